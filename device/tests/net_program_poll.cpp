// spinio_socket_poll: sockets of programs that share memory with kernels tell the same events as those through Linux, and beside other
// descriptors. Prints each failure and exits with 1.
#include "net_test.h"

#include <poll.h>

#include <chrono>
#include <functional>

// What the kernel does with its end of the connection.
enum Step : uint64_t { send_ten = 1, receive_all, shut_send, shut_receive, close_end, end };

// One connection after the other: steps[0] is the number of the step that the kernel has made, steps[1] that of the program's, steps[2]
// which one it is, and steps[3] how many bytes it receives.
__global__ void obey(net::Handle handle, int listener, int connections, uint64_t *steps)
{
    auto g = net::block();
    __shared__ char buffer[256];
    __shared__ uint64_t step, bytes;
    uint64_t number = 0;
    for (int i = 0; i < connections; i++) {
        const int s = net::accept(g, handle, listener);
        for (;;) {
            pass_and_wait(steps, ++number);
            if (g.leads())
                step = steps[2], bytes = steps[3];
            g.sync();
            const uint64_t wanted = step, count = bytes;
            g.sync();
            if (wanted == send_ten)
                net::send(g, handle, s, buffer, 10);
            for (uint64_t got = 0; wanted == receive_all && got < count;) {
                const int64_t more = net::recv(g, handle, s, buffer, sizeof buffer);
                if (more <= 0)
                    break;
                got += uint64_t(more);
            }
            if (wanted == shut_send || wanted == shut_receive)
                net::shutdown(g, handle, s, wanted == shut_send ? net::SHUT_SEND : net::SHUT_RECEIVE);
            if (wanted == close_end || wanted == end)
                net::close(g, handle, s);
            if (wanted == end)
                break;
        }
    }
}

struct Kernel {
    uint64_t *steps;
    uint64_t number = 0;

    // Once the kernel has made the step.
    void makes(Step step, uint64_t bytes = 0)
    {
        wait();
        steps[2] = step, steps[3] = bytes;
        __atomic_store_n(steps + 1, ++number, __ATOMIC_RELEASE);
        if (step != end)
            wait();
    }

    void wait() const
    {
        while (__atomic_load_n(steps, __ATOMIC_ACQUIRE) != number + 1)
            usleep(100);
    }
};

static spinio_socket *open_socket(const std::string &address, bool no_upgrade)
{
    struct spinio_socket_options options = {sizeof options, no_upgrade, 60000, 60000};
    spinio_socket *s = spinio_socket_connect(address.c_str(), &options);
    char text[128] = "";
    CHECK(s && spinio_socket_transport(s, text, sizeof text) == !no_upgrade);
    return s;
}

constexpr unsigned short all_events = POLLIN | POLLOUT | POLLRDHUP;

static int polled(spinio_socket *s, unsigned short events = all_events, int timeout_ms = 0)
{
    struct spinio_socket_poll_entry entry = {s, -1, events, 0xffff};
    const int ready = spinio_socket_poll(&entry, 1, timeout_ms);
    CHECK(ready == (entry.revents != 0));
    return entry.revents;
}

static double milliseconds(const std::function<void()> &body)
{
    const auto begun = std::chrono::steady_clock::now();
    body();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begun).count();
}

// The events of a connection after each step, once nothing is on its way any more: so many microseconds after it.
static std::vector<int> events_of(const char *where, bool no_upgrade, bool reset, useconds_t way)
{
    Net net({.no_upgrade = no_upgrade});
    std::string address;
    const int s = listener(net, where, address);
    const int connections = 5;
    uint64_t *steps = reinterpret_cast<uint64_t *>(net.words);
    spinio::launch_resident_on(net.stream, obey, 1, 32, net.handle, s, connections, steps);
    Kernel kernel = {steps};
    std::vector<int> log;
    spinio_socket *socket = nullptr;
    auto tell = [&](const char *) {
        usleep(way);
        log.push_back(polled(socket));
    };
    auto next = [&](const char *what) {
        if (socket) {
            kernel.makes(end);
            CHECK(!spinio_socket_close(socket));
        }
        socket = open_socket(address, no_upgrade);
        kernel.wait();
        tell(what);
    };
    char bytes[4096] = {};
    next("connected");
    kernel.makes(send_ten);
    tell("bytes");
    log.push_back(polled(socket, POLLRDHUP));
    CHECK(spinio_socket_recv(socket, bytes, 4, 0) == 4);
    tell("some of them");
    CHECK(spinio_socket_recv(socket, bytes, 6, 0) == 6);
    tell("none left");
    uint64_t sent = 0;
    for (int quiet = 0; quiet < 5;) {
        const ssize_t got = spinio_socket_send(socket, bytes, sizeof bytes, MSG_DONTWAIT);
        quiet = got > 0 ? 0 : quiet + 1;
        sent += got > 0 ? uint64_t(got) : 0;
        if (got <= 0)
            usleep(way / 3);
    }
    tell("no room");
    kernel.makes(receive_all, sent);
    tell("room");
    kernel.makes(shut_send);
    tell("the kernel sends no more");
    CHECK(!spinio_socket_shutdown(socket, SHUT_WR));
    tell("nor does the program");

    next("connected");
    CHECK(!spinio_socket_shutdown(socket, SHUT_WR));
    tell("the program sends no more");
    kernel.makes(send_ten);
    tell("bytes");
    CHECK(!spinio_socket_shutdown(socket, SHUT_RD));
    tell("and receives no more");

    next("connected");
    CHECK(!spinio_socket_shutdown(socket, SHUT_RD));
    tell("the program receives no more");
    kernel.makes(close_end);
    tell("closed");

    next("connected");
    kernel.makes(send_ten);
    kernel.makes(close_end);
    tell("closed, with bytes");
    CHECK(spinio_socket_recv(socket, bytes, 10, MSG_WAITALL) == 10);
    tell("without");

    next("connected");
    if (reset) {
        CHECK(spinio_socket_send(socket, bytes, 100, 0) == 100);
        usleep(way * 2);
        kernel.makes(close_end);
        tell("closed by a kernel that has not received all");
    } else {
        kernel.makes(shut_receive);
        tell("the kernel receives no more");
    }
    kernel.makes(end);
    CHECK(!spinio_socket_close(socket));
    net.wait();
    return log;
}

