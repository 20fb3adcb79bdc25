// A typical CUDA program, on the emulated device. Prints each failure and exits with 1.
#include <spinio/kernel.h>
#include <spinio/wait.h>
#include <spinio/word.h>

#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#define CHECK_CAUSE spinio_last_error()
#include "check.h"

__constant__ float weights[4];

__device__ float weigh(float x, int at)
{
    return x * weights[at % 4];
}

__global__ void apply(const float *in, float *out, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] = weigh(in[i], i);
}

__global__ void add(int *x, int by, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        x[i] += by;
}

static void copies_and_kernels_are_ordered()
{
    const int n = 100001;
    const float table[4] = {1, -2, 0.5f, 8};
    std::vector<float> host(n), back(n);
    for (int i = 0; i < n; i++)
        host[i] = float(i % 977);
    float *in, *out;
    CHECK(cudaMalloc(&in, n * sizeof *in) == cudaSuccess && cudaMalloc((void **)&out, n * sizeof *out) == cudaSuccess);
    CHECK(cudaMemcpyToSymbol(weights, table, sizeof table) == cudaSuccess);
    CHECK(cudaMemcpy(in, host.data(), n * sizeof *in, cudaMemcpyHostToDevice) == cudaSuccess);
    spinio::launch(apply, (n + 255) / 256, 256, in, out, n);
    CHECK(cudaGetLastError() == cudaSuccess);
    // Ordered after the kernel without a synchronization.
    CHECK(cudaMemcpy(back.data(), out, n * sizeof *out, cudaMemcpyDeviceToHost) == cudaSuccess);
    for (int i = 0; i < n; i++)
        CHECK(back[i] == host[i] * table[i % 4]);
    CHECK(cudaFree(in) == cudaSuccess && cudaFree(out) == cudaSuccess);
}

static void streams_are_ordered_with_the_default_stream()
{
    const int n = 3000;
    int *x;
    std::vector<int> back(n);
    cudaStream_t one, two;
    CHECK(cudaMalloc(&x, n * sizeof *x) == cudaSuccess);
    CHECK(cudaStreamCreate(&one) == cudaSuccess && cudaStreamCreate(&two) == cudaSuccess && one != two);
    std::vector<int> zeros(n);
    CHECK(cudaMemcpy(x, zeros.data(), n * sizeof *x, cudaMemcpyHostToDevice) == cudaSuccess);
    for (int round = 0; round < 10; round++) {
        spinio::launch_on(one, add, 12, 256, x, 1, n);
        spinio::launch(add, 12, 256, x, 10, n);
        spinio::launch_on(two, add, 12, 256, x, 100, n);
        // The two streams have no order between each other: without this kernel they add at the same time.
        spinio::launch(add, 12, 256, x, 1000, n);
    }
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(cudaMemcpy(back.data(), x, n * sizeof *x, cudaMemcpyDeviceToHost) == cudaSuccess);
    for (int value : back)
        CHECK(value == 11110);
    CHECK(cudaStreamSynchronize(one) == cudaSuccess && cudaStreamDestroy(one) == cudaSuccess && cudaStreamDestroy(two) == cudaSuccess);
    CHECK(cudaFree(x) == cudaSuccess);
}

// Waits for a word of the CPU or of another kernel, and answers with another word; all blocks agree on it first.
__global__ void answer(const uint64_t *question, uint64_t *reply, uint64_t *arrived, uint64_t wanted)
{
    if (threadIdx.x == 0) {
        spinio::Backoff waiting;
        while (spinio::load_acquire_system(question) != wanted)
            waiting.pause();
        spinio::add_release_device(arrived, 1);
        while (spinio::load_acquire_device(arrived) != gridDim.x)
            waiting.pause();
        if (blockIdx.x == 0)
            spinio::store_release_system(reply, wanted + 1);
    }
}

