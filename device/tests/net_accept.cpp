// accept with a time limit: the same calls by a kernel and by this program have the same results, and no connection is lost. Prints each
// failure and exits with 1.
#include "net_test.h"

#include <fcntl.h>

#include <ctime>

constexpr uint64_t ms = 1'000'000;
constexpr uint64_t short_limit = 20 * ms;

// The calls of a group of a kernel, which has `name` and `byte` in shared memory.
template <typename Group>
struct KernelCalls {
    Group group;
    const net::Handle &handle;
    net::Address *name;
    char *byte;
    int64_t *out;
    int at;

    __device__ void put(int64_t result)
    {
        if (group.leads())
            out[at] = result;
        at++;
    }
    __device__ uint64_t now() const { return spinio::nanoseconds(); }
    __device__ int socket(int domain, int type) const { return net::socket(group, handle, domain, type, 0); }
    __device__ int bind(int s, const net::Address &a) const { return net::bind(group, handle, s, a); }
    __device__ int listen(int s) const { return net::listen(group, handle, s, 5); }
    __device__ int connect(int s, const net::Address &a) const { return net::connect(group, handle, s, a); }
    __device__ int accept(int s, int flags) const { return net::accept(group, handle, s, nullptr, flags); }
    __device__ int limit(int s, uint64_t ns) const { return net::set_timeout(group, handle, s, ns, 0); }
    __device__ int64_t limit_of(int s) const
    {
        int64_t time[2] = {0, 0};
        unsigned length = sizeof time;
        net::getsockopt(group, handle, s, net::LEVEL_SOCKET, net::OPTION_RCVTIMEO, time, &length);
        return time[0] * 1000 + time[1] / 1000;
    }
    __device__ int close(int s) const { return net::close(group, handle, s); }
    __device__ int send(int s, char value) const
    {
        if (group.leads())
            *byte = value;
        group.sync();
        return int(net::send(group, handle, s, byte, 1));
    }
    __device__ int receive(int s) const
    {
        const int64_t got = net::recv(group, handle, s, byte, 1);
        const int value = got == 1 ? *byte : int(got);
        group.sync();
        return value;
    }
    __device__ net::Address name_of(int s) const
    {
        net::getsockname(group, handle, s, name);
        group.sync();
        net::Address copy = *name;
        group.sync();
        return copy;
    }
};

// The same of this program.
struct PlainCalls {
    std::vector<int64_t> out;

    void put(int64_t result) { out.push_back(result); }
    static int or_errno(int64_t result) { return result < 0 ? -errno : int(result); }
    static const sockaddr *as(const net::Address &a) { return reinterpret_cast<const sockaddr *>(a.bytes); }
    static uint64_t now()
    {
        timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        return uint64_t(time.tv_sec) * 1000 * ms + uint64_t(time.tv_nsec);
    }
    int socket(int domain, int type) const { return or_errno(::socket(domain, type, 0)); }
    int bind(int s, const net::Address &a) const { return or_errno(::bind(s, as(a), a.length)); }
    int listen(int s) const { return or_errno(::listen(s, 5)); }
    int connect(int s, const net::Address &a) const { return or_errno(::connect(s, as(a), a.length)); }
    int accept(int s, int flags) const
    {
        // DONTWAIT of accept(2) is a flag of the open socket.
        const int before = fcntl(s, F_GETFL);
        if (flags & net::DONTWAIT)
            fcntl(s, F_SETFL, before | O_NONBLOCK);
        const int result = or_errno(::accept(s, nullptr, nullptr));
        fcntl(s, F_SETFL, before);
        return result;
    }
    int limit(int s, uint64_t ns) const
    {
        timeval time = {time_t(ns / (1000 * ms)), suseconds_t(ns / 1000 % ms)};
        return or_errno(setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time));
    }
    int64_t limit_of(int s) const
    {
        timeval time = {};
        socklen_t length = sizeof time;
        getsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &time, &length);
        return time.tv_sec * 1000 + time.tv_usec / 1000;
    }
    int close(int s) const { return or_errno(::close(s)); }
    int send(int s, char value) const { return or_errno(::send(s, &value, 1, MSG_NOSIGNAL)); }
    int receive(int s) const
    {
        char byte = 0;
        const int got = or_errno(::recv(s, &byte, 1, 0));
        return got == 1 ? byte : got;
    }
    net::Address name_of(int s) const
    {
        net::Address name = {};
        socklen_t length = sizeof name.bytes;
        getsockname(s, reinterpret_cast<sockaddr *>(name.bytes), &length);
        name.length = length;
        return name;
    }
};

