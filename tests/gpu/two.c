/* The suite of two GPUs: one program, or two, that read and write files with both, under LD_PRELOAD=libspinio.so.
 *
 *   two SCRATCH [name...] [-name...]        as the GPU suite's; with fewer than two GPUs: a message and status 77
 *
 * Failures possible with two GPUs only: a copy issued in the wrong context, a stream or an event of one used for
 * the other, one bounce buffer pool for both, an address that belongs to the peer.
 */
#include "harness.h"

#include <spinio.h>
#include <spinio_gaia.h>

#include "../../benches/common/preloaded.h"

#define MORE_FUNCTIONS(F)                                                                                              \
    F(cuDeviceGetCount, (int *))                                                                                       \
    F(cuDeviceCanAccessPeer, (int *, int, int))                                                                        \
    F(cuCtxEnablePeerAccess, (void *, unsigned))                                                                       \
    F(cuMemcpyPeer, (gpu_ptr, void *, gpu_ptr, void *, size_t))                                                        \
    F(cuIpcGetMemHandle, (void *, gpu_ptr))                                                                            \
    F(cuIpcCloseMemHandle, (gpu_ptr))

/* The handle is passed by value. */
struct ipc { char bytes[64]; };

static struct {
#define F(name, args) int (*name) args;
    MORE_FUNCTIONS(F)
#undef F
    int (*cuIpcOpenMemHandle_v2)(gpu_ptr *, struct ipc, unsigned);
} more;

static void *contexts[2];