static void kernels_wait_for_the_program_and_for_each_other()
{
    const unsigned most = spinio::largest_resident_grid(answer, 64);
    uint64_t *words, *counts, zeros[2] = {};
    cudaStream_t one, two;
    CHECK(cudaHostAlloc(&words, 3 * sizeof *words, cudaHostAllocDefault) == cudaSuccess);
    CHECK(cudaMalloc(&counts, sizeof zeros) == cudaSuccess);
    CHECK(cudaMemcpy(counts, zeros, sizeof zeros, cudaMemcpyHostToDevice) == cudaSuccess);
    CHECK(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking) == cudaSuccess && cudaStreamCreate(&two) == cudaSuccess);
    words[0] = words[1] = words[2] = 0;
    // The first kernel waits for the second, which waits for the program.
    spinio::launch_resident_on(one, answer, most / 2, 64, words + 1, words + 2, counts, 8u);
    void *arguments[] = {new const uint64_t *(words), new uint64_t *(words + 1), new uint64_t *(counts + 1), new uint64_t(7)};
    CHECK(cudaLaunchCooperativeKernel(answer, most / 2, 64, arguments, 0, two) == cudaSuccess);
    // A copy that is ordered with neither goes on.
    uint64_t back = 1;
    spinio_set_stream(spinio_emulated_stream_nonblocking());
    CHECK(cudaMemcpy(&back, counts, sizeof back, cudaMemcpyDeviceToHost) == cudaSuccess && back <= most);
    spinio_set_stream(nullptr);
    spinio::store_release_system(words, 7);
    CHECK(cudaStreamSynchronize(one) == cudaSuccess && cudaStreamSynchronize(two) == cudaSuccess);
    CHECK(words[1] == 8 && words[2] == 9);
    delete (const uint64_t **)arguments[0], delete (uint64_t **)arguments[1], delete (uint64_t **)arguments[2], delete (uint64_t *)arguments[3];
    CHECK(cudaFree(counts) == cudaSuccess && cudaFreeHost(words) == cudaSuccess);
}

static void grid_that_cannot_be_resident_is_refused()
{
    const unsigned most = spinio::largest_resident_grid(answer, 64);
    spinio::launch_resident(answer, most + 1, 64, nullptr, nullptr, nullptr, 0u);
    cudaError_t refused = cudaGetLastError();
    std::string sentence = cudaGetErrorString(refused);
    CHECK(refused == cudaErrorCooperativeLaunchTooLarge && cudaDeviceSynchronize() == cudaSuccess);
    CHECK(sentence.find(": " + std::to_string(most + 1) + ", and at most " + std::to_string(most)) != std::string::npos);
}

static sigjmp_buf out_of_here;

static void caught(int)
{
    siglongjmp(out_of_here, 1);
}

static void cpu_access_faults_and_new_memory_is_poisoned()
{
    unsigned char *memory, first = 0;
    CHECK(cudaMalloc(&memory, 100) == cudaSuccess);
    spinio::launch(add, 1, 1, (int *)memory, 0, 0); // the memory was accessible to a kernel once
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(cudaMemcpy(&first, memory, 1, cudaMemcpyDeviceToHost) == cudaSuccess && first == 0xA5);
    struct sigaction action = {}, before;
    action.sa_handler = caught;
    sigaction(SIGSEGV, &action, &before);
    volatile bool faulted = true;
    if (sigsetjmp(out_of_here, 1) == 0) {
        *(volatile unsigned char *)memory;
        faulted = false;
    }
    sigaction(SIGSEGV, &before, nullptr);
    CHECK(faulted);
    CHECK(cudaFree(memory) == cudaSuccess);
}

__global__ void add_from(int *into, const int *from, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        into[i] += from[i];
}

