// What `spinio net` shows: the text that the library publishes has the sockets, and the blocks that wait.
#include "net_test.h"

#include <fstream>
#include <iterator>

// A block that waits in each call: recv, accept, and wait of an event set.
__global__ void wait_for_all(net::Handle handle, int s, int listener, int set, uint64_t *ended)
{
    __shared__ char bytes[8];
    __shared__ net::Ready ready;
    auto g = net::block();
    int64_t result = blockIdx.x == 0   ? net::recv(g, handle, s, bytes, 8)
                     : blockIdx.x == 1 ? int64_t(net::accept(g, handle, listener))
                                       : int64_t(net::wait(g, handle, set, &ready, 1, -1));
    if (threadIdx.x == 0)
        spinio::store_release_system(ended + blockIdx.x, result == -ESHUTDOWN ? 2 : 1);
}

// A block with a span of each direction of a socket, until it is told to go on.
__global__ void keep_spans(net::Handle handle, int s, uint64_t *turn)
{
    net::Span span;
    auto g = net::block();
    net::reserve(g, handle, s, &span, 10);
    net::borrow(g, handle, s, &span, 10);
    pass_and_wait(turn, 1);
    net::commit(g, handle, s, 0);
    pass_and_wait(turn, 2);
    net::close(g, handle, s);
    pass_and_wait(turn, 3);
}

static std::string folder()
{
    const char *runtime = std::getenv("XDG_RUNTIME_DIR");
    return runtime && *runtime == '/' ? std::string(runtime) + "/spinio" : "/dev/shm/spinio-" + std::to_string(geteuid());
}

static std::string published(const char *suffix = "")
{
    for (const std::string &place : {folder(), "/dev/shm/spinio-" + std::to_string(geteuid())}) {
        std::ifstream file(place + "/" + std::to_string(getpid()) + ".net" + suffix, std::ios::binary);
        if (file) {
            // Of a longer text before it something may be left.
            std::string all{std::istreambuf_iterator<char>(file), {}};
            uint64_t length = 0;
            if (all.size() >= 24)
                std::memcpy(&length, all.data() + 8, 8);
            return all.substr(0, 24 + length);
        }
    }
    return "";
}

// Waits until the text has all of these, and not the other one; it is written four times a second.
static bool becomes(const std::vector<std::string> &parts, const char *absent = "no such text")
{
    std::string text;
    for (int i = 0; i < 30000; i++, usleep(10000)) {
        text = published();
        if (std::all_of(parts.begin(), parts.end(), [&](auto &part) { return text.find(part) != std::string::npos; }) && text.find(absent) == std::string::npos)
            return true;
    }
    std::printf("the text is:\n%s\n", text.c_str());
    return false;
}

int main()
{
    if (std::getenv("SPINIO_STATS")) {
        std::printf("skipped: SPINIO_STATS is set, so nothing is published\n");
        return 0;
    }
    {
        Net net;
        bool any = false;
        for (int i = 0; i < 500 && !(any = !published().empty()); i++)
            usleep(10000);
        if (!any) {
            std::printf("skipped: no private folder for files of this process\n");
            return 0;
        }
        std::string address;
        int l = listener(net, "tcp://127.0.0.1:0", address), set = spinio_net_set(net.net), ends[2];
        CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
        int s = spinio_net_adopt(net.net, ends[0]);
        if (s < 0) {
            std::printf("skipped: this sandbox refuses pidfd_getfd (%s)\n", spinio_last_error());
            return 0;
        }
        CHECK(becomes({"\"device\":\"emulated", "\"stopped\":false", "\"type\":\"tcp\",\"state\":\"LISTEN\",\"local\":\"" + address.substr(6),
                       "\"type\":\"u_str\",\"state\":\"ESTAB\"", "\"set\":1,\"waits\":[]"}));
        auto ended = reinterpret_cast<uint64_t *>(net.words + 100);
        spinio::launch_resident_on(net.stream, wait_for_all, 3, 32, net.handle, s, l, set, ended);
        CHECK(becomes({"{\"for\":\"recv\",\"block\":0,", "{\"for\":\"accept\",\"block\":1,", "{\"for\":\"wait\",\"block\":2,"}));
        // The wait is over although nothing has taken the word back.
        CHECK(send(ends[1], "abc", 3, 0) == 3);
        while (!spinio::load_acquire_system(ended))
            usleep(500);
        CHECK(send(ends[1], "defg", 4, 0) == 4);
        CHECK(becomes({"\"unread\":4,", "{\"for\":\"accept\""}, "\"for\":\"recv\""));
        // Spans, until they are given back, and until a close takes them away.
        cudaStream_t beside;
        CHECK(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking) == cudaSuccess);
        int more[2];
        CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, more) && send(more[1], "abc", 3, 0) == 3);
        int kept = spinio_net_adopt(net.net, more[0]);
        auto turn = reinterpret_cast<uint64_t *>(net.words + 200);
        spinio::launch_resident_on(beside, keep_spans, 1, 32, net.handle, kept, turn);
        CHECK(becomes({"{\"for\":\"borrow\",\"block\":0,", "{\"for\":\"reserve\",\"block\":0,"}));
        spinio::store_release_system(turn + 1, 1);
        CHECK(becomes({"{\"for\":\"borrow\",\"block\":0,"}, "\"for\":\"reserve\""));
        spinio::store_release_system(turn + 1, 2);
        CHECK(becomes({"{\"for\":\"accept\""}, "\"for\":\"borrow\""));
        spinio::store_release_system(turn + 1, 3);
        CHECK(cudaStreamSynchronize(beside) == cudaSuccess);
        close(more[1]);
        CHECK(!spinio_net_stop(net.net));
        net.wait();
        CHECK(ended[0] == 1 && ended[1] == 2 && ended[2] == 2);
        CHECK(becomes({"\"stopped\":true"}, "\"for\":"));
        // Another net has another file, as long as it is open.
        spinio_net *second = spinio_net_open("emulated", nullptr);
        for (int i = 0; i < 30000 && published(".1").empty(); i++)
            usleep(10000);
        CHECK(second && !published(".1").empty());
        CHECK(!spinio_net_close(second) && published(".1").empty());
        close(ends[1]);
    }
    CHECK(published().empty());
    std::printf("%d failures\n", failures);
    return failures != 0;
}
