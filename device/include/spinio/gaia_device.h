// gaia_device.h: kernels read files that are larger than device memory, on demand.
//
//     __global__ void sum(struct spinio_gaia_reader file, uint64_t count, unsigned long long *total)
//     {
//         gaia::reader<unsigned> numbers(file);
//         uint64_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, warps = gridDim.x * blockDim.x / 32;
//         for (uint64_t at = warp * 32; at < count; at += warps * 32) {
//             unsigned number;
//             if (numbers.read(at + threadIdx.x % 32, &number) == 1)
//                 atomicAdd(total, number);
//         }
//     }
//
// The host opens the reader with spinio_gaia_reader_open() (spinio_gaia.h). A warp that needs a page does this:
//
//   tags of the page's set (8 frames) ── found ──> counts itself as user, reads, gives the frame back
//        │ not found
//        └ locks the set, takes a frame that no warp uses (CLOCK), stores a request in the ring, waits for the word of the
//          frame in host memory, copies the bytes from their slot of host memory into the frame, gives the slot back. Warps
//          that need the same page wait for its tag in device memory.
//
//   tag: page 44 bits | state 2 | polled 1 | recent 1 | users 16
//
// A warp holds one page at a time unless it pins more, so warps never wait for each other in a circle. Every wait ends: by
// the bytes, an error of the file, ETIMEDOUT (reader.timeout_ns), or ECANCELED when the program closes the reader or ends.
//
// If the page before is in the cache, the next ones are requested too: kernels that read in order find them there. What was
// requested ahead stays in its slot until a warp needs it. If it keeps all slots, warps that have waited long drop such pages.
//
// Order: bytes in the slot, then the frame's word (release by the CPU, acquire by the warp that polls), then bytes in the frame,
// then the tag (release and acquire on the device). Users leave with release, and who takes the frame acquires: no byte is
// replaced under a user. A slot is given back, with release, after all lanes have read it.
//
// Known limits: files that can only be read as a stream have no readers. All lanes of the mask must call together. A page that is
// pinned 49152 times has no further users. The first access of a page that was requested ahead reads host memory once. NVRTC cannot
// compile this header: its struct is in spinio_gaia.h, which includes the C library.
#ifndef SPINIO_GAIA_DEVICE_H
#define SPINIO_GAIA_DEVICE_H

#include <cerrno>
#include <type_traits>

#include <spinio/kernel.h>
#include <spinio/quads.h>
#include <spinio/stop.h>
#include <spinio/wait.h>
#include <spinio/word.h>
#include <spinio_gaia.h>

namespace gaia {

constexpr unsigned all_lanes = 0xffffffff;

// A frame that has a page, or a negative errno. `arrived`: the word that says where its bytes are, if the caller is the one that
// copies them into the frame; else 0.
struct taken_page {
    int64_t frame;
    uint64_t arrived;
};

// The lanes of a warp that copy a page.
struct lanes {
    unsigned number, count;
    __device__ unsigned rank() const { return number; }
    __device__ unsigned size() const { return count; }
};

// The pages of a reader; calls are made by one thread for its warp.
class pages {
public:
    __device__ explicit pages(const spinio_gaia_reader &reader) : file(reader) {}

    // The frame of a page, which stays there until it is given back.
    __device__ taken_page take(uint64_t page)
    {
        uint64_t first = set_of(page) * ways;
        spinio::Backoff waiting;
        unsigned long long began = 0;
        for (unsigned tries = 0;; tries++) {
            int64_t frame = find_and_use(first, page);
            bool claimed = false;
            if (frame < 0) {
                frame = claim(first, page, 1);
                claimed = frame >= 0;
                if (claimed)
                    request_ahead(page);
            }
            if (frame >= 0) {
                uint64_t arrived = 0;
                int64_t error = wait_for(uint64_t(frame), page, claimed, arrived);
                if (error == 0)
                    return {frame, arrived};
                give_back(frame);
                return {error, 0};
            }
            // Another warp has the lock, or all frames of the set are in use.
            if (int error = overdue(tries, began))
                return {error, 0};
            waiting.pause();
        }
    }

