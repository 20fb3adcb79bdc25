// shuffles.h: CUDA's operations of a warp: shuffles, votes, matches, reductions, __syncwarp().
//
// All lanes of the mask that have not ended must call the same operation. Values have at most 8 bytes. A shuffle from a
// lane that is not in the mask, or has ended, has no result in CUDA: here all bytes of it are 0xA5. Only __syncwarp()
// orders accesses to memory.
//
// __activemask() returns the calling lane alone. CUDA promises no more: lanes that took the same branch need not run at
// the same time. Code that takes the result for the lanes of its branch is wrong, and fails here.
#ifndef SPINIO_EMULATION_SHUFFLES_H
#define SPINIO_EMULATION_SHUFFLES_H

#include <cstring>
#include <type_traits>

#include <spinio/emulation/block.h>

constexpr int warpSize = int(spinio::emulation::lanes);

namespace spinio::emulation {

enum Operation : unsigned { shuffle_operation = 1, vote_operation, match_operation, reduction_operation };

template <typename T>
uint64_t to_word(T value)
{
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8, "lanes exchange values of at most 8 bytes");
    uint64_t word = 0;
    std::memcpy(&word, &value, sizeof value);
    return word;
}

template <typename T>
T from_word(uint64_t word)
{
    T value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

// The value of lane `source`, which CUDA limits to the lane's group of `width` lanes.
template <typename T>
T shuffle(unsigned mask, T value, unsigned source)
{
    Given all = current_block->exchange(mask, shuffle_operation, to_word(value));
    return from_word<T>(all.has(source) ? all.get(source) : 0xA5A5A5A5A5A5A5A5);
}

// Combines the values of all lanes.
template <typename T, typename Combine>
T reduce(unsigned mask, T value, unsigned operation, Combine combine)
{
    Given all = current_block->exchange(mask, reduction_operation + operation, to_word(value));
    bool first = true;
    T result = value;
    for (unsigned lane = 0; lane < lanes; lane++)
        if (all.has(lane)) {
            T other = from_word<T>(all.get(lane));
            result = first ? other : combine(result, other);
            first = false;
        }
    return result;
}

} // namespace spinio::emulation

inline void __syncwarp(unsigned mask = spinio::emulation::all_lanes)
{
    spinio::emulation::current_block->warp_barrier(mask);
}

inline unsigned __activemask()
{
    return 1u << spinio::emulation::current_block->lane();
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize)
{
    unsigned lane = spinio::emulation::current_block->lane(), group = unsigned(width) - 1;
    return spinio::emulation::shuffle(mask, value, (lane & ~group) | (unsigned(source) & group));
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize)
{
    unsigned lane = spinio::emulation::current_block->lane(), in_group = lane & (unsigned(width) - 1);
    return spinio::emulation::shuffle(mask, value, in_group < delta ? lane : lane - delta);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize)
{
    unsigned lane = spinio::emulation::current_block->lane(), in_group = lane & (unsigned(width) - 1);
    return spinio::emulation::shuffle(mask, value, in_group + delta >= unsigned(width) ? lane : lane + delta);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int with, int width = warpSize)
{
    unsigned lane = spinio::emulation::current_block->lane(), source = lane ^ unsigned(with);
    bool later_group = source >= (lane | (unsigned(width) - 1)) + 1;
    return spinio::emulation::shuffle(mask, value, later_group ? lane : source);
}

inline unsigned __ballot_sync(unsigned mask, int yes)
{
    auto all = spinio::emulation::current_block->exchange(mask, spinio::emulation::vote_operation, yes != 0);
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < spinio::emulation::lanes; lane++)
        ballot |= unsigned(all.has(lane) && all.get(lane)) << lane;
    return ballot;
}

inline int __any_sync(unsigned mask, int yes)
{
    return __ballot_sync(mask, yes) != 0;
}

// Of those that have not ended.
inline int __all_sync(unsigned mask, int yes)
{
    return __ballot_sync(mask, !yes) == 0;
}

template <typename T>
unsigned __match_any_sync(unsigned mask, T value)
{
    uint64_t own = spinio::emulation::to_word(value);
    auto all = spinio::emulation::current_block->exchange(mask, spinio::emulation::match_operation, own);
    unsigned same = 0;
    for (unsigned lane = 0; lane < spinio::emulation::lanes; lane++)
        same |= unsigned(all.has(lane) && all.get(lane) == own) << lane;
    return same;
}

#define SPINIO_REDUCTION(NAME, T, NUMBER, EXPRESSION)                                                                  \
    inline T __reduce_##NAME##_sync(unsigned mask, T value)                                                            \
    {                                                                                                                  \
        return spinio::emulation::reduce(mask, value, NUMBER, [](T a, T b) -> T { return EXPRESSION; });               \
    }

SPINIO_REDUCTION(add, unsigned, 0, a + b)
SPINIO_REDUCTION(min, unsigned, 1, a < b ? a : b)
SPINIO_REDUCTION(max, unsigned, 2, a > b ? a : b)
SPINIO_REDUCTION(and, unsigned, 3, a & b)
SPINIO_REDUCTION(or, unsigned, 4, a | b)
SPINIO_REDUCTION(xor, unsigned, 5, a ^ b)
SPINIO_REDUCTION(add, int, 0, int(unsigned(a) + unsigned(b)))
SPINIO_REDUCTION(min, int, 1, a < b ? a : b)
SPINIO_REDUCTION(max, int, 2, a > b ? a : b)
#undef SPINIO_REDUCTION

#endif
