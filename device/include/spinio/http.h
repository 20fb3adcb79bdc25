// http.h: reads the head of an HTTP/1.1 request, without trust in a byte of it, and writes replies (http/reply.h). All by one
// thread of a kernel; examples/net/http is a whole server.
//
//   GET /models?all=1 HTTP/1.1 CRLF  Host: gpu CRLF ... CRLF   body
//   └──────────────── head, head_length() bytes ───────────┘   Request::body_length bytes
//
//     unsigned head = http::head_length(bytes, count);       // 0: not complete, receive more
//     if (head || count == sizeof bytes)
//         request = http::parse(bytes, head, 65536);          // the longest body that this server takes
//     if (request.status == 200) ...
//
// A request that is refused has another status than 200, with which the server replies, and then closes the connection, since where
// the next request would begin is not known: 400, what is not such a head, or has no Host in HTTP/1.1; 413, a longer body; 431, a head
// that does not fit into the buffer; 501, a body without Content-Length; 505, another version.
//
// Known flaws: a target that is not a path (OPTIONS *, a proxy's) is 400, and `Expect: 100-continue` gets no answer.
#ifndef SPINIO_HTTP_H
#define SPINIO_HTTP_H

#include <spinio/http/reply.h>
#include <spinio/text.h>

namespace spinio::http {

enum Method { GET, HEAD, POST, PUT, DELETE, OTHER };

// Its views are of the bytes of the head.
struct Request {
    int status;
    Method method;
    bool close;     // the connection, after the reply
    unsigned minor; // of HTTP/1.x; 0: the client knows no chunks
    text::View path, query, fields;
    uint64_t body_length;
};

// Bytes up to and with the empty line; 0: not complete.
__device__ inline unsigned head_length(const char *bytes, unsigned count)
{
    for (unsigned i = 3; i < count; i++)
        if (bytes[i] == '\n' && bytes[i - 1] == '\r' && bytes[i - 2] == '\n' && bytes[i - 3] == '\r')
            return i + 1;
    return 0;
}

namespace detail {

// What a name of a field is made of.
__device__ inline bool is_token(char c)
{
    if ((text::lower(c) >= 'a' && text::lower(c) <= 'z') || (c >= '0' && c <= '9'))
        return true;
    for (const char *other = "!#$%&'*+-.^_`|~"; *other; other++)
        if (c == *other)
            return true;
    return false;
}

__device__ inline bool is_control(char c)
{
    return (unsigned char)c < ' ' || c == 127;
}

struct Field {
    text::View name, value;
};

// Takes the next line from the fields; false if it is malformed.
__device__ inline bool next_field(text::View &fields, Field &field)
{
    size_t end = 0, name = 0;
    while (end < fields.length && fields.bytes[end] != '\r' && fields.bytes[end] != '\n')
        end++;
    if (end + 1 >= fields.length || fields.bytes[end] != '\r' || fields.bytes[end + 1] != '\n')
        return false;
    while (name < end && is_token(fields.bytes[name]))
        name++;
    if (name == 0 || name == end || fields.bytes[name] != ':')
        return false;
    field.name = {fields.bytes, name};
    field.value = text::trimmed({fields.bytes + name + 1, end - name - 1});
    for (size_t i = 0; i < field.value.length; i++)
        if (is_control(field.value.bytes[i]) && field.value.bytes[i] != '\t')
            return false;
    fields = {fields.bytes + end + 2, fields.length - end - 2};
    return true;
}

// Whether a list with commas has this item, in lower case.
__device__ inline bool has_item(text::View list, const char *item)
{
    for (size_t at = 0; at <= list.length;) {
        size_t end = at;
        while (end < list.length && list.bytes[end] != ',')
            end++;
        if (text::equals_any_case(text::trimmed({list.bytes + at, end - at}), item))
            return true;
        at = end + 1;
    }
    return false;
}

__device__ inline Method method_of(text::View name)
{
    const char *const names[] = {"GET", "HEAD", "POST", "PUT", "DELETE"};
    int method = 0;
    while (method < OTHER && !text::equals(name, names[method]))
        method++;
    return Method(method);
}

// Reads the request line; returns its length, or 0 with the status.
__device__ inline unsigned read_line(const char *bytes, unsigned count, Request &request)
{
    unsigned at = 0;
    while (at < count && bytes[at] >= 'A' && bytes[at] <= 'Z')
        at++;
    request.method = method_of({bytes, at});
    if (at == 0 || at + 1 >= count || bytes[at] != ' ' || bytes[at + 1] != '/')
        return 0;
    const unsigned target = ++at;
    unsigned query = 0; // where it begins
    for (; at < count && bytes[at] > ' ' && bytes[at] < 127; at++)
        if (bytes[at] == '?' && !query)
            query = at + 1;
    request.path = {bytes + target, (query ? query - 1 : at) - target};
    request.query = {bytes + query, query ? at - query : 0};
    const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
    if (at + 11 > count || bytes[at] != ' ' || !text::equals({bytes + at + 1, 5}, "HTTP/") || !is_digit(bytes[at + 6]) || bytes[at + 7] != '.' || !is_digit(bytes[at + 8]) || bytes[at + 9] != '\r' || bytes[at + 10] != '\n')
        return 0;
    request.minor = unsigned(bytes[at + 8] - '0');
    if (bytes[at + 6] != '1') {
        request.status = 505;
        return 0;
    }
    return at + 11;
}

} // namespace detail

// Parses a complete head; of length 0: it does not fit into the buffer.
__device__ inline Request parse(const char *bytes, unsigned head, uint64_t longest_body = 0)
{
    Request request = {head ? 400 : 431, OTHER, true, 0, {bytes, 0}, {bytes, 0}, {bytes, 0}, 0};
    const unsigned line = detail::read_line(bytes, head, request);
    // Two bytes for the empty line.
    if (line == 0 || line + 2 > head)
        return request;
    text::View rest = request.fields = {bytes + line, head - line - 2};
    bool close = false, keeps = request.minor != 0, host = false, length = false, encoded = false;
    while (rest.length) {
        detail::Field field;
        if (!detail::next_field(rest, field))
            return request;
        if (text::equals_any_case(field.name, "host")) {
            if (host)
                return request;
            host = true;
        } else if (text::equals_any_case(field.name, "content-length")) {
            // Two lengths, of which a proxy may have used the other one.
            if (length || !text::read_number(field.value, request.body_length))
                return request;
            length = true;
        } else if (text::equals_any_case(field.name, "transfer-encoding")) {
            encoded = true;
        } else if (text::equals_any_case(field.name, "connection")) {
            close = close || detail::has_item(field.value, "close");
            keeps = keeps || detail::has_item(field.value, "keep-alive");
        }
    }
    if ((request.minor && !host) || (length && encoded))
        return request;
    request.status = encoded ? 501 : request.body_length > longest_body ? 413 : 200;
    request.close = request.status != 200 || close || !keeps;
    return request;
}

// The value of a field of a request with status 200, by its name in lower case; bytes is NULL if there is none. Of several it is the
// first one.
__device__ inline text::View find_field(const Request &request, const char *name)
{
    text::View rest = request.fields;
    detail::Field field;
    while (rest.length && detail::next_field(rest, field))
        if (text::equals_any_case(field.name, name))
            return field.value;
    return {nullptr, 0};
}

// Stores the name of the file in a path with its NUL, relative to the directory of the server; false if there is none, or no room.
//
//   /pictures/a%20b.png ── decoded ──> pictures/a b.png
//
// No name: a path with an empty part, "." or "..", a control character, a malformed escape or an escaped slash.
__device__ inline bool file_name(text::View path, char *name, size_t room)
{
    size_t length = 0, part = 0; // where the last part begins
    const auto is_good = [&] {
        const size_t count = length - part;
        return count > 0 && !(name[part] == '.' && (count == 1 || (count == 2 && name[part + 1] == '.')));
    };
    for (size_t i = 1; i < path.length; i++) {
        char c = path.bytes[i];
        if (c == '%') {
            const int high = i + 1 < path.length ? text::hex_digit(path.bytes[i + 1]) : -1;
            const int low = i + 2 < path.length ? text::hex_digit(path.bytes[i + 2]) : -1;
            if (high < 0 || low < 0)
                return false;
            c = char(high * 16 + low);
            i += 2;
            if (c == '/')
                return false;
        } else if (c == '/') {
            if (!is_good())
                return false;
            part = length + 1;
        }
        if (detail::is_control(c) || length + 1 >= room)
            return false;
        name[length++] = c;
    }
    if (!is_good())
        return false;
    name[length] = 0;
    return true;
}

// The media type of a name, by its end.
__device__ inline const char *media_type(const char *name)
{
    size_t length = 0, dot = 0;
    for (; name[length]; length++)
        dot = name[length] == '.' ? length : dot;
    const char *const types[][2] = {{".html", "text/html"}, {".txt", "text/plain"}, {".css", "text/css"}, {".js", "text/javascript"},
                                    {".json", "application/json"}, {".png", "image/png"}, {".jpg", "image/jpeg"}, {".svg", "image/svg+xml"}};
    for (auto &type : types)
        if (text::equals_any_case({name + dot, length - dot}, type[0]))
            return type[1];
    return "application/octet-stream";
}

} // namespace spinio::http

#endif
