// file.h: sendfile, and what all calls for files have in common. spinio/file.h has open, pread, pwrite, fstat and close.
//
//   leader: request with numbers in a mailbox ── proxy ── worker: sendfile(2), pread(2) ... ── reply with numbers
//
// The bytes of sendfile go from the file to the socket inside the Linux kernel, but for connections inside the net.
#ifndef SPINIO_NET_FILE_H
#define SPINIO_NET_FILE_H

#include <spinio/net/control.h>
#include <spinio/net/stream.h>

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
__device__ __attribute__((noinline)) inline int file_call(Handle net, FileRequest &request, bool waits, uint64_t *posting = nullptr, uint64_t timeout = 0)
{
    Address words = {};
    auto numbers = reinterpret_cast<AliasedWord *>(words.bytes);
    for (unsigned i = 0; i < file_numbers; i++)
        numbers[i] = request.numbers[i];
    int result = call(net, {request.call, request.descriptor, request.argument, request.flags, &words, 0, timeout}, waits, &words, posting);
    for (unsigned i = 0; i < file_numbers; i++)
        request.numbers[i] = numbers[i];
    return result;
}

// A file buffer, claimed by a group: its number, or -errno. On the leader alone.
__device__ inline int claim_buffer(const Handle &net)
{
    if (!net.files)
        return -EACCES;
    uint64_t *claims = device_words(net, 0) + layout::claims_file_buffers;
    Backoff waiting;
    for (unsigned at = blockIdx.x, polls = 1;; at++, polls++) {
        unsigned buffer = at % layout::file_buffers;
        if (compare_exchange_device(claims + buffer, 0, 1) == 0)
            return int(buffer);
        if (polls % layout::file_buffers == 0) {
            if (stopped(net))
                return -ESHUTDOWN;
            waiting.pause();
        }
    }
}

__device__ inline void release_buffer(const Handle &net, int buffer)
{
    store_release_device(device_words(net, 0) + layout::claims_file_buffers + buffer, 0);
}

__device__ inline unsigned char *buffer_bytes(const Handle &net, int buffer)
{
    return reinterpret_cast<unsigned char *>(uintptr_t(net.pinned) + net.files + size_t(buffer) * layout::file_buffer_bytes);
}

// The leader's call for a piece of a file.
__device__ inline int64_t move_piece(const Handle &net, bool reads, int f, int buffer, int64_t offset, size_t bytes)
{
    FileRequest request = {reads ? layout::call_read_file : layout::call_write_file, f, uint32_t(buffer), 0, {uint64_t(offset), bytes}};
    return file_call(net, request, true);
}

// 1 once there is room for more, or -errno. Others send meanwhile, so it takes the lock of the direction as they do.
__device__ SPINIO_OUTLINE inline int64_t wait_for_room_of_peer_locked(Handle net, int s, int flags, uint64_t deadline)
{
    layout::DeviceSocket *socket = device_socket(net, s);
    const Position locked = lock(net, s, &socket->send_lock, Patience::limited, deadline);
    if (locked.failed < 0)
        return locked.failed;
    const int64_t room = wait_for_room_of_peer(net, s, flags, locked.position, deadline);
    unlock(s, &socket->send_lock, locked.position);
    return room < 0 ? room : 1;
}

// Bytes that sends with MORE have left, on the leader.
__device__ SPINIO_OUTLINE inline void publish_left(Handle net, int s)
{
    Locked locked = {};
    const Outcome at = lock_direction(net, s, 0, false, locked);
    if (!at.ring)
        return;
    if (locked.peer && !(locked.shut & shut_send)) {
        fence_device();
        publish_tail(net, s, locked, at.position);
    }
    unlock(s, &device_socket(net, s)->send_lock, at.position);
}

