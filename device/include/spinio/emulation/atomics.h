// atomics.h: CUDA's atomic functions. Each returns the old value, and has relaxed memory order.
#ifndef SPINIO_EMULATION_ATOMICS_H
#define SPINIO_EMULATION_ATOMICS_H

namespace spinio::emulation {

// For operations without a processor instruction.
template <typename T, typename Next>
T exchange_with(T *at, Next next)
{
    T old;
    __atomic_load(at, &old, __ATOMIC_RELAXED);
    for (;;) {
        T wanted = next(old);
        if (__atomic_compare_exchange(at, &old, &wanted, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            return old;
    }
}

} // namespace spinio::emulation

#define SPINIO_ATOMICS(T)                                                                                              \
    inline T atomicAdd(T *at, T by) { return __atomic_fetch_add(at, by, __ATOMIC_RELAXED); }                           \
    inline T atomicExch(T *at, T to) { return __atomic_exchange_n(at, to, __ATOMIC_RELAXED); }                         \
    inline T atomicAnd(T *at, T with) { return __atomic_fetch_and(at, with, __ATOMIC_RELAXED); }                       \
    inline T atomicOr(T *at, T with) { return __atomic_fetch_or(at, with, __ATOMIC_RELAXED); }                         \
    inline T atomicXor(T *at, T with) { return __atomic_fetch_xor(at, with, __ATOMIC_RELAXED); }                       \
    inline T atomicMin(T *at, T with)                                                                                  \
    {                                                                                                                  \
        return spinio::emulation::exchange_with(at, [with](T old) { return old < with ? old : with; });                \
    }                                                                                                                  \
    inline T atomicMax(T *at, T with)                                                                                  \
    {                                                                                                                  \
        return spinio::emulation::exchange_with(at, [with](T old) { return old > with ? old : with; });                \
    }                                                                                                                  \
    inline T atomicCAS(T *at, T expected, T to)                                                                        \
    {                                                                                                                  \
        __atomic_compare_exchange_n(at, &expected, to, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);                     \
        return expected;                                                                                               \
    }

SPINIO_ATOMICS(int)
SPINIO_ATOMICS(unsigned)
SPINIO_ATOMICS(unsigned long long)
#undef SPINIO_ATOMICS

inline int atomicSub(int *at, int by)
{
    return __atomic_fetch_sub(at, by, __ATOMIC_RELAXED);
}

inline unsigned atomicSub(unsigned *at, unsigned by)
{
    return __atomic_fetch_sub(at, by, __ATOMIC_RELAXED);
}

inline float atomicAdd(float *at, float by)
{
    return spinio::emulation::exchange_with(at, [by](float old) { return old + by; });
}

inline double atomicAdd(double *at, double by)
{
    return spinio::emulation::exchange_with(at, [by](double old) { return old + by; });
}

inline float atomicExch(float *at, float to)
{
    return spinio::emulation::exchange_with(at, [to](float) { return to; });
}

#endif