static void events_are_those_through_linux()
{
    for (const char *where : {"tcp://127.0.0.1:0", "unix:@"})
        for (bool reset : {false, true}) {
            std::vector<int> shared, linux;
            // On a busy machine what is on its way may take longer.
            for (useconds_t way : {30'000, 300'000, 3'000'000}) {
                shared = events_of(where, false, reset, way), linux = events_of(where, true, reset, way);
                if (shared == linux)
                    break;
            }
            CHECK(shared.size() == linux.size());
            for (size_t i = 0; i < shared.size(); i++)
                if (shared[i] != linux[i])
                    CHECK((std::printf("%s: events %zu: %#x, through Linux %#x\n", where, i, unsigned(shared[i]), unsigned(linux[i])), false));
        }
}

static void polls_wait_as_long_as_they_are_told(bool no_upgrade)
{
    Net net({.no_upgrade = no_upgrade});
    std::string address;
    const int s = listener(net, "tcp://127.0.0.1:0", address);
    uint64_t *steps = reinterpret_cast<uint64_t *>(net.words);
    spinio::launch_resident_on(net.stream, obey, 1, 32, net.handle, s, 1, steps);
    Kernel kernel = {steps};
    spinio_socket *socket = open_socket(address, no_upgrade);
    kernel.wait();
    CHECK(milliseconds([&] { CHECK(polled(socket, POLLIN, 80) == 0); }) >= 80);
    int pipes[2];
    CHECK(!pipe(pipes));
    struct spinio_socket_poll_entry entries[4] = {{socket, -1, POLLIN, 0}, {nullptr, pipes[0], POLLIN, 0}, {nullptr, -1, POLLIN, 7}, {nullptr, 999, POLLIN, 0}};
    // Bytes of the kernel, of another descriptor, and of both.
    auto later = [](const std::function<void()> &body) {
        return std::thread([=] {
            usleep(30000);
            body();
        });
    };
    std::thread sends = later([&] { kernel.makes(send_ten); });
    CHECK(spinio_socket_poll(entries, 3, -1) == 1 && entries[0].revents == POLLIN && !entries[1].revents && !entries[2].revents);
    sends.join();
    char bytes[10];
    CHECK(spinio_socket_recv(socket, bytes, 10, MSG_WAITALL) == 10);
    std::thread writes = later([&] { CHECK(write(pipes[1], "x", 1) == 1); });
    CHECK(spinio_socket_poll(entries, 3, -1) == 1 && !entries[0].revents && entries[1].revents == POLLIN);
    writes.join();
    kernel.makes(send_ten);
    CHECK(polled(socket, POLLIN, 10000) == POLLIN);
    CHECK(spinio_socket_poll(entries, 4, -1) == 3 && entries[0].revents == POLLIN && entries[1].revents == POLLIN && entries[3].revents == POLLNVAL);
    CHECK(spinio_socket_recv(socket, bytes, 10, MSG_WAITALL) == 10);
    CHECK(spinio_socket_poll(nullptr, 0, 0) == 0 && spinio_socket_poll(nullptr, 1, 0) == -1);
    // The connection of Linux ends, as when the other process has.
    std::thread ends = later([&] { CHECK(!shutdown(spinio_socket_fd(socket), SHUT_RDWR)); });
    const int told = polled(socket, POLLIN | POLLRDHUP, -1);
    CHECK(told == (POLLIN | POLLRDHUP | POLLHUP));
    ends.join();
    kernel.makes(end);
    net.wait();
    CHECK(!spinio_socket_close(socket));
    close(pipes[0]);
    close(pipes[1]);
}

int main()
{
    events_are_those_through_linux();
    for (bool no_upgrade : {false, true})
        polls_wait_as_long_as_they_are_told(no_upgrade);
    std::printf("%d failures\n", failures);
    return failures != 0;
}
