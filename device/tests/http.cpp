// text.h and http.h: requests, names of files, numbers and replies, and 200,000 heads of random bytes. Functions of kernels are functions
// of this program here; what they read ends where a page does that cannot be accessed. Prints each failure and exits with 1.
#include <sys/mman.h>

#include <cstring>
#include <string>

#include <spinio/http.h>

#include "check.h"

namespace http = spinio::http;
namespace text = spinio::text;

static std::string string(text::View view) { return {view.bytes, view.length}; }
static text::View view(const std::string &string) { return {string.data(), string.size()}; }

// A copy just before a page without access.
static const char *guarded(const std::string &bytes)
{
    constexpr size_t page = 4096;
    static char *const pages = [] {
        void *const memory = mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(memory != MAP_FAILED && !mprotect(static_cast<char *>(memory) + page, page, PROT_NONE));
        return static_cast<char *>(memory);
    }();
    char *const copy = pages + page - bytes.size();
    std::memcpy(copy, bytes.data(), bytes.size());
    return copy;
}

// Of a text that must be a whole head.
static http::Request parse(const std::string &head, uint64_t longest_body = 0)
{
    const char *const bytes = guarded(head);
    CHECK(http::head_length(bytes, unsigned(head.size())) == head.size());
    return http::parse(bytes, unsigned(head.size()), longest_body);
}

static void good_requests_are_read()
{
    const http::Request request = parse("POST /a/b?c=1?d HTTP/1.1\r\nhOsT:\t gpu \r\nX-Odd_name!: \x80\r\nX:\r\nContent-Length: 12\r\n\r\n", 12);
    CHECK(request.status == 200 && request.method == http::POST && !request.close && request.minor == 1 && request.body_length == 12);
    CHECK(string(request.path) == "/a/b" && string(request.query) == "c=1?d");
    CHECK(string(http::find_field(request, "host")) == "gpu" && string(http::find_field(request, "x-odd_name!")) == "\x80");
    CHECK(http::find_field(request, "x").bytes && http::find_field(request, "x").length == 0 && !http::find_field(request, "y").bytes);
    CHECK(parse("GET / HTTP/1.1\r\nHost: x\r\n\r\n").method == http::GET && parse("BREW / HTTP/1.1\r\nHost: x\r\n\r\n").method == http::OTHER);
    CHECK(parse("DELETE /? HTTP/1.0\r\n\r\n").status == 200 && parse("DELETE /? HTTP/1.0\r\n\r\n").query.length == 0);
    CHECK(http::head_length("GET / HTTP/1.1\r\n\r", 17) == 0 && http::head_length("\r\n\r\nrest", 8) == 4);
}

static void connections_close_when_they_should()
{
    const auto closes = [](const std::string &version, const std::string &field) {
        const http::Request request = parse("GET / " + version + "\r\nHost: x\r\n" + field + "\r\n");
        CHECK(request.status == 200);
        return request.close;
    };
    CHECK(!closes("HTTP/1.1", "") && closes("HTTP/1.0", ""));
    CHECK(closes("HTTP/1.1", "Connection: Close\r\n") && closes("HTTP/1.1", "Connection: TE ,close\r\nConnection: keep-alive\r\n"));
    CHECK(!closes("HTTP/1.1", "Connection: enclose\r\n") && !closes("HTTP/1.0", "Connection: TE,Keep-Alive\r\n") && closes("HTTP/1.0", "Connection: TE\r\n"));
}

