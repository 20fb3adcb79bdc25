// sendfile of kernels: bytes, order, files that are cut, peers that are slow or gone, deadlines, close and stop while it waits.
// Prints each failure and exits with 1. `--gib N` sends a file of N GiB of zeros, which takes a while.
#include "net_test.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <spinio/file.h>

namespace file = spinio::file;

// Of the middle of a file: its bytes at an offset.
__host__ __device__ static unsigned char byte_at(uint64_t offset)
{
    return (unsigned char)((offset * 0x9e3779b97f4a7c15) >> 56);
}

// A directory with one file, "f".
struct Folder {
    std::string path = "/tmp/spinio-net-sendfile-XXXXXX";
    int fd = -1;

    explicit Folder(size_t bytes, off_t at = 0)
    {
        CHECK(mkdtemp(path.data()));
        fd = open((path + "/f").c_str(), O_RDWR | O_CREAT, 0644);
        std::vector<unsigned char> data(bytes);
        for (size_t i = 0; i < bytes; i++)
            data[i] = byte_at(uint64_t(at) + i);
        CHECK(pwrite(fd, data.data(), bytes, at) == ssize_t(bytes));
    }

    ~Folder()
    {
        close(fd);
        CHECK(!unlink((path + "/f").c_str()) && !rmdir(path.c_str()));
    }
};

// A connection from a listening socket of this program to the kernel's net; the program's end has small buffers.
struct Connection {
    int ours = -1, kernel = -1;

