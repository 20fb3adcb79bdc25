// What it takes to bring 8 GiB in chunks from one GPU to another: memory made and mapped, both sides made accessible, copied; all access
// first, or that of each group while the group before is copied.
//
//     nvcc -O2 -std=c++17 benches/gaia/overlapped_access.cu -lcuda -o overlapped_access && ./overlapped_access
//
// Needs two GPUs with a link between them. Exit status: 1 after an error of the driver, 77 without two GPUs.
#include "driver.h"

#include <vector>

constexpr size_t total = size_t(8) << 30;

// Memory of a device in chunks, without access.
class Memory {
public:
    Memory(int device, size_t chunk) : chunks(total / chunk)
    {
        CUmemAllocationProp wanted = {};
        wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        wanted.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
        wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        check(cuMemAddressReserve(&start, total, 0, 0, 0), "cuMemAddressReserve");
        for (size_t i = 0; i < chunks.size(); i++) {
            check(cuMemCreate(&chunks[i], chunk, &wanted, 0), "cuMemCreate");
            check(cuMemMap(start + i * chunk, chunk, 0, chunks[i], 0), "cuMemMap");
        }
    }

    ~Memory()
    {
        check(cuMemUnmap(start, total), "cuMemUnmap");
        for (auto chunk : chunks)
            check(cuMemRelease(chunk), "cuMemRelease");
        check(cuMemAddressFree(start, total), "cuMemAddressFree");
    }

    void grant(int device, size_t from, size_t bytes)
    {
        CUmemAccessDesc access = {};
        access.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        check(cuMemSetAccess(start + from, bytes, &access, 1), "cuMemSetAccess");
    }

    CUdeviceptr start = 0;

private:
    std::vector<CUmemGenericAllocationHandle> chunks;
};

static double transfer(Memory &from, size_t chunk, size_t group, bool overlapped, CUstream stream)
{
    const double begun = now_ms();
    Memory to(1, chunk);
    auto grant = [&](size_t at) {
        to.grant(1, at, group);
        from.grant(1, at, group);
    };
    if (!overlapped)
        for (size_t at = 0; at < total; at += group)
            grant(at);
    for (size_t at = 0; at < total; at += group) {
        if (overlapped)
            grant(at);
        for (size_t piece = at; piece < at + group; piece += chunk)
            check(cuMemcpyDtoDAsync(to.start + piece, from.start + piece, chunk, stream), "cuMemcpyDtoDAsync");
    }
    check(cuStreamSynchronize(stream), "cuStreamSynchronize");
    return now_ms() - begun;
}

int main()
{
    if (!begin_on_second_of_two())
        return 77;
    CUstream stream;
    check(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    for (size_t chunk : {64, 256})
        for (size_t group : {256, 1024, 8192})
            for (int round = 0; round < 3; round++)
                for (bool overlapped : {false, true}) {
                    Memory from(0, chunk << 20);
                    from.grant(0, 0, total);
                    const double ms = transfer(from, chunk << 20, group << 20, overlapped, stream);
                    std::printf("chunks of %3zu MiB, access to %4zu MiB at once, %s: %.1f ms\n", chunk, group,
                                overlapped ? "while the group before is copied" : "before the copies", ms);
                }
}
