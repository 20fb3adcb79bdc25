// word.h: words that threads of kernels, kernels and the CPU share, as acquire and release operations.
//
//   _system  crosses PCIe: a word in host memory, or one that the CPU or another GPU accesses. 8 aligned bytes, one writer,
//            plain loads and stores only: the bus has no read-modify-write.
//   _device  in device memory, for threads of one GPU: claims, counts, locks.
//
//   writer: bytes ... store_release(word)    reader: load_acquire(word), if it is new: the bytes
//
// PTX on a GPU, __atomic elsewhere. Operations instead of fences, since ThreadSanitizer knows no fences. A program may call the first
// two for words of host memory, as kernels do.
#ifndef SPINIO_WORD_H
#define SPINIO_WORD_H

#include <spinio/kernel.h>
#include <spinio/standard.h>

namespace spinio {

#if defined(__CUDACC__)

__host__ __device__ inline uint64_t load_acquire_system(const uint64_t *at)
{
#if defined(__CUDA_ARCH__)
    unsigned long long value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(at)) : "memory");
    return value;
#else
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
#endif
}

__host__ __device__ inline void store_release_system(uint64_t *at, uint64_t value)
{
#if defined(__CUDA_ARCH__)
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(at)), "l"((unsigned long long)value) : "memory");
#else
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
#endif
}

__device__ inline uint64_t load_acquire_device(const uint64_t *at)
{
    unsigned long long value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(at)) : "memory");
    return value;
}

__device__ inline void store_release_device(uint64_t *at, uint64_t value)
{
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(at)), "l"((unsigned long long)value) : "memory");
}

__device__ inline uint64_t add_acquire_device(uint64_t *at, uint64_t by)
{
    unsigned long long old;
    asm volatile("atom.acquire.gpu.global.add.u64 %0, [%1], %2;"
                 : "=l"(old)
                 : "l"(__cvta_generic_to_global(at)), "l"((unsigned long long)by)
                 : "memory");
    return old;
}

__device__ inline uint64_t add_release_device(uint64_t *at, uint64_t by)
{
    unsigned long long old;
    asm volatile("atom.release.gpu.global.add.u64 %0, [%1], %2;"
                 : "=l"(old)
                 : "l"(__cvta_generic_to_global(at)), "l"((unsigned long long)by)
                 : "memory");
    return old;
}

__device__ inline uint64_t or_acquire_device(uint64_t *at, uint64_t bits)
{
    unsigned long long old;
    asm volatile("atom.acquire.gpu.global.or.b64 %0, [%1], %2;"
                 : "=l"(old)
                 : "l"(__cvta_generic_to_global(at)), "l"((unsigned long long)bits)
                 : "memory");
    return old;
}

__device__ inline uint64_t and_release_device(uint64_t *at, uint64_t bits)
{
    unsigned long long old;
    asm volatile("atom.release.gpu.global.and.b64 %0, [%1], %2;"
                 : "=l"(old)
                 : "l"(__cvta_generic_to_global(at)), "l"((unsigned long long)bits)
                 : "memory");
    return old;
}

// Bytes that are read in host memory.
__device__ inline void count_ring_bytes(size_t) {}

// A load for which the thread does not wait before it uses the value; it orders nothing before the next fence.
__device__ inline uint64_t load_ahead_system(const uint64_t *at)
{
    unsigned long long value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(at)) : "memory");
    return value;
}

// Return the old value; without order.
__device__ inline uint64_t or_relaxed_device(uint64_t *at, uint64_t bits)
{
    unsigned long long old;
    asm volatile("atom.relaxed.gpu.global.or.b64 %0, [%1], %2;"
                 : "=l"(old)
                 : "l"(__cvta_generic_to_global(at)), "l"((unsigned long long)bits)
                 : "memory");
    return old;
}

__device__ inline uint64_t exchange_relaxed_device(uint64_t *at, uint64_t value)
{
    unsigned long long old;
    asm volatile("atom.relaxed.gpu.global.exch.b64 %0, [%1], %2;"
                 : "=l"(old)
                 : "l"(__cvta_generic_to_global(at)), "l"((unsigned long long)value)
                 : "memory");
    return old;
}

// Of 4 bytes.
__device__ inline uint32_t exchange_relaxed_device(uint32_t *at, uint32_t value)
{
    uint32_t old;
    asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(old) : "l"(__cvta_generic_to_global(at)), "r"(value) : "memory");
    return old;
}

// The same of 8 bytes with release order.
__device__ inline uint64_t exchange_release_device(uint64_t *at, uint64_t value)
{
    unsigned long long old;
    asm volatile("atom.release.gpu.global.exch.b64 %0, [%1], %2;"
                 : "=l"(old)
                 : "l"(__cvta_generic_to_global(at)), "l"((unsigned long long)value)
                 : "memory");
    return old;
}

// Acquire and release.
__device__ inline uint64_t or_device(uint64_t *at, uint64_t bits)
{
    unsigned long long old;
    asm volatile("atom.acq_rel.gpu.global.or.b64 %0, [%1], %2;"
                 : "=l"(old)
                 : "l"(__cvta_generic_to_global(at)), "l"((unsigned long long)bits)
                 : "memory");
    return old;
}

