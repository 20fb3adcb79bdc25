// zmq.h: ZeroMQ as a peer, for the rows of latency.h: its library is opened at run time, so nothing has to be installed.
//
// GPUNET_ZMQ names the library; pyzmq's wheel has one in pyzmq.libs/. Without it the rows are left out, and a line says so.
#ifndef GPUNET_ZMQ_H
#define GPUNET_ZMQ_H

#include <dlfcn.h>

#include "host.h"

// The part of its interface that an echo needs: sockets PAIR, blocking.
struct Zmq {
    void *(*ctx_new)();
    int (*ctx_term)(void *);
    void *(*socket)(void *, int);
    int (*bind)(void *, const char *), (*connect)(void *, const char *), (*close)(void *);
    int (*send)(void *, const void *, size_t, int), (*recv)(void *, void *, size_t, int);

    bool load(const char *path)
    {
        void *library = dlopen(path, RTLD_NOW);
        auto find = [&](auto &function, const char *name) {
            function = reinterpret_cast<std::decay_t<decltype(function)>>(library ? dlsym(library, name) : nullptr);
            return function != nullptr;
        };
        return find(ctx_new, "zmq_ctx_new") && find(ctx_term, "zmq_ctx_term") && find(socket, "zmq_socket") && find(bind, "zmq_bind") &&
               find(connect, "zmq_connect") && find(close, "zmq_close") && find(send, "zmq_send") && find(recv, "zmq_recv");
    }
};

constexpr int zmq_pair = 0;

// Echo of messages, CPU to CPU, and with `process` on the way: what a program with ZeroMQ does with a GPU.
template <typename Process>
static void zmq_rows(const char *row, int bytes, double limit, Process process)
{
    const char *path = std::getenv("GPUNET_ZMQ");
    Zmq zmq;
    if (!path || !zmq.load(path)) {
        Result(row, std::string("no ZeroMQ: ") + (path ? "its library cannot be opened" : "GPUNET_ZMQ does not name its library"));
        return;
    }
    for (bool naive : {false, true})
        for (bool inet : {false, true}) {
            std::string address = inet ? "tcp://127.0.0.1:" + std::to_string(20000 + getpid() % 20000) : "ipc://@spinio-bench-zmq-" + std::to_string(getpid());
            void *context = zmq.ctx_new(), *server = zmq.socket(context, zmq_pair), *client = zmq.socket(context, zmq_pair);
            check(!zmq.bind(server, address.c_str()) && !zmq.connect(client, address.c_str()), "ZeroMQ");
            std::thread serving([&] {
                std::vector<char> buffer(size_t(bytes) + 1);
                for (int got; (got = zmq.recv(server, buffer.data(), buffer.size(), 0)) == bytes;)
                    if ((naive && !process(buffer.data(), size_t(bytes))) || zmq.send(server, buffer.data(), size_t(bytes), 0) != bytes)
                        break;
            });
            std::vector<double> times;
            std::vector<char> out(size_t(bytes), 'a'), in(size_t(bytes), 0);
            const double cpu = process_cpu();
            for (double end = now() + limit, begun; (begun = now()) < end;) {
                out[0]++;
                if (zmq.send(client, out.data(), out.size(), 0) != bytes || zmq.recv(client, in.data(), in.size(), 0) != bytes || in != out)
                    break;
                times.push_back((now() - begun) * 1e6);
            }
            const double used = process_cpu() - cpu;
            zmq.send(client, "", 0, 0);
            serving.join();
            zmq.close(client);
            zmq.close(server);
            zmq.ctx_term(context);
            Result(row, std::string("peer: ZeroMQ, ") + (naive ? "copy, launch, copy, " : "CPU to CPU, ") + (inet ? "TCP" : "UNIX"))
                .times(times)
                .number("process_us_a_message", used * 1e6 / double(std::max<size_t>(1, times.size())));
        }
}

#endif
