// team.h: blocks that decode together: one for a small model, so that blocks need not wait for each other, all for a large one.
#ifndef STORIES_TEAM_H
#define STORIES_TEAM_H

#include <spinio/kernel.h>
#include <spinio/standard.h>
#include <spinio/wait.h>
#include <spinio/word.h>

class Team {
public:
    // `arrived`: a word of the team in device memory, zero at first.
    __device__ Team(unsigned rank, unsigned size, uint64_t *arrived) : rank(rank), size(size), arrived(arrived) {}

    const unsigned rank, size;

    __device__ bool leads() const { return rank == 0; }

    // All threads of all its blocks: what was stored before is seen after it.
    __device__ void sync()
    {
        __syncthreads();
        if (size == 1)
            return;
        expected += size;
        if (threadIdx.x == 0) {
            spinio::add_release_device(arrived, 1);
            spinio::Backoff waiting(512, 256);
            while (spinio::load_acquire_device(arrived) < expected)
                waiting.pause();
        }
        __syncthreads();
    }

private:
    uint64_t *arrived, expected = 0;
};

#endif
