// Datagrams and packets: the same calls by a kernel and by this program have the same results. Prints each difference and
// exits with 1.
#include "net_test.h"

constexpr int buffer_bytes = 66000;

// The calls of a kernel.
struct KernelCalls {
    const net::Handle &handle;
    unsigned char *buffer;
    net::Address *name; // in shared memory
    int64_t *out;
    int at;

    __device__ void put(int64_t result)
    {
        if (threadIdx.x == 0)
            out[at] = result;
        at++;
    }
    __device__ int socket(int domain, int type) const { return net::socket(net::block(), handle, domain, type, 0); }
    __device__ int bind(int s, const net::Address &a) const { return net::bind(net::block(), handle, s, a); }
    __device__ int connect(int s, const net::Address &a) const { return net::connect(net::block(), handle, s, a); }
    __device__ int listen(int s) const { return net::listen(net::block(), handle, s, 5); }
    __device__ int accept(int s) const { return net::accept(net::block(), handle, s); }
    __device__ int shutdown(int s, int how) const { return net::shutdown(net::block(), handle, s, how); }
    __device__ int close(int s) const { return net::close(net::block(), handle, s); }
    __device__ int limit(int s) const { return net::set_timeout(net::block(), handle, s, 5000000, 0); }

    __device__ net::Address name_of(int s, bool peer, int &result) const
    {
        result = peer ? net::getpeername(net::block(), handle, s, name) : net::getsockname(net::block(), handle, s, name);
        __syncthreads();
        net::Address copy = *name;
        __syncthreads();
        return copy;
    }
    __device__ int64_t send(int s, int bytes, unsigned seed, const net::Address *to) const
    {
        for (int i = int(threadIdx.x); i < bytes && i < buffer_bytes; i += int(blockDim.x))
            buffer[i] = (unsigned char)(unsigned(i) * 7 + seed);
        __syncthreads();
        int64_t sent = to ? net::sendto(net::block(), handle, s, buffer, size_t(bytes), 0, *to) : net::send(net::block(), handle, s, buffer, size_t(bytes));
        __syncthreads();
        return sent;
    }
    __device__ int64_t receive(int s, int bytes, int flags, unsigned &sum, net::Address &from) const
    {
        int64_t got = net::recvfrom(net::block(), handle, s, buffer, size_t(bytes), flags, name);
        __syncthreads();
        sum = 0;
        for (int64_t i = 0; i < got && i < bytes; i++)
            sum = sum * 31 % 65521 + buffer[i];
        from = *name;
        __syncthreads();
        return got;
    }
};

// The same of this program.
struct PlainCalls {
    std::vector<unsigned char> buffer;
    std::vector<int64_t> out;

