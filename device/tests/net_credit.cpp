// When a kernel that has received from a peer tells of the room: at once where a writer or a set may wait for it, and not at each call.
// Prints each failure and exits with 1.
#include "net_test.h"

constexpr unsigned ring_bytes = 4096;

// Block 0 has received all that was sent, and waits for more: block 1 sees all of the ring as room.
__global__ void receive_and_wait(net::Handle handle, int listener, int client, int64_t *out)
{
    __shared__ char bytes[100];
    __shared__ net::Poll poll;
    auto g = net::block();
    if (blockIdx.x == 0) {
        int s = net::accept(g, handle, listener);
        net::recv(g, handle, s, bytes, sizeof bytes, net::WAITALL);
        net::recv(g, handle, s, bytes, 1);
        net::close(g, handle, s);
        return;
    }
    unsigned room[2] = {0, 0};
    for (int after : {0, 1}) {
        const unsigned long long deadline = spinio::nanoseconds() + 300'000'000'000;
        while (__syncthreads_or(room[after] != ring_bytes && spinio::nanoseconds() < deadline)) {
            if (threadIdx.x == 0)
                poll = {client, net::OUT, 0, 0, 0};
            __syncthreads();
            net::poll(g, handle, &poll, 1, 0);
            room[after] = poll.out;
            __syncthreads();
            if (threadIdx.x == 0)
                __nanosleep(100000);
        }
        net::send(g, handle, client, bytes, after ? 1 : sizeof bytes);
    }
    if (threadIdx.x == 0)
        out[0] = room[0], out[1] = room[1];
    net::close(g, handle, client);
}

static void reader_that_waits_tells_of_all_room()
{
    Net net({.ring_bytes = ring_bytes});
    std::string address;
    int s = listener(net, "unix:@", address), client = spinio_net_connect(net.net, address.c_str());
    CHECK(client > 0);
    spinio::launch_resident_on(net.stream, receive_and_wait, 2, 32, net.handle, s, client, net.words);
    net.wait();
    CHECK(net.stats().upgraded == 1 && net.words[0] == ring_bytes && net.words[1] == ring_bytes);
}

// Block 1 fills the ring and waits for an event; block 0 takes a quarter, of which it tells although the event is not due, and
// another one, with which it is.
__global__ void take_quarters(net::Handle handle, int listener, int client, int set, uint64_t *full, int64_t *out)
{
    __shared__ char bytes[1100];
    __shared__ net::Ready ready;
    auto g = net::block();
    if (blockIdx.x == 0) {
        int s = net::accept(g, handle, listener);
        spinio::Backoff waiting;
        while (threadIdx.x == 0 && !spinio::load_acquire_system(full))
            waiting.pause();
        __syncthreads();
        int64_t got = net::recv(g, handle, s, bytes, sizeof bytes, net::WAITALL);
        got += net::recv(g, handle, s, bytes, sizeof bytes, net::WAITALL);
        if (threadIdx.x == 0)
            out[0] = got;
        return;
    }
    int64_t sent = 0, got, events = net::add(g, handle, set, client, net::OUT);
    // There is room now.
    events = events * 100 + net::wait(g, handle, set, &ready, 1, 300'000'000'000);
    while ((got = net::send(g, handle, client, bytes, sizeof bytes, net::DONTWAIT)) > 0)
        sent += got;
    events = events * 100 + net::rearm(g, handle, client);
    events = events * 100 + net::wait(g, handle, set, &ready, 1, 10'000'000);
    if (threadIdx.x == 0)
        spinio::store_release_system(full, 1);
    events = events * 100 + net::wait(g, handle, set, &ready, 1, 300'000'000'000);
    if (threadIdx.x == 0)
        out[1] = sent, out[2] = events, out[3] = ready.events;
}

static void writer_that_waits_is_told_of_half_a_ring()
{
    Net net({.ring_bytes = ring_bytes});
    std::string address;
    int s = listener(net, "unix:@", address), client = spinio_net_connect(net.net, address.c_str()), set = spinio_net_set(net.net);
    CHECK(client > 0);
    spinio::launch_resident_on(net.stream, take_quarters, 2, 32, net.handle, s, client, set, reinterpret_cast<uint64_t *>(net.words + 100), net.words);
    net.wait();
    CHECK(net.words[0] == 2200 && net.words[1] == ring_bytes);
    // In turn: added, one event, armed, none, one.
    CHECK(net.words[2] == 1000001 && net.words[3] == net::OUT);
}

// The kernel has received all that a program has sent, and arms the socket: that is no reason for an event.
__global__ void receive_and_arm(net::Handle handle, int set, int64_t *out)
{
    __shared__ char bytes[64];
    __shared__ net::Ready ready;
    auto g = net::block();
    int64_t events = net::wait(g, handle, set, &ready, 1, 300'000'000'000);
    net::rearm(g, handle, ready.s);
    events = events * 10 + net::wait(g, handle, set, &ready, 1, 300'000'000'000);
    int64_t got = net::recv(g, handle, ready.s, bytes, sizeof bytes);
    const int s = ready.s;
    net::rearm(g, handle, s);
    events = events * 10 + net::wait(g, handle, set, &ready, 1, 300'000'000);
    net::close(g, handle, s);
    if (threadIdx.x == 0)
        out[0] = events, out[1] = got;
}

static void received_bytes_are_no_event()
{
    Net net;
    std::string address;
    int s = listener(net, "unix:@", address), set = spinio_net_set(net.net);
    CHECK(!spinio_net_add(net.net, set, s, net::IN));
    spinio::launch_resident_on(net.stream, receive_and_arm, 1, 32, net.handle, set, net.words);
    spinio_socket *program = spinio_socket_connect(address.c_str(), nullptr);
    CHECK(program && spinio_socket_send(program, "0123456789", 10, 0) == 10);
    net.wait();
    CHECK(net.stats().shared == 1 && net.words[0] == 110 && net.words[1] == 10);
    CHECK(!spinio_socket_close(program));
}

int main()
{
    reader_that_waits_tells_of_all_room();
    writer_that_waits_is_told_of_half_a_ring();
    received_bytes_are_no_event();
    std::printf("%d failures\n", failures);
    return failures != 0;
}