#define MORE(call)                                                                                                     \
    do {                                                                                                               \
        int code_ = more.call;                                                                                         \
        check(code_ == 0, "%s: %d %s", #call, code_, gpu_error(code_));                                                \
    } while (0)

static void load_more(void) {
    gpu_load();
#define F(name, args) check((more.name = (int(*) args)dlsym(RTLD_DEFAULT, #name)) != NULL, "the driver lacks " #name);
    MORE_FUNCTIONS(F)
#undef F
    more.cuIpcOpenMemHandle_v2 = (int (*)(gpu_ptr *, struct ipc, unsigned))dlsym(RTLD_DEFAULT, "cuIpcOpenMemHandle_v2");
    check(more.cuIpcOpenMemHandle_v2 != NULL, "the driver lacks cuIpcOpenMemHandle_v2");
}

static void open_both(void) {
    load_more();
    GPU(cuInit(0));
    for (int i = 0; i < 2; i++) {
        int at;
        GPU(cuDeviceGet(&at, i));
        GPU(cuDevicePrimaryCtxRetain(&contexts[i], at));
    }
    GPU(cuCtxSetCurrent(contexts[0]));
}

static gpu_ptr device_of(int which, size_t size) {
    GPU(cuCtxSetCurrent(contexts[which]));
    return device(size);
}

/* Copies back the bytes of device `which` at `at`, in its own context; the caller sets the current context again. */
static char *back_of(int which, gpu_ptr at, size_t size) {
    GPU(cuCtxSetCurrent(contexts[which]));
    return back(at, size);
}

static size_t some_length(void) {
    switch (random_below(4)) {
    case 0: return 1 + random_below(4096);
    case 1: return 1 + random_below(64 * KIB);
    case 2: return 64 * KIB + 1 + random_below(MIB);
    default: return 1 + random_below(12 * MIB);
    }
}

/* ---- one process -------------------------------------------------------------------------------------------------- */

static void test_reads_in_turn(void) {
    gpu_ptr at[2] = { device_of(0, 16 * MIB), device_of(1, 16 * MIB) };
    for (int i = 0; i < 200; i++) {
        int to = random_below(2), current = random_below(3);
        size_t length = some_length(), offset = random_below(FILE_SIZE - length);
        GPU(cuCtxSetCurrent(current == 2 ? NULL : contexts[current])); /* the device's, the peer's, or none */
        check(pread(fd, (void *)at[to], length, offset) == (ssize_t)length, "pread to GPU %d", to);
        check(memcmp(back_of(to, at[to], length), content + offset, length) == 0,
              "GPU %d, context of %d: wrong bytes (%zu at %zu)", to, current, length, offset);
    }
}

static void test_writes_in_turn(void) {
    int f = new_file("both", O_TRUNC);
    gpu_ptr at[2] = { device_of(0, 12 * MIB), device_of(1, 12 * MIB) };
    char *model = calloc(1, 64 * MIB), *now = malloc(64 * MIB);
    size_t end = 0;
    for (int i = 0; i < 120; i++) {
        int from = random_below(2), current = random_below(3);
        size_t length = some_length(), offset = random_below(64 * MIB - length), source = random_below(FILE_SIZE - length);
        GPU(cuCtxSetCurrent(contexts[from]));
        GPU(cuMemcpyHtoD_v2(at[from], content + source, length));
        GPU(cuCtxSetCurrent(current == 2 ? NULL : contexts[current]));
        check(pwrite(f, (void *)at[from], length, offset) == (ssize_t)length, "pwrite from GPU %d", from);
        memcpy(model + offset, content + source, length);
        end = offset + length > end ? offset + length : end;
    }
    check(pread(f, now, 64 * MIB, 0) == (ssize_t)end, "the file has %zu bytes", end);
    check(memcmp(now, model, end) == 0, "the file differs from the written bytes");
}

struct worker { int which, writes; gpu_ptr at; };

static void *work(void *p) {
    struct worker *me = p;
    unsigned long my = 88172645463325252ul + (unsigned long)me->at;
    GPU(cuCtxSetCurrent(contexts[me->which]));
    char *now = malloc(8 * MIB), name[64];
    snprintf(name, sizeof name, "of-%llx", (unsigned long long)me->at);
    int f = new_file(name, O_TRUNC);
    for (int i = 0; i < 60; i++) {
        my = my * 6364136223846793005ul + 1442695040888963407ul;
        size_t length = 1 + (my >> 33) % (i % 4 ? 200 * KIB : 8 * MIB), offset = (my >> 17) % (FILE_SIZE - 8 * MIB);
        check(pread(fd, (void *)me->at, length, offset) == (ssize_t)length, "pread");
        GPU(cuMemcpyDtoH_v2(now, me->at, length));
        check(memcmp(now, content + offset, length) == 0, "GPU %d: wrong bytes", me->which);
        if (!me->writes)
            continue;
        check(pwrite(f, (void *)me->at, length, 0) == (ssize_t)length, "pwrite");
        check(pread(f, now, length, 0) == (ssize_t)length && memcmp(now, content + offset, length) == 0,
              "GPU %d: wrong bytes in the file", me->which);
    }
    free(now);
    return NULL;
}

static void on_both_at_once(int writes) {
    pthread_t t[8];
    struct worker workers[8];
    for (int i = 0; i < 8; i++)
        workers[i] = (struct worker){ i % 2, writes, device_of(i % 2, 8 * MIB) };
    for (int i = 0; i < 8; i++)
        pthread_create(&t[i], NULL, work, &workers[i]);
    for (int i = 0; i < 8; i++)
        pthread_join(t[i], NULL);
}

static void test_reads_at_once(void) { on_both_at_once(0); }
static void test_writes_at_once(void) { on_both_at_once(1); }

static void test_one_after_the_other(void) { /* a read into one GPU, then a copy to the peer queued after it */
    gpu_ptr a = device_of(0, 8 * MIB), b = device_of(1, 8 * MIB);
    for (int i = 0; i < 60; i++) {
        size_t length = some_length() % (8 * MIB) + 1, offset = random_below(FILE_SIZE - length);
        GPU(cuCtxSetCurrent(contexts[0]));
        check(pread(fd, (void *)a, length, offset) == (ssize_t)length, "pread");
        MORE(cuMemcpyPeer(b, contexts[1], a, contexts[0], length));
        check(memcmp(back_of(1, b, length), content + offset, length) == 0, "a copy to the peer ran before the read");
    }
}

static void test_a_reset_of_one(void) {
    gpu_ptr stays = device_of(0, 8 * MIB);
    for (int i = 0; i < 3; i++) {
        gpu_ptr goes = device_of(1, 8 * MIB);
        check(pread(fd, (void *)goes, 8 * MIB, i) == (ssize_t)(8 * MIB), "pread");
        check(pread(fd, (void *)goes, 4096, i) == 4096, "pread"); /* queued when the context is destroyed */
        int second;
        GPU(cuDeviceGet(&second, 1));
        GPU(cuDevicePrimaryCtxReset_v2(second));
        GPU(cuCtxSetCurrent(contexts[0]));
        for (size_t length = 100; length <= 8 * MIB; length *= 290) {
            check(pread(fd, (void *)stays, length, i) == (ssize_t)length, "the other GPU after a reset");
            check(memcmp(back(stays, length), content + i, length) == 0, "its bytes");
        }
        GPU(cuDevicePrimaryCtxRetain(&contexts[1], second));
    }
}

/* ---- the peer's memory --------------------------------------------------------------------------------------------- */

static void test_memory_of_the_peer(void) {
    int can = 0;
    MORE(cuDeviceCanAccessPeer(&can, 0, 1));
    if (!can) {
        printf("    skipped: these GPUs cannot reach each other's memory\n");
        return;
    }
    GPU(cuCtxSetCurrent(contexts[0]));
    MORE(cuCtxEnablePeerAccess(contexts[1], 0));
    gpu_ptr at = device_of(1, 16 * MIB);
    int f = new_file("peer", O_TRUNC);
    for (int i = 0; i < 60; i++) {
        size_t length = some_length(), offset = random_below(FILE_SIZE - length);
        GPU(cuCtxSetCurrent(contexts[0])); /* the peer's context, which could touch the memory itself */
        check(pread(fd, (void *)at, length, offset) == (ssize_t)length, "pread into the peer's memory");
        check(memcmp(back_of(1, at, length), content + offset, length) == 0, "its bytes");
        GPU(cuCtxSetCurrent(contexts[0]));
        check(pwrite(f, (void *)at, length, offset) == (ssize_t)length, "pwrite from the peer's memory");
        char *now = malloc(length);
        check(pread(f, now, length, offset) == (ssize_t)length && memcmp(now, content + offset, length) == 0, "the file");
        free(now);
    }
}

/* The used part of CUmemAllocationProp and CUmemAccessDesc. */
struct prop { int type, handles, location_type, location_id; void *windows; unsigned char flags[8]; };
struct access { int location_type, location_id, flags; };

static void test_a_mapping_over_both(void) {
    GPU(cuCtxSetCurrent(contexts[0]));
    gpu_ptr at;
    GPU(cuMemAddressReserve(&at, 8 * MIB, 0, 0, 0));
    for (int i = 0; i < 4; i++) { /* one range, 2 MiB chunks on alternating GPUs */
        struct prop prop = { 1, 0, 1, i % 2, NULL, { 0 } };
        struct access both[2] = { { 1, 0, 3 }, { 1, 1, 3 } };
        unsigned long long handle;
        GPU(cuMemCreate(&handle, 2 * MIB, &prop, 0));
        GPU(cuMemMap(at + i * 2 * MIB, 2 * MIB, 0, handle, 0));
        GPU(cuMemSetAccess(at + i * 2 * MIB, 2 * MIB, both, 2));
    }
    for (int i = 0; i < 60; i++) {
        size_t length = 1 + random_below(5 * MIB), to = random_below(8 * MIB - length), offset = random_below(FILE_SIZE - length);
        ssize_t n = pread(fd, (void *)(at + to), length, offset);
        check(n > 0 && (size_t)n <= length, "pread returned %zd", n);
        GPU(cuCtxSynchronize());
        check(memcmp(back(at + to, n), content + offset, n) == 0, "%zd bytes in a mapping over both", n);
    }
}

/* ---- a leased file on both: `spinio gaia serve` runs, and SPINIO_GAIA_SOCKET names it ---------------------------------- */

static unsigned char *map_on(int which, const char *path, size_t size) {
    GPU(cuCtxSetCurrent(contexts[which]));
    int f = open(path, O_RDONLY);
    unsigned char *map = f < 0 ? NULL : FIND(spinio_gaia_map)(f, 0, size, SPINIO_GAIA_READ);
    close(f);
    return map;
}

static struct spinio_gaia_info info_of(const void *map) {
    struct spinio_gaia_info info;
    check(FIND(spinio_gaia_info)(map, &info, sizeof info) == 0, "spinio_gaia_info: %s", FIND(spinio_last_error)());
    return info;
}

/* Fills it on GPU 0 from the file, and on GPU 1 from GPU 0. */
static void fill_both(const char *name, size_t offset) {
    const size_t size = 20 * MIB + 4567;
    char path[4096];
    int can = 0, f = new_file(name, O_TRUNC);
    check(write(f, content + offset, size) == (ssize_t)size && close(f) == 0, "write");
    snprintf(path, sizeof path, "%s/%s", scratch, name);
    MORE(cuDeviceCanAccessPeer(&can, 1, 0));
    unsigned char *maps[2];
    for (int which = 0; which < 2; which++) {
        maps[which] = map_on(which, path, size);
        ssize_t got = maps[which] ? FIND(spinio_gaia_acquire)(maps[which], size, SPINIO_GAIA_READ) : -1;
        if (got < 0 && which == 0 && (errno == ENOTSUP || errno == EPERM)) {
            printf("    skipped: %s\n", FIND(spinio_last_error)());
            return;
        }
        check(got == (ssize_t)size, "acquire on GPU %d: %s", which, FIND(spinio_last_error)());
    }
    for (int which = 0; which < 2; which++)
        check(memcmp(back_of(which, (gpu_ptr)maps[which], size), content + offset, size) == 0, "bytes on GPU %d", which);
    struct spinio_gaia_info first = info_of(maps[0]), second = info_of(maps[1]);
    check(first.bytes_from_file == size && first.bytes_from_peer == 0, "GPU 0 did not read the file");
    if (can)
        check(second.bytes_from_peer == size && second.bytes_from_file == 0 && second.peer_refused == 0,
              "GPU 1: %lu from the peer, %lu from the file, reason %lu", second.bytes_from_peer, second.bytes_from_file,
              second.peer_refused);
    else
        check(second.bytes_from_file == size && second.peer_refused == 2, "GPU 1 did not read the file");
    if (!can)
        printf("    these GPUs cannot reach each other's memory: the file was read twice\n");
    for (int which = 0; which < 2; which++) {
        GPU(cuCtxSetCurrent(contexts[which]));
        check(FIND(spinio_gaia_unmap)(maps[which]) == 0, "unmap");
    }
}

/* Without and with access of the contexts to each other: the copy needs none. */
static void test_a_leased_file_on_both(void) {
    if (!getenv("SPINIO_GAIA_SOCKET")) {
        printf("    skipped: SPINIO_GAIA_SOCKET names no daemon of leased files\n");
        return;
    }
    fill_both("leased", 0);
    for (int which = 0; which < 2; which++) {
        GPU(cuCtxSetCurrent(contexts[which]));
        more.cuCtxEnablePeerAccess(contexts[!which], 0); /* fails if an earlier test has enabled it, or if there is none */
    }
    fill_both("leased-with-access", 12345);
}

/* ---- two processes ------------------------------------------------------------------------------------------------- */

static void child_process(int which, int shared) {
    gpu_ptr at = device_of(which, 8 * MIB);
    for (int i = 0; i < 60; i++) {
        size_t length = some_length() % (8 * MIB) + 1, offset = random_below(FILE_SIZE - length);
        check(pread(fd, (void *)at, length, offset) == (ssize_t)length, "pread");
        check(memcmp(back(at, length), content + offset, length) == 0, "process %d: wrong bytes", which);
        check(pwrite(shared, (void *)at, length, which * 8 * MIB) == (ssize_t)length, "pwrite");
        char *now = malloc(length);
        check(pread(shared, now, length, which * 8 * MIB) == (ssize_t)length && memcmp(now, content + offset, length) == 0,
              "process %d: wrong bytes in the file", which);
        free(now);
    }
}

static void test_two_processes(void) {
    int shared = new_file("shared", O_TRUNC);
    check(ftruncate(shared, 16 * MIB) == 0, "ftruncate");
    /* this process has used CUDA: the children must be new programs */
    for (int which = 0; which < 2; which++) {
        if (fork() == 0) {
            char number[8], descriptor[16];
            snprintf(number, sizeof number, "%d", which);
            snprintf(descriptor, sizeof descriptor, "%d", dup(shared));
            execl("/proc/self/exe", "two", scratch, "--child", number, descriptor, NULL);
            _exit(127);
        }
    }
    for (int i = 0; i < 2; i++) {
        int status;
        wait(&status);
        check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a process: status %x", status);
    }
}

/* Memory of one process on GPU 1, opened by another process whose current GPU is 0. */
static void test_memory_of_another_process(void) {
    gpu_ptr at = device_of(1, 8 * MIB);
    struct ipc handle;
    MORE(cuIpcGetMemHandle(&handle, at));
    int requests[2], replies[2];
    check(pipe(requests) == 0 && pipe(replies) == 0, "pipe");
    pid_t child = fork();
    if (child == 0) {
        char in[16], out[16];
        snprintf(in, sizeof in, "%d", dup(requests[0])), snprintf(out, sizeof out, "%d", dup(replies[1]));
        execl("/proc/self/exe", "two", scratch, "--reader", in, out, NULL);
        _exit(127);
    }
    check(write(requests[1], &handle, sizeof handle) == sizeof handle, "write");
    int status;
    waitpid(child, &status, 0);
    check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the reader: status %x", status);
    size_t offset;
    check(read(replies[0], &offset, sizeof offset) == sizeof offset, "read");
    check(memcmp(back_of(1, at, 6 * MIB), content + offset, 6 * MIB) == 0, "bytes that another process read into our memory");
}

static void reader(int in, int out) {
    struct ipc handle;
    check(read(in, &handle, sizeof handle) == sizeof handle, "read");
    gpu_ptr at;
    GPU(cuCtxSetCurrent(contexts[1]));
    int code = more.cuIpcOpenMemHandle_v2(&at, handle, 1);
    if (code) {
        printf("    cuIpcOpenMemHandle: %s\n", gpu_error(code));
        _exit(1);
    }
    GPU(cuCtxSetCurrent(contexts[0]));
    size_t offset = 12345;
    check(pread(fd, (void *)at, 6 * MIB, offset) == (ssize_t)(6 * MIB), "pread into memory of another process");
    GPU(cuCtxSetCurrent(contexts[1]));
    GPU(cuCtxSynchronize());
    MORE(cuIpcCloseMemHandle(at));
    check(write(out, &offset, sizeof offset) == sizeof offset, "write");
}

/* ---- the runner ---------------------------------------------------------------------------------------------------- */

#define TESTS(T)                                                                                                       \
    T(reads_in_turn) T(writes_in_turn) T(reads_at_once) T(writes_at_once) T(one_after_the_other) T(a_reset_of_one)     \
    T(memory_of_the_peer) T(a_mapping_over_both) T(a_leased_file_on_both) T(two_processes) T(memory_of_another_process)

static const struct test tests[] = {
#define T(name) { #name, test_##name },
    TESTS(T)
#undef T
};

/* A child process counts the GPUs: a process that has opened the driver must not fork. */
static int gpus(void) {
    pid_t child = fork();
    if (child == 0) {
        int count = 0;
        load_more();
        _exit(gpu.cuInit(0) == 0 && more.cuDeviceGetCount(&count) == 0 ? 100 + count : 0);
    }
    int status;
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) > 100 ? WEXITSTATUS(status) - 100 : 0; /* below: there is no driver */
}

int main(int argc, char **argv) {
    if (argc == 5 && argv[2][0] == '-' && argv[2][1] == '-') {
        scratch = argv[1];
        prepare();
        open_both();
        if (strcmp(argv[2], "--child") == 0)
            child_process(atoi(argv[3]), atoi(argv[4]));
        else
            reader(atoi(argv[3]), atoi(argv[4]));
        return 0;
    }
    if (gpus() < 2)
        return printf("skipped: this machine has fewer than two GPUs\n"), 77;
    return run_tests(argc, argv, tests, sizeof tests / sizeof *tests, open_both);
}
