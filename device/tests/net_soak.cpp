// The soak of kernels' sockets: connections that are made, used, broken and killed, for any duration.
//
//   net_soak SECONDS [SEED]
//
//   client threads, client processes ── chunks of 4 KiB with a CRC32C ──> blocks of a kernel, by an event set
//     (some are killed in between)  <── each byte changed, with its own CRC32C ──┘
//     through Linux, as programs that share memory (spinio_socket_...), or as kernels of another net
//   another kernel ── connects, sends chunks, gets them back ──> an echo of this program
//
// In rounds, each with nets of its own, whose memory, descriptors, granules and ports must be free afterwards. It fails if a chunk
// is wrong, a connection hangs, or something is left. `cargo x net-soak` runs it, plain or under a sanitizer.
#include "net_test.h"

#include <atomic>
#include <chrono>

#include <spawn.h>
#include <sys/prctl.h>

constexpr size_t chunk_bytes = 4096;

__host__ __device__ inline unsigned crc32c(const unsigned char *bytes, size_t count)
{
    unsigned crc = ~0u;
    for (size_t i = 0; i < count; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

__host__ __device__ inline unsigned stored(const unsigned char *chunk)
{
    return chunk[0] | unsigned(chunk[1]) << 8 | unsigned(chunk[2]) << 16 | unsigned(chunk[3]) << 24;
}

__host__ __device__ inline void seal(unsigned char *chunk)
{
    unsigned crc = crc32c(chunk + 4, chunk_bytes - 4);
    for (int i = 0; i < 4; i++)
        chunk[i] = (unsigned char)(crc >> (8 * i));
}

__host__ __device__ inline bool is_right(const unsigned char *chunk) { return stored(chunk) == crc32c(chunk + 4, chunk_bytes - 4); }

// What the kernels count.
enum Count { served, wrong, sent_out, quit };

__device__ inline void count(int64_t *words, Count which)
{
    if (threadIdx.x == 0)
        atomicAdd(reinterpret_cast<unsigned long long *>(words + which), 1ull);
}

// Whether the chunk in `buffer` is right, for all threads. Changes each byte of it and seals it again.
__device__ inline bool check_and_answer(unsigned char *buffer)
{
    __shared__ bool right;
    if (threadIdx.x == 0)
        right = is_right(buffer);
    __syncthreads();
    for (size_t i = 4 + threadIdx.x; i < chunk_bytes; i += blockDim.x)
        buffer[i] ^= 0x5a;
    __syncthreads();
    bool was_right = right;
    if (threadIdx.x == 0)
        seal(buffer);
    __syncthreads();
    return was_right;
}

__global__ void serve(net::Handle handle, int set, int64_t *words)
{
    __shared__ net::Ready ready;
    __shared__ unsigned char buffer[chunk_bytes];
    auto g = net::block();
    while (net::wait(g, handle, set, &ready, 1, -1) > 0) {
        int s = ready.s;
        if (ready.events & net::NEW)
            net::set_timeout(g, handle, s, 20000000000, 20000000000);
        int64_t got = net::recv(g, handle, s, buffer, chunk_bytes, ready.events & net::NEW ? net::DONTWAIT | net::PEEK : net::WAITALL);
        bool on = ready.events & net::NEW ? got > 0 || got == -EAGAIN : got == int64_t(chunk_bytes);
        if (on && !(ready.events & net::NEW)) {
            count(words, served);
            if (!check_and_answer(buffer))
                count(words, wrong);
            on = net::send(g, handle, s, buffer, chunk_bytes) == int64_t(chunk_bytes);
        }
        if (on)
            net::rearm(g, handle, s);
        else
            net::close(g, handle, s);
        __syncthreads();
    }
}

// Connects again and again, and gets back what it sends, with these bits of each byte changed.
__global__ void call_out(net::Handle handle, net::Address address, unsigned char changed, int64_t *words)
{
    __shared__ unsigned char out[chunk_bytes], in[chunk_bytes];
    auto g = net::block();
    for (unsigned turn = blockIdx.x;; turn += 7) {
        if (spinio::load_acquire_system(reinterpret_cast<const uint64_t *>(words + quit)))
            return;
        int s = net::socket(g, handle, address.bytes[0], net::STREAM, 0);
        if (net::connect(g, handle, s, address) == 0)
            for (unsigned i = 0; i < turn % 5 + 1; i++) {
                for (size_t k = 4 + threadIdx.x; k < chunk_bytes; k += blockDim.x)
                    out[k] = (unsigned char)(k * turn + i);
                __syncthreads();
                if (threadIdx.x == 0)
                    seal(out);
                __syncthreads();
                int64_t sent = net::send(g, handle, s, out, chunk_bytes), got = net::recv(g, handle, s, in, chunk_bytes, net::WAITALL);
                bool same = sent == int64_t(chunk_bytes) && got == sent && (threadIdx.x || is_right(in));
                for (size_t k = 4 + threadIdx.x; k < chunk_bytes; k += blockDim.x)
                    same = same && in[k] == (out[k] ^ changed);
                count(words, sent_out);
                if (!__syncthreads_count(!same))
                    continue;
                count(words, wrong);
            }
        else
            count(words, wrong);
        net::close(g, handle, s);
    }
}

static unsigned next_random(unsigned &seed, unsigned below)
{
    seed = seed * 1664525 + 1013904223;
    return (seed >> 8) % below;
}

static bool move_all(int s, unsigned char *bytes, size_t count, bool out, spinio_socket *shared = nullptr)
{
    for (size_t done = 0; done < count;) {
        ssize_t part = shared ? out ? spinio_socket_send(shared, bytes + done, count - done, 0) : spinio_socket_recv(shared, bytes + done, count - done, 0)
                       : out  ? send(s, bytes + done, count - done, MSG_NOSIGNAL)
                              : recv(s, bytes + done, count - done, 0);
        if (part <= 0 && errno != EINTR)
            return false;
        done += part > 0 ? size_t(part) : 0;
    }
    return true;
}

// One connection, through Linux or over shared memory, which ends in one of several ways. Returns whether all that came was right.
static bool use_connection(const std::string &address, unsigned &seed, bool shares)
{
    struct spinio_socket_options options = {sizeof options, 0, 60000, 60000};
    spinio_socket *shared = shares ? spinio_socket_connect(address.c_str(), &options) : nullptr;
    CHECK(shared || !shares);
    if (shares && !shared)
        return false;
    int s = shares ? spinio_socket_fd(shared) : connect_to(address);
    unsigned chunks = 1 + next_random(seed, 12), at_once = 1 + next_random(seed, 4), ending = next_random(seed, 5);
    if (shared)
        // Neither side has more room than a ring: with more on their way both would wait for room.
        at_once = std::min(at_once, 2u);
    unsigned char chunk[chunk_bytes];
    bool right = true;
    for (unsigned i = 0; right && i < chunks; i++) {
        const unsigned first = seed;
        for (unsigned k = 0; k < at_once; k++) {
            for (size_t b = 4; b < chunk_bytes; b++)
                chunk[b] = (unsigned char)(next_random(seed, 256));
            seal(chunk);
            right = move_all(s, chunk, chunk_bytes, true, shared) && right;
        }
        unsigned again = first;
        for (unsigned k = 0; right && k < at_once; k++) {
            right = move_all(s, chunk, chunk_bytes, false, shared);
            if (!right)
                std::printf("chunk %u of %u does not come back: %s\n", i, chunks, std::strerror(errno));
            right = right && is_right(chunk);
            for (size_t b = 4; b < chunk_bytes; b++)
                right = (chunk[b] ^ 0x5a) == (unsigned char)(next_random(again, 256)) && right;
        }
    }
    if (ending == 1 && !shared) {
        linger none = {1, 0};
        setsockopt(s, SOL_SOCKET, SO_LINGER, &none, sizeof none);
    } else if (ending == 2) {
        // It goes without its answer.
        right = move_all(s, chunk, chunk_bytes, true, shared) && right;
    } else if (ending == 3) {
        // A part of a chunk.
        right = move_all(s, chunk, 1000, true, shared) && right;
        usleep(next_random(seed, 20000));
    } else if (ending == 4) {
        shared ? spinio_socket_shutdown(shared, SHUT_WR) : shutdown(s, SHUT_WR);
        right = (shared ? spinio_socket_recv(shared, chunk, 1, 0) : recv(s, chunk, 1, 0)) == 0 && right;
    }
    shared ? spinio_socket_close(shared) : close(s);
    return right;
}

static size_t entries(const char *folder)
{
    size_t count = 0;
    DIR *dir = opendir(folder);
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

// A process that uses connections until it is killed: --client, --shares or --net.
static pid_t start_client(const char *how, const std::string &address, unsigned seed)
{
    std::string number = std::to_string(seed);
    char *const arguments[] = {const_cast<char *>("net_soak"), const_cast<char *>(how), const_cast<char *>(address.c_str()), number.data(), nullptr};
    pid_t pid = -1;
    CHECK(!posix_spawn(&pid, "/proc/self/exe", nullptr, nullptr, arguments, environ));
    return pid;
}

struct Totals {
    std::atomic<uint64_t> connections{0}, killed{0};
    uint64_t served = 0, sent_out = 0, shared = 0, peer = 0;
};

static int echo_of_program(std::string &address)
{
    sockaddr_in any;
    int s = listening_socket(any, 16);
    address = std::to_string(ntohs(any.sin_port));
    return s;
}

// A quarter of the connections can have one at a time; those of processes that were killed are for this one now.
static void all_granules_are_free(const std::string &address)
{
    std::vector<spinio_socket *> sockets;
    char text[128] = "";
    // The proxy hears a little later of the last ones that were closed.
    for (int tries = 0; sockets.size() < 12 && tries < 5000; tries++) {
        spinio_socket *s = spinio_socket_connect(address.c_str(), nullptr);
        CHECK(s && spinio_socket_transport(s, text, sizeof text) >= 0);
        if (s && !std::strncmp(text, "shared: ", 8)) {
            sockets.push_back(s);
        } else {
            CHECK(s && !spinio_socket_close(s));
            usleep(1000);
        }
    }
    if (sockets.size() < 12) {
        std::printf("%zu of 12 granules are free: %s\n", sockets.size(), text);
        failures++;
    }
    for (spinio_socket *s : sockets)
        CHECK(s && !spinio_socket_close(s));
}

// What such a process does.
[[noreturn]] static void use_until_killed(const std::string &how, const std::string &address, unsigned seed)
{
    // Also if the supervisor dies.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (how == "--net") {
        Net net({.ring_bytes = 8192u});
        spinio::launch_resident_on(net.stream, call_out, 2, 64, net.handle, address_of(address), 0x5a, net.words);
        net.wait();
    }
    for (;;)
        use_connection(address, seed, how == "--shares");
}

static void round_of(double seconds, unsigned seed, Totals &totals)
{
    auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    auto on = [&] { return std::chrono::steady_clock::now() < end && !failures; };
    std::string tcp, local, port;
    int echoing = echo_of_program(port);
    {
        Net net({.connections = 48, .sockets = 128, .ring_bytes = seed % 2 ? 4096u : 16384u, .fault_seed = seed % 3 ? 0 : seed, .threads = seed % 4 + 1});
        int a = listener(net, "tcp://127.0.0.1:0", tcp), b = listener(net, ("unix:@spinio-soak-" + std::to_string(getpid())).c_str(), local);
        int set = spinio_net_set(net.net);
        CHECK(!spinio_net_add(net.net, set, a, net::IN) && !spinio_net_add(net.net, set, b, net::IN));
        cudaStream_t out;
        CHECK(cudaStreamCreateWithFlags(&out, cudaStreamNonBlocking) == cudaSuccess);
        spinio::launch_resident_on(net.stream, serve, 4, 64, net.handle, set, net.words);
        spinio::launch_resident_on(out, call_out, 2, 64, net.handle, net::Address::inet(127, 0, 0, 1, unsigned(std::stoi(port))), 0, net.words);
        Net other({.connections = 48, .sockets = 128, .ring_bytes = 8192u});
        spinio::launch_resident_on(other.stream, call_out, 2, 64, other.handle, address_of(seed % 2 ? tcp : local), 0x5a, other.words);
        std::vector<std::thread> threads;
        for (unsigned i = 0; i < 6; i++)
            threads.emplace_back([&, i] {
                for (unsigned own = seed * 16 + i; on(); totals.connections++)
                    CHECK(use_connection(i % 2 ? tcp : local, own, i < 2));
            });
        threads.emplace_back([&] {
            for (unsigned own = seed; on(); totals.killed++) {
                const char *const how[] = {"--client", "--shares", "--net"};
                const bool by_tcp = next_random(own, 2);
                pid_t pid = start_client(how[next_random(own, 3)], by_tcp ? tcp : local, own);
                usleep(20000 + next_random(own, 200000));
                CHECK(!kill(pid, SIGKILL) && waitpid(pid, nullptr, 0) == pid);
            }
        });
        std::thread echo([&] {
            for (int s; (s = accept(echoing, nullptr, nullptr)) >= 0; close(s)) {
                unsigned char bytes[5000];
                for (ssize_t got; (got = recv(s, bytes, sizeof bytes, 0)) > 0;)
                    if (!move_all(s, bytes, size_t(got), true))
                        break;
            }
        });
        for (std::thread &thread : threads)
            thread.join();
        __atomic_store_n(net.words + quit, 1, __ATOMIC_RELEASE);
        CHECK(cudaStreamSynchronize(out) == cudaSuccess);
        cudaStreamDestroy(out);
        __atomic_store_n(other.words + quit, 1, __ATOMIC_RELEASE);
        other.wait();
        CHECK(other.words[wrong] == 0 && other.words[sent_out] > 0 && other.stats().violations == 0);
        totals.peer += other.stats().peer;
        // All connections end; the listening sockets stay.
        for (int i = 0; i < 60000 && net.stats().open != 2; i++)
            usleep(1000);
        const struct spinio_net_stats left = net.stats();
        if (left.open != 2 || left.violations) {
            std::printf("%llu descriptors are open and not 2, %llu violations\n", (unsigned long long)left.open, (unsigned long long)left.violations);
            failures++;
        }
        totals.shared += left.shared;
        all_granules_are_free(tcp);
        CHECK(!spinio_net_stop(net.net));
        net.wait();
        CHECK(net.words[wrong] == 0 && net.words[served] > 0 && net.words[sent_out] > 0);
        totals.served += uint64_t(net.words[served]);
        totals.sent_out += uint64_t(net.words[sent_out]);
        shutdown(echoing, SHUT_RDWR);
        echo.join();
        close(echoing);
    }
    // The ports are free.
    Net other;
    CHECK(spinio_net_listen(other.net, tcp.c_str(), 1) > 0 && spinio_net_listen(other.net, local.c_str(), 1) > 0);
}

int main(int arguments, char **argument)
{
    if (arguments > 3 && argument[1][0] == '-')
        use_until_killed(argument[1], argument[2], unsigned(std::atoi(argument[3])));
    const double seconds = arguments > 1 ? std::atof(argument[1]) : 2;
    const unsigned seed = arguments > 2 ? unsigned(std::atoi(argument[2])) : 1;
    const unsigned rounds = std::max(3u, unsigned(seconds / 20));
    Totals totals;
    size_t descriptors = 0;
    long first_kib = 0;
    for (unsigned i = 0; i < rounds && !failures; i++) {
        round_of(seconds / rounds, seed + i, totals);
        // The first rounds make what stays: threads, streams, arenas of malloc.
        if (i == 1) {
            descriptors = entries("/proc/self/fd");
            first_kib = resident_kib();
        }
        if (failures)
            std::printf("in the round of seed %u\n", seed + i);
    }
    CHECK(entries("/proc/self/fd") == descriptors);
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
    const long grown = resident_kib() - first_kib;
    if (grown > 48 * 1024) {
        std::printf("%ld KiB more than after two rounds\n", grown);
        failures++;
    }
#endif
    CHECK(totals.shared > 0 && totals.peer > 0);
    std::printf("%llu connections in shared memory, and %llu of another net here in device memory\n", (unsigned long long)totals.shared, (unsigned long long)totals.peer);
    std::printf("%llu chunks of 4 KiB served and %llu sent over %llu connections and %llu killed clients, %u nets; %ld KiB at first, %ld KiB at the end\n",
                (unsigned long long)totals.served, (unsigned long long)totals.sent_out, (unsigned long long)totals.connections.load(),
                (unsigned long long)totals.killed.load(), rounds, first_kib, resident_kib());
    std::printf("%d failures\n", failures);
    return failures != 0;
}
