// block.h: runs the threads of one block on one CPU thread.
//
//   started:  fiber A runs thread 0, 1, 2 ... as plain calls, one stack for all of them
//             thread 5 waits: A waits there, fiber B continues with thread 6, 7 ...
//   rounds:   each thread that may go on runs until it waits again or ends
//
//   a thread waits   at __syncthreads()      until all threads of the block that have not ended wait there
//                    for lanes of its warp   until they all have come to the same operation (warp.h)
//                    for something else      until the next round: it polls again (__nanosleep, spinio::Backoff)
//
// So a kernel without barriers switches no stacks at all, and one with barriers has as many fibers as threads. Which
// threads have ended does not matter, as on a GPU.
//
// If all threads of a block poll or wait for those that do, the CPU thread sleeps between rounds, twice as long each time
// up to 1 ms: blocks that wait for other blocks or for the CPU leave the processor to them. If threads wait for each
// other at different places, no thread polls and none can go on, the program ends with a sentence: a GPU would hang.
//
// Blocks with an odd number begin with their last thread: a kernel that lacks a barrier, and would be correct by chance if
// thread 0 ran first, is wrong in every other block.
//
// Known limits: a thread that polls without saying so never returns. ThreadSanitizer gets a stack for every thread.
#ifndef SPINIO_EMULATION_BLOCK_H
#define SPINIO_EMULATION_BLOCK_H

#include <algorithm>
#include <ctime>
#include <memory>
#include <sched.h>
#include <utility>
#include <vector>

#include <spinio/emulation/fiber.h>
#include <spinio/emulation/warp.h>

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

inline uint3 thread_index()
{
    return {peek(here.thread.x), peek(here.thread.y), peek(here.thread.z)};
}

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
#ifdef SPINIO_EMULATION_TSAN
        poke(outside.thread, __tsan_get_current_fiber());
#endif
        current_block = this;
        body = kernel;
        count = block.x * block.y * block.z;
        backwards = last_first;
        next = ended = 0;
        quiet = 0;
        here.block = index;
        here.threads = {block.x, block.y, block.z};
        warps.clear();
        for (unsigned first = 0; first < count; first += lanes)
            warps.emplace_back(std::min(lanes, count - first));
        while (peek(next) < count)
            enter(idle_fiber());
        while (begin_round())
            for (Fiber *fiber : round)
                enter(*fiber);
        acquire_order(&finished);
    }

    // __syncthreads() and its variants: the number of threads that arrived, and the number whose predicate is true.
    std::pair<unsigned, unsigned> barrier(bool vote)
    {
        Fiber &fiber = *peek(running);
        char *order = &orders[peek(barriers) % 2];
        release_order(order);
        poke(fiber.vote, vote);
        leave(fiber, Request::barrier);
        acquire_order(order);
        return {peek(agreed), peek(asked)};
    }

    // The values that the lanes of a mask gave to the same operation; `get(lane)` returns them while no lane of the warp
    // waits again. The result has a bit for each lane that gave one.
    Given exchange(unsigned mask, unsigned operation, uint64_t value)
    {
        Fiber &fiber = *peek(running);
        poke(fiber.mask, mask);
        poke(fiber.operation, operation);
        poke(fiber.value, value);
        leave(fiber, Request::warp);
        return Given{peek(fiber.given), fiber.values};
    }

    // __syncwarp(): an exchange that orders accesses.
    void warp_barrier(unsigned mask)
    {
        Fiber &fiber = *peek(running);
        unsigned turn = peek(fiber.turn);
        poke(fiber.turn, turn + 1);
        char *order = &fiber.order[turn % 2];
        release_order(order);
        Given orders = exchange(mask, warp_barrier_operation, reinterpret_cast<uintptr_t>(order));
        for (unsigned lane = 0; checks_races && lane < lanes; lane++)
            if (orders.lanes >> lane & 1)
                acquire_order(reinterpret_cast<void *>(static_cast<uintptr_t>(orders.get(lane))));
    }

    // The thread polls: others run first. `begins`: it did not wait for the same before.
    void pause(bool begins)
    {
        Fiber &fiber = *peek(running);
        poke(fiber.vote, begins);
        leave(fiber, Request::pause);
    }

    // The running thread's number in its warp.
    unsigned lane() const
    {
        return linear(thread_index()) % lanes;
    }

