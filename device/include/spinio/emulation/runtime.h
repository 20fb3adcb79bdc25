// runtime.h: the part of the CUDA runtime that programs need around their kernels, on the emulated devices of libspinio.so.
//
//   cudaMalloc ──> memory that neither the CPU nor a system call can access, filled with 0xA5
//   launch ──────> queued on the stream ──> in stream order: unprotect that memory, run the grid, protect it
//
// Kernels of different streams run side by side. So errors on a GPU are errors here: a CPU access to a result in place
// faults, and a kernel without a synchronization has not run. Only while kernels run can the CPU access device memory by
// accident.
//
// SPINIO_EMULATED=devices=2 makes two devices. As in CUDA each thread has a current one, for allocations, for new streams
// and for the default stream; a stream belongs to the device that was current when it was made. Known difference: variables
// with __device__ or __constant__ exist once, for all devices.
#ifndef SPINIO_EMULATION_RUNTIME_H
#define SPINIO_EMULATION_RUNTIME_H

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <tuple>

#include <spinio.h>
#include <spinio/emulation/grid.h>
#include <spinio/emulation/resident.h>

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidDevice = 101,
    cudaErrorPeerAccessUnsupported = 217,
    cudaErrorPeerAccessAlreadyEnabled = 704,
    cudaErrorCooperativeLaunchTooLarge = 720,
    cudaErrorUnknown = 999
};

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};

using cudaStream_t = void *;

enum { cudaStreamDefault, cudaStreamNonBlocking };
enum { cudaHostAllocDefault };

namespace spinio {

constexpr bool emulated = true;

namespace emulation {

inline thread_local cudaError_t last_error = cudaSuccess;

// Blocks of this thread's last grid that was too large to be resident.
inline thread_local uint64_t refused_blocks = 0;

inline cudaError_t fail(cudaError_t error)
{
    return last_error = error;
}

// The CUDA error of the library's last failed call.
inline cudaError_t failed_call()
{
    switch (errno) {
    case ENOMEM:
        return fail(cudaErrorMemoryAllocation);
    case EINVAL:
    case EFAULT:
        return fail(cudaErrorInvalidValue);
    case ENODEV:
        return fail(cudaErrorInvalidDevice);
    default:
        return fail(cudaErrorUnknown);
    }
}

// Waits for all work of a device.
inline bool wait_for(int device)
{
    int before = spinio_emulated_device();
    bool done = !spinio_emulated_set_device(device) && !spinio_emulated_wait(nullptr);
    int why = errno;
    spinio_emulated_set_device(before);
    errno = why;
    return done;
}

// A launch queued on a stream.
template <typename... Parameters>
struct Launch {
    void (*kernel)(Parameters...);
    dim3 grid, block;
    bool resident;
    std::tuple<Parameters...> arguments;

    static void call(const void *launch)
    {
        auto &self = *static_cast<const Launch *>(launch);
        std::apply(self.kernel, self.arguments);
    }

    static void run(void *launch)
    {
        std::unique_ptr<Launch> self(static_cast<Launch *>(launch));
        (self->resident ? run_resident : run_grid)(Body{call, self.get()}, self->grid, self->block);
    }
};

// Queues a launch.
template <typename... Parameters>
cudaError_t queue(cudaStream_t stream, Launch<Parameters...> launch)
{
    if (!is_launchable(launch.grid, launch.block))
        return fail(cudaErrorInvalidConfiguration);
    if (launch.resident && !can_be_resident(launch.grid)) {
        refused_blocks = uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z;
        return fail(cudaErrorCooperativeLaunchTooLarge);
    }
    auto made = new Launch<Parameters...>(std::move(launch));
    if (!spinio_emulated_launch(Launch<Parameters...>::run, made, stream))
        return cudaSuccess;
    delete made;
    return failed_call();
}

template <typename... Parameters, size_t... Number>
Launch<Parameters...> unpack(void (*kernel)(Parameters...), dim3 grid, dim3 block, void **arguments, std::index_sequence<Number...>)
{
    (void)arguments;
    return {kernel, grid, block, true, {*static_cast<std::remove_reference_t<Parameters> *>(arguments[Number])...}};
}

} // namespace emulation

// Queues a kernel on a stream.
template <typename... Parameters, typename... Arguments>
void launch_on(cudaStream_t stream, void (*kernel)(Parameters...), dim3 grid, dim3 block, Arguments... arguments)
{
    using Launch = emulation::Launch<Parameters...>;
    emulation::queue(stream, Launch{kernel, grid, block, false, {static_cast<Parameters>(arguments)...}});
}

// The same for a kernel whose blocks wait for each other or for the program: all run at the same time.
template <typename... Parameters, typename... Arguments>
void launch_resident_on(cudaStream_t stream, void (*kernel)(Parameters...), dim3 grid, dim3 block, Arguments... arguments)
{
    using Launch = emulation::Launch<Parameters...>;
    emulation::queue(stream, Launch{kernel, grid, block, true, {static_cast<Parameters>(arguments)...}});
}

// The most blocks with which the kernel can be launched resident.
template <typename... Parameters>
unsigned largest_resident_grid(void (*)(Parameters...), dim3)
{
    return emulation::most_resident;
}

} // namespace spinio

inline cudaError_t cudaGetDeviceCount(int *count)
{
    *count = spinio_emulated_device_count();
    return *count < 0 ? spinio::emulation::failed_call() : cudaSuccess;
}

inline cudaError_t cudaSetDevice(int device)
{
    return spinio_emulated_set_device(device) ? spinio::emulation::failed_call() : cudaSuccess;
}