    Connection(const Net &net, bool inet)
    {
        int waiting, small = 32768;
        std::string address;
        if (inet) {
            sockaddr_in any;
            waiting = listening_socket(any, 1);
            address = text_of(any);
        } else {
            sockaddr_un name = {};
            socklen_t length = sizeof name;
            name.sun_family = AF_UNIX;
            waiting = socket(AF_UNIX, SOCK_STREAM, 0);
            CHECK(!bind(waiting, reinterpret_cast<sockaddr *>(&name), sizeof(sa_family_t)) && !listen(waiting, 1));
            CHECK(!getsockname(waiting, reinterpret_cast<sockaddr *>(&name), &length));
            address = "unix:@" + std::string(name.sun_path + 1, length - sizeof(sa_family_t) - 1);
        }
        // Of the connection that it will accept.
        setsockopt(waiting, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
        kernel = spinio_net_connect(net.net, address.c_str());
        ours = accept(waiting, nullptr, nullptr);
        CHECK(kernel > 0 && ours >= 0);
        timeval limit = {60, 0};
        setsockopt(ours, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        close(waiting);
    }

    // All bytes up to the end of the stream, or at most this many.
    std::vector<unsigned char> read_all(size_t most = SIZE_MAX)
    {
        std::vector<unsigned char> bytes;
        unsigned char part[65536];
        ssize_t got;
        while (bytes.size() < most && (got = recv(ours, part, std::min(sizeof part, most - bytes.size()), 0)) > 0)
            bytes.insert(bytes.end(), part, part + got);
        return bytes;
    }

    ~Connection() { close(ours); }
};

static Net net_of(const Folder &folder, unsigned faults = 0)
{
    return Net({.fault_seed = faults, .files_root = folder.path.c_str()});
}

struct Piece {
    size_t text;
    int64_t offset;
    size_t bytes;
};

// Text by send, a piece of the file, and so on; then the end of the stream.
template <typename Group>
__device__ void send_pieces(Group group, const net::Handle &handle, int s, const Piece *pieces, int count, int64_t *out)
{
    __shared__ char text[5000];
    for (unsigned i = group.rank(); i < sizeof text; i += group.size())
        text[i] = char('a' + i % 26);
    group.sync();
    int f = file::open(group, handle, "f", file::RDONLY);
    for (int i = 0; i < count; i++) {
        int64_t sent = net::send(group, handle, s, text, pieces[i].text);
        int64_t result = net::sendfile(group, handle, s, f, pieces[i].offset, pieces[i].bytes);
        if (group.leads())
            out[i] = sent == int64_t(pieces[i].text) ? result : sent;
    }
    file::close(group, handle, f);
    net::send(group, handle, s, text, 7);
    net::close(group, handle, s);
}

__global__ void send_all_pieces(net::Handle handle, int s, int who, const Piece *pieces, int count, int64_t *out)
{
    if (who == 0)
        send_pieces(net::block(), handle, s, pieces, count, out);
    else if (who == 1 && threadIdx.x < 32)
        send_pieces(net::warp(), handle, s, pieces, count, out);
    else if (who == 2 && threadIdx.x == 0)
        send_pieces(net::thread(), handle, s, pieces, count, out);
}

static void bytes_come_in_order(bool inet, int who, unsigned faults)
{
    const off_t far = off_t(5) << 30;
    // The file has a hole up to `far`, so that offsets need more than 32 bits.
    Folder folder(faults ? 3000 : 3000000, far);
    const size_t size = faults ? 3000 : 3000000;
    const Piece all[] = {{10, far, 1}, {0, far + 1, 98}, {98, far + 100, 99}, {5000, far + 5, 500}, {0, far, size}, {4999, far + 1000, size},
                         {1, far + off_t(size), 10}, {1, far + off_t(size) + 100, 10}, {0, far - 10, 20}, {3, far, 0}, {0, far, SIZE_MAX}};
    constexpr int count = sizeof all / sizeof *all;
    Net net = net_of(folder, faults);
    Connection connection(net, inet);
    Piece *pieces;
    CHECK(!cudaHostAlloc(&pieces, sizeof all, cudaHostAllocDefault));
    std::memcpy(pieces, all, sizeof all);
    spinio::launch_resident_on(net.stream, send_all_pieces, 1, 64, net.handle, connection.kernel, who, static_cast<const Piece *>(pieces), count, net.words);
    auto got = connection.read_all();
    net.wait();
    std::vector<unsigned char> wanted;
    for (int i = 0; i < count; i++) {
        for (size_t at = 0; at < all[i].text; at++)
            wanted.push_back((unsigned char)('a' + at % 26));
        uint64_t end = uint64_t(far) + size, from = uint64_t(all[i].offset), bytes = from >= end ? 0 : std::min<uint64_t>(all[i].bytes, end - from);
        for (uint64_t at = from; at < from + bytes; at++)
            wanted.push_back(at < uint64_t(far) ? 0 : byte_at(at));
        CHECK(net.words[i] == int64_t(bytes));
    }
    for (int at = 0; at < 7; at++)
        wanted.push_back((unsigned char)('a' + at));
    CHECK(got == wanted);
    auto stats = net.stats();
    CHECK(stats.bytes_sent == wanted.size() && stats.violations == 0);
    cudaFreeHost(pieces);
}

// What a block does with the whole file, and what comes out.
__global__ void send_whole(net::Handle handle, int s, size_t bytes, int flags, uint64_t timeout, int calls, int64_t *out)
{
    auto g = net::block();
    int f = file::open(g, handle, "f", file::RDONLY);
    net::set_timeout(g, handle, s, 0, timeout);
    int64_t at = 0;
    for (int i = 0; i < calls; i++) {
        int64_t sent = net::sendfile(g, handle, s, f, at, bytes - size_t(at), flags);
        at += sent > 0 ? sent : 0;
        if (threadIdx.x == 0)
            spinio::store_release_system(reinterpret_cast<uint64_t *>(out + i), uint64_t(sent));
    }
    file::close(g, handle, f);
}

static bool is_of_file(const std::vector<unsigned char> &bytes)
{
    for (size_t i = 0; i < bytes.size(); i++)
        if (bytes[i] != byte_at(i))
            return false;
    return true;
}

constexpr size_t large = 24 << 20;
constexpr int64_t untouched = 1234567;

static void file_that_is_cut_gives_a_short_result(bool inet)
{
    Folder folder(large);
    Net net = net_of(folder);
    Connection connection(net, inet);
    spinio::launch_resident_on(net.stream, send_whole, 1, 32, net.handle, connection.kernel, large, 0, uint64_t(0), 2, net.words);
    uint64_t sent = wait_until_it_waits(net);
    CHECK(sent < large - 100001);
    CHECK(!ftruncate(folder.fd, off_t(sent) + 100001));
    auto got = connection.read_all(sent + 100001);
    net.wait();
    CHECK(net.words[0] == int64_t(sent + 100001) && net.words[1] == 0);
    CHECK(got.size() == sent + 100001 && is_of_file(got));
}

static void slow_peer_takes_no_worker_and_ends_at_the_deadline(bool inet)
{
    // More connections than there are workers.
    constexpr int many = 12;
    Folder folder(large);
    Net net = net_of(folder);
    std::vector<Connection *> all;
    std::vector<cudaStream_t> streams(many);
    for (int i = 0; i < many; i++) {
        all.push_back(new Connection(net, inet));
        CHECK(!cudaStreamCreateWithFlags(&streams[size_t(i)], cudaStreamNonBlocking));
        // The last one has no deadline, and a peer that reads.
        spinio::launch_resident_on(streams[size_t(i)], send_whole, 1, 32, net.handle, all.back()->kernel, large, 0,
                                   uint64_t(i < many - 1 ? 300000000 : 0), i < many - 1 ? 2 : 1, net.words + i * 2);
    }
    auto whole = all.back()->read_all(large);
    CHECK(whole.size() == large && is_of_file(whole));
    for (int i = 0; i < many; i++) {
        CHECK(!cudaStreamSynchronize(streams[size_t(i)]));
        int64_t first = net.words[i * 2], second = net.words[i * 2 + 1];
        if (i == many - 1)
            CHECK(first == int64_t(large));
        else
            // On a busy machine the time may pass before the first byte is sent.
            CHECK((first > 0 || first == -EAGAIN) && first < int64_t(large) && (second == -EAGAIN || second > 0));
        if (i < many - 1) {
            auto part = all[size_t(i)]->read_all(size_t(std::max<int64_t>(first, 0) + std::max<int64_t>(second, 0)));
            CHECK(is_of_file(part));
        }
        delete all[size_t(i)];
    }
}

static void call_that_does_not_wait_sends_what_has_room(bool inet)
{
    Folder folder(large);
    Net net = net_of(folder);
    Connection connection(net, inet);
    spinio::launch_resident_on(net.stream, send_whole, 1, 32, net.handle, connection.kernel, large, net::DONTWAIT, uint64_t(0), 40, net.words);
    net.wait();
    int64_t sent = 0;
    for (int i = 0; i < 40; i++) {
        CHECK(net.words[i] > 0 || net.words[i] == -EAGAIN);
        sent += std::max<int64_t>(net.words[i], 0);
    }
    CHECK(net.words[0] > 0 && net.words[39] == -EAGAIN && sent < int64_t(large));
    auto got = connection.read_all(size_t(sent));
    CHECK(got.size() == size_t(sent) && is_of_file(got));
}

// The whole file without a wait for the peer: an event set tells when there is room. Events after which there was none are counted.
__global__ void send_by_events(net::Handle handle, int s, size_t bytes, int64_t *out)
{
    auto g = net::block();
    __shared__ net::Ready ready;
    const int f = file::open(g, handle, "f", file::RDONLY), set = net::set(g, handle);
    int64_t at = 0, events = 0, empty = 0;
    bool fresh = false; // the event
    while (at < int64_t(bytes)) {
        const int64_t sent = net::sendfile(g, handle, s, f, at, bytes - size_t(at), net::DONTWAIT);
        if (sent <= 0 && sent != -EAGAIN)
            break;
        at += sent > 0 ? sent : 0;
        empty += fresh && sent == -EAGAIN;
        fresh = false;
        if (sent > 0)
            continue;
        if (threadIdx.x == 0) {
            spinio::store_release_system(reinterpret_cast<uint64_t *>(out + 1), uint64_t(empty));
            spinio::store_release_system(reinterpret_cast<uint64_t *>(out + 2), uint64_t(events + 1));
        }
        if ((events ? net::rearm(g, handle, s) : net::add(g, handle, set, s, net::OUT)) || net::wait(g, handle, set, &ready, 1, -1) != 1)
            break;
        events++;
        fresh = true;
    }
    file::close(g, handle, f);
    if (threadIdx.x == 0)
        out[0] = at;
}

static void set_tells_of_room_for_a_file(bool inet)
{
    Folder folder(large);
    Net net = net_of(folder);
    Connection connection(net, inet);
    spinio::launch_resident_on(net.stream, send_by_events, 1, 32, net.handle, connection.kernel, large, net.words);
    for (int i = 0; i < 60000 && !__atomic_load_n(net.words + 2, __ATOMIC_ACQUIRE); i++)
        usleep(1000);
    // The peer does not read: a set that says that there is room says it again and again.
    usleep(200000);
    const int64_t events = __atomic_load_n(net.words + 2, __ATOMIC_ACQUIRE), empty = __atomic_load_n(net.words + 1, __ATOMIC_ACQUIRE);
    CHECK(events > 0 && empty < 20);
    const auto got = connection.read_all(large);
    net.wait();
    CHECK(got.size() == large && is_of_file(got) && net.words[0] == int64_t(large));
}

// A call that does not wait, after another one that waits for the peer: there is no room before that one has ended.
static void set_tells_of_no_room_while_another_file_waits(bool inet)
{
    Folder folder(large);
    Net net = net_of(folder);
    Connection connection(net, inet);
    cudaStream_t stream;
    CHECK(!cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    spinio::launch_resident_on(net.stream, send_whole, 1, 32, net.handle, connection.kernel, large, 0, uint64_t(0), 1, net.words + 8);
    wait_until_it_waits(net);
    spinio::launch_resident_on(stream, send_by_events, 1, 32, net.handle, connection.kernel, large, net.words);
    for (int i = 0; i < 60000 && !__atomic_load_n(net.words + 2, __ATOMIC_ACQUIRE); i++)
        usleep(1000);
    usleep(200000);
    CHECK(__atomic_load_n(net.words + 2, __ATOMIC_ACQUIRE) > 0 && __atomic_load_n(net.words + 1, __ATOMIC_ACQUIRE) < 20);
    auto got = connection.read_all(2 * large);
    net.wait();
    CHECK(!cudaStreamSynchronize(stream));
    CHECK(got.size() == 2 * large && net.words[8] == int64_t(large) && net.words[0] == int64_t(large));
    // The second one is whole after the first one.
    CHECK(is_of_file({got.begin(), got.begin() + large}) && is_of_file({got.begin() + large, got.end()}));
}

__global__ void close_it(net::Handle handle, int s, int64_t *out)
{
    out[0] = net::close(net::block(), handle, s);
}

enum Ending { PEER_CLOSES, PEER_RESETS, KERNEL_CLOSES, NET_STOPS };

static void call_that_waits_ends(Ending ending, bool inet)
{
    Folder folder(large);
    Net net = net_of(folder);
    Connection connection(net, inet);
    net.words[0] = untouched;
    spinio::launch_resident_on(net.stream, send_whole, 1, 32, net.handle, connection.kernel, large, 0, uint64_t(0), 2, net.words);
    uint64_t sent = wait_until_it_waits(net);
    CHECK(__atomic_load_n(net.words, __ATOMIC_ACQUIRE) == untouched);
    if (ending == PEER_RESETS) {
        linger at_once = {1, 0};
        setsockopt(connection.ours, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    }
    if (ending == PEER_CLOSES || ending == PEER_RESETS)
        CHECK(!close(std::exchange(connection.ours, -1)));
    cudaStream_t stream;
    CHECK(!cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    if (ending == KERNEL_CLOSES)
        spinio::launch_resident_on(stream, close_it, 1, 32, net.handle, connection.kernel, net.words + 8);
    if (ending == NET_STOPS)
        CHECK(!spinio_net_stop(net.net));
    net.wait();
    CHECK(!cudaStreamSynchronize(stream));
    auto gone = [](int64_t result) { return result == -EPIPE || result == -ECONNRESET; };
    switch (ending) {
    case PEER_CLOSES:
    case PEER_RESETS:
        CHECK(net.words[0] == int64_t(sent) && gone(net.words[1]));
        break;
    case KERNEL_CLOSES: {
        CHECK(net.words[8] == 0 && net.words[0] == int64_t(sent) && net.words[1] == -EBADF);
        auto got = connection.read_all();
        CHECK(got.size() == sent && is_of_file(got));
        for (int i = 0; i < 60000 && net.stats().open != 0; i++)
            usleep(1000);
        CHECK(net.stats().open == 0);
        break;
    }
    case NET_STOPS:
        CHECK(net.words[0] == int64_t(sent) && net.words[1] == -ESHUTDOWN);
        break;
    }
}

// The socket is closed while a worker sends: the call returns how many bytes the peer gets.
static void call_that_is_closed_while_it_sends_says_how_much(bool inet)
{
    Folder folder(large);
    Net net = net_of(folder);
    cudaStream_t stream;
    CHECK(!cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int i = 0; i < 40; i++) {
        Connection connection(net, inet);
        const uint64_t before = net.stats().bytes_sent;
        spinio::launch_resident_on(net.stream, send_whole, 1, 32, net.handle, connection.kernel, large, 0, uint64_t(0), 2, net.words);
        size_t got = 0;
        std::thread reader([&] { got = connection.read_all().size(); });
        while (net.stats().bytes_sent == before && __atomic_load_n(net.words, __ATOMIC_ACQUIRE) != int64_t(large))
            usleep(100);
        usleep(unsigned(i) * 50);
        spinio::launch_resident_on(stream, close_it, 1, 32, net.handle, connection.kernel, net.words + 8);
        net.wait();
        CHECK(!cudaStreamSynchronize(stream));
        reader.join();
        CHECK(int64_t(got) == std::max<int64_t>(net.words[0], 0) + std::max<int64_t>(net.words[1], 0));
        net.words[0] = 0;
    }
}

// Inside a net: a block sends the file, another one bytes of its own on the same socket, and a third one receives it all.
__global__ void send_file_beside_bytes(net::Handle handle, int listening, int s, size_t bytes, int sends, int64_t *out)
{
    auto g = net::block();
    __shared__ char buffer[1024];
    int64_t result = 0;
    if (blockIdx.x == 0) {
        int f = file::open(g, handle, "f", file::RDONLY);
        result = net::sendfile(g, handle, s, f, 0, bytes);
    } else if (blockIdx.x == 1) {
        for (int i = 0; i < sends; i++)
            result += net::send(g, handle, s, buffer, 1000);
    } else {
        int peer = net::accept(g, handle, listening);
        for (size_t left = bytes + size_t(sends) * 1000; left;) {
            int64_t got = net::recv(g, handle, peer, buffer, left < sizeof buffer ? left : sizeof buffer);
            if (got <= 0)
                break;
            left -= size_t(got);
            result += got;
        }
        net::close(g, handle, peer);
    }
    if (threadIdx.x == 0)
        out[blockIdx.x] = result;
}

static void whole_file_goes_beside_other_sends()
{
    const size_t bytes = 1 << 20;
    const int sends = 1000;
    Folder folder(bytes);
    Net net = net_of(folder);
    std::string name;
    int listening = listener(net, "tcp://127.0.0.1:0", name), s = spinio_net_connect(net.net, name.c_str());
    CHECK(s > 0);
    spinio::launch_resident_on(net.stream, send_file_beside_bytes, 3, 32, net.handle, listening, s, bytes, sends, net.words);
    net.wait();
    CHECK(net.stats().upgraded == 1);
    CHECK(net.words[0] == int64_t(bytes) && net.words[1] == sends * 1000 && net.words[2] == net.words[0] + net.words[1]);
}

// Two blocks send the file on one socket and others send text: no byte of one is inside another.
__global__ void send_records(net::Handle handle, int s, size_t bytes, int rounds, int64_t *out)
{
    auto g = net::block();
    __shared__ unsigned char text[999];
    for (unsigned i = threadIdx.x; i < sizeof text; i += blockDim.x)
        text[i] = 'x';
    __syncthreads();
    int f = file::open(g, handle, "f", file::RDONLY);
    bool good = true;
    for (int i = 0; i < rounds; i++)
        if (blockIdx.x < 2)
            good = net::sendfile(g, handle, s, f, 0, bytes) == int64_t(bytes) && good;
        else
            good = net::send(g, handle, s, text, sizeof text) == int64_t(sizeof text) && good;
    file::close(g, handle, f);
    out[blockIdx.x] = good;
}

static void calls_of_several_blocks_do_not_mix()
{
    constexpr size_t bytes = 20000;
    constexpr int rounds = 20, blocks = 4;
    Folder folder(bytes);
    CHECK(pwrite(folder.fd, "<", 1, 0) == 1);
    Net net = net_of(folder);
    Connection connection(net, true);
    spinio::launch_resident_on(net.stream, send_records, blocks, 32, net.handle, connection.kernel, bytes, rounds, net.words);
    auto got = connection.read_all(2 * rounds * (bytes + 999));
    net.wait();
    for (int i = 0; i < blocks; i++)
        CHECK(net.words[i] == 1);
    int files = 0, texts = 0;
    for (size_t at = 0; at < got.size();) {
        bool text = got[at] == 'x';
        size_t length = text ? 999 : bytes;
        bool right = at + length <= got.size() && (text || got[at] == '<');
        for (size_t i = 1; right && i < length; i++)
            right = got[at + i] == (text ? 'x' : byte_at(i));
        CHECK(right);
        if (!right)
            break;
        (text ? texts : files)++;
        at += length;
    }
    CHECK(files == 2 * rounds && texts == 2 * rounds);
}

// A file of zeros without blocks; the peer drops the bytes.
static void send_gibibytes(uint64_t gib)
{
    Folder folder(1);
    uint64_t bytes = gib << 30;
    CHECK(pwrite(folder.fd, "", 1, 0) == 1 && !ftruncate(folder.fd, off_t(bytes)));
    Net net = net_of(folder);
    Connection connection(net, true);
    timespec begun, ended;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    spinio::launch_resident_on(net.stream, send_whole, 1, 32, net.handle, connection.kernel, size_t(bytes), 0, uint64_t(0), 1, net.words);
    uint64_t got = 0;
    ssize_t part;
    while (got < bytes && (part = recv(connection.ours, nullptr, 1 << 20, MSG_TRUNC)) > 0)
        got += uint64_t(part);
    net.wait();
    clock_gettime(CLOCK_MONOTONIC, &ended);
    CHECK(got == bytes && net.words[0] == int64_t(bytes));
    double seconds = double(ended.tv_sec - begun.tv_sec) + double(ended.tv_nsec - begun.tv_nsec) * 1e-9;
    std::printf("%llu bytes in %.2f s, %.2f GB/s\n", (unsigned long long)got, seconds, double(got) / seconds * 1e-9);
}

int main(int count, char **arguments)
{
    if (count == 3 && !std::strcmp(arguments[1], "--gib")) {
        send_gibibytes(std::strtoull(arguments[2], nullptr, 10));
        return failures != 0;
    }
    for (bool inet : {true, false}) {
        for (int who = 0; who < 3; who++)
            bytes_come_in_order(inet, who, 0);
        bytes_come_in_order(inet, 0, 7);
        file_that_is_cut_gives_a_short_result(inet);
        slow_peer_takes_no_worker_and_ends_at_the_deadline(inet);
        call_that_does_not_wait_sends_what_has_room(inet);
        set_tells_of_room_for_a_file(inet);
        set_tells_of_no_room_while_another_file_waits(inet);
        call_that_is_closed_while_it_sends_says_how_much(inet);
        call_that_waits_ends(PEER_CLOSES, inet);
        call_that_waits_ends(KERNEL_CLOSES, inet);
        call_that_waits_ends(NET_STOPS, inet);
    }
    call_that_waits_ends(PEER_RESETS, true);
    calls_of_several_blocks_do_not_mix();
    whole_file_goes_beside_other_sends();
    std::printf("%d failures\n", failures);
    return failures != 0;
}
