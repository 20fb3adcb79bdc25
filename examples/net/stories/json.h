// json.h: reads JSON in place, without memory: the body of a request in the kernel, and the files of a model on the CPU.
//
//     json::Reader in{bytes, length};
//     json::View name;
//     for (bool more = in.begin_object(); more && in.next_member(name);)
//         if (json::is(name, "max_tokens"))
//             count = in.number();
//         else
//             in.skip();
//     if (in.bad) ... // it is not JSON, or not of these types
//
// After the first error nothing more is read, and `bad` stays. Known flaws: a name with an escape is never equal to a known one, and
// numbers have the precision of a double.
#ifndef STORIES_JSON_H
#define STORIES_JSON_H

#include <spinio/kernel.h>
#include <spinio/standard.h>

namespace json {

struct View {
    const char *bytes;
    size_t length;
};

__host__ __device__ inline bool is(View view, const char *text)
{
    size_t i = 0;
    while (i < view.length && text[i] && view.bytes[i] == text[i])
        i++;
    return i == view.length && !text[i];
}

struct Reader {
    const char *bytes;
    size_t length, at = 0;
    bool bad = false, first = true;

    __host__ __device__ Reader(const char *bytes, size_t length) : bytes(bytes), length(length) {}

    // What comes next: '{', '[', '"', a digit, ...; 0 at the end.
    __host__ __device__ char peek()
    {
        while (at < length && (bytes[at] == ' ' || bytes[at] == '\t' || bytes[at] == '\r' || bytes[at] == '\n'))
            at++;
        return at < length && !bad ? bytes[at] : 0;
    }

    __host__ __device__ bool take(char wanted)
    {
        if (peek() == wanted)
            at++;
        else
            bad = true;
        return !bad;
    }

    __host__ __device__ bool begin_object()
    {
        first = true;
        return take('{');
    }

    // Stops after its name; false: the object has ended.
    __host__ __device__ bool next_member(View &name)
    {
        if (!next('}'))
            return false;
        name = string();
        return take(':');
    }

    __host__ __device__ bool begin_array()
    {
        first = true;
        return take('[');
    }

    __host__ __device__ bool next_element() { return next(']'); }

    // A string as it stands, with its escapes.
    __host__ __device__ View string()
    {
        if (!take('"'))
            return {bytes, 0};
        const size_t begin = at;
        while (at < length && bytes[at] != '"' && (unsigned char)bytes[at] >= ' ')
            at += bytes[at] == '\\' ? 2 : 1;
        if (at >= length || bytes[at] != '"') {
            bad = true;
            return {bytes, 0};
        }
        return {bytes + begin, at++ - begin};
    }

    __host__ __device__ double number()
    {
        const char sign = peek();
        at += sign == '-';
        if (peek() < '0' || peek() > '9')
            bad = true;
        double value = digits();
        if (at < length && bytes[at] == '.') {
            const size_t point = ++at;
            double fraction = digits();
            for (size_t i = point; i < at; i++)
                fraction /= 10;
            value += fraction;
        }
        if (at < length && (bytes[at] == 'e' || bytes[at] == 'E')) {
            const bool smaller = ++at < length && bytes[at] == '-';
            at += at < length && (bytes[at] == '-' || bytes[at] == '+');
            const double power = digits();
            // No double has more digits.
            for (unsigned i = 0; i < 400 && i < power; i++)
                value = smaller ? value / 10 : value * 10;
        }
        return sign == '-' ? -value : value;
    }

    __host__ __device__ bool boolean()
    {
        const bool yes = peek() == 't';
        word(yes ? "true" : "false");
        return yes;
    }

    // Any value.
    __host__ __device__ void skip()
    {
        unsigned depth = 0;
        do {
            switch (peek()) {
            case '{':
            case '[':
                depth++, at++;
                break;
            case '}':
            case ']':
                bad = bad || depth == 0;
                depth -= depth > 0, at++;
                break;
            case ',':
            case ':':
                bad = bad || depth == 0;
                at++;
                break;
            case '"': string(); break;
            case 't': word("true"); break;
            case 'f': word("false"); break;
            case 'n': word("null"); break;
            default: number();
            }
        } while (depth && !bad);
    }

private:
    __host__ __device__ bool next(char end)
    {
        if (peek() == end) {
            at++;
            // The object or array was a value of the one around it.
            first = false;
            return false;
        }
        if (!first)
            take(',');
        first = false;
        bad = bad || peek() == 0;
        return !bad;
    }

    __host__ __device__ double digits()
    {
        double value = 0;
        for (; at < length && bytes[at] >= '0' && bytes[at] <= '9'; at++)
            value = value * 10 + (bytes[at] - '0');
        return value;
    }

    __host__ __device__ void word(const char *text)
    {
        for (; *text && !bad; text++, at++)
            bad = at >= length || bytes[at] != *text;
    }
};

// The bytes of a string of next_member() or string(), one after the other: \n, \" and \u00e9 become what they mean, in UTF-8.
struct Characters {
    View view;
    size_t at = 0;
    unsigned char pending[3];
    unsigned waiting = 0;
    bool bad = false;

    __host__ __device__ explicit Characters(View view) : view(view) {}

    // The next byte, or -1 at the end.
    __host__ __device__ int next()
    {
        if (waiting)
            return pending[--waiting];
        if (at >= view.length || bad)
            return -1;
        if (view.bytes[at] != '\\')
            return (unsigned char)view.bytes[at++];
        const char kind = view.bytes[at + 1];
        at += 2;
        switch (kind) {
        case 'n': return '\n';
        case 't': return '\t';
        case 'r': return '\r';
        case 'b': return '\b';
        case 'f': return '\f';
        case '"':
        case '\\':
        case '/': return kind;
        case 'u': return utf8(code_point());
        default: bad = true; return -1;
        }
    }

private:
    __host__ __device__ unsigned unit()
    {
        unsigned value = 0;
        for (unsigned i = 0; i < 4; i++, at++) {
            const char c = at < view.length ? view.bytes[at] : 'x';
            const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
            bad = bad || digit < 0;
            value = value << 4 | unsigned(digit & 15);
        }
        return value;
    }

    __host__ __device__ unsigned code_point()
    {
        const unsigned high = unit();
        if (high < 0xd800 || high > 0xdfff)
            return high;
        // Two units of UTF-16.
        if (at + 1 >= view.length || view.bytes[at] != '\\' || view.bytes[at + 1] != 'u')
            bad = true;
        at += 2;
        const unsigned low = bad ? 0 : unit();
        bad = bad || high > 0xdbff || low < 0xdc00 || low > 0xdfff;
        return 0x10000 + ((high & 0x3ff) << 10) + (low & 0x3ff);
    }

    __host__ __device__ int utf8(unsigned code)
    {
        if (bad)
            return -1;
        if (code < 0x80)
            return int(code);
        const unsigned more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
        for (unsigned i = 0; i < more; i++)
            pending[i] = (unsigned char)(0x80 | (code >> 6 * i & 0x3f));
        waiting = more;
        return int((0xf80u >> more & 0xf0) | code >> 6 * more) & 0xff;
    }
};

} // namespace json

#endif
