// net_handshake.h: for net_handshake.cpp: the steps of the upgrade, a process that is killed or stopped after one of them, and what
// the two sides of a connection do: messages there and back.
#ifndef NET_HANDSHAKE_H
#define NET_HANDSHAKE_H

#include "net_granule.h"
#include "net_process.h"

#include <atomic>
#include <chrono>
#include <climits>
#include <memory>

// --- steps ---

// A point of crates/net/src, and whether it is one of connections of programs too.
struct Step {
    const char *name;
    bool is_of_programs = true;
};

// Not of the library: the kernel has sent its first message.
static const char *const first_bytes = "first bytes";

static const Step accepting_net[] = {
    {"accepting net: door knocked at"}, {"accepting net: announcement received"}, {"accepting net: welcome sent"},        {"accepting net: connection accepted"},
    {"accepting net: granule offered"}, {"accepting net: memory offered", false}, {"accepting net: memory received", false}, {"accepting net: agreement received"},
    {"accepting net: go sent"},         {first_bytes},
};
static const Step connecting_net[] = {
    {"connecting net: announcement sent"},  {"connecting net: welcome received"}, {"connecting net: connected"},      {"connecting net: offer received"},
    {"connecting net: granule registered"}, {"connecting net: memory received"},  {"connecting net: about to agree"}, {"connecting net: agreement sent"},
    {"connecting net: go received"},        {first_bytes},
};
static const Step program[] = {
    {"program: door knocked at"}, {"program: announcement sent"}, {"program: welcome received"}, {"program: connected"}, {"program: offer received"},
    {"program: granule mapped"},  {"program: agreement sent"},    {"program: go received"},      {first_bytes},
};

// The file by which a point is armed, as crates/sys/src/injection.rs has it.
struct Injection {
    static constexpr size_t bytes = (8 + 2 * 256) * 8;
    std::string path = "/tmp/spinio-handshake-XXXXXX", variable;
    uint64_t *words;

    Injection()
    {
        const int file = mkostemp(path.data(), O_CLOEXEC);
        CHECK(file >= 0 && !ftruncate(file, bytes));
        words = static_cast<uint64_t *>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
        close(file);
        variable = "SPINIO_INJECTION=" + path;
    }
    ~Injection()
    {
        munmap(words, bytes);
        unlink(path.c_str());
    }
    Injection(const Injection &) = delete;

    void arm(const std::string &point, int signal)
    {
        uint64_t hash = 0xcbf29ce484222325;
        for (char each : point)
            hash = (hash ^ (unsigned char)each) * 0x100000001b3;
        words[1] = 1;
        words[2] = uint64_t(signal);
        __atomic_store_n(words, hash | 1, __ATOMIC_SEQ_CST);
    }
    bool has_counted() const
    {
        bool any = false;
        for (size_t i = 8; i < bytes / 8; i++)
            any = any || words[i];
        return any;
    }
};

// --- messages ---

constexpr int64_t message = 3000, rounds = 5;
// Words of a net: what kernels count, and how they wait for the program.
constexpr int words_result = 0, words_wrong = 10, words_step = 20;

__host__ __device__ inline unsigned char byte_of(uint64_t at) { return (unsigned char)(at * 7 + (at >> 8) * 3 + (at >> 16)); }

// Gives back what comes, and compares it. With `step` it waits for the program after the first message.
__global__ void serve(net::Handle handle, int listener, int connections, uint64_t *step, int64_t *words)
{
    __shared__ unsigned char bytes[message];
    auto g = net::block();
    for (int i = 0; i < connections; i++) {
        int s = net::accept(g, handle, listener);
        if (s < 0)
            return;
        int64_t got = 0;
        for (uint64_t total = 0; (got = net::recv(g, handle, s, bytes, sizeof bytes, net::WAITALL)) > 0; total += uint64_t(got)) {
            bool right = true;
            for (int64_t k = threadIdx.x; k < got; k += blockDim.x)
                right = right && bytes[k] == byte_of(total + uint64_t(k));
            if (__syncthreads_count(!right) && threadIdx.x == 0)
                __atomic_fetch_add(words + words_wrong, 1, __ATOMIC_RELAXED);
            if (net::send(g, handle, s, bytes, size_t(got)) != got)
                break;
            if (step && total == 0)
                pass_and_wait(step, 1);
        }
        net::close(g, handle, s);
    }
}

struct Result {
    // -errno or 0; bytes that came back right, and not; what the last recv returned if not all came.
    int64_t connected = 0, right = 0, wrong = 0, last = 1;
    double seconds = 0;
    bool is_shared = false;
    char transport[128] = ""; // of a program

