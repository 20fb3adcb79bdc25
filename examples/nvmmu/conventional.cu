// The NVMMU paper's Fig. 4: an image is copied through host memory to the GPU, and the result back through it to a file.
#include <fcntl.h>
#include <unistd.h>

#include "image.h"

static void check(bool right, const char *what)
{
    if (!right) {
        std::perror(what);
        std::exit(1);
    }
}

int main(int argc, char **argv)
{
    auto [r_fileName, w_fileName, imageWidth, imageHeight, imageChannels, deviceMask, dimGrid, dimBlock] = Arguments(argc, argv);
    float *pGPUInput, *pGPUOutput;
    Stopwatch watch;

    // begin
    size_t nImageDataSize = imageWidth * imageHeight * imageChannels * sizeof(float);
    int fd_r = open(r_fileName, O_RDONLY);
    check(fd_r >= 0, r_fileName);
    int fd_w = open(w_fileName, O_WRONLY | O_CREAT, 0666);
    check(fd_w >= 0, w_fileName);
    char *pSSDInput = (char *)malloc(nImageDataSize);
    char *pSSDOutput = (char *)malloc(nImageDataSize);
    check(pSSDInput && pSSDOutput, "malloc");
    check(!cudaMalloc(&pGPUInput, nImageDataSize) && !cudaMalloc(&pGPUOutput, nImageDataSize), "cudaMalloc");
    for (size_t done = 0; done < nImageDataSize;) {
        ssize_t got = read(fd_r, pSSDOutput + done, nImageDataSize - done);
        check(got > 0, "read");
        done += got;
    }
    check(!cudaMemcpy(pGPUInput, pSSDOutput, nImageDataSize, cudaMemcpyHostToDevice), "cudaMemcpy");
    spinio::launch(filter, dimGrid, dimBlock, pGPUInput, pGPUOutput, deviceMask, imageChannels, imageWidth, imageHeight);
    check(!cudaMemcpy(pSSDInput, pGPUOutput, nImageDataSize, cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (size_t done = 0; done < nImageDataSize;) {
        ssize_t put = write(fd_w, pSSDInput + done, nImageDataSize - done);
        check(put > 0, "write");
        done += put;
    }
    check(!close(fd_w) && !close(fd_r), "close");
    free(pSSDInput);
    free(pSSDOutput);
    // end
}
