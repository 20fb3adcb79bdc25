/* spinio.h: the C API of SPIN (libspinio.so).
 *
 * Most programs need none of this: under LD_PRELOAD=libspinio.so, or linked with -lspinio, plain pread(), read(),
 * readv(), preadv() and fread() accept device memory, and so do write(), pwrite(), writev(), pwritev() and fwrite().
 * This header is for memory of devices that have no allocator of their own, for stream-ordered reads and writes, for
 * batches and pinned files, and for counters.
 *
 * Unless stated otherwise a function returns -1 and sets errno when it fails, and spinio_last_error() returns a message
 * about the cause. All functions may be called from any thread, none from a signal handler.
 */
#ifndef SPINIO_H
#define SPINIO_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* For names that the next release no longer has. */
#ifndef SPINIO_DEPRECATED
#if defined(__GNUC__)
#define SPINIO_DEPRECATED(instead) __attribute__((deprecated(instead)))
#else
#define SPINIO_DEPRECATED(instead)
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- memory ---------------------------------------------------------------------------------------------------- */

/* The CPU can load from and store to the memory, at the same address. */
#define SPINIO_MEM_HOST_MAPPED 1u

/* Allocates memory of a device; NULL and errno on failure:
 *   "emulated", "emulated:0"   the software GPU; "emulated:1" .. "emulated:7" where SPINIO_EMULATED has devices=8
 *   "p2pmem:0"                 PCI memory that the kernel publishes for peer-to-peer, counted from 0
 * CUDA memory comes from CUDA's own allocators. flags: 0 or SPINIO_MEM_HOST_MAPPED.
 * EINVAL: size 0, unknown flags. ENODEV: no such device. ENOMEM: the device is full. */
void *spinio_mem_alloc(const char *device, size_t size, unsigned flags);

/* Frees memory of spinio_mem_alloc(), after all work queued on it is done. NULL is allowed. */
int spinio_mem_free(void *memory);

/* Copies size bytes between host and device memory, in any direction, and waits until the copy is complete. It starts
 * after all reads that this thread has made into either memory. EFAULT if device memory ends before size bytes. */
int spinio_mem_copy(void *to, const void *from, size_t size);

/* ---- reads ----------------------------------------------------------------------------------------------------- */

/* As pread(), into host or device memory, but a size above 0x7ffff000 bytes (2 GiB minus a page) is read completely. */
ssize_t spinio_pread(int fd, void *buffer, size_t size, off_t offset);

/* Reads the file now and queues the copies into device memory on a stream of the device (CUDA: a cudaStream_t).
 * Returns the number of bytes that will be in the buffer when the stream has reached that point. Until then it occupies
 * bounce buffers of that length; if twice SPINIO_BOUNCE_LIMIT is occupied in this way, the call waits until a stream
 * advances.
 * EFAULT if the buffer is not device memory, EBUSY if the stream is being captured into a graph. */
ssize_t spinio_pread_async(int fd, void *buffer, size_t size, off_t offset, void *stream);

/* Sets the stream with which this thread's reads and writes are ordered from now on, including hooked ones: a
 * cudaStream_t, NULL for the default stream. Small reads are queued on it; larger reads, and writes, start after the
 * work queued there. */
void spinio_set_stream(void *stream);

/* ---- GPU kernels of the emulated GPUs --------------------------------------------------------------------------
 *
 * For headers that build GPU kernels for them (device/ in SPIN's source builds them from CUDA C++), and for tests.
 * SPINIO_EMULATED=devices=2 makes two. Each thread uses one of them, the first until it chooses another. ENODEV: there is
 * no such device. */

/* The number of emulated GPUs; 1 unless SPINIO_EMULATED says otherwise. */
int spinio_emulated_device_count(void);

/* Chooses the emulated GPU that this thread uses: for new streams, for the default stream, and for maps of files. */
int spinio_emulated_set_device(int device);

/* The number of the one that this thread uses. */
int spinio_emulated_device(void);

/* Whether kernels of a device can access the memory of another one: 1 or 0. */
int spinio_emulated_can_access_peer(int device, int peer);

/* Kernels of the device that this thread uses may access the memory of another one from now on (that of
 * spinio_mem_alloc(), not maps of files). EEXIST: they may already. ENODEV: they cannot. */
int spinio_emulated_enable_peer_access(int peer);

/* Queues a copy from device memory to device memory, of the same or of two devices, on a stream of either. EINVAL if one
 * is not device memory of `size` bytes. */
int spinio_emulated_copy(void *to, const void *from, size_t size, void *stream);

