/* Shared by the programs that measure one row of a table: PROGRAM ROW MODE FILE [name=value ...]. */
#ifndef ROWS_H
#define ROWS_H

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "gpu.h"
#include "measure.h"

#define MIB ((size_t)1 << 20)

static struct { const char *row, *mode, *file; } request;

static inline int is(const char *mode) { return strcmp(request.mode, mode) == 0; }

static inline void fail(const char *what) {
    const char *(*why)(void) = (const char *(*)(void))dlsym(RTLD_DEFAULT, "spinio_last_error");
    fprintf(stderr, "%s %s %s: %s: %s. %s\n", program_invocation_short_name, request.row, request.mode, what,
            strerror(errno), why ? why() : "");
    exit(3);
}

/* A number or a string that name=value sets. */
struct option { const char *name; size_t *number; const char **text; };

/* Parses the command line; exits with status 2 if it is invalid. */
static inline void parse_args(int argc, char **argv, const struct option *options, size_t count) {
    if (argc >= 4) {
        request.row = argv[1], request.mode = argv[2], request.file = argv[3];
        for (int i = 4; i < argc; i++) {
            char *value = strchr(argv[i], '=');
            size_t at = 0;
            while (value && at < count && (strncmp(options[at].name, argv[i], value - argv[i]) || options[at].name[value - argv[i]]))
                at++;
            if (!value || at == count) {
                fprintf(stderr, "%s: unknown argument %s\n", argv[0], argv[i]);
                exit(2);
            }
            if (options[at].text)
                *options[at].text = value + 1;
            else
                *options[at].number = strtoull(value + 1, NULL, 0);
        }
        return;
    }
    fprintf(stderr, "%s ROW MODE FILE [", argv[0]);
    for (size_t i = 0; i < count; i++)
        fprintf(stderr, i ? " %s=" : "%s=", options[i].name);
    fprintf(stderr, "]\n");
    exit(2);
}

#define COUNT(array) (sizeof(array) / sizeof *(array))

struct row { const char *name; void (*run)(void); };

/* Measures the requested row; returns the program's exit status. */
static inline int measure(const struct row *rows, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (strcmp(rows[i].name, request.row) == 0) {
            rows[i].run();
            return 0;
        }
    fprintf(stderr, "%s: no row %s\n", program_invocation_short_name, request.row);
    return 2;
}

/* Opens the GPU, and the requested file for reading; returns the file's size in bytes. */
static inline size_t open_both(int *fd) {
    struct stat st;
    gpu_open();
    *fd = open(request.file, O_RDONLY | O_CLOEXEC);
    if (*fd < 0 || fstat(*fd, &st))
        fail(request.file);
    return st.st_size;
}

/* Pinned memory of huge pages: the GPU copies from and to it at full speed. */
static inline void *pinned(size_t size) {
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        fail("mmap");
    madvise(p, size, MADV_HUGEPAGE);
    memset(p, 1, size);
    GPU(cuMemHostRegister_v2(p, size, 1));
    return p;
}

#endif
