// Kernels of the emulated GPU for test_net.py, which loads this by ctypes: the launches are C functions.
#include <spinio/file.h>
#include <spinio/net.h>

using namespace spinio;

// A connection after the other, until the net is stopped.
__global__ void echo(net::Handle handle, int listener)
{
    __shared__ char buffer[4096];
    for (;;) {
        int s = net::accept(net::block(), handle, listener);
        if (s < 0)
            return;
        for (;;) {
            int64_t got = net::recv(net::block(), handle, s, buffer, sizeof buffer);
            if (got <= 0 || net::send(net::block(), handle, s, buffer, size_t(got)) < 0)
                break;
        }
        net::close(net::block(), handle, s);
    }
}

// Answers a socket of an event set with the beginning of the file `greeting`, and ends the use of the socket by kernels.
__global__ void greet(net::Handle handle, int set, int *result)
{
    __shared__ net::Ready ready;
    __shared__ char buffer[64];
    int got = net::wait(net::block(), handle, set, &ready, 1, -1);
    if (got == 1) {
        int file = file::open(net::block(), handle, "greeting", file::RDONLY);
        got = file < 0 ? file : int(net::recv(net::block(), handle, ready.s, buffer, 5, net::WAITALL));
        if (got == 5)
            got = int(file::pread(net::block(), handle, file, buffer, sizeof buffer, 0));
        if (got > 0)
            got = int(net::send(net::block(), handle, ready.s, buffer, size_t(got)));
        net::release(net::block(), handle, ready.s);
    }
    if (threadIdx.x == 0)
        *result = got;
}

extern "C" int launch_echo(cudaStream_t stream, net::Handle handle, int listener, unsigned blocks)
{
    launch_resident_on(stream, echo, blocks, 32, handle, listener);
    return cudaGetLastError();
}

// `result` is memory of the host: kernels of this GPU can store to it.
extern "C" int launch_greet(cudaStream_t stream, net::Handle handle, int set, int *result)
{
    launch_resident_on(stream, greet, 1, 32, handle, set, result);
    return cudaGetLastError();
}
