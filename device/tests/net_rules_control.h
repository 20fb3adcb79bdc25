// net_rules_control.h: the sections of net_rules.cpp about event sets, mailboxes, the doorbell queue, and words that are wrong.
#ifndef NET_RULES_CONTROL_H
#define NET_RULES_CONTROL_H

// Blocks that wait here go on at the same time. It orders nothing else.
__device__ void meet(uint64_t *arrived, unsigned blocks)
{
    if (threadIdx.x == 0) {
        uint64_t end = (__atomic_fetch_add(arrived, 1, __ATOMIC_RELAXED) / blocks + 1) * blocks;
        while (__atomic_load_n(arrived, __ATOMIC_RELAXED) < end)
            sched_yield();
    }
    __syncthreads();
}

constexpr int event_count = 1500;

// Takes events until it has seen an end. What an event is about was written before it.
__global__ void take_events(net::Handle handle, const uint64_t *payload, int64_t *seen, int64_t *wrong)
{
    __shared__ net::Ready ready[3];
    for (;;) {
        int count = net::wait(net::block(), handle, 1, ready, int(blockIdx.x) + 1, -1);
        if (count < 0)
            return;
        for (int i = int(threadIdx.x); i < count; i += int(blockDim.x)) {
            __atomic_fetch_add(&seen[ready[i].events], 1, __ATOMIC_RELAXED);
            // The payload of an event, and its listener, belong to it.
            if (payload[ready[i].events] != uint64_t(ready[i].events) * 3)
                __atomic_fetch_add(wrong, 1, __ATOMIC_RELAXED);
        }
        __syncthreads();
    }
}

struct Producer {
    Proxy &proxy;
    uint64_t tail = 0;

    explicit Producer(Proxy &proxy) : proxy(proxy) { release(words() + layout::event_made, 1); }
    uint64_t *words() const { return net::detail::event_words(proxy.handle, 1); }
    uint64_t taken() const { return acquire(words() + layout::event_taken); }

    bool push(int events, uint64_t listener = 0)
    {
        if (tail - taken() >= layout::events)
            return false;
        uint64_t *entry = net::detail::event_ring(proxy.handle, 1) + tail % layout::events * 2;
        uint64_t lap = tail / layout::events % 2 ? 0 : layout::lap_bit;
        release(entry + 1, listener);
        release(entry, uint64_t(Proxy::descriptor(1)) | uint64_t(events) << 32 | lap);
        tail++;
        return true;
    }
};

static void each_event_goes_to_one_group()
{
    Proxy proxy;
    Producer producer(proxy);
    std::vector<uint64_t> payload(event_count);
    std::vector<int64_t> seen(event_count);
    int64_t wrong = 0;
    std::thread kernel = start(take_events, 3, 32, proxy.handle, (const uint64_t *)payload.data(), seen.data(), &wrong);
    for (int i = 0; i < event_count;) {
        payload[size_t(i)] = uint64_t(i) * 3;
        if (producer.push(i))
            i++;
        else
            std::this_thread::yield();
        // Now and then all groups wait.
        if (i % 300 == 0)
            std::this_thread::sleep_for(std::chrono::milliseconds(3));
    }
    auto *set = net::detail::device_set(proxy.handle, 1);
    while (acquire(&set->head) != uint64_t(event_count))
        std::this_thread::yield();
    proxy.stop();
    kernel.join();
    for (int64_t times : seen)
        wrong += times != 1;
    CHECK(wrong == 0);
    // The proxy is told in quarters.
    CHECK(producer.taken() <= uint64_t(event_count) && uint64_t(event_count) - producer.taken() < layout::events / 4);
}

// Takes events of a full ring, one at a time, while others do the same.
__global__ void drain(net::Handle handle, const uint64_t *payload, int64_t *seen, int64_t *wrong, uint64_t *arrived)
{
    net::Ready ready;
    meet(arrived, gridDim.x);
    while (net::wait(net::thread(), handle, 1, &ready, 1, 0) == 1) {
        __atomic_fetch_add(&seen[ready.events], 1, __ATOMIC_RELAXED);
        if (payload[ready.events] != uint64_t(ready.events) * 3)
            __atomic_fetch_add(wrong, 1, __ATOMIC_RELAXED);
    }
}

