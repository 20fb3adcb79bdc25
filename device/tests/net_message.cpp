// Short messages between ends in device memory, which go in words beside the tail: all lengths and groups, messages that are received
// in parts or not at all before others follow, and memory that was used before. Prints each failure and exits with 1.
#include "net_peer.h"

constexpr unsigned longest = 120;

__host__ __device__ inline unsigned char byte_of(uint64_t at) { return (unsigned char)(at * 11 + (at >> 8) * 5 + 3); }

// Whether the group has the bytes of the stream from `at` on.
template <typename Group>
__device__ bool has_bytes(Group group, const unsigned char *bytes, uint64_t at, int64_t count)
{
    bool right = true;
    for (int64_t i = group.rank(); i < count; i += group.size())
        right = right && bytes[i] == byte_of(at + uint64_t(i));
    return !group.any(!right);
}

template <typename Group>
__device__ bool send_bytes(Group group, const net::Handle &handle, int s, unsigned char *bytes, uint64_t at, unsigned count)
{
    group.sync();
    for (unsigned i = group.rank(); i < count; i += group.size())
        bytes[i] = byte_of(at + i);
    group.sync();
    return net::send(group, handle, s, bytes, count) == int64_t(count);
}

// Waits until so many bytes can be received.
__device__ inline bool waits_for_bytes(net::Handle handle, int s, unsigned count)
{
    __shared__ net::Poll poll;
    const unsigned long long deadline = spinio::nanoseconds() + 300'000'000'000;
    while (__syncthreads_or(spinio::nanoseconds() < deadline)) {
        if (threadIdx.x == 0)
            poll = {s, net::IN, 0, 0, 0};
        __syncthreads();
        net::poll(net::block(), handle, &poll, 1, 0);
        if (poll.in == count)
            return true;
        if (threadIdx.x == 0)
            __nanosleep(100000);
    }
    return false;
}

// Messages of all lengths, each of which comes back. What is received is looked at first, then taken in two parts.
template <typename Group>
__device__ int64_t ask(Group group, const net::Handle &handle, int s, unsigned char *bytes)
{
    uint64_t at = 0;
    int64_t right = 0;
    for (unsigned count = 1; count <= longest; at += count, count++)
        right += send_bytes(group, handle, s, bytes, at, count) && net::recv(group, handle, s, bytes, count, net::WAITALL) == int64_t(count) && has_bytes(group, bytes, at, count);
    return right;
}

template <typename Group>
__device__ int64_t answer(Group group, const net::Handle &handle, int s, unsigned char *bytes)
{
    uint64_t at = 0;
    int64_t right = 0;
    for (unsigned count = 1; count <= longest; at += count, count++) {
        bool good = net::recv(group, handle, s, bytes, longest, net::PEEK) == int64_t(count) && has_bytes(group, bytes, at, count);
        const unsigned part = count > 10 ? count % 10 : 0;
        if (part)
            good = good && net::recv(group, handle, s, bytes, part) == int64_t(part) && has_bytes(group, bytes, at, part);
        group.sync();
        good = good && net::recv(group, handle, s, bytes, longest) == int64_t(count - part) && has_bytes(group, bytes, at + part, count - part);
        right += good && send_bytes(group, handle, s, bytes, at, count);
    }
    return right;
}

// Three messages that are received after all of them are sent, then one and many bytes: the next one may not replace the words, and what
// comes later says that all is in the ring.
__device__ inline int64_t send_unread(const net::Handle &handle, int s, unsigned char *bytes)
{
    auto g = net::block();
    uint64_t at = 0;
    int64_t right = 0;
    const unsigned counts[] = {40, 40, 40, 0, 60, 3000, 0};
    for (unsigned count : counts) {
        // Then the other side has received all.
        right += count ? send_bytes(g, handle, s, bytes, at, count) : net::recv(g, handle, s, bytes, 1) == 1;
        at += count;
    }
    return right;
}

