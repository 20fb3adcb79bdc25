// request.h: reads the head of an HTTP/1.1 request, by one thread, without trust in a byte of it.
//
//   GET /mandelbrot.bmp?3 HTTP/1.1 CRLF  name: value CRLF ... CRLF
//
// Refused with 400: anything that is not such a head, a head without Host in HTTP/1.1, and a body, for which this server has
// no use. Refused with 405: methods other than GET and HEAD.
#ifndef REQUEST_H
#define REQUEST_H

#include <spinio/kernel.h>

struct Request {
    int status; // 200, 400, 405 or 505
    bool head, close;
    const char *path; // without the query
    unsigned path_length;
};

// Bytes up to and with the empty line; 0: not complete.
__device__ inline unsigned head_length(const char *bytes, unsigned count)
{
    for (unsigned i = 3; i < count; i++)
        if (bytes[i] == '\n' && bytes[i - 1] == '\r' && bytes[i - 2] == '\n' && bytes[i - 3] == '\r')
            return i + 1;
    return 0;
}

__device__ inline char lower(char c)
{
    return c >= 'A' && c <= 'Z' ? char(c + 'a' - 'A') : c;
}

// Whether the bytes are this text, in letters of any case.
__device__ inline bool is(const char *bytes, unsigned count, const char *text)
{
    unsigned i = 0;
    for (; i < count && text[i]; i++)
        if (lower(bytes[i]) != text[i])
            return false;
    return i == count && !text[i];
}

__device__ inline bool is_token(char c)
{
    return (lower(c) >= 'a' && lower(c) <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
}

// One header line without its CRLF; false if it is malformed.
__device__ inline bool read_header(const char *line, unsigned count, Request &request, bool &host)
{
    unsigned name = 0;
    while (name < count && is_token(line[name]))
        name++;
    if (name == 0 || name == count || line[name] != ':')
        return false;
    const char *value = line + name + 1;
    unsigned length = count - name - 1;
    while (length && (value[0] == ' ' || value[0] == '\t'))
        value++, length--;
    while (length && (value[length - 1] == ' ' || value[length - 1] == '\t'))
        length--;
    for (unsigned i = 0; i < length; i++)
        if ((unsigned char)value[i] < ' ' && value[i] != '\t')
            return false;
    if (is(line, name, "host")) {
        if (host)
            return false;
        host = true;
    }
    if (is(line, name, "transfer-encoding") || (is(line, name, "content-length") && !is(value, length, "0")))
        return false;
    if (is(line, name, "connection"))
        request.close = is(value, length, "close");
    return true;
}

// Parses a complete head.
__device__ inline Request parse(const char *bytes, unsigned count)
{
    Request request = {400, false, true, bytes, 0};
    unsigned at = 0;
    while (at < count && bytes[at] >= 'A' && bytes[at] <= 'Z')
        at++;
    unsigned method = at;
    if (method == 0 || bytes[at++] != ' ' || bytes[at] != '/')
        return request;
    request.path = bytes + at;
    bool query = false;
    while (at < count && bytes[at] > ' ' && bytes[at] < 127) {
        query = query || bytes[at] == '?';
        request.path_length += !query;
        at++;
    }
    if (at + 11 > count || bytes[at] != ' ' || !is(bytes + at + 1, 5, "http/") || bytes[at + 7] != '.' || bytes[at + 9] != '\r' || bytes[at + 10] != '\n')
        return request;
    char major = bytes[at + 6], minor = bytes[at + 8];
    if (major != '1' || minor < '0' || minor > '9') {
        if (major >= '0' && major <= '9' && minor >= '0' && minor <= '9')
            request.status = 505;
        return request;
    }
    bool host = false, keeps = minor != '0';
    request.close = !keeps;
    for (at += 11; at + 2 < count;) {
        unsigned end = at;
        while (end < count && bytes[end] != '\r' && bytes[end] != '\n')
            end++;
        if (end + 1 >= count || bytes[end] != '\r' || bytes[end + 1] != '\n' || !read_header(bytes + at, end - at, request, host)) {
            request.close = true;
            return request;
        }
        at = end + 2;
    }
    if (keeps && !host) {
        request.close = true;
        return request;
    }
    request.head = is(bytes, method, "head");
    request.status = request.head || is(bytes, method, "get") ? 200 : 405;
    return request;
}

#endif
