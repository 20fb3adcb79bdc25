// gaia.h: epochs as scopes, around launches.
//
//     {
//         gaia::epoch epoch(map, bytes, SPINIO_GAIA_WRITE);        // acquire; throws gaia::error
//         spinio::launch(kernel, grid, block, map);
//         epoch.release();                                         // kernels, then release; throws
//     }
//     {
//         gaia::stream_epoch epoch(map, bytes, SPINIO_GAIA_WRITE, stream);
//         spinio::launch_on(stream, kernel, grid, block, map);
//     }                                                            // queues the release
//
// A scope that is left early, as by an exception, gives its epoch up: stores since the acquire are dropped, no other
// program sees half of them. That of a stream_epoch is released unless discard() was called.
#ifndef SPINIO_GAIA_SCOPES_H
#define SPINIO_GAIA_SCOPES_H

#include <cerrno>
#include <stdexcept>
#include <string>

#include <spinio.h>
#include <spinio/kernel.h>
#include <spinio_gaia.h>

namespace gaia {

// An errno, and the sentence of spinio_last_error().
class error : public std::runtime_error {
public:
    error() : std::runtime_error(spinio_last_error()), number(errno) {}
    int number;
};

// From acquire to release, on the thread's stream.
class epoch {
public:
    epoch(void *address, size_t size, unsigned access) : address(address), size(size)
    {
        ssize_t got = spinio_gaia_acquire(address, size, access);
        if (got < 0)
            throw error();
        bytes = size_t(got);
    }

    epoch(const epoch &) = delete;
    epoch &operator=(const epoch &) = delete;

    // Publishes the stores of all kernels that were queued on the thread's stream; the bytes of changed pages.
    size_t release()
    {
        ssize_t published = spinio_gaia_release(address, size, 0);
        if (published < 0)
            throw error();
        open = false;
        return size_t(published);
    }

    ~epoch()
    {
        if (open)
            (void)spinio_gaia_release(address, size, SPINIO_GAIA_DISCARD);
    }

    size_t bytes = 0; // of the range, in the file

private:
    void *address;
    size_t size;
    bool open = true;
};

// The same in the order of a stream. `published`, if given, gets the bytes, or a negative errno.
class stream_epoch {
public:
    stream_epoch(void *address, size_t size, unsigned access, cudaStream_t stream, ssize_t *published = nullptr)
        : address(address), size(size), stream(stream), published(published)
    {
        if (spinio_gaia_acquire_async(address, size, access, stream))
            throw error();
    }

    stream_epoch(const stream_epoch &) = delete;
    stream_epoch &operator=(const stream_epoch &) = delete;

    void discard()
    {
        flags = SPINIO_GAIA_DISCARD;
    }

    ~stream_epoch()
    {
        if (spinio_gaia_release_async(address, size, flags, stream, published) && published)
            *published = -errno;
    }

private:
    void *address;
    size_t size;
    cudaStream_t stream;
    ssize_t *published;
    unsigned flags = 0;
};

} // namespace gaia

#endif
