// Descriptors that others have chosen: of sockets that a program gives away, that come with bytes of UNIX sockets, or through a door. The
// last close of some waits (SO_LINGER); the net answers meanwhile. Prints each failure and exits with 1.
#include "net_echo.h"
#include "net_granule.h"

#include <sys/resource.h>

// Longer than a test waits for an answer.
static const linger long_linger = {1, 150};

// A connection whose close waits, since its peer does not read; its other end.
struct Lingering {
    int peer, s;

    Lingering()
    {
        int ends[2];
        connect_pair(ends, 4096);
        std::vector<char> junk(100000);
        while (send(ends[1], junk.data(), junk.size(), MSG_DONTWAIT) > 0) {
        }
        CHECK(!setsockopt(ends[1], SOL_SOCKET, SO_LINGER, &long_linger, sizeof long_linger));
        peer = ends[0];
        s = ends[1];
    }
    Lingering(const Lingering &) = delete;
    // The other end leaves: the close ends.
    ~Lingering() { close(peer); }

    // Sends it with bytes, several times; false: the other end takes no descriptors. This program's own is closed.
    bool give(int via, const std::string &bytes, size_t copies = 1)
    {
        alignas(cmsghdr) char control[CMSG_SPACE(16 * sizeof s)] = {};
        iovec part = {const_cast<char *>(bytes.data()), bytes.size()};
        msghdr message = {};
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE(copies * sizeof s);
        cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(copies * sizeof s);
        for (size_t i = 0; i < copies; i++)
            std::memcpy(CMSG_DATA(header) + i * sizeof s, &s, sizeof s);
        bool given = sendmsg(via, &message, MSG_NOSIGNAL) == ssize_t(bytes.size());
        CHECK(given || errno == EPERM);
        linger none = {};
        // This close would be the one that waits.
        CHECK(given || !setsockopt(s, SOL_SOCKET, SO_LINGER, &none, sizeof none));
        close(s);
        return given;
    }
};

// A net with a kernel that answers.
struct EchoNet : Net {
    std::string address, unix_address;
    int listening, unix_listening, peer;

    EchoNet() : Net({.connections = 32})
    {
        listening = listener(*this, "tcp://127.0.0.1:0", address);
        unix_listening = listener(*this, "unix:@", unix_address);
        spinio::launch_resident_on(stream, echo_some, 1, 32, handle, listening, 1, words);
        peer = connect_to(address);
    }
    // It answers, a few times: what it has to close is closed meanwhile.
    void answers() const
    {
        for (int i = 0; i < 20; i++) {
            round_trip(peer, 100, unsigned(i));
            usleep(10000);
        }
    }
    ~EchoNet()
    {
        answers();
        close(peer);
        wait();
    }
};

struct Stream {
    cudaStream_t stream;
    Stream() { CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess); }
    void wait() const { CHECK(cudaStreamSynchronize(stream) == cudaSuccess); }
};

// Bytes that Linux takes at once, and the peer does not.
__global__ void send_and_close(net::Handle handle, int s, bool accepts, int64_t *out)
{
    __shared__ char bytes[1000];
    auto g = net::block();
    if (accepts)
        s = net::accept(g, handle, s);
    int64_t sent = 0;
    for (int i = 0; i < 100; i++)
        sent += net::send(g, handle, s, bytes, sizeof bytes);
    out[0] = sent;
    out[1] = net::close(g, handle, s);
}

static void runs(const Stream &stream, const Net &net, int s, bool accepts)
{
    spinio::launch_resident_on(stream.stream, send_and_close, 1, 32, net.handle, s, accepts, net.words + 8);
    stream.wait();
    CHECK(net.words[8] == 100000 && net.words[9] == 0);
}

static void adopted_socket_that_lingers()
{
    EchoNet net;
    Stream stream;
    int ends[2];
    connect_pair(ends, 4096);
    CHECK(!setsockopt(ends[1], SOL_SOCKET, SO_LINGER, &long_linger, sizeof long_linger));
    int s = spinio_net_adopt(net.net, ends[1]);
    CHECK(s > 0);
    runs(stream, net, s, false);
    net.answers();
    close(ends[0]);
}

