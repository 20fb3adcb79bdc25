// viewer.h: a connection that shows the prints of a kernel, which all blocks send.
//
//   block 0 ── look_for ──> the word <── load ── print ── all blocks ── send ──> nc
//                             0: none; socket + 1; or `ended`
//
// A line is one send, and a send of a group has the socket's direction for itself until all bytes are in the ring: lines of
// several blocks never mix. So a line must not have a time limit (set_timeout), which could end it in the middle.
//
// A new viewer takes the place of the one before. While a viewer does not read, blocks that print wait for it.
#ifndef VIEWER_H
#define VIEWER_H

#include <spinio/net.h>

class Viewer {
public:
    __device__ Viewer(const spinio::net::Handle &handle, uint64_t *word) : handle(handle), word(word) {}

    // Waits for a new viewer in an event set, for so long; false once the program has stopped the net. For one block.
    __device__ bool look_for(int set, int64_t nanoseconds)
    {
        using namespace spinio;
        __shared__ net::Ready ready;
        int count = net::wait(net::block(), handle, set, &ready, 1, nanoseconds);
        if (count != 0)
            replace(spinio::load_acquire_device(word), count < 0 ? ended : uint64_t(ready.s) + 1);
        // The next wait must not overwrite `ready` before all have read it.
        __syncthreads();
        return count >= 0;
    }

    // Sends a line of this block; without a viewer it is dropped. False once the program has stopped the net.
    __device__ bool print(const char *line, size_t length)
    {
        using namespace spinio;
        __shared__ uint64_t seen;
        if (threadIdx.x == 0)
            seen = load_acquire_device(word);
        __syncthreads();
        uint64_t to = seen;
        __syncthreads();
        if (to != 0 && to != ended && net::send(net::block(), handle, int(to - 1), line, length) < 0)
            replace(to, 0);
        return to != ended;
    }

    // Whether the program has stopped the net, as one thread sees it.
    __device__ bool over() const { return spinio::load_acquire_device(word) == ended; }

private:
    static constexpr uint64_t ended = ~uint64_t(0);

    // The block that takes a viewer out of the word closes its connection.
    __device__ void replace(uint64_t old, uint64_t to)
    {
        using namespace spinio;
        __shared__ uint64_t closed;
        if (threadIdx.x == 0) {
            uint64_t found = old;
            while ((found = compare_exchange_device(word, old, to)) != old && to != 0)
                old = found;
            closed = found == old && old != ended ? old : 0;
        }
        __syncthreads();
        uint64_t socket = closed;
        __syncthreads();
        if (socket)
            net::close(net::block(), handle, int(socket - 1));
    }

    spinio::net::Handle handle;
    uint64_t *word;
};

#endif
