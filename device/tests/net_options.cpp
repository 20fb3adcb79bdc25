// setsockopt and getsockopt, and connect that does not wait: to a program, to a socket of the same net, and where it fails. Prints each
// failure and exits with 1.
#include "net_test.h"

#include <netinet/tcp.h>

#include <spinio/file.h>

template <typename Value>
__device__ int get(const net::Handle &handle, int s, int level, int option, Value *value, unsigned length = sizeof(Value))
{
    const int result = net::getsockopt(net::block(), handle, s, level, option, value, &length);
    return result ? result : int(length) == int(sizeof(Value)) ? 0 : -1000;
}

template <typename Value>
__device__ int set(const net::Handle &handle, int s, int level, int option, Value value, unsigned length = sizeof(Value))
{
    return net::setsockopt(net::block(), handle, s, level, option, &value, length);
}

struct Limit {
    int64_t seconds, microseconds;
};

__global__ void options(net::Handle handle, int64_t *out)
{
    auto g = net::block();
    const int tcp = net::socket(g, handle, net::INET, net::STREAM, 0), local = net::socket(g, handle, net::UNIX, net::STREAM, 0);
    const int udp6 = net::socket(g, handle, net::INET6, net::DGRAM, 0);
    __shared__ int value;
    __shared__ Limit limit;
    int n = 0;
    // A result and what is expected of it.
    auto expect = [&](int64_t result, int64_t expected) {
        if (threadIdx.x == 0)
            out[n] = result, out[n + 1] = expected;
        n += 2;
    };
    using namespace net;
    expect(get(handle, tcp, LEVEL_SOCKET, OPTION_TYPE, &value), 0);
    expect(value, SOCK_STREAM);
    expect(get(handle, local, LEVEL_SOCKET, OPTION_DOMAIN, &value), 0);
    expect(value, AF_UNIX);
    expect(get(handle, tcp, LEVEL_SOCKET, OPTION_KEEPALIVE, &value), 0);
    expect(value, 0);
    expect(set(handle, tcp, LEVEL_SOCKET, OPTION_KEEPALIVE, 1), 0);
    expect(get(handle, tcp, LEVEL_SOCKET, OPTION_KEEPALIVE, &value), 0);
    expect(value, 1);
    expect(set(handle, tcp, LEVEL_TCP, OPTION_KEEPIDLE, 77), 0);
    expect(get(handle, tcp, LEVEL_TCP, OPTION_KEEPIDLE, &value), 0);
    expect(value, 77);
    expect(get(handle, tcp, LEVEL_SOCKET, OPTION_ERROR, &value), 0);
    expect(value, 0);
    if (udp6 > 0) {
        expect(set(handle, udp6, LEVEL_IPV6, OPTION_V6ONLY, 1), 0);
        expect(get(handle, udp6, LEVEL_IPV6, OPTION_V6ONLY, &value), 0);
        expect(value, 1);
    }
    // Time limits are those of set_timeout().
    expect(set(handle, tcp, LEVEL_SOCKET, OPTION_RCVTIMEO, Limit{2, 500'000}), 0);
    expect(get(handle, tcp, LEVEL_SOCKET, OPTION_RCVTIMEO, &limit), 0);
    expect(limit.seconds * 1'000'000 + limit.microseconds, 2'500'000);
    expect(net::set_timeout(g, handle, tcp, 0, 3'000'000'000), 0);
    expect(get(handle, tcp, LEVEL_SOCKET, OPTION_SNDTIMEO, &limit), 0);
    expect(limit.seconds, 3);
    expect(set(handle, tcp, LEVEL_SOCKET, OPTION_SNDTIMEO, Limit{1, 1'000'000}), -EDOM);
    expect(set(handle, tcp, LEVEL_SOCKET, OPTION_SNDTIMEO, Limit{-1, 0}), 0);
    expect(get(handle, tcp, LEVEL_SOCKET, OPTION_SNDTIMEO, &limit), 0);
    expect(limit.seconds, 0);
    expect(limit.microseconds, 0);
    // Numbers that are too large for their fields are not those of others.
    net::Address longer = {};
    longer.length = 256 + 16;
    expect(net::bind(g, handle, tcp, longer), -EINVAL);
    expect(net::set(g, handle), 1);
    expect(net::add(g, handle, (1 << 16) + 1, tcp, net::IN), -EBADF);
    // Wrong sizes, unknown options, those of another domain, those that can only be read, and sockets that are none.
    expect(set(handle, tcp, LEVEL_SOCKET, OPTION_KEEPALIVE, 1, 3), -EINVAL);
    expect(set(handle, tcp, LEVEL_SOCKET, OPTION_KEEPALIVE, Limit{1, 0}, 8), -EINVAL);
    expect(set(handle, tcp, LEVEL_SOCKET, OPTION_KEEPALIVE, 1, 0), -EINVAL);
    expect(set(handle, tcp, LEVEL_SOCKET, OPTION_RCVTIMEO, 1, 4), -EINVAL);
    expect(get(handle, tcp, LEVEL_SOCKET, OPTION_TYPE, &value, 2), -EINVAL);
    expect(get(handle, tcp, LEVEL_SOCKET, OPTION_RCVTIMEO, &limit, 8), -EINVAL);
    expect(set(handle, tcp, LEVEL_SOCKET, SO_LINGER, Limit{1, 0}, 8), -ENOPROTOOPT);
    expect(set(handle, tcp, 12345678, 1, 1), -ENOPROTOOPT);
    expect(set(handle, tcp, LEVEL_SOCKET, OPTION_TYPE, 1), -ENOPROTOOPT);
    expect(set(handle, local, LEVEL_TCP, OPTION_NODELAY, 1), -EOPNOTSUPP);
    expect(get(handle, -1, LEVEL_SOCKET, OPTION_ERROR, &value), -EBADF);
    net::close(g, handle, tcp);
    expect(get(handle, tcp, LEVEL_SOCKET, OPTION_ERROR, &value), -EBADF);
    expect(-1, -1);
}

static void options_are_those_of_linux()
{
    Net net;
    spinio::launch_resident_on(net.stream, options, 1, 32, net.handle, net.words);
    net.wait();
    CHECK(net.words[0] == 0);
    for (int i = 0; net.words[i] != -1; i += 2)
        if (net.words[i] != net.words[i + 1])
            CHECK((std::printf("result %d is %ld, not %ld\n", i / 2, long(net.words[i]), long(net.words[i + 1])), false));
}

// Connects without waiting to what has no room, and once it has.
__global__ void connect_later(net::Handle handle, net::Address to, bool fails, net::Address then, uint64_t *turn, int64_t *out)
{
    auto g = net::block();
    __shared__ net::Poll poll;
    __shared__ int error;
    __shared__ char bytes[8];
    unsigned length = sizeof error;
    const int s = net::socket(g, handle, net::INET, net::STREAM, 0);
    auto put = [&](int at, int64_t value) {
        if (threadIdx.x == 0)
            out[at] = value;
    };
    put(0, net::connect(g, handle, s, to, net::DONTWAIT));
    if (threadIdx.x == 0)
        poll = {s, net::IN | net::OUT, 0, 0, 0};
    __syncthreads();
    put(1, net::poll(g, handle, &poll, 1, 0));
    put(2, net::connect(g, handle, s, to, net::DONTWAIT));
    put(3, net::send(g, handle, s, "early", 5, net::DONTWAIT));
    put(4, net::recv(g, handle, s, bytes, 8, net::DONTWAIT));
    put(5, net::getsockopt(g, handle, s, net::LEVEL_SOCKET, net::OPTION_ERROR, &error, &length));
    put(6, error);
    pass_and_wait(turn, 1);
    // It waits for the connection.
    put(7, net::send(g, handle, s, "later", 5));
    put(8, net::poll(g, handle, &poll, 1, 30'000'000'000));
    put(9, poll.ready);
    put(10, net::getsockopt(g, handle, s, net::LEVEL_SOCKET, net::OPTION_ERROR, &error, &length));
    put(11, error);
    put(12, net::getsockopt(g, handle, s, net::LEVEL_SOCKET, net::OPTION_ERROR, &error, &length));
    put(13, error);
    if (fails) {
        put(14, net::send(g, handle, s, "never", 5));
        put(15, net::connect(g, handle, s, then));
        put(16, net::send(g, handle, s, "again", 5));
    }
    net::close(g, handle, s);
}

static std::string received(int fd)
{
    char text[16] = {};
    size_t at = 0;
    for (ssize_t got; at < 5 && (got = recv(fd, text + at, 5 - at, 0)) > 0;)
        at += size_t(got);
    return text;
}

static void connect_waits_for_nothing(bool fails)
{
    Net net;
    sockaddr_in name, then;
    // A backlog of one, which two connections fill: Linux drops the next attempt, and makes it again a second later.
    const int full = listening_socket(name, 0), good = listening_socket(then);
    std::vector<int> fillers;
    timeval patience = {20, 0};
    for (int fd : {full, good})
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    for (int i = 0; i < 2; i++) {
        const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        (void)connect(fd, reinterpret_cast<sockaddr *>(&name), sizeof name);
        fillers.push_back(fd);
    }
    usleep(20000);
    auto turn = reinterpret_cast<uint64_t *>(net.words) + 64;
    int64_t *out = net.words;
    spinio::launch_resident_on(net.stream, connect_later, 1, 32, net.handle, address_of(text_of(name)), fails, address_of(text_of(then)), turn, out);
    while (spinio::load_acquire_system(turn) < 1)
        usleep(1000);
    if (fails)
        close(full);
    spinio::store_release_system(turn + 1, 1);
    if (!fails) {
        // The fillers, and then the kernel's.
        std::string text;
        for (int i = 0; i < 3 && text != "later"; i++) {
            const int fd = accept(full, nullptr, nullptr);
            timeval limit = {0, 100'000};
            setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
            text = received(fd);
            fillers.push_back(fd);
        }
        CHECK(text == "later");
        close(full);
    } else {
        const int fd = accept(good, nullptr, nullptr);
        CHECK(received(fd) == "again");
        fillers.push_back(fd);
    }
    net.wait();
    CHECK(out[0] == -EINPROGRESS && out[1] == 0 && out[2] == -EALREADY && out[3] == -EAGAIN && out[4] == -EAGAIN && out[5] == 0 && out[6] == 0);
    if (fails) {
        // Linux has reset the attempt: refused, or the reset of a connection that the listener's end took with it.
        CHECK(out[7] == -out[11] && out[8] == 1 && out[9] == (net::IN | net::OUT | net::ERR | net::HUP));
        CHECK(out[10] == 0 && (out[11] == ECONNREFUSED || out[11] == ECONNRESET) && out[12] == 0 && out[13] == 0);
        CHECK(out[14] == -EPIPE && out[15] == 0 && out[16] == 5);
    } else {
        CHECK(out[7] == 5 && out[8] == 1 && out[9] == net::OUT && out[10] == 0 && out[11] == 0 && out[12] == 0 && out[13] == 0);
    }
    if (failures)
        for (int i = 0; i < 17; i++)
            std::printf("%d: %ld\n", i, long(out[i]));
    for (int fd : fillers)
        close(fd);
    close(good);
}

// In an event set: the connection is made inside the net, and its events come.
__global__ void connect_in_a_set(net::Handle handle, net::Address to, int64_t *out)
{
    auto g = net::block();
    __shared__ net::Ready ready;
    __shared__ char bytes[8];
    const int set = net::set(g, handle), s = net::socket(g, handle, to.bytes[0], net::STREAM, 0);
    auto put = [&](int at, int64_t value) {
        if (threadIdx.x == 0)
            out[at] = value;
    };
    put(0, net::add(g, handle, set, s, net::IN | net::OUT));
    put(1, net::connect(g, handle, s, to, net::DONTWAIT));
    put(2, net::wait(g, handle, set, &ready, 1, 300'000'000'000));
    put(3, ready.s == s && ready.events == net::OUT);
    // Only what comes now: there is room all the time.
    put(4, net::add(g, handle, set, s, net::IN));
    put(5, net::send(g, handle, s, "hello", 5));
    put(6, net::wait(g, handle, set, &ready, 1, 300'000'000'000));
    put(7, ready.s == s && (ready.events & net::IN));
    put(8, net::recv(g, handle, s, bytes, 8));
    put(9, net::rearm(g, handle, s));
    put(10, net::wait(g, handle, set, &ready, 1, 300'000'000'000));
    put(11, ready.s == s && (ready.events & net::IN));
    put(12, net::recv(g, handle, s, bytes, 8));
    net::close(g, handle, s);
}

// Sends back what comes first, once it is asked to, and closes.
__global__ void echo_once(net::Handle handle, int listener)
{
    auto g = net::block();
    __shared__ char bytes[8];
    const int s = net::accept(g, handle, listener);
    const int64_t got = net::recv(g, handle, s, bytes, 5, net::WAITALL);
    net::send(g, handle, s, bytes, size_t(got));
    net::close(g, handle, s);
}

static void connect_in_a_set_is_told(const char *name, int nets)
{
    Net accepts, connects;
    Net &client = nets == 2 ? connects : accepts;
    std::string address;
    const int s = listener(accepts, name, address);
    spinio::launch_resident_on(accepts.stream, echo_once, 1, 32, accepts.handle, s);
    spinio::launch_resident_on(connects.stream, connect_in_a_set, 1, 32, client.handle, address_of(address), connects.words);
    accepts.wait();
    connects.wait();
    const int64_t *out = connects.words;
    const bool right = !out[0] && (out[1] == 0 || out[1] == -EINPROGRESS) && out[2] == 1 && out[3] && !out[4] && out[5] == 5 && out[6] == 1 && out[7] && out[8] == 5 && !out[9] &&
                       out[10] == 1 && out[11] && out[12] == 0;
    CHECK(right);
    for (int i = 0; !right && i < 13; i++)
        std::printf("%s %d: %ld\n", name, i, long(out[i]));
    CHECK(nets == 1 ? accepts.stats().upgraded == 1 : accepts.stats().peer == 1);
}

// A head left by MORE, a file, and the end, of which the first is asked for while the connection is being made.
__global__ void connect_and_end(net::Handle handle, net::Address to, int64_t *out)
{
    auto g = net::block();
    __shared__ net::Poll poll;
    __shared__ int error;
    __shared__ char byte;
    unsigned length = 2;
    const int s = net::socket(g, handle, to.bytes[0], net::STREAM, 0), f = spinio::file::open(g, handle, "file", spinio::file::RDONLY);
    const int connected = net::connect(g, handle, s, to, net::DONTWAIT);
    // Before any other call knows how the connection goes on.
    const int64_t file = net::sendfile(g, handle, s, f, 0, 4), empty = net::sendfile(g, handle, s, f, 4, 9);
    if (threadIdx.x == 0)
        poll = {s, net::OUT, 0, 0, 0};
    __syncthreads();
    const int polled = net::poll(g, handle, &poll, 1, 300'000'000'000), size = net::getsockopt(g, handle, s, net::LEVEL_SOCKET, net::OPTION_ERROR, &error, &length);
    const int64_t head = net::send(g, handle, s, "head", 4, net::MORE), none = net::sendfile(g, handle, s, f, 4, 9);
    const int ended = net::shutdown(g, handle, s, net::SHUT_SEND);
    const int64_t got = net::recv(g, handle, s, &byte, 1);
    if (threadIdx.x == 0)
        out[0] = f > 0 && (!connected || connected == -EINPROGRESS), out[1] = file, out[2] = empty, out[3] = polled, out[4] = size, out[5] = head, out[6] = none, out[7] = ended, out[8] = got;
    net::close(g, handle, s);
}

// Receives to the end, and answers with a byte.
__global__ void read_to_the_end(net::Handle handle, int listener, char *text)
{
    auto g = net::block();
    const int s = net::accept(g, handle, listener);
    int64_t at = 0;
    for (int64_t got; (got = net::recv(g, handle, s, text + at, size_t(32 - at))) > 0;)
        at += got;
    net::send(g, handle, s, "!", 1);
    net::close(g, handle, s);
}

static void connection_that_was_made_later_is_ended(const char *name, int nets)
{
    char folder[] = "/var/tmp/spinio-options-XXXXXX";
    CHECK(mkdtemp(folder));
    const std::string path = std::string(folder) + "/file";
    FILE *file = std::fopen(path.c_str(), "we");
    CHECK(file && std::fputs("body", file) >= 0 && !std::fclose(file));
    {
        Net accepts({.files_root = folder}), connects({.files_root = folder});
        Net &client = nets == 2 ? connects : accepts;
        std::string address;
        const int s = listener(accepts, name, address);
        auto text = reinterpret_cast<char *>(accepts.words + 100);
        spinio::launch_resident_on(accepts.stream, read_to_the_end, 1, 32, accepts.handle, s, text);
        spinio::launch_resident_on(connects.stream, connect_and_end, 1, 32, client.handle, address_of(address), connects.words);
        accepts.wait();
        connects.wait();
        const int64_t expected[] = {1, 4, 0, 1, -EINVAL, 4, 0, 0, 1};
        for (int i = 0; i < 9; i++)
            if (connects.words[i] != expected[i])
                CHECK((std::printf("%s, %d nets: result %d is %ld\n", name, nets, i, long(connects.words[i])), false));
        CHECK(!std::strcmp(text, "bodyhead"));
    }
    unlink(path.c_str());
    rmdir(folder);
}

// The first call after connect arms the socket, of which the other end has sent already.
__global__ void connect_and_arm(net::Handle handle, net::Address to, int64_t *out)
{
    auto g = net::block();
    __shared__ net::Ready ready;
    __shared__ net::Poll poll;
    const int set = net::set(g, handle), s = net::socket(g, handle, to.bytes[0], net::STREAM, 0);
    const int added = net::add(g, handle, set, s, net::IN);
    const int connected = net::connect(g, handle, s, to, net::DONTWAIT);
    if (threadIdx.x == 0)
        poll = {s, net::IN, 0, 0, 0};
    __syncthreads();
    const int polled = net::poll(g, handle, &poll, 1, 300'000'000'000);
    int armed = net::rearm(g, handle, s), waited = net::wait(g, handle, set, &ready, 1, 300'000'000'000);
    __syncthreads();
    // It may have told first that it is connected.
    if (waited == 1 && ready.events == net::OUT) {
        armed = net::rearm(g, handle, s);
        waited = net::wait(g, handle, set, &ready, 1, 300'000'000'000);
    }
    if (threadIdx.x == 0)
        out[0] = !added && (!connected || connected == -EINPROGRESS) && polled == 1 && !armed, out[1] = waited == 1 && ready.s == s && ready.events == net::IN;
    net::close(g, handle, s);
}

__global__ void greet(net::Handle handle, int listener)
{
    auto g = net::block();
    __shared__ char byte;
    const int s = net::accept(g, handle, listener);
    net::send(g, handle, s, "hi", 2);
    net::recv(g, handle, s, &byte, 1);
    net::close(g, handle, s);
}

static void connection_that_was_made_later_can_be_armed(const char *name)
{
    Net net;
    cudaStream_t beside;
    CHECK(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking) == cudaSuccess);
    std::string address;
    const int s = listener(net, name, address);
    spinio::launch_resident_on(net.stream, greet, 1, 32, net.handle, s);
    spinio::launch_resident_on(beside, connect_and_arm, 1, 32, net.handle, address_of(address), net.words);
    CHECK(cudaStreamSynchronize(beside) == cudaSuccess);
    net.wait();
    CHECK(net.words[0] && net.words[1] && net.stats().upgraded == 1);
}

int main()
{
    options_are_those_of_linux();
    connect_waits_for_nothing(false);
    connect_waits_for_nothing(true);
    for (const char *name : {"tcp://127.0.0.1:0", "unix:@"})
        connection_that_was_made_later_can_be_armed(name);
    for (const char *name : {"tcp://127.0.0.1:0", "unix:@"})
        for (int nets : {1, 2})
            connection_that_was_made_later_is_ended(name, nets);
    for (const char *name : {"tcp://127.0.0.1:0", "unix:@"})
        for (int nets : {1, 2})
            connect_in_a_set_is_told(name, nets);
    std::printf("%d failures\n", failures);
    return failures != 0;
}
