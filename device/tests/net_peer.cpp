// Connections inside a net: both ends are sockets of kernels. The same calls give the same results with the upgrade to device
// memory and without it; no byte goes through Linux with it. Prints each failure and exits with 1.
#include "net_test.h"

#include <spinio/file.h>

static net::Address address_of(const std::string &text)
{
    if (text.rfind("tcp://", 0) == 0)
        return net::Address::inet(127, 0, 0, 1, unsigned(std::atoi(text.c_str() + text.rfind(':') + 1)));
    return text[5] == '@' ? net::Address::abstract(text.c_str() + 6) : net::Address::path(text.c_str() + 7);
}

// Only the listening socket is left: the proxy closes the others a little after the kernels.
static bool others_close(const Net &net)
{
    for (int i = 0; i < 10000 && net.stats().open != 1; i++)
        usleep(1000);
    return net.stats().open == 1;
}

// Blocks wait here for each other, again and again; `words` are zero at the beginning.
__device__ inline void meet(uint64_t *words, unsigned blocks)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        uint64_t round = spinio::load_acquire_device(words + 1);
        uint64_t before = 0, seen;
        // Acquire and release at once.
        while ((seen = spinio::compare_exchange_device(words, before, before + 1)) != before)
            before = seen;
        if (before + 1 == (round + 1) * blocks)
            spinio::store_release_device(words + 1, round + 1);
        spinio::Backoff waiting;
        while (spinio::load_acquire_device(words + 1) == round)
            waiting.pause();
    }
    __syncthreads();
}

template <typename Group>
__device__ int connected(Group group, const net::Handle &handle, const net::Address &to)
{
    int s = net::socket(group, handle, to.bytes[0], net::STREAM, 0);
    int failed = net::connect(group, handle, s, to);
    return failed ? failed : s;
}

// --- the same results with and without the upgrade ---

struct Log {
    int64_t *at;

    __device__ void add(int64_t value)
    {
        if (threadIdx.x == 0)
            *at++ = value;
    }
};

constexpr int most_results = 64;

__device__ inline int64_t sum(const char *bytes, int64_t count)
{
    int64_t all = count;
    for (int64_t i = 0; i < count; i++)
        all = all * 31 % 1000003 + (unsigned char)bytes[i];
    __syncthreads();
    return all;
}

// Calls until there is another result than one of those that only mean that the error has not arrived yet.
__device__ inline int64_t send_until_error(const net::Handle &handle, int s, const char *from)
{
    for (int i = 0; i < 100000; i++) {
        int64_t sent = net::send(net::block(), handle, s, from, 500, net::DONTWAIT);
        if (sent < 0 && sent != -EAGAIN)
            return sent;
        if (threadIdx.x == 0)
            spinio::wait_hint();
    }
    return 1;
}

