// What other processes do to sockets of kernels: a peer that is killed in a long transfer, one that shares or squats an
// address, network namespaces, a process that is stopped for seconds, several nets at once, forks and device calls meanwhile. In
// each: right bytes or a true error, and nothing left: no descriptor, no proxy, no port.
//
//   net_process_faults [MIB [SECONDS]]      of a transfer each way, by default 16; for which a process is stopped, by default 2
#include "net_process.h"

#include <atomic>

#include <sched.h>

__host__ __device__ inline unsigned char byte_of(uint64_t at) { return (unsigned char)(at * 7 + (at >> 8) * 3 + (at >> 16)); }

// Block 0 receives, block 1 sends on the same connection; out: result and bytes of both, and how many were wrong.
__global__ void both_ways(net::Handle handle, int listener, uint64_t *turn, int64_t *out)
{
    __shared__ unsigned char bytes[4096];
    auto g = net::block();
    uint64_t total = 0;
    int64_t moved = 0;
    if (blockIdx.x == 0) {
        int s = net::accept(g, handle, listener), wrong = 0;
        if (g.leads())
            spinio::store_release_system(turn, uint64_t(s));
        for (; (moved = net::recv(g, handle, s, bytes, sizeof bytes)) > 0; total += uint64_t(moved)) {
            bool right = true;
            for (unsigned i = threadIdx.x; i < moved; i += blockDim.x)
                right = right && bytes[i] == byte_of(total + i);
            wrong += __syncthreads_count(!right);
        }
        out[2] = wrong;
        if (g.leads()) {
            spinio::Backoff waiting;
            while (!spinio::load_acquire_system(turn + 1))
                waiting.pause();
        }
        __syncthreads();
        net::close(g, handle, s);
    } else {
        if (g.leads()) {
            spinio::Backoff waiting;
            while (!spinio::load_acquire_system(turn))
                waiting.pause();
        }
        __syncthreads();
        int s = int(spinio::load_acquire_system(turn));
        do {
            for (unsigned i = threadIdx.x; i < sizeof bytes; i += blockDim.x)
                bytes[i] = byte_of(total + i);
            __syncthreads();
            moved = net::send(g, handle, s, bytes, sizeof bytes);
            total += moved > 0 ? uint64_t(moved) : 0;
        } while (moved > 0);
        if (g.leads())
            spinio::store_release_system(turn + 1, 1);
    }
    out[3 * blockIdx.x] = moved;
    out[3 * blockIdx.x + 1] = int64_t(total);
}

// The peer, until it is killed. It ends by itself if a byte is wrong.
[[noreturn]] static void use_both_ways(const std::string &address)
{
    int s = connect_to(address);
    std::thread([s] {
        std::vector<unsigned char> bytes(65536);
        for (uint64_t at = 0;; at += bytes.size()) {
            for (size_t i = 0; i < bytes.size(); i++)
                bytes[i] = byte_of(at + i);
            if (send(s, bytes.data(), bytes.size(), MSG_NOSIGNAL) != ssize_t(bytes.size()))
                _exit(3);
        }
    }).detach();
    std::vector<unsigned char> bytes(65536);
    ssize_t got;
    for (uint64_t at = 0; (got = recv(s, bytes.data(), bytes.size(), 0)) > 0; at += uint64_t(got))
        for (ssize_t i = 0; i < got; i++)
            if (bytes[size_t(i)] != byte_of(at + uint64_t(i)))
                _exit(4);
    _exit(5);
}

