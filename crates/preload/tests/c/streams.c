/* Pipes and sockets to and from device memory: the bytes that one call transfers, their order, and what is left. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

enum { SIZE = 1 << 20 };
static unsigned char sent[SIZE], got[SIZE];
static unsigned char *device;

static void expect(size_t at, const unsigned char *bytes, size_t size)
{
    device_get(got, device, SIZE);
    CHECK(memcmp(got + at, bytes, size) == 0);
}

static void *send_all(void *fd)
{
    for (size_t at = 0; at < SIZE;) {
        ssize_t n = write(*(int *)fd, sent + at, SIZE - at < 30000 ? SIZE - at : 30000);
        CHECK(n > 0);
        at += n;
    }
    close(*(int *)fd);
    return NULL;
}

static void into_device(int reader, int writer)
{
    pthread_t thread;
    CHECK(write(writer, sent, 100) == 100);
    CHECK(read(reader, device + 5, 60) == 60);
    expect(5, sent, 60);
    /* A mixed vector takes the available bytes; its host part is in the middle. */
    unsigned char middle[10];
    struct iovec parts[3] = {{device, 10}, {middle, 10}, {device + 100, 50}};
    CHECK(readv(reader, parts, 3) == 40);
    expect(0, sent + 60, 10);
    CHECK(memcmp(middle, sent + 70, 10) == 0);
    expect(100, sent + 80, 20);
    CHECK(pthread_create(&thread, NULL, send_all, &writer) == 0);
    size_t done = 0;
    for (;;) {
        ssize_t n = read(reader, device + done, SIZE - done);
        CHECK(n >= 0);
        if (n == 0)
            break;
        done += n;
        if (done == SIZE) {
            CHECK(read(reader, middle, 1) == 0);
            break;
        }
    }
    CHECK(done == SIZE);
    pthread_join(thread, NULL);
    expect(0, sent, SIZE);
    close(reader);
}

static void *receive_all(void *fd)
{
    for (size_t at = 0;;) {
        ssize_t n = read(*(int *)fd, got + at, SIZE - at);
        CHECK(n >= 0);
        if (n == 0)
            return NULL;
        at += n;
    }
}

/* Writes from device memory, all of it, although the other end reads it in parts. */
static void from_device(int reader, int writer)
{
    pthread_t thread;
    unsigned char front[60];
    CHECK(write(writer, device + 5, 60) == 60 && read(reader, front, 60) == 60 && memcmp(front, sent + 5, 60) == 0);
    struct iovec parts[3] = {{device, 10}, {sent + 10, 10}, {device + 20, 40}};
    CHECK(writev(writer, parts, 3) == 60 && read(reader, front, 60) == 60 && memcmp(front, sent, 60) == 0);
    memset(got, 0, SIZE);
    CHECK(pthread_create(&thread, NULL, receive_all, &reader) == 0);
    CHECK(write(writer, device, SIZE) == SIZE);
    close(writer);
    pthread_join(thread, NULL);
    CHECK(memcmp(got, sent, SIZE) == 0);
    close(reader);
}

static void interrupted(int signal)
{
    (void)signal;
}

int main(void)
{
    device = device_alloc(SIZE);
    for (size_t i = 0; i < SIZE; i++)
        sent[i] = (unsigned char)(i * 2654435761u >> 13);
    int ends[2];
    CHECK(pipe(ends) == 0);
    into_device(ends[0], ends[1]);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    into_device(ends[0], ends[1]);

    /* Datagrams stay separate, and a short buffer takes the front of one. */
    CHECK(socketpair(AF_UNIX, SOCK_DGRAM, 0, ends) == 0);
    CHECK(write(ends[1], sent, 300) == 300 && write(ends[1], sent + 300, 50) == 50 && write(ends[1], sent, 8) == 8);
    CHECK(read(ends[0], device, 100) == 100);
    expect(0, sent, 100);
    unsigned char front[20];
    struct iovec parts[2] = {{front, 20}, {device, 200}};
    CHECK(readv(ends[0], parts, 2) == 50);
    CHECK(memcmp(front, sent + 300, 20) == 0);
    expect(0, sent + 320, 30);
    CHECK(recv(ends[0], front, 20, 0) == 8);

    device_put(device, sent, SIZE);
    int both[2];
    CHECK(pipe(both) == 0);
    from_device(both[0], both[1]);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, both) == 0);
    from_device(both[0], both[1]);

    /* Each write is a datagram, vectors too, and a write that is too long sends none. */
    CHECK(socketpair(AF_UNIX, SOCK_DGRAM, 0, both) == 0);
    CHECK(write(both[1], device, 300) == 300 && writev(both[1], (struct iovec[]){{sent, 7}, {device + 7, 43}}, 2) == 50);
    CHECK(recv(both[0], got, SIZE, 0) == 300 && memcmp(got, sent, 300) == 0);
    CHECK(recv(both[0], got, SIZE, 0) == 50 && memcmp(got, sent, 50) == 0);
    CHECK(write(both[1], sent, SIZE) == -1 && errno == EMSGSIZE);
    FAILS(write(both[1], device, SIZE), EMSGSIZE);
    close(both[0]), close(both[1]);

    /* A full pipe takes what fits, and then nothing. */
    CHECK(pipe2(both, O_NONBLOCK) == 0);
    ssize_t room = write(both[1], sent, SIZE);
    CHECK(room > 0 && room < SIZE);
    for (ssize_t n, left = room; left > 0; left -= n)
        CHECK((n = read(both[0], got, left)) > 0);
    CHECK(write(both[1], device, SIZE) == room);
    FAILS(write(both[1], device, SIZE), EAGAIN);
    CHECK(read(both[0], got, SIZE) == room && memcmp(got, sent, room) == 0);
    close(both[0]), close(both[1]);

    /* A signal ends a waiting read, since its handler was installed without SA_RESTART. */
    struct sigaction action = {.sa_handler = interrupted};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    /* A repeated timer: on a slow machine the first signal may come before the thread waits. */
    struct itimerval often = {.it_value.tv_usec = 300000, .it_interval.tv_usec = 300000}, never = {0};
    CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
    FAILS(read(ends[0], device, 100), EINTR);
    FAILS(readv(ends[0], parts, 2), EINTR);
    /* A signal ends a waiting write too, which returns the bytes written. */
    CHECK(pipe(both) == 0);
    for (ssize_t n, done = 0; done < room; done += n)
        CHECK((n = write(both[1], device, SIZE)) > 0 && done + n <= room);
    FAILS(write(both[1], device, 10), EINTR);
    CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0);
    device_free(device);
    return 0;
}
