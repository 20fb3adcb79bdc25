// Checked builds: threads of a group that pass different arguments get -EINVAL, all of them, and nothing has changed. Prints each
// failure and exits with 1.
#define SPINIO_NET_CHECK
#include "net_test.h"
#include "net_tile.h"

#include <spinio/file.h>

// What thread 5 of each group passes in another way.
enum Different { none, descriptor, buffer, length, flags, handles };

// In memory: of two parameters of a kernel, nvcc 13 loads the one that a thread chooses from outside its local memory.
struct Sockets {
    net::Handle handle, other;
    int s, t;
};

template <typename Group>
__device__ void call(Group g, const Sockets &sockets, char *bytes, int64_t *out)
{
    const bool odd = g.rank() == 5;
    auto is = [odd](Different one, Different two) { return odd && one == two; };
    int64_t wrong = 0;
    for (Different one : {none, descriptor, buffer, length, flags, handles}) {
        const int s = is(one, descriptor) ? sockets.t : sockets.s;
        char *buffer_here = bytes + is(one, buffer);
        const size_t length_here = 4 + is(one, length);
        const int flags_here = is(one, flags) ? net::DONTWAIT : 0;
        const net::Handle &handle = is(one, handles) ? sockets.other : sockets.handle;
        const int64_t wanted = one == none ? 4 : -EINVAL;
        // Without the check each would send, or wait for ever.
        wrong = wrong * 2 + (net::send(g, handle, s, buffer_here, length_here, flags_here) != wanted);
        wrong = wrong * 2 + (net::recv(g, handle, s, buffer_here, length_here, flags_here | net::WAITALL) != wanted);
    }
    // What else is compared, and what is not.
    net::Address to = net::Address::inet(127, 0, 0, 1, odd ? 2 : 1), mine;
    wrong = wrong * 2 + (net::connect(g, sockets.handle, sockets.s, to) != -EINVAL);
    wrong = wrong * 2 + (net::sendto(g, sockets.handle, sockets.s, bytes, 4, 0, to) != -EINVAL);
    wrong = wrong * 2 + (net::shutdown(g, sockets.handle, sockets.s, odd ? net::SHUT_SEND : net::SHUT_BOTH) != -EINVAL);
    wrong = wrong * 2 + (net::close(g, sockets.handle, odd ? sockets.t : sockets.s) != -EINVAL);
    wrong = wrong * 2 + (net::set_timeout(g, sockets.handle, sockets.s, odd, 0) != -EINVAL);
    wrong = wrong * 2 + (net::socket(g, sockets.handle, net::INET, odd ? net::STREAM : net::DGRAM, 0) != -EINVAL);
    const char *paths[] = {"a", "b"};
    wrong = wrong * 2 + (spinio::file::open(g, sockets.handle, paths[odd], 0) != -EINVAL);
    wrong = wrong * 2 + (net::getsockname(g, sockets.handle, sockets.s, odd ? nullptr : &mine) != 0);
    net::Span span;
    wrong = wrong * 2 + (net::reserve(g, sockets.handle, sockets.s, &span, 4 + odd) != -EINVAL);
    wrong = wrong * 2 + (net::reserve(g, sockets.handle, sockets.s, &span, 4) != 4);
    wrong = wrong * 2 + (net::commit(g, sockets.handle, sockets.s, odd) != -EINVAL);
    wrong = wrong * 2 + (net::commit(g, sockets.handle, sockets.s, 0) != 0);
    // All threads have seen the same.
    if (g.any(wrong != 0) && wrong)
        atomicAdd(reinterpret_cast<unsigned long long *>(out), 1ull);
    if (g.leads())
        out[1] = wrong, out[2] = 1;
    g.sync();
}

__global__ void of_block(const Sockets *all, char *bytes, int64_t *out) { call(net::block(), *all, bytes, out); }

__global__ void of_warp(const Sockets *all, char *bytes, int64_t *out)
{
    if (threadIdx.x < 32)
        call(net::warp(), *all, bytes, out);
}

__global__ void of_tile(const Sockets *all, char *bytes, int64_t *out)
{
    if (threadIdx.x < 8)
        call(net::group(tile_of<8>()), *all, bytes, out);
}

// Two calls at the same time: on the emulated GPU the threads meet.
__global__ void of_two_calls(const Sockets *all, char *bytes, int64_t *out)
{
    const Sockets &sockets = *all;
    auto g = net::block();
    const int64_t got = threadIdx.x == 5 ? net::recv(g, sockets.handle, sockets.s, bytes, 4, net::DONTWAIT) : net::send(g, sockets.handle, sockets.s, bytes, 4);
    if (got != -EINVAL)
        atomicAdd(reinterpret_cast<unsigned long long *>(out), 1ull);
    if (threadIdx.x == 0)
        out[2] = 1;
}

