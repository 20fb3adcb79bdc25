// net_echo.h: kernels that give back what they receive, and a peer that compares it.
#ifndef NET_ECHO_H
#define NET_ECHO_H

#include "net_test.h"

__global__ void echo_some(net::Handle handle, int listener, int connections, int64_t *done)
{
    __shared__ char buffer[3000];
    auto g = net::block();
    for (int i = 0; i < connections; i++) {
        int s = net::accept(g, handle, listener);
        int64_t got;
        while ((got = net::recv(g, handle, s, buffer, sizeof buffer)) > 0)
            if (net::send(g, handle, s, buffer, size_t(got)) != got)
                break;
        net::close(g, handle, s);
        if (threadIdx.x == 0)
            spinio::store_release_system(reinterpret_cast<uint64_t *>(done), uint64_t(i) + 1);
    }
}

// The same for all sockets of an event set, until the net stops.
__global__ void echo_set(net::Handle handle, int set)
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

// Sends bytes and compares what comes back.
[[maybe_unused]] static void round_trip(int s, size_t bytes, unsigned seed)
{
    std::vector<unsigned char> out(bytes), in(bytes);
    for (auto &byte : out)
        byte = (unsigned char)((seed = seed * 1664525 + 1013904223) >> 24);
    // A call with a time limit is interrupted where the process was stopped.
    auto all = [&](auto move) {
        size_t done = 0;
        for (ssize_t part; done < bytes && ((part = move(done)) > 0 || (part < 0 && errno == EINTR));)
            done += part > 0 ? size_t(part) : 0;
        return done == bytes;
    };
    std::thread writer([&] { CHECK(all([&](size_t at) { return send(s, out.data() + at, bytes - at, MSG_NOSIGNAL); })); });
    CHECK(all([&](size_t at) { return recv(s, in.data() + at, bytes - at, 0); }) && in == out);
    writer.join();
}

[[maybe_unused]] static void waits_for_open(const Net &net, uint64_t open)
{
    // Looked at once: a connection of a process that was killed may be accepted, and end, after this.
    bool is_so = false;
    for (int i = 0; i < 60000 && !(is_so = net.stats().open == open); i++)
        usleep(1000);
    CHECK(is_so);
}

#endif
