/* Names of earlier releases do what the new ones do: compiled once with -DOLD and once without. The table of
 * docs/deprecated.md has the same pairs (tests/suite/header.rs compares them). */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stddef.h>
#include <unistd.h>

#include <nvmmu.h>
#include <spinio.h>

#include "check.h"

#ifdef OLD
#define NAME(old, new) old
#else
#define NAME(old, new) new
#endif

#define SIZE 100000

/* The report is an ABI: both names of a field are at the same place. */
_Static_assert(sizeof(struct nvmmu_report) == 56, "size");
_Static_assert(offsetof(struct nvmmu_report, NAME(promise, mode)) == 16, "mode");
_Static_assert(offsetof(struct nvmmu_report, NAME(whole, full_stripe)) == 24, "full_stripe");
_Static_assert(offsetof(struct nvmmu_report, NAME(neighbours, filler)) == 32, "filler");
_Static_assert(offsetof(struct nvmmu_report, NAME(loose, unaligned)) == 40, "unaligned");
_Static_assert(offsetof(struct nvmmu_report, read_ahead) == 48, "read_ahead");
_Static_assert(sizeof(struct NAME(spinio_piece, spinio_read_op)) == 40, "read op");
_Static_assert(NAME(NVMMU_PLAIN, NVMMU_PASSTHROUGH) == 1, "passthrough");
_Static_assert(NAME(NVMMU_SHAPED, NVMMU_ALIGNED) == 2, "aligned");
_Static_assert(NAME(NVMMU_PREPARED, NVMMU_PREREAD) == 3, "preread");

static unsigned char host[SIZE], back[SIZE];

static void batches(int fd, unsigned char *device)
{
    struct NAME(spinio_piece, spinio_read_op) op = {.fd = fd, .offset = 5, .size = 1000, .buffer = device};
    NAME(spinio_batch_ticket, spinio_batch_handle) *batch = spinio_batch_submit(&op, 1);
    CHECK(batch && spinio_batch_wait(batch) == 1000 && op.result == 1000);
    CHECK(spinio_mem_copy(back, device, 1000) == 0 && memcmp(host + 5, back, 1000) == 0);
}

static void pinned_files(int fd)
{
    if (NAME(spinio_hold, spinio_pin_file)(fd)) {
        CHECK(errno == EOPNOTSUPP); /* a file system without leases */
        return;
    }
    CHECK(NAME(spinio_is_held, spinio_is_pinned)(fd) == 1);
    void *map = spinio_map(fd, 0, 100, 0);
    CHECK(map && NAME(spinio_map_wanted, spinio_map_revoked)(map) == 0 && spinio_unmap(map) == 0);
    FAILS(NAME(spinio_map_wanted, spinio_map_revoked)(map), EINVAL);
    CHECK(NAME(spinio_release, spinio_unpin_file)(fd) == 0 && NAME(spinio_is_held, spinio_is_pinned)(fd) == 0);
    FAILS(NAME(spinio_release, spinio_unpin_file)(fd), ESTALE);
}

static void moves(unsigned char *device)
{
    struct nvmmu_report report;
    FAILS(NAME(nvmmu_expect, nvmmu_hint_range)(0, SIZE), ESRCH);
    CHECK(nvmmu_begin(1, "deprecated.out") == 0);
    CHECK(NAME(nvmmu_expect, nvmmu_hint_range)(0, SIZE) == 0);
    FAILS(NAME(nvmmu_expect, nvmmu_hint_range)(-1, SIZE), EINVAL);
    CHECK(nvmmu_move("deprecated.out", device, 0, SIZE, D2H) == SIZE);
    CHECK(nvmmu_end(1, &report, sizeof report) == 0);
    CHECK(report.NAME(promise, mode) >= NAME(NVMMU_PLAIN, NVMMU_PASSTHROUGH));
    CHECK(report.NAME(promise, mode) <= NAME(NVMMU_PREPARED, NVMMU_PREREAD));
    CHECK(report.NAME(whole, full_stripe) - report.NAME(neighbours, filler) + report.NAME(loose, unaligned) == SIZE);
    CHECK(unlink("deprecated.out") == 0);
}

int main(void)
{
    for (size_t i = 0; i < SIZE; i++)
        host[i] = (unsigned char)(i * 2654435761u >> 9);
    int fd = open("deprecated.tmp", O_CREAT | O_TRUNC | O_RDWR, 0600);
    CHECK(fd >= 0 && write(fd, host, SIZE) == SIZE && close(fd) == 0);
    CHECK((fd = open("deprecated.tmp", O_RDONLY)) >= 0);
    unsigned char *device = spinio_mem_alloc("emulated", SIZE, 0);
    CHECK(device);
    batches(fd, device);
    pinned_files(fd);
    moves(device);
    CHECK(spinio_mem_free(device) == 0 && close(fd) == 0 && unlink("deprecated.tmp") == 0);
    return 0;
}