static void many_groups_take_from_a_full_ring()
{
    Proxy proxy;
    Producer producer(proxy);
    int64_t wrong = 0;
    uint64_t together = 0, alone = 0;
    for (int round = 0; round < 40; round++) {
        std::vector<uint64_t> payload(layout::events);
        std::vector<int64_t> seen(layout::events);
        for (unsigned i = 0; i < layout::events; i++) {
            payload[i] = i * 3;
            CHECK(producer.push(int(i)));
        }
        run_resident(drain, 4, 1, proxy.handle, (const uint64_t *)payload.data(), seen.data(), &wrong, &together);
        // One that has found the ring locked and empty has left events to another one, which may have left before it.
        run_resident(drain, 1, 1, proxy.handle, (const uint64_t *)payload.data(), seen.data(), &wrong, &alone);
        for (int64_t times : seen)
            CHECK(times == 1);
    }
    CHECK(wrong == 0);
}

// Block 0 moves an event to the copies, block 1 claims it: only the tail of the copies orders the two.
__global__ void gather_and_claim(net::Handle handle, uint64_t *payload, uint64_t *arrived, int64_t *right)
{
    layout::DeviceSet *set = net::detail::device_set(handle, 1);
    meet(arrived, 2);
    if (blockIdx.x == 0) {
        while (!net::detail::gather_events(handle, 1, set))
            sched_yield();
        return;
    }
    net::Ready ready;
    int count = 0;
    while (!net::detail::claim_events(handle, set, &ready, 1, count))
        sched_yield();
    *right = count == 1 && payload[0] == 7;
}

static void copies_are_published_by_their_tail()
{
    Proxy proxy;
    Producer producer(proxy);
    for (int round = 0; round < 20; round++) {
        uint64_t payload = 0, arrived = 0;
        int64_t right = 0;
        std::thread kernel = start(gather_and_claim, 2, 1, proxy.handle, &payload, &arrived, &right);
        while (__atomic_load_n(&arrived, __ATOMIC_RELAXED) < 2)
            std::this_thread::yield();
        payload = 7;
        CHECK(producer.push(net::IN));
        kernel.join();
        CHECK(right == 1);
    }
}

__global__ void wait_once(net::Handle handle, net::Ready *ready, int64_t *out)
{
    int64_t count = net::wait(net::thread(), handle, 1, ready, 1, 0);
    out[0] = count;
}

static void entries_of_two_rounds_are_told_apart()
{
    Proxy proxy;
    Producer producer(proxy);
    net::Ready ready = {};
    int64_t got = 0;
    for (unsigned i = 0; i < layout::events + 2; i++) {
        CHECK(producer.push(net::NEW, uint64_t(Proxy::descriptor(2))));
        run_resident(wait_once, 1, 1, proxy.handle, &ready, &got);
        CHECK(got == 1 && ready.events == net::NEW && ready.s == Proxy::descriptor(1) && ready.listener == Proxy::descriptor(2));
        run_resident(wait_once, 1, 1, proxy.handle, &ready, &got);
        CHECK(got == 0);
    }
    // An event of a socket that is closed meanwhile is left out.
    CHECK(producer.push(net::IN));
    release(&proxy.socket(1)->state, uint64_t(Proxy::epoch) << 2 | layout::state_closed);
    run_resident(wait_once, 1, 1, proxy.handle, &ready, &got);
    CHECK(got == 0);
}

static void all_places_of_a_ring_are_used_again()
{
    Proxy proxy;
    Producer producer(proxy);
    net::Ready ready = {};
    int64_t got = 0;
    for (unsigned i = 0; i < 3 * layout::events; i++) {
        CHECK(producer.push(net::IN));
        if (i % layout::events == layout::events - 1)
            for (unsigned k = 0; k < layout::events; k++)
                run_resident(wait_once, 1, 1, proxy.handle, &ready, &got);
    }
    CHECK(producer.taken() == 3 * layout::events);
}

__global__ void write_and_arm(net::Handle handle, uint64_t *words, int rounds)
{
    auto g = net::block();
    for (int i = 0; i < rounds; i++) {
        words[unsigned(i) * blockDim.x + threadIdx.x] = uint64_t(i);
        net::rearm(g, handle, Proxy::descriptor(0));
    }
}