/* Queues a call of kernel(argument) on a stream of an emulated GPU; NULL is the default stream of the one that this
 * thread uses. It runs on a thread of the library, calls of different streams side by side, and only during such calls
 * can the CPU access the memory of that device, as of spinio_mem_alloc("emulated", ...). */
int spinio_emulated_launch(void (*kernel)(void *), void *argument, void *stream);

/* Creates a stream of the emulated GPU that this thread uses, ordered with its default stream in both directions as a
 * blocking CUDA stream is; NULL and errno on failure. It exists until the process ends. */
void *spinio_emulated_stream(void);

/* The same, ordered with no other stream, as a CUDA stream with cudaStreamNonBlocking. */
void *spinio_emulated_stream_nonblocking(void);

/* Waits for all work queued on a stream; NULL: on all streams of the device that this thread uses. */
int spinio_emulated_wait(void *stream);

/* ---- writes ---------------------------------------------------------------------------------------------------- */

/* As pwrite(), from host or device memory, but a size above 0x7ffff000 bytes (2 GiB minus a page) is written
 * completely. */
ssize_t spinio_pwrite(int fd, const void *buffer, size_t size, off_t offset);

/* Queues a pwrite() of device memory on a stream of the device (CUDA: a cudaStream_t) and returns 0. When the stream
 * reaches that point the file is written, and then *written, unless it is NULL, is set to the bytes written or to a
 * negative errno; work queued after it on the stream waits for both. The file may be closed meanwhile. Writes larger
 * than the bounce limit (SPINIO_BOUNCE_LIMIT) are made before the call returns, after the queued work. Until the stream
 * reaches the write, the write occupies memory of its length, for which no other request waits. At most twice
 * SPINIO_BOUNCE_LIMIT of that memory is pinned; above it CUDA copies only while the caller waits, so if the stream
 * waits for a later action of this thread, the call never returns. EFAULT if the buffer is not device memory, ESPIPE if
 * the file has no offsets, EBADF if it is not open for writing, EBUSY if the stream is being captured into a graph. */
int spinio_pwrite_async(int fd, const void *buffer, size_t size, off_t offset, void *stream, ssize_t *written);

/* ---- batches --------------------------------------------------------------------------------------------------- */

/* One read of a batch. Set reserved to 0. */
struct spinio_read_op {
    int fd;
    unsigned reserved;
    uint64_t offset; /* in the file */
    uint64_t size;   /* bytes to read */
    void *buffer;    /* device or host memory */
    int64_t result;  /* set by the batch: bytes read, short at the end of the file or of the buffer, or -errno */
};

/* Executes all reads, in any order, and waits for them: thousands of small reads cost little more than their bytes.
 * Each has the result of the corresponding pread(); a failed read does not affect the others. The batch starts after
 * all work queued on the device before. Returns the total number of bytes read, or -1 if the batch could not start. */
ssize_t spinio_batch(struct spinio_read_op *ops, size_t count);

/* The same for one file, with the reads given as arrays. results may be NULL. */
ssize_t spinio_batch_file(int fd, const uint64_t *offsets, const uint64_t *sizes, void *const *buffers, int64_t *results, size_t count);

/* The same for reads of one size, which are placed one after the other in one buffer. results may be NULL. */
ssize_t spinio_batch_fixed(int fd, const uint64_t *offsets, size_t size, void *buffer, int64_t *results, size_t count);

/* The handle of an asynchronous batch. */
typedef struct spinio_batch_handle spinio_batch_handle;

/* Submits a batch, which starts after the work queued on the device now, and returns; NULL and errno if it could not
 * start. Until spinio_batch_wait() has returned, the array, the buffers and the descriptors must stay valid, and no
 * thread may access the array. */
spinio_batch_handle *spinio_batch_submit(struct spinio_read_op *ops, size_t count);

/* 1 if every read has its result, 0 if not, -1 and errno on failure. EINVAL: batch is NULL. ESRCH: the parent process has
 * submitted it. */
int spinio_batch_poll(const spinio_batch_handle *batch);

/* Waits until every read has completed or failed, and frees the handle: call it exactly once per batch. Returns what
 * spinio_batch() returns. A forked child cannot wait for a batch of its parent: ESRCH, and only its copy of the handle is
 * freed. */
ssize_t spinio_batch_wait(spinio_batch_handle *batch);

/* ---- pinned files ----------------------------------------------------------------------------------------------- */

