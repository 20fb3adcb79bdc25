// Random scripts of calls, one after the other: by a kernel, and by this program with the system calls. A peer, which is this program
// both times, takes turns with the side that is tested, which waits for what is to arrive before it looks: so each call has one result,
// whatever the timing. Results, bytes and errno are the same. net_scripts.cpp has scripts that both sides run at their own pace.
//
//   script (a seed) ──┬─ calls by a kernel ──────┐
//                     └─ calls by this program ──┴─> two logs, compared line by line
//
//   net_calls [FIRST [COUNT]]    400 scripts from 0 on without arguments; the number of a script is its seed
#include "net_test.h"

#include <sys/ioctl.h>

#include <functional>
#include <poll.h>

enum Op : int { SOCKET, BIND, LISTEN, ACCEPT, CONNECT, SEND, SEND_TO, RECEIVE, RECEIVE_FROM, SHUTDOWN, CLOSE, NAME, PEER_NAME, POLL, AWAIT_BYTES, AWAIT, QUIT };

static const char *name_of(Op op)
{
    const char *const names[] = {"socket", "bind", "listen", "accept", "connect", "send", "sendto", "recv", "recvfrom", "shutdown", "close", "getsockname", "getpeername", "poll", "await bytes", "await"};
    return names[op];
}

constexpr unsigned sockets = 3, most_bytes = 3000;

// One call. `socket` is a number of the script, not a descriptor.
struct Call {
    Op op;
    int socket, a, b, flags;
    net::Address address;
};

struct Result {
    int64_t value;
    uint64_t sum; // of the bytes that were received
    net::Address address;
};

__host__ __device__ static unsigned char byte_of(int call, int i)
{
    return (unsigned char)(i * 7 + call * 13 + 1);
}

__host__ __device__ static uint64_t sum_of(const unsigned char *bytes, int64_t count)
{
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum = (sum * 31 + bytes[i] + 1) % 1000000007;
    return sum;
}

// The flags as Linux has them, from ours and the other way round.
static int flags_of_linux(int flags)
{
    return (flags & net::DONTWAIT ? MSG_DONTWAIT : 0) | (flags & net::WAITALL ? MSG_WAITALL : 0) | (flags & net::PEEK ? MSG_PEEK : 0) | (flags & net::TRUNC ? MSG_TRUNC : 0) |
           (flags & net::MORE ? MSG_MORE : 0) | MSG_NOSIGNAL;
}

// By a block, until QUIT. `turn`: calls asked for, calls done.
__global__ void run_calls(net::Handle handle, const Call *call, Result *result, uint64_t *turn)
{
    __shared__ unsigned char bytes[most_bytes];
    __shared__ net::Address address;
    __shared__ int all[sockets];
    auto g = net::block();
    if (threadIdx.x < sockets)
        all[threadIdx.x] = 0;
    for (uint64_t number = 1;; number++) {
        if (threadIdx.x == 0) {
            spinio::Backoff waiting;
            while (spinio::load_acquire_system(turn) < number)
                waiting.pause();
        }
        __syncthreads();
        const Call now = *call;
        int64_t value = 0, got = 0;
        if (now.op == QUIT)
            break;
        const int s = all[now.socket];
        if (now.op == SEND || now.op == SEND_TO)
            for (int i = int(threadIdx.x); i < now.a; i += int(blockDim.x))
                bytes[i] = byte_of(now.b, i);
        if (threadIdx.x == 0)
            address = now.address;
        __syncthreads();
        switch (now.op) {
        case SOCKET: value = net::socket(g, handle, now.a, now.b, 0); break;
        case BIND: value = net::bind(g, handle, s, address); break;
        case LISTEN: value = net::listen(g, handle, s, now.a); break;
        case ACCEPT: value = net::accept(g, handle, all[now.a], &address, now.flags); break;
        case CONNECT: value = net::connect(g, handle, s, address); break;
        case SEND: value = net::send(g, handle, s, bytes, size_t(now.a), now.flags); break;
        case SEND_TO: value = net::sendto(g, handle, s, bytes, size_t(now.a), now.flags, address); break;
        case RECEIVE: value = got = net::recv(g, handle, s, bytes, size_t(now.a), now.flags); break;
        case RECEIVE_FROM: value = got = net::recvfrom(g, handle, s, bytes, size_t(now.a), now.flags, &address); break;
        case SHUTDOWN: value = net::shutdown(g, handle, s, now.a); break;
        case CLOSE: value = net::close(g, handle, s); break;
        case NAME: value = net::getsockname(g, handle, s, &address); break;
        case PEER_NAME: value = net::getpeername(g, handle, s, &address); break;
        default: {
            // POLL: the events that are true now. AWAIT: until one is true. AWAIT_BYTES: until so many are there.
            __shared__ net::Poll polls[1];
            do {
                __syncthreads();
                if (threadIdx.x == 0)
                    polls[0] = {s, now.op == AWAIT_BYTES ? net::IN : now.a, 0, 0, 0};
                __syncthreads();
                value = net::poll(g, handle, polls, 1, now.op == POLL ? 0 : -1);
                value = value < 0 ? value : polls[0].ready;
            } while (value >= 0 && now.op == AWAIT_BYTES && polls[0].in < unsigned(now.a) && !(value & (net::HUP | net::ERR)));
            value = now.op == POLL || value < 0 ? value : 0;
        }
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            if (value > 0 && (now.op == SOCKET || now.op == ACCEPT)) {
                all[now.socket] = int(value);
                value = 0;
            }
            if (now.op == CLOSE)
                all[now.socket] = 0;
            // What is longer than the buffer is not in it.
            result->sum = got > 0 ? sum_of(bytes, got < now.a ? got : now.a) : 0;
            result->value = value;
            result->address = address;
            spinio::store_release_system(turn + 1, number);
        }
        __syncthreads();
    }
}

