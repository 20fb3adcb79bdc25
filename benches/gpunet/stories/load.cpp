// load.cpp: clients of a language model server that stream completions: of examples/net/stories, and of peer.py.
//
//     g++ -O2 -std=c++17 -pthread benches/gpunet/stories/load.cpp -o load
//     load tcp://HOST:PORT|unix://PATH [--clients 64] [--seconds 5] [--warm-up 1] [--max-tokens 200] [--temperature 0.8] [--threads 2] [--pid P]
//
//   thread ── epoll ── its share of the clients, each:  POST ── head, events ... [DONE] ── POST ...
//
// Each client asks again as soon as its stream has ended, on the same connection if the server leaves it open. All is measured as it arrives
// here: a token is an event with a text. Between tokens of one stream that one recv() has brought, the gap is 0. Time to first token is from the
// first attempt to send the request, or from connect() where a connection is made for it, until the first token has arrived. With --pid also the
// processor time of that process, the server. The result is a line of JSON.
//
// A stream that has another end than it should (no finish_reason, no [DONE], fewer tokens than `length` means) is an error, as is any status but 200
// and silence of 10 s. With errors, or without a token, the exit status is 1.
#include <sys/resource.h>

#include <atomic>
#include <memory>
#include <thread>

#include "../result.h"
#include "client.h"

static const char *last_error() { return ""; }

struct Options {
    std::string address;
    unsigned clients = 64, threads = 2;
    double seconds = 5, warm_up = 1;
    long pid = 0;
    Request request;
};

[[noreturn]] static void usage()
{
    std::fprintf(stderr, "load tcp://HOST:PORT|unix://PATH [--clients N] [--seconds S] [--warm-up S] [--max-tokens N] [--temperature T]"
                         " [--threads N] [--pid P]\n");
    std::exit(2);
}

static Options parse(int count, char **words)
{
    Options options;
    for (int i = 1; i < count; i++) {
        const std::string word = words[i];
        if (word.compare(0, 2, "--")) {
            options.address = word;
            continue;
        }
        char *end = nullptr;
        const double value = i + 1 < count ? std::strtod(words[++i], &end) : -1;
        if (!end || end == words[i] || *end || value < 0)
            usage();
        if (word == "--clients")
            options.clients = unsigned(value);
        else if (word == "--seconds")
            options.seconds = value;
        else if (word == "--warm-up")
            options.warm_up = value;
        else if (word == "--max-tokens")
            options.request.max_tokens = unsigned(value);
        else if (word == "--temperature")
            options.request.temperature = value;
        else if (word == "--threads")
            options.threads = unsigned(value);
        else if (word == "--pid")
            options.pid = long(value);
        else
            usage();
    }
    if (options.address.empty() || !options.clients || !options.threads || !options.request.max_tokens)
        usage();
    options.threads = std::min(options.threads, options.clients);
    return options;
}

// Seconds of all threads of a process, in user and kernel mode.
static double process_cpu(long pid)
{
    char path[64], text[1024];
    std::snprintf(path, sizeof path, "/proc/%ld/stat", pid);
    FILE *file = std::fopen(path, "r");
    if (!file)
        fail(path);
    text[std::fread(text, 1, sizeof text - 1, file)] = 0;
    std::fclose(file);
    // The name, in parentheses, may contain anything: fields 14 and 15 are the 12th and 13th after it.
    const char *rest = std::strrchr(text, ')');
    unsigned long user = 0, system = 0;
    check(rest && std::sscanf(rest + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &system) == 2, path);
    return double(user + system) / double(sysconf(_SC_CLK_TCK));
}

static double own_cpu()
{
    rusage used;
    getrusage(RUSAGE_SELF, &used);
    auto in_seconds = [](const timeval &t) { return double(t.tv_sec) + double(t.tv_usec) * 1e-6; };
    return in_seconds(used.ru_utime) + in_seconds(used.ru_stime);
}

static void serve(const Options &options, const Address &address, unsigned thread, const std::atomic<bool> &stop, Figures &figures)
{
    const int events = epoll_create1(EPOLL_CLOEXEC);
    check(events >= 0, "epoll_create1");
    std::vector<std::unique_ptr<Client>> clients;
    for (unsigned i = thread; i < options.clients; i += options.threads) {
        clients.push_back(std::make_unique<Client>(options.request, address, events, i, figures));
        clients.back()->ask();
    }
    double looked = now();
    while (!stop.load(std::memory_order_relaxed)) {
        epoll_event ready[256];
        const int count = epoll_wait(events, ready, 256, 10);
        for (int i = 0; i < count; i++)
            static_cast<Client *>(ready[i].data.ptr)->proceed(ready[i].events);
        if (const double time = now(); time > looked + 0.01) {
            looked = time;
            for (auto &client : clients)
                client->look(time);
        }
    }
    clients.clear();
    close(events);
}

// Puts the percentiles of times in seconds into a result, in microseconds.
static void percentiles(Result &result, const std::string &name, std::vector<float> &all)
{
    std::sort(all.begin(), all.end());
    for (auto [part, percent] : {std::pair(0.5, "p50"), std::pair(0.99, "p99"), std::pair(0.999, "p999")})
        if (!all.empty())
            result.number((name + "_" + percent + "_us").c_str(), 1e6 * double(all[std::min(all.size() - 1, size_t(double(all.size()) * part))]));
    if (!all.empty())
        result.number((name + "_max_us").c_str(), 1e6 * double(all.back()));
}

int main(int count, char **words)
{
    const Options options = parse(count, words);
    Address address;
    if (!address.find(options.address))
        fail(options.address.c_str());
    std::vector<Figures> figures(options.threads);
    std::atomic<bool> stop{false};
    const double from = now() + options.warm_up;
    for (Figures &each : figures) {
        each.from = from;
        each.to = from + options.seconds;
    }
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < options.threads; i++)
        threads.emplace_back([&, i] { serve(options, address, i, stop, figures[i]); });
    auto sleep_until = [](double time) {
        while (now() < time)
            usleep(useconds_t(std::max(1.0, std::min(1e5, (time - now()) * 1e6))));
    };
    sleep_until(from);
    double server = options.pid ? process_cpu(options.pid) : 0, own = own_cpu();
    sleep_until(from + options.seconds);
    server = options.pid ? process_cpu(options.pid) - server : 0;
    own = own_cpu() - own;
    stop = true;
    for (std::thread &thread : threads)
        thread.join();

    Figures all = std::move(figures[0]);
    for (size_t i = 1; i < figures.size(); i++)
        all.add(figures[i]);
    {
        Result result("stories", std::to_string(options.clients) + " clients, " + options.address);
        result.number("tokens_s", double(all.tokens) / options.seconds).number("tokens", double(all.tokens));
        result.number("streams", double(all.streams)).number("receives", double(all.receives));
        percentiles(result, "first_token", all.first);
        percentiles(result, "gap", all.gaps);
        if (options.pid) {
            result.number("server_cpu_s", server);
            if (all.tokens)
                result.number("server_us_a_token", server * 1e6 / double(all.tokens));
        }
        result.number("client_cpu_s", own).number("seconds", options.seconds).number("errors", double(all.errors));
        if (all.errors)
            result.string("first_error", all.first_error);
    }
    return all.errors || !all.tokens ? 1 : 0;
}
