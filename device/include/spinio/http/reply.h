// reply.h: the writers of http.h: heads of replies, bodies in chunks, server-sent events.
//
//     text::Buffer out(bytes, sizeof bytes);
//     http::begin_head(out, 200);
//     http::add_field(out, "Content-Type", "text/event-stream");
//     http::add_field(out, "Transfer-Encoding", "chunked");
//     http::end_head(out, request.close);
//     net::send(...)                                          // then for each event, in an empty buffer:
//     http::Chunk chunk(out);
//     http::add_event(out, word, length);
//     chunk.end();
//     net::send(...)                                          // and at the end:
//     http::add_last_chunk(out);
//
// A reply of which out.cut is true had no room, and must not be sent.
#ifndef SPINIO_HTTP_REPLY_H
#define SPINIO_HTTP_REPLY_H

#include <spinio/text.h>

namespace spinio::http {

__device__ inline const char *reason(int status)
{
    switch (status) {
    case 200: return "OK";
    case 201: return "Created";
    case 202: return "Accepted";
    case 204: return "No Content";
    case 304: return "Not Modified";
    case 400: return "Bad Request";
    case 403: return "Forbidden";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 408: return "Request Timeout";
    case 413: return "Content Too Large";
    case 415: return "Unsupported Media Type";
    case 429: return "Too Many Requests";
    case 431: return "Request Header Fields Too Large";
    case 500: return "Internal Server Error";
    case 501: return "Not Implemented";
    case 503: return "Service Unavailable";
    case 505: return "HTTP Version Not Supported";
    default: return "";
    }
}

namespace detail {

// Without line breaks, which would begin a field or an event of the one that has chosen the text.
__device__ inline void add_line(text::Buffer &out, const char *text)
{
    for (; *text; text++)
        if (*text != '\r' && *text != '\n')
            out.add(text, 1);
}

} // namespace detail

__device__ inline void begin_head(text::Buffer &out, int status)
{
    out.add("HTTP/1.1 ").add_number(uint64_t(status)).add(" ").add(reason(status)).add("\r\n");
}

// Line breaks in the value are left out.
__device__ inline void add_field(text::Buffer &out, const char *name, const char *value)
{
    out.add(name).add(": ");
    detail::add_line(out, value);
    out.add("\r\n");
}

__device__ inline void add_number_field(text::Buffer &out, const char *name, uint64_t value)
{
    out.add(name).add(": ").add_number(value).add("\r\n");
}

// `close`: the server closes the connection after this reply.
__device__ inline void end_head(text::Buffer &out, bool close)
{
    add_field(out, "Connection", close ? "close" : "keep-alive");
    out.add("\r\n");
}

// A chunk of a body with `Transfer-Encoding: chunked`: what is added to the buffer between its begin and its end(). Without bytes it is
// left out, since an empty chunk would end the body. Not for clients with HTTP/1.0.
class Chunk {
    static constexpr unsigned digits = 8;

public:
    static constexpr unsigned head_bytes = digits + 2; // before its content

    __device__ explicit Chunk(text::Buffer &out) : out(out), room(out.room), begin(out.length)
    {
        if (out.room - out.length < head_bytes + 2) {
            out.room = out.length;
            out.cut = true;
            return;
        }
        out.add("00000000\r\n");
        // For the line break after it.
        out.room -= 2;
    }

    __device__ void end()
    {
        out.room = room;
        const size_t bytes = out.length - begin;
        if (bytes <= head_bytes) {
            out.length = begin;
            return;
        }
        text::Buffer(out.bytes + begin, digits).add_hex(bytes - head_bytes, digits);
        out.add("\r\n");
    }

private:
    text::Buffer &out;
    size_t room, begin;
};

// The end of a body in chunks.
__device__ inline void add_last_chunk(text::Buffer &out)
{
    out.add("0\r\n\r\n");
}

// An event of a body of type text/event-stream. Each line of the data is one of the event; `name`: its type, NULL: "message".
__device__ inline void add_event(text::Buffer &out, const char *data, size_t count, const char *name = nullptr)
{
    if (name) {
        out.add("event: ");
        detail::add_line(out, name);
        out.add("\n");
    }
    for (size_t at = 0; at <= count;) {
        size_t end = at;
        while (end < count && data[end] != '\r' && data[end] != '\n')
            end++;
        out.add("data: ").add(data + at, end - at).add("\n");
        const bool two = end + 1 < count && data[end] == '\r' && data[end + 1] == '\n';
        at = end + (two ? 2 : 1);
    }
    out.add("\n");
}

} // namespace spinio::http

#endif