using Caller = std::function<Result(const Call &)>;

// The same by system calls; `all` has its descriptors.
static Result call_linux(const Call &call, int (&all)[sockets])
{
    Result result = {};
    std::vector<unsigned char> bytes(most_bytes);
    result.address = call.address;
    auto *const address = reinterpret_cast<sockaddr *>(result.address.bytes);
    socklen_t length = sizeof result.address.bytes;
    const int s = all[call.socket], flags = flags_of_linux(call.flags);
    int64_t value = 0, got = 0;
    for (int i = 0; i < call.a && (call.op == SEND || call.op == SEND_TO); i++)
        bytes[size_t(i)] = byte_of(call.b, i);
    switch (call.op) {
    case SOCKET: value = socket(call.a, call.b, 0); break;
    case BIND: value = bind(s, address, call.address.length); break;
    case LISTEN: value = listen(s, call.a); break;
    case ACCEPT:
        // Without a wait there is a call for it only for sockets that do not block.
        if (call.flags & net::DONTWAIT) {
            pollfd look = {all[call.a], POLLIN, 0};
            if (poll(&look, 1, 0) == 0) {
                value = -1, errno = EAGAIN;
                break;
            }
        }
        value = accept(all[call.a], address, &length);
        break;
    case CONNECT: value = connect(s, address, call.address.length); break;
    case SEND: value = send(s, bytes.data(), size_t(call.a), flags); break;
    case SEND_TO: value = sendto(s, bytes.data(), size_t(call.a), flags, address, call.address.length); break;
    case RECEIVE: value = got = recv(s, bytes.data(), size_t(call.a), flags); break;
    case RECEIVE_FROM: value = got = recvfrom(s, bytes.data(), size_t(call.a), flags, address, &length); break;
    case SHUTDOWN: value = shutdown(s, call.a); break;
    case CLOSE: value = close(s); break;
    case NAME: value = getsockname(s, address, &length); break;
    case PEER_NAME: value = getpeername(s, address, &length); break;
    default: {
        pollfd look = {s, short(call.op == AWAIT_BYTES ? POLLIN : call.a), 0};
        int there = 0;
        do {
            value = poll(&look, 1, call.op == POLL ? 0 : 60000);
            ioctl(s, FIONREAD, &there);
        } while (value > 0 && call.op == AWAIT_BYTES && there < call.a && !(look.revents & (POLLHUP | POLLERR)));
        value = value < 0 ? value : call.op == POLL ? look.revents : 0;
    }
    }
    if (value < 0)
        value = -errno;
    if (value >= 0 && (call.op == SOCKET || call.op == ACCEPT)) {
        all[call.socket] = int(value);
        value = 0;
    }
    if (call.op == CLOSE)
        all[call.socket] = -1;
    result.sum = got > 0 ? sum_of(bytes.data(), std::min<int64_t>(got, call.a)) : 0;
    result.value = value;
    result.address.length = length;
    return result;
}