static void connections_of_an_adopted_listener_that_lingers()
{
    EchoNet net;
    Stream stream;
    sockaddr_in name;
    int listening = listening_socket(name), small = 4096;
    CHECK(!setsockopt(listening, SOL_SOCKET, SO_LINGER, &long_linger, sizeof long_linger));
    int s = spinio_net_adopt(net.net, listening);
    CHECK(s > 0);
    int peer = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(!setsockopt(peer, SOL_SOCKET, SO_RCVBUF, &small, sizeof small));
    CHECK(!connect(peer, reinterpret_cast<sockaddr *>(&name), sizeof name));
    runs(stream, net, s, true);
    net.answers();
    close(peer);
}

// Each byte makes an event.
__global__ void receive_ten(net::Handle handle, int s, int64_t *out)
{
    __shared__ char bytes[10];
    net::set_timeout(net::block(), handle, s, 300000000000, 0);
    out[0] = net::recv(net::block(), handle, s, bytes, sizeof bytes);
}

static void adopted_socket_that_wants_many_bytes_at_a_time()
{
    EchoNet net;
    Stream stream;
    int ends[2], low = 100;
    connect_pair(ends);
    CHECK(!setsockopt(ends[1], SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low));
    int s = spinio_net_adopt(net.net, ends[1]);
    CHECK(s > 0);
    // The net has looked, and waits for an event.
    usleep(100000);
    CHECK(send(ends[0], "0123456789", 10, 0) == 10);
    spinio::launch_resident_on(stream.stream, receive_ten, 1, 32, net.handle, s, net.words + 8);
    stream.wait();
    CHECK(net.words[8] == 10);
    close(ends[0]);
}

static void descriptors_with_bytes()
{
    EchoNet net;
    Stream stream;
    spinio::launch_resident_on(stream.stream, echo_some, 1, 32, net.handle, net.unix_listening, 1, net.words + 8);
    int peer = connect_to(net.unix_address);
    Lingering lingering;
    if (!lingering.give(peer, "x"))
        CHECK(send(peer, "x", 1, 0) == 1);
    char byte = 0;
    CHECK(recv(peer, &byte, 1, 0) == 1 && byte == 'x');
    net.answers();
    close(peer);
    stream.wait();
}

// They wait in the queue before the net has the socket, so it cannot refuse them.
static void descriptors_with_bytes_of_adopted_sockets()
{
    for (int type : {SOCK_STREAM, SOCK_SEQPACKET, SOCK_DGRAM}) {
        EchoNet net;
        Stream stream;
        int ends[2];
        CHECK(!socketpair(AF_UNIX, type, 0, ends));
        Lingering lingering;
        CHECK(lingering.give(ends[0], "0123456789"));
        int s = spinio_net_adopt(net.net, ends[1]);
        CHECK(s > 0);
        spinio::launch_resident_on(stream.stream, receive_ten, 1, 32, net.handle, s, net.words + 8);
        stream.wait();
        CHECK(net.words[8] == 10);
        net.answers();
        close(ends[0]);
    }
}

__global__ void close_one(net::Handle handle, int s, int64_t *out) { out[0] = net::close(net::block(), handle, s); }

static void close_in_kernel(const EchoNet &net, const Stream &stream, int s)
{
    spinio::launch_resident_on(stream.stream, close_one, 1, 32, net.handle, s, net.words + 8);
    stream.wait();
    CHECK(net.words[8] == 0);
}

// A close that waits, with the net: the ring has no room for the bytes with which a descriptor comes, so that it ends with the socket.
struct WaitingClose : Lingering {
    int sender;

    WaitingClose(const EchoNet &net, const Stream &stream)
    {
        int ends[2];
        CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
        std::string much(20000, 'x');
        CHECK(send(ends[0], much.data(), much.size(), 0) == ssize_t(much.size()));
        CHECK(give(ends[0], "x"));
        int s = spinio_net_adopt(net.net, ends[1]);
        CHECK(s > 0);
        close_in_kernel(net, stream, s);
        sender = ends[0];
    }
    ~WaitingClose() { close(sender); }
};

