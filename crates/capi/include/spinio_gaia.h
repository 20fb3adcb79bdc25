/* spinio_gaia.h: files in GPU memory, consistent with CPU programs (libspinio.so).
 *
 * An example, complete but for the includes; shared.bin is below a GAIA mount (spinio gaia mount DIR):
 *
 *     static void kernel(void *gpu) { ++*(unsigned char *)gpu; }
 *
 *     int main(void)
 *     {
 *         int fd = open("shared.bin", O_RDWR);
 *         void *gpu = spinio_emulated_stream() ? spinio_gaia_map(fd, 0, 8192, SPINIO_GAIA_WRITE) : NULL;
 *         if (!gpu || spinio_gaia_acquire(gpu, 8192, SPINIO_GAIA_WRITE) < 0) // kernels see what others have written
 *             return fprintf(stderr, "%s\n", spinio_last_error()), 1;
 *         spinio_emulated_launch(kernel, gpu, NULL);                         // plain loads and stores
 *         if (spinio_gaia_release(gpu, 8192, 0) < 0)                         // others see what kernels have stored
 *             return fprintf(stderr, "%s\n", spinio_last_error()), 1;
 *         return spinio_gaia_unmap(gpu);
 *     }
 *
 * With CUDA the kernel is launched as any other, kernel<<<1, 1, 0, stream>>>(gpu), after spinio_set_stream(stream).
 *
 * CPU programs use the file as any other: open, read, write, mmap; they are neither changed nor linked with anything.
 * Several programs, on CPUs and GPUs, may write different bytes of one page at the same time: all are kept. If they
 * write the same byte without an order between them, one of the values remains, the same for all.
 *
 * An epoch is the time from acquire to release. A kernel may load only what was acquired, and store only what was
 * acquired with SPINIO_GAIA_WRITE. Nothing is visible to others before release; spinio_gaia_unmap() and a process that
 * ends drop stores that were not released. One release is not atomic for programs that read meanwhile.
 *
 * Device memory comes in chunks, from 2 to 64 MiB, with the first acquire of a page, and is in use until release: a file
 * may be larger than the device, if not all of it is acquired at the same time. If the device is full, or the limit of
 * the process is reached (SPINIO_GAIA_MEMORY), the chunk of any map of the process that was acquired least recently, and
 * of which nothing is in use, is evicted: its next acquire fetches the bytes again. If there is none, acquire fails with
 * ENOMEM. So release also what was acquired for reading. A kernel that uses memory of pages which are not acquired may
 * fail, as with any bad address.
 *
 * An epoch belongs to pages of 4096 bytes of a map, not to a thread: a range is extended to whole pages, and a release
 * ends the epoch of its pages for all threads. Threads of a process may call these functions at any time, and calls on
 * one map run one after another. During acquire and release of a page no kernel of another stream may store to it.
 *
 * If the GAIA server is restarted, CPU programs notice nothing, released stores are kept, and maps stay; but epochs
 * that were open are lost: their next call fails with ESTALE, once. Then acquire again, and redo the epoch. The same
 * happens to an epoch below which others overwrite more than the server has memory for.
 *
 * A file that is not below a mount can be mapped for reading while a daemon serves (spinio gaia serve): the processes of
 * a user share one copy on each GPU. Acquire fails with ETXTBSY while a process has the file open for writing; the map
 * keeps the bytes of its last acquire until the next one. Release has no effect there.
 *
 * A map never extends a file: stores past its end are dropped. Addresses are device addresses, sizes and offsets are
 * bytes. A forked child has no maps; those of its parent stay valid. Unless stated otherwise a function returns -1 and
 * sets errno when it fails, and spinio_last_error() of spinio.h returns a sentence about the cause. All may fail with
 * EIO: the device failed, or the mount has ended or was without a server for 30 s. ETIMEDOUT: a server has not
 * answered a new connection for 30 s.
 */
#ifndef SPINIO_GAIA_H
#define SPINIO_GAIA_H

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    SPINIO_GAIA_READ = 1,    /* load */
    SPINIO_GAIA_WRITE = 2,   /* load and store */
    SPINIO_GAIA_OVERWRITE = 4, /* acquire: store to all of the range; its bytes are not fetched */
    SPINIO_GAIA_IN_PLACE = 8,  /* map: kernels use the page cache, without memory of the device */
    SPINIO_GAIA_DISCARD = 32, /* release: end the epoch and publish nothing */
    SPINIO_GAIA_HANDOFF = 64 /* release: the memory may be given away, instead of a copy of it */
};

