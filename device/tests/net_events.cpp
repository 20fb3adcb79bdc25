// Event sets and poll, called by kernels, against ordinary sockets of this program. Prints each failure and exits with 1.
#include <sys/resource.h>

#include "net_test.h"

// Any group serves any connection: what one event says, then the socket is armed again.
template <typename Group>
__device__ void serve_from_set(Group group, const net::Handle &handle, int set, char *buffer, size_t size, net::Ready *ready, int64_t *out)
{
    int64_t events = 0;
    int count = 0;
    while ((count = net::wait(group, handle, set, ready, 3, -1)) > 0)
        for (int i = 0; i < count; i++) {
            int s = ready[i].s;
            events++;
            if (ready[i].events & net::NEW) {
                net::rearm(group, handle, s);
                continue;
            }
            int64_t got = net::recv(group, handle, s, buffer, size, net::DONTWAIT);
            if (got > 0 && net::send(group, handle, s, buffer, size_t(got)) == got)
                net::rearm(group, handle, s);
            else
                net::close(group, handle, s);
        }
    if (group.leads()) {
        out[0] = count;
        out[1] = events;
    }
}

// Who calls: 0 the block, 1 each warp, 2 the first and the last thread.
__global__ void servers(net::Handle handle, int set, int who, int64_t *out)
{
    __shared__ char buffers[4][700];
    __shared__ net::Ready ready[4][3];
    unsigned warp = net::Warp::linear() / 32;
    int64_t *mine = out + blockIdx.x * 8;
    if (who == 0)
        serve_from_set(net::block(), handle, set, buffers[0], sizeof buffers[0], ready[0], mine);
    else if (who == 1)
        serve_from_set(net::warp(), handle, set, buffers[warp], sizeof buffers[0], ready[warp], mine + warp * 2);
    else if (threadIdx.x == 0 || threadIdx.x == blockDim.x - 1)
        serve_from_set(net::thread(), handle, set, buffers[threadIdx.x != 0], sizeof buffers[0], ready[threadIdx.x != 0], mine + (threadIdx.x != 0) * 2);
}

// Asks many times over all its connections: each byte comes back once, and in order.
static void many_clients(const std::string &address, int connections, int rounds, unsigned seed)
{
    std::vector<int> sockets;
    for (int i = 0; i < connections; i++)
        sockets.push_back(connect_to(address));
    for (int round = 0; round < rounds; round++) {
        std::vector<std::vector<char>> sent;
        for (int s : sockets) {
            std::vector<char> bytes(1 + (seed = seed * 1664525 + 1013904223) % 2500);
            for (auto &byte : bytes)
                byte = char((seed = seed * 1664525 + 1013904223) >> 24);
            CHECK(send(s, bytes.data(), bytes.size(), MSG_NOSIGNAL) == ssize_t(bytes.size()));
            sent.push_back(bytes);
        }
        for (int i = 0; i < connections; i++) {
            std::vector<char> back(sent[size_t(i)].size());
            CHECK(recv(sockets[size_t(i)], back.data(), back.size(), MSG_WAITALL) == ssize_t(back.size()) && back == sent[size_t(i)]);
        }
    }
    for (int s : sockets) {
        char more;
        CHECK(!shutdown(s, SHUT_WR) && recv(s, &more, 1, 0) == 0);
        close(s);
    }
}

static void few_groups_serve_many_connections(const char *where, int who, unsigned blocks, unsigned threads)
{
    Net net({.connections = 48});
    std::string address;
    int s = listener(net, where, address), set = spinio_net_set(net.net);
    CHECK(set == 1 && !spinio_net_add(net.net, set, s, net::IN));
    spinio::launch_resident_on(net.stream, servers, blocks, threads, net.handle, set, who, net.words);
    std::vector<std::thread> clients;
    for (unsigned i = 0; i < 2; i++)
        clients.emplace_back(many_clients, address, 20, 5, i);
    for (auto &client : clients)
        client.join();
    while (net.stats().open > 1)
        usleep(1000);
    CHECK(!spinio_net_stop(net.net));
    net.wait();
    int64_t events = 0;
    for (unsigned i = 0; i < blocks * 4; i++) {
        CHECK(net.words[i * 2] == 0 || net.words[i * 2] == -ESHUTDOWN);
        events += net.words[i * 2 + 1];
    }
    // At least one for each connection, each message and each end.
    CHECK(events >= 40 * (1 + 5 + 1) && net.words[0] == -ESHUTDOWN);
    CHECK(net.stats().accepted == 40 && net.stats().violations == 0);
}

