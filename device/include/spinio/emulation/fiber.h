// fiber.h: a thread of a block as a fiber, a stack that can be switched to.
//
//   fiber_switch(&mine, theirs):  push the callee-saved registers, store my stack pointer in `mine`,
//                                 take theirs, pop, return: there
//
// Below each stack is a guard page, so that a kernel with too much on its stack ends with a fault and not with wrong
// bytes. Each switch is reported to AddressSanitizer.
#ifndef SPINIO_EMULATION_FIBER_H
#define SPINIO_EMULATION_FIBER_H

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>

#if !defined(__x86_64__)
#error "the emulation switches stacks in x86-64 assembly"
#endif

#if defined(__SANITIZE_ADDRESS__)
#define SPINIO_EMULATION_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SPINIO_EMULATION_ASAN 1
#endif
#endif

#ifdef SPINIO_EMULATION_ASAN
extern "C" void __sanitizer_start_switch_fiber(void **fake, const void *bottom, size_t size);
extern "C" void __sanitizer_finish_switch_fiber(void *fake, const void **bottom, size_t *size);
#endif

namespace spinio::emulation {

// Bytes of a fiber's stack. A GPU's thread has a few KiB; debug builds and sanitizers take more.
#ifdef SPINIO_EMULATION_ASAN
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
    fiber_switch(&from.pointer, to.pointer);
    arrived(from, nullptr);
}

// A stack, and the saved stack pointer.
class Fiber {
public:
    // `entry` is called at the first switch, and must never return.
    explicit Fiber(void (*entry)())
    {
        void *memory = mmap(nullptr, guard + stack_bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory, guard, PROT_NONE)) {
            std::perror("no stack for a thread of a block");
            std::abort();
        }
        base = static_cast<char *>(memory);
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

    ~Fiber()
    {
        munmap(base, guard + stack_bytes);
    }

    Fiber(const Fiber &) = delete;
    Fiber &operator=(const Fiber &) = delete;

    Context context;
    unsigned thread = 0; // the thread of the block that it currently runs

private:
    static constexpr size_t guard = 4096;
    char *base;
};

} // namespace spinio::emulation

#endif
