// Kernels that connect to what is no net, or one that breaks the rules: doors whose holders leave in each step, offer what is none,
// or say what may not come; words and packets that are wrong. And programs that do so to a net which has device memory for others.
// Prints each failure and exits with 1.
#include "net_granule.h"
#include "net_process.h"

__global__ void close_socket(net::Handle handle, int s) { net::close(net::block(), handle, s); }

static void close_in_a_kernel(Net &net, int s)
{
    spinio::launch_resident_on(net.stream, close_socket, 1, 32, net.handle, s);
    net.wait();
}

__global__ void echo(net::Handle handle, int listener)
{
    __shared__ char buffer[3000];
    int s = net::accept(net::block(), handle, listener);
    int64_t got;
    while ((got = net::recv(net::block(), handle, s, buffer, sizeof buffer)) > 0)
        net::send(net::block(), handle, s, buffer, size_t(got));
    net::close(net::block(), handle, s);
}

// A process that listens, with a door, and goes as many steps as it wants as a net would.
struct RawNet {
    int listening, door, channel = -1, anchor = -1, memory = -1, own = -1, theirs = -1;
    volatile uint64_t *words = nullptr;
    // Device memory, emulated: what the kernel stores there, and where this end stores; and the number of that.
    volatile uint64_t *near = nullptr, *far = nullptr;
    uint64_t number = 0;
    std::string address;

    RawNet()
    {
        sockaddr_in at;
        listening = listening_socket(at);
        address = text_of(at);
        door = door_socket(address, true);
    }

    // 0: closes, 1: answers, 2: offers, 3: says go.
    void goes(int steps)
    {
        channel = accept(door, nullptr, nullptr);
        std::string announced = take_packet(channel);
        CHECK(announced.size() == 24 && announced[8] == 1);
        if (steps > 0)
            give_packet(channel, packet(2));
        if (steps > 1) {
            anchor = accept(listening, nullptr, nullptr);
            memory = memfd_create("spinio-raw", MFD_ALLOW_SEALING);
            CHECK(!ftruncate(memory, 4096 * 3) && !fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK));
            words = static_cast<uint64_t *>(mmap(nullptr, 4096 * 3, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0));
            give_packet(channel, packet(4, 12 | 1 << 8, (uint64_t(1) << 48) - 1000), memory);
        }
        if (steps > 2) {
            CHECK(take_packet(channel) == packet(5));
            give_packet(channel, packet(6));
        }
    }

    // Offers device memory too, `bytes` of it with rings of this size, as number `of` of a net. Without an answer to it: false.
    bool offers_memory(uint64_t generation, uint64_t of, size_t bytes = 2 << 20, uint64_t ring_log2 = 12)
    {
        goes(1);
        anchor = accept(listening, nullptr, nullptr);
        memory = memfd_create("spinio-raw", MFD_ALLOW_SEALING);
        own = memfd_create("spinio-raw", MFD_ALLOW_SEALING);
        CHECK(!ftruncate(memory, 4096 * 3) && !fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK));
        CHECK(!ftruncate(own, off_t(bytes)) && !fcntl(own, F_ADD_SEALS, F_SEAL_SHRINK));
        words = static_cast<uint64_t *>(mmap(nullptr, 4096 * 3, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0));
        give_packet(channel, packet(4, 12 | generation << 8 | ring_log2 << 32, (uint64_t(1) << 48) - 1000), memory);
        if (ring_log2 < 12 || ring_log2 > 20) {
            CHECK(take_packet(channel).empty());
            return false;
        }
        give_packet(channel, packet(8, uint64_t(getpid()), of), own);
        std::string answer = take_packet(channel, &theirs);
        if (answer == packet(5))
            return false;
        CHECK(answer.size() == 24 && answer[7] == 8 && theirs >= 0 && take_packet(channel) == packet(5));
        std::memcpy(&number, answer.data() + 16, 8);
        near = static_cast<uint64_t *>(mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, own, 0));
        far = static_cast<uint64_t *>(mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, theirs, 0));
        return true;
    }

    ~RawNet()
    {
        for (auto at : {near, far})
            if (at)
                munmap(const_cast<uint64_t *>(at), 8192);
        if (words)
            munmap(const_cast<uint64_t *>(words), 4096 * 3);
        for (int fd : {listening, door, channel, anchor, memory, own, theirs})
            if (fd >= 0)
                close(fd);
    }
};

