// Sockets called by kernels, against ordinary sockets of this program. Prints each failure and exits with 1.
#include <algorithm>
#include <vector>

#include "net_test.h"

template <typename Group>
__device__ void echo_one(Group group, const net::Handle &handle, int listener, char *buffer, size_t size, int64_t *result)
{
    int s = net::accept(group, handle, listener);
    int64_t total = 0, got = 0;
    while ((got = net::recv(group, handle, s, buffer, size)) > 0) {
        if (net::send(group, handle, s, buffer, size_t(got)) != got)
            break;
        total += got;
    }
    int closed = net::close(group, handle, s);
    if (group.leads()) {
        result[0] = got ? got : closed;
        result[1] = total;
    }
}

// Who calls: 0 the block, 1 each warp, 2 the first and the last thread.
__global__ void echo(net::Handle handle, int listener, int who, int64_t *results)
{
    __shared__ char buffers[8][1500];
    unsigned warp = net::Warp::linear() / 32;
    if (who == 0)
        echo_one(net::block(), handle, listener, buffers[0], sizeof buffers, results + blockIdx.x * 2);
    else if (who == 1)
        echo_one(net::warp(), handle, listener, buffers[warp], sizeof buffers[0], results + (blockIdx.x * 8 + warp) * 2);
    else if (threadIdx.x == 0 || threadIdx.x == blockDim.x - 1)
        echo_one(net::thread(), handle, listener, buffers[threadIdx.x != 0], sizeof buffers[0], results + (blockIdx.x * 2 + (threadIdx.x != 0)) * 2);
}

// Sends bytes and compares what comes back, then closes its direction.
static void echo_client(const std::string &address, size_t bytes, unsigned seed)
{
    int s = connect_to(address);
    std::vector<unsigned char> data(bytes), back(bytes);
    for (auto &byte : data)
        byte = (unsigned char)((seed = seed * 1664525 + 1013904223) >> 24);
    std::thread writer([&] {
        for (size_t at = 0, step = 1; at < bytes; at += step, step = step * 7 % 5003 + 1)
            CHECK(send(s, data.data() + at, std::min(step, bytes - at), MSG_NOSIGNAL) == ssize_t(std::min(step, bytes - at)));
        CHECK(!shutdown(s, SHUT_WR));
    });
    CHECK(recv(s, back.data(), bytes, MSG_WAITALL) == ssize_t(bytes) && back == data);
    char more;
    CHECK(recv(s, &more, 1, 0) == 0);
    writer.join();
    close(s);
}

static void bytes_come_back_to_blocks_warps_and_threads(const char *where)
{
    struct {
        int who;
        unsigned blocks, threads, clients;
    } cases[] = {{0, 2, 32, 2}, {0, 1, 256, 1}, {0, 1, 100, 1}, {1, 1, 64, 2}, {2, 1, 64, 2}};
    for (auto &each : cases) {
        Net net;
        std::string address;
        int s = listener(net, where, address);
        spinio::launch_resident_on(net.stream, echo, each.blocks, each.threads, net.handle, s, each.who, net.words);
        CHECK(cudaGetLastError() == cudaSuccess);
        std::vector<std::thread> clients;
        for (unsigned i = 0; i < each.clients; i++)
            clients.emplace_back(echo_client, address, 30000 + i * 1111, i);
        for (auto &client : clients)
            client.join();
        net.wait();
        int64_t total = 0;
        for (unsigned i = 0; i < each.clients; i++) {
            CHECK(net.words[i * 2] == 0);
            total += net.words[i * 2 + 1];
        }
        CHECK(total == int64_t(each.clients * 30000 + each.clients * (each.clients - 1) / 2 * 1111));
        auto stats = net.stats();
        CHECK(stats.accepted == each.clients && stats.violations == 0);
    }
}