__device__ inline int64_t receive_unread(const net::Handle &handle, int s, unsigned char *bytes)
{
    auto g = net::block();
    int64_t right = 0;
    for (unsigned count : {120u, 3060u})
        right += waits_for_bytes(handle, s, count) && net::recv(g, handle, s, bytes, count, net::WAITALL) == int64_t(count) && has_bytes(g, bytes, right ? 120 : 0, count) && net::send(g, handle, s, bytes, 1) == 1;
    return right;
}

// Calls it with the group of so many threads of the block: the result, -1 for the other threads.
template <typename Call>
__device__ int64_t by_group(int size, Call call)
{
    __syncthreads();
    int64_t result = -1;
    if (size == 1 && threadIdx.x == 0)
        result = call(net::thread());
    else if (size == 32 && threadIdx.x < 32)
        result = call(net::warp());
    else if (size == 64)
        result = call(net::block());
    __syncthreads();
    return result;
}

__global__ void asks(net::Handle handle, net::Address to, int size, int64_t *out)
{
    __shared__ unsigned char bytes[4096];
    int s = connected(net::block(), handle, to);
    const int64_t right = by_group(size, [&](auto group) { return ask(group, handle, s, bytes); });
    const int64_t unread = send_unread(handle, s, bytes);
    net::close(net::block(), handle, s);
    if (threadIdx.x == 0)
        out[0] = right, out[1] = unread;
}

__global__ void answers(net::Handle handle, int listener, int size, int64_t *out)
{
    __shared__ unsigned char bytes[4096];
    int s = net::accept(net::block(), handle, listener);
    const int64_t right = by_group(size, [&](auto group) { return answer(group, handle, s, bytes); });
    const int64_t unread = receive_unread(handle, s, bytes);
    // The words of the other end are those of a message.
    if (threadIdx.x == 0)
        out[2] = right, out[3] = unread, out[4] = int64_t(net::detail::attached_peer(handle, s).theirs->message[0] >> 63);
    net::close(net::block(), handle, s);
}

// Two nets, or twice one, a listening socket of the first one, and kernels at the ends of a connection.
struct Ends {
    Net accepts, connects;
    Net &client;
    std::string address;
    int s;

    explicit Ends(bool two, const char *where = "tcp://127.0.0.1:0", const NetOptions &options = {.ring_bytes = 4096})
        : accepts(options), connects(options), client(two ? connects : accepts), s(listener(accepts, where, address))
    {
    }

    // Launches both kernels, with `more` before the words of the results, and waits for their ends.
    template <typename Accepting, typename Connecting, typename... More>
    int64_t *run(Accepting accepting, Connecting connecting, unsigned threads, More... more)
    {
        spinio::launch_resident_on(accepts.stream, accepting, 1, threads, accepts.handle, s, more..., accepts.words);
        spinio::launch_resident_on(connects.stream, connecting, 1, threads, client.handle, address_of(address), more..., accepts.words);
        accepts.wait();
        connects.wait();
        return accepts.words;
    }
};

// `two`: the ends are of two nets.
static void messages_arrive(const char *where, bool two)
{
    Ends ends(two, where);
    for (int size : {1, 32, 64, 64, 32}) {
        const int64_t *out = ends.run(answers, asks, 64, size);
        CHECK(out[0] == longest && out[1] == 7 && out[2] == longest && out[3] == 2 && out[4] == 1);
        CHECK(others_close(ends.accepts));
    }
    const auto stats = ends.accepts.stats();
    CHECK((two ? stats.peer : stats.upgraded) == 5 && stats.bytes_sent == 0 && stats.violations == 0);
}

