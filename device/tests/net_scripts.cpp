// Random scripts of calls, run by a kernel and by this program, against the same peer: the results are the same, also with
// faults of the network (short, interrupted and late system calls of the proxy), and between two kernels of a net or of two
// nets, with the upgrade of such connections and without it. Prints each difference and exits with 1.
//
// Some numbers of bytes are sent and received in place: by kernels (spinio/net/span.h), and by programs that share memory.
//
//   net_scripts [FIRST [COUNT]]    1000 scripts from 0 on, those of IPv6 and those between kernels without arguments;
//                                  the number of a script is its seed
#include "net_test.h"

// A script of calls, run by a kernel and by this program, against the same peer.
struct Step {
    enum What : int { peer_sends, receive, send, peer_receives, peer_ends, end, receive_more, done } what;
    int bytes;
};

CALLED_BY_BOTH
template <typename Socket>
__host__ __device__ void run_script(Socket socket, const Step *steps, int64_t *results)
{
    for (int i = 0; steps[i].what != Step::done; i++) {
        int64_t result = 0;
        switch (steps[i].what) {
        case Step::receive: result = socket.receive(steps[i].bytes); break;
        case Step::send: result = socket.send(steps[i].bytes); break;
        case Step::end: result = socket.end(); break;
        case Step::receive_more: result = socket.receive(steps[i].bytes); break;
        default: break;
        }
        if (socket.leads())
            results[i] = result;
    }
}

struct KernelSocket {
    const net::Handle &handle;
    int s;
    char *buffer;

    __device__ bool leads() const { return threadIdx.x == 0; }

    // Some numbers of bytes travel in place.
    __device__ static bool in_place(int bytes) { return bytes % 3 == 1; }

    // The count and the sum of what came.
    __device__ int64_t receive(int bytes) const
    {
        if (in_place(bytes))
            return receive_in_place(bytes);
        int64_t got = net::recv(net::block(), handle, s, buffer, size_t(bytes), net::WAITALL), sum = 0;
        for (int64_t i = 0; i < got; i++)
            sum = sum * 31 % 65521 + (unsigned char)buffer[i];
        __syncthreads();
        return got < 0 ? got : got * 65536 + sum;
    }

    __device__ int64_t receive_in_place(int bytes) const
    {
        int64_t total = 0, sum = 0;
        while (total < bytes) {
            net::Span span;
            int64_t got = net::borrow(net::block(), handle, s, &span, size_t(bytes - total));
            if (got <= 0)
                return got < 0 && total == 0 ? got : total * 65536 + sum;
            for (int64_t i = 0; i < got; i++)
                sum = sum * 31 % 65521 + span.bytes[i];
            if (int failed = net::give_back(net::block(), handle, s, size_t(got)))
                return failed;
            total += got;
        }
        return total * 65536 + sum;
    }

    __device__ int64_t send_in_place(int bytes) const
    {
        int64_t total = 0;
        while (total < bytes) {
            net::Span span;
            int64_t got = net::reserve(net::block(), handle, s, &span, size_t(bytes - total));
            if (got <= 0)
                return total ? total : got;
            for (int64_t i = threadIdx.x; i < got; i += blockDim.x)
                span.bytes[i] = (unsigned char)((total + i) * 3 + bytes);
            if (int failed = net::commit(net::block(), handle, s, size_t(got)))
                return failed;
            total += got;
        }
        return total;
    }

    __device__ int64_t send(int bytes) const
    {
        if (in_place(bytes))
            return send_in_place(bytes);
        for (int i = int(threadIdx.x); i < bytes; i += int(blockDim.x))
            buffer[i] = char(i * 3 + bytes);
        __syncthreads();
        int64_t sent = net::send(net::block(), handle, s, buffer, size_t(bytes));
        __syncthreads();
        return sent;
    }

    __device__ int64_t end() const { return net::shutdown(net::block(), handle, s, net::SHUT_SEND); }
};

