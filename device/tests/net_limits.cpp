// Where sockets of kernels end: few descriptors, little memory of the process and of the device, and a stop while blocks wait in
// every kind of call. In each a true error in bounded time, and nothing left. Prints each failure and exits with 1.
#include "net_process.h"

#include <sys/resource.h>

#include <spinio/file.h>

static void echo_works(Net &net)
{
    std::string address;
    int s = listener(net, "tcp://127.0.0.1:0", address);
    spinio::launch_resident_on(net.stream, echo_some, 1, 32, net.handle, s, 1, net.words);
    int peer = connect_to(address);
    round_trip(peer, 10000, 1);
    close(peer);
    net.wait();
    waits_for_open(net, 1);
}

// Each number of descriptors gives a net that works, or EMFILE with a sentence.
static void few_descriptors_are_an_error_or_enough()
{
    NothingLeft nothing(__func__);
    rlimit before;
    CHECK(!getrlimit(RLIMIT_NOFILE, &before));
    int opened = 0, listening = 0;
    for (rlim_t limit = 0; limit < 6; limit++) {
        rlimit few = {limit, before.rlim_max};
        CHECK(!setrlimit(RLIMIT_NOFILE, &few));
        spinio_net *net = spinio_net_open("emulated", nullptr);
        // The memory of the emulated device is a file, too: its driver fails with this code.
        CHECK(net || errno == EMFILE || (errno == EIO && std::strstr(spinio_last_error(), ("code " + std::to_string(EMFILE)).c_str())));
        int s = net ? spinio_net_listen(net, "tcp://127.0.0.1:0", 1) : -1;
        CHECK(!net || s > 0 || (errno == EMFILE && *spinio_last_error()));
        opened += net != nullptr;
        listening += s > 0;
        CHECK(!net || !spinio_net_close(net));
        CHECK(!setrlimit(RLIMIT_NOFILE, &before));
    }
    // With 0 and 1 not, with 5 they are enough.
    CHECK(opened > 0 && opened < 6 && listening > 0 && listening < opened);
}

static size_t pages_of_process()
{
    unsigned long pages = 0;
    FILE *file = std::fopen("/proc/self/statm", "re");
    CHECK(file && std::fscanf(file, "%lu", &pages) == 1);
    std::fclose(file);
    return pages;
}

// Pinned memory that cannot be had is ENOMEM; what may not be locked is no obstacle to the emulated device.
static void little_memory_is_an_error_or_enough()
{
    NothingLeft nothing(__func__);
    rlimit before, less, none = {0, 0};
    struct spinio_net_options options = {};
    options.size = sizeof options;
    options.connections = 128;
    options.ring_bytes = 4 << 20;
    CHECK(!getrlimit(RLIMIT_AS, &before));
    for (int i = 0; i < 5; i++) {
        less = {rlim_t(pages_of_process()) * 4096 + (256 << 20), before.rlim_max};
        CHECK(!setrlimit(RLIMIT_AS, &less));
        spinio_net *net = spinio_net_open("emulated", &options);
        CHECK(!net && errno == ENOMEM && *spinio_last_error());
        CHECK(!setrlimit(RLIMIT_AS, &before));
    }
    CHECK(!getrlimit(RLIMIT_MEMLOCK, &before));
    none.rlim_max = before.rlim_max;
    CHECK(!setrlimit(RLIMIT_MEMLOCK, &none));
    {
        Net net;
        echo_works(net);
    }
    CHECK(!setrlimit(RLIMIT_MEMLOCK, &before));
}

// Nets until the device has no memory left: as many again after they were closed.
static void device_without_memory()
{
    size_t first = 0;
    for (int turn = 0; turn < 3; turn++) {
        std::vector<spinio_net *> nets;
        while (spinio_net *net = spinio_net_open("emulated", nullptr))
            nets.push_back(net);
        CHECK(errno == ENOMEM && *spinio_last_error() && !nets.empty());
        first = turn ? first : nets.size();
        CHECK(nets.size() == first);
        for (spinio_net *net : nets)
            CHECK(!spinio_net_close(net));
    }
}