// What the words of a kernel are for, in order.
__device__ void put(int64_t *out, int &at, int64_t value)
{
    if (threadIdx.x == 0)
        out[at] = value;
    at++;
}

__global__ void calls(net::Handle handle, int s, int other, uint64_t *turn, int64_t *out)
{
    auto g = net::block();
    __shared__ net::Ready ready[4];
    __shared__ char bytes[64];
    int at = 0;
    int set = net::set(g, handle), second = net::set(g, handle);
    put(out, at, set);
    put(out, at, second);
    put(out, at, net::wait(g, handle, 0, ready, 4, 0));        // EBADF
    put(out, at, net::wait(g, handle, 3, ready, 4, 0));        // EBADF: not made
    put(out, at, net::wait(g, handle, 17, ready, 4, 0));       // EBADF
    put(out, at, net::wait(g, handle, set, ready, 0, 0));      // EINVAL
    put(out, at, net::add(g, handle, 3, s, net::IN));          // EBADF
    put(out, at, net::add(g, handle, set, 77, net::IN));       // EBADF
    put(out, at, net::add(g, handle, set, s, 0x100));          // EINVAL
    put(out, at, net::add(g, handle, set, s, 1 << 20));        // EINVAL
    put(out, at, net::rearm(g, handle, 77));                   // EBADF
    put(out, at, net::add(g, handle, set, s, net::IN));        // 0
    put(out, at, net::wait(g, handle, set, ready, 4, 1000000)); // 0: nothing came
    pass_and_wait(turn, 1);                                           // the peer sends 10 bytes
    put(out, at, net::wait(g, handle, set, ready, 4, -1));     // 1
    put(out, at, ready[0].s == s && ready[0].events == net::IN && ready[0].listener == 0);
    put(out, at, net::wait(g, handle, set, ready, 4, 20000000)); // 0: it is not armed
    put(out, at, net::recv(g, handle, s, bytes, 4));           // 4: not all
    put(out, at, net::rearm(g, handle, s));
    put(out, at, net::wait(g, handle, set, ready, 4, -1));     // 1: the rest is still there
    put(out, at, net::recv(g, handle, s, bytes, 64));          // 6
    put(out, at, net::rearm(g, handle, s));
    put(out, at, net::wait(g, handle, set, ready, 4, 20000000)); // 0: all was taken
    put(out, at, net::add(g, handle, second, s, net::IN | net::OUT)); // into the other set
    put(out, at, net::wait(g, handle, second, ready, 4, -1));  // 1
    put(out, at, ready[0].events == net::OUT);
    put(out, at, net::add(g, handle, second, s, 0));           // out of it
    put(out, at, net::rearm(g, handle, s));                    // 0: in no set
    pass_and_wait(turn, 2);                                           // the peer sends 1 byte
    put(out, at, net::wait(g, handle, second, ready, 4, 20000000)); // 0
    put(out, at, net::add(g, handle, set, s, net::IN | net::RDHUP)); // at once: a byte is there
    pass_and_wait(turn, 3);                                           // until the event is in the ring
    put(out, at, net::close(g, handle, s));
    put(out, at, net::wait(g, handle, set, ready, 4, 20000000)); // 0: closed after its event
    put(out, at, net::add(g, handle, set, other, net::IN));
    put(out, at, net::close(g, handle, other));                // closed while armed
    pass_and_wait(turn, 4);                                           // the peer sends and closes
    put(out, at, net::wait(g, handle, set, ready, 4, 20000000)); // 0
    for (int i = 2; i < 16; i++)
        put(out, at, net::set(g, handle));
    put(out, at, net::set(g, handle));                         // ENOBUFS
}

