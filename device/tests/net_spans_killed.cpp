// A process is killed while its kernel has a span of a stream: what it stored and did not commit never arrives, the other end gets what was
// committed and then an error or the end, and nothing is left.
#include "net_process.h"

constexpr int sent_before = 3, sent_to_it = 10, reserved = 100;

// Connects or accepts, sends three bytes, takes a span in one direction and never gives it back.
__global__ void hold(net::Handle handle, int listener, net::Address to, bool borrows, uint64_t *turn, int64_t *out)
{
    auto g = net::block();
    const int s = listener ? net::accept(g, handle, listener) : connected(g, handle, to);
    net::Span span;
    int64_t got = net::reserve(g, handle, s, &span, sent_before);
    if (got == sent_before && threadIdx.x < sent_before)
        span.bytes[threadIdx.x] = (unsigned char)('a' + threadIdx.x);
    const int committed = got == sent_before ? net::commit(g, handle, s, sent_before) : -1;
    got = borrows ? net::borrow(g, handle, s, &span, sent_to_it) : net::reserve(g, handle, s, &span, reserved);
    for (int64_t i = threadIdx.x; !borrows && i < got; i += blockDim.x)
        span.bytes[i] = 'X';
    if (threadIdx.x == 0)
        out[0] = committed ? committed : got;
    pass_and_wait(turn, 1);
}

// The other process, which is killed.
static void hold_until_killed(const std::string &address, bool borrows)
{
    Net net;
    std::string name;
    const bool accepts = address == "accept";
    const int s = accepts ? listener(net, "unix:@", name) : 0;
    if (accepts)
        say(name);
    auto turn = reinterpret_cast<uint64_t *>(net.words + 100);
    spinio::launch_resident_on(net.stream, hold, 1, 64, net.handle, s, accepts ? net::Address() : address_of(address), borrows, turn, net.words);
    while (!spinio::load_acquire_system(turn))
        usleep(1000);
    say(net.words[0] == (borrows ? sent_to_it : reserved) ? "holds" : "failed: " + std::to_string(net.words[0]));
    pause();
}

static void kill_it(Child &child)
{
    CHECK(child.hear() == "holds");
    CHECK(!kill(child.pid, SIGKILL));
    CHECK(WIFSIGNALED(child.ends()));
}

static void other_end_is_a_program(const char *where, bool borrows)
{
    NothingLeft nothing(__func__);
    sockaddr_in name;
    const std::string path = "@spinio-held-" + std::to_string(getpid());
    int listening = -1;
    std::string address;
    if (!std::strcmp(where, "tcp")) {
        listening = listening_socket(name);
        address = text_of(name);
    } else {
        sockaddr_un local = {};
        local.sun_family = AF_UNIX;
        std::memcpy(local.sun_path + 1, path.data() + 1, path.size() - 1);
        listening = socket(AF_UNIX, SOCK_STREAM, 0);
        CHECK(!bind(listening, reinterpret_cast<sockaddr *>(&local), socklen_t(offsetof(sockaddr_un, sun_path) + path.size())));
        CHECK(!listen(listening, 1));
        address = "unix:" + path;
    }
    Child child({"--hold", address, borrows ? "borrow" : "reserve"});
    const int s = accept(listening, nullptr, nullptr);
    char bytes[200] = {};
    CHECK(recv(s, bytes, sent_before, MSG_WAITALL) == sent_before && !std::memcmp(bytes, "abc", sent_before));
    if (borrows)
        CHECK(send(s, "0123456789", sent_to_it, MSG_NOSIGNAL) == sent_to_it);
    kill_it(child);
    const ssize_t got = recv(s, bytes, sizeof bytes, 0);
    CHECK(got == 0 || (got < 0 && errno == ECONNRESET));
    close(s);
    close(listening);
}

// What came before the end, and how that ended.
__global__ void survive(net::Handle handle, int listener, bool sends, int64_t *out)
{
    __shared__ char bytes[200];
    auto g = net::block();
    const int s = net::accept(g, handle, listener);
    int64_t got = net::recv(g, handle, s, bytes, sent_before, net::WAITALL);
    const bool right = got == sent_before && bytes[0] == 'a' && bytes[1] == 'b' && bytes[2] == 'c';
    if (sends && net::send(g, handle, s, bytes, sizeof bytes) != int64_t(sizeof bytes))
        got = -1;
    if (got == sent_before)
        got = net::recv(g, handle, s, bytes, sizeof bytes);
    if (threadIdx.x == 0) {
        out[0] = right;
        out[1] = got;
    }
    net::close(g, handle, s);
}

static void other_end_is_a_kernel(bool borrows)
{
    NothingLeft nothing(__func__);
    Net net;
    std::string name;
    const int s = listener(net, "unix:@", name);
    spinio::launch_resident_on(net.stream, survive, 1, 64, net.handle, s, borrows, net.words);
    Child child({"--hold", name, borrows ? "borrow" : "reserve"});
    kill_it(child);
    net.wait();
    CHECK(net.stats().shared + net.stats().peer == 1);
    CHECK(net.words[0] == 1 && (net.words[1] == 0 || net.words[1] == -ECONNRESET));
}

static void other_end_shares_memory(bool borrows)
{
    NothingLeft nothing(__func__);
    Child child({"--hold", "accept", borrows ? "borrow" : "reserve"});
    spinio_socket *s = spinio_socket_connect(child.hear().c_str(), nullptr);
    char bytes[200] = {}, text[100];
    CHECK(s && spinio_socket_transport(s, text, sizeof text) == 1);
    CHECK(spinio_socket_recv(s, bytes, sent_before, MSG_WAITALL) == sent_before && !std::memcmp(bytes, "abc", sent_before));
    if (borrows)
        CHECK(spinio_socket_send(s, "0123456789", sent_to_it, 0) == sent_to_it);
    kill_it(child);
    const ssize_t got = spinio_socket_recv(s, bytes, sizeof bytes, 0);
    CHECK(got == 0 || (got < 0 && errno == ECONNRESET));
    CHECK(!spinio_socket_close(s));
}

int main(int arguments, char **argument)
{
    if (arguments > 3 && !std::strcmp(argument[1], "--hold")) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        hold_until_killed(argument[2], !std::strcmp(argument[3], "borrow"));
        return 0;
    }
    for (bool borrows : {false, true}) {
        other_end_is_a_program("tcp", borrows);
        other_end_is_a_program("unix", borrows);
        other_end_is_a_kernel(borrows);
        other_end_shares_memory(borrows);
    }
    std::printf("%d failures\n", failures);
    return failures != 0;
}
