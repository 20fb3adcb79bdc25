// result.h: results as lines of JSON, and the clock, of gpunet.cu, nvshmem.cu, nccl_device.cu and stories/load.cpp.
#ifndef GPUNET_RESULT_H
#define GPUNET_RESULT_H

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

// The last error of a library, "" without one: each program has its own.
static const char *last_error();

[[noreturn]] static void fail(const char *what)
{
    std::printf("{\"failed\": \"%s: %s; %s\"}\n", what, std::strerror(errno), last_error());
    std::fflush(stdout);
    // Without exit handlers, which would wait for a kernel.
    _exit(1);
}

static void check(bool right, const char *what)
{
    if (!right)
        fail(what);
}

static double seconds(clockid_t clock)
{
    timespec t;
    clock_gettime(clock, &t);
    return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

static double now() { return seconds(CLOCK_MONOTONIC); }

// One result: the row's name, what was measured, then numbers by name.
class Result {
public:
    Result(const char *row, const std::string &what) { text = std::string("{\"row\": \"") + row + "\", \"what\": \"" + what + "\""; }

    Result &number(const char *name, double value)
    {
        char buffer[96];
        std::snprintf(buffer, sizeof buffer, ", \"%s\": %.6g", name, value);
        text += buffer;
        return *this;
    }

    // Of a text without quotes.
    Result &string(const char *name, const std::string &value)
    {
        text += std::string(", \"") + name + "\": \"" + value + "\"";
        return *this;
    }

    // Times in microseconds.
    Result &times(std::vector<double> all)
    {
        if (all.empty())
            return number("count", 0);
        std::sort(all.begin(), all.end());
        auto at = [&](double part) { return all[std::min(all.size() - 1, size_t(double(all.size()) * part))]; };
        return number("p50_us", at(0.5)).number("p99_us", at(0.99)).number("p999_us", at(0.999)).number("count", double(all.size()));
    }

    ~Result()
    {
        std::printf("%s}\n", text.c_str());
        std::fflush(stdout);
    }

private:
    std::string text;
};

#endif
