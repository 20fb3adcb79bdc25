// The gather kernel: copies many small pieces of host memory, each to its destination in device memory.
//
//   list   [from, to, len] [from, to, len] ...      in pinned memory, as crates/device/src/traits.rs `Gathered`
//            \______________________/
//             8 per warp: fetched together, then copied one after the other, all lanes on each
//
// Reads of host memory take more than a microsecond, so each lane has as many of them in flight as it has registers
// for: eight of 16 bytes. Pieces whose addresses and length are multiples of 16 bytes are copied so; any other is copied
// in words of 4 bytes that are aligned at the destination, combined from the two source words that contain them. No
// read extends past the 4-byte words that contain the piece, so none reaches another page.

typedef unsigned long long u64;
typedef unsigned int u32;

struct piece {
    u64 from, to, len;
};

#define PIECES 8u
#define WIDE 8u

// Host memory changes between kernels: reads must bypass caches that persist across kernels.
static __device__ __forceinline__ uint4 fetch(const uint4 *at) { return __ldcv(at); }

static __device__ void copy_aligned(u64 from, u64 to, u64 len, u32 lane) {
    const uint4 *src = (const uint4 *)from;
    uint4 *dst = (uint4 *)to;
    u64 n = len / 16;
    for (u64 at = lane; at < n; at += 32 * WIDE) {
        uint4 v[WIDE];
#pragma unroll
        for (u32 i = 0; i < WIDE; i++)
            if (at + 32 * i < n) v[i] = fetch(src + at + 32 * i);
#pragma unroll
        for (u32 i = 0; i < WIDE; i++)
            if (at + 32 * i < n) dst[at + 32 * i] = v[i];
    }
}

static __device__ void copy_bytes(u64 from, u64 to, u64 len, u32 lane) {
    u64 head = (4 - (to & 3)) & 3;
    if (head > len) head = len;
    if (lane < head) *(volatile unsigned char *)(to + lane) = *(const volatile unsigned char *)(from + lane);
    from += head, to += head, len -= head;
    u64 words = len / 4;
    u32 shift = (u32)(from & 3) * 8;
    const u32 *src = (const u32 *)(from & ~(u64)3);
    u32 *dst = (u32 *)to;
    for (u64 at = lane; at < words; at += 32 * WIDE) {
        u32 lo[WIDE], hi[WIDE];
#pragma unroll
        for (u32 i = 0; i < WIDE; i++)
            if (at + 32 * i < words) {
                lo[i] = __ldcv(src + at + 32 * i);
                hi[i] = shift ? __ldcv(src + at + 32 * i + 1) : 0;
            }
#pragma unroll
        for (u32 i = 0; i < WIDE; i++)
            if (at + 32 * i < words) dst[at + 32 * i] = __funnelshift_r(lo[i], hi[i], shift);
    }
    u64 tail = len & 3;
    if (lane < tail)
        *(volatile unsigned char *)(to + 4 * words + lane) = *(const volatile unsigned char *)(from + 4 * words + lane);
}

extern "C" __global__ void __launch_bounds__(256) spinio_gather(const struct piece *list, u32 count) {
    u32 lane = threadIdx.x & 31;
    u32 warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, warps = gridDim.x * blockDim.x / 32;
    for (u32 first = warp * PIECES; first < count; first += warps * PIECES) {
        u32 n = count - first < PIECES ? count - first : PIECES;
        u64 from = 0, to = 0, len = 0;
        if (lane < n) {
            const volatile struct piece *mine = list + first + lane;
            from = mine->from, to = mine->to, len = mine->len;
        }
        // All pieces are short and aligned: every lane fetches its part of each before it stores any.
        if (__all_sync(~0u, ((from | to | len) & 15) == 0 && len <= 512)) {
            uint4 v[PIECES];
#pragma unroll
            for (u32 i = 0; i < PIECES; i++) {
                u64 f = __shfl_sync(~0u, from, i), l = __shfl_sync(~0u, len, i);
                if (lane * 16 < l) v[i] = fetch((const uint4 *)f + lane);
            }
#pragma unroll
            for (u32 i = 0; i < PIECES; i++) {
                u64 t = __shfl_sync(~0u, to, i), l = __shfl_sync(~0u, len, i);
                if (lane * 16 < l) ((uint4 *)t)[lane] = v[i];
            }
            continue;
        }
        for (u32 i = 0; i < n; i++) {
            u64 f = __shfl_sync(~0u, from, i), t = __shfl_sync(~0u, to, i), l = __shfl_sync(~0u, len, i);
            if (((f | t | l) & 15) == 0) copy_aligned(f, t, l, lane);
            else copy_bytes(f, t, l, lane);
        }
    }
}
