// latency.h: the rows of gpunet.cu that measure times of single messages, with the limits and peers beside them.
//
//   parts    CPU to CPU echo; a word there and back between CPU and GPU          the limits
//   echo     CPU client <-> block                                                ours
//   relay    recv, cudaMemcpy, launch, cudaMemcpy, send; ZeroMQ in its place     the naive way; with gRPC: grpc.h
//   blocks   block <-> block through a UNIX socket, and of a connection inside the net in device memory
//   send     when send() of 64 KiB returns
//   idle     processor time in silence, and the first message after it
#ifndef GPUNET_LATENCY_H
#define GPUNET_LATENCY_H

#include "host.h"
#include "kernels.h"
#include "zmq.h"

constexpr int message = 64;

// Echo by a thread of this program, until the client closes.
static void serve_here(int listener)
{
    int s = accept_here(listener);
    static const bool polling = polls();
    for (char bytes[4096];;) {
        ssize_t got = recv(s, bytes, sizeof bytes, polling ? MSG_DONTWAIT : 0);
        if (got == 0 || (got < 0 && errno != EAGAIN))
            break;
        if (got > 0 && !send_all(s, bytes, size_t(got)))
            break;
    }
    close(s);
}

static void row_parts(const Size &size)
{
    for (bool inet : {false, true}) {
        Name name;
        int listener = listen_here(inet, name);
        std::thread server(serve_here, listener);
        int s = connect_to(name);
        Result("parts", std::string("limit: CPU to CPU, ") + family_name(inet)).times(round_trips(s, message, size.seconds));
        close(s);
        server.join();
        close(listener);
    }
    const uint64_t rounds = size.small ? 200 : 50000;
    auto words = pinned<uint64_t>(64);
    auto stream = new_stream();
    spinio::launch_on(stream, word_ping_pong, 1, 1, words, words + 32, rounds);
    check(cudaGetLastError() == cudaSuccess, "launch");
    std::vector<double> times;
    for (uint64_t next = 1; next <= rounds; next++) {
        double begun = now();
        __atomic_store_n(words, next, __ATOMIC_RELEASE);
        while (__atomic_load_n(words + 32, __ATOMIC_ACQUIRE) < next)
            if (!polls())
                std::this_thread::yield();
        if (next > rounds / 10)
            times.push_back((now() - begun) * 1e6);
    }
    check(cudaStreamSynchronize(stream) == cudaSuccess, "the kernel of words");
    Result("parts", "limit: a word from CPU to GPU and back").times(times);
}

static void row_echo(const Size &size)
{
    for (bool inet : {false, true}) {
        Net net(16);
        Name name;
        int listener = net.listener(inet, name);
        net.launch(echo, 1, 64, net.handle, listener);
        for (int bytes : {message, 98, 128, 4096}) {
            int s = connect_to(name);
            ProxyTime proxy(net);
            double cpu = process_cpu();
            auto times = round_trips(s, size_t(bytes), bytes == message ? size.seconds : size.seconds / 5);
            double count = double(times.size());
            Result("echo", std::string("CPU and block, ") + family_name(inet) + ", " + std::to_string(bytes) + " bytes")
                .times(times)
                .number("proxy_us_a_message", proxy.spent() * 1e6 / count)
                .number("process_us_a_message", (process_cpu() - cpu) * 1e6 / count);
            close(s);
        }
        net.end();
    }
}

// What the naive way does with each message: to the GPU, through a kernel, back.
struct NaiveWay {
    unsigned char *in, *out;

    NaiveWay() { check(cudaMalloc(&in, 4096) == cudaSuccess && cudaMalloc(&out, 4096) == cudaSuccess, "cudaMalloc"); }

    bool process(void *bytes, size_t count) const
    {
        if (cudaMemcpy(in, bytes, count, cudaMemcpyHostToDevice) != cudaSuccess)
            return false;
        spinio::launch(relay, 1, 64, (const unsigned char *)in, out, int(count));
        std::memset(bytes, 0, count);
        return cudaMemcpy(bytes, out, count, cudaMemcpyDeviceToHost) == cudaSuccess;
    }
};

static void row_relay(const Size &size)
{
    NaiveWay way;
    for (bool inet : {false, true}) {
        Name name;
        int listener = listen_here(inet, name);
        std::thread server([&] {
            int s = accept_here(listener);
            for (char bytes[message]; receive_all(s, bytes, sizeof bytes);)
                check(way.process(bytes, sizeof bytes) && send_all(s, bytes, sizeof bytes), "the naive way");
            close(s);
        });
        int s = connect_to(name);
        double cpu = process_cpu();
        auto times = round_trips(s, message, size.seconds);
        Result("relay", std::string("peer: recv, copy, launch, copy, send, ") + family_name(inet))
            .times(times)
            .number("process_us_a_message", (process_cpu() - cpu) * 1e6 / double(times.size()));
        shutdown(s, SHUT_RDWR);
        server.join();
        close(s);
        close(listener);
    }
    zmq_rows("relay", message, size.seconds, [&](void *bytes, size_t count) { return way.process(bytes, count); });
}

