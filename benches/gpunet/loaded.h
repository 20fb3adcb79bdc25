// loaded.h: the rows of gpunet.cu whose proxy has many connections to serve, or little processor time. The limits are programs of
// the CPU under the same conditions.
//
//   busy       1,000 connections that all ask, alone and beside 10,000 silent ones; limit: one thread with epoll
//   two-cores  echo and a stream, all threads of this process on two processors
//   crowded    the same while a thread for each processor, and one more, computes
#ifndef GPUNET_LOADED_H
#define GPUNET_LOADED_H

#include <atomic>

#include "latency.h"
#include "rates.h"
#include "waiting.h"

// Closes its connections at the end.
class Silent {
public:
    Silent(const Name &name, unsigned count)
    {
        for (unsigned i = 0; i < count; i++)
            sockets.push_back(connect_to(name));
    }
    ~Silent()
    {
        for (int s : sockets)
            close(s);
    }
    Silent(const Silent &) = delete;

private:
    std::vector<int> sockets;
};

static double cpu_of(std::thread &thread)
{
    clockid_t clock;
    check(!pthread_getcpuclockid(thread.native_handle(), &clock), "the clock of a thread");
    return seconds(clock);
}

static void row_busy(const Size &size)
{
    // Both ends of a connection are in this process.
    const size_t possible = (raise_descriptor_limit() - 100) / 2;
    const unsigned busy = unsigned(std::min<size_t>(size.small ? 8 : 1000, possible / 2));
    const unsigned most = unsigned(std::min<size_t>(size.small ? 32 : 10000, possible - busy));
    for (unsigned silent : {0u, most}) {
        const std::string what = std::to_string(busy) + " connections ask, " + std::to_string(silent) + " are silent, UNIX";
        {
            Name name;
            double spent = 0;
            const int listener = listen_here(false, name);
            std::thread server([&] { serve_with_epoll(listener, silent + busy + 1, spent); });
            {
                Silent beside(name, silent);
                const int last = connect_to(name);
                round_trips(last, message, 0.01); // the others are accepted
                const double before = cpu_of(server);
                Clients plain(name, busy, size.seconds);
                Result("busy", "limit: one thread with epoll, " + what)
                    .times(plain.times)
                    .number("messages_s", double(plain.times.size()) / plain.seconds)
                    .number("server_us_a_message", (cpu_of(server) - before) * 1e6 / double(plain.times.size()));
                close(last);
            }
            server.join();
            close(listener);
        }
        Net net(silent + busy + 2, 4096);
        Name name;
        const int listener = net.listener(false, name), set = spinio_net_set(net.net);
        check(set > 0 && !spinio_net_add(net.net, set, listener, net::IN), "an event set");
        net.launch(serve_events, size.small ? 2 : 64, 64, net.handle, set);
        {
            Silent beside(name, silent);
            const int last = connect_to(name);
            round_trips(last, message, 0.01);
            ProxyTime proxy(net);
            Clients ours(name, busy, size.seconds);
            Result("busy", "blocks with an event set, " + what)
                .times(ours.times)
                .number("messages_s", double(ours.times.size()) / ours.seconds)
                .number("proxy_us_a_message", proxy.spent() * 1e6 / double(ours.times.size()));
            close(last);
        }
        net.end();
    }
}

// Echo of 64 bytes and a stream out of a block, beside the same between two threads.
static void under_load(const Size &size, const char *row)
{
    Name name;
    int listener = listen_here(false, name);
    std::thread server(serve_here, listener);
    int s = connect_to(name);
    Result(row, "limit: CPU to CPU, UNIX").times(round_trips(s, message, size.seconds));
    close(s);
    server.join();

    int out = connect_to(name), in = accept_here(listener);
    close(listener);
    std::thread sender(send_until_it_fails, out);
    Result(row, "limit: CPU to CPU, UNIX, a stream").number("GB_s", drain(in, size.seconds) * 1e-9);
    close(in);
    sender.join();

    {
        Net net(16);
        listener = net.listener(false, name);
        net.launch(echo, 1, 64, net.handle, listener);
        s = connect_to(name);
        ProxyTime proxy(net);
        auto times = round_trips(s, message, size.seconds);
        const double messages = double(times.size());
        Result(row, "CPU and block, UNIX, 64 bytes").times(times).number("proxy_us_a_message", proxy.spent() * 1e6 / messages);
        close(s);
        net.end();
    }
    Net net(16, 1 << 20);
    listener = net.listener(false, name);
    net.launch(source, 1, 512, net.handle, listener, device_buffers(1), unsigned(period));
    s = connect_to(name);
    ProxyTime proxy(net);
    const double begun = now(), rate = drain(s, size.seconds);
    Result(row, "block to CPU, UNIX, ring of 1024 KiB").number("GB_s", rate * 1e-9).number("proxy_cores", proxy.spent() / (now() - begun));
    close(s);
    net.end();
}

static void row_two_cores(const Size &size)
{
    cpu_set_t all, two;
    CPU_ZERO(&two);
    check(!sched_getaffinity(0, sizeof all, &all), "sched_getaffinity");
    for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&two) < 2; cpu++)
        if (CPU_ISSET(cpu, &all))
            CPU_SET(cpu, &two);
    // Before any other thread begins: each has the processors of the one that makes it.
    check(!sched_setaffinity(0, sizeof two, &two), "sched_setaffinity");
    under_load(size, "two-cores");
}

static void row_crowded(const Size &size)
{
    std::atomic<bool> ends{false};
    std::vector<std::thread> others;
    for (unsigned i = 0; i <= processors(); i++)
        others.emplace_back([&] {
            while (!ends.load(std::memory_order_relaxed)) {
            }
        });
    under_load(size, "crowded");
    ends = true;
    for (auto &other : others)
        other.join();
}

#endif
