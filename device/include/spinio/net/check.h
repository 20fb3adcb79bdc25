// check.h: checked builds: whether the threads of a group call alike.
//
//     #define SPINIO_NET_CHECK          // before the first include of spinio/, in all files of a program
//     #include <spinio/net.h>
//
// Each call then looks first whether all threads of its group passed equal arguments, and whether the lanes of a warp or a tile are
// converged. If not, all threads that called get -EINVAL, nothing has changed, and one of them prints a line:
//
//     spinio: block 3: send: threads passed different arguments
//
// That is a device printf, which appears when the host synchronises; on the emulated GPU a line on stderr. Without the define the calls
// have no instruction of it.
//
// Arguments to which the leader alone stores, and a Span, are not compared. Of an Address and of a path the bytes are.
//
// Known flaws: a block of which some warps or lanes do not call waits for them, as at any barrier. Threads that make different calls at
// the same time are mostly found, but not for certain. On a GPU each thread's local memory has the same addresses, so a buffer there looks
// equal. Lanes that the compiler has not brought together again after a branch count as diverged: __syncwarp() before the call
// brings them together. A tile is only looked at for whether so many lanes of its warp are active. The emulated GPU has no active
// lanes: there a diverged warp waits, or the emulation ends the program.
#ifndef SPINIO_NET_CHECK_H
#define SPINIO_NET_CHECK_H

#include <spinio/net/group.h>
#include <spinio/net/layout.h>

#if defined(SPINIO_NET_CHECK)

#if !defined(__CUDACC__)
#include <spinio/emulation/print.h>
#elif !defined(__CUDACC_RTC__)
#include <cstdio>
#endif

namespace spinio::net::detail {

// Each word makes one result of each hash: arguments of which one differs never look equal.
__device__ inline uint64_t mix(uint64_t hash, uint64_t word)
{
    hash ^= word;
    hash = (hash ^ hash >> 33) * 0xff51afd7ed558ccd;
    hash = (hash ^ hash >> 33) * 0xc4ceb9fe1a85ec53;
    return hash ^ hash >> 33;
}

// What is compared of an argument: an integer or a place,
template <typename Value>
__device__ auto word_of(const Value &value) -> decltype((uint64_t)value)
{
    return (uint64_t)value;
}

// the net,
__device__ inline uint64_t word_of(const Handle &net) { return net.pinned; }

// a text,
__device__ inline uint64_t word_of(const char *text)
{
    uint64_t hash = 0;
    for (size_t i = 0; i <= layout::path_bytes && text[i]; i++)
        hash = mix(hash, uint64_t((unsigned char)text[i]));
    return hash;
}

// or an Address.
template <typename Name>
__device__ auto word_of(const Name &name) -> decltype(uint64_t(name.length))
{
    uint64_t hash = name.length;
    for (unsigned i = 0; i < name.length && i < layout::address_bytes; i++)
        hash = mix(hash, name.bytes[i]);
    return hash;
}

__device__ inline void print_failure(const char *call, const char *what)
{
#if defined(__CUDACC__)
    printf("spinio: block %u: %s: %s\n", blockIdx.x, call, what);
#else
    emulation::print("spinio: block %u: %s: %s\n", blockIdx.x, call, what);
#endif
}

// Whether the lanes of the group can be converged, as far as one of them can tell without waiting for the others.
__device__ inline bool converged(Thread, const char *) { return true; }
__device__ inline bool converged(Block, const char *) { return true; }

template <typename Group>
__device__ bool converged([[maybe_unused]] Group group, [[maybe_unused]] const char *call)
{
#if defined(__CUDA_ARCH__)
    const unsigned active = __activemask();
    if (unsigned(__popc(active)) >= group.size())
        return true;
    if (Warp::linear() % 32 == unsigned(__ffs(active)) - 1)
        print_failure(call, "threads are diverged");
    return false;
#else
    return true;
#endif
}

// 0, or -EINVAL for all threads that called. The barriers are as many for each call, so that threads in different calls meet here.
template <typename Group, typename... Arguments>
__device__ int checked(Group group, const char *call, const Arguments &...arguments)
{
    if (!converged(group, call))
        return -EINVAL;
    uint64_t mine = word_of(call);
    ((mine = mix(mine, word_of(arguments))), ...);
    const bool differs = uint64_t(share(group, int64_t(mine))) != mine;
    if (!group.any(differs))
        return 0;
    if (group.leads())
        print_failure(call, "threads passed different arguments");
    return -EINVAL;
}

} // namespace spinio::net::detail

// At the beginning of a call: its group, its name and what is compared.
#define SPINIO_CHECK_CALL(...)                                                                                         \
    if (int unequal = ::spinio::net::detail::checked(__VA_ARGS__))                                                     \
    return unequal

#else

// A macro, since a function that does nothing still made other code of the calls.
#define SPINIO_CHECK_CALL(...) static_cast<void>(0)

#endif

#endif
