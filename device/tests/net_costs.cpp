// What calls cost in accesses to host memory, and messages of all small sizes. Prints each failure and exits with 1.
#include "net_test.h"

// What a call has cost the block: all its threads are on one CPU thread.
struct Cost {
    uint64_t reads, releases, bytes;

    static Cost now()
    {
        auto &counts = spinio::emulation::host_accesses;
        auto load = [](uint64_t &count) { return __atomic_load_n(&count, __ATOMIC_RELAXED); };
        return {load(counts.reads), load(counts.releases), load(counts.bytes)};
    }
};

template <typename Call>
__device__ void count(int64_t *out, Call call)
{
    __syncthreads();
    Cost before = Cost::now();
    __syncthreads();
    int64_t result = call();
    __syncthreads();
    Cost after = Cost::now();
    if (threadIdx.x == 0) {
        out[0] = result;
        out[1] = int64_t(after.reads - before.reads);
        out[2] = int64_t(after.releases - before.releases);
        out[3] = int64_t(after.bytes - before.bytes);
    }
    __syncthreads();
}

// Waits until the program says that bytes have arrived; that has its own cost.
__device__ void await(uint64_t *turn, uint64_t now)
{
    if (threadIdx.x == 0) {
        spinio::Backoff waiting;
        while (spinio::load_acquire_system(turn) < now)
            waiting.pause();
    }
    __syncthreads();
}

__global__ void costs(net::Handle handle, int listener, uint64_t *turn, int64_t *out)
{
    __shared__ char bytes[2000];
    auto g = net::block();
    int s = net::accept(g, handle, listener);
    net::send(g, handle, s, bytes, 1); // the first call looks at everything
    await(turn, 1);
    count(out, [&] { return net::recv(g, handle, s, bytes, 98); });
    count(out + 4, [&] { return net::send(g, handle, s, bytes, 98); });
    count(out + 8, [&] { return net::send(g, handle, s, bytes, 1500); });
    count(out + 12, [&] { return net::send(g, handle, s, bytes, 99); });
    await(turn, 2);
    count(out + 16, [&] { return net::recv(g, handle, s, bytes, 2000); });
    count(out + 20, [&] { return net::recv(g, handle, s, bytes, 1, net::DONTWAIT); });
    net::close(g, handle, s);
}

static void calls_cost_what_the_design_says()
{
    Net net;
    std::string address;
    int s = listener(net, ("unix:@spinio-cost-" + std::to_string(getpid())).c_str(), address);
    auto turn = reinterpret_cast<uint64_t *>(net.words + 1000);
    spinio::launch_resident_on(net.stream, costs, 1, 64, net.handle, s, turn, net.words);
    int peer = connect_to(address);
    char bytes[4096] = {};
    CHECK(recv(peer, bytes, 1, MSG_WAITALL) == 1);
    auto give = [&](size_t count, uint64_t next) {
        uint64_t before = net.stats().bytes_received;
        CHECK(send(peer, bytes, count, MSG_NOSIGNAL) == ssize_t(count));
        while (net.stats().bytes_received < before + count)
            usleep(1000);
        __atomic_store_n(turn, next, __ATOMIC_RELEASE);
    };
    give(98, 1);
    CHECK(recv(peer, bytes, 98 + 1500 + 99, MSG_WAITALL) == 98 + 1500 + 99);
    give(1300, 2);
    net.wait();
    close(peer);
    const int64_t expected[][4] = {{98, 1, 0, 98}, {98, 0, 1, 0}, {1500, 0, 1, 0}, {99, 0, 1, 0}, {1300, 1, 0, 1300}, {-EAGAIN, 1, 0, 0}};
    const char *names[] = {"recv of 98 bytes", "send of 98 bytes", "send of 1500 bytes", "send of 99 bytes", "recv of 1300 bytes", "recv of nothing"};
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++)
        for (size_t k = 0; k < 4; k++)
            if (net.words[i * 4 + k] != expected[i][k]) {
                const int64_t *w = net.words + i * 4;
                std::printf("%s: result %lld, %lld reads of host memory, %lld releases, %lld bytes\n", names[i], (long long)w[0], (long long)w[1],
                            (long long)w[2], (long long)w[3]);
                failures++;
                break;
            }
}