    bool is_whole() const { return connected == 0 && right == message * rounds && wrong == 0; }
};

// Sends messages and waits for each of them. With `step` it waits for the program after the first one is sent.
__global__ void exchange(net::Handle handle, net::Address to, uint64_t *step, Result *out)
{
    __shared__ unsigned char bytes[message];
    auto g = net::block();
    Result result;
    int s = net::socket(g, handle, to.bytes[0], net::STREAM, 0);
    result.connected = net::connect(g, handle, s, to);
    for (int64_t at = 0; !result.connected && at < message * rounds; at += message) {
        __syncthreads();
        for (int64_t i = threadIdx.x; i < message; i += blockDim.x)
            bytes[i] = byte_of(uint64_t(at + i));
        __syncthreads();
        const int64_t sent = net::send(g, handle, s, bytes, sizeof bytes);
        if (step && at == 0)
            pass_and_wait(step, 1);
        const int64_t got = net::recv(g, handle, s, bytes, sizeof bytes, net::WAITALL);
        int wrong = 0;
        for (int64_t i = threadIdx.x; i < got; i += blockDim.x)
            wrong += bytes[i] != byte_of(uint64_t(at + i));
        result.wrong += __syncthreads_count(wrong);
        result.right += got > 0 ? got : 0;
        if (sent == message && got == message)
            continue;
        // The end, also after a part of a message.
        result.last = got <= 0 ? got : net::recv(g, handle, s, bytes, sizeof bytes);
        break;
    }
    net::close(g, handle, s);
    if (g.leads())
        *out = result;
}

