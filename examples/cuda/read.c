/* Reads a file into GPU memory with one pread.
 *
 *     cc -O2 -o read read.c -I$CUDA_HOME/include -L$CUDA_HOME/lib64 -lcudart
 *     spinio run --stats -- ./read FILE
 */
#include <cuda_runtime.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    int fd = argc == 2 ? open(argv[1], O_RDONLY) : -1;
    off_t size = lseek(fd, 0, SEEK_END);
    char *gpu, first;
    if (size <= 0 || cudaMalloc((void **)&gpu, size) != cudaSuccess)
        return fprintf(stderr, "usage: read FILE (not empty, no larger than GPU memory)\n"), 1;

    ssize_t n = pread(fd, gpu, size, 0); /* the only difference: a device pointer */
    if (n < 0)
        return perror("pread"), 1;

    cudaMemcpy(&first, gpu, 1, cudaMemcpyDeviceToHost);
    printf("%zd bytes are on the GPU; the first is 0x%02x\n", n, (unsigned char)first);
    return 0;
}
