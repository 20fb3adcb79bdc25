/* What the system calls of a proxy cost with epoll and with io_uring: an echo of 64 bytes over TCP on loopback, with many connections.
 *
 *   cc -O2 -o epoll_uring epoll_uring.c -luring -pthread
 *   epoll_uring [ROUNDS]        prints a line for each number of connections, kind of wait and method
 *
 *   client: each connection has one message on its way ──> server: one thread, as the proxy of a net
 *
 *   epoll   epoll_wait (edge-triggered), recv until EAGAIN, send: what the proxy does
 *   uring   a RECV into the connection's buffer and a SEND for each message; all of a pass with one io_uring_enter
 *           (SINGLE_ISSUER, DEFER_TASKRUN)
 *
 * `spin` looks again at once where nothing is there, as the proxy of a machine with 8 processors does; `sleep` waits in Linux. The methods
 * take turns; medians of ROUNDS (7) are printed: processor time of the server's thread for each message (with `spin` of no meaning, so not
 * printed), the median round trip, messages a second. Client and server need a processor each. Exit status 77 without io_uring. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../common/measure.h"

enum { BYTES = 64, MOST_CONNECTIONS = 1000, MOST_ROUNDS = 99, SECONDS = 1, SAMPLES = 1 << 20, EVENTS = 64, DEPTH = 4096 };

static atomic_bool stop;

struct server {
    int connections, ends[MOST_CONNECTIONS];
    bool spin, uring;
    double processor;
    char bytes[MOST_CONNECTIONS][BYTES];
};

static void serve_by_epoll(struct server *s)
{
    int epoll = epoll_create1(0);
    for (int i = 0; i < s->connections; i++) {
        struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u32 = i};
        if (epoll_ctl(epoll, EPOLL_CTL_ADD, s->ends[i], &event))
            die("epoll_ctl");
    }
    while (!stop) {
        struct epoll_event events[EVENTS];
        int count = epoll_wait(epoll, events, EVENTS, s->spin ? 0 : 100);
        for (int i = 0; i < count; i++) {
            int at = events[i].data.u32;
            while (recv(s->ends[at], s->bytes[at], BYTES, MSG_DONTWAIT) == BYTES)
                if (send(s->ends[at], s->bytes[at], BYTES, MSG_DONTWAIT | MSG_NOSIGNAL) != BYTES)
                    die("send");
        }
    }
    close(epoll);
}

static void ask_for_bytes(struct io_uring *ring, struct server *s, int at)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(ring);
    io_uring_prep_recv(sqe, s->ends[at], s->bytes[at], BYTES, 0);
    /* As after an event loop's EAGAIN: the next message is not there yet. */
    sqe->ioprio |= IORING_RECVSEND_POLL_FIRST;
    io_uring_sqe_set_data64(sqe, at);
}

static void serve_by_uring(struct server *s)
{
    struct io_uring ring;
    struct __kernel_timespec patience = {.tv_nsec = 100000000};
    if (io_uring_queue_init(DEPTH, &ring, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN))
        exit(77);
    for (int i = 0; i < s->connections; i++)
        ask_for_bytes(&ring, s, i);
    while (!stop) {
        struct io_uring_cqe *cqe;
        if (s->spin)
            io_uring_submit_and_get_events(&ring);
        else
            io_uring_submit_and_wait_timeout(&ring, &cqe, 1, &patience, NULL);
        unsigned head, seen = 0;
        io_uring_for_each_cqe(&ring, head, cqe) {
            seen++;
            uint64_t at = io_uring_cqe_get_data64(cqe);
            if (at == MOST_CONNECTIONS)
                continue;
            if (cqe->res != BYTES)
                die("recv");
            /* The answer leaves before the buffer is received into again. */
            struct io_uring_sqe *sqe = io_uring_get_sqe(&ring);
            io_uring_prep_send(sqe, s->ends[at], s->bytes[at], BYTES, MSG_NOSIGNAL);
            io_uring_sqe_set_data64(sqe, MOST_CONNECTIONS);
            sqe->flags |= IOSQE_CQE_SKIP_SUCCESS;
            ask_for_bytes(&ring, s, at);
        }
        io_uring_cq_advance(&ring, seen);
    }
    io_uring_queue_exit(&ring);
}

