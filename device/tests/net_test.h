// net_test.h: for the tests of sockets in kernels: a net, and ordinary sockets of this program.
//
// Rings are as small as possible and positions begin just before 2^48, so that both wrap all the time.
#ifndef NET_TEST_H
#define NET_TEST_H

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <spinio.h>
#include <spinio/net.h>
#include <spinio_net.h>

#define CHECK_CAUSE spinio_last_error()
#include "check.h"

namespace net = spinio::net;

// The device of the nets: most of these programs are also compiled by nvcc, and run on a GPU.
[[maybe_unused]] constexpr const char *test_device = spinio::emulated ? "emulated" : nullptr;

// Before a template of what kernels and this program call, each with functions of its own.
#if defined(__CUDACC__)
#define CALLED_BY_BOTH _Pragma("nv_exec_check_disable")
#else
#define CALLED_BY_BOTH
#endif

// The program's turn after the kernel's, by a block: turn[0] is what the kernel has reached, turn[1] the program.
__device__ inline void pass_and_wait(uint64_t *turn, uint64_t mine)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        spinio::store_release_system(turn, mine);
        spinio::Backoff waiting;
        while (spinio::load_acquire_system(turn + 1) < mine)
            waiting.pause();
    }
    __syncthreads();
}

// Which net a test needs.
struct NetOptions {
    unsigned connections = 16;
    unsigned sockets = 64;
    unsigned ring_bytes = 4096;
    unsigned idle_us = 0;
    unsigned fault_seed = 0;
    bool no_upgrade = false;
    const char *files_root = nullptr;
    bool files_write = false;
    unsigned files = 0;
    unsigned shared_connections = 0;
    unsigned threads = 0;
    unsigned linger_ms = 0;
    unsigned last_linger_ms = 0;
    const char *device = test_device;
};

