// kernels.h: the kernels of gpunet.cu. Each takes a handle and sockets, and ends when its connections or the net do.
#ifndef GPUNET_KERNELS_H
#define GPUNET_KERNELS_H

#include <vector>

#include <spinio/net.h>

#include "device_clock.h"

namespace net = spinio::net;

__device__ inline uint64_t look(const uint64_t *word, spinio::Backoff &waiting)
{
    uint64_t value = spinio::load_acquire_system(word);
    // On the emulated GPU a loop has to say that it waits.
    if (spinio::emulated)
        waiting.pause();
    return value;
}

// One thread: answers each number with the same number, until it is `last`.
__global__ void word_ping_pong(const uint64_t *in, uint64_t *out, uint64_t last)
{
    spinio::Backoff waiting;
    for (uint64_t next = 1; next <= last; next++) {
        while (look(in, waiting) < next) {
        }
        spinio::store_release_system(out, next);
    }
}

// The kernel that the naive way launches for each message: it changes nothing.
__global__ void relay(const unsigned char *in, unsigned char *out, int bytes)
{
    for (int i = int(threadIdx.x); i < bytes; i += int(blockDim.x))
        out[i] = in[i];
}

// Echo, one connection after the other.
__global__ void echo(net::Handle handle, int listener)
{
    __shared__ char buffer[4096];
    for (;;) {
        int s = net::accept(net::block(), handle, listener);
        if (s < 0)
            return;
        int64_t got;
        while ((got = net::recv(net::block(), handle, s, buffer, sizeof buffer)) > 0)
            if (net::send(net::block(), handle, s, buffer, size_t(got)) < 0)
                break;
        net::close(net::block(), handle, s);
    }
}

// Accepts connections and leaves them alone.
__global__ void accept_only(net::Handle handle, int listener, uint64_t *count)
{
    while (net::accept(net::block(), handle, listener) > 0)
        if (threadIdx.x == 0)
            spinio::store_release_system(count + blockIdx.x, count[blockIdx.x] + 1);
}

// Block 0 accepts and echoes, block 1 asks through the socket `client`: ticks of each round trip of 64 bytes.
__global__ void two_blocks(net::Handle handle, int listener, int client, unsigned rounds, unsigned long long *times, Clocks *clocks)
{
    __shared__ char buffer[64];
    auto g = net::block();
    if (blockIdx.x == 0) {
        int s = net::accept(g, handle, listener);
        int64_t got;
        while ((got = net::recv(g, handle, s, buffer, sizeof buffer)) > 0)
            if (net::send(g, handle, s, buffer, size_t(got)) < 0)
                break;
        net::close(g, handle, s);
        return;
    }
    if (threadIdx.x == 0)
        clocks->read(0);
    for (unsigned round = 0; round < rounds; round++) {
        unsigned long long begun = ticks();
        if (net::send(g, handle, client, buffer, sizeof buffer) != sizeof buffer || net::recv(g, handle, client, buffer, sizeof buffer, net::WAITALL) != sizeof buffer)
            break;
        if (threadIdx.x == 0)
            times[round] = ticks() - begun;
    }
    if (threadIdx.x == 0)
        clocks->read(1);
    net::close(g, handle, client);
}

// What a byte of a stream is, after so many others: streams repeat with this period.
constexpr size_t period = 64 << 10;

__host__ __device__ inline unsigned char byte_at(size_t position)
{
    size_t at = position % period;
    return (unsigned char)(at * 7 + (at >> 8));
}

// What a program sends at a time: some periods.
inline std::vector<unsigned char> stream_bytes()
{
    std::vector<unsigned char> bytes(4 * period);
    for (size_t i = 0; i < bytes.size(); i++)
        bytes[i] = byte_at(i);
    return bytes;
}

__device__ inline void fill(unsigned char *buffer)
{
    for (size_t i = threadIdx.x; i < period; i += blockDim.x)
        buffer[i] = byte_at(i);
    __syncthreads();
}

