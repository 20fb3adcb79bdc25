// copies.h: the row of gpunet.cu that measures who copies the bytes of a large receive from a ring, which is pinned memory, into
// device memory: the block that receives, or a copy engine that a thread of the host starts for it.
//
//   block:   as recv() copies, 512 threads
//   engine:  block ── a word ──> host thread ── cudaMemcpyAsync, then a copy of the answer's word ──> block
#ifndef GPUNET_COPIES_H
#define GPUNET_COPIES_H

#include "peer.h"

__global__ void __launch_bounds__(1024) timed_loads(const Sixteen *from, Sixteen *to, size_t bytes, unsigned rounds, const uint64_t *word, unsigned long long *times, Clocks *clocks)
{
    if (threadIdx.x == 0)
        clocks->read(0);
    for (unsigned round = 0; round < rounds; round++) {
        const unsigned long long begun = ticks();
        load_again(from, to, bytes, word);
        if (threadIdx.x == 0)
            times[round] = ticks() - begun;
    }
    if (threadIdx.x == 0)
        clocks->read(1);
}

// In stream order, beside running kernels. The emulated GPU copies at once.
static void start_copy(void *to, const void *from, size_t bytes, cudaStream_t stream)
{
#if defined(__CUDACC__)
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream) == cudaSuccess, "cudaMemcpyAsync");
#else
    (void)stream;
    check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice) == cudaSuccess, "cudaMemcpy");
#endif
}

static void row_copies(const Size &size)
{
    const Two two;
    for (size_t bytes : {64u << 10, 256u << 10, 1u << 20, 4u << 20, 16u << 20}) {
        if (size.small && bytes > 256 << 10)
            break;
        const std::string what = std::to_string(bytes >> 10) + " KiB from pinned memory";
        const unsigned rounds = size.small ? 20 : 200;
        auto from = pinned<unsigned char>(bytes);
        auto to = two.memory<unsigned char>(0, bytes);
        for (size_t i = 0; i < bytes; i++)
            from[i] = byte_at(i);
        auto request = pinned<uint64_t>(16);
        auto times = pinned<unsigned long long>(rounds);
        auto clocks = pinned<Clocks>(1);
        const cudaStream_t kernels = new_stream(), copies = new_stream();
        const auto report = [&](const char *who) {
            std::vector<unsigned char> got(bytes);
            check(cudaStreamSynchronize(kernels) == cudaSuccess && cudaMemcpy(got.data(), to, bytes, cudaMemcpyDeviceToHost) == cudaSuccess, who);
            check(!std::memcmp(got.data(), from, bytes), "a copy with wrong bytes");
            got.assign(bytes, 0);
            check(cudaMemcpy(to, got.data(), bytes, cudaMemcpyHostToDevice) == cudaSuccess, "cudaMemcpy");
            Result("copies", std::string(who) + ", " + what).times(device_times(times, rounds, *clocks));
        };
        spinio::launch_resident_on(kernels, timed_loads, 1, 512, reinterpret_cast<const Sixteen *>(from), reinterpret_cast<Sixteen *>(to), bytes, rounds, (const uint64_t *)request, times, clocks);
        report("a block");

        // word_ping() asks for a round with its number and waits for the same number.
        auto answers = pinned<uint64_t>(rounds + 1);
        auto answer = two.memory<uint64_t>(0, 16);
        spinio::launch_resident_on(kernels, word_ping, 1, 1, (const uint64_t *)answer, request, rounds, times, clocks);
        for (uint64_t round = 1; round <= rounds; round++) {
            while (__atomic_load_n(request, __ATOMIC_ACQUIRE) < round)
                if (!polls())
                    std::this_thread::yield();
            answers[round] = round;
            start_copy(to, from, bytes, copies);
            start_copy(answer, answers + round, sizeof(uint64_t), copies);
        }
        report("a copy engine, asked for by a block");
    }
}

#endif
