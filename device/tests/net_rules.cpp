// The rules of order between kernels and the proxy, with a proxy that this program plays: so that each rule can be looked at
// alone, without a net and without the library. Built with -fsanitize=thread it finds missing barriers, acquires and releases;
// built without, the other rules. `cargo x mutate-net` takes the rules away one by one.
//
//   net_rules            all sections
//   net_rules SECTION    one of them: sink source echo shared whole events room rearm calls words claims close lines datagrams
//
// Known limit: of words that are relaxed atomics (copies of events) ThreadSanitizer sees no race; what they refer to shows it.
#include "run.h"
#include "net_tile.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include <sched.h>

#include <spinio/net.h>

// The first failure ends the program, since kernels wait for a proxy that goes on.
#undef CHECK
#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            std::printf("%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition);                                  \
            std::fflush(stdout);                                                                                       \
            std::_Exit(1);                                                                                             \
        }                                                                                                              \
    } while (0)

namespace net = spinio::net;
namespace layout = spinio::net::layout;

static uint64_t acquire(const uint64_t *at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
static void release(uint64_t *at, uint64_t value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }

struct Bell {
    unsigned operation, socket, epoch;
    uint64_t position;
};

// The memory of a net, and the proxy's side of it. Rings of 4 KiB; positions begin just before 2^48.
struct Proxy {
    static constexpr unsigned sockets = 4, mailboxes = layout::quick_mailboxes + 1, epoch = 5, ring = 4096;
    static constexpr uint64_t first = layout::position_mask - 100;
    std::vector<uint64_t> pinned_memory, device_memory;
    net::Handle handle = {};
    uint64_t next = 0;

    Proxy() : pinned_memory((rings() + sockets * 2 * ring + layout::page) / 8), device_memory(1 << 17)
    {
        handle.pinned = (uintptr_t(pinned_memory.data()) + layout::page - 1) & ~uint64_t(layout::page - 1);
        handle.device = (uintptr_t(device_memory.data()) + layout::page - 1) & ~uint64_t(layout::page - 1);
        handle.sockets = sockets;
        handle.mailboxes = mailboxes;
        handle.first = first;
        handle.waits = waits();
        for (unsigned index = 0; index < sockets; index++)
            open(index, epoch);
    }

    static size_t waits() { return layout::event_sets(sockets, mailboxes) + 17 * layout::page; }
    static size_t rings() { return waits() + layout::page; }
    uint64_t *words(size_t offset) const { return reinterpret_cast<uint64_t *>(uintptr_t(handle.pinned) + offset); }
    uint64_t *device_line(unsigned index) const { return words(layout::device_lines(sockets) + index * layout::line_bytes); }
    uint64_t *host_line(unsigned index) const { return words(layout::host_lines(sockets) + index * layout::line_bytes); }
    uint64_t *record(unsigned index) const { return words(layout::records(sockets) + index * layout::record_bytes); }
    uint64_t *mailbox(unsigned number) const { return words(layout::mailboxes(sockets) + number * layout::mailbox_bytes); }
    static size_t receive_ring(unsigned index) { return rings() + index * 2 * ring; }
    unsigned char &received(unsigned index, uint64_t at) const { return reinterpret_cast<unsigned char *>(words(receive_ring(index)))[at % ring]; }
    unsigned char &sent(unsigned index, uint64_t at) const { return reinterpret_cast<unsigned char *>(words(receive_ring(index) + ring))[at % ring]; }
    static int descriptor(unsigned index, unsigned epoch = Proxy::epoch) { return int(epoch << 16 | index); }
    layout::DeviceSocket *socket(unsigned index) const { return net::detail::device_socket(handle, descriptor(index)); }

    // Connected.
    void open(unsigned index, unsigned epoch, unsigned type = net::STREAM) const
    {
        device_line(index)[1] = device_line(index)[0] = first;
        record(index)[layout::record_receive] = receive_ring(index) << 8 | 12;
        record(index)[layout::record_send] = (receive_ring(index) + ring) << 8 | 12;
        record(index)[layout::record_first] = first | uint64_t(type | net::UNIX << 4 | 1 << 15) << layout::position_bits;
        release(record(index) + layout::record_state, uint64_t(epoch) << 2 | layout::state_open);
    }

    void stop(uint64_t how = 1) const { release(words(0) + layout::header_stop, how); }

    bool hear(Bell &bell)
    {
        const uint64_t *place = words(layout::page) + next % layout::doorbells * 2;
        uint64_t lap = next / layout::doorbells % 2 ? 0 : layout::lap_bit, e0 = acquire(place), e1 = acquire(place + 1);
        if ((e0 & layout::lap_bit) != lap || (e1 & layout::lap_bit) != lap)
            return false;
        bell = {unsigned(e0 >> 48) & 0x7f, unsigned(e1), unsigned(e1 >> 32) & 0x7fff, e0 & layout::position_mask};
        release(words(0) + layout::header_doorbell_head, ++next);
        return true;
    }

    Bell hear()
    {
        Bell bell;
        while (!hear(bell))
            std::this_thread::yield();
        return bell;
    }
};

// Runs a kernel beside the program.
template <typename... Parameters, typename... Arguments>
static std::thread start(void (*kernel)(Parameters...), dim3 grid, dim3 block, Arguments... arguments)
{
    return std::thread([=] { run_resident(kernel, grid, block, arguments...); });
}

static unsigned char byte_of(uint64_t position) { return (unsigned char)(position * 7 + (position >> 8)); }
static uint64_t add(uint64_t position, uint64_t bytes) { return (position + bytes) & layout::position_mask; }

// Calls by a block, by its first warp, by its first thread or by its first 8 threads.
template <typename Call>
__device__ void as(int who, Call call)
{
    if (who == 0)
        call(net::block());
    else if (who == 1 && threadIdx.x < 32)
        call(net::warp());
    else if (who == 2 && threadIdx.x == 0)
        call(net::thread());
    else if (who == 3 && threadIdx.x < 8)
        call(net::group(tile_of<8>()));
}

// Block b receives from socket b until the end of the stream, and compares.
__global__ void sink(net::Handle handle, int who, int64_t *wrong)
{
    __shared__ unsigned char buffer[700];
    const int s = Proxy::descriptor(blockIdx.x);
    as(who, [&](auto g) {
        int64_t got;
        for (uint64_t at = 0; (got = net::recv(g, handle, s, buffer, sizeof buffer)) > 0; at += uint64_t(got))
            for (int64_t i = 0; i < got; i++)
                if (buffer[i] != byte_of(at + uint64_t(i)))
                    __atomic_fetch_add(wrong, 1, __ATOMIC_RELAXED);
        g.sync();
    });
}

// Nothing but the consumed position tells when bytes of the ring can be replaced.
static void received_bytes_are_ordered_by_two_words(int who, unsigned threads)
{
    Proxy proxy;
    int64_t wrong = 0;
    std::thread kernel = start(sink, 2, threads, proxy.handle, who, &wrong);
    const uint64_t total = 30000;
    uint64_t position[2] = {}, taken[2] = {};
    while (position[0] < total || position[1] < total) {
        for (unsigned index = 0; index < 2; index++) {
            uint64_t word = acquire(proxy.host_line(index));
            if (word >> layout::position_bits == Proxy::epoch)
                taken[index] = (word - Proxy::first) & layout::position_mask;
            uint64_t bytes = std::min({uint64_t(777), total - position[index], taken[index] + Proxy::ring - position[index]});
            for (uint64_t i = 0; i < bytes; i++)
                proxy.received(index, add(Proxy::first, position[index] + i)) = byte_of(position[index] + i);
            position[index] += bytes;
            release(proxy.device_line(index), add(Proxy::first, position[index]));
        }
        std::this_thread::yield();
    }
    for (unsigned index = 0; index < 2; index++)
        release(proxy.device_line(index), add(Proxy::first, total) | layout::flag_eof);
    kernel.join();
    CHECK(wrong == 0);
    Bell bell;
    CHECK(!proxy.hear(bell)); // no credit was asked for
    for (unsigned index = 0; index < 2; index++)
        CHECK(acquire(proxy.host_line(index)) == (add(Proxy::first, total) | uint64_t(Proxy::epoch) << layout::position_bits));
}

__global__ void source(net::Handle handle, int who, unsigned bytes, int64_t *failed)
{
    __shared__ unsigned char buffer[700];
    const int s = Proxy::descriptor(blockIdx.x);
    as(who, [&](auto g) {
        for (uint64_t at = 0; at < bytes; at += sizeof buffer) {
            for (unsigned i = g.rank(); i < sizeof buffer; i += g.size())
                buffer[i] = byte_of(at + i);
            if (net::send(g, handle, s, buffer, sizeof buffer) != int64_t(sizeof buffer) && g.leads())
                __atomic_fetch_add(failed, 1, __ATOMIC_RELAXED);
        }
    });
}

// Doorbells say what can be sent, and the sent position what can be overwritten.
static void sent_bytes_are_ordered_by_doorbell_and_line(int who, unsigned threads)
{
    Proxy proxy;
    int64_t failed = 0;
    const unsigned total = 700 * 40;
    std::thread kernel = start(source, 2, threads, proxy.handle, who, total, &failed);
    uint64_t sent[2] = {}, wrong = 0;
    while (sent[0] < total || sent[1] < total) {
        Bell bell = proxy.hear();
        CHECK(bell.operation == layout::doorbell_send && bell.socket < 2 && bell.epoch == Proxy::epoch);
        uint64_t up_to = (bell.position - Proxy::first) & layout::position_mask, &at = sent[bell.socket & 1];
        CHECK(up_to > at && up_to - at <= Proxy::ring / 2);
        for (; at < up_to; at++)
            wrong += proxy.sent(bell.socket, add(Proxy::first, at)) != byte_of(at);
        release(proxy.device_line(bell.socket) + 1, bell.position);
    }
    kernel.join();
    CHECK(wrong == 0 && failed == 0);
}

__global__ void echo(net::Handle handle, int who, int messages, const int *sizes)
{
    __shared__ unsigned char buffer[2000];
    const int s = Proxy::descriptor(blockIdx.x);
    as(who, [&](auto g) {
        for (int i = 0; i < messages; i++) {
            net::recv(g, handle, s, buffer, size_t(sizes[i]), net::WAITALL);
            for (int at = int(g.rank()); at < sizes[i]; at += int(g.size()))
                buffer[at] ^= 0x5a;
            net::send(g, handle, s, buffer, size_t(sizes[i]));
        }
    });
}

// Messages of small and larger sizes come back, whether or not the kernel knows that the last one was sent.
static void messages_come_back(int who, unsigned threads)
{
    Proxy proxy;
    std::vector<int> sizes;
    for (int i = 0; i < 60; i++)
        sizes.push_back(i % 3 ? 1 + i * 37 % 98 : 99 + i * 31 % 1900);
    std::thread kernel = start(echo, 2, threads, proxy.handle, who, int(sizes.size()), (const int *)sizes.data());
    uint64_t position = Proxy::first;
    uint64_t wrong = 0;
    for (size_t i = 0; i < sizes.size(); i++) {
        auto bytes = uint64_t(sizes[i]);
        for (unsigned index = 0; index < 2; index++) {
            for (uint64_t k = 0; k < bytes; k++)
                proxy.received(index, add(position, k)) = byte_of(i + k + index);
            release(proxy.device_line(index), add(position, bytes));
        }
        uint64_t left[2] = {bytes, bytes}, at[2] = {position, position};
        while (left[0] || left[1]) {
            Bell bell = proxy.hear();
            CHECK(bell.operation == layout::doorbell_send && bell.epoch == Proxy::epoch && bell.socket < 2);
            const unsigned index = bell.socket & 1;
            uint64_t part = (bell.position - at[index]) & layout::position_mask;
            CHECK(part && part <= left[index]);
            for (uint64_t k = 0; k < part; k++)
                wrong += proxy.sent(index, add(at[index], k)) != (byte_of(i + bytes - left[index] + k + index) ^ 0x5a);
            at[index] = bell.position;
            left[index] -= std::min(part, left[index]);
            // Every other short message is known to be sent only later.
            if (i % 2 || bytes > 98)
                release(proxy.device_line(index) + 1, bell.position);
        }
        position = add(position, bytes);
        for (unsigned index = 0; index < 2; index++)
            CHECK((acquire(proxy.host_line(index)) & layout::position_mask) == position);
    }
    kernel.join();
    CHECK(wrong == 0);
}

__global__ void send_sizes(net::Handle handle, const int *sizes, int count)
{
    __shared__ unsigned char buffer[3000];
    const int s = Proxy::descriptor(0);
    auto g = net::block();
    for (unsigned i = threadIdx.x; i < sizeof buffer; i += blockDim.x)
        buffer[i] = 1;
    for (int i = 0; i < count; i++) {
        net::send(g, handle, s, buffer, size_t(sizes[i]));
        net::recv(g, handle, s, buffer, 1);
    }
}

// A long send takes half of the ring at a time.
static void parts_are_halves()
{
    Proxy proxy;
    const int sizes[] = {3000, 98, 1};
    std::thread kernel = start(send_sizes, 1, 64, proxy.handle, (const int *)sizes, 3);
    uint64_t position = Proxy::first, answered = Proxy::first;
    for (int bytes : sizes) {
        uint64_t end = add(position, uint64_t(bytes));
        for (Bell bell; position != end; position = bell.position) {
            bell = proxy.hear();
            CHECK(((bell.position - position) & layout::position_mask) <= Proxy::ring / 2);
            CHECK(bell.operation == layout::doorbell_send);
            release(proxy.device_line(0) + 1, bell.position);
        }
        proxy.received(0, answered) = 1;
        release(proxy.device_line(0), answered = add(answered, 1));
        while ((acquire(proxy.host_line(0)) & layout::position_mask) != answered)
            std::this_thread::yield();
    }
    kernel.join();
}

__global__ void share_socket(net::Handle handle, int turns, int64_t *sum)
{
    __shared__ unsigned char buffer[16];
    const int s = Proxy::descriptor(0);
    auto g = net::block();
    for (int i = 0; i < turns; i++) {
        net::recv(g, handle, s, buffer, 16, net::WAITALL);
        if (threadIdx.x == 0)
            __atomic_fetch_add(sum, buffer[0], __ATOMIC_RELAXED);
        net::send(g, handle, s, buffer, 16);
    }
}

// Several blocks use one socket: its locks order them.
static void blocks_share_a_socket()
{
    Proxy proxy;
    const int blocks = 3, turns = 60;
    int64_t sum = 0, expected = 0;
    std::thread kernel = start(share_socket, blocks, 32, proxy.handle, turns, &sum);
    uint64_t given = 0, sent = 0;
    while (sent < blocks * turns * 16) {
        uint64_t word = acquire(proxy.host_line(0)), taken = word >> 48 ? (word - Proxy::first) & layout::position_mask : 0;
        if (given < blocks * turns * 16 && given + 16 - taken <= Proxy::ring) {
            for (unsigned i = 0; i < 16; i++)
                proxy.received(0, add(Proxy::first, given + i)) = (unsigned char)(given / 16);
            expected += (unsigned char)(given / 16);
            release(proxy.device_line(0), add(Proxy::first, given += 16));
        }
        Bell bell;
        if (proxy.hear(bell)) {
            sent = (bell.position - Proxy::first) & layout::position_mask;
            release(proxy.device_line(0) + 1, bell.position);
        }
        std::this_thread::yield();
    }
    kernel.join();
    CHECK(sum == expected);
}

#include "net_rules_control.h"

int main(int count, char **argument)
{
    const char *section = count > 1 ? argument[1] : nullptr;
    auto on = [&](const char *name) { return !section || !std::strcmp(section, name); };
    for (int who : {0, 1, 2, 3}) {
        if (on("sink"))
            received_bytes_are_ordered_by_two_words(who, who ? 32 : 64);
        if (on("source"))
            sent_bytes_are_ordered_by_doorbell_and_line(who, who ? 32 : 64);
        if (on("echo"))
            messages_come_back(who, who ? 32 : 64);
    }
    if (on("shared"))
        blocks_share_a_socket();
    if (on("whole"))
        parts_are_halves();
    if (on("room"))
        all_places_of_a_ring_are_used_again();
    if (on("rearm"))
        rearm_comes_after_what_the_group_did();
    if (on("datagrams")) {
        datagrams_are_ordered_too();
        datagrams_are_replaced_once_they_were_taken();
    }
    if (on("events")) {
        each_event_goes_to_one_group();
        many_groups_take_from_a_full_ring();
        copies_are_published_by_their_tail();
        entries_of_two_rounds_are_told_apart();
    }
    if (on("calls"))
        mailboxes_belong_to_one_call();
    if (on("words"))
        words_of_lines_are_checked();
    if (on("claims"))
        full_queues_refuse();
    if (on("close"))
        close_and_shutdown_say_how_far_was_sent();
    if (on("lines")) {
        descriptors_are_checked();
    }
    std::printf("%d failures\n", failures);
    return failures;
}
