/* Prints whether it runs with more privileges than its parent process, and whether the software GPU has 1 MiB free,
 * which the environment denies. */
#include <stdio.h>
#include <sys/auxv.h>

#include "spinio.h"

int main(void)
{
    void *memory = spinio_mem_alloc("emulated", 1 << 20, 0);
    printf("%s, %s\n", getauxval(AT_SECURE) ? "more rights" : "no more rights", memory ? "room" : "no room");
    spinio_mem_free(memory);
    return 0;
}
