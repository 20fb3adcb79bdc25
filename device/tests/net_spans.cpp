// Bytes of streams in place: reserve and commit, borrow and give_back, over each transport and for each group, against programs and
// kernels that use send and recv. Prints each failure and exits with 1.
#include "net_test.h"
#include "net_process.h"

#include <thread>

constexpr unsigned ring_bytes = 4096, total = 60'000;

__host__ __device__ inline unsigned char byte_of(uint64_t at) { return (unsigned char)(at * 13 + (at >> 8) * 7 + (at >> 16)); }

// A size of the next span or call, from where the stream is.
__host__ __device__ inline size_t size_at(uint64_t at) { return at * 2654435761u % 3001 + 1; }

// Sends the stream in place; returns how many bytes.
template <typename Group>
__device__ int64_t store_stream(Group group, const net::Handle &handle, int s)
{
    uint64_t at = 0;
    while (at < total) {
        net::Span span;
        const uint64_t left = total - at, wanted = size_at(at) < left ? size_at(at) : left;
        int64_t got = net::reserve(group, handle, s, &span, wanted);
        if (got <= 0 || got > int64_t(wanted) || size_t(got) != span.size)
            return got <= 0 ? got : -1000;
        for (int64_t i = group.rank(); i < got; i += group.size())
            span.bytes[i] = byte_of(at + uint64_t(i));
        // Each fifth time the last byte is not sent, and each seventh time nothing is.
        const int64_t sent = at % 7 == 3 ? 0 : at % 5 == 1 && got > 1 ? got - 1 : got;
        if (int failed = net::commit(group, handle, s, size_t(sent)))
            return failed;
        at += uint64_t(sent ? sent : 0);
        if (!sent) {
            // The next span begins where this one did.
            const unsigned char byte = byte_of(at);
            if (net::send(group, handle, s, &byte, 1) != 1)
                return -1001;
            at++;
        }
    }
    return int64_t(at);
}

// Receives it in place; returns how many of its bytes are right.
template <typename Group>
__device__ int64_t load_stream(Group group, const net::Handle &handle, int s)
{
    uint64_t at = 0;
    bool right = true;
    for (;;) {
        net::Span span;
        int64_t got = net::borrow(group, handle, s, &span, size_at(at));
        // One look at all threads' results, at the end: a barrier here would do what give_back has to do.
        if (got <= 0)
            return got < 0 ? got : group.any(!right) ? -2000 : int64_t(at);
        right = right && size_t(got) == span.size;
        for (int64_t i = group.rank(); i < got; i += group.size())
            right = right && span.bytes[i] == byte_of(at + uint64_t(i));
        const int64_t taken = at % 7 == 3 ? 0 : at % 5 == 1 && got > 1 ? got - 1 : got;
        if (int failed = net::give_back(group, handle, s, size_t(taken)))
            return failed;
        at += uint64_t(taken);
        if (!taken) {
            unsigned char byte = 0;
            if (net::recv(group, handle, s, &byte, 1) != 1 || group.any(group.leads() && byte != byte_of(at)))
                return -2001;
            at++;
        }
    }
}

template <typename Group>
__device__ void both(Group group, const net::Handle &handle, int s, int64_t *out)
{
    int64_t got = load_stream(group, handle, s), sent = store_stream(group, handle, s);
    if (group.leads())
        out[0] = got, out[1] = sent;
    net::close(group, handle, s);
}

// Block 0 by the block, 1 by a warp, 2 by a thread: a stream in, then one out.
__global__ void serve(net::Handle handle, int listener, int64_t *out)
{
    if (blockIdx.x == 0) {
        both(net::block(), handle, net::accept(net::block(), handle, listener), out);
    } else if (blockIdx.x == 1 && threadIdx.x < 32) {
        both(net::warp(), handle, net::accept(net::warp(), handle, listener), out + 2);
    } else if (blockIdx.x == 2 && threadIdx.x == 0) {
        both(net::thread(), handle, net::accept(net::thread(), handle, listener), out + 4);
    }
}