// What both kinds of sockets of a program do with their bytes.
template <typename Receive>
static int64_t receive_and_sum(int bytes, Receive receive)
{
    std::vector<unsigned char> buffer(size_t(bytes) + 1);
    int64_t got = receive(buffer.data()), sum = 0;
    for (int64_t i = 0; i < got; i++)
        sum = sum * 31 % 65521 + buffer[size_t(i)];
    return got < 0 ? -errno : got * 65536 + sum;
}

template <typename Send>
static int64_t send_numbers(int bytes, Send send)
{
    std::vector<char> buffer(size_t(bytes) + 1);
    for (int i = 0; i < bytes; i++)
        buffer[size_t(i)] = char(i * 3 + bytes);
    int64_t sent = send(buffer.data());
    return sent < 0 ? -errno : sent;
}

struct PlainSocket {
    int s;

    bool leads() const { return true; }

    int64_t receive(int bytes) const
    {
        return receive_and_sum(bytes, [&](void *to) { return recv(s, to, size_t(bytes), MSG_WAITALL); });
    }

    int64_t send(int bytes) const
    {
        return send_numbers(bytes, [&](const void *from) { return ::send(s, from, size_t(bytes), MSG_NOSIGNAL); });
    }

    int64_t end() const { return shutdown(s, SHUT_WR) ? -errno : 0; }
};

constexpr int most_steps = 16;
constexpr unsigned batch_scripts = 250;

// Steps that have one result, whatever the timing: a direction has at most what the smallest ring and buffer hold.
static std::vector<Step> make_script(unsigned seed)
{
    auto random = [&](unsigned below) { return int((seed = seed * 1664525 + 1013904223) >> 8) % int(below); };
    std::vector<Step> steps;
    int to_kernel = 0, from_kernel = 0;
    bool ended = false, peer_ended = false;
    while (steps.size() < most_steps - 4) {
        int bytes = 1 + random(random(2) ? 100 : 3000);
        switch (random(7)) {
        case 0: case 1:
            if (!peer_ended && to_kernel + bytes < 4000)
                steps.push_back({Step::peer_sends, bytes}), to_kernel += bytes;
            break;
        case 2:
            if (to_kernel) {
                bytes = 1 + random(unsigned(to_kernel));
                steps.push_back({Step::receive, bytes}), to_kernel -= bytes;
            }
            break;
        case 3:
            if (ended || from_kernel + bytes < 4000)
                steps.push_back({Step::send, bytes}), from_kernel += ended ? 0 : bytes;
            break;
        case 4:
            if (from_kernel)
                steps.push_back({Step::peer_receives, from_kernel}), from_kernel = 0;
            break;
        case 5:
            if (!ended && random(3) == 0)
                steps.push_back({Step::end, 0}), ended = true;
            break;
        default:
            if (!peer_ended && random(3) == 0)
                steps.push_back({Step::peer_ends, 0}), peer_ended = true;
            break;
        }
    }
    if (!peer_ended)
        steps.push_back({Step::peer_ends, 0});
    // More than there is: what is left, and then the end of the stream, again and again.
    steps.push_back({Step::receive_more, 5000});
    steps.push_back({Step::receive_more, 1});
    steps.push_back({Step::done, 0});
    return steps;
}

// A socket of this program that may share memory with the kernel.
// As spinio_socket_recv with MSG_WAITALL and spinio_socket_send; some numbers of bytes in place, and now and then not all of a span.
static ssize_t receive_of_program(spinio_socket *s, void *to, size_t bytes)
{
    if (bytes % 3 != 1)
        return spinio_socket_recv(s, to, bytes, MSG_WAITALL);
    size_t total = 0;
    while (total < bytes) {
        void *span;
        ssize_t got = spinio_socket_borrow(s, &span, bytes - total, 0);
        if (got <= 0)
            return total ? ssize_t(total) : got;
        const size_t take = size_t(got) > 1 && got % 5 == 0 ? size_t(got) - 1 : size_t(got);
        std::memcpy(static_cast<char *>(to) + total, span, take);
        CHECK(!spinio_socket_give_back(s, take));
        total += take;
    }
    return ssize_t(total);
}

