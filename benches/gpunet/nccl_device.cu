// What NCCL's device API (2.28 and newer) needs for what the row `peer` of gpunet.cu measures, on two GPUs: 64 bytes there and back,
// and bytes that blocks put.
//
//     nccl_device [--tiny]
//
//     nvcc -O2 -std=c++17 -arch=native --extended-lambda -I device/include -I $NCCL/include benches/gpunet/nccl_device.cu
//          -L $NCCL/lib -l:libnccl.so.2 -o nccl_device
//
//   thread 0, GPU 0 ── window of symmetric memory ── thread 1, GPU 1   one process; NVLink multicast and networks are off
//     puts 64 bytes through ncclGetLsaPointer(), then ──> waits, puts 64 bytes back
//       a word with release, or the barrier of both GPUs
//     every block puts its part again and again, then one fence
//
// NCCL has no put with a signal between GPUs that load and store each other's memory. A program writes a word itself, or uses NCCL's
// barrier (ncclLsaBarrierSession), which both GPUs pass once in each direction: both are measured. Parts are put by stores of 16 bytes, and
// by ncclLsaCopy() where this NCCL has it. A put has no flow control, and the reader of a part is not told of it: both are in the figures
// of gpunet.cu. What has arrived is compared after each measurement.
//
// Prints lines of JSON as gpunet.cu does. Exit status: 0, 1 after an error or after 50 s, 77 without two GPUs that NCCL can connect so.
#include <nccl.h>
#include <nccl_device.h>
#include <pthread.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <thread>

#include <spinio/word.h>

#include "device_clock.h"
#include "result.h"

// The error of the library that failed, as part of a line of JSON.
static thread_local std::string problem;

static const char *last_error()
{
    for (char &each : problem)
        if (each == '"' || each == '\\' || (unsigned char)each < ' ')
            each = ' ';
    return problem.c_str();
}

static void check(ncclResult_t result, const char *what)
{
    if (result != ncclSuccess) {
        problem = std::string(ncclGetErrorString(result)) + ": " + ncclGetLastError(nullptr);
        fail(what);
    }
}

static void check(cudaError_t result, const char *what)
{
    if (result != cudaSuccess) {
        problem = cudaGetErrorString(result);
        fail(what);
    }
}

[[noreturn]] static void skip(const char *why)
{
    std::printf("skipped: %s\n", why);
    std::fflush(stdout);
    // The other thread may wait in NCCL.
    _exit(77);
}

constexpr unsigned most_blocks = 132;
constexpr size_t largest = 512 << 10;
// Places in the window: a part for each block, the bytes that are put, the messages of 64 bytes that arrive, and their words.
constexpr size_t source = most_blocks * largest, inbox = source + largest, word = inbox + 4096, window_bytes = word + 4096;

// A load or store of a thread.
struct alignas(16) Sixteen {
    uint64_t low, high;
};

// 64 bytes that say their round, by four threads of the warp.
__device__ inline void put_message(Sixteen *to, uint64_t round)
{
    if (threadIdx.x < 4)
        to[threadIdx.x] = Sixteen{round, round};
    __syncwarp();
}

// One warp: puts 64 bytes and a word to the other GPU and waits for its word, and the other way round.
__global__ void ping_word(ncclWindow_t window, int other, bool asks, uint64_t rounds, unsigned long long *times, Clocks *clocks)
{
    auto to = static_cast<Sixteen *>(ncclGetLsaPointer(window, inbox, other));
    auto signal = static_cast<uint64_t *>(ncclGetLsaPointer(window, word, other));
    auto own = static_cast<const uint64_t *>(ncclGetLocalPointer(window, word));
    if (asks && threadIdx.x == 0)
        clocks->read(0);
    for (uint64_t round = 1; round <= rounds; round++) {
        unsigned long long begun = ticks();
        for (bool sends : {asks, !asks}) {
            if (sends) {
                put_message(to, round);
                if (threadIdx.x == 0)
                    spinio::store_release_system(signal, round);
            } else if (threadIdx.x == 0) {
                while (spinio::load_acquire_system(own) < round) {
                }
            }
            __syncwarp();
        }
        if (asks && threadIdx.x == 0)
            times[round - 1] = ticks() - begun;
    }
    if (asks && threadIdx.x == 0)
        clocks->read(1);
}

// The same, with NCCL's barrier in place of the words.
__global__ void ping_barrier(ncclDevComm comm, ncclWindow_t window, int other, bool asks, uint64_t rounds, unsigned long long *times, Clocks *clocks)
{
    auto to = static_cast<Sixteen *>(ncclGetLsaPointer(window, inbox, other));
    ncclLsaBarrierSession<ncclCoopCta> barrier(ncclCoopCta(), comm, ncclTeamTagLsa(), 0);
    if (asks && threadIdx.x == 0)
        clocks->read(0);
    for (uint64_t round = 1; round <= rounds; round++) {
        unsigned long long begun = ticks();
        for (bool sends : {asks, !asks}) {
            if (sends)
                put_message(to, round);
            barrier.sync(ncclCoopCta(), cuda::memory_order_acq_rel);
        }
        if (asks && threadIdx.x == 0)
            times[round - 1] = ticks() - begun;
    }
    if (asks && threadIdx.x == 0)
        clocks->read(1);
}

