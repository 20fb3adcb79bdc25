// Kernels of two nets, of one process or of two, on one device or on two: their bytes go through memory that both nets map.
// Groups, event sets, names, reasons, processes that are killed, peers that break the rules. The same results as through Linux:
// net_scripts.cpp. Prints each failure and exits with 1.
#include "net_granule.h"
#include "net_process.h"

static net::Address address_of(const std::string &text)
{
    if (text.rfind("tcp://", 0) == 0)
        return net::Address::inet(127, 0, 0, 1, unsigned(std::atoi(text.c_str() + text.rfind(':') + 1)));
    return text[5] == '@' ? net::Address::abstract(text.c_str() + 6) : net::Address::path(text.c_str() + 7);
}

__host__ __device__ inline unsigned char byte_of(uint64_t at) { return (unsigned char)(at * 7 + (at >> 8) * 3 + (at >> 16)); }

__device__ inline void fill(unsigned char *bytes, uint64_t at, size_t count)
{
    __syncthreads();
    for (size_t i = threadIdx.x; i < count; i += blockDim.x)
        bytes[i] = byte_of(at + i);
    __syncthreads();
}

__device__ inline int wrong_bytes(const unsigned char *bytes, uint64_t at, int64_t count)
{
    bool right = true;
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x)
        right = right && bytes[i] == byte_of(at + uint64_t(i));
    return __syncthreads_count(!right);
}

template <typename Group>
__device__ int connected(Group group, const net::Handle &handle, const net::Address &to)
{
    int s = net::socket(group, handle, to.bytes[0], net::STREAM, 0);
    int failed = net::connect(group, handle, s, to);
    return failed ? failed : s;
}

__global__ void close_socket(net::Handle handle, int s) { net::close(net::block(), handle, s); }

static void close_in_a_kernel(Net &net, int s)
{
    spinio::launch_resident_on(net.stream, close_socket, 1, 32, net.handle, s);
    net.wait();
}

// --- all groups ---

template <typename Group>
__device__ void send_back(Group group, const net::Handle &handle, int listener, char *buffer, size_t size)
{
    int s = net::accept(group, handle, listener);
    int64_t got;
    while ((got = net::recv(group, handle, s, buffer, size)) > 0)
        net::send(group, handle, s, buffer, size_t(got));
    net::close(group, handle, s);
}

// A block for each size of group: block, warp, thread.
__global__ void echo(net::Handle handle, int listener)
{
    __shared__ char buffer[3000];
    if (blockIdx.x == 0)
        send_back(net::block(), handle, listener, buffer, sizeof buffer);
    else if (blockIdx.x == 1 && threadIdx.x < 32)
        send_back(net::warp(), handle, listener, buffer, 700);
    else if (blockIdx.x == 2 && threadIdx.x == 0)
        send_back(net::thread(), handle, listener, buffer, 100);
}

template <typename Group>
__device__ int64_t ask(Group group, const net::Handle &handle, net::Address to, unsigned char *bytes, size_t bytes_each, int rounds)
{
    int s = connected(group, handle, to);
    int64_t right = 0;
    for (int round = 0; round < rounds; round++) {
        for (size_t i = 0; i < bytes_each; i++)
            bytes[i] = byte_of(uint64_t(round) * 1000 + i);
        group.sync();
        bool good = net::send(group, handle, s, bytes, bytes_each) == int64_t(bytes_each);
        group.sync();
        for (size_t i = 0; i < bytes_each; i++)
            bytes[i] = 0;
        group.sync();
        good = good && net::recv(group, handle, s, bytes, bytes_each, net::WAITALL) == int64_t(bytes_each);
        for (size_t i = 0; i < bytes_each; i++)
            good = good && bytes[i] == byte_of(uint64_t(round) * 1000 + i);
        group.sync();
        right += good;
    }
    net::shutdown(group, handle, s, net::SHUT_SEND);
    right += net::recv(group, handle, s, bytes, 1) == 0;
    net::close(group, handle, s);
    return right;
}