static void calls_and_their_errors()
{
    Net net;
    sockaddr_in name;
    int listening = listening_socket(name);
    std::string address = text_of(name);
    int s = spinio_net_connect(net.net, address.c_str()), peer = accept(listening, nullptr, nullptr);
    int other = spinio_net_connect(net.net, address.c_str()), other_peer = accept(listening, nullptr, nullptr);
    auto turn = reinterpret_cast<uint64_t *>(net.words + 1000);
    spinio::launch_resident_on(net.stream, calls, 1, 64, net.handle, s, other, turn, net.words);
    auto await = [&](uint64_t step) {
        while (spinio::load_acquire_system(turn) < step)
            usleep(500);
    };
    await(1);
    CHECK(send(peer, "0123456789", 10, MSG_NOSIGNAL) == 10);
    spinio::store_release_system(turn + 1, 1);
    await(2);
    CHECK(send(peer, "x", 1, MSG_NOSIGNAL) == 1);
    while (net.stats().bytes_received < 11)
        usleep(500);
    spinio::store_release_system(turn + 1, 2);
    await(3);
    usleep(20000); // the call of add() was answered after the event was made, or one pass before
    spinio::store_release_system(turn + 1, 3);
    await(4);
    (void)!send(other_peer, "y", 1, MSG_NOSIGNAL);
    close(other_peer);
    usleep(20000);
    spinio::store_release_system(turn + 1, 4);
    net.wait();
    const int64_t expected[] = {1, 2, -EBADF, -EBADF, -EBADF, -EINVAL, -EBADF, -EBADF, -EINVAL, -EINVAL, -EBADF, 0, 0, 1, 1, 0, 4, 0, 1, 6,
                                0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, -ENOBUFS};
    for (size_t i = 0; i < sizeof expected / 8; i++)
        if (net.words[i] != expected[i]) {
            std::printf("call %zu: %lld instead of %lld\n", i, (long long)net.words[i], (long long)expected[i]);
            failures++;
        }
    CHECK(spinio_net_set(net.net) == -1 && errno == ENOBUFS);
    CHECK(spinio_net_add(net.net, 1, 77, net::IN) == -1 && errno == EBADF);
    CHECK(spinio_net_add(net.net, 99, 77, net::IN) == -1 && errno == EBADF);
    close(peer);
    close(listening);
}

// First all connections are armed and ready, which is more than the event ring has entries; then events are taken.
__global__ void take_all(net::Handle handle, int listener, int set, int count, uint64_t *turn, int64_t *seen)
{
    auto g = net::block();
    __shared__ net::Ready ready[7];
    for (int i = 0; i < count; i++) {
        int s = net::accept(g, handle, listener);
        net::add(g, handle, set, s, net::IN);
    }
    pass_and_wait(turn, 1);
    for (int taken = 0; taken < count;) {
        int got = net::wait(g, handle, set, ready, 7, -1);
        if (got < 0)
            return;
        if (threadIdx.x == 0)
            for (int i = 0; i < got; i++)
                seen[ready[i].s & 0xffff]++;
        taken += got;
        __syncthreads();
    }
    int more = net::wait(g, handle, set, ready, 7, 20000000);
    if (threadIdx.x == 0)
        turn[2] = uint64_t(more);
}

static void full_event_ring_loses_nothing()
{
    const int count = 600;
    Net net({.connections = unsigned(count), .sockets = 1024});
    std::string address;
    int s = listener(net, ("unix:@spinio-full-" + std::to_string(getpid())).c_str(), address), set = spinio_net_set(net.net);
    auto turn = reinterpret_cast<uint64_t *>(net.words + 4000);
    spinio::launch_resident_on(net.stream, take_all, 1, 32, net.handle, s, set, count, turn, net.words);
    std::vector<int> peers;
    for (int i = 0; i < count; i++)
        peers.push_back(connect_to(address));
    while (spinio::load_acquire_system(turn) == 0)
        usleep(1000);
    for (int peer : peers)
        CHECK(send(peer, "!", 1, MSG_NOSIGNAL) == 1);
    while (net.stats().bytes_received < uint64_t(count))
        usleep(1000);
    spinio::store_release_system(turn + 1, 1);
    net.wait();
    int64_t once = 0, all = 0;
    for (int i = 0; i < 1024; i++) {
        once += net.words[i] == 1;
        all += net.words[i];
    }
    CHECK(once == count && all == count && turn[2] == 0);
    for (int peer : peers)
        close(peer);
}

__global__ void wait_in_vain(net::Handle handle, int set, int s, int64_t *out)
{
    __shared__ net::Ready ready[2];
    __shared__ net::Poll one;
    int result = 0;
    if (blockIdx.x < 3) {
        result = net::wait(net::block(), handle, set, ready, 2, -1);
    } else {
        if (threadIdx.x == 0)
            one = {blockIdx.x == 3 ? s : -1, net::IN, 0, 0, 0};
        __syncthreads();
        result = net::poll(net::block(), handle, &one, 1, -1);
    }
    if (threadIdx.x == 0)
        spinio::store_release_system(reinterpret_cast<uint64_t *>(out + blockIdx.x), uint64_t(result));
}

