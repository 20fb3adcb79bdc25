// runtime.h: the part of the CUDA runtime that programs need around their kernels, on the emulated device of libspinio.so.
//
//   cudaMalloc ──> memory that neither the CPU nor a system call can access, filled with 0xA5
//   launch ──────> queued on the stream ──> in stream order: unprotect that memory, run the grid, protect it
//
// Kernels of different streams run side by side. So errors on a GPU are errors here: a CPU access to a result in place faults, and a kernel without a synchronization
// has not run. Only while kernels run can the CPU access device memory by accident.
#ifndef SPINIO_EMULATION_RUNTIME_H
#define SPINIO_EMULATION_RUNTIME_H

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <tuple>

#include <spinio.h>
#include <spinio/emulation/grid.h>
#include <spinio/emulation/resident.h>

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
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
    return fail(errno == ENOMEM ? cudaErrorMemoryAllocation : errno == EINVAL || errno == EFAULT ? cudaErrorInvalidValue : cudaErrorUnknown);
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

template <typename T>
cudaError_t cudaMalloc(T **memory, size_t bytes)
{
    *memory = static_cast<T *>(spinio_mem_alloc("emulated", bytes, 0));
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

// The default stream waits for all others.
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

// Streams of the emulated device are few and exist until the process ends.
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
    default:
        return spinio_last_error();
    }
}

#endif