// Sends 1000 bytes, whose reply says that they were received, before the word of the other end does: then a whole ring has room.
__global__ void fills_the_ring(net::Handle handle, net::Address to, int64_t *out)
{
    __shared__ unsigned char bytes[4000];
    auto g = net::block();
    int s = connected(g, handle, to);
    bool good = send_bytes(g, handle, s, bytes, 0, 1000) && net::recv(g, handle, s, bytes, 10, net::WAITALL) == 10;
    good = good && send_bytes(g, handle, s, bytes, 1000, 4000);
    const int64_t more = net::send(g, handle, s, bytes, 200, net::DONTWAIT), none = net::send(g, handle, s, bytes, 1, net::DONTWAIT);
    __shared__ net::Poll poll;
    if (threadIdx.x == 0)
        poll = {s, net::OUT, 0, 0, 0};
    __syncthreads();
    const int ready = net::poll(g, handle, &poll, 1, 0);
    net::close(g, handle, s);
    if (threadIdx.x == 0) {
        out[1] = good && more == 96 && none == -EAGAIN && ready == 0 && poll.out == 0;
        spinio::store_release_system(reinterpret_cast<uint64_t *>(out), 1);
    }
}

// Receives the first bytes, replies, and receives nothing until the other side is done.
__global__ void replies_once(net::Handle handle, int listener, int64_t *out)
{
    __shared__ unsigned char bytes[4000];
    auto g = net::block();
    int s = net::accept(g, handle, listener);
    bool good = net::recv(g, handle, s, bytes, 1000, net::WAITALL) == 1000 && send_bytes(g, handle, s, bytes, 0, 10);
    if (threadIdx.x == 0) {
        spinio::Backoff waiting;
        const unsigned long long deadline = spinio::nanoseconds() + 300'000'000'000;
        while (!spinio::load_acquire_system(reinterpret_cast<const uint64_t *>(out)) && spinio::nanoseconds() < deadline)
            waiting.pause();
    }
    __syncthreads();
    good = good && net::recv(g, handle, s, bytes, 4000, net::WAITALL) == 4000 && has_bytes(g, bytes, 1000, 4000);
    net::close(g, handle, s);
    if (threadIdx.x == 0)
        out[2] = good;
}

static void room_is_what_the_other_end_has_said_at_last(bool two)
{
    Ends ends(two);
    const int64_t *out = ends.run(replies_once, fills_the_ring, 64);
    CHECK(out[1] == 1 && out[2] == 1);
}

// Whether the words that an end has written are all of no message.
__device__ inline bool has_no_message(const net::Handle &handle, int s)
{
    for (uint64_t &word : net::detail::attached_peer(handle, s).mine->message)
        if (spinio::load_relaxed_device(&word))
            return false;
    return true;
}

// Receives before it sends. Its first bytes go through the ring, so the words are those of this connection only if they are clear; the
// second reply is in them.
__global__ void replies_twice(net::Handle handle, int listener, int64_t *out)
{
    __shared__ unsigned char bytes[64];
    auto g = net::block();
    const int s = net::accept(g, handle, listener);
    bool good = net::recv(g, handle, s, bytes, 20, net::WAITALL) == 20 && send_bytes(g, handle, s, bytes, 0, 20);
    good = good && net::recv(g, handle, s, bytes, 20, net::WAITALL) == 20;
    const bool clear = has_no_message(handle, s);
    __syncthreads();
    good = good && send_bytes(g, handle, s, bytes, 20, 20);
    const bool written = !has_no_message(handle, s);
    // Until the other end has taken it.
    good = good && net::recv(g, handle, s, bytes, 1) == 0;
    net::close(g, handle, s);
    if (threadIdx.x == 0)
        out[0] = good, out[1] = clear, out[2] = written;
}

__global__ void requests_twice(net::Handle handle, net::Address to, int64_t *out)
{
    __shared__ unsigned char bytes[64];
    auto g = net::block();
    const int s = connected(g, handle, to);
    bool good = true;
    for (unsigned at = 0; at < 40; at += 20)
        good = good && send_bytes(g, handle, s, bytes, at, 20) && net::recv(g, handle, s, bytes, 20, net::WAITALL) == 20 && has_bytes(g, bytes, at, 20);
    net::close(g, handle, s);
    if (threadIdx.x == 0)
        out[3] = good;
}

