// net_peer.h: for the tests of connections whose ends are kernels of one net.
#ifndef NET_PEER_H
#define NET_PEER_H

#include "net_test.h"

// Only the listening socket is left: the proxy closes the others a little after the kernels.
static bool others_close(const Net &net)
{
    for (int i = 0; i < 300000 && net.stats().open != 1; i++)
        usleep(1000);
    return net.stats().open == 1;
}

// Blocks wait here for each other, again and again; `words` are zero at the beginning.
__device__ inline void meet(uint64_t *words, unsigned blocks)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        uint64_t round = spinio::load_acquire_device(words + 1);
        uint64_t before = 0, seen;
        // Acquire and release at once.
        while ((seen = spinio::compare_exchange_device(words, before, before + 1)) != before)
            before = seen;
        if (before + 1 == (round + 1) * blocks)
            spinio::store_release_device(words + 1, round + 1);
        spinio::Backoff waiting;
        while (spinio::load_acquire_device(words + 1) == round)
            waiting.pause();
    }
    __syncthreads();
}

// The results of a block, in order.
struct Log {
    int64_t *at;

    __device__ void add(int64_t value)
    {
        if (threadIdx.x == 0)
            *at++ = value;
    }
};

#endif