// Two blocks talk to each other: every call, and its errors. Block 0 is the server.
__global__ void both_ends(net::Handle handle, net::Address address, int domain, uint64_t *turn, int64_t *out)
{
    auto g = net::block();
    __shared__ char bytes[8192];
    __shared__ net::Address name;
    auto pass = [&](uint64_t next) {
        __syncthreads();
        if (threadIdx.x == 0)
            spinio::store_release_system(turn, next);
    };
    auto await = [&](uint64_t now) {
        if (threadIdx.x == 0) {
            spinio::Backoff waiting;
            while (spinio::load_acquire_system(turn) < now)
                waiting.pause();
        }
        __syncthreads();
    };
    if (blockIdx.x == 0) {
        int s = net::socket(g, handle, domain, net::STREAM, 0);
        out[0] = net::accept(g, handle, s);              // EINVAL
        out[1] = net::recv(g, handle, s, bytes, 1);      // ENOTCONN; EINVAL
        out[2] = net::send(g, handle, s, bytes, 1);      // EPIPE; ENOTCONN
        out[3] = net::shutdown(g, handle, s, net::SHUT_SEND); // ENOTCONN
        out[4] = net::bind(g, handle, s, address);
        out[5] = net::listen(g, handle, s, 5);
        out[6] = net::getsockname(g, handle, s, &name);
        out[7] = name.length;
        int other = net::socket(g, handle, domain, net::STREAM, 0);
        out[8] = net::bind(g, handle, other, name);      // EADDRINUSE
        out[9] = net::close(g, handle, other);
        out[10] = net::close(g, handle, other);          // EBADF
        out[11] = net::recv(g, handle, other, bytes, 1); // EBADF
        out[12] = net::accept(g, handle, s, nullptr, net::DONTWAIT); // EAGAIN
        if (threadIdx.x < sizeof name / 8)
            reinterpret_cast<uint64_t *>(out + 100)[threadIdx.x] = reinterpret_cast<uint64_t *>(&name)[threadIdx.x];
        pass(1);
        int c = net::accept(g, handle, s, &name);
        out[13] = net::recv(g, handle, c, bytes, 5, net::WAITALL);
        out[14] = net::recv(g, handle, c, bytes, 8, net::PEEK);
        out[15] = bytes[0];
        out[16] = net::recv(g, handle, c, bytes + 1, 3);
        out[17] = bytes[1] == bytes[0];
        out[18] = net::recv(g, handle, c, bytes, 1, net::DONTWAIT); // EAGAIN
        net::set_timeout(g, handle, c, 1000000, 0);
        out[19] = net::recv(g, handle, c, bytes, 1);     // EAGAIN
        net::set_timeout(g, handle, c, 0, 0);
        pass(2);
        out[20] = net::recv(g, handle, c, bytes, 8000, net::WAITALL);
        bool right = true;
        for (unsigned i = threadIdx.x; i < 8000; i += blockDim.x)
            right = right && bytes[i] == char(i * 7);
        out[21] = __syncthreads_and(right);
        out[22] = net::recv(g, handle, c, bytes, 8);     // end of stream
        out[23] = net::shutdown(g, handle, c, net::SHUT_SEND);
        out[24] = net::send(g, handle, c, bytes, 1);     // EPIPE
        out[25] = net::connect(g, handle, c, address);   // EISCONN
        await(3);
        out[26] = net::close(g, handle, c);
        out[27] = net::close(g, handle, s);
    } else {
        await(1);
        if (threadIdx.x < sizeof name / 8)
            reinterpret_cast<uint64_t *>(&name)[threadIdx.x] = reinterpret_cast<uint64_t *>(out + 100)[threadIdx.x];
        __syncthreads();
        int s = net::socket(g, handle, domain, net::STREAM, 0);
        out[40] = net::connect(g, handle, s, name);
        for (unsigned i = threadIdx.x; i < 8; i += blockDim.x)
            bytes[i] = char('a' + i);
        __syncthreads();
        out[41] = net::send(g, handle, s, bytes, 8);
        await(2);
        for (unsigned i = threadIdx.x; i < 8000; i += blockDim.x)
            bytes[i] = char(i * 7);
        __syncthreads();
        out[42] = net::send(g, handle, s, bytes, 8000);
        out[43] = net::shutdown(g, handle, s, net::SHUT_SEND);
        out[44] = net::recv(g, handle, s, bytes, 1);     // end of stream
        out[45] = net::close(g, handle, s);
        out[46] = net::socket(g, handle, 77, net::STREAM, 0);   // EAFNOSUPPORT
        out[47] = net::socket(g, handle, domain, 4, 0);         // ESOCKTNOSUPPORT
        out[48] = net::accept(g, handle, -1);                   // EBADF
        out[49] = net::recv(g, handle, 0x7fffffff, bytes, 1);   // EBADF
        pass(3);
    }
}