__global__ void ask_all(net::Handle handle, net::Address to, int64_t *out)
{
    __shared__ unsigned char bytes[6000];
    int64_t right = -1;
    if (blockIdx.x == 0)
        right = ask(net::block(), handle, to, bytes, 6000, 20);
    else if (blockIdx.x == 1 && threadIdx.x < 32)
        right = ask(net::warp(), handle, to, bytes, 98, 20);
    else if (blockIdx.x == 2 && threadIdx.x == 0)
        right = ask(net::thread(), handle, to, bytes, 333, 20);
    if (threadIdx.x == 0)
        out[blockIdx.x] = right;
}

// `ordinal`: of the device of the net that connects, -1: the same one.
static void all_groups_exchange_bytes(const char *where, int ordinal = -1)
{
    Net accepts;
    std::string address;
    int s = listener(accepts, where, address);
    if (ordinal >= 0) {
        CHECK(cudaSetDevice(ordinal) == cudaSuccess);
        void *in_use;
        CHECK(cudaMalloc(&in_use, 4096) == cudaSuccess);
    }
    {
        Net connects({.device = ordinal < 0 ? "emulated" : nullptr});
        for (int again = 0; again < 3; again++) {
            spinio::launch_resident_on(accepts.stream, echo, 3, 64, accepts.handle, s);
            spinio::launch_resident_on(connects.stream, ask_all, 3, 64, connects.handle, address_of(address), connects.words);
            connects.wait();
            accepts.wait();
            CHECK(connects.words[0] == 21 && connects.words[1] == 21 && connects.words[2] == 21);
            waits_for_open(connects, 0);
            waits_for_open(accepts, 1);
        }
        for (const Net *net : {&accepts, &connects})
            CHECK(net->stats().shared == 9 && net->stats().bytes_sent == 0 && net->stats().bytes_received == 0 && net->stats().violations == 0);
    }
    if (ordinal >= 0)
        CHECK(cudaSetDevice(0) == cudaSuccess);
}

// --- event sets ---

__global__ void serve(net::Handle handle, int set)
{
    __shared__ net::Ready ready;
    __shared__ char buffer[700];
    auto g = net::block();
    while (net::wait(g, handle, set, &ready, 1, -1) > 0) {
        const int s = ready.s;
        int64_t got = ready.events & net::NEW ? 1 : net::recv(g, handle, s, buffer, sizeof buffer, net::DONTWAIT);
        if (!(ready.events & net::NEW) && got > 0)
            got = net::send(g, handle, s, buffer, size_t(got));
        if (got > 0 || got == -EAGAIN)
            net::rearm(g, handle, s);
        else
            net::close(g, handle, s);
        __syncthreads();
    }
}

// Sends and waits in a set for what comes back; `early`: the socket is in the set before it is connected.
__global__ void ask_with_sets(net::Handle handle, net::Address to, int early, int64_t *out)
{
    __shared__ net::Ready ready;
    __shared__ unsigned char bytes[900], back[900];
    auto g = net::block();
    const int set = net::set(g, handle);
    int s = net::socket(g, handle, to.bytes[0], net::STREAM, 0);
    int64_t right = 0;
    if (early)
        right += net::add(g, handle, set, s, net::IN);
    right += net::connect(g, handle, s, to);
    if (!early)
        right += net::add(g, handle, set, s, net::IN);
    for (int round = 0; round < 12; round++) {
        const size_t count = 1 + size_t(round) * 75;
        fill(bytes, uint64_t(round), count);
        net::send(g, handle, s, bytes, count);
        size_t have = 0;
        while (have < count) {
            if (net::wait(g, handle, set, &ready, 1, -1) != 1 || ready.s != s)
                break;
            int64_t got = net::recv(g, handle, s, back + have, count - have, net::DONTWAIT);
            have += got > 0 ? size_t(got) : 0;
            net::rearm(g, handle, s);
        }
        right += have == count && wrong_bytes(back, uint64_t(round), int64_t(count)) == 0;
    }
    net::shutdown(g, handle, s, net::SHUT_SEND);
    // The end is an event too.
    right += net::wait(g, handle, set, &ready, 1, -1) == 1 && net::recv(g, handle, s, back, 1, net::DONTWAIT) == 0;
    net::close(g, handle, s);
    if (threadIdx.x == 0)
        out[0] = right;
}

