// A web server in one kernel: it accepts connections, reads requests, and answers with a page and a picture that it computes
// for each request. No code of the CPU looks at a request or an answer.
//
//   curl, browser ── TCP ── proxy (a thread of libspinio.so) ── event set ── block 0: wait, request, answer, wait ...
//                                                                         └─ block 1: the same
//
// Any block serves any connection: it waits for an event of the set, a new connection or bytes, answers what is complete, and
// leaves the rest in device memory for the block that gets the next event. So connections that stay open may be many more
// than blocks. All threads of a block compute the picture. Files of a directory (--files) are sent by sendfile: their bytes go
// from the page cache to the socket and never see the GPU. Connections that send nothing for 5 s are closed. The same source is
// compiled by nvcc for a GPU and by g++ for the emulated one. README.md has the line that starts it.
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
constexpr uint64_t patience_ns = 5000000000;
constexpr int width = 320, height = 240, rows_at_once = 8;
constexpr unsigned bmp_header = 54, row_bytes = width * 3, picture_bytes = bmp_header + row_bytes * height;

// In device memory: what all blocks count together.
struct Counts {
    unsigned long long requests, pictures, files, refused;
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

// The picture as a BMP file, row by row; whether all was sent.
__device__ bool send_picture(const net::Handle &handle, int s, unsigned long long picture)
{
    alignas(8) __shared__ unsigned char rows[rows_at_once * row_bytes];
    if (threadIdx.x == 0) {
        for (unsigned i = 0; i < bmp_header; i++)
            rows[i] = 0;
        const unsigned numbers[][2] = {{2, picture_bytes}, {10, bmp_header}, {14, 40}, {18, width}, {22, height}, {26, 1 | 24 << 16}, {34, row_bytes * height}};
        rows[0] = 'B';
        rows[1] = 'M';
        for (auto &number : numbers)
            for (unsigned i = 0; i < 4; i++)
                rows[number[0] + i] = (unsigned char)(number[1] >> 8 * i);
    }
    __syncthreads();
    if (net::send(net::block(), handle, s, rows, bmp_header, net::MORE) != bmp_header)
        return false;
    for (int y = 0; y < height; y += rows_at_once) {
        for (int i = int(threadIdx.x); i < rows_at_once * width; i += int(blockDim.x))
            pixel(i % width, y + i / width, picture, rows + i * 3);
        __syncthreads();
        if (net::send(net::block(), handle, s, rows, sizeof rows) != int64_t(sizeof rows))
            return false;
    }
    return true;
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

// Answers one request; whether the connection stays open.
__device__ bool answer(const net::Handle &handle, int s, const http::Request &request, Counts *counts)
{
    __shared__ char head[512], body[1024];
    __shared__ size_t head_size, body_size;
    __shared__ unsigned long long picture;
    bool wants_picture = request.status == 200 && text::equals(request.path, "/mandelbrot.bmp");
    bool wants_page = request.status == 200 && text::equals(request.path, "/");
    int status = request.status, f = -1;
    size_t file_size = 0;
    const char *file_type = "";
    if (status == 200 && !wants_picture && !wants_page)
        f = open_file(handle, request, status, file_size, file_type);
    if (threadIdx.x == 0) {
        unsigned long long number = atomicAdd(&counts->requests, 1ull) + 1;
        if (status != 200)
            atomicAdd(&counts->refused, 1ull);
        text::Buffer page(body, sizeof body), out(head, sizeof head);
        if (f >= 0) {
            atomicAdd(&counts->files, 1ull);
        } else if (wants_picture) {
            picture = atomicAdd(&counts->pictures, 1ull);
        } else if (wants_page) {
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
        } else {
            page.add(http::reason(status)).add("\n");
        }
        body_size = page.length;
        const char *type = f >= 0 ? file_type : wants_picture ? "image/bmp" : wants_page ? "text/html" : "text/plain";
        add_head(out, status, type, f >= 0 ? file_size : wants_picture ? picture_bytes : page.length, request.close);
        head_size = out.length;
    }
    __syncthreads();
    // The client gets the head with the first bytes of the body. If the time limit ends a send, only the end of the connection tells.
    const bool has_body = request.method != http::HEAD && (f >= 0 ? file_size > 0 : wants_picture || body_size > 0);
    bool sent = net::send(net::block(), handle, s, head, head_size, has_body ? net::MORE : 0) == int64_t(head_size);
    // A file that was cut meanwhile is shorter than the head says: only the end of the connection tells.
    if (sent && has_body && f >= 0)
        sent = net::sendfile(net::block(), handle, s, f, 0, file_size) == int64_t(file_size);
    else if (sent && has_body)
        sent = wants_picture ? send_picture(handle, s, picture) : net::send(net::block(), handle, s, body, body_size) == int64_t(body_size);
    if (f >= 0)
        file::close(net::block(), handle, f);
    __syncthreads();
    return sent && !request.close;
}

using Connection = http::Connection<head_bytes>;

// Answers what has come, and keeps the beginning of the next request; whether the connection stays open.
__device__ bool serve(const net::Handle &handle, const net::Ready &ready, Connection &connection, Counts *counts)
{
    __shared__ char bytes[head_bytes];
    __shared__ http::Request request;
    bool fresh = ready.events & net::NEW;
    unsigned count = fresh ? 0 : connection.count;
    for (unsigned i = threadIdx.x; i < count; i += blockDim.x)
        bytes[i] = connection.bytes[i];
    if (fresh)
        net::set_timeout(net::block(), handle, ready.s, patience_ns, patience_ns);
    __syncthreads();
    for (;;) {
        unsigned head = http::head_length(bytes, count);
        if (!head && count < head_bytes) {
            int64_t got = net::recv(net::block(), handle, ready.s, bytes + count, head_bytes - count, net::DONTWAIT);
            if (got == -EAGAIN)
                break;
            if (got <= 0)
                return false;
            count += unsigned(got);
            continue;
        }
        if (threadIdx.x == 0) {
            request = http::parse(bytes, head);
            if (request.status == 200 && request.method != http::GET && request.method != http::HEAD)
                request.status = 405;
        }
        __syncthreads();
        if (!answer(handle, ready.s, request, counts))
            return false;
        // The next request may have come with this one.
        if (threadIdx.x == 0)
            for (unsigned i = head; i < count; i++)
                bytes[i - head] = bytes[i];
        count -= head;
        __syncthreads();
    }
    for (unsigned i = threadIdx.x; i < count; i += blockDim.x)
        connection.bytes[i] = bytes[i];
    connection.count = count;
    return http::leave_idle(handle, connection, ready.s);
}

// A connection that is closed with unread bytes is reset, and the client may lose the answer: so it is told first that no
// more comes, and what it still sends is dropped, up to a limit.
__device__ void finish(const net::Handle &handle, int s)
{
    __shared__ char dropped[1024];
    net::shutdown(net::block(), handle, s, net::SHUT_SEND);
    net::set_timeout(net::block(), handle, s, patience_ns / 10, 0);
    for (int i = 0; i < 64 && net::recv(net::block(), handle, s, dropped, sizeof dropped) > 0; i++) {
    }
}

__global__ void server(net::Handle handle, int set, Connection *connections, uint64_t *last, Counts *counts)
{
    __shared__ net::Ready ready;
    __shared__ bool mine;
    int count = 0;
    while ((count = net::wait(net::block(), handle, set, &ready, 1, 500000000)) >= 0) { // until the program stops the net
        if (count) {
            Connection &connection = http::connection_of(connections, ready.s);
            if (threadIdx.x == 0)
                mine = ready.events & net::NEW || http::claim(connection, ready.s);
            __syncthreads();
            if (mine && !serve(handle, ready, connection, counts)) {
                finish(handle, ready.s);
                net::close(net::block(), handle, ready.s);
            }
        }
        http::close_silent(handle, connections, last, patience_ns);
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
    unsigned blocks = 8;
    bool until_input_ends = false;
    for (int i = 1, place = 0; i < count; i++) {
        if (!std::strcmp(arguments[i], "--until-stdin-ends"))
            until_input_ends = true;
        else if (!std::strcmp(arguments[i], "--files") && i + 1 < count)
            files = arguments[++i];
        else if (place++ == 0)
            address = arguments[i];
        else
            blocks = unsigned(std::atoi(arguments[i]));
    }
    const sigset_t signals = block_signals_of_the_end();

    cudaStream_t stream;
    Counts *counts = zeros<Counts>(1);
    uint64_t *last = zeros<uint64_t>(1);
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess || !counts || !last)
        return fail("no device");
    struct spinio_net_options options = {};
    options.size = sizeof options;
    options.files_root = files;
    spinio_net *net = spinio_net_open(emulated ? "emulated" : nullptr, &options);
    net::Handle handle;
    char name[128];
    int listener = net ? spinio_net_listen(net, address, 512) : -1;
    if (listener < 0 || spinio_net_handle(net, reinterpret_cast<struct spinio_net_handle *>(&handle)) || spinio_net_address(net, listener, name, sizeof name))
        return fail(address);
    int set = spinio_net_set(net);
    if (set < 0 || spinio_net_add(net, set, listener, net::IN))
        return fail("no event set");
    Connection *connections = zeros<Connection>(handle.sockets);
    if (!connections)
        return fail("no memory for connections");
    launch_resident_on(stream, server, blocks, 128, handle, set, connections, last, counts);
    if (cudaError_t error = cudaGetLastError()) {
        std::fprintf(stderr, "http: %u blocks: %s (at most %u)\n", blocks, cudaGetErrorString(error), largest_resident_grid(server, 128));
        return 1;
    }
    std::printf("listening on %s, %u blocks on the %s\n", name, blocks, emulated ? "emulated GPU" : "GPU");
    std::fflush(stdout);

    wait_for_the_end(signals, until_input_ends);
    if (spinio_net_stop(net) || cudaStreamSynchronize(stream) != cudaSuccess)
        return fail("cannot stop");
    Counts seen;
    struct spinio_net_stats stats;
    if (cudaMemcpy(&seen, counts, sizeof seen, cudaMemcpyDeviceToHost) != cudaSuccess || spinio_net_stats(net, &stats, sizeof stats))
        return fail("cannot read the counters");
    std::printf("connections %llu\nrequests %llu\npictures %llu\nfiles %llu\nrefused %llu\nbytes_sent %llu\nproxy_us %llu\n", (unsigned long long)stats.accepted,
                seen.requests, seen.pictures, seen.files, seen.refused, (unsigned long long)stats.bytes_sent, (unsigned long long)stats.proxy_ns / 1000);
    return spinio_net_close(net) ? fail("cannot close the net") : 0;
}