static void calls_and_their_errors(bool inet)
{
    Net net;
    auto address = inet ? net::Address::inet(127, 0, 0, 1, 0) : net::Address::abstract(("spinio-test-" + std::to_string(getpid())).c_str());
    auto turn = reinterpret_cast<uint64_t *>(net.words + 1000);
    spinio::launch_resident_on(net.stream, both_ends, 2, 64, net.handle, address, inet ? net::INET : net::UNIX, turn, net.words);
    net.wait();
    const int64_t length = inet ? 16 : address.length;
    const int64_t server[] = {-EINVAL, inet ? -ENOTCONN : -EINVAL, inet ? -EPIPE : -ENOTCONN, -ENOTCONN, 0, 0, 0, length, -EADDRINUSE, 0, -EBADF, -EBADF, -EAGAIN, 5,
                              3, 'f', 3, 1, -EAGAIN, -EAGAIN, 8000, 1, 0, 0, -EPIPE, -EISCONN, 0, 0};
    const int64_t client[] = {0, 8, 8000, 0, 0, 0, -EAFNOSUPPORT, -ESOCKTNOSUPPORT, -EBADF, -EBADF};
    for (size_t i = 0; i < sizeof server / 8; i++)
        if (net.words[i] != server[i]) {
            std::printf("server call %zu (inet %d): %lld instead of %lld\n", i, inet, (long long)net.words[i], (long long)server[i]);
            failures++;
        }
    for (size_t i = 0; i < sizeof client / 8; i++)
        if (net.words[40 + i] != client[i]) {
            std::printf("client call %zu (inet %d): %lld instead of %lld\n", i, inet, (long long)net.words[40 + i], (long long)client[i]);
            failures++;
        }
}

// Block 0 waits in accept, 1 in recv, 2 in send, 3 for the lock of block 1's recv, 4 connects to nowhere.
__global__ void waiters(net::Handle handle, int listener, int silent, int full, net::Address nowhere, int64_t *out)
{
    __shared__ char bytes[512];
    auto g = net::block();
    int64_t result = 0;
    if (blockIdx.x == 0)
        result = net::accept(g, handle, listener);
    else if (blockIdx.x == 1 || blockIdx.x == 3)
        result = net::recv(g, handle, silent, bytes, 1);
    else if (blockIdx.x == 2)
        while ((result = net::send(g, handle, full, bytes, sizeof bytes)) > 0) {
        }
    else
        do {
            int s = net::socket(g, handle, net::UNIX, net::STREAM, 0);
            result = s < 0 ? s : net::connect(g, handle, s, nowhere);
            net::close(g, handle, s);
        } while (result == -ECONNREFUSED);
    if (threadIdx.x == 0)
        spinio::store_release_system(reinterpret_cast<uint64_t *>(out + blockIdx.x), uint64_t(result));
}

static void stop_ends_every_wait()
{
    Net net;
    std::string address;
    int peer = socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un name = {};
    name.sun_family = AF_UNIX;
    socklen_t length = sizeof(sa_family_t);
    CHECK(!bind(peer, reinterpret_cast<sockaddr *>(&name), length) && !listen(peer, 8));
    length = sizeof name;
    CHECK(!getsockname(peer, reinterpret_cast<sockaddr *>(&name), &length));
    address = "unix:@" + std::string(name.sun_path + 1, length - offsetof(sockaddr_un, sun_path) - 1);
    int silent = spinio_net_connect(net.net, address.c_str()), full = spinio_net_connect(net.net, address.c_str());
    std::string where;
    int waits = listener(net, ("unix:@spinio-stop-" + std::to_string(getpid())).c_str(), where);
    CHECK(silent > 0 && full > 0);
    auto nowhere = net::Address::abstract("spinio-nowhere");
    spinio::launch_resident_on(net.stream, waiters, 5, 32, net.handle, waits, silent, full, nowhere, net.words);
    // Until the sender has filled ring and socket, and all others had their time.
    for (uint64_t sent = 0, before = 1; sent != before; usleep(200000))
        before = sent, sent = net.stats().bytes_sent;
    for (int i = 0; i < 4; i++)
        CHECK(net.words[i] == 0);
    CHECK(!spinio_net_stop(net.net));
    net.wait();
    for (int i = 0; i < 5; i++)
        CHECK(net.words[i] == -ESHUTDOWN);
    CHECK(spinio_net_listen(net.net, "unix:@other", 1) == -1 && errno == ESHUTDOWN);
    close(peer);
}

