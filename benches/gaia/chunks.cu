// What 8 GiB of device memory in chunks cost: made, mapped, made accessible to their device, and to another one.
//
//     nvcc -O2 -std=c++17 benches/gaia/chunks.cu -lcuda -o chunks && ./chunks
//
// Prints a line for each size of chunk, without and with a descriptor for other processes, right after the memory of the line before was
// freed, and 200 ms later. Exit status: 1 after an error of the driver.
#include "driver.h"

#include <vector>

#include <unistd.h>

int main()
{
    constexpr size_t total = size_t(8) << 30;
    CUdevice device;
    CUcontext context;
    int devices = 0;
    check(cuInit(0), "cuInit");
    check(cuDeviceGetCount(&devices), "cuDeviceGetCount");
    check(cuDeviceGet(&device, 0), "cuDeviceGet");
    check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    for (unsigned pause_ms : {0, 200})
        for (bool shared : {false, true})
            for (size_t mib : {64, 128, 256, 512, 1024, 64, 256}) {
                const size_t size = mib << 20, count = total / size;
                usleep(pause_ms * 1000);
                CUmemAllocationProp wanted = {};
                wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
                wanted.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
                if (shared)
                    wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
                CUdeviceptr start;
                check(cuMemAddressReserve(&start, total, 0, 0, 0), "cuMemAddressReserve");
                std::vector<CUmemGenericAllocationHandle> chunks(count);
                double at[5] = {now_ms()};
                for (auto &chunk : chunks)
                    check(cuMemCreate(&chunk, size, &wanted, 0), "cuMemCreate");
                at[1] = now_ms();
                for (size_t i = 0; i < count; i++)
                    check(cuMemMap(start + i * size, size, 0, chunks[i], 0), "cuMemMap");
                at[2] = now_ms();
                CUmemAccessDesc access[2] = {};
                access[0].location = access[1].location = wanted.location;
                access[0].flags = access[1].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
                access[1].location.id = 1;
                check(cuMemSetAccess(start, total, access, 1), "cuMemSetAccess");
                at[3] = now_ms();
                if (devices > 1)
                    check(cuMemSetAccess(start, total, access, 2), "cuMemSetAccess of two devices");
                at[4] = now_ms();
                std::printf("%3u ms after a free, fd %d, chunks of %4zu MiB: create %.2f map %.2f access %.2f peer access %.2f ms\n", pause_ms, shared, mib, at[1] - at[0], at[2] - at[1],
                            at[3] - at[2], at[4] - at[3]);
                check(cuMemUnmap(start, total), "cuMemUnmap");
                for (auto chunk : chunks)
                    check(cuMemRelease(chunk), "cuMemRelease");
                check(cuMemAddressFree(start, total), "cuMemAddressFree");
            }
}
