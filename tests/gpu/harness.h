/* Shared by the suites: a file of random bytes, checks, and a runner that starts a process for each test, so that a crash
 * or a hang counts as one failure.
 *
 * A suite is a list of `struct test` and a main that passes it to run_tests.
 */
#ifndef HARNESS_H
#define HARNESS_H

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../benches/common/gpu.h"

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

static const char *scratch;
static int fd;              /* FILE_SIZE random bytes */
static char *content;       /* the same, in memory */
enum { FILE_SIZE = 48 << 20 };

static void check(int holds, const char *text, ...) {
    if (holds)
        return;
    va_list list;
    va_start(list, text);
    printf("    ");
    vprintf(text, list);
    printf(" (errno %d %s)\n", errno, strerror(errno));
    va_end(list);
    const char *(*why)(void) = (const char *(*)(void))dlsym(RTLD_DEFAULT, "spinio_last_error");
    if (why && *why())
        printf("    spinio: %s\n", why());
    fflush(stdout);
    _exit(1);
}

static unsigned long seed = 0x9e3779b97f4a7c15ul;
static unsigned long random_below(unsigned long n) {
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return seed % n;
}

static inline int new_file(const char *name, int flags) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", scratch, name);
    int f = open(path, O_CREAT | O_RDWR | O_CLOEXEC | flags, 0644);
    check(f >= 0, "cannot create %s", path);
    return f;
}

static gpu_ptr device(size_t size) {
    gpu_ptr at;
    GPU(cuMemAlloc_v2(&at, size));
    GPU(cuMemsetD8_v2(at, 0xee, size));
    GPU(cuCtxSynchronize());
    return at;
}

/* Copies device bytes back, after all work queued on the default stream. */
static char *back(gpu_ptr at, size_t size) {
    static char *memory;
    memory = realloc(memory, size ? size : 1);
    if (size)
        GPU(cuMemcpyDtoH_v2(memory, at, size));
    return memory;
}

static inline int all(const char *p, size_t n, int byte) {
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)p[i] != byte)
            return 0;
    return 1;
}

static void prepare(void) {
    content = malloc(FILE_SIZE);
    for (size_t i = 0; i < FILE_SIZE / 8; i++)
        random_below(2), memcpy(content + 8 * i, &seed, 8);
    fd = new_file("noise", 0);
    for (size_t done = 0; done < FILE_SIZE;) {
        ssize_t n = pwrite(fd, content + done, FILE_SIZE - done, done);
        check(n > 0, "pwrite");
        done += n;
    }
    fsync(fd);
}

static int is_selected(const char *name, int words, char **word) {
    int only = 0;
    for (int i = 0; i < words; i++) {
        if (word[i][0] == '-' && strcmp(word[i] + 1, name) == 0)
            return 0;
        if (strcmp(word[i], name) == 0)
            return 1;
        only |= word[i][0] != '-';
    }
    return !only;
}

struct test { const char *name; void (*run)(void); };

/* Runs the named tests; returns the number of failures, at most 100. `open_device` is called in each test's process. */
static int run_tests(int argc, char **argv, const struct test *tests, size_t count, void (*open_device)(void)) {
    if (argc < 2)
        return fprintf(stderr, "%s SCRATCH [test...] [-test...]\n", argv[0]), 2;
    scratch = argv[1];
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (!dlsym(RTLD_DEFAULT, "spinio_version"))
        return fprintf(stderr, "%s: LD_PRELOAD=libspinio.so is missing\n", argv[0]), 2;
    prepare();
    int failures = 0, ran = 0;
    for (size_t i = 0; i < count; i++) {
        if (!is_selected(tests[i].name, argc - 2, argv + 2))
            continue;
        fflush(stdout);
        pid_t child = fork(); /* before CUDA: each test initialises it */
        if (child == 0) {
            alarm(60); /* ends a hanging test */
            open_device();
            tests[i].run();
            fflush(stdout);
            _exit(0);
        }
        int status;
        waitpid(child, &status, 0);
        ran++;
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
            printf("ok    %s\n", tests[i].name);
        } else {
            failures++;
            printf("FAIL  %s (%s %d)\n", tests[i].name, WIFSIGNALED(status) ? WTERMSIG(status) == SIGALRM ? "hung, signal" : "signal" : "status",
                   WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
        }
    }
    printf("%d tests, %d failures\n", ran, failures);
    return failures > 100 ? 100 : failures;
}

#endif