// Memory that the process has.
inline long resident_kib()
{
    long pages = 0, all = 0;
    FILE *file = std::fopen("/proc/self/statm", "re");
    CHECK(file && std::fscanf(file, "%ld %ld", &all, &pages) == 2);
    std::fclose(file);
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

// A net, its handle, a stream of its own, and words that kernels and this program see.
struct Net {
    spinio_net *net;
    net::Handle handle;
    cudaStream_t stream;
    int64_t *words;

    explicit Net(const NetOptions &wanted = {})
    {
        struct spinio_net_options options = {};
        options.size = sizeof options;
        options.sockets = wanted.sockets;
        options.connections = wanted.connections;
        options.ring_bytes = wanted.ring_bytes;
        options.first_position = (uint64_t(1) << 48) - 1000;
        options.idle_us = wanted.idle_us;
        options.fault_seed = wanted.fault_seed;
        options.files_root = wanted.files_root;
        options.files_write = wanted.files_write;
        options.files = wanted.files;
        options.shared_connections = wanted.shared_connections;
        options.threads = wanted.threads;
        options.linger_ms = wanted.linger_ms;
        options.last_linger_ms = wanted.last_linger_ms;
        options.no_upgrade = wanted.no_upgrade;
        // Makes the context of a GPU, which the net is for.
        CHECK(cudaFree(nullptr) == cudaSuccess);
        net = spinio_net_open(wanted.device, &options);
        CHECK(net && !spinio_net_handle(net, reinterpret_cast<struct spinio_net_handle *>(&handle)));
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
        CHECK(cudaHostAlloc(&words, 64 * 1024, cudaHostAllocDefault) == cudaSuccess);
        std::memset(words, 0, 64 * 1024);
    }

    void wait() { CHECK(cudaStreamSynchronize(stream) == cudaSuccess); }

    struct spinio_net_stats stats() const
    {
        struct spinio_net_stats stats;
        CHECK(!spinio_net_stats(net, &stats, sizeof stats));
        return stats;
    }

    ~Net()
    {
        CHECK(!spinio_net_close(net));
        cudaFreeHost(words);
    }
};

// Until the peer's buffers are full; returns the bytes that were sent.
[[maybe_unused]] static uint64_t wait_until_it_waits(const Net &net)
{
    uint64_t sent = 0;
    for (int quiet = 0; quiet < 30; usleep(10000)) {
        uint64_t now = net.stats().bytes_sent;
        quiet = now == sent && now > 0 ? quiet + 1 : 0;
        sent = now;
    }
    return sent;
}

// Of a TCP address.
[[maybe_unused]] static uint16_t port_of(const std::string &address) { return uint16_t(std::atoi(address.c_str() + address.rfind(':') + 1)); }

// A connected socket of this program; address as of spinio_net_address().
[[maybe_unused]] static int connect_to(const std::string &address)
{
    sockaddr_un path = {};
    sockaddr_in inet = {};
    sockaddr_in6 inet6 = {};
    int s = -1, failed = -1;
    if (address.rfind("tcp://[", 0) == 0) {
        size_t end = address.rfind("]:");
        inet6.sin6_family = AF_INET6;
        inet6.sin6_port = htons(port_of(address));
        inet_pton(AF_INET6, address.substr(7, end - 7).c_str(), &inet6.sin6_addr);
        s = socket(AF_INET6, SOCK_STREAM, 0);
        failed = connect(s, reinterpret_cast<sockaddr *>(&inet6), sizeof inet6);
    } else if (address.rfind("tcp://", 0) == 0) {
        size_t colon = address.rfind(':');
        inet.sin_family = AF_INET;
        inet.sin_port = htons(port_of(address));
        inet_pton(AF_INET, address.substr(6, colon - 6).c_str(), &inet.sin_addr);
        s = socket(AF_INET, SOCK_STREAM, 0);
        failed = connect(s, reinterpret_cast<sockaddr *>(&inet), sizeof inet);
    } else {
        std::string name = address.substr(address[5] == '@' ? 5 : 7);
        path.sun_family = AF_UNIX;
        std::memcpy(path.sun_path, name.data(), name.size());
        if (name[0] == '@')
            path.sun_path[0] = 0;
        s = socket(AF_UNIX, SOCK_STREAM, 0);
        failed = connect(s, reinterpret_cast<sockaddr *>(&path), socklen_t(offsetof(sockaddr_un, sun_path) + name.size()));
    }
    CHECK(!failed);
    timeval limit = {60, 0};
    setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    return s;
}

// What a kernel connects to; text as of spinio_net_address().
[[maybe_unused]] static net::Address address_of(const std::string &text)
{
    if (text.rfind("tcp://", 0) == 0)
        return net::Address::inet(127, 0, 0, 1, port_of(text));
    return text[5] == '@' ? net::Address::abstract(text.c_str() + 6) : net::Address::path(text.c_str() + 7);
}

template <typename Group>
__device__ int connected(Group group, const net::Handle &handle, const net::Address &to)
{
    int s = net::socket(group, handle, to.bytes[0], net::STREAM, 0);
    int failed = net::connect(group, handle, s, to);
    return failed ? failed : s;
}

// A listening TCP socket of this program, and its name.
[[maybe_unused]] static int listening_socket(sockaddr_in &name, int backlog = 8)
{
    name = {};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof name;
    int s = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(!bind(s, reinterpret_cast<sockaddr *>(&name), length) && !listen(s, backlog));
    CHECK(!getsockname(s, reinterpret_cast<sockaddr *>(&name), &length));
    return s;
}

// The address as of spinio_net_address().
[[maybe_unused]] static std::string text_of(const sockaddr_in &name) { return "tcp://127.0.0.1:" + std::to_string(ntohs(name.sin_port)); }

// Both ends of a TCP connection within this program; the receive buffer of the first one, if not the usual one.
[[maybe_unused]] static void connect_pair(int (&ends)[2], int receive_buffer = 0)
{
    sockaddr_in name;
    int listening = listening_socket(name, 1);
    ends[0] = socket(AF_INET, SOCK_STREAM, 0);
    if (receive_buffer)
        CHECK(!setsockopt(ends[0], SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer));
    CHECK(!connect(ends[0], reinterpret_cast<sockaddr *>(&name), sizeof name));
    ends[1] = accept(listening, nullptr, nullptr);
    CHECK(ends[1] >= 0);
    close(listening);
}

// Whether this machine has ::1; prints why not.
[[maybe_unused]] static bool has_ipv6()
{
    sockaddr_in6 loopback = {};
    loopback.sin6_family = AF_INET6;
    loopback.sin6_addr = in6addr_loopback;
    int s = socket(AF_INET6, SOCK_STREAM, 0);
    bool has = s >= 0 && !bind(s, reinterpret_cast<sockaddr *>(&loopback), sizeof loopback);
    if (!has)
        std::printf("skipped: this machine has no IPv6 loopback (%s)\n", std::strerror(errno));
    if (s >= 0)
        close(s);
    return has;
}

// "unix:@" is a name that no other program has.
[[maybe_unused]] static int listener(const Net &net, const std::string &address, std::string &name)
{
    static int names;
    char text[160];
    const std::string unique = address == "unix:@" ? address + "spinio-test-" + std::to_string(getpid()) + "-" + std::to_string(names++) : address;
    int s = spinio_net_listen(net.net, unique.c_str(), 64);
    CHECK(s > 0 && !spinio_net_address(net.net, s, text, sizeof text));
    name = text;
    return s;
}

#endif
