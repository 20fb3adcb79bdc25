/* nvmmu.h from C: the paper's functions, and their errors on misuse. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <nvmmu.h>
#include <spinio.h>

#include "check.h"

#define SIZE 300000

static unsigned char host[SIZE], back[SIZE];
static char *device;

static void put(const char *path, const void *bytes, size_t size)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && write(fd, bytes, size) == (ssize_t)size && close(fd) == 0);
}

static void paper_functions_move_files(void)
{
    put("nvmmu.in", host, SIZE);
    CHECK(nvmmuBegin(7, "nvmmu.out") == 1);
    CHECK(nvmmuMove("nvmmu.in", device, 0, SIZE, H2D) == SIZE);
    CHECK(nvmmuMove("nvmmu.in", device, SIZE - 10, 100, H2D) == 10);
    CHECK(nvmmuMove("nvmmu.in", device, 0, 10, H2D) == 10);
    CHECK(nvmmuMove("nvmmu.out", device, 50, SIZE, D2H) == SIZE);
    CHECK(nvmmuEnd(7) == 1);
    int fd = open("nvmmu.out", O_RDONLY);
    CHECK(pread(fd, back, SIZE, 50) == SIZE && lseek(fd, 0, SEEK_END) == SIZE + 50 && close(fd) == 0);
    CHECK(memcmp(host, back, SIZE) == 0);
}

static void large_sizes_and_report(void)
{
    struct nvmmu_report report;
    CHECK(nvmmu_begin(1, "nvmmu.big") == 0);
    CHECK(nvmmu_hint_range(5LL << 30, 1000) == 0);
    CHECK(nvmmu_move("nvmmu.big", device, 5LL << 30, 1000, D2H) == 1000);
    CHECK(nvmmu_flush(1) == 0);
    CHECK(nvmmu_move("nvmmu.big", device + 2000, 5LL << 30, SIZE - 2000, H2D) == 1000);
    CHECK(nvmmu_end(1, &report, sizeof report) == 0);
    CHECK(report.uploaded == 1000 && report.downloaded == 1000 && report.mode != NVMMU_NO_OUTPUT);
    CHECK(unlink("nvmmu.big") == 0);
}

static int failed(int64_t answer, int number, const char *says)
{
    int right = answer == -1 && errno == number && strstr(spinio_last_error(), says);
    if (!right)
        printf("%lld, %s: %s\n", (long long)answer, strerror(errno), spinio_last_error());
    return right;
}

static void *call_from_other_thread(void *unused)
{
    CHECK(failed(nvmmu_move("nvmmu.in", device, 0, 10, H2D), ESRCH, "no session"));
    CHECK(failed(nvmmu_begin(2, NULL), EBUSY, "another thread has begun as 2"));
    CHECK(failed(nvmmu_end(2, NULL, 0), EPERM, "another thread"));
    CHECK(nvmmu_begin(3, NULL) == 0); /* never ended */
    return unused;
}