static double now()
{
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What a kernel waits for, if this side is to be killed or stopped after the first bytes.
struct AfterFirstBytes {
    uint64_t *step = nullptr;
    std::thread thread;

    AfterFirstBytes(Net &net, int signal)
    {
        if (!signal)
            return;
        step = reinterpret_cast<uint64_t *>(net.words + words_step);
        thread = std::thread([this, signal] {
            while (!spinio::load_acquire_system(step))
                usleep(100);
            kill(getpid(), signal);
            spinio::store_release_system(step + 1, 1);
        });
    }
    ~AfterFirstBytes()
    {
        if (thread.joinable())
            thread.join();
    }
};

static Result exchange_of_kernel(Net &net, const std::string &address, int signal = 0)
{
    const double begin = now();
    auto *out = reinterpret_cast<Result *>(net.words + words_result);
    *out = Result();
    {
        AfterFirstBytes after(net, signal);
        spinio::launch_resident_on(net.stream, exchange, 1, 32, net.handle, address_of(address), after.step, out);
        net.wait();
    }
    Result result = *out;
    result.seconds = now() - begin;
    return result;
}

static Result exchange_of_program(const std::string &address, int signal = 0)
{
    Result result;
    const double begin = now();
    struct spinio_socket_options options = {sizeof options, 0, 60000, 60000};
    spinio_socket *s = spinio_socket_connect(address.c_str(), &options);
    result.connected = s ? 0 : -errno;
    unsigned char bytes[message];
    for (int64_t at = 0; s && at < message * rounds; at += message) {
        for (int64_t i = 0; i < message; i++)
            bytes[i] = byte_of(uint64_t(at + i));
        const ssize_t sent = spinio_socket_send(s, bytes, sizeof bytes, 0);
        if (signal && at == 0)
            kill(getpid(), signal);
        const ssize_t got = spinio_socket_recv(s, bytes, sizeof bytes, MSG_WAITALL);
        const int64_t failed = got < 0 ? -errno : 0;
        for (int64_t i = 0; i < got; i++)
            result.wrong += bytes[i] != byte_of(uint64_t(at + i));
        result.right += got > 0 ? got : 0;
        if (sent == message && got == message)
            continue;
        const ssize_t last = got > 0 ? spinio_socket_recv(s, bytes, sizeof bytes, 0) : 0;
        result.last = got < 0 ? failed : last < 0 ? -errno : last;
        break;
    }
    if (s) {
        result.is_shared = is_shared(s);
        std::snprintf(result.transport, sizeof result.transport, "%s", transport_of(s).c_str());
        CHECK(!spinio_socket_close(s));
    }
    result.seconds = now() - begin;
    return result;
}

// As many connections at a time as a net has granules.
static void uses_all_granules(const std::string &address)
{
    std::vector<spinio_socket *> sockets;
    for (int i = 0; i < 4; i++)
        sockets.push_back(spinio_socket_connect(address.c_str(), nullptr));
    for (spinio_socket *s : sockets) {
        CHECK(s && is_shared(s));
        CHECK(s && !spinio_socket_close(s));
    }
}

// --- the other process ---

// What it does: one connection. `signal`: of first_bytes, to itself.
static int side_of(const std::string &side, const std::string &where, int signal)
{
    if (side == "program" || side == "shares") {
        const Result result = exchange_of_program(where, signal);
        // One that is held up for the time that a step may take does not share.
        if (!result.is_whole() || (side == "shares" && !result.is_shared)) {
            std::printf("a program: connect %lld, %lld bytes, %s, %.1f s\n", (long long)result.connected, (long long)result.right, result.transport, result.seconds);
            failures++;
        }
        return failures != 0;
    }
    if (side == "shares all") {
        uses_all_granules(where);
        return failures != 0;
    }
    Net net;
    if (side == "connects" || side == "peer") {
        CHECK(exchange_of_kernel(net, where, signal).is_whole());
        CHECK(side != "peer" || net.stats().peer == 1);
        waits_for_open(net, 0);
    } else {
        std::string address;
        const int s = listener(net, where.c_str(), address);
        AfterFirstBytes after(net, signal);
        spinio::launch_resident_on(net.stream, serve, 1, 32, net.handle, s, 1, after.step, net.words);
        say(address);
        net.wait();
        CHECK(net.words[words_wrong] == 0);
        waits_for_open(net, 1);
    }
    CHECK(net.stats().violations == 0);
    return failures != 0;
}

// It gets the signal once it has passed the step.
struct Victim {
    std::string name;
    Injection injection;
    const double begin = now();
    Child child;
    std::atomic<bool> is_stopped{false};

    Victim(const std::string &side, const std::string &where, const std::string &step, int signal)
        : name(where + ", " + step), child(arguments(side, where, step, signal), armed(step, signal))
    {
    }
    bool after_first_bytes() const { return name.rfind(first_bytes) != std::string::npos; }

    void was_killed()
    {
        is_done_in(300);
        const int status = child.ends();
        if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) {
            std::printf("%s: was not killed there, and ends with %d\n", name.c_str(), status);
            failures++;
        }
    }

    // Its end, before this process reaps it: where many processes reap others at the same time, Linux was seen to need a minute for
    // that (6.18, shrink_dcache_parent).
    void is_done_in(double seconds)
    {
        while (!child.hear().empty()) {
        }
        if (now() - begin > seconds) {
            std::printf("%s: ends after %.1f s\n", name.c_str(), now() - begin);
            failures++;
        }
    }

    void goes_on_after(double seconds)
    {
        int status = 0;
        CHECK(waitpid(child.pid, &status, WUNTRACED) == child.pid);
        if (!WIFSTOPPED(status)) {
            std::printf("%s: was not stopped there, and ends with %d\n", name.c_str(), status);
            std::fflush(stdout);
            // The others wait for it.
            _exit(1);
        }
        is_stopped = true;
        usleep(useconds_t(seconds * 1e6));
        is_stopped = false;
        CHECK(!kill(child.pid, SIGCONT));
    }

private:
    static std::vector<std::string> arguments(const std::string &side, const std::string &where, const std::string &step, int signal)
    {
        return {"--side", side, where, std::to_string(step == first_bytes ? signal : 0)};
    }
    const char *armed(const std::string &step, int signal)
    {
        if (signal && step != first_bytes)
            injection.arm(step, signal);
        return injection.variable.c_str();
    }
};

// Whether the library counts points, which a process does that connects.
static bool has_points()
{
    std::string address;
    Net net;
    const int s = listener(net, "tcp://127.0.0.1:0", address);
    spinio::launch_resident_on(net.stream, serve, 1, 32, net.handle, s, 1, static_cast<uint64_t *>(nullptr), net.words);
    Victim other("program", address, "", 0);
    CHECK(other.child.ends() == 0);
    net.wait();
    return other.injection.has_counted();
}

// --- what is left ---

// Of the tables that proxies have of their own.
static size_t descriptors_of_proxies()
{
    size_t count = 0;
    DIR *tasks = opendir("/proc/self/task");
    while (dirent *entry = tasks ? readdir(tasks) : nullptr) {
        const std::string task = std::string("/proc/self/task/") + entry->d_name;
        char name[32] = {};
        const int file = open((task + "/comm").c_str(), O_RDONLY | O_CLOEXEC);
        if (file < 0)
            continue;
        if (read(file, name, sizeof name - 1) > 0 && !std::strcmp(name, "spinio-net\n"))
            count += entries(task + "/fd", "");
        close(file);
    }
    closedir(tasks);
    return count;
}

#endif
