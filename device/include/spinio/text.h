// text.h: text in buffers of fixed size, read and written by one thread of a kernel.
//
//     __shared__ char line[80];
//     if (threadIdx.x == 0) {
//         text::Buffer out(line, sizeof line);
//         out.add("block ").add_number(blockIdx.x).add("\n");
//         length = out.length;
//     }
//
// Text has a length and no NUL at its end. What has no room in a buffer is left out, and Buffer::cut says so.
#ifndef SPINIO_TEXT_H
#define SPINIO_TEXT_H

#include <spinio/kernel.h>
#include <spinio/standard.h>

namespace spinio::text {

// Bytes of a text that is elsewhere.
struct View {
    const char *bytes;
    size_t length;
};

// A text that grows in a buffer.
struct Buffer {
    char *bytes;
    size_t room, length = 0;
    bool cut = false; // something had no room

    __device__ Buffer(char *bytes, size_t room) : bytes(bytes), room(room) {}

    __device__ Buffer &add(const char *text)
    {
        while (*text && length < room)
            bytes[length++] = *text++;
        cut = cut || *text;
        return *this;
    }

    __device__ Buffer &add(const char *text, size_t count)
    {
        size_t i = 0;
        for (; i < count && length < room; i++)
            bytes[length++] = text[i];
        cut = cut || i < count;
        return *this;
    }

    // Decimal, with zeros before it up to so many digits.
    __device__ Buffer &add_number(uint64_t value, unsigned digits = 1) { return add_digits(value, 10, digits); }

    __device__ Buffer &add_signed(int64_t value)
    {
        if (value < 0)
            add("-");
        return add_number(value < 0 ? 0 - uint64_t(value) : uint64_t(value));
    }

    __device__ Buffer &add_hex(uint64_t value, unsigned digits = 1) { return add_digits(value, 16, digits); }

private:
    static constexpr unsigned most_digits = 20; // of 2^64 - 1

    __device__ Buffer &add_digits(uint64_t value, unsigned base, unsigned digits)
    {
        char reversed[most_digits];
        unsigned count = 0;
        for (; value || (count < digits && count < most_digits); value /= base)
            reversed[count++] = char(value % base < 10 ? '0' + value % base : 'a' + (value % base - 10));
        while (count)
            add(&reversed[--count], 1);
        return *this;
    }
};

__device__ inline char lower(char c)
{
    return c >= 'A' && c <= 'Z' ? char(c + 'a' - 'A') : c;
}

__device__ inline bool equals(View view, const char *text)
{
    size_t i = 0;
    while (i < view.length && text[i] && view.bytes[i] == text[i])
        i++;
    return i == view.length && !text[i];
}

// The same for letters of any case; `text` is in lower case.
__device__ inline bool equals_any_case(View view, const char *text)
{
    size_t i = 0;
    while (i < view.length && text[i] && lower(view.bytes[i]) == text[i])
        i++;
    return i == view.length && !text[i];
}

// Without spaces and tabs at both ends.
__device__ inline View trimmed(View view)
{
    const auto is_blank = [](char c) { return c == ' ' || c == '\t'; };
    while (view.length && is_blank(view.bytes[0]))
        view.bytes++, view.length--;
    while (view.length && is_blank(view.bytes[view.length - 1]))
        view.length--;
    return view;
}

// The value of a hexadecimal digit, or -1.
__device__ inline int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    return lower(c) >= 'a' && lower(c) <= 'f' ? lower(c) - 'a' + 10 : -1;
}

// Whether the view is a decimal number below 2^64, of digits alone.
__device__ inline bool read_number(View view, uint64_t &value)
{
    value = 0;
    for (size_t i = 0; i < view.length; i++) {
        const unsigned digit = unsigned(view.bytes[i] - '0');
        if (digit > 9 || value > (~uint64_t(0) - digit) / 10)
            return false;
        value = value * 10 + digit;
    }
    return view.length > 0;
}

} // namespace spinio::text

#endif