static void rearm_comes_after_what_the_group_did()
{
    Proxy proxy;
    const unsigned rounds = 20, threads = 64;
    std::vector<uint64_t> words(rounds * threads, 99);
    std::thread kernel = start(write_and_arm, 1, threads, proxy.handle, words.data(), int(rounds));
    for (unsigned i = 0; i < rounds; i++) {
        CHECK(proxy.hear().operation == layout::doorbell_rearm);
        for (unsigned k = 0; k < threads; k++)
            CHECK(words[i * threads + k] == i);
    }
    kernel.join();
}

// Sends each datagram that it has received, and then receives one that is impossible.
__global__ void echo_datagrams(net::Handle handle, int count, int64_t *out)
{
    __shared__ unsigned char buffer[500];
    const int s = Proxy::descriptor(blockIdx.x);
    auto g = net::block();
    int64_t right = 0;
    for (int i = 0; i < count; i++) {
        int64_t got = net::recv(g, handle, s, buffer, sizeof buffer);
        right += got > 0 && net::send(g, handle, s, buffer, size_t(got)) == got;
    }
    int64_t failed = net::recv(g, handle, s, buffer, sizeof buffer);
    if (threadIdx.x == 0) {
        out[blockIdx.x * 2] = right;
        out[blockIdx.x * 2 + 1] = failed;
    }
}

static void datagrams_are_ordered_too()
{
    Proxy proxy;
    for (unsigned index = 0; index < 2; index++)
        proxy.open(index, Proxy::epoch, net::DGRAM);
    const int count = 60;
    int64_t out[4] = {}, wrong = 0;
    std::thread kernel = start(echo_datagrams, 2, 64, proxy.handle, count, out);
    // A record begins at a multiple of 16 of its position.
    uint64_t at[2] = {Proxy::first, Proxy::first}, sent[2] = {Proxy::first, Proxy::first};
    auto word = [&](unsigned char &byte) -> uint64_t & { return reinterpret_cast<uint64_t &>(byte); };
    for (int i = 0; i < count; i++) {
        const uint64_t bytes = 1 + uint64_t(i) * 53 % 480, padded = (bytes + 15) / 16 * 16;
        for (unsigned index = 0; index < 2; index++) {
            const uint64_t header[] = {bytes, 0, 0, bytes};
            for (unsigned k = 0; k < 4; k++)
                word(proxy.received(index, at[index] + k * 8)) = header[k];
            for (uint64_t k = 0; k < bytes; k++)
                proxy.received(index, at[index] + 32 + k) = byte_of(k + uint64_t(i) + index);
            release(proxy.device_line(index), at[index] = add(at[index], 32 + padded));
        }
        for (unsigned turn = 0; turn < 2; turn++) {
            Bell bell = proxy.hear();
            const unsigned index = bell.socket & 1;
            CHECK(bell.operation == layout::doorbell_send && word(proxy.sent(index, sent[index])) == bytes);
            for (uint64_t k = 0; k < bytes; k++)
                wrong += proxy.sent(index, sent[index] + 32 + k) != byte_of(k + uint64_t(i) + index);
            CHECK(bell.position == add(sent[index], 32 + padded));
            release(proxy.device_line(index) + 1, sent[index] = bell.position);
        }
    }
    for (unsigned index = 0; index < 2; index++) {
        word(proxy.received(index, at[index])) = 300;
        release(proxy.device_line(index), add(at[index], 48));
    }
    kernel.join();
    CHECK(wrong == 0);
    for (unsigned index = 0; index < 2; index++)
        CHECK(out[index * 2] == count && out[index * 2 + 1] == -EPROTO);
}

__global__ void sink_datagrams(net::Handle handle, int count, int64_t *right)
{
    __shared__ unsigned char buffer[500];
    for (int i = 0; i < count; i++) {
        int64_t got = net::recv(net::block(), handle, Proxy::descriptor(0), buffer, sizeof buffer);
        bool same = got == 400;
        for (int64_t k = 0; k < got; k++)
            same = same && buffer[k] == byte_of(uint64_t(i) + uint64_t(k));
        if (!__syncthreads_count(!same) && threadIdx.x == 0)
            ++*right;
    }
}

