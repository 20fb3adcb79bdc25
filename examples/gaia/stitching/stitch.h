// The kernels of the example, which the laboratory's program has too (benches/gaia/programs): each tile is found in the
// overview, and its cell pasted into the picture.
#ifndef STITCH_H
#define STITCH_H

#include <spinio/kernel.h>

#include "tiles.h"

enum : unsigned { STITCH_THREADS = 256 };

// What the kernels work on, in device memory but for the numbers.
struct Work {
    tiles t;
    unsigned writer, writers;
    const unsigned char *overview, *images;
    unsigned *differences; // of each tile at each position
    unsigned *found;       // the position of each tile
};

__global__ void compare(Work work)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x, tile = i / POSITIONS;
    if (tile < work.t.columns * work.t.rows && writer_of(&work.t, tile, work.writers) == work.writer)
        work.differences[i] = difference(&work.t, work.overview, work.images, tile, i % POSITIONS);
}

__global__ void choose(Work work)
{
    unsigned tile = blockIdx.x * blockDim.x + threadIdx.x;
    if (tile >= work.t.columns * work.t.rows || writer_of(&work.t, tile, work.writers) != work.writer)
        return;
    const unsigned *differences = work.differences + size_t(tile) * POSITIONS;
    unsigned best = 0;
    for (unsigned position = 1; position < POSITIONS; position++)
        if (differences[position] < differences[best])
            best = position;
    work.found[tile] = best;
}

// One thread a pixel. Stores only the pixels of its own tiles: what a kernel does not store stays as others leave it.
__global__ void paste(Work work, unsigned char *picture)
{
    size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x, line = width(&work.t);
    if (i >= line * height(&work.t))
        return;
    unsigned x = unsigned(i % line), y = unsigned(i / line), tile = y / CELL * work.t.columns + x / CELL;
    if (writer_of(&work.t, tile, work.writers) != work.writer)
        return;
    const unsigned char *from = pixel(work.images, tile, work.found[tile], x % CELL, y % CELL);
    for (int c = 0; c < 3; c++)
        picture[i * 3 + c] = from[c];
}

static unsigned stitch_blocks(size_t threads)
{
    return unsigned((threads + STITCH_THREADS - 1) / STITCH_THREADS);
}

static bool stitch(const Work &work, unsigned char *picture)
{
    size_t count = size_t(work.t.columns) * work.t.rows;
    spinio::launch(compare, stitch_blocks(count * POSITIONS), unsigned(STITCH_THREADS), work);
    spinio::launch(choose, stitch_blocks(count), unsigned(STITCH_THREADS), work);
    spinio::launch(paste, stitch_blocks(width(&work.t) * height(&work.t)), unsigned(STITCH_THREADS), work, picture);
    return !cudaGetLastError() && !cudaDeviceSynchronize();
}

#endif
