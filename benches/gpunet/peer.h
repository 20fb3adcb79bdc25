// peer.h: the row of gpunet.cu that measures kernels of two nets of this program, on two GPUs where there are two. Its limits are
// words that two kernels write to each other, copies of the driver between the two GPUs, and the stores of one block.
#ifndef GPUNET_PEER_H
#define GPUNET_PEER_H

#include "latency.h"

// Asks through a connected socket: ticks of each round trip of 64 bytes.
__global__ void ask(net::Handle handle, int s, unsigned rounds, unsigned long long *times, Clocks *clocks)
{
    __shared__ char buffer[64];
    auto g = net::block();
    if (threadIdx.x == 0)
        clocks->read(0);
    for (unsigned round = 0; round < rounds; round++) {
        unsigned long long begun = ticks();
        if (net::send(g, handle, s, buffer, sizeof buffer) != sizeof buffer || net::recv(g, handle, s, buffer, sizeof buffer, net::WAITALL) != sizeof buffer)
            break;
        if (threadIdx.x == 0)
            times[round] = ticks() - begun;
    }
    if (threadIdx.x == 0)
        clocks->read(1);
    net::close(g, handle, s);
}

// Each block accepts a connection, and sends messages of `bytes`, a multiple of the period, until that fails.
__global__ void __launch_bounds__(1024) give(net::Handle handle, int listener, unsigned char *buffer, unsigned bytes, int flags)
{
    for (size_t at = 0; at < bytes; at += period)
        fill(buffer + at);
    int s = net::accept(net::block(), handle, listener);
    while (net::send(net::block(), handle, s, buffer, bytes, flags) > 0) {
    }
    net::close(net::block(), handle, s);
}

// Each block receives so many bytes of give(), and looks at the first and the last one of each call.
__global__ void __launch_bounds__(1024) take(net::Handle handle, const int *sockets, unsigned char *buffers, unsigned message, uint64_t bytes, uint64_t *wrong)
{
    const int s = sockets[blockIdx.x];
    unsigned char *buffer = buffers + size_t(blockIdx.x) * message;
    uint64_t total = 0;
    while (total < bytes) {
        int64_t got = net::recv(net::block(), handle, s, buffer, message);
        if (got <= 0)
            break;
        if (threadIdx.x == 0 && (buffer[0] != byte_at(total) || buffer[got - 1] != byte_at(total + uint64_t(got) - 1)))
            wrong[blockIdx.x] += 1;
        total += uint64_t(got);
        __syncthreads();
    }
    if (threadIdx.x == 0 && total < bytes)
        wrong[blockIdx.x] += 1;
    net::close(net::block(), handle, s);
}

// The asking side of word_ping_pong(): one thread.
__global__ void word_ping(const uint64_t *in, uint64_t *out, unsigned rounds, unsigned long long *times, Clocks *clocks)
{
    spinio::Backoff waiting;
    clocks->read(0);
    for (unsigned round = 0; round < rounds; round++) {
        unsigned long long begun = ticks();
        spinio::store_release_system(out, uint64_t(round) + 1);
        while (look(in, waiting) < uint64_t(round) + 1) {
        }
        times[round] = ticks() - begun;
    }
    clocks->read(1);
}

// A load or store of a thread.
struct alignas(16) Sixteen {
    uint64_t low, high;
};

// Each block stores a period again and again.
__global__ void __launch_bounds__(1024) bare_stores(const Sixteen *from, Sixteen *to, size_t bytes, unsigned repeats)
{
    Sixteen *own = to + blockIdx.x * (bytes / sizeof(Sixteen));
    for (unsigned repeat = 0; repeat < repeats; repeat++)
        for (size_t i = threadIdx.x; i < bytes / sizeof(Sixteen); i += blockDim.x)
            own[i] = from[i];
}