// A connection that waits: its client.
CALLED_BY_BOTH
template <typename Calls>
__host__ __device__ int client_of(Calls &calls, int domain, int type, const net::Address &to)
{
    const int s = calls.socket(domain, type);
    calls.put(calls.connect(s, to));
    return s;
}

// Accepts it: whether it is that one.
CALLED_BY_BOTH
template <typename Calls>
__host__ __device__ void accepts(Calls &calls, int listener, int client, char value)
{
    const int s = calls.accept(listener, 0);
    calls.put(s > 0);
    // Of TCP, that of the listening socket.
    calls.put(calls.limit_of(s));
    calls.put(calls.send(client, value));
    calls.put(calls.receive(s));
    calls.put(calls.close(client));
    calls.put(calls.close(s));
}

CALLED_BY_BOTH
template <typename Calls>
__host__ __device__ void ends_in_time(Calls &calls, int listener, uint64_t limit)
{
    const uint64_t begun = calls.now();
    calls.put(calls.accept(listener, 0));
    calls.put(calls.now() - begun >= limit);
}

CALLED_BY_BOTH
template <typename Calls>
__host__ __device__ void script(Calls &calls, const net::Address &address, int type)
{
    const int domain = address.bytes[0];
    const int listener = calls.socket(domain, type);
    calls.put(calls.limit(listener, 60'000 * ms));
    calls.put(calls.accept(listener, 0));
    calls.put(calls.bind(listener, address));
    calls.put(calls.listen(listener));
    calls.put(calls.accept(listener, net::DONTWAIT));
    calls.put(calls.limit(listener, short_limit));
    ends_in_time(calls, listener, short_limit);
    const net::Address to = calls.name_of(listener);
    // What comes after a call has ended is there for the next one, in order.
    const int one = client_of(calls, domain, type, to), two = client_of(calls, domain, type, to);
    accepts(calls, listener, one, 'a');
    accepts(calls, listener, two, 'b');
    ends_in_time(calls, listener, short_limit);
    calls.put(calls.accept(listener, net::DONTWAIT));
    accepts(calls, listener, client_of(calls, domain, type, to), 'c');
    calls.put(calls.limit(listener, 0));
    accepts(calls, listener, client_of(calls, domain, type, to), 'd');
    calls.put(calls.close(listener));
    calls.put(calls.accept(listener, 0));
    const int datagrams = calls.socket(domain, net::DGRAM);
    calls.put(calls.limit(datagrams, short_limit));
    calls.put(calls.accept(datagrams, 0));
    calls.put(calls.close(datagrams));
}

template <typename Group>
__device__ void script_of(Group group, const net::Handle &handle, const net::Address &address, int type, int64_t *out)
{
    __shared__ net::Address name;
    __shared__ char byte;
    KernelCalls<Group> calls = {group, handle, &name, &byte, out, 1};
    script(calls, address, type);
    if (group.leads())
        out[0] = calls.at - 1;
}

enum Caller { block, warp, thread };

__global__ void script_of_kernel(net::Handle handle, Caller caller, net::Address address, int type, int64_t *out)
{
    if (caller == block)
        script_of(net::block(), handle, address, type, out);
    else if (caller == warp && threadIdx.x < 32)
        script_of(net::warp(), handle, address, type, out);
    else if (caller == thread && threadIdx.x == 0)
        script_of(net::thread(), handle, address, type, out);
}

static void kernels_have_the_results_of_programs()
{
    for (bool no_upgrade : {false, true})
        for (Caller caller : {block, warp, thread})
            for (int type : {net::STREAM, net::SEQPACKET})
                for (int domain : {net::UNIX, net::INET}) {
                    if (type == net::SEQPACKET && domain == net::INET)
                        continue;
                    const std::string text = "spinio-accept-" + std::to_string(getpid());
                    const net::Address address = domain == net::UNIX ? net::Address::abstract(text.c_str()) : net::Address::inet(127, 0, 0, 1, 0);
                    PlainCalls plain;
                    script(plain, address, type);
                    Net net({.no_upgrade = no_upgrade});
                    spinio::launch_resident_on(net.stream, script_of_kernel, 1, 64, net.handle, caller, address, type, net.words);
                    net.wait();
                    CHECK(net.words[0] == int64_t(plain.out.size()));
                    for (size_t i = 0; i < plain.out.size(); i++)
                        if (net.words[i + 1] != plain.out[i])
                            CHECK((std::printf("caller %d, domain %d, type %d: result %zu is %ld, not %ld\n", caller, domain, type, i, long(net.words[i + 1]), long(plain.out[i])), false));
                }
}

// Until the proxy has taken so many calls.
static void wait_for_calls(const Net &net, uint64_t calls)
{
    while (net.stats().calls < calls)
        usleep(1000);
}

// Three blocks wait in turn on one socket, the second one with a limit. Each tells its client who it is.
__global__ void wait_in_turn(net::Handle handle, int listener, uint64_t *turn, int64_t *out)
{
    auto g = net::block();
    __shared__ char who;
    if (g.leads()) {
        spinio::Backoff waiting;
        while (spinio::load_acquire_system(turn) < blockIdx.x)
            waiting.pause();
        who = char('0' + blockIdx.x);
    }
    g.sync();
    // The last one has a limit that the clock never reaches.
    const uint64_t limits[3] = {0, 2 * short_limit, ~uint64_t(0)};
    net::set_timeout(g, handle, listener, limits[blockIdx.x], 0);
    const int s = net::accept(g, handle, listener);
    if (s > 0)
        net::send(g, handle, s, &who, 1);
    if (g.leads())
        spinio::store_release_system(reinterpret_cast<uint64_t *>(out + blockIdx.x), uint64_t(int64_t(s)));
}

static void limit_of_one_call_ends_no_other()
{
    Net net;
    std::string name;
    const int listening = listener(net, "tcp://127.0.0.1:0", name);
    uint64_t *turn = reinterpret_cast<uint64_t *>(net.words) + 8;
    const uint64_t calls = net.stats().calls;
    spinio::launch_resident_on(net.stream, wait_in_turn, 3, 32, net.handle, listening, turn, net.words);
    for (uint64_t block = 0; block < 3; block++) {
        __atomic_store_n(turn, block, __ATOMIC_RELEASE);
        wait_for_calls(net, calls + block + 1);
    }
    for (int i = 0; i < 30000 && !__atomic_load_n(net.words + 1, __ATOMIC_ACQUIRE); i++)
        usleep(10000);
    CHECK(net.words[1] == -EAGAIN);
    usleep(100000);
    CHECK(__atomic_load_n(net.words, __ATOMIC_ACQUIRE) == 0 && __atomic_load_n(net.words + 2, __ATOMIC_ACQUIRE) == 0);
    for (char expected : {'0', '2'}) {
        const int s = connect_to(name);
        char who = 0;
        CHECK(recv(s, &who, 1, 0) == 1 && who == expected);
        close(s);
    }
    net.wait();
    CHECK(net.words[0] > 0 && net.words[2] > 0);
}

// Accepts with a limit of a millisecond until the net is stopped; each block counts what it accepts, and the calls that end.
__global__ void accept_often(net::Handle handle, int listener, int64_t *out)
{
    auto g = net::block();
    int64_t accepted = 0, ended = 0;
    net::set_timeout(g, handle, listener, ms, 0);
    for (;;) {
        const int s = net::accept(g, handle, listener);
        if (s == -EAGAIN) {
            ended++;
            continue;
        }
        if (s < 0)
            break;
        accepted++;
        net::send(g, handle, s, "x", 1);
        net::close(g, handle, s);
    }
    if (g.leads())
        out[blockIdx.x * 2] = accepted, out[blockIdx.x * 2 + 1] = ended;
}

static void no_connection_is_lost()
{
    constexpr int blocks = 4, clients = 300;
    for (unsigned seed : {0u, 5u})
        for (const char *address : {"tcp://127.0.0.1:0", "unix:@"}) {
            Net net({.idle_us = 300, .fault_seed = seed});
            std::string name;
            const int listening = listener(net, address, name);
            spinio::launch_resident_on(net.stream, accept_often, blocks, 32, net.handle, listening, net.words);
            int served = 0;
            for (int i = 0; i < clients; i++) {
                const int s = connect_to(name);
                char byte = 0;
                served += recv(s, &byte, 1, 0) == 1 && byte == 'x' && recv(s, &byte, 1, 0) == 0;
                close(s);
                // At any time of a call's millisecond.
                usleep(unsigned(i * 7919 % 2000));
            }
            CHECK(!spinio_net_stop(net.net));
            net.wait();
            int64_t accepted = 0, ended = 0;
            for (int i = 0; i < blocks; i++)
                accepted += net.words[i * 2], ended += net.words[i * 2 + 1];
            if (served != clients || accepted != clients || ended < clients / 4)
                CHECK((std::printf("%d served, %ld accepted, %ld calls ended\n", served, long(accepted), long(ended)), false));
        }
}

// Each thread waits in a mailbox of its own, without a limit.
__global__ void wait_in_threads(net::Handle handle, int listener, unsigned count, int64_t *out)
{
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        out[i] = net::accept(net::thread(), handle, listener);
}

__global__ void wait_for_mailbox(net::Handle handle, int listener, int64_t *out)
{
    auto g = net::block();
    net::set_timeout(g, handle, listener, short_limit, 0);
    const uint64_t begun = spinio::nanoseconds();
    const int result = net::accept(g, handle, listener);
    const bool in_time = spinio::nanoseconds() - begun >= short_limit;
    net::close(g, handle, listener);
    if (g.leads())
        out[0] = result, out[1] = in_time;
}

static void limit_counts_the_wait_for_a_mailbox()
{
    Net net;
    std::string name;
    const int listening = listener(net, "unix:@", name);
    const unsigned all = net.handle.mailboxes - net::layout::quick_mailboxes;
    // As many as accept may have.
    const unsigned waiting = all - all / 8;
    const uint64_t calls = net.stats().calls;
    spinio::launch_resident_on(net.stream, wait_in_threads, (waiting + 63) / 64, 64, net.handle, listening, waiting, net.words + 2);
    wait_for_calls(net, calls + waiting);
    cudaStream_t other;
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking) == cudaSuccess);
    spinio::launch_resident_on(other, wait_for_mailbox, 1, 32, net.handle, listening, net.words);
    CHECK(cudaStreamSynchronize(other) == cudaSuccess);
    net.wait();
    CHECK(net.words[0] == -EAGAIN && net.words[1] == 1);
    for (unsigned i = 0; i < waiting; i++)
        CHECK(net.words[2 + i] == -EBADF);
}