// All that this thread has done, and knows that others of its group have, comes before what it does next, for threads of this GPU.
__device__ inline void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Returns the old value: the exchange was made if that is `expected`. Acquire and release.
__device__ inline uint64_t compare_exchange_device(uint64_t *at, uint64_t expected, uint64_t wanted)
{
    unsigned long long old;
    asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(old)
                 : "l"(__cvta_generic_to_global(at)), "l"((unsigned long long)expected), "l"((unsigned long long)wanted)
                 : "memory");
    return old;
}

// The same with acquire order only, which waits for no earlier store.
__device__ inline uint64_t compare_exchange_acquire_device(uint64_t *at, uint64_t expected, uint64_t wanted)
{
    unsigned long long old;
    asm volatile("atom.acquire.gpu.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(old)
                 : "l"(__cvta_generic_to_global(at)), "l"((unsigned long long)expected), "l"((unsigned long long)wanted)
                 : "memory");
    return old;
}

// The same without order.
__device__ inline uint64_t compare_exchange_relaxed_device(uint64_t *at, uint64_t expected, uint64_t wanted)
{
    unsigned long long old;
    asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(old)
                 : "l"(__cvta_generic_to_global(at)), "l"((unsigned long long)expected), "l"((unsigned long long)wanted)
                 : "memory");
    return old;
}

#else

// What accesses cost on a GPU, counted here: the tests compare it with what the design says. Of the blocks that this thread
// runs, so of one block where all are resident.
namespace emulation {

struct HostAccesses {
    uint64_t reads;    // of host memory, each of which the GPU waits for
    uint64_t releases; // stores and fences that wait until all earlier stores have arrived
    uint64_t bytes;    // read in rings
};

inline thread_local HostAccesses host_accesses;

inline void count(uint64_t &counter, uint64_t by)
{
    __atomic_fetch_add(&counter, by, __ATOMIC_RELAXED);
}

inline void count_release()
{
    count(host_accesses.releases, 1);
}

} // namespace emulation

inline void count_ring_bytes(size_t bytes)
{
    emulation::count(emulation::host_accesses.bytes, bytes);
}

inline uint64_t load_acquire_system(const uint64_t *at)
{
    emulation::count(emulation::host_accesses.reads, 1);
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

inline void store_release_system(uint64_t *at, uint64_t value)
{
    emulation::count_release();
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
}

inline uint64_t load_acquire_device(const uint64_t *at)
{
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

inline uint64_t load_ahead_system(const uint64_t *at)
{
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

inline void store_release_device(uint64_t *at, uint64_t value)
{
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
}

// ThreadSanitizer knows no fences: the operations before and after these have the order.
inline uint64_t or_relaxed_device(uint64_t *at, uint64_t bits)
{
    return __atomic_fetch_or(at, bits, __ATOMIC_ACQ_REL);
}

inline uint64_t exchange_relaxed_device(uint64_t *at, uint64_t value)
{
    return __atomic_exchange_n(at, value, __ATOMIC_ACQ_REL);
}

inline uint32_t exchange_relaxed_device(uint32_t *at, uint32_t value)
{
    return __atomic_exchange_n(at, value, __ATOMIC_ACQ_REL);
}

inline uint64_t exchange_release_device(uint64_t *at, uint64_t value)
{
    return __atomic_exchange_n(at, value, __ATOMIC_ACQ_REL);
}

inline uint64_t or_device(uint64_t *at, uint64_t bits)
{
    return __atomic_fetch_or(at, bits, __ATOMIC_ACQ_REL);
}

inline void fence_device() {}

inline uint64_t add_acquire_device(uint64_t *at, uint64_t by)
{
    return __atomic_fetch_add(at, by, __ATOMIC_ACQUIRE);
}

inline uint64_t add_release_device(uint64_t *at, uint64_t by)
{
    return __atomic_fetch_add(at, by, __ATOMIC_RELEASE);
}

inline uint64_t or_acquire_device(uint64_t *at, uint64_t bits)
{
    return __atomic_fetch_or(at, bits, __ATOMIC_ACQUIRE);
}

inline uint64_t and_release_device(uint64_t *at, uint64_t bits)
{
    return __atomic_fetch_and(at, bits, __ATOMIC_RELEASE);
}

inline uint64_t compare_exchange_device(uint64_t *at, uint64_t expected, uint64_t wanted)
{
    __atomic_compare_exchange_n(at, &expected, wanted, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return expected;
}

inline uint64_t compare_exchange_acquire_device(uint64_t *at, uint64_t expected, uint64_t wanted)
{
    __atomic_compare_exchange_n(at, &expected, wanted, false, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE);
    return expected;
}

inline uint64_t compare_exchange_relaxed_device(uint64_t *at, uint64_t expected, uint64_t wanted)
{
    __atomic_compare_exchange_n(at, &expected, wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}

#endif

// Without order: for a word that others may look at while the thread that has its lock changes it. On a GPU all 8 bytes are
// loaded and stored at once.
template <typename Unsigned>
__device__ inline Unsigned load_relaxed_device(const Unsigned *at)
{
#if defined(__CUDACC__)
    return *static_cast<const volatile Unsigned *>(at);
#else
    return __atomic_load_n(at, __ATOMIC_RELAXED);
#endif
}

__device__ inline void store_relaxed_device(uint64_t *at, uint64_t value)
{
#if defined(__CUDACC__)
    *static_cast<volatile uint64_t *>(at) = value;
#else
    __atomic_store_n(at, value, __ATOMIC_RELAXED);
#endif
}

} // namespace spinio

#endif