    void put(int64_t result) { out.push_back(result); }
    static int64_t or_errno(int64_t result) { return result < 0 ? -errno : result; }
    static const sockaddr *as(const net::Address &a) { return reinterpret_cast<const sockaddr *>(a.bytes); }
    int socket(int domain, int type) const { return int(or_errno(::socket(domain, type, 0))); }
    int bind(int s, const net::Address &a) const { return int(or_errno(::bind(s, as(a), a.length))); }
    int connect(int s, const net::Address &a) const { return int(or_errno(::connect(s, as(a), a.length))); }
    int listen(int s) const { return int(or_errno(::listen(s, 5))); }
    int accept(int s) const { return int(or_errno(::accept(s, nullptr, nullptr))); }
    int shutdown(int s, int how) const { return int(or_errno(::shutdown(s, how))); }
    int close(int s) const { return int(or_errno(::close(s))); }
    int limit(int s) const
    {
        timeval time = {0, 5000};
        return int(or_errno(setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time)));
    }
    net::Address name_of(int s, bool peer, int &result) const
    {
        net::Address name = {};
        socklen_t length = sizeof name.bytes;
        auto to = reinterpret_cast<sockaddr *>(name.bytes);
        result = int(or_errno(peer ? getpeername(s, to, &length) : getsockname(s, to, &length)));
        name.length = length;
        return name;
    }
    int64_t send(int s, int bytes, unsigned seed, const net::Address *to)
    {
        buffer.assign(size_t(buffer_bytes) * 2, 0);
        for (int i = 0; i < bytes && i < buffer_bytes; i++)
            buffer[size_t(i)] = (unsigned char)(unsigned(i) * 7 + seed);
        return or_errno(::sendto(s, buffer.data(), size_t(bytes), MSG_NOSIGNAL, to ? as(*to) : nullptr, to ? to->length : 0));
    }
    int64_t receive(int s, int bytes, int flags, unsigned &sum, net::Address &from)
    {
        buffer.assign(size_t(bytes) + 1, 0);
        from = {};
        socklen_t length = sizeof from.bytes;
        int plain = (flags & net::DONTWAIT ? MSG_DONTWAIT : 0) | (flags & net::PEEK ? MSG_PEEK : 0) | (flags & net::TRUNC ? MSG_TRUNC : 0);
        int64_t got = or_errno(::recvfrom(s, buffer.data(), size_t(bytes), plain, reinterpret_cast<sockaddr *>(from.bytes), &length));
        from.length = length;
        sum = 0;
        for (int64_t i = 0; i < got && i < bytes; i++)
            sum = sum * 31 % 65521 + buffer[size_t(i)];
        return got;
    }
};

__host__ __device__ inline bool same(const net::Address &a, const net::Address &b)
{
    bool same = a.length == b.length;
    for (unsigned i = 0; i < a.length && i < sizeof a.bytes; i++)
        same = same && a.bytes[i] == b.bytes[i];
    return same;
}

// A name that does not exist, an address without a family, an empty one for bind, and one of each domain.
struct Names {
    net::Address nowhere, path, any, loopback, loopback6, none, cut;

    __host__ __device__ const net::Address &of(int domain) const { return domain == net::UNIX ? any : domain == net::INET ? loopback : loopback6; }
};

// The bytes that came, their sum, and whether they came from there.
CALLED_BY_BOTH
template <typename Calls>
__host__ __device__ void receive(Calls &calls, int s, int bytes, int flags, const net::Address *from)
{
    unsigned sum = 0;
    net::Address source = {};
    int64_t got = calls.receive(s, bytes, flags, sum, source);
    calls.put(got);
    calls.put(got < 0 ? 0 : sum);
    calls.put(got < 0 || !from ? 0 : same(source, *from));
}

// A socket that is bound, and its name.
CALLED_BY_BOTH
template <typename Calls>
__host__ __device__ int bound(Calls &calls, int domain, const Names &names, net::Address &name)
{
    int s = calls.socket(domain, net::DGRAM), result = 0;
    calls.put(s > 0);
    calls.put(calls.bind(s, names.of(domain)));
    name = calls.name_of(s, false, result);
    calls.put(result);
    return s;
}