// Bytes to memory of the other GPU, by a block: a multiple of four words of 16 bytes for each thread, loaded before they are stored.
__device__ inline void put_by_stores(void *to, const void *from, size_t bytes)
{
    auto target = static_cast<Sixteen *>(to);
    auto each = static_cast<const Sixteen *>(from);
    for (size_t i = threadIdx.x; i < bytes / sizeof(Sixteen); i += 4 * blockDim.x) {
        Sixteen loaded[4];
#pragma unroll
        for (unsigned k = 0; k < 4; k++)
            loaded[k] = each[i + k * blockDim.x];
#pragma unroll
        for (unsigned k = 0; k < 4; k++)
            target[i + k * blockDim.x] = loaded[k];
    }
}

#if __has_include(<nccl_device/reduce_copy.h>)
constexpr bool has_copy = true;
__device__ inline void put_by_nccl(void *to, void *from, size_t bytes)
{
    auto target = static_cast<float *>(to);
    ncclLsaCopy(ncclCoopCta(), static_cast<float *>(from), [=] __device__(int) { return target; }, 1, int(bytes / sizeof(float)));
}
#else
constexpr bool has_copy = false;
__device__ inline void put_by_nccl(void *, void *, size_t) {}
#endif

// Every block puts its part again and again.
template <bool by_nccl>
__global__ void __launch_bounds__(512) put(ncclWindow_t window, int other, size_t bytes, unsigned repeats)
{
    void *to = ncclGetLsaPointer(window, blockIdx.x * bytes, other), *from = ncclGetLocalPointer(window, source);
    for (unsigned repeat = 0; repeat < repeats; repeat++) {
        if (by_nccl)
            put_by_nccl(to, from, bytes);
        else
            put_by_stores(to, from, bytes);
        // As a put of a block in NVSHMEM, it ends for all threads together.
        __syncthreads();
    }
    __threadfence_system();
}

static pthread_barrier_t both;

static void meet()
{
    const int result = pthread_barrier_wait(&both);
    check(result == 0 || result == PTHREAD_BARRIER_SERIAL_THREAD, "pthread_barrier_wait");
}

// Whether the last message that came is that of the last round.
static void look_at_inbox(const char *memory, uint64_t rounds, const char *what)
{
    std::vector<uint64_t> got(8);
    check(cudaMemcpy(got.data(), memory + inbox, 64, cudaMemcpyDeviceToHost), "cudaMemcpy of the inbox");
    check(std::count(got.begin(), got.end(), rounds) == 8, what);
}

// One of the two ranks, in a thread of its own.
class Rank {
public:
    Rank(int mine, const ncclUniqueId &id) : mine(mine), other(mine ^ 1)
    {
        check(cudaSetDevice(mine), "cudaSetDevice");
        check(ncclCommInitRank(&comm, 2, id, mine), "ncclCommInitRank");
#if defined(NCCL_COMM_PROPERTIES_INITIALIZER)
        ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
        check(ncclCommQueryProperties(comm, &properties), "ncclCommQueryProperties");
        if (!properties.deviceApiSupport)
            skip("NCCL has no device API for these two GPUs");
#endif
        void *allocated = nullptr;
        check(ncclMemAlloc(&allocated, window_bytes), "ncclMemAlloc");
        memory = static_cast<char *>(allocated);
        check(cudaMemset(memory, 0, window_bytes), "cudaMemset");
        check(cudaDeviceSynchronize(), "cudaDeviceSynchronize after cudaMemset");
        check(ncclCommWindowRegister(comm, memory, window_bytes, &window, NCCL_WIN_COLL_SYMMETRIC), "ncclCommWindowRegister");
        if (!window)
            skip("NCCL makes no symmetric memory for these two GPUs");
        // Newer versions want the size and version of the structure, which this one fills in; older ones want zeros.
#if defined(NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER)
        ncclDevCommRequirements_t requirements = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
#else
        ncclDevCommRequirements_t requirements = {};
#endif
        requirements.lsaBarrierCount = 1;
        check(ncclDevCommCreate(comm, &requirements, &device_comm), "ncclDevCommCreate");
        if (device_comm.lsaSize != 2)
            skip("the two GPUs cannot load and store each other's memory");
        check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
        check(cudaMallocHost(&clocks, sizeof *clocks), "cudaMallocHost of the clocks");
        std::vector<uint32_t> bytes(largest / sizeof(uint32_t));
        for (size_t i = 0; i < bytes.size(); i++)
            bytes[i] = uint32_t(i * 2654435761u);
        check(cudaMemcpy(memory + source, bytes.data(), largest, cudaMemcpyHostToDevice), "cudaMemcpy of the source");
        pattern = std::move(bytes);
    }