static void event_sets_hear_of_other_nets(const char *where)
{
    Net accepts, connects;
    std::string address;
    int s = listener(accepts, where, address), set = spinio_net_set(accepts.net);
    CHECK(!spinio_net_add(accepts.net, set, s, net::IN));
    spinio::launch_resident_on(accepts.stream, serve, 2, 64, accepts.handle, set);
    for (int early = 0; early < 2; early++) {
        spinio::launch_resident_on(connects.stream, ask_with_sets, 1, 64, connects.handle, address_of(address), early, connects.words);
        connects.wait();
        CHECK(connects.words[0] == 13);
    }
    waits_for_open(accepts, 1);
    CHECK(connects.stats().shared == 2 && accepts.stats().shared == 2);
    CHECK(!spinio_net_stop(accepts.net));
    accepts.wait();
}

// Block 0 connects, block 1 polls the same socket meanwhile, which no call of it has found to be connected.
__global__ void connect_and_poll(net::Handle handle, net::Address to, uint64_t *turn, int64_t *out)
{
    auto g = net::block();
    __shared__ net::Poll poll;
    if (blockIdx.x == 0) {
        int s = net::socket(g, handle, to.bytes[0], net::STREAM, 0);
        pass_and_wait(turn, uint64_t(s));
        int64_t failed = net::connect(g, handle, s, to);
        if (g.leads())
            out[0] = failed;
        return;
    }
    spinio::Backoff waiting;
    while (!spinio::load_acquire_system(turn))
        waiting.pause();
    int64_t ready = 0;
    for (bool told = false; ready == 0;) {
        if (g.leads())
            poll = {int(spinio::load_acquire_system(turn)), net::OUT, 0, 0, 0};
        __syncthreads();
        ready = net::poll(g, handle, &poll, 1, 0);
        if (!told && g.leads())
            spinio::store_release_system(turn + 1, ~uint64_t(0) >> 1);
        told = true;
        // An unconnected socket has an error.
        ready = ready == 1 && poll.ready & net::OUT && !(poll.ready & net::ERR) ? 1 : 0;
        __syncthreads();
        if (g.leads())
            spinio::wait_hint();
    }
    if (g.leads())
        out[1] = poll.out;
}

static void poll_sees_a_connection_that_no_call_has_found()
{
    for (int round = 0; round < 10; round++) {
        Net accepts, connects;
        std::string address;
        listener(accepts, "tcp://127.0.0.1:0", address);
        spinio::launch_resident_on(connects.stream, connect_and_poll, 2, 32, connects.handle, address_of(address), reinterpret_cast<uint64_t *>(connects.words + 100),
                                   connects.words);
        connects.wait();
        CHECK(connects.words[0] == 0 && connects.words[1] == 4096 && connects.stats().shared == 1);
    }
}

// --- names, and calls that such sockets do not have ---

__global__ void names(net::Handle handle, int s, net::Address *out, int64_t *results)
{
    auto g = net::block();
    int64_t own = net::getsockname(g, handle, s, out), peer = net::getpeername(g, handle, s, out + 1);
    int64_t released = net::release(g, handle, s);
    if (threadIdx.x == 0)
        results[0] = own, results[1] = peer, results[2] = released;
}

__global__ void accept_one(net::Handle handle, int listener, net::Address *out, int64_t *results)
{
    int s = net::accept(net::block(), handle, listener, out + 2);
    if (threadIdx.x == 0)
        results[3] = s;
}