static void peer_killed_in_a_long_transfer_ends_its_connection_only(const std::string &where, uint64_t bytes)
{
    NothingLeft nothing(__func__);
    std::string address, other_address;
    {
        Net net({.ring_bytes = 65536});
        int s = listener(net, where.c_str(), address), other = listener(net, "tcp://127.0.0.1:0", other_address);
        cudaStream_t stream;
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
        spinio::launch_resident_on(net.stream, both_ways, 2, 64, net.handle, s, reinterpret_cast<uint64_t *>(net.words + 100), net.words);
        spinio::launch_resident_on(stream, echo_some, 1, 32, net.handle, other, 1, net.words + 50);
        int peer = connect_to(other_address);
        Child child({"--both-ways", address});
        for (struct spinio_net_stats now = net.stats(); now.bytes_received < bytes || now.bytes_sent < bytes; now = net.stats()) {
            // Not the kill, but an end of its own: then the bytes do not come.
            if (waitpid(child.pid, nullptr, WNOHANG | WNOWAIT) == child.pid)
                break;
            usleep(1000);
        }
        round_trip(peer, 20000, 1);
        CHECK(!kill(child.pid, SIGKILL));
        int status = child.ends();
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        net.wait();
        round_trip(peer, 20000, 2);
        close(peer);
        CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
        cudaStreamDestroy(stream);
        const int64_t received = net.words[0], sent = net.words[3];
        if ((received != 0 && received != -ECONNRESET) || (sent != -EPIPE && sent != -ECONNRESET)) {
            std::printf("%s: recv returns %lld and send %lld after the kill\n", where.c_str(), (long long)received, (long long)sent);
            failures++;
        }
        CHECK(uint64_t(net.words[1]) >= bytes - 65536 && uint64_t(net.words[4]) >= bytes && net.words[2] == 0);
        waits_for_open(net, 2);
        CHECK(net.stats().violations == 0);
    }
    Net again;
    CHECK(spinio_net_listen(again.net, address.c_str(), 1) > 0);
}

// Answers each connection with a letter.
__global__ void answer_each(net::Handle handle, int listener)
{
    __shared__ char letter;
    auto g = net::block();
    for (;;) {
        int s = net::accept(g, handle, listener);
        if (s < 0)
            return;
        letter = 'k';
        __syncthreads();
        net::send(g, handle, s, &letter, 1);
        net::close(g, handle, s);
    }
}

// Connects and counts the answers: out[letter].
__global__ void ask_often(net::Handle handle, net::Address address, int count, int64_t *out)
{
    __shared__ unsigned char letter;
    auto g = net::block();
    for (int i = 0; i < count; i++) {
        int s = net::socket(g, handle, net::INET, net::STREAM, 0);
        letter = 0;
        __syncthreads();
        int64_t failed = net::connect(g, handle, s, address), got = failed ? failed : net::recv(g, handle, s, &letter, 1);
        __syncthreads();
        if (g.leads())
            out[got == 1 ? letter : 0]++;
        net::close(g, handle, s);
    }
}

static int listen_beside(unsigned short &port)
{
    int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    socklen_t length = sizeof address;
    CHECK(!setsockopt(s, SOL_SOCKET, SO_REUSEPORT, &on, sizeof on) && !bind(s, reinterpret_cast<sockaddr *>(&address), sizeof address));
    CHECK(!listen(s, 128) && !getsockname(s, reinterpret_cast<sockaddr *>(&address), &length));
    port = ntohs(address.sin_port);
    return s;
}

// A port of which kernels and a program share the connections, also those of kernels of the same net.
static void port_is_shared_with_a_program()
{
    NothingLeft nothing(__func__);
    const int count = 64;
    unsigned short port = 0;
    Net net;
    int ours = spinio_net_adopt(net.net, listen_beside(port)), theirs = listen_beside(port);
    CHECK(ours > 0);
    std::thread program([theirs] {
        for (int s; (s = accept(theirs, nullptr, nullptr)) >= 0; close(s))
            CHECK(send(s, "p", 1, MSG_NOSIGNAL) == 1);
    });
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    spinio::launch_resident_on(net.stream, answer_each, 2, 32, net.handle, ours);
    spinio::launch_resident_on(stream, ask_often, 1, 32, net.handle, net::Address::inet(127, 0, 0, 1, port), count, net.words);
    int letters[128] = {};
    for (int i = 0; i < count; i++) {
        int peer = connect_to("tcp://127.0.0.1:" + std::to_string(port));
        char letter = 0;
        CHECK(recv(peer, &letter, 1, 0) == 1);
        letters[letter & 127]++;
        close(peer);
    }
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    cudaStreamDestroy(stream);
    CHECK(letters['k'] > 0 && letters['p'] > 0 && letters['k'] + letters['p'] == count);
    CHECK(net.words['k'] > 0 && net.words['p'] > 0 && net.words['k'] + net.words['p'] == count);
    CHECK(net.stats().upgraded <= uint64_t(net.words['k']) && net.stats().violations == 0);
    shutdown(theirs, SHUT_RDWR);
    program.join();
    close(theirs);
    CHECK(!spinio_net_stop(net.net));
    net.wait();
}

