// file.h: files that GPU kernels open, read and write. docs/gpunet.md is the manual.
//
//     #include <spinio/file.h>
//     using namespace spinio;
//
//     __global__ void first_bytes(net::Handle handle, char *out, int64_t *count)
//     {
//         int f = file::open(net::block(), handle, "data/numbers.bin", file::RDONLY);
//         *count = f < 0 ? f : file::pread(net::block(), handle, f, out, 4096, 0);
//         if (f >= 0)
//             file::close(net::block(), handle, f);
//     }
//
// Files belong to a net, whose host says which directory they are in (files_root of spinio_net_open()). Calls are made by
// groups, as those of sockets, and return a result >= 0 or -errno.
//
//   pread    worker: pread(2) into a buffer in pinned memory    all: buffer -> memory of the kernel    128 KiB at a time
//   pwrite   all: memory of the kernel -> buffer                worker: pwrite(2)
//
// No call of the device is made for them, so a running kernel can wait for them in any state of the program.
#ifndef SPINIO_FILE_H
#define SPINIO_FILE_H

#include <spinio/net/file.h>

namespace spinio::file {

using net::Handle;

// Flags of open(), as Linux has them.
constexpr int RDONLY = 0, WRONLY = 1, RDWR = 2, CREAT = 0100, EXCL = 0200, TRUNC = 01000, APPEND = 02000;

struct Stat {
    uint64_t size;
    uint32_t mode;
    int64_t mtime_ns;
    uint64_t inode, device;
};

namespace detail {

using namespace net::detail;
namespace layout = net::layout;

// Reads or writes in pieces; each ends the call if it is short.
template <typename Group>
__device__ int64_t move(Group group, const Handle &net, bool reads, int f, unsigned char *bytes, size_t count, int64_t offset)
{
    if (offset < 0 || !net.files)
        return offset < 0 ? -EINVAL : -EBADF;
    int64_t buffer = group.leads() ? claim_buffer(net) : 0;
    buffer = net::share(group, buffer);
    if (buffer < 0)
        return buffer;
    unsigned char *place = buffer_bytes(net, int(buffer));
    // The call is still made, for errors of the file.
    const bool has_no_memory = !bytes && count;
    count = has_no_memory ? 0 : count;
    size_t done = 0;
    int64_t result = 0;
    do {
        size_t piece = count - done < layout::file_buffer_bytes ? count - done : layout::file_buffer_bytes;
        if (!reads) {
            copy(group, place, bytes + done, piece);
            group.sync();
        }
        result = group.leads() ? move_piece(net, reads, f, int(buffer), offset + int64_t(done), piece) : 0;
        result = net::share(group, result);
        // More than the piece: the word is not the proxy's.
        if (result > int64_t(piece))
            result = -EPROTO;
        if (result <= 0)
            break;
        if (reads) {
            copy(group, bytes + done, place, size_t(result));
            group.sync();
        }
        done += size_t(result);
        if (size_t(result) < piece)
            break;
    } while (done < count);
    if (group.leads())
        release_buffer(net, int(buffer));
    return done ? int64_t(done) : has_no_memory && result >= 0 ? -EFAULT : result;
}

} // namespace detail

// Opens a file below the directory of the host's option; its number or -errno. EACCES: the host allows no files. EROFS: it
// allows no writing. EXDEV: the path leads out of the directory. EINVAL: other flags, or no regular file. EMFILE: as many are
// open as the net may have.
template <typename Group>
__device__ int open(Group group, const Handle &net, const char *path, int flags, unsigned mode = 0644)
{
    SPINIO_CHECK_CALL(group, "open", net, path, flags, mode);
    int64_t result = 0;
    if (group.leads()) {
        result = path ? detail::claim_buffer(net) : -EFAULT;
        if (result >= 0) {
            const int buffer = int(result);
            unsigned char *place = detail::buffer_bytes(net, buffer);
            size_t length = 0;
            while (path[length] && length < net::layout::path_bytes + 1) {
                place[length] = (unsigned char)path[length];
                length++;
            }
            if (length > net::layout::path_bytes) {
                result = -ENAMETOOLONG;
            } else {
                place[length] = 0;
                net::detail::FileRequest request = {net::layout::call_open_file, buffer, uint32_t(flags), 0, {mode}};
                result = net::detail::file_call(net, request, true);
            }
            detail::release_buffer(net, buffer);
        }
    }
    return int(net::share(group, result));
}

// Reads up to `bytes` at `offset` into memory that the kernel can store to; returns how many, fewer only at the end of the
// file or if an error came after them; or -errno.
template <typename Group>
__device__ int64_t pread(Group group, const Handle &net, int f, void *buffer, size_t bytes, int64_t offset)
{
    SPINIO_CHECK_CALL(group, "pread", net, f, buffer, bytes, offset);
    return detail::move(group, net, true, f, static_cast<unsigned char *>(buffer), bytes, offset);
}

// Writes; the bytes are in the page cache then, as after pwrite(2).
template <typename Group>
__device__ int64_t pwrite(Group group, const Handle &net, int f, const void *buffer, size_t bytes, int64_t offset)
{
    SPINIO_CHECK_CALL(group, "pwrite", net, f, buffer, bytes, offset);
    auto from = const_cast<unsigned char *>(static_cast<const unsigned char *>(buffer));
    return detail::move(group, net, false, f, from, bytes, offset);
}

// The leader stores what is known of the file; 0 or -errno.
template <typename Group>
__device__ int fstat(Group group, const Handle &net, int f, Stat *stat)
{
    SPINIO_CHECK_CALL(group, "fstat", net, f);
    int64_t result = 0;
    if (group.leads()) {
        net::detail::FileRequest request = {net::layout::call_stat_file, f, 0, 0, {}};
        result = net.files ? net::detail::file_call(net, request, true) : -EBADF;
        if (!result && !stat)
            result = -EFAULT;
        if (!result)
            *stat = {request.numbers[0], uint32_t(request.numbers[1]), int64_t(request.numbers[2]), request.numbers[3], request.numbers[4]};
    }
    return int(net::share(group, result));
}

// Closes the number. Calls that use the file go on with it.
template <typename Group>
__device__ int close(Group group, const Handle &net, int f)
{
    SPINIO_CHECK_CALL(group, "close", net, f);
    int64_t result = 0;
    if (group.leads()) {
        net::detail::FileRequest request = {net::layout::call_close_file, f, 0, 0, {}};
        result = net.files ? net::detail::file_call(net, request, false) : -EBADF;
    }
    return int(net::share(group, result));
}

} // namespace spinio::file

#endif
