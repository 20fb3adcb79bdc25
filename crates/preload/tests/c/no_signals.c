/* Pinned files if the kernel refuses what pinning needs: signals between threads (a seccomp filter), address space. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <spinio.h>

#include "check.h"

enum { SIZE = 16 << 20, LARGE = 512 << 20 };

/* tgkill fails with EPERM, in every thread. */
static void refuse_tgkill(void)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_tgkill, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) != 0) {
        puts("skipped: no seccomp filter for all threads");
        exit(0);
    }
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    alarm(600); /* a hang becomes a failure */
    char *device = spinio_mem_alloc("emulated", 1 << 20, 0);
    char path[] = "no-signals-XXXXXX";
    int out = mkstemp(path);
    CHECK(device && out >= 0 && ftruncate(out, strcmp(argv[1], "space") ? SIZE : LARGE) == 0 && close(out) == 0);
    int fd = open(path, O_RDONLY);
    CHECK(fd >= 0 && unlink(path) == 0);
    if (!strcmp(argv[1], "before"))
        refuse_tgkill();
    if (!strcmp(argv[1], "space")) {
        CHECK(pread(fd, device, 1 << 20, 0) == 1 << 20);
        struct rlimit limit = {RLIM_INFINITY, RLIM_INFINITY};
        char line[256];
        unsigned long kilobytes = 0;
        FILE *status = fopen("/proc/self/status", "r");
        while (status && fgets(line, sizeof line, status))
            if (sscanf(line, "VmSize: %lu", &kilobytes) == 1)
                break;
        /* Enough for threads and their arenas, but not for the file. */
        limit.rlim_cur = (kilobytes << 10) + LARGE / 2;
        CHECK(kilobytes && setrlimit(RLIMIT_AS, &limit) == 0);
        FAILS(spinio_pin_file(fd), ENOMEM);
        CHECK(strstr(spinio_last_error(), "RLIMIT_AS") && !strstr(spinio_last_error(), "overlayfs"));
        return 0;
    }
    if (spinio_pin_file(fd) != 0) {
        printf("skipped: %s\n", spinio_last_error());
        return 0;
    }
    if (!strcmp(argv[1], "after"))
        refuse_tgkill();
    for (int i = 0; i < 3; i++) {
        CHECK(spinio_is_pinned(fd) == 1 && spinio_unpin_file(fd) == 0 && spinio_is_pinned(fd) == 0);
        CHECK(spinio_pin_file(fd) == 0);
    }
    CHECK(spinio_unpin_file(fd) == 0);
    return 0;
}
