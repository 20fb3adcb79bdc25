// A kernel is a client of memcached: each block sets, gets and deletes values over a connection of its own, and this program gets
// them by another one. Prints each failure and exits with 1.
//
//   net_memcached tcp://127.0.0.1:11211
#include "net_test.h"

#include <spinio/text.h>

namespace text = spinio::text;

constexpr unsigned blocks = 4, rounds = 50;
constexpr unsigned most_bytes = 20000;

__host__ __device__ static unsigned size_of(unsigned block, unsigned round)
{
    const unsigned sizes[] = {0, 1, 98, 99, 4096, most_bytes};
    return sizes[(block + round) % 6];
}

__host__ __device__ static unsigned char byte_of(unsigned block, unsigned round, unsigned i)
{
    return (unsigned char)((i * 2654435761u >> 13) + block * 7 + round);
}

// A block's connection, with what it is sent and expects next.
struct Client {
    const net::Handle &handle;
    int s;
    char *line;       // in shared memory, as the next ones
    size_t *line_size;
    unsigned char *bytes;

    // "VERB k<block>-<round>", and what follows it.
    __device__ void write_line(const char *verb, unsigned round, const char *rest, bool with_size, unsigned size, const char *end)
    {
        __syncthreads();
        if (threadIdx.x == 0) {
            text::Buffer out(line, 128);
            out.add(verb).add(" k").add_number(blockIdx.x).add("-").add_number(round).add(rest);
            if (with_size)
                out.add_number(size);
            out.add(end);
            *line_size = out.length;
        }
        __syncthreads();
    }

    __device__ bool send_line(int flags = 0) const { return net::send(net::block(), handle, s, line, *line_size, flags) == int64_t(*line_size); }

    // Whether the server says this next.
    __device__ bool expect(const char *wanted, size_t size)
    {
        int64_t got = net::recv(net::block(), handle, s, bytes, size, net::WAITALL);
        bool right = got == int64_t(size);
        for (size_t i = threadIdx.x; right && i < size; i += blockDim.x)
            right = bytes[i] == (unsigned char)wanted[i];
        return __syncthreads_and(right);
    }
};

__global__ void store_and_load(net::Handle handle, net::Address server, int64_t *out)
{
    __shared__ char line[128];
    __shared__ size_t line_size;
    __shared__ unsigned char bytes[most_bytes];
    const int s = connected(net::block(), handle, server);
    Client client{handle, s, line, &line_size, bytes};
    int64_t right = 0;
    bool good = s > 0;
    for (unsigned round = 0; good && round < rounds; round++) {
        const unsigned size = size_of(blockIdx.x, round);
        client.write_line("set", round, " 0 0 ", true, size, "\r\n");
        for (unsigned i = threadIdx.x; i < size; i += blockDim.x)
            bytes[i] = byte_of(blockIdx.x, round, i);
        __syncthreads();
        good = client.send_line(net::MORE) && net::send(net::block(), handle, s, bytes, size, net::MORE) == int64_t(size) && net::send(net::block(), handle, s, "\r\n", 2) == 2;
        good = good && client.expect("STORED\r\n", 8);
        client.write_line("get", round, "", false, 0, "\r\n");
        good = good && client.send_line();
        client.write_line("VALUE", round, " 0 ", true, size, "\r\n");
        good = good && client.expect(line, line_size) && net::recv(net::block(), handle, s, bytes, size, net::WAITALL) == int64_t(size);
        bool same = true;
        for (unsigned i = threadIdx.x; i < size; i += blockDim.x)
            same = same && bytes[i] == byte_of(blockIdx.x, round, i);
        good = __syncthreads_and(same) && good && client.expect("\r\nEND\r\n", 7);
        // Every other one stays for the program.
        if (good && round % 2) {
            client.write_line("delete", round, "", false, 0, "\r\n");
            good = client.send_line() && client.expect("DELETED\r\n", 9);
            client.write_line("get", round, "", false, 0, "\r\n");
            good = good && client.send_line() && client.expect("END\r\n", 5);
        }
        right += good;
    }
    if (s > 0)
        net::close(net::block(), handle, s);
    if (threadIdx.x == 0)
        out[blockIdx.x] = s > 0 ? right : s;
}

// The value of a key, by this program.
static std::string value_of(int s, const std::string &key)
{
    const std::string asked = "get " + key + "\r\n";
    CHECK(send(s, asked.data(), asked.size(), MSG_NOSIGNAL) == ssize_t(asked.size()));
    std::string all;
    char part[4096];
    ssize_t got;
    while (all.size() < 5 || all.compare(all.size() - 5, 5, "END\r\n") != 0) {
        if ((got = recv(s, part, sizeof part, 0)) <= 0)
            break;
        all.append(part, size_t(got));
    }
    const size_t begin = all.find("\r\n") + 2, end = all.size() - 7;
    return all.compare(0, 5, "VALUE") == 0 && end >= begin ? all.substr(begin, end - begin) : "none: " + all;
}

int main(int count, char **arguments)
{
    if (count != 2) {
        std::printf("skipped: the address of a memcached server is missing\n");
        return 0;
    }
    Net net({.ring_bytes = 65536});
    spinio::launch_resident_on(net.stream, store_and_load, blocks, 64, net.handle, address_of(arguments[1]), net.words);
    net.wait();
    for (unsigned block = 0; block < blocks; block++) {
        if (net.words[block] != rounds)
            std::printf("block %u: %lld of %u rounds\n", block, (long long)net.words[block], rounds);
        CHECK(net.words[block] == rounds);
    }
    const int s = connect_to(arguments[1]);
    for (unsigned block = 0; block < blocks; block++)
        for (unsigned round = 0; round < rounds; round++) {
            std::string wanted;
            for (unsigned i = 0; i < size_of(block, round); i++)
                wanted += char(byte_of(block, round, i));
            const std::string value = value_of(s, "k" + std::to_string(block) + "-" + std::to_string(round));
            CHECK(round % 2 ? value == "none: END\r\n" : value == wanted);
        }
    close(s);
    std::printf("%u values, %d failures\n", blocks * rounds, failures);
    return failures != 0;
}
