/* nvmmu.h: a file range moved to or from device memory in one call (libspinio.so).
 *
 *     nvmmuBegin(1, "out.bin");                               the output is named: its storage is prepared
 *     nvmmuMove("in.bin", device_in, 0, bytes, H2D);          file -> device
 *     kernel<<<grid, block>>>(device_in, device_out);         meanwhile the preparation goes on
 *     nvmmuMove("out.bin", device_out, 0, bytes, D2H);        device -> file, once the kernel is done
 *     nvmmuEnd(1);                                            all of it is in the file
 *
 * The three functions with the capital letters are those of the NVMMU paper (PACT 2015, Table I), arguments and answers
 * included. The others say why they fail: -1 and errno, and spinio_last_error() of spinio.h has a sentence. So it has
 * after a failed call of the paper's.
 *
 * A session belongs to the thread that began it. Files stay open between its moves, outside the program's descriptor
 * table. A move is ordered on the device as a cudaMemcpy would be, or with the stream of spinio_set_stream(). It is no
 * POSIX call: what it writes may reach the file in pieces, and small downloads that follow each other are gathered and
 * are in the file when the session ends or is flushed. docs/nvmmu.md says when to use moves, and when pread and pwrite.
 *
 * None of this may be called from a signal handler. A forked child has no session: its parent's goes on without it; nor can
 * it wait for a ticket of its parent's (ESRCH). What is gathered is lost where a process ends without nvmmuEnd.
 */
#ifndef NVMMU_H
#define NVMMU_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Directions: from the file to the device, and from the device to the file. */
enum { H2D = 1, D2H = 2 };

/* ---- as in the paper -------------------------------------------------------------------------------------------- */

/* Begins a session of this thread. threadId: any number that no other thread uses now. downloadFileName: the file that
 * results will go to, made if it is not there and never shortened, or NULL. 1, or 0 if it fails. */
int nvmmuBegin(int threadId, const char *downloadFileName);

/* Moves length bytes between a file, from offset on, and device memory. The bytes moved: fewer than length only where an
 * upload meets the end of its file. 0 if it fails. */
int nvmmuMove(const char *fileName, void *gpuMemPtr, int offset, int length, int direction);

/* Ends the session: what was gathered is written, every file closed. 1, or 0 if it fails. */
int nvmmuEnd(int threadId);

/* ---- with 64 bits, and errors that say why ----------------------------------------------------------------------- */

/* As nvmmuBegin. EBUSY: this thread, or another one as that number, has a session already. Else open()'s errors. */
int nvmmu_begin(int thread, const char *download);

/* As nvmmuMove; -1 and errno if it fails, and then any part of the range may have been moved.
 * ESRCH: no session. EINVAL: unknown direction, no file named, a negative offset or length. EFAULT: no device memory, or
 * it ends before the range does. Else what open(), pread() or pwrite() would say. */
int64_t nvmmu_move(const char *file, void *device, int64_t offset, int64_t length, int direction);

/* Says where in the output a download will go, as early as that is known: on an array with parity (RAID-5, RAID-6), what
 * the download leaves of its first and last stripe is read while the kernel runs. May be said several times. Without it
 * the session expects what the last one on that file wrote. */
int nvmmu_expect(int64_t offset, int64_t length);

/* Writes what is gathered, so that others find it in the output; if sync is not 0, waits until the storage has the output.
 * Other files that were downloaded into are not waited for. */
int nvmmu_flush(int sync);

/* ---- in the order of a stream ------------------------------------------------------------------------------------ */

struct nvmmu_ticket;

/* As nvmmu_move, but the move begins when what is queued on a stream (CUDA: a cudaStream_t) is done, and what is queued
 * there afterwards finds the bytes on the device, or may use the memory again. 0, and a ticket unless that is NULL; a move
 * without a ticket is waited for when the session ends. Over when it returns: a download into an output on an array with
 * parity, one larger than the staging memory (SPINIO_STAGING), any on a device without host functions. EBUSY: the stream
 * is being captured into a graph. */
int nvmmu_move_async(const char *file, void *device, int64_t offset, int64_t length, int direction, void *stream, struct nvmmu_ticket **ticket);

/* Waits for a move and frees its ticket, once. What nvmmu_move would have returned. */
int64_t nvmmu_wait(struct nvmmu_ticket *ticket);

/* 1 if the move is over. */
int nvmmu_done(const struct nvmmu_ticket *ticket);

/* A stream, and device memory that pieces come and go by. */
struct nvmmu_slot {
    void *stream;
    void *input;
    void *output;
};

/* A piece that comes to the device: counted from 0, with its length in bytes. */
struct nvmmu_step {
    uint64_t number;
    uint64_t length;
    struct nvmmu_slot slot;
};

/* What goes through: pieces of one file, results to another, one behind the other. */
struct nvmmu_pieces {
    const char *input;
    int64_t input_offset;
    int64_t input_length;
    int64_t piece; /* bytes of a piece; the last may be shorter */
    const char *output;
    int64_t output_offset;
};

/* Moves pieces through slots in turn, so that with three of them an upload, a kernel and a download overlap. For each
 * piece kernel(step, context) queues work on the step's stream and returns the bytes of output that this makes, or
 * a negative number to stop; it must not use the session meanwhile (EBUSY). The bytes written, or -1 and errno;
 * ECANCELED: kernel said so. */
int64_t nvmmu_pipeline(const struct nvmmu_pieces *pieces, const struct nvmmu_slot *slots, size_t count, int64_t (*kernel)(const struct nvmmu_step *, void *), void *context);

/* ---- the end ----------------------------------------------------------------------------------------------------- */

/* How far an output could be prepared. */
enum {
    NVMMU_NO_OUTPUT = 0, /* none was named */
    NVMMU_PLAIN = 1,     /* written as it came: no array with parity, or nothing tells where its stripes are */
    NVMMU_SHAPED = 2,    /* whole stripes written as such; others had the file open, or no lease could be had */
    NVMMU_PREPARED = 3   /* stripes covered in part, too */
};

struct nvmmu_report {
    uint64_t uploaded;   /* bytes brought to devices */
    uint64_t downloaded; /* bytes brought to files */
    uint64_t promise;    /* NVMMU_NO_OUTPUT ... */
    uint64_t whole;      /* bytes written as whole stripes, with their neighbours */
    uint64_t neighbours; /* of these, old bytes that were not the session's */
    uint64_t loose;      /* bytes of the output written as they came */
    uint64_t read_ahead; /* old bytes that were read beforehand */
};

/* As nvmmuEnd; report may be NULL, else size is sizeof *report. ESRCH: nothing was begun as that number, or it has ended.
 * EPERM: by another thread. Else what writing the last bytes said: the session has ended all the same. */
int nvmmu_end(int thread, struct nvmmu_report *report, size_t size);

#ifdef __cplusplus
}
#endif

#endif
