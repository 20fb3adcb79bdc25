// Figure 5 of the paper on GPUnet (OSDI 2014), as it is printed, with the calls of <spinio/gpunet.h>: a server that adds one to each
// character. Each block accepts a connection, serves it once, and accepts the next one.
//
// One source for nvcc and g++ (the emulated GPU). README.md has the line that starts it.
#include <cstdio>
#include <cstdlib>

#include <spinio.h>
#include <spinio/gpunet.h>
#include <spinio_net.h>

#include "../server.h"

using namespace spinio;

// What the figure leaves out: the constant, two variables of each thread, and the type of the result.
constexpr unsigned THREADS_IN_TB = 32;

struct Thread {
    unsigned thread_id;
    int len;

__device__ void
increment_by_one_server(int csoc)
{
    //buffer shared by all TB threads
    __shared__ char buf[THREADS_IN_TB];
    //collaborative recv into buf
    len=THREADS_IN_TB;
    grecv(csoc, buf, len);
    //data parallel code per thread
    buf[thread_id]++;
    //collaborative send from buf
    gsend(csoc, buf, len);
}
};

__global__ void server(int listener)
{
    for (;;) {
        const int csoc = gaccept(listener);
        if (csoc < 0)
            return; // the program has stopped the net
        Thread{threadIdx.x, 0}.increment_by_one_server(csoc);
        gclose(csoc);
    }
}

static int fail(const char *what)
{
    std::fprintf(stderr, "figure5: %s: %s\n", what, spinio_last_error());
    return 1;
}

int main(int count, char **arguments)
{
    const char *address = count > 1 ? arguments[1] : "tcp://127.0.0.1:7005";
    unsigned blocks = count > 2 ? unsigned(std::atoi(arguments[2])) : 4;
    const sigset_t signals = block_signals_of_the_end();

    cudaStream_t stream;
    if (auto failed = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) {
        std::fprintf(stderr, "figure5: no CUDA device (error %d); a C++ compiler builds this for the emulated GPU\n", int(failed));
        return 1;
    }
    spinio_net *net = spinio_net_open(emulated ? "emulated" : nullptr, nullptr);
    net::Handle handle;
    int listener = net ? spinio_net_listen(net, address, 128) : -1;
    char name[128];
    if (listener < 0 || spinio_net_handle(net, reinterpret_cast<struct spinio_net_handle *>(&handle)) || spinio_net_address(net, listener, name, sizeof name))
        return fail(address);
    if (cudaError_t error = gpunet_init(handle)) {
        std::fprintf(stderr, "figure5: gpunet_init: %s\n", cudaGetErrorString(error));
        return 1;
    }

    launch_resident_on(stream, server, blocks, THREADS_IN_TB, listener);
    if (cudaError_t error = cudaGetLastError()) {
        std::fprintf(stderr, "figure5: %u blocks: %s (at most %u)\n", blocks, cudaGetErrorString(error), largest_resident_grid(server, THREADS_IN_TB));
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