CALLED_BY_BOTH
template <typename Calls>
__host__ __device__ void errors(Calls &calls, int domain, const Names &names)
{
    net::Address a_name, b_name;
    int result = 0, s = calls.socket(domain, net::DGRAM);
    calls.put(calls.send(s, 1, 0, nullptr));              // EDESTADDRREQ or ENOTCONN
    if (domain == net::INET) {
        calls.put(calls.send(s, 65536, 0, nullptr));      // EMSGSIZE
        calls.put(calls.send(s, 65508, 0, nullptr));      // EDESTADDRREQ
    } else if (domain == net::INET6) {
        calls.put(calls.send(s, 65536, 0, nullptr));      // EDESTADDRREQ
    }
    receive(calls, s, 5, net::DONTWAIT, nullptr);         // EAGAIN
    calls.put(calls.listen(s));                           // EOPNOTSUPP
    calls.put(calls.accept(s));                           // EOPNOTSUPP
    calls.put(calls.send(s, 1, 0, &names.cut));           // EINVAL
    (void)calls.name_of(s, true, result);
    calls.put(result);                                    // ENOTCONN
    calls.put(calls.shutdown(s, net::SHUT_SEND));         // INET: ENOTCONN
    calls.put(calls.send(s, 1, 0, &names.nowhere));       // EPIPE, or of the address
    calls.put(calls.close(s));
    int a = bound(calls, domain, names, a_name), b = bound(calls, domain, names, b_name);
    if (domain == net::UNIX) {
        calls.put(calls.send(a, 1, 0, &names.nowhere));   // ECONNREFUSED
        calls.put(calls.send(a, 1, 0, &names.path));      // ENOENT
        calls.put(calls.connect(a, names.nowhere));       // ECONNREFUSED
        calls.put(calls.send(a, 1, 0, nullptr));          // ENOTCONN
    } else {
        calls.put(calls.send(a, domain == net::INET ? 65508 : 65528, 0, &b_name)); // EMSGSIZE
    }
    calls.put(calls.connect(a, b_name));
    net::Address peer = calls.name_of(a, true, result);
    calls.put(result);
    calls.put(same(peer, b_name));
    calls.put(calls.send(a, 3, 1, nullptr));
    calls.put(calls.send(b, 0, 2, &a_name));
    calls.put(calls.send(b, 9, 3, &a_name));
    receive(calls, b, 100, 0, &a_name);
    receive(calls, a, 100, 0, &b_name);                   // empty
    receive(calls, a, 4, net::PEEK, &b_name);
    receive(calls, a, 4, net::PEEK | net::TRUNC, &b_name);
    receive(calls, a, 4, 0, &b_name);                     // the rest is gone
    calls.put(calls.limit(a));
    receive(calls, a, 4, 0, &b_name);                     // EAGAIN
    calls.put(calls.send(b, 0, 2, &a_name));
    receive(calls, a, 0, net::TRUNC, &b_name);
    calls.put(calls.connect(a, a_name));                  // another peer
    calls.put(calls.send(a, 5, 5, nullptr));
    receive(calls, a, 100, 0, &a_name);
    calls.put(calls.connect(a, names.none));              // none
    calls.put(calls.send(a, 5, 5, nullptr));              // EDESTADDRREQ or ENOTCONN
    calls.put(calls.connect(a, b_name));
    calls.put(calls.shutdown(a, net::SHUT_SEND));
    calls.put(calls.send(a, 5, 5, nullptr));              // EPIPE
    calls.put(calls.shutdown(a, net::SHUT_RECEIVE));
    receive(calls, a, 4, 0, nullptr);                     // 0
    calls.put(calls.shutdown(a, 7));                      // EINVAL
    calls.put(calls.close(a));
    calls.put(calls.connect(b, a_name));                  // UNIX: ECONNREFUSED
    if (domain != net::UNIX) {
        calls.put(calls.send(b, 5, 5, nullptr));          // to a port that is closed
        receive(calls, b, 4, 0, nullptr);                 // ECONNREFUSED
        receive(calls, b, 4, net::DONTWAIT, nullptr);     // EAGAIN: it was told
    }
    calls.put(calls.close(b));
    calls.put(calls.send(b, 5, 5, &a_name));              // EBADF
}

