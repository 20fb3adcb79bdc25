// warp.h: the threads of a warp, which exchange values.
//
//   lane 0: __shfl_sync(0xf, a, 1) ─┐
//   lane 1: __shfl_sync(0xf, b, 1) ─┤ all lanes of the mask that have not ended are here:
//   lane 2: __shfl_sync(0xf, c, 1) ─┤ each gets the values of all, and takes what its operation needs
//   lane 3: has ended               ┘
//
// Every operation of a warp is such an exchange: shuffles, votes, reductions (shuffles.h), __syncwarp(). Lanes with
// different masks do not wait for each other, so the branches of a diverged warp may use masks of their own.
//
// CUDA has no result for lanes that disagree about the mask or the operation, or for a mask without the lane itself: here
// the program ends with a sentence. A warp does not run in lockstep: between two operations a lane may be far ahead.
#ifndef SPINIO_EMULATION_WARP_H
#define SPINIO_EMULATION_WARP_H

#include <vector>

#include <spinio/emulation/fiber.h>

namespace spinio::emulation {

constexpr unsigned all_lanes = 0xffffffff;

// Numbers of operations; shuffles.h has more.
constexpr unsigned warp_barrier_operation = 0;

// What an exchange returns to a lane.
struct Given {
    unsigned lanes;
    const uint64_t *values;

    bool has(unsigned lane) const
    {
        return lane < emulation::lanes && (lanes >> lane & 1);
    }

    uint64_t get(unsigned lane) const
    {
        return peek(values[lane]);
    }
};

class Warp {
public:
    explicit Warp(unsigned threads) : alive(threads == lanes ? all_lanes : (1u << threads) - 1) {}

    // A lane has ended.
    void end(unsigned lane)
    {
        poke(alive, peek(alive) & ~(1u << lane));
    }

    // A lane waits. If it was the last one of its mask, all of them are appended to `ready`.
    void arrive(Fiber &fiber, bool last_first, std::vector<Fiber *> &ready)
    {
        unsigned lane = peek(fiber.thread) % lanes, mask = peek(fiber.mask);
        if (!(mask >> lane & 1))
            report("a lane is not in the mask that it passed", mask, mask);
        for (unsigned other = 0; other < lanes; other++)
            if (waiting >> other & mask >> other & 1) {
                const Fiber &there = *fibers[other];
                if (peek(there.mask) != mask)
                    report("lanes of a warp passed different masks", peek(there.mask), mask);
                if (peek(there.operation) != peek(fiber.operation))
                    report("lanes of a warp came to different operations", mask, mask);
            }
        waiting |= 1u << lane;
        fibers[lane] = &fiber;
        complete(mask, last_first, ready);
    }

    // Operations that wait for lanes which have ended meanwhile.
    void complete_all(bool last_first, std::vector<Fiber *> &ready)
    {
        for (unsigned lane = 0, left = waiting; lane < lanes; lane++)
            if (left >> lane & 1) {
                unsigned mask = peek(fibers[lane]->mask);
                left &= ~mask;
                complete(mask, last_first, ready);
            }
    }

private:
    void complete(unsigned mask, bool last_first, std::vector<Fiber *> &ready)
    {
        unsigned given = waiting & mask;
        if (peek(alive) & mask & ~given)
            return;
        waiting &= ~mask;
        for (unsigned i = 0; i < lanes; i++) {
            unsigned lane = last_first ? lanes - 1 - i : i;
            if (!(given >> lane & 1))
                continue;
            Fiber &fiber = *fibers[lane];
            poke(fiber.given, given);
            for (unsigned other = 0; other < lanes; other++)
                if (given >> other & 1)
                    poke(fiber.values[other], peek(fibers[other]->value));
            ready.push_back(&fiber);
        }
    }

    [[noreturn]] static void report(const char *what, unsigned one, unsigned other)
    {
        std::fprintf(stderr, "spinio: an emulated kernel is wrong: %s (masks %#x and %#x)\n", what, one, other);
        std::abort();
    }

    unsigned alive;       // lanes that exist and have not ended
    unsigned waiting = 0; // lanes that wait for others
    Fiber *fibers[lanes] = {};
};

} // namespace spinio::emulation

#endif
