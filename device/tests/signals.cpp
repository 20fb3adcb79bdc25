// Signals while a read waits for a kernel of the program: on the emulated device, or compiled by nvcc (-x cu) on a GPU. A
// read's copies run after what the program has queued before, which may be without end. A signal without a handler ends the
// process all the same; a handler runs at the end of the read. Prints each failure and exits with 1.
#include <spinio/kernel.h>
#include <spinio/wait.h>
#include <spinio/word.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <pthread.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "check.h"

constexpr size_t KiB = 1024, MiB = 1024 * KiB, file_bytes = 80 * MiB;

static int new_file()
{
    char path[] = "signals-XXXXXX";
    const int fd = mkstemp(path);
    unlink(path);
    const std::vector<char> bytes(file_bytes, 's');
    CHECK(write(fd, bytes.data(), bytes.size()) == ssize_t(bytes.size()) && fdatasync(fd) == 0);
    return fd;
}

// Waits for the program, which may never answer.
__global__ void wait_for_word(const uint64_t *word)
{
    spinio::Backoff backoff;
    while (spinio::load_acquire_system(word) == 0)
        backoff.pause();
}

static void *answer_soon(void *word)
{
    usleep(300'000);
    spinio::store_release_system(static_cast<uint64_t *>(word), 1);
    return nullptr;
}

struct Read {
    const char *what;
    size_t bytes;
    bool cold, again;
};

static volatile sig_atomic_t handled;

// What a child does: a kernel that waits, and a read after it, which a signal meets. Without a handler the kernel is without
// end; with one, it ends after the signal.
static int read_after_kernel(int fd, const Read &read, bool handles)
{
    void *memory = nullptr;
    uint64_t *word = nullptr;
    if (cudaMalloc(&memory, read.bytes) != cudaSuccess || cudaHostAlloc(&word, sizeof *word, cudaHostAllocDefault) != cudaSuccess)
        return 2;
    *word = 0;
    // What this one has registered is not unregistered yet.
    if (read.again && pread(fd, memory, read.bytes, 0) != ssize_t(read.bytes))
        return 3;
    if (read.cold)
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    if (handles)
        signal(SIGALRM, [](int) { handled = 1; });
    spinio::launch_resident(wait_for_word, 1, 1, word);
    // Before the answer, however late this thread goes on.
    ualarm(100'000, 0);
    pthread_t thread;
    if (handles && pthread_create(&thread, nullptr, answer_soon, word) != 0)
        return 4;
    const ssize_t got = pread(fd, memory, read.bytes, 0);
    if (!handles)
        return 5;
    std::vector<char> back(read.bytes);
    if (cudaMemcpy(back.data(), memory, read.bytes, cudaMemcpyDeviceToHost) != cudaSuccess)
        return 6;
    return got == ssize_t(read.bytes) && handled && back == std::vector<char>(read.bytes, 's') ? 0 : 7;
}

// The status of a child, which is killed after five minutes.
static int status_of(int fd, const Read &read, bool handles)
{
    const pid_t child = fork();
    if (!child)
        _exit(read_after_kernel(fd, read, handles));
    int status = 0;
    for (int wait = 0; wait < 30'000; wait++) {
        if (waitpid(child, &status, WNOHANG) == child)
            return status;
        usleep(10'000);
    }
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    return status;
}

int main()
{
    const int fd = new_file();
    struct statfs system = {};
    CHECK(fstatfs(fd, &system) == 0);
    std::printf("file system %lx (ext4 is ef53)\n", long(system.f_type));
    for (const Read &read : {
             Read{"300 KiB", 300 * KiB, false, false},
             Read{"300 KiB, cold", 300 * KiB, true, false},
             Read{"4 MiB", 4 * MiB, false, false},
             Read{"4 MiB again", 4 * MiB, false, true},
             Read{"4 MiB, cold", 4 * MiB, true, false},
             Read{"64 MiB", 64 * MiB, false, false},
             Read{"64 MiB again", 64 * MiB, false, true},
         }) {
        const int ended = status_of(fd, read, false), handled = status_of(fd, read, true);
        std::printf("%-14s status %d without a handler, %d with one\n", read.what, ended, handled);
        CHECK(WIFSIGNALED(ended) && WTERMSIG(ended) == SIGALRM);
        CHECK(WIFEXITED(handled) && WEXITSTATUS(handled) == 0);
    }
    std::printf("%d failures\n", failures);
    return failures != 0;
}
