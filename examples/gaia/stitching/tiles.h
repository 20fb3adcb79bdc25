/* What the programs of the example know: the photographs of a camera that moves over a scene, tile by tile.
 *
 *              CELL                   The camera does not stop exactly where it should: a tile shows its cell of the
 *     ┌──────────────────┐            picture, and up to 2 * JITTER pixels more on each side. Where the cell is in
 *     │ ┌────────────┐   │            the tile must be found: of all positions, the one where the tile agrees with
 *     │ │   cell     │   │ SIDE       the overview, a picture of the whole scene with every STEPth pixel only.
 *     │ └────────────┘   │
 *     └──────────────────┘            A row of a cell is 288 bytes of the picture's file, so that every page has
 *                                     parts of many tiles, of all writers.
 *
 * The file of tiles: struct tiles, the overview (1 byte a pixel), and the tiles (3 bytes a pixel), row by row.
 * The picture is a PPM: a line of text, then 3 bytes a pixel.
 */
#ifndef TILES_H
#define TILES_H

#include <stdint.h>

#ifdef __CUDACC__
#define TILES_FUNCTION static inline __host__ __device__
#else
#define TILES_FUNCTION static inline
#endif

#define TILES_MAGIC UINT64_C(0x2173656c69744147)

enum {
    CELL = 96,
    JITTER = 6,
    SIDE = CELL + 2 * JITTER,
    STEP = 4,
    POSITIONS = (2 * JITTER + 1) * (2 * JITTER + 1)
};

struct tiles {
    uint64_t magic;
    uint32_t columns, rows;
};

TILES_FUNCTION uint64_t width(const struct tiles *t)
{
    return t->columns * (uint64_t)CELL;
}

TILES_FUNCTION uint64_t height(const struct tiles *t)
{
    return t->rows * (uint64_t)CELL;
}

TILES_FUNCTION uint64_t picture_bytes(const struct tiles *t)
{
    return width(t) * height(t) * 3;
}

TILES_FUNCTION uint64_t overview_bytes(const struct tiles *t)
{
    return (width(t) / STEP) * (height(t) / STEP);
}

TILES_FUNCTION uint64_t tiles_bytes(const struct tiles *t)
{
    return t->columns * (uint64_t)t->rows * SIDE * SIDE * 3;
}

/* The writer of a tile: neighbours have different ones. */
TILES_FUNCTION unsigned writer_of(const struct tiles *t, unsigned tile, unsigned writers)
{
    return (tile % t->columns + tile / t->columns) % writers;
}

/* The pixel of a tile that is pixel (x, y) of its cell, if the cell is at this position of the tile. */
TILES_FUNCTION const unsigned char *pixel(const unsigned char *tiles, unsigned tile, unsigned position, unsigned x,
                                          unsigned y)
{
    unsigned column = x + position % (2 * JITTER + 1), row = y + position / (2 * JITTER + 1);
    return tiles + (tile * (uint64_t)(SIDE * SIDE) + row * SIDE + column) * 3;
}

/* How much a tile differs from the overview, if its cell is at this position. */
TILES_FUNCTION unsigned difference(const struct tiles *t, const unsigned char *overview, const unsigned char *tiles,
                                   unsigned tile, unsigned position)
{
    uint64_t line = width(t) / STEP;
    overview += (tile / t->columns) * (CELL / STEP) * line + (tile % t->columns) * (CELL / STEP);
    unsigned sum = 0;
    for (unsigned y = 0; y < CELL; y += STEP)
        for (unsigned x = 0; x < CELL; x += STEP) {
            int by = pixel(tiles, tile, position, x, y)[1] - overview[y / STEP * line + x / STEP];
            sum += by < 0 ? -by : by;
        }
    return sum;
}

#endif