__global__ void accept_once(net::Handle handle, int listener, uint64_t limit, int64_t *out)
{
    auto g = net::block();
    net::set_timeout(g, handle, listener, limit, 0);
    const uint64_t begun = spinio::nanoseconds();
    const int s = net::accept(g, handle, listener);
    const uint64_t took = spinio::nanoseconds() - begun;
    if (g.leads())
        out[0] = s, out[1] = int64_t(took);
}

// A proxy that may sleep for 10 s, longer and longer, does not sleep past a limit: it would wake after 1.6 s, and after 3.3 s. On a busy
// machine it may get no processor in time, but not each time.
static void proxy_wakes_for_a_limit()
{
    int64_t shortest = INT64_MAX;
    for (int turn = 0; turn < 20 && shortest > 2500 * int64_t(ms); turn++) {
        Net net({.idle_us = 10'000'000});
        std::string name;
        const int listening = listener(net, "unix:@", name);
        spinio::launch_resident_on(net.stream, accept_once, 1, 32, net.handle, listening, 1700 * ms, net.words);
        net.wait();
        if (net.words[0] != -EAGAIN || net.words[1] < 1700 * int64_t(ms))
            CHECK((std::printf("%ld after %ld ns\n", long(net.words[0]), long(net.words[1])), false));
        shortest = std::min(shortest, net.words[1]);
    }
    if (shortest > 2500 * int64_t(ms))
        CHECK((std::printf("after %ld ns\n", long(shortest)), false));
}

