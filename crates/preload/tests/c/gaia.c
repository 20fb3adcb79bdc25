/* A program that uses spinio_gaia.h on a file below a mount (argument 1), of 3 pages and 100 bytes, each byte 7, and on
 * one that is not (argument 2). */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <spinio.h>
#include <spinio_gaia.h>

#include "check.h"

enum { PAGE = 4096, LEN = 3 * PAGE + 100, R = SPINIO_GAIA_READ, W = SPINIO_GAIA_WRITE };

struct job {
    unsigned char *at, value;
};

static void store(void *argument)
{
    struct job *job = argument;
    *job->at = job->value;
}

static void load(void *argument)
{
    struct job *job = argument;
    job->value = *job->at;
}

static void launch(void (*kernel)(void *), struct job *job)
{
    CHECK(spinio_emulated_launch(kernel, job, NULL) == 0 && spinio_emulated_wait(NULL) == 0);
}

static void gpu_store(unsigned char *at, unsigned char value)
{
    struct job job = {at, value};
    launch(store, &job);
}

static unsigned char gpu_load(unsigned char *at)
{
    struct job job = {at, 0};
    launch(load, &job);
    return job.value;
}

/* Counts in its own page of a map that all threads use. */
static void *count(void *argument)
{
    unsigned char *page = argument;
    for (int i = 0; i < 50; i++) {
        CHECK(spinio_gaia_acquire(page, PAGE, W) > 0);
        gpu_store(page + 9, gpu_load(page + 9) + 1);
        CHECK(spinio_gaia_release(page, PAGE, 0) > 0);
    }
    return NULL;
}

/* Maps, uses and unmaps while other threads do too. */
static void *map_and_unmap(void *argument)
{
    int fd = *(int *)argument;
    for (int i = 0; i < 20; i++) {
        unsigned char *gpu = spinio_gaia_map(fd, PAGE, PAGE, R);
        CHECK(gpu && spinio_gaia_acquire(gpu, PAGE, R) == PAGE && gpu_load(gpu) == 7);
        CHECK(spinio_gaia_unmap(gpu) == 0);
    }
    return NULL;
}

static void wrong_maps(int fd, int reader, int other)
{
    NO_MAP(spinio_gaia_map(-1, 0, PAGE, R), EBADF, "descriptor");
    NO_MAP(spinio_gaia_map(fd, 1, PAGE, R), EINVAL, "4096");
    NO_MAP(spinio_gaia_map(fd, -PAGE, PAGE, R), EINVAL, "negative");
    NO_MAP(spinio_gaia_map(fd, 0, 0, R), EINVAL, "empty");
    NO_MAP(spinio_gaia_map(fd, 0, PAGE, 0), EINVAL, "no access");
    NO_MAP(spinio_gaia_map(fd, 0, PAGE, 4), EINVAL, "no access");
    NO_MAP(spinio_gaia_map(fd, 0, (size_t)8 << 40, R), ENOMEM, "memory");
    /* Larger than the device: only what is acquired needs memory. */
    void *large = spinio_gaia_map(fd, 0, (size_t)1 << 35, R);
    CHECK(large && spinio_gaia_acquire(large, PAGE, R) == PAGE && spinio_gaia_unmap(large) == 0);
    NO_MAP(spinio_gaia_map(reader, 0, PAGE, W), EACCES, "not open for this access");
    NO_MAP(spinio_gaia_map(other, 0, PAGE, R), ENOTSUP, "not below a GAIA mount");
}

