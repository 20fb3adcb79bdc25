/* nvmmu.h: moves a file range to or from device memory in one call (libspinio.so).
 *
 *     nvmmuBegin(1, "out.bin");                               names the output: its storage is prepared
 *     nvmmuMove("in.bin", device_in, 0, bytes, H2D);          file -> device
 *     kernel<<<grid, block>>>(device_in, device_out);         the preparation continues meanwhile
 *     nvmmuMove("out.bin", device_out, 0, bytes, D2H);        device -> file, after the kernel has finished
 *     nvmmuEnd(1);                                            all bytes are in the file
 *
 * The three functions with capital letters are those of the NVMMU paper (PACT 2015, Table I), with the same arguments
 * and return values. The others report the cause of a failure: -1 and errno, and spinio_last_error() of spinio.h
 * returns a message. It returns one after a failed call of the paper's functions too.
 *
 * A session belongs to the thread that began it. Files stay open between its moves, outside the program's descriptor
 * table. A move is ordered on the device as a cudaMemcpy would be, or with the stream of spinio_set_stream(). It is not
 * a POSIX call: its bytes may reach the file in several writes, and small consecutive downloads are gathered and are in
 * the file when the session ends or is flushed. docs/nvmmu.md describes when to use moves, and when pread and pwrite.
 *
 * None of these functions may be called from a signal handler. A forked child has no session: its parent's session
 * continues in the parent only; and the child cannot wait for a ticket of its parent (ESRCH). Gathered bytes are lost
 * if a process ends without nvmmuEnd.
 */
#ifndef NVMMU_H
#define NVMMU_H

#include <stddef.h>
#include <stdint.h>

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

/* Directions: from the file to the device, and from the device to the file. */
enum { H2D = 1, D2H = 2 };

/* ---- as in the paper -------------------------------------------------------------------------------------------- */

/* Begins a session of this thread. threadId: any number that no other thread uses now. downloadFileName: the output
 * file for results, created if it does not exist and never truncated, or NULL. Returns 1, or 0 on failure. */
int nvmmuBegin(int threadId, const char *downloadFileName);

/* Moves length bytes between a file, starting at offset, and device memory. Returns the bytes moved: fewer than length
 * only if an upload reaches the end of its file. 0 on failure, but also for an upload from the end of its file on, and
 * for a length of 0: nvmmu_move() tells these apart. */
int nvmmuMove(const char *fileName, void *gpuMemPtr, int offset, int length, int direction);

/* Ends the session: writes the gathered bytes and closes every file. Returns 1, or 0 on failure. */
int nvmmuEnd(int threadId);

/* ---- with 64-bit sizes and errno --------------------------------------------------------------------------------- */

/* As nvmmuBegin; returns 0, or -1 and errno. EBUSY: this thread, or another thread with this number, has a session
 * already. Else the errors of open(). */
int nvmmu_begin(int thread, const char *download);

/* As nvmmuMove; -1 and errno on failure, also where an error comes after some bytes. Any part of the range may have been
 * moved then.
 * ESRCH: no session. EINVAL: unknown direction, no file name, a negative offset or length. EFAULT: not device memory,
 * or it ends before the range ends. Else the errors of open(), pread() or pwrite(). */
int64_t nvmmu_move(const char *file, void *device, int64_t offset, int64_t length, int direction);

/* Announces the range of a later download in the output, as early as it is known: on an array with parity (RAID-5,
 * RAID-6), the rest of its first and last stripe is then read while the GPU kernel runs. May be called several times.
 * Without it the session expects the range that the previous session on that file wrote. Returns 0, or -1 and errno. */
int nvmmu_hint_range(int64_t offset, int64_t length);

/* Writes the gathered bytes, so that other processes read them in the output; if sync is not 0, waits until the output
 * is on storage. Does not wait for other files with downloads. Returns 0, or -1 and errno: gathered bytes that could not
 * be written are kept for the next flush. */
int nvmmu_flush(int sync);

/* ---- stream-ordered moves ---------------------------------------------------------------------------------------- */

struct nvmmu_ticket;

/* As nvmmu_move, but the move begins after all work queued on a stream (CUDA: a cudaStream_t), and work queued there
 * afterwards sees the bytes on the device, or may reuse the memory. Returns 0, and a ticket unless `ticket` is NULL;
 * the end of the session waits for a move without a ticket. These are complete on return: a download into an output on
 * an array with parity, a download larger than the bounce buffers (SPINIO_BOUNCE_LIMIT), an upload of a file without a
 * size (/dev/zero, procfs), any move on a device without host functions. EBUSY: the stream is being captured into a
 * graph. */
