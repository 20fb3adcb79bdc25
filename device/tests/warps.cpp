// The emulation's warps, without a device: shuffles, votes, reductions, masks of diverged branches, lanes that ended, threads
// that wait for each other, programs that the emulation ends. Prints each failure and exits with 1.
//
//   warps         all tests
//   warps WHICH   a kernel that must be reported
#include "run.h"

#include <cstring>
#include <vector>

constexpr unsigned full = 0xffffffff;

__global__ void shuffles(int *wrong)
{
    int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    double value = lane + 100.5 * warp;
    auto is = [&](double got, int from) {
        if (got != from + 100.5 * warp)
            atomicAdd(wrong, 1);
    };
    for (int width : {32, 16, 8, 4, 2, 1}) {
        int first = lane / width * width;
        for (int by : {0, 1, 3, 7, 16, 31}) {
            is(__shfl_sync(full, value, by, width), first + by % width);
            is(__shfl_up_sync(full, value, unsigned(by), width), lane - first >= by ? lane - by : lane);
            is(__shfl_down_sync(full, value, unsigned(by), width), lane - first + by < width ? lane + by : lane);
            is(__shfl_xor_sync(full, value, by, width), (lane ^ by) < first + width ? lane ^ by : lane);
        }
    }
}

static void shuffles_follow_cuda()
{
    for (int threads : {32, 96, 1024}) {
        int wrong = 0;
        run(shuffles, 3, threads, &wrong);
        CHECK(wrong == 0);
    }
}

__global__ void votes(int *wrong)
{
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto expect = [&](bool right) { atomicAdd(wrong, right ? 0 : 1); };
    expect(__ballot_sync(full, lane % 3 == 0) == 0x49249249);
    expect(__any_sync(full, lane == warp) && !__any_sync(full, 0));
    expect(__all_sync(full, lane < 32) && !__all_sync(full, lane != 5));
    expect(__match_any_sync(full, lane % 4) == 0x11111111u << lane % 4);
    expect(__reduce_add_sync(full, lane) == 496 && __reduce_min_sync(full, int(lane) - 7) == -7);
    expect(__reduce_max_sync(full, int(lane) * (lane % 2 ? -1 : 1)) == 30);
    expect(__reduce_or_sync(full, 1u << lane) == full && __reduce_xor_sync(full, lane) == 0);
    // A leader of whatever lanes are here: right for any result of __activemask().
    unsigned active = __activemask();
    expect(active >> lane & 1);
    expect(__ffs(int(__ballot_sync(active, 1))) == __ffs(int(active)));
}

static void votes_and_reductions_follow_cuda()
{
    int wrong = 0;
    run(votes, 4, 128, &wrong);
    CHECK(wrong == 0);
}

__global__ void diverged(int *out)
{
    int lane = int(threadIdx.x) % 32;
    if (lane % 2) {
        // Seven rounds in one branch, two in the other: their masks do not wait for each other.
        int value = lane;
        for (int i = 0; i < 7; i++)
            value = __shfl_sync(0xaaaaaaaa, value, (lane + 2) % 32);
        out[threadIdx.x] = value;
    } else {
        int value = lane;
        for (int i = 0; i < 2; i++)
            value = __shfl_sync(0x55555555, value, (lane + 2) % 32);
        out[threadIdx.x] = value;
    }
    __syncwarp();
    int neighbour = out[threadIdx.x ^ 1];
    __syncwarp();
    out[threadIdx.x] += 1000 * neighbour;
}

static void branches_have_masks_of_their_own()
{
    std::vector<int> out(64);
    run(diverged, 1, 64, out.data());
    for (int i = 0; i < 64; i++) {
        auto mine = [](int lane) { return (lane + (lane % 2 ? 14 : 4)) % 32; };
        CHECK(out[i] == mine(i % 32) + 1000 * mine((i ^ 1) % 32));
    }
}

__global__ void leaving(unsigned *out)
{
    unsigned lane = threadIdx.x % 32;
    if (lane % 4 == 3)
        return;
    unsigned before = __ballot_sync(full, 1);
    if (lane >= 20)
        return;
    // From a lane that has ended: no value.
    unsigned gone = __shfl_sync(full, 7u, 31);
    out[threadIdx.x] = before + (gone == 0xA5A5A5A5 ? 0 : 1) + __reduce_add_sync(full, 0x10000000u);
}

