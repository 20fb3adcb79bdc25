// Kernels of two nets, of one process or of two, on one device or on two: their bytes go through memory that both nets map.
// Groups, event sets, names, reasons, processes that are killed. Peers that break the rules: net_doors.cpp. The same results as
// through Linux: net_scripts.cpp. Prints each failure and exits with 1.
#include "net_granule.h"
#include "net_process.h"

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

__global__ void close_socket(net::Handle handle, int s) { net::close(net::block(), handle, s); }

static void close_in_a_kernel(Net &net, int s)
{
    spinio::launch_resident_on(net.stream, close_socket, 1, 32, net.handle, s);
    net.wait();
}

static uint64_t joined(const Net &net) { return net.stats().shared + net.stats().peer; }

// --- all groups ---

template <typename Group>
__device__ void send_back(Group group, const net::Handle &handle, int listener, char *buffer, size_t size)
{
    int s = net::accept(group, handle, listener);
    int64_t got;
    while ((got = net::recv(group, handle, s, buffer, size)) > 0)
        if (net::send(group, handle, s, buffer, size_t(got)) != got)
            break;
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
        for (size_t i = group.rank(); i < bytes_each; i += group.size())
            bytes[i] = byte_of(uint64_t(round) * 1000 + i);
        group.sync();
        bool good = net::send(group, handle, s, bytes, bytes_each) == int64_t(bytes_each);
        group.sync();
        for (size_t i = group.rank(); i < bytes_each; i += group.size())
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

// `ordinal`: of the device of the net that connects, -1: the same one. Without access to the other one's memory, rings are in pinned memory.
static void all_groups_exchange_bytes(const char *where, int ordinal = -1, unsigned ring_bytes = 4096, bool have_access = true)
{
    Net accepts({.connections = 64, .ring_bytes = ring_bytes});
    std::string address;
    int s = listener(accepts, where, address);
    if (ordinal >= 0) {
        CHECK(cudaSetDevice(ordinal) == cudaSuccess);
        void *in_use;
        CHECK(cudaMalloc(&in_use, 4096) == cudaSuccess);
    }
    {
        Net connects({.ring_bytes = ring_bytes, .device = ordinal < 0 ? "emulated" : nullptr});
        // The largest rings have pinned memory for three connections, which may be free a little later.
        const int rounds = ring_bytes > 1 << 20 ? 1 : 3;
        for (int again = 0; again < rounds; again++) {
            spinio::launch_resident_on(accepts.stream, echo, 3, 64, accepts.handle, s);
            spinio::launch_resident_on(connects.stream, ask_all, 3, 64, connects.handle, address_of(address), connects.words);
            connects.wait();
            accepts.wait();
            CHECK(connects.words[0] == 21 && connects.words[1] == 21 && connects.words[2] == 21);
            waits_for_open(connects, 0);
            waits_for_open(accepts, 1);
        }
        for (const Net *net : {&accepts, &connects})
            CHECK((have_access ? net->stats().peer : net->stats().shared) == uint64_t(rounds) * 3 && net->stats().bytes_sent == 0 && net->stats().bytes_received == 0 && net->stats().violations == 0);
    }
    if (ordinal >= 0)
        CHECK(cudaSetDevice(0) == cudaSuccess);
}

// --- event sets ---

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
    spinio::launch_resident_on(accepts.stream, echo_set, 2, 64, accepts.handle, set);
    for (int early = 0; early < 2; early++) {
        spinio::launch_resident_on(connects.stream, ask_with_sets, 1, 64, connects.handle, address_of(address), early, connects.words);
        connects.wait();
        CHECK(connects.words[0] == 13);
    }
    waits_for_open(accepts, 1);
    CHECK(connects.stats().peer == 2 && accepts.stats().peer == 2);
    CHECK(!spinio_net_stop(accepts.net));
    accepts.wait();
}

