// kernel.h: one kernel source for the GPU and for the emulated device.
//
//     #include <spinio/kernel.h>
//
//     __global__ void scale(float *x, float by, int n)
//     {
//         int i = blockIdx.x * blockDim.x + threadIdx.x;
//         if (i < n)
//             x[i] *= by;
//     }
//     ...
//     spinio::launch(scale, (n + 255) / 256, 256, x, 2.0f, n);
//
// nvcc compiles this as scale<<<grid, block>>>(...), NVRTC the kernel alone. Any other C++17 compiler gets CUDA's keywords and functions from
// emulation/, and the program is linked with libspinio.so, whose emulated device then has the memory.
#ifndef SPINIO_KERNEL_H
#define SPINIO_KERNEL_H

#if defined(__CUDACC_RTC__)

// NVRTC compiles kernels only: the program launches them by itself.
namespace spinio {

constexpr bool emulated = false;

} // namespace spinio

#elif defined(__CUDACC__)

#include <tuple>

#include <cuda_runtime.h>

namespace spinio {

constexpr bool emulated = false;

// Queues a kernel on a stream; cudaGetLastError() then returns the error of a failed launch.
template <typename... Parameters, typename... Arguments>
void launch_on(cudaStream_t stream, void (*kernel)(Parameters...), dim3 grid, dim3 block, Arguments... arguments)
{
    kernel<<<grid, block, 0, stream>>>(static_cast<Parameters>(arguments)...);
}

// The same for a kernel whose blocks wait for each other or for the program: all run at the same time, or the launch fails
// with cudaErrorCooperativeLaunchTooLarge: largest_resident_grid() names the limit.
template <typename... Parameters, typename... Arguments>
void launch_resident_on(cudaStream_t stream, void (*kernel)(Parameters...), dim3 grid, dim3 block, Arguments... arguments)
{
    std::tuple<Parameters...> values(static_cast<Parameters>(arguments)...);
    std::apply(
        [&](Parameters &...each) {
            void *addresses[] = {const_cast<void *>(static_cast<const void *>(&each))..., nullptr};
            // Its error stays for cudaGetLastError().
            (void)cudaLaunchCooperativeKernel(reinterpret_cast<const void *>(kernel), grid, block, addresses, 0, stream);
        },
        values);
}

// The most blocks with which the kernel can be launched resident, 0 if that fails.
template <typename... Parameters>
unsigned largest_resident_grid(void (*kernel)(Parameters...), dim3 block)
{
    int device = 0, processors = 0, blocks = 0;
    if (cudaGetDevice(&device) || cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) ||
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, int(block.x * block.y * block.z), 0))
        return 0;
    return unsigned(processors) * unsigned(blocks);
}

} // namespace spinio

#else

#include <spinio/emulation/atomics.h>
#include <spinio/emulation/runtime.h>
#include <spinio/emulation/shuffles.h>
#include <spinio/emulation/words.h>

#endif

#if !defined(__CUDACC_RTC__)

namespace spinio {

// Queues a kernel on the default stream.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, Arguments... arguments)
{
    launch_on(nullptr, kernel, grid, block, arguments...);
}

template <typename... Parameters, typename... Arguments>
void launch_resident(void (*kernel)(Parameters...), dim3 grid, dim3 block, Arguments... arguments)
{
    launch_resident_on(nullptr, kernel, grid, block, arguments...);
}

} // namespace spinio

#endif

#endif
