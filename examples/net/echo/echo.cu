// An echo server on a GPU: each block accepts a connection, sends back what it receives, and accepts the next one.
//
//   nc ── TCP or UNIX ── proxy (a thread of libspinio.so) ── pinned memory ── block
//
// One source for nvcc and g++ (the emulated GPU). README.md has the line that starts it.
#include <cstdio>
#include <cstdlib>

#include <spinio.h>
#include <spinio/net.h>
#include <spinio_net.h>

#include "../server.h"

using namespace spinio;

__global__ void echo(net::Handle handle, int listener)
{
    __shared__ char buffer[4096];
    for (;;) {
        int s = net::accept(net::block(), handle, listener);
        if (s < 0)
            return; // the program has stopped the net
        for (;;) {
            int64_t got = net::recv(net::block(), handle, s, buffer, sizeof buffer);
            if (got <= 0 || net::send(net::block(), handle, s, buffer, size_t(got)) < 0)
                break;
        }
        net::close(net::block(), handle, s);
    }
}

static int fail(const char *what)
{
    std::fprintf(stderr, "echo: %s: %s\n", what, spinio_last_error());
    return 1;
}

int main(int count, char **arguments)
{
    const char *address = count > 1 ? arguments[1] : "tcp://127.0.0.1:7007";
    unsigned blocks = count > 2 ? unsigned(std::atoi(arguments[2])) : 4;
    const sigset_t signals = block_signals_of_the_end();

    cudaStream_t stream;
    if (auto failed = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) {
        std::fprintf(stderr, "echo: no CUDA device (error %d); a C++ compiler builds this for the emulated GPU\n", int(failed));
        return 1;
    }
    spinio_net *net = spinio_net_open(emulated ? "emulated" : nullptr, nullptr);
    net::Handle handle;
    int listener = net ? spinio_net_listen(net, address, 128) : -1;
    char name[128];
    if (listener < 0 || spinio_net_handle(net, reinterpret_cast<struct spinio_net_handle *>(&handle)) || spinio_net_address(net, listener, name, sizeof name))
        return fail(address);

    launch_resident_on(stream, echo, blocks, 128, handle, listener);
    if (cudaError_t error = cudaGetLastError()) {
        std::fprintf(stderr, "echo: %u blocks: %s (at most %u)\n", blocks, cudaGetErrorString(error), largest_resident_grid(echo, 128));
        return 1;
    }
    std::printf("listening on %s, %s; Ctrl-C ends it\n", name, emulated ? "emulated GPU" : "GPU");
    std::fflush(stdout);

    wait_for_the_end(signals, false);
    if (spinio_net_stop(net) || cudaStreamSynchronize(stream) != cudaSuccess)
        return fail("cannot stop");
    struct spinio_net_stats stats;
    spinio_net_stats(net, &stats, sizeof stats);
    std::printf("%llu connections, %llu bytes through Linux\n", (unsigned long long)stats.accepted, (unsigned long long)stats.bytes_sent);
    return spinio_net_close(net) ? fail("cannot close the net") : 0;
}