// Holds a UNIX name and a port as another user, and answers.
static void squat(const std::string &name)
{
    if (getuid() == 0)
        CHECK(!setgid(65534) && !setuid(65534));
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    unsigned short port = 0;
    int inet = listen_beside(port), local = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    CHECK(!bind(local, reinterpret_cast<sockaddr *>(&address), socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size())) && !listen(local, 8));
    say(std::to_string(port));
    int s = accept(local, nullptr, nullptr);
    char bytes[64];
    for (ssize_t got; (got = recv(s, bytes, sizeof bytes, 0)) > 0;)
        CHECK(send(s, bytes, size_t(got), MSG_NOSIGNAL) == got);
    close(inet);
}

__global__ void ask_unix(net::Handle handle, net::Address address, int64_t *out)
{
    __shared__ char bytes[8];
    auto g = net::block();
    int s = net::socket(g, handle, net::UNIX, net::STREAM, 0);
    out[0] = net::connect(g, handle, s, address);
    if (threadIdx.x < 8)
        bytes[threadIdx.x] = char('a' + threadIdx.x);
    __syncthreads();
    out[1] = net::send(g, handle, s, bytes, 8);
    out[2] = net::recv(g, handle, s, bytes, 8, net::WAITALL);
    out[3] = bytes[7];
    out[4] = net::close(g, handle, s);
}

static void address_that_another_user_holds_is_in_use()
{
    NothingLeft nothing(__func__);
    std::string name = "spinio-squatted-" + std::to_string(getpid());
    Net net;
    Child child({"--squat", name});
    std::string tcp = "tcp://127.0.0.1:" + child.hear();
    CHECK(spinio_net_listen(net.net, ("unix:@" + name).c_str(), 1) == -1 && errno == EADDRINUSE);
    CHECK(spinio_net_listen(net.net, tcp.c_str(), 1) == -1 && errno == EADDRINUSE);
    spinio::launch_resident_on(net.stream, ask_unix, 1, 32, net.handle, net::Address::abstract(name.c_str()), net.words);
    net.wait();
    const int64_t want[] = {0, 8, 8, 'h', 0};
    CHECK(!std::memcmp(net.words, want, sizeof want) && net.stats().upgraded == 0);
    CHECK(child.ends() == 0);
    CHECK(spinio_net_listen(net.net, ("unix:@" + name).c_str(), 1) > 0 && spinio_net_listen(net.net, tcp.c_str(), 1) > 0);
    waits_for_open(net, 2);
}

// A process with a net: an echo of some connections.
static void serve_for_parent(int connections)
{
    std::string address;
    Net net;
    int s = listener(net, "tcp://127.0.0.1:0", address);
    spinio::launch_resident_on(net.stream, echo_some, 1, 32, net.handle, s, connections, net.words);
    say(address);
    net.wait();
    waits_for_open(net, 1);
}

