// waiting.h: the rows of gpunet.cu for one block that waits for many sockets, and for what is not a stream.
//
//   events      a block serves connections from an event set; all but one are silent
//   poll        the same by poll()
//   datagrams   echo of datagrams: CPU to CPU (the limit), CPU and block
//   files       a block reads a cached file by pread(); the CPU's own pread (the limit)
//   spans       a block computes what it sends: into a buffer and send(), or into the ring; the program receives or borrows it
#ifndef GPUNET_WAITING_H
#define GPUNET_WAITING_H

#include <fcntl.h>

#include "host.h"
#include "kernels.h"
#include "latency.h"
#include "shared.h"

#include <spinio/file.h>

// Answers what has come on a socket; false at its end.
__device__ inline bool answer(const net::Handle &handle, int s, char *buffer, size_t size)
{
    int64_t got = net::recv(net::block(), handle, s, buffer, size, net::DONTWAIT);
    return got > 0 && net::send(net::block(), handle, s, buffer, size_t(got)) == got;
}

__global__ void serve_events(net::Handle handle, int set)
{
    __shared__ char buffer[4096];
    __shared__ net::Ready ready[4];
    auto g = net::block();
    for (int count; (count = net::wait(g, handle, set, ready, 4, -1)) > 0;)
        for (int i = 0; i < count; i++) {
            const int s = ready[i].s;
            if (ready[i].events & net::NEW || answer(handle, s, buffer, sizeof buffer))
                net::rearm(g, handle, s);
            else
                net::close(g, handle, s);
        }
}

// Accepts `count` connections, says so, and serves them until one ends.
__global__ void serve_polls(net::Handle handle, int listener, int count, net::Poll *polls, uint64_t *accepted)
{
    __shared__ char buffer[4096];
    auto g = net::block();
    for (int i = 0; i < count; i++) {
        int s = net::accept(g, handle, listener);
        if (threadIdx.x == 0) {
            polls[i] = {s, net::IN, 0, 0, 0};
            spinio::store_release_system(accepted, uint64_t(i + 1));
        }
    }
    __syncthreads();
    while (net::poll(g, handle, polls, count, -1) > 0)
        for (int i = 0; i < count; i++)
            if (polls[i].ready && !answer(handle, polls[i].s, buffer, sizeof buffer))
                return;
}

template <bool events>
static void serve_many(const Size &size, const char *row)
{
    for (unsigned count : {1u, 64u, size.connections}) {
        Net net(count + 2, 4096);
        Name name;
        const int listener = net.listener(false, name);
        auto accepted = pinned<uint64_t>(1);
        if (events) {
            const int set = spinio_net_set(net.net);
            check(set > 0 && !spinio_net_add(net.net, set, listener, net::IN), "an event set");
            net.launch(serve_events, 1, 64, net.handle, set);
        } else {
            net.launch(serve_polls, 1, 64, net.handle, listener, int(count), pinned<net::Poll>(count), accepted);
        }
        std::vector<int> sockets;
        for (unsigned i = 0; i < count; i++)
            sockets.push_back(connect_to(name));
        for (double begun = now(); !events && __atomic_load_n(accepted, __ATOMIC_ACQUIRE) < count; usleep(1000))
            check(now() < begun + 10, "connections are missing");
        ProxyTime proxy(net);
        auto times = round_trips(sockets.back(), message, size.seconds / 2);
        const double messages = double(times.size());
        Result(row, "one of " + std::to_string(count) + " connections asks, UNIX, 64 bytes")
            .times(times)
            .number("proxy_us_a_message", proxy.spent() * 1e6 / messages);
        for (int s : sockets)
            close(s);
        net.end();
    }
}

static void row_events(const Size &size) { serve_many<true>(size, "events"); }
static void row_poll(const Size &size) { serve_many<false>(size, "poll"); }

// Binds a socket of datagrams to `at`, says its name, and sends back what comes.
__global__ void echo_datagrams(net::Handle handle, int domain, net::Address at, net::Address *bound, int64_t *result)
{
    __shared__ char buffer[4096];
    __shared__ net::Address from;
    auto g = net::block();
    const int s = net::socket(g, handle, domain, net::DGRAM, 0);
    const int failed = s < 0 ? s : net::bind(g, handle, s, at);
    const int named = failed ? failed : net::getsockname(g, handle, s, bound);
    if (threadIdx.x == 0)
        spinio::store_release_system(reinterpret_cast<uint64_t *>(result), uint64_t(named ? named : 1));
    for (int64_t got; (got = net::recvfrom(g, handle, s, buffer, sizeof buffer, 0, &from)) >= 0;) {
        __syncthreads();
        if (net::sendto(g, handle, s, buffer, size_t(got), 0, from) < 0)
            break;
    }
}

