/* client.c: a CPU program that talks to a kernel through memory that both map, if it can: sends lines, prints what comes back.
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
    return spinio_socket_close(s) != 0;
}
