// inline.h: small messages inside a line. crates/ring/src/inline.rs explains their words.
//
//   recv   lanes 0-15 of a warp read the whole line in one go: word 0 says what is new, words 2-15 may have the bytes
//   send   lanes store the 14 words and the leader rings, with no fence: each word says by its phase whether it is there
//
// A word whose phase is not that of word 0 is an old one, or one that came later: the bytes are read in the ring then.
#ifndef SPINIO_NET_INLINE_H
#define SPINIO_NET_INLINE_H

#include <spinio/net/group.h>
#include <spinio/net/line.h>

namespace spinio::net::detail {

constexpr unsigned inline_bytes_a_word = 7;

__device__ inline unsigned inline_length(uint64_t word) { return unsigned(word >> layout::position_bits) & 0x7f; }
__device__ inline unsigned inline_phase(uint64_t word) { return unsigned(word >> layout::inline_phase_bit) & 0x1f; }

// The line as the lanes of a warp have it: each has its word of it, and all have the first two.
struct WideLine {
    uint64_t received, sent, mine;

    // All lanes of a warp call. One read of host memory: of 128 bytes, or of the first words only.
    __device__ static WideLine read(const uint64_t *line, unsigned words = 16)
    {
        unsigned lane = Warp::linear() % 32;
        uint64_t mine = lane < words ? load_acquire_system_once(line + lane, lane == 0) : 0;
        uint64_t received = __shfl_sync(0xffffffffu, mine, 0), sent = __shfl_sync(0xffffffffu, mine, 1);
        // Shuffles do not order memory.
        __syncwarp();
        return {received, sent, mine};
    }

    // Whether the `there` bytes that are unread are all inside the line. All lanes call.
    __device__ bool has(uint64_t there) const
    {
        unsigned lane = Warp::linear() % 32, length = inline_length(received);
        bool right = lane < layout::inline_first || lane >= 16 || (mine >> 56) == inline_phase(received);
        return __all_sync(0xffffffffu, right) && there <= length;
    }

    // The lane's bytes of the first `take` of the `there` that are unread.
    __device__ void copy_to(unsigned char *to, uint64_t there, size_t take) const
    {
        unsigned lane = Warp::linear() % 32;
        if (lane < layout::inline_first || lane >= 16)
            return;
        unsigned skipped = inline_length(received) - unsigned(there);
        for (unsigned i = 0; i < inline_bytes_a_word; i++) {
            unsigned at = (lane - layout::inline_first) * inline_bytes_a_word + i - skipped;
            if (at < take)
                to[at] = (unsigned char)(mine >> (i * 8));
        }
    }
};

// Stores a message in a host line; the group has its bytes, at most inline_bytes.
template <typename Group>
__device__ void store_inline(Group group, uint64_t *line, const unsigned char *from, unsigned bytes, unsigned phase)
{
    for (unsigned word = group.rank(); word < layout::inline_words; word += group.size()) {
        uint64_t value = uint64_t(phase) << 56;
        for (unsigned i = 0; i < inline_bytes_a_word && word * inline_bytes_a_word + i < bytes; i++)
            value |= uint64_t(from[word * inline_bytes_a_word + i]) << (i * 8);
        store_published(line + layout::inline_first + word, value);
    }
}

} // namespace spinio::net::detail

#endif