// sendfile to a socket whose other end is in this net: Linux has no part in it, so the bytes go through a file buffer, a piece
// at a time. None is kept while the other end has no room: those who wait for a buffer do not wait for that one.
template <typename Group>
__device__ int64_t send_file_to_peer(Group group, const Handle &net, int s, int file, int64_t offset, size_t bytes, int flags)
{
    if (offset < 0)
        return -EINVAL;
    // More than a ring would be read again and again.
    const uint64_t end = load_acquire_system(record_of(net, s) + layout::record_receive), ring = uint64_t(1) << (end & 63);
    const size_t most = ring < layout::file_buffer_bytes ? size_t(ring) : layout::file_buffer_bytes;
    size_t done = 0;
    uint64_t deadline = 0;
    int64_t result = 0;
    while (done < bytes) {
        int64_t buffer = share(group, int64_t(group.leads() ? claim_buffer(net) : 0));
        if (buffer < 0) {
            result = buffer;
            break;
        }
        const size_t piece = bytes - done < most ? bytes - done : most;
        const int64_t read = share(group, group.leads() ? move_piece(net, true, file, int(buffer), offset + int64_t(done), piece) : 0);
        result = read > int64_t(piece) ? -EPROTO : read;
        if (result > 0)
            result = send(group, net, s, buffer_bytes(net, int(buffer)), size_t(read), flags | DONTWAIT);
        if (group.leads()) {
            release_buffer(net, int(buffer));
            if (result == -EAGAIN && !(flags & DONTWAIT)) {
                deadline = deadline_of(load_relaxed_device(&device_socket(net, s)->send_timeout), deadline);
                result = wait_for_room_of_peer_locked(net, s, flags, deadline);
            } else if (result > 0) {
                done += size_t(result);
            }
        }
        done = size_t(share(group, int64_t(done)));
        result = share(group, result);
        // The file has no more: looked for again by the next piece.
        if (result <= 0)
            break;
    }
    // What sends with MORE have left goes before a file that has no bytes, too.
    if (!done && group.leads())
        publish_left(net, s);
    return done ? int64_t(done) : result;
}

// Waits for a connection that is being made, with the lock of the direction: 0 or -errno; -moved: it is inside the net.
__device__ SPINIO_OUTLINE inline int wait_until_connected(Handle net, int s, int flags, uint64_t position)
{
    const layout::DeviceSocket *socket = device_socket(net, s);
    if (load_relaxed_device(&socket->connected) != 2 || load_acquire_system(device_line(net, s) + 1) >> layout::position_bits != layout::connecting)
        return 0;
    const int64_t room = wait_until_sent(net, s, flags, position, deadline_of(load_relaxed_device(&socket->send_timeout), 0));
    return room < 0 ? int(room) : 0;
}

// sendfile by Linux, on the leader.
__device__ inline int64_t send_file_by_linux(const Handle &net, int s, int file, int64_t offset, size_t bytes, int flags)
{
    if (int failed = find(net, s))
        return failed;
    layout::DeviceSocket *socket = device_socket(net, s);
    // A send of another group is complete before, but none waits while the file is sent: close() could not end that.
    const Position locked = lock(net, s, &socket->send_lock, flags & DONTWAIT ? Patience::none : Patience::limited);
    if (locked.failed < 0)
        return locked.failed;
    if (int failed = wait_until_connected(net, s, flags, locked.position)) {
        unlock(s, &socket->send_lock, locked.position);
        return failed;
    }
    const uint64_t timeout = load_acquire_device(&socket->send_timeout);
    FileRequest request = {layout::call_send_file, s, uint32_t(file), flags & DONTWAIT, {uint64_t(offset), bytes, timeout}};
    const int result = file_call(net, request, true, &socket->send_lock, locked.failed ? uint64_t(locked.failed) : timeout);
    return result ? result : int64_t(request.numbers[0]);
}

} // namespace detail

// Sends up to `bytes` of an open file from `offset` on, after what was sent before; returns how many, fewer if the file ends,
// or if some were sent before an error, a close or the stop of the net, before a timeout, or before DONTWAIT found no room; or -errno. What others send
// meanwhile goes after it; only inside a net it may come between two pieces of at most 128 KiB.
// It waits for the peer as send() does, and DONTWAIT waits for the disk only. After that has found no room, the event OUT of a set tells
// when there is some; poll() does not know.
template <typename Group>
__device__ int64_t sendfile(Group group, const Handle &net, int s, int file, int64_t offset, size_t bytes, int flags = 0)
{
    SPINIO_CHECK_CALL(group, "sendfile", net, s, file, offset, bytes, flags);
    for (;;) {
        int64_t result = share(group, int64_t(group.leads() && detail::has_peer(net, s)));
        if (result)
            return detail::send_file_to_peer(group, net, s, file, offset, bytes, flags);
        result = share(group, group.leads() ? detail::send_file_by_linux(net, s, file, offset, bytes, flags) : 0);
        if (result != -int(layout::moved))
            return result;
    }
}

} // namespace spinio::net

#endif
