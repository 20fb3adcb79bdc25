// shared.h: the row of gpunet.cu that measures a CPU program which shares memory with a block (spinio_socket_...). Its limits are
// the words of the row `parts` and, for streams, a block that copies between device and pinned memory.
#ifndef GPUNET_SHARED_H
#define GPUNET_SHARED_H

#include "host.h"
#include "kernels.h"
#include "peer.h"

struct SharedClient {
    spinio_socket *s;

    explicit SharedClient(const Name &name)
    {
        struct spinio_socket_options options = {sizeof options, 0, 10000, 10000};
        char text[128] = "no socket";
        s = spinio_socket_connect(name.text().c_str(), &options);
        check(s && spinio_socket_transport(s, text, sizeof text) == 1, text);
    }

    ~SharedClient() { spinio_socket_close(s); }

    bool receive(void *to, size_t bytes) const { return spinio_socket_recv(s, to, bytes, MSG_WAITALL) == ssize_t(bytes); }
    bool send(const void *from, size_t bytes) const { return spinio_socket_send(s, from, bytes, 0) == ssize_t(bytes); }
};

static void shared_echo(const Size &size, bool inet)
{
    Net net(16, 0, false);
    Name name;
    int listener = net.listener(inet, name);
    net.launch(echo, 1, 64, net.handle, listener);
    for (int bytes : {64, 98, 4096}) {
        SharedClient client(name);
        ProxyTime proxy(net);
        double end = now() + (bytes == 64 ? size.seconds : size.seconds / 5);
        std::vector<double> times;
        std::vector<unsigned char> out(size_t(bytes), 0), in(out);
        for (size_t round = 0; times.size() < 100000; round++) {
            for (size_t i = 0; i < out.size(); i++)
                out[i] = (unsigned char)(round * 31 + i);
            double begun = now();
            if (begun > end)
                break;
            check(client.send(out.data(), out.size()) && client.receive(in.data(), in.size()), "a round trip");
            times.push_back((now() - begun) * 1e6);
            check(in == out, "an echo with wrong bytes");
        }
        times.erase(times.begin(), times.begin() + std::ptrdiff_t(std::min<size_t>(times.size() / 10, 100)));
        double count = double(times.size());
        Result("shared", std::string("program and block, ") + family_name(inet) + ", " + std::to_string(bytes) + " bytes")
            .times(times)
            .number("proxy_us_a_message", proxy.spent() * 1e6 / count);
    }
    net.end();
}

static void shared_stream(const Size &size, unsigned ring)
{
    const std::string with = ", ring of " + std::to_string(ring >> 10) + " KiB";
    unsigned char *buffers;
    check(cudaMalloc(&buffers, period) == cudaSuccess, "cudaMalloc");
    std::vector<unsigned char> bytes(256 << 10);
    {
        Net net(16, ring, false);
        Name name;
        int listener = net.listener(false, name);
        net.launch(source, 1, 512, net.handle, listener, buffers, unsigned(period));
        SharedClient client(name);
        size_t total = 0;
        double begun = now();
        while (now() < begun + size.seconds) {
            ssize_t got = spinio_socket_recv(client.s, bytes.data(), bytes.size(), 0);
            check(got > 0 && bytes[0] == byte_at(total), "a stream with a wrong byte");
            total += size_t(got);
        }
        Result("shared", "block to program" + with).number("GB_s", double(total) / (now() - begun) * 1e-9);
        spinio_socket_shutdown(client.s, SHUT_RDWR);
        check(!spinio_net_stop(net.net), "stop a net");
        net.end();
    }
    Net net(16, ring, false);
    Name name;
    int listener = net.listener(false, name);
    net.launch(sink, 1, 512, net.handle, listener, buffers);
    SharedClient client(name);
    bytes = stream_bytes();
    size_t total = 0, got = 0;
    double begun = now();
    for (; now() < begun + size.seconds; total += bytes.size())
        check(client.send(bytes.data(), bytes.size()), "a stream broke");
    check(!spinio_socket_shutdown(client.s, SHUT_WR) && client.receive(&got, sizeof got) && got == total, "bytes were lost");
    Result("shared", "program to block" + with).number("GB_s", double(total) / (now() - begun) * 1e-9);
    net.end();
}

static void row_shared(const Size &size)
{
    for (bool inet : {false, true})
        shared_echo(size, inet);
    {
        const Two two;
        const auto device = two.memory<unsigned char>(0, period), host = pinned<unsigned char>(period);
        const cudaStream_t stream = new_stream();
        Result("shared", "limit: a block copies to pinned memory").number("GB_s", rate_of_stores(size, stream, device, host, 1) * 1e-9);
        Result("shared", "limit: a block copies from pinned memory").number("GB_s", rate_of_loads(size, stream, host, device) * 1e-9);
    }
    for (unsigned ring : {64u << 10, 1u << 20})
        shared_stream(size, ring);
}

#endif