// Block 0 connects, block 1 accepts. Each writes its results.
__global__ void dialogue(net::Handle handle, int listener, net::Address to, int64_t *results, uint64_t *turns)
{
    __shared__ char bytes[9000];
    const auto g = net::block();
    const bool client = blockIdx.x == 0;
    Log log{results + blockIdx.x * most_results};
    for (int i = int(threadIdx.x); i < 9000; i += int(blockDim.x))
        bytes[i] = char(i * 7 + i / 256);
    __syncthreads();
    for (int part = 0; part < 6; part++) {
        net::Address name;
        int s = client ? connected(g, handle, to) : net::accept(g, handle, listener, &name);
        log.add(s > 0);
        meet(turns, 2);
        switch (part) {
        case 0: // ends of directions, one after the other
            if (client) {
                log.add(net::send(g, handle, s, bytes, 5));
                log.add(net::shutdown(g, handle, s, net::SHUT_SEND));
                meet(turns, 2);
                log.add(net::recv(g, handle, s, bytes, 3, net::WAITALL));
                log.add(net::send(g, handle, s, bytes, 1));
                meet(turns, 2);
                log.add(net::recv(g, handle, s, bytes, 3));
            } else {
                if (threadIdx.x == 0)
                    log.add(name.bytes[0] == net::UNIX ? int64_t(name.length) : 0);
                log.add(net::recv(g, handle, s, bytes, 9000));
                log.add(net::recv(g, handle, s, bytes, 9000));
                log.add(net::recv(g, handle, s, bytes, 9000, net::DONTWAIT));
                log.add(net::getpeername(g, handle, s, &name));
                if (threadIdx.x == 0)
                    log.add(name.bytes[0] == net::UNIX ? int64_t(name.length) : 0);
                meet(turns, 2);
                log.add(net::send(g, handle, s, bytes, 3));
                meet(turns, 2);
                log.add(net::close(g, handle, s));
                s = 0;
            }
            break;
        case 1: // PEEK, parts, WAITALL, DONTWAIT
            if (client) {
                log.add(net::recv(g, handle, s, bytes, 10, net::DONTWAIT));
                meet(turns, 2);
                log.add(net::send(g, handle, s, bytes, 1000));
                log.add(net::send(g, handle, s, bytes + 1000, 8000));
            } else {
                meet(turns, 2);
                char *mine = bytes;
                for (int i = int(threadIdx.x); i < 9000; i += int(blockDim.x))
                    mine[i] = 0;
                __syncthreads();
                log.add(net::recv(g, handle, s, mine, 10, net::PEEK));
                log.add(sum(mine, 10));
                log.add(net::recv(g, handle, s, mine, 7));
                log.add(sum(mine, 7));
                log.add(net::recv(g, handle, s, mine, 8993, net::WAITALL));
                log.add(sum(mine, 8993));
                log.add(net::recv(g, handle, s, mine, 0));
                log.add(net::recv(g, handle, s, mine, 1, net::DONTWAIT));
                for (int i = int(threadIdx.x); i < 9000; i += int(blockDim.x))
                    bytes[i] = char(i * 7 + i / 256);
                __syncthreads();
            }
            break;
        case 2: // time limits
            log.add(net::set_timeout(g, handle, s, 2000000, 2000000));
            log.add(net::recv(g, handle, s, bytes, 1));
            log.add(net::recv(g, handle, s, bytes, 1, net::WAITALL));
            break;
        case 3: // closed with bytes that were not received
            if (client) {
                log.add(net::send(g, handle, s, bytes, 10));
                meet(turns, 2);
                log.add(net::recv(g, handle, s, bytes, 10));
                // Of TCP the error, of UNIX the end; both cannot send.
                int64_t error = send_until_error(handle, s, bytes);
                log.add(error == -ECONNRESET || error == -EPIPE);
            } else {
                log.add(net::recv(g, handle, s, bytes, 1, net::PEEK));
                log.add(net::close(g, handle, s));
                meet(turns, 2);
                s = 0;
            }
            break;
        case 4: // closed after all was received
            if (client) {
                log.add(net::send(g, handle, s, bytes, 10));
                log.add(net::recv(g, handle, s, bytes, 10, net::WAITALL));
                log.add(net::recv(g, handle, s, bytes, 10));
                log.add(send_until_error(handle, s, bytes));
                log.add(net::recv(g, handle, s, bytes, 10));
            } else {
                log.add(net::recv(g, handle, s, bytes, 10, net::WAITALL));
                log.add(net::send(g, handle, s, bytes, 10));
                log.add(net::close(g, handle, s));
                log.add(net::recv(g, handle, s, bytes, 10));
                s = 0;
            }
            break;
        default: // no more receiving
            if (client) {
                meet(turns, 2);
                if (to.bytes[0] == net::UNIX)
                    log.add(send_until_error(handle, s, bytes));
                else
                    log.add(net::send(g, handle, s, bytes, 10));
            } else {
                log.add(net::shutdown(g, handle, s, net::SHUT_RECEIVE));
                log.add(net::recv(g, handle, s, bytes, 10));
                log.add(net::shutdown(g, handle, s, 3));
                meet(turns, 2);
            }
        }
        meet(turns, 2);
        if (s > 0)
            log.add(net::close(g, handle, s));
        log.add(net::send(g, handle, s, bytes, 1));
        meet(turns, 2);
    }
    log.add(12345);
}

