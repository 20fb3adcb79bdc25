// Programs that share memory with kernels (spinio_socket_...): event sets, reasons, the end of processes in each step, peers
// that break the rules on either side. Prints each failure and exits with 1. The same results as through Linux: net_scripts.cpp.
#include "net_echo.h"
#include "net_granule.h"

#include <poll.h>

static const char *self;

// Of this program, with `arguments`.
static pid_t start(std::vector<std::string> arguments)
{
    pid_t child = fork();
    if (child == 0) {
        std::vector<char *> all = {const_cast<char *>(self)};
        for (auto &argument : arguments)
            all.push_back(argument.data());
        all.push_back(nullptr);
        execv("/proc/self/exe", all.data());
        _exit(127);
    }
    return child;
}

static int finish(pid_t child)
{
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    return status;
}

static spinio_socket *open_socket(const std::string &address, bool no_upgrade = false)
{
    struct spinio_socket_options options = {sizeof options, no_upgrade, 60000, 60000};
    spinio_socket *s = spinio_socket_connect(address.c_str(), &options);
    CHECK(s);
    return s;
}

// --- event sets ---

static void event_sets_hear_of_programs(const char *where, unsigned clients, int rounds)
{
    Net net({.connections = 64});
    std::string address;
    int s = listener(net, where, address), set = spinio_net_set(net.net);
    CHECK(!spinio_net_add(net.net, set, s, net::IN));
    spinio::launch_resident_on(net.stream, echo_set, 2, 64, net.handle, set);
    std::vector<std::thread> threads;
    for (unsigned client = 0; client < clients; client++)
        threads.emplace_back([=] {
            unsigned seed = client;
            spinio_socket *socket = open_socket(address);
            CHECK(is_shared(socket));
            for (int round = 0; round < rounds; round++) {
                std::vector<char> bytes(1 + (seed = seed * 1664525 + 1013904223) % 9000), back(bytes.size());
                for (auto &byte : bytes)
                    byte = char((seed = seed * 1664525 + 1013904223) >> 24);
                std::thread writer([&] { CHECK(spinio_socket_send(socket, bytes.data(), bytes.size(), 0) == ssize_t(bytes.size())); });
                CHECK(spinio_socket_recv(socket, back.data(), back.size(), MSG_WAITALL) == ssize_t(back.size()) && back == bytes);
                writer.join();
            }
            char more;
            CHECK(spinio_socket_recv(socket, &more, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
            CHECK(!spinio_socket_shutdown(socket, SHUT_WR) && spinio_socket_recv(socket, &more, 1, 0) == 0);
            CHECK(spinio_socket_send(socket, "x", 1, 0) == -1 && errno == EPIPE);
            CHECK(!spinio_socket_close(socket));
        });
    for (auto &thread : threads)
        thread.join();
    waits_for_open(net, 1);
    CHECK(net.stats().shared == clients && net.stats().bytes_received == 0 && net.stats().violations == 0);
    CHECK(!spinio_net_stop(net.net));
    net.wait();
}

// --- the end of a process ---

// Of each connection: bytes received, what ended that, and what ends sending.
__global__ void drain(net::Handle handle, int listener, int connections, int greeting, int64_t *out)
{
    __shared__ char buffer[300];
    auto g = net::block();
    for (int i = 0; i < connections; i++) {
        int s = net::accept(g, handle, listener);
        int64_t got = net::send(g, handle, s, buffer, size_t(greeting)), total = 0, error = 0;
        while ((got = net::recv(g, handle, s, buffer, sizeof buffer)) > 0)
            total += got;
        for (int tries = 0; !error && tries < 100000; tries++) {
            int64_t sent = net::send(g, handle, s, buffer, 100, net::DONTWAIT);
            error = sent < 0 && sent != -EAGAIN ? sent : 0;
            if (threadIdx.x == 0)
                spinio::wait_hint();
        }
        net::close(g, handle, s);
        if (threadIdx.x == 0)
            out[i * 3] = total, out[i * 3 + 1] = got, out[i * 3 + 2] = error;
        __syncthreads();
    }
}

// A client that ends without a word, or closes; with bytes that it has not received, or without.
static int client(const std::string &address, const std::string &how, bool no_upgrade)
{
    spinio_socket *s = open_socket(address, no_upgrade);
    if (!s || is_shared(s) == no_upgrade)
        return 2;
    std::vector<char> bytes(3000);
    if (spinio_socket_send(s, bytes.data(), bytes.size(), 0) != 3000)
        return 3;
    // The greeting has come.
    if (spinio_socket_recv(s, bytes.data(), 1, MSG_PEEK) != 1)
        return 4;
    if (how != "unread" && spinio_socket_recv(s, bytes.data(), 200, MSG_WAITALL) != 200)
        return 5;
    if (how != "close")
        raise(SIGKILL);
    return spinio_socket_close(s) ? 6 : 0;
}

static void kernels_see_the_end_of_a_program_as_through_linux(const char *where)
{
    std::vector<int64_t> results[2];
    for (bool no_upgrade : {false, true}) {
        Net net;
        std::string address;
        int s = listener(net, where, address);
        spinio::launch_resident_on(net.stream, drain, 1, 32, net.handle, s, 3, 200, net.words);
        for (const char *how : {"kill", "unread", "close"}) {
            int status = finish(start({"client", address, how, no_upgrade ? "1" : "0"}));
            CHECK(how[0] == 'c' ? status == 0 : WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        }
        net.wait();
        waits_for_open(net, 1);
        CHECK(net.stats().shared == (no_upgrade ? 0 : 3));
        results[no_upgrade].assign(net.words, net.words + 9);
        // Through Linux the error of a connection may be followed by that of sending.
        if (results[no_upgrade][5] == -EPIPE)
            results[no_upgrade][5] = -ECONNRESET;
        if (where[0] == 'u')
            unlink(where + 7);
    }
    for (int i = 0; i < 9; i++)
        if (results[0][size_t(i)] != results[1][size_t(i)]) {
            std::printf("%s: result %d is %lld over shared memory, %lld through Linux\n", where, i, (long long)results[0][size_t(i)],
                        (long long)results[1][size_t(i)]);
            failures++;
        }
    CHECK(results[0][0] == 3000 && results[0][1] == 0 && results[0][4] == -ECONNRESET);
}

__global__ void greet_and_wait(net::Handle handle, int listener)
{
    __shared__ char buffer[300];
    auto g = net::block();
    int s = net::accept(g, handle, listener);
    net::send(g, handle, s, buffer, 200);
    while (net::recv(g, handle, s, buffer, sizeof buffer) > 0) {
    }
}

// A net in a process that is killed: what its kernel has sent is received, and then the end.
static int server(const std::string &where)
{
    Net net;
    std::string address;
    int s = listener(net, where.c_str(), address);
    spinio::launch_resident_on(net.stream, greet_and_wait, 1, 32, net.handle, s);
    std::printf("ready\n");
    std::fflush(stdout);
    for (;;)
        pause();
}

static void program_sees_the_end_of_the_kernels_process(bool no_upgrade)
{
    std::string address = "unix:@spinio-shared-" + std::to_string(getpid());
    int ready[2];
    CHECK(!pipe(ready));
    int out = dup(1);
    dup2(ready[1], 1);
    pid_t child = start({"server", address});
    dup2(out, 1);
    close(out);
    close(ready[1]);
    char text[8];
    CHECK(read(ready[0], text, sizeof text) > 0);
    close(ready[0]);
    spinio_socket *s = open_socket(address, no_upgrade);
    CHECK(is_shared(s) == !no_upgrade);
    char bytes[300];
    CHECK(spinio_socket_recv(s, bytes, 100, MSG_WAITALL) == 100);
    CHECK(!kill(child, SIGKILL));
    finish(child);
    CHECK(spinio_socket_recv(s, bytes, 200, MSG_WAITALL) == 100);
    CHECK(spinio_socket_recv(s, bytes, 200, 0) == 0);
    ssize_t sent = 0;
    for (int i = 0; i < 10000 && sent >= 0; i++)
        if ((sent = spinio_socket_send(s, bytes, 100, 0)) >= 0)
            usleep(1000);
    CHECK(sent == -1 && errno == EPIPE);
    CHECK(!spinio_socket_close(s));
}

// --- reasons ---

static void reasons_are_told()
{
    Net net;
    std::string address;
    int s = listener(net, "tcp://127.0.0.1:0", address), set = spinio_net_set(net.net);
    CHECK(!spinio_net_add(net.net, set, s, net::IN));
    spinio::launch_resident_on(net.stream, echo_set, 1, 32, net.handle, set);
    auto works = [](spinio_socket *socket) {
        char back[5];
        CHECK(spinio_socket_send(socket, "hello", 5, 0) == 5 && spinio_socket_recv(socket, back, 5, MSG_WAITALL) == 5 && !std::memcmp(back, "hello", 5));
    };
    // Sixteen connections of the net have four granules.
    std::vector<spinio_socket *> sockets;
    for (int i = 0; i < 5; i++) {
        sockets.push_back(open_socket(address));
        works(sockets.back());
        CHECK(is_shared(sockets.back()) == (i < 4));
    }
    CHECK(transport_of(sockets[4]) == "kernel: the net has no memory left for programs" && net.stats().kept_by_granules == 1);
    for (auto socket : sockets)
        CHECK(!spinio_socket_close(socket));
    waits_for_open(net, 1);
    // The same process may have them again; another one may not.
    sockets = {open_socket(address), open_socket(address, true)};
    CHECK(is_shared(sockets[0]) && transport_of(sockets[1]) == "kernel: no_upgrade of the options");
    for (auto socket : sockets) {
        works(socket);
        CHECK(!spinio_socket_close(socket));
    }
    CHECK(finish(start({"ask", address, "kernel: the net has no memory left for programs"})) == 0);
    setenv("SPINIO_NET_UPGRADE", "off", 1);
    CHECK(finish(start({"ask", address, "kernel: SPINIO_NET_UPGRADE=off"})) == 0);
    unsetenv("SPINIO_NET_UPGRADE");
    waits_for_open(net, 1);
    CHECK(!spinio_net_stop(net.net));
    net.wait();
    CHECK(!spinio_socket_connect("tcp://127.0.0.1:1", nullptr) && errno == ECONNREFUSED);
    CHECK(!spinio_socket_connect("tcp://localhost:1", nullptr) && errno == EINVAL);
}

static int ask(const std::string &address, const std::string &expected)
{
    spinio_socket *s = open_socket(address);
    char back;
    CHECK(transport_of(s) == expected && spinio_socket_send(s, "x", 1, 0) == 1 && spinio_socket_recv(s, &back, 1, 0) == 1);
    CHECK(!spinio_socket_close(s));
    return failures != 0;
}

// --- peers that break the rules ---

// A program that goes as many steps as it wants: announced, connected, offered, agreed.
struct RawPeer {
    int channel, anchor, memory = -1;
    volatile uint64_t *words = nullptr;
    uint64_t generation = 0;

    RawPeer(const std::string &address, int steps)
    {
        channel = door_socket(address, false);
        sockaddr_in to;
        anchor = bound_anchor(address, to);
        if (steps > 0) {
            give_packet(channel, packet(1), anchor);
            CHECK(take_packet(channel) == packet(2));
        }
        if (steps > 1)
            CHECK(!connect(anchor, reinterpret_cast<sockaddr *>(&to), sizeof to));
        if (steps > 2) {
            std::string offer = take_packet(channel, &memory);
            CHECK(offer.size() == 24 && memory >= 0);
            uint64_t word;
            std::memcpy(&word, offer.data() + 8, 8);
            generation = word >> 8;
            CHECK((word & 0xff) == 12 && fcntl(memory, F_GET_SEALS) == (F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW));
            words = static_cast<uint64_t *>(mmap(nullptr, 4096 * 3, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0));
        }
        if (steps > 3) {
            give_packet(channel, packet(5));
            CHECK(take_packet(channel) == packet(6));
        }
    }

    ~RawPeer()
    {
        close(channel);
        close(anchor);
        if (words)
            munmap(const_cast<uint64_t *>(words), 4096 * 3), close(memory);
    }
};

// What ends each connection of a block; 1 before.
__global__ void ends(net::Handle handle, int listener, int connections, int64_t *out)
{
    __shared__ char buffer[300];
    auto g = net::block();
    for (int i = 0; i < connections; i++) {
        int s = net::accept(g, handle, listener);
        int64_t got;
        while ((got = net::recv(g, handle, s, buffer, sizeof buffer)) > 0) {
        }
        net::close(g, handle, s);
        if (threadIdx.x == 0)
            spinio::store_release_system(reinterpret_cast<uint64_t *>(out + blockIdx.x * 4 + i), uint64_t(got));
    }
}

static void program_that_breaks_the_rules_ends_its_own_connection_only()
{
    Net net;
    std::string address;
    int s = listener(net, "tcp://127.0.0.1:0", address);
    std::fill(net.words, net.words + 8, 1);
    spinio::launch_resident_on(net.stream, ends, 2, 32, net.handle, s, 4, net.words);
    // One block has an honest program, the other one all the others.
    spinio_socket *honest = open_socket(address);
    CHECK(is_shared(honest) && spinio_socket_send(honest, "x", 1, 0) == 1);
    auto waits_for_ends = [&](int wanted) {
        for (int wait = 0; wait < 60000; wait++, usleep(1000)) {
            int ended = 0;
            for (int at = 0; at < 8; at++)
                ended += __atomic_load_n(net.words + at, __ATOMIC_ACQUIRE) != 1;
            if (ended >= wanted)
                return;
        }
    };
    // It leaves before it connects.
    for (int steps = 0; steps < 2; steps++)
        RawPeer leaves(address, steps);
    for (int i = 0; i < 3; i++) {
        RawPeer peer(address, 4);
        // A connection that ends before a kernel has accepted it is gone.
        for (int wait = 0; wait < 60000 && net.stats().accepted < uint64_t(i) + 2; wait++)
            usleep(1000);
        if (i == 0) {
            // More than the ring has: the kernel finds it.
            peer.words[0] = (((uint64_t(1) << 48) - 1000 + 4097) & ((uint64_t(1) << 48) - 1)) | peer.generation << 48;
        } else if (i == 1) {
            // Bytes where none may come.
            CHECK(send(peer.anchor, "x", 1, MSG_NOSIGNAL) == 1);
        } else {
            // A packet that is none.
            give_packet(peer.channel, "x");
        }
        waits_for_ends(i + 1);
    }
    // It leaves after the offer.
    {
        RawPeer leaves(address, 3);
    }
    waits_for_ends(4);
    const int64_t *other = net.words + (net.words[0] == 1 ? 4 : 0);
    CHECK(other[0] == -EPROTO && other[1] == -ECONNRESET && other[2] == -ECONNRESET && other[3] == 0);
    CHECK(net.stats().violations == 2);
    // The other one has lived through all this. Its block serves the rest.
    CHECK(spinio_socket_send(honest, "y", 1, 0) == 1 && !spinio_socket_close(honest));
    for (int steps = 2; steps <= 4; steps++)
        RawPeer leaves(address, steps);
    net.wait();
    const int64_t *last = net.words + (other == net.words ? 4 : 0);
    CHECK(last[0] == 0 && last[1] == 0 && last[2] == 0 && last[3] == 0);
    waits_for_open(net, 1);
}

static void rule_that_is_broken_before_accept_resets_the_connection()
{
    Net net;
    std::string address;
    listener(net, "tcp://127.0.0.1:0", address);
    RawPeer peer(address, 4);
    give_packet(peer.channel, "x");
    char byte;
    CHECK(recv(peer.anchor, &byte, 1, 0) == -1 && errno == ECONNRESET && net.stats().violations == 1);
}

// A door whose holder does not keep to the steps: the program goes on with Linux, and no byte is lost.
static void program_does_not_trust_the_holder_of_a_door()
{
    for (int what = 0; what < 4; what++) {
        sockaddr_in at;
        int listening = listening_socket(at);
        std::string address = text_of(at);
        int door = door_socket(address, true);
        std::thread holder([&] {
            int channel = accept(door, nullptr, nullptr);
            take_packet(channel);
            if (what > 0)
                give_packet(channel, packet(2));
            // Memory that can shrink, memory that is too small, no memory.
            int file = what < 3 ? memfd_create("x", MFD_ALLOW_SEALING) : -1;
            if (what > 0) {
                if (what == 2)
                    CHECK(!ftruncate(file, 4096) && !fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK));
                else if (what == 1)
                    CHECK(!ftruncate(file, 4096 * 3));
                give_packet(channel, packet(4, 12 | 1 << 8), file);
            }
            close(channel);
            if (file >= 0)
                close(file);
        });
        spinio_socket *s = open_socket(address);
        CHECK(!is_shared(s));
        int other = accept(listening, nullptr, nullptr);
        char back[5];
        CHECK(spinio_socket_send(s, "hello", 5, 0) == 5 && recv(other, back, 5, MSG_WAITALL) == 5 && !std::memcmp(back, "hello", 5));
        CHECK(!spinio_socket_close(s));
        holder.join();
        for (int fd : {listening, door, other})
            close(fd);
    }
}

int main(int count, char **arguments)
{
    self = arguments[0];
    if (count == 5 && !std::strcmp(arguments[1], "client"))
        return client(arguments[2], arguments[3], arguments[4][0] == '1');
    if (count == 3 && !std::strcmp(arguments[1], "server"))
        return server(arguments[2]);
    if (count == 4 && !std::strcmp(arguments[1], "ask"))
        return ask(arguments[2], arguments[3]);
    {
        // What the library keeps open for good is open after this.
        Net first;
    }
    const int descriptors = open_descriptors();
    std::string path = "unix:///tmp/spinio-shared-" + std::to_string(getpid());
    event_sets_hear_of_programs("tcp://127.0.0.1:0", 3, 20);
    event_sets_hear_of_programs(path.c_str(), 3, 20);
    unlink(path.c_str() + 7);
    if (has_ipv6())
        event_sets_hear_of_programs("tcp://[::]:0", 2, 5);
    kernels_see_the_end_of_a_program_as_through_linux("tcp://127.0.0.1:0");
    kernels_see_the_end_of_a_program_as_through_linux(path.c_str());
    program_sees_the_end_of_the_kernels_process(false);
    program_sees_the_end_of_the_kernels_process(true);
    reasons_are_told();
    program_that_breaks_the_rules_ends_its_own_connection_only();
    rule_that_is_broken_before_accept_resets_the_connection();
    program_does_not_trust_the_holder_of_a_door();
    CHECK(open_descriptors() == descriptors && granules_mapped() == 0);
    std::printf("%d failures\n", failures);
    return failures != 0;
}
