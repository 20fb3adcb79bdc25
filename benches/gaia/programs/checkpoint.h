// A checkpoint: a kernel stores a buffer, which becomes a file.
//
//   map     the file is mapped and overwritten; release makes it readable, sync durable
//   copy    cudaMemcpy and write in pieces; fsync
//   pwrite  spinio_pwrite from device memory; fsync
//
// Arguments: file, which has its size already. Each round stores other bytes: word i of round r is mix(r << 40 | i).
#ifndef LAB_CHECKPOINT_H
#define LAB_CHECKPOINT_H

#include <algorithm>

#include "worker.h"

namespace lab {

__global__ void fill(unsigned long long *words, size_t count, unsigned long long round)
{
    size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i < count)
        words[i] = mix(round << 40 | i);
}

class Checkpoint : public Work {
public:
    explicit Checkpoint(const Arguments &arguments) : method(arguments.method)
    {
        fd = open_file(arguments.text("file"), O_RDWR);
        size = size_of(fd);
        if (method == "map")
            map = std::make_unique<Map>(fd, size, SPINIO_GAIA_WRITE);
        else
            copy = std::make_unique<Buffer<char>>(size);
    }

    void prepare() override
    {
        round++;
        if (map)
            map->acquire(0, size, SPINIO_GAIA_OVERWRITE);
        char *memory = map ? map->memory : *copy;
        spinio::launch(fill, unsigned((size / 8 + 255) / 256), 256u, reinterpret_cast<unsigned long long *>(memory), size / 8, round);
        wait_for_kernels();
    }

    void run(Figures &) override
    {
        if (map) {
            map->release();
        } else if (method == "pwrite") {
            check(spinio_pwrite(fd, *copy, size, 0) == ssize_t(size), "pwrite");
        } else {
            piece.resize(piece_bytes);
            for (size_t at = 0; at < size; at += piece_bytes) {
                size_t bytes = std::min(piece_bytes, size - at);
                check_cuda(cudaMemcpy(piece.data(), *copy + at, bytes, cudaMemcpyDeviceToHost), "copy from the device");
                check_system(pwrite(fd, piece.data(), bytes, off_t(at)) == ssize_t(bytes), "pwrite");
            }
        }
    }

    void sync() override
    {
        if (map)
            check(spinio_gaia_sync(map->memory, size) == 0, "sync");
        else
            check_system(fsync(fd) == 0, "fsync");
    }

    uint64_t wrong() override
    {
        std::vector<char> bytes = read_file(fd, size);
        auto words = reinterpret_cast<const unsigned long long *>(bytes.data());
        uint64_t wrong = 0;
        for (size_t i = 0; i < size / 8; i++)
            wrong += words[i] != mix(round << 40 | i);
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
    unsigned long long round = 0;
    std::unique_ptr<Map> map;
    std::unique_ptr<Buffer<char>> copy;
    std::vector<char> piece;
};

inline std::unique_ptr<Work> checkpoint(const Arguments &arguments)
{
    return std::make_unique<Checkpoint>(arguments);
}

} // namespace lab

#endif
