// rates.h: the rows of gpunet.cu that measure streams, many sockets and many blocks.
//
//   stream      one stream in each direction and both at once; limit: CPU to CPU
//   sockets     32 KiB sends of a block a socket, 2 to 416 of them: the paper's scaling figure; 4096, 16 for each block
//   contention  64 byte echoes of 1 to 132 blocks, with the proxy's processor time a message; limit: one thread with epoll
//   many        idle connections, and one that is not
//   attributes  registers and shared memory of the kernels; bytes a connection
#ifndef GPUNET_RATES_H
#define GPUNET_RATES_H

#include <sys/epoll.h>

#include "host.h"
#include "kernels.h"

// Receives for a time and compares a byte of each part. Returns bytes a second.
static double drain(int s, double limit)
{
    std::vector<unsigned char> bytes(1 << 20);
    size_t total = 0;
    double begun = now();
    while (now() < begun + limit) {
        ssize_t got = recv(s, bytes.data(), bytes.size(), 0);
        check(got > 0, "a stream ended");
        check(bytes[0] == byte_at(total), "a stream with a wrong byte");
        total += size_t(got);
    }
    return double(total) / (now() - begun);
}

// Sends for a time, ends the direction and returns how many bytes were sent.
static size_t pour(int s, double limit)
{
    const auto bytes = stream_bytes();
    size_t total = 0;
    for (double end = now() + limit; now() < end; total += bytes.size())
        check(send_all(s, bytes.data(), bytes.size()), "a stream broke");
    shutdown(s, SHUT_WR);
    return total;
}

// Sends until the other end closes.
static void send_until_it_fails(int s)
{
    const auto bytes = stream_bytes();
    while (send_all(s, bytes.data(), bytes.size())) {
    }
    close(s);
}

template <typename T>
static T *device_array(size_t count)
{
    T *array;
    check(cudaMalloc(&array, count * sizeof(T)) == cudaSuccess, "cudaMalloc");
    return array;
}

static unsigned char *device_buffers(unsigned count) { return device_array<unsigned char>(count * period); }

static void row_stream(const Size &size)
{
    for (bool inet : {false, true}) {
        std::string family = family_name(inet);
        Name name;
        int listener = listen_here(inet, name);
        int out = connect_to(name), in = accept_here(listener);
        close(listener);
        std::thread sender(send_until_it_fails, out);
        Result("stream", "limit: CPU to CPU, " + family).number("GB_s", drain(in, size.seconds) * 1e-9);
        close(in);
        sender.join();

        for (unsigned ring : {64u << 10, 1u << 20}) {
            std::string with = ", " + family + ", ring of " + std::to_string(ring >> 10) + " KiB";
            unsigned char *buffers = device_buffers(2);
            auto received = pinned<uint64_t>(1);
            Net net(16, ring);
            int sources = net.listener(inet, name);
            net.launch(source, 1, 512, net.handle, sources, buffers, unsigned(period));
            int s = connect_to(name);
            ProxyTime proxy(net);
            double begun = now(), rate = drain(s, size.seconds);
            Result("stream", "block to CPU" + with).number("GB_s", rate * 1e-9).number("proxy_cores", proxy.spent() / (now() - begun));
            close(s);
            net.end();

            Net other(16, ring);
            int sinks = other.listener(inet, name);
            other.launch(sink, 1, 512, other.handle, sinks, buffers);
            s = connect_to(name);
            ProxyTime proxy_in(other);
            begun = now();
            size_t sent = pour(s, size.seconds), got = 0;
            check(receive_all(s, &got, sizeof got) && got == sent, "bytes were lost");
            double took = now() - begun;
            Result("stream", "CPU to block" + with).number("GB_s", double(sent) / took * 1e-9).number("proxy_cores", proxy_in.spent() / took);
            close(s);
            other.end();

            Net both(16, ring);
            Name here;
            int waiting = listen_here(inet, here), socket = spinio_net_connect(both.net, here.text().c_str());
            check(socket > 0, "connect in a net");
            s = accept_here(waiting);
            close(waiting);
            both.launch(duplex, 2, 512, both.handle, socket, buffers, received);
            begun = now();
            std::thread pouring([&] { sent = pour(s, size.seconds); });
            rate = drain(s, size.seconds);
            pouring.join();
            // An end of the connection that comes first would discard bytes.
            while (__atomic_load_n(received, __ATOMIC_ACQUIRE) == 0 && now() < begun + 10)
                usleep(100);
            took = now() - begun;
            check(*received == sent, "bytes were lost");
            Result("stream", "duplex" + with).number("out_GB_s", rate * 1e-9).number("in_GB_s", double(sent) / took * 1e-9);
            close(s);
            both.end();
        }
    }
}