static void descriptors_with_bytes_that_are_not_received()
{
    EchoNet net;
    Stream stream;
    WaitingClose waits(net, stream);
    net.answers();
}

// The program's descriptor is the only one then.
static void released_socket_ends_when_the_program_closes_it()
{
    EchoNet net;
    Stream stream;
    WaitingClose waits(net, stream);
    int ends[2];
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
    timeval limit = {60, 0};
    CHECK(!setsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
    int s = spinio_net_adopt(net.net, ends[1]);
    CHECK(s > 0);
    char bytes[16];
    size_t unread = 0;
    int released = spinio_net_release(net.net, s, bytes, sizeof bytes, &unread);
    CHECK(released >= 0 && unread == 0 && !close(released));
    CHECK(recv(ends[0], bytes, 1, 0) == 0);
    close(ends[0]);
}

// With an announcement, of which it is the socket; several at a time; and with what is none.
static void descriptors_at_a_door()
{
    const std::string none(24, 'x');
    for (const std::string &bytes : {packet(1), none}) {
        for (size_t copies : {1, 5}) {
            EchoNet net;
            int channel = door_socket(net.address, false);
            Lingering lingering;
            CHECK(lingering.give(channel, bytes, copies));
            net.answers();
            close(channel);
            net.answers();
        }
    }
}

// They are in the queue of a connection that the net has not accepted, or not received from, when its listening socket is closed.
static void descriptors_at_a_door_that_is_closed()
{
    EchoNet net;
    Stream stream;
    std::string name;
    int listening = listener(net, "tcp://127.0.0.1:0", name);
    std::vector<int> channels;
    Lingering lingering[4];
    for (Lingering &each : lingering) {
        channels.push_back(door_socket(name, false));
        CHECK(each.give(channels.back(), packet(1)));
    }
    spinio::launch_resident_on(stream.stream, close_one, 1, 32, net.handle, listening, net.words + 8);
    stream.wait();
    net.answers();
    // Its name is free.
    CHECK(spinio_net_listen(net.net, name.c_str(), 1) > 0);
    close(door_socket(name, false));
    for (int channel : channels)
        close(channel);
}

// The net has no number for the connections that wait there.
static void descriptors_at_a_door_that_is_closed_while_the_table_is_full()
{
    EchoNet net;
    Stream stream;
    std::string name;
    int listening = listener(net, "tcp://127.0.0.1:0", name), channel = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    Lingering lingering;
    rlimit before, none;
    // Its own connection is accepted as long as there are descriptors.
    net.answers();
    CHECK(!getrlimit(RLIMIT_NOFILE, &before));
    none = before;
    none.rlim_cur = 3;
    CHECK(!setrlimit(RLIMIT_NOFILE, &none));
    door_socket(name, false, channel);
    CHECK(lingering.give(channel, packet(1)));
    close_in_kernel(net, stream, listening);
    net.answers();
    CHECK(!setrlimit(RLIMIT_NOFILE, &before));
    close(channel);
}

// A file is no socket: nothing is asked of it.
static void file_at_a_door()
{
    EchoNet net;
    int channel = door_socket(net.address, false), file = memfd_create("spinio-file", 0);
    give_packet(channel, packet(1), file);
    char byte;
    CHECK(recv(channel, &byte, 1, 0) == 0);
    close(channel);
    close(file);
}

int main()
{
    adopted_socket_that_lingers();
    connections_of_an_adopted_listener_that_lingers();
    adopted_socket_that_wants_many_bytes_at_a_time();
    descriptors_with_bytes();
    descriptors_with_bytes_of_adopted_sockets();
    descriptors_with_bytes_that_are_not_received();
    released_socket_ends_when_the_program_closes_it();
    descriptors_at_a_door();
    descriptors_at_a_door_that_is_closed();
    descriptors_at_a_door_that_is_closed_while_the_table_is_full();
    file_at_a_door();
    std::printf("%d failures\n", failures);
    return failures != 0;
}
