// The calls of spinio/gpunet.h: without a handle, and between two blocks. Prints each failure and exits with 1.
#include <spinio/gpunet.h>

#include "net_test.h"

constexpr int calls = 9;

__global__ void all_calls(int s, int64_t *results)
{
    __shared__ char buffer[16];
    const net::Address address = net::Address::inet(127, 0, 0, 1, 0);
    const int64_t got[calls] = {gsocket(net::INET, net::STREAM, 0), gbind(s, address), glisten(s, 1), gaccept(s), gconnect(s, address), gsend(s, buffer, 16), grecv(s, buffer, 16), gshutdown(s, net::SHUT_BOTH), gclose(s)};
    if (threadIdx.x == 0)
        for (int i = 0; i < calls; i++)
            results[i] = got[i];
}

// The descriptor is one of an open net: only the handle is missing.
static void calls_without_a_handle_fail()
{
    Net net;
    std::string address;
    const int s = listener(net, "tcp://127.0.0.1:0", address);
    spinio::launch_resident_on(net.stream, all_calls, 1, 32, s, net.words);
    CHECK(cudaGetLastError() == cudaSuccess);
    net.wait();
    for (int i = 0; i < calls; i++)
        CHECK(net.words[i] == -EBADF);
}

__device__ static bool is_filled(const char *buffer, char with)
{
    return !__syncthreads_or(buffer[threadIdx.x] != with);
}

// Block 0 listens and answers, block 1 connects and asks.
__global__ void exchange(uint64_t *port, int64_t *results)
{
    __shared__ char buffer[64];
    __shared__ net::Address name;
    bool right = true;
    if (blockIdx.x == 0) {
        const int listener = gsocket(net::INET, net::STREAM, 0);
        right = right && gbind(listener, net::Address::inet(127, 0, 0, 1, 0)) == 0 && glisten(listener, 8) == 0;
        right = right && gaccept(listener, nullptr, net::DONTWAIT) == -EAGAIN;
        net::getsockname(net::block(), gpunet_handle, listener, &name);
        __syncthreads();
        if (threadIdx.x == 0)
            spinio::store_release_system(port, name.port());
        const int s = gaccept(listener, &name);
        right = right && s > 0 && gclose(listener) == 0;
        right = right && grecv(s, buffer, sizeof buffer, net::WAITALL) == int64_t(sizeof buffer) && is_filled(buffer, 'q');
        __syncthreads();
        buffer[threadIdx.x] = 'a';
        right = right && gsend(s, buffer, sizeof buffer) == int64_t(sizeof buffer);
        right = right && grecv(s, buffer, sizeof buffer) == 0 && gclose(s) == 0;
    } else {
        spinio::Backoff waiting;
        while (!spinio::load_acquire_system(port))
            waiting.pause();
        const int s = gsocket(net::INET, net::STREAM, 0);
        right = right && gconnect(s, net::Address::inet(127, 0, 0, 1, unsigned(spinio::load_acquire_system(port)))) == 0;
        right = right && grecv(s, buffer, sizeof buffer, net::DONTWAIT) == -EAGAIN;
        buffer[threadIdx.x] = 'q';
        right = right && gsend(s, buffer, sizeof buffer) == int64_t(sizeof buffer);
        right = right && grecv(s, buffer, sizeof buffer, net::WAITALL) == int64_t(sizeof buffer) && is_filled(buffer, 'a');
        right = right && gshutdown(s, net::SHUT_SEND) == 0 && gclose(s) == 0;
    }
    if (threadIdx.x == 0)
        results[blockIdx.x] = right;
}

static void blocks_talk(bool no_upgrade)
{
    NetOptions options;
    options.no_upgrade = no_upgrade;
    Net net(options);
    CHECK(gpunet_init(net.handle) == cudaSuccess);
    spinio::launch_resident_on(net.stream, exchange, 2, 64, reinterpret_cast<uint64_t *>(net.words), net.words + 1);
    CHECK(cudaGetLastError() == cudaSuccess);
    net.wait();
    CHECK(net.words[1] == 1 && net.words[2] == 1);
}

int main()
{
    calls_without_a_handle_fail();
    blocks_talk(false);
    blocks_talk(true);
    return failures != 0;
}
