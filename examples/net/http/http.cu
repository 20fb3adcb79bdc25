// A web server in one kernel: it accepts connections, reads requests, and answers with a page and a picture that it computes
// for each request. No code of the CPU looks at a request or an answer.
//
//   curl, browser ── TCP ── proxy (a thread of libspinio.so) ── event set ── block 0: wait, request, answer, wait ...
//                                                                         └─ block 1: the same
//
// Any block serves any connection: it waits for an event of the set, a new connection, bytes or room for more, does what can be
// done at once, and leaves the rest in device memory for the block that gets the next event:
//
//   NEW, IN ──> request ──> answer ──┬─ all is sent: next request, or the end: what still comes is dropped
//                  OUT ──> rest of it┘
//
// So connections that stay open may be many more than blocks, and no block waits for a client. All threads of a block compute the
// picture. Files of a directory (--files) are sent by sendfile: their bytes go from the page cache to the socket and never see
// the GPU. Connections are closed which send nothing, or no whole head, for 5 s (--limits), or take longer for an answer than 60 s and a second
// for each 16 KiB of it (--limits, --least-rate).
// The same source is compiled by nvcc for a GPU and by g++ for the emulated one. README.md has the line that starts it.
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <spinio.h>
#include <spinio/file.h>
#include <spinio/http.h>
#include <spinio/http/connection.h>
#include <spinio/net.h>
#include <spinio_net.h>

#include "../server.h"

using namespace spinio;

constexpr unsigned head_bytes = 2048;
// Sent of a file before other connections have a turn.
constexpr uint64_t bytes_of_a_turn = 4 << 20;
constexpr int width = 320, height = 240, rows_at_once = 8;
constexpr unsigned bmp_header = 54, row_bytes = width * 3, picture_bytes = bmp_header + row_bytes * height;

// In device memory: what all blocks count together.
struct Counts {
    unsigned long long requests, pictures, files, refused;
};

// An answer, as far as it is not sent yet.
struct Answer {
    bool begun, last;              // `last`: the connection ends after it
    int file;                      // 0: none
    unsigned long long picture;    // if there is no file
    uint64_t text_size, body_size; // of the head with a page, and of the file or picture that follows
    uint64_t sent;                 // of all
    char text[1536];
};

struct Client : http::Connection<head_bytes> {
    Answer answer;
    bool dropping; // the last answer is sent
};

// What all blocks are given; the memory is the device's.
struct Server {
    net::Handle handle;
    int set;
    uint64_t head_ns, answer_ns; // limits
    uint64_t least_rate;         // bytes of an answer for which its client has a second more
    Client *clients;
    uint64_t *last_closing;
    Counts *counts;
};

__device__ void add_head(text::Buffer &out, int status, const char *type, size_t length, bool close)
{
    http::begin_head(out, status);
    http::add_field(out, "Content-Type", type);
    http::add_number_field(out, "Content-Length", length);
    if (status == 405)
        http::add_field(out, "Allow", "GET, HEAD");
    http::add_field(out, "Cache-Control", "no-store");
    http::end_head(out, close);
}

// One pixel of the Mandelbrot set, seen closer in every picture.
__device__ void pixel(int x, int y, unsigned long long picture, unsigned char *bgr)
{
    float scale = 3.0f / width / (1.0f + float(picture % 64) * 0.25f);
    float cx = -0.743643f + (float(x) - width / 2) * scale, cy = 0.131825f + (float(y) - height / 2) * scale, zx = 0, zy = 0;
    int steps = 0;
    while (steps < 128 && zx * zx + zy * zy < 4) {
        float next = zx * zx - zy * zy + cx;
        zy = 2 * zx * zy + cy;
        zx = next;
        steps++;
    }
    bool inside = steps == 128;
    bgr[0] = (unsigned char)(inside ? 0 : 40 + steps * 5 % 200);
    bgr[1] = (unsigned char)(inside ? 0 : steps * 9 % 256);
    bgr[2] = (unsigned char)(inside ? 0 : steps * 3 % 256);
}

