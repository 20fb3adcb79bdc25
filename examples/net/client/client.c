/* client.c: a CPU program that talks to a kernel through memory that both map, if it can: sends lines, prints what comes back; then
 * numbers, which it writes and reads in place, without a buffer of its own.
 *
 *     ./client tcp://127.0.0.1:7007 hello        against ../echo
 *
 * The first line says how the bytes travel, and why. */
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include <spinio.h>
#include <spinio_net.h>

static double microseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

/* So many bytes there and back, in place; 0, or -1 and errno. */
static int numbers_in_place(spinio_socket *s, size_t total)
{
    size_t sent = 0, received = 0;
    while (received < total) {
        void *at;
        ssize_t room = sent < total ? spinio_socket_reserve(s, &at, total - sent < 4096 ? total - sent : 4096, 0) : 0;
        for (ssize_t i = 0; i < room; i++)
            ((unsigned char *)at)[i] = (unsigned char)((sent + (size_t)i) * 7);
        if (room < 0 || (room > 0 && spinio_socket_commit(s, (size_t)room)))
            return -1;
        for (sent += (size_t)room; received < sent;) {
            ssize_t got = spinio_socket_borrow(s, &at, sent - received, 0);
            for (ssize_t i = 0; i < got; i++)
                if (((unsigned char *)at)[i] != (unsigned char)((received + (size_t)i) * 7))
                    return fprintf(stderr, "client: a wrong byte\n"), -1;
            if (got <= 0 || spinio_socket_give_back(s, (size_t)got))
                return -1;
            received += (size_t)got;
        }
    }
    return 0;
}

int main(int count, char **arguments)
{
    const char *address = count > 1 ? arguments[1] : "tcp://127.0.0.1:7007", *text = count > 2 ? arguments[2] : "hello";
    const size_t bytes = strlen(text);
    char transport[128], back[4096];
    spinio_socket *s = bytes && bytes < sizeof back ? spinio_socket_connect(address, NULL) : NULL;
    if (!s || spinio_socket_transport(s, transport, sizeof transport) < 0)
        return fprintf(stderr, "client: %s: %s\n", address, spinio_last_error()), 1;
    printf("%s\n", transport);
    double best = 1e9;
    for (int round = 0; round < 1000; round++) {
        const double begun = microseconds();
        if (spinio_socket_send(s, text, bytes, 0) != (ssize_t)bytes || spinio_socket_recv(s, back, bytes, MSG_WAITALL) != (ssize_t)bytes)
            return perror("client"), 1;
        const double took = microseconds() - begun;
        best = took < best ? took : best;
    }
    printf("%.*s, 1000 times; the fastest round trip took %.1f us\n", (int)bytes, back, best);
    const size_t numbers = 1 << 20;
    const double begun = microseconds();
    if (numbers_in_place(s, numbers))
        return perror("client"), 1;
    printf("1 MiB of numbers there and back in place, 4 KiB at a time: %.1f ms\n", (microseconds() - begun) * 1e-3);
    return spinio_socket_close(s) != 0;
}
