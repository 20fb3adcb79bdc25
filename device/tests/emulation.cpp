// The emulation without a device, on host memory: barriers, threads that return early, shared memory, atomics, many blocks.
// Prints each failure and exits with 1.
#include "run.h"

#include <sys/wait.h>
#include <unistd.h>

#include <vector>

namespace emulation = spinio::emulation;

// ---- indices

__global__ void number(unsigned *out)
{
    unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    atomicAdd(&out[block * blockDim.x * blockDim.y * blockDim.z + thread], 1u);
}

static void every_thread_runs_once()
{
    for (auto [grid, block] : {std::pair<dim3, dim3>{1, 1}, {{3, 5, 2}, {4, 3, 7}}, {{7, 1, 9}, {32, 32, 1}}, {4096, {1, 1, 64}}}) {
        size_t threads = size_t(grid.x) * grid.y * grid.z * block.x * block.y * block.z;
        std::vector<unsigned> out(threads);
        run(number, grid, block, out.data());
        for (unsigned times : out)
            CHECK(times == 1);
    }
}

// ---- barriers

__global__ void rotate(const int *in, int *out, int rounds)
{
    __shared__ int tile[1024];
    int at = threadIdx.x, n = blockDim.x, first = blockIdx.x * n;
    int mine = in[first + at];
    for (int i = 0; i < rounds; i++) {
        tile[at] = mine;
        __syncthreads();
        mine = tile[(at + 1) % n];
        __syncthreads();
    }
    out[first + at] = mine;
}

static void barriers_order_accesses()
{
    for (int threads : {1, 2, 33, 1024}) {
        const int blocks = 5, rounds = 7;
        std::vector<int> in(threads * blocks), out(in.size());
        for (size_t i = 0; i < in.size(); i++)
            in[i] = int(i * 2654435761u >> 7);
        run(rotate, blocks, threads, in.data(), out.data(), rounds);
        for (int b = 0; b < blocks; b++)
            for (int t = 0; t < threads; t++)
                CHECK(out[b * threads + t] == in[b * threads + (t + rounds) % threads]);
    }
}

__global__ void sum(const int *in, int *out, int n)
{
    __shared__ int part[256];
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    part[threadIdx.x] = at < n ? in[at] : 0;
    __syncthreads();
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half)
            part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        atomicAdd(out, part[0]);
}

static void shared_memory_reduces()
{
    const int n = 100003;
    std::vector<int> in(n);
    int expected = 0, got = 0;
    for (int i = 0; i < n; i++)
        expected += in[i] = i % 1000 - 300;
    run(sum, (n + 255) / 256, 256, in.data(), &got, n);
    CHECK(got == expected);
}

__global__ void leave(int *out)
{
    __shared__ int alive;
    int at = threadIdx.x;
    if (at % 3 == 0)
        return; // never reaches a barrier
    if (at == 1)
        alive = 0;
    __syncthreads();
    atomicAdd(&alive, 1);
    if (at % 3 == 1) {
        __syncthreads();
        out[blockIdx.x * blockDim.x + at] = alive;
        return;
    }
    __syncthreads(); // another line of the source, the same barrier
    __syncthreads(); // now only a third of the threads is left
    out[blockIdx.x * blockDim.x + at] = -alive;
}

static void barriers_ignore_ended_threads()
{
    const int threads = 96, blocks = 11;
    std::vector<int> out(threads * blocks, 7);
    run(leave, blocks, threads, out.data());
    for (int i = 0; i < threads * blocks; i++)
        CHECK(out[i] == (i % threads % 3 == 0 ? 7 : i % threads % 3 == 1 ? 64 : -64));
}

__global__ void vote(int *out)
{
    int at = threadIdx.x;
    int even = __syncthreads_count(at % 2 == 0);
    int any = __syncthreads_or(at == 17), none = __syncthreads_or(0);
    int all = __syncthreads_and(at < 50), most = __syncthreads_and(at != 17);
    out[at] = even == 25 && any && !none && all && !most;
}

static void barriers_count_votes()
{
    std::vector<int> out(50);
    run(vote, 1, 50, out.data());
    for (int right : out)
        CHECK(right);
}

__global__ void late(int *out)
{
    // Only the last thread reaches a barrier: the others have ended, as plain calls on one stack.
    if (threadIdx.x == blockDim.x - 1)
        __syncthreads();
    atomicAdd(out, 1);
}

static void barrier_of_one_thread_completes()
{
    int got = 0;
    run(late, 3, 100, &got);
    CHECK(got == 300);
}

// Large local variables are on the fiber's own stack, and unchanged after a barrier.
__global__ void locals(int *wrong)
{
    int mine[512];
    double scale = threadIdx.x * 0.5;
    for (int i = 0; i < 512; i++)
        mine[i] = int(threadIdx.x * 1000 + i);
    for (int round = 0; round < 3; round++) {
        __syncthreads();
        for (int i = 0; i < 512; i++)
            if (mine[i] != int(threadIdx.x * 1000 + i))
                atomicAdd(wrong, 1);
    }
    if (scale != threadIdx.x * 0.5)
        atomicAdd(wrong, 1);
}

