// sanitizers.h: what AddressSanitizer and ThreadSanitizer have to know about fibers.
//
//   AddressSanitizer: which stack is in use           before and after each switch
//   ThreadSanitizer:  which thread of a kernel runs   before each switch, which orders nothing
//                     what a barrier orders           released before it, acquired after it
//
// For ThreadSanitizer each thread of a block is a thread of its own, although one CPU thread runs them all: an access
// that only the order of the fibers protects is a race, as on a GPU. What the fibers themselves share is read and
// written by peek and poke, which are no races and order nothing.
//
// Known limit: ThreadSanitizer knows no fences. There every __threadfence() is ordered with every other one, so that a
// protocol that is right by fences is silent, and some that are wrong are, too. Acquire and release operations
// (spinio/word.h) are exact.
#ifndef SPINIO_EMULATION_SANITIZERS_H
#define SPINIO_EMULATION_SANITIZERS_H

#include <atomic>
#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#define SPINIO_EMULATION_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SPINIO_EMULATION_ASAN 1
#endif
#endif

#if defined(__SANITIZE_THREAD__)
#define SPINIO_EMULATION_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SPINIO_EMULATION_TSAN 1
#endif
#endif

#ifdef SPINIO_EMULATION_ASAN
extern "C" void __sanitizer_start_switch_fiber(void **fake, const void *bottom, size_t size);
extern "C" void __sanitizer_finish_switch_fiber(void *fake, const void **bottom, size_t *size);
#endif

#ifdef SPINIO_EMULATION_TSAN
extern "C" void *__tsan_get_current_fiber(void);
extern "C" void *__tsan_create_fiber(unsigned flags);
extern "C" void __tsan_destroy_fiber(void *fiber);
extern "C" void __tsan_switch_to_fiber(void *fiber, unsigned flags);
extern "C" void __tsan_acquire(void *address);
extern "C" void __tsan_release(void *address);
#endif

namespace spinio::emulation {

#ifdef SPINIO_EMULATION_TSAN

constexpr bool checks_races = true;

// The flag of a switch that orders nothing.
constexpr unsigned tsan_no_order = 1;

// What released an address before is seen by what acquires it.
inline void release_order(void *address)
{
    __tsan_release(address);
}

inline void acquire_order(void *address)
{
    __tsan_acquire(address);
}

// A word of the emulation itself, which threads of a kernel share.
template <typename T>
T peek(const T &word)
{
    return __atomic_load_n(&word, __ATOMIC_RELAXED);
}

template <typename T>
void poke(T &word, T value)
{
    __atomic_store_n(&word, value, __ATOMIC_RELAXED);
}

inline void fence()
{
    static std::atomic<int> order;
    order.fetch_add(1, std::memory_order_seq_cst);
}

#else

constexpr bool checks_races = false;

inline void release_order(void *) {}
inline void acquire_order(void *) {}

template <typename T>
T peek(const T &word)
{
    return word;
}

template <typename T>
void poke(T &word, T value)
{
    word = value;
}

inline void fence()
{
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

#endif

} // namespace spinio::emulation

#endif
