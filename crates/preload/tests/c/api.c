/* A program that links the library and uses its whole C API. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <spinio.h>

#include "check.h"

/* close_range unpins the file only if the range contains the pinning descriptor and closes it in this fd table. */
static void *close_in_unshared_table(void *other)
{
    int fd = *(int *)other;
    CHECK(close_range(fd, fd, CLOSE_RANGE_UNSHARE) == 0 && fcntl(fd, F_GETFD) == -1);
    return NULL;
}

static void unpin_by_close_range(int fd)
{
    /* Above all other descriptors, since those may be the driver's. */
    int other = dup2(fd, 900);
    CHECK(other == 900 && dup2(fd, 899) == 899 && dup2(fd, 901) == 901);
    pthread_t thread;
    CHECK(spinio_pin_file(other) == 0);
    CHECK(close_range(901, ~0u, 0) == 0 && close_range(800, 899, 0) == 0 && spinio_is_pinned(fd) == 1);
    CHECK(close_range(900, ~0u, CLOSE_RANGE_CLOEXEC) == 0 && spinio_is_pinned(fd) == 1);
    FAILS(close_range(900, 900, 1 << 30), EINVAL);
    FAILS(close_range(901, 900, 0), EINVAL);
    closefrom(901);
    CHECK(pthread_create(&thread, NULL, close_in_unshared_table, &other) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(spinio_is_pinned(fd) == 1 && fcntl(other, F_GETFD) == FD_CLOEXEC);
    CHECK(close_range(900, 900, 0) == 0 && spinio_is_pinned(fd) == 0);
    CHECK(dup2(fd, other) == other);
    /* The previous pin may still be in release: spinio_pin_file waits for it. */
    CHECK(spinio_pin_file(other) == 0 && spinio_is_pinned(fd) == 1);
    closefrom(900);
    CHECK(spinio_is_pinned(fd) == 0);
    for (int i = 0; i < 50; i++) {
        CHECK(dup2(fd, other) == other && spinio_pin_file(other) == 0);
        close(other);
    }
}

int main(void)
{
    enum { SIZE = 3 << 20 };
    CHECK(strchr(spinio_version(), '.'));
    CHECK(spinio_last_error()[0] == 0);
    CHECK(spinio_mem_alloc("toaster", 1, 0) == NULL && errno == ENODEV);
    CHECK(strstr(spinio_last_error(), "toaster"));
    CHECK(spinio_mem_alloc("emulated", 0, 0) == NULL && errno == EINVAL);
    CHECK(spinio_mem_alloc("emulated", 1, 0x80) == NULL && errno == EINVAL);
    CHECK(spinio_mem_alloc("emulated", (size_t)1 << 60, 0) == NULL && errno == ENOMEM);
    CHECK(spinio_mem_free(NULL) == 0);

    unsigned char *a = spinio_mem_alloc("emulated", SIZE, 0), *b = spinio_mem_alloc("emulated:0", SIZE, 0);
    unsigned char *host = malloc(SIZE), *back = malloc(SIZE);
    CHECK(a && b && host && back);
    for (size_t i = 0; i < SIZE; i++)
        host[i] = (unsigned char)(i * 2654435761u >> 9);
    CHECK(spinio_mem_copy(a, host, SIZE) == 0);
    CHECK(spinio_mem_copy(b + 3, a, SIZE - 3) == 0);
    CHECK(spinio_mem_copy(back, b + 3, SIZE - 3) == 0 && memcmp(host, back, SIZE - 3) == 0);
    FAILS(spinio_mem_copy(a + 1, host, SIZE), EFAULT);

    int fd = open("api.tmp", O_CREAT | O_TRUNC | O_RDWR, 0600);
    CHECK(fd >= 0 && write(fd, host, SIZE) == SIZE);
    struct spinio_counters before, after;
    CHECK(spinio_stats(&before, sizeof before) == 0);
    CHECK(spinio_pread(fd, a, SIZE, 100) == SIZE - 100);
    CHECK(spinio_mem_copy(back, a, SIZE - 100) == 0 && memcmp(host + 100, back, SIZE - 100) == 0);
    memset(back, 0, SIZE);
    CHECK(spinio_pread(fd, back, SIZE, 0) == SIZE && memcmp(host, back, SIZE) == 0);
    CHECK(spinio_pread_async(fd, b, SIZE, 7, NULL) == SIZE - 7);
    CHECK(spinio_mem_copy(back, b, SIZE - 7) == 0 && memcmp(host + 7, back, SIZE - 7) == 0);
    CHECK(spinio_stats(&after, sizeof after) == 0);
    CHECK(after.reads == before.reads + 2 && after.read_bytes == before.read_bytes + 2 * SIZE - 107);
    uint64_t moved = 0;
    for (int i = 0; i < SPINIO_ROUTES; i++)
        moved += after.route[i].bytes - before.route[i].bytes;
    CHECK(moved >= 2 * SIZE - 107);
    spinio_set_stream(NULL);
    /* An older program gets the fields it knows, a newer one zeros. */
    struct {
        struct spinio_counters known;
        uint64_t news;
    } newer = {.news = 5};
    CHECK(spinio_stats(&newer.known, sizeof newer) == 0 && newer.news == 0 && newer.known.reads == after.reads);
    uint64_t older[2] = {0, 5};
    CHECK(spinio_stats((struct spinio_counters *)older, sizeof *older) == 0 && older[0] == after.reads && older[1] == 5);

    /* Batches: read ops, arrays, one buffer; and an asynchronous batch. */
    enum { PIECES = 500, PIECE = 700 };
    static struct spinio_read_op piece[PIECES];
    static uint64_t offsets[PIECES], sizes[PIECES];
    static void *buffers[PIECES];
    static int64_t results[PIECES];
    for (int i = 0; i < PIECES; i++) {
        offsets[i] = (uint64_t)i * 7919 % (SIZE - PIECE);
        sizes[i] = PIECE;
        buffers[i] = a + i * 1000;
        piece[i] = (struct spinio_read_op){.fd = fd, .offset = offsets[i], .size = PIECE, .buffer = b + i * 1000};
    }
    piece[1].fd = -1;
    CHECK(spinio_batch(piece, PIECES) == (PIECES - 1) * PIECE);
    CHECK(piece[0].result == PIECE && piece[1].result == -EBADF);
    CHECK(spinio_batch_file(fd, offsets, sizes, buffers, results, PIECES) == PIECES * PIECE && results[3] == PIECE);
    for (int i = 0; i < PIECES; i++) {
        CHECK(spinio_mem_copy(back, a + i * 1000, PIECE) == 0 && memcmp(host + offsets[i], back, PIECE) == 0);
        CHECK(spinio_mem_copy(back, b + i * 1000, PIECE) == 0 && (memcmp(host + offsets[i], back, PIECE) == 0 || i == 1));
    }
    CHECK(spinio_batch_fixed(fd, offsets, PIECE, a, NULL, PIECES) == PIECES * PIECE);
    CHECK(spinio_mem_copy(back, a + 9 * PIECE, PIECE) == 0 && memcmp(host + offsets[9], back, PIECE) == 0);
    spinio_batch_handle *ticket = spinio_batch_submit(piece, PIECES);
    CHECK(ticket && spinio_batch_poll(ticket) >= 0);
    CHECK(spinio_batch_wait(ticket) == (PIECES - 1) * PIECE);
    FAILS(spinio_batch(NULL, 1), EINVAL);
    CHECK(spinio_batch(NULL, 0) == 0);
    CHECK(spinio_stats(&after, sizeof after) == 0);

    /* A pinned file. */
    FAILS(spinio_pin_file(fd), ETXTBSY);
    CHECK(strstr(spinio_last_error(), "open for writing"));
    CHECK(spinio_is_pinned(fd) == 0 && spinio_map(fd, 0, 100, 0) == NULL && errno == ETXTBSY);
    FAILS(spinio_unpin_file(fd), ESTALE);
    close(fd);
    fd = open("api.tmp", O_RDONLY);
    for (int i = 0; i < PIECES; i++)
        piece[i].fd = fd;
    if (spinio_pin_file(fd) == 0) {
        CHECK(spinio_is_pinned(fd) == 1);
        struct spinio_counters then = after;
        CHECK(spinio_batch(piece, PIECES) == PIECES * PIECE);
        CHECK(spinio_pread(fd, a, SIZE, 0) == SIZE);
        CHECK(spinio_mem_copy(back, a, SIZE) == 0 && memcmp(host, back, SIZE) == 0);
        CHECK(spinio_stats(&after, sizeof after) == 0);
        CHECK(after.route[SPINIO_ROUTE_GATHER].bytes == then.route[SPINIO_ROUTE_GATHER].bytes + PIECES * PIECE);
        CHECK(after.route[SPINIO_ROUTE_DMA].bytes == then.route[SPINIO_ROUTE_DMA].bytes + SIZE);
        const unsigned char *map = spinio_map(fd, 10, 100, 0);
        CHECK(map && memcmp(map, host + 10, 100) == 0); /* GPU kernels of the emulated GPU run on the CPU */
        CHECK(spinio_map_revoked(map) == 0 && spinio_unmap(map) == 0);
        FAILS(spinio_map_revoked(map), EINVAL);
        FAILS(spinio_unmap(map), EINVAL);
        CHECK(spinio_unpin_file(fd) == 0 && spinio_is_pinned(fd) == 0);
        /* Closing the pinning descriptor unpins the file. */
        int other = dup(fd);
        CHECK(spinio_pin_file(other) == 0 && spinio_is_pinned(fd) == 1);
        close(other);
        CHECK(spinio_is_pinned(fd) == 0);
        unpin_by_close_range(fd);
    } else {
        CHECK(errno == EOPNOTSUPP); /* a file system without leases */
    }
    close(fd);
    fd = open("api.tmp", O_RDWR);
    CHECK(fd >= 0);
    CHECK(spinio_stats(&after, sizeof after) == 0);

    /* Writes. */
    CHECK(spinio_mem_copy(a, host, SIZE) == 0);
    CHECK(spinio_pwrite(fd, a + 5, SIZE - 5, 1000) == SIZE - 5);
    CHECK(pread(fd, back, SIZE - 5, 1000) == SIZE - 5 && memcmp(host + 5, back, SIZE - 5) == 0);
    CHECK(spinio_pwrite(fd, host, 100, 0) == 100);
    CHECK(spinio_stats(&before, sizeof before) == 0);
    CHECK(before.writes == after.writes + 1 && before.written_bytes == after.written_bytes + SIZE - 5);
    ssize_t written = -1000;
    CHECK(spinio_pwrite_async(fd, a, SIZE - 9, 33, NULL, &written) == 0);
    CHECK(spinio_mem_copy(back, a, SIZE) == 0 && written == SIZE - 9); /* copied after the write on the stream */
    CHECK(pread(fd, back, SIZE - 9, 33) == SIZE - 9 && memcmp(host, back, SIZE - 9) == 0);
    CHECK(spinio_pwrite_async(fd, a, SIZE, 0, NULL, NULL) == 0 && spinio_mem_copy(back, a, SIZE) == 0);
    CHECK(pread(fd, back, SIZE, 0) == SIZE && memcmp(host, back, SIZE) == 0);
    FAILS(spinio_pwrite_async(fd, host, 10, 0, NULL, &written), EFAULT);
    FAILS(spinio_pwrite_async(-1, a, 10, 0, NULL, &written), EBADF);
    FAILS(spinio_pwrite_async(fd, a, 10, -1, NULL, &written), EINVAL);
    FAILS(spinio_pwrite(fd, a, 10, -1), EINVAL);
    FAILS(spinio_pwrite(-1, a, 10, 0), EBADF);

    FAILS(spinio_pread(fd, a, 10, -1), EINVAL);
    FAILS(spinio_pread(-1, a, 10, 0), EBADF);
    CHECK(strstr(spinio_last_error(), "descriptor"));
    FAILS(spinio_pread_async(fd, host, 10, 0, NULL), EFAULT);
    CHECK(spinio_mem_free(a) == 0 && spinio_mem_free(b) == 0);
    FAILS(spinio_mem_free(a), EFAULT);
    FAILS(spinio_pread(fd, a, 10, 0), EFAULT);
    unlink("api.tmp");
    return 0;
}