// Nothing but the consumed position tells when a record can be replaced.
static void datagrams_are_replaced_once_they_were_taken()
{
    Proxy proxy;
    proxy.open(0, Proxy::epoch, net::DGRAM);
    const int count = 80;
    const uint64_t record = 432;
    int64_t right = 0;
    std::thread kernel = start(sink_datagrams, 1, 64, proxy.handle, count, &right);
    for (uint64_t i = 0; i < count; i++) {
        for (;;) {
            uint64_t word = acquire(proxy.host_line(0)), taken = word >> 48 ? (word - Proxy::first) & layout::position_mask : 0;
            if ((i + 1) * record - taken <= Proxy::ring)
                break;
            std::this_thread::yield();
        }
        uint64_t at = add(Proxy::first, i * record);
        const uint64_t header[] = {400, 0, 0, 400};
        for (unsigned k = 0; k < 4; k++)
            reinterpret_cast<uint64_t &>(proxy.received(0, add(at, k * 8))) = header[k];
        for (uint64_t k = 0; k < 400; k++)
            proxy.received(0, add(at, 32 + k)) = byte_of(i + k);
        release(proxy.device_line(0), add(at, record));
    }
    kernel.join();
    CHECK(right == count);
}

__global__ void call_often(net::Handle handle, int calls, int64_t *wrong, int64_t *sum)
{
    for (int i = 0; i < calls; i++) {
        __shared__ net::Address from;
        int64_t result = net::accept(net::block(), handle, Proxy::descriptor(3), &from);
        if (threadIdx.x == 0 && (result <= 0 || from.length != 16 || from.bytes[0] != (unsigned char)(result * 3)))
            __atomic_fetch_add(wrong, 1, __ATOMIC_RELAXED);
        if (threadIdx.x == 0)
            __atomic_fetch_add(sum, result, __ATOMIC_RELAXED);
    }
}

// All calls that wait share one mailbox here. The reply is that of this call, with its address.
static void mailboxes_belong_to_one_call()
{
    Proxy proxy;
    const int blocks = 3, calls = 60;
    int64_t wrong = 0, sum = 0;
    std::thread kernel = start(call_often, blocks, 32, proxy.handle, calls, &wrong, &sum);
    for (uint64_t number = 1; number <= blocks * calls; number++) {
        Bell bell = proxy.hear();
        CHECK(bell.operation == layout::doorbell_control && bell.socket == layout::quick_mailboxes);
        uint64_t *request = proxy.mailbox(bell.socket), *reply = request + layout::line_bytes / 8;
        CHECK(request[0] >> 32 == number && (request[0] & 0xff) == layout::call_accept && uint32_t(request[1]) == uint32_t(Proxy::descriptor(3)));
        reply[1] = 16;
        for (unsigned i = 2; i < 16; i++)
            reply[i] = (number * 3 & 0xff) * 0x0101010101010101;
        release(reply, number | number << 32);
    }
    kernel.join();
    // Each call has a reply of its own, none that of an earlier one.
    CHECK(wrong == 0 && sum == blocks * calls * (blocks * calls + 1) / 2);
}

// One call on socket 0: 0 recv, 1 send of 200 bytes, 2 recv of at most 10, 3 shutdown of sending.
__global__ void call_once(net::Handle handle, int what, int s, int flags, int64_t *out)
{
    __shared__ unsigned char buffer[200];
    auto g = net::block();
    int64_t result = 0;
    if (what == 0 || what == 2)
        result = net::recv(g, handle, s, buffer, what ? 10 : 200, flags);
    else if (what == 1)
        result = net::send(g, handle, s, buffer, 200, flags);
    else if (what == 3)
        result = net::shutdown(g, handle, s, net::SHUT_SEND);
    if (threadIdx.x == 0)
        *out = result;
}

static int64_t call_alone(const Proxy &proxy, int what, int s = Proxy::descriptor(0), int flags = net::DONTWAIT)
{
    int64_t result = 0;
    for (unsigned threads : {1u, 64u}) {
        int64_t before = result;
        run_resident(call_once, 1, threads, proxy.handle, what, s, flags, &result);
        CHECK(threads == 1 || result == before);
    }
    return result;
}

