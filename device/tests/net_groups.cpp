// Each call of spinio/net.h and spinio/file.h by groups of cooperative groups: a thread block, tiles of each size, one thread; several
// groups of a warp at the same time. Prints each failure and exits with 1.
//
// On a GPU the groups are those of <cooperative_groups.h>, else types with the same members (net_tile.h).
#include "net_test.h"
#include "net_tile.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <spinio/file.h>

namespace file = spinio::file;

// As many groups of a block call at a time.
constexpr unsigned groups = 4;

// What a group has to itself.
struct Place {
    net::Address name, from;
    net::Ready ready;
    net::Poll polls[3];
    file::Stat stat;
    unsigned char out[5000], in[5000];
};

// Counts the steps of a group, and remembers the first one that was wrong for one of its threads.
template <typename Group>
struct Steps {
    Group group;
    int count = 0, wrong = 0;

    __device__ explicit Steps(Group group) : group(group) {}

    __device__ void expect(bool right)
    {
        count++;
        if (group.any(!right) && !wrong)
            wrong = count;
    }
};

__device__ inline unsigned char byte_of(uint64_t at) { return (unsigned char)(at * 29 + (at >> 8) * 3); }

template <typename Group>
__device__ bool is_pattern(Group group, const unsigned char *bytes, size_t count)
{
    bool right = true;
    for (size_t i = group.rank(); i < count; i += group.size())
        right = right && bytes[i] == byte_of(i);
    return right;
}

// A stream from a socket of the group to another one.
template <typename Group>
__device__ void stream(Steps<Group> &steps, const net::Handle &handle, Place &place, int from, int to)
{
    Group g = steps.group;
    for (size_t bytes : {size_t(1), size_t(50), size_t(700), sizeof place.out}) {
        for (size_t sent = 0, got = 0; got < bytes;) {
            // No more than the rings take, since the group waits for itself.
            const size_t piece = bytes - sent < 1500 ? bytes - sent : 1500;
            steps.expect(net::send(g, handle, from, place.out + sent, piece) == int64_t(piece));
            sent += piece;
            steps.expect(net::recv(g, handle, to, place.in + got, piece, net::WAITALL) == int64_t(piece));
            got += piece;
        }
        steps.expect(is_pattern(g, place.in, bytes));
    }
    net::Span span;
    steps.expect(net::reserve(g, handle, from, &span, 100) > 0);
    for (size_t i = g.rank(); i < span.size; i += g.size())
        span.bytes[i] = byte_of(i);
    const size_t bytes = span.size;
    steps.expect(net::commit(g, handle, from, bytes) == 0);
    for (size_t at = 0; at < bytes && !steps.wrong; at += span.size) {
        steps.expect(net::borrow(g, handle, to, &span, bytes) > 0);
        for (size_t i = g.rank(); i < span.size; i += g.size())
            place.in[at + i] = span.bytes[i];
        steps.expect(net::give_back(g, handle, to, span.size) == 0);
    }
    steps.expect(is_pattern(g, place.in, bytes));
}

template <typename Group>
__device__ void events(Steps<Group> &steps, const net::Handle &handle, Place &place, int from, int to)
{
    Group g = steps.group;
    const int set = net::set(g, handle);
    steps.expect(set > 0);
    steps.expect(net::add(g, handle, set, to, net::IN) == 0);
    steps.expect(net::wait(g, handle, set, &place.ready, 1, 0) == 0);
    for (int turn = 0; turn < 2; turn++) {
        if (g.leads())
            for (int i = 0; i < 3; i++)
                place.polls[i] = {i == 1 ? -1 : i ? from : to, i ? net::OUT : net::IN, 0, 0, 0};
        g.sync();
        steps.expect(net::poll(g, handle, place.polls, 1, 0) == 0);
        steps.expect(net::send(g, handle, from, place.out, 3) == 3);
        steps.expect(net::poll(g, handle, place.polls, 1, -1) == 1);
        steps.expect(net::poll(g, handle, place.polls, 3, 0) == 2 && place.polls[0].in == 3 && place.polls[2].ready == net::OUT);
        steps.expect(net::wait(g, handle, set, &place.ready, 1, -1) == 1 && place.ready.s == to);
        steps.expect(net::recv(g, handle, to, place.in, 3, net::WAITALL) == 3);
        steps.expect(net::rearm(g, handle, to) == 0);
    }
    steps.expect(net::add(g, handle, set, to, 0) == 0);
}

