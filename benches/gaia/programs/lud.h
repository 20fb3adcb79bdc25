// LU decomposition of a matrix in a file: much work for few bytes, kernels that know nothing of files.
//
//   copy   pread and cudaMemcpy          pread   spinio_pread          map   kernels store into the map; it is discarded
//
// Argument: file, a square matrix of floats whose diagonal dominates, so that no rows are exchanged. L times U times a
// vector is compared with the matrix times that vector.
#ifndef LAB_LUD_H
#define LAB_LUD_H

#include <algorithm>
#include <cmath>

#include "worker.h"

namespace lab {

__global__ void divide_column(float *matrix, unsigned n, unsigned k)
{
    unsigned row = k + 1 + blockIdx.x * blockDim.x + threadIdx.x;
    if (row < n)
        matrix[row * size_t(n) + k] /= matrix[k * size_t(n) + k];
}

__global__ void subtract(float *matrix, unsigned n, unsigned k)
{
    unsigned column = k + 1 + blockIdx.x * blockDim.x + threadIdx.x, row = k + 1 + blockIdx.y;
    if (column < n && row < n)
        matrix[row * size_t(n) + column] -= matrix[row * size_t(n) + k] * matrix[k * size_t(n) + column];
}

class Lud : public Work {
public:
    explicit Lud(const Arguments &arguments) : method(arguments.method)
    {
        fd = open_file(arguments.text("file"), method == "map" ? O_RDWR : O_RDONLY);
        size = size_of(fd);
        n = unsigned(std::lround(std::sqrt(double(size / sizeof(float)))));
        if (method != "map")
            copy = std::make_unique<Buffer<char>>(size);
    }

    void prepare() override
    {
        map = nullptr;
    }

    void run(Figures &figures) override
    {
        double begun = now();
        char *memory;
        if (method == "map") {
            map = std::make_unique<Map>(fd, size, SPINIO_GAIA_WRITE);
            map->acquire();
            memory = map->memory;
        } else {
            memory = *copy;
            if (method == "copy")
                read_and_copy(fd, memory, size);
            else
                check(spinio_pread(fd, memory, size, 0) == ssize_t(size), "pread");
        }
        double brought = now();
        auto matrix = reinterpret_cast<float *>(memory);
        for (unsigned k = 0; k + 1 < n; k++) {
            unsigned rest = n - k - 1;
            spinio::launch(divide_column, (rest + 127) / 128, 128u, matrix, n, k);
            spinio::launch(subtract, dim3((rest + 127) / 128, rest), 128u, matrix, n, k);
        }
        wait_for_kernels();
        figures.add("bring", brought - begun);
        figures.add("kernel", now() - brought);
    }

    uint64_t wrong() override
    {
        std::vector<char> input = read_file(fd, size), output(size);
        check_cuda(cudaMemcpy(output.data(), map ? map->memory : *copy, size, cudaMemcpyDeviceToHost), "copy from the device");
        if (map)
            map->release(SPINIO_GAIA_DISCARD);
        auto a = reinterpret_cast<const float *>(input.data()), lu = reinterpret_cast<const float *>(output.data());
        std::vector<double> x(n), y(n, 0), right(n, 0);
        for (unsigned i = 0; i < n; i++)
            x[i] = 1 + i % 7;
        for (unsigned i = 0; i < n; i++)
            for (unsigned j = 0; j < n; j++) {
                right[i] += double(a[i * size_t(n) + j]) * x[j];
                y[i] += j >= i ? double(lu[i * size_t(n) + j]) * x[j] : 0;
            }
        uint64_t wrong = 0;
        for (unsigned i = 0; i < n; i++) {
            double z = y[i];
            for (unsigned j = 0; j < i; j++)
                z += double(lu[i * size_t(n) + j]) * y[j];
            // Also if it is not a number.
            wrong += !(std::abs(z - right[i]) <= 1e-3 * std::abs(right[i]));
        }
        return wrong;
    }

    uint64_t map_bytes() override
    {
        return map ? map->info().device_bytes : 0;
    }

private:
    const std::string method;
    int fd;
    size_t size;
    unsigned n;
    std::unique_ptr<Map> map;
    std::unique_ptr<Buffer<char>> copy;
};

inline std::unique_ptr<Work> lud(const Arguments &arguments)
{
    return std::make_unique<Lud>(arguments);
}

} // namespace lab

#endif
