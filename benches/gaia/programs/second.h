// A second GPU gets a file that the first one has: a leased or a mounted file, in one process that uses both.
//
//   limit   cudaMemcpyPeer of as many bytes from the first GPU to the second
//   pread   spinio_pread of the file into the second GPU's memory
//   map     a map on the second GPU, and an acquire: it copies from the first one
//   mounted the same of a file below a mount
//
// Memory of the map before was freed some time ago, as after a program that has ended (benches/gaia/chunks.cu).
//
// Arguments: file, a constant one whose word i is mix(i). The words on the second GPU are compared with it there.
#ifndef LAB_SECOND_H
#define LAB_SECOND_H

#include "worker.h"

namespace lab {

__global__ void compare_made(const unsigned long long *words, size_t count, unsigned *wrong)
{
    size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i < count && words[i] != mix(i))
        atomicAdd(wrong, 1u);
}

class Second : public Work {
public:
    explicit Second(const Arguments &arguments)
        : method(arguments.method), maps(method == "map" || method == "mounted"), fd(open_file(arguments.text("file"), O_RDONLY)), size(size_of(fd))
    {
        int count = 0;
        check_cuda(cudaGetDeviceCount(&count), "devices");
        if (count < 2)
            fail("second", "there is only one device");
        use(0);
        if (maps) {
            first = std::make_unique<Map>(fd, size, SPINIO_GAIA_READ);
            first->acquire();
        } else if (method == "limit") {
            source = std::make_unique<Buffer<char>>(size);
            check(spinio_pread(fd, *source, size, 0) == ssize_t(size), "pread");
        }
        use(1);
        differing = std::make_unique<Buffer<unsigned>>(1);
        if (!maps)
            copy = std::make_unique<Buffer<char>>(size);
        if (method != "limit")
            return;
        // As a program does that copies between them; it fails where there is no way but through the host.
        for (int device : {0, 1}) {
            use(device);
            if (cudaDeviceEnablePeerAccess(1 - device, 0) != cudaSuccess)
                (void)cudaGetLastError();
        }
    }

    void prepare() override
    {
        use(1);
        map = nullptr;
    }

    void run(Figures &figures) override
    {
        if (maps) {
            map = std::make_unique<Map>(fd, size, SPINIO_GAIA_READ);
            map->acquire();
            auto info = map->info();
            figures.add("peer", double(info.bytes_from_peer));
            figures.add("refused", double(info.peer_refused));
        } else if (method == "limit") {
            check_cuda(cudaMemcpyPeer(*copy, 1, *source, 0, size), "copy between the devices");
            check_cuda(cudaDeviceSynchronize(), "copy between the devices");
            figures.add("peer", double(size));
        } else {
            check(spinio_pread(fd, *copy, size, 0) == ssize_t(size), "pread");
            figures.add("peer", 0);
        }
    }

    uint64_t wrong() override
    {
        unsigned count = 0;
        differing->to_device(&count);
        const char *words = map ? map->memory : *copy;
        spinio::launch(compare_made, unsigned((size / 8 + 255) / 256), 256u, reinterpret_cast<const unsigned long long *>(words),
                       size / 8, static_cast<unsigned *>(*differing));
        wait_for_kernels();
        differing->to_host(&count);
        return count;
    }

    uint64_t map_bytes() override
    {
        return (map ? map->info().device_bytes : 0) + (first ? first->info().device_bytes : 0);
    }

private:
    static void use(int device)
    {
        check_cuda(cudaSetDevice(device), "device");
        // The context exists from the first call that needs it.
        check_cuda(cudaDeviceSynchronize(), "device");
    }

    const std::string method;
    const bool maps;
    const int fd;
    const size_t size;
    std::unique_ptr<Map> first, map;
    std::unique_ptr<Buffer<char>> source, copy;
    std::unique_ptr<Buffer<unsigned>> differing;
};

inline std::unique_ptr<Work> second(const Arguments &arguments)
{
    return std::make_unique<Second>(arguments);
}

} // namespace lab

#endif
