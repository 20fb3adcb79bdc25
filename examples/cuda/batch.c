/* Reads a thousand random blocks of a file into GPU memory at once.
 *
 *     cc -O2 -o batch batch.c -I$CUDA_HOME/include -L$CUDA_HOME/lib64 -lcudart \
 *         -I$SPIN/crates/capi/include -L$SPIN/target/release/deps -lspinio -Wl,-rpath,$SPIN/target/release/deps
 *     ./batch FILE
 *
 * SPIN is the root of this repository.
 */
#include <cuda_runtime.h>
#include <errno.h>
#include <fcntl.h>
#include <spinio.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BLOCK = 4096, COUNT = 1000 };

int main(int argc, char **argv)
{
    int fd = argc == 2 ? open(argv[1], O_RDONLY) : -1;
    off_t size = lseek(fd, 0, SEEK_END);
    char *gpu;
    if (size < BLOCK || cudaMalloc((void **)&gpu, (size_t)COUNT * BLOCK) != cudaSuccess)
        return fprintf(stderr, "usage: batch FILE (of 4096 bytes or more)\n"), 1;

    if (spinio_pin_file(fd)) /* pins the file: useful for many batches; optional */
        fprintf(stderr, "not pinned: %s\n", spinio_last_error());

    struct spinio_read_op piece[COUNT];
    for (int i = 0; i < COUNT; i++)
        piece[i] = (struct spinio_read_op){
            .fd = fd, .offset = rand() % (size / BLOCK) * BLOCK, .size = BLOCK, .buffer = gpu + (size_t)i * BLOCK};
    ssize_t bytes = spinio_batch(piece, COUNT);
    if (bytes < 0)
        return fprintf(stderr, "%s\n", spinio_last_error()), 1;
    for (int i = 0; i < COUNT; i++)
        if (piece[i].result < 0)
            fprintf(stderr, "block at %llu: %s\n", (unsigned long long)piece[i].offset, strerror(-piece[i].result));

    printf("%zd bytes are on the GPU\n", bytes);
    return 0;
}