static void stop_ends_every_wait()
{
    Net net;
    std::string address;
    int s = listener(net, ("unix:@spinio-vain-" + std::to_string(getpid())).c_str(), address), set = spinio_net_set(net.net);
    CHECK(!spinio_net_add(net.net, set, s, net::IN));
    int silent = spinio_net_connect(net.net, address.c_str());
    CHECK(silent > 0 && !spinio_net_add(net.net, set, s, 0));
    spinio::launch_resident_on(net.stream, wait_in_vain, 5, 32, net.handle, set, silent, net.words);
    usleep(100000);
    // The connection above came as an event of the set, if the set had it in time: to one group at most.
    CHECK((net.words[0] > 0) + (net.words[1] > 0) + (net.words[2] > 0) <= 1 && net.words[3] == 0 && net.words[4] == 0);
    CHECK(!spinio_net_stop(net.net));
    net.wait();
    int stopped = 0;
    for (int i = 0; i < 3; i++)
        stopped += net.words[i] == -ESHUTDOWN;
    CHECK(stopped >= 2 && net.words[3] == 1 && net.words[4] == -ESHUTDOWN);
}

__global__ void poll_states(net::Handle handle, int s, int closed, uint64_t *turn, int64_t *out)
{
    auto g = net::block();
    __shared__ net::Poll polls[4];
    __shared__ net::Address name;
    __shared__ char bytes[4096];
    int at = 0;
    auto look = [&](int64_t ns) {
        __syncthreads();
        if (threadIdx.x == 0) {
            polls[0] = {s, net::IN | net::OUT | net::RDHUP, 0, 0, 0};
            polls[1] = {-1, net::IN, 7, 7, 7};
            polls[2] = {closed, net::IN, 0, 0, 0};
            polls[3] = {s, net::IN, 0, 0, 0};
        }
        __syncthreads();
        int count = net::poll(g, handle, polls, 4, ns);
        const int64_t results[] = {count, polls[0].ready, polls[0].in, polls[0].out, polls[1].ready, polls[2].ready, polls[3].ready};
        for (int64_t result : results)
            put(out, at, result);
    };
    // Until these are true, and a ring has so much room; after five minutes what is true then.
    auto becomes = [&](int events, unsigned room) {
        const unsigned long long deadline = spinio::nanoseconds() + 300'000'000'000;
        bool is_so = false;
        while (!is_so && !__syncthreads_or(spinio::nanoseconds() > deadline)) {
            if (threadIdx.x == 0)
                polls[0] = {s, net::IN | net::OUT | net::RDHUP, 0, 0, 0};
            __syncthreads();
            net::poll(g, handle, polls, 1, 0);
            is_so = polls[0].ready == events && polls[0].out == room;
            __syncthreads();
        }
    };
    net::close(g, handle, closed);
    look(0);                       // OUT
    pass_and_wait(turn, 1);              // 10 bytes
    becomes(net::IN | net::OUT, 4096);
    look(0);                       // IN, OUT
    net::recv(g, handle, s, bytes, 10);
    // Until there is no room for 100 ms, twice: the proxy sends on what is in the ring, as long as the peer's buffer has room. It answers a
    // call between the two, so that it was not only late.
    auto fills = [&] {
        if (net::send(g, handle, s, bytes, sizeof bytes, net::DONTWAIT) > 0)
            return true;
        __syncthreads();
        if (threadIdx.x == 0)
            polls[0] = {s, net::OUT, 0, 0, 0};
        __syncthreads();
        return net::poll(g, handle, polls, 1, 100000000) > 0;
    };
    for (int full = 0; full < 2; net::getsockname(g, handle, s, &name))
        full = fills() ? 0 : full + 1;
    look(0);                       // nothing
    pass_and_wait(turn, 2);              // the peer reads all, and ends
    if (threadIdx.x == 0)
        polls[0] = {s, net::OUT, 0, 0, 0};
    __syncthreads();
    put(out, at, net::poll(g, handle, polls, 1, -1));
    net::shutdown(g, handle, s, net::SHUT_SEND);
    pass_and_wait(turn, 3);
    becomes(net::IN | net::OUT | net::RDHUP | net::HUP, 4096);
    look(-1);                      // IN, OUT, RDHUP, HUP
}

