// What NVSHMEM needs for what the row `peer` of gpunet.cu measures, on two GPUs: 64 bytes there and back, and bytes that blocks put.
//
//     nvshmem [--tiny]
//
//     nvcc -O2 -std=c++17 -arch=native -rdc=true -I device/include -I $NVSHMEM/include benches/gpunet/nvshmem.cu
//          -L $NVSHMEM/lib -lnvshmem_device -l:libnvshmem_host.so.3 -lcuda -o nvshmem
//
//   rank 0 ── unique id ── pipe ──> rank 1      a process and a GPU each; NVLink multicast and networks are off
//     put 64 bytes and a signal  ─────────────> waits for the signal, puts 64 bytes back
//     every block puts its part again and again, then waits for all
//
// A put has no flow control, and the reader of a part is not told of it: both are in the figures of gpunet.cu. Prints lines of JSON as
// gpunet.cu does. Exit status: 0, 1 after an error, 77 with less than two GPUs.
#include <nvshmem.h>
#include <nvshmemx.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <csignal>

#include <cstdint>
#include <cstdlib>

#include "device_clock.h"
#include "result.h"

static const char *last_error() { return cudaGetErrorString(cudaGetLastError()); }

// One block: sends 64 bytes, waits for those of the other side, and the other way round.
__global__ void ping(char *inbox, const char *outbox, uint64_t *signal, int other, uint64_t rounds, unsigned long long *times, Clocks *clocks)
{
    const bool asks = times != nullptr;
    if (asks && threadIdx.x == 0)
        clocks->read(0);
    for (uint64_t round = 1; round <= rounds; round++) {
        unsigned long long begun = ticks();
        for (bool sends : {asks, !asks}) {
            if (sends)
                nvshmemx_putmem_signal_block(inbox, outbox, 64, signal, round, NVSHMEM_SIGNAL_SET, other);
            else if (threadIdx.x == 0)
                nvshmem_signal_wait_until(signal, NVSHMEM_CMP_GE, round);
            __syncthreads();
        }
        if (asks && threadIdx.x == 0)
            times[round - 1] = ticks() - begun;
    }
    if (asks && threadIdx.x == 0)
        clocks->read(1);
}

// Every block puts its part again and again.
__global__ void __launch_bounds__(512) put(char *to, const char *from, size_t bytes, unsigned repeats, int other)
{
    char *own = to + blockIdx.x * bytes;
    for (unsigned repeat = 0; repeat < repeats; repeat++)
        nvshmemx_putmem_block(own, from, bytes, other);
    nvshmem_quiet();
}

static void rank(int mine, nvshmemx_uniqueid_t id, bool small)
{
    check(cudaSetDevice(mine) == cudaSuccess, "cudaSetDevice");
    nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
    check(!nvshmemx_set_attr_uniqueid_args(mine, 2, &id, &attributes), "nvshmemx_set_attr_uniqueid_args");
    check(!nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes), "nvshmemx_init_attr");
    const int other = mine ^ 1;
    const size_t largest = 512 << 10;
    auto memory = static_cast<char *>(nvshmem_calloc(133, largest));
    auto signal = static_cast<uint64_t *>(nvshmem_calloc(1, sizeof(uint64_t)));
    check(memory && signal, "nvshmem_calloc");
    const uint64_t rounds = small ? 50 : 20000;
    unsigned long long *times = nullptr;
    Clocks *clocks = nullptr;
    check(cudaMallocHost(&times, rounds * sizeof *times) == cudaSuccess && cudaMallocHost(&clocks, sizeof *clocks) == cudaSuccess, "cudaMallocHost");
    nvshmem_barrier_all();
    ping<<<1, 64>>>(memory, memory + 4096, signal, other, rounds, mine ? nullptr : times, clocks);
    check(cudaDeviceSynchronize() == cudaSuccess, "put and signal");
    if (mine == 0)
        Result("nvshmem", "two GPUs, put and signal of 64 bytes, there and back").times(device_times(times, rounds, *clocks));
    for (unsigned blocks : {1u, 8u, 132u})
        for (size_t bytes : {size_t(64 << 10), largest}) {
            const unsigned repeats = unsigned((small ? size_t(1 << 20) : size_t(1) << 30) / bytes);
            nvshmem_barrier_all();
            if (mine == 0) {
                put<<<blocks, 512>>>(memory, memory + 132 * largest, bytes, 1, other); // loads the kernel
                check(cudaDeviceSynchronize() == cudaSuccess, "a put");
                const double begun = now();
                put<<<blocks, 512>>>(memory, memory + 132 * largest, bytes, repeats, other);
                check(cudaDeviceSynchronize() == cudaSuccess, "puts");
                Result("nvshmem", "two GPUs, puts of " + std::to_string(blocks) + " blocks, " + std::to_string(bytes >> 10) + " KiB each")
                    .number("GB_s", double(bytes) * repeats * blocks / (now() - begun) * 1e-9);
            }
        }
    nvshmem_barrier_all();
    nvshmem_free(signal);
    nvshmem_free(memory);
    nvshmem_finalize();
}

int main(int count, char **arguments)
{
    const bool small = count > 1 && !std::strcmp(arguments[1], "--tiny");
    for (auto [name, value] : {std::pair{"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo"}, {"NVSHMEM_REMOTE_TRANSPORT", "none"}, {"NVSHMEM_DISABLE_NVLS", "1"}})
        setenv(name, value, 0);
    int ends[2];
    check(!pipe(ends), "pipe");
    // Before the driver is in use.
    const pid_t child = fork();
    nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); // it may wait for the other one forever
        close(ends[1]);
        if (read(ends[0], &id, sizeof id) == sizeof id)
            rank(1, id, small);
        return 0;
    }
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < 2) {
        std::printf("skipped: there are no two GPUs\n");
        return 77;
    }
    check(!nvshmemx_get_uniqueid(&id) && write(ends[1], &id, sizeof id) == sizeof id, "nvshmemx_get_uniqueid");
    rank(0, id, small);
    int status = 0;
    check(waitpid(child, &status, 0) == child && status == 0, "the other rank");
}
