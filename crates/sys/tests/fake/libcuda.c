/* A stand-in for the CUDA driver, for tests on machines without a GPU.
 *
 * Device memory is a PROT_NONE range, so that an access by the CPU or a system call fails as with GPU memory;
 * its bytes are in a second, writable mapping of the same memory file. Copies run immediately. A call that crashes the real
 * driver (with a stream or event of a destroyed context) aborts here; calls that invalidate a graph capture are counted. A
 * call from a thread without the driver's descriptor aborts too, except for pure queries.
 *
 * fake_*: controls for the tests. The rest has the driver's names, prototypes and results, as observed on a real one.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK = 0, INVALID = 1, NOMEM = 2, NOINIT = 3, NODEV = 101, BADCTX = 201, NOTFOUND = 500,
       DESTROYED = 709, ALREADY = 712, NOTREG = 713, DENIED = 800, CAPTURE = 900, IMPLICIT = 906 };
enum { DEVICES = 2 };
#define SPAN (1ull << 33) /* addresses */
#define MEMORY (1ull << 30)

typedef struct context { int device, alive; uint64_t id; } context;
typedef struct handle { char kind; context *ctx; uint64_t id; int flags; } handle; /* stream or event */
typedef struct range { uint64_t start, len, id, whole, whole_len; context *ctx; uint64_t ctx_id; int device, managed, pool, no_access, read_only, chunk, accessors; } range;
typedef struct pinned { uint64_t start, len; context *ctx; uint64_t ctx_id; int read_only; } pinned;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int up;
static context primary[DEVICES];
static uint64_t next_id = 1, next_buffer = 100;
static char *base, *bytes;
static uint64_t used;
static range ranges[256];
static pinned pins[256];
static __thread context *stack[8];
static __thread int depth;
static __thread unsigned capture_mode;
static __thread int in_callback; /* the driver rejects queries there */
static struct { uint64_t start, len; } reserved[64]; /* addresses without memory */
static struct { int fd; size_t len; } chunk[256]; /* memory without addresses: memory files; the handle is the index + 1 */
static handle *captured; /* the stream being captured; other streams are affected if it is a blocking one */
static struct { uint64_t at; unsigned char byte; size_t n; } node[16]; /* the graph: its memsets, in order */
static int nodes;
static uint64_t register_most;
static int capturing, invalidated, fail_register, hold_register, in_register, fail_copy, fail_module, queries, sched;
static int live_pins, live_streams, live_events;
static _Atomic int stopped; /* streams that wait for the CPU */
static int no_stream_wait, hang;
static int pageable; /* access to memory of the process: 1 by page faults, 2 by its page tables */
static _Atomic int trap; /* of a kernel: all calls of its context fail with it */

static int descriptor = -1; /* stands for the real driver's descriptor of its kernel module */
static struct stat identity;
static void at_home(void);
static context *current(void) { return depth ? stack[depth - 1] : NULL; }
static int need(void) { context *c = current(); return in_callback ? DENIED : !up ? NOINIT : !c ? BADCTX : !c->alive ? DESTROYED : trap; }
#define NEED() do { int e_ = need(); if (e_) return e_; } while (0)
static void die(const char *why) { fprintf(stderr, "fake driver: %s: the real one would crash\n", why); abort(); }
/* Such a call may wait for all work of the device, with the driver's locks. */
static void no_stop(const char *call) { if (stopped) { fprintf(stderr, "fake driver: %s ", call); die("while a stream waits for the CPU"); } }
static void touch(handle *h, char kind) {
    if (h && (uintptr_t)h > 2 && (h->kind != kind || !h->ctx->alive || h->ctx->id != h->id)) die(kind == 's' ? "dead stream" : kind == 'e' ? "dead event" : "dead module");
}
static void at_home(void) {
    struct stat now;
    if (up && (fstat(descriptor, &now) || now.st_ino != identity.st_ino || now.st_dev != identity.st_dev)) die("a thread without the driver's descriptors");
}
static int legacy(handle *s) { return s == NULL || s == (handle *)1; }
static int spoils(handle *s) { if (capturing && legacy(s)) { invalidated++; return 1; } return 0; }
static int unsafe_in_capture(void) { if (capturing && capture_mode != 2) { invalidated++; return 1; } return 0; }
static char *at(uint64_t a) { return (char *)a >= base && (char *)a < base + SPAN ? bytes + (a - (uint64_t)base) : (char *)a; }
static range *find(uint64_t a) {
    for (int i = 0; i < 256; i++) {
        range *r = &ranges[i];
        if (r->len && a >= r->start && a < r->start + r->len && (!r->ctx || (r->ctx->alive && r->ctx->id == r->ctx_id))) return r;
    }
    return NULL;
}
static int accessible(uint64_t a, uint64_t n, int store) {
    while (n) {
        range *r = find(a);
        if (!r || r->no_access || (store && r->read_only)) return 0;
        uint64_t k = r->start + r->len - a;
        if (k > n) k = n;
        a += k; n -= k;
    }
    return 1;
}
static int covered(uint64_t a, uint64_t n) { return accessible(a, n, 0); }
static range *new_range(void) { for (int i = 0; i < 256; i++) if (!ranges[i].len) return &ranges[i]; return NULL; }
static uint64_t space(uint64_t n) { uint64_t a = (uint64_t)base + used; used += (n + 0x1fffff) & ~0x1fffffull; return used > SPAN ? 0 : a; }
static void drop_context(context *c) {
    c->alive = 0;
    for (int i = 0; i < 256; i++) { if (ranges[i].len && ranges[i].ctx == c) ranges[i].len = 0; if (pins[i].len && pins[i].ctx == c) { pins[i].len = 0; live_pins--; } }
}