// The second connection has the memory of the first one.
static void words_of_an_earlier_connection_are_cleared_by_an_end_that_receives_first(bool two)
{
    Ends ends(two, "tcp://127.0.0.1:0", {.connections = 1, .ring_bytes = 4096});
    for (int connection = 0; connection < 3; connection++) {
        const int64_t *out = ends.run(replies_twice, requests_twice, 64);
        CHECK(out[0] == 1 && out[1] == 1 && out[2] == 1 && out[3] == 1);
        CHECK(others_close(ends.accepts));
    }
}

// What a send did to the words of an end: nothing, or all have another tag.
constexpr int64_t words_are_unchanged = 1, words_have_another_tag = 2;

// Sends bytes that are answered: what that did to the words.
__device__ inline int64_t send_and_look(const net::Handle &handle, int s, unsigned char *bytes, uint64_t at, unsigned count)
{
    auto g = net::block();
    const uint64_t *words = net::detail::attached_peer(handle, s).mine->message;
    uint64_t before[spinio::net::layout::message_words];
    unsigned unchanged = 0, others = 0;
    for (unsigned i = 0; i < spinio::net::layout::message_words; i++)
        before[i] = spinio::load_relaxed_device(words + i);
    __syncthreads();
    if (!send_bytes(g, handle, s, bytes, at, count) || net::recv(g, handle, s, bytes, 1) != 1)
        return 0;
    for (unsigned i = 0; i < spinio::net::layout::message_words; i++) {
        const uint64_t after = spinio::load_relaxed_device(words + i);
        unchanged += after == before[i];
        others += (after ^ before[i]) >> 56 != 0;
    }
    return unchanged == spinio::net::layout::message_words ? words_are_unchanged : others == spinio::net::layout::message_words ? words_have_another_tag : 0;
}

// A message, bytes that are too many for one, and bytes that end 128 or 129 after the message: only the latter ones are a message.
__global__ void sends_past_the_tags(net::Handle handle, net::Address to, int64_t *out)
{
    __shared__ unsigned char bytes[128];
    auto g = net::block();
    const int s = connected(g, handle, to);
    uint64_t at = 0;
    unsigned i = 0;
    // The first bytes go through the ring, and clear the words.
    for (unsigned count : {50u, 64u, 100u, 28u, 64u, 100u, 29u}) {
        const int64_t result = send_and_look(handle, s, bytes, at, count);
        at += count;
        if (threadIdx.x == 0)
            out[i] = result;
        i++;
    }
    net::close(g, handle, s);
}

__global__ void answers_each(net::Handle handle, int listener, int64_t *out)
{
    __shared__ unsigned char bytes[128];
    auto g = net::block();
    const int s = net::accept(g, handle, listener);
    uint64_t at = 0;
    bool good = true;
    for (unsigned count : {50u, 64u, 100u, 28u, 64u, 100u, 29u}) {
        good = good && net::recv(g, handle, s, bytes, count, net::WAITALL) == int64_t(count) && has_bytes(g, bytes, at, count) && net::send(g, handle, s, bytes, 1) == 1;
        at += count;
    }
    net::close(g, handle, s);
    if (threadIdx.x == 0)
        out[7] = good;
}

static void bytes_with_the_tag_of_the_last_message_go_through_the_ring(bool two)
{
    Ends ends(two);
    const int64_t *out = ends.run(answers_each, sends_past_the_tags, 64);
    const int64_t same = words_are_unchanged, other = words_have_another_tag, expected[] = {0, other, same, same, other, same, other, 1};
    // The first bytes clear the words.
    for (unsigned i = 1; i < 8; i++)
        CHECK(out[i] == expected[i]);
}