    // Copies the bytes of an arrived page from their slot into the frame, each lane its part.
    __device__ void copy(lanes lanes, const taken_page &page) const
    {
        const int64_t bytes = bytes_of(page.arrived);
        if (bytes <= 0)
            return;
        auto from = reinterpret_cast<const spinio::Quad *>(static_cast<uintptr_t>(file.staged) + (slot_of(page.arrived) << file.page_shift));
        auto to = reinterpret_cast<spinio::Quad *>(frame_memory(page.frame));
        // The slot and the frame have whole pages.
        spinio::copy_quads<8>(lanes, to, from, size_t(bytes + 15) / 16);
    }

    // After all lanes have copied: the slot is free, and the frame is there for all.
    __device__ void publish(const taken_page &page)
    {
        give_slot_back(page.arrived);
        spinio::store_release_device(results() + page.frame, uint64_t(bytes_of(page.arrived)));
        spinio::add_release_device(tags() + page.frame, valid - filling - polled);
    }

    // Bytes of the file in a frame that was taken, or a negative errno.
    __device__ int64_t bytes(int64_t frame) const
    {
        return int64_t(spinio::load_acquire_device(results() + frame));
    }

    __device__ void give_back(int64_t frame)
    {
        uint64_t *tag = tags() + frame, seen = spinio::load_acquire_device(tag);
        if (state_of(seen) != valid || bytes(frame) >= 0) {
            spinio::add_release_device(tag, uint64_t(-1));
            return;
        }
        // A page that could not be read is not kept: the next access tries again. Of users that leave together, one is the last.
        for (uint64_t old = 0;; seen = old) {
            old = spinio::compare_exchange_device(tag, seen, (seen & users) == 1 ? 0 : seen - 1);
            if (old == seen)
                return;
        }
    }

    __device__ const char *memory(int64_t frame) const
    {
        return frame_memory(frame);
    }

    __device__ int64_t frame_of(const void *memory) const
    {
        return int64_t((reinterpret_cast<uintptr_t>(memory) - file.frames) >> file.page_shift);
    }

    const spinio_gaia_reader file;

private:
    static constexpr unsigned ways = 8;
    static constexpr uint64_t users = 0xffff, recent = 1 << 16, polled = 1 << 17;
    static constexpr uint64_t state_bit = 1 << 18, states = 3 << 18;
    static constexpr uint64_t empty = 0, filling = state_bit, valid = 2 * state_bit;
    // All warps of a GPU, some 10,000, may count themselves at once after they have seen one user fewer.
    static constexpr uint64_t most_users = 0xc000;
    static constexpr unsigned page_bit = 20, slot_bit = 17;
    // A wait of this time drops what was requested ahead.
    static constexpr unsigned long long long_wait_ns = 8000000;

    __device__ static uint64_t *words(uint64_t at)
    {
        return reinterpret_cast<uint64_t *>(static_cast<uintptr_t>(at));
    }

    __device__ char *frame_memory(int64_t frame) const
    {
        return reinterpret_cast<char *>(static_cast<uintptr_t>(file.frames)) + (uint64_t(frame) << file.page_shift);
    }

    // Of a done word: bytes, or a negative errno; the slot of the bytes; the request.
    __device__ static int64_t bytes_of(uint64_t done)
    {
        const int32_t result = int32_t(done);
        return result < 0 ? result : result & ((1 << slot_bit) - 1);
    }

    __device__ static uint64_t slot_of(uint64_t done)
    {
        return uint32_t(done) >> slot_bit;
    }

    __device__ void give_slot_back(uint64_t done) const
    {
        if (bytes_of(done) > 0)
            spinio::store_release_system(words(file.taken) + slot_of(done), done >> 32);
    }

    __device__ uint64_t *tags() const { return words(file.tags); }
    __device__ uint64_t *tickets() const { return words(file.tickets); }
    __device__ uint64_t *results() const { return words(file.results); }

    __device__ static uint64_t state_of(uint64_t tag)
    {
        return tag & states;
    }

    __device__ static bool has(uint64_t tag, uint64_t page)
    {
        return tag >> page_bit == page && state_of(tag) != empty;
    }

    // Neighbours are in different sets, and so are the pages of files that are read with a stride.
    __device__ uint64_t set_of(uint64_t page) const
    {
        return (page ^ (page * 0x9e3779b97f4a7c15ull >> 40)) % file.sets;
    }