__global__ void receive_until_end(net::Handle handle, int s, int64_t *out)
{
    __shared__ char buffer[300];
    int64_t got, total = 0;
    while ((got = net::recv(net::block(), handle, s, buffer, sizeof buffer)) > 0)
        total += got;
    int64_t sent = 0;
    for (int tries = 0; sent >= 0 && tries < 1000; tries++)
        sent = net::send(net::block(), handle, s, buffer, sizeof buffer, net::DONTWAIT);
    net::close(net::block(), handle, s);
    if (threadIdx.x == 0)
        out[0] = total, out[1] = got, out[2] = sent;
}

// A net that leaves, offers what is none, or says what may not come: the connection goes through Linux, and no byte is lost.
static void kernel_does_not_trust_the_holder_of_a_door()
{
    for (int what = 0; what < 9; what++) {
        Net connects;
        RawNet net;
        std::thread holder([&] {
            if (what < 3) {
                // It ends after each step but the last one.
                net.goes(what);
            } else {
                net.goes(what == 3 ? 0 : 1);
                // Memory that can shrink, that is too short, whose positions begin elsewhere; none.
                int file = what >= 4 && what <= 6 ? memfd_create("x", MFD_ALLOW_SEALING) : -1;
                if (file >= 0)
                    CHECK(!ftruncate(file, what == 5 ? 4096 : 4096 * 3) && (what == 4 || !fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK)));
                const std::string bytes = what == 3 ? packet(3, 2) : what < 8 ? packet(4, 12 | 1 << 8, (uint64_t(1) << 48) - (what == 6 ? 999 : 1000)) : packet(6);
                give_packet(net.channel, bytes, file);
                if (file >= 0)
                    close(file);
                // The other one leaves, and does not agree.
                CHECK(take_packet(net.channel).empty());
            }
            close(net.channel);
            net.channel = -1;
        });
        int s = spinio_net_connect(connects.net, net.address.c_str());
        holder.join();
        CHECK(s > 0 && connects.stats().shared == 0 && connects.stats().connected == 1);
        // None looks like one for which this process had no number left.
        const auto stats = connects.stats();
        CHECK(what == 7 ? stats.kept_by_descriptors == 1 : stats.kept_by_time + stats.kept_by_backlog == 1);
        if (net.anchor < 0)
            net.anchor = accept(net.listening, nullptr, nullptr);
        CHECK(send(net.anchor, "hello", 5, MSG_NOSIGNAL) == 5 && !shutdown(net.anchor, SHUT_WR));
        spinio::launch_resident_on(connects.stream, receive_until_end, 1, 32, connects.handle, s, connects.words);
        for (char bytes[300]; recv(net.anchor, bytes, sizeof bytes, 0) > 0;) {
        }
        connects.wait();
        CHECK(connects.words[0] == 5 && connects.words[1] == 0);
    }
}

// A holder that never answers, and one that goes on after the connecting side has left: bounded, and the two agree.
static void kernel_does_not_wait_for_the_holder_of_a_door()
{
    Net connects;
    RawNet net;
    std::thread holder([&] {
        net.channel = accept(net.door, nullptr, nullptr);
        // Announced, and then the end.
        take_packet(net.channel);
        CHECK(take_packet(net.channel).empty());
    });
    CHECK(spinio_net_connect(connects.net, net.address.c_str()) > 0 && connects.stats().kept_by_time == 1);
    holder.join();
}

// One memory for two connections: the second one goes through Linux.
static void memory_is_for_one_connection()
{
    Net connects;
    RawNet one, two;
    std::thread holder([&] {
        one.goes(3);
        two.goes(1);
        two.anchor = accept(two.listening, nullptr, nullptr);
        give_packet(two.channel, packet(4, 12 | 2 << 8, (uint64_t(1) << 48) - 1000), one.memory);
        CHECK(take_packet(two.channel).empty());
    });
    CHECK(spinio_net_connect(connects.net, one.address.c_str()) > 0 && spinio_net_connect(connects.net, two.address.c_str()) > 0);
    holder.join();
    CHECK(connects.stats().shared == 1 && connects.stats().connected == 2 && connects.stats().kept_by_time == 1);
}