static void names_are_those_of_the_connection(const char *where)
{
    net::Address all[2][2][3];
    for (bool no_upgrade : {false, true}) {
        Net accepts({.no_upgrade = no_upgrade}), connects({.no_upgrade = no_upgrade});
        std::string address;
        int s = listener(accepts, where, address), client = spinio_net_connect(connects.net, address.c_str());
        CHECK(client > 0);
        net::Address *out;
        CHECK(cudaHostAlloc(&out, 6 * sizeof *out, cudaHostAllocDefault) == cudaSuccess);
        std::memset(static_cast<void *>(out), 0, 6 * sizeof *out);
        spinio::launch_resident_on(accepts.stream, accept_one, 1, 32, accepts.handle, s, out, accepts.words);
        accepts.wait();
        CHECK(connects.stats().shared == !no_upgrade);
        spinio::launch_resident_on(accepts.stream, names, 1, 32, accepts.handle, int(accepts.words[3]), out, accepts.words);
        spinio::launch_resident_on(connects.stream, names, 1, 32, connects.handle, client, out + 3, connects.words);
        accepts.wait();
        connects.wait();
        for (const Net *net : {&accepts, &connects})
            CHECK(net->words[0] == 0 && net->words[1] == 0 && net->words[2] == (no_upgrade ? 0 : -EOPNOTSUPP));
        CHECK(where[0] != 't' || (!std::memcmp(out[0].bytes, out[4].bytes, 8) && !std::memcmp(out[1].bytes, out[3].bytes, 8)));
        std::memcpy(static_cast<void *>(all[no_upgrade]), out, sizeof all[0]);
        cudaFreeHost(out);
        if (where[0] == 'u')
            unlink(where + 7);
    }
    for (int side = 0; side < 2 && where[0] == 'u'; side++)
        for (int which = 0; which < 3; which++)
            CHECK(all[0][side][which].length == all[1][side][which].length && !std::memcmp(all[0][side][which].bytes, all[1][side][which].bytes, all[0][side][which].length));
}

// --- reasons ---

static void reasons_are_counted()
{
    Net accepts, connects, off({.no_upgrade = true});
    std::string address, other;
    int s = listener(accepts, "tcp://127.0.0.1:0", address);
    listener(off, "tcp://127.0.0.1:0", other);
    // Sixteen connections of a net have four granules.
    std::vector<int> sockets;
    for (int i = 0; i < 5; i++)
        sockets.push_back(spinio_net_connect(connects.net, address.c_str()));
    CHECK(connects.stats().shared == 4 && connects.stats().kept_by_granules == 1 && accepts.stats().kept_by_granules == 1);
    CHECK(connects.stats().connected == 5 && connects.stats().violations == 0);
    for (int each : sockets)
        close_in_a_kernel(connects, each);
    waits_for_open(connects, 0);
    // What no kernel has accepted is gone with its peer, once the proxy looks.
    spinio::launch_resident_on(accepts.stream, echo, 1, 32, accepts.handle, s);
    accepts.wait();
    // A net that shares nothing, and a client of one.
    CHECK(spinio_net_connect(connects.net, other.c_str()) > 0 && connects.stats().shared == 4);
    CHECK(spinio_net_connect(off.net, address.c_str()) > 0 && off.stats().shared == 0);
}

__global__ void connect_twice(net::Handle handle, net::Address bound, net::Address first, net::Address second, int64_t *out)
{
    auto g = net::block();
    int s = net::socket(g, handle, second.bytes[0], net::STREAM, 0);
    int64_t results[3] = {0, 0, 0};
    if (bound.length)
        results[0] = net::bind(g, handle, s, bound);
    if (first.length)
        results[1] = net::connect(g, handle, s, first);
    results[2] = net::connect(g, handle, s, second);
    net::close(g, handle, s);
    if (threadIdx.x == 0)
        for (int i = 0; i < 3; i++)
            out[i] = results[i];
}