static void ended_and_absent_lanes_are_not_waited_for()
{
    std::vector<unsigned> out(40); // a whole warp, and a quarter of one
    run(leaving, 1, 40, out.data());
    for (unsigned i = 0; i < 40; i++) {
        unsigned others = i < 32 ? 0x77777777 : 0x77, left = i < 32 ? 15 : 6;
        unsigned lane = i % 32;
        CHECK(out[i] == (lane % 4 == 3 || lane >= 20 ? 0 : others + left * 0x10000000u));
    }
}

// Memory of the warp, ordered by __syncwarp alone.
__global__ void exchange(int *wrong, int rounds)
{
    __shared__ int words[256];
    int at = int(threadIdx.x), next = at / 32 * 32 + (at + 1) % 32;
    for (int i = 0; i < rounds; i++) {
        words[at] = at * 1000 + i;
        __syncwarp();
        if (words[next] != next * 1000 + i)
            atomicAdd(wrong, 1);
        __syncwarp();
    }
}

static void syncwarp_orders_accesses()
{
    int wrong = 0;
    run(exchange, 5, 256, &wrong, 20);
    CHECK(wrong == 0);
}

// A token goes round all threads of a block, which poll for it.
__global__ void token(unsigned *turn, unsigned rounds)
{
    for (unsigned i = 0; i < rounds; i++) {
        while (__atomic_load_n(turn, __ATOMIC_ACQUIRE) != i * blockDim.x + (blockDim.x - 1 - threadIdx.x))
            __nanosleep(100);
        __atomic_fetch_add(turn, 1u, __ATOMIC_RELEASE);
    }
    __syncthreads();
}

static void threads_of_a_block_wait_for_each_other()
{
    unsigned turn = 0;
    run(token, 1, 70, &turn, 3u);
    CHECK(turn == 210);
}

// A thread that works, with operations of its warp and without a pause, until a thread that polls has seen something.
__global__ void busy(unsigned *word)
{
    if (threadIdx.x < 32) {
        while (!__any_sync(full, __atomic_load_n(&word[1], __ATOMIC_ACQUIRE) != 0))
            __atomic_store_n(&word[0], 1u, __ATOMIC_RELEASE);
    } else {
        while (!__atomic_load_n(&word[0], __ATOMIC_ACQUIRE))
            __nanosleep(1);
        __nanosleep(1);
        __atomic_store_n(&word[1], 1u, __ATOMIC_RELEASE);
    }
}

static void polling_thread_goes_on_beside_working_ones()
{
    unsigned words[2] = {};
    run(busy, 1, 64, words);
    CHECK(words[0] == 1 && words[1] == 1);
}

// ---- what must be reported

__global__ void not_in_mask()
{
    __syncwarp(threadIdx.x == 3 ? 0x1 : 0xf);
}

__global__ void two_masks()
{
    __syncwarp(threadIdx.x == 3 ? 0xc : 0xf);
}

__global__ void two_operations()
{
    if (threadIdx.x % 2)
        __shfl_sync(full, 1, 0);
    else
        __any_sync(full, 1);
}

__global__ void two_barriers()
{
    if (threadIdx.x % 2)
        __syncthreads();
    else
        __syncwarp();
}

int main(int count, char **argument)
{
    const struct {
        const char *name;
        void (*kernel)();
    } wrong[] = {{"not-in-mask", not_in_mask}, {"two-masks", two_masks}, {"two-operations", two_operations}, {"two-barriers", two_barriers}};
    for (auto &each : wrong)
        if (count > 1 && !std::strcmp(argument[1], each.name))
            run(each.kernel, 1, 32);
    shuffles_follow_cuda();
    votes_and_reductions_follow_cuda();
    branches_have_masks_of_their_own();
    ended_and_absent_lanes_are_not_waited_for();
    syncwarp_orders_accesses();
    threads_of_a_block_wait_for_each_other();
    polling_thread_goes_on_beside_working_ones();
    return failures ? 1 : 0;
}
