// Connections whose addresses are not those that the two ends see: they stay with Linux, with a reason, and no byte is lost.
//
//   a relay of this program     connects from another port, to a socket whose door the client does not find
//   a translating device        in a network namespace (root): swaps source and destination, so that a packet to 10.88.0.2 comes from
//                               there to 10.88.0.1. Sums of headers stay right. The door is found, and the names do not match.
//
//   kernel or program at 10.88.0.1:P ── to 10.88.0.2:L ──> device ── from 10.88.0.2:P to 10.88.0.1:L ──> net, which listens at 0.0.0.0:L
#include "net_granule.h"
#include "net_process.h"

#include <chrono>

#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>

static constexpr size_t total = 300000;

__host__ __device__ inline unsigned char byte_of(uint64_t at) { return (unsigned char)(at * 7 + (at >> 8) * 3 + (at >> 16)); }

// Sends messages and gets them back, on a socket that was bound before, if `own` is an address. Out: connect, right bytes, the end.
__global__ void ask(net::Handle handle, net::Address own, net::Address to, int64_t *out)
{
    __shared__ unsigned char bytes[1000];
    auto g = net::block();
    int s = net::socket(g, handle, net::INET, net::STREAM, 0);
    int64_t bound = own.length ? net::bind(g, handle, s, own) : 0, connected = net::connect(g, handle, s, to), right = 0;
    for (uint64_t at = 0; !connected && at < total; at += sizeof bytes) {
        __syncthreads();
        for (unsigned i = threadIdx.x; i < sizeof bytes; i += blockDim.x)
            bytes[i] = byte_of(at + i);
        __syncthreads();
        net::send(g, handle, s, bytes, sizeof bytes);
        const int64_t got = net::recv(g, handle, s, bytes, sizeof bytes, net::WAITALL);
        int wrong = 0;
        for (int64_t i = threadIdx.x; i < got; i += blockDim.x)
            wrong += bytes[i] != byte_of(at + uint64_t(i));
        if (__syncthreads_count(wrong) || got <= 0)
            break;
        right += got;
    }
    net::shutdown(g, handle, s, net::SHUT_SEND);
    const int64_t end = net::recv(g, handle, s, bytes, 1);
    net::close(g, handle, s);
    if (g.leads())
        out[0] = bound, out[1] = connected, out[2] = right, out[3] = end;
}

static void kernel_asks(Net &net, net::Address own, net::Address to)
{
    spinio::launch_resident_on(net.stream, ask, 1, 64, net.handle, own, to, net.words);
    net.wait();
    if (net.words[0] || net.words[1] || net.words[2] != int64_t(total) || net.words[3]) {
        std::printf("a kernel: bind %lld, connect %lld, %lld bytes, then %lld\n", (long long)net.words[0], (long long)net.words[1], (long long)net.words[2],
                    (long long)net.words[3]);
        failures++;
    }
}

// Returns the transport.
static std::string program_asks(const std::string &address)
{
    spinio_socket *s = spinio_socket_connect(address.c_str(), nullptr);
    CHECK(s);
    if (!s)
        return "";
    unsigned char bytes[1000];
    for (uint64_t at = 0; at < total; at += sizeof bytes) {
        for (size_t i = 0; i < sizeof bytes; i++)
            bytes[i] = byte_of(at + i);
        CHECK(spinio_socket_send(s, bytes, sizeof bytes, 0) == sizeof bytes);
        CHECK(spinio_socket_recv(s, bytes, sizeof bytes, MSG_WAITALL) == sizeof bytes);
        for (size_t i = 0; i < sizeof bytes; i++)
            CHECK(bytes[i] == byte_of(at + i));
    }
    CHECK(!spinio_socket_shutdown(s, SHUT_WR) && spinio_socket_recv(s, bytes, 1, 0) == 0);
    char text[128] = "";
    CHECK(spinio_socket_transport(s, text, sizeof text) >= 0 && !spinio_socket_close(s));
    return text;
}

static uint64_t upgraded(const Net &net)
{
    const auto stats = net.stats();
    return stats.upgraded + stats.shared + stats.peer;
}

// --- a relay ---

// Carries the bytes of one connection both ways until both sides have ended.
static void carry(int from, int to)
{
    for (bool open[2] = {true, true}; open[0] || open[1];) {
        pollfd both[2] = {{open[0] ? from : -1, POLLIN, 0}, {open[1] ? to : -1, POLLIN, 0}};
        CHECK(poll(both, 2, 60000) > 0);
        for (int i = 0; i < 2; i++) {
            if (!both[i].revents)
                continue;
            char bytes[7000];
            const ssize_t got = recv(i ? to : from, bytes, sizeof bytes, 0);
            if (got > 0) {
                for (ssize_t done = 0, part = 0; done < got && part >= 0; done += part)
                    CHECK((part = send(i ? from : to, bytes + done, size_t(got - done), MSG_NOSIGNAL)) > 0);
            } else {
                open[i] = false;
                shutdown(i ? from : to, SHUT_WR);
            }
        }
    }
}

