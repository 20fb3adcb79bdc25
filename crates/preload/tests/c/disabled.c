/* Under SPINIO_DISABLE=1 the hooks do nothing: the kernel alone decides about device memory. */
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include "check.h"
#include "memory.h"

int main(void)
{
    char *device = device_alloc(4096);
    char host[4];
    struct iovec parts[2] = {{host, 4}, {device, 4}};
    int fd = open("/dev/zero", O_RDONLY);
    CHECK(fd >= 0);
    FAILS(read(fd, device, 4), EFAULT);
    FAILS(pread(fd, device, 4, 0), EFAULT);
    FAILS(readv(fd, parts + 1, 1), EFAULT);
    CHECK(readv(fd, parts, 2) == 4);
    return 0;
}