static net::Address address_of_socket(int s, bool of_peer = false)
{
    net::Address address = {};
    socklen_t length = sizeof address.bytes;
    CHECK(!(of_peer ? getpeername : getsockname)(s, reinterpret_cast<sockaddr *>(address.bytes), &length));
    address.length = length;
    return address;
}

static bool same(const net::Address &one, const net::Address &two)
{
    return one.length == two.length && !std::memcmp(one.bytes, two.bytes, one.length);
}

// A script with its side that is tested: what it does depends on the seed alone.
class Script {
public:
    Script(unsigned seed, Caller caller) : seed(seed * 2654435761u + 12345), caller(std::move(caller)) {}

    std::vector<std::string> run()
    {
        is_inet = random(2) == 0;
        for (int errors = random(3); errors--;)
            wrong_call();
        switch (random(3)) {
        case 0: run_datagrams(); break;
        case 1: run_connection(is_inet || random(2) ? net::STREAM : net::SEQPACKET); break;
        default: run_connection(net::STREAM);
        }
        return log;
    }

private:
    unsigned seed;
    Caller caller;
    std::vector<std::string> log;
    bool is_inet = false;
    int calls = 0;

    int random(unsigned below) { return int((seed = seed * 1664525 + 1013904223) >> 8) % int(below); }

    void note(const std::string &what, int64_t value, uint64_t sum = 0) { log.push_back(what + " -> " + std::to_string(value) + (sum ? " sum " + std::to_string(sum) : "")); }

    Result ask(Op op, int socket, int a = 0, int b = 0, int flags = 0, const net::Address &address = {})
    {
        const Result result = caller({op, socket, a, b, flags, address});
        note(std::string(name_of(op)) + "(" + std::to_string(socket) + ", " + std::to_string(a) + ", " + std::to_string(b) + ", flags " + std::to_string(flags) + ")", result.value, result.sum);
        return result;
    }

    int domain() const { return is_inet ? net::INET : net::UNIX; }

    // A name that no other socket has, or any port.
    net::Address new_address() const
    {
        static int names;
        return is_inet ? net::Address::inet(127, 0, 0, 1, 0) : net::Address::abstract(("spinio-calls-" + std::to_string(getpid()) + "-" + std::to_string(names++)).c_str());
    }

    // A socket of the peer with a name.
    int bound(int type, net::Address &address)
    {
        const net::Address wanted = new_address();
        const int s = ::socket(domain(), type, 0);
        CHECK(!bind(s, reinterpret_cast<const sockaddr *>(wanted.bytes), wanted.length));
        address = address_of_socket(s);
        timeval limit = {60, 0};
        setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        return s;
    }

    // Calls that fail, each on a socket of its own.
    void wrong_call()
    {
        net::Address taken, other;
        const int listening = bound(SOCK_STREAM, taken), silent = bound(SOCK_STREAM, other);
        CHECK(!listen(listening, 1));
        const net::Address foreign = is_inet ? net::Address::abstract("spinio-none") : net::Address::inet(127, 0, 0, 1, 9);
        const int which = random(14);
        if (which >= 2)
            ask(SOCKET, 0, domain(), net::STREAM);
        switch (which) {
        case 0: ask(SOCKET, 0, 77, net::STREAM); break;
        case 1: ask(SOCKET, 0, domain(), 9); return close_both(listening, silent);
        case 2: ask(BIND, 0, 0, 0, 0, taken); break;
        case 3: ask(BIND, 0, 0, 0, 0, foreign); break;
        case 4: ask(BIND, 0, 0, 0, 0, new_address()), ask(BIND, 0, 0, 0, 0, new_address()); break;
        // Has a name, and does not listen.
        case 5: ask(CONNECT, 0, 0, 0, 0, other); break;
        case 6: ask(CONNECT, 0, 0, 0, 0, foreign); break;
        case 7: ask(ACCEPT, 1, 0); break;
        case 8: ask(RECEIVE, 0, 10), ask(PEER_NAME, 0); break;
        case 9: ask(SEND, 0, 10); break;
        // Of UNIX a program gets 0, and a kernel ENOTCONN.
        case 10: is_inet ? ask(SHUTDOWN, 0, random(4)) : ask(PEER_NAME, 0); break;
        case 11: ask(BIND, 0, 0, 0, 0, new_address()), ask(LISTEN, 0, 1), ask(ACCEPT, 1, 0, 0, net::DONTWAIT), ask(CONNECT, 0, 0, 0, 0, taken); break;
        case 12: ask(CONNECT, 0, 0, 0, 0, taken), ask(CONNECT, 0, 0, 0, 0, taken), ask(BIND, 0, 0, 0, 0, new_address()); break;
        default: ask(CONNECT, 0, 0, 0, 0, taken), ask(LISTEN, 0, 1);
        }
        if (which >= 2)
            ask(CLOSE, 0);
        close_both(listening, silent);
    }

