// Closed sockets whose peers take what was sent late, or never: no byte is lost while its ring is not needed, and where bytes are given
// up the peer of a TCP connection learns it. Prints each failure and exits with 1.
#include "net_echo.h"

#include <sys/resource.h>

#include <atomic>
#include <filesystem>
#include <fstream>

// Sends until the peer has taken nothing for half a second, twice, and closes: how many bytes were sent, and what close said. Between the
// two the proxy answers a call: what was late for it is in the socket then.
__global__ void fill_and_close(net::Handle handle, int s, int64_t *out)
{
    __shared__ char bytes[1000];
    __shared__ net::Address name;
    auto g = net::block();
    for (unsigned i = threadIdx.x; i < sizeof bytes; i += blockDim.x)
        bytes[i] = char(i);
    net::set_timeout(g, handle, s, 0, 500000000);
    int64_t sent = 0, n = 0;
    for (int full = 0; full < 2;) {
        n = net::send(g, handle, s, bytes, sizeof bytes);
        sent += n > 0 ? n : 0;
        full = n > 0 ? 0 : full + 1;
        if (full)
            net::getsockname(g, handle, s, &name);
    }
    out[0] = sent;
    out[1] = net::close(g, handle, s);
}

// A connection whose other end this program has, with small buffers.
static int connection(const Net &net, bool inet, int &peer)
{
    int ends[2], small = 4096;
    if (inet)
        connect_pair(ends, small);
    else
        CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
    setsockopt(ends[1], SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    peer = ends[0];
    int s = spinio_net_adopt(net.net, ends[1]);
    CHECK(s > 0);
    return s;
}

// A closed socket that has bytes to send: how many there were in all.
static int64_t filled_and_closed(Net &net, bool inet, int &peer)
{
    int s = connection(net, inet, peer);
    spinio::launch_resident_on(net.stream, fill_and_close, 1, 32, net.handle, s, net.words);
    net.wait();
    CHECK(net.words[0] > 0 && net.words[1] == 0);
    return net.words[0];
}

// All bytes until the end; which errno that has, 0 for the end of the stream.
static int64_t read_all(int peer, int &end)
{
    char bytes[4096];
    int64_t got = 0;
    ssize_t n;
    while ((n = recv(peer, bytes, sizeof bytes, 0)) > 0)
        got += n;
    end = n < 0 ? errno : 0;
    close(peer);
    return got;
}

static void late_peers_get_all_bytes()
{
    Net net({.linger_ms = 50});
    for (bool inet : {true, false}) {
        int peer, end;
        int64_t sent = filled_and_closed(net, inet, peer);
        // Many times the limit; there are other rings.
        usleep(1000000);
        int64_t got = read_all(peer, end);
        if (got != sent || end) {
            std::printf("%s: %lld of %lld bytes, then %s\n", inet ? "tcp" : "unix", (long long)got, (long long)sent, std::strerror(end));
            failures++;
        }
    }
    waits_for_open(net, 0);
}

// Tries until a closed socket has made room, for a minute.
static int adopt_later(const Net &net, int fd, int refused)
{
    int s = -1;
    for (int i = 0; i < 60000 && s < 0; i++) {
        s = spinio_net_adopt(net.net, fd);
        CHECK(s > 0 || errno == refused);
        usleep(1000);
    }
    return s;
}

// With rings for one connection.
static void closed_socket_gives_way_to_another_after_its_limit()
{
    for (bool inet : {true, false}) {
        Net net({.connections = 1, .linger_ms = 50});
        int peer, end, ends[2];
        int64_t sent = filled_and_closed(net, inet, peer);
        CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
        CHECK(adopt_later(net, ends[1], ENOBUFS) > 0);
        int64_t got = read_all(peer, end);
        // UNIX sockets have no sign for it.
        CHECK(got < sent && end == (inet ? ECONNRESET : 0));
        close(ends[0]);
    }
    Net net({.connections = 1});
    int peer, end, ends[2];
    int64_t sent = filled_and_closed(net, true, peer);
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
    CHECK(spinio_net_adopt(net.net, ends[1]) == -1 && errno == ENOBUFS);
    CHECK(read_all(peer, end) == sent && !end);
    close(ends[0]);
    close(ends[1]);
}

// All would take the peer 5 seconds: it gets one, ten times the limit. It never takes more than half, so that a late proxy finds bytes.
static void closed_socket_of_a_slow_peer_gives_way_too()
{
    Net net({.connections = 1, .ring_bytes = 1 << 20, .linger_ms = 100});
    int peer, end, ends[2];
    int64_t sent = filled_and_closed(net, true, peer), got = 0;
    std::atomic<bool> slow = true;
    std::thread reader([&] {
        char bytes[4096];
        ssize_t n;
        while (slow && got < sent / 2 && (n = recv(peer, bytes, sizeof bytes, 0)) > 0) {
            got += n;
            usleep(20000);
        }
    });
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
    CHECK(adopt_later(net, ends[1], ENOBUFS) > 0);
    slow = false;
    reader.join();
    got += read_all(peer, end);
    CHECK(got < sent && end == ECONNRESET);
    close(ends[0]);
}

// The highest number in the descriptor table of a thread, which has one of its own.
static int highest_descriptor(const char *thread)
{
    int highest = -1;
    for (auto &task : std::filesystem::directory_iterator("/proc/self/task")) {
        std::string name;
        std::getline(std::ifstream(task.path() / "comm"), name);
        if (name != thread)
            continue;
        for (auto &fd : std::filesystem::directory_iterator(task.path() / "fd"))
            highest = std::max(highest, std::stoi(fd.path().filename()));
    }
    return highest;
}

// The proxy needs two descriptors to adopt one. Its table has no more than those of closed sockets.
static void closed_sockets_give_way_to_another_descriptor()
{
    Net net({.connections = 8, .no_upgrade = true, .linger_ms = 50});
    int peers[2], end, ends[2];
    int64_t sent[2];
    for (int i = 0; i < 2; i++)
        sent[i] = filled_and_closed(net, true, peers[i]);
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
    rlimit before, few;
    CHECK(!getrlimit(RLIMIT_NOFILE, &before));
    few = before;
    few.rlim_cur = rlim_t(highest_descriptor("spinio-net")) + 1;
    CHECK(few.rlim_cur > 0);
    CHECK(!setrlimit(RLIMIT_NOFILE, &few));
    CHECK(adopt_later(net, ends[1], EMFILE) > 0);
    CHECK(!setrlimit(RLIMIT_NOFILE, &before));
    int given_up = 0;
    for (int i = 0; i < 2; i++) {
        bool cut = read_all(peers[i], end) < sent[i];
        CHECK(end == (cut ? ECONNRESET : 0));
        given_up += cut;
    }
    CHECK(given_up > 0);
    close(ends[0]);
}

static void end_of_net_is_no_end_of_a_stream_of_which_bytes_are_missing()
{
    int peer, end;
    int64_t sent = 0;
    {
        Net net({.last_linger_ms = 50});
        sent = filled_and_closed(net, true, peer);
    }
    int64_t got = read_all(peer, end);
    CHECK(got < sent && end == ECONNRESET);
}

static void end_of_net_waits_for_a_peer_that_reads()
{
    int peer, end;
    int64_t sent = 0, got = 0;
    std::thread reader;
    {
        Net net({.last_linger_ms = 300000});
        sent = filled_and_closed(net, true, peer);
        reader = std::thread([&] { got = read_all(peer, end); });
    }
    reader.join();
    CHECK(got == sent && !end);
}

int main()
{
    late_peers_get_all_bytes();
    closed_socket_gives_way_to_another_after_its_limit();
    closed_socket_of_a_slow_peer_gives_way_too();
    closed_sockets_give_way_to_another_descriptor();
    end_of_net_is_no_end_of_a_stream_of_which_bytes_are_missing();
    end_of_net_waits_for_a_peer_that_reads();
    std::printf("%d failures\n", failures);
    return failures != 0;
}