static void bound_and_refused_sockets_connect_as_others_do()
{
    Net accepts, connects;
    std::string address, path = "unix:///tmp/spinio-nets-" + std::to_string(getpid()), mine = path + "-client", unused;
    listener(accepts, "tcp://127.0.0.1:0", address);
    listener(accepts, path.c_str(), unused);
    auto connect = [&](net::Address bound, net::Address first, net::Address second) {
        spinio::launch_resident_on(connects.stream, connect_twice, 1, 32, connects.handle, bound, first, second, connects.words);
        connects.wait();
        return std::vector<int64_t>(connects.words, connects.words + 3);
    };
    // The path is not known to be of one socket; the port is.
    CHECK((connect(address_of(mine), {}, address_of(path)) == std::vector<int64_t>{0, 0, 0}));
    CHECK(connects.stats().kept_by_name == 1 && connects.stats().shared == 0);
    CHECK((connect(net::Address::inet(127, 0, 0, 1, 0), {}, address_of(address)) == std::vector<int64_t>{0, 0, 0}));
    CHECK(connects.stats().shared == 1);
    CHECK((connect(net::Address::inet(0, 0, 0, 0, 0), {}, address_of(address)) == std::vector<int64_t>{0, 0, 0}));
    CHECK(connects.stats().kept_by_name == 2 && connects.stats().shared == 1);
    // A door where nothing listens any more: the next address may be anywhere.
    int door = door_socket("tcp://127.0.0.2:9", true), listening = socket(AF_INET, SOCK_STREAM, 0);
    std::thread holder([&] {
        int channel = accept(door, nullptr, nullptr);
        take_packet(channel);
        give_packet(channel, packet(2));
        take_packet(channel);
        close(channel);
    });
    sockaddr_in at = {};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof at;
    CHECK(!bind(listening, reinterpret_cast<sockaddr *>(&at), length) && !listen(listening, 8));
    CHECK(!getsockname(listening, reinterpret_cast<sockaddr *>(&at), &length));
    CHECK((connect({}, net::Address::inet(127, 0, 0, 2, 9), net::Address::inet(127, 0, 0, 1, ntohs(at.sin_port))) == std::vector<int64_t>{0, -ECONNREFUSED, 0}));
    int accepted = accept(listening, reinterpret_cast<sockaddr *>(&at), &length);
    // The address of the second connection is not that of the first one.
    CHECK(accepted >= 0 && at.sin_addr.s_addr == htonl(INADDR_LOOPBACK));
    holder.join();
    for (int fd : {door, listening, accepted})
        close(fd);
    unlink(path.c_str() + 7);
    unlink(mine.c_str() + 7);
}

// --- processes that are killed ---

// Block 0 receives, block 1 sends, on one connection. `listener` 0: it connects to `to`. Out: result, bytes, wrong ones.
__global__ void both_ways(net::Handle handle, int listener, net::Address to, uint64_t *turn, int64_t *out)
{
    __shared__ unsigned char bytes[2048];
    auto g = net::block();
    if (blockIdx.x == 0) {
        int s = listener ? net::accept(g, handle, listener) : connected(g, handle, to);
        if (g.leads())
            spinio::store_release_system(turn, uint64_t(s));
    }
    spinio::Backoff waiting;
    while (!spinio::load_acquire_system(turn))
        waiting.pause();
    __syncthreads();
    const int s = int(spinio::load_acquire_system(turn));
    uint64_t total = 0;
    int64_t moved = 0, wrong = 0;
    if (blockIdx.x == 0) {
        for (; (moved = net::recv(g, handle, s, bytes, sizeof bytes)) > 0; total += uint64_t(moved)) {
            wrong += wrong_bytes(bytes, total, moved);
            if (g.leads())
                spinio::store_release_system(reinterpret_cast<uint64_t *>(out + 6), total);
        }
    } else {
        do {
            fill(bytes, total, sizeof bytes);
            moved = net::send(g, handle, s, bytes, sizeof bytes);
            total += moved > 0 ? uint64_t(moved) : 0;
        } while (moved > 0);
    }
    if (g.leads())
        out[3 * blockIdx.x] = moved, out[3 * blockIdx.x + 1] = int64_t(total), out[3 * blockIdx.x + 2] = wrong;
}

static void run_both_ways(Net &net, int listener, net::Address to)
{
    std::memset(net.words, 0, 1024);
    spinio::launch_resident_on(net.stream, both_ways, 2, 64, net.handle, listener, to, reinterpret_cast<uint64_t *>(net.words + 100), net.words);
}

static int other_side(bool accepts, const std::string &address, bool no_upgrade)
{
    Net net({.no_upgrade = no_upgrade});
    std::string name;
    int s = accepts ? listener(net, address.c_str(), name) : 0;
    if (accepts)
        say("ready");
    run_both_ways(net, s, accepts ? net::Address{} : address_of(address));
    for (;;)
        pause();
}