/* Maps a range of a file into memory of the device of the current CUDA context; without one, of the emulated GPU if the
 * process uses it (spinio_emulated_stream() starts it). offset: a multiple of 4096. The range may end past the end of
 * the file. access: READ, or WRITE, which includes READ. The descriptor may be closed afterwards. Returns the device
 * address of the first byte, at a multiple of 4096, or NULL and errno. EACCES: the descriptor is not open for this
 * access (O_RDONLY or O_RDWR for READ, O_RDWR for WRITE). EBADF: no descriptor. EINVAL: offset, an empty range, unknown
 * bits of access. ENODEV: no device is in use. ENOMEM: the server has no memory for a map of this size, or the device
 * has no addresses, or is full and has no memory in chunks. ENOTSUP: not a file below a GAIA mount, and either access
 * is WRITE, or no daemon serves, or the file system has no leases that exclude all writers; or the device cannot map
 * files; or Linux is too old (6.16, without a mount 6.9); or a forked child of a process with maps. EUSERS: this user
 * has too many maps. ETXTBSY: another process has a lease on it. */
void *spinio_gaia_map(int fd, off_t offset, size_t size, unsigned access);

/* With SPINIO_GAIA_READ | SPINIO_GAIA_IN_PLACE kernels load the pages of the Linux kernel's page cache over the bus. The
 * map has no memory of the device, and nothing is copied: for files of which kernels read little, or once. What CPU programs
 * write to pages that were acquired may be seen at once. An acquire registers again what has changed otherwise, for which
 * it waits for kernels that run on the device, also those that use other memory. Only of files below a mount; in stream
 * order there is no acquire (ENOTSUP). EINVAL: with WRITE. ENOTSUP also: the device cannot read registered pages. Where a
 * program cuts the file, kernels on the emulated GPU must not load the pages that go, as with any mapping: SIGBUS.
 *
 * Where kernels of the device access all memory of the process (HMM, or the CPU's page tables: in_place in
 * spinio_gaia_info is 2 or 3) the map is a shared mapping of the file, with WRITE a writable one, and kernels are CPU
 * programs: loads and stores are coherent with all others at once. Then
 *  - nothing is registered, and no acquire waits for kernels. It returns the bytes of the range that are in the file; whole
 *    pages past its end are zeros until the next acquire, and stores to them are dropped;
 *  - stores are visible before they are released, also those of a program that dies. A release waits for the thread's
 *    stream and returns 0. SPINIO_GAIA_DISCARD ends the epoch, and fails with ENOTSUP if it was one for writing;
 *  - in stream order an acquire has its effect when it is called, and a release sets *published to 0;
 *  - files that are below no mount can be mapped for reading, without a daemon: what programs write is seen at once;
 *  - a page that a program cuts off while a kernel uses it ends the process (SIGBUS) or, on a GPU, the context;
 *  - atomic functions fail on pages of files, where the GPU has no atomics on memory of the host (with HMM). */

/* Unmaps; address is that of spinio_gaia_map(). Stores that were not released are dropped. Kernels that use the map
 * must have finished. EINVAL: no map begins at this address, for example because it was unmapped already. */
int spinio_gaia_unmap(void *address);

/* Begins an epoch for the pages of a range, or extends it. It starts after the work queued on the thread's stream
 * (spinio_set_stream), and when it returns, kernels see what CPU programs had written and other maps had released when
 * it was called. Inside an epoch the program's own stores are kept. Returns the bytes of the range that are in the
 * file; those past its end are zeros. EINVAL: the range is empty or not within one map, or unknown bits of access.
 * EACCES: the map is read-only. ENOMEM: all device memory for maps is in use; release, or acquire a smaller range.
 * ESTALE: see above. EBUSY: the stream is being captured into a graph. Of a file that is not below a mount: ETXTBSY, a
 * process has it open for writing; EPERM, nothing excludes writers, since the file is another user's; ENOMEM, the
 * device or the daemon's limit has no room; EIO, the daemon has ended. After any other error, as EIO from the disk, an
 * epoch of the map that was open may be lost too. */
ssize_t spinio_gaia_acquire(void *address, size_t size, unsigned access);

/* With SPINIO_GAIA_OVERWRITE, alone or with WRITE, the program says that it will store to every byte of the range before it
 * releases: pages that lie wholly in it are not fetched, what the memory has there is not defined, and release publishes
 * all of them. For files that are written from the GPU, as checkpoints. Make the file as long as needed before
 * (ftruncate): a map does not extend it. Pages that are in an epoch for writing already stay as they are. */

