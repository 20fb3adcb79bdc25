// A net with several I/O threads: many connections at once, whose bytes are all right, and threads that help and end.
// Prints each failure and exits with 1.
#include "net_test.h"

#include <fstream>

constexpr int clients = 32;
constexpr size_t stream_bytes = 128 << 10;

// One block serves as many connections as it takes, one at a time: it sends back each byte, changed.
__global__ void answer(net::Handle handle, int listener, int connections, int64_t *out)
{
    __shared__ unsigned char bytes[1000];
    auto g = net::block();
    for (int i = 0; i < connections; i++) {
        const int s = net::accept(g, handle, listener);
        int64_t got;
        while ((got = net::recv(g, handle, s, bytes, sizeof bytes)) > 0) {
            for (int64_t k = threadIdx.x; k < got; k += blockDim.x)
                bytes[k] ^= 0x5a;
            __syncthreads();
            if (net::send(g, handle, s, bytes, size_t(got)) != got)
                break;
        }
        if (net::close(g, handle, s) == 0 && threadIdx.x == 0)
            atomicAdd(reinterpret_cast<unsigned long long *>(out), 1ull);
    }
}

static unsigned char byte_of(int client, size_t at) { return (unsigned char)(at * 7 + at / 251 + unsigned(client) * 31); }

// Sends a stream and reads what comes back at the same time; whether all was right.
static bool use_stream(const std::string &address, int client)
{
    const int s = connect_to(address);
    std::thread sender([&] {
        std::vector<unsigned char> bytes(stream_bytes);
        for (size_t i = 0; i < bytes.size(); i++)
            bytes[i] = byte_of(client, i);
        for (size_t done = 0; done < bytes.size();) {
            const ssize_t part = send(s, bytes.data() + done, std::min<size_t>(bytes.size() - done, 3000), MSG_NOSIGNAL);
            if (part <= 0)
                break;
            done += size_t(part);
        }
        shutdown(s, SHUT_WR);
    });
    unsigned char bytes[4096];
    size_t came = 0;
    bool right = true;
    for (ssize_t got; (got = recv(s, bytes, sizeof bytes, 0)) > 0; came += size_t(got))
        for (ssize_t i = 0; i < got; i++)
            right = bytes[i] == (byte_of(client, came + size_t(i)) ^ 0x5a) && right;
    sender.join();
    close(s);
    return right && came == stream_bytes;
}

// Threads of this process with the name of I/O threads.
static int io_threads()
{
    int count = 0;
    DIR *tasks = opendir("/proc/self/task");
    while (dirent *task = readdir(tasks)) {
        std::string name;
        std::ifstream("/proc/self/task/" + std::string(task->d_name) + "/comm") >> name;
        count += name == "spinio-net-io";
    }
    closedir(tasks);
    return count;
}

static void streams_are_right(unsigned threads, const char *where, unsigned fault_seed)
{
    uint64_t helped = 0;
    // Whether another thread comes in time to help depends on the machine's other work.
    for (int round = 0; round < 20; round++) {
        {
            Net net({.connections = 2 * clients, .sockets = 128, .fault_seed = fault_seed, .no_upgrade = true, .threads = threads});
            std::string address;
            const int s = listener(net, where, address);
            spinio::launch_resident_on(net.stream, answer, clients / 2, 32, net.handle, s, 2, net.words);
            std::vector<std::thread> all;
            std::vector<char> right(clients);
            for (int i = 0; i < clients; i++)
                all.emplace_back([&, i] { right[size_t(i)] = use_stream(address, i); });
            for (std::thread &one : all)
                one.join();
            net.wait();
            CHECK(std::count(right.begin(), right.end(), 1) == clients && net.words[0] == clients);
            CHECK(net.stats().violations == 0 && net.stats().bytes_received == clients * stream_bytes);
            helped = net.stats().helped;
            CHECK(io_threads() < int(threads) && (!helped || io_threads() > 0));
        }
        // Its threads have ended, or are about to.
        for (int i = 0; i < 300000 && io_threads() > 0; i++)
            usleep(1000);
        CHECK(io_threads() == 0);
        if (helped > 0 || threads == 1 || failures)
            break;
    }
    CHECK(!helped || threads > 1);
    if (!helped && threads > 1)
        std::printf("skipped: with %u threads the net's own was always the first\n", threads);
}

int main()
{
    for (unsigned threads : {1u, 2u, 4u})
        streams_are_right(threads, threads == 2 ? "unix:@" : "tcp://127.0.0.1:0", 0);
    streams_are_right(4, "tcp://127.0.0.1:0", 7);
    // More than there may be.
    struct spinio_net_options options = {};
    options.size = sizeof options;
    options.threads = 65;
    CHECK(!spinio_net_open(test_device, &options) && errno == EINVAL);
    std::printf("%d failures\n", failures);
    return failures != 0;
}