CALLED_BY_BOTH
template <typename Calls>
__host__ __device__ void packets(Calls &calls, const Names &names)
{
    int result = 0, l = calls.socket(net::UNIX, net::SEQPACKET), s = calls.socket(net::UNIX, net::SEQPACKET);
    calls.put(calls.send(s, 1, 0, nullptr));              // ENOTCONN
    receive(calls, s, 5, 0, nullptr);                     // ENOTCONN
    calls.put(calls.accept(l));                           // EINVAL
    calls.put(calls.bind(l, names.any));
    net::Address name = calls.name_of(l, false, result);
    calls.put(calls.listen(l));
    calls.put(calls.connect(s, name));
    int p = calls.accept(l);
    calls.put(p > 0);
    calls.put(calls.connect(s, name));                    // EISCONN
    calls.put(calls.send(s, 10, 1, nullptr));
    calls.put(calls.send(s, 20, 2, &names.nowhere));      // the address does not matter
    calls.put(calls.send(s, 0, 2, nullptr));
    calls.put(calls.send(s, 3, 3, nullptr));
    receive(calls, p, 100, 0, nullptr);                   // 10 and 20 stay apart
    receive(calls, p, 5, net::TRUNC, nullptr);
    receive(calls, p, 5, 0, nullptr);                     // empty
    receive(calls, p, 5, 0, nullptr);
    calls.put(calls.send(p, 7, 7, nullptr));
    calls.put(calls.shutdown(p, net::SHUT_SEND));
    calls.put(calls.send(p, 7, 7, nullptr));              // EPIPE
    receive(calls, s, 100, 0, nullptr);
    receive(calls, s, 100, 0, nullptr);                   // the end
    receive(calls, s, 100, 0, nullptr);
    calls.put(calls.close(p));
    calls.put(calls.send(s, 7, 7, nullptr));              // EPIPE
    receive(calls, s, 100, 0, nullptr);                   // the end
    calls.put(calls.close(s));
    calls.put(calls.close(l));
}

// All lengths matter at their limits: padding, the rings' ends, the longest datagram.
CALLED_BY_BOTH
template <typename Calls>
__host__ __device__ void lengths(Calls &calls, int domain, const Names &names)
{
    net::Address a_name, b_name;
    int a = bound(calls, domain, names, a_name), b = bound(calls, domain, names, b_name);
    const int sizes[] = {0, 1, 15, 16, 17, 1472, 1473, 9000, 32768, 65490, 65506, 65507, 65508, 65527, 65528, 65535, 65536, 65507, 0, 65507};
    for (int size : sizes) {
        int64_t sent = calls.send(a, size, unsigned(size), &b_name);
        calls.put(sent);
        if (sent >= 0)
            receive(calls, b, buffer_bytes, 0, &a_name);
    }
    calls.put(calls.close(a));
    calls.put(calls.close(b));
}

// A random script of two sockets. No more datagrams are under way than a socket of the system holds.
CALLED_BY_BOTH
template <typename Calls>
__host__ __device__ void script(Calls &calls, int domain, const Names &names, unsigned seed)
{
    net::Address name[2];
    int s[2] = {0, 0}, queued[2] = {0, 0};
    bool ended[2] = {false, false};
    auto random = [&](unsigned below) { return int((seed = seed * 1664525 + 1013904223) >> 8) % int(below); };
    for (int i = 0; i < 2; i++)
        s[i] = bound(calls, domain, names, name[i]);
    if (random(2))
        for (int i = 0; i < 2; i++)
            calls.put(calls.connect(s[i], name[1 - i]));
    bool connected = calls.send(s[0], 1, 0, nullptr) == 1;
    queued[1] += connected;
    for (int step = 0; step < 14; step++) {
        int who = random(2), bytes = random(random(2) ? 60 : 2500), what = random(8);
        if (what < 4) {
            if (queued[1 - who] < 6) {
                bool with_address = !connected || random(3) == 0;
                int64_t sent = calls.send(s[who], bytes, seed, with_address ? &name[1 - who] : nullptr);
                calls.put(sent);
                queued[1 - who] += sent == bytes && !ended[who];
            }
        } else if (what < 7) {
            const int flags[] = {0, 0, net::TRUNC, net::PEEK, net::PEEK | net::TRUNC};
            int flag = flags[random(5)];
            if (queued[who]) {
                receive(calls, s[who], random(2) ? bytes : 3000, flag, &name[1 - who]);
                queued[who] -= !(flag & net::PEEK);
            }
        } else if (connected && random(4) == 0) {
            calls.put(calls.shutdown(s[who], net::SHUT_SEND));
            ended[who] = true;
        }
    }
    for (int i = 0; i < 2; i++) {
        while (queued[i]--)
            receive(calls, s[i], 3000, 0, &name[1 - i]);
        calls.put(calls.close(s[i]));
    }
}