static void polls_say_what_is_true()
{
    Net net;
    std::string address;
    int s = listener(net, ("unix:@spinio-poll-" + std::to_string(getpid())).c_str(), address);
    int peers_listener = socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un name = {};
    name.sun_family = AF_UNIX;
    CHECK(!bind(peers_listener, reinterpret_cast<sockaddr *>(&name), sizeof(sa_family_t)) && !listen(peers_listener, 8));
    socklen_t length = sizeof name;
    CHECK(!getsockname(peers_listener, reinterpret_cast<sockaddr *>(&name), &length));
    std::string where = "unix:@" + std::string(name.sun_path + 1, length - offsetof(sockaddr_un, sun_path) - 1);
    int polled = spinio_net_connect(net.net, where.c_str()), peer = accept(peers_listener, nullptr, nullptr);
    auto turn = reinterpret_cast<uint64_t *>(net.words + 1000);
    spinio::launch_resident_on(net.stream, poll_states, 1, 32, net.handle, polled, s, turn, net.words);
    auto await = [&](uint64_t step) {
        while (spinio::load_acquire_system(turn) < step)
            usleep(500);
    };
    await(1);
    CHECK(send(peer, "0123456789", 10, MSG_NOSIGNAL) == 10);
    spinio::store_release_system(turn + 1, 1);
    await(2);
    spinio::store_release_system(turn + 1, 2);
    std::vector<char> dropped(65536);
    while (recv(peer, dropped.data(), dropped.size(), 0) > 0) {
    }
    CHECK(!shutdown(peer, SHUT_WR));
    await(3);
    spinio::store_release_system(turn + 1, 3);
    net.wait();
    const int64_t all = net::IN | net::OUT | net::RDHUP | net::HUP;
    const int64_t expected[] = {2, net::OUT, 0, 4096, 0, net::ERR, 0, 3, net::IN | net::OUT, 10, 4096, 0, net::ERR, net::IN,
                                1, 0, 0, 0, 0, net::ERR, 0, 1, 3, all, 0, 4096, 0, net::ERR, net::IN | net::HUP};
    for (size_t i = 0; i < sizeof expected / 8; i++)
        if (net.words[i] != expected[i] && i != 17) {
            std::printf("poll, word %zu: %lld instead of %lld\n", i, (long long)net.words[i], (long long)expected[i]);
            failures++;
        }
    CHECK(net.words[17] < 2048);
    close(peer);
    close(peers_listener);
}

// The kernel connects to itself: 5,000 connections have 10,000 sockets. One byte comes through one of them.
__global__ void poll_many(net::Handle handle, int listener, net::Address address, int pairs, net::Poll *polls, int64_t *out)
{
    auto g = net::block();
    __shared__ char byte;
    for (int i = 0; i < pairs; i++) {
        int s = net::socket(g, handle, net::UNIX, net::STREAM, 0);
        int failed = net::connect(g, handle, s, address);
        int peer = failed ? failed : net::accept(g, handle, listener);
        if (threadIdx.x == 0) {
            polls[2 * i] = {s, net::IN, 0, 0, 0};
            polls[2 * i + 1] = {peer, net::IN, 0, 0, 0};
        }
    }
    __syncthreads();
    int before = net::poll(g, handle, polls, 2 * pairs, 0);
    if (threadIdx.x == 0)
        byte = 'x';
    __syncthreads();
    net::send(g, handle, polls[2 * (pairs - 3)].s, &byte, 1);
    int ready = net::poll(g, handle, polls, 2 * pairs, -1);
    if (threadIdx.x == 0) {
        out[0] = before;
        out[1] = ready;
        out[2] = polls[2 * (pairs - 3) + 1].ready;
        out[3] = polls[2 * (pairs - 3) + 1].in;
    }
}

static void poll_of_ten_thousand_sockets()
{
    const int pairs = 5000;
    rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    if (limit.rlim_max < 2 * pairs + 100) {
        std::printf("skipped: a process may have %llu descriptors only\n", (unsigned long long)limit.rlim_max);
        return;
    }
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    Net net({.connections = 2 * pairs + 8, .sockets = 16384});
    std::string address;
    std::string name = "spinio-many-" + std::to_string(getpid());
    int s = listener(net, ("unix:@" + name).c_str(), address);
    net::Poll *polls;
    CHECK(cudaHostAlloc(&polls, sizeof(net::Poll) * pairs * 2, cudaHostAllocDefault) == cudaSuccess);
    net.words[1] = -1;
    spinio::launch_resident_on(net.stream, poll_many, 1, 64, net.handle, s, net::Address::abstract(name.c_str()), pairs, polls, net.words);
    net.wait();
    CHECK(net.words[0] == 0 && net.words[1] == 1 && net.words[2] == net::IN && net.words[3] == 1);
    CHECK(net.stats().open == 2 * pairs + 1);
    cudaFreeHost(polls);
}

int main()
{
    std::string name = "unix:@spinio-set-" + std::to_string(getpid());
    few_groups_serve_many_connections("tcp://127.0.0.1:0", 0, 3, 64);
    few_groups_serve_many_connections(name.c_str(), 1, 1, 64);
    few_groups_serve_many_connections(name.c_str(), 2, 2, 40);
    calls_and_their_errors();
    full_event_ring_loses_nothing();
    stop_ends_every_wait();
    polls_say_what_is_true();
    poll_of_ten_thousand_sockets();
    std::printf("%d failures\n", failures);
    return failures != 0;
}