/* Pins a file: keeps its pages registered with the device (CUDA: of the current context), for repeated reads: large
 * reads are DMA directly from the pages, batches use the gather kernel. The file is read into memory and stays there;
 * the limit is SPINIO_PIN_LIMIT. A read lease prevents writes meanwhile: a process that opens the file for writing, or
 * truncates it, waits until the pages are unpinned, which takes milliseconds; with O_NONBLOCK its call fails with
 * EAGAIN meanwhile. From then on reads are served as if the file had never been pinned. A file may be pinned more than
 * once. ETXTBSY: open for writing. EACCES: not owned by this user, and neither sealed nor immutable nor on a read-only
 * file system. EOPNOTSUPP: the file system has no leases, or is an overlay. ENOMEM: above the limit, or the pages
 * cannot be mapped (RLIMIT_AS) or registered. EAGAIN: no worker threads. ENODEV: no device in use reads host memory.
 * EINVAL: not a regular file, or an empty one. */
int spinio_pin_file(int fd);

/* Unpins the file; call it once for each spinio_pin_file(). Closing the descriptor that was passed to spinio_pin_file()
 * unpins it too, for all calls. ESTALE: not pinned, or no longer pinned. */
int spinio_unpin_file(int fd);

/* 1 if the file is pinned and no process waits to write it, else 0. */
int spinio_is_pinned(int fd);

/* Returns an address at which GPU kernels read a pinned file in place; pins the file if it is not pinned. Read-only,
 * for the device only; flags must be 0. NULL and errno as for spinio_pin_file(); EINVAL if the range is not within the
 * file. While the file is mapped, a process that opens it for writing waits: poll spinio_map_revoked(), and unmap. If
 * that takes longer than /proc/sys/fs/lease-break-time (45 s), the Linux kernel lets the process write nevertheless,
 * and from then on the address shows the old contents of the file. */
void *spinio_map(int fd, off_t offset, size_t size, unsigned flags);

/* 1 if a process waits to write the file of a mapping, else 0. EINVAL: no mapping at this address. */
int spinio_map_revoked(const void *address);

/* Unmaps. GPU kernels that read the mapping must have finished. EINVAL: no mapping at this address. */
int spinio_unmap(const void *address);

/* ---- counters and errors --------------------------------------------------------------------------------------- */

/* Routes, as indexes of struct spinio_counters. */
enum {
    SPINIO_ROUTE_COPY = 0,   /* page cache -> bounce buffer -> device; for writes each in the opposite direction */
    SPINIO_ROUTE_DMA = 1,    /* page cache -> device, directly from the pages */
    SPINIO_ROUTE_STORE = 2,  /* page cache -> CPU stores into a host-mapped buffer */
    SPINIO_ROUTE_DIRECT = 3, /* storage -> bounce buffer -> device */
    SPINIO_ROUTE_P2P = 4,    /* storage -> device */
    SPINIO_ROUTE_GATHER = 5, /* page cache -> device, fetched by a GPU kernel */
    SPINIO_ROUTES = 6
};

struct spinio_route_counters {
    uint64_t pieces;      /* segments moved */
    uint64_t bytes;       /* bytes moved */
    uint64_t nanoseconds; /* time spent on them, summed over threads */
};

struct spinio_counters {
    uint64_t reads;            /* device reads that returned */
    uint64_t read_bytes;       /* bytes they returned */
    uint64_t read_nanoseconds; /* time inside them, summed over threads */
    struct spinio_route_counters route[SPINIO_ROUTES];
    uint64_t writes;             /* device writes that returned */
    uint64_t written_bytes;      /* bytes they wrote */
    uint64_t write_nanoseconds;  /* time inside them, summed over threads */
    uint64_t batches;            /* batches that returned */
    uint64_t batch_bytes;        /* bytes they moved */
    uint64_t batch_nanoseconds;  /* time inside them, summed over threads */
};

/* Returns the counters of this process in *out. size: sizeof *out, so that programs and libraries of different versions
 * fit: fields that the library does not know become 0, fields beyond size are left out. */
int spinio_stats(struct spinio_counters *out, size_t size);

/* The message about this thread's last failed call, hooked calls included; "" if none failed. Valid until the thread's
 * next failure. */
const char *spinio_last_error(void);

/* The version of the library, such as "0.1.0". */
const char *spinio_version(void);

/* ---- names of earlier releases ----------------------------------------------------------------------------------
 *
 * The next release no longer has them: docs/deprecated.md. */

#define spinio_piece spinio_read_op
#define spinio_batch_ticket spinio_batch_handle

int spinio_hold(int fd) SPINIO_DEPRECATED("use spinio_pin_file");
int spinio_release(int fd) SPINIO_DEPRECATED("use spinio_unpin_file");
int spinio_is_held(int fd) SPINIO_DEPRECATED("use spinio_is_pinned");
int spinio_map_wanted(const void *address) SPINIO_DEPRECATED("use spinio_map_revoked");

#ifdef __cplusplus
}
#endif

#endif
