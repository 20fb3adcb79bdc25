// Grids whose blocks wait for each other, without a device. Prints each failure and exits with 1.
#include "run.h"

#include <thread>
#include <vector>

namespace emulation = spinio::emulation;

// A token goes through the blocks from the last to the first, several times: each waits for one with a higher number.
__global__ void ring(unsigned *turn, unsigned rounds)
{
    for (unsigned i = 0; i < rounds; i++) {
        if (threadIdx.x == 0) {
            while (__atomic_load_n(turn, __ATOMIC_ACQUIRE) != i * gridDim.x + (gridDim.x - 1 - blockIdx.x))
                __nanosleep(100);
            __atomic_fetch_add(turn, 1u, __ATOMIC_RELEASE);
        }
        __syncthreads();
    }
}

static void blocks_of_a_resident_grid_wait_for_each_other()
{
    for (unsigned blocks : {1u, 7u, emulation::most_resident}) {
        unsigned turn = 0;
        run_resident(ring, blocks, 40, &turn, 3u);
        CHECK(turn == 3 * blocks);
    }
}

__global__ void count_threads(unsigned *threads)
{
    if (threadIdx.x % 2)
        __nanosleep(1);
    __syncthreads();
    atomicAdd(threads, 1u);
}

// Stacks of 65536 threads: more than a process has mappings.
static void the_largest_resident_grid_runs()
{
    unsigned threads = 0;
    run_resident(count_threads, emulation::most_resident, 1024, &threads);
    CHECK(threads == emulation::most_resident * 1024);
}

// Every block has shared memory of its own while all run.
__global__ void own_memory(int *wrong, unsigned *arrived)
{
    __shared__ unsigned mine;
    if (threadIdx.x == 0) {
        mine = blockIdx.x;
        __atomic_fetch_add(arrived, 1u, __ATOMIC_ACQ_REL);
        while (__atomic_load_n(arrived, __ATOMIC_ACQUIRE) < gridDim.x)
            __nanosleep(100);
    }
    __syncthreads();
    if (mine != blockIdx.x)
        atomicAdd(wrong, 1);
}

static void resident_blocks_have_shared_memory_of_their_own()
{
    int wrong = 0;
    unsigned arrived = 0;
    run_resident(own_memory, 32, 8, &wrong, &arrived);
    CHECK(wrong == 0 && arrived == 32);
}

// Grids of several callers: each waits for the one after it, whose blocks may find all workers occupied.
__global__ void chain(unsigned *words, unsigned number)
{
    if (threadIdx.x == 0) {
        while (!__atomic_load_n(&words[number + 1], __ATOMIC_ACQUIRE))
            __nanosleep(100);
        __atomic_store_n(&words[number], 1u, __ATOMIC_RELEASE);
    }
}

static void grids_of_several_callers_wait_for_each_other()
{
    unsigned words[6] = {};
    std::vector<std::thread> callers;
    for (unsigned i = 0; i < 5; i++)
        callers.emplace_back([&words, i] { run(chain, 40, 32, words, i); });
    __atomic_store_n(&words[5], 1u, __ATOMIC_RELEASE);
    for (auto &caller : callers)
        caller.join();
    for (unsigned word : words)
        CHECK(word == 1);
}

static void several_resident_grids_share_the_room()
{
    // Together more than the room: those that do not fit wait for the end of others.
    std::vector<std::thread> callers;
    std::vector<unsigned> turns(5);
    for (unsigned i = 0; i < 5; i++)
        callers.emplace_back([&turns, i] { run_resident(ring, 30, 4, &turns[i], 2u); });
    for (auto &caller : callers)
        caller.join();
    for (unsigned turn : turns)
        CHECK(turn == 60);
}

int main()
{
    blocks_of_a_resident_grid_wait_for_each_other();
    resident_blocks_have_shared_memory_of_their_own();
    several_resident_grids_share_the_room();
    grids_of_several_callers_wait_for_each_other();
    the_largest_resident_grid_runs();
    return failures ? 1 : 0;
}
