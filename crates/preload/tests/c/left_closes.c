/* A signal handler leaves two waiting calls of close() of one number by longjmp: both changes of the number never end.
 * A file that gets the number later is read as any other, and its offset stands where the bytes end. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

enum { SIZE = 8 << 20, SHORT = 1 << 20, NUMBER = 77 };
static sigjmp_buf out;

static void jump(int signal)
{
    (void)signal;
    siglongjmp(out, 1);
}

/* close() of this socket waits: it has SO_LINGER and bytes that its peer does not read. */
static int lingering_socket(void)
{
    static char bytes[1 << 16];
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    struct linger linger = {1, 60};
    int listener = socket(AF_INET, SOCK_STREAM, 0), ours = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(listener, (void *)&at, size) == 0 && listen(listener, 1) == 0);
    CHECK(getsockname(listener, (void *)&at, &size) == 0 && connect(ours, (void *)&at, size) == 0);
    CHECK(accept(listener, NULL, NULL) >= 0 && close(listener) == 0);
    while (send(ours, bytes, sizeof bytes, MSG_DONTWAIT) > 0)
        ;
    CHECK(setsockopt(ours, SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0);
    return ours;
}

int main(void)
{
    static char zeros[SIZE];
    char *device = device_alloc(SIZE), path[] = "left-closes-XXXXXX";
    int file = mkstemp(path);
    CHECK(file >= 0 && unlink(path) == 0 && write(file, zeros, SIZE) == SIZE && fsync(file) == 0);
    CHECK(pread(file, device, SIZE, 0) == SIZE && signal(SIGALRM, jump) != SIG_ERR);
    for (volatile int turn = 0; turn < 2; turn++) {
        int waits = lingering_socket();
        CHECK(dup2(waits, NUMBER) == NUMBER && close(waits) == 0);
        if (sigsetjmp(out, 1) == 0) {
            struct itimerval soon = {{0, 0}, {0, 30000}};
            CHECK(setitimer(ITIMER_REAL, &soon, NULL) == 0);
            close(NUMBER);
            CHECK(!"a close that lingers returned");
        }
    }
    CHECK(dup2(file, NUMBER) == NUMBER && lseek(NUMBER, 0, SEEK_SET) == 0);
    CHECK(read(NUMBER, device, SIZE) == SIZE && lseek(NUMBER, 0, SEEK_CUR) == SIZE);
    CHECK(pread(NUMBER, device, SIZE, 0) == SIZE);
    /* The range that a read claims is larger than the file. */
    CHECK(ftruncate(file, SHORT) == 0);
    for (int turn = 0; turn < 2; turn++) {
        CHECK(lseek(NUMBER, 0, SEEK_SET) == 0);
        CHECK(read(NUMBER, device, SIZE) == SHORT && lseek(NUMBER, 0, SEEK_CUR) == SHORT);
    }
    device_free(device);
    return 0;
}
