/* spinio.h: the C API of SPIN (libspinio.so).
 *
 * Most programs need none of this: under LD_PRELOAD=libspinio.so, or linked with -lspinio, plain pread(), read(),
 * readv(), preadv() and fread() take device memory, and so do write(), pwrite(), writev(), pwritev() and fwrite(). This
 * header is for memory of devices that have no allocator of their own, for reads and writes in stream order, and for
 * asking what happened.
 *
 * Unless said otherwise a function returns -1 and sets errno when it fails, and spinio_last_error() has a sentence
 * about it. All functions may be called from any thread, none from a signal handler.
 */
#ifndef SPINIO_H
#define SPINIO_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- memory ---------------------------------------------------------------------------------------------------- */

/* The CPU can load and store there, at the same address. */
#define SPINIO_MEM_HOST_MAPPED 1u

/* New memory of a device, or NULL and errno:
 *   "emulated", "emulated:0"   the software GPU
 *   "p2pmem:0"                 PCI memory that the kernel publishes for peer-to-peer, counted from 0
 * CUDA memory comes from CUDA's own allocators. flags: 0 or SPINIO_MEM_HOST_MAPPED.
 * EINVAL: no size, unknown flags. ENODEV: no such device. ENOMEM: the device is full. */
void *spinio_mem_alloc(const char *device, size_t size, unsigned flags);

/* Gives back memory of spinio_mem_alloc(), after everything queued on it is done. NULL is allowed. */
int spinio_mem_free(void *memory);

/* Copies size bytes between host and device memory, in any direction, and waits until they have arrived. It starts
 * behind all reads that this thread has made into either. EFAULT if device memory ends before size bytes. */
int spinio_mem_copy(void *to, const void *from, size_t size);

/* ---- reads ----------------------------------------------------------------------------------------------------- */

/* As pread(), into host or device memory, but a size above 0x7ffff000 bytes (2 GiB less a page) is read whole. */
ssize_t spinio_pread(int fd, void *buffer, size_t size, off_t offset);

/* Reads the file now and queues the copies into device memory on a stream of the device (CUDA: a cudaStream_t).
 * Returns the bytes that will be there once the stream gets that far. Until then it holds staging memory of their length; if
 * twice SPINIO_STAGING is held so, it waits for a stream to move. EFAULT if the buffer is no device memory, EBUSY if the
 * stream is being captured into a graph. */
ssize_t spinio_pread_async(int fd, void *buffer, size_t size, off_t offset, void *stream);

/* The stream that this thread's reads and writes are ordered with from now on, hooked ones included: a cudaStream_t,
 * NULL for the default stream. Small reads are queued on it; larger ones, and writes, start behind what is queued
 * there. */
void spinio_set_stream(void *stream);

/* ---- kernels of the emulated GPU -------------------------------------------------------------------------------
 *
 * For headers that build kernels for it (device/ in SPIN's source makes them out of CUDA C++), and for tests. */

/* Queues a call of kernel(argument) on a stream of the emulated GPU; NULL is the default stream. It runs on a thread of
 * SPIN's, and only for that time can the CPU load and store in the memory of spinio_mem_alloc("emulated", ...). */
int spinio_emulated_launch(void (*kernel)(void *), void *argument, void *stream);

/* A new stream of it, ordered with the default stream both ways as an ordinary CUDA stream is; NULL and errno if there is
 * none. It stays as long as the process. */
void *spinio_emulated_stream(void);

/* Waits for all that is queued on a stream; NULL: on any. */
int spinio_emulated_wait(void *stream);

/* ---- writes ---------------------------------------------------------------------------------------------------- */

/* As pwrite(), out of host or device memory, but a size above 0x7ffff000 bytes (2 GiB less a page) is written whole. */
ssize_t spinio_pwrite(int fd, const void *buffer, size_t size, off_t offset);

/* Queues a pwrite() of device memory on a stream of the device (CUDA: a cudaStream_t) and returns 0. When the stream gets
 * there the file is written, and then *written, unless it is NULL, set to the bytes written or to an errno below zero;
 * what is queued behind it on the stream waits for both. The file may be closed meanwhile. Writes larger than the staging
 * memory (SPINIO_STAGING) are made at once, behind what is queued. Until the stream gets there the write holds memory of
 * its length, which no other request waits for. Of that at most twice SPINIO_STAGING is pinned; beyond it CUDA copies only
 * while the caller waits, so a stream that waits for something this thread does later would then wait for ever. EFAULT if
 * the buffer is no device memory, ESPIPE if the file has no offsets, EBADF if it is not open for writing, EBUSY if the
 * stream is being captured into a graph. */
int spinio_pwrite_async(int fd, const void *buffer, size_t size, off_t offset, void *stream, ssize_t *written);

/* ---- batches --------------------------------------------------------------------------------------------------- */

/* One read of a batch. Set reserved to 0. */
struct spinio_piece {
    int fd;
    unsigned reserved;
    uint64_t offset; /* in the file */
    uint64_t size;   /* bytes wanted */
    void *buffer;    /* device memory, or memory of the host */
    int64_t result;  /* afterwards: bytes read, short at the end of the file or of the buffer, or -errno */
};

/* Reads all pieces, in any order, and waits for them: thousands of small reads cost little more than their bytes.
 * Each piece ends as the pread() it stands for; one that fails touches no other. The batch starts behind all work that
 * was queued on the device before. Returns the bytes of all pieces together, or -1 if the batch could not begin. */