static ssize_t send_of_program(spinio_socket *s, const void *from, size_t bytes)
{
    if (bytes % 3 != 1)
        return spinio_socket_send(s, from, bytes, 0);
    size_t total = 0;
    while (total < bytes) {
        void *span;
        ssize_t room = spinio_socket_reserve(s, &span, bytes - total, 0);
        if (room < 0)
            return total ? ssize_t(total) : -1;
        const size_t take = room > 1 && room % 5 == 0 ? size_t(room) - 1 : size_t(room);
        std::memcpy(span, static_cast<const char *>(from) + total, take);
        if (spinio_socket_commit(s, take))
            return total ? ssize_t(total) : -1;
        total += take;
    }
    return ssize_t(total);
}

struct SharedSocket {
    spinio_socket *s;

    explicit SharedSocket(const std::string &address, bool no_upgrade) : s(nullptr)
    {
        struct spinio_socket_options options = {sizeof options, no_upgrade, 60000, 60000};
        s = spinio_socket_connect(address.c_str(), &options);
        char text[128] = "";
        CHECK(s && spinio_socket_transport(s, text, sizeof text) == !no_upgrade);
        if (s && (text[0] == 's') == no_upgrade)
            std::printf("transport %s\n", text);
    }

    bool leads() const { return true; }

    int64_t receive(int bytes) const
    {
        return receive_and_sum(bytes, [&](void *to) { return receive_of_program(s, to, size_t(bytes)); });
    }

    int64_t send(int bytes) const
    {
        return send_numbers(bytes, [&](const void *from) { return send_of_program(s, from, size_t(bytes)); });
    }

    int64_t end() const { return spinio_socket_shutdown(s, SHUT_WR) ? -errno : 0; }
};

static ssize_t send(const SharedSocket &s, const void *from, size_t bytes, int) { return send_of_program(s.s, from, bytes); }
static ssize_t recv(const SharedSocket &s, void *to, size_t bytes, int flags)
{
    return flags == MSG_WAITALL ? receive_of_program(s.s, to, bytes) : spinio_socket_recv(s.s, to, bytes, flags);
}
static int shutdown(const SharedSocket &s, int how) { return spinio_socket_shutdown(s.s, how); }
static int close(const SharedSocket &s) { return spinio_socket_close(s.s); }

// The peer's steps; returns what it received.
template <typename Peer>
static std::string run_peer(const Peer &s, const std::vector<Step> &steps)
{
    std::string all;
    for (auto &step : steps) {
        std::vector<char> bytes(size_t(step.bytes) + 1);
        if (step.what == Step::peer_sends) {
            for (int i = 0; i < step.bytes; i++)
                bytes[size_t(i)] = char(i * 5 + step.bytes);
            CHECK(send(s, bytes.data(), size_t(step.bytes), MSG_NOSIGNAL) == step.bytes);
        } else if (step.what == Step::peer_receives) {
            CHECK(recv(s, bytes.data(), size_t(step.bytes), MSG_WAITALL) == step.bytes);
            all.append(bytes.data(), size_t(step.bytes));
        } else if (step.what == Step::peer_ends) {
            CHECK(!shutdown(s, SHUT_WR));
        }
    }
    for (char byte; recv(s, &byte, 1, 0) > 0;)
        all += byte;
    close(s);
    return all;
}

__global__ void scripts(net::Handle handle, int listener, const Step *steps, int count, int64_t *results)
{
    __shared__ char buffer[5000];
    for (int i = 0; i < count; i++) {
        int s = net::accept(net::block(), handle, listener);
        run_script(KernelSocket{handle, s, buffer}, steps + i * most_steps, results + i * most_steps);
        net::close(net::block(), handle, s);
    }
}

enum class Client { plain, shared, not_upgraded };