static void device_memory_comes_back()
{
    Child child({"--small-device"}, "SPINIO_EMULATED=size=96M");
    CHECK(child.ends() == 0);
}

struct Waits {
    int accepts, silent, also_silent, full, set, datagrams, sender, blocked_file;
    net::Address backlog, queue, inner;
    int inner_listener;
};

constexpr int file_is_open = 100;

// Each block waits in another call.
__global__ void wait_in_every_call(net::Handle handle, Waits waits, int64_t *out)
{
    __shared__ char bytes[1024];
    __shared__ net::Poll polls[1];
    __shared__ net::Ready ready;
    auto g = net::block();
    int64_t result = 1;
    switch (blockIdx.x) {
    case 0: result = net::accept(g, handle, waits.accepts); break;
    case 1: result = net::recv(g, handle, waits.silent, bytes, 1); break;
    case 2: result = net::recv(g, handle, waits.silent, bytes, 1); break; // for the lock
    case 3: result = net::recv(g, handle, waits.also_silent, bytes, sizeof bytes, net::WAITALL); break;
    case 4:
        while ((result = net::send(g, handle, waits.full, bytes, sizeof bytes)) > 0) {
        }
        break;
    case 5: {
        // Of two, since one may have a place.
        for (int i = 0; i < 3 && result >= 0; i++) {
            int s = net::socket(g, handle, net::UNIX, net::STREAM, 0);
            result = s < 0 ? s : net::connect(g, handle, s, waits.backlog);
        }
        break;
    }
    case 6: result = net::wait(g, handle, waits.set, &ready, 1, -1); break;
    case 7:
        polls[0] = {waits.also_silent, net::IN, 0, 0, 0};
        __syncthreads();
        result = net::poll(g, handle, polls, 1, -1);
        break;
    case 8: result = net::recvfrom(g, handle, waits.datagrams, bytes, sizeof bytes, 0, nullptr); break;
    case 9:
        while ((result = net::sendto(g, handle, waits.sender, bytes, sizeof bytes, 0, waits.queue)) > 0) {
        }
        break;
    case 10: {
        int f = spinio::file::open(g, handle, "f", spinio::file::RDONLY);
        if (g.leads())
            spinio::store_release_system(reinterpret_cast<uint64_t *>(out + file_is_open), 1);
        while ((result = net::sendfile(g, handle, waits.blocked_file, f, 0, size_t(1) << 20)) > 0) {
        }
        break;
    }
    case 11: {
        int s = net::socket(g, handle, net::UNIX, net::STREAM, 0);
        result = net::connect(g, handle, s, waits.inner);
        while (result >= 0)
            result = net::send(g, handle, s, bytes, sizeof bytes);
        break;
    }
    case 12: {
        int s = net::socket(g, handle, net::UNIX, net::STREAM, 0);
        result = net::connect(g, handle, s, waits.inner);
        if (result >= 0)
            result = net::recv(g, handle, s, bytes, 1);
        break;
    }
    case 13:
        do
            result = net::accept(g, handle, waits.inner_listener);
        while (result >= 0);
        break;
    }
    if (g.leads())
        spinio::store_release_system(reinterpret_cast<uint64_t *>(out + blockIdx.x), uint64_t(result));
}