    void messages(uint64_t rounds)
    {
        unsigned long long *times = nullptr;
        check(cudaMallocHost(&times, rounds * sizeof *times), "cudaMallocHost of the times");
        for (bool barrier : {false, true}) {
            check(cudaMemset(memory + inbox, 0, 4096), "cudaMemset of the inbox");
            check(cudaDeviceSynchronize(), "cudaDeviceSynchronize after cudaMemset of the inbox");
            meet();
            if (barrier)
                ping_barrier<<<1, 32, 0, stream>>>(device_comm, window, other, mine == 0, rounds, times, clocks);
            else
                ping_word<<<1, 32, 0, stream>>>(window, other, mine == 0, rounds, times, clocks);
            check(cudaGetLastError(), "launch of messages");
            check(cudaStreamSynchronize(stream), barrier ? "put and barrier" : "put and word");
            look_at_inbox(memory, rounds, "a message with wrong bytes");
            if (mine == 0)
                Result("nccl", std::string("two GPUs, put of 64 bytes and ") + (barrier ? "NCCL's barrier" : "a word") + ", there and back")
                    .times(device_times(times, rounds, *clocks));
            meet();
        }
    }

    void puts(bool by_nccl, unsigned blocks, size_t bytes, unsigned repeats)
    {
        if (mine == 1) {
            check(cudaMemset(memory, 0, blocks * bytes), "cudaMemset of the parts");
            check(cudaDeviceSynchronize(), "cudaDeviceSynchronize after cudaMemset of the parts");
        }
        meet();
        if (mine == 0) {
            launch_puts(by_nccl, blocks, bytes, 1); // finds the addresses
            const double begun = now();
            launch_puts(by_nccl, blocks, bytes, repeats);
            Result("nccl", "two GPUs, puts of " + std::to_string(blocks) + " blocks, " + std::to_string(bytes >> 10) + " KiB each, by " + (by_nccl ? "ncclLsaCopy" : "stores of 16 bytes"))
                .number("GB_s", double(bytes) * repeats * blocks / (now() - begun) * 1e-9);
        }
        meet();
        if (mine == 1) {
            std::vector<char> got(blocks * bytes);
            check(cudaMemcpy(got.data(), memory, got.size(), cudaMemcpyDeviceToHost), "cudaMemcpy of the parts");
            for (unsigned block = 0; block < blocks; block++)
                check(!std::memcmp(got.data() + block * bytes, pattern.data(), bytes), "a part with wrong bytes");
        }
    }

private:
    void launch_puts(bool by_nccl, unsigned blocks, size_t bytes, unsigned repeats)
    {
        (by_nccl ? put<true> : put<false>)<<<blocks, 512, 0, stream>>>(window, other, bytes, repeats);
        check(cudaGetLastError(), "launch of puts");
        check(cudaStreamSynchronize(stream), "puts");
    }

    int mine, other;
    ncclComm_t comm = nullptr;
    ncclWindow_t window = nullptr;
    ncclDevComm_t device_comm = {};
    char *memory = nullptr;
    cudaStream_t stream = nullptr;
    Clocks *clocks = nullptr;
    std::vector<uint32_t> pattern;
};

static void run(int mine, const ncclUniqueId &id, bool small)
{
    Rank rank(mine, id);
    if (mine == 0) {
        int version = 0;
        check(ncclGetVersion(&version), "ncclGetVersion");
        Result("nccl", "the library's version").number("version", version);
    }
    rank.messages(small ? 50 : 20000);
    for (bool by_nccl : {false, true})
        for (unsigned blocks : {1u, 8u, most_blocks})
            for (size_t bytes : {size_t(64 << 10), largest})
                if (has_copy || !by_nccl)
                    rank.puts(by_nccl, blocks, bytes, unsigned((small ? size_t(1 << 20) : size_t(1) << 30) / bytes));
    meet();
}

// A rank that waits for the other one would wait forever, in the library or in a kernel.
static void late(int)
{
    static const char text[] = "{\"failed\": \"NCCL's device API: not at its end after 50 s\"}\n";
    if (write(1, text, sizeof text - 1) < 0)
        _exit(2);
    _exit(1);
}

int main(int count, char **arguments)
{
    const bool small = count > 1 && !std::strcmp(arguments[1], "--tiny");
    // A kernel that is loaded while another one waits would wait for it. NCCL needs loopback only, and no multicast: no other row has it.
    for (auto [name, value] : {std::pair{"CUDA_MODULE_LOADING", "EAGER"}, {"NCCL_NVLS_ENABLE", "0"}, {"NCCL_SOCKET_IFNAME", "lo"},
                               {"NCCL_IB_DISABLE", "1"}, {"NCCL_DEBUG", "WARN"}})
        setenv(name, value, 0);
    std::signal(SIGALRM, late);
    alarm(50);
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < 2)
        skip("there are no two GPUs");
    ncclUniqueId id;
    check(ncclGetUniqueId(&id), "ncclGetUniqueId");
    check(!pthread_barrier_init(&both, nullptr, 2), "pthread_barrier_init");
    std::thread second(run, 1, id, small);
    run(0, id, small);
    second.join();
    // Memory goes with the process: to give it back, both ranks would wait for each other once more.
    std::fflush(stdout);
    _exit(0);
}