    // The frame of the page, with one more user; -1 if it is not there, or has all the users that it may have.
    __device__ int64_t find_and_use(uint64_t first, uint64_t page)
    {
        for (unsigned way = 0; way < ways; way++) {
            uint64_t *tag = tags() + first + way;
            const uint64_t seen = spinio::load_acquire_device(tag);
            if (!has(seen, page))
                continue;
            if ((seen & users) >= most_users)
                return -1;
            uint64_t old = spinio::add_acquire_device(tag, 1);
            if (has(old, page)) {
                if (!(old & recent))
                    spinio::or_acquire_device(tag, recent);
                return int64_t(first + way);
            }
            // Replaced in between: another page has one user too many for a moment.
            give_back(int64_t(first + way));
        }
        return -1;
    }

    __device__ bool is_there(uint64_t page) const
    {
        uint64_t first = set_of(page) * ways;
        for (unsigned way = 0; way < ways; way++)
            if (has(spinio::load_acquire_device(tags() + first + way), page))
                return true;
        return false;
    }

    // Takes a frame for a page that is in none, and requests it; -1 if the lock or all frames are in use, or the page is
    // there. `count`: the users it begins with.
    __device__ int64_t claim(uint64_t first, uint64_t page, uint64_t count)
    {
        uint64_t *lock = words(file.locks) + first / ways, before = spinio::load_acquire_device(lock);
        if (before & 1 || spinio::compare_exchange_device(lock, before, before | 1) != before)
            return -1;
        int64_t frame = is_there(page) ? -1 : replace(first, before / 2, page, count);
        if (frame >= 0) {
            request(uint64_t(frame), page);
            if (count == 0) // whichever warp needs it polls
                spinio::and_release_device(tags() + frame, ~polled);
        }
        spinio::store_release_device(lock, before + 2);
        return frame;
    }

    // CLOCK: the first frame from `hand` on that is empty, or without users and not used recently; then any without users.
    __device__ int64_t replace(uint64_t first, uint64_t hand, uint64_t page, uint64_t count)
    {
        const uint64_t wanted = page << page_bit | filling | polled | recent | count;
        for (unsigned step = 0; step < 3 * ways; step++) {
            uint64_t frame = first + (hand + step) % ways, *tag = tags() + frame;
            uint64_t seen = spinio::load_acquire_device(tag);
            if (seen & users || (step < ways && state_of(seen) != empty))
                continue;
            // Requested ahead, and not used yet: only if it has arrived.
            if (state_of(seen) == filling && (seen & polled || !has_arrived(frame)))
                continue;
            // Also of pages that were requested ahead: those that were used before them go first.
            if (seen & recent && step < 2 * ways) {
                spinio::and_release_device(tag, ~recent);
                continue;
            }
            const uint64_t unused = state_of(seen) == filling ? done_word(frame) : 0;
            if (spinio::compare_exchange_device(tag, seen, wanted) == seen) {
                give_slot_back(unused);
                return int64_t(frame);
            }
        }
        return -1;
    }

    // Gives back the slot of a page that was requested ahead, has arrived and that no warp uses: the page is in no frame then. With the
    // lock of the set, if that is free: else the page may be replaced and requested again in between, and the tag looks the same.
    __device__ void drop_unused(uint64_t frame)
    {
        uint64_t *tag = tags() + frame;
        if (!is_unused(frame, spinio::load_acquire_device(tag)))
            return;
        uint64_t *lock = words(file.locks) + frame / ways, before = spinio::load_acquire_device(lock);
        if (before & 1 || spinio::compare_exchange_device(lock, before, before | 1) != before)
            return;
        const uint64_t seen = spinio::load_acquire_device(tag);
        if (is_unused(frame, seen)) {
            const uint64_t unused = done_word(frame);
            if (spinio::compare_exchange_device(tag, seen, 0) == seen)
                give_slot_back(unused);
        }
        spinio::store_release_device(lock, before);
    }

    // Requested ahead, arrived, and not used.
    __device__ bool is_unused(uint64_t frame, uint64_t tag) const
    {
        return state_of(tag) == filling && !(tag & (users | polled)) && has_arrived(frame);
    }