private:
    static void begin()
    {
        Block &block = *peek(current_block);
        Fiber &fiber = *peek(block.running);
        arrived(fiber.context, &block.outside);
        for (;;) {
            for (unsigned at; (at = peek(block.next)) < block.count;) {
                poke(block.next, at + 1);
                unsigned thread = block.backwards ? block.count - 1 - at : at;
                set_thread(block.position(thread));
                block.body.call(block.body.arguments);
                // It may have moved to another position meanwhile, not to another fiber.
                block.warps[linear(thread_index()) / lanes].end(linear(thread_index()) % lanes);
                poke(block.ended, peek(block.ended) + 1);
                if (checks_races)
                    break;
            }
            poke(fiber.request, Request::ended);
            release_order(&block.finished);
            switch_to(fiber.context, block.outside);
        }
    }

    // Waits in the outside's care, and continues as the same thread.
    void leave(Fiber &fiber, Request request)
    {
        unsigned thread = linear(thread_index());
        poke(fiber.thread, thread);
        poke(fiber.request, request);
        switch_to(fiber.context, outside);
        set_thread(position(thread));
    }

    // Runs a fiber until it waits or has finished, and notes what for.
    void enter(Fiber &fiber)
    {
        poke(running, &fiber);
        switch_to(outside, fiber.context);
        switch (peek(fiber.request)) {
        case Request::ended:
            idle.push_back(&fiber);
            break;
        case Request::barrier:
            waiting.push_back(&fiber);
            votes += peek(fiber.vote);
            break;
        case Request::warp:
            warps[peek(fiber.thread) / lanes].arrive(fiber, backwards, ready);
            break;
        case Request::pause:
            paused.push_back(&fiber);
            if (!peek(fiber.vote))
                return;
            break;
        }
        quiet = 0;
    }

    // Finds who may go on; false if all threads have ended.
    bool begin_round()
    {
        round.clear();
        if (peek(ended) == count)
            return false;
        round.swap(ready);
        if (round.empty())
            for (Warp &warp : warps)
                warp.complete_all(backwards, round);
        if (round.empty() && waiting.size() == count - peek(ended)) {
            round.swap(waiting);
            if (backwards)
                std::reverse(round.begin(), round.end());
            poke(agreed, votes);
            poke(asked, unsigned(round.size()));
            poke(barriers, peek(barriers) + 1);
            votes = 0;
        }
        if (round.empty() && paused.empty())
            report_deadlock();
        if (round.empty())
            sleep();
        round.insert(round.end(), paused.begin(), paused.end());
        paused.clear();
        return true;
    }

    // Nothing but polling happened since the last round, or almost nothing.
    void sleep()
    {
        if (quiet++ < 2) {
            sched_yield();
            return;
        }
        timespec time = {0, std::min(1000000l, 10000l << std::min(quiet, 10u))};
        nanosleep(&time, nullptr);
    }

    [[noreturn]] void report_deadlock() const
    {
        std::fprintf(stderr, "spinio: block (%u, %u, %u) of an emulated kernel cannot go on: of %u threads, %u have ended, %zu wait at a barrier of "
                             "the block, and the others wait for lanes of their warp that are elsewhere\n",
                     here.block.x, here.block.y, here.block.z, count, ended, waiting.size());
        std::abort();
    }

    Fiber &idle_fiber()
    {
        if (idle.empty()) {
            fibers.push_back(std::make_unique<Fiber>(begin));
            idle.push_back(fibers.back().get());
        }
        Fiber *fiber = idle.back();
        idle.pop_back();
        fiber->renew();
        return *fiber;
    }

    static void set_thread(uint3 thread)
    {
        poke(here.thread.x, thread.x);
        poke(here.thread.y, thread.y);
        poke(here.thread.z, thread.z);
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
    unsigned count = 0, next = 0, ended = 0, votes = 0, agreed = 0, asked = 0;
    unsigned barriers = 0; // completed ones
    unsigned quiet = 0;    // rounds in which threads only polled
    bool backwards = false;
    Context outside;
    Fiber *running = nullptr;
    std::vector<Warp> warps;
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Fiber *> idle, waiting, ready, paused, round;
    char orders[2] = {}, finished = 0; // addresses for acquire_order
};

} // namespace spinio::emulation

#endif
