// send with MORE: bytes that come with those of a later call, over each transport, and what ends the wait for it. Prints each failure and
// exits with 1.
#include "net_process.h"
#include "net_test.h"

#include <spinio/file.h>

// Of each connection: "head" with MORE; after the program's turn, "body"; and what the last calls are told to do.
enum Then { send_it, send_by_another_block, shut_down, close_it, send_file, hand_over, many, steps };

__device__ inline int64_t finish(const net::Handle &handle, int s, int then, int file)
{
    auto g = net::block();
    __shared__ unsigned char bytes[8192];
    switch (then) {
    case shut_down: return net::shutdown(g, handle, s, net::SHUT_SEND);
    case close_it: return net::close(g, handle, s);
    case send_file: return net::sendfile(g, handle, s, file, 0, 4);
    case hand_over: return net::release(g, handle, s);
    case many:
        // More than a quarter of the ring is sent on, and more than the ring waits for room as ever.
        for (unsigned i = threadIdx.x; i < sizeof bytes; i += blockDim.x)
            bytes[i] = (unsigned char)i;
        __syncthreads();
        for (unsigned at = 0; at < sizeof bytes; at += 64)
            if (net::send(g, handle, s, bytes + at, 64, net::MORE) != 64)
                return -1000;
        return net::send(g, handle, s, "body", 4);
    default: return net::send(g, handle, s, "body", 4);
    }
}

// Block 0 accepts connections in the order of `Then`; block 1 sends the end of the second one.
__global__ void serve(net::Handle handle, int listener, int count, uint64_t *turns, int64_t *out)
{
    auto g = net::block();
    for (int then = 0; then < count; then++) {
        uint64_t *turn = turns + then * 16;
        if (blockIdx.x == 1 && then != send_by_another_block)
            continue;
        if (blockIdx.x == 0) {
            const int s = net::accept(g, handle, listener);
            int64_t sent = net::send(g, handle, s, "head", 4, net::MORE);
            if (threadIdx.x == 0)
                out[then * 4] = sent, out[then * 4 + 1] = s;
            pass_and_wait(turn, 1);
            if (then == send_by_another_block) {
                pass_and_wait(turn, 2);
                continue;
            }
        } else {
            spinio::Backoff waiting;
            while (spinio::load_acquire_system(turn + 1) < 1)
                waiting.pause();
            __syncthreads();
        }
        const int file = then == send_file ? spinio::file::open(g, handle, "file", spinio::file::RDONLY) : -1;
        const int64_t done = finish(handle, int(out[then * 4 + 1]), then, file);
        if (threadIdx.x == 0)
            out[then * 4 + 2] = done;
    }
}

// Whether something comes within 30 ms.
template <typename Receive>
static bool is_silent(Receive receive)
{
    char byte;
    for (int i = 0; i < 3; usleep(10000), i++)
        if (receive(&byte, 1, MSG_DONTWAIT | MSG_PEEK) != -1 || errno != EAGAIN)
            return false;
    return true;
}

template <typename Receive>
static std::string all_of(Receive receive, size_t bytes)
{
    std::string text(bytes, 0);
    size_t at = 0;
    for (ssize_t got; at < bytes && (got = receive(&text[at], bytes - at, 0)) > 0;)
        at += size_t(got);
    text.resize(at);
    return text;
}

static void programs_get_the_head_with_the_body(bool shares)
{
    char folder[] = "/var/tmp/spinio-more-XXXXXX";
    CHECK(mkdtemp(folder));
    const std::string path = std::string(folder) + "/file";
    FILE *file = std::fopen(path.c_str(), "we");
    CHECK(file && std::fputs("body", file) >= 0 && !std::fclose(file));
    Net net({.files_root = folder});
    std::string address;
    const int listening = listener(net, "unix:@", address);
    // A connection that shares memory stays there.
    const int count = shares ? int(close_it) + 1 : int(steps);
    auto turns = reinterpret_cast<uint64_t *>(net.words);
    int64_t *out = net.words + 1024;
    spinio::launch_resident_on(net.stream, serve, 2, 64, net.handle, listening, count, turns, out);
    for (int then = 0; then < count; then++) {
        spinio_socket *shared = shares ? spinio_socket_connect(address.c_str(), nullptr) : nullptr;
        const int fd = shares ? -1 : connect_to(address);
        auto receive = [&](char *to, size_t bytes, int flags) { return shares ? spinio_socket_recv(shared, to, bytes, flags & ~MSG_PEEK) : recv(fd, to, bytes, flags); };
        while (spinio::load_acquire_system(turns + then * 16) < 1)
            usleep(100);
        CHECK(out[then * 4] == 4 && is_silent(receive));
        spinio::store_release_system(turns + then * 16 + 1, 1);
        if (then == many) {
            const std::string text = all_of(receive, 4 + 8192 + 4);
            bool right = text.size() == 8200 && text.substr(0, 4) == "head" && text.substr(8196) == "body";
            for (size_t i = 0; right && i < 8192; i++)
                right = text[4 + i] == char((unsigned char)i);
            CHECK(right);
        } else {
            const bool ends = then == shut_down || then == close_it || then == hand_over;
            const std::string text = all_of(receive, ends ? 4 : 8);
            if (text != (ends ? "head" : "headbody"))
                CHECK((std::printf("case %d got \"%s\", result %ld\n", then, text.c_str(), long(out[then * 4 + 2])), false));
        }
        if (then == send_by_another_block) {
            while (!out[then * 4 + 2])
                usleep(100);
            spinio::store_release_system(turns + then * 16 + 1, 2);
        }
        if (shared)
            CHECK(!spinio_socket_close(shared));
        else
            close(fd);
    }
    net.wait();
    for (int then = 0; then < count; then++)
        CHECK(out[then * 4 + 2] == (then == shut_down || then == close_it || then == hand_over ? 0 : 4));
    CHECK(net.stats().violations == 0 && net.stats().shared == (shares ? uint64_t(count) : 0));
    unlink(path.c_str());
    rmdir(folder);
}