/* controls */
void fake_capture(int on) { capturing = on; }
int fake_invalidated(void) { return invalidated; }
void fake_trap(int code) { trap = code; }
void fake_fail_register(int code) { fail_register = code; }
void fake_limit_register(uint64_t most) { register_most = most; }
void fake_hold_register(int on) { __atomic_store_n(&hold_register, on, __ATOMIC_RELEASE); }
int fake_in_register(void) { return __atomic_load_n(&in_register, __ATOMIC_ACQUIRE); }
void fake_fail_copy(int code) { fail_copy = code; }
void fake_fail_module(int code) { fail_module = code; }
void fake_hang(int on) { hang = on; }
void fake_no_stream_wait(int on) { no_stream_wait = on; }
int fake_queries(void) { return queries; }
static int vmm_calls;
int fake_vmm_calls(void) { return __atomic_load_n(&vmm_calls, __ATOMIC_RELAXED); }
static void count_vmm(void) { __atomic_add_fetch(&vmm_calls, 1, __ATOMIC_RELAXED); }
static int calls;
int fake_calls(void) { return __atomic_load_n(&calls, __ATOMIC_RELAXED); }
void fake_schedule(int flags) { sched = flags; }
int fake_live_pins(void) { return live_pins; }
int fake_live_streams(void) { return live_streams; }
int fake_live_events(void) { return live_events; }
/* kind: 0 of the current context, 1 of a pool, 2 managed. With near, memory directly after an earlier allocation. */
uint64_t fake_alloc(int kind, uint64_t n, uint64_t near) {
    pthread_mutex_lock(&lock);
    range *r = new_range();
    uint64_t a = near ? near : kind == 2 ? (uint64_t)mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : space(n);
    context *c = current();
    *r = (range){ a, n, next_buffer++, a, n, kind == 1 ? NULL : c, c ? c->id : 0, c ? c->device : 0, kind == 2, kind == 1, 0, 0, 0, 0 };
    pthread_mutex_unlock(&lock);
    return a;
}
/* Mappings of 2 MiB each, one per bit of `map`, in one reservation of `n` MiB. */
uint64_t fake_vmm(uint64_t n, unsigned map) {
    pthread_mutex_lock(&lock);
    uint64_t a = space(n << 20);
    for (int i = 0; i < 32; i++)
        if (map >> i & 1) *new_range() = (range){ a + ((uint64_t)i << 21), 1 << 21, next_buffer++, a, n << 20, NULL, 0, 0, 0, 0, 0, 0, 0, 0 };
    pthread_mutex_unlock(&lock);
    return a;
}
void fake_free(uint64_t a) { pthread_mutex_lock(&lock); range *r = find(a); if (r) r->len = 0; pthread_mutex_unlock(&lock); }
void fake_peek(uint64_t a, void *to, uint64_t n) { memcpy(to, at(a), n); }
context *fake_context(int device) { context *c = calloc(1, sizeof *c); *c = (context){ device, 1, next_id++ }; return c; }
void fake_destroy(context *c) { drop_context(c); }
void fake_reset(int device) { drop_context(&primary[device]); primary[device].id = 0; }

