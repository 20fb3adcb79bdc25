// Ends: what a kernel has sent arrives however its socket or its net ends, a shutdown does not wait for a send without room, and
// a limit of time is one of the whole call. Prints each failure and exits with 1.
#include "net_test.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <atomic>

// A connection within this program, whose second end goes to the kernels.
struct Pair {
    int ours = -1, theirs = -1;

    explicit Pair(bool inet)
    {
        int ends[2] = {-1, -1}, small = 16384;
        if (inet)
            connect_pair(ends, small);
        else
            CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
        setsockopt(ends[1], SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
        timeval limit = {60, 0};
        setsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        ours = ends[0];
        theirs = ends[1];
    }

    ~Pair() { close(ours); }

    // Bytes up to the end of the stream; `error` is that of the end.
    size_t read_all(int &error)
    {
        std::vector<char> part(65536);
        size_t bytes = 0;
        ssize_t got;
        while ((got = recv(ours, part.data(), part.size(), 0)) > 0)
            bytes += size_t(got);
        error = got < 0 ? errno : 0;
        return bytes;
    }
};

__global__ void send_and_end(net::Handle handle, int s, size_t first, bool closes, int64_t *out)
{
    __shared__ char buffer[64];
    for (size_t got = 0; got < first;)
        got += size_t(net::recv(net::block(), handle, s, buffer, first - got));
    int64_t sent = net::send(net::block(), handle, s, "0123456789", 10);
    if (threadIdx.x == 0)
        out[0] = sent;
    if (closes)
        net::close(net::block(), handle, s);
}

// The proxy sleeps, and the close of the net finds the kernel's last doorbell unread.
static void closed_net_has_sent_all(bool inet, bool closes)
{
    Pair pair(inet);
    {
        Net net({.idle_us = 100000});
        int s = spinio_net_adopt(net.net, pair.theirs);
        CHECK(s > 0);
        std::this_thread::sleep_for(std::chrono::milliseconds(250));
        spinio::launch_resident_on(net.stream, send_and_end, 1, 32, net.handle, s, size_t(0), closes, net.words);
        net.wait();
        CHECK(net.words[0] == 10);
    }
    int error;
    CHECK(pair.read_all(error) == 10 && !error);
}

// As a program's: the peer gets what was sent, and then learns that not all was read.
static void socket_with_unread_bytes_sends_before_the_reset()
{
    Net net({.idle_us = 20000});
    Pair pair(true);
    int s = spinio_net_adopt(net.net, pair.theirs);
    char bytes[100] = {};
    CHECK(send(pair.ours, bytes, sizeof bytes, 0) == sizeof bytes);
    spinio::launch_resident_on(net.stream, send_and_end, 1, 32, net.handle, s, size_t(10), true, net.words);
    net.wait();
    int error;
    CHECK(pair.read_all(error) == 10 && error == ECONNRESET);
}

__global__ void shut_beside_a_send(net::Handle handle, int s, char *buffer, size_t bytes, int64_t *out)
{
    if (blockIdx.x == 0) {
        int64_t sent = net::send(net::block(), handle, s, buffer, bytes);
        if (threadIdx.x == 0)
            out[0] = sent;
        return;
    }
    pass_and_wait(reinterpret_cast<uint64_t *>(out + 8), 1);
    int shut = net::shutdown(net::block(), handle, s, net::SHUT_SEND);
    int64_t again = net::send(net::block(), handle, s, buffer, 1);
    if (threadIdx.x == 0) {
        out[1] = shut;
        out[2] = again;
    }
}

static void shutdown_ends_a_send_without_room(bool inet)
{
    Net net;
    Pair pair(inet);
    int s = spinio_net_adopt(net.net, pair.theirs);
    const size_t size = 16 << 20;
    char *buffer;
    CHECK(cudaMalloc(&buffer, size) == cudaSuccess);
    spinio::launch_resident_on(net.stream, shut_beside_a_send, 2, 32, net.handle, s, buffer, size, net.words);
    wait_until_it_waits(net);
    __atomic_store_n(net.words + 9, 1, __ATOMIC_RELEASE);
    net.wait();
    CHECK(net.words[0] > 0 && net.words[0] < int64_t(size));
    CHECK(net.words[1] == 0 && net.words[2] == -EPIPE);
    int error;
    CHECK(int64_t(pair.read_all(error)) == net.words[0] && !error);
    cudaFree(buffer);
}

__global__ void receive_all(net::Handle handle, int s, char *buffer, size_t bytes, uint64_t limit, int64_t *out)
{
    net::set_timeout(net::block(), handle, s, limit, 0);
    int64_t got = net::recv(net::block(), handle, s, buffer, bytes, net::WAITALL);
    if (threadIdx.x == 0)
        out[0] = got;
}

constexpr size_t drops = 4096;

// A peer that sends a byte before each limit of a wait ends cannot hold a block.
static void limit_of_time_is_one_of_the_call()
{
    Net net;
    Pair pair(false);
    int s = spinio_net_adopt(net.net, pair.theirs);
    char *buffer;
    CHECK(cudaMalloc(&buffer, drops) == cudaSuccess);
    std::atomic<bool> done = false;
    std::thread peer([&] {
        for (size_t i = 0; i < drops && !done; i++) {
            CHECK(send(pair.ours, "x", 1, 0) == 1);
            std::this_thread::sleep_for(std::chrono::milliseconds(4));
        }
    });
    spinio::launch_resident_on(net.stream, receive_all, 1, 32, net.handle, s, buffer, drops, uint64_t(100) * 1000 * 1000, net.words);
    net.wait();
    done = true;
    peer.join();
    CHECK(net.words[0] != 0 && net.words[0] < int64_t(drops));
    cudaFree(buffer);
}

__global__ void drip(net::Handle handle, int listening, size_t count)
{
    int s = net::accept(net::block(), handle, listening);
    int64_t sent = s;
    for (size_t i = 0; i < count && sent > 0; i++) {
        sent = net::send(net::block(), handle, s, "x", 1);
        for (int pause = 0; pause < 4; pause++)
            __nanosleep(1000 * 1000);
    }
    net::close(net::block(), handle, s);
}

static void so_it_is_for_programs_that_share_memory()
{
    Net net;
    std::string name;
    int listening = listener(net, "tcp://127.0.0.1:0", name);
    spinio::launch_resident_on(net.stream, drip, 1, 32, net.handle, listening, drops);
    struct spinio_socket_options options = {};
    options.size = sizeof options;
    options.receive_timeout_ms = 100;
    spinio_socket *s = spinio_socket_connect(name.c_str(), &options);
    char text[128], bytes[drops];
    CHECK(s && spinio_socket_transport(s, text, sizeof text) == 1);
    ssize_t got = spinio_socket_recv(s, bytes, sizeof bytes, MSG_WAITALL);
    CHECK(got != 0 && got < ssize_t(drops));
    spinio_socket_close(s);
    net.wait();
}

// Moving a socket back takes two numbers of the table, and no third one.
static void socket_comes_back_into_a_table_with_two_places()
{
    Net net;
    Pair pair(false);
    int s = spinio_net_adopt(net.net, pair.theirs);
    CHECK(send(pair.ours, "abc", 3, 0) == 3);
    struct rlimit before, low;
    CHECK(!getrlimit(RLIMIT_NOFILE, &before));
    low = before;
    low.rlim_cur = 256;
    CHECK(!setrlimit(RLIMIT_NOFILE, &low));
    std::vector<int> taken;
    for (int fd; (fd = open("/dev/null", O_RDONLY)) >= 0;)
        taken.push_back(fd);
    for (int i = 0; i < 2; i++, taken.pop_back())
        close(taken.back());
    char unread[4096];
    size_t count = 0;
    int fd = spinio_net_release(net.net, s, unread, sizeof unread, &count);
    CHECK(fd >= 0);
    for (int other : taken)
        close(other);
    CHECK(!setrlimit(RLIMIT_NOFILE, &before));
    char rest[4];
    // What the proxy had not received yet is in the socket.
    CHECK(count + size_t(std::max<ssize_t>(recv(fd, rest, sizeof rest, MSG_DONTWAIT), 0)) == 3);
    close(fd);
}

// Who shares a listening socket that was adopted may clear O_NONBLOCK: the net serves and stops nevertheless.
static void shared_listening_socket_does_not_stop_the_net()
{
    sockaddr_in any;
    int waiting = listening_socket(any);
    Net net;
    int other = dup(waiting), listening = spinio_net_adopt(net.net, waiting);
    CHECK(listening > 0);
    CHECK(!fcntl(other, F_SETFL, fcntl(other, F_GETFL) & ~O_NONBLOCK));
    // Two calls, of which the second one has to wait in the proxy, not in the Linux kernel.
    // A stopped net takes what a ring has room for: 2 s of it.
    spinio::launch_resident_on(net.stream, drip, 1, 32, net.handle, listening, size_t(500));
    spinio::launch_resident_on(net.stream, drip, 1, 32, net.handle, listening, size_t(500));
    int first = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(!connect(first, reinterpret_cast<sockaddr *>(&any), sizeof any));
    char byte;
    CHECK(recv(first, &byte, 1, 0) == 1);
    CHECK(!fcntl(other, F_SETFL, fcntl(other, F_GETFL) & ~O_NONBLOCK));
    close(first);
    CHECK(!spinio_net_stop(net.net));
    net.wait();
    close(other);
}

int main()
{
    for (bool inet : {false, true}) {
        closed_net_has_sent_all(inet, false);
        closed_net_has_sent_all(inet, true);
        shutdown_ends_a_send_without_room(inet);
    }
    socket_with_unread_bytes_sends_before_the_reset();
    limit_of_time_is_one_of_the_call();
    so_it_is_for_programs_that_share_memory();
    socket_comes_back_into_a_table_with_two_places();
    shared_listening_socket_does_not_stop_the_net();
    std::printf("%d failures\n", failures);
    return failures ? 1 : 0;
}