static void stop_ends_every_kind_of_call()
{
    NothingLeft nothing(__func__);
    char folder[] = "/tmp/spinio-net-XXXXXX";
    CHECK(mkdtemp(folder) != nullptr);
    const std::string file = std::string(folder) + "/f";
    int f = open(file.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0644);
    CHECK(f >= 0 && !ftruncate(f, 1 << 20));
    close(f);
    const std::string own = std::to_string(getpid());
    auto listens = [](const std::string &name, int type, int backlog) {
        sockaddr_un address = {};
        address.sun_family = AF_UNIX;
        std::memcpy(address.sun_path + 1, name.data(), name.size());
        int s = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);
        CHECK(!bind(s, reinterpret_cast<sockaddr *>(&address), socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size())));
        CHECK(type == SOCK_DGRAM || !listen(s, backlog));
        return s;
    };
    int peer = listens("spinio-silent-" + own, SOCK_STREAM, 8), narrow = listens("spinio-narrow-" + own, SOCK_STREAM, 0);
    int queue = listens("spinio-queue-" + own, SOCK_DGRAM, 0);
    {
        Net net({.connections = 32, .files_root = folder});
        Waits waits = {};
        const std::string silent = "unix:@spinio-silent-" + own;
        for (int *s : {&waits.silent, &waits.also_silent, &waits.full, &waits.blocked_file})
            CHECK((*s = spinio_net_connect(net.net, silent.c_str())) > 0);
        std::string name;
        waits.accepts = listener(net, "tcp://127.0.0.1:0", name);
        waits.inner_listener = listener(net, ("unix:@spinio-inner-" + own).c_str(), name);
        waits.inner = net::Address::abstract(("spinio-inner-" + own).c_str());
        waits.backlog = net::Address::abstract(("spinio-narrow-" + own).c_str());
        waits.queue = net::Address::abstract(("spinio-queue-" + own).c_str());
        int own_queue = listens("spinio-own-" + own, SOCK_DGRAM, 0);
        waits.datagrams = spinio_net_adopt(net.net, own_queue);
        waits.sender = spinio_net_adopt(net.net, socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
        CHECK(waits.datagrams > 0 && waits.sender > 0 && (waits.set = spinio_net_set(net.net)) > 0);
        CHECK(!spinio_net_add(net.net, waits.set, waits.silent, net::IN));
        const int blocks = 14;
        for (int i = 0; i < blocks; i++)
            net.words[i] = 1;
        spinio::launch_resident_on(net.stream, wait_in_every_call, blocks, 32, net.handle, waits, net.words);
        CHECK(cudaGetLastError() == cudaSuccess);
        // A file that cannot be opened any more has another error.
        for (int i = 0; i < 300000 && !__atomic_load_n(net.words + file_is_open, __ATOMIC_ACQUIRE); i++)
            usleep(1000);
        for (uint64_t sent = 0, before = 1; sent != before; usleep(300000))
            before = sent, sent = net.stats().bytes_sent + net.stats().calls;
        for (int i = 0; i < blocks; i++)
            if (__atomic_load_n(net.words + i, __ATOMIC_ACQUIRE) != 1) {
                std::printf("block %d does not wait: %lld\n", i, (long long)net.words[i]);
                failures++;
            }
        CHECK(!spinio_net_stop(net.net));
        net.wait();
        for (int i = 0; i < blocks; i++)
            // poll says that the socket is ready: all its calls return -ESHUTDOWN.
            if (net.words[i] != (i == 7 ? 1 : -ESHUTDOWN)) {
                std::printf("block %d: %lld\n", i, (long long)net.words[i]);
                failures++;
            }
    }
    for (int s : {peer, narrow, queue})
        close(s);
    unlink(file.c_str());
    rmdir(folder);
}

__global__ void make_sockets(net::Handle handle, int count, int64_t *out)
{
    for (int i = 0; i < count; i++)
        out[i] = net::socket(net::block(), handle, net::UNIX, net::STREAM, 0);
    net::close(net::block(), handle, int(out[0]));
    out[count] = net::socket(net::block(), handle, net::UNIX, net::STREAM, 0);
}

