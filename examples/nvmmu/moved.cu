// The same program as in the paper's Fig. 9: one call moves the image to the GPU, and one the result to the file.
#include <nvmmu.h>
#include <spinio.h>

#include "image.h"

static void check(bool right)
{
    if (!right) {
        std::fprintf(stderr, "%s\n", spinio_last_error());
        std::exit(1);
    }
}

int main(int argc, char **argv)
{
    auto [r_filename, w_filename, imageWidth, imageHeight, imageChannels, deviceMask, dimGrid, dimBlock] = Arguments(argc, argv);
    float *pGPUInP2P, *pGPUOutP2P;
    const int tid = 0;
    Stopwatch watch;

    // begin
    int nImageDataSize = imageWidth * imageHeight * imageChannels * sizeof(float);
    check(nvmmuBegin(tid, w_filename));
    check(!cudaMalloc(&pGPUInP2P, nImageDataSize) && !cudaMalloc(&pGPUOutP2P, nImageDataSize));
    check(nvmmuMove(r_filename, pGPUInP2P, 0, nImageDataSize, H2D) == nImageDataSize);
    spinio::launch(filter, dimGrid, dimBlock, pGPUInP2P, pGPUOutP2P, deviceMask, imageChannels, imageWidth, imageHeight);
    check(nvmmuMove(w_filename, pGPUOutP2P, 0, nImageDataSize, D2H) == nImageDataSize);
    check(nvmmuEnd(tid));
    // end
}