// Half of a warp calls, and all but one thread of a block.
__global__ void of_some(const Sockets *all, char *bytes, int64_t *out)
{
    const Sockets &sockets = *all;
    if (threadIdx.x < 32 && threadIdx.x % 2 && net::send(net::warp(), sockets.handle, sockets.s, bytes, 4) != -EINVAL)
        atomicAdd(reinterpret_cast<unsigned long long *>(out), 1ull);
    __syncthreads();
    if (threadIdx.x != 40 && net::send(net::block(), sockets.handle, sockets.s, bytes, 4) != -EINVAL)
        atomicAdd(reinterpret_cast<unsigned long long *>(out), 1ull);
    __syncthreads();
    // Nothing of it is left.
    if (net::send(net::block(), sockets.handle, sockets.s, bytes, 4) != 4 || net::recv(net::block(), sockets.handle, sockets.s, bytes, 4, net::WAITALL) != 4)
        atomicAdd(reinterpret_cast<unsigned long long *>(out), 1ull);
    if (threadIdx.x == 0)
        out[2] = 1;
}

// The program's standard error while a kernel runs: how often it has the text.
class Captured {
public:
    Captured() : file(std::tmpfile()), before(dup(2))
    {
        CHECK(file && before >= 0 && dup2(fileno(file), 2) == 2);
    }

    int count(const std::string &text)
    {
        std::string all;
        std::rewind(file);
        for (int c; (c = std::fgetc(file)) != EOF;)
            all += char(c);
        int found = 0;
        for (size_t at = 0; (at = all.find(text, at)) != std::string::npos; at++)
            found++;
        return found;
    }

    ~Captured()
    {
        CHECK(dup2(before, 2) == 2);
        close(before);
        std::fclose(file);
    }

private:
    FILE *file;
    int before;
};

// `messages`: how many of 4 bytes are sent, and answered.
static void unequal_calls_are_refused(void (*kernel)(const Sockets *, char *, int64_t *), unsigned threads, int messages, const std::string &line)
{
    Net net, other;
    int ends[2];
    connect_pair(ends);
    // Where the kernel fails, nothing comes.
    timeval limit = {10, 0};
    CHECK(!setsockopt(ends[1], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
    std::string address;
    const int s = spinio_net_adopt(net.net, ends[0]), t = listener(net, "tcp://127.0.0.1:0", address);
    CHECK(s > 0 && t > 0);
    char *bytes;
    CHECK(cudaMalloc(&bytes, 64) == cudaSuccess);
    std::thread peer([&] {
        char message[4];
        for (int i = 0; i < messages; i++)
            CHECK(recv(ends[1], message, 4, MSG_WAITALL) == 4 && send(ends[1], message, 4, 0) == 4);
    });
    Captured captured;
    auto sockets = reinterpret_cast<Sockets *>(net.words + 512);
    *sockets = {net.handle, other.handle, s, t};
    spinio::launch_resident_on(net.stream, kernel, 1, threads, (const Sockets *)sockets, bytes, net.words);
    net.wait();
    peer.join();
    CHECK(net.words[0] == 0 && net.words[1] == 0 && net.words[2] == 1);
    if (net.words[1])
        std::printf("wrong calls: %lx\n", long(net.words[1]));
    // Nothing else was sent.
    char more;
    usleep(20000);
    CHECK(recv(ends[1], &more, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
    CHECK(net.stats().bytes_sent == uint64_t(messages) * 4);
    // A device prints elsewhere.
    if (spinio::emulated)
        CHECK(captured.count(line) == 1);
    close(ends[1]);
    CHECK(cudaFree(bytes) == cudaSuccess);
}

int main()
{
    const std::string line = "spinio: block 0: sendto: threads passed different arguments\n";
    unequal_calls_are_refused(of_block, 64, 1, line);
    unequal_calls_are_refused(of_warp, 64, 1, line);
    unequal_calls_are_refused(of_tile, 64, 1, line);
    unequal_calls_are_refused(of_some, 64, 1, "spinio: block 0: send: 16 of 32 threads call\nspinio: block 0: send: 63 of 64 threads call\n");
    if (spinio::emulated)
        unequal_calls_are_refused(of_two_calls, 64, 0, "threads passed different arguments\n");
    std::printf("%d failures\n", failures);
    return failures != 0;
}