/* Publishes the stores to the pages of a range, and ends their epoch, with flags 0: the kernels that use them have
 * finished, or are queued on the thread's stream, after which it starts. When it returns, loads and reads of CPU
 * programs return the new bytes, also through mappings that exist already. Returns the bytes of the pages that were
 * published, 0 if no store changed a byte. All pages or none. Of pages that were acquired for reading only it publishes
 * nothing, and returns 0: it says that kernels no longer use them. One release gives up all earlier acquires. EINVAL:
 * the range is not within one map, or a page of it was not acquired since its last release. ESTALE: see above. EBUSY:
 * as above. ENOSPC: the server has no memory for so many pages; the epoch goes on, parts of the range may fit.
 * ETIMEDOUT: copies from the device waited for other work for more than 10 s; the epoch goes on.
 *
 * With SPINIO_GAIA_DISCARD the stores are dropped instead: no program sees them, and the next acquire fetches the pages
 * again. Returns 0. Pages that were acquired for reading are given up, others stay as they are, and an epoch that was
 * lost just ends: neither EINVAL for that nor ESTALE.
 *
 * With SPINIO_GAIA_HANDOFF the release may hand the chunks of device memory that lie wholly in the range over to the
 * server, which copies them after the release has returned: programs that use the file wait for that. The pages are
 * unmapped, and the next acquire fetches them; kernels must not use them before. A hint: where it is not possible
 * (releases_handed_over in spinio_gaia_info), and in stream order, it is an ordinary release. If the device cannot give
 * the bytes any more, the next fsync fails with EIO. */
ssize_t spinio_gaia_release(void *address, size_t size, unsigned flags);

/* The same in the order of a stream (CUDA: a cudaStream_t; NULL is the default stream): both return 0 without waiting,
 * begin when the work that was queued on the stream before is done, and work that is queued on it afterwards waits until
 * they are done. So acquire_async, kernels and release_async need no wait on the CPU between them:
 *
 *    spinio_gaia_acquire_async(gpu, size, SPINIO_GAIA_WRITE, stream);
 *    kernel<<<grid, block, 0, stream>>>(gpu);
 *    spinio_gaia_release_async(gpu, size, 0, stream, &published);
 *
 * *published, unless published is NULL, is set to the bytes published or to a negative errno before the stream goes on.
 * EINVAL, EACCES: as above, as far as it can be seen at once. ENOMEM: as above. Memory for chunks is allocated and
 * freed by the call itself, and not beside a stopped stream: such a call waits until no call is queued on the GPU.
 * EBUSY: the stream is being captured into a graph. ENOTSUP: the device has no such calls, or the file is not below a
 * mount.
 *
 * What fails later (ESTALE, EIO, EINVAL for a release without an acquire, ...) is reported once: by the next acquire,
 * release or sync of the map, of either kind, which does nothing else. Until then no call that is queued on the map runs,
 * nor one that was queued before the report: *published is set to the errno of the failure. Kernels between them do run.
 * So after a failure wait for the stream, discard the epoch (SPINIO_GAIA_DISCARD), acquire again, and redo it.
 *
 * spinio_gaia_acquire(), _release(), _sync() and _unmap() wait for all calls that are queued on the map. While calls are
 * queued, memory of CUDA should not be freed or registered (cudaFree, cudaHostRegister): that may wait for the stream
 * with a lock of the driver. If the GPU does not run the copies of a call for 60 s, the call fails with EDEADLK, and the
 * stream goes on. Calls on all maps of a GPU run one after another; at most 4 of them are queued, the next one waits.
 * With CUDA_DEVICE_MAX_CONNECTIONS below 8 nothing is sure to run beside a stopped stream: there these calls wait for the
 * stream, and have done their work when they return.
 * An acquire copies the bytes of the file through the CPU, so that a large first acquire is faster with
 * spinio_gaia_acquire(). */
int spinio_gaia_acquire_async(void *address, size_t size, unsigned access, void *stream);
int spinio_gaia_release_async(void *address, size_t size, unsigned flags, void *stream, ssize_t *published);

/* Returns when all that was released of the range before the call is on storage, as after fsync(): bytes that CPU
 * programs have written, too. Stores that were not released are not included. Any program may call fsync() instead.
 * EINVAL: the range is not within one map. EIO, ENOSPC, EDQUOT: of the file system below the mount. */