static void kernel_and_program_get_the_same_results(const char *where, unsigned first, int count, unsigned fault_seed = 0, Client client = Client::plain)
{
    Net net({.fault_seed = fault_seed});
    std::string address;
    int s = listener(net, where, address);
    Step *steps;
    int64_t *results;
    CHECK(cudaHostAlloc(&steps, sizeof(Step) * most_steps * size_t(count), cudaHostAllocDefault) == cudaSuccess);
    CHECK(cudaHostAlloc(&results, sizeof(int64_t) * most_steps * size_t(count), cudaHostAllocDefault) == cudaSuccess);
    std::memset(results, 0, sizeof(int64_t) * most_steps * size_t(count));
    for (int i = 0; i < count; i++) {
        auto script = make_script(first + unsigned(i));
        std::copy(script.begin(), script.end(), steps + i * most_steps);
    }
    spinio::launch_resident_on(net.stream, scripts, 1, 48, net.handle, s, (const Step *)steps, count, results);
    std::vector<std::string> received;
    for (int i = 0; i < count; i++) {
        auto script = make_script(first + unsigned(i));
        received.push_back(client == Client::plain ? run_peer(connect_to(address), script)
                                                   : run_peer(SharedSocket(address, client == Client::not_upgraded), script));
    }
    net.wait();
    CHECK(net.stats().shared == (client == Client::shared ? uint64_t(count) : 0));
    for (int i = 0; i < count; i++) {
        int pair[2];
        CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
        auto script = make_script(first + unsigned(i));
        int64_t expected[most_steps] = {};
        std::thread program([&] {
            run_script(PlainSocket{pair[0]}, script.data(), expected);
            close(pair[0]);
        });
        CHECK(run_peer(pair[1], script) == received[size_t(i)]);
        program.join();
        for (int step = 0; step < most_steps; step++)
            if (results[i * most_steps + step] != expected[step]) {
                std::printf("script %u, step %d (%d): a kernel gets %lld, a program %lld\n", first + unsigned(i), step, script[size_t(step)].what,
                            (long long)results[i * most_steps + step], (long long)expected[step]);
                failures++;
            }
    }
    cudaFreeHost(steps);
    cudaFreeHost(results);
}

// The peer's steps by another block of the same net; stores how many bytes it got, and their sum.
__device__ inline void run_peer_kernel(const net::Handle &handle, int s, const Step *steps, char *bytes, int64_t *result)
{
    int64_t count = 0, all = 0, wrong = 0;
    auto receive = [&](int most, int flags) {
        int64_t got = net::recv(net::block(), handle, s, bytes, size_t(most), flags);
        for (int64_t i = 0; i < got; i++)
            all = all * 31 % 65521 + (unsigned char)bytes[i];
        count += got < 0 ? 0 : got;
        __syncthreads();
        return got;
    };
    for (int step = 0; steps[step].what != Step::done; step++) {
        int most = steps[step].bytes;
        if (steps[step].what == Step::peer_sends) {
            for (int i = int(threadIdx.x); i < most; i += int(blockDim.x))
                bytes[i] = char(i * 5 + most);
            __syncthreads();
            wrong += net::send(net::block(), handle, s, bytes, size_t(most)) != most;
            __syncthreads();
        } else if (steps[step].what == Step::peer_receives) {
            wrong += receive(most, net::WAITALL) != most;
        } else if (steps[step].what == Step::peer_ends) {
            wrong += net::shutdown(net::block(), handle, s, net::SHUT_SEND);
        }
    }
    while (receive(5000, 0) > 0) {
    }
    wrong += net::close(net::block(), handle, s);
    if (threadIdx.x == 0)
        *result = wrong ? -1 : count * 65536 + all;
}

__global__ void scripts_between_blocks(net::Handle handle, int listener, net::Address to, const Step *steps, int count, int64_t *results, int64_t *received)
{
    __shared__ char buffer[5000];
    for (int i = 0; i < count; i++) {
        if (blockIdx.x == 0) {
            int s = net::accept(net::block(), handle, listener);
            run_script(KernelSocket{handle, s, buffer}, steps + i * most_steps, results + i * most_steps);
            net::close(net::block(), handle, s);
        } else {
            int s = net::socket(net::block(), handle, to.bytes[0], net::STREAM, 0);
            if (net::connect(net::block(), handle, s, to) == 0)
                run_peer_kernel(handle, s, steps + i * most_steps, buffer, received + i);
        }
    }
}