// A socket of datagrams of this program, bound to a free name and connected.
static int datagram_socket(bool inet, const Name *to)
{
    const int s = socket(inet ? AF_INET : AF_UNIX, SOCK_DGRAM, 0);
    sockaddr_in any = {};
    any.sin_family = inet ? AF_INET : AF_UNIX;
    any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    check(s >= 0 && !bind(s, reinterpret_cast<sockaddr *>(&any), inet ? sizeof any : sizeof(sa_family_t)), "bind");
    timeval limit = {10, 0};
    setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    check(!to || !connect(s, reinterpret_cast<const sockaddr *>(&to->bytes), to->length), "connect");
    return s;
}

static void row_datagrams(const Size &size)
{
    for (bool inet : {false, true}) {
        {
            const int server = datagram_socket(inet, nullptr);
            Name name;
            name.length = sizeof name.bytes;
            getsockname(server, reinterpret_cast<sockaddr *>(&name.bytes), &name.length);
            const int s = datagram_socket(inet, &name);
            std::thread echo([&] {
                for (char bytes[4096];;) {
                    Name from;
                    from.length = sizeof from.bytes;
                    ssize_t got = recvfrom(server, bytes, sizeof bytes, polls() ? MSG_DONTWAIT : 0, reinterpret_cast<sockaddr *>(&from.bytes), &from.length);
                    if (got < 0 && errno == EAGAIN)
                        continue;
                    if (got <= 0)
                        break;
                    sendto(server, bytes, size_t(got), 0, reinterpret_cast<sockaddr *>(&from.bytes), from.length);
                }
            });
            Result("datagrams", std::string("limit: CPU to CPU, ") + (inet ? "UDP" : "UNIX")).times(round_trips(s, message, size.seconds / 2));
            check(send(s, "", 0, 0) == 0, "the end");
            echo.join();
            close(s);
            close(server);
        }
        Net net(16);
        auto bound = pinned<net::Address>(1);
        auto result = pinned<int64_t>(1);
        const std::string unique = "spinio-datagrams-" + std::to_string(getpid());
        const auto at = inet ? net::Address::inet(127, 0, 0, 1, 0) : net::Address::abstract(unique.c_str());
        net.launch(echo_datagrams, 1, 64, net.handle, inet ? net::INET : net::UNIX, at, bound, result);
        for (double begun = now(); !__atomic_load_n(result, __ATOMIC_ACQUIRE); usleep(1000))
            check(now() < begun + 10, "a kernel binds");
        check(*result == 1, "bind");
        Name name;
        std::memcpy(&name.bytes, bound->bytes, bound->length);
        name.length = bound->length;
        const int s = datagram_socket(inet, &name);
        Result("datagrams", std::string("CPU and block, ") + (inet ? "UDP" : "UNIX")).times(round_trips(s, message, size.seconds / 2));
        close(s);
        net.end();
    }
}

// Reads `rounds` pieces of a file, one after the other and again from its beginning: ticks of each.
__global__ void read_file(net::Handle handle, const char *path, unsigned char *buffer, size_t bytes, size_t pieces, unsigned rounds,
                          unsigned long long *times, Clocks *clocks, int64_t *result)
{
    auto g = net::block();
    const int file = spinio::file::open(g, handle, path, spinio::file::RDONLY);
    int64_t got = file;
    if (threadIdx.x == 0)
        clocks->read(0);
    for (unsigned round = 0; round < rounds && got >= 0; round++) {
        unsigned long long begun = ticks();
        got = spinio::file::pread(g, handle, file, buffer, bytes, int64_t(round % pieces * bytes));
        if (threadIdx.x == 0)
            times[round] = ticks() - begun;
    }
    if (threadIdx.x == 0) {
        clocks->read(1);
        *result = got;
    }
    spinio::file::close(g, handle, file);
}

