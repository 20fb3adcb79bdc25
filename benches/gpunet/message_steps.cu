// What a message between two blocks costs, step by step. argv: none. Prints one line a variant, same GPU and two GPUs.
#include <cstdint>
#include <cstdio>
#include <cuda_runtime.h>
typedef unsigned long long u64;
#define CK(x) do { cudaError_t e = (x); if (e) { printf("%s: %s\n", #x, cudaGetErrorString(e)); return 1; } } while (0)
__device__ u64 ld_acq(const u64 *p) { u64 v; asm volatile("ld.acquire.sys.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
__device__ u64 ld_acq_gpu(const u64 *p) { u64 v; asm volatile("ld.acquire.gpu.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
__device__ u64 ld_rlx(const u64 *p) { u64 v; asm volatile("ld.relaxed.sys.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
__device__ void st_rel(u64 *p, u64 v) { asm volatile("st.release.sys.global.u64 [%0],%1;" :: "l"(p), "l"(v) : "memory"); }
__device__ void st_rlx(u64 *p, u64 v) { asm volatile("st.relaxed.sys.global.u64 [%0],%1;" :: "l"(p), "l"(v) : "memory"); }
__device__ u64 xchg_rel(u64 *p, u64 v) { u64 o; asm volatile("atom.exch.release.gpu.global.b64 %0,[%1],%2;" : "=l"(o) : "l"(p), "l"(v) : "memory"); return o; }
__device__ u64 cas_rlx(u64 *p, u64 c, u64 v) { u64 o; asm volatile("atom.cas.relaxed.gpu.global.b64 %0,[%1],%2,%3;" : "=l"(o) : "l"(p), "l"(c), "l"(v) : "memory"); return o; }
__device__ void st_rlx_gpu(u64 *p, u64 v) { asm volatile("st.relaxed.gpu.global.u64 [%0],%1;" :: "l"(p), "l"(v) : "memory"); }
struct Area { u64 tail[16]; u64 lock[16]; u64 fields[16]; u64 line[16]; u64 data[8192]; };
__device__ u64 share(u64 v) { __shared__ u64 s; if (threadIdx.x == 0) s = v; __syncthreads(); v = s; __syncthreads(); return v; }
// variants: bit 0 barriers, bit 1 data with release, bit 2 exchange instead of store, bit 3 locks and fields, bit 4 self-validating words
template <int V> __global__ void pingpong(Area *mine, Area *theirs, Area *own, int first, int rounds, u64 *out, u64 *buffer)
{
    int t = threadIdx.x;
    u64 sum = 0;
    for (int r = 1; r <= rounds; r++) {
        for (int half = 0; half < 2; half++) {
            if ((half == 0) == first) { // send
                u64 ok = 0;
                if (V & 8) {
                    if (t == 0) {
                        u64 old = ld_acq_gpu(&own->lock[0]);
                        ok = cas_rlx(&own->lock[0], old, old | 1ull << 63);
                        for (int i = 0; i < 7; i++) ok += ld_rlx(&own->fields[i]);
                    }
                }
                if (V & 1) ok = share(ok);
                if (V & 16) {
                    if (t < 10) st_rlx(&theirs->line[t], (buffer[t] & 0xffffffffffffffull) | (u64)(r & 255) << 56);
                } else if (V & 2) {
                    if (t < 4) ((ulonglong2 *)theirs->data)[(r * 4 + t) & 4095] = ((ulonglong2 *)buffer)[t];
                    __syncthreads();
                    if (t == 0) { if (V & 4) { sum += xchg_rel(theirs->tail, r); __threadfence(); } else st_rel(theirs->tail, r); }
                } else if (t == 0) st_rlx(theirs->tail, r);
                if (V & 8 && t == 0) st_rlx_gpu(&own->lock[0], r + ok * 0);
            } else {
                u64 seen = 0;
                if (V & 8) {
                    if (t == 0) {
                        u64 old = ld_acq_gpu(&own->lock[8]);
                        seen = cas_rlx(&own->lock[8], old, old | 1ull << 63) * 0;
                        for (int i = 8; i < 15; i++) seen += ld_rlx(&own->fields[i]);
                    }
                }
                if (V & 16) {
                    if (t < 32) {
                        u64 w;
                        do { w = t < 10 ? ld_rlx(&mine->line[t]) : (u64)(r & 255) << 56; } while (!__all_sync(~0u, (w >> 56) == (u64)(r & 255)));
                        if (t < 10) buffer[t] = w;
                        seen = w;
                    }
                    if (V & 1) seen = share(seen);
                    if (V & 1) __syncthreads();
                } else {
                    if (t == 0) while (((V & 4) ? ld_acq_gpu(mine->tail) : ld_acq(mine->tail)) != (u64)r) {}
                    if (V & 1) seen = share(seen);
                    if (V & 2) {
                        if (t < 4) ((ulonglong2 *)buffer)[t] = ((volatile ulonglong2 *)mine->data)[(r * 4 + t) & 4095].x ? make_ulonglong2(1, 2) : make_ulonglong2(3, 4);
                        __syncthreads();
                    }
                }
                if (V & 8 && t == 0) st_rlx_gpu(&own->lock[8], r + seen * 0);
                sum += seen;
            }
        }
    }
    if (t == 0) out[0] = sum;
}
template <int V> int row(const char *name, int two)
{
    Area *a, *b, *ao, *bo; u64 *o0, *o1, *f0, *f1;
    cudaStream_t s0, s1; cudaEvent_t e0, e1;
    int d1 = two ? 1 : 0;
    CK(cudaSetDevice(0)); CK(cudaMalloc(&a, sizeof(Area))); CK(cudaMalloc(&ao, sizeof(Area))); CK(cudaMalloc(&o0, 64)); CK(cudaMalloc(&f0, 4096)); CK(cudaMemset(a, 0, sizeof(Area))); CK(cudaMemset(ao, 0, sizeof(Area)));
    CK(cudaStreamCreateWithFlags(&s0, cudaStreamNonBlocking)); CK(cudaEventCreate(&e0)); CK(cudaEventCreate(&e1));
    CK(cudaDeviceSynchronize());
    CK(cudaSetDevice(d1)); CK(cudaMalloc(&b, sizeof(Area))); CK(cudaMalloc(&bo, sizeof(Area))); CK(cudaMalloc(&o1, 64)); CK(cudaMalloc(&f1, 4096)); CK(cudaMemset(b, 0, sizeof(Area))); CK(cudaMemset(bo, 0, sizeof(Area)));
    CK(cudaStreamCreateWithFlags(&s1, cudaStreamNonBlocking)); CK(cudaDeviceSynchronize());
    // Lazy loading: a launch of no rounds first, on both.
    pingpong<V><<<1, 256, 0, s1>>>(b, a, bo, 0, 0, o1, f1); CK(cudaStreamSynchronize(s1));
    CK(cudaSetDevice(0)); pingpong<V><<<1, 256, 0, s0>>>(a, b, ao, 1, 0, o0, f0); CK(cudaStreamSynchronize(s0));
    const int rounds = 20000;
    CK(cudaSetDevice(d1)); pingpong<V><<<1, 256, 0, s1>>>(b, a, bo, 0, rounds, o1, f1);
    CK(cudaSetDevice(0)); CK(cudaEventRecord(e0, s0)); pingpong<V><<<1, 256, 0, s0>>>(a, b, ao, 1, rounds, o0, f0); CK(cudaEventRecord(e1, s0));
    CK(cudaStreamSynchronize(s0)); CK(cudaStreamSynchronize(s1));
    float ms; CK(cudaEventElapsedTime(&ms, e0, e1));
    printf("%-60s %s %.2f us\n", name, two ? "two GPUs" : "one GPU ", ms * 1e3 / rounds);
    return 0;
}
int main()
{
    int n = 0; CK(cudaGetDeviceCount(&n));
    if (n > 1) { CK(cudaSetDevice(0)); CK(cudaDeviceEnablePeerAccess(1, 0)); CK(cudaSetDevice(1)); CK(cudaDeviceEnablePeerAccess(0, 0)); }
    for (int two = 0; two < (n > 1 ? 2 : 1); two++) {
        row<0>("words", two);
        row<1>("words, block barriers", two);
        row<3>("64 bytes, st.release, ld.acquire.sys", two);
        row<7>("64 bytes, exchange.release.gpu + fence, ld.acquire.gpu", two);
        row<11>("64 bytes, st.release, locks and fields", two);
        row<15>("64 bytes, exchange, locks and fields", two);
        row<16>("self-validating words, no barriers", two);
        row<17>("self-validating words, barriers", two);
        row<25>("self-validating words, barriers, locks and fields", two);
    }
}
