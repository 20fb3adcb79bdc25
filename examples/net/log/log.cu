// Prints of a running kernel, in nc: all blocks compute pi by random points, for ever, and print what they have after each
// round. `nc 127.0.0.1 7009` shows them.
//
//   block 0 ─┐
//   block 1 ─┼─ a line a round ── viewer.h ── proxy (a thread of libspinio.so) ── TCP or UNIX ── nc
//   block 2 ─┘
//
// One source for nvcc and g++ (the emulated GPU). README.md has the line that starts it.
#include <cstdio>
#include <cstdlib>

#include <spinio.h>
#include <spinio/net.h>
#include <spinio/text.h>
#include <spinio_net.h>

#include "../server.h"
#include "viewer.h"

using namespace spinio;

constexpr unsigned points = 1024; // of a thread in a round

// xorshift64, from the number of the thread.
__device__ static uint64_t random(uint64_t &state)
{
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

__device__ static unsigned points_in_circle(uint64_t &state)
{
    unsigned inside = 0;
    for (unsigned i = 0; i < points; i++) {
        uint64_t bits = random(state), x = bits & 0xffff, y = bits >> 16 & 0xffff;
        inside += x * x + y * y < uint64_t(1) << 32;
    }
    return inside;
}

__device__ static size_t write_line(char *line, size_t room, unsigned long long round, unsigned long long inside, unsigned long long all)
{
    unsigned long long pi = inside * 40000 / all;
    text::Buffer out(line, room);
    out.add("block ").add_number(blockIdx.x).add(", round ").add_number(round).add(": ");
    out.add_number(inside).add(" of ").add_number(all).add(" points are in the circle, pi is about ");
    out.add_number(pi / 10000).add(".").add_number(pi % 10000, 4).add("\n");
    return out.length;
}

__global__ void work(net::Handle handle, int set, uint64_t *word, unsigned pause_ms)
{
    __shared__ unsigned in_round;
    __shared__ char line[160];
    __shared__ size_t length;
    Viewer viewer(handle, word);
    const int64_t pause = int64_t(pause_ms) * 1000000;
    uint64_t state = (blockIdx.x * uint64_t(blockDim.x) + threadIdx.x + 1) * 0x9e3779b97f4a7c15u;
    unsigned long long inside = 0, all = 0;
    for (unsigned long long round = 1;; round++) {
        if (threadIdx.x == 0)
            in_round = 0;
        __syncthreads();
        atomicAdd(&in_round, points_in_circle(state));
        __syncthreads();
        if (threadIdx.x == 0) {
            inside += in_round;
            all += (unsigned long long)points * blockDim.x;
            length = write_line(line, sizeof line, round, inside, all);
        }
        __syncthreads();
        if (!viewer.print(line, length))
            return;
        if (blockIdx.x == 0 && !viewer.look_for(set, pause))
            return;
        if (blockIdx.x != 0 && threadIdx.x == 0) {
            Backoff waiting;
            for (auto until = nanoseconds() + pause; nanoseconds() < until && !viewer.over();)
                waiting.pause();
        }
    }
}

static int fail(const char *what)
{
    std::fprintf(stderr, "log: %s: %s\n", what, spinio_last_error());
    return 1;
}

int main(int count, char **arguments)
{
    const char *address = count > 1 ? arguments[1] : "tcp://127.0.0.1:7009";
    unsigned blocks = count > 2 ? unsigned(std::atoi(arguments[2])) : 4;
    unsigned pause_ms = count > 3 ? unsigned(std::atoi(arguments[3])) : 500;
    const sigset_t signals = block_signals_of_the_end();

    cudaStream_t stream;
    uint64_t *word = zeros<uint64_t>(1);
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess || !word)
        return fail("no device");
    spinio_net *net = spinio_net_open(emulated ? "emulated" : nullptr, nullptr);
    net::Handle handle;
    int listener = net ? spinio_net_listen(net, address, 16) : -1;
    char name[128];
    if (listener < 0 || spinio_net_handle(net, reinterpret_cast<struct spinio_net_handle *>(&handle)) || spinio_net_address(net, listener, name, sizeof name))
        return fail(address);
    int set = spinio_net_set(net);
    if (set < 0 || spinio_net_add(net, set, listener, net::IN))
        return fail("no event set");

    launch_resident_on(stream, work, blocks, 128, handle, set, word, pause_ms);
    if (cudaError_t error = cudaGetLastError()) {
        std::fprintf(stderr, "log: %u blocks: %s (at most %u)\n", blocks, cudaGetErrorString(error), largest_resident_grid(work, 128));
        return 1;
    }
    std::printf("listening on %s, %u blocks on the %s; Ctrl-C ends it\n", name, blocks, emulated ? "emulated GPU" : "GPU");
    std::fflush(stdout);

    wait_for_the_end(signals, false);
    if (spinio_net_stop(net) || cudaStreamSynchronize(stream) != cudaSuccess)
        return fail("cannot stop");
    struct spinio_net_stats stats;
    spinio_net_stats(net, &stats, sizeof stats);
    std::printf("%llu viewers, %llu bytes printed\n", (unsigned long long)stats.accepted, (unsigned long long)stats.bytes_sent);
    return spinio_net_close(net) ? fail("cannot close the net") : 0;
}
