// fiber.h: a thread of a block as a fiber, a stack that can be switched to.
//
//   fiber_switch(&mine, theirs):  push the callee-saved registers, store my stack pointer in `mine`,
//                                 take theirs, pop, return: there
//
// Below each stack is a guard, so that a kernel with too much on its stack ends with a fault and not with wrong bytes. It
// is larger than the local memory of a GPU's thread, so that no local array of a kernel ends below it. Each switch is
// reported to AddressSanitizer and ThreadSanitizer.
//
// A process has 65530 mappings, if its administrator does not permit more, and a resident grid 65536 threads. So a guard is
// no mapping where Linux can do that (6.13); else the first fibers have guards, and the others only as much memory.
#ifndef SPINIO_EMULATION_FIBER_H
#define SPINIO_EMULATION_FIBER_H

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>

#include <spinio/emulation/sanitizers.h>

#if !defined(__x86_64__)
#error "the emulation switches stacks in x86-64 assembly"
#endif

namespace spinio::emulation {

// Bytes of a fiber's stack. A GPU's thread has a few KiB; debug builds and sanitizers take more.
#if defined(SPINIO_EMULATION_ASAN) || defined(SPINIO_EMULATION_TSAN)
constexpr size_t stack_bytes = 256 << 10;
#else
constexpr size_t stack_bytes = 64 << 10;
#endif

// The calling convention has only six callee-saved registers; the control words of the floating-point units
// are the same on all fibers of a thread.
__attribute__((naked, noinline)) inline void fiber_switch(void **, void *)
{
    __asm__("pushq %rbp\n\t"
            "pushq %rbx\n\t"
            "pushq %r12\n\t"
            "pushq %r13\n\t"
            "pushq %r14\n\t"
            "pushq %r15\n\t"
            "movq %rsp, (%rdi)\n\t"
            "movq %rsi, %rsp\n\t"
            "popq %r15\n\t"
            "popq %r14\n\t"
            "popq %r13\n\t"
            "popq %r12\n\t"
            "popq %rbx\n\t"
            "popq %rbp\n\t"
            "ret");
}

// The target of a switch: a fiber, or the CPU thread that runs them (which has a stack already).
struct Context {
    void *pointer = nullptr;
    const void *bottom = nullptr;
    size_t size = 0;
    void *fake = nullptr;
    void *thread = nullptr; // ThreadSanitizer's
};

// Switches from `from` to `to`; returns after a switch back. A context that has just begun calls `arrived` itself.
inline void arrived(Context &here, Context *left)
{
#ifdef SPINIO_EMULATION_ASAN
    const void *bottom;
    size_t size;
    __sanitizer_finish_switch_fiber(here.fake, &bottom, &size);
    if (left && !left->bottom) { // the CPU thread's own stack, whose bounds only the sanitizer knows
        left->bottom = bottom;
        left->size = size;
    }
#else
    (void)here, (void)left;
#endif
}

inline void switch_to(Context &from, Context &to)
{
#ifdef SPINIO_EMULATION_ASAN
    __sanitizer_start_switch_fiber(&from.fake, to.bottom, to.size);
#endif
#ifdef SPINIO_EMULATION_TSAN
    __tsan_switch_to_fiber(peek(to.thread), tsan_no_order);
#endif
    fiber_switch(&from.pointer, to.pointer);
    arrived(from, nullptr);
}

// What a fiber asks of its block when it leaves.
enum class Request : unsigned {
    ended,   // all threads that it ran have ended
    barrier, // its thread waits at a barrier of the block
    warp,    // its thread waits for the lanes of a mask
    pause,   // its thread waits for something else
};

// The lanes of a warp.
constexpr unsigned lanes = 32;

// A stack, the saved stack pointer, and what its thread gives to others and gets from them.
class Fiber {
public:
    // `entry` is called at the first switch, and must never return.
    explicit Fiber(void (*entry)())
    {
        void *memory = mmap(nullptr, guard + stack_bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
        if (memory == MAP_FAILED) {
            std::perror("no stack for a thread of a block");
            std::abort();
        }
        base = static_cast<char *>(memory);
        install_guard();
        context.bottom = base + guard;
        context.size = stack_bytes;
        // As after a call of `entry`: the stack pointer is 8 off a multiple of 16, and a return would jump to 0.
        auto top = reinterpret_cast<uintptr_t *>(base + guard + stack_bytes);
        *--top = 0;
        *--top = reinterpret_cast<uintptr_t>(entry);
        for (int saved = 0; saved < 6; saved++)
            *--top = 0;
        context.pointer = top;
    }

    // Its next thread is a new one for ThreadSanitizer: ordered after its block's beginning, not after another thread.
    void renew()
    {
#ifdef SPINIO_EMULATION_TSAN
        forget();
        context.thread = __tsan_create_fiber(0);
#endif
    }

    ~Fiber()
    {
        forget();
        mapped_guards -= is_mapped;
        munmap(base, guard + stack_bytes);
    }

    Fiber(const Fiber &) = delete;
    Fiber &operator=(const Fiber &) = delete;

    Context context;
    unsigned thread = 0; // the thread of the block that it currently runs
    Request request = Request::ended;
    bool vote = false;      // barrier: its predicate. pause: it begins to wait
    unsigned mask = 0;      // warp: whom it waits for, and for what
    unsigned operation = 0;
    uint64_t value = 0;     // what it gives
    unsigned given = 0;     // which lanes gave theirs, and what
    uint64_t values[lanes] = {};
    char order[2] = {};     // addresses for acquire_order, used in turn
    unsigned turn = 0;

private:
    void forget()
    {
#ifdef SPINIO_EMULATION_TSAN
        if (context.thread)
            __tsan_destroy_fiber(context.thread);
        context.thread = nullptr;
#endif
    }

    void install_guard()
    {
        constexpr int guard_install = 102; // MADV_GUARD_INSTALL, in newer headers
        if (!madvise(base, guard, guard_install))
            return;
        is_mapped = mapped_guards < most_mapped_guards && !mprotect(base, guard, PROT_NONE);
        mapped_guards += is_mapped;
        // What is too much for the stack is then in memory of no other use. No huge page: it would hold all of that.
        if (!is_mapped)
            (void)madvise(base, guard + stack_bytes, MADV_NOHUGEPAGE);
    }

    // A GPU's thread has at most 512 KiB of local memory.
    static constexpr size_t guard = 1 << 20;
    // Each is two mappings.
    static constexpr unsigned most_mapped_guards = 8192;
    static inline std::atomic<unsigned> mapped_guards{0};
    bool is_mapped = false; // the guard
    char *base;
};

} // namespace spinio::emulation

#endif
