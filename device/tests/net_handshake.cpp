// The upgrade of a connection, of which one process is killed or stopped just after each step: the other one gets right bytes or a
// true error, soon, nothing is left, and it goes on with others. The steps are the points of crates/net/src (injection_point!,
// explained in crates/sys/src/injection.rs): a build without debug assertions has none, and this test is skipped there.
//
//   net_handshake [SECONDS...]       for which a process is stopped, by default 1 and 6, of which the second is longer than a step may take
//
// Sides: a net that accepts; a net or a program that connects. The side that survives is this program.
#include "net_handshake.h"

// --- killed ---

constexpr int times = 4;

// Of the proxy after each time. Memory for processes is made as it is needed, now and then one more; what is left behind in a step
// is more each time.
static void stays_as_it_was(const std::string &where, const size_t (&descriptors)[times])
{
    bool grows = true;
    for (int i = 1; i < times; i++)
        grows = grows && descriptors[i] > descriptors[i - 1];
    if (grows) {
        std::printf("%s: the proxy has %zu descriptors, and had %zu\n", where.c_str(), descriptors[times - 1], descriptors[0]);
        failures++;
    }
}

// A process that accepts, here and now, and is killed: how many seconds the other side's calls took.
static double accepting_side_is_killed_once(Net *net, const std::string &where, const Step &step)
{
    Victim victim("accepts", where, step.name, SIGKILL);
    const std::string address = victim.child.hear();
    const Result result = net ? exchange_of_kernel(*net, address) : exchange_of_program(address);
    victim.was_killed();
    // After the bytes that came, the end or an error that says so.
    const bool connects = result.connected == 0 || result.connected == -ECONNREFUSED || result.connected == -ECONNRESET;
    const bool ends = result.connected || result.last == 0 || result.last == -ECONNRESET;
    const int64_t most = victim.after_first_bytes() ? message : 0;
    if (!connects || !ends || result.wrong || result.right > most) {
        std::printf("%s: connect %lld, then %lld bytes right, %lld wrong, recv %lld, %.1f s\n", victim.name.c_str(), (long long)result.connected, (long long)result.right,
                    (long long)result.wrong, (long long)result.last, result.seconds);
        failures++;
    }
    return result.seconds;
}

// Not by the end of the time that a step may take. A busy machine may hold up a call, but not each time.
static void accepting_side_is_killed(Net *net, const std::string &where, const Step &step)
{
    double seconds = 5;
    for (int turn = 0; turn < 5 && seconds > 4; turn++) {
        seconds = accepting_side_is_killed_once(net, where, step);
        if (net)
            waits_for_open(*net, 0);
    }
    if (seconds > 4) {
        std::printf("%s, %s: ends after %.1f s\n", where.c_str(), step.name, seconds);
        failures++;
    }
}

static void connecting_side_is_killed(const Net &net, const std::string &side, const std::string &address, const Step &step)
{
    Victim victim(side, address, step.name, SIGKILL);
    victim.was_killed();
    // Kernels that run late may still have the memory of the last connections: there are four places.
    waits_for_open(net, 1);
    // The memory of a net is for one process at a time, so these are others too.
    Victim other("shares", address, "", 0);
    CHECK(other.child.ends() == 0);
}

static void connecting_process_is_killed(const std::string &where)
{
    NothingLeft nothing(__func__);
    std::string address;
    {
        Net net;
        const int s = listener(net, where.c_str(), address);
        spinio::launch_resident_on(net.stream, serve, 6, 32, net.handle, s, INT_MAX, static_cast<uint64_t *>(nullptr), net.words);
        size_t descriptors[times];
        for (size_t &each : descriptors) {
            for (const Step &step : connecting_net)
                connecting_side_is_killed(net, "connects", address, step);
            for (const Step &step : program)
                connecting_side_is_killed(net, "program", address, step);
            waits_for_open(net, 1);
            for (const char *side : {"shares all", "peer"}) {
                Victim other(side, address, "", 0);
                CHECK(other.child.ends() == 0);
                waits_for_open(net, 1);
            }
            each = descriptors_of_proxies();
        }
        stays_as_it_was(where, descriptors);
        CHECK(net.words[words_wrong] == 0 && net.stats().violations == 0);
        CHECK(!spinio_net_stop(net.net));
        net.wait();
    }
    CHECK(granules_mapped() == 0);
    Net again;
    CHECK(spinio_net_listen(again.net, address.c_str(), 1) > 0);
}

static void accepting_process_is_killed(const std::string &where)
{
    NothingLeft nothing(__func__);
    {
        Net net;
        size_t descriptors[times];
        for (size_t &each : descriptors) {
            for (const Step &step : accepting_net) {
                accepting_side_is_killed(&net, where, step);
                waits_for_open(net, 0);
                if (step.is_of_programs)
                    accepting_side_is_killed(nullptr, where, step);
            }
            Victim other("accepts", where, "", 0);
            const uint64_t before = net.stats().peer;
            CHECK(exchange_of_kernel(net, other.child.hear()).is_whole() && net.stats().peer == before + 1);
            CHECK(other.child.ends() == 0);
            waits_for_open(net, 0);
            each = descriptors_of_proxies();
        }
        stays_as_it_was(where, descriptors);
        CHECK(net.stats().violations == 0);
    }
    CHECK(granules_mapped() == 0);
}