// Sends some of the picture, a BMP file, from an offset on, and computes it for that.
__device__ int64_t send_picture(const net::Handle &handle, int s, unsigned long long picture, uint64_t at)
{
    alignas(8) __shared__ unsigned char bytes[rows_at_once * row_bytes];
    unsigned first = 0, count = bmp_header;
    if (at < bmp_header) {
        if (threadIdx.x == 0) {
            for (unsigned i = 0; i < bmp_header; i++)
                bytes[i] = 0;
            const unsigned numbers[][2] = {{2, picture_bytes}, {10, bmp_header}, {14, 40}, {18, width}, {22, height}, {26, 1 | 24 << 16}, {34, row_bytes * height}};
            bytes[0] = 'B';
            bytes[1] = 'M';
            for (auto &number : numbers)
                for (unsigned i = 0; i < 4; i++)
                    bytes[number[0] + i] = (unsigned char)(number[1] >> 8 * i);
        }
        first = unsigned(at);
    } else {
        const int y = int((at - bmp_header) / row_bytes), rows = height - y < rows_at_once ? height - y : rows_at_once;
        for (int i = int(threadIdx.x); i < rows * width; i += int(blockDim.x))
            pixel(i % width, y + i / width, picture, bytes + i * 3);
        first = unsigned((at - bmp_header) % row_bytes);
        count = unsigned(rows) * row_bytes;
    }
    __syncthreads();
    return net::send(net::block(), handle, s, bytes + first, count - first, net::DONTWAIT | (at < bmp_header ? net::MORE : 0));
}

// Opens the file that a request asks for: its number, and what is known of it; 404 or 503 in `status` if it cannot.
__device__ int open_file(const net::Handle &handle, const http::Request &request, int &status, size_t &size, const char *&type)
{
    __shared__ char name[512];
    __shared__ bool good;
    __shared__ file::Stat stat;
    if (threadIdx.x == 0)
        good = http::file_name(request.path, name, sizeof name);
    __syncthreads();
    const int f = good ? file::open(net::block(), handle, name, file::RDONLY) : -ENOENT;
    status = f == -EMFILE ? 503 : 404;
    if (f < 0)
        return f;
    if (file::fstat(net::block(), handle, f, &stat)) {
        file::close(net::block(), handle, f);
        return -ENOENT;
    }
    __syncthreads();
    status = 200;
    size = size_t(stat.size);
    type = http::media_type(name);
    return f;
}

// Prepares the answer to a request.
__device__ void begin_answer(const Server &server, const http::Request &request, Answer &answer)
{
    __shared__ char body[1024];
    const bool wants_picture = request.status == 200 && text::equals(request.path, "/mandelbrot.bmp");
    const bool wants_page = request.status == 200 && text::equals(request.path, "/");
    int status = request.status, f = 0;
    size_t file_size = 0;
    const char *file_type = "";
    if (status == 200 && !wants_picture && !wants_page)
        f = open_file(server.handle, request, status, file_size, file_type);
    if (threadIdx.x == 0) {
        Counts *counts = server.counts;
        const unsigned long long number = atomicAdd(&counts->requests, 1ull) + 1;
        text::Buffer page(body, sizeof body), out(answer.text, sizeof answer.text);
        if (status != 200) {
            atomicAdd(&counts->refused, 1ull);
            page.add(http::reason(status)).add("\n");
        } else if (f > 0) {
            atomicAdd(&counts->files, 1ull);
        } else if (wants_picture) {
            answer.picture = atomicAdd(&counts->pictures, 1ull);
        } else {
            page.add("<!doctype html><title>A GPU kernel</title><body style=\"font:16px sans-serif;margin:2em\">"
                     "<h1>This page was sent by a GPU kernel</h1><p>Request ")
                .add_number(number)
                .add(", answered by block ")
                .add_number(blockIdx.x)
                .add(" of ")
                .add_number(gridDim.x)
                .add(". The kernel accepted the connection, read the request, and computes a new picture each time:</p>"
                     "<img id=\"p\" src=\"/mandelbrot.bmp\" width=\"640\"><script>let n=0;p.onload=()=>setTimeout(()=>"
                     "p.src='/mandelbrot.bmp?'+n++,100)</script>\n");
        }
        const char *type = f > 0 ? file_type : wants_picture ? "image/bmp" : wants_page ? "text/html" : "text/plain";
        answer.body_size = f > 0 ? file_size : wants_picture ? picture_bytes : 0;
        add_head(out, status, type, answer.body_size + page.length, request.close);
        if (request.method == http::HEAD)
            answer.body_size = 0;
        else
            out.add(body, page.length);
        answer.file = f > 0 ? f : 0;
        answer.text_size = out.length;
        answer.sent = 0;
        answer.last = request.close;
        answer.begun = true;
    }
    __syncthreads();
}

enum class Next { WAIT, GO_ON, CLOSE };

