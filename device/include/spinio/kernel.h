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
// nvcc compiles this as scale<<<grid, block>>>(...). Any other C++17 compiler gets CUDA's keywords and functions from
// emulation/, and the program is linked with libspinio.so, whose emulated device then has the memory.
#ifndef SPINIO_KERNEL_H
#define SPINIO_KERNEL_H

#if defined(__CUDACC__)

#include <cuda_runtime.h>

namespace spinio {

constexpr bool emulated = false;

// Queues a kernel on a stream; cudaGetLastError() then returns the error of a failed launch.
template <typename... Parameters, typename... Arguments>
void launch_on(cudaStream_t stream, void (*kernel)(Parameters...), dim3 grid, dim3 block, Arguments... arguments)
{
    kernel<<<grid, block, 0, stream>>>(static_cast<Parameters>(arguments)...);
}

} // namespace spinio

#else

#include <spinio/emulation/atomics.h>
#include <spinio/emulation/runtime.h>
#include <spinio/emulation/words.h>

#endif

namespace spinio {

// Queues a kernel on the default stream.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, Arguments... arguments)
{
    launch_on(nullptr, kernel, grid, block, arguments...);
}

} // namespace spinio

#endif
