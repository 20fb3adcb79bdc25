// host.h: what all rows of gpunet.cu share: results as JSON lines, clocks, ordinary sockets, and a net with its kernel.
//
//   Sample times ──> report("echo", "kernel, UNIX", times) ──> {"row":"echo","what":...,"p50_us":...} on the standard output
//   Net          ──> spinio_net_open, a stream, pinned words; the destructor stops the net and waits for its kernel
//
// On machines with less than 8 processors, clients sleep in recv() instead of polling.
#ifndef GPUNET_HOST_H
#define GPUNET_HOST_H

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <thread>
#include <vector>

#include <spinio.h>
#include <spinio/net.h>
#include <spinio_net.h>

#include "result.h"

namespace net = spinio::net;

// How long a measurement may take, in seconds, and how many connections the largest one has.
struct Size {
    bool small;
    double seconds;
    unsigned connections;
};

static const char *last_error() { return spinio_last_error(); }

static double process_cpu() { return seconds(CLOCK_PROCESS_CPUTIME_ID); }
static double thread_cpu() { return seconds(CLOCK_THREAD_CPUTIME_ID); }

// That this process may use.
static unsigned processors()
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) ? 1 : unsigned(CPU_COUNT(&set));
}

static bool polls() { return processors() >= 8; }

// Raises the limit of descriptors as far as it goes; what it is then.
static size_t raise_descriptor_limit()
{
    rlimit files;
    check(!getrlimit(RLIMIT_NOFILE, &files), "getrlimit");
    files.rlim_cur = files.rlim_max;
    check(!setrlimit(RLIMIT_NOFILE, &files), "setrlimit");
    return size_t(files.rlim_cur);
}

// An address for connect() and bind().
struct Name {
    sockaddr_storage bytes = {};
    socklen_t length = 0;

    // Of a text of spinio_net_address().
    static Name of(const char *text)
    {
        Name name;
        if (!std::strncmp(text, "tcp://", 6)) {
            auto address = reinterpret_cast<sockaddr_in *>(&name.bytes);
            address->sin_family = AF_INET;
            address->sin_port = htons(uint16_t(std::atoi(std::strrchr(text, ':') + 1)));
            address->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
            name.length = sizeof *address;
        } else {
            auto address = reinterpret_cast<sockaddr_un *>(&name.bytes);
            address->sun_family = AF_UNIX;
            size_t length = std::strlen(text + 6); // after "unix:@"
            std::memcpy(address->sun_path + 1, text + 6, length);
            name.length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + length);
        }
        return name;
    }

    // As text for spinio_net_connect().
    std::string text() const
    {
        if (bytes.ss_family == AF_INET)
            return "tcp://127.0.0.1:" + std::to_string(ntohs(reinterpret_cast<const sockaddr_in *>(&bytes)->sin_port));
        auto path = reinterpret_cast<const sockaddr_un *>(&bytes)->sun_path;
        return "unix:@" + std::string(path + 1, length - offsetof(sockaddr_un, sun_path) - 1);
    }
};

static const char *family_name(bool inet) { return inet ? "TCP" : "UNIX"; }

