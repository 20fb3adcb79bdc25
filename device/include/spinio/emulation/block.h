// block.h: runs the threads of one block, one after the other on one CPU thread.
//
//   started:   fiber A runs thread 0, 1, 2 ... as plain calls, one stack for all of them
//              thread 5 reaches a barrier: A waits there, fiber B continues with thread 6, 7 ...
//   all begun: those waiting at the barrier continue, one by one, to the next barrier or to their end
//
// So a kernel without barriers switches no stacks at all, and one with barriers has as many fibers as threads. A barrier
// completes when every thread that has not ended waits at it; which threads have ended does not matter, as on a GPU.
//
// Blocks with an odd number begin with their last thread: a kernel that lacks a barrier, and would be correct by chance if
// thread 0 ran first, is wrong in every other block.
//
// Known limits: a thread that waits for another thread of its block without a barrier, by polling memory, never returns.
// There are no warps: __syncwarp, shuffles and votes do not exist, and a source that uses them does not compile.
#ifndef SPINIO_EMULATION_BLOCK_H
#define SPINIO_EMULATION_BLOCK_H

#include <memory>
#include <utility>
#include <vector>

#include <spinio/emulation/fiber.h>

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace spinio::emulation {

// The values of threadIdx and so on. All fibers of a CPU thread share them: they are set at every switch.
struct Here {
    uint3 thread, block;
    uint3 threads, blocks;
};
inline __thread Here here;

// A kernel with its arguments.
struct Body {
    void (*call)(const void *arguments);
    const void *arguments;
};

class Block;
inline __thread Block *current_block;

class Block {
public:
    // Runs all threads of a block.
    void run(const Body &kernel, dim3 block, uint3 index, bool last_first)
    {
        current_block = this;
        body = kernel;
        count = block.x * block.y * block.z;
        backwards = last_first;
        next = 0;
        here.block = index;
        here.threads = {block.x, block.y, block.z};
        while (next < count)
            enter(idle_fiber());
        while (!waiting.empty()) {
            released.swap(waiting);
            agreed = votes;
            asked = voters;
            votes = voters = 0;
            for (size_t i = 0; i < released.size(); i++)
                enter(*released[backwards ? released.size() - 1 - i : i]);
            released.clear();
        }
    }

    // __syncthreads() and its variants: the number of threads that arrived, and the number whose predicate is true.
    std::pair<unsigned, unsigned> barrier(bool vote)
    {
        Fiber *fiber = running;
        fiber->thread = linear(here.thread);
        waiting.push_back(fiber);
        votes += vote;
        voters++;
        switch_to(fiber->context, outside);
        here.thread = position(fiber->thread);
        return {agreed, asked};
    }

private:
    static void begin()
    {
        Block &block = *current_block;
        Fiber &fiber = *block.running;
        arrived(fiber.context, &block.outside);
        for (;;) {
            while (block.next < block.count) {
                unsigned thread = block.next++;
                here.thread = block.position(block.backwards ? block.count - 1 - thread : thread);
                block.body.call(block.body.arguments);
            }
            block.idle.push_back(&fiber);
            switch_to(fiber.context, block.outside);
        }
    }

    // Runs a fiber until it waits or has finished.
    void enter(Fiber &fiber)
    {
        running = &fiber;
        switch_to(outside, fiber.context);
    }

    Fiber &idle_fiber()
    {
        if (idle.empty()) {
            fibers.push_back(std::make_unique<Fiber>(begin));
            return *fibers.back();
        }
        Fiber *fiber = idle.back();
        idle.pop_back();
        return *fiber;
    }

    static unsigned linear(uint3 thread)
    {
        return (thread.z * here.threads.y + thread.y) * here.threads.x + thread.x;
    }

    static uint3 position(unsigned thread)
    {
        unsigned row = thread / here.threads.x;
        return {thread % here.threads.x, row % here.threads.y, row / here.threads.y};
    }

    Body body{};
    unsigned count = 0, next = 0, votes = 0, voters = 0, agreed = 0, asked = 0;
    bool backwards = false;
    Context outside;
    Fiber *running = nullptr;
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Fiber *> idle, waiting, released;
};

} // namespace spinio::emulation

#endif
