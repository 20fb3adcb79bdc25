/* Shared by the benchmarks: clocks, the median, random numbers, and lookup of functions that may be absent. */
#ifndef MEASURE_H
#define MEASURE_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>

/* A clock's time in seconds. */
static inline double seconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static inline double now(void) { return seconds(CLOCK_MONOTONIC); }

/* CPU time of the whole process in seconds, user and system. */
static inline double cpu(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

static inline int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median; sorts the values, so that the smallest is the first afterwards. */
static inline double median(double *values, size_t count) {
    qsort(values, count, sizeof *values, by_value);
    return values[count / 2];
}

/* The same numbers in each run; a program may set the seed, not to 0. */
static uint64_t seed = 88172645463325252ull;
static inline uint64_t next_random(void) { return seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17; }
static inline size_t random_below(size_t n) { return next_random() % n; }

/* The numbers from 0 on, in random order. */
static inline void shuffle(size_t *order, size_t count) {
    for (size_t i = 0; i < count; i++)
        order[i] = i;
    for (size_t i = count - 1; i > 0; i--) {
        size_t j = random_below(i + 1), x = order[i];
        order[i] = order[j], order[j] = x;
    }
}

static inline void die(const char *what) {
    perror(what);
    exit(2);
}

/* A function of SPIN's library; exits if the library is not loaded. */
static inline void *spinio_function(const char *name) {
    void *found = dlsym(RTLD_DEFAULT, name);
    if (!found) {
        fprintf(stderr, "%s not found: set LD_PRELOAD=libspinio.so\n", name);
        exit(3);
    }
    return found;
}

#endif