inline cudaError_t cudaGetDevice(int *device)
{
    *device = spinio_emulated_device();
    return cudaSuccess;
}

inline cudaError_t cudaDeviceCanAccessPeer(int *possible, int device, int peer)
{
    *possible = spinio_emulated_can_access_peer(device, peer);
    return *possible < 0 ? spinio::emulation::failed_call() : cudaSuccess;
}

// Kernels of the current device may use the memory of `peer` from now on.
inline cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    if (flags)
        return spinio::emulation::fail(cudaErrorInvalidValue);
    int possible;
    if (cudaError_t error = cudaDeviceCanAccessPeer(&possible, spinio_emulated_device(), peer))
        return error;
    if (!possible)
        return spinio::emulation::fail(peer == spinio_emulated_device() ? cudaErrorInvalidDevice : cudaErrorPeerAccessUnsupported);
    if (!spinio_emulated_enable_peer_access(peer))
        return cudaSuccess;
    return errno == EEXIST ? spinio::emulation::fail(cudaErrorPeerAccessAlreadyEnabled) : spinio::emulation::failed_call();
}

template <typename T>
cudaError_t cudaMalloc(T **memory, size_t bytes)
{
    char name[32];
    std::snprintf(name, sizeof name, "emulated:%d", spinio_emulated_device());
    *memory = static_cast<T *>(spinio_mem_alloc(name, bytes, 0));
    return *memory ? cudaSuccess : spinio::emulation::failed_call();
}

inline cudaError_t cudaFree(void *memory)
{
    return spinio_mem_free(memory) ? spinio::emulation::failed_call() : cudaSuccess;
}

inline cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind)
{
    return spinio_mem_copy(to, from, bytes) ? spinio::emulation::failed_call() : cudaSuccess;
}

inline cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    return spinio_emulated_wait(stream) ? spinio::emulation::failed_call() : cudaSuccess;
}

// Between two devices; the numbers must be those of the memory. After the work queued on a stream of either.
inline cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes, cudaStream_t stream = nullptr)
{
    int count = spinio_emulated_device_count();
    if (to_device < 0 || to_device >= count || from_device < 0 || from_device >= count)
        return spinio::emulation::fail(cudaErrorInvalidDevice);
    return spinio_emulated_copy(to, from, bytes, stream) ? spinio::emulation::failed_call() : cudaSuccess;
}

// After all work of both devices.
inline cudaError_t cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t bytes)
{
    if (!spinio::emulation::wait_for(to_device) || !spinio::emulation::wait_for(from_device))
        return spinio::emulation::failed_call();
    if (cudaError_t error = cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes))
        return error;
    return spinio_emulated_wait(nullptr) ? spinio::emulation::failed_call() : cudaSuccess;
}

// The default stream waits for all others of the current device.
inline cudaError_t cudaDeviceSynchronize()
{
    return cudaStreamSynchronize(nullptr);
}

inline cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    *stream = spinio_emulated_stream();
    return *stream ? cudaSuccess : spinio::emulation::failed_call();
}

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    *stream = flags == cudaStreamNonBlocking ? spinio_emulated_stream_nonblocking() : spinio_emulated_stream();
    return *stream ? cudaSuccess : spinio::emulation::failed_call();
}

template <typename... Parameters>
cudaError_t cudaLaunchCooperativeKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, void **arguments, size_t = 0,
                                        cudaStream_t stream = nullptr)
{
    auto numbers = std::index_sequence_for<Parameters...>();
    return spinio::emulation::queue(stream, spinio::emulation::unpack(kernel, grid, block, arguments, numbers));
}

// Host memory that kernels see at the same address.
template <typename T>
cudaError_t cudaHostAlloc(T **memory, size_t bytes, unsigned)
{
    *memory = static_cast<T *>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
    return *memory ? cudaSuccess : spinio::emulation::fail(cudaErrorMemoryAllocation);
}

// As on a GPU, it waits for all kernels.
inline cudaError_t cudaFreeHost(void *memory)
{
    cudaError_t waited = cudaDeviceSynchronize();
    std::free(memory);
    return waited;
}

// Streams of the emulated devices are few and exist until the process ends.
inline cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    return cudaStreamSynchronize(stream);
}

// Constants are plain variables here.
template <typename T>
cudaError_t cudaMemcpyToSymbol(T &symbol, const void *from, size_t bytes)
{
    if (bytes > sizeof symbol)
        return spinio::emulation::fail(cudaErrorInvalidValue);
    cudaError_t waited = cudaDeviceSynchronize();
    __builtin_memcpy(&symbol, from, bytes);
    return waited;
}

inline cudaError_t cudaGetLastError()
{
    cudaError_t error = spinio::emulation::last_error;
    spinio::emulation::last_error = cudaSuccess;
    return error;
}

inline const char *cudaGetErrorString(cudaError_t error)
{
    switch (error) {
    case cudaSuccess:
        return "no error";
    case cudaErrorInvalidConfiguration:
        return "invalid configuration argument";
    case cudaErrorCooperativeLaunchTooLarge: {
        static thread_local char sentence[96];
        std::snprintf(sentence, sizeof sentence, "too many blocks in cooperative launch: %llu, and at most %u can be resident",
                      (unsigned long long)spinio::emulation::refused_blocks, spinio::emulation::most_resident);
        return sentence;
    }
    case cudaErrorPeerAccessAlreadyEnabled:
        return "peer access is already enabled";
    case cudaErrorPeerAccessUnsupported:
        return "peer access is not supported between these two devices";
    default:
        return spinio_last_error();
    }
}

#endif
