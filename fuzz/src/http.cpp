// The HTTP parser of kernels, as functions of this process. What it reads ends where a page does that cannot be accessed.
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include <spinio/http.h>

namespace http = spinio::http;
namespace text = spinio::text;

extern "C" void spinio_fuzz_jump(uintptr_t place);

#if defined(__clang__)
#define NOT_COUNTED __attribute__((no_sanitize("coverage")))
#else
#define NOT_COUNTED __attribute__((no_sanitize_coverage))
#endif

// The compiler puts a call of __sanitizer_cov_trace_pc at each jump, which the linker makes one of this.
extern "C" NOT_COUNTED void __wrap___sanitizer_cov_trace_pc()
{
    spinio_fuzz_jump(uintptr_t(__builtin_return_address(0)));
}

static void check(bool condition)
{
    if (!condition)
        std::abort();
}

// A copy just before a page without access, and after another one.
static const char *guarded(const char *bytes, size_t count)
{
    constexpr size_t page = 4096, room = 2 * page;
    static char *const pages = [] {
        void *const memory = mmap(nullptr, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        check(memory != MAP_FAILED && !mprotect(static_cast<char *>(memory) + room, page, PROT_NONE));
        return static_cast<char *>(memory);
    }();
    check(count <= room);
    char *const copy = pages + room - count;
    if (count)
        std::memcpy(copy, bytes, count);
    return copy;
}

static std::string string(text::View view) { return std::string(view.bytes, view.length); }

static bool has_control(const std::string &text)
{
    for (unsigned char c : text)
        if (c < ' ' || c == 127)
            return true;
    return false;
}

// What must be true of a request, whatever its bytes are.
static void check_request(const http::Request &request, const char *head, unsigned count, uint64_t longest_body)
{
    check(request.status == 200 || request.status == 400 || request.status == 413 || request.status == 431 || request.status == 501 || request.status == 505);
    for (const text::View &part : {request.path, request.query, request.fields})
        check(!part.length || (part.bytes >= head && part.bytes + part.length <= head + count));
    // What follows a request that was refused is not known.
    check(request.status == 200 || request.close);
    if (request.status != 200)
        return;
    check(request.path.length && request.path.bytes[0] == '/' && request.body_length <= longest_body);
    check(!has_control(string(request.path)) && !has_control(string(request.query)));
    const text::View host = http::find_field(request, "host"), encoding = http::find_field(request, "transfer-encoding");
    check((host.bytes || !request.minor) && !encoding.bytes);
    const text::View length = http::find_field(request, "content-length");
    uint64_t number = 0;
    check(length.bytes ? text::read_number(length, number) && number == request.body_length : request.body_length == 0);
    if (host.bytes)
        check(host.bytes >= head && host.bytes + host.length <= head + count && string(host).find_first_of("\r\n") == std::string::npos);
    // Any room, also too little.
    char name[64];
    for (size_t room : {sizeof name, size_t(request.path.length), size_t(4)}) {
        if (room > sizeof name)
            continue;
        std::memset(name, '?', sizeof name);
        if (!http::file_name(request.path, name, room))
            continue;
        const std::string file = name;
        check(file.size() < room && !file.empty() && file[0] != '/' && file.back() != '/' && !has_control(file));
        check(("/" + file + "/").find("/../") == std::string::npos && ("/" + file + "/").find("/./") == std::string::npos);
        check(file.find("//") == std::string::npos && std::strlen(http::media_type(name)) > 0);
    }
}

// What a reply is made of may be a client's: it adds no line.
static void check_reply(const char *bytes, size_t count)
{
    const std::string value(bytes, std::strlen(std::string(bytes, count).c_str()));
    for (size_t room : {size_t(4096), count, size_t(40)}) {
        std::string all(room, 0);
        text::Buffer out(all.data(), room);
        http::begin_head(out, 200);
        http::add_field(out, "A", value.c_str());
        http::end_head(out, true);
        if (out.cut)
            continue;
        size_t lines = 0;
        for (size_t at = 0; (at = all.find('\n', at)) != std::string::npos; at++)
            lines++;
        check(lines == 4 && all.substr(0, out.length).find("\r\n\r\n") == out.length - 4);
    }
    std::string all(4 * count + 64, 0);
    text::Buffer out(all.data(), all.size());
    http::Chunk chunk(out);
    http::add_event(out, bytes, count);
    chunk.end();
    http::add_last_chunk(out);
    // One event, at its end.
    const std::string written = all.substr(0, out.length);
    if (!out.cut)
        check(written.find("\n\n") == written.size() - 9 && written.compare(written.size() - 7, 7, "\r\n0\r\n\r\n") == 0);
}

extern "C" void spinio_fuzz_http(const unsigned char *input, size_t count)
{
    const char *const bytes = reinterpret_cast<const char *>(input);
    const char *const whole = guarded(bytes, count);
    constexpr uint64_t longest_body = 1000;
    const unsigned head = http::head_length(whole, unsigned(count));
    check(head <= count && (!head || std::memcmp(whole + head - 4, "\r\n\r\n", 4) == 0));
    const http::Request request = http::parse(whole, head, longest_body);
    check_request(request, whole, head, longest_body);
    const std::string path = string(request.path);
    // A caller may be wrong about the length.
    check_request(http::parse(whole, unsigned(count), longest_body), whole, unsigned(count), longest_body);
    // The same, however the head has come: fewer bytes are no head, and what is behind it changes nothing.
    if (head) {
        check(!http::head_length(whole, head - 1));
        const char *const alone = guarded(bytes, head);
        const http::Request again = http::parse(alone, head, longest_body);
        check(again.status == request.status && again.close == request.close && again.body_length == request.body_length && string(again.path) == path);
    }
    check_reply(guarded(bytes, count), count);
}