// Memory that is known is offered again, with rings of another size.
static void memory_has_the_size_that_it_had()
{
    Net connects;
    RawNet one;
    std::thread holder([&] { one.goes(3); });
    int s = spinio_net_connect(connects.net, one.address.c_str());
    holder.join();
    close_in_a_kernel(connects, s);
    close(one.channel);
    one.channel = -1;
    waits_for_open(connects, 0);
    for (uint64_t ring_log2 : {13, 76, 255}) {
        RawNet two;
        holder = std::thread([&] {
            two.goes(1);
            two.anchor = accept(two.listening, nullptr, nullptr);
            give_packet(two.channel, packet(4, ring_log2 | 2 << 8, (uint64_t(1) << 48) - 1000), one.memory);
            CHECK(take_packet(two.channel).empty());
        });
        CHECK(spinio_net_connect(connects.net, two.address.c_str()) > 0);
        holder.join();
    }
    CHECK(connects.stats().shared == 1 && connects.stats().connected == 4 && connects.stats().kept_by_time == 3);
}

static void net_that_breaks_the_rules_ends_its_own_connection_only()
{
    Net accepts, connects;
    std::string address;
    int s = listener(accepts, "tcp://127.0.0.1:0", address);
    int honest = spinio_net_connect(connects.net, address.c_str());
    CHECK(honest > 0 && connects.stats().peer == 1);
    for (int what = 0; what < 4; what++) {
        RawNet net;
        std::thread holder([&] { net.goes(3); });
        int broken = spinio_net_connect(connects.net, net.address.c_str());
        holder.join();
        CHECK(broken > 0 && connects.stats().shared == uint64_t(what) + 1);
        const uint64_t first = (uint64_t(1) << 48) - 1000, mask = (uint64_t(1) << 48) - 1, use = uint64_t(1) << 48;
        spinio::launch_resident_on(connects.stream, receive_until_end, 1, 32, connects.handle, broken, connects.words);
        if (what == 0)
            // More than the ring has.
            net.words[16] = ((first + 4097) & mask) | use;
        else if (what == 1)
            // Bytes where none may come.
            CHECK(send(net.anchor, "x", 1, MSG_NOSIGNAL) == 1);
        else if (what == 2)
            // A packet that may not come.
            give_packet(net.channel, packet(5));
        else
            // It is gone, with 100 bytes sent.
            net.words[16] = ((first + 100) & mask) | use, close(net.channel), close(net.anchor), net.channel = net.anchor = -1;
        connects.wait();
        const int64_t want = what == 0 ? -EPROTO : what == 3 ? 0 : -ECONNRESET;
        if (connects.words[1] != want || connects.words[0] != (what == 3 ? 100 : 0) || (what == 3 && connects.words[2] != -EPIPE)) {
            std::printf("rule %d: %lld bytes, recv %lld, send %lld\n", what, (long long)connects.words[0], (long long)connects.words[1], (long long)connects.words[2]);
            failures++;
        }
        waits_for_open(connects, 1);
    }
    CHECK(connects.stats().violations == 2 && accepts.stats().violations == 0);
    // The honest one has lived through all this.
    spinio::launch_resident_on(accepts.stream, echo, 1, 32, accepts.handle, s);
    close_in_a_kernel(connects, honest);
    accepts.wait();
    waits_for_open(accepts, 1);
}