// --- stopped ---

static bool is_short(double seconds) { return seconds < 3; }

// In a process for each, since all of them wait at the same time. Here and on the other side all bytes come.
static void accepting_side_is_stopped(const std::string &where, const std::string &step, double seconds, bool by_program)
{
    NothingLeft nothing(__func__);
    Net net;
    Victim victim("accepts", where, step, SIGSTOP);
    const std::string address = victim.child.hear();
    std::thread goes_on([&] { victim.goes_on_after(seconds); });
    const Result result = by_program ? exchange_of_program(address) : exchange_of_kernel(net, address);
    goes_on.join();
    victim.is_done_in(seconds + 300);
    CHECK(victim.child.ends() == 0);
    const bool upgraded = by_program ? result.is_shared : net.stats().peer == 1;
    // A step that takes too long leaves the connection to Linux, and whether it does so is for both to know.
    if (!result.is_whole() || (is_short(seconds) && !upgraded) || (!by_program && !upgraded && net.stats().kept_by_time != 1)) {
        std::printf("%s, %.0f s: connect %lld, %lld bytes, upgraded %d, %.1f s\n", victim.name.c_str(), seconds, (long long)result.connected, (long long)result.right, upgraded,
                    result.seconds);
        failures++;
    }
    waits_for_open(net, 0);
    CHECK(net.stats().violations == 0);
}

static void connecting_side_is_stopped(const std::string &side, const std::string &where, const std::string &step, double seconds)
{
    NothingLeft nothing(__func__);
    Net net;
    std::string address;
    const int s = listener(net, where.c_str(), address);
    spinio::launch_resident_on(net.stream, serve, 2, 32, net.handle, s, INT_MAX, static_cast<uint64_t *>(nullptr), net.words);
    Victim victim(side, address, step, SIGSTOP);
    std::thread goes_on([&] { victim.goes_on_after(seconds); });
    // It holds up no other one meanwhile.
    while (!victim.is_stopped)
        usleep(1000);
    const Result other = exchange_of_program(address);
    const bool was_stopped = victim.is_stopped;
    goes_on.join();
    CHECK(was_stopped && other.is_whole() && other.is_shared);
    victim.is_done_in(seconds + 300);
    const int status = victim.child.ends();
    waits_for_open(net, 1);
    const bool upgraded = net.stats().peer + net.stats().shared == 2;
    if (status || (is_short(seconds) && !upgraded) || net.words[words_wrong]) {
        std::printf("%s, %.0f s: ends with %d, upgraded %d\n", victim.name.c_str(), seconds, status, upgraded);
        failures++;
    }
    CHECK(net.stats().violations == 0);
    uses_all_granules(address);
    CHECK(!spinio_net_stop(net.net));
    net.wait();
}

static void all_are_stopped(const std::string &seconds)
{
    std::vector<std::vector<std::string>> todo;
    int number = 0;
    auto add = [&](const char *side, const Step &step, const char *by) {
        const bool tcp = number++ % 2;
        const std::string where = tcp ? "tcp://127.0.0.1:0" : "unix:@spinio-stopped-" + std::to_string(getpid()) + "-" + std::to_string(number);
        todo.push_back({"--stopped", side, where, step.name, seconds, by});
    };
    for (const Step &step : accepting_net) {
        add("accepts", step, "kernel");
        if (step.is_of_programs)
            add("accepts", step, "program");
    }
    for (const Step &step : connecting_net)
        add("connects", step, "");
    for (const Step &step : program)
        add("program", step, "");
    constexpr size_t at_once = 8;
    for (size_t i = 0; i < todo.size(); i += at_once) {
        std::vector<std::unique_ptr<Child>> all;
        for (size_t k = i; k < todo.size() && k < i + at_once; k++)
            all.push_back(std::make_unique<Child>(todo[k]));
        for (auto &each : all)
            CHECK(each->ends() == 0);
    }
}

int main(int count, char **argument)
{
    const std::string what = count > 1 ? argument[1] : "";
    if (what.rfind("--", 0) == 0)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (what == "--stopped") {
        const double seconds = std::atof(argument[5]);
        if (!std::strcmp(argument[2], "accepts"))
            accepting_side_is_stopped(argument[3], argument[4], seconds, !std::strcmp(argument[6], "program"));
        else
            connecting_side_is_stopped(argument[2], argument[3], argument[4], seconds);
        return failures != 0;
    }
    if (what == "--side")
        return side_of(argument[2], argument[3], std::atoi(argument[4]));
    if (!has_points()) {
        std::printf("skipped: this library has no injection points\n");
        return 0;
    }
    const std::string name = "unix:@spinio-handshake-" + std::to_string(getpid());
    for (const std::string &where : {std::string("tcp://127.0.0.1:0"), name}) {
        connecting_process_is_killed(where);
        accepting_process_is_killed(where);
    }
    for (const std::string &seconds : count > 1 ? std::vector<std::string>(argument + 1, argument + count) : std::vector<std::string>{"1", "6"})
        all_are_stopped(seconds);
    std::printf("%d failures\n", failures);
    return failures != 0;
}