// `accepts`: the process that is killed.
static void other_side_is_killed(const std::string &where, bool accepts, bool no_upgrade)
{
    Net net({.no_upgrade = no_upgrade});
    std::string address = where;
    int s = accepts ? 0 : listener(net, where.c_str(), address);
    Child child({"other", accepts ? "accepts" : "connects", address, no_upgrade ? "off" : "on"});
    if (accepts)
        CHECK(child.hear() == "ready");
    run_both_ways(net, s, accepts ? address_of(where) : net::Address{});
    auto received = [&] { return spinio::load_acquire_system(reinterpret_cast<uint64_t *>(net.words + 6)); };
    for (int i = 0; i < 60000 && received() < 200000; i++)
        usleep(1000);
    CHECK(received() >= 200000);
    CHECK(!kill(child.pid, SIGKILL));
    child.ends();
    net.wait();
    CHECK(net.stats().shared == !no_upgrade);
    const int64_t receiving = net.words[0], sending = net.words[3];
    if ((receiving != 0 && receiving != -ECONNRESET) || (sending != -EPIPE && sending != -ECONNRESET) || net.words[2]) {
        std::printf("%s %d %d: recv returns %lld and send %lld after the kill, %lld blocks wrong\n", where.c_str(), accepts, no_upgrade, (long long)receiving,
                    (long long)sending, (long long)net.words[2]);
        failures++;
    }
    close_in_a_kernel(net, int(net.words[100]));
    waits_for_open(net, accepts ? 0 : 1);
    if (!accepts) {
        // The memory of the dead process is free for others.
        Net other({.no_upgrade = no_upgrade});
        CHECK(spinio_net_connect(other.net, address.c_str()) > 0 && other.stats().shared == !no_upgrade);
    }
    if (where[0] == 'u')
        unlink(where.c_str() + 7);
}

// --- peers that break the rules ---

// A process that listens, with a door, and goes as many steps as it wants as a net would.
struct RawNet {
    int listening, door, channel = -1, anchor = -1, memory = -1;
    volatile uint64_t *words = nullptr;
    std::string address;

    RawNet()
    {
        sockaddr_in at = {};
        at.sin_family = AF_INET;
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t length = sizeof at;
        listening = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(!bind(listening, reinterpret_cast<sockaddr *>(&at), length) && !listen(listening, 8));
        CHECK(!getsockname(listening, reinterpret_cast<sockaddr *>(&at), &length));
        address = "tcp://127.0.0.1:" + std::to_string(ntohs(at.sin_port));
        door = door_socket(address, true);
    }

    // 0: closes, 1: answers, 2: offers, 3: says go.
    void goes(int steps)
    {
        channel = accept(door, nullptr, nullptr);
        std::string announced = take_packet(channel);
        CHECK(announced.size() > 24 && announced[8] == 1);
        if (steps > 0)
            give_packet(channel, packet(2));
        if (steps > 1) {
            anchor = accept(listening, nullptr, nullptr);
            memory = memfd_create("spinio-raw", MFD_ALLOW_SEALING);
            CHECK(!ftruncate(memory, 4096 * 3) && !fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK));
            words = static_cast<uint64_t *>(mmap(nullptr, 4096 * 3, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0));
            give_packet(channel, packet(4, 12 | 1 << 8, (uint64_t(1) << 48) - 1000), memory);
        }
        if (steps > 2) {
            CHECK(take_packet(channel) == packet(5));
            give_packet(channel, packet(6));
        }
    }

    ~RawNet()
    {
        if (words)
            munmap(const_cast<uint64_t *>(words), 4096 * 3);
        for (int fd : {listening, door, channel, anchor, memory})
            if (fd >= 0)
                close(fd);
    }
};