// Waits, on one thread, until a word is as far.
__device__ inline void wait_for_turn(const uint64_t *turn, uint64_t wanted)
{
    spinio::Backoff waiting;
    const unsigned long long deadline = spinio::nanoseconds() + 300'000'000'000;
    while (spinio::load_acquire_system(turn) < wanted && spinio::nanoseconds() < deadline)
        waiting.pause();
}

// A group of one thread, whose send goes on only after the other end has received the message.
struct Pausing : net::Thread {
    uint64_t *turn;

    __device__ explicit Pausing(uint64_t *turn) : turn(turn) {}

    __device__ void sync() const
    {
        spinio::store_release_system(turn, 1);
        wait_for_turn(turn + 1, 1);
    }
};

__global__ void sends_to_a_shut_end(net::Handle handle, net::Address to, int64_t *out)
{
    auto g = net::thread();
    unsigned char bytes[20] = {};
    const int s = connected(g, handle, to);
    const bool good = net::send(g, handle, s, bytes, 10) == 10 && net::recv(g, handle, s, bytes, 1) == 1;
    out[2] = net::send(Pausing(reinterpret_cast<uint64_t *>(out)), handle, s, bytes, 20);
    net::close(g, handle, s);
    out[3] = good;
}

// Its reply says what it has received, but not that it wants no more. It receives the message nevertheless, and says so.
__global__ void receives_though_shut(net::Handle handle, int listener, int64_t *out)
{
    auto g = net::thread();
    auto turn = reinterpret_cast<uint64_t *>(out);
    unsigned char bytes[20] = {};
    const int s = net::accept(g, handle, listener);
    bool good = net::recv(g, handle, s, bytes, 10, net::WAITALL) == 10 && net::shutdown(g, handle, s, net::SHUT_RECEIVE) == 0;
    good = good && net::send(g, handle, s, bytes, 1) == 1;
    wait_for_turn(turn, 1);
    out[4] = net::recv(g, handle, s, bytes, 20);
    good = good && net::shutdown(g, handle, s, net::SHUT_RECEIVE) == 0;
    spinio::store_release_system(turn + 1, 1);
    // Until the other end is closed.
    net::Poll poll = {s, net::HUP, 0, 0, 0};
    good = good && net::shutdown(g, handle, s, net::SHUT_SEND) == 0 && net::poll(g, handle, &poll, 1, 300'000'000'000) == 1;
    out[5] = net::recv(g, handle, s, bytes, 20);
    net::close(g, handle, s);
    out[6] = good;
}

// `sent`: what the send returns, as with Linux.
static void message_is_received_while_its_send_goes_on(const char *where, bool two, int64_t sent)
{
    Ends ends(two, where);
    const int64_t *out = ends.run(receives_though_shut, sends_to_a_shut_end, 1);
    CHECK(out[2] == sent && out[3] == 1);
    CHECK(out[4] == 20 && out[5] == 0 && out[6] == 1);
}

int main()
{
    message_is_received_while_its_send_goes_on("tcp://127.0.0.1:0", false, 20);
    message_is_received_while_its_send_goes_on("tcp://127.0.0.1:0", true, 20);
    message_is_received_while_its_send_goes_on("unix:@", false, -EPIPE);
    bytes_with_the_tag_of_the_last_message_go_through_the_ring(false);
    bytes_with_the_tag_of_the_last_message_go_through_the_ring(true);
    words_of_an_earlier_connection_are_cleared_by_an_end_that_receives_first(false);
    words_of_an_earlier_connection_are_cleared_by_an_end_that_receives_first(true);
    room_is_what_the_other_end_has_said_at_last(false);
    room_is_what_the_other_end_has_said_at_last(true);
    messages_arrive("tcp://127.0.0.1:0", false);
    messages_arrive("unix:@", false);
    messages_arrive("tcp://127.0.0.1:0", true);
    std::printf("%d failures\n", failures);
    return failures != 0;
}
