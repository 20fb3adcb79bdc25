// The kernel of the example: a warp replaces a block of the picture by the tile of the gallery that differs least from it.
//
//   block ── mean color ──> bucket ── index ──> a few candidates ── their pixels ──> the best one ──> output
//
// Where the gallery is read from is a parameter: on demand from the file, or all of it from device memory. Nothing else
// differs.
#ifndef COLLAGE_H
#define COLLAGE_H

#include <spinio/gaia_device.h>
#include <spinio/kernel.h>

#include "gallery.h"

// The gallery in its file.
class OnDemand {
public:
    // By value to the kernel; the reader itself is made there.
    explicit OnDemand(const spinio_gaia_reader &reader) : file(reader) {}

    // A number of the file, the same for all lanes; returns 1, or what reader::read() says.
    __device__ int number(uint64_t at, uint32_t *value) const
    {
        return gaia::reader<uint32_t>(file).read(at, value);
    }

    // A tile, until it is given back; false if it cannot be read.
    __device__ bool take(uint64_t at, const uint32_t **pixels) const
    {
        gaia::reader<uint32_t> numbers(file);
        int64_t got = numbers.pin(at, pixels);
        if (got > 0 && got < PIXELS) // the file was cut off
            numbers.unpin(*pixels);
        return got >= PIXELS;
    }

    __device__ void give_back(const uint32_t *pixels) const
    {
        gaia::reader<uint32_t>(file).unpin(pixels);
    }

private:
    spinio_gaia_reader file;
};

// All of the file in device memory.
class InMemory {
public:
    explicit InMemory(const uint32_t *numbers) : numbers(numbers) {}

    __device__ int number(uint64_t at, uint32_t *value) const
    {
        *value = numbers[at];
        return 1;
    }

    __device__ bool take(uint64_t at, const uint32_t **pixels) const
    {
        *pixels = numbers + at;
        return true;
    }

    __device__ void give_back(const uint32_t *) const {}

private:
    const uint32_t *numbers;
};

__device__ inline uint32_t sum_of_warp(uint32_t value)
{
    for (int by = 16; by > 0; by /= 2)
        value += __shfl_xor_sync(gaia::all_lanes, value, by);
    return value;
}

// Pictures are in pixels of 4 bytes, `columns` blocks wide. chosen: the tile of each block; failed: blocks without one.
template <typename Gallery>
__global__ void make_collage(Gallery file, gallery g, const uint32_t *picture, unsigned columns, unsigned blocks, uint32_t *output,
                             uint32_t *chosen, unsigned *failed)
{
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x, lane = thread % 32, warps = gridDim.x * blockDim.x / 32;
    for (unsigned block = thread / 32; block < blocks; block += warps) {
        // Each lane has a row.
        const uint64_t corner = (uint64_t(block / columns * SIDE) + lane) * columns * SIDE + block % columns * SIDE;
        color_sum sum = {{0, 0, 0}};
        for (int x = 0; x < SIDE; x++)
            add_pixel(&sum, picture[corner + x]);
        for (int c = 0; c < 3; c++)
            sum.channel[c] = sum_of_warp(sum.channel[c]);
        const unsigned bucket = bucket_of(&sum);

        uint32_t tile = 0, past = 0, best = ~0u, least = ~0u;
        bool good = file.number(INDEX_AT + bucket, &tile) == 1 && file.number(INDEX_AT + bucket + 1, &past) == 1;
        const uint32_t *pixels;
        for (; good && tile < past; tile++) {
            good = file.take(tile_at(&g, tile), &pixels);
            if (!good)
                break;
            uint32_t difference = 0;
            for (int x = 0; x < SIDE; x++)
                difference += distance(pixels[lane * SIDE + x], picture[corner + x]);
            file.give_back(pixels);
            difference = sum_of_warp(difference);
            if (difference < least) {
                least = difference;
                best = tile;
            }
        }
        if (good && best != ~0u && file.take(tile_at(&g, best), &pixels)) {
            for (int x = 0; x < SIDE; x++)
                output[corner + x] = pixels[lane * SIDE + x];
            file.give_back(pixels);
        } else if (lane == 0) {
            atomicAdd(failed, 1u);
        }
        if (lane == 0)
            chosen[block] = best;
    }
}

#endif