// Device memory: bytes and positions in it, and what is said in the granule besides.
static void kernel_checks_what_is_in_its_device_memory()
{
    Net connects;
    const uint64_t first = (uint64_t(1) << 48) - 1000, mask = (uint64_t(1) << 48) - 1;
    for (uint64_t what = 0; what < 3; what++) {
        RawNet net;
        const uint64_t use = (what + 1) << 48;
        std::thread holder([&] {
            CHECK(net.offers_memory(what + 1, what));
            give_packet(net.channel, packet(6, 1));
        });
        int s = spinio_net_connect(connects.net, net.address.c_str());
        holder.join();
        CHECK(s > 0 && connects.stats().peer == what + 1);
        // Bytes that wrap around the end of the ring, then none, or too many; and what a process that has ended leaves unread.
        auto bytes = reinterpret_cast<volatile unsigned char *>(net.far + 512);
        for (uint64_t at = first; at < first + 100; at++)
            bytes[at & 4095] = 7;
        spinio::store_release_system(const_cast<uint64_t *>(net.far), ((first + (what ? 100 : 4097)) & mask) | use);
        spinio::launch_resident_on(connects.stream, receive_until_end, 1, 32, connects.handle, s, connects.words);
        if (what == 1) {
            spinio::store_release_system(const_cast<uint64_t *>(net.far), ((first + 100) & mask) | use | uint64_t(1) << 62);
            spinio::store_release_system(const_cast<uint64_t *>(net.far) + 1, (first & mask) | use | uint64_t(1) << 62);
        } else if (what == 2) {
            // Only the proxy can say it then, in the granule, where this end's own words are the kernel's copies.
            while ((spinio::load_acquire_system(const_cast<uint64_t *>(net.near) + 1) & mask) != ((first + 100) & mask))
                usleep(100);
            close(net.channel);
            close(net.anchor);
            net.channel = net.anchor = -1;
        }
        connects.wait();
        const int64_t ends[] = {-EPROTO, 0, 0};
        if (connects.words[0] != (what ? 100 : 0) || connects.words[1] != ends[what] || (what && connects.words[2] >= 0)) {
            std::printf("device memory %d: %lld bytes, recv %lld, send %lld\n", int(what), (long long)connects.words[0], (long long)connects.words[1],
                        (long long)connects.words[2]);
            failures++;
        }
        waits_for_open(connects, 0);
    }
    CHECK(connects.stats().violations == 0);
}

// What is no device memory is not used, and a net that uses it all the same is reset.
static void device_memory_that_was_not_offered_is_not_used()
{
    for (uint64_t go = 0; go < 2; go++) {
        Net connects;
        RawNet net;
        std::thread holder([&] {
            CHECK(!net.offers_memory(1, 0, 4096));
            give_packet(net.channel, packet(6, go));
        });
        int s = spinio_net_connect(connects.net, net.address.c_str());
        CHECK(go ? s == -1 && errno == ECONNRESET : s > 0);
        holder.join();
        CHECK(connects.stats().peer == 0 && connects.stats().shared == 1 - go && connects.stats().violations == go);
    }
}

// The memory has 2 MiB, of which a page is for words.
static void rings_that_do_not_fit_into_device_memory_are_refused()
{
    for (uint64_t ring_log2 : {1, 11, 21, 64, 255}) {
        Net connects;
        RawNet net;
        std::thread holder([&] { CHECK(!net.offers_memory(1, 0, 2 << 20, ring_log2)); });
        int s = spinio_net_connect(connects.net, net.address.c_str());
        holder.join();
        const struct spinio_net_stats stats = connects.stats();
        CHECK(s > 0 && stats.peer == 0 && stats.shared == 0 && stats.kept_by_time == 1 && stats.violations == 0);
    }
}

// The proxy has been through its events several times since then: each pass takes commands first, and events at its end.
static void sees_what_came(const Net &net)
{
    for (int i = 0; i < 5; i++)
        CHECK(spinio_net_add(net.net, 1, 77, net::IN) == -1 && errno == EBADF);
    usleep(50000);
}

// A kernel that has left does not know whether the other one still stores into its memory.
static void device_memory_is_used_again_once_both_have_left()
{
    Net connects;
    RawNet nets[3];
    for (uint64_t i = 0; i < 3; i++) {
        std::thread holder([&] {
            CHECK(nets[i].offers_memory(i + 1, i));
            give_packet(nets[i].channel, packet(6, 1));
        });
        int s = spinio_net_connect(connects.net, nets[i].address.c_str());
        holder.join();
        CHECK(s > 0 && nets[i].number == (i == 1 ? 1 : 0));
        close_in_a_kernel(connects, s);
        waits_for_open(connects, 0);
        CHECK(take_packet(nets[i].channel).empty());
        if (i == 1) {
            // The first one leaves, and its memory is free.
            close(nets[0].channel);
            nets[0].channel = -1;
            sees_what_came(connects);
        }
    }
}