// Kernels that ask with send and recv.
__global__ void ask(net::Handle handle, net::Address to, int64_t *out)
{
    __shared__ unsigned char bytes[3001];
    auto g = net::block();
    int s = connected(g, handle, to);
    for (uint64_t at = 0; at < total;) {
        const uint64_t left = total - at, count = size_at(at + 1) < left ? size_at(at + 1) : left;
        __syncthreads();
        for (uint64_t i = threadIdx.x; i < count; i += blockDim.x)
            bytes[i] = byte_of(at + i);
        __syncthreads();
        net::send(g, handle, s, bytes, count);
        at += count;
    }
    net::shutdown(g, handle, s, net::SHUT_SEND);
    int64_t at = 0, got;
    while ((got = net::recv(g, handle, s, bytes, sizeof bytes)) > 0) {
        bool right = true;
        for (int64_t i = threadIdx.x; i < got; i += blockDim.x)
            right = right && bytes[i] == byte_of(uint64_t(at + i));
        if (__syncthreads_or(!right))
            break;
        at += got;
    }
    net::close(g, handle, s);
    if (threadIdx.x == 0)
        out[blockIdx.x] = at;
}

static bool served(const Net &net)
{
    bool right = true;
    for (int i = 0; i < 6; i++)
        right = right && net.words[i] == total;
    if (!right)
        std::printf("%ld %ld %ld %ld %ld %ld\n", long(net.words[0]), long(net.words[1]), long(net.words[2]), long(net.words[3]), long(net.words[4]), long(net.words[5]));
    return right;
}

// A program's part: `send` and `recv` of its own kind of socket.
template <typename Send, typename Receive>
static int64_t program_asks(Send send, Receive receive)
{
    std::vector<unsigned char> bytes(3001);
    for (uint64_t at = 0; at < total;) {
        const uint64_t count = std::min<uint64_t>(size_at(at + 1), total - at);
        for (uint64_t i = 0; i < count; i++)
            bytes[i] = byte_of(at + i);
        if (!send(bytes.data(), count))
            return -1;
        at += count;
    }
    send(nullptr, 0);
    int64_t at = 0;
    for (ssize_t got; (got = receive(bytes.data(), bytes.size())) > 0; at += got)
        for (ssize_t i = 0; i < got; i++)
            if (bytes[size_t(i)] != byte_of(uint64_t(at + i)))
                return -2;
    return at;
}

static void programs_talk_to_spans(bool shares)
{
    Net net({.ring_bytes = ring_bytes});
    std::string address;
    int s = listener(net, "unix:@", address);
    spinio::launch_resident_on(net.stream, serve, 3, 64, net.handle, s, net.words);
    std::vector<std::thread> programs;
    int64_t got[3] = {};
    for (int64_t &mine : got)
        programs.emplace_back([&address, &mine, shares] {
            if (shares) {
                spinio_socket *socket = spinio_socket_connect(address.c_str(), nullptr);
                mine = program_asks(
                    [&](const void *bytes, size_t count) { return count ? spinio_socket_send(socket, bytes, count, 0) == ssize_t(count) : !spinio_socket_shutdown(socket, SHUT_WR); },
                    [&](void *bytes, size_t count) { return spinio_socket_recv(socket, bytes, count, 0); });
                spinio_socket_close(socket);
            } else {
                int fd = socket(AF_UNIX, SOCK_STREAM, 0);
                sockaddr_un name = {};
                name.sun_family = AF_UNIX;
                std::memcpy(name.sun_path + 1, address.data() + 6, address.size() - 6);
                CHECK(!connect(fd, reinterpret_cast<sockaddr *>(&name), socklen_t(offsetof(sockaddr_un, sun_path) + address.size() - 5)));
                mine = program_asks([fd](const void *bytes, size_t count) { return count ? write(fd, bytes, count) == ssize_t(count) : !shutdown(fd, SHUT_WR); },
                                    [fd](void *bytes, size_t count) { return read(fd, bytes, count); });
                close(fd);
            }
        });
    for (auto &program : programs)
        program.join();
    net.wait();
    CHECK(served(net) && got[0] == total && got[1] == total && got[2] == total);
    CHECK(net.stats().shared == (shares ? 3u : 0u));
}