__global__ void receive_until_end(net::Handle handle, int s, int64_t *out)
{
    __shared__ char buffer[300];
    int64_t got, total = 0;
    while ((got = net::recv(net::block(), handle, s, buffer, sizeof buffer)) > 0)
        total += got;
    int64_t sent = 0;
    for (int tries = 0; sent >= 0 && tries < 1000; tries++)
        sent = net::send(net::block(), handle, s, buffer, sizeof buffer, net::DONTWAIT);
    net::close(net::block(), handle, s);
    if (threadIdx.x == 0)
        out[0] = total, out[1] = got, out[2] = sent;
}

// A net that leaves, offers what is none, or says what may not come: the connection goes through Linux, and no byte is lost.
static void kernel_does_not_trust_the_holder_of_a_door()
{
    for (int what = 0; what < 9; what++) {
        Net connects;
        RawNet net;
        std::thread holder([&] {
            if (what < 3) {
                // It ends after each step but the last one.
                net.goes(what);
            } else {
                net.goes(what == 3 ? 0 : 1);
                // Memory that can shrink, that is too short, whose positions begin elsewhere; none.
                int file = what >= 4 && what <= 6 ? memfd_create("x", MFD_ALLOW_SEALING) : -1;
                if (file >= 0)
                    CHECK(!ftruncate(file, what == 5 ? 4096 : 4096 * 3) && (what == 4 || !fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK)));
                const std::string bytes = what == 3 ? packet(3, 2) : what < 8 ? packet(4, 12 | 1 << 8, (uint64_t(1) << 48) - (what == 6 ? 999 : 1000)) : packet(6);
                give_packet(net.channel, bytes, file);
                if (file >= 0)
                    close(file);
                // Until the other one has left.
                take_packet(net.channel);
            }
            close(net.channel);
            net.channel = -1;
        });
        int s = spinio_net_connect(connects.net, net.address.c_str());
        holder.join();
        CHECK(s > 0 && connects.stats().shared == 0 && connects.stats().connected == 1);
        CHECK(connects.stats().kept_by_time + connects.stats().kept_by_backlog == 1);
        if (net.anchor < 0)
            net.anchor = accept(net.listening, nullptr, nullptr);
        CHECK(send(net.anchor, "hello", 5, MSG_NOSIGNAL) == 5 && !shutdown(net.anchor, SHUT_WR));
        spinio::launch_resident_on(connects.stream, receive_until_end, 1, 32, connects.handle, s, connects.words);
        for (char bytes[300]; recv(net.anchor, bytes, sizeof bytes, 0) > 0;) {
        }
        connects.wait();
        CHECK(connects.words[0] == 5 && connects.words[1] == 0);
    }
}

// A holder that never answers, and one that goes on after the connecting side has left: bounded, and the two agree.
static void kernel_does_not_wait_for_the_holder_of_a_door()
{
    Net connects;
    RawNet net;
    std::thread holder([&] {
        net.channel = accept(net.door, nullptr, nullptr);
        // Announced, and then the end.
        take_packet(net.channel);
        CHECK(take_packet(net.channel).empty());
    });
    CHECK(spinio_net_connect(connects.net, net.address.c_str()) > 0 && connects.stats().kept_by_time == 1);
    holder.join();
}

// One memory for two connections: the second one goes through Linux.
static void memory_is_for_one_connection()
{
    Net connects;
    RawNet one, two;
    std::thread holder([&] {
        one.goes(3);
        two.goes(1);
        two.anchor = accept(two.listening, nullptr, nullptr);
        give_packet(two.channel, packet(4, 12 | 2 << 8, (uint64_t(1) << 48) - 1000), one.memory);
        CHECK(take_packet(two.channel).empty());
    });
    CHECK(spinio_net_connect(connects.net, one.address.c_str()) > 0 && spinio_net_connect(connects.net, two.address.c_str()) > 0);
    holder.join();
    CHECK(connects.stats().shared == 1 && connects.stats().connected == 2 && connects.stats().kept_by_time == 1);
}

