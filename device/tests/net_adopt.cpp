// Sockets that move between this program and a kernel: adopt and release, in the middle of streams in both directions.
//
//   peer ── counted bytes, all the time ──> program, kernel, program ... each receives a part: no byte is lost or twice
//   peer <── the same ───────────────────── program, kernel, program
#include "net_test.h"

#include <fcntl.h>
#include <linux/netlink.h>
#include <poll.h>

__host__ __device__ inline unsigned char byte_at(int64_t i) { return (unsigned char)(i * 131 + (i >> 8) * 7); }

// Receives a part and sends a part, and gives the socket up: words of `out`: where it is, wrong bytes, results.
__global__ void take_a_part(net::Handle handle, int s, int64_t received, int64_t sent, int64_t bytes, int64_t *out, uint64_t *turn)
{
    __shared__ unsigned char buffer[3000];
    auto g = net::block();
    int64_t done = 0, wrong = 0, got = 1;
    while (done < bytes && got > 0) {
        int64_t want = bytes - done < 3000 ? bytes - done : 1 + (done * 7) % 3000;
        got = net::recv(g, handle, s, buffer, size_t(want < bytes - done ? want : bytes - done));
        for (int64_t i = int64_t(threadIdx.x); i < got; i += blockDim.x)
            wrong += buffer[i] != byte_at(received + done + i);
        __syncthreads();
        done += got > 0 ? got : 0;
    }
    int64_t gone = 0;
    while (gone < bytes) {
        int64_t now = bytes - gone < 50 + gone % 2000 ? bytes - gone : 50 + gone % 2000;
        for (int64_t i = int64_t(threadIdx.x); i < now; i += blockDim.x)
            buffer[i] = byte_at(sent + gone + i);
        __syncthreads();
        if (net::send(g, handle, s, buffer, size_t(now)) != now)
            break;
        __syncthreads();
        gone += now;
    }
    int given = net::release(g, handle, s);
    int again = net::release(g, handle, s), late = int(net::recv(g, handle, s, buffer, 1));
    atomicAdd((unsigned long long *)(out + 3), (unsigned long long)wrong);
    __syncthreads();
    if (threadIdx.x == 0) {
        out[0] = done;
        out[1] = gone;
        out[2] = given == 0 && again == -EBADF && late == -EBADF;
        spinio::store_release_system(turn, 1);
    }
}

// Ends of a connection; the second is the peer's.
static void connect_pair(int domain, int type, int (&ends)[2])
{
    if (domain == AF_UNIX)
        CHECK(!socketpair(AF_UNIX, type, 0, ends));
    else
        connect_pair(ends);
}

struct Mine {
    int s;
    int64_t received = 0, sent = 0;
    bool right = true;

    void check(const unsigned char *bytes, size_t count)
    {
        for (size_t i = 0; i < count; i++)
            right = right && bytes[i] == byte_at(received + int64_t(i));
        received += int64_t(count);
    }

    void receive(int64_t bytes)
    {
        std::vector<unsigned char> buffer(static_cast<size_t>(bytes));
        ssize_t got = recv(s, buffer.data(), buffer.size(), MSG_WAITALL);
        CHECK(got == bytes);
        check(buffer.data(), size_t(std::max<ssize_t>(got, 0)));
    }

    void send(int64_t bytes)
    {
        std::vector<unsigned char> buffer(static_cast<size_t>(bytes));
        for (size_t i = 0; i < buffer.size(); i++)
            buffer[i] = byte_at(sent + int64_t(i));
        CHECK(::send(s, buffer.data(), buffer.size(), MSG_NOSIGNAL) == bytes);
        sent += bytes;
    }
};

static int released(const Net &net, int s, Mine *mine)
{
    unsigned char unread[4096];
    size_t count = 99;
    int fd = spinio_net_release(net.net, s, unread, sizeof unread, &count);
    CHECK(fd >= 0 && count <= sizeof unread);
    if (fd < 0)
        std::exit(1); // nothing after this can succeed
    if (mine)
        mine->check(unread, count);
    return fd;
}

