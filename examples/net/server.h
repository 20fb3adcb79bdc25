// server.h: the host side that the servers of these examples have in common: cleared device memory, and the end of the program.
#ifndef EXAMPLES_NET_SERVER_H
#define EXAMPLES_NET_SERVER_H

#include <csignal>
#include <cstddef>
#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>
#include <vector>

#include <spinio/kernel.h>

// Device memory full of zeros, or NULL.
template <typename Type>
Type *zeros(size_t count)
{
    Type *memory;
    if (cudaMalloc(&memory, count * sizeof *memory) != cudaSuccess)
        return nullptr;
    const std::vector<char> part(count * sizeof *memory < 1 << 20 ? count * sizeof *memory : 1 << 20);
    for (size_t at = 0; at < count * sizeof *memory; at += part.size()) {
        const size_t left = count * sizeof *memory - at;
        if (cudaMemcpy(reinterpret_cast<char *>(memory) + at, part.data(), left < part.size() ? left : part.size(), cudaMemcpyHostToDevice) != cudaSuccess)
            return nullptr;
    }
    return memory;
}

// Before anything starts threads: the signals are blocked in all of them, those of the library too, and read from a descriptor. So the
// library is not called in a signal handler.
inline sigset_t block_signals_of_the_end()
{
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    sigprocmask(SIG_BLOCK, &signals, nullptr);
    return signals;
}

// Until Ctrl-C, or the end of standard input if `input`.
inline void wait_for_the_end(const sigset_t &signals, bool input)
{
    pollfd ends[2] = {{signalfd(-1, &signals, SFD_CLOEXEC), POLLIN, 0}, {input ? 0 : -1, POLLIN, 0}};
    for (char byte;;) {
        if (poll(ends, 2, -1) < 0)
            continue;
        if (ends[0].revents || (ends[1].revents && read(0, &byte, 1) <= 0))
            break;
    }
    close(ends[0].fd);
}

#endif
