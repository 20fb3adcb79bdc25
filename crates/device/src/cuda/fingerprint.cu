// The fingerprint kernel: 128 bits for each page, as crates/device/src/fingerprint.rs defines them.
//
//   page   |lane 0|lane 1| ... |lane 31|lane 0| ...      16 bytes (two words) each, 8 rounds, coalesced
//            \______\____________/
//             sums of both mixes, added up across the warp; lane 0 stores them
//
// One warp per page. The sum has no order, so neither has the warp's reduction.

typedef unsigned long long u64;
typedef unsigned int u32;

#define PAGE_WORDS 512u

static __device__ __forceinline__ u64 mix_a(u64 x) {
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdull;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ull;
    return x ^ (x >> 33);
}

static __device__ __forceinline__ u64 mix_b(u64 x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

extern "C" __global__ void __launch_bounds__(256) spinio_fingerprint(const ulonglong2 *pages, u64 count, ulonglong2 *out) {
    u32 lane = threadIdx.x & 31;
    u64 warp = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 32, warps = (u64)gridDim.x * blockDim.x / 32;
    for (u64 page = warp; page < count; page += warps) {
        const ulonglong2 *words = pages + page * (PAGE_WORDS / 2);
        ulonglong2 v[PAGE_WORDS / 64];
#pragma unroll
        for (u32 i = 0; i < PAGE_WORDS / 64; i++) v[i] = words[32 * i + lane];
        u64 low = 0, high = 0;
#pragma unroll
        for (u32 i = 0; i < PAGE_WORDS / 64; i++) {
            u64 at = 2 * (u64)(32 * i + lane);
            u64 a = v[i].x ^ ((at + 1) * 0x9e3779b97f4a7c15ull), b = v[i].y ^ ((at + 2) * 0x9e3779b97f4a7c15ull);
            low += mix_a(a) + mix_a(b);
            high += mix_b(a) + mix_b(b);
        }
#pragma unroll
        for (u32 step = 16; step; step /= 2) {
            low += __shfl_xor_sync(~0u, low, step);
            high += __shfl_xor_sync(~0u, high, step);
        }
        if (!lane) out[page] = make_ulonglong2(low, high);
    }
}