int spinio_gaia_sync(void *address, size_t size);

/* Advice, with the numbers of POSIX_MADV_*. */
enum {
    SPINIO_GAIA_RANDOM = 1,     /* the file below the mount will be read without order, ... */
    SPINIO_GAIA_SEQUENTIAL = 2, /* ... or in order; both for the whole map, until the next advice of the two */
    SPINIO_GAIA_WILLNEED = 3,   /* begins to read the range into host memory, and does not wait */
    SPINIO_GAIA_DONTNEED = 4,   /* drops the pages that are in no epoch for writing: the next acquire fetches them. Gives
                                   up those that were acquired for reading, and frees chunks that lie in the range */
    SPINIO_GAIA_LEND = 16       /* CPU reads of the range may be answered from this memory, where the host has the file not
                                   cached. For chunks that lie in the range; reads their pages of the file once. They stay
                                   in device memory until DONTNEED or unmap */
};

/* Says how a range will be used. Kernels must not use pages that were dropped before they are acquired again. DONTNEED
 * waits for calls that are queued on the GPU. Without effect on maps of leased files. EINVAL: the range is not within
 * one map, or unknown advice. LEND: ENOTSUP, the device has no memory that it can share; ENFILE, the mount has 4096 chunks,
 * or an eighth of its descriptors; EIO, ENODEV, the daemon cannot use the device. */
int spinio_gaia_advise(void *address, size_t size, int advice);

/* What a map has done. */
struct spinio_gaia_info {
    uint64_t file_size;            /* bytes of the file when it was last acquired */
    uint64_t acquires;             /* acquires that returned */
    uint64_t releases;             /* releases that were committed */
    uint64_t bytes_from_file;      /* brought to the device from the file below the mount */
    uint64_t bytes_from_snapshots; /* brought to the device from released pages that were not in the file yet */
    uint64_t pages_patched;        /* pages that got bytes of other writers inside an epoch */
    uint64_t bytes_published;      /* by releases */
    uint64_t pages_committed;      /* released pages whose bytes were new */
    uint64_t pages_merged;         /* among them, pages that others had changed meanwhile */
    uint64_t reattached;           /* times that the map was attached to a new server */
    uint64_t releases_recovered;   /* releases that a server had committed before it ended */
    uint64_t bytes_shared;         /* of leased files: brought to the device by other processes */
    uint64_t acquires_unchanged;   /* of the acquires: sent no message, because nothing had changed */
    uint64_t device_bytes;         /* of device memory that the map has now; of leased files, also what others have too */
    uint64_t chunks_evicted;       /* times that a chunk of the map was evicted */
    uint64_t bytes_registered;     /* by acquires of a map with SPINIO_GAIA_IN_PLACE */
    uint64_t bytes_from_peer;      /* copied from another GPU that had them, instead of read from the file */
    uint64_t peer_refused;         /* why such a copy was not possible, the last time; 0: it was. 1: the process does not
                                    * have that GPU. 2: the two cannot access each other's memory. 3: its memory could not
                                    * be imported. 4: the copy failed. Of a mounted file also, 6: a call on the other map
                                    * was under way. 7: the other map had an epoch of the pages, or had lost them. 8: it had
                                    * changed or lost pages when they were copied */
    uint64_t releases_handed_over; /* of the releases: with SPINIO_GAIA_HANDOFF, and it was possible */
    uint64_t peer_bytes_refused;   /* of a mounted file: another GPU had them, and they could not be copied from there */
    /* Where the time of acquires went, in nanoseconds; not of those that sent no message. */
    uint64_t flush_ns;             /* CPU programs' dirty pages were handed to the server */
    uint64_t plan_ns;              /* the server listed the pages to fetch */
    uint64_t read_ns;              /* they were read from the file */
    uint64_t copy_ns;              /* those that were not read into device memory were copied there */
    uint64_t confirm_ns;           /* the server was told, and listed pages that had changed meanwhile */
    uint64_t scan_ns;              /* fingerprints, to know later what kernels have changed */
    /* The same of releases. */
    uint64_t release_scan_ns;      /* fingerprints, to know what kernels have changed */
    uint64_t release_copy_ns;      /* changed pages were copied to the server's memory */
    uint64_t release_commit_ns;    /* they were made visible */
    uint64_t in_place;             /* how kernels use the page cache: 0, they do not. 1: as registered pages. 2: as any
                                    * memory of the process, by page faults (HMM). 3: the same, by the CPU's page tables */
};

