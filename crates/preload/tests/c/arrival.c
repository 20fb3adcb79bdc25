/* Above 64 KiB a call returns once its bytes have arrived in the device, also where it is made of smaller parts. The
 * copies of this device take long, and the CPU can load from its memory: a call that does not wait leaves old bytes. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include <spinio.h>

#include "../../../../benches/common/preloaded.h"
#include "check.h"
#include "memory.h"

#define LARGE (1 << 20)
#define TAIL 4096
#define PART (60 << 10)

static unsigned char *host_mapped(size_t size)
{
    unsigned char *memory = FIND(spinio_mem_alloc)("emulated", size, SPINIO_MEM_HOST_MAPPED);
    CHECK(memory);
    return memory;
}

int main(void)
{
    static unsigned char bytes[LARGE + TAIL];
    memset(bytes, 7, sizeof bytes);
    FILE *file = tmpfile();
    CHECK(file && fwrite(bytes, 1, sizeof bytes, file) == sizeof bytes && fflush(file) == 0);
    int fd = fileno(file);

    unsigned char *memory = host_mapped(sizeof bytes);
    rewind(file);
    CHECK(fread(memory, 1, sizeof bytes, file) == sizeof bytes);
    CHECK(!memcmp(memory, bytes, sizeof bytes));

    /* Of a file, and of a stream. */
    unsigned char *parts = host_mapped(2 * PART);
    struct iovec vectors[] = {{parts, PART}, {parts + PART, PART}};
    CHECK(preadv(fd, vectors, 2, 0) == 2 * PART);
    CHECK(!memcmp(parts, bytes, 2 * PART));

    unsigned char *ends = host_mapped(2 * PART);
    int both[2];
    CHECK(pipe(both) == 0 && fcntl(both[1], F_SETPIPE_SZ, 2 * PART) >= 2 * PART);
    CHECK(write(both[1], bytes, 2 * PART) == 2 * PART);
    struct iovec halves[] = {{ends, PART}, {ends + PART, PART}};
    CHECK(readv(both[0], halves, 2) == 2 * PART);
    CHECK(!memcmp(ends, bytes, 2 * PART));
    return 0;
}