/* the driver */
int cuInit(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    if (!up) {
        int fd = memfd_create("fake", MFD_CLOEXEC);
        if (fd < 0 || ftruncate(fd, SPAN)) abort();
        bytes = mmap(0, SPAN, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        base = mmap(0, SPAN + (2 << 20), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        base = (char *)(((uintptr_t)base + 0x1fffff) & ~0x1ffffful);
        descriptor = fcntl(fd, F_DUPFD_CLOEXEC, 200); /* a high number, for programs that expect the next free one */
        fstat(descriptor, &identity);
        close(fd);
        up = 1;
    }
    pthread_mutex_unlock(&lock);
    return OK;
}
int cuGetErrorName(int e, const char **s) { *s = e ? "FAKE_ERROR" : "FAKE_SUCCESS"; return OK; }
int cuDriverGetVersion(int *v) { *v = 13000; return OK; }
int cuDeviceGetCount(int *n) { *n = DEVICES; return up ? OK : NOINIT; }
int cuDeviceGet(int *d, int o) { *d = o; return !up ? NOINIT : o < DEVICES ? OK : NODEV; }
int cuDeviceGetName(char *s, int n, int d) { snprintf(s, n, "Fake GPU %d", d); return OK; }
int cuDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:0%d:00.0", d + 1); return OK; }
int cuDeviceTotalMem_v2(size_t *n, int d) { (void)d; *n = MEMORY; return OK; }
int cuDeviceGetAttribute(int *v, int a, int d) {
    (void)d;
    *v = a == 99 || a == 102 || a == 103 || a == 113 || (a == 88 && pageable) || (a == 100 && pageable == 2);
    return OK;
}
void fake_pageable(int how) { pageable = how; }

static int answer(void *to, int which, range *r, pinned *p, uint64_t a) {
    switch (which) {
    case 1: *(void **)to = r ? (void *)r->ctx : (void *)p->ctx; return OK;
    case 2: *(unsigned *)to = r ? 2 : 1; return OK;
    case 7: *(uint64_t *)to = r ? r->id : p->start; return OK;
    case 8: *(unsigned *)to = r ? r->managed : 0; return OK;
    case 9: *(int *)to = r ? r->device : 0; return OK;
    case 11: *(uint64_t *)to = r ? r->whole : p->start; return OK;
    case 12: *(size_t *)to = r ? r->whole_len : p->len; return OK;
    }
    (void)a;
    return INVALID;
}
static pinned *pin_at(uint64_t a) { for (int i = 0; i < 256; i++) if (pins[i].len && a >= pins[i].start && a < pins[i].start + pins[i].len) return &pins[i]; return NULL; }
int cuPointerGetAttribute(void *to, int which, uint64_t a) {
    if (in_callback || !up) return in_callback ? DENIED : NOINIT;
    pthread_mutex_lock(&lock);
    queries++;
    range *r = find(a); pinned *p = pin_at(a);
    int e = r || p ? answer(to, which, r, p, a) : INVALID;
    pthread_mutex_unlock(&lock);
    return e;
}
int cuPointerGetAttributes(unsigned n, const int *which, void **to, uint64_t a) {
    if (in_callback || !up) return in_callback ? DENIED : NOINIT;
    errno = ENOTTY; /* the driver may change errno */
    pthread_mutex_lock(&lock);
    queries++;
    range *r = find(a); pinned *p = pin_at(a);
    for (unsigned i = 0; i < n; i++) {
        if (r || p) answer(to[i], which[i], r, p, a);
        else if (which[i] == 9) *(int *)to[i] = -2;
        else if (which[i] == 1 || which[i] == 7 || which[i] == 11 || which[i] == 12) *(uint64_t *)to[i] = 0;
        else *(unsigned *)to[i] = 0;
    }
    pthread_mutex_unlock(&lock);
    return OK;
}
int cuMemGetAddressRange_v2(uint64_t *s, size_t *n, uint64_t a) { NEED(); range *r = find(a); if (!r) return NOTFOUND; *s = r->start; *n = r->len; return OK; }

int cuCtxGetCurrent(context **c) { if (in_callback || !up) return in_callback ? DENIED : NOINIT; *c = current(); return OK; }
int cuCtxSetCurrent(context *c) { if (!up) return NOINIT; if (!c) depth = 0; else if (depth) stack[depth - 1] = c; else stack[depth++] = c; return OK; }
int cuCtxPushCurrent_v2(context *c) { if (depth == 8) return INVALID; stack[depth++] = c; return OK; }
int cuCtxPopCurrent_v2(context **c) { if (!depth) return BADCTX; *c = stack[--depth]; return OK; }
int cuCtxGetDevice(int *d) { NEED(); *d = current()->device; return OK; }
int cuCtxGetFlags(unsigned *f) { NEED(); *f = sched; return OK; }
int cuCtxSynchronize(void) { NEED(); return OK; }
int cuCtxGetId(context *c, uint64_t *id) { if (!c) c = current(); if (!c) return BADCTX; if (!c->alive) return DESTROYED; *id = c->id; return OK; }
int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { *f = sched; *a = primary[d].alive; return OK; }
int cuDevicePrimaryCtxRetain(context **c, int d) { if (!primary[d].alive) primary[d] = (context){ d, 1, next_id++ }; *c = &primary[d]; return OK; }
int cuDevicePrimaryCtxRelease_v2(int d) { (void)d; return OK; }

int cuMemHostRegister_v2(void *p, size_t n, unsigned flags) {
    at_home();
    no_stop("cuMemHostRegister");
    NEED();
    if (unsafe_in_capture()) return CAPTURE;
    if (fail_register) return fail_register;
    __atomic_add_fetch(&in_register, 1, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(&hold_register, __ATOMIC_ACQUIRE)) usleep(50);
    __atomic_sub_fetch(&in_register, 1, __ATOMIC_ACQ_REL);
    if (register_most && n > register_most) return NOMEM;
    pthread_mutex_lock(&lock);
    int e = pin_at((uint64_t)p) ? ALREADY : NOMEM;
    for (int i = 0; e == NOMEM && i < 256; i++)
        if (!pins[i].len) { pins[i] = (pinned){ (uint64_t)p, n, current(), current()->id, flags & 8 }; live_pins++; e = OK; }
    pthread_mutex_unlock(&lock);
    return e;
}
int cuMemHostUnregister(void *p) {
    at_home();
    no_stop("cuMemHostUnregister");
    NEED();
    if (unsafe_in_capture()) return CAPTURE;
    pthread_mutex_lock(&lock);
    pinned *q = pin_at((uint64_t)p);
    int e = q && q->start == (uint64_t)p ? OK : NOTREG;
    if (!e) { q->len = 0; live_pins--; }
    pthread_mutex_unlock(&lock);
    return e;
}
int cuMemAlloc_v2(uint64_t *a, size_t n) { at_home(); no_stop("cuMemAlloc"); NEED(); if (unsafe_in_capture()) return CAPTURE; *a = fake_alloc(0, n, 0); return *a ? OK : NOMEM; }
int cuMemFree_v2(uint64_t a) { at_home(); no_stop("cuMemFree"); NEED(); fake_free(a); return OK; }
/* Copies of the program may occupy the engine, and wait for the CPU. */
static int is_beside(void) { char name[16] = ""; prctl(PR_GET_NAME, name); return !strcmp(name, "spinio-gaia-ord"); }
static void no_engine(void) { if (is_beside()) die("a copy engine beside stopped streams"); }
static int copy(uint64_t device, handle *s) { __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED); at_home(); no_engine(); NEED(); (void)device; touch(s, 's'); if (spoils(s)) return IMPLICIT; if (fail_copy) return fail_copy; return OK; }
int cuMemcpyHtoDAsync_v2(uint64_t d, const void *p, size_t n, handle *s) { int e = copy(d, s); if (e) return e; if (!accessible(d, n, 1)) return INVALID; memcpy(at(d), p, n); return OK; }
int cuMemcpyDtoHAsync_v2(void *p, uint64_t d, size_t n, handle *s) { int e = copy(d, s); if (e) return e; if (!covered(d, n)) return INVALID; memcpy(p, at(d), n); return OK; }

static handle *new_handle(char kind, int flags) { handle *h = malloc(sizeof *h); *h = (handle){ kind, current(), current()->id, flags }; return h; }
int cuStreamCreate(handle **s, unsigned f) { at_home(); no_stop("cuStreamCreate"); NEED(); *s = new_handle('s', f); live_streams++; return OK; }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { NEED(); *least = 0, *greatest = -5; return OK; }
int cuStreamCreateWithPriority(handle **s, unsigned f, int priority) { if (!(f & 1) && priority < -4) die("a blocking stream beside stops"); return cuStreamCreate(s, f); }
int cuStreamDestroy_v2(handle *s) { touch(s, 's'); live_streams--; free(s); return OK; }
int cuStreamSynchronize(handle *s) { at_home(); NEED(); touch(s, 's'); if (unsafe_in_capture()) return CAPTURE; return spoils(s) ? IMPLICIT : OK; }
int cuStreamQuery(handle *s) { NEED(); touch(s, 's'); if (unsafe_in_capture()) return CAPTURE; return spoils(s) ? IMPLICIT : OK; }
int cuStreamWaitEvent(handle *s, handle *e, unsigned f) { (void)f; at_home(); NEED(); touch(s, 's'); touch(e, 'e'); return spoils(s) ? IMPLICIT : OK; }
int cuStreamIsCapturing(handle *s, int *status) { NEED(); touch(s, 's'); if (capturing && legacy(s)) return IMPLICIT; *status = s && s == captured; return OK; }
int cuThreadExchangeStreamCaptureMode(unsigned *m) { unsigned old = capture_mode; capture_mode = *m; *m = old; return OK; }
int cuEventCreate(handle **e, unsigned f) { at_home(); NEED(); *e = new_handle('e', f); live_events++; return OK; }
int cuEventDestroy_v2(handle *e) { touch(e, 'e'); live_events--; free(e); return OK; }
int cuEventRecord(handle *e, handle *s) { at_home(); NEED(); touch(e, 'e'); touch(s, 's'); return spoils(s) ? IMPLICIT : OK; }
int cuEventQuery(handle *e) { NEED(); touch(e, 'e'); return unsafe_in_capture() ? CAPTURE : OK; }
int cuEventSynchronize(handle *e) { at_home(); NEED(); touch(e, 'e'); return unsafe_in_capture() ? CAPTURE : OK; }

/* The GPU kernels are SPIN's own. The gather's list, and the memory that the list names, are read in place. */
int cuMemHostGetDevicePointer_v2(uint64_t *a, void *p, unsigned f) { (void)f; NEED(); if (!pin_at((uint64_t)p)) return INVALID; *a = (uint64_t)p; return OK; }
int cuModuleLoadData(void **m, const void *code) {
    at_home();
    no_stop("cuModuleLoadData");
    NEED();
    if (unsafe_in_capture()) return CAPTURE;
    if (fail_module) return fail_module;
    int which = strstr(code, ".entry spinio_gather(") ? 0 : strstr(code, ".entry spinio_fingerprint(") ? 1 : -1;
    if (which < 0) return 218;
    *m = new_handle('m', which);
    return OK;
}
int cuModuleGetFunction(void **f, handle *m, const char *name) {
    NEED();
    touch(m, 'm');
    if (strcmp(name, m->flags ? "spinio_fingerprint" : "spinio_gather")) return NOTFOUND;
    *f = m;
    return OK;
}
/* Memory that a kernel may use: registered, or the device's. */
static char *for_kernel(uint64_t a, uint64_t n) { return pin_at(a) && pin_at(a + n - 1) ? (char *)a : accessible(a, n, 1) ? at(a) : NULL; }
/* As crates/device/src/fingerprint.rs defines it. */
static int fingerprint(uint64_t pages, uint64_t count, uint64_t out) {
    char *sums = for_kernel(out, count * 16);
    if (!covered(pages, count * 4096) || !sums) return INVALID;
    for (uint64_t page = 0; page < count; page++) {
        uint64_t *word = (uint64_t *)at(pages + page * 4096), *sum = (uint64_t *)(sums + page * 16);
        sum[0] = sum[1] = 0;
        for (uint64_t i = 0; i < 512; i++) {
            uint64_t a = word[i] ^ ((i + 1) * 0x9e3779b97f4a7c15ull), b = a;
            a = (a ^ (a >> 33)) * 0xff51afd7ed558ccdull, a = (a ^ (a >> 33)) * 0xc4ceb9fe1a85ec53ull, sum[0] += a ^ (a >> 33);
            b = (b ^ (b >> 30)) * 0xbf58476d1ce4e5b9ull, b = (b ^ (b >> 27)) * 0x94d049bb133111ebull, sum[1] += b ^ (b >> 31);
        }
    }
    return OK;
}
int cuLaunchKernel(handle *f, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz, unsigned shared, handle *s, void **with, void **extra) {
    (void)shared;
    __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
    at_home();
    NEED();
    touch(f, 'm');
    touch(s, 's');
    if (spoils(s)) return IMPLICIT;
    if (!x || y != 1 || z != 1 || !tx || tx > 256 || ty != 1 || tz != 1 || extra) return INVALID;
    if (fail_copy && is_beside()) return fail_copy;
    if (f->flags) return fingerprint(*(uint64_t *)with[0], *(uint64_t *)with[1], *(uint64_t *)with[2]);
    struct { uint64_t from, to, len; } *list = *(void **)with[0];
    unsigned count = *(unsigned *)with[1];
    if (!pin_at((uint64_t)list) || !pin_at((uint64_t)(list + count) - 1)) die("a list that is not registered");
    for (unsigned i = 0; i < count; i++) {
        if (!list[i].len) continue;
        char *from = for_kernel(list[i].from, list[i].len), *to = for_kernel(list[i].to, list[i].len);
        if (!from) die("a piece that is not registered");
        if (!to) return INVALID;
        memcpy(to, from, list[i].len);
    }
    return OK;
}

/* functions that only programs call */
int cuDevicePrimaryCtxReset_v2(int d) { fake_reset(d); return OK; }
int cuMemAllocAsync(uint64_t *a, size_t n, handle *s) { NEED(); touch(s, 's'); *a = fake_alloc(1, n, 0); return *a ? OK : NOMEM; }
int cuMemFreeAsync(uint64_t a, handle *s) { NEED(); touch(s, 's'); fake_free(a); return OK; }
int cuMemAllocManaged(uint64_t *a, size_t n, unsigned f) { (void)f; NEED(); *a = fake_alloc(2, n, 0); return OK; }
int cuMemHostAlloc(void **p, size_t n, unsigned f) { *p = aligned_alloc(4096, (n + 4095) & ~4095ul); return *p ? cuMemHostRegister_v2(*p, n, f) : NOMEM; }
int cuMemFreeHost(void *p) { int e = cuMemHostUnregister(p); free(p); return e; }
int cuMemcpyHtoD_v2(uint64_t d, const void *p, size_t n) { return cuMemcpyHtoDAsync_v2(d, p, n, NULL); }
int cuMemcpyDtoH_v2(void *p, uint64_t d, size_t n) { return cuMemcpyDtoHAsync_v2(p, d, n, NULL); }
int cuMemcpy(uint64_t d, uint64_t from, size_t n) { int e = copy(d, NULL); if (e) return e; if (!covered(d, n)) return INVALID; memmove(at(d), at(from), n); return OK; }
static int fail_copy_within;
void fake_fail_copy_within(int code) { fail_copy_within = code; }
int cuMemcpyDtoDAsync_v2(uint64_t d, uint64_t from, size_t n, handle *s) {
    int e = copy(d, s);
    if (e || fail_copy_within) return e ? e : fail_copy_within;
    if (!covered(d, n) || !covered(from, n)) return INVALID;
    for (int i = 0; i < 2; i++)
        for (uint64_t start = i ? d : from, a = start; a < start + n;) {
            range *r = find(a);
            if (r->chunk && !(r->accessors >> current()->device & 1)) die("a copy of a chunk that this GPU has no access to");
            a = r->start + r->len;
        }
    memmove(at(d), at(from), n);
    return OK;
}
int cuMemsetD8Async(uint64_t d, unsigned char byte, size_t n, handle *s) {
    NEED();
    touch(s, 's');
    if (captured && s == captured) { node[nodes].at = d; node[nodes].byte = byte; node[nodes++].n = n; return OK; }
    if (spoils(s)) return IMPLICIT;
    if (!covered(d, n)) return INVALID;
    memset(at(d), byte, n);
    return OK;
}
int cuMemsetD8_v2(uint64_t d, unsigned char byte, size_t n) { return cuMemsetD8Async(d, byte, n, NULL); }
int cuStreamBeginCapture_v2(handle *s, unsigned mode) {
    NEED();
    captured = s, nodes = 0, invalidated = 0, capturing = !(s->flags & 1), capture_mode = mode;
    return OK;
}
int cuStreamEndCapture(handle *s, void **graph) { touch(s, 's'); captured = NULL, capturing = 0, capture_mode = 0; *graph = node; return invalidated ? 901 : OK; }
int cuGraphInstantiateWithFlags(void **run, void *graph, unsigned long long f) { (void)f; *run = graph; return OK; }
int cuGraphLaunch(void *run, handle *s) { (void)run; for (int i = 0; i < nodes; i++) cuMemsetD8Async(node[i].at, node[i].byte, node[i].n, s); return OK; }
int cuGraphExecDestroy(void *run) { (void)run; return OK; }
int cuGraphDestroy(void *graph) { (void)graph; return OK; }
int cuLaunchHostFunc(handle *s, void (*f)(void *), void *with) {
    NEED();
    touch(s, 's');
    if (hang) return OK;
    in_callback = 1;
    f(with);
    in_callback = 0;
    return OK;
}
/* The streams of this fake are never behind: the call itself waits. */
int cuStreamWaitValue32_v2(handle *s, uint64_t a, uint32_t value, unsigned flags) {
    at_home();
    NEED();
    touch(s, 's');
    if (spoils(s)) return IMPLICIT;
    if (no_stream_wait) return 801;
    if (flags || a % 4 || !pin_at(a)) return INVALID;
    /* As on an H200. */
    const char *channels = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    int32_t left = (int32_t)(__atomic_load_n((uint32_t *)a, __ATOMIC_ACQUIRE) - value);
    if (channels && atoi(channels) < 8 && left < 0) die("a stream was stopped, and the GPU has no channel for others");
    stopped++;
    while (!hang && (int32_t)(__atomic_load_n((uint32_t *)a, __ATOMIC_ACQUIRE) - value) < 0) usleep(50);
    stopped--;
    return OK;
}

/* virtual memory: chunks are memory files, which other processes map too */
int cuDeviceGetUuid_v2(char *uuid, int d) { memcpy(uuid, "fake GPU number ", 16); uuid[15] = (char)('0' + d); return OK; }
int cuMemGetAllocationGranularity(size_t *n, const void *prop, int which) { (void)prop, (void)which; *n = 2 << 20; return OK; }
int cuMemAddressReserve(uint64_t *a, size_t n, size_t align, uint64_t hint, unsigned long long f) {
    count_vmm();
    (void)align, (void)hint, (void)f;
    if (!n || n % (2 << 20)) return INVALID;
    pthread_mutex_lock(&lock);
    *a = space(n);
    int i = 0;
    while (i < 64 && reserved[i].len) i++;
    if (i == 64) die("too many reservations for this fake");
    if (*a) reserved[i].start = *a, reserved[i].len = n;
    pthread_mutex_unlock(&lock);
    return *a ? OK : NOMEM;
}
int cuMemAddressFree(uint64_t a, size_t n) {
    count_vmm();
    int e = INVALID;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 256; i++) if (ranges[i].len && ranges[i].start >= a && ranges[i].start < a + n) die("a reservation freed with memory in it");
    for (int i = 0; i < 64; i++) if (reserved[i].len == n && reserved[i].start == a) reserved[i].len = 0, e = OK;
    pthread_mutex_unlock(&lock);
    return e;
}
static int new_chunk(unsigned long long *h, int fd, size_t n) {
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < 256 && chunk[i].len) i++;
    if (i < 256) chunk[i].fd = fd, chunk[i].len = n, *h = i + 1;
    pthread_mutex_unlock(&lock);
    return i < 256 ? OK : NOMEM;
}
static int creates_left = 1 << 30;
void fake_limit_creates(int most) { creates_left = most; }
int cuMemCreate(unsigned long long *h, size_t n, const int *prop, unsigned long long f) {
    (void)prop, (void)f;
    at_home();
    no_stop("cuMemCreate");
    if (creates_left-- <= 0) return NOMEM;
    if (!n || n % (2 << 20)) return INVALID;
    int fd = memfd_create("chunk", MFD_CLOEXEC);
    return fd < 0 || ftruncate(fd, n) ? NOMEM : new_chunk(h, fd, n);
}
static void live(unsigned long long h) { if (!h || h > 256 || !chunk[h - 1].len) die("dead chunk"); }
int cuMemRelease(unsigned long long h) { live(h); close(chunk[h - 1].fd); chunk[h - 1].len = 0; return OK; }
int cuMemExportToShareableHandle(int *fd, unsigned long long h, int type, unsigned long long f) {
    at_home();
    live(h);
    if (type != 1 || f) return INVALID;
    *fd = dup(chunk[h - 1].fd);
    return *fd < 0 ? NOMEM : OK;
}
int cuMemImportFromShareableHandle(unsigned long long *h, void *os, int type) {
    struct stat s;
    at_home();
    int fd = fcntl((int)(intptr_t)os, F_DUPFD_CLOEXEC, 3);
    if (type != 1 || fd < 0 || fstat(fd, &s)) return INVALID;
    return new_chunk(h, fd, s.st_size);
}
int cuMemRetainAllocationHandle(unsigned long long *h, void *a) {
    count_vmm();
    at_home();
    range *r = find((uint64_t)a);
    if (!r || r->start != (uint64_t)a || !r->chunk) return INVALID;
    return new_chunk(h, dup(r->chunk - 1), r->len);
}
int cuMemMap(uint64_t a, size_t n, size_t offset, unsigned long long h, unsigned long long f) {
    count_vmm();
    at_home();
    no_stop("cuMemMap");
    live(h);
    if (offset || f || n != chunk[h - 1].len || find(a)) return INVALID;
    int i = 0;
    while (i < 64 && !(reserved[i].len && a >= reserved[i].start && a + n <= reserved[i].start + reserved[i].len)) i++;
    if (i == 64) return INVALID;
    if (mmap(at(a), n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, chunk[h - 1].fd, 0) == MAP_FAILED) return NOMEM;
    pthread_mutex_lock(&lock);
    *new_range() = (range){ a, n, next_buffer++, reserved[i].start, reserved[i].len, NULL, 0, 0, 0, 0, 1, 0, dup(chunk[h - 1].fd) + 1, 0 };
    pthread_mutex_unlock(&lock);
    return OK;
}
static int fail_unmap;
void fake_fail_unmap(int code) { fail_unmap = code; }
int cuMemUnmap(uint64_t a, size_t n) {
    if (fail_unmap) return fail_unmap;
    count_vmm();
    at_home();
    no_stop("cuMemUnmap");
    while (n) {
        range *r = find(a);
        if (!r || r->start != a || r->len > n) return INVALID;
        mmap(at(a), r->len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        close(r->chunk - 1);
        a += r->len, n -= r->len, r->len = 0;
    }
    return OK;
}
static int fail_access, good_accesses;
void fake_fail_access(int code, int after) { fail_access = code, good_accesses = after; }
int cuMemSetAccess(uint64_t a, size_t n, const int *access, size_t count) {
    if (fail_access && good_accesses-- <= 0) return fail_access;
    count_vmm();
    at_home();
    no_stop("cuMemSetAccess");
    for (size_t i = 0; i < count; i++) if (access[3 * i] != 1 || access[3 * i + 2] != access[2]) return INVALID;
    if (!count || (access[2] != 1 && access[2] != 3)) return INVALID;
    while (n) {
        range *r = find(a);
        if (!r || r->start != a || r->len > n) return INVALID;
        r->no_access = 0, r->read_only = access[2] == 1, r->accessors |= 1 << access[1];
        a += r->len, n -= r->len;
    }
    return OK;
}

/* functions that only programs with two GPUs call; memory of another process is not available here */
int cuDeviceCanAccessPeer(int *can, int d, int peer) { *can = d != peer; return OK; }
int cuCtxEnablePeerAccess(context *peer, unsigned f) { (void)f; NEED(); return peer->alive ? OK : DESTROYED; }
int cuMemcpyPeer(uint64_t d, context *to, uint64_t from, context *of, size_t n) { return !to->alive || !of->alive ? DESTROYED : cuMemcpyDtoDAsync_v2(d, from, n, NULL); }
int cuIpcGetMemHandle(void *h, uint64_t a) { (void)h, (void)a; return 801; }
int cuIpcCloseMemHandle(uint64_t a) { (void)a; return 801; }
struct ipc { char bytes[64]; };
int cuIpcOpenMemHandle_v2(uint64_t *a, struct ipc h, unsigned f) { (void)a, (void)h, (void)f; return 801; }