// A connection comes, and the limit passes, while the process is stopped. On a busy machine the connection may come after the limit:
// then there is another turn.
static void connection_comes_before_a_limit()
{
    for (int turn = 0, late = 0; turn < 3 && late < 100; turn++) {
        Net net;
        std::string name;
        const int listening = listener(net, "unix:@", name);
        const uint64_t calls = net.stats().calls, begun = PlainCalls::now();
        spinio::launch_resident_on(net.stream, accept_once, 1, 32, net.handle, listening, 300 * ms, net.words);
        wait_for_calls(net, calls + 1);
        int came[2];
        CHECK(!pipe(came));
        const pid_t child = fork();
        if (!child) {
            kill(getppid(), SIGSTOP);
            usleep(50000);
            const int s = connect_to(name);
            const uint64_t now = PlainCalls::now();
            (void)!write(came[1], &now, sizeof now);
            usleep(400000);
            kill(getppid(), SIGCONT);
            char byte;
            _exit(recv(s, &byte, 1, 0) != 0);
        }
        net.wait();
        uint64_t connected = 0;
        CHECK(read(came[0], &connected, sizeof connected) == sizeof connected);
        close(came[0]);
        close(came[1]);
        if (net.words[0] <= 0 && connected >= begun + 300 * ms)
            turn--, late++;
        else if (net.words[0] <= 0)
            CHECK((std::printf("the call ended with %ld\n", long(net.words[0])), false));
        CHECK(!spinio_net_stop(net.net));
        kill(child, SIGKILL);
        CHECK(waitpid(child, nullptr, 0) == child);
    }
}