// Two devices, as SPINIO_EMULATED asks for.
static void two_devices_have_their_own_memory_and_streams()
{
    const int n = 5000;
    int count = 0, possible = 0, current = -1, *one, *two;
    cudaStream_t of_one, of_two;
    std::vector<int> host(n), back(n);
    for (int i = 0; i < n; i++)
        host[i] = i;
    CHECK(cudaGetDeviceCount(&count) == cudaSuccess && count == 2);
    CHECK(cudaMalloc(&one, n * sizeof *one) == cudaSuccess && cudaStreamCreate(&of_one) == cudaSuccess);
    CHECK(cudaSetDevice(2) == cudaErrorInvalidDevice && cudaGetLastError() == cudaErrorInvalidDevice);
    CHECK(cudaSetDevice(1) == cudaSuccess && cudaGetDevice(&current) == cudaSuccess && current == 1);
    std::thread other([] {
        int device = -1;
        CHECK(cudaGetDevice(&device) == cudaSuccess && device == 0);
    });
    other.join();
    CHECK(cudaMalloc(&two, n * sizeof *two) == cudaSuccess && cudaStreamCreate(&of_two) == cudaSuccess && of_one != of_two);
    CHECK(cudaMemcpy(two, host.data(), n * sizeof *two, cudaMemcpyHostToDevice) == cudaSuccess);
    spinio::launch_on(of_two, add, 20, 256, two, 1, n);
    CHECK(cudaStreamSynchronize(of_two) == cudaSuccess);
    CHECK(cudaMemcpyPeer(one, 0, two, 1, n * sizeof *one) == cudaSuccess);
    // The stream of the first device, while the second is current.
    spinio::launch_on(of_one, add, 20, 256, one, 10, n);
    CHECK(cudaMemcpyPeerAsync(two, 1, one, 0, n * sizeof *one, of_one) == cudaSuccess);
    CHECK(cudaStreamSynchronize(of_one) == cudaSuccess);
    CHECK(cudaMemcpy(back.data(), two, n * sizeof *two, cudaMemcpyDeviceToHost) == cudaSuccess);
    for (int i = 0; i < n; i++)
        CHECK(back[i] == i + 11);
    CHECK(cudaDeviceCanAccessPeer(&possible, 1, 0) == cudaSuccess && possible == 1);
    CHECK(cudaDeviceCanAccessPeer(&possible, 1, 1) == cudaSuccess && possible == 0);
    CHECK(cudaDeviceEnablePeerAccess(0, 0) == cudaSuccess);
    CHECK(cudaDeviceEnablePeerAccess(0, 0) == cudaErrorPeerAccessAlreadyEnabled);
    spinio::launch(add_from, 20, 256, two, (const int *)one, n);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(cudaMemcpy(back.data(), two, n * sizeof *two, cudaMemcpyDeviceToHost) == cudaSuccess);
    for (int i = 0; i < n; i++)
        CHECK(back[i] == 2 * (i + 11));
    CHECK(cudaMemcpyPeer(one, 0, two, 7, 4) == cudaErrorInvalidDevice);
    cudaGetLastError();
    CHECK(cudaFree(one) == cudaSuccess && cudaFree(two) == cudaSuccess);
    CHECK(cudaSetDevice(0) == cudaSuccess);
}

static void errors_are_reported()
{
    int *x;
    spinio::launch(add, 1, 2000, (int *)nullptr, 0, 0);
    CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration && cudaGetLastError() == cudaSuccess);
    CHECK(cudaMalloc(&x, size_t(1) << 50) == cudaErrorMemoryAllocation && !x);
    CHECK(cudaFree(&x) == cudaErrorInvalidValue);
    CHECK(cudaStreamSynchronize((cudaStream_t)12345) == cudaErrorInvalidValue);
    cudaGetLastError();
}

int main()
{
    copies_and_kernels_are_ordered();
    streams_are_ordered_with_the_default_stream();
    kernels_wait_for_the_program_and_for_each_other();
    grid_that_cannot_be_resident_is_refused();
    cpu_access_faults_and_new_memory_is_poisoned();
    two_devices_have_their_own_memory_and_streams();
    errors_are_reported();
    return failures ? 1 : 0;
}