static void locals_survive_barriers()
{
    int wrong = 0;
    run(locals, 6, 200, &wrong);
    CHECK(wrong == 0);
}

// Its locals are more than a stack, and the first ones lie in stacks of other threads if nothing is between.
__device__ __attribute__((noinline)) void too_many_locals(char *out)
{
    volatile char local[500 << 10];
    for (int i = 0; i < 1000; i++)
        local[i] = 1;
    *out = local[1];
}

__global__ void too_much_on_the_stack(char *out)
{
    __syncthreads();
    if (threadIdx.x == 1)
        too_many_locals(out);
    __syncthreads();
}

// Before there are other threads.
static void too_much_on_a_stack_is_a_fault()
{
    const pid_t child = fork();
    if (!child) {
        // The sanitizer's report is no failure.
        (void)std::freopen("/dev/null", "w", stderr);
        char out;
        run(too_much_on_the_stack, 1, 64, &out);
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && status != 0);
}

// Without its barrier this kernel is correct if threads run in order: blocks that begin with the last thread detect it.
__global__ void missing_barrier(int *wrong)
{
    __shared__ int word;
    if (threadIdx.x == 0)
        word = int(blockIdx.x) + 1;
    if (word != int(blockIdx.x) + 1)
        atomicAdd(wrong, 1);
}

static void missing_barrier_is_detected()
{
    int wrong = 0;
    run(missing_barrier, 64, 32, &wrong);
    CHECK(wrong > 0);
}

// ---- atomics

__global__ void atomics(int *i, unsigned *u, unsigned long long *l, float *f, double *d)
{
    int at = int(blockIdx.x * blockDim.x + threadIdx.x);
    atomicAdd(&i[0], at);
    atomicSub(&i[1], at);
    atomicMin(&i[2], at - 500);
    atomicMax(&i[3], at);
    atomicAdd(&u[0], 1u);
    atomicOr(&u[1], 1u << at % 32);
    atomicAnd(&u[2], ~(1u << at % 16));
    atomicXor(&u[3], unsigned(at));
    atomicAdd(&l[0], 1ull << 33);
    atomicAdd(f, 0.5f);
    atomicAdd(d, 0.25);
    unsigned old = u[4], seen; // a counter by compare-and-swap
    do {
        seen = old;
        old = atomicCAS(&u[4], seen, seen + 2);
    } while (old != seen);
    if (atomicExch(&u[5], 1u) == 0)
        atomicAdd(&u[6], 1u);
}

static void atomics_lose_no_update()
{
    const int blocks = 300, threads = 128, n = blocks * threads;
    int i[4] = {0, 0, 1 << 30, -1};
    unsigned u[7] = {0, 0, ~0u, 0, 0, 0, 0}, mixed = 0;
    unsigned long long l[1] = {0};
    float f = 0;
    double d = 0;
    run(atomics, blocks, threads, i, u, l, &f, &d);
    for (int at = 0; at < n; at++)
        mixed ^= unsigned(at);
    CHECK(i[0] == int(long(n) * (n - 1) / 2));
    CHECK(i[1] == -i[0]);
    CHECK(i[2] == -500 && i[3] == n - 1);
    CHECK(u[0] == unsigned(n) && u[1] == ~0u && u[2] == 0xffff0000u && u[3] == mixed && u[4] == 2u * n);
    CHECK(u[5] == 1 && u[6] == 1);
    CHECK(l[0] == (unsigned long long)n << 33);
    CHECK(f == 0.5f * n && d == 0.25 * n);
}

// ---- sizes

__global__ void count(unsigned long long *out)
{
    if (threadIdx.x == 0)
        atomicAdd(out, 1ull);
}

static void large_grids_complete()
{
    unsigned long long got = 0;
    run(count, dim3(70000, 7), 2, &got);
    CHECK(got == 490000);
    run(count, dim3(1, 65535), 1, &got);
    CHECK(got == 490000 + 65535);
}

static void launch_limits_equal_cuda()
{
    CHECK(emulation::is_launchable({1, 1, 1}, {1024, 1, 1}));
    CHECK(emulation::is_launchable(2147483647u, 1));
    CHECK(!emulation::is_launchable({0, 1, 1}, 1));
    CHECK(!emulation::is_launchable(1, {1025, 1, 1}));
    CHECK(!emulation::is_launchable(1, {1, 1, 65}));
    CHECK(!emulation::is_launchable({1, 65536, 1}, 1));
    CHECK(!emulation::is_launchable(1, {32, 0, 1}));
    CHECK(emulation::can_be_resident({8, 4, 2}) && !emulation::can_be_resident({13, 5, 1}) && !emulation::can_be_resident({65536, 65535, 1}));
}

int main()
{
    too_much_on_a_stack_is_a_fault();
    every_thread_runs_once();
    barriers_order_accesses();
    shared_memory_reduces();
    barriers_ignore_ended_threads();
    barriers_count_votes();
    barrier_of_one_thread_completes();
    locals_survive_barriers();
    missing_barrier_is_detected();
    atomics_lose_no_update();
    large_grids_complete();
    launch_limits_equal_cuda();
    return failures ? 1 : 0;
}