template <typename Group>
__device__ void echo_pieces(Group group, const net::Handle &handle, int listener, char *buffer)
{
    int s = net::accept(group, handle, listener);
    // Peeks, then takes less than a message, then the rest.
    for (unsigned turn = 0;; turn++) {
        int64_t got = turn % 3 == 0 ? net::recv(group, handle, s, buffer, 200, net::PEEK) : net::recv(group, handle, s, buffer, turn % 7 ? 200 : 5);
        if (got <= 0)
            break;
        group.sync();
        if (turn % 3 != 0 && net::send(group, handle, s, buffer, size_t(got)) != got)
            break;
        group.sync();
    }
    net::close(group, handle, s);
}

// Who calls: 0 the block, 1 its first warp, 2 its first thread.
__global__ void echo(net::Handle handle, int listener, int who)
{
    __shared__ char buffer[200];
    if (who == 0)
        echo_pieces(net::block(), handle, listener, buffer);
    else if (who == 1 && threadIdx.x < 32)
        echo_pieces(net::warp(), handle, listener, buffer);
    else if (who == 2 && threadIdx.x == 0)
        echo_pieces(net::thread(), handle, listener, buffer);
}

// Messages of all small sizes, one after another and many at once: they come back as they were.
static void messages_of_all_sizes_come_back(int who, unsigned threads)
{
    Net net;
    std::string address;
    int s = listener(net, ("unix:@spinio-sizes-" + std::to_string(getpid())).c_str(), address);
    spinio::launch_resident_on(net.stream, echo, 1, threads, net.handle, s, who);
    int peer = connect_to(address);
    unsigned seed = 1;
    std::vector<unsigned char> out, in;
    for (size_t round = 0; round < 120; round++) {
        size_t bytes = round < 105 ? round + 1 : 3000;
        out.resize(bytes), in.resize(bytes);
        for (auto &byte : out)
            byte = (unsigned char)((seed = seed * 1664525 + 1013904223) >> 24);
        // Every fifth in two parts, so that the second one may come while the first one is read.
        size_t first = round % 5 ? bytes : bytes / 2;
        CHECK(send(peer, out.data(), first, MSG_NOSIGNAL) == ssize_t(first));
        CHECK(send(peer, out.data() + first, bytes - first, MSG_NOSIGNAL) == ssize_t(bytes - first));
        CHECK(recv(peer, in.data(), bytes, MSG_WAITALL) == ssize_t(bytes) && in == out);
    }
    close(peer);
    net.wait();
    CHECK(net.stats().violations == 0);
}

__global__ void echo_many(net::Handle handle, int listener, int connections)
{
    __shared__ char buffer[98];
    for (int i = 0; i < connections; i++) {
        int s = net::accept(net::block(), handle, listener);
        int64_t got = net::recv(net::block(), handle, s, buffer, sizeof buffer);
        if (got > 0)
            net::send(net::block(), handle, s, buffer, size_t(got));
        net::close(net::block(), handle, s);
    }
}

// Sockets of the same place in the table: what the last one left in lines and rings is nothing of the next one.
static void next_socket_of_a_place_sees_its_own_messages()
{
    Net net({.connections = 2, .sockets = 2});
    std::string address;
    int s = listener(net, ("unix:@spinio-place-" + std::to_string(getpid())).c_str(), address);
    const int connections = 200;
    spinio::launch_resident_on(net.stream, echo_many, 1, 32, net.handle, s, connections);
    for (int i = 0; i < connections; i++) {
        int peer = connect_to(address);
        char out[98], in[98] = {};
        std::memset(out, i, sizeof out);
        size_t bytes = size_t(i) * 37 % 98 + 1;
        CHECK(send(peer, out, bytes, MSG_NOSIGNAL) == ssize_t(bytes));
        CHECK(recv(peer, in, bytes, MSG_WAITALL) == ssize_t(bytes) && !std::memcmp(in, out, bytes));
        close(peer);
    }
    net.wait();
    CHECK(net.stats().violations == 0);
}

int main()
{
    calls_cost_what_the_design_says();
    messages_of_all_sizes_come_back(0, 64);
    messages_of_all_sizes_come_back(0, 17);
    messages_of_all_sizes_come_back(1, 32);
    messages_of_all_sizes_come_back(2, 32);
    next_socket_of_a_place_sees_its_own_messages();
    std::printf("%d failures\n", failures);
    return failures != 0;
}