static void row_blocks(const Size &size)
{
    for (bool inet : {false, true})
        for (bool no_upgrade : {true, false}) {
            Net net(16, 0, no_upgrade);
            Name name;
            int listener = net.listener(inet, name), client = spinio_net_connect(net.net, name.text().c_str());
            check(client > 0, "connect in a net");
            const unsigned rounds = size.small ? 50 : 20000;
            auto times = pinned<unsigned long long>(rounds);
            auto clocks = pinned<Clocks>(1);
            ProxyTime proxy(net);
            double begun = now();
            net.launch(two_blocks, 2, 64, net.handle, listener, client, rounds, times, clocks);
            check(cudaStreamSynchronize(net.stream) == cudaSuccess, "two blocks");
            Result("blocks", std::string("two blocks, ") + family_name(inet) + (no_upgrade ? "" : ", in device memory"))
                .times(device_times(times, rounds, *clocks))
                .number("mean_us", (now() - begun) * 1e6 / rounds)
                .number("proxy_us_a_round", proxy.spent() * 1e6 / rounds);
            net.end();
        }
}

// A socket of the net that is connected to a socket of this program.
static int connect_back(Net &net, bool inet, int &peer)
{
    Name name;
    int listener = listen_here(inet, name), s = spinio_net_connect(net.net, name.text().c_str());
    check(s > 0, "connect in a net");
    peer = accept_here(listener);
    close(listener);
    return s;
}

static void row_send(const Size &size)
{
    // Small ones inside a line are after the receive of a byte, so that all is known to be sent.
    for (unsigned ring : {64u << 10, 256u << 10})
        for (unsigned bytes : {64u, 4096u, 65536u}) {
            Net net(16, ring);
            int peer, s = connect_back(net, false, peer);
            unsigned char *buffer;
            check(cudaMalloc(&buffer, period) == cudaSuccess, "cudaMalloc");
            const unsigned rounds = size.small ? 20 : 3000;
            auto times = pinned<unsigned long long>(rounds);
            auto clocks = pinned<Clocks>(1);
            net.launch(timed_sends, 1, 1024, net.handle, s, buffer, bytes, times, clocks);
            std::vector<unsigned char> got(bytes);
            for (unsigned round = 0; round < rounds; round++) {
                check(send_all(peer, "x", 1) && receive_all(peer, got.data(), bytes), "a timed send");
                check(got[bytes / 2] == byte_at(bytes / 2) && got[bytes - 1] == byte_at(bytes - 1), "wrong bytes");
            }
            close(peer);
            check(cudaStreamSynchronize(net.stream) == cudaSuccess, "timed sends");
            Result("send", "returns after, " + std::to_string(bytes) + " bytes, ring of " + std::to_string(ring >> 10) + " KiB")
                .times(device_times(times, rounds, *clocks));
            net.end();
        }
}

static void row_idle(const Size &size)
{
    Net net;
    Name name;
    int listener = net.listener(false, name);
    net.launch(echo, 1, 64, net.handle, listener);
    int s = connect_to(name);
    round_trips(s, message, 0.05);
    std::this_thread::sleep_for(std::chrono::milliseconds(size.small ? 100 : 1000));
    double begun = now();
    ProxyTime proxy(net);
    std::this_thread::sleep_for(std::chrono::milliseconds(size.small ? 100 : 2000));
    Result("idle", "one waiting block, after a second of silence").number("cores", proxy.spent() / (now() - begun));
    const int repeats = size.small ? 2 : 10;
    auto pause = std::chrono::milliseconds(size.small ? 30 : 200);
    std::vector<double> times;
    for (int i = 0; i < repeats; i++) {
        std::this_thread::sleep_for(pause);
        char bytes[message] = {};
        double sent = now();
        check(send_all(s, bytes, sizeof bytes) && receive_all(s, bytes, sizeof bytes), "an echo after a silence");
        times.push_back((now() - sent) * 1e6);
    }
    Result("idle", "echo, first after a silence").times(times);
    close(s);

    int peer, socket = connect_back(net, false, peer);
    auto word = pinned<uint64_t>(1);
    cudaStream_t stream = new_stream();
    spinio::launch_resident_on(stream, send_on_word, 1, 32, net.handle, socket, (const uint64_t *)word);
    times.clear();
    for (int i = 1; i <= repeats; i++) {
        std::this_thread::sleep_for(pause);
        uint64_t got = 0;
        double sent = now();
        __atomic_store_n(word, uint64_t(i), __ATOMIC_RELEASE);
        check(receive_all(peer, &got, sizeof got) && got == uint64_t(i), "a send after a silence");
        times.push_back((now() - sent) * 1e6);
    }
    Result("idle", "send of a block, first after a silence").times(times);
    __atomic_store_n(word, ~uint64_t(0), __ATOMIC_RELEASE);
    check(cudaStreamSynchronize(stream) == cudaSuccess, "sends after silences");
    net.end();
}

#endif