static void relay_stays_with_linux()
{
    NothingLeft nothing(__func__);
    std::string address;
    {
        Net accepts, connects;
        const int s = listener(accepts, "tcp://127.0.0.1:0", address), relay = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        sockaddr_in at = {};
        at.sin_family = AF_INET;
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t length = sizeof at;
        CHECK(!bind(relay, reinterpret_cast<sockaddr *>(&at), length) && !listen(relay, 8) && !getsockname(relay, reinterpret_cast<sockaddr *>(&at), &length));
        std::thread carries([&] {
            for (int i = 0; i < 2; i++) {
                int from = accept(relay, nullptr, nullptr), to = connect_to(address);
                carry(from, to);
                close(from);
                close(to);
            }
        });
        spinio::launch_resident_on(accepts.stream, echo_some, 1, 64, accepts.handle, s, 2, accepts.words);
        kernel_asks(connects, {}, net::Address::inet(127, 0, 0, 1, ntohs(at.sin_port)));
        CHECK(program_asks("tcp://127.0.0.1:" + std::to_string(ntohs(at.sin_port))) == "kernel: no net that shares memory listens there");
        carries.join();
        close(relay);
        accepts.wait();
        CHECK(upgraded(accepts) == 0 && upgraded(connects) == 0 && accepts.stats().violations == 0);
        waits_for_open(accepts, 1);
        waits_for_open(connects, 0);
    }
    CHECK(granules_mapped() == 0);
}

// --- a device that translates ---

// Swaps the addresses of IPv4 packets, until `end` is readable.
static void translate(int device, int end)
{
    for (;;) {
        pollfd both[2] = {{device, POLLIN, 0}, {end, POLLIN, 0}};
        CHECK(poll(both, 2, -1) > 0);
        if (both[1].revents)
            return;
        unsigned char packet[65536];
        const ssize_t got = read(device, packet, sizeof packet);
        if (got < 20 || packet[0] >> 4 != 4)
            continue;
        for (int i = 0; i < 4; i++)
            std::swap(packet[12 + i], packet[16 + i]);
        CHECK(write(device, packet, size_t(got)) == got);
    }
}

static int translating_device()
{
    if (getuid() != 0 || unshare(CLONE_NEWNET))
        return -1;
    const int device = open("/dev/net/tun", O_RDWR | O_CLOEXEC);
    ifreq request = {};
    std::strcpy(request.ifr_name, "spinio%d");
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    if (device < 0 || ioctl(device, TUNSETIFF, &request))
        return -1;
    const std::string name = request.ifr_name;
    if (std::system(("ip link set lo up && ip addr add 10.88.0.1/24 dev " + name + " && ip link set " + name + " up").c_str()))
        return -1;
    return device;
}

static void translated_addresses_stay_with_linux(int device)
{
    NothingLeft nothing(__func__);
    int ends[2];
    CHECK(!pipe2(ends, O_CLOEXEC));
    std::thread translates([&] { translate(device, ends[0]); });
    std::string address;
    {
        Net accepts, connects;
        const int s = listener(accepts, "tcp://0.0.0.0:0", address);
        const net::Address there = net::Address::inet(10, 88, 0, 2, port_of(address)), own = net::Address::inet(10, 88, 0, 1, 0);
        spinio::launch_resident_on(accepts.stream, echo_some, 1, 64, accepts.handle, s, 4, accepts.words);
        // The address is that of another machine, as far as is known here.
        kernel_asks(connects, {}, there);
        CHECK(upgraded(connects) == 0 && connects.stats().kept_by_time == 0);
        CHECK(program_asks("tcp://10.88.0.2:" + std::to_string(port_of(address))) == "kernel: the address is not one of this machine");
        // With a name of its own it asks at the door, and waits for an offer that does not come.
        kernel_asks(connects, own, there);
        CHECK(upgraded(connects) == 0 && connects.stats().kept_by_time == 1);
        // Without the translation both meet.
        kernel_asks(connects, own, net::Address::inet(10, 88, 0, 1, port_of(address)));
        CHECK(connects.stats().peer == 1 && upgraded(accepts) == 1);
        accepts.wait();
        CHECK(accepts.stats().violations == 0 && connects.stats().violations == 0);
        waits_for_open(accepts, 1);
        waits_for_open(connects, 0);
    }
    CHECK(granules_mapped() == 0);
    close(ends[1]);
    translates.join();
    close(ends[0]);
}

int main()
{
    relay_stays_with_linux();
    const int device = translating_device();
    if (device >= 0)
        translated_addresses_stay_with_linux(device);
    else
        std::printf("skipped: a device that translates addresses needs root, network namespaces, /dev/net/tun and iproute2 (%s)\n", std::strerror(errno));
    std::printf("%d failures\n", failures);
    return failures != 0;
}