/* Returns the counters of the map that contains address in *out. size: sizeof *out, so that programs and libraries of
 * different versions fit: fields that the library does not know become 0, fields beyond size are left out. EINVAL: no
 * map contains this address. EFAULT: out is NULL. */
int spinio_gaia_info(const void *address, struct spinio_gaia_info *out, size_t size);

/* ---- on-demand reads from kernels ------------------------------------------------------------------------------
 *
 * A kernel reads elements of a file that may be larger than device memory, without a map: gaia::reader of
 * spinio/gaia_device.h (device/ in SPIN's source). Pages of the file are in a cache in device memory; a kernel that needs
 * another page requests it and waits, while threads of this library read it. For any regular file that is open for
 * reading, mounted or not. A page has the bytes that the file had when it was read, as after pread(): a later change of
 * the file is seen once the page was replaced, or by another reader. */

/* What a kernel needs: passed to it by value. */
struct spinio_gaia_reader {
    uint64_t size;        /* bytes of the file when it was opened */
    uint64_t timeout_ns;  /* how long a kernel waits for a page: 30 s; may be changed before the struct is passed */
    uint64_t id;          /* the rest is not for programs */
    uint64_t frames, tags, tickets, results, locks, tail, ring, done, taken, staged, stop;
    uint32_t page_shift, sets, entries, prefetch;
};

struct spinio_gaia_reader_stats {
    uint64_t fills;   /* pages that were read for kernels */
    uint64_t bytes;   /* their bytes */
    uint64_t errors;  /* pages that could not be read */
};

/* Opens a reader on the device that spinio_gaia_map() would use. cache_bytes of its memory are for pages, with some
 * 0.04 to 0.6 % more for their table, and up to 16 MiB of pinned host memory for pages on their way. page_bytes: 4096, 8192, ... 65536. advice: 0, or SPINIO_GAIA_RANDOM, with which no
 * page is requested ahead. The descriptor may be closed afterwards. EINVAL: page_bytes; fewer than 8 pages or more than
 * 1048576; unknown advice. not a regular file. EBADF: no descriptor. EACCES: not open for reading. ENODEV: no device is in use. ENOMEM: the
 * device is full. EFAULT: out is NULL. */
int spinio_gaia_reader_open(int fd, size_t cache_bytes, unsigned page_bytes, unsigned advice, struct spinio_gaia_reader *out);

/* Closes it: kernels that wait for a page get ECANCELED, and no kernel may use it afterwards. Waits until the kernels
 * of the device have ended, as cudaFree() does. EBADF: it is closed already. */
int spinio_gaia_reader_close(const struct spinio_gaia_reader *reader);

/* Returns its counters in *out. size: sizeof *out, as in spinio_gaia_info(). */
int spinio_gaia_reader_stats(const struct spinio_gaia_reader *reader, struct spinio_gaia_reader_stats *out, size_t size);

/* The names of the paper (Brokhman et al., USENIX ATC 2019), for programs that were written for it.
 *
 * mmap(NULL, size, protection, MAP_ONGPU, fd, offset) is spinio_gaia_map(): PROT_READ, or PROT_WRITE for both. It takes
 * no other flags (EOPNOTSUPP), and returns MAP_FAILED instead of NULL. munmap() with the same address and size is
 * spinio_gaia_unmap(), of all maps; EINVAL for a part of a map, and for more than one. Both are libspinio.so's,
 * preloaded or linked: without it, mmap() fails with EOPNOTSUPP, because MAP_ONGPU has the bits of
 * MAP_SHARED_VALIDATE. */
#ifndef MAP_ONGPU
#define MAP_ONGPU 0x2000003
#endif

/* spinio_gaia_acquire() for what the map may do: 0, or -1 and errno. device is not used: an address has one device. */
static inline int macquire(void *address, size_t size, void *device)
{
    int before = errno;
    ssize_t done = spinio_gaia_acquire(address, size, SPINIO_GAIA_WRITE);
    (void)device;
    if (done < 0 && errno == EACCES) {
        done = spinio_gaia_acquire(address, size, SPINIO_GAIA_READ);
        if (done >= 0)
            errno = before;
    }
    return done < 0 ? -1 : 0;
}

/* spinio_gaia_release(): 0, or -1 and errno. */
static inline int mrelease(void *address, size_t size, void *device)
{
    (void)device;
    return spinio_gaia_release(address, size, 0) < 0 ? -1 : 0;
}

#ifdef __cplusplus
}
#endif

#endif
