/* A failed check prints its location and ends the program. */
#ifndef CHECK_H
#define CHECK_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        int errno_ = errno;                                                                                  \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: check failed: %s (errno %d, %s)\n", __FILE__, __LINE__, #condition, errno_,    \
                    strerror(errno_));                                                                       \
            exit(1);                                                                                         \
        }                                                                                                    \
        errno = errno_;                                                                                      \
    } while (0)

/* The call fails, with this errno. */
#define FAILS(call, number)                                                                                  \
    do {                                                                                                     \
        errno = 0;                                                                                           \
        CHECK((call) == -1 && errno == (number));                                                            \
    } while (0)

/* The call fails with this errno, and with a sentence that has these words. */
#define REFUSED(call, number, words)                                                                         \
    do {                                                                                                     \
        FAILS((intptr_t)(call), number);                                                                     \
        if (!strstr(spinio_last_error(), words)) {                                                           \
            fprintf(stderr, "%s:%d: %s: no \"%s\" in \"%s\"\n", __FILE__, __LINE__, #call, words,             \
                    spinio_last_error());                                                                    \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)
/* The call returns no map. */
#define NO_MAP(call, number, words) REFUSED((call) ? 0 : -1, number, words)

/* Whether a file is on ext4 or XFS, whose reads hold signals; says so if not. */
static inline int is_on_local_disk(int file)
{
    struct statfs fs;
    CHECK(fstatfs(file, &fs) == 0);
    int is_local = fs.f_type == 0xef53 || fs.f_type == 0x58465342;
    if (!is_local)
        puts("skipped: the folder is neither on ext4 nor on XFS");
    return is_local;
}

#endif
