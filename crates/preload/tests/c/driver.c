/* A library with the driver's name, which reads into device memory: such a call is passed directly to the kernel. Built
 * twice: as that library (-DDRIVER) and as the program. */
#include <fcntl.h>
#include <unistd.h>

#ifdef DRIVER
int driver_read(int fd, void *buffer)
{
    volatile int got = (int)read(fd, buffer, 4);
    return got;
}
#else
#include "check.h"
#include "memory.h"

int driver_read(int fd, void *buffer);

int main(void)
{
    void *device = device_alloc(4096);
    int fd = open("/dev/zero", O_RDONLY);
    CHECK(fd >= 0);
    CHECK(read(fd, device, 4) == 4);
    FAILS(driver_read(fd, device), EFAULT);
    CHECK(read(fd, device, 4) == 4);
    return 0;
}
#endif