// A block's copy from pinned memory as in recv(): after a load that acquires, so that none is answered by the L1 cache.
__device__ inline void load_again(const Sixteen *from, Sixteen *to, size_t bytes, const uint64_t *word)
{
    if (threadIdx.x == 0)
        spinio::load_acquire_system(word);
    __syncthreads();
    spinio::copy_quads(net::block(), reinterpret_cast<spinio::Quad *>(to), reinterpret_cast<const spinio::Quad *>(from), bytes / sizeof(spinio::Quad));
    __syncthreads();
}

__global__ void __launch_bounds__(1024) bare_loads(const Sixteen *from, Sixteen *to, size_t bytes, unsigned repeats, const uint64_t *word)
{
    for (unsigned repeat = 0; repeat < repeats; repeat++)
        load_again(from, to, bytes, word);
}

// The devices of the two nets.
struct Two {
    int device[2] = {0, 0};
    bool can_access = false;

    Two()
    {
        int count = 0, possible = 0;
        check(cudaGetDeviceCount(&count) == cudaSuccess, "no device");
        device[1] = count > 1 ? 1 : 0;
        if (count > 1 && cudaDeviceCanAccessPeer(&possible, 0, 1) == cudaSuccess && possible) {
            can_access = true;
            for (int side : {0, 1}) {
                use(side);
                can_access = can_access && cudaDeviceEnablePeerAccess(device[side ^ 1], 0) == cudaSuccess;
            }
            use(0);
        }
        for (int side : {1, 0}) {
            use(side);
            // A driver that loads a kernel at its first launch waits for those that run.
            load(echo, ask, give, take, word_ping, word_ping_pong, bare_stores, bare_loads);
        }
    }
    template <typename... Kernels>
    static void load(Kernels... kernels)
    {
        check(((spinio::largest_resident_grid(kernels, 512) > 0) && ...), "load the kernels");
    }
    void use(int side) const { check(cudaSetDevice(device[side]) == cudaSuccess, "cudaSetDevice"); }
    const char *name() const { return device[1] ? "two GPUs, " : "one GPU, "; }

