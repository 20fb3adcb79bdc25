// grpc.h: gRPC as a peer, the row `grpc` of gpunet.cu. Two libraries, since programs with a GPU use either; both are in the same run:
//
//   gRPC for C++        a library (grpc_peer.cpp) that is opened at run time, named by GPUNET_GRPC; server and client in this process
//   grpcio of Python    a program (grpc_peer.py), named by GPUNET_GRPC_PYTHON, which prints its results
//
// Without them the rows are left out, and a line says so.
#ifndef GPUNET_GRPC_H
#define GPUNET_GRPC_H

#include <dlfcn.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <csignal>

#include "latency.h"

// What a server does with a message that a GPU is to see; whether that went well.
using GrpcProcess = int (*)(void *context, void *bytes, size_t count);

// The functions of grpc_peer.cpp.
struct Grpc {
    const char *(*version)();
    void *(*open)(const char *, GrpcProcess, void *);
    long (*unary)(void *, const void *, void *, size_t), (*read)(void *, void *, size_t);
    bool (*begin)(void *, const char *), (*write)(void *, const void *, size_t), (*end)(void *, void *, size_t);
    void (*close)(void *);

    // Why it cannot be used, "" if it can.
    std::string load(const char *path)
    {
        void *library = dlopen(path, RTLD_NOW);
        if (!library)
            return dlerror();
        auto find = [&](auto &function, const char *name) {
            function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
            return function != nullptr;
        };
        const bool complete = find(version, "grpc_peer_version") && find(open, "grpc_peer_open") && find(unary, "grpc_peer_unary") &&
                              find(begin, "grpc_peer_begin") && find(write, "grpc_peer_write") && find(read, "grpc_peer_read") &&
                              find(end, "grpc_peer_end") && find(close, "grpc_peer_close");
        return complete ? "" : "it has not all functions";
    }
};

// Messages there and back, by a call each or in one call.
static void grpc_round_trips(const Grpc &grpc, void *peer, bool stream, const std::string &what, double limit)
{
    std::vector<double> times;
    std::vector<char> out(message, 'a'), in(message, 0);
    check(!stream || grpc.begin(peer, "/stream"), "begin a stream of gRPC");
    const double cpu = process_cpu();
    for (double end = now() + limit, begun; (begun = now()) < end;) {
        out[0]++;
        check(!stream || grpc.write(peer, out.data(), message), "a message of a stream of gRPC");
        const long got = stream ? grpc.read(peer, in.data(), message) : grpc.unary(peer, out.data(), in.data(), message);
        check(got == message && in == out, "a round trip of gRPC");
        times.push_back((now() - begun) * 1e6);
    }
    const double used = process_cpu() - cpu;
    check(!stream || grpc.end(peer, nullptr, 0), "end a stream of gRPC");
    const double count = double(times.size());
    // The first ones find cold caches, as in round_trips().
    times.erase(times.begin(), times.begin() + std::ptrdiff_t(std::min<size_t>(times.size() / 10, 100)));
    Result("grpc", what + (stream ? ", stream" : ", unary") + ", 64 bytes").times(times).number("process_us_a_message", used * 1e6 / count);
}

// A stream of messages one way.
static void grpc_one_way(const Grpc &grpc, void *peer, size_t bytes, const std::string &what, double limit)
{
    const std::vector<char> out(bytes, 'a');
    uint64_t sent = 0, taken = 0;
    const double begun = now(), cpu = process_cpu();
    check(grpc.begin(peer, "/take"), "begin a stream of gRPC");
    for (; now() < begun + limit; sent += bytes)
        check(grpc.write(peer, out.data(), bytes), "a message of a stream of gRPC");
    check(grpc.end(peer, &taken, sizeof taken) && taken == sent, "a stream of gRPC that lost bytes");
    Result("grpc", what + ", one way, messages of " + std::to_string(bytes >> 10) + " KiB")
        .number("GB_s", double(sent) / (now() - begun) * 1e-9)
        .number("process_s_a_GB", (process_cpu() - cpu) / (double(sent) * 1e-9));
}

static void grpc_of_cpp(const Size &size)
{
    Grpc grpc = {};
    const char *path = std::getenv("GPUNET_GRPC");
    const std::string why = path ? grpc.load(path) : "GPUNET_GRPC does not name its library";
    if (!why.empty()) {
        Result("grpc", "no gRPC for C++: " + why);
        return;
    }
    NaiveWay way;
    const GrpcProcess process = [](void *context, void *bytes, size_t count) -> int {
        return static_cast<NaiveWay *>(context)->process(bytes, count);
    };
    for (bool naive : {false, true})
        for (bool inet : {false, true}) {
            // No name is used twice: the server of the last one may still close.
            const std::string name = "unix-abstract:spinio-bench-grpc-" + std::to_string(getpid()) + (naive ? "-gpu" : "");
            const std::string address = inet ? "127.0.0.1:0" : name;
            void *peer = grpc.open(address.c_str(), naive ? process : nullptr, &way);
            check(peer != nullptr, "open a server of gRPC");
            const std::string work = naive ? "copy, launch, copy, " : "CPU to CPU, ";
            const std::string what = std::string("peer: gRPC ") + grpc.version() + " (C++), " + work + family_name(inet);
            for (bool stream : {false, true})
                grpc_round_trips(grpc, peer, stream, what, size.seconds);
            for (size_t bytes : {size_t(64 << 10), size_t(1 << 20)})
                if (!naive)
                    grpc_one_way(grpc, peer, bytes, what, size.seconds / 2);
            grpc.close(peer);
        }
}

static void grpc_of_python(const Size &size)
{
    const char *program = std::getenv("GPUNET_GRPC_PYTHON");
    if (!program) {
        Result("grpc", "no gRPC of Python: GPUNET_GRPC_PYTHON does not name its program");
        return;
    }
    const std::string seconds = std::to_string(size.seconds);
    const pid_t child = fork();
    if (child == 0) {
        // It has the pipe of this row: it must not outlive the row.
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        execlp("python3", "python3", program, "--seconds", seconds.c_str(), nullptr);
        _exit(127);
    }
    int status = 0;
    check(child > 0 && waitpid(child, &status, 0) == child && status == 0, "the program with grpcio");
}

static void row_grpc(const Size &size)
{
    grpc_of_cpp(size);
    grpc_of_python(size);
}

#endif
