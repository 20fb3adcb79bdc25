/* The fortified functions that programs compiled with -D_FORTIFY_SOURCE=2 call; a buffer overrun still aborts. */
#include <fcntl.h>
#include <signal.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

ssize_t __read_chk(int, void *, size_t, size_t);
ssize_t __pread_chk(int, void *, size_t, off_t, size_t);
ssize_t __pread64_chk(int, void *, size_t, off_t, size_t);
size_t __fread_chk(void *, size_t, size_t, size_t, FILE *);
size_t __fread_unlocked_chk(void *, size_t, size_t, size_t, FILE *);

int main(void)
{
    char *device = device_alloc(4096), host[4] = "";
    FILE *file = fopen("fortified.tmp", "w+");
    CHECK(file && fputs("abcdefghijkl", file) >= 0 && fflush(file) == 0);
    rewind(file);
    int fd = fileno(file);
    CHECK(__pread_chk(fd, device, 4, 0, 4) == 4);
    device_get(host, device, 4);
    CHECK(memcmp(host, "abcd", 4) == 0);
    CHECK(__pread64_chk(fd, device, 4, 4, 100) == 4);
    device_get(host, device, 4);
    CHECK(memcmp(host, "efgh", 4) == 0);
    CHECK(__fread_chk(device, 100, 2, 2, file) == 2);
    CHECK(__fread_unlocked_chk(device + 4, 100, 2, 2, file) == 2);
    device_get(host, device + 2, 4);
    CHECK(memcmp(host, "cdef", 4) == 0);
    CHECK(lseek(fd, 1, SEEK_SET) == 1 && __read_chk(fd, device, 4, 4) == 4);
    device_get(host, device, 4);
    CHECK(memcmp(host, "bcde", 4) == 0);
    pid_t child = fork();
    if (child == 0) {
        close(2); /* hides libc's message */
        __read_chk(fd, device, 4096, 8);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    unlink("fortified.tmp");
    return 0;
}
