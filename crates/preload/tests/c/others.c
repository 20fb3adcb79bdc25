/* Visibility of device-memory writes in other processes: each write is visible when the call has returned, on every
 * route; and records that several processes append: each is contiguous and none is lost. Usage: others FOLDER */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

enum { SIZE = 6 << 20, ROUNDS = 6, WRITERS = 3, RECORDS = 12, RECORD = 700001 };

/* The write that the reader has to find. */
struct write_report {
    uint32_t version, from, length;
};

/* The byte at an offset of a version. */
static unsigned char byte_at(size_t at, unsigned version)
{
    return (unsigned char)((at * 2654435761u >> 13) % 101 + 7 * version);
}

static void expect(const char *how, const unsigned char *seen, struct write_report write_report)
{
    for (size_t i = 0; i < write_report.length; i++)
        if (seen[i] != byte_at(write_report.from + i, write_report.version)) {
            fprintf(stderr, "%s: version %u, %u bytes at %u: another one at %zu\n", how, write_report.version, write_report.length,
                    write_report.from, i);
            _exit(1);
        }
}

/* Another process; it opened and mapped the file before the writes. */
static void reader(const char *path, int news_from, int answers)
{
    int fd = open(path, O_RDONLY), direct = open(path, O_RDONLY | O_DIRECT);
    unsigned char *map = mmap(NULL, SIZE, PROT_READ, MAP_SHARED, fd, 0);
    unsigned char *bytes = aligned_alloc(4096, SIZE);
    struct write_report write_report;
    CHECK(fd >= 0 && map != MAP_FAILED && bytes);
    while (read(news_from, &write_report, sizeof write_report) == sizeof write_report) {
        CHECK(pread(fd, bytes, write_report.length, write_report.from) == (ssize_t)write_report.length);
        expect("read", bytes, write_report);
        expect("mapped", map + write_report.from, write_report);
        if (direct >= 0) {
            memset(bytes, 0, SIZE);
            CHECK(pread(direct, bytes, SIZE, 0) >= (ssize_t)(write_report.from + write_report.length));
            expect("O_DIRECT read", bytes + write_report.from, write_report);
        }
        /* The file is cached for some of the writes. */
        if (write_report.version % 2)
            CHECK(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
        CHECK(write(answers, "k", 1) == 1);
    }
    _exit(0);
}

static void expect_success(pid_t child)
{
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void read_after_write(const char *path)
{
    int write_report[2], answers[2], flags[] = {0, O_DSYNC, O_SYNC, O_DIRECT, O_APPEND | O_DSYNC};
    CHECK(pipe(write_report) == 0 && pipe(answers) == 0);
    int fd = open(path, O_CREAT | O_TRUNC | O_RDWR, 0600);
    CHECK(fd >= 0 && ftruncate(fd, SIZE) == 0);
    close(fd);
    pid_t child = fork();
    if (child == 0) {
        close(write_report[1]), close(answers[0]);
        reader(path, write_report[0], answers[1]);
    }
    close(write_report[0]), close(answers[1]);
    unsigned char *host = malloc(SIZE), *device = device_alloc(SIZE);
    CHECK(host && device);
    unsigned version = 0;
    char answer;
    for (int round = 0; round < ROUNDS; round++)
        for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
            version++;
            size_t unit = flags[i] & O_DIRECT ? 4096 : 1, length = SIZE >> (2 * (round % 4));
            size_t from = (SIZE - length) / (size_t)(1 + round) / unit * unit;
            if (flags[i] & O_APPEND) {
                from = SIZE / 3, length = SIZE - from;
                CHECK(truncate(path, from) == 0);
            }
            for (size_t at = 0; at < length; at++)
                host[at] = byte_at(from + at, version);
            device_put(device, host, length);
            if ((fd = open(path, O_WRONLY | flags[i])) < 0)
                continue;
            /* Host memory first, of a length that O_DIRECT accepts. */
            size_t front = length / 8192 * 4096;
            void *aligned = aligned_alloc(4096, front);
            memcpy(aligned, host, front);
            struct iovec parts[] = {{aligned, front}, {device + front, length - front}};
            ssize_t wrote = flags[i] & O_APPEND ? write(fd, device, length)
                            : round % 2         ? pwritev(fd, parts, 2, from)
                                                : pwrite(fd, device, length, from);
            CHECK(wrote == (ssize_t)length);
            struct write_report of = {version, from, length};
            CHECK(write(write_report[1], &of, sizeof of) == sizeof of && read(answers[0], &answer, 1) == 1);
            free(aligned);
            close(fd);
        }
    /* Through stdio, after a flush. */
    FILE *stream = fopen(path, "r+");
    version++;
    for (size_t at = 0; at < SIZE; at++)
        host[at] = byte_at(at, version);
    device_put(device, host, SIZE);
    CHECK(stream && fwrite(device, 1, SIZE, stream) == SIZE && fflush(stream) == 0);
    struct write_report of = {version, 0, SIZE};
    CHECK(write(write_report[1], &of, sizeof of) == sizeof of && read(answers[0], &answer, 1) == 1);
    fclose(stream);
    close(write_report[1]);
    expect_success(child);
    device_free(device);
    free(host);
}

/* A record: its number, its length, and `length` bytes of that number. */
static void appender(const char *path, int number)
{
    int fd = open(path, O_WRONLY | O_APPEND);
    unsigned char *host = malloc(RECORD), *device = device_alloc(RECORD);
    CHECK(fd >= 0 && host && device);
    for (int n = 0; n < RECORDS; n++) {
        uint32_t length = RECORD >> (n % 3 * 4), head[2] = {(uint32_t)(number * RECORDS + n), length};
        memset(host, 1 + number * RECORDS + n, length);
        device_put(device, host, length);
        struct iovec parts[] = {{head, sizeof head}, {device, length}};
        CHECK(writev(fd, parts, 2) == (ssize_t)(sizeof head + length));
    }
    device_free(device);
    _exit(0);
}

static void append_together(const char *path)
{
    pid_t children[WRITERS];
    int fd = open(path, O_CREAT | O_TRUNC | O_RDWR, 0600), seen[WRITERS * RECORDS] = {0};
    CHECK(fd >= 0);
    for (int i = 0; i < WRITERS; i++)
        if ((children[i] = fork()) == 0)
            appender(path, i);
    for (int i = 0; i < WRITERS; i++)
        expect_success(children[i]);
    unsigned char *bytes = malloc(RECORD);
    uint32_t head[2];
    int records = 0;
    for (; read(fd, head, sizeof head) == sizeof head; records++) {
        CHECK(head[0] < WRITERS * RECORDS && head[1] <= RECORD && !seen[head[0]]++);
        CHECK(read(fd, bytes, head[1]) == (ssize_t)head[1]);
        for (uint32_t i = 0; i < head[1]; i++)
            CHECK(bytes[i] == 1 + head[0]);
    }
    CHECK(records == WRITERS * RECORDS);
    free(bytes);
    close(fd);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    char path[4096];
    snprintf(path, sizeof path, "%s/others-%d", argv[1], (int)getpid());
    /* Before this process uses a device: a forked child needs a device of its own. */
    append_together(path);
    read_after_write(path);
    unlink(path);
    return 0;
}