    // Stores a request. A frame has one at a time, so the ring has room.
    __device__ void request(uint64_t frame, uint64_t page)
    {
        uint64_t ticket = spinio::add_acquire_device(words(file.tail), 1);
        spinio::store_release_device(tickets() + frame, ticket + 1);
        uint64_t phase = ticket / file.entries % 15 + 1;
        spinio::store_release_system(words(file.ring) + ticket % file.entries, phase << 60 | frame << 40 | page);
    }

    __device__ void request_ahead(uint64_t page)
    {
        if (!file.prefetch || page == 0 || !is_there(page - 1))
            return;
        for (uint64_t next = page + 1; next <= page + file.prefetch && next << file.page_shift < file.size; next++)
            if (!is_there(next))
                claim(set_of(next) * ways, next, 0);
    }

    __device__ uint64_t done_word(uint64_t frame) const
    {
        return spinio::load_acquire_system(words(file.done) + frame);
    }

    __device__ bool has_arrived(uint64_t frame) const
    {
        return uint32_t(done_word(frame) >> 32) == uint32_t(spinio::load_acquire_device(tickets() + frame));
    }

    // Waits until a frame that is in use has its bytes, or until they have arrived in a slot and the caller copies them: 0, or a
    // negative errno if it gives up. The warp that `claimed` the frame polls for all; of a page that was requested ahead, or given
    // up, another one does.
    __device__ int64_t wait_for(uint64_t frame, uint64_t page, bool claimed, uint64_t &arrived)
    {
        uint64_t *tag = tags() + frame;
        uint64_t ticket = claimed ? spinio::load_acquire_device(tickets() + frame) : 0;
        bool polls = claimed, drops = false;
        // A page takes some 20 us; hundreds of warps that look more often take a part of the bus.
        spinio::Backoff waiting(8192, 0);
        unsigned long long began = 0;
        for (unsigned tries = 0;; tries++) {
            uint64_t seen = spinio::load_acquire_device(tag);
            if (state_of(seen) == valid)
                break;
            if (!polls && !(seen & polled)) {
                if (spinio::compare_exchange_device(tag, seen, seen | polled) != seen)
                    continue;
                polls = true;
                ticket = spinio::load_acquire_device(tickets() + frame);
            }
            if (polls) {
                uint64_t word = done_word(frame);
                if (uint32_t(word >> 32) == uint32_t(ticket)) {
                    arrived = word;
                    break;
                }
                if (tries % 16 == 15)
                    drops = spinio::nanoseconds() - began > long_wait_ns;
                if (drops)
                    drop_unused((ticket + tries) % (uint64_t(file.sets) * ways));
            }
            if (int error = overdue(tries, began)) {
                if (polls)
                    spinio::and_release_device(tag, ~polled);
                return error;
            }
            waiting.pause();
        }
        if (polls && !claimed)
            request_ahead(page);
        return 0;
    }

    // Whether a wait must end: an errno.
    __device__ int overdue(unsigned tries, unsigned long long &began) const
    {
        if (tries % 16 == 0 && spinio::stop_word(words(file.stop), words(file.tail) + 8))
            return -ECANCELED;
        if (!began)
            began = spinio::nanoseconds();
        return tries % 16 == 15 && spinio::nanoseconds() - began > file.timeout_ns ? -ETIMEDOUT : 0;
    }
};

// The elements of a file, whose first byte is that of element 0.
template <typename T>
class reader {
    static_assert(std::is_trivially_copyable<T>::value && (sizeof(T) & (sizeof(T) - 1)) == 0 && sizeof(T) <= 4096,
                  "elements have 1, 2, 4, ... 4096 bytes, so that none lies in two pages");

public:
    // For lanes that need no element.
    static constexpr uint64_t none = ~0ull;

    __device__ explicit reader(const spinio_gaia_reader &file) : cache(file) {}

    // Elements of the file when it was opened.
    __device__ uint64_t size() const
    {
        return cache.file.size / sizeof(T);
    }

