// The laboratory's program with kernels: each kind of work of its experiments, compiled once.
//
//     worker KIND method=NAME file=PATH [NAME=VALUE]...
//     worker devices                                        prints the number of devices and the name of the first one
//
// worker.h says how it is told what to do. Exit status: 0 done, 1 an error (message on stderr), 2 usage.
#include "checkpoint.h"
#include "collage.h"
#include "lud.h"
#include "owners.h"
#include "pasting.h"
#include "second.h"
#include "sharing.h"
#include "shortest.h"
#include "streaming.h"

static const std::map<std::string, lab::Kind> kinds = {
    {"checkpoint", lab::checkpoint}, {"collage", lab::collage}, {"lud", lab::lud},           {"owners", lab::owners},
    {"pasting", lab::pasting},       {"second", lab::second},   {"sharing", lab::sharing},   {"shortest", lab::shortest},
    {"streaming", lab::streaming},
};

static int devices()
{
#if defined(__CUDACC__)
    int count = 0;
    cudaDeviceProp first;
    lab::check_cuda(cudaGetDeviceCount(&count), "devices");
    lab::check_cuda(cudaGetDeviceProperties(&first, 0), "device");
    std::printf("%d %s\n", count, first.name);
#else
    // Each process has one of its own.
    std::puts("8 emulated");
#endif
    return 0;
}

int main(int argc, char **argv)
{
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    if (argc == 2 && std::strcmp(argv[1], "devices") == 0)
        return devices();
    auto kind = argc < 2 ? kinds.end() : kinds.find(argv[1]);
    if (kind == kinds.end()) {
        std::fprintf(stderr, "usage: %s KIND method=NAME file=PATH [NAME=VALUE]...\n", argv[0]);
        return 2;
    }
    // The first call of a program puts the device to use.
    lab::check_cuda(cudaDeviceSynchronize(), "device");
    lab::Arguments arguments(argc - 2, argv + 2);
    std::unique_ptr<lab::Work> work = kind->second(arguments);
    return lab::serve(*work);
}