// 0 errors, 1 lengths, 2 packets, 3 scripts
CALLED_BY_BOTH
template <typename Calls>
__host__ __device__ void run(Calls &calls, int what, int domain, const Names &names, int count)
{
    if (what == 0)
        errors(calls, domain, names);
    else if (what == 1)
        lengths(calls, domain, names);
    else if (what == 2)
        packets(calls, names);
    else
        for (int i = 0; i < count; i++)
            script(calls, domain, names, unsigned(i * 77 + domain));
}

__global__ void run_in_kernel(net::Handle handle, int what, int domain, Names names, int count, unsigned char *buffer, int64_t *out)
{
    __shared__ net::Address name;
    KernelCalls calls{handle, buffer, &name, out, 1};
    run(calls, what, domain, names, count);
    if (threadIdx.x == 0)
        out[0] = calls.at;
}

static void kernel_and_program_get_the_same_results(int what, int domain, int count)
{
    Net net({.ring_bytes = what == 1 ? 65536u : 4096u});
    Names names = {net::Address::abstract("spinio-no-such-name"), net::Address::path("/no-such-folder/socket"), net::Address::path(""),
                   net::Address::inet(127, 0, 0, 1, 0), net::Address::inet6({0, 0, 0, 0, 0, 0, 0, 1}, 0), {}, net::Address::path("")};
    names.none.length = 16;
    names.cut.length = 1;
    unsigned char *buffer;
    int64_t *out;
    const size_t most = 100000;
    CHECK(cudaHostAlloc(&buffer, buffer_bytes, cudaHostAllocDefault) == cudaSuccess);
    CHECK(cudaHostAlloc(&out, most * 8, cudaHostAllocDefault) == cudaSuccess);
    spinio::launch_resident_on(net.stream, run_in_kernel, 1, 64, net.handle, what, domain, names, count, buffer, out);
    PlainCalls plain;
    plain.put(0);
    run(plain, what, domain, names, count);
    net.wait();
    CHECK(out[0] == int64_t(plain.out.size()));
    for (size_t i = 1; i < plain.out.size() && failures < 20; i++)
        if (out[i] != plain.out[i]) {
            std::printf("part %d, domain %d, result %zu: a kernel gets %lld, a program %lld\n", what, domain, i, (long long)out[i], (long long)plain.out[i]);
            failures++;
        }
    while (net.stats().open)
        usleep(1000);
    CHECK(net.stats().violations == 0);
    cudaFreeHost(buffer);
    cudaFreeHost(out);
}

// Waits with an event set, and receives only once the ring is full.
__global__ void receive_late(net::Handle handle, net::Address name, uint64_t *turn, int count, int64_t *out)
{
    __shared__ unsigned char bytes[3000];
    __shared__ net::Ready ready;
    auto g = net::block();
    int s = net::socket(g, handle, net::UNIX, net::DGRAM, 0), set = net::set(g, handle);
    out[0] = net::bind(g, handle, s, name);
    net::add(g, handle, set, s, net::IN);
    pass_and_wait(turn, 1);
    out[1] = net::wait(g, handle, set, &ready, 1, -1) == 1 && ready.s == s && ready.events == net::IN;
    int right = 0;
    for (int i = 0; i < count; i++) {
        int64_t got = net::recv(g, handle, s, bytes, sizeof bytes);
        bool good = got == 1 + i * 577 % 2900;
        for (int64_t at = 0; at < got; at++)
            good = good && bytes[at] == (unsigned char)(at + i);
        right += good;
        __syncthreads();
    }
    out[2] = right;
}

