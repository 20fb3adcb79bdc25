// GPUnet on a real GPU: echo of 64 bytes over UNIX and TCP, kernel beside CPU, in one run. Ends by itself within 20 s.
//
//   nvcc -O2 -std=c++17 -arch=native -I device/include -I crates/capi/include tests/gpu/net.cu libspinio.so -o net && ./net
//
// Then a kernel reads and sends a file: no call of it may wait for the kernel that runs.
//
// Prints a line for each way, the middle and the 99th percentile of the round trip, and checks every byte. It is compiled by
// g++ for the emulated GPU too.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <spinio.h>
#include <spinio/file.h>
#include <spinio/net.h>
#include <spinio_net.h>

namespace net = spinio::net;
using Clock = std::chrono::steady_clock;

constexpr int message = 64, most_rounds = 20000;
constexpr unsigned blocks = 2;

__global__ void echo(net::Handle handle, int listener)
{
    __shared__ char buffer[4096];
    for (;;) {
        int s = net::accept(net::block(), handle, listener);
        if (s < 0)
            return;
        int64_t got;
        while ((got = net::recv(net::block(), handle, s, buffer, sizeof buffer)) > 0)
            if (net::send(net::block(), handle, s, buffer, size_t(got)) < 0)
                break;
        net::close(net::block(), handle, s);
    }
}

[[noreturn]] static void fail(const char *what)
{
    std::printf("FAILED: %s: %s\n", what, spinio_last_error());
    std::fflush(stdout);
    // Without exit handlers, which would wait for a kernel.
    _exit(1);
}

struct Name {
    sockaddr_storage bytes;
    socklen_t length;
};

static int listen_at(bool inet, Name &name)
{
    int s = socket(inet ? AF_INET : AF_UNIX, SOCK_STREAM, 0);
    sockaddr_in any = {};
    any.sin_family = inet ? AF_INET : AF_UNIX;
    any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(s, reinterpret_cast<sockaddr *>(&any), inet ? sizeof any : sizeof(sa_family_t)) || listen(s, 8))
        fail("listen");
    name.length = sizeof name.bytes;
    getsockname(s, reinterpret_cast<sockaddr *>(&name.bytes), &name.length);
    return s;
}

// Round trips for at most 2 s.
static void measure(const char *what, const Name &name)
{
    int s = socket(name.bytes.ss_family, SOCK_STREAM, 0), one = 1;
    timeval limit = {3, 0};
    setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    if (connect(s, reinterpret_cast<const sockaddr *>(&name.bytes), name.length))
        fail(what);
    setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    std::vector<double> times;
    auto end = Clock::now() + std::chrono::seconds(2);
    unsigned char out[message], in[message];
    for (int round = 0; round < most_rounds && Clock::now() < end; round++) {
        for (int i = 0; i < message; i++)
            out[i] = (unsigned char)(round * 31 + i);
        auto begun = Clock::now();
        if (send(s, out, message, MSG_NOSIGNAL) != message)
            fail(what);
        // Polls, so that the client's own wake-up is not what is measured.
        for (int got = 0; got < message;) {
            ssize_t part = recv(s, in + got, size_t(message - got), MSG_DONTWAIT);
            if (part == 0 || Clock::now() > end + std::chrono::seconds(2))
                fail(what);
            got += part > 0 ? int(part) : 0;
        }
        times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begun).count());
        if (std::memcmp(in, out, message))
            fail("wrong bytes");
    }
    close(s);
    std::sort(times.begin(), times.end());
    std::printf("%-28s %6zu round trips of %d bytes: p50 %7.1f us, p99 %7.1f us\n", what, times.size(), message, times[times.size() / 2],
                times[times.size() * 99 / 100]);
    std::fflush(stdout);
}

// The same echo by a thread of this program, which polls.
static void cpu_echo(int listener)
{
    int s = accept(listener, nullptr, nullptr), one = 1;
    setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    for (char bytes[4096];;) {
        ssize_t got = recv(s, bytes, sizeof bytes, MSG_DONTWAIT);
        if (got == 0)
            break;
        if (got > 0 && send(s, bytes, size_t(got), MSG_NOSIGNAL) != got)
            break;
    }
    close(s);
}

// Copies a file by pread and pwrite, and sends it.
__global__ void use_file(net::Handle handle, int s, unsigned char *memory, size_t bytes, int64_t *out)
{
    auto g = net::block();
    int from = spinio::file::open(g, handle, "from", spinio::file::RDONLY);
    int to = spinio::file::open(g, handle, "to", spinio::file::RDWR | spinio::file::CREAT);
    out[0] = spinio::file::pread(g, handle, from, memory, bytes, 0);
    out[1] = spinio::file::pwrite(g, handle, to, memory, bytes, 0);
    out[2] = net::sendfile(g, handle, s, to, 0, bytes);
    out[3] = net::close(g, handle, s);
}