// The same between two nets: this one connects, and scripts() of the other net accepts.
__global__ void scripts_of_the_client(net::Handle handle, net::Address to, const Step *steps, int count, int64_t *received)
{
    __shared__ char buffer[5000];
    for (int i = 0; i < count; i++) {
        int s = net::socket(net::block(), handle, to.bytes[0], net::STREAM, 0);
        if (net::connect(net::block(), handle, s, to) == 0)
            run_peer_kernel(handle, s, steps + i * most_steps, buffer, received + i);
    }
}

__global__ void scripts_of_the_peer(net::Handle handle, int listener, const Step *steps, int count, int64_t *received)
{
    __shared__ char buffer[5000];
    for (int i = 0; i < count; i++)
        run_peer_kernel(handle, net::accept(net::block(), handle, listener), steps + i * most_steps, buffer, received + i);
}

// The other way around: the script is run by a program that shares memory, and the kernel is its peer.
static void program_that_shares_memory_gets_the_same_results(const char *where, unsigned first, int count, bool no_upgrade)
{
    Net net;
    std::string address;
    int s = listener(net, where, address);
    Step *steps;
    int64_t *received;
    CHECK(cudaHostAlloc(&steps, sizeof(Step) * most_steps * size_t(count), cudaHostAllocDefault) == cudaSuccess);
    CHECK(cudaHostAlloc(&received, sizeof(int64_t) * size_t(count), cudaHostAllocDefault) == cudaSuccess);
    for (int i = 0; i < count; i++) {
        auto script = make_script(first + unsigned(i));
        std::copy(script.begin(), script.end(), steps + i * most_steps);
    }
    spinio::launch_resident_on(net.stream, scripts_of_the_peer, 1, 48, net.handle, s, (const Step *)steps, count, received);
    std::vector<std::vector<int64_t>> results;
    for (int i = 0; i < count; i++) {
        SharedSocket socket(address, no_upgrade);
        results.emplace_back(most_steps);
        run_script(socket, steps + i * most_steps, results.back().data());
        close(socket);
    }
    net.wait();
    for (int i = 0; i < count; i++) {
        int pair[2];
        CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
        auto script = make_script(first + unsigned(i));
        std::vector<int64_t> expected(most_steps);
        std::thread program([&] {
            run_script(PlainSocket{pair[0]}, script.data(), expected.data());
            close(pair[0]);
        });
        int64_t sum = 0, bytes = 0;
        for (unsigned char byte : run_peer(pair[1], script))
            sum = sum * 31 % 65521 + byte, bytes++;
        program.join();
        CHECK(received[i] == bytes * 65536 + sum);
        CHECK(results[size_t(i)] == expected);
    }
    cudaFreeHost(steps);
    cudaFreeHost(received);
}