// Two kernels: of one net, and of two. The reader gets nothing until the writer's call without MORE; in the second round, too, where short
// messages have a way of their own.
constexpr int rounds = 2;

__global__ void write_twice(net::Handle handle, net::Address to, uint64_t *turn, int64_t *out)
{
    auto g = net::block();
    __shared__ char answer[2];
    const int s = connected(g, handle, to);
    int64_t head = 0, body = 0, answered = 0;
    for (int round = 0; round < rounds; round++) {
        head += net::send(g, handle, s, "head", 4, net::MORE);
        pass_and_wait(turn, uint64_t(round) + 1);
        body += net::send(g, handle, s, "body", 4);
        answered += net::recv(g, handle, s, answer, 2, net::WAITALL);
    }
    const int datagrams = net::socket(g, handle, net::INET, net::DGRAM, 0);
    const int64_t refused = net::sendto(g, handle, datagrams, "x", 1, net::MORE, to);
    if (threadIdx.x == 0)
        out[0] = head, out[1] = body, out[2] = answered, out[3] = refused;
    net::close(g, handle, s);
}

__global__ void read_twice(net::Handle handle, int listener, uint64_t *turn, int64_t *out)
{
    __shared__ char bytes[16];
    auto g = net::block();
    const int s = net::accept(g, handle, listener);
    for (int round = 0; round < rounds; round++) {
        // Until the writer has sent the head.
        spinio::Backoff waiting;
        while (spinio::load_acquire_system(turn) < uint64_t(round) + 1)
            waiting.pause();
        __syncthreads();
        const int64_t none = net::recv(g, handle, s, bytes, 16, net::DONTWAIT);
        if (threadIdx.x == 0)
            spinio::store_release_system(turn + 1, uint64_t(round) + 1);
        __syncthreads();
        const int64_t got = net::recv(g, handle, s, bytes, 8, net::WAITALL);
        if (threadIdx.x == 0) {
            out[4] += none == -EAGAIN, out[5] += got;
            for (int i = 0; i < 8; i++)
                out[6] += bytes[i] == "headbody"[i];
        }
        net::send(g, handle, s, "ok", 2);
    }
    net::close(g, handle, s);
}

static void kernels_get_the_head_with_the_body(bool two, const char *name)
{
    Net accepts, connects;
    Net &client = two ? connects : accepts;
    std::string address;
    const int s = listener(accepts, name, address);
    auto turn = reinterpret_cast<uint64_t *>(accepts.words) + 64;
    spinio::launch_resident_on(accepts.stream, read_twice, 1, 32, accepts.handle, s, turn, accepts.words);
    spinio::launch_resident_on(connects.stream, write_twice, 1, 32, client.handle, address_of(address), turn, accepts.words);
    accepts.wait();
    connects.wait();
    const int64_t *out = accepts.words;
    const bool right = out[0] == 4 * rounds && out[1] == 4 * rounds && out[2] == 2 * rounds && out[3] == -EOPNOTSUPP && out[4] == rounds && out[5] == 8 * rounds && out[6] == 8 * rounds;
    CHECK(right);
    for (int i = 0; !right && i < 7; i++)
        std::printf("%d: %ld\n", i, long(out[i]));
    CHECK((two ? accepts.stats().peer : accepts.stats().upgraded) == 1 && accepts.stats().violations == 0);
}

int main()
{
    programs_get_the_head_with_the_body(false);
    programs_get_the_head_with_the_body(true);
    kernels_get_the_head_with_the_body(false, "tcp://127.0.0.1:0");
    kernels_get_the_head_with_the_body(true, "tcp://127.0.0.1:0");
    std::printf("%d failures\n", failures);
    return failures != 0;
}