static void full_ring_leaves_datagrams_with_the_system()
{
    const int count = 100;
    Net net;
    auto name = net::Address::abstract(("spinio-late-" + std::to_string(getpid())).c_str());
    auto turn = reinterpret_cast<uint64_t *>(net.words + 1000);
    spinio::launch_resident_on(net.stream, receive_late, 1, 32, net.handle, name, turn, count, net.words);
    while (spinio::load_acquire_system(turn) == 0)
        usleep(500);
    std::thread sender([&] {
        int s = socket(AF_UNIX, SOCK_DGRAM, 0);
        for (int i = 0; i < count; i++) {
            std::vector<unsigned char> bytes(size_t(1 + i * 577 % 2900));
            for (size_t at = 0; at < bytes.size(); at++)
                bytes[at] = (unsigned char)(at + size_t(i));
            CHECK(sendto(s, bytes.data(), bytes.size(), 0, PlainCalls::as(name), name.length) == ssize_t(bytes.size()));
        }
        close(s);
    });
    for (uint64_t now = 0, before = 1; now != before || !now; usleep(50000))
        before = now, now = net.stats().bytes_received;
    CHECK(net.stats().bytes_received < 8192);
    spinio::store_release_system(turn + 1, 1);
    sender.join();
    net.wait();
    CHECK(net.words[0] == 0 && net.words[1] == 1 && net.words[2] == count);
}

// Sends until the time limit finds no room, and ends the direction: how many sends have returned their length.
__global__ void send_and_shut(net::Handle handle, net::Address name, int64_t *out)
{
    __shared__ unsigned char bytes[2000];
    auto g = net::block();
    int s = net::socket(g, handle, net::UNIX, net::SEQPACKET, 0);
    int64_t sent = 0, failed = net::connect(g, handle, s, name);
    net::set_timeout(g, handle, s, 0, 2'000'000);
    while (net::send(g, handle, s, bytes, sizeof bytes) == int64_t(sizeof bytes))
        sent++;
    failed |= net::shutdown(g, handle, s, net::SHUT_SEND);
    if (threadIdx.x == 0) {
        out[0] = failed;
        out[1] = sent;
    }
}

static void shutdown_comes_after_what_was_sent()
{
    Net net;
    auto name = net::Address::abstract(("spinio-shut-" + std::to_string(getpid())).c_str());
    int listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    CHECK(!bind(listener, PlainCalls::as(name), name.length) && !listen(listener, 1));
    spinio::launch_resident_on(net.stream, send_and_shut, 1, 32, net.handle, name, net.words);
    int peer = accept(listener, nullptr, nullptr);
    net.wait();
    CHECK(net.words[0] == 0 && net.words[1] > 0);
    int64_t received = 0;
    for (char bytes[2000]; recv(peer, bytes, sizeof bytes, 0) == 2000;)
        received++;
    CHECK(received == net.words[1]);
    close(peer);
    close(listener);
}

int main()
{
    for (int domain : {net::INET, net::UNIX}) {
        kernel_and_program_get_the_same_results(0, domain, 0);
        kernel_and_program_get_the_same_results(3, domain, 200);
    }
    kernel_and_program_get_the_same_results(1, net::INET, 0);
    if (has_ipv6()) {
        kernel_and_program_get_the_same_results(0, net::INET6, 0);
        kernel_and_program_get_the_same_results(1, net::INET6, 0);
        kernel_and_program_get_the_same_results(3, net::INET6, 60);
    }
    kernel_and_program_get_the_same_results(2, net::UNIX, 0);
    full_ring_leaves_datagrams_with_the_system();
    shutdown_comes_after_what_was_sent();
    std::printf("%d failures\n", failures);
    return failures != 0;
}