    // Reads the element that each lane names. By all lanes of `mask` together. Returns 1; 0 past the end of the file, or
    // for `none`; or a negative errno, as EIO. Lanes whose elements are in one page cost one look at the cache.
    __device__ int read(uint64_t index, T *value, unsigned mask = all_lanes)
    {
        const unsigned lane = lane_number();
        int result = 0;
        bool open = index <= most_index();
        while (unsigned left = __ballot_sync(mask, open)) {
            const int leader = __ffs(int(left)) - 1;
            const uint64_t mine = open ? page_of(index) : none, page = shuffle(mask, mine, leader);
            int64_t frame = take(mask, lane, leader, page);
            if (mine == page) {
                const int64_t bytes = frame < 0 ? frame : cache.bytes(frame);
                const uint64_t at = offset_of(index);
                if (bytes < 0) {
                    result = int(bytes);
                } else if (at + sizeof(T) <= uint64_t(bytes)) {
                    *value = *reinterpret_cast<const T *>(cache.memory(frame) + at);
                    result = 1;
                }
                open = false;
            }
            give_back(mask, lane, leader, frame);
        }
        return result;
    }

    // The elements from `index` to the end of its page, in device memory, until unpin(). By all lanes of `mask` together,
    // with the same index. Returns how many there are; 0 past the end of the file; or a negative errno. Only a positive
    // number pins. A warp that pins several pages at once may wait for itself, until the timeout.
    __device__ int64_t pin(uint64_t index, const T **elements, unsigned mask = all_lanes)
    {
        if (index > most_index())
            return 0;
        const unsigned lane = lane_number();
        const int leader = first_lane(mask);
        int64_t frame = take(mask, lane, leader, page_of(index));
        if (frame < 0)
            return frame;
        const int64_t bytes = cache.bytes(frame), at = int64_t(offset_of(index));
        *elements = reinterpret_cast<const T *>(cache.memory(frame) + at);
        const int64_t count = bytes < 0 ? bytes : bytes < at ? 0 : (bytes - at) / int64_t(sizeof(T));
        if (count <= 0)
            give_back(mask, lane, leader, frame);
        return count;
    }

    __device__ void unpin(const T *elements, unsigned mask = all_lanes)
    {
        give_back(mask, lane_number(), first_lane(mask), cache.frame_of(elements));
    }

private:
    __device__ static unsigned lane_number()
    {
        return ((threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x) % 32;
    }

    // Of those that have not ended.
    __device__ static int first_lane(unsigned mask)
    {
        return __ffs(int(__ballot_sync(mask, 1))) - 1;
    }

    __device__ static uint64_t shuffle(unsigned mask, uint64_t value, int from)
    {
        return __shfl_sync(mask, (unsigned long long)value, from);
    }

    __device__ uint64_t most_index() const
    {
        return ((1ull << 40) << cache.file.page_shift) / sizeof(T) - 1;
    }

    __device__ uint64_t page_of(uint64_t index) const
    {
        return index / ((1ull << cache.file.page_shift) / sizeof(T));
    }

    __device__ uint64_t offset_of(uint64_t index) const
    {
        return index * sizeof(T) & ((1ull << cache.file.page_shift) - 1);
    }

    // The frame of a page for all lanes, taken by one, and filled by all if its bytes have just arrived.
    __device__ int64_t take(unsigned mask, unsigned lane, int leader, uint64_t page)
    {
        taken_page taken = {0, 0};
        if (int(lane) == leader)
            taken = cache.take(page);
        taken.frame = int64_t(shuffle(mask, uint64_t(taken.frame), leader));
        taken.arrived = shuffle(mask, taken.arrived, leader);
        // What the leader has seen, all see after this: shuffles do not order memory.
        __syncwarp(mask);
        if (taken.arrived) {
            const unsigned here = __ballot_sync(mask, 1);
            cache.copy({unsigned(__popc(here & ((1u << lane) - 1))), unsigned(__popc(here))}, taken);
            __syncwarp(mask);
            if (int(lane) == leader)
                cache.publish(taken);
            __syncwarp(mask);
        }
        return taken.frame;
    }

    __device__ void give_back(unsigned mask, unsigned lane, int leader, int64_t frame)
    {
        __syncwarp(mask); // all have read
        if (int(lane) == leader && frame >= 0)
            cache.give_back(frame);
    }

    pages cache;
};

} // namespace gaia

#endif