static void words_of_lines_are_checked()
{
    const uint64_t first = Proxy::first;
    {
        Proxy proxy;
        CHECK(call_alone(proxy, 0) == -EAGAIN);
        release(proxy.device_line(0), add(first, Proxy::ring + 1));
        CHECK(call_alone(proxy, 0) == -EPROTO);
        // Bytes come before an error, and an error before the end.
        release(proxy.device_line(0) + 1, first | uint64_t(ECONNRESET) << layout::position_bits);
        release(proxy.device_line(0), add(first, 20) | layout::flag_err | layout::flag_eof);
        CHECK(call_alone(proxy, 2) == 10 && call_alone(proxy, 2) == -ECONNRESET);
    }
    {
        // A new socket has no room before it has seen its line.
        Proxy proxy;
        release(proxy.device_line(0) + 1, first | uint64_t(ENOTCONN) << layout::position_bits);
        CHECK(call_alone(proxy, 1) == -ENOTCONN);
        // More sent than there was.
        release(proxy.device_line(0) + 1, add(first, 1));
        CHECK(call_alone(proxy, 1) == -EPROTO);
    }
    {
        // A credit is rung only for a proxy that waits for room, with the epoch, and after the position.
        Proxy proxy;
        Bell bell;
        int64_t result;
        release(proxy.device_line(0), add(first, 30));
        run_resident(call_once, 1, 32, proxy.handle, 2, Proxy::descriptor(0), 0, &result);
        CHECK(result == 10 && !proxy.hear(bell));
        release(proxy.device_line(0), add(first, 30) | layout::flag_full);
        run_resident(call_once, 1, 32, proxy.handle, 2, Proxy::descriptor(0), 0, &result);
        CHECK(result == 10 && proxy.hear(bell) && bell.operation == layout::doorbell_credit && bell.epoch == Proxy::epoch);
        CHECK(acquire(proxy.host_line(0)) == (add(first, 20) | uint64_t(Proxy::epoch) << layout::position_bits));
    }
    {
        // Every wait looks at the stop word.
        Proxy proxy;
        proxy.stop();
        CHECK(call_alone(proxy, 0, Proxy::descriptor(0), 0) == -ESHUTDOWN);
    }
}

__global__ void ring_bells(net::Handle handle, int count, int64_t *out, uint64_t *arrived)
{
    meet(arrived, gridDim.x);
    out += blockIdx.x * 3;
    spinio::emulation::HostAccesses before = spinio::emulation::host_accesses;
    int64_t failed = 0;
    int done = 0;
    for (; done < count && !failed; done++)
        failed = net::detail::ring(handle, layout::doorbell_rearm, uint32_t(done), 1, 0);
    out[0] = done;
    out[1] = failed;
    out[2] = int64_t(spinio::emulation::host_accesses.releases - before.releases);
}

// A full queue refuses, and its places are used again only once the proxy says so.
static void full_queues_refuse()
{
    Proxy proxy;
    int64_t out[3] = {};
    uint64_t arrived = 0;
    run_resident(ring_bells, 1, 1, proxy.handle, int(layout::doorbells), out, &arrived);
    // Each with one fence.
    CHECK(out[0] == layout::doorbells && out[1] == 0 && out[2] == layout::doorbells);
    proxy.stop();
    run_resident(ring_bells, 1, 1, proxy.handle, 1, out, &arrived);
    CHECK(out[1] == -ESHUTDOWN);
    for (unsigned i = 0; i < layout::doorbells; i++) {
        Bell bell;
        CHECK(proxy.hear(bell) && bell.socket == i);
    }
    Bell bell;
    CHECK(!proxy.hear(bell));
    run_resident(ring_bells, 1, 1, proxy.handle, 10, out, &arrived);
    CHECK(out[0] == 10 && out[1] == 0);
    for (unsigned i = 0; i < 10; i++)
        CHECK(proxy.hear(bell) && bell.socket == i);
    CHECK(!proxy.hear(bell));
    // Of several blocks each has a place of its own.
    std::vector<int64_t> outs(3 * 4);
    release(proxy.words(0) + layout::header_stop, 0);
    arrived = 0;
    std::thread kernel = start(ring_bells, 4, 1, proxy.handle, 10000, outs.data(), &arrived);
    unsigned next_of[10000] = {};
    for (unsigned i = 0; i < 4 * 10000; i++)
        next_of[proxy.hear().socket]++;
    kernel.join();
    CHECK(!proxy.hear(bell));
    for (unsigned times : next_of)
        CHECK(times == 4);
}