    static void close_both(int one, int two)
    {
        close(one);
        close(two);
    }

    // The peer's end of a connection to socket 0.
    int connect_peer(int type)
    {
        net::Address address;
        int peer;
        if (random(2)) {
            const int listening = bound(type, address);
            CHECK(!listen(listening, 1));
            ask(SOCKET, 0, domain(), type);
            if (random(2))
                ask(BIND, 0, 0, 0, 0, new_address());
            ask(CONNECT, 0, 0, 0, 0, address);
            peer = accept(listening, nullptr, nullptr);
            close(listening);
        } else {
            ask(SOCKET, 1, domain(), type);
            ask(BIND, 1, 0, 0, 0, new_address());
            ask(LISTEN, 1, 1);
            ask(ACCEPT, 0, 1, 0, net::DONTWAIT);
            address = caller({NAME, 1, 0, 0, 0, {}}).address;
            peer = bound(type, address_of_peer);
            CHECK(!::connect(peer, reinterpret_cast<sockaddr *>(address.bytes), address.length));
            const Result accepted = ask(ACCEPT, 0, 1);
            note("name of the peer", same(accepted.address, address_of_peer));
            ask(CLOSE, 1);
        }
        timeval limit = {60, 0};
        setsockopt(peer, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        note("own name", same(ask(NAME, 0).address, address_of_socket(peer, true)));
        note("name of the peer", same(ask(PEER_NAME, 0).address, address_of_socket(peer)));
        return peer;
    }

    net::Address address_of_peer;

    void peer_sends(int s, int bytes, const net::Address *to = nullptr)
    {
        std::vector<unsigned char> all(size_t(bytes) + 1);
        for (int i = 0; i < bytes; i++)
            all[size_t(i)] = byte_of(calls, i);
        calls++;
        CHECK(sendto(s, all.data(), size_t(bytes), MSG_NOSIGNAL, to ? reinterpret_cast<const sockaddr *>(to->bytes) : nullptr, to ? to->length : 0) == bytes);
    }

    // So many bytes, or one datagram.
    void peer_receives(int s, int bytes)
    {
        std::vector<unsigned char> all(size_t(bytes) + 1);
        const ssize_t got = recv(s, all.data(), size_t(bytes), MSG_WAITALL);
        note("peer receives " + std::to_string(bytes), got < 0 ? -errno : got, sum_of(all.data(), got));
    }

    // Streams and packets. What lies between both ends is known at each step; of packets, the length of each.
    void run_connection(int type)
    {
        const bool packets = type == net::SEQPACKET;
        const int peer = connect_peer(type);
        std::vector<int> to_kernel, from_kernel;
        const auto bytes_of = [](const std::vector<int> &all) {
            int sum = 0;
            for (int each : all)
                sum += each;
            return sum;
        };
        const auto take = [&](std::vector<int> &from, int bytes) {
            for (int left = bytes; left > 0 && !from.empty();) {
                const int part = packets ? from[0] : std::min(left, from[0]);
                left -= packets ? left : part;
                if ((from[0] -= part) == 0)
                    from.erase(from.begin());
            }
        };
        bool ended = false, shut_receive = false, peer_ended = false, held = false; // `held`: the last send said MORE
        for (int steps = 6 + random(14); steps--;) {
            const int there = bytes_of(to_kernel), bytes = 1 + random(random(2) ? 100 : 1500);
            switch (random(13)) {
            case 0: case 1: case 2:
                // Packets come one at a time: whether a second one has come, no call of a program tells.
                if (!peer_ended && !shut_receive && there + bytes < 2000 && (!packets || !there)) {
                    peer_sends(peer, bytes);
                    to_kernel.push_back(bytes);
                    packets ? ask(AWAIT, 0, net::IN) : ask(AWAIT_BYTES, 0, bytes_of(to_kernel));
                }
                break;
            case 3: case 4:
                if (there || peer_ended || shut_receive) {
                    ask(RECEIVE, 0, bytes, 0, random(2) ? net::DONTWAIT : 0);
                    take(to_kernel, bytes);
                }
                break;
            case 5:
                if (there >= bytes && !packets) {
                    ask(RECEIVE, 0, bytes, 0, net::WAITALL);
                    take(to_kernel, bytes);
                }
                break;
            case 6: ask(RECEIVE, 0, bytes, 0, net::PEEK | net::DONTWAIT); break;
            case 7:
                // Nothing is there, or all that was sent.
                ask(RECEIVE, 0, bytes, 0, net::DONTWAIT | (packets && random(2) ? net::TRUNC : 0));
                take(to_kernel, bytes);
                break;
            case 8: case 9:
                if (bytes_of(from_kernel) + bytes < 1900) {
                    held = !packets && random(3) == 0;
                    ask(SEND, 0, bytes, calls++, (held ? net::MORE : 0) | (random(2) ? net::DONTWAIT : 0));
                    if (!ended)
                        from_kernel.push_back(bytes);
                }
                break;
            case 10:
                if (!from_kernel.empty() && (!held || ended)) {
                    if (packets)
                        for (int each : from_kernel)
                            peer_receives(peer, each);
                    else
                        peer_receives(peer, bytes_of(from_kernel));
                    from_kernel.clear();
                }
                break;
            case 11:
                // Once both sides of TCP have ended it is soon no connection any more.
                if (random(3) == 0 && !(is_inet && ended && peer_ended)) {
                    const int how = random(3);
                    ask(SHUTDOWN, 0, how);
                    ended = ended || how != net::SHUT_RECEIVE;
                    shut_receive = shut_receive || how != net::SHUT_SEND;
                    if (shut_receive)
                        ask(AWAIT, 0, net::RDHUP);
                } else if (!peer_ended && random(2)) {
                    CHECK(!shutdown(peer, SHUT_WR));
                    peer_ended = true;
                    ask(AWAIT, 0, net::RDHUP);
                }
                break;
            default: ask(POLL, 0, net::IN | net::RDHUP);
            }
        }
        // With unread bytes or without; all that was sent arrives, and then the end or its error. If there are unread bytes, TCP loses
        // what it has not sent yet, and the peer of a kernel's UNIX socket is not told of them, that of a program before it gets packets.
        const bool unread = !to_kernel.empty();
        ask(CLOSE, 0);
        ask(RECEIVE, 0, 1);
        int64_t got;
        int count = 0;
        uint64_t sum = 0;
        std::vector<unsigned char> all(most_bytes);
        while ((got = recv(peer, all.data(), all.size(), 0)) > 0) {
            for (int64_t i = 0; i < got; i++)
                sum = (sum * 31 + all[size_t(i)] + 1) % 1000000007;
            count += int(got);
        }
        if (!unread || (!is_inet && !packets))
            note("peer receives at the end", count, sum);
        if (!unread || is_inet)
            note("and then", got < 0 ? -errno : 0);
        close(peer);
    }

    void run_datagrams()
    {
        net::Address address, nowhere;
        const int peer = bound(SOCK_DGRAM, address);
        ask(SOCKET, 0, domain(), net::DGRAM);
        // Of UDP such a send, which fails, gives the socket of a program a port, and that of a kernel none.
        if (!is_inet && random(4) == 0)
            ask(SEND, 0, 10);
        ask(BIND, 0, 0, 0, 0, new_address());
        const net::Address own = caller({NAME, 0, 0, 0, 0, {}}).address;
        close(bound(SOCK_DGRAM, nowhere));
        bool connects = false;
        int waiting = 0;
        for (int steps = 8 + random(12); steps--;) {
            const int bytes = random(4) ? random(1500) : random(3);
            switch (random(9)) {
            case 0: case 1: case 2:
                // One at a time: whether a second one has come, no call of a program tells.
                if (!waiting) {
                    peer_sends(peer, bytes, &own);
                    waiting = 1;
                    ask(AWAIT, 0, net::IN);
                }
                break;
            case 3: case 4: {
                // Of 0 bytes, and cut.
                const Result result = ask(RECEIVE_FROM, 0, bytes, 0, waiting && random(2) ? net::TRUNC : net::DONTWAIT);
                if (result.value >= 0)
                    note("from the peer", same(result.address, address));
                waiting = 0;
                break;
            }
            case 5: ask(RECEIVE, 0, bytes, 0, net::DONTWAIT | net::PEEK); break;
            case 6:
                ask(SEND_TO, 0, bytes, calls++, 0, address);
                peer_receives(peer, 1500);
                break;
            case 7:
                if (connects) {
                    ask(SEND, 0, bytes, calls++, net::DONTWAIT);
                    peer_receives(peer, 1500);
                } else if (random(2)) {
                    ask(CONNECT, 0, 0, 0, 0, address);
                    note("name of the peer", same(ask(PEER_NAME, 0).address, address));
                    connects = true;
                } else {
                    ask(PEER_NAME, 0);
                }
                break;
            default:
                if (!is_inet)
                    ask(SEND_TO, 0, bytes, calls++, 0, nowhere);
                ask(SEND_TO, 0, bytes, calls++, 0, is_inet ? net::Address::abstract("spinio-none") : net::Address::inet(127, 0, 0, 1, 9));
                ask(POLL, 0, net::IN);
            }
        }
        ask(CLOSE, 0);
        close(peer);
    }
};

static void kernel_and_program_get_the_same_results(unsigned first, unsigned count)
{
    Net net;
    Call *call;
    Result *result;
    CHECK(cudaHostAlloc(&call, sizeof *call, cudaHostAllocDefault) == cudaSuccess && cudaHostAlloc(&result, sizeof *result, cudaHostAllocDefault) == cudaSuccess);
    auto *const turn = reinterpret_cast<uint64_t *>(net.words);
    uint64_t calls = 0;
    const auto ask_kernel = [&](const Call &now) {
        *call = now;
        __atomic_store_n(turn, ++calls, __ATOMIC_RELEASE);
        for (int i = 0; now.op != QUIT && __atomic_load_n(turn + 1, __ATOMIC_ACQUIRE) < calls; i++)
            i < 2000 ? std::this_thread::yield() : void(usleep(50));
        return *result;
    };
    spinio::launch_resident_on(net.stream, run_calls, 1, 32, net.handle, static_cast<const Call *>(call), result, turn);
    for (unsigned seed = first; seed < first + count && failures < 5; seed++) {
        int all[sockets] = {-1, -1, -1};
        const auto of_kernel = Script(seed, ask_kernel).run(), of_program = Script(seed, [&](const Call &now) { return call_linux(now, all); }).run();
        for (size_t i = 0; i < std::max(of_kernel.size(), of_program.size()); i++) {
            const std::string kernel = i < of_kernel.size() ? of_kernel[i] : "nothing", program = i < of_program.size() ? of_program[i] : "nothing";
            if (kernel == program)
                continue;
            std::printf("script %u:\n", seed);
            for (size_t before = 0; before < i; before++)
                std::printf("  %s\n", of_program[before].c_str());
            std::printf("a kernel: %s\na program: %s\n", kernel.c_str(), program.c_str());
            failures++;
            break;
        }
    }
    ask_kernel({QUIT, 0, 0, 0, 0, {}});
    net.wait();
    CHECK(net.stats().violations == 0);
    std::printf("%llu calls\n", (unsigned long long)calls);
    cudaFreeHost(call);
    cudaFreeHost(result);
}

int main(int count, char **arguments)
{
    const unsigned first = count > 1 ? unsigned(std::atoi(arguments[1])) : 0, scripts = count > 2 ? unsigned(std::atoi(arguments[2])) : 400;
    kernel_and_program_get_the_same_results(first, scripts);
    std::printf("%u scripts from %u on, %d failures\n", scripts, first, failures);
    return failures != 0;
}