// Rings for two connections: the third socket gets ENOBUFS, and a closed one makes room.
static void rings_run_out()
{
    NothingLeft nothing(__func__);
    Net net({.connections = 2});
    spinio::launch_resident_on(net.stream, make_sockets, 1, 32, net.handle, 4, net.words);
    net.wait();
    CHECK(net.words[0] > 0 && net.words[1] > 0 && net.words[2] == -ENOBUFS && net.words[3] == -ENOBUFS && net.words[4] > 0);
    CHECK(spinio_net_connect(net.net, "unix:@nothing-there") == -1 && errno == ENOBUFS && *spinio_last_error());
}

static void options_of_a_wrong_size_are_refused()
{
    struct spinio_net_options options = {};
    for (size_t size : {size_t(0), size_t(3), sizeof options.size - 1}) {
        options.size = size;
        CHECK(!spinio_net_open("emulated", &options) && errno == EINVAL && *spinio_last_error());
    }
    // Those of an older program are shorter, and of a newer one longer.
    struct {
        struct spinio_net_options known;
        uint64_t later[4];
    } longer = {};
    for (size_t size : {sizeof(size_t), sizeof options, sizeof longer}) {
        longer.known.size = size;
        spinio_net *net = spinio_net_open("emulated", &longer.known);
        CHECK(net && !spinio_net_close(net));
    }
}

__global__ void use_no_memory(net::Handle handle, int s, int datagrams, int64_t *out)
{
    __shared__ char byte;
    auto g = net::block();
    const char *text = nullptr;
    char *none = nullptr;
    net::Address from;
    int f = spinio::file::open(g, handle, "f", spinio::file::RDWR);
    for (int socket : {s, datagrams}) {
        *out++ = net::send(g, handle, socket, none, 1);
        *out++ = net::recv(g, handle, socket, none, 1);
        *out++ = net::sendto(g, handle, socket, none, 1, 0, net::Address{});
        *out++ = net::recvfrom(g, handle, socket, none, 1, 0, &from);
        *out++ = net::setsockopt(g, handle, socket, net::LEVEL_SOCKET, net::OPTION_KEEPALIVE, none, 4);
        *out++ = net::getsockopt(g, handle, socket, net::LEVEL_SOCKET, net::OPTION_KEEPALIVE, &byte, nullptr);
        *out++ = net::poll(g, handle, nullptr, 1, 0);
        *out++ = spinio::file::open(g, handle, text, spinio::file::RDONLY);
        *out++ = spinio::file::pread(g, handle, f, none, 1, 0);
        *out++ = spinio::file::pwrite(g, handle, f, none, 1, 0);
        *out++ = spinio::file::fstat(g, handle, f, nullptr);
        // What came is still there.
        *out++ = net::recv(g, handle, socket, &byte, 1) == 1 && byte == 'x';
        // No bytes need no memory.
        *out++ = net::send(g, handle, socket, none, 0);
    }
}

static void no_memory_is_efault()
{
    NothingLeft nothing(__func__);
    char folder[] = "/tmp/spinio-net-XXXXXX";
    CHECK(mkdtemp(folder) != nullptr);
    const std::string file = std::string(folder) + "/f";
    close(open(file.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0644));
    Net net({.files_root = folder, .files_write = true});
    int ends[2], datagrams[2];
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends) && !socketpair(AF_UNIX, SOCK_DGRAM, 0, datagrams));
    CHECK(send(ends[0], "x", 1, 0) == 1 && send(datagrams[0], "x", 1, 0) == 1);
    int s = spinio_net_adopt(net.net, ends[1]), d = spinio_net_adopt(net.net, datagrams[1]);
    CHECK(s > 0 && d > 0);
    spinio::launch_resident_on(net.stream, use_no_memory, 1, 32, net.handle, s, d, net.words);
    net.wait();
    for (int i = 0; i < 26; i++) {
        const int64_t expected = i % 13 < 11 ? -EFAULT : i % 13 == 11;
        if (net.words[i] != expected) {
            std::printf("call %d without memory: %lld\n", i, (long long)net.words[i]);
            failures++;
        }
    }
    close(ends[0]);
    close(datagrams[0]);
    unlink(file.c_str());
    rmdir(folder);
}