__global__ void send_and_close(net::Handle handle, size_t bytes, int64_t *out)
{
    __shared__ unsigned char buffer[100];
    if (threadIdx.x == 0)
        std::memset(buffer, 1, sizeof buffer);
    __syncthreads();
    int64_t sent = bytes ? net::send(net::block(), handle, Proxy::descriptor(0), buffer, bytes) : 0;
    int64_t closed = net::close(net::block(), handle, Proxy::descriptor(0));
    if (threadIdx.x == 0)
        out[0] = sent, out[1] = closed;
}

// The proxy may see it first.
static void close_and_shutdown_say_how_far_was_sent()
{
    for (size_t bytes : {size_t(0), size_t(100)}) {
        Proxy proxy;
        int64_t out[2] = {-1, -1};
        run_resident(send_and_close, 1, 32, proxy.handle, bytes, out);
        CHECK(out[0] == int64_t(bytes) && out[1] == 0);
        if (bytes)
            CHECK(proxy.hear().operation == layout::doorbell_send);
        const Bell bell = proxy.hear();
        CHECK(bell.operation == layout::doorbell_close && bell.epoch == Proxy::epoch && bell.position == add(Proxy::first, bytes));
    }
    // So may a shutdown, which waits for its answer.
    Proxy proxy;
    int64_t sent = 0, done = 0;
    run_resident(call_once, 1, 32, proxy.handle, 1, Proxy::descriptor(0), 0, &sent);
    std::thread kernel = start(call_once, 1, 32, proxy.handle, 3, Proxy::descriptor(0), 0, &done);
    CHECK(proxy.hear().operation == layout::doorbell_send && sent == 200);
    const Bell bell = proxy.hear();
    CHECK(bell.operation == layout::doorbell_control && bell.position == add(Proxy::first, 200));
    uint64_t *reply = proxy.mailbox(bell.socket) + layout::line_bytes / 8;
    release(reply, uint64_t(1) << 32);
    kernel.join();
    CHECK(done == 0);
}

__global__ void fill_together(net::Handle handle, int s, int64_t *wrong, uint64_t *arrived)
{
    meet(arrived, gridDim.x);
    if (net::detail::find(handle, s) || net::detail::device_socket(handle, s)->receive_ring == 0)
        __atomic_fetch_add(wrong, 1, __ATOMIC_RELAXED);
}

static void descriptors_are_checked()
{
    Proxy proxy;
    const int wrong[] = {0, -1, Proxy::descriptor(0, 0), Proxy::descriptor(0, Proxy::epoch + 1), Proxy::descriptor(0, Proxy::epoch - 1),
                         Proxy::descriptor(Proxy::sockets)};
    for (int s : wrong)
        CHECK(call_alone(proxy, 0, s) == -EBADF && call_alone(proxy, 1, s) == -EBADF);
    CHECK(call_alone(proxy, 0) == -EAGAIN);
    // A direction that another call has locked.
    const uint64_t locked = net::detail::locked_bit | net::detail::free_lock(Proxy::descriptor(0), 7);
    release(&proxy.socket(0)->receive_lock, locked);
    CHECK(call_alone(proxy, 0) == -EAGAIN && proxy.socket(0)->receive_lock == locked);
    // A call that waits for a lock sees that the descriptor is closed.
    int64_t late = 0;
    std::thread waiting = start(call_once, 1, 32, proxy.handle, 0, Proxy::descriptor(0), 0, &late);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    release(&proxy.socket(0)->state, uint64_t(Proxy::epoch) << 2 | layout::state_closed);
    waiting.join();
    CHECK(late == -EBADF && proxy.socket(0)->receive_lock == locked);
    // The first calls of the next socket of the place, at the same time: one fills in what the others use.
    int64_t missing = 0;
    uint64_t arrived = 0;
    for (unsigned epoch = Proxy::epoch + 1; epoch < Proxy::epoch + 40; epoch++) {
        proxy.open(0, epoch);
        run_resident(fill_together, 4, 1, proxy.handle, Proxy::descriptor(0, epoch), &missing, &arrived);
    }
    CHECK(missing == 0);
}

#endif
