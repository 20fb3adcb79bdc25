// runtime.h: the part of the CUDA runtime that programs need around their kernels, on the emulated device of libspinio.so.
//
//   cudaMalloc ──> memory that neither the CPU nor a system call can access, filled with 0xA5
//   launch ──────> queued on the stream ──> in stream order: unprotect that memory, run the grid, protect it
//
// So errors on a GPU are errors here: a CPU access to a result in place faults, and a kernel without a synchronization
// has not run. Only while a kernel runs can the CPU access device memory by accident.
#ifndef SPINIO_EMULATION_RUNTIME_H
#define SPINIO_EMULATION_RUNTIME_H

#include <cerrno>
#include <cstddef>
#include <tuple>

#include <spinio.h>
#include <spinio/emulation/grid.h>

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
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

namespace spinio {

constexpr bool emulated = true;

namespace emulation {

inline thread_local cudaError_t last_error = cudaSuccess;

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
    std::tuple<Parameters...> arguments;

    static void call(const void *launch)
    {
        auto &self = *static_cast<const Launch *>(launch);
        std::apply(self.kernel, self.arguments);
    }

    static void run(void *launch)
    {
        std::unique_ptr<Launch> self(static_cast<Launch *>(launch));
        run_grid(Body{call, self.get()}, self->grid, self->block);
    }
};

} // namespace emulation

// Queues a kernel on a stream.
template <typename... Parameters, typename... Arguments>
void launch_on(cudaStream_t stream, void (*kernel)(Parameters...), dim3 grid, dim3 block, Arguments... arguments)
{
    using Launch = emulation::Launch<Parameters...>;
    if (!emulation::is_launchable(grid, block)) {
        emulation::fail(cudaErrorInvalidConfiguration);
        return;
    }
    auto made = new Launch{kernel, grid, block, std::tuple<Parameters...>(static_cast<Parameters>(arguments)...)};
    if (spinio_emulated_launch(Launch::run, made, stream)) {
        emulation::failed_call();
        delete made;
    }
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
    default:
        return spinio_last_error();
    }
}

#endif