template <typename Group>
__device__ void datagrams(Steps<Group> &steps, const net::Handle &handle, Place &place)
{
    Group g = steps.group;
    const int s = net::socket(g, handle, net::INET, net::DGRAM, 0);
    steps.expect(s > 0);
    steps.expect(net::bind(g, handle, s, net::Address::inet(127, 0, 0, 1, 0)) == 0);
    steps.expect(net::getsockname(g, handle, s, &place.name) == 0);
    for (size_t bytes : {size_t(0), size_t(1), size_t(1000)}) {
        steps.expect(net::sendto(g, handle, s, place.out, bytes, 0, place.name) == int64_t(bytes));
        steps.expect(net::recvfrom(g, handle, s, place.in, sizeof place.in, 0, &place.from) == int64_t(bytes));
        steps.expect(is_pattern(g, place.in, bytes) && place.from.port() == place.name.port());
    }
    steps.expect(net::close(g, handle, s) == 0);
}

template <typename Group>
__device__ void files(Steps<Group> &steps, const net::Handle &handle, Place &place, unsigned number, int from, int to)
{
    Group g = steps.group;
    const char path[] = {'f', char('0' + number), 0};
    const int f = file::open(g, handle, path, file::RDWR | file::CREAT);
    steps.expect(f >= 0);
    steps.expect(file::pwrite(g, handle, f, place.out, 900, 0) == 900);
    steps.expect(file::pread(g, handle, f, place.in, 1000, 0) == 900 && is_pattern(g, place.in, 900));
    steps.expect(file::fstat(g, handle, f, &place.stat) == 0 && place.stat.size == 900);
    steps.expect(net::sendfile(g, handle, from, f, 0, 900) == 900);
    steps.expect(net::recv(g, handle, to, place.in, 900, net::WAITALL) == 900 && is_pattern(g, place.in, 900));
    steps.expect(file::close(g, handle, f) == 0);
}

// The group talks with itself: `number` is its own of the block.
template <typename Group>
__device__ void every_call(Group g, const net::Handle &handle, Place *places, unsigned number, int64_t *out)
{
    if (number >= groups)
        return;
    Place &place = places[number];
    Steps<Group> steps(g);
    for (size_t i = g.rank(); i < sizeof place.out; i += g.size())
        place.out[i] = byte_of(i);
    g.sync();
    const int listener = net::socket(g, handle, net::INET, net::STREAM, 0);
    steps.expect(net::bind(g, handle, listener, net::Address::inet(127, 0, 0, 1, 0)) == 0);
    steps.expect(net::listen(g, handle, listener, 4) == 0);
    steps.expect(net::getsockname(g, handle, listener, &place.name) == 0 && place.name.port());
    const int one = net::socket(g, handle, net::INET, net::STREAM, 0);
    steps.expect(net::connect(g, handle, one, place.name) == 0);
    const int two = net::accept(g, handle, listener, &place.from);
    steps.expect(two > 0);
    steps.expect(net::getpeername(g, handle, one, &place.from) == 0 && place.from.port() == place.name.port());
    stream(steps, handle, place, one, two);
    stream(steps, handle, place, two, one);
    events(steps, handle, place, one, two);
    datagrams(steps, handle, place);
    files(steps, handle, place, number, one, two);
    steps.expect(net::set_timeout(g, handle, two, 1'000'000, 0) == 0);
    steps.expect(net::recv(g, handle, two, place.in, 1) == -EAGAIN);
    steps.expect(net::shutdown(g, handle, one, net::SHUT_SEND) == 0);
    steps.expect(net::set_timeout(g, handle, two, 0, 0) == 0);
    steps.expect(net::recv(g, handle, two, place.in, 1) == 0);
    steps.expect(net::close(g, handle, one) == 0);
    steps.expect(net::close(g, handle, two) == 0);
    steps.expect(net::release(g, handle, listener) == 0);
    if (g.leads()) {
        out[number * 2] = steps.wrong;
        out[number * 2 + 1] = steps.count;
    }
}