static void files(cudaStream_t stream)
{
    constexpr size_t bytes = (8 << 20) + 12345;
    std::vector<unsigned char> content(bytes), got(bytes);
    for (size_t i = 0; i < bytes; i++)
        content[i] = (unsigned char)((i * 0x9e3779b97f4a7c15) >> 56);
    char directory[] = "/tmp/spinio-gpu-net-XXXXXX";
    if (!mkdtemp(directory))
        fail("mkdtemp");
    const std::string from = std::string(directory) + "/from", to = std::string(directory) + "/to";
    FILE *file = std::fopen(from.c_str(), "wb");
    if (!file || std::fwrite(content.data(), 1, bytes, file) != bytes || std::fclose(file))
        fail("write a file");
    Name name;
    int listener = listen_at(true, name);
    char where[64];
    std::snprintf(where, sizeof where, "tcp://127.0.0.1:%d", ntohs(reinterpret_cast<sockaddr_in *>(&name.bytes)->sin_port));
    struct spinio_net_options options = {};
    options.size = sizeof options;
    options.files_root = directory;
    options.files_write = 1;
    spinio_net *net = spinio_net_open(spinio::emulated ? "emulated" : nullptr, &options);
    net::Handle handle;
    int s = net ? spinio_net_connect(net, where) : -1, peer = accept(listener, nullptr, nullptr);
    unsigned char *memory;
    int64_t *out;
    if (s < 0 || peer < 0 || spinio_net_handle(net, reinterpret_cast<struct spinio_net_handle *>(&handle)) || cudaMalloc(&memory, bytes) != cudaSuccess ||
        cudaHostAlloc(&out, 4 * sizeof *out, cudaHostAllocDefault) != cudaSuccess)
        fail("open a net with files");
    auto begun = Clock::now();
    spinio::launch_resident_on(stream, use_file, 1, 256, handle, s, memory, bytes, out);
    size_t done = 0;
    for (ssize_t part; done < bytes && (part = recv(peer, got.data() + done, bytes - done, 0)) > 0;)
        done += size_t(part);
    if (cudaStreamSynchronize(stream) != cudaSuccess || done != bytes || got != content)
        fail("the bytes of a file");
    for (int i = 0; i < 3; i++)
        if (out[i] != int64_t(bytes))
            fail("pread, pwrite or sendfile");
    std::printf("%-20s %zu bytes read, written and sent in %.1f ms\n", "files", bytes, std::chrono::duration<double, std::milli>(Clock::now() - begun).count());
    if (spinio_net_stop(net) || spinio_net_close(net) || cudaFree(memory) != cudaSuccess || cudaFreeHost(out) != cudaSuccess)
        fail("close a net with files");
    close(peer);
    close(listener);
    if (unlink(from.c_str()) || unlink(to.c_str()) || rmdir(directory))
        fail("remove the files");
}

int main()
{
    std::thread([] {
        std::this_thread::sleep_for(std::chrono::seconds(20));
        fail("the watchdog ended the program after 20 s");
    }).detach();
    cudaStream_t stream;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess)
        fail("no device");
    for (bool inet : {false, true}) {
        Name name;
        int listener = listen_at(inet, name);
        std::thread echoing(cpu_echo, listener);
        measure(inet ? "CPU to CPU, TCP" : "CPU to CPU, UNIX", name);
        echoing.join();
        close(listener);

        spinio_net *net = spinio_net_open(spinio::emulated ? "emulated" : nullptr, nullptr);
        net::Handle handle;
        char where[128];
        std::snprintf(where, sizeof where, "unix:@spinio-gpu-net-%d", int(getpid()));
        int s = net ? spinio_net_listen(net, inet ? "tcp://127.0.0.1:0" : where, 8) : -1;
        if (s < 0 || spinio_net_handle(net, reinterpret_cast<struct spinio_net_handle *>(&handle)) || spinio_net_address(net, s, where, sizeof where))
            fail("open a net");
        Name server = {};
        if (inet) {
            auto address = reinterpret_cast<sockaddr_in *>(&server.bytes);
            *address = {};
            address->sin_family = AF_INET;
            address->sin_port = htons(uint16_t(std::atoi(std::strrchr(where, ':') + 1)));
            address->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
            server.length = sizeof *address;
        } else {
            auto address = reinterpret_cast<sockaddr_un *>(&server.bytes);
            address->sun_family = AF_UNIX;
            size_t length = std::strlen(where + 6);
            std::memcpy(address->sun_path + 1, where + 6, length);
            server.length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + length);
        }
        spinio::launch_resident_on(stream, echo, blocks, 64, handle, s);
        if (cudaGetLastError() != cudaSuccess)
            fail("launch");
        measure(inet ? "CPU to kernel, TCP" : "CPU to kernel, UNIX", server);
        if (spinio_net_stop(net) || cudaStreamSynchronize(stream) != cudaSuccess || spinio_net_close(net))
            fail("stop");
    }
    files(stream);
    std::printf("ok, %s\n", spinio::emulated ? "emulated GPU" : "GPU");
    return 0;
}