// Between two blocks of one net, through device memory and through Linux; or of two nets, through shared memory.
static void two_kernels_get_the_same_results(const char *where, unsigned first, int count, bool two_nets = false)
{
    const size_t words = (most_steps + 1) * size_t(count);
    std::vector<int64_t> all[2];
    Step *steps;
    int64_t *results;
    CHECK(cudaHostAlloc(&steps, sizeof(Step) * most_steps * size_t(count), cudaHostAllocDefault) == cudaSuccess);
    CHECK(cudaHostAlloc(&results, sizeof(int64_t) * words, cudaHostAllocDefault) == cudaSuccess);
    for (int i = 0; i < count; i++) {
        auto script = make_script(first + unsigned(i));
        std::copy(script.begin(), script.end(), steps + i * most_steps);
    }
    for (bool no_upgrade : {false, true}) {
        // Memory of one connection may be free a little later.
        Net net({.connections = two_nets ? 64u : 16u, .no_upgrade = no_upgrade});
        std::string address;
        int s = listener(net, where, address);
        net::Address to = where[0] == 't' ? net::Address::inet(127, 0, 0, 1, port_of(address))
                                          : net::Address::path(address.c_str() + 7);
        std::memset(results, 0, sizeof(int64_t) * words);
        const uint64_t upgraded = no_upgrade ? 0 : uint64_t(count);
        if (two_nets) {
            Net other({.no_upgrade = no_upgrade});
            spinio::launch_resident_on(net.stream, scripts, 1, 48, net.handle, s, (const Step *)steps, count, results);
            spinio::launch_resident_on(other.stream, scripts_of_the_client, 1, 48, other.handle, to, (const Step *)steps, count, results + most_steps * count);
            net.wait();
            other.wait();
            CHECK(net.stats().peer == upgraded && other.stats().peer == upgraded && net.stats().upgraded == 0);
        } else {
            spinio::launch_resident_on(net.stream, scripts_between_blocks, 2, 48, net.handle, s, to, (const Step *)steps, count, results,
                                       results + most_steps * count);
            net.wait();
            CHECK(net.stats().upgraded == upgraded);
        }
        all[no_upgrade].assign(results, results + words);
        if (where[0] == 'u')
            unlink(where + 7);
    }
    for (int i = 0; i < count; i++) {
        int pair[2];
        CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
        auto script = make_script(first + unsigned(i));
        int64_t expected[most_steps] = {};
        std::thread program([&] {
            run_script(PlainSocket{pair[0]}, script.data(), expected);
            close(pair[0]);
        });
        std::string received = run_peer(pair[1], script);
        program.join();
        int64_t sum = 0;
        for (unsigned char byte : received)
            sum = sum * 31 % 65521 + byte;
        CHECK(all[0][size_t(most_steps * count + i)] == int64_t(received.size()) * 65536 + sum);
        for (int step = 0; step < most_steps; step++)
            if (all[0][size_t(i * most_steps + step)] != expected[step]) {
                std::printf("script %u, step %d: an end inside the net gets %lld, a program %lld\n", first + unsigned(i), step,
                            (long long)all[0][size_t(i * most_steps + step)], (long long)expected[step]);
                failures++;
            }
    }
    CHECK(all[0] == all[1]);
    cudaFreeHost(steps);
    cudaFreeHost(results);
}

// A batch of scripts, which the number of its first one determines: over TCP or UNIX, with or without faults.
static void batch(unsigned first, int count)
{
    unsigned number = first / batch_scripts, faults = number / 2 % 2 ? number : 0;
    std::string path = "unix:///tmp/spinio-net-" + std::to_string(getpid());
    kernel_and_program_get_the_same_results(number % 2 ? path.c_str() : "tcp://127.0.0.1:0", first, count, faults);
    unlink(path.c_str() + 7);
}

int main(int arguments, char **argument)
{
    const unsigned first = arguments > 1 ? unsigned(std::atoi(argument[1])) : 0, count = arguments > 2 ? unsigned(std::atoi(argument[2])) : 1000;
    unsigned done = 0;
    while (done < count && !failures) {
        // A batch that is begun inside is not that of the whole: its faults are others.
        unsigned now = std::min(batch_scripts - (first + done) % batch_scripts, count - done);
        batch(first + done, int(now));
        if (failures)
            std::printf("in the batch that `net_scripts %u %u` repeats\n", first + done, now);
        done += now;
    }
    if (arguments == 1) {
        std::string path = "unix:///tmp/spinio-net-" + std::to_string(getpid());
        if (has_ipv6())
            kernel_and_program_get_the_same_results("tcp://[::1]:0", 4001, 100, 3);
        for (Client client : {Client::shared, Client::not_upgraded}) {
            kernel_and_program_get_the_same_results("tcp://127.0.0.1:0", 8001, 100, 0, client);
            kernel_and_program_get_the_same_results(path.c_str(), 8101, 100, 0, client);
            unlink(path.c_str() + 7);
            program_that_shares_memory_gets_the_same_results("tcp://0.0.0.0:0", 8201, 100, client == Client::not_upgraded);
            program_that_shares_memory_gets_the_same_results(path.c_str(), 8301, 100, client == Client::not_upgraded);
            unlink(path.c_str() + 7);
        }
        two_kernels_get_the_same_results("tcp://127.0.0.1:0", 6001, 150);
        two_kernels_get_the_same_results(path.c_str(), 7001, 150);
        two_kernels_get_the_same_results("tcp://127.0.0.1:0", 9001, 150, true);
        two_kernels_get_the_same_results(path.c_str(), 9201, 150, true);
    }
    std::printf("%u scripts from %u on, %d failures\n", done, first, failures);
    return failures != 0;
}