static void misuse_returns_errors(void)
{
    pthread_t thread;
    CHECK(failed(nvmmu_move("nvmmu.in", device, 0, 10, H2D), ESRCH, "no session"));
    CHECK(nvmmuMove("nvmmu.in", device, 0, 10, H2D) == 0);
    CHECK(failed(nvmmu_end(2, NULL, 0), ESRCH, "nothing was begun as 2"));
    CHECK(nvmmuEnd(2) == 0);
    CHECK(failed(nvmmu_begin(2, "/no/such/folder/file"), ENOENT, "/no/such/folder/file"));
    CHECK(nvmmuBegin(2, NULL) == 1);
    CHECK(nvmmuBegin(2, NULL) == 0);
    CHECK(failed(nvmmu_begin(4, NULL), EBUSY, "this thread has begun as 2"));
    CHECK(failed(nvmmu_move("nvmmu.in", device, 0, 10, 0), EINVAL, "0 is no direction"));
    CHECK(failed(nvmmu_move("nvmmu.in", device, 0, 10, 3), EINVAL, "3 is no direction"));
    CHECK(failed(nvmmu_move("nvmmu.in", device, -1, 10, H2D), EINVAL, "offset -1"));
    CHECK(failed(nvmmu_move("nvmmu.in", device, 0, -10, H2D), EINVAL, "length -10"));
    CHECK(failed(nvmmu_move(NULL, device, 0, 10, H2D), EINVAL, "no file"));
    CHECK(failed(nvmmu_move("nvmmu.in", host, 0, 10, H2D), EFAULT, "no device memory"));
    CHECK(failed(nvmmu_move("nvmmu.in", NULL, 0, 10, D2H), EFAULT, "no device memory"));
    CHECK(failed(nvmmu_move("nvmmu.in", device + SIZE - 5, 0, 10, H2D), EFAULT, "ends after 5 bytes"));
    CHECK(failed(nvmmu_move("nothing there", device, 0, 10, H2D), ENOENT, "nothing there"));
    CHECK(nvmmu_move("nvmmu.in", device, 0, 0, H2D) == 0);
    CHECK(pthread_create(&thread, NULL, call_from_other_thread, NULL) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(nvmmuEnd(2) == 1);
    CHECK(nvmmuEnd(2) == 0);
    /* The other thread has ended, and its session with it. */
    CHECK(nvmmu_begin(3, NULL) == 0 && nvmmu_end(3, NULL, 0) == 0);
}

static void forked_child_has_no_session(void)
{
    CHECK(nvmmu_begin(5, "nvmmu.out") == 0);
    pid_t child = fork();
    if (child == 0)
        _exit(failed(nvmmu_move("nvmmu.in", device, 0, 10, H2D), ESRCH, "no session") &&
                      failed(nvmmu_end(5, NULL, 0), ESRCH, "nothing was begun as 5")
                  ? 0
                  : 1);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(nvmmu_end(5, NULL, 0) == 0);
}

/* The program's locks on a file survive its move: no descriptor of the file is closed in the program's fd table. */
static void program_locks_survive_moves(void)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    int fd = open("nvmmu.in", O_RDWR), status;
    CHECK(fd >= 0 && fcntl(fd, F_SETLK, &lock) == 0);
    CHECK(nvmmuBegin(6, "nvmmu.in") == 1 && nvmmuMove("nvmmu.in", device, 0, SIZE, H2D) == SIZE);
    CHECK(nvmmuMove("nvmmu.in", device, 0, SIZE, D2H) == SIZE && nvmmuEnd(6) == 1);
    pid_t child = fork();
    if (child == 0) {
        int again = open("nvmmu.in", O_RDWR);
        _exit(fcntl(again, F_SETLK, &lock) == -1 && errno == EAGAIN ? 0 : 1);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(close(fd) == 0);
}

static int64_t count_steps(const struct nvmmu_step *step, void *count)
{
    CHECK(step->length <= 70000 && step->slot.input == step->slot.output);
    return ++*(int *)count == 100 ? -5 : (int64_t)step->length;
}

static void stream_ordered_moves(void)
{
    struct nvmmu_ticket *up, *down;
    void *stream = spinio_emulated_stream();
    CHECK(stream && nvmmuBegin(1, "nvmmu.later") == 1);
    CHECK(nvmmu_move_async("nvmmu.in", device, 0, SIZE, H2D, stream, &up) == 0);
    CHECK(nvmmu_move_async("nvmmu.later", device, 0, SIZE, D2H, stream, &down) == 0);
    CHECK(nvmmu_move_async("nvmmu.later", device, SIZE, 100, D2H, stream, NULL) == 0);
    CHECK(failed(nvmmu_move_async("nvmmu.later", device, 0, 10, 9, stream, NULL), EINVAL, "9 is no direction"));
    CHECK(nvmmu_wait(down) == SIZE && nvmmu_done(up) == 1 && nvmmu_wait(up) == SIZE);
    CHECK(nvmmuEnd(1) == 1);
    int fd = open("nvmmu.later", O_RDONLY);
    CHECK(pread(fd, back, SIZE, 0) == SIZE && lseek(fd, 0, SEEK_END) == SIZE + 100 && close(fd) == 0);
    CHECK(memcmp(host, back, SIZE) == 0);

    struct nvmmu_slot slots[3];
    for (int i = 0; i < 3; i++)
        slots[i] = (struct nvmmu_slot){spinio_emulated_stream(), device + i * 70000, device + i * 70000};
    struct nvmmu_pieces pieces = {"nvmmu.in", 0, SIZE, 70000, "nvmmu.piped", 0};
    int count = 0;
    CHECK(nvmmuBegin(1, "nvmmu.piped") == 1);
    CHECK(nvmmu_pipeline(&pieces, slots, 3, count_steps, &count) == SIZE && count == 5);
    count = 98;
    CHECK(failed(nvmmu_pipeline(&pieces, slots, 3, count_steps, &count), ECANCELED, "answered -5"));
    CHECK(failed(nvmmu_pipeline(&pieces, slots, 0, count_steps, &count), EINVAL, "no slot"));
    CHECK(nvmmuEnd(1) == 1);
    fd = open("nvmmu.piped", O_RDONLY);
    CHECK(pread(fd, back, SIZE, 0) == SIZE && close(fd) == 0 && memcmp(host, back, SIZE) == 0);
}

int main(void)
{
    for (size_t i = 0; i < SIZE; i++)
        host[i] = (unsigned char)(i * 2654435761u >> 9);
    CHECK((device = spinio_mem_alloc("emulated", SIZE, 0)) != NULL);
    paper_functions_move_files();
    large_sizes_and_report();
    misuse_returns_errors();
    forked_child_has_no_session();
    program_locks_survive_moves();
    stream_ordered_moves();
    CHECK(spinio_mem_free(device) == 0);
    return 0;
}