int nvmmu_move_async(const char *file, void *device, int64_t offset, int64_t length, int direction, void *stream, struct nvmmu_ticket **ticket);

/* Waits for a move and frees its ticket; call it once. Returns what nvmmu_move would have returned. Also the end of the
 * session and a flush report the error of a move, in case its ticket is dropped or waited for later. */
int64_t nvmmu_wait(struct nvmmu_ticket *ticket);

/* 1 if the move is complete, else 0. */
int nvmmu_done(const struct nvmmu_ticket *ticket);

/* A stream, and device memory for the input and the output of one piece. */
struct nvmmu_slot {
    void *stream;
    void *input;
    void *output;
};

/* A piece on the device: its number, counted from 0, and its length in bytes. */
struct nvmmu_step {
    uint64_t number;
    uint64_t length;
    struct nvmmu_slot slot;
};

/* The pieces of a pipeline: consecutive pieces of the input file; their results are written consecutively to the
 * output. */
struct nvmmu_pieces {
    const char *input;
    int64_t input_offset;
    int64_t input_length;
    int64_t piece; /* bytes per piece; the last may be shorter */
    const char *output;
    int64_t output_offset;
};

/* Moves pieces through the slots in turn, so that with three slots an upload, a GPU kernel and a download overlap. For
 * each piece kernel(step, context) queues work on the step's stream and returns the number of output bytes of this
 * work, or a negative number to stop; it must not use the session meanwhile (EBUSY). Returns the bytes written, or -1
 * and errno. ECANCELED: kernel returned a negative number. EINVAL: the input ends before the last piece does, also if
 * that is found out after a kernel has worked on the piece. */
int64_t nvmmu_pipeline(const struct nvmmu_pieces *pieces, const struct nvmmu_slot *slots, size_t count, int64_t (*kernel)(const struct nvmmu_step *, void *), void *context);

/* ---- the end ----------------------------------------------------------------------------------------------------- */

/* How far an output was prepared. */
enum {
    NVMMU_NO_OUTPUT = 0,   /* no output named */
    NVMMU_PASSTHROUGH = 1, /* written unaligned: no array with parity, or its stripe geometry is unknown */
    NVMMU_ALIGNED = 2,     /* full stripes written aligned; others had the file open, or no lease was granted */
    NVMMU_PREREAD = 3      /* partly covered stripes too: their old bytes were read beforehand */
};

/* A field, and its name in earlier releases. C99 has no anonymous union, but compilers do. */
#if defined(__GNUC__)
#define NVMMU_RENAMED(field, old) __extension__ union { uint64_t field; uint64_t old SPINIO_DEPRECATED("use " #field); }
#else
#define NVMMU_RENAMED(field, old) union { uint64_t field; uint64_t old; }
#endif

struct nvmmu_report {
    uint64_t uploaded;                        /* bytes moved to devices, by moves that succeeded */
    uint64_t downloaded;                      /* bytes moved to files, likewise */
    NVMMU_RENAMED(mode, promise);             /* NVMMU_NO_OUTPUT ... */
    NVMMU_RENAMED(full_stripe, whole);        /* bytes written as full stripes, including filler */
    NVMMU_RENAMED(filler, neighbours);        /* of these, old bytes of the stripes, which are not the session's */
    NVMMU_RENAMED(unaligned, loose);          /* bytes of the output written unaligned */
    uint64_t read_ahead;                      /* old bytes read beforehand */
};

/* As nvmmuEnd; report may be NULL, else size is sizeof *report. Returns 0, or -1 and errno. ESRCH: no session with this
 * number, or it has ended. EPERM: another thread began it. Else the error of writing the last bytes: the session has
 * ended nevertheless. */
int nvmmu_end(int thread, struct nvmmu_report *report, size_t size);

/* ---- names of earlier releases -----------------------------------------------------------------------------------
 *
 * The next release no longer has them, nor the old names of the report's fields: docs/deprecated.md. */

#define NVMMU_PLAIN NVMMU_PASSTHROUGH
#define NVMMU_SHAPED NVMMU_ALIGNED
#define NVMMU_PREPARED NVMMU_PREREAD

int nvmmu_expect(int64_t offset, int64_t length) SPINIO_DEPRECATED("use nvmmu_hint_range");

#ifdef __cplusplus
}
#endif

#endif