// Sends as much of the answer as the client has room for, but of a large one a part, so that others have their turn. WAIT: for room.
__device__ Next send_answer(const Server &server, int s, Client &client)
{
    const Answer &answer = client.answer;
    const uint64_t begin = answer.sent, whole = answer.text_size + answer.body_size;
    uint64_t sent = begin;
    int64_t result = 1;
    while (result > 0 && sent < whole && sent - begin < bytes_of_a_turn) {
        const uint64_t left = whole - sent, at = sent - answer.text_size; // `at`: in the body
        if (sent < answer.text_size)
            result = net::send(net::block(), server.handle, s, answer.text + sent, answer.text_size - sent, net::DONTWAIT | (answer.body_size ? net::MORE : 0));
        else if (answer.file)
            result = net::sendfile(net::block(), server.handle, s, answer.file, int64_t(at), left < bytes_of_a_turn ? left : bytes_of_a_turn, net::DONTWAIT);
        else
            result = send_picture(server.handle, s, answer.picture, at);
        sent += result > 0 ? uint64_t(result) : 0;
    }
    __syncthreads();
    if (threadIdx.x == 0)
        client.answer.sent = sent;
    // 0: a file that was cut meanwhile is shorter than the head says. Only the end of the connection tells.
    return sent == whole ? Next::GO_ON : result > 0 || result == -EAGAIN ? Next::WAIT : Next::CLOSE;
}

// After an answer: the next request, or the end. A connection that is closed with unread bytes is reset, and the client may lose the
// answer: so it is told first that no more comes, and what it still sends is dropped.
__device__ void end_answer(const Server &server, int s, Client &client)
{
    if (client.answer.file)
        file::close(net::block(), server.handle, client.answer.file);
    if (client.answer.last)
        net::shutdown(net::block(), server.handle, s, net::SHUT_SEND);
    __syncthreads();
    if (threadIdx.x == 0) {
        client.answer.file = 0;
        client.answer.begun = false;
        client.dropping = client.answer.last;
        http::give_time(client, server.head_ns);
    }
    __syncthreads();
}

// Receives more of a request, and begins the answer if it is complete. WAIT: for the rest.
__device__ Next read_request(const Server &server, int s, Client &client)
{
    __shared__ http::Request request;
    unsigned count = client.count, head;
    while (!(head = http::head_length(client.bytes, count)) && count < head_bytes) {
        const int64_t got = net::recv(net::block(), server.handle, s, client.bytes + count, head_bytes - count, net::DONTWAIT);
        if (got <= 0 && got != -EAGAIN)
            return Next::CLOSE;
        if (threadIdx.x == 0) {
            // For the whole head, from its first byte on.
            if (got > 0 && count == 0)
                http::give_time(client, server.head_ns);
            client.count = count + (got > 0 ? unsigned(got) : 0);
        }
        if (got == -EAGAIN)
            return Next::WAIT;
        count += unsigned(got);
    }
    if (threadIdx.x == 0) {
        request = http::parse(client.bytes, head);
        if (request.status == 200 && request.method != http::GET && request.method != http::HEAD)
            request.status = 405;
    }
    __syncthreads();
    begin_answer(server, request, client.answer);
    if (threadIdx.x == 0) {
        // For the whole answer: a client that takes a byte now and then would stay for ever.
        const uint64_t seconds = (client.answer.text_size + client.answer.body_size) / server.least_rate;
        http::give_time(client, server.answer_ns + seconds * 1000000000);
        // The next request may have come with this one.
        for (unsigned i = head; i < count; i++)
            client.bytes[i - head] = client.bytes[i];
        client.count = count - head;
    }
    __syncthreads();
    return Next::GO_ON;
}

// Drops what has come after the last answer, but not for long: others have their turn.
__device__ Next drop(const net::Handle &handle, int s)
{
    __shared__ char dropped[1024];
    int64_t got = 1;
    for (int i = 0; i < 16 && got > 0; i++)
        got = net::recv(net::block(), handle, s, dropped, sizeof dropped, net::DONTWAIT);
    return got > 0 || got == -EAGAIN ? Next::WAIT : Next::CLOSE;
}

// Does what can be done at once; the event that the connection waits for then, 0: it is to be closed.
__device__ int serve(const Server &server, const net::Ready &ready, Client &client)
{
    if (ready.events & net::NEW && threadIdx.x == 0) {
        http::begin(client);
        http::give_time(client, server.head_ns);
        client.answer.begun = client.dropping = false;
        client.answer.file = 0;
    }
    for (;;) {
        __syncthreads();
        const bool answers = client.answer.begun, drops = client.dropping;
        const Next next = answers ? send_answer(server, ready.s, client) : drops ? drop(server.handle, ready.s) : read_request(server, ready.s, client);
        if (next != Next::GO_ON)
            return next == Next::CLOSE ? 0 : answers ? net::OUT : net::IN;
        if (answers)
            end_answer(server, ready.s, client);
    }
}

__device__ void close(const Server &server, int s, const Client &client)
{
    if (client.answer.file)
        file::close(net::block(), server.handle, client.answer.file);
    net::close(net::block(), server.handle, s);
}