static void bad_requests_are_refused()
{
    const std::string line = "GET / HTTP/1.1\r\n", good = line + "Host: x\r\n";
    const struct {
        std::string head;
        int status;
    } bad[] = {
        {"\r\n\r\n", 400},
        {"GET\r\n\r\n", 400},
        {"get / HTTP/1.1\r\nHost: x\r\n\r\n", 400},
        {"GET  / HTTP/1.1\r\nHost: x\r\n\r\n", 400},
        {"GET / http/1.1\r\nHost: x\r\n\r\n", 400},
        {"GET / HTTP/1.1 \r\nHost: x\r\n\r\n", 400},
        {"GET x HTTP/1.1\r\nHost: x\r\n\r\n", 400},
        {"GET /\x80 HTTP/1.1\r\nHost: x\r\n\r\n", 400},
        {"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505},
        {"GET / HTTP/1.1\nHost: x\r\n\r\n", 400},
        {line + "\r\n", 400},
        {good + "Host: y\r\n\r\n", 400},
        {good + ": y\r\n\r\n", 400},
        {good + "a : y\r\n\r\n", 400},
        {good + " folded\r\n\r\n", 400},
        {good + "a\r\n\r\n", 400},
        {good + "a: \x01\r\n\r\n", 400},
        {good + "a: b\rc\r\n\r\n", 400},
        {good + "a: b\nc: d\r\n\r\n", 400},
        {good + "Content-Length: -1\r\n\r\n", 400},
        {good + "Content-Length: \r\n\r\n", 400},
        {good + "Content-Length: 1, 1\r\n\r\n", 400},
        {good + "Content-Length: 18446744073709551616\r\n\r\n", 400},
        {good + "Content-Length: 1\r\nContent-Length: 1\r\n\r\n", 400},
        {good + "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400},
        {good + "Content-Length: 101\r\n\r\n", 413},
        {good + "Transfer-Encoding: chunked\r\n\r\n", 501},
    };
    for (auto &each : bad) {
        const http::Request request = parse(each.head, 100);
        if (request.status != each.status)
            std::printf("%d for %s\n", request.status, each.head.c_str());
        CHECK(request.status == each.status && request.close);
    }
    CHECK(http::parse(guarded(""), 0).status == 431 && http::parse(guarded(""), 0).close);
}

// No byte after the end is read, which would end the program, and views are inside the head.
static void random_heads_are_survived()
{
    const std::string whole = "POST /a%20b/c.png?d HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nConnection: close, te\r\n\r\n";
    const std::string likely = "\r\n\r\n:: %/?.,HTP10 \t\xff\x7f";
    uint64_t state = 0x9e3779b97f4a7c15;
    const auto random = [&](size_t below) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return size_t(state >> 16) % below;
    };
    int good = 0;
    for (int round = 0; round < 200'000; round++) {
        std::string head = whole.substr(0, random(4) ? whole.size() : random(whole.size() + 1));
        for (size_t changes = random(4); changes-- && !head.empty();)
            head[random(head.size())] = random(2) ? likely[random(likely.size())] : char(random(256));
        const char *const bytes = guarded(head);
        const unsigned length = http::head_length(bytes, unsigned(head.size()));
        CHECK(length <= head.size());
        // A caller may also be wrong about the length.
        for (unsigned count : {length, unsigned(head.size())}) {
            const http::Request request = http::parse(bytes, count, 5);
            if (request.status != 200)
                continue;
            good++;
            char name[16];
            for (const text::View &part : {request.path, request.query, request.fields})
                CHECK(part.bytes >= bytes && part.bytes + part.length <= bytes + head.size());
            CHECK(request.path.length && request.path.bytes[0] == '/' && request.body_length <= 5);
            if (http::file_name(request.path, name, sizeof name))
                CHECK(std::strlen(name) < sizeof name && std::string("/" + std::string(name) + "/").find("/../") == std::string::npos);
            (void)http::find_field(request, "connection");
        }
    }
    CHECK(good > 10'000);
}

static void names_of_files_stay_in_the_directory()
{
    const auto name = [](const std::string &path, size_t room = 16) {
        char bytes[16];
        return http::file_name({guarded(path), path.size()}, bytes, room) ? std::string(bytes) : "none";
    };
    CHECK(name("/a%20b/c.png") == "a b/c.png" && name("/%C3%a4") == "\xc3\xa4" && name("/...") == "..." && name("/.a") == ".a");
    for (const char *path : {"/", "//a", "/a/", "/a//b", "/.", "/..", "/../a", "/a/..", "/a/./b", "/%2e%2E/a", "/a%2fb", "/a%00", "/a%0a", "/a%7f", "/a%", "/a%2", "/%g0", "/a\tb"})
        CHECK(name(path) == "none");
    CHECK(name("/abc", 4) == "abc" && name("/abcd", 4) == "none");
    CHECK(!std::strcmp(http::media_type("a/b.HTML"), "text/html") && !std::strcmp(http::media_type("a.html/b"), "application/octet-stream"));
    CHECK(!std::strcmp(http::media_type(""), "application/octet-stream"));
}

static void numbers_and_texts_are_written()
{
    char bytes[64];
    const auto written = [&](text::Buffer &out) { return std::string(bytes, out.length); };
    text::Buffer out(bytes, sizeof bytes);
    out.add("a").add("bcd", 2).add_number(0).add(" ").add_number(~uint64_t(0)).add(" ").add_number(7, 3).add(" ").add_signed(INT64_MIN).add(" ").add_hex(0xbeef, 5);
    CHECK(written(out) == "abc0 18446744073709551615 007 -9223372036854775808 0beef" && !out.cut);
    text::Buffer small(bytes, 5);
    small.add("abcde").add("");
    CHECK(written(small) == "abcde" && !small.cut);
    small.add_number(1);
    CHECK(written(small) == "abcde" && small.cut);
    uint64_t value = 0;
    CHECK(text::read_number(view("18446744073709551615"), value) && value == ~uint64_t(0) && text::read_number(view("007"), value) && value == 7);
    for (const char *number : {"", "+1", " 1", "1 ", "18446744073709551616", "99999999999999999999", "0x1"})
        CHECK(!text::read_number(view(number), value));
    CHECK(text::equals(view("ab"), "ab") && !text::equals(view("ab"), "abc") && !text::equals(view("abc"), "ab") && !text::equals(view("Ab"), "ab"));
    CHECK(text::equals_any_case(view("aB-"), "ab-") && !text::equals_any_case(view("a"), "ab"));
}

static void replies_are_written()
{
    char bytes[256];
    const auto written = [&](text::Buffer &out) { return std::string(bytes, out.length); };
    text::Buffer head(bytes, sizeof bytes);
    http::begin_head(head, 404);
    http::add_field(head, "A", "b\r\nC: d");
    http::add_number_field(head, "Content-Length", 10);
    http::end_head(head, true);
    CHECK(written(head) == "HTTP/1.1 404 Not Found\r\nA: bC: d\r\nContent-Length: 10\r\nConnection: close\r\n\r\n");

    text::Buffer out(bytes, sizeof bytes);
    http::Chunk chunk(out);
    http::add_event(out, "a\r\nb\rc\n", 7, "x\ny");
    chunk.end();
    http::Chunk empty(out);
    empty.end();
    http::add_last_chunk(out);
    CHECK(written(out) == "0000002a\r\nevent: xy\ndata: a\ndata: b\ndata: c\ndata: \n\n\r\n0\r\n\r\n" && !out.cut);
    text::Buffer silent(bytes, sizeof bytes);
    http::add_event(silent, "", 0);
    CHECK(written(silent) == "data: \n\n");

    // A chunk is whole or not there, whatever room it has.
    for (size_t room = 0; room < 20; room++) {
        text::Buffer small(bytes, room);
        http::Chunk cut(small);
        small.add("0123456789");
        cut.end();
        const std::string part = std::string("0123456789").substr(0, room < 12 ? 0 : room - 12);
        CHECK(small.cut && small.room == room && written(small) == (part.empty() ? "" : "0000000" + std::to_string(part.size()) + "\r\n" + part + "\r\n"));
    }
}

int main()
{
    good_requests_are_read();
    connections_close_when_they_should();
    bad_requests_are_refused();
    random_heads_are_survived();
    names_of_files_stay_in_the_directory();
    numbers_and_texts_are_written();
    replies_are_written();
    return failures != 0;
}
