// What sockets of GPU kernels cost, with limits and peers beside them in one run.
//
//     gpunet [--rows NAME,NAME...] [--tiny] [--limit SECONDS] [--out FILE]
//
//     nvcc -O2 -std=c++17 -arch=native -I device/include -I crates/capi/include benches/gpunet/gpunet.cu libspinio.so -o gpunet
//
// Prints a line for each result, and with --out stores them all as JSON. g++ compiles the same source for the emulated GPU.
//
//   gpunet ── for each row ── a process of its own: gpunet --row NAME ── lines of JSON through a pipe
//                             killed at the row's deadline; what it has printed until then is kept
//
// Times are microseconds; bytes are compared in each row. copies.h, latency.h, loaded.h, peer.h, rates.h, shared.h and waiting.h say what the rows are, zmq.h and
// grpc.h how ZeroMQ and gRPC become peers. Exit status: 0 all rows are complete, 1 one is not, 2 usage.
#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>

#include "copies.h"
#include "grpc.h"
#include "latency.h"
#include "loaded.h"
#include "peer.h"
#include "rates.h"
#include "shared.h"
#include "waiting.h"

struct Row {
    const char *name;
    void (*run)(const Size &);
    double deadline; // seconds
};

static const Row rows[] = {
    {"parts", row_parts, 6},           {"echo", row_echo, 10},   {"relay", row_relay, 9},     {"grpc", row_grpc, 20},
    {"blocks", row_blocks, 8},
    {"stream", row_stream, 14},        {"send", row_send, 8},   {"sockets", row_sockets, 16}, {"contention", row_contention, 12},
    {"attributes", row_attributes, 8}, {"idle", row_idle, 12}, {"many", row_many, 15},
    {"shared", row_shared, 8},         {"peer", row_peer, 15},    {"events", row_events, 8}, {"poll", row_poll, 8},
    {"datagrams", row_datagrams, 8},   {"files", row_files, 8},   {"spans", row_spans, 8},   {"peer-blocks", row_peer_blocks, 30},
    {"copies", row_copies, 8},         {"busy", row_busy, 20},    {"two-cores", row_two_cores, 10}, {"crowded", row_crowded, 10},
};

// One row in this process.
static int run_row(const char *name, bool tiny)
{
    Size size = tiny ? Size{true, 0.1, 8} : Size{false, 0.5, 416};
    for (const Row &row : rows)
        if (!std::strcmp(row.name, name)) {
            row.run(size);
            std::printf("{\"complete\": \"%s\"}\n", name);
            std::fflush(stdout);
            // Memory goes with the process: to give it back takes longer than the row.
            _exit(0);
        }
    return 2;
}

// A result as a line of a table.
static void print(const std::string &json)
{
    std::string text;
    for (size_t at = 1; at + 1 < json.size(); at++)
        if (json[at] != '"')
            text += json[at];
    std::printf("  %s\n", text.c_str());
    std::fflush(stdout);
}

// Runs a row in a process of its own; whether it is complete.
static bool start_row(const Row &row, bool tiny, double deadline, std::vector<std::string> &results)
{
    int ends[2];
    check(!pipe(ends), "pipe");
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 1);
        close(ends[0]);
        execl("/proc/self/exe", "gpunet", "--row", row.name, tiny ? "--tiny" : nullptr, nullptr);
        _exit(127);
    }
    close(ends[1]);
    bool complete = false, killed = false;
    std::string text;
    double begun = now();
    for (;;) {
        double left = begun + deadline - now();
        pollfd waiting = {ends[0], POLLIN, 0};
        if (!killed && (left <= 0 || poll(&waiting, 1, int(left * 1000) + 1) == 0)) {
            kill(child, SIGKILL);
            killed = true;
        }
        char part[4096];
        ssize_t got = read(ends[0], part, sizeof part);
        if (got <= 0)
            break;
        text.append(part, size_t(got));
        for (size_t end; (end = text.find('\n')) != std::string::npos; text.erase(0, end + 1)) {
            std::string line = text.substr(0, end);
            complete |= line.rfind("{\"complete\"", 0) == 0;
            if (line.rfind("{\"complete\"", 0) != 0) {
                print(line);
                results.push_back(line);
            }
        }
    }
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    std::printf("%s: %s, %.1f s\n", row.name, complete ? "complete" : killed ? "KILLED at its deadline" : "FAILED", now() - begun);
    if (!complete)
        results.push_back(std::string("{\"row\": \"") + row.name + "\", \"what\": \"" + (killed ? "killed at its deadline" : "failed") + "\"}");
    return complete;
}

static void store(const char *path, const std::vector<std::string> &results)
{
    FILE *file = std::fopen(path, "w");
    check(file != nullptr, path);
    std::fprintf(file, "[\n");
    for (size_t i = 0; i < results.size(); i++)
        std::fprintf(file, "%s%s\n", results[i].c_str(), i + 1 < results.size() ? "," : "");
    std::fprintf(file, "]\n");
    std::fclose(file);
}

int main(int count, char **arguments)
{
    std::string wanted;
    const char *out = nullptr, *only = nullptr;
    bool tiny = false;
    double limit = 130;
    for (int i = 1; i < count; i++) {
        std::string argument = arguments[i];
        bool more = i + 1 < count;
        if (argument == "--tiny")
            tiny = true;
        else if (argument == "--rows" && more)
            wanted = "," + std::string(arguments[++i]) + ",";
        else if (argument == "--row" && more)
            only = arguments[++i];
        else if (argument == "--out" && more)
            out = arguments[++i];
        else if (argument == "--limit" && more)
            limit = std::atof(arguments[++i]);
        else
            return std::fprintf(stderr, "gpunet [--rows NAME,NAME...] [--tiny] [--limit SECONDS] [--out FILE]\n"), 2;
    }
    // A kernel that is loaded while another one waits would wait for it.
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    if (only)
        return run_row(only, tiny);
    std::vector<std::string> results;
    bool complete = true;
    double begun = now();
    results.push_back("{\"row\": \"machine\", \"what\": \"" + std::string(spinio::emulated ? "emulated GPU" : "GPU") +
                      "\", \"processors\": " + std::to_string(processors()) + "}");
    for (const Row &row : rows) {
        if (!wanted.empty() && wanted.find("," + std::string(row.name) + ",") == std::string::npos)
            continue;
        double left = begun + limit - now();
        if (left < 1) {
            std::printf("%s: left out, no time is left\n", row.name);
            complete = false;
            continue;
        }
        // A tiny run is a test, on machines that may be busy.
        complete &= start_row(row, tiny, std::min(left, tiny ? limit : row.deadline), results);
        if (out)
            store(out, results);
    }
    return complete ? 0 : 1;
}