    template <typename T>
    T *memory(int side, size_t count) const
    {
        T *at;
        use(side);
        const std::vector<T> zeros(count);
        check(cudaMalloc(&at, count * sizeof(T)) == cudaSuccess, "cudaMalloc");
        check(cudaMemcpy(at, zeros.data(), count * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess, "cudaMemcpy");
        return at;
    }
};

static void peer_words(const Size &size, const Two &two)
{
    const unsigned rounds = size.small ? 50 : 20000;
    auto times = pinned<unsigned long long>(rounds);
    auto clocks = pinned<Clocks>(1);
    for (bool in_device_memory : {false, true}) {
        if (in_device_memory && !two.can_access)
            continue;
        uint64_t *words[2];
        for (int side : {0, 1})
            words[side] = in_device_memory ? two.memory<uint64_t>(side, 16) : pinned<uint64_t>(16);
        two.use(1);
        cudaStream_t answers = new_stream();
        spinio::launch_resident_on(answers, word_ping_pong, 1, 1, (const uint64_t *)words[1], words[0], uint64_t(rounds));
        two.use(0);
        cudaStream_t asks = new_stream();
        spinio::launch_resident_on(asks, word_ping, 1, 1, (const uint64_t *)words[0], words[1], rounds, times, clocks);
        check(cudaStreamSynchronize(asks) == cudaSuccess && cudaStreamSynchronize(answers) == cudaSuccess, "words");
        Result("peer", std::string(two.name()) + "bare words, in " + (in_device_memory ? "the reader's device memory" : "pinned memory"))
            .times(device_times(times, rounds, *clocks));
    }
}

// Kernels of both end before memory is given back, which waits for all of a GPU.
static void end(const Two &two, Net &first, Net &second)
{
    check(!spinio_net_stop(second.net) && cudaStreamSynchronize(second.stream) == cudaSuccess, "stop a net");
    first.end();
    two.use(1);
    second.end();
    two.use(0);
}

// How bytes travel between two nets that have connected.
static const char *transport(const Net &net)
{
    struct spinio_net_stats stats;
    check(!spinio_net_stats(net.net, &stats, sizeof stats), "stats");
    return stats.peer ? ", in device memory" : stats.shared ? ", over shared memory" : "";
}

static void peer_echo(const Size &size, const Two &two, bool inet, bool no_upgrade)
{
    const unsigned rounds = size.small ? 50 : 5000;
    two.use(1);
    Net accepts(16, 0, no_upgrade);
    Name name;
    int listener = accepts.listener(inet, name);
    accepts.launch(echo, 1, 64, accepts.handle, listener);
    two.use(0);
    Net connects(16, 0, no_upgrade);
    int s = spinio_net_connect(connects.net, name.text().c_str());
    check(s > 0, "connect to another net");
    auto times = pinned<unsigned long long>(rounds);
    auto clocks = pinned<Clocks>(1);
    ProxyTime one(connects), other(accepts);
    connects.launch(ask, 1, 64, connects.handle, s, rounds, times, clocks);
    check(cudaStreamSynchronize(connects.stream) == cudaSuccess, "a block that asks");
    Result("peer", std::string(two.name()) + "two nets, " + family_name(inet) + transport(connects) + ", 64 bytes")
        .times(device_times(times, rounds, *clocks))
        .number("proxy_us_a_round", (one.spent() + other.spent()) * 1e6 / rounds);
    end(two, connects, accepts);
}

static void peer_stream(const Size &size, const Two &two, unsigned blocks, unsigned ring, unsigned message, bool no_upgrade, int flags = 0)
{
    const uint64_t bytes = size.small ? 1 << 20 : uint64_t(1) << 30;
    const unsigned connections = std::max(blocks, 16u);
    two.use(1);
    Net sends(connections, ring, no_upgrade, connections);
    Name name;
    int listener = sends.listener(false, name);
    unsigned char *from = two.memory<unsigned char>(1, message), *to = two.memory<unsigned char>(0, size_t(blocks) * message);
    two.use(1);
    sends.launch(give, blocks, 512, sends.handle, listener, from, message, flags);
    two.use(0);
    Net takes(connections, ring, no_upgrade, connections);
    auto sockets = pinned<int>(blocks);
    for (unsigned i = 0; i < blocks; i++)
        check((sockets[i] = spinio_net_connect(takes.net, name.text().c_str())) > 0, "connect to another net");
    struct spinio_net_stats stats;
    check(!spinio_net_stats(takes.net, &stats, sizeof stats) && (no_upgrade || stats.peer + stats.shared == blocks), "a connection goes through Linux");
    auto wrong = pinned<uint64_t>(blocks);
    double begun = now();
    takes.launch(take, blocks, 512, takes.handle, (const int *)sockets, to, message, bytes, wrong);
    check(cudaStreamSynchronize(takes.stream) == cudaSuccess && std::count(wrong, wrong + blocks, 0u) == blocks, "a stream with wrong bytes");
    Result("peer", std::string(two.name()) + std::to_string(blocks) + " to " + std::to_string(blocks) + " blocks, UNIX" + transport(takes) + (ring ? ", ring of " + std::to_string(ring >> 10) + " KiB" : ", default rings") + ", messages of " + std::to_string(message >> 10) + " KiB" + (flags & net::MORE ? " with MORE" : ""))
        .number("GB_s", double(bytes) * blocks / (now() - begun) * 1e-9);
    end(two, takes, sends);
}

// Bytes a second of blocks that store a period each, again and again.
static double rate_of_stores(const Size &size, cudaStream_t stream, const unsigned char *from, unsigned char *to, unsigned blocks)
{
    const unsigned periods = size.small ? 4 : 4000;
    const double begun = now();
    spinio::launch_resident_on(stream, bare_stores, blocks, 512, reinterpret_cast<const Sixteen *>(from), reinterpret_cast<Sixteen *>(to), period, periods);
    check(cudaStreamSynchronize(stream) == cudaSuccess, "stores of blocks");
    return double(period) * periods * blocks / (now() - begun);
}

// Bytes a second of one block that copies a period of pinned memory, again and again.
static double rate_of_loads(const Size &size, cudaStream_t stream, const unsigned char *from, unsigned char *to)
{
    const unsigned periods = size.small ? 4 : 4000;
    const auto word = pinned<uint64_t>(1);
    const double begun = now();
    spinio::launch_resident_on(stream, bare_loads, 1, 512, reinterpret_cast<const Sixteen *>(from), reinterpret_cast<Sixteen *>(to), period, periods, (const uint64_t *)word);
    check(cudaStreamSynchronize(stream) == cudaSuccess, "loads of a block");
    return double(period) * periods / (now() - begun);
}

static void peer_limits(const Size &size, const Two &two)
{
    const size_t bytes = size.small ? 1 << 20 : 64 << 20;
    const unsigned repeats = size.small ? 1 : 20;
    const unsigned most = two.device[1] ? 132 : 1;
    auto from = two.memory<unsigned char>(0, bytes), to = two.memory<unsigned char>(1, std::max(bytes, most * period));
    two.use(0);
    check(cudaMemcpyPeer(to, two.device[1], from, two.device[0], bytes) == cudaSuccess, "cudaMemcpyPeer");
    double begun = now();
    for (unsigned repeat = 0; repeat < repeats; repeat++)
        check(cudaMemcpyPeer(to, two.device[1], from, two.device[0], bytes) == cudaSuccess, "cudaMemcpyPeer");
    check(cudaDeviceSynchronize() == cudaSuccess, "a copy");
    Result("peer", std::string(two.name()) + "cudaMemcpyPeer").number("GB_s", double(bytes) * repeats / (now() - begun) * 1e-9);
    cudaStream_t stream = new_stream();
    auto host = pinned<unsigned char>(period);
    Result("peer", std::string(two.name()) + "loads of a block from pinned memory").number("GB_s", rate_of_loads(size, stream, host, from) * 1e-9);
    struct {
        const char *what;
        unsigned char *from, *to;
        unsigned blocks;
        bool possible;
    } const all[] = {{"stores of a block to pinned memory", from, host, 1, true},
                     {"stores of a block to the other GPU", from, to, 1, two.can_access},
                     {"stores of 8 blocks to the other GPU", from, to, 8, two.can_access},
                     {"stores of 132 blocks to the other GPU", from, to, 132, two.can_access}};
    for (auto &each : all) {
        if (!each.possible || spinio::largest_resident_grid(bare_stores, 512) < each.blocks)
            continue;
        Result("peer", std::string(two.name()) + each.what).number("GB_s", rate_of_stores(size, stream, each.from, each.to, each.blocks) * 1e-9);
    }
}

static void row_peer(const Size &size)
{
    const Two two;
    peer_words(size, two);
    for (bool no_upgrade : {true, false})
        for (bool inet : {false, true})
            peer_echo(size, two, inet, no_upgrade);
    // 0: the default, which is 64 KiB through Linux and 1 MiB in device memory.
    for (unsigned ring : {64u << 10, 0u})
        for (unsigned message : {unsigned(period), 8 * unsigned(period)})
            for (bool no_upgrade : {true, false})
                if (!ring || ring >= message)
                    peer_stream(size, two, 1, ring, message, no_upgrade);
    // All but a quarter of a ring.
    for (bool no_upgrade : {true, false})
        peer_stream(size, two, 1, 0, period, no_upgrade, net::MORE);
    peer_limits(size, two);
}

// As many blocks at each side, a connection each. On one GPU both kernels would not be resident.
static void row_peer_blocks(const Size &size)
{
    const Two two;
    for (unsigned blocks : {8u, 132u})
        for (unsigned message : {unsigned(period), 8 * unsigned(period)})
            if (two.device[1] && spinio::largest_resident_grid(take, 512) >= blocks)
                peer_stream(size, two, blocks, 0, message, false);
}

#endif