__global__ void serve_all(Server server)
{
    __shared__ net::Ready ready;
    __shared__ bool mine;
    const net::Handle &handle = server.handle;
    int count = 0;
    while ((count = net::wait(net::block(), handle, server.set, &ready, 1, 500000000)) >= 0) { // until the program stops the net
        if (count) {
            Client &client = http::connection_of(server.clients, ready.s);
            if (threadIdx.x == 0)
                mine = ready.events & net::NEW || http::claim(client, ready.s);
            __syncthreads();
            if (mine) {
                const int event = serve(server, ready, client);
                if (!event)
                    close(server, ready.s, client);
                else if (!http::leave_idle(handle, client, ready.s, server.set, event))
                    net::close(net::block(), handle, ready.s);
            }
        }
        http::close_late(handle, server.clients, server.last_closing, [&](Client &client) {
            if (client.answer.file)
                file::close(net::thread(), handle, client.answer.file);
        });
        __syncthreads();
    }
}

static int fail(const char *what)
{
    std::fprintf(stderr, "http: %s: %s\n", what, spinio_last_error());
    return 1;
}

int main(int count, char **arguments)
{
    const char *address = "tcp://127.0.0.1:8080", *files = nullptr;
    unsigned blocks = 8, seconds_a_head = 5, seconds_an_answer = 60, least_rate = 16 << 10;
    bool until_input_ends = false;
    for (int i = 1, place = 0; i < count; i++) {
        if (!std::strcmp(arguments[i], "--until-stdin-ends"))
            until_input_ends = true;
        else if (!std::strcmp(arguments[i], "--files") && i + 1 < count)
            files = arguments[++i];
        else if (!std::strcmp(arguments[i], "--limits") && i + 2 < count)
            seconds_a_head = unsigned(std::atoi(arguments[++i])), seconds_an_answer = unsigned(std::atoi(arguments[++i]));
        else if (!std::strcmp(arguments[i], "--least-rate") && i + 1 < count)
            least_rate = unsigned(std::atoi(arguments[++i]));
        else if (place++ == 0)
            address = arguments[i];
        else
            blocks = unsigned(std::atoi(arguments[i]));
    }
    const sigset_t signals = block_signals_of_the_end();

    cudaStream_t stream;
    Server server = {};
    server.head_ns = seconds_a_head * 1000000000ull;
    server.answer_ns = seconds_an_answer * 1000000000ull;
    server.least_rate = least_rate ? least_rate : 1;
    server.counts = zeros<Counts>(1);
    server.last_closing = zeros<uint64_t>(1);
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess || !server.counts || !server.last_closing)
        return fail("no device");
    struct spinio_net_options options = {};
    options.size = sizeof options;
    options.files_root = files;
    spinio_net *net = spinio_net_open(emulated ? "emulated" : nullptr, &options);
    char name[128];
    int listener = net ? spinio_net_listen(net, address, 512) : -1;
    if (listener < 0 || spinio_net_handle(net, reinterpret_cast<struct spinio_net_handle *>(&server.handle)) || spinio_net_address(net, listener, name, sizeof name))
        return fail(address);
    server.set = spinio_net_set(net);
    if (server.set < 0 || spinio_net_add(net, server.set, listener, net::IN))
        return fail("no event set");
    server.clients = zeros<Client>(server.handle.sockets);
    if (!server.clients)
        return fail("no memory for connections");
    launch_resident_on(stream, serve_all, blocks, 128, server);
    if (cudaError_t error = cudaGetLastError()) {
        std::fprintf(stderr, "http: %u blocks: %s (at most %u)\n", blocks, cudaGetErrorString(error), largest_resident_grid(serve_all, 128));
        return 1;
    }
    std::printf("listening on %s, %u blocks on the %s\n", name, blocks, emulated ? "emulated GPU" : "GPU");
    std::fflush(stdout);

    wait_for_the_end(signals, until_input_ends);
    if (spinio_net_stop(net) || cudaStreamSynchronize(stream) != cudaSuccess)
        return fail("cannot stop");
    Counts seen;
    struct spinio_net_stats stats;
    if (cudaMemcpy(&seen, server.counts, sizeof seen, cudaMemcpyDeviceToHost) != cudaSuccess || spinio_net_stats(net, &stats, sizeof stats))
        return fail("cannot read the counters");
    std::printf("connections %llu\nrequests %llu\npictures %llu\nfiles %llu\nrefused %llu\nbytes_sent %llu\nproxy_us %llu\n", (unsigned long long)stats.accepted,
                seen.requests, seen.pictures, seen.files, seen.refused, (unsigned long long)stats.bytes_sent, (unsigned long long)stats.proxy_ns / 1000);
    return spinio_net_close(net) ? fail("cannot close the net") : 0;
}
