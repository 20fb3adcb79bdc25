// check.h: for the test programs: a count of failures.
#ifndef CHECK_H
#define CHECK_H

#include <cstdio>

static int failures;

// A program that has the library defines this first, as spinio_last_error(): a failure then has its text.
#ifndef CHECK_CAUSE
#define CHECK_CAUSE "no text"
#endif

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            std::printf("%s:%d: check failed: %s (%s)\n", __FILE__, __LINE__, #condition, CHECK_CAUSE);                \
            failures++;                                                                                                \
        }                                                                                                              \
    } while (0)

#endif
