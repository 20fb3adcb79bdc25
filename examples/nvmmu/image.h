// Shared by both programs: the filter, and the command line.
//
//     conventional IN OUT WIDTH HEIGHT CHANNELS
//     moved        IN OUT WIDTH HEIGHT CHANNELS
//
// IN is an image of 32-bit floats, channel by channel; OUT becomes the same image, smoothed.
#ifndef IMAGE_H
#define IMAGE_H

#include <spinio/kernel.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

// A 3 x 3 mean, weighted by the mask.
__global__ void filter(const float *in, float *out, const float *mask, int channels, int width, int height)
{
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y, c = blockIdx.z;
    if (x >= width || y >= height || c >= channels)
        return;
    float sum = 0, weight = 0;
    for (int dy = -1; dy <= 1; dy++)
        for (int dx = -1; dx <= 1; dx++)
            if (x + dx >= 0 && x + dx < width && y + dy >= 0 && y + dy < height) {
                float by = mask[(dy + 1) * 3 + dx + 1];
                sum += by * in[(size_t(c) * height + y + dy) * width + x + dx];
                weight += by;
            }
    out[(size_t(c) * height + y) * width + x] = sum / weight;
}

struct Arguments {
    char *r_fileName, *w_fileName;
    int imageWidth, imageHeight, imageChannels;
    float *deviceMask;
    dim3 dimGrid, dimBlock;

    Arguments(int argc, char **argv)
    {
        if (argc != 6) {
            std::fprintf(stderr, "usage: %s IN OUT WIDTH HEIGHT CHANNELS\n", argv[0]);
            std::exit(2);
        }
        r_fileName = argv[1];
        w_fileName = argv[2];
        imageWidth = std::atoi(argv[3]);
        imageHeight = std::atoi(argv[4]);
        imageChannels = std::atoi(argv[5]);
        const float mask[9] = {1, 2, 1, 2, 4, 2, 1, 2, 1};
        if (cudaMalloc(&deviceMask, sizeof mask) || cudaMemcpy(deviceMask, mask, sizeof mask, cudaMemcpyHostToDevice)) {
            std::fprintf(stderr, "no device\n");
            std::exit(1);
        }
        dimBlock = dim3(32, 8);
        dimGrid = dim3((imageWidth + 31) / 32, (imageHeight + 7) / 8, imageChannels);
    }
};

// Prints the elapsed time when it is destroyed.
class Stopwatch {
public:
    ~Stopwatch()
    {
        std::printf("%.6f s\n", std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
    }

private:
    std::chrono::steady_clock::time_point began = std::chrono::steady_clock::now();
};

#endif