__global__ void accept_without_room(net::Handle handle, int listener, int64_t *out)
{
    auto g = net::block();
    net::set_timeout(g, handle, listener, short_limit, 0);
    const int first = net::accept(g, handle, listener), none = net::accept(g, handle, listener);
    const int closed = net::close(g, handle, first);
    net::set_timeout(g, handle, listener, 30'000 * ms, 0);
    const int second = net::accept(g, handle, listener);
    const int64_t sent = net::send(g, handle, second, "2", 1);
    if (g.leads())
        out[0] = first > 0, out[1] = none, out[2] = closed, out[3] = second > 0, out[4] = sent;
}

// Rings for one connection: the second one waits in the backlog, also after the call that could not take it has ended.
static void connection_without_room_waits()
{
    Net net({.connections = 1});
    std::string name;
    const int listening = listener(net, "unix:@", name);
    const int first = connect_to(name), second = connect_to(name);
    spinio::launch_resident_on(net.stream, accept_without_room, 1, 32, net.handle, listening, net.words);
    char byte = 0;
    CHECK(recv(first, &byte, 1, 0) == 0 && recv(second, &byte, 1, 0) == 1 && byte == '2');
    net.wait();
    const int64_t expected[5] = {1, -EAGAIN, 0, 1, 1};
    for (int i = 0; i < 5; i++)
        CHECK(net.words[i] == expected[i]);
    close(first);
    close(second);
}

// The limit of the connection that an event tells of.
__global__ void limit_of_event(net::Handle handle, int listener, int64_t *out)
{
    __shared__ net::Ready ready;
    auto g = net::block();
    const int set = net::set(g, handle);
    net::set_timeout(g, handle, listener, 70 * ms, 0);
    net::add(g, handle, set, listener, net::IN);
    const bool is_new = net::wait(g, handle, set, &ready, 1, -1) == 1 && ready.events & net::NEW;
    // getsockopt() stores the leader's value only.
    const int64_t limit = KernelCalls<net::Block>{g, handle, nullptr, nullptr, out, 0}.limit_of(ready.s);
    if (g.leads())
        out[0] = is_new, out[1] = limit;
    net::close(g, handle, ready.s);
}

static void connection_of_an_event_has_the_limits_of_its_listening_socket()
{
    Net net;
    std::string name;
    const int listening = listener(net, "tcp://127.0.0.1:0", name);
    spinio::launch_resident_on(net.stream, limit_of_event, 1, 32, net.handle, listening, net.words);
    const int s = connect_to(name);
    net.wait();
    CHECK(net.words[0] == 1 && net.words[1] == 70);
    close(s);
}

int main()
{
    kernels_have_the_results_of_programs();
    limit_of_one_call_ends_no_other();
    no_connection_is_lost();
    limit_counts_the_wait_for_a_mailbox();
    proxy_wakes_for_a_limit();
    connection_comes_before_a_limit();
    connection_without_room_waits();
    connection_of_an_event_has_the_limits_of_its_listening_socket();
    std::printf("%d failures\n", failures);
    return failures != 0;
}
