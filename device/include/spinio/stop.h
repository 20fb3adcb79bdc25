// stop.h: how waiting threads of a GPU see that the program stops them.
//
//   stop word in host memory ── read by one thread, 50 us after the last time ──> two words in device memory <── read by all who wait
//
// Reads of one line of host memory take about 1 us each, one after the other, and whatever else goes between GPU and host waits
// for them: with the word read by 528 warps, each every 100 us, a copy of 4 KiB by a copy engine took 1 ms instead of 7 us
// (H100). So no word of host memory may be polled by many.
#ifndef SPINIO_STOP_H
#define SPINIO_STOP_H

#include <spinio/kernel.h>
#include <spinio/standard.h>
#include <spinio/wait.h>
#include <spinio/word.h>

namespace spinio {

constexpr uint64_t stop_interval_ns = 50000;

// The stop word, as it was at most so long ago. `words`: two words of device memory, zero at first: when the word was read last,
// and what it was. It never falls.
__device__ SPINIO_OUTLINE inline uint64_t stop_word(const uint64_t *host, uint64_t *words)
{
    const uint64_t seen = load_acquire_device(words + 1);
    const uint64_t before = load_relaxed_device(words), now = nanoseconds();
    if (now - before < stop_interval_ns || compare_exchange_relaxed_device(words, before, now) != before)
        return seen;
    const uint64_t value = load_acquire_system(host);
    if (value > seen)
        store_release_device(words + 1, value);
    return value;
}

} // namespace spinio

#endif
