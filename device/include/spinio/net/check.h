// check.h: checked builds: whether the threads of a group call alike.
//
//     #define SPINIO_NET_CHECK          // before the first include of spinio/, in all files of a program
//     #include <spinio/net.h>
//
// Each call then looks first whether all threads of its group have come, for a second, and whether they passed equal arguments. If not, all
// threads that called get -EINVAL, nothing has changed, and one of them prints a line:
//
//     spinio: block 3: send: threads passed different arguments
//     spinio: block 3: send: 5 of 64 threads call
//
// That is a device printf, which appears when the host synchronises; on the emulated GPU a line on stderr. Without the define the calls
// have no instruction of it.
//
//   a thread ── arrivals of its warp or block: + 1 ── all there ──> barrier, 0, barrier ── hashes are equal? ──> the call
//                                                  └ not within a second: - 1 ──> -EINVAL
//
// Arguments to which the leader alone stores, and a Span, are not compared. Of an Address and of a path the bytes are.
//
// Known flaws: threads that make different calls at the same time are mostly found, but not for certain. On a GPU each thread's local memory
// has the same addresses, so a buffer there looks equal. Of a tile it is not seen that a thread does not call: the others wait. Shared
// memory has any content when a block begins: a kernel that an error ended in a call may leave arrivals, which a later block on
// the same processor counts once.
#ifndef SPINIO_NET_CHECK_H
#define SPINIO_NET_CHECK_H

#include <spinio/net/group.h>
#include <spinio/net/layout.h>
#include <spinio/wait.h>
#include <spinio/word.h>

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
    for (size_t i = 0; text && i <= layout::path_bytes && text[i]; i++)
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

__device__ inline void print_missing(const char *call, unsigned came, unsigned size)
{
#if defined(__CUDACC__)
    printf("spinio: block %u: %s: %u of %u threads call\n", blockIdx.x, call, came, size);
#else
    emulation::print("spinio: block %u: %s: %u of %u threads call\n", blockIdx.x, call, came, size);
#endif
}

// A word of shared memory: how many threads of a group have come, whether one has given up, and bits that say that it is such a word.
constexpr uint64_t arrivals_tag = 0x7350494e636f0000, arrivals_mask = 0x7fff, arrivals_late = 0x8000, patience_ns = 1'000'000'000;

__device__ inline bool change_arrivals(uint64_t *word, uint64_t from, uint64_t to)
{
    return atomicCAS(reinterpret_cast<unsigned long long *>(word), (unsigned long long)from, (unsigned long long)to) == from;
}

// Whether all threads come within a second; one that gives up leaves. The first one to do so prints.
__device__ inline bool all_come(uint64_t *word, unsigned size, const char *call)
{
    for (;;) {
        const uint64_t old = load_relaxed_device(word), tag = old & ~(arrivals_mask | arrivals_late);
        if (change_arrivals(word, old, (tag == arrivals_tag ? old : arrivals_tag) + 1))
            break;
    }
    const uint64_t late = nanoseconds() + patience_ns;
    Backoff waiting;
    for (;;) {
        const uint64_t now = load_relaxed_device(word);
        const unsigned came = unsigned(now & arrivals_mask);
        if (came >= size)
            return true;
        if (nanoseconds() > late && change_arrivals(word, now, came == 1 ? arrivals_tag : (now - 1) | arrivals_late)) {
            if (!(now & arrivals_late))
                print_missing(call, came, size);
            return false;
        }
        waiting.pause();
    }
}

// One for each warp, and one for the block.
__device__ inline uint64_t *arrivals(Block)
{
    __shared__ uint64_t words[33];
    return words + 32;
}

__device__ inline uint64_t *arrivals(Warp) { return arrivals(Block()) - 32 + Warp::linear() / 32; }

template <typename Group>
__device__ bool is_complete(Group group, const char *call)
{
    uint64_t *word = arrivals(group);
    if (!all_come(word, group.size(), call))
        return false;
    group.sync();
    if (group.leads())
        atomicExch(reinterpret_cast<unsigned long long *>(word), (unsigned long long)arrivals_tag);
    group.sync();
    return true;
}

__device__ inline bool is_complete(Thread, const char *) { return true; }

template <typename G>
__device__ bool is_complete(Tile<G>, const char *)
{
    return true;
}

// 0, or -EINVAL for all threads that called. The barriers are as many for each call, so that threads in different calls meet here.
template <typename Group, typename... Arguments>
__device__ int checked(Group group, const char *call, const Arguments &...arguments)
{
    if (!is_complete(group, call))
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