__global__ void receive_until_it_fails(net::Handle handle, int listener, int64_t *out)
{
    __shared__ char bytes[256];
    int s = net::accept(net::block(), handle, listener);
    int64_t got = 0, total = 0;
    while ((got = net::recv(net::block(), handle, s, bytes, sizeof bytes)) > 0)
        total += got;
    out[0] = got;
    out[1] = net::send(net::block(), handle, s, bytes, 1);
    out[2] = total;
    net::close(net::block(), handle, s);
    // A connection that is closed with bytes that were not read.
    s = net::accept(net::block(), handle, listener);
    out[3] = net::recv(net::block(), handle, s, bytes, 1);
    out[4] = net::close(net::block(), handle, s);
}

static void resets_go_both_ways()
{
    Net net;
    std::string address;
    int s = listener(net, "tcp://127.0.0.1:0", address);
    spinio::launch_resident_on(net.stream, receive_until_it_fails, 1, 32, net.handle, s, net.words);
    int peer = connect_to(address);
    CHECK(send(peer, "0123456789", 10, MSG_NOSIGNAL) == 10);
    while (net.stats().bytes_received < 10)
        usleep(1000);
    linger now = {1, 0};
    setsockopt(peer, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    close(peer);
    peer = connect_to(address);
    CHECK(send(peer, "0123456789", 10, MSG_NOSIGNAL) == 10);
    char byte;
    CHECK(recv(peer, &byte, 1, 0) == -1 && errno == ECONNRESET);
    close(peer);
    net.wait();
    CHECK(net.words[0] == -ECONNRESET && net.words[1] == -ECONNRESET && net.words[2] == 10);
    CHECK(net.words[3] == 1 && net.words[4] == 0);
}

// Two blocks, so that they claim places in the doorbell queue at the same time.
__global__ void small_sends(net::Handle handle, int listener, int count)
{
    int s = net::accept(net::block(), handle, listener);
    __shared__ unsigned number;
    for (int i = 0; i < count; i++) {
        if (threadIdx.x == 0)
            number = unsigned(i) * 2654435761u;
        __syncthreads();
        net::send(net::block(), handle, s, &number, sizeof number);
        __syncthreads();
    }
    net::close(net::block(), handle, s);
}

static void doorbell_queue_goes_round_many_times()
{
    const int count = 10000; // of each block; the queue has 4096 entries
    Net net;
    std::string address;
    int s = listener(net, ("unix:@spinio-round-" + std::to_string(getpid())).c_str(), address);
    spinio::launch_resident_on(net.stream, small_sends, 2, 32, net.handle, s, count);
    std::thread peers[2];
    for (auto &peer : peers)
        peer = std::thread([&] {
            int c = connect_to(address), right = 0;
            for (unsigned number; recv(c, &number, sizeof number, MSG_WAITALL) == sizeof number; right++)
                if (number != unsigned(right) * 2654435761u)
                    break;
            CHECK(right == count);
            close(c);
        });
    for (auto &peer : peers)
        peer.join();
    net.wait();
    CHECK(net.stats().doorbells > 2 * count && net.stats().violations == 0);
}

__global__ void echo_until_it_fails(net::Handle handle, int listener, int64_t *out)
{
    __shared__ char bytes[4096];
    int s = net::accept(net::block(), handle, listener);
    int64_t got = 0;
    while ((got = net::recv(net::block(), handle, s, bytes, sizeof bytes)) > 0)
        if ((got = net::send(net::block(), handle, s, bytes, size_t(got))) < 0)
            break;
    out[0] = got;
    out[1] = net::close(net::block(), handle, s);
}

static void killed_client_ends_its_connection_only(const char *where)
{
    Net net;
    std::string address;
    int s = listener(net, where, address);
    spinio::launch_resident_on(net.stream, echo_until_it_fails, 2, 32, net.handle, s, net.words);
    int other = connect_to(address), killed = connect_to(address);
    pid_t child = fork();
    if (child == 0) {
        char bytes[3000] = {};
        for (;;)
            if (send(killed, bytes, sizeof bytes, MSG_NOSIGNAL) < 0 || recv(killed, bytes, sizeof bytes / 2, 0) < 0)
                _exit(1);
    }
    close(killed);
    while (net.stats().bytes_received < 100000)
        usleep(1000);
    CHECK(!kill(child, SIGKILL) && waitpid(child, nullptr, 0) == child);
    while (net.stats().open > 2)
        usleep(1000);
    char back[5];
    CHECK(send(other, "still", 5, MSG_NOSIGNAL) == 5 && recv(other, back, 5, MSG_WAITALL) == 5 && !std::memcmp(back, "still", 5));
    close(other);
    net.wait();
    CHECK(net.words[0] <= 0 && net.words[1] == 0 && net.stats().violations == 0);
}

__global__ void copies(const unsigned char *from, unsigned char *to, size_t bytes)
{
    net::copy(net::block(), to, from, bytes);
}

static void copies_are_whole_at_every_place()
{
    constexpr size_t room = 2304, edge = 32; // more than 4 units of 16 bytes for each of 32 threads
    std::vector<unsigned char> from(room), want(room), to(room);
    // Kernels of a GPU read and write pinned memory.
    unsigned char *pinned;
    CHECK(cudaHostAlloc(&pinned, 2 * room, cudaHostAllocDefault) == cudaSuccess);
    for (size_t i = 0; i < room; i++)
        from[i] = (unsigned char)(i * 7 + i / 256);
    for (size_t out = 0; out < 16; out++)
        for (size_t in = 0; in < 16; in++)
            for (size_t bytes : {size_t(0), size_t(1), size_t(63), size_t(64), size_t(65), size_t(79), size_t(500), room - 2 * edge}) {
                // A copy of its own, with nothing after its end: reads past it are errors under AddressSanitizer.
                std::vector<unsigned char> source(from.begin(), from.begin() + ptrdiff_t(in + bytes));
                std::fill(to.begin(), to.end(), 0xaa);
                want = to;
                std::copy(source.begin() + ptrdiff_t(in), source.end(), want.begin() + ptrdiff_t(edge + out));
                if (spinio::emulated) {
                    spinio::launch(copies, 1, 32, source.data() + in, to.data() + edge + out, bytes);
                    CHECK(cudaDeviceSynchronize() == cudaSuccess);
                } else {
                    std::copy(source.begin(), source.end(), pinned);
                    std::copy(to.begin(), to.end(), pinned + room);
                    spinio::launch(copies, 1, 32, pinned + in, pinned + room + edge + out, bytes);
                    CHECK(cudaDeviceSynchronize() == cudaSuccess);
                    std::copy(pinned + room, pinned + 2 * room, to.begin());
                }
                CHECK(to == want);
            }
    cudaFreeHost(pinned);
}

static int count_entries(const char *path)
{
    int count = 0;
    if (DIR *directory = opendir(path)) {
        while (readdir(directory))
            count++;
        closedir(directory);
    }
    return count;
}

static void nets_leave_nothing()
{
    { Net first; }
    int descriptors = count_entries("/proc/self/fd");
    for (int i = 0; i < 20; i++) {
        Net net;
        std::string address;
        listener(net, "tcp://127.0.0.1:0", address);
        CHECK(count_entries("/proc/self/fd") == descriptors);
        close(connect_to(address));
    }
    CHECK(count_entries("/proc/self/fd") == descriptors);
}

static void host_calls_refuse_bad_arguments()
{
    struct spinio_net_options options = {};
    options.size = sizeof options;
    options.ring_bytes = 5000;
    CHECK(!spinio_net_open(test_device, &options) && errno == EINVAL);
    CHECK(!spinio_net_open("toaster", nullptr) && errno == ENODEV);
    Net net;
    CHECK(spinio_net_listen(net.net, "http://x", 1) == -1 && errno == EINVAL);
    CHECK(spinio_net_connect(net.net, "unix:@no-listener-here") == -1 && errno == ECONNREFUSED);
    CHECK(spinio_net_connect(net.net, ("unix:///" + std::string(200, 'x')).c_str()) == -1 && errno == ENAMETOOLONG);
    char small[4];
    CHECK(spinio_net_address(net.net, 12345, small, sizeof small) == -1 && errno == EBADF);
    pid_t child = fork();
    if (child == 0)
        _exit(spinio_net_listen(net.net, "unix:@child", 1) == -1 && errno == ENODEV ? 0 : 1);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

int main()
{
    bytes_come_back_to_blocks_warps_and_threads("tcp://127.0.0.1:0");
    bytes_come_back_to_blocks_warps_and_threads(("unix:@spinio-echo-" + std::to_string(getpid())).c_str());
    calls_and_their_errors(true);
    calls_and_their_errors(false);
    stop_ends_every_wait();
    resets_go_both_ways();
    doorbell_queue_goes_round_many_times();
    killed_client_ends_its_connection_only("tcp://127.0.0.1:0");
    killed_client_ends_its_connection_only(("unix:@spinio-kill-" + std::to_string(getpid())).c_str());
    copies_are_whole_at_every_place();
    nets_leave_nothing();
    host_calls_refuse_bad_arguments();
    std::printf("%d failures\n", failures);
    return failures != 0;
}