// A program that says that it is a net, up to the offer of device memory, and of that the number.
struct RawClient {
    int channel, anchor, own = -1;
    uint64_t number = ~uint64_t(0), generation = 0;

    RawClient(const std::string &address, uint64_t of, bool maps = true)
    {
        channel = door_socket(address, false);
        sockaddr_in to;
        anchor = bound_anchor(address, to);
        give_packet(channel, packet(1, 1, 1 << 16), anchor);
        CHECK(take_packet(channel) == packet(2) && !connect(anchor, reinterpret_cast<sockaddr *>(&to), sizeof to));
        std::string offer = take_packet(channel), memory = take_packet(channel);
        CHECK(offer.size() == 24 && offer[12] == 12 && memory.size() == 24 && memory[7] == 8);
        std::memcpy(&generation, offer.data() + 8, 4);
        generation >>= 8;
        std::memcpy(&number, memory.data() + 16, 8);
        if (maps) {
            own = memfd_create("spinio-raw", MFD_ALLOW_SEALING);
            CHECK(!ftruncate(own, 2 << 20) && !fcntl(own, F_ADD_SEALS, F_SEAL_SHRINK));
            give_packet(channel, packet(8, uint64_t(getpid()), of), own);
        }
        give_packet(channel, packet(5));
        CHECK(take_packet(channel) == packet(6, maps));
    }

    ~RawClient()
    {
        for (int fd : {channel, anchor, own})
            if (fd >= 0)
                close(fd);
    }
};

__global__ void hold(net::Handle handle, int listener, uint64_t *turn)
{
    int s = net::accept(net::block(), handle, listener);
    pass_and_wait(turn, 1);
    net::close(net::block(), handle, s);
}

static void device_memory_is_used_again_once_the_kernel_has_left()
{
    Net accepts;
    std::string address;
    int s = listener(accepts, "tcp://127.0.0.1:0", address);
    uint64_t *turn = reinterpret_cast<uint64_t *>(accepts.words + 100);
    spinio::launch_resident_on(accepts.stream, hold, 1, 32, accepts.handle, s, turn);
    {
        RawClient first(address, 0);
        CHECK(first.number == 0 && first.generation == 1);
        while (!spinio::load_acquire_system(turn))
            usleep(100);
    }
    usleep(50000);
    // The kernel has not closed the first one, whether the net has seen that it left or not.
    CHECK(RawClient(address, 1).number == 1);
    spinio::store_release_system(turn + 1, 1);
    accepts.wait();
    waits_for_open(accepts, 1);
    sees_what_came(accepts);
    // Its memory comes again, with a generation that it never had.
    {
        RawClient third(address, 2);
        CHECK(third.number == 0 && third.generation > 1);
    }
    // One that maps nothing goes through the granule, and so do all.
    RawClient(address, 3, false);
    for (int i = 0; i < 60000 && accepts.stats().shared != 1; i++)
        usleep(1000);
    CHECK(accepts.stats().peer == 3 && accepts.stats().shared == 1);
}

int main()
{
    {
        // What the library keeps open for good is open after this.
        Net first;
    }
    const int descriptors = open_descriptors();
    kernel_does_not_trust_the_holder_of_a_door();
    kernel_does_not_wait_for_the_holder_of_a_door();
    memory_is_for_one_connection();
    memory_has_the_size_that_it_had();
    net_that_breaks_the_rules_ends_its_own_connection_only();
    kernel_checks_what_is_in_its_device_memory();
    device_memory_that_was_not_offered_is_not_used();
    rings_that_do_not_fit_into_device_memory_are_refused();
    device_memory_is_used_again_once_both_have_left();
    device_memory_is_used_again_once_the_kernel_has_left();
    CHECK(open_descriptors() == descriptors && granules_mapped() == 0);
    std::printf("%d failures\n", failures);
    return failures != 0;
}
