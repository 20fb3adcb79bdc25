// Connections inside a net: what kernels are told of them. Events, the reasons for which one stays with Linux, words that no rule
// allows, a listening socket that closes. Bytes and results of calls: net_peer.cpp. Prints each failure and exits with 1.
#include "net_peer.h"

// --- event sets and poll ---

// Block 0 serves with an event set, the others are clients that ask many times.
__global__ void ask_and_serve(net::Handle handle, int set, net::Address to, int questions, int64_t *results, uint64_t *left)
{
    __shared__ char buffer[3000];
    __shared__ net::Ready ready;
    const auto g = net::block();
    if (blockIdx.x) {
        int s = connected(g, handle, to);
        int64_t wrong = 0;
        for (int i = 0; i < questions; i++) {
            int bytes = 1 + i * 37 % 3000;
            wrong += net::send(g, handle, s, buffer, size_t(bytes)) != bytes;
            wrong += net::recv(g, handle, s, buffer, size_t(bytes), net::WAITALL) != bytes;
        }
        net::close(g, handle, s);
        if (threadIdx.x == 0)
            results[blockIdx.x] = wrong ? -1 : questions;
        return;
    }
    while (spinio::load_acquire_device(left) < gridDim.x - 1) {
        int count = net::wait(g, handle, set, &ready, 1, 300'000'000'000);
        if (count <= 0) {
            if (threadIdx.x == 0)
                results[0] = count ? count : -ETIMEDOUT;
            return;
        }
        int64_t got = ready.events & net::NEW ? 1 : net::recv(g, handle, ready.s, buffer, sizeof buffer, net::DONTWAIT);
        if (!(ready.events & net::NEW) && got > 0)
            got = net::send(g, handle, ready.s, buffer, size_t(got));
        if (got > 0 || got == -EAGAIN) {
            net::rearm(g, handle, ready.s);
        } else {
            net::close(g, handle, ready.s);
            if (threadIdx.x == 0)
                spinio::add_release_device(left, 1);
        }
        __syncthreads();
    }
    if (threadIdx.x == 0)
        results[0] = 1;
}

static void event_sets_tell_of_ends_inside_the_net(const char *where)
{
    Net net;
    std::string address;
    int s = listener(net, where, address), set = spinio_net_set(net.net);
    CHECK(set > 0 && !spinio_net_add(net.net, set, s, net::IN));
    uint64_t *left = reinterpret_cast<uint64_t *>(net.words + 100);
    spinio::launch_resident_on(net.stream, ask_and_serve, 4, 64, net.handle, set, address_of(address), 60, net.words, left);
    net.wait();
    CHECK(net.words[0] == 1);
    for (int i = 1; i < 4; i++)
        CHECK(net.words[i] == 60);
    CHECK(net.stats().upgraded == 3 && others_close(net));
    if (where[0] == 'u' && where[5] == '/')
        unlink(where + 7);
}

// The events OUT, RDHUP and HUP of an end that the kernel itself has put into a set, and the same by poll.
__global__ void events_of_an_end(net::Handle handle, int listener, net::Address to, int64_t *results, uint64_t *turns)
{
    __shared__ char buffer[4096];
    __shared__ net::Ready ready;
    __shared__ net::Poll polls[2];
    const auto g = net::block();
    Log log{results};
    if (blockIdx.x) {
        int s = net::accept(g, handle, listener);
        meet(turns, 2);
        net::recv(g, handle, s, buffer, 3000, net::WAITALL);
        meet(turns, 2);
        net::send(g, handle, s, buffer, 77);
        meet(turns, 2);
        net::close(g, handle, s);
        meet(turns, 2);
        return;
    }
    int s = connected(g, handle, to), set = net::set(g, handle);
    auto poll = [&](int64_t ns) {
        if (threadIdx.x == 0)
            polls[0] = {s, net::IN | net::OUT | net::RDHUP, 0, 0, 0}, polls[1] = {-1, 0, 0, 0, 0};
        __syncthreads();
        int count = net::poll(g, handle, polls, 2, ns);
        return count * 0x10000 + polls[0].ready;
    };
    net::set_timeout(g, handle, s, 0, 1000000);
    log.add(net::send(g, handle, s, buffer, 4000));
    log.add(net::send(g, handle, s, buffer, 4000));
    log.add(net::send(g, handle, s, buffer, 1));
    log.add(net::send(g, handle, s, buffer, 1, net::DONTWAIT));
    log.add(net::add(g, handle, set, s, net::IN | net::OUT));
    log.add(net::wait(g, handle, set, &ready, 1, 1000000)); // full: nothing
    log.add(poll(0));
    meet(turns, 2);
    log.add(net::wait(g, handle, set, &ready, 1, -1));
    log.add(ready.events); // OUT
    log.add(poll(-1));
    meet(turns, 2);
    log.add(net::add(g, handle, set, s, net::IN));
    log.add(net::wait(g, handle, set, &ready, 1, -1));
    log.add(ready.events); // IN
    log.add(poll(-1));
    log.add(polls[0].in);
    log.add(polls[0].out);
    log.add(net::recv(g, handle, s, buffer, 77, net::WAITALL));
    log.add(net::rearm(g, handle, s));
    log.add(net::wait(g, handle, set, &ready, 1, 1000000)); // nothing is left
    meet(turns, 2);
    log.add(net::wait(g, handle, set, &ready, 1, -1));
    log.add(ready.events); // the other end has closed, with bytes unread
    meet(turns, 2);
    log.add(poll(0));
    log.add(net::close(g, handle, s));
    log.add(poll(0));
}

static void poll_and_sets_see_what_is_true()
{
    Net net;
    std::string address;
    int s = listener(net, "tcp://127.0.0.1:0", address);
    uint64_t *turns = reinterpret_cast<uint64_t *>(net.words + 4000);
    spinio::launch_resident_on(net.stream, events_of_an_end, 2, 64, net.handle, s, address_of(address), net.words, turns);
    net.wait();
    constexpr int one = 0x10000, gone = net::IN | net::ERR | net::HUP;
    const int64_t expected[] = {4000, 96, -EAGAIN, -EAGAIN, 0, 0, 0, 1, net::OUT, one | net::OUT, 0, 1, net::IN, one | net::IN | net::OUT, 77, 3000,
                                77, 0, 0, 1, gone, one | gone | net::OUT | net::RDHUP, 0, one | net::ERR};
    for (size_t i = 0; i < sizeof expected / 8; i++)
        if (net.words[i] != expected[i]) {
            std::printf("event %zu: %lld, not %lld\n", i, (long long)net.words[i], (long long)expected[i]);
            failures++;
        }
}

// --- what keeps a connection with Linux, and what ends one from outside ---

// Connects `count` times, and then waits on the last one.
__global__ void only_connect(net::Handle handle, net::Address to, int count, int64_t *results, uint64_t *turn)
{
    const auto g = net::block();
    __shared__ char byte;
    int s = 0;
    for (int i = 0; i < count; i++) {
        s = connected(g, handle, to);
        if (threadIdx.x == 0)
            results[i] = s;
    }
    pass_and_wait(turn, 1);
    int64_t got = net::recv(g, handle, s, &byte, 1), sent = net::send(g, handle, s, &byte, 1, net::DONTWAIT);
    if (threadIdx.x == 0) {
        results[count] = got;
        results[count + 1] = sent;
    }
}

// Connects `count` times, then does `then` while the kernel waits; returns the statistics before.
template <typename Then>
static struct spinio_net_stats connect_and_wait(Net &net, const net::Address &to, int count, Then then)
{
    uint64_t *turn = reinterpret_cast<uint64_t *>(net.words + 4000);
    spinio::launch_resident_on(net.stream, only_connect, 1, 32, net.handle, to, count, net.words, turn);
    while (spinio::load_acquire_system(turn) == 0)
        usleep(1000);
    auto stats = net.stats();
    spinio::store_release_system(turn + 1, 1);
    usleep(20000);
    then();
    net.wait();
    return stats;
}

static void reasons_say_why_a_connection_stays_with_linux()
{
    {
        // Of a backlog of 2, and of memory for 4 connections: each pair has a ring of 4 KiB in each direction.
        Net net({.connections = 8});
        int s = spinio_net_listen(net.net, ("unix:@spinio-reason-" + std::to_string(getpid())).c_str(), 2);
        CHECK(s > 0);
        auto to = net::Address::abstract(("spinio-reason-" + std::to_string(getpid())).c_str());
        auto stats = connect_and_wait(net, to, 4, [&] { CHECK(!spinio_net_stop(net.net)); });
        CHECK(stats.upgraded == 2 && stats.kept_by_backlog == 2);
    }
    {
        Net net({.connections = 8});
        std::string address;
        listener(net, "tcp://127.0.0.1:0", address);
        auto stats = connect_and_wait(net, address_of(address), 6, [&] { CHECK(!spinio_net_stop(net.net)); });
        CHECK(stats.upgraded == 4 && stats.kept_by_memory == 2);
        CHECK(net.words[6] == -ESHUTDOWN);
    }
    {
        Net net;
        // A listening socket of this program, no socket of the net.
        sockaddr_in here;
        int s = listening_socket(here);
        auto to = net::Address::inet(127, 0, 0, 1, ntohs(here.sin_port));
        auto stats = connect_and_wait(net, to, 1, [&] { close(accept(s, nullptr, nullptr)); });
        CHECK(stats.upgraded + stats.kept_by_name + stats.kept_by_memory + stats.kept_by_backlog + stats.kept_by_setting == 0);
        CHECK(net.words[1] == 0);
        close(s);
    }
}

// Words of an end that no rule allows, written by its kernel: the other end says so, and does not look outside its rings.
__global__ void break_rules(net::Handle handle, int listener, net::Address to, int64_t *results)
{
    __shared__ char buffer[16];
    const auto g = net::warp();
    int a = connected(g, handle, to), b = net::accept(g, handle, listener);
    net::detail::Peer peer(handle, spinio::load_acquire_system(net::detail::record_of(handle, b) + net::layout::record_receive), 0);
    for (int i = 0; i < 3; i++) {
        const uint64_t wrong[] = {4097, 1, uint64_t(1) << 47};
        if (threadIdx.x == 0) {
            peer.store(&peer.mine->tail, i == 1 ? handle.first - 1 : handle.first + wrong[i], 0);
            peer.store(&peer.mine->consumed, handle.first + wrong[i], 0);
        }
        int64_t got = net::recv(g, handle, a, buffer, sizeof buffer), sent = net::send(g, handle, a, buffer, sizeof buffer);
        if (threadIdx.x == 0) {
            results[i * 2] = got;
            results[i * 2 + 1] = sent;
        }
        __syncwarp();
    }
    net::close(g, handle, a);
    net::close(g, handle, b);
}

static void impossible_words_of_the_other_end_are_errors()
{
    Net net;
    std::string address;
    int s = listener(net, "tcp://127.0.0.1:0", address);
    spinio::launch_resident_on(net.stream, break_rules, 1, 32, net.handle, s, address_of(address), net.words);
    net.wait();
    for (int i = 0; i < 6; i++)
        CHECK(net.words[i] == -EPROTO);
    CHECK(others_close(net) && net.stats().upgraded == 1);
}

__global__ void close_one(net::Handle handle, int s, int64_t *result)
{
    *result = net::close(net::thread(), handle, s);
}

static void listener_that_closes_resets_what_waits_there()
{
    Net net;
    std::string address;
    int s = listener(net, "tcp://127.0.0.1:0", address);
    cudaStream_t other;
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking) == cudaSuccess);
    auto stats = connect_and_wait(net, address_of(address), 3, [&] {
        spinio::launch_resident_on(other, close_one, 1, 1, net.handle, s, net.words + 100);
        CHECK(cudaStreamSynchronize(other) == cudaSuccess);
    });
    CHECK(stats.upgraded == 3 && net.words[100] == 0 && net.words[3] == -ECONNRESET);
    // What is sent before the ring is full goes nowhere, as with every error.
    CHECK(net.words[4] == 1 || net.words[4] == -ECONNRESET);
}

int main()
{
    std::string path = "unix:///tmp/spinio-net-" + std::to_string(getpid()), name = "unix:@spinio-net-peer-" + std::to_string(getpid());
    for (const char *where : {"tcp://127.0.0.1:0", "tcp://0.0.0.0:0", path.c_str(), name.c_str()})
        event_sets_tell_of_ends_inside_the_net(where);
    poll_and_sets_see_what_is_true();
    reasons_say_why_a_connection_stays_with_linux();
    impossible_words_of_the_other_end_are_errors();
    listener_that_closes_resets_what_waits_there();
    std::printf("%d failures\n", failures);
    return failures != 0;
}
