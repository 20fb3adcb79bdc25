// One call of send and one of recv for many bytes, at the same time, on the emulated GPU. The buffers are one piece of memory that is
// mapped again and again, so that sizes above 4 GiB need no such memory. Prints each failure and exits with 1.
//
//   net_large [MIB]    16 MiB in each direction without an argument; 5120 by hand
#include "net_test.h"

#include <sys/mman.h>

constexpr size_t piece_bytes = 8 << 20;

// So many bytes of addresses, of which all pieces are the same memory.
struct Repeated {
    unsigned char *bytes = nullptr;
    size_t size;

    explicit Repeated(size_t size) : size(size)
    {
        const int memory = memfd_create("net-large", MFD_CLOEXEC);
        CHECK(memory >= 0 && !ftruncate(memory, piece_bytes));
        void *const all = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        CHECK(all != MAP_FAILED);
        bytes = static_cast<unsigned char *>(all);
        for (size_t at = 0; at < size; at += piece_bytes)
            CHECK(mmap(bytes + at, std::min(piece_bytes, size - at), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory, 0) != MAP_FAILED);
        close(memory);
    }

    ~Repeated() { munmap(bytes, size); }
};

static unsigned char byte_at(size_t at, unsigned seed)
{
    return (unsigned char)((at * 0x9e3779b97f4a7c15 + seed) >> 56);
}

static std::vector<unsigned char> piece_of(unsigned seed)
{
    std::vector<unsigned char> piece(piece_bytes);
    for (size_t i = 0; i < piece_bytes; i++)
        piece[i] = byte_at(i, seed);
    return piece;
}

// Block 0 sends and block 1 receives, each by one call.
__global__ void send_and_receive(net::Handle handle, int s, const unsigned char *from, unsigned char *to, size_t bytes, int64_t *out)
{
    const int64_t result = blockIdx.x == 0 ? net::send(net::block(), handle, s, from, bytes) : net::recv(net::block(), handle, s, to, bytes, net::WAITALL);
    if (threadIdx.x == 0)
        out[blockIdx.x] = result;
}

static void one_call_moves_all_bytes(size_t bytes)
{
    // Not a whole number of pieces.
    bytes += 12345;
    Net net({.ring_bytes = 65536});
    Repeated from(bytes), to(bytes);
    const auto sent = piece_of(1), received = piece_of(2);
    std::memcpy(from.bytes, sent.data(), piece_bytes);
    sockaddr_in name;
    const int listening = listening_socket(name, 1), s = spinio_net_connect(net.net, text_of(name).c_str()), peer = accept(listening, nullptr, nullptr);
    CHECK(s > 0 && peer >= 0);
    close(listening);
    timespec begun, ended;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    spinio::launch_resident_on(net.stream, send_and_receive, 2, 64, net.handle, s, static_cast<const unsigned char *>(from.bytes), to.bytes, bytes, net.words);
    std::thread writer([&] {
        for (size_t at = 0; at < bytes;) {
            const size_t in_piece = at % piece_bytes;
            const ssize_t done = send(peer, received.data() + in_piece, std::min(piece_bytes - in_piece, bytes - at), MSG_NOSIGNAL);
            CHECK(done > 0);
            if (done <= 0)
                return;
            at += size_t(done);
        }
    });
    std::vector<unsigned char> part(1 << 20);
    size_t count = 0;
    bool right = true;
    while (count < bytes) {
        const size_t in_piece = count % piece_bytes;
        const ssize_t done = recv(peer, part.data(), std::min(part.size(), piece_bytes - in_piece), 0);
        if (done <= 0)
            break;
        right = right && !std::memcmp(part.data(), sent.data() + in_piece, size_t(done));
        count += size_t(done);
    }
    writer.join();
    net.wait();
    clock_gettime(CLOCK_MONOTONIC, &ended);
    CHECK(count == bytes && right);
    CHECK(net.words[0] == int64_t(bytes) && net.words[1] == int64_t(bytes));
    // The last bytes begin the piece, and those of the piece before are behind them.
    CHECK(!std::memcmp(to.bytes, received.data(), std::min(bytes, piece_bytes)));
    const auto stats = net.stats();
    CHECK(stats.bytes_sent == bytes && stats.bytes_received == bytes && stats.violations == 0);
    const double seconds = double(ended.tv_sec - begun.tv_sec) + double(ended.tv_nsec - begun.tv_nsec) * 1e-9;
    std::printf("%zu bytes in each direction, each by one call, in %.2f s\n", bytes, seconds);
    close(peer);
}

int main(int count, char **arguments)
{
    one_call_moves_all_bytes(size_t(count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 16) << 20);
    return failures != 0;
}