ssize_t spinio_batch(struct spinio_piece *pieces, size_t count);

/* The same for one file, out of arrays. results may be NULL. */
ssize_t spinio_batch_file(int fd, const uint64_t *offsets, const uint64_t *sizes, void *const *buffers, int64_t *results, size_t count);

/* The same for pieces of one size, which go one behind the other into one buffer. results may be NULL. */
ssize_t spinio_batch_fixed(int fd, const uint64_t *offsets, size_t size, void *buffer, int64_t *results, size_t count);

/* A batch that goes on while the program does something else. */
typedef struct spinio_batch_ticket spinio_batch_ticket;

/* Begins a batch behind what is queued on the device now, and returns; NULL if it could not begin. Until it was waited
 * for, the pieces, their buffers and their descriptors must stay, and nobody may use the pieces. */
spinio_batch_ticket *spinio_batch_submit(struct spinio_piece *pieces, size_t count);

/* 1 if every piece has its result, 0 if not. */
int spinio_batch_poll(const spinio_batch_ticket *batch);

/* Waits until every piece has arrived or failed, and ends the ticket: exactly once for each. Returns what
 * spinio_batch() returns. */
ssize_t spinio_batch_wait(spinio_batch_ticket *batch);

/* ---- held files ------------------------------------------------------------------------------------------------- */

/* Keeps the pages of a file registered with the device (CUDA: of the context that is current), for reads that come again
 * and again: large reads are DMA straight out of them, batches a gather. The file is read into memory and stays there; see
 * SPINIO_HOLD. A read lease sees to it that nobody writes the file meanwhile: who opens it for writing, or truncates
 * it, waits until its pages were given back, which takes milliseconds; with O_NONBLOCK he gets EAGAIN meanwhile. From
 * then on reads go as if it had never been held. May be asked for more than once.
 * ETXTBSY: open for writing. EACCES: not the owner's, and neither sealed nor immutable nor on a read-only file system.
 * EOPNOTSUPP: the file system has no leases, or is an overlay. ENOMEM: too much is held, or the pages cannot be
 * mapped (RLIMIT_AS) or registered. EAGAIN: no helper threads. ENODEV: no device is in use that reads host memory. EINVAL: no regular file, or an empty one. */
int spinio_hold(int fd);

/* Lets the file go, once for each spinio_hold(). Closing the descriptor it was held by does so too, for all of them.
 * ESTALE: not held, or not any more. */
int spinio_release(int fd);

/* 1 if the file is held and nobody waits to write it, else 0. */
int spinio_is_held(int fd);

/* An address through which kernels of the device read a held file in place; held now if it was not. Read-only, for the
 * device alone, flags 0. NULL and errno as of spinio_hold(); EINVAL if the range is not in the file.
 * While it is mapped, who opens the file for writing waits: ask spinio_map_wanted() now and then, and unmap. If that
 * takes longer than /proc/sys/fs/lease-break-time (45 s), the kernel lets him write all the same, and from then on the
 * address shows what the file was. */
void *spinio_map(int fd, off_t offset, size_t size, unsigned flags);

/* 1 if somebody waits to write the file of a map, else 0. EINVAL: there is no map at this address. */
int spinio_map_wanted(const void *address);

/* Ends a map. Kernels that read it must be done. EINVAL: there is none at this address. */
int spinio_unmap(const void *address);

/* ---- what happened --------------------------------------------------------------------------------------------- */

/* Routes, as indexes of struct spinio_counters. */
enum {
    SPINIO_ROUTE_COPY = 0,   /* page cache -> staging -> device; of writes each is meant the other way round */
    SPINIO_ROUTE_DMA = 1,    /* page cache -> device, out of the pages themselves */
    SPINIO_ROUTE_STORE = 2,  /* page cache -> CPU stores into a host-mapped buffer */
    SPINIO_ROUTE_DIRECT = 3, /* storage -> staging -> device */
    SPINIO_ROUTE_P2P = 4,    /* storage -> device */
    SPINIO_ROUTE_GATHER = 5, /* page cache -> device, fetched by a kernel */
    SPINIO_ROUTES = 6
};

struct spinio_route_counters {
    uint64_t pieces;      /* pieces moved */
    uint64_t bytes;       /* bytes moved */
    uint64_t nanoseconds; /* time spent on them, added up over threads */
};

struct spinio_counters {
    uint64_t reads;            /* device reads that returned */
    uint64_t read_bytes;       /* bytes they returned */
    uint64_t read_nanoseconds; /* time inside them, added up over threads */
    struct spinio_route_counters route[SPINIO_ROUTES];
    uint64_t writes;             /* device writes that returned */
    uint64_t written_bytes;      /* bytes they wrote */
    uint64_t write_nanoseconds;  /* time inside them, added up over threads */
    uint64_t batches;            /* batches that returned */
    uint64_t batch_bytes;        /* bytes they moved */
    uint64_t batch_nanoseconds;  /* time inside them, added up over threads */
};

/* Fills in the counters of this process. size: sizeof *out, so that programs and libraries of different age fit:
 * what the library does not know becomes 0, what the program does not know stays out. */
int spinio_stats(struct spinio_counters *out, size_t size);

/* The sentence about this thread's last failed call, hooked ones included; "" if none failed. It stays until the
 * thread's next failure. */
const char *spinio_last_error(void);

/* Version of the library, such as "0.1.0". */
const char *spinio_version(void);

#ifdef __cplusplus
}
#endif

#endif