static std::vector<int64_t> results_of_dialogue(const char *where, bool no_upgrade, unsigned threads)
{
    Net net({.no_upgrade = no_upgrade});
    std::string address;
    int s = listener(net, where, address);
    uint64_t *turns = reinterpret_cast<uint64_t *>(net.words + 4000);
    spinio::launch_resident_on(net.stream, dialogue, 2, threads, net.handle, s, address_of(address), net.words, turns);
    net.wait();
    auto stats = net.stats();
    CHECK(stats.upgraded == (no_upgrade ? 0 : 6) && stats.kept_by_setting == (no_upgrade ? 6 : 0));
    CHECK(stats.accepted == 6 && stats.connected == 6 && stats.violations == 0 && others_close(net));
    CHECK(no_upgrade || (stats.bytes_sent == 0 && stats.bytes_received == 0));
    if (where[0] == 'u' && where[5] == '/')
        unlink(where + 7);
    return std::vector<int64_t>(net.words, net.words + 2 * most_results);
}

static void calls_have_the_same_results(const char *where, unsigned threads)
{
    auto with = results_of_dialogue(where, false, threads), without = results_of_dialogue(where, true, threads);
    for (size_t i = 0; i < with.size(); i++)
        if (with[i] != without[i]) {
            std::printf("%s, block %zu, result %zu: %lld with the upgrade, %lld without\n", where, i / most_results, i % most_results,
                        (long long)with[i], (long long)without[i]);
            failures++;
        }
}

// --- bytes, by all groups ---

template <typename Group>
__device__ void stream_and_compare(Group group, const net::Handle &handle, int s, bool first, size_t bytes, char *buffer, int64_t *result)
{
    int64_t wrong = 0;
    for (int turn = 0; turn < 2; turn++) {
        bool sends = first == (turn == 0);
        for (size_t at = 0, step = 1; at < bytes; at += step, step = step * 7 % 1500 + 1) {
            step = step < bytes - at ? step : bytes - at;
            if (sends)
                for (size_t i = group.rank(); i < step; i += group.size())
                    buffer[i] = char((at + i) * 13 + (at + i) / 251);
            group.sync();
            int64_t done = sends ? net::send(group, handle, s, buffer, step) : net::recv(group, handle, s, buffer, step, net::WAITALL);
            wrong += done != int64_t(step);
            if (!sends)
                for (size_t i = group.rank(); i < step; i += group.size())
                    wrong += buffer[i] != char((at + i) * 13 + (at + i) / 251);
            group.sync();
        }
    }
    if (wrong)
        *result = -1;
    if (group.leads() && !wrong)
        *result = int64_t(bytes);
}

__global__ void both_ways(net::Handle handle, int listener, net::Address to, int who, size_t bytes, int64_t *results)
{
    __shared__ char buffers[4][1501];
    const bool client = blockIdx.x == 0;
    const unsigned warp = net::Warp::linear() / 32;
    if (who == 0) {
        int s = client ? connected(net::block(), handle, to) : net::accept(net::block(), handle, listener);
        stream_and_compare(net::block(), handle, s, client, bytes, buffers[0], results + blockIdx.x * 4);
        net::close(net::block(), handle, s);
    } else if (who == 1) {
        int s = client ? connected(net::warp(), handle, to) : net::accept(net::warp(), handle, listener);
        stream_and_compare(net::warp(), handle, s, client, bytes, buffers[warp], results + blockIdx.x * 4 + warp);
        net::close(net::warp(), handle, s);
    } else if (threadIdx.x == 0) {
        int s = client ? connected(net::thread(), handle, to) : net::accept(net::thread(), handle, listener);
        stream_and_compare(net::thread(), handle, s, client, bytes, buffers[0], results + blockIdx.x * 4);
        net::close(net::thread(), handle, s);
    }
}