static void net_that_breaks_the_rules_ends_its_own_connection_only()
{
    Net accepts, connects;
    std::string address;
    int s = listener(accepts, "tcp://127.0.0.1:0", address);
    int honest = spinio_net_connect(connects.net, address.c_str());
    CHECK(honest > 0 && connects.stats().shared == 1);
    for (int what = 0; what < 4; what++) {
        RawNet net;
        std::thread holder([&] { net.goes(3); });
        int broken = spinio_net_connect(connects.net, net.address.c_str());
        holder.join();
        CHECK(broken > 0 && connects.stats().shared == uint64_t(what) + 2);
        const uint64_t first = (uint64_t(1) << 48) - 1000, mask = (uint64_t(1) << 48) - 1, use = uint64_t(1) << 48;
        spinio::launch_resident_on(connects.stream, receive_until_end, 1, 32, connects.handle, broken, connects.words);
        if (what == 0)
            // More than the ring has.
            net.words[16] = ((first + 4097) & mask) | use;
        else if (what == 1)
            // Bytes where none may come.
            CHECK(send(net.anchor, "x", 1, MSG_NOSIGNAL) == 1);
        else if (what == 2)
            // A packet that may not come.
            give_packet(net.channel, packet(5));
        else
            // It is gone, with 100 bytes sent.
            net.words[16] = ((first + 100) & mask) | use, close(net.channel), close(net.anchor), net.channel = net.anchor = -1;
        connects.wait();
        const int64_t want = what == 0 ? -EPROTO : what == 3 ? 0 : -ECONNRESET;
        if (connects.words[1] != want || connects.words[0] != (what == 3 ? 100 : 0) || (what == 3 && connects.words[2] != -EPIPE)) {
            std::printf("rule %d: %lld bytes, recv %lld, send %lld\n", what, (long long)connects.words[0], (long long)connects.words[1], (long long)connects.words[2]);
            failures++;
        }
        waits_for_open(connects, 1);
    }
    CHECK(connects.stats().violations == 2 && accepts.stats().violations == 0);
    // The honest one has lived through all this.
    spinio::launch_resident_on(accepts.stream, echo, 1, 32, accepts.handle, s);
    close_in_a_kernel(connects, honest);
    accepts.wait();
    waits_for_open(accepts, 1);
}

int main(int count, char **arguments)
{
    if (count == 5 && !std::strcmp(arguments[1], "other"))
        return other_side(arguments[2][0] == 'a', arguments[3], !std::strcmp(arguments[4], "off"));
    if (count == 2 && !std::strcmp(arguments[1], "two-devices")) {
        all_groups_exchange_bytes("tcp://127.0.0.1:0", 1);
        return failures != 0;
    }
    {
        // What the library keeps open for good is open after this.
        Net first;
    }
    const int descriptors = open_descriptors();
    const std::string path = "unix:///tmp/spinio-nets-" + std::to_string(getpid()), name = "unix:@spinio-nets-" + std::to_string(getpid());
    for (const char *where : {"tcp://127.0.0.1:0", "tcp://0.0.0.0:0", path.c_str(), name.c_str()}) {
        all_groups_exchange_bytes(where);
        if (where[0] == 'u')
            unlink(where + 7);
    }
    for (const char *where : {"tcp://127.0.0.1:0", name.c_str()})
        event_sets_hear_of_other_nets(where);
    poll_sees_a_connection_that_no_call_has_found();
    names_are_those_of_the_connection("tcp://127.0.0.1:0");
    names_are_those_of_the_connection(path.c_str());
    reasons_are_counted();
    bound_and_refused_sockets_connect_as_others_do();
    for (bool no_upgrade : {false, true})
        for (bool accepts : {false, true}) {
            other_side_is_killed(path, accepts, no_upgrade);
            other_side_is_killed(accepts ? "tcp://127.0.0.1:7917" : "tcp://127.0.0.1:0", accepts, no_upgrade);
        }
    kernel_does_not_trust_the_holder_of_a_door();
    kernel_does_not_wait_for_the_holder_of_a_door();
    memory_is_for_one_connection();
    net_that_breaks_the_rules_ends_its_own_connection_only();
    CHECK(open_descriptors() == descriptors && granules_mapped() == 0);
    {
        Child child({"two-devices"}, "SPINIO_EMULATED=devices=2");
        CHECK(child.ends() == 0);
    }
    std::printf("%d failures\n", failures);
    return failures != 0;
}