static void streams_move_and_no_byte_is_lost(int domain, unsigned fault_seed)
{
    Net net({.fault_seed = fault_seed});
    const int64_t total = 400000;
    int ends[2];
    connect_pair(domain, SOCK_STREAM, ends);
    std::thread sender([&] {
        Mine peer{ends[1]};
        while (peer.sent < total)
            peer.send(std::min<int64_t>(total - peer.sent, 1 + peer.sent % 7000));
        shutdown(ends[1], SHUT_WR);
    });
    std::thread receiver([&] {
        unsigned char buffer[5000];
        Mine peer{ends[1]};
        for (ssize_t got; (got = recv(ends[1], buffer, 1 + size_t(peer.received) % 5000, 0)) > 0;)
            peer.check(buffer, size_t(got));
        CHECK(peer.right && peer.received == total);
    });
    Mine mine{ends[0]};
    auto turn = reinterpret_cast<uint64_t *>(net.words + 100);
    while (mine.received + 30000 < total && mine.sent + 30000 < total) {
        mine.receive(1000);
        mine.send(777);
        int s = spinio_net_adopt(net.net, mine.s);
        CHECK(s > 0 && fcntl(mine.s, F_GETFD) < 0);
        if (failures)
            std::exit(1); // nothing after this can succeed
        const int64_t bytes = 20000 + mine.sent % 5000;
        std::memset(net.words, 0, 1000);
        spinio::launch_resident_on(net.stream, take_a_part, 1, 64, net.handle, s, mine.received, mine.sent, bytes, net.words, turn);
        while (!spinio::load_acquire_system(turn))
            usleep(200);
        CHECK(net.words[0] == bytes && net.words[1] == bytes && net.words[2] == 1 && net.words[3] == 0);
        mine.received += bytes;
        mine.sent += bytes;
        mine.s = released(net, s, &mine);
        CHECK(fcntl(mine.s, F_GETFD) == FD_CLOEXEC && !(fcntl(mine.s, F_GETFL) & O_NONBLOCK));
    }
    mine.send(total - mine.sent);
    shutdown(mine.s, SHUT_WR);
    mine.receive(total - mine.received);
    unsigned char byte;
    CHECK(mine.right && recv(mine.s, &byte, 1, 0) == 0);
    sender.join();
    receiver.join();
    net.wait();
    close(mine.s);
    close(ends[1]);
    CHECK(net.stats().open == 0 && net.stats().violations == 0);
}

// Echoes one message of each connection, or of a socket that is connected.
__global__ void echo_once(net::Handle handle, int s, bool accepts, int64_t *out)
{
    __shared__ unsigned char buffer[100];
    auto g = net::block();
    int connection = accepts ? net::accept(g, handle, s) : s;
    int64_t got = net::recv(g, handle, connection, buffer, sizeof buffer);
    int64_t sent = net::send(g, handle, connection, buffer, size_t(got > 0 ? got : 0));
    if (threadIdx.x == 0)
        out[0] = got == sent ? got : -1;
    net::close(g, handle, connection);
    if (accepts)
        net::release(g, handle, s);
}

static void asks(int s, size_t bytes)
{
    char question[100], answer[100];
    for (size_t i = 0; i < bytes; i++)
        question[i] = char(i * 3);
    CHECK(send(s, question, bytes, MSG_NOSIGNAL) == ssize_t(bytes));
    CHECK(recv(s, answer, sizeof answer, 0) == ssize_t(bytes) && !std::memcmp(question, answer, bytes));
}

static void packets_and_datagrams_move()
{
    for (int type : {SOCK_SEQPACKET, SOCK_DGRAM}) {
        Net net;
        int ends[2];
        connect_pair(AF_UNIX, type, ends);
        // One is there already, the other one comes later; the boundaries stay.
        CHECK(send(ends[1], "first", 5, 0) == 5);
        int s = spinio_net_adopt(net.net, ends[0]);
        CHECK(s > 0);
        spinio::launch_resident_on(net.stream, echo_once, 1, 32, net.handle, s, false, net.words);
        char answer[10];
        CHECK(recv(ends[1], answer, sizeof answer, 0) == 5 && !std::memcmp(answer, "first", 5));
        net.wait();
        CHECK(net.words[0] == 5);
        close(ends[1]);
    }
}