// Connections of before and from meanwhile go on once the process does.
static void process_that_is_stopped_for_seconds_goes_on(unsigned seconds)
{
    NothingLeft nothing(__func__);
    Child child({"--serve", "2"});
    std::string address = child.hear();
    int before = connect_to(address);
    round_trip(before, 20000, 1);
    CHECK(!kill(child.pid, SIGSTOP));
    CHECK(waitpid(child.pid, nullptr, WUNTRACED) == child.pid);
    char text[100] = {}, back[100];
    std::memset(text, 'x', sizeof text);
    CHECK(send(before, text, sizeof text, MSG_NOSIGNAL) == sizeof text);
    int meanwhile = connect_to(address);
    CHECK(send(meanwhile, text, sizeof text, MSG_NOSIGNAL) == sizeof text);
    sleep(seconds);
    CHECK(recv(before, back, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
    CHECK(!kill(child.pid, SIGCONT));
    CHECK(recv(before, back, sizeof back, MSG_WAITALL) == sizeof back && !std::memcmp(text, back, sizeof back));
    round_trip(before, 20000, 2);
    close(before);
    CHECK(recv(meanwhile, back, sizeof back, MSG_WAITALL) == sizeof back && !std::memcmp(text, back, sizeof back));
    close(meanwhile);
    CHECK(child.ends() == 0);
}

// Two nets of a process connect to two nets of another process, or of this one.
static void call_from_two_nets(Net (&nets)[2], const std::string &first, const std::string &second)
{
    const std::string *address[] = {&first, &second};
    for (int i = 0; i < 2; i++) {
        unsigned port = port_of(*address[i]);
        spinio::launch_resident_on(nets[i].stream, ask_often, 1, 32, nets[i].handle, net::Address::inet(127, 0, 0, 1, port), 20, nets[i].words);
    }
    for (Net &net : nets) {
        net.wait();
        CHECK(net.words['k'] == 20 && net.stats().upgraded == 0);
        waits_for_open(net, 0);
    }
}

static void nets_of_several_processes_and_two_of_one_work_at_once()
{
    NothingLeft nothing(__func__);
    // To close a net is to give memory back, which waits for all kernels of the process.
    Net nets[2], callers[2];
    std::string address[2];
    for (int i = 0; i < 2; i++) {
        int s = listener(nets[i], "tcp://127.0.0.1:0", address[i]);
        spinio::launch_resident_on(nets[i].stream, answer_each, 2, 32, nets[i].handle, s);
    }
    Child first({"--call", address[0], address[1]}), second({"--call", address[1], address[0]});
    call_from_two_nets(callers, address[1], address[0]);
    CHECK(first.ends() == 0 && second.ends() == 0);
    for (Net &net : nets) {
        CHECK(net.stats().accepted == 60 && net.stats().violations == 0 && net.stats().upgraded == 0);
        waits_for_open(net, 1);
        CHECK(!spinio_net_stop(net.net));
        net.wait();
    }
}

__global__ void add_one(unsigned *value) { *value += 1; }

// What a program does beside its kernels: memory, launches, other programs. These have no socket of the net.
static void program_allocates_launches_and_starts_others_meanwhile()
{
    NothingLeft nothing(__func__);
    std::string address;
    Net net;
    int s = listener(net, "tcp://127.0.0.1:0", address);
    spinio::launch_resident_on(net.stream, echo_some, 2, 32, net.handle, s, 1, net.words);
    int peers[] = {connect_to(address), connect_to(address)};
    std::atomic<bool> on{true};
    std::atomic<unsigned> turns{0};
    std::vector<std::thread> threads;
    std::vector<unsigned *> memory;
    threads.emplace_back([&] {
        cudaStream_t stream;
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
        for (unsigned turn = 0; on && turn < 200; turns++, turn++) {
            unsigned *device, *value, result = 0;
            CHECK(cudaMalloc(&device, 1 << 16) == cudaSuccess && cudaHostAlloc(&value, 1 << 16, cudaHostAllocDefault) == cudaSuccess);
            *value = turn;
            spinio::launch_on(stream, add_one, 1, 1, value);
            CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
            CHECK(cudaMemcpy(device, value, sizeof result, cudaMemcpyDefault) == cudaSuccess);
            CHECK(cudaMemcpy(&result, device, sizeof result, cudaMemcpyDefault) == cudaSuccess);
            CHECK(result == turn + 1);
            memory.push_back(device);
            memory.push_back(value);
        }
        // Waits for all kernels, and so for the peers of this one.
        for (size_t i = 0; i < memory.size(); i += 2)
            CHECK(cudaFree(memory[i]) == cudaSuccess && cudaFreeHost(memory[i + 1]) == cudaSuccess);
        cudaStreamDestroy(stream);
    });
    threads.emplace_back([&] {
        for (; on; turns++) {
            Child child({"--wait"});
            CHECK(child.hear() == "here");
            const size_t sockets = entries("/proc/" + std::to_string(child.pid) + "/fd", "socket:");
            // Those of this program, which does not close them on exec; the net has three more.
            CHECK(sockets == 2);
            child.tell();
            CHECK(child.ends() == 0);
        }
    });
    unsigned rounds = 0;
    for (; rounds < 20 || turns < 20; rounds++)
        for (int peer : peers)
            round_trip(peer, 20000, rounds);
    on = false;
    threads.back().join();
    for (int peer : peers)
        close(peer);
    net.wait();
    threads.front().join();
    waits_for_open(net, 1);
}

static int run(const std::string &command)
{
    return std::system(command.c_str());
}

// In a network namespace of its own, connected with another one by a virtual cable.
static void live_apart(bool serves)
{
    if (unshare(CLONE_NEWNET)) {
        say(std::string("no network namespace: ") + std::strerror(errno));
        return;
    }
    say("here");
    await_parent();
    const std::string end = serves ? "spinio0" : "spinio1";
    CHECK(!run("ip link set lo up && ip addr add 10.77.0." + std::to_string(serves ? 1 : 2) + "/24 dev " + end + " && ip link set " + end + " up"));
    Net net;
    // The same name as in the other namespace, and one that is in this one only.
    int local = spinio_net_listen(net.net, "unix:@spinio-apart", 1);
    CHECK(local > 0 && spinio_net_listen(net.net, ("unix:@spinio-apart-" + end).c_str(), 1) > 0);
    auto goes_through_memory = [&] { return net.stats().upgraded + net.stats().shared + net.stats().peer; };
    if (serves) {
        int s = spinio_net_listen(net.net, "tcp://10.77.0.1:7007", 8);
        CHECK(s > 0);
        spinio::launch_resident_on(net.stream, answer_each, 1, 32, net.handle, s);
        say("serves");
        await_parent();
        CHECK(net.stats().accepted == 20 && goes_through_memory() == 0);
        waits_for_open(net, 3);
        CHECK(!spinio_net_stop(net.net));
    } else {
        // The port of the other namespace is one of this one too, and so is a door at which a connection to it could ask.
        Net beside;
        CHECK(spinio_net_listen(beside.net, "tcp://0.0.0.0:7007", 1) > 0);
        spinio::launch_resident_on(net.stream, ask_often, 1, 32, net.handle, net::Address::inet(10, 77, 0, 1, 7007), 20, net.words);
        net.wait();
        CHECK(net.words['k'] == 20 && goes_through_memory() == 0);
        waits_for_open(net, 2);
        CHECK(beside.stats().accepted == 0 && beside.stats().shared + beside.stats().peer == 0);
        // Names of the other namespace are not found, by kernels and by programs.
        spinio::launch_resident_on(net.stream, ask_unix, 1, 32, net.handle, net::Address::abstract("spinio-apart-spinio0"), net.words);
        net.wait();
        CHECK(net.words[0] == -ECONNREFUSED);
        CHECK(!spinio_socket_connect("unix:@spinio-apart-spinio0", nullptr) && errno == ECONNREFUSED);
        // This one's are.
        spinio_socket *own = spinio_socket_connect("unix:@spinio-apart-spinio1", nullptr);
        CHECK(own && !spinio_socket_close(own));
        CHECK(!spinio_net_stop(net.net));
        say("asked");
        await_parent();
    }
    net.wait();
}

static void kernels_of_two_network_namespaces_talk()
{
    NothingLeft nothing(__func__);
    if (getuid() != 0 || run("ip -V >/dev/null 2>&1")) {
        std::printf("skipped: two network namespaces need root and iproute2\n");
        return;
    }
    Child server({"--apart", "server"}), client({"--apart", "client"});
    std::string here = server.hear(), there = client.hear();
    if (here != "here" || there != "here" ||
        run("ip link add spinio0 netns " + std::to_string(server.pid) + " type veth peer name spinio1 netns " + std::to_string(client.pid))) {
        std::printf("skipped: %s; or no virtual cable\n", here.c_str());
        kill(server.pid, SIGKILL);
        kill(client.pid, SIGKILL);
        server.ends();
        client.ends();
        return;
    }
    server.tell();
    CHECK(server.hear() == "serves");
    client.tell();
    CHECK(client.hear() == "asked");
    server.tell();
    client.tell();
    CHECK(server.ends() == 0 && client.ends() == 0);
}

int main(int arguments, char **argument)
{
    const std::string what = arguments > 1 ? argument[1] : "";
    auto text = [&](int i) { return std::string(i < arguments ? argument[i] : ""); };
    if (what.rfind("--", 0) == 0)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (what == "--both-ways")
        use_both_ways(text(2));
    if (what == "--squat")
        squat(text(2));
    else if (what == "--serve")
        serve_for_parent(std::atoi(text(2).c_str()));
    else if (what == "--call") {
        Net nets[2];
        call_from_two_nets(nets, text(2), text(3));
    } else if (what == "--apart")
        live_apart(text(2) == "server");
    else if (what == "--wait") {
        say("here");
        await_parent();
    } else {
        const uint64_t bytes = (what.empty() ? 16 : std::strtoull(what.c_str(), nullptr, 10)) << 20;
        peer_killed_in_a_long_transfer_ends_its_connection_only("tcp://127.0.0.1:0", bytes);
        peer_killed_in_a_long_transfer_ends_its_connection_only("unix:@spinio-long-" + std::to_string(getpid()), bytes);
        port_is_shared_with_a_program();
        address_that_another_user_holds_is_in_use();
        process_that_is_stopped_for_seconds_goes_on(arguments > 2 ? unsigned(std::atoi(argument[2])) : 2);
        nets_of_several_processes_and_two_of_one_work_at_once();
        program_allocates_launches_and_starts_others_meanwhile();
        kernels_of_two_network_namespaces_talk();
        std::printf("%d failures\n", failures);
    }
    return failures != 0;
}