/* The file is 3 pages and 100 bytes, and byte 6 is 2. */
static void names_of_the_paper(int fd, int reader, int other, volatile unsigned char *cpu)
{
    enum { RW = PROT_READ | PROT_WRITE };
#define NOT_MAPPED(call, number, words) REFUSED((call) != MAP_FAILED ? 0 : -1, number, words)
    NOT_MAPPED(mmap(NULL, PAGE, PROT_NONE, MAP_ONGPU, fd, 0), EINVAL, "PROT_READ");
    NOT_MAPPED(mmap(NULL, PAGE, RW | PROT_EXEC, MAP_ONGPU, fd, 0), EINVAL, "PROT_READ");
    NOT_MAPPED(mmap((void *)cpu, PAGE, RW, MAP_ONGPU | MAP_FIXED, fd, 0), EOPNOTSUPP, "0x10");
    NOT_MAPPED(mmap(NULL, PAGE, RW, MAP_ONGPU, reader, 0), EACCES, "not open for this access");
    NOT_MAPPED(mmap(NULL, PAGE, RW, MAP_ONGPU, other, 0), ENOTSUP, "not below a GAIA mount");
    NOT_MAPPED(mmap(NULL, PAGE, RW, MAP_ONGPU, fd, 1), EINVAL, "4096");
    NOT_MAPPED(mmap(NULL, 0, RW, MAP_ONGPU, fd, 0), EINVAL, "empty");
    /* Without the library: an error of the Linux kernel, and no mapping. */
    FAILS(syscall(SYS_mmap, NULL, PAGE, PROT_READ, MAP_ONGPU, fd, 0), EOPNOTSUPP);
    FAILS(syscall(SYS_mmap, NULL, PAGE, PROT_READ, MAP_ONGPU, other, 0), EOPNOTSUPP);

    errno = 77;
    unsigned char *gpu = mmap(NULL, LEN, RW, MAP_SHARED | MAP_ONGPU, fd, 0);
    unsigned char *read_only = mmap(NULL, PAGE, PROT_READ, MAP_ONGPU, reader, 0);
    CHECK(gpu != MAP_FAILED && read_only != MAP_FAILED && errno == 77);
    CHECK(macquire(gpu, LEN, NULL) == 0 && gpu_load(gpu + 6) == 2);
    gpu_store(gpu + 10, 12);
    CHECK(mrelease(gpu, LEN, NULL) == 0 && cpu[10] == 12);
    CHECK(macquire(read_only, PAGE, NULL) == 0 && gpu_load(read_only + 10) == 12 && errno == 77);
    CHECK(mrelease(read_only, PAGE, NULL) == 0);
    REFUSED(mrelease(read_only, PAGE, NULL), EINVAL, "not acquired");
    REFUSED(macquire(gpu, LEN + 1, NULL), EINVAL, "not within one map");

    REFUSED(munmap(gpu, PAGE), EINVAL, "as a whole");
    REFUSED(munmap(gpu + PAGE, 3 * PAGE), EINVAL, "as a whole");
    REFUSED(munmap(gpu, 5 * PAGE), EINVAL, "as a whole");
    REFUSED(munmap(gpu - PAGE, 5 * PAGE), EINVAL, "as a whole");
    CHECK(macquire(gpu, LEN, NULL) == 0 && gpu_load(gpu + 10) == 12);
    /* Host memory, next to maps. */
    char *host = mmap(NULL, 2 * PAGE, RW, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(host != MAP_FAILED && (host[PAGE] = 1) && munmap(host, PAGE) == 0 && host[PAGE] == 1);
    CHECK(munmap(host + PAGE, PAGE) == 0 && munmap(host, PAGE) == 0);
    FAILS(munmap(host + 1, PAGE), EINVAL);
    errno = 77;
    CHECK(munmap(gpu, 4 * PAGE) == 0 && munmap(read_only, 1) == 0 && errno == 77);
    REFUSED(macquire(gpu, LEN, NULL), EINVAL, "no map");
    /* A map of spinio_gaia_map(), too. */
    CHECK((gpu = spinio_gaia_map(fd, 0, LEN, W)) && munmap(gpu, LEN) == 0);
    REFUSED(spinio_gaia_unmap(gpu), EINVAL, "No map");
}

static void sync_and_advice(unsigned char *gpu, char *elsewhere)
{
    struct spinio_gaia_info before, after;
    CHECK(spinio_gaia_sync(gpu, LEN) == 0 && spinio_gaia_sync(gpu + 5, 1) == 0);
    REFUSED(spinio_gaia_sync(gpu, LEN + 1), EINVAL, "not within one map");
    REFUSED(spinio_gaia_sync(elsewhere, 1), EINVAL, "no map");
    for (int advice = SPINIO_GAIA_RANDOM; advice <= SPINIO_GAIA_DONTNEED; advice++) {
        CHECK(spinio_gaia_acquire(gpu, LEN, R) == LEN);
        CHECK(spinio_gaia_info(gpu, &before, sizeof before) == 0 && spinio_gaia_advise(gpu, LEN, advice) == 0);
        CHECK(spinio_gaia_acquire(gpu, LEN, R) == LEN && spinio_gaia_info(gpu, &after, sizeof after) == 0);
        uint64_t fetched = after.bytes_from_file + after.bytes_from_snapshots - before.bytes_from_file;
        CHECK(fetched - before.bytes_from_snapshots == (advice == SPINIO_GAIA_DONTNEED ? 4 * PAGE : 0));
    }
    REFUSED(spinio_gaia_advise(gpu, LEN, 0), EINVAL, "no advice");
    REFUSED(spinio_gaia_advise(gpu, LEN, 5), EINVAL, "no advice");
    REFUSED(spinio_gaia_advise(gpu, LEN + 1, SPINIO_GAIA_WILLNEED), EINVAL, "not within one map");
    REFUSED(spinio_gaia_advise(elsewhere, 1, SPINIO_GAIA_WILLNEED), EINVAL, "no map");
}

static void stream_order(int fd, unsigned char *gpu, unsigned char *read_only)
{
    static ssize_t published = -1000;
    void *stream = spinio_emulated_stream();
    struct job one = {gpu + 11, 33};
    char elsewhere;
    CHECK(spinio_gaia_acquire_async(gpu, LEN, W, stream) == 0 && spinio_emulated_launch(store, &one, stream) == 0);
    CHECK(spinio_gaia_release_async(gpu, LEN, 0, stream, &published) == 0 && spinio_emulated_wait(stream) == 0);
    CHECK(published == PAGE && pread(fd, &elsewhere, 1, 11) == 1 && elsewhere == 33);
    CHECK(spinio_gaia_acquire_async(read_only, PAGE, R, NULL) == 0);
    struct job two = {read_only + 11, 0};
    CHECK(spinio_emulated_launch(load, &two, NULL) == 0 && spinio_emulated_wait(NULL) == 0 && two.value == 33);
    CHECK(spinio_gaia_acquire_async(gpu, LEN, W, stream) == 0);
    CHECK(spinio_gaia_release_async(gpu, LEN, SPINIO_GAIA_DISCARD, stream, NULL) == 0);
    /* A release without an acquire: reported by the next call, once. */
    CHECK(spinio_gaia_release_async(gpu, PAGE, 0, stream, &published) == 0 && spinio_emulated_wait(stream) == 0);
    CHECK(published == -EINVAL);
    REFUSED(spinio_gaia_acquire(gpu, PAGE, R), EINVAL, "earlier release in stream order");
    CHECK(spinio_gaia_acquire(gpu, PAGE, R) == PAGE);
    REFUSED(spinio_gaia_acquire_async(gpu, LEN + 1, W, stream), EINVAL, "not within one map");
    REFUSED(spinio_gaia_acquire_async(gpu, PAGE, 8, stream), EINVAL, "no access");
    REFUSED(spinio_gaia_acquire_async(&elsewhere, PAGE, R, stream), EINVAL, "no map");
    REFUSED(spinio_gaia_acquire_async(read_only, PAGE, W, stream), EACCES, "read-only");
    CHECK(spinio_gaia_release_async(read_only, PAGE, 0, stream, &published) == 0 && spinio_emulated_wait(stream) == 0);
    CHECK(published == 0);
    REFUSED(spinio_gaia_release_async(gpu, PAGE, 16, stream, NULL), EINVAL, "flags");
}

static void overwrite(int fd, unsigned char *gpu, unsigned char *read_only)
{
    char byte;
    struct spinio_gaia_info before, after;
    CHECK(spinio_gaia_acquire(gpu, LEN, W) == LEN && spinio_gaia_release(gpu, LEN, SPINIO_GAIA_DISCARD) == 0);
    CHECK(spinio_gaia_info(gpu, &before, sizeof before) == 0);
    CHECK(spinio_gaia_acquire(gpu, PAGE, W | SPINIO_GAIA_OVERWRITE) == PAGE);
    struct job one = {gpu + 11, 34};
    CHECK(spinio_emulated_launch(store, &one, NULL) == 0 && spinio_emulated_wait(NULL) == 0);
    CHECK(spinio_gaia_release(gpu, PAGE, 0) == PAGE);
    CHECK(pread(fd, &byte, 1, 11) == 1 && byte == 34);
    CHECK(spinio_gaia_info(gpu, &after, sizeof after) == 0);
    CHECK(after.bytes_from_file == before.bytes_from_file && after.bytes_from_snapshots == before.bytes_from_snapshots);
    CHECK(spinio_gaia_acquire_async(gpu, PAGE, SPINIO_GAIA_OVERWRITE, NULL) == 0);
    CHECK(spinio_gaia_release_async(gpu, PAGE, SPINIO_GAIA_DISCARD, NULL, NULL) == 0);
    REFUSED(spinio_gaia_acquire(gpu, PAGE, SPINIO_GAIA_OVERWRITE | 8), EINVAL, "no access");
    REFUSED(spinio_gaia_acquire(read_only, PAGE, SPINIO_GAIA_OVERWRITE), EACCES, "read-only");
    REFUSED(spinio_gaia_acquire_async(read_only, PAGE, SPINIO_GAIA_OVERWRITE, NULL), EACCES, "read-only");
}

static void wrong_calls(unsigned char *gpu, unsigned char *read_only)
{
    char elsewhere;
    struct spinio_gaia_info info;
    REFUSED(spinio_gaia_unmap(&elsewhere), EINVAL, "No map");
    REFUSED(spinio_gaia_unmap(NULL), EINVAL, "No map");
    REFUSED(spinio_gaia_unmap(gpu + 1), EINVAL, "No map");
    REFUSED(spinio_gaia_acquire(&elsewhere, 1, R), EINVAL, "no map");
    REFUSED(spinio_gaia_acquire(gpu, LEN + 1, R), EINVAL, "not within one map");
    REFUSED(spinio_gaia_acquire(gpu, SIZE_MAX, R), EINVAL, "not within one map");
    REFUSED(spinio_gaia_acquire(gpu, 0, R), EINVAL, "not within one map");
    REFUSED(spinio_gaia_acquire(gpu, PAGE, 8), EINVAL, "no access");
    REFUSED(spinio_gaia_release(gpu, PAGE, 0), EINVAL, "not acquired");
    REFUSED(spinio_gaia_release(gpu, PAGE, 16), EINVAL, "flags");
    REFUSED(spinio_gaia_release(gpu, LEN + 1, SPINIO_GAIA_DISCARD), EINVAL, "not within one map");
    CHECK(spinio_gaia_release(gpu, LEN, SPINIO_GAIA_DISCARD) == 0);
    REFUSED(spinio_gaia_release(&elsewhere, PAGE, 0), EINVAL, "no map");
    REFUSED(spinio_gaia_acquire(read_only, PAGE, W), EACCES, "read-only");
    CHECK(spinio_gaia_acquire(read_only, PAGE, R) == PAGE);
    CHECK(spinio_gaia_release(read_only, PAGE, 0) == 0);
    REFUSED(spinio_gaia_release(read_only, PAGE, 0), EINVAL, "not acquired");
    REFUSED(spinio_gaia_info(gpu, NULL, 0), EFAULT, "NULL");
    REFUSED(spinio_gaia_info(&elsewhere, &info, sizeof info), EINVAL, "no map");
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    int fd = open(argv[1], O_RDWR), reader = open(argv[1], O_RDONLY), other = open(argv[2], O_RDWR);
    CHECK(fd >= 0 && reader >= 0 && other >= 0);
    volatile unsigned char *cpu = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(cpu != MAP_FAILED && cpu[5] == 7);
    NO_MAP(spinio_gaia_map(fd, 0, PAGE, R), ENODEV, "device");
    CHECK(spinio_emulated_stream());
    wrong_maps(fd, reader, other);

    unsigned char *gpu = spinio_gaia_map(fd, 0, LEN, W), *read_only = spinio_gaia_map(reader, 0, PAGE, R);
    CHECK(gpu && read_only && (uintptr_t)gpu % PAGE == 0);
    wrong_calls(gpu, read_only);

    cpu[6] = 2;
    names_of_the_paper(fd, reader, other, cpu);
    cpu[6] = cpu[10] = 7;
    sync_and_advice(gpu, (char *)&fd);
    stream_order(fd, gpu, read_only);
    overwrite(fd, gpu, read_only);

    /* Descriptors are not needed any more; stores of both sides meet in one page. */
    CHECK(close(reader) == 0);
    CHECK(spinio_gaia_acquire(gpu, LEN, R | W) == LEN && gpu_load(gpu + LEN - 1) == 7);
    gpu_store(gpu + 5, 1);
    cpu[6] = 2;
    CHECK(pwrite(fd, "\3", 1, 7) == 1 && cpu[5] == 7);
    CHECK(spinio_gaia_release(gpu, LEN, 0) == PAGE && cpu[5] == 1 && cpu[6] == 2 && cpu[7] == 3);
    REFUSED(spinio_gaia_release(gpu, LEN, 0), EINVAL, "not acquired");
    CHECK(spinio_gaia_acquire(read_only, PAGE, R) == PAGE && gpu_load(read_only + 5) == 1);
    CHECK(gpu_load(read_only + 6) == 2 && gpu_load(read_only + 7) == 3);

    /* A range within a page is its whole page; a release of more than was acquired changes nothing. */
    CHECK(spinio_gaia_acquire(gpu + PAGE + 10, 5, W) == 5);
    gpu_store(gpu + PAGE, 9);
    REFUSED(spinio_gaia_release(gpu, LEN, 0), EINVAL, "not acquired");
    CHECK(cpu[PAGE] == 7 && spinio_gaia_release(gpu + PAGE + 20, 1, 0) == PAGE && cpu[PAGE] == 9);
    CHECK(spinio_gaia_acquire(gpu + PAGE, PAGE, W) == PAGE);
    gpu_store(gpu + PAGE, 7);
    CHECK(spinio_gaia_release(gpu + PAGE, PAGE, 0) == PAGE);
    CHECK(spinio_gaia_acquire(gpu, LEN, W) == LEN && spinio_gaia_release(gpu, LEN, 0) == 0);

    /* Stores that are discarded are gone, in the map too. */
    CHECK(spinio_gaia_acquire(gpu, LEN, W) == LEN);
    gpu_store(gpu + 8, 99);
    gpu_store(gpu + PAGE, 8);
    CHECK(spinio_gaia_release(gpu, PAGE, SPINIO_GAIA_DISCARD) == 0 && cpu[8] == 7);
    REFUSED(spinio_gaia_release(gpu, LEN, 0), EINVAL, "not acquired");
    CHECK(spinio_gaia_release(gpu + PAGE, LEN - PAGE, 0) == PAGE && cpu[PAGE] == 8);
    CHECK(spinio_gaia_acquire(gpu, LEN, W) == LEN && gpu_load(gpu + 8) == 7 && gpu_load(gpu + 5) == 1);
    gpu_store(gpu + PAGE, 7);
    CHECK(spinio_gaia_release(gpu, LEN, 0) == PAGE && cpu[8] == 7 && cpu[PAGE] == 7);

    /* Threads, of one map and of their own. */
    pthread_t threads[4];
    unsigned char *second = spinio_gaia_map(fd, 2 * PAGE, PAGE, W);
    CHECK(second);
    CHECK(pthread_create(&threads[0], NULL, count, gpu) == 0 && pthread_create(&threads[1], NULL, count, second) == 0);
    CHECK(pthread_create(&threads[2], NULL, map_and_unmap, &fd) == 0);
    CHECK(pthread_create(&threads[3], NULL, map_and_unmap, &fd) == 0);

    /* Children meanwhile: they have no maps, and do not wait for a lock of their parent. */
    for (int i = 0; i < 20; i++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(600);
            REFUSED(spinio_gaia_acquire(gpu, PAGE, W), EINVAL, "forked child");
            REFUSED(spinio_gaia_release(gpu, PAGE, 0), EINVAL, "forked child");
            REFUSED(spinio_gaia_acquire_async(gpu, PAGE, W, NULL), EINVAL, "forked child");
            REFUSED(spinio_gaia_release_async(gpu, PAGE, 0, NULL, NULL), EINVAL, "forked child");
            REFUSED(spinio_gaia_unmap(gpu), EINVAL, "forked child");
            REFUSED(spinio_gaia_sync(gpu, PAGE), EINVAL, "forked child");
            CHECK(munmap(gpu, PAGE) == 0);
            _exit(0);
        }
        int status;
        CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    }
    for (int i = 0; i < 4; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(cpu[9] == 57 && cpu[2 * PAGE + 9] == 57);

    struct spinio_gaia_info info = {0};
    uint64_t one[2] = {0, 99};
    CHECK(spinio_gaia_info(gpu + 10, &info, sizeof info) == 0 && info.file_size == LEN && info.releases == 58);
    CHECK(spinio_gaia_info(gpu, (struct spinio_gaia_info *)one, 8) == 0 && one[0] == LEN && one[1] == 99);

    /* Stores that were not released are dropped. */
    CHECK(spinio_gaia_acquire(gpu, LEN, W) == LEN);
    gpu_store(gpu + 50, 1);
    CHECK(spinio_gaia_unmap(gpu) == 0 && cpu[50] == 7);
    REFUSED(spinio_gaia_unmap(gpu), EINVAL, "No map");
    REFUSED(spinio_gaia_acquire(gpu, PAGE, R), EINVAL, "no map");
    REFUSED(spinio_gaia_info(gpu, &info, sizeof info), EINVAL, "no map");
    CHECK(spinio_gaia_unmap(read_only) == 0 && spinio_gaia_unmap(second) == 0);
    puts("done");
    return 0;
}
