// Connections inside a net: both ends are sockets of kernels. The same calls give the same results with the upgrade to device
// memory and without it; no byte goes through Linux with it. Events and errors: net_peer_events.cpp. Prints each failure and
// exits with 1.
#include "net_peer.h"

#include <spinio/file.h>

// --- the same results with and without the upgrade ---

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

// --- files ---

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

// --- the host, programs and kernels in one net ---

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
    }
    calls_have_the_same_results("tcp://127.0.0.1:0", 1);
    file_goes_to_an_end_inside_the_net("tcp://127.0.0.1:0");
    file_goes_to_an_end_inside_the_net(name.c_str());
    host_and_programs_mix_with_ends_inside_the_net();
    std::printf("%d failures\n", failures);
    return failures != 0;
}