static void all_groups_exchange_bytes(const char *where)
{
    struct {
        int who;
        unsigned threads, connections;
    } cases[] = {{0, 256, 1}, {0, 17, 1}, {1, 96, 3}, {2, 32, 1}};
    Net net;
    std::string address;
    int s = listener(net, where, address);
    unsigned all = 0;
    for (auto &each : cases) {
        std::memset(net.words, 0, 1024);
        size_t bytes = each.who == 2 ? 5000 : 60000;
        spinio::launch_resident_on(net.stream, both_ways, 2, each.threads, net.handle, s, address_of(address), each.who, bytes, net.words);
        net.wait();
        for (unsigned i = 0; i < 2 * each.connections; i++)
            CHECK(net.words[i / each.connections * 4 + i % each.connections] == int64_t(bytes));
        all += each.connections;
    }
    CHECK(net.stats().upgraded == all && net.stats().bytes_sent == 0 && others_close(net));
    if (where[0] == 'u' && where[5] == '/')
        unlink(where + 7);
}

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
        int count = net::wait(g, handle, set, &ready, 1, 10000000000);
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

// --- files, and what does not leave the net ---

// Block 0 sends a file between two texts, block 1 reads slowly. The ring has 4096 bytes.
__global__ void file_between_texts(net::Handle handle, int listener, net::Address to, uint64_t bytes, int64_t *results)
{
    __shared__ unsigned char buffer[3000];
    const auto g = net::block();
    Log log{results + blockIdx.x * 8};
    if (blockIdx.x == 0) {
        int s = connected(g, handle, to), f = spinio::file::open(g, handle, "f", spinio::file::RDONLY);
        for (int i = int(threadIdx.x); i < 3000; i += int(blockDim.x))
            buffer[i] = 1;
        __syncthreads();
        log.add(net::send(g, handle, s, buffer, 2000));
        log.add(net::sendfile(g, handle, s, f, 5, bytes)); // up to the end of the file
        log.add(net::sendfile(g, handle, s, f, int64_t(bytes), 100));
        log.add(net::sendfile(g, handle, s, -1, 0, 100));
        log.add(net::send(g, handle, s, buffer, 1000));
        log.add(net::release(g, handle, s));
        log.add(net::close(g, handle, s));
        spinio::file::close(g, handle, f);
        return;
    }
    int s = net::accept(g, handle, listener);
    uint64_t all = 0, wrong = 0;
    for (int64_t got; (got = net::recv(g, handle, s, buffer, sizeof buffer)) > 0; all += uint64_t(got))
        for (int64_t i = 0; i < got; i++) {
            const uint64_t at = all + uint64_t(i);
            const bool text = at < 2000 || at >= 2000 + bytes - 5;
            wrong += buffer[i] != (text ? 1 : (unsigned char)((at - 2000 + 5) * 7 >> 3));
        }
    net::close(g, handle, s);
    log.add(int64_t(all));
    log.add(int64_t(wrong));
}