static void *serve(void *argument)
{
    struct server *s = argument;
    double before = seconds(CLOCK_THREAD_CPUTIME_ID);
    (s->uring ? serve_by_uring : serve_by_epoll)(s);
    s->processor = seconds(CLOCK_THREAD_CPUTIME_ID) - before;
    return NULL;
}

/* A connection on loopback. */
static void connect_both(int listener, int *client, int *server)
{
    struct sockaddr_in at;
    socklen_t size = sizeof at;
    int on = 1;
    *client = socket(AF_INET, SOCK_STREAM, 0);
    if (getsockname(listener, (struct sockaddr *)&at, &size) || connect(*client, (struct sockaddr *)&at, size))
        die("connect");
    *server = accept(listener, NULL, NULL);
    if (*server < 0)
        die("accept");
    setsockopt(*client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(*server, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

struct result {
    double processor, round_trip, rate;
};

static struct result run(struct server *s)
{
    static int clients[MOST_CONNECTIONS];
    static double sent_at[MOST_CONNECTIONS], trips[SAMPLES];
    char bytes[BYTES] = {1};
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int listener = socket(AF_INET, SOCK_STREAM, 0), epoll = epoll_create1(0);
    if (bind(listener, (struct sockaddr *)&any, sizeof any) || listen(listener, 64))
        die("listen");
    for (int i = 0; i < s->connections; i++) {
        connect_both(listener, &clients[i], &s->ends[i]);
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = i};
        epoll_ctl(epoll, EPOLL_CTL_ADD, clients[i], &event);
    }
    pthread_t thread;
    stop = false;
    if (pthread_create(&thread, NULL, serve, s))
        die("pthread_create");
    double began = now(), time = began;
    for (int i = 0; i < s->connections; i++) {
        sent_at[i] = time;
        if (send(clients[i], bytes, BYTES, 0) != BYTES)
            die("send");
    }
    int64_t messages = 0;
    while (time - began < SECONDS) {
        struct epoll_event events[EVENTS];
        int count = epoll_wait(epoll, events, EVENTS, 100);
        for (int i = 0; i < count; i++) {
            int at = events[i].data.u32;
            if (recv(clients[at], bytes, BYTES, MSG_WAITALL) != BYTES)
                die("recv");
            time = now();
            trips[messages++ % SAMPLES] = time - sent_at[at];
            sent_at[at] = time;
            if (send(clients[at], bytes, BYTES, 0) != BYTES)
                die("send");
        }
        time = now();
    }
    double took = time - began;
    stop = true;
    pthread_join(thread, NULL);
    for (int i = 0; i < s->connections; i++) {
        close(clients[i]);
        close(s->ends[i]);
    }
    close(listener);
    close(epoll);
    int count = messages < SAMPLES ? messages : SAMPLES;
    return (struct result){s->processor / messages * 1e6, median(trips, count) * 1e6, messages / took};
}

int main(int arguments, char **argument)
{
    static const int connections[] = {1, 16, 64, 1000};
    static struct server s;
    int rounds = arguments > 1 ? atoi(argument[1]) : 7;
    struct rlimit files = {4096, 4096};
    if (rounds < 1 || rounds > MOST_ROUNDS) {
        fprintf(stderr, "epoll_uring: ROUNDS is a number from 1 to %d\n", MOST_ROUNDS);
        return 2;
    }
    setrlimit(RLIMIT_NOFILE, &files);
    printf("%11s %5s %6s %15s %14s %10s\n", "connections", "wait", "method", "us of processor", "round trip, us", "messages/s");
    for (size_t n = 0; n < sizeof connections / sizeof *connections; n++)
        for (int spin = 0; spin < 2; spin++) {
            double values[2][3][MOST_ROUNDS];
            for (int round = 0; round < rounds; round++)
                for (int uring = 0; uring < 2; uring++) {
                    s.connections = connections[n];
                    s.spin = spin, s.uring = uring;
                    struct result r = run(&s);
                    values[uring][0][round] = r.processor;
                    values[uring][1][round] = r.round_trip;
                    values[uring][2][round] = r.rate;
                }
            for (int uring = 0; uring < 2; uring++) {
                char processor[16] = "-";
                if (!spin)
                    snprintf(processor, sizeof processor, "%.2f", median(values[uring][0], rounds));
                printf("%11d %5s %6s %15s %14.1f %10.0f\n", connections[n], spin ? "spin" : "sleep", uring ? "uring" : "epoll", processor,
                       median(values[uring][1], rounds), median(values[uring][2], rounds));
            }
        }
    return 0;
}