static void row_sockets(const Size &size)
{
    const size_t descriptors = raise_descriptor_limit();
    for (unsigned count : {2u, 4u, 8u, 32u, 64u, 132u, 264u, 416u, 4096u}) {
        // More than there are resident blocks.
        const bool in_turn = count > 416;
        if (in_turn ? size.small : count > size.connections)
            continue;
        // Both ends are in this process.
        if (2 * count + 100 > descriptors) {
            Result("sockets", std::to_string(count) + " sockets need more descriptors than this process may have");
            continue;
        }
        Net net(count + 1);
        Name name;
        int listener = net.listener(false, name);
        if (in_turn)
            net.launch(source_in_turn, count / 16, 128, net.handle, listener, device_buffers(1), 32u << 10, device_array<int>(count), 16u);
        else
            net.launch(source, count, 128, net.handle, listener, device_buffers(count), 32u << 10);
        std::vector<int> sockets;
        for (unsigned i = 0; i < count; i++)
            sockets.push_back(connect_to(name));
        const unsigned readers = std::min(count, polls() ? 4u : 1u);
        std::vector<double> rates(readers);
        std::vector<std::thread> threads;
        ProxyTime proxy(net);
        double begun = now();
        for (unsigned reader = 0; reader < readers; reader++)
            threads.emplace_back([&, reader] {
                std::vector<unsigned char> bytes(256 << 10);
                std::vector<size_t> totals(count);
                size_t total = 0;
                double end = begun + size.seconds / 2;
                while (now() < end)
                    for (unsigned i = reader; i < count; i += readers) {
                        ssize_t got = recv(sockets[i], bytes.data(), bytes.size(), MSG_DONTWAIT);
                        if (got > 0) {
                            check(bytes[0] == byte_at(totals[i]), "a wrong byte");
                            totals[i] += size_t(got);
                            total += size_t(got);
                        }
                    }
                rates[reader] = double(total) / (now() - begun);
            });
        for (auto &thread : threads)
            thread.join();
        double sum = 0, spent = proxy.spent() / (now() - begun);
        for (double rate : rates)
            sum += rate;
        Result("sockets", "32 KiB sends, " + std::to_string(count) + " sockets, UNIX").number("GB_s", sum * 1e-9).number("proxy_cores", spent);
        for (int s : sockets)
            close(s);
        net.end();
    }
}

// Clients with a connection each, few threads; each sends on all its connections, then waits for all answers.
struct Clients {
    std::vector<double> times;
    double seconds = 0;

    Clients(const Name &name, unsigned count, double limit)
    {
        const unsigned threads = std::min(count, polls() ? 4u : 1u);
        std::vector<std::vector<double>> each(threads);
        std::vector<std::thread> running;
        double begun = now();
        for (unsigned thread = 0; thread < threads; thread++)
            running.emplace_back([&, thread] {
                std::vector<int> sockets;
                for (unsigned i = thread; i < count; i += threads)
                    sockets.push_back(connect_to(name));
                std::vector<double> sent(sockets.size());
                char bytes[64] = {}, back[64];
                for (double end = now() + limit; now() < end;) {
                    bytes[0]++;
                    for (size_t i = 0; i < sockets.size(); i++) {
                        sent[i] = now();
                        check(send_all(sockets[i], bytes, sizeof bytes), "an echo");
                    }
                    for (size_t i = 0; i < sockets.size(); i++) {
                        check(receive_all(sockets[i], back, sizeof back) && back[0] == bytes[0], "an echo");
                        each[thread].push_back((now() - sent[i]) * 1e6);
                    }
                }
                for (int s : sockets)
                    close(s);
            });
        for (auto &thread : running)
            thread.join();
        seconds = now() - begun;
        for (auto &more : each)
            times.insert(times.end(), more.begin(), more.end());
    }
};

// A server of one thread, as programs write it; `spent`: its processor time.
static void serve_with_epoll(int listener, unsigned count, double &spent)
{
    int epoll = epoll_create1(0);
    auto watch = [&](int s) {
        epoll_event event = {};
        event.events = EPOLLIN;
        event.data.fd = s;
        epoll_ctl(epoll, EPOLL_CTL_ADD, s, &event);
    };
    watch(listener);
    double begun = thread_cpu();
    for (unsigned closed = 0; closed < count;) {
        epoll_event events[64];
        int ready = epoll_wait(epoll, events, 64, 1000);
        for (int i = 0; i < ready; i++) {
            char bytes[4096];
            int s = events[i].data.fd;
            if (s == listener) {
                watch(accept_here(listener));
                continue;
            }
            ssize_t got = recv(s, bytes, sizeof bytes, MSG_DONTWAIT);
            if (got > 0)
                send_all(s, bytes, size_t(got));
            else if (got == 0)
                close(s), closed++;
        }
    }
    spent = thread_cpu() - begun;
    close(epoll);
}