// As a service of systemd gets it: the socket listens before the net is there, and another process has it too.
static void listening_sockets_move(const char *where)
{
    Net net;
    std::string address;
    int first = listener(net, where, address);
    int listening = released(net, first, nullptr);
    int s = spinio_net_adopt(net.net, listening);
    CHECK(s > 0);
    for (int i = 0; i < 2; i++) {
        // The second client is in the backlog while the socket moves.
        int client = connect_to(address), waiting = connect_to(address);
        spinio::launch_resident_on(net.stream, echo_once, 1, 32, net.handle, s, true, net.words);
        asks(client, 44);
        close(client);
        net.wait();
        listening = released(net, s, nullptr);
        int taken = accept(listening, nullptr, nullptr);
        CHECK(taken >= 0 && send(taken, "x", 1, 0) == 1);
        close(taken);
        char byte;
        CHECK(recv(waiting, &byte, 1, 0) == 1 && byte == 'x');
        close(waiting);
        s = spinio_net_adopt(net.net, listening);
        CHECK(s > 0);
    }
    // A kernel ends before the proxy has read its last doorbell.
    for (unsigned waited = 0; net.stats().open != 1 && waited < 300000; waited++)
        usleep(1000);
    CHECK(net.stats().open == 1);
    if (address[5] == '/')
        unlink(address.c_str() + 7);
}

static int errno_of(int result) { return result < 0 ? errno : 0; }

static void what_cannot_move_stays()
{
    Net net({.connections = 2});
    size_t count;
    char unread[8192];
    auto release = [&](int s, size_t size) { return spinio_net_release(net.net, s, unread, size, &count); };
    CHECK(errno_of(spinio_net_adopt(net.net, -1)) == EBADF && errno_of(spinio_net_adopt(net.net, 9999)) == EBADF);
    int none[2];
    CHECK(!pipe(none) && errno_of(spinio_net_adopt(net.net, none[0])) == ENOTSOCK);
    int lonely = socket(AF_UNIX, SOCK_STREAM, 0), link = socket(AF_NETLINK, SOCK_DGRAM, NETLINK_ROUTE);
    CHECK(errno_of(spinio_net_adopt(net.net, lonely)) == ENOTCONN);
    CHECK(errno_of(spinio_net_adopt(net.net, link)) == EAFNOSUPPORT);
    CHECK(fcntl(lonely, F_GETFD) >= 0 && !(fcntl(lonely, F_GETFL) & O_NONBLOCK));
    CHECK(errno_of(release(77, 0)) == EBADF && errno_of(spinio_net_release(net.net, 1, nullptr, 1, &count)) == EFAULT);

    // More bytes than there is room for.
    int ends[2], packets[2], more[2];
    connect_pair(AF_UNIX, SOCK_STREAM, ends);
    CHECK(send(ends[1], unread, 5000, 0) == 5000);
    int s = spinio_net_adopt(net.net, ends[0]);
    uint64_t before = 0;
    while ((before = net.stats().bytes_received) < 4096)
        usleep(500);
    CHECK(errno_of(release(s, 4095)) == EMSGSIZE);
    int fd = release(s, 4096);
    CHECK(fd >= 0 && count == 4096 && recv(fd, unread, sizeof unread, 0) == 904);

    // A packet that no kernel has received, and no place for another socket meanwhile.
    connect_pair(AF_UNIX, SOCK_SEQPACKET, packets);
    s = spinio_net_adopt(net.net, packets[0]);
    connect_pair(AF_UNIX, SOCK_STREAM, more);
    CHECK(errno_of(spinio_net_adopt(net.net, more[0])) == ENOBUFS && fcntl(more[0], F_GETFD) >= 0);
    CHECK(send(packets[1], "abc", 3, 0) == 3);
    while (net.stats().bytes_received < before + 3)
        usleep(500);
    CHECK(errno_of(release(s, 8192)) == EBUSY);
    spinio::launch_resident_on(net.stream, echo_once, 1, 32, net.handle, s, false, net.words);
    char answer[8];
    CHECK(recv(packets[1], answer, sizeof answer, 0) == 3);
    net.wait();

    // After the end of the net the program can have its sockets back.
    while (net.stats().open)
        usleep(500);
    s = spinio_net_adopt(net.net, more[0]);
    CHECK(s > 0 && !spinio_net_stop(net.net));
    CHECK(errno_of(spinio_net_adopt(net.net, fd)) == ESHUTDOWN);
    CHECK((more[0] = release(s, 0)) >= 0 && send(more[0], "y", 1, 0) == 1);
    for (int used : {none[0], none[1], lonely, link, ends[1], fd, packets[1], more[0], more[1]})
        CHECK(!close(used));
}

