// What goes wrong around sockets of kernels, for real: no descriptors left, a full backlog, a port in use, peers that do not
// read, the whole process stopped, forks. In each: right bytes or a true error, and nothing left afterwards. Prints each failure
// and exits with 1. Faults from a seed: net_scripts.cpp.
#include "net_echo.h"

#include <sys/resource.h>

// The table of the proxy has no place left: connections wait in the backlog until others are closed.
static void connections_wait_for_descriptors()
{
    const unsigned clients = 24, blocks = 4;
    // Without doors and granules, which have descriptors too.
    Net net({.connections = 64, .no_upgrade = true});
    std::string address;
    int s = listener(net, "tcp://127.0.0.1:0", address);
    std::vector<int> peers;
    for (unsigned i = 0; i < clients; i++)
        peers.push_back(connect_to(address));
    rlimit before, few;
    CHECK(!getrlimit(RLIMIT_NOFILE, &before));
    // The proxy's table has the epoll instance, the listener and room for two connections.
    few = before;
    few.rlim_cur = 4;
    CHECK(!setrlimit(RLIMIT_NOFILE, &few));
    spinio::launch_resident_on(net.stream, echo_some, blocks, 32, net.handle, s, int(clients / blocks), net.words);
    // Four blocks ask, two are given a connection.
    usleep(100000);
    CHECK(net.stats().accepted <= 2);
    // It pauses between its attempts: a proxy that spins would use all of this second.
    uint64_t before_ns = net.stats().proxy_ns;
    usleep(1000000);
    CHECK(net.stats().proxy_ns - before_ns < 500000000);
    for (unsigned i = 0; i < clients; i++) {
        round_trip(peers[i], 2000 + i, i);
        close(peers[i]);
    }
    net.wait();
    CHECK(!setrlimit(RLIMIT_NOFILE, &before));
    waits_for_open(net, 1);
    CHECK(net.stats().accepted == clients);
}

__global__ void connect_once(net::Handle handle, net::Address address, int64_t *out)
{
    int s = net::socket(net::block(), handle, net::UNIX, net::STREAM, 0);
    int64_t result = net::connect(net::block(), handle, s, address);
    net::close(net::block(), handle, s);
    if (threadIdx.x == 0)
        spinio::store_release_system(reinterpret_cast<uint64_t *>(out), uint64_t(result));
}

// connect() of a UNIX socket waits while the backlog is full. Then the place is in use, and later nothing listens.
static void full_backlogs_wait_and_errors_are_true()
{
    Net net;
    std::string name = "spinio-backlog-" + std::to_string(getpid());
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    auto length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    int listening = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK(!bind(listening, reinterpret_cast<sockaddr *>(&address), length) && !listen(listening, 0));
    int first = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK(!connect(first, reinterpret_cast<sockaddr *>(&address), length));
    auto where = net::Address::abstract(name.c_str());
    net.words[0] = 1;
    spinio::launch_resident_on(net.stream, connect_once, 1, 32, net.handle, where, net.words);
    usleep(50000);
    CHECK(__atomic_load_n(net.words, __ATOMIC_ACQUIRE) == 1);
    int accepted[2] = {accept(listening, nullptr, nullptr), accept(listening, nullptr, nullptr)};
    net.wait();
    CHECK(net.words[0] == 0);
    CHECK(spinio_net_listen(net.net, ("unix:@" + name).c_str(), 1) == -1 && errno == EADDRINUSE);
    for (int s : {listening, first, accepted[0], accepted[1]})
        close(s);
    spinio::launch_resident_on(net.stream, connect_once, 1, 32, net.handle, where, net.words);
    net.wait();
    CHECK(net.words[0] == -ECONNREFUSED);
    waits_for_open(net, 0);
}

__global__ void send_forever(net::Handle handle, int s, int64_t *out)
{
    __shared__ char bytes[1000];
    int64_t sent;
    while ((sent = net::send(net::block(), handle, s, bytes, sizeof bytes)) > 0) {
    }
    out[0] = sent;
    out[1] = net::close(net::block(), handle, s);
}

// A peer that does not read holds up its own connection only; once it goes, the kernel learns of it.
static void peer_that_does_not_read_harms_no_other()
{
    Net net;
    std::string address;
    int s = listener(net, "tcp://127.0.0.1:0", address);
    sockaddr_in any;
    int waiting = listening_socket(any, 1);
    int full = spinio_net_connect(net.net, text_of(any).c_str());
    int silent = accept(waiting, nullptr, nullptr);
    CHECK(full > 0 && silent >= 0);
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    spinio::launch_resident_on(stream, send_forever, 1, 32, net.handle, full, net.words + 10);
    for (uint64_t sent = 0, before = 1; sent != before; usleep(100000))
        before = sent, sent = net.stats().bytes_sent;
    spinio::launch_resident_on(net.stream, echo_some, 1, 32, net.handle, s, 1, net.words);
    int peer = connect_to(address);
    round_trip(peer, 50000, 3);
    close(peer);
    net.wait();
    close(silent);
    close(waiting);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK((net.words[10] == -ECONNRESET || net.words[10] == -EPIPE) && net.words[11] == 0);
    waits_for_open(net, 1);
}

// The process is stopped and goes on, again and again: kernels, proxy and clients alike.
static void stopped_process_goes_on()
{
    Net net;
    std::string address;
    int s = listener(net, ("unix:@spinio-stopped-" + std::to_string(getpid())).c_str(), address);
    spinio::launch_resident_on(net.stream, echo_some, 1, 32, net.handle, s, 1, net.words);
    int peer = connect_to(address);
    pid_t parent = getpid(), child = fork();
    if (child == 0) {
        for (int i = 0; i < 10; i++) {
            kill(parent, SIGSTOP);
            usleep(20000);
            kill(parent, SIGCONT);
            usleep(5000);
        }
        _exit(0);
    }
    for (unsigned round = 0; round < 20; round++)
        round_trip(peer, 20000, round);
    CHECK(waitpid(child, nullptr, 0) == child);
    round_trip(peer, 20000, 99);
    close(peer);
    net.wait();
    waits_for_open(net, 1);
}

// A child that lives on holds no port of the net, nor a connection.
static void forked_child_holds_no_port()
{
    std::string address;
    int ends[2];
    CHECK(!pipe(ends));
    pid_t child;
    {
        Net net;
        int s = listener(net, "tcp://127.0.0.1:0", address);
        spinio::launch_resident_on(net.stream, echo_some, 1, 32, net.handle, s, 1, net.words);
        child = fork();
        if (child == 0) {
            char byte;
            close(ends[1]);
            _exit(read(ends[0], &byte, 1) == 0 ? 0 : 1);
        }
        close(ends[0]);
        int peer = connect_to(address);
        round_trip(peer, 10000, 1);
        close(peer);
        net.wait();
    }
    Net other;
    CHECK(spinio_net_listen(other.net, address.c_str(), 1) > 0);
    close(ends[1]);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

int main()
{
    connections_wait_for_descriptors();
    full_backlogs_wait_and_errors_are_true();
    peer_that_does_not_read_harms_no_other();
    stopped_process_goes_on();
    forked_child_holds_no_port();
    std::printf("%d failures\n", failures);
    return failures != 0;
}