static void row_contention(const Size &size)
{
    for (unsigned count : {1u, 4u, 16u, 64u, 132u}) {
        if (count > size.connections)
            break;
        std::string many = std::to_string(count) + " connections, UNIX";
        Name name;
        double spent = 0;
        int listener = listen_here(false, name);
        std::thread server([&] { serve_with_epoll(listener, count, spent); });
        Clients plain(name, count, size.seconds / 2);
        server.join();
        close(listener);
        Result("contention", "limit: one thread with epoll, " + many)
            .times(plain.times)
            .number("messages_s", double(plain.times.size()) / plain.seconds)
            .number("server_us_a_message", spent * 1e6 / double(plain.times.size()));

        Net net(count + 1);
        int s = net.listener(false, name);
        net.launch(echo, count, 64, net.handle, s);
        ProxyTime proxy(net);
        Clients ours(name, count, size.seconds / 2);
        double used = proxy.spent();
        Result("contention", "blocks, " + many)
            .times(ours.times)
            .number("messages_s", double(ours.times.size()) / ours.seconds)
            .number("proxy_us_a_message", used * 1e6 / double(ours.times.size()));
        net.end();
    }
}

static void row_many(const Size &size)
{
    const unsigned idle = unsigned(std::min<size_t>(size.small ? 100 : 10000, (raise_descriptor_limit() - 100) / 2));
    Net net(idle + 2, 4096);
    Name name, other;
    int listener = net.listener(false, name), echoes = net.listener(false, other);
    const unsigned blocks = size.small ? 2 : 16;
    auto counts = pinned<uint64_t>(blocks);
    net.launch(accept_only, blocks, 32, net.handle, listener, counts);
    double begun = now();
    std::vector<int> sockets;
    for (unsigned i = 0; i < idle; i++)
        sockets.push_back(connect_to(name));
    auto accepted = [&] {
        uint64_t sum = 0;
        for (unsigned i = 0; i < blocks; i++)
            sum += __atomic_load_n(counts + i, __ATOMIC_ACQUIRE);
        return sum;
    };
    while (accepted() < idle && now() < begun + 10)
        usleep(1000);
    check(accepted() == idle, "connections are missing");
    Result("many", "accepted by kernels").number("connections", idle).number("us_a_connection", (now() - begun) * 1e6 / idle);
    cudaStream_t stream = new_stream();
    spinio::launch_resident_on(stream, echo, 1, 64, net.handle, echoes);
    int s = connect_to(other);
    Result("many", "echo of 64 bytes beside them, UNIX").times(round_trips(s, 64, size.seconds));
    close(s);
    std::this_thread::sleep_for(std::chrono::milliseconds(size.small ? 50 : 1000));
    ProxyTime proxy(net);
    begun = now();
    std::this_thread::sleep_for(std::chrono::milliseconds(size.small ? 50 : 1000));
    Result("many", "silence").number("cores", proxy.spent() / (now() - begun));
    check(!spinio_net_stop(net.net) && cudaStreamSynchronize(stream) == cudaSuccess, "stop");
    net.end();
}

template <typename... Parameters>
static void attributes_of(const char *name, void (*kernel)(Parameters...))
{
    Result result("attributes", name);
#if defined(__CUDACC__)
    cudaFuncAttributes attributes = {};
    check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void *>(kernel)) == cudaSuccess, "attributes");
    result.number("registers", attributes.numRegs).number("shared_bytes", double(attributes.sharedSizeBytes)).number("local_bytes", double(attributes.localSizeBytes));
    result.number("resident_blocks_of_64", spinio::largest_resident_grid(kernel, 64));
#else
    result.number("resident_blocks", spinio::largest_resident_grid(kernel, 64));
#endif
}

static void row_attributes(const Size &)
{
    attributes_of("echo (4096 of the shared bytes are its buffer)", echo);
    attributes_of("source", source);
    attributes_of("sink", sink);
    attributes_of("two_blocks (64 of the shared bytes are its buffer)", two_blocks);
    for (unsigned ring : {4096u, 8192u, 65536u}) {
        using namespace net::layout;
        Result("attributes", "pinned bytes of a connection, ring of " + std::to_string(ring >> 10) + " KiB")
            .number("bytes", 2.0 * ring + 2 * line_bytes + record_bytes)
            .number("device_bytes", sizeof(DeviceSocket));
    }
    for (unsigned connections : {256u, 10000u}) {
        double begun = now();
        Net net(connections, 8192);
        Result("attributes", "a net opens, " + std::to_string(connections) + " connections, ring of 8 KiB").number("ms", (now() - begun) * 1e3);
        net.end();
    }
}

#endif