// The peer reads only once the kernel has filled all buffers.
__global__ void send_much(net::Handle handle, int s, int64_t *out, uint64_t *turn)
{
    __shared__ unsigned char buffer[1000];
    auto g = net::block();
    int64_t sent = 0, now = 1000;
    net::set_timeout(g, handle, s, 0, 20000000);
    while (now == 1000) {
        for (int64_t i = int64_t(threadIdx.x); i < 1000; i += blockDim.x)
            buffer[i] = byte_at(sent + i);
        __syncthreads();
        now = net::send(g, handle, s, buffer, 1000);
        __syncthreads();
        sent += now > 0 ? now : 0;
    }
    net::release(g, handle, s);
    if (threadIdx.x == 0) {
        out[0] = sent;
        spinio::store_release_system(turn, 1);
    }
}

static void bytes_that_the_peer_does_not_take_keep_the_socket()
{
    Net net;
    int ends[2];
    connect_pair(AF_UNIX, SOCK_STREAM, ends);
    int s = spinio_net_adopt(net.net, ends[0]);
    auto turn = reinterpret_cast<uint64_t *>(net.words + 100);
    spinio::launch_resident_on(net.stream, send_much, 1, 32, net.handle, s, net.words, turn);
    while (!spinio::load_acquire_system(turn))
        usleep(500);
    size_t count;
    CHECK(errno_of(spinio_net_release(net.net, s, nullptr, 0, &count)) == EBUSY);
    std::thread peer([&] {
        Mine peer{ends[1]};
        unsigned char buffer[5000];
        for (ssize_t got; (got = recv(ends[1], buffer, sizeof buffer, 0)) > 0;)
            peer.check(buffer, size_t(got));
        CHECK(peer.right && peer.received == net.words[0]);
    });
    int fd;
    while ((fd = spinio_net_release(net.net, s, nullptr, 0, &count)) < 0 && errno == EBUSY) {
    }
    CHECK(fd >= 0);
    close(fd);
    peer.join();
    net.wait();
    close(ends[1]);
}

static int open_descriptors()
{
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (folder && readdir(folder))
        count++;
    if (folder)
        closedir(folder);
    return count;
}

int main()
{
    { Net first; } // what the device opens once
    int before = open_descriptors();
    int probe[2], tried;
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, probe));
    {
        Net net;
        tried = spinio_net_adopt(net.net, probe[0]);
        if (tried < 0 && (errno == EPERM || errno == ENOSYS)) {
            std::printf("skipped: this sandbox refuses pidfd_getfd (%s)\n", spinio_last_error());
            return 0;
        }
        CHECK(tried > 0);
    }
    close(probe[1]);
    for (int domain : {AF_UNIX, AF_INET}) {
        streams_move_and_no_byte_is_lost(domain, 0);
        streams_move_and_no_byte_is_lost(domain, unsigned(domain) + 5);
    }
    packets_and_datagrams_move();
    listening_sockets_move("tcp://127.0.0.1:0");
    listening_sockets_move(("unix:///tmp/spinio-adopt-" + std::to_string(getpid())).c_str());
    what_cannot_move_stays();
    bytes_that_the_peer_does_not_take_keep_the_socket();
    CHECK(open_descriptors() == before);
    std::printf("%d failures\n", failures);
    return failures != 0;
}