static void kernels_talk_to_spans(bool two)
{
    Net accepts({.ring_bytes = ring_bytes}), connects({.ring_bytes = ring_bytes});
    Net &client = two ? connects : accepts;
    std::string address;
    int s = listener(accepts, "tcp://127.0.0.1:0", address);
    spinio::launch_resident_on(accepts.stream, serve, 3, 64, accepts.handle, s, accepts.words);
    spinio::launch_resident_on(connects.stream, ask, 3, 64, client.handle, address_of(address), connects.words);
    accepts.wait();
    connects.wait();
    CHECK(served(accepts) && connects.words[0] == total && connects.words[1] == total && connects.words[2] == total);
    CHECK((two ? accepts.stats().peer : accepts.stats().upgraded) == 3 && accepts.stats().violations == 0);
}

// Misuse, and what else happens to a socket whose direction a group has.
__global__ void misuse(net::Handle handle, int listener, int64_t *out)
{
    auto g = net::block();
    net::Span span, other;
    __shared__ char bytes[8];
    int s = net::accept(g, handle, listener), datagrams = net::socket(g, handle, net::INET, net::DGRAM, 0);
    int64_t results[] = {
        net::commit(g, handle, s, 0),
        net::give_back(g, handle, s, 0),
        net::reserve(g, handle, datagrams, &span, 10),
        net::reserve(g, handle, s, &span, 0),
        net::borrow(g, handle, -1, &span, 10),
        net::borrow(g, handle, s, &span, 10, net::DONTWAIT),
        net::reserve(g, handle, s, &span, 10),
        net::reserve(g, handle, s, &other, 10, net::DONTWAIT),
        net::send(g, handle, s, bytes, 1, net::DONTWAIT),
        net::commit(g, handle, s, 11),
        net::commit(g, handle, s, 10),
        net::commit(g, handle, s, 10),
        net::borrow(g, handle, s, &span, 100),
        net::recv(g, handle, s, bytes, 1, net::DONTWAIT),
        net::give_back(g, handle, s, 6),
        net::give_back(g, handle, s, 3),
        net::recv(g, handle, s, bytes, 8),
        net::reserve(g, handle, s, &span, 10),
        net::close(g, handle, s),
        net::commit(g, handle, s, 10),
        net::reserve(g, handle, s, &span, 10),
    };
    if (threadIdx.x == 0)
        for (size_t i = 0; i < sizeof results / 8; i++)
            out[i] = results[i];
}

static void misuse_is_refused()
{
    Net net({.ring_bytes = ring_bytes});
    std::string address;
    int s = listener(net, "unix:@", address);
    spinio::launch_resident_on(net.stream, misuse, 1, 64, net.handle, s, net.words);
    spinio_socket *socket = spinio_socket_connect(address.c_str(), nullptr);
    char bytes[16];
    CHECK(spinio_socket_recv(socket, bytes, sizeof bytes, 0) == 10);
    CHECK(spinio_socket_send(socket, "hello", 5, 0) == 5);
    net.wait();
    CHECK(net.stats().shared == 1);
    const int64_t expected[] = {-EINVAL, -EINVAL, -EOPNOTSUPP, -EINVAL, -EBADF, -EAGAIN, 10, -EAGAIN, -EAGAIN, -EINVAL, 0, -EINVAL, 5, -EAGAIN, -EINVAL, 0, 2, 10, 0, -EBADF, -EBADF};
    for (size_t i = 0; i < sizeof expected / 8; i++)
        if (net.words[i] != expected[i])
            CHECK((std::printf("result %zu is %ld, not %ld\n", i, long(net.words[i]), long(expected[i])), false));
    spinio_socket_close(socket);
}

// Gives back what comes.
__global__ void echo(net::Handle handle, int listener)
{
    __shared__ char bytes[500];
    auto g = net::block();
    const int s = net::accept(g, handle, listener);
    for (int64_t got; (got = net::recv(g, handle, s, bytes, sizeof bytes)) > 0;)
        net::send(g, handle, s, bytes, size_t(got));
    net::close(g, handle, s);
}

