/* k-means on four threads of the CPU: a program that has nothing to do with GPUs, and should not notice them.
 *
 *     kmeans POINTS ROUNDS
 *
 * Prints `ready`; answers each line `run` with its seconds, and `check` with the number of centers that differ from
 * those that one thread finds. Points have whole numbers, so that the order of additions does not matter.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { THREADS = 4, CENTERS = 16, DIMENSIONS = 4 };

static int points, rounds;
static int *data;
static int centers[CENTERS][DIMENSIONS];

struct part {
    pthread_t thread;
    int first, past;
    int64_t sums[CENTERS][DIMENSIONS], counts[CENTERS];
};

static void *assign(void *argument)
{
    struct part *part = argument;
    memset(part->sums, 0, sizeof part->sums);
    memset(part->counts, 0, sizeof part->counts);
    for (int i = part->first; i < part->past; i++) {
        const int *point = data + (size_t)i * DIMENSIONS;
        int best = 0;
        int64_t least = INT64_MAX;
        for (int c = 0; c < CENTERS; c++) {
            int64_t distance = 0;
            for (int d = 0; d < DIMENSIONS; d++)
                distance += (int64_t)(point[d] - centers[c][d]) * (point[d] - centers[c][d]);
            if (distance < least) {
                least = distance;
                best = c;
            }
        }
        part->counts[best]++;
        for (int d = 0; d < DIMENSIONS; d++)
            part->sums[best][d] += point[d];
    }
    return NULL;
}

static int cluster(int threads)
{
    static struct part parts[THREADS];
    for (int c = 0; c < CENTERS; c++)
        memcpy(centers[c], data + (size_t)c * (points / CENTERS) * DIMENSIONS, sizeof centers[c]);
    for (int round = 0; round < rounds; round++) {
        for (int t = 0; t < threads; t++) {
            parts[t].first = (int)((int64_t)points * t / threads);
            parts[t].past = (int)((int64_t)points * (t + 1) / threads);
            if (pthread_create(&parts[t].thread, NULL, assign, &parts[t]) != 0)
                return 0;
        }
        int64_t sums[CENTERS][DIMENSIONS] = {0}, counts[CENTERS] = {0};
        for (int t = 0; t < threads; t++) {
            pthread_join(parts[t].thread, NULL);
            for (int c = 0; c < CENTERS; c++) {
                counts[c] += parts[t].counts[c];
                for (int d = 0; d < DIMENSIONS; d++)
                    sums[c][d] += parts[t].sums[c][d];
            }
        }
        for (int c = 0; c < CENTERS; c++)
            for (int d = 0; d < DIMENSIONS && counts[c]; d++)
                centers[c][d] = (int)(sums[c][d] / counts[c]);
    }
    return 1;
}

static double seconds(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

int main(int argc, char **argv)
{
    points = argc == 3 ? atoi(argv[1]) : 0;
    rounds = argc == 3 ? atoi(argv[2]) : 0;
    if (points < CENTERS || rounds < 1) {
        fprintf(stderr, "usage: %s POINTS ROUNDS\n", argv[0]);
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    data = malloc((size_t)points * DIMENSIONS * sizeof *data);
    if (!data) {
        perror("malloc");
        return 1;
    }
    uint32_t random = 1;
    for (size_t i = 0; i < (size_t)points * DIMENSIONS; i++) {
        random = random * 1664525 + 1013904223;
        data[i] = (int)(random >> 12);
    }
    char line[64];
    puts("ready");
    while (fgets(line, sizeof line, stdin)) {
        if (strcmp(line, "check\n") == 0) {
            int found[CENTERS][DIMENSIONS], wrong = 0;
            memcpy(found, centers, sizeof found);
            if (!cluster(1))
                return 1;
            for (int c = 0; c < CENTERS; c++)
                wrong += memcmp(found[c], centers[c], sizeof found[c]) != 0;
            printf("done wrong=%d\n", wrong);
            continue;
        }
        double begun = seconds(CLOCK_MONOTONIC), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
        if (!cluster(THREADS)) {
            perror("pthread_create");
            return 1;
        }
        printf("done seconds=%.9g cpu=%.9g gpu=0\n", seconds(CLOCK_MONOTONIC) - begun, seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu);
    }
    return 0;
}