static void row_files(const Size &size)
{
    const size_t file_bytes = size.small ? 1 << 20 : 64 << 20;
    char folder[] = "/tmp/spinio-files-XXXXXX";
    check(mkdtemp(folder) != nullptr, "a folder");
    const std::string whole = std::string(folder) + "/file";
    std::vector<unsigned char> all(file_bytes);
    for (size_t i = 0; i < file_bytes; i++)
        all[i] = byte_at(i + i / period);
    const int file = open(whole.c_str(), O_RDWR | O_CREAT, 0600);
    check(file >= 0 && write(file, all.data(), file_bytes) == ssize_t(file_bytes), "a file");
    struct spinio_net_options options = {};
    options.size = sizeof options;
    options.files_root = folder;
    // Makes the context of a GPU, which the net is for.
    unsigned char *buffer;
    check(cudaMalloc(&buffer, 1 << 20) == cudaSuccess, "cudaMalloc");
    spinio_net *opened = spinio_net_open(nullptr, &options);
    net::Handle handle;
    check(opened && !spinio_net_handle(opened, reinterpret_cast<struct spinio_net_handle *>(&handle)), "open a net");
    auto path = pinned<char>(8);
    std::strcpy(path, "file");
    for (size_t bytes : {size_t(4096), size_t(64 << 10), size_t(1 << 20)}) {
        const unsigned rounds = size.small ? 8 : unsigned(std::min<size_t>(4000, (size_t(1) << 30) / bytes));
        std::vector<double> here;
        std::vector<unsigned char> copy(bytes);
        for (unsigned round = 0; round < rounds; round++) {
            const double begun = now();
            check(pread(file, copy.data(), bytes, off_t(round % (file_bytes / bytes) * bytes)) == ssize_t(bytes), "pread");
            here.push_back((now() - begun) * 1e6);
        }
        const std::string what = std::to_string(bytes) + " bytes";
        Result("files", "limit: pread of the CPU, " + what).times(here);
        auto times = pinned<unsigned long long>(rounds);
        auto clocks = pinned<Clocks>(1);
        auto result = pinned<int64_t>(1);
        cudaStream_t stream = new_stream();
        spinio::launch_resident_on(stream, read_file, 1, 512, handle, static_cast<const char *>(path), buffer, bytes, file_bytes / bytes, rounds, times, clocks,
                                   result);
        check(cudaStreamSynchronize(stream) == cudaSuccess && *result == int64_t(bytes), "a kernel reads");
        check(cudaMemcpy(copy.data(), buffer, bytes, cudaMemcpyDeviceToHost) == cudaSuccess, "copy");
        check(!std::memcmp(copy.data(), all.data() + (rounds - 1) % (file_bytes / bytes) * bytes, bytes), "a file with wrong bytes");
        Result("files", "a block reads " + what).times(device_times(times, rounds, *clocks));
    }
    unlink(whole.c_str());
    rmdir(folder);
    check(!spinio_net_stop(opened) && !spinio_net_close(opened), "stop a net");
}

// Computes a stream and sends it, until that fails: through a buffer, or in place.
__global__ void __launch_bounds__(1024) compute_and_send(net::Handle handle, int listener, unsigned char *buffer, bool in_place)
{
    auto g = net::block();
    const int s = net::accept(g, handle, listener);
    for (size_t at = 0;;) {
        net::Span span = {buffer, period};
        int64_t room = in_place ? net::reserve(g, handle, s, &span, period) : int64_t(period);
        if (room <= 0)
            break;
        for (int64_t i = threadIdx.x; i < room; i += blockDim.x)
            span.bytes[i] = byte_at(at + size_t(i));
        __syncthreads();
        if (in_place ? net::commit(g, handle, s, size_t(room)) < 0 : net::send(g, handle, s, buffer, size_t(room)) < room)
            break;
        at += size_t(room);
    }
    net::close(g, handle, s);
}

static void row_spans(const Size &size)
{
    unsigned char *buffer;
    check(cudaMalloc(&buffer, period) == cudaSuccess, "cudaMalloc");
    for (bool sends_in_place : {false, true})
        for (bool receives_in_place : {false, true}) {
            Net net(16, 1 << 20, false);
            Name name;
            const int listener = net.listener(false, name);
            net.launch(compute_and_send, 1, 1024, net.handle, listener, buffer, sends_in_place);
            SharedClient client(name);
            std::vector<unsigned char> bytes(256 << 10);
            size_t total = 0;
            uint64_t sum = 0;
            const double begun = now();
            while (now() < begun + size.seconds) {
                void *at = bytes.data();
                const ssize_t got = receives_in_place ? spinio_socket_borrow(client.s, &at, bytes.size(), 0)
                                                      : spinio_socket_recv(client.s, at, bytes.size(), 0);
                check(got > 0 && *static_cast<unsigned char *>(at) == byte_at(total), "a stream with a wrong byte");
                // Both ways the program looks at each byte.
                for (ssize_t i = 0; i + 8 <= got; i += 8) {
                    uint64_t word;
                    std::memcpy(&word, static_cast<char *>(at) + i, 8);
                    sum += word;
                }
                check(!receives_in_place || !spinio_socket_give_back(client.s, size_t(got)), "give back");
                total += size_t(got);
            }
            Result("spans", std::string("a block computes and sends ") + (sends_in_place ? "in place" : "a buffer") + ", a program " +
                                (receives_in_place ? "reads in place" : "receives"))
                .number("GB_s", double(total) / (now() - begun) * 1e-9)
                .number("sum", double(sum % 1000));
            spinio_socket_shutdown(client.s, SHUT_RDWR);
            check(!spinio_net_stop(net.net), "stop a net");
            net.end();
        }
}

#endif