// A program has bytes of its own direction in place: others wait, misuse is an error, and a close takes the span away.
static void programs_have_spans(bool no_upgrade)
{
    Net net;
    std::string address;
    const int listening = listener(net, "unix:@", address);
    spinio::launch_resident_on(net.stream, echo, 1, 32, net.handle, listening);
    struct spinio_socket_options options = {sizeof options, no_upgrade, 60000, 60000};
    spinio_socket *s = spinio_socket_connect(address.c_str(), &options);
    char text[128], bytes[8] = {};
    CHECK(s && spinio_socket_transport(s, text, sizeof text) == !no_upgrade);
    void *span = nullptr;
    auto fails = [](ssize_t result, int number) { return result == -1 && errno == number; };
    CHECK(fails(spinio_socket_reserve(s, &span, 0, 0), EINVAL) && fails(spinio_socket_borrow(s, &span, 0, 0), EINVAL));
    CHECK(fails(spinio_socket_reserve(s, nullptr, 9, 0), EFAULT) && fails(spinio_socket_borrow(s, nullptr, 9, 0), EFAULT));
    CHECK(fails(spinio_socket_commit(s, 0), EINVAL) && fails(spinio_socket_give_back(s, 1), EINVAL));
    CHECK(fails(spinio_socket_borrow(s, &span, 9, MSG_DONTWAIT), EAGAIN));

    CHECK(spinio_socket_reserve(s, &span, 5, 0) == 5 && span);
    CHECK(fails(spinio_socket_send(s, "x", 1, MSG_DONTWAIT), EAGAIN));
    CHECK(fails(spinio_socket_commit(s, 6), EINVAL));
    std::memcpy(span, "abcde", 5);
    std::thread waits([&] { CHECK(spinio_socket_send(s, "z", 1, 0) == 1); });
    usleep(20000);
    CHECK(!spinio_socket_commit(s, 3));
    waits.join();

    CHECK(spinio_socket_borrow(s, &span, 2, 0) == 2 && !std::memcmp(span, "ab", 2));
    CHECK(fails(spinio_socket_recv(s, bytes, 1, MSG_DONTWAIT), EAGAIN));
    CHECK(!spinio_socket_give_back(s, 1));
    CHECK(spinio_socket_recv(s, bytes, 3, MSG_WAITALL) == 3 && !std::memcmp(bytes, "bcz", 3));

    // At the end of the stream, and after it.
    CHECK(!spinio_socket_shutdown(s, SHUT_WR));
    CHECK(spinio_socket_borrow(s, &span, 9, 0) == 0 && fails(spinio_socket_give_back(s, 0), EINVAL));
    if (no_upgrade) // the system tells when the bytes are sent
        CHECK(spinio_socket_reserve(s, &span, 9, 0) == 9 && fails(spinio_socket_commit(s, 9), EPIPE));
    else
        CHECK(fails(spinio_socket_reserve(s, &span, 9, 0), EPIPE));
    CHECK(!spinio_socket_close(s));
    net.wait();
}

static void close_of_a_program_takes_spans_away()
{
    Net net;
    std::string address;
    const int listening = listener(net, "unix:@", address);
    spinio::launch_resident_on(net.stream, echo, 1, 32, net.handle, listening);
    spinio_socket *s = spinio_socket_connect(address.c_str(), nullptr);
    void *span;
    CHECK(s && spinio_socket_send(s, "abc", 3, 0) == 3);
    CHECK(spinio_socket_borrow(s, &span, 9, 0) >= 1 && spinio_socket_reserve(s, &span, 9, 0) == 9);
    CHECK(!spinio_socket_close(s));
    net.wait();
}

int main()
{
    programs_talk_to_spans(false);
    programs_talk_to_spans(true);
    kernels_talk_to_spans(false);
    kernels_talk_to_spans(true);
    misuse_is_refused();
    programs_have_spans(false);
    programs_have_spans(true);
    close_of_a_program_takes_spans_away();
    std::printf("%d failures\n", failures);
    return failures != 0;
}
