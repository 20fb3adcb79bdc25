// gpunet.h: the calls of the paper "GPUnet: Networking Abstractions for GPU Programs" (OSDI 2014), by their names.
//
//     #include <spinio/gpunet.h>
//
//     __global__ void server(int listener)
//     {
//         __shared__ char buffer[4096];
//         int s = gaccept(listener);
//         long long got = grecv(s, buffer, sizeof buffer);
//         if (got > 0)
//             gsend(s, buffer, got);
//         gclose(s);
//     }
//     ...
//     gpunet_init(handle);                   // on the host, before the launch: the handle of spinio_net_handle()
//
// All threads of a block make a call together, with equal arguments, as the paper has it. Each is the call of net.h without the g,
// with net::block() and this handle, and has its results and flags: net::DONTWAIT makes gaccept, gconnect, gsend and grecv non-blocking.
// A call before gpunet_init() returns -EBADF.
//
// The handle is a variable of each source file that includes this one, on each device: gpunet_init() sets it for its own file and
// the current device. A program that compiles by NVRTC has no gpunet_init(): it copies the handle to the variable `gpunet_handle`,
// which cuModuleGetGlobal() finds by this name.
#ifndef SPINIO_GPUNET_H
#define SPINIO_GPUNET_H

#include <spinio/net.h>

// In constant memory, as the arguments of a kernel are.
#if defined(__CUDACC_RTC__)
extern "C" {
__constant__ spinio::net::Handle gpunet_handle;
}
#else
static __constant__ spinio::net::Handle gpunet_handle;

// The calls of kernels that are launched from now on use this net. It must be open while they run.
static inline cudaError_t gpunet_init(const spinio::net::Handle &handle)
{
    return cudaMemcpyToSymbol(gpunet_handle, &handle, sizeof handle);
}
#endif

// The functions are static because the variable is: each file has its own. They return long long instead of int64_t, which NVRTC has
// in namespace spinio only.

// Without gpunet_init() the handle has no sockets: the other calls find that their descriptor is not one.
static inline __device__ int gsocket(int domain, int type, int protocol)
{
    return gpunet_handle.sockets ? spinio::net::socket(spinio::net::block(), gpunet_handle, domain, type, protocol) : -EBADF;
}

static inline __device__ int gbind(int s, const spinio::net::Address &address)
{
    return spinio::net::bind(spinio::net::block(), gpunet_handle, s, address);
}

static inline __device__ int glisten(int s, int backlog)
{
    return spinio::net::listen(spinio::net::block(), gpunet_handle, s, backlog);
}

static inline __device__ int gaccept(int s, spinio::net::Address *peer = nullptr, int flags = 0)
{
    return spinio::net::accept(spinio::net::block(), gpunet_handle, s, peer, flags);
}

static inline __device__ int gconnect(int s, const spinio::net::Address &address, int flags = 0)
{
    return spinio::net::connect(spinio::net::block(), gpunet_handle, s, address, flags);
}

static inline __device__ long long gsend(int s, const void *buffer, size_t bytes, int flags = 0)
{
    return spinio::net::send(spinio::net::block(), gpunet_handle, s, buffer, bytes, flags);
}

static inline __device__ long long grecv(int s, void *buffer, size_t bytes, int flags = 0)
{
    return spinio::net::recv(spinio::net::block(), gpunet_handle, s, buffer, bytes, flags);
}

static inline __device__ int gshutdown(int s, int how)
{
    return spinio::net::shutdown(spinio::net::block(), gpunet_handle, s, how);
}

static inline __device__ int gclose(int s)
{
    return spinio::net::close(spinio::net::block(), gpunet_handle, s);
}

#endif