template <unsigned threads>
__global__ void calls_of_tiles(net::Handle handle, Place *places, int64_t *out)
{
    every_call(net::group(tile_of<threads>()), handle, places, threadIdx.x / threads, out);
}

__global__ void calls_of_block(net::Handle handle, Place *places, int64_t *out)
{
    every_call(net::group(whole_block()), handle, places, 0, out);
}

#if !defined(__CUDACC__)
__global__ void calls_of_thread(net::Handle handle, Place *places, int64_t *out)
{
    every_call(net::group(lone_thread()), handle, places, threadIdx.x, out);
}
#else
// Lanes that are not side by side.
__global__ void calls_of_odd_lanes(net::Handle handle, Place *places, int64_t *out)
{
    if (threadIdx.x < 32 && threadIdx.x % 2)
        every_call(net::group(cooperative_groups::coalesced_threads()), handle, places, 0, out);
}
#endif

static void groups_make_every_call(const char *name, void (*kernel)(net::Handle, Place *, int64_t *), unsigned count, bool no_upgrade)
{
    char folder[] = "/tmp/spinio-net-XXXXXX";
    CHECK(mkdtemp(folder) != nullptr);
    Place *places;
    CHECK(cudaMalloc(&places, sizeof(Place) * groups) == cudaSuccess);
    {
        Net net({.connections = 64, .no_upgrade = no_upgrade, .files_root = folder, .files_write = true});
        spinio::launch_resident_on(net.stream, kernel, 1, 64, net.handle, places, net.words);
        net.wait();
        for (unsigned i = 0; i < groups; i++) {
            const bool right = net.words[i * 2] == 0 && (net.words[i * 2 + 1] > 50) == (i < count);
            if (!right)
                std::printf("%s, group %u: step %ld of %ld is wrong\n", name, i, long(net.words[i * 2]), long(net.words[i * 2 + 1]));
            CHECK(right);
        }
        CHECK(net.stats().violations == 0 && (net.stats().upgraded > 0) == !no_upgrade);
    }
    CHECK(cudaFree(places) == cudaSuccess);
    for (unsigned i = 0; i < count; i++)
        CHECK(!unlink((std::string(folder) + "/f" + std::to_string(i)).c_str()));
    CHECK(!rmdir(folder));
}

int main()
{
    for (bool no_upgrade : {false, true}) {
        groups_make_every_call("block", calls_of_block, 1, no_upgrade);
        groups_make_every_call("tiles of 8", calls_of_tiles<8>, 4, no_upgrade);
#if defined(__CUDACC__)
        // nvcc compiles all calls for each kind of group, for 14 s.
        groups_make_every_call("odd lanes", calls_of_odd_lanes, 1, no_upgrade);
#else
        groups_make_every_call("tiles of 32", calls_of_tiles<32>, 2, no_upgrade);
        groups_make_every_call("tiles of 16", calls_of_tiles<16>, 4, no_upgrade);
        groups_make_every_call("tiles of 4", calls_of_tiles<4>, 4, no_upgrade);
        groups_make_every_call("tiles of 2", calls_of_tiles<2>, 4, no_upgrade);
        groups_make_every_call("tiles of 1", calls_of_tiles<1>, 4, no_upgrade);
        groups_make_every_call("threads", calls_of_thread, 4, no_upgrade);
#endif
    }
    std::printf("%d failures\n", failures);
    return failures != 0;
}