// Calls with the number of a socket of another net.
__global__ void use_foreign(net::Handle handle, int s, int64_t *out)
{
    net::Address address;
    out[0] = net::getsockname(net::block(), handle, s, &address);
    out[1] = net::close(net::block(), handle, s);
}

// The first socket of each of two nets has the same place.
static void number_of_another_net_is_no_descriptor()
{
    Net one, other;
    std::string name;
    int s = listener(one, "tcp://127.0.0.1:0", name), its = listener(other, "tcp://127.0.0.1:0", name);
    CHECK((s & 0xffff) == (its & 0xffff) && s != its);
    spinio::launch_resident_on(other.stream, use_foreign, 1, 32, other.handle, s, other.words);
    other.wait();
    CHECK(other.words[0] == -EBADF && other.words[1] == -EBADF);
    char text[64];
    CHECK(spinio_net_address(other.net, s, text, sizeof text) == -1 && errno == EBADF);
    CHECK(other.stats().open == 1);
}

// Events of a socket that has room and that no group rearms; `early`: it is in the set before it is connected.
__global__ void count_events(net::Handle handle, net::Address to, int early, int64_t *out)
{
    __shared__ net::Ready ready[4];
    auto g = net::block();
    const int set = net::set(g, handle);
    int s = net::socket(g, handle, to.bytes[0], net::STREAM, 0);
    int64_t failed = early ? net::add(g, handle, set, s, net::OUT) : 0;
    failed |= net::connect(g, handle, s, to);
    failed |= early ? 0 : net::add(g, handle, set, s, net::OUT);
    int64_t events = net::wait(g, handle, set, ready, 4, 10'000'000'000);
    // The proxy has seen all doorbells before this call.
    net::Address name;
    failed |= net::getsockname(g, handle, s, &name);
    events += net::wait(g, handle, set, ready, 4, 30'000'000);
    net::close(g, handle, s);
    if (threadIdx.x == 0) {
        out[0] = failed;
        out[1] = events;
    }
}

// So no two groups serve it at once.
static void an_arming_makes_one_event(const char *where)
{
    Net accepts, connects;
    std::string address;
    listener(accepts, where, address);
    for (Net *from : {&connects, &accepts})
        for (int early = 0; early < 2; early++) {
            const uint64_t before = joined(*from) + from->stats().upgraded;
            spinio::launch_resident_on(from->stream, count_events, 1, 64, from->handle, address_of(address), early, from->words);
            from->wait();
            CHECK(from->words[0] == 0 && from->words[1] == 1);
            CHECK(joined(*from) + from->stats().upgraded == before + 1);
        }
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
        CHECK(connects.words[0] == 0 && connects.words[1] == 4096 && connects.stats().peer == 1);
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
        CHECK(connects.stats().peer == !no_upgrade);
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

// --- how many ---

static void as_many_connections_as_asked_for_use_device_memory()
{
    const unsigned wanted = 140;
    for (unsigned count : {wanted, 3u}) {
        Net accepts({.connections = 256, .sockets = 512, .shared_connections = count}), connects({.connections = 256, .sockets = 512});
        const std::string address = "unix:@spinio-nets-many-" + std::to_string(getpid());
        CHECK(spinio_net_listen(accepts.net, address.c_str(), 256) > 0); // no kernel accepts
        std::vector<int> sockets;
        for (unsigned i = 0; i < wanted; i++) {
            sockets.push_back(spinio_net_connect(connects.net, address.c_str()));
            CHECK(sockets.back() > 0);
        }
        CHECK(connects.stats().peer == count && connects.stats().kept_by_granules == wanted - count);
        for (int each : sockets)
            close_in_a_kernel(connects, each);
        waits_for_open(connects, 0);
    }
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
    CHECK(connects.stats().peer == 4 && connects.stats().kept_by_granules == 1 && accepts.stats().kept_by_granules == 1);
    CHECK(connects.stats().connected == 5 && connects.stats().violations == 0);
    for (int each : sockets)
        close_in_a_kernel(connects, each);
    waits_for_open(connects, 0);
    // What no kernel has accepted is gone with its peer, once the proxy looks.
    spinio::launch_resident_on(accepts.stream, echo, 1, 32, accepts.handle, s);
    accepts.wait();
    // A net that shares nothing, and a client of one.
    CHECK(spinio_net_connect(connects.net, other.c_str()) > 0 && joined(connects) == 4);
    CHECK(spinio_net_connect(off.net, address.c_str()) > 0 && joined(off) == 0);
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
    CHECK(connects.stats().kept_by_name == 1 && joined(connects) == 0);
    CHECK((connect(net::Address::inet(127, 0, 0, 1, 0), {}, address_of(address)) == std::vector<int64_t>{0, 0, 0}));
    CHECK(connects.stats().peer == 1);
    CHECK((connect(net::Address::inet(0, 0, 0, 0, 0), {}, address_of(address)) == std::vector<int64_t>{0, 0, 0}));
    CHECK(connects.stats().kept_by_name == 2 && joined(connects) == 1);
    // A door where nothing listens any more: the next address may be anywhere.
    sockaddr_in at;
    int door = door_socket("tcp://127.0.0.2:9", true), listening = listening_socket(at);
    std::thread holder([&] {
        int channel = accept(door, nullptr, nullptr);
        take_packet(channel);
        give_packet(channel, packet(2));
        take_packet(channel);
        close(channel);
    });
    socklen_t length = sizeof at;
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
    CHECK(net.stats().peer == !no_upgrade);
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
        CHECK(spinio_net_connect(other.net, address.c_str()) > 0 && other.stats().peer == !no_upgrade);
    }
    if (where[0] == 'u')
        unlink(where.c_str() + 7);
}

int main(int count, char **arguments)
{
    if (count == 5 && !std::strcmp(arguments[1], "other"))
        return other_side(arguments[2][0] == 'a', arguments[3], !std::strcmp(arguments[4], "off"));
    if (count == 2 && !std::strcmp(arguments[1], "two-devices")) {
        all_groups_exchange_bytes("tcp://127.0.0.1:0", 1);
        return failures != 0;
    }
    if (count == 2 && !std::strcmp(arguments[1], "no-access")) {
        all_groups_exchange_bytes("tcp://127.0.0.1:0", 1, 4096, false);
        all_groups_exchange_bytes("tcp://127.0.0.1:0", 1, 2 << 20, false);
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
    all_groups_exchange_bytes("tcp://127.0.0.1:0", -1, 2 << 20);
    for (const char *where : {"tcp://127.0.0.1:0", name.c_str()}) {
        event_sets_hear_of_other_nets(where);
        an_arming_makes_one_event(where);
    }
    number_of_another_net_is_no_descriptor();
    poll_sees_a_connection_that_no_call_has_found();
    names_are_those_of_the_connection("tcp://127.0.0.1:0");
    names_are_those_of_the_connection(path.c_str());
    as_many_connections_as_asked_for_use_device_memory();
    reasons_are_counted();
    bound_and_refused_sockets_connect_as_others_do();
    for (bool no_upgrade : {false, true})
        for (bool accepts : {false, true}) {
            other_side_is_killed(path, accepts, no_upgrade);
            other_side_is_killed(accepts ? "tcp://127.0.0.1:7917" : "tcp://127.0.0.1:0", accepts, no_upgrade);
        }
    CHECK(open_descriptors() == descriptors && granules_mapped() == 0);
    {
        Child child({"two-devices"}, "SPINIO_EMULATED=devices=2");
        CHECK(child.ends() == 0);
    }
    {
        Child child({"no-access"}, "SPINIO_EMULATED=devices=2,peer=0");
        CHECK(child.ends() == 0);
    }
    std::printf("%d failures\n", failures);
    return failures != 0;
}