// Each block accepts a connection and sends on it until that fails. `buffers`: a period for each block.
__global__ void __launch_bounds__(1024) source(net::Handle handle, int listener, unsigned char *buffers, unsigned bytes)
{
    unsigned char *buffer = buffers + blockIdx.x * period;
    fill(buffer);
    for (;;) {
        int s = net::accept(net::block(), handle, listener);
        if (s < 0)
            return;
        size_t at = 0;
        while (net::send(net::block(), handle, s, buffer + at, bytes) > 0)
            at = (at + bytes) % period;
        net::close(net::block(), handle, s);
    }
}

// Each block accepts `each` connections and sends on one after the other until that fails. `buffer`: a period, for all blocks;
// `sockets`: a number for each connection.
__global__ void __launch_bounds__(1024) source_in_turn(net::Handle handle, int listener, unsigned char *buffer, unsigned bytes, int *sockets, unsigned each)
{
    auto g = net::block();
    fill(buffer); // all blocks store the same
    int *own = sockets + blockIdx.x * each;
    for (unsigned i = 0; i < each; i++) {
        const int s = net::accept(g, handle, listener);
        if (s < 0)
            return;
        if (threadIdx.x == 0)
            own[i] = s;
    }
    __syncthreads();
    for (size_t at = 0;; at = (at + bytes) % period)
        for (unsigned i = 0; i < each; i++)
            if (net::send(g, handle, own[i], buffer + at, bytes) <= 0)
                return;
}

// Receives until the end of the stream, then says how many bytes came.
__global__ void __launch_bounds__(1024) sink(net::Handle handle, int listener, unsigned char *buffers)
{
    unsigned char *buffer = buffers + blockIdx.x * period;
    __shared__ int64_t total;
    for (;;) {
        int s = net::accept(net::block(), handle, listener);
        if (s < 0)
            return;
        int64_t got, all = 0;
        while ((got = net::recv(net::block(), handle, s, buffer, period)) > 0)
            all += got;
        if (threadIdx.x == 0)
            total = all;
        __syncthreads();
        net::send(net::block(), handle, s, &total, sizeof total);
        net::close(net::block(), handle, s);
    }
}

// Block 0 sends on a socket, block 1 receives from it at the same time.
__global__ void __launch_bounds__(1024) duplex(net::Handle handle, int s, unsigned char *buffers, uint64_t *received)
{
    unsigned char *buffer = buffers + blockIdx.x * period;
    if (blockIdx.x == 0) {
        fill(buffer);
        while (net::send(net::block(), handle, s, buffer, period) > 0) {
        }
        return;
    }
    int64_t got, all = 0;
    while ((got = net::recv(net::block(), handle, s, buffer, period)) > 0)
        all += got;
    if (threadIdx.x == 0)
        spinio::store_release_system(received, uint64_t(all));
}

// For each byte that comes, a send of `bytes`: ticks until it returns.
__global__ void __launch_bounds__(1024) timed_sends(net::Handle handle, int s, unsigned char *buffer, unsigned bytes, unsigned long long *times, Clocks *clocks)
{
    __shared__ char go;
    fill(buffer);
    if (threadIdx.x == 0)
        clocks->read(0);
    for (unsigned round = 0; net::recv(net::block(), handle, s, &go, 1) == 1; round++) {
        unsigned long long begun = ticks();
        net::send(net::block(), handle, s, buffer, bytes);
        if (threadIdx.x == 0)
            times[round] = ticks() - begun;
    }
    if (threadIdx.x == 0)
        clocks->read(1);
}

// A send for each change of a word, which this program makes after a silence.
__global__ void send_on_word(net::Handle handle, int s, const uint64_t *word)
{
    __shared__ uint64_t now;
    uint64_t before = 0;
    for (;;) {
        if (threadIdx.x == 0) {
            spinio::Backoff waiting(256);
            while ((now = spinio::load_acquire_system(word)) == before)
                waiting.pause();
        }
        __syncthreads();
        before = now;
        if (before == ~uint64_t(0) || net::send(net::block(), handle, s, &now, sizeof now) < 0)
            return;
        __syncthreads();
    }
}

#endif