static void file_goes_to_an_end_inside_the_net(const char *where)
{
    constexpr uint64_t bytes = 300007;
    std::string folder = "/tmp/spinio-net-peer-XXXXXX", address;
    CHECK(mkdtemp(folder.data()));
    const std::string path = folder + "/f";
    std::vector<unsigned char> data(bytes);
    for (uint64_t i = 0; i < bytes; i++)
        data[i] = (unsigned char)(i * 7 >> 3);
    std::FILE *file = std::fopen(path.c_str(), "w");
    CHECK(file && std::fwrite(data.data(), 1, bytes, file) == bytes && !std::fclose(file));
    {
        Net net({.files_root = folder.c_str()});
        int s = listener(net, where, address);
        spinio::launch_resident_on(net.stream, file_between_texts, 2, 64, net.handle, s, address_of(address), bytes, net.words);
        net.wait();
        const int64_t expected[] = {2000, int64_t(bytes) - 5, 0, -EBADF, 1000, -EOPNOTSUPP, 0, 0, int64_t(bytes) - 5 + 3000, 0};
        for (size_t i = 0; i < sizeof expected / 8; i++)
            CHECK(net.words[i] == expected[i]);
        CHECK(net.stats().upgraded == 1 && net.stats().bytes_sent == 0 && others_close(net));
    }
    CHECK(!unlink(path.c_str()) && !rmdir(folder.c_str()));
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

__global__ void accept_in_order(net::Handle handle, int listener, int first, int third, int64_t *results)
{
    const auto g = net::block();
    int sockets[3];
    net::send(g, handle, first, "m", 1);
    net::send(g, handle, third, "s", 1);
    __shared__ char byte;
    for (int i = 0; i < 3; i++) {
        sockets[i] = net::accept(g, handle, listener);
        net::recv(g, handle, sockets[i], &byte, 1);
        if (threadIdx.x == 0)
            results[i] = byte;
        __syncthreads();
    }
    for (int s : sockets)
        net::close(g, handle, s);
    net::close(g, handle, first);
    net::close(g, handle, third);
}

// The host makes both ends, programs connect in between, and one place is used again and again.
static void host_and_programs_mix_with_ends_inside_the_net()
{
    Net net;
    std::string address;
    int s = listener(net, "tcp://127.0.0.1:0", address);
    int set = spinio_net_set(net.net), mine = spinio_net_connect(net.net, address.c_str());
    CHECK(mine > 0 && net.stats().upgraded == 1);
    errno = 0;
    CHECK(spinio_net_add(net.net, set, mine, net::IN) == -1 && errno == EOPNOTSUPP);
    int program = connect_to(address);
    int second = spinio_net_connect(net.net, address.c_str());
    CHECK(second > 0 && net.stats().upgraded == 2);
    // In the order in which they connected.
    int64_t *words = net.words;
    std::thread client([&] { CHECK(send(program, "p", 1, MSG_NOSIGNAL) == 1); });
    spinio::launch_resident_on(net.stream, accept_in_order, 1, 32, net.handle, s, mine, second, words);
    net.wait();
    client.join();
    close(program);
    CHECK(words[0] == 'm' && words[1] == 'p' && words[2] == 's');
    for (int i = 0; i < 40; i++) {
        uint64_t *turns = reinterpret_cast<uint64_t *>(net.words + 4000);
        std::memset(turns, 0, 16);
        spinio::launch_resident_on(net.stream, both_ways, 2, 32, net.handle, s, address_of(address), 0, size_t(3000), net.words);
        net.wait();
        CHECK(net.words[0] == 3000 && net.words[4] == 3000);
    }
    CHECK(others_close(net) && net.stats().upgraded == 42 && net.stats().kept_by_memory == 0);
}

int main()
{
    std::string path = "unix:///tmp/spinio-net-" + std::to_string(getpid()), name = "unix:@spinio-net-peer-" + std::to_string(getpid());
    for (const char *where : {"tcp://127.0.0.1:0", "tcp://0.0.0.0:0", path.c_str(), name.c_str()}) {
        calls_have_the_same_results(where, 64);
        all_groups_exchange_bytes(where);
        event_sets_tell_of_ends_inside_the_net(where);
    }
    calls_have_the_same_results("tcp://127.0.0.1:0", 1);
    file_goes_to_an_end_inside_the_net("tcp://127.0.0.1:0");
    file_goes_to_an_end_inside_the_net(name.c_str());
    poll_and_sets_see_what_is_true();
    reasons_say_why_a_connection_stays_with_linux();
    impossible_words_of_the_other_end_are_errors();
    listener_that_closes_resets_what_waits_there();
    host_and_programs_mix_with_ends_inside_the_net();
    std::printf("%d failures\n", failures);
    return failures != 0;
}
