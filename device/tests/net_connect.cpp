// connect with a time limit, and beside as many calls of accept as a net has room for. Prints each failure and exits with 1.
#include "net_test.h"

constexpr uint64_t ms = 1'000'000;

// A listening socket of this program, whose backlog others have filled.
struct FullListener {
    int listener, filler;
    net::Address name;

    FullListener(int domain, int type)
    {
        name = domain == AF_INET ? net::Address::inet(127, 0, 0, 1, 0) : net::Address::abstract(("spinio-connect-" + std::to_string(getpid())).c_str());
        listener = socket(domain, type, 0);
        socklen_t length = name.length;
        CHECK(!bind(listener, reinterpret_cast<sockaddr *>(name.bytes), length) && !listen(listener, 0));
        length = sizeof name.bytes;
        CHECK(!getsockname(listener, reinterpret_cast<sockaddr *>(name.bytes), &length));
        name.length = length;
        filler = socket(domain, type, 0);
        CHECK(!connect(filler, reinterpret_cast<sockaddr *>(name.bytes), length));
    }

    ~FullListener()
    {
        close(filler);
        close(listener);
    }
};

// Block 0 connects with a limit. Once there is room, it sends a byte.
__global__ void connect_in_time(net::Handle handle, net::Address to, int type, uint64_t limit, uint64_t *turn, int64_t *out)
{
    __shared__ char byte;
    auto g = net::block();
    int s = net::socket(g, handle, to.bytes[0], type, 0);
    net::set_timeout(g, handle, s, 0, limit);
    const uint64_t begun = spinio::nanoseconds();
    const int64_t result = net::connect(g, handle, s, to), waited = int64_t(spinio::nanoseconds() - begun);
    const int64_t again = net::connect(g, handle, s, to);
    pass_and_wait(turn, 1);
    net::set_timeout(g, handle, s, 0, 0);
    if (result != -EINPROGRESS)
        net::connect(g, handle, s, to);
    if (g.leads())
        byte = 'x';
    g.sync();
    const int64_t sent = net::send(g, handle, s, &byte, 1);
    if (g.leads()) {
        out[0] = result;
        out[1] = waited;
        out[2] = again;
        out[3] = sent;
    }
    net::close(g, handle, s);
}

// As in Linux, but for a UNIX stream, which goes on to connect as one of TCP does.
static void limit_ends_the_call(int domain, int type, int result, int again)
{
    Net net;
    FullListener full(domain, type);
    uint64_t *turn = reinterpret_cast<uint64_t *>(net.words + 100);
    spinio::launch_resident_on(net.stream, connect_in_time, 1, 32, net.handle, full.name, type, 40 * ms, turn, net.words);
    while (spinio::load_acquire_system(turn) == 0)
        usleep(500);
    int first = accept(full.listener, nullptr, nullptr);
    spinio::store_release_system(turn + 1, 1);
    int peer = accept(full.listener, nullptr, nullptr);
    char byte = 0;
    CHECK(recv(peer, &byte, 1, MSG_WAITALL) == 1 && byte == 'x');
    net.wait();
    CHECK(net.words[0] == result && net.words[2] == again && net.words[3] == 1);
    CHECK(net.words[1] >= int64_t(40 * ms));
    close(first);
    close(peer);
}

// The last block connects, all threads of the others wait in accept.
__global__ void connect_beside_accepts(net::Handle handle, int listener, net::Address to, uint64_t *turn, int64_t *out)
{
    if (blockIdx.x + 1 < gridDim.x) {
        (void)net::accept(net::thread(), handle, listener);
        return;
    }
    auto g = net::block();
    pass_and_wait(turn, 1);
    int s = net::socket(g, handle, to.bytes[0], net::STREAM, 0);
    net::set_timeout(g, handle, s, 0, 300'000 * ms);
    const int result = net::connect(g, handle, s, to);
    if (g.leads())
        out[0] = result ? result : 1;
}

static void accepts_leave_room_for_other_calls()
{
    Net net;
    std::string address;
    int listening = listener(net, "tcp://127.0.0.1:0", address), plain = socket(AF_INET, SOCK_STREAM, 0);
    net::Address to = net::Address::inet(127, 0, 0, 1, 0);
    socklen_t length = to.length;
    CHECK(!bind(plain, reinterpret_cast<sockaddr *>(to.bytes), length) && !listen(plain, 1));
    CHECK(!getsockname(plain, reinterpret_cast<sockaddr *>(to.bytes), &length));
    uint64_t *turn = reinterpret_cast<uint64_t *>(net.words + 100);
    spinio::launch_resident_on(net.stream, connect_beside_accepts, 34, 64, net.handle, listening, to, turn, net.words);
    while (spinio::load_acquire_system(turn) == 0)
        usleep(500);
    // Until the others wait.
    usleep(300'000);
    spinio::store_release_system(turn + 1, 1);
    for (int looks = 0; looks < 300'000 && !net.words[0]; looks++)
        usleep(1000);
    CHECK(net.words[0] == 1);
    CHECK(!spinio_net_stop(net.net));
    net.wait();
    close(plain);
}

int main()
{
    limit_ends_the_call(AF_INET, net::STREAM, -EINPROGRESS, -EALREADY);
    limit_ends_the_call(AF_UNIX, net::STREAM, -EINPROGRESS, -EALREADY);
    limit_ends_the_call(AF_UNIX, net::SEQPACKET, -EAGAIN, -EAGAIN);
    accepts_leave_room_for_other_calls();
    std::printf("%d failures\n", failures);
    return failures != 0;
}