static void prepare(int s)
{
    int one = 1;
    timeval limit = {10, 0};
    setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

// A listening socket of this program.
static int listen_here(bool inet, Name &name)
{
    int s = socket(inet ? AF_INET : AF_UNIX, SOCK_STREAM, 0);
    sockaddr_in any = {};
    any.sin_family = inet ? AF_INET : AF_UNIX;
    any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    check(!bind(s, reinterpret_cast<sockaddr *>(&any), inet ? sizeof any : sizeof(sa_family_t)) && !listen(s, 1024), "listen");
    name.length = sizeof name.bytes;
    getsockname(s, reinterpret_cast<sockaddr *>(&name.bytes), &name.length);
    return s;
}

static int accept_here(int listener)
{
    int s = accept(listener, nullptr, nullptr);
    check(s >= 0, "accept");
    prepare(s);
    return s;
}

static int connect_to(const Name &name)
{
    int s = socket(name.bytes.ss_family, SOCK_STREAM, 0);
    check(s >= 0 && !connect(s, reinterpret_cast<const sockaddr *>(&name.bytes), name.length), "connect");
    prepare(s);
    return s;
}

// Receives all bytes, by polling where there are processors for it; false at the end of the stream.
static bool receive_all(int s, void *to, size_t bytes)
{
    static const bool polling = polls();
    double deadline = 0;
    for (size_t got = 0, tries = 0; got < bytes;) {
        ssize_t part = recv(s, static_cast<char *>(to) + got, bytes - got, polling ? MSG_DONTWAIT : 0);
        if (part == 0 || (part < 0 && (!polling || errno != EAGAIN) && errno != EINTR))
            return false;
        got += part > 0 ? size_t(part) : 0;
        if (++tries % 4096 == 0) {
            if (deadline == 0)
                deadline = now() + 10;
            if (now() > deadline)
                return errno = ETIMEDOUT, false;
        }
    }
    return true;
}

static bool send_all(int s, const void *from, size_t bytes)
{
    for (size_t sent = 0; sent < bytes;) {
        ssize_t part = send(s, static_cast<const char *>(from) + sent, bytes - sent, MSG_NOSIGNAL);
        if (part <= 0)
            return false;
        sent += size_t(part);
    }
    return true;
}

// Round trips of a message: every byte is compared.
static std::vector<double> round_trips(int s, size_t bytes, double limit, size_t most = 100000)
{
    std::vector<double> all;
    std::vector<unsigned char> out(bytes), in(bytes);
    double end = now() + limit;
    for (size_t round = 0; round < most; round++) {
        for (size_t i = 0; i < bytes; i++)
            out[i] = (unsigned char)(round * 31 + i);
        double begun = now();
        if (begun > end)
            break;
        check(send_all(s, out.data(), bytes) && receive_all(s, in.data(), bytes), "a round trip");
        all.push_back((now() - begun) * 1e6);
        check(in == out, "an echo with wrong bytes");
    }
    // The first ones find cold caches and a proxy that sleeps.
    all.erase(all.begin(), all.begin() + std::ptrdiff_t(std::min<size_t>(all.size() / 10, 100)));
    return all;
}

// Pinned memory of kernels and this program.
template <typename T>
static T *pinned(size_t count)
{
    T *memory;
    check(cudaHostAlloc(&memory, count * sizeof(T), cudaHostAllocDefault) == cudaSuccess, "cudaHostAlloc");
    std::memset(static_cast<void *>(memory), 0, count * sizeof(T));
    return memory;
}

static cudaStream_t new_stream()
{
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess, "no device");
    return stream;
}

// A net and a kernel that uses it. Memory is given back by the end of the process: this would wait for kernels.
struct Net {
    cudaStream_t stream = new_stream();
    spinio_net *net;
    net::Handle handle;

    explicit Net(unsigned connections = 16, unsigned ring_bytes = 0, bool no_upgrade = true, unsigned shared_connections = 0)
    {
        struct spinio_net_options options = {};
        options.size = sizeof options;
        options.connections = connections;
        options.sockets = connections + 16;
        options.ring_bytes = ring_bytes;
        options.no_upgrade = no_upgrade;
        options.shared_connections = shared_connections;
        net = spinio_net_open(nullptr, &options);
        check(net && !spinio_net_handle(net, reinterpret_cast<struct spinio_net_handle *>(&handle)), "open a net");
    }

    // A listening socket of kernels.
    int listener(bool inet, Name &name)
    {
        static int number;
        char text[128];
        std::snprintf(text, sizeof text, "unix:@spinio-bench-%d-%d", int(getpid()), number++);
        int s = spinio_net_listen(net, inet ? "tcp://127.0.0.1:0" : text, 1024);
        check(s > 0 && !spinio_net_address(net, s, text, sizeof text), "listen in a net");
        name = Name::of(text);
        return s;
    }

    template <typename... Parameters, typename... Arguments>
    void launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, Arguments... arguments)
    {
        spinio::launch_resident_on(stream, kernel, blocks, threads, arguments...);
        check(cudaGetLastError() == cudaSuccess, "launch");
    }

    // Processor time of the proxy, up to 5 ms ago.
    double proxy_cpu() const
    {
        struct spinio_net_stats stats;
        check(!spinio_net_stats(net, &stats, sizeof stats), "stats");
        return double(stats.proxy_ns) * 1e-9;
    }

    // Ends the kernel.
    void end()
    {
        check(!spinio_net_stop(net) && cudaStreamSynchronize(stream) == cudaSuccess && !spinio_net_close(net), "stop a net");
    }
};

// Processor time of the proxy from its construction to the call.
class ProxyTime {
public:
    explicit ProxyTime(const Net &net) : net(net), begun(net.proxy_cpu()) {}
    double spent() const { return net.proxy_cpu() - begun; }

private:
    const Net &net;
    double begun;
};

#endif
