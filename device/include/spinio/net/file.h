// file.h: sendfile, and what all calls for files have in common. spinio/file.h has open, pread, pwrite, fstat and close.
//
//   leader: request with numbers in a mailbox ── proxy ── worker: sendfile(2), pread(2) ... ── reply with numbers
//
// The bytes of sendfile go from the file to the socket inside the Linux kernel.
#ifndef SPINIO_NET_FILE_H
#define SPINIO_NET_FILE_H

#include <spinio/net/control.h>

namespace spinio::net {

namespace detail {

constexpr unsigned file_numbers = 5;

struct FileRequest {
    layout::Call call;
    int descriptor;
    uint32_t argument;
    int flags;
    uint64_t numbers[file_numbers]; // the reply's afterwards
};

// On the leader alone. Not inlined: it keeps the registers of kernels few.
__device__ __attribute__((noinline)) inline int file_call(const Handle &net, FileRequest &request, bool waits, uint64_t *posting = nullptr)
{
    Address words = {};
    auto numbers = reinterpret_cast<AliasedWord *>(words.bytes);
    for (unsigned i = 0; i < file_numbers; i++)
        numbers[i] = request.numbers[i];
    int result = call(net, {request.call, request.descriptor, request.argument, request.flags, &words}, waits, &words, posting);
    for (unsigned i = 0; i < file_numbers; i++)
        request.numbers[i] = numbers[i];
    return result;
}

} // namespace detail

// Sends up to `bytes` of an open file from `offset` on, after what was sent before; returns how many, fewer if the file ends,
// or if some were sent before an error, before a timeout, or before DONTWAIT found no room; or -errno. What others send
// meanwhile goes after it. It waits for the peer as send() does, and DONTWAIT waits for the disk only.
template <typename Group>
__device__ int64_t sendfile(Group group, const Handle &net, int s, int file, int64_t offset, size_t bytes, int flags = 0)
{
    int64_t result = 0;
    if (group.leads()) {
        layout::DeviceSocket *socket = detail::device_socket(net, s);
        result = detail::find(net, s);
        // A send of another group is complete before, but none waits while the file is sent: close() could not end that.
        if (!result)
            result = detail::lock(net, s, &socket->send_lock, !(flags & DONTWAIT));
        if (!result) {
            uint64_t timeout = load_acquire_device(&socket->send_timeout);
            detail::FileRequest request = {layout::call_send_file, s, uint32_t(file), flags & DONTWAIT, {uint64_t(offset), bytes, timeout}};
            result = detail::file_call(net, request, true, &socket->send_lock);
            if (!result)
                result = int64_t(request.numbers[0]);
        }
    }
    return share(group, result);
}

} // namespace spinio::net

#endif