__global__ void use_path(net::Handle handle, net::Address path, int64_t *out)
{
    __shared__ char byte;
    auto g = net::block();
    int s = net::socket(g, handle, net::UNIX, net::STREAM, 0), d = net::socket(g, handle, net::UNIX, net::DGRAM, 0);
    out[0] = net::bind(g, handle, s, path);
    out[1] = net::connect(g, handle, s, path);
    out[2] = net::connect(g, handle, d, path);
    out[3] = net::sendto(g, handle, d, &byte, 1, 0, path);
    net::close(g, handle, s);
    net::close(g, handle, d);
}

// A path or a name that is cut is not bound, and nothing is sent there. One that has just room is only not found.
static void paths_that_are_too_long_are_refused()
{
    NothingLeft nothing(__func__);
    Net net;
    auto results = [&](const net::Address &path, int64_t expected, int64_t bound) {
        spinio::launch_resident_on(net.stream, use_path, 1, 32, net.handle, path, net.words);
        net.wait();
        CHECK(net.words[0] == bound);
        for (int i = 1; i < 4; i++)
            CHECK(net.words[i] == expected);
    };
    const std::string longest = "/nothing-here/" + std::string(94, 'x');
    for (size_t more : {1, 2, 3, 100}) {
        results(net::Address::path((longest + std::string(more, 'x')).c_str()), -ENAMETOOLONG, -ENAMETOOLONG);
        results(net::Address::abstract((longest + std::string(more, 'x')).c_str()), -ENAMETOOLONG, -ENAMETOOLONG);
    }
    results(net::Address::path(longest.c_str()), -ENOENT, -ENOENT);
}

__global__ void bind_port(net::Handle handle, net::Address address, int64_t *out)
{
    int s = net::socket(net::block(), handle, net::INET, net::STREAM, 0);
    out[0] = net::bind(net::block(), handle, s, address);
    out[1] = net::close(net::block(), handle, s);
}

// As an ordinary user: the port is one of root's.
static void use_privileged_port()
{
    if (getuid() == 0)
        CHECK(!setgid(65534) && !setuid(65534));
    Net net;
    CHECK(spinio_net_listen(net.net, "tcp://127.0.0.1:81", 1) == -1 && errno == EACCES && *spinio_last_error());
    spinio::launch_resident_on(net.stream, bind_port, 1, 32, net.handle, net::Address::inet(127, 0, 0, 1, 81), net.words);
    net.wait();
    CHECK(net.words[0] == -EACCES && net.words[1] == 0);
    waits_for_open(net, 0);
}

static void privileged_port_is_refused()
{
    int first = 1024;
    if (FILE *file = std::fopen("/proc/sys/net/ipv4/ip_unprivileged_port_start", "re")) {
        CHECK(std::fscanf(file, "%d", &first) == 1);
        std::fclose(file);
    }
    if (first <= 81) {
        std::printf("skipped: no port is privileged here\n");
        return;
    }
    Child child({"--privileged-port"});
    CHECK(child.ends() == 0);
}

int main(int arguments, char **argument)
{
    if (arguments > 1 && !std::strcmp(argument[1], "--small-device")) {
        device_without_memory();
        return failures != 0;
    }
    if (arguments > 1 && !std::strcmp(argument[1], "--privileged-port")) {
        use_privileged_port();
        return failures != 0;
    }
    options_of_a_wrong_size_are_refused();
    privileged_port_is_refused();
    paths_that_are_too_long_are_refused();
    no_memory_is_efault();
    rings_run_out();
    few_descriptors_are_an_error_or_enough();
    little_memory_is_an_error_or_enough();
    device_memory_comes_back();
    stop_ends_every_kind_of_call();
    std::printf("%d failures\n", failures);
    return failures != 0;
}
