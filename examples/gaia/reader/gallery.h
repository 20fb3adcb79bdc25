/* What the programs of the example know: a gallery, a file of many small pictures, and how one of them is found.
 *
 *     page 0          struct gallery
 *     page 1 ...      index: number of the first tile of each bucket, and at the end the number of all tiles
 *     tiles_at ...    tiles, sorted by bucket: SIDE x SIDE pixels of 4 bytes (red, green, blue, 0), a page each
 *
 * The bucket of a tile is its mean color, coarsely: LEVELS steps of each channel. Which tile is the best one for a block of
 * a picture, only the pixels tell: of the tiles in the block's bucket, the one that differs least. So a search for it
 * needs a few tiles of a file of any size, and knows which ones when it has seen the block.
 */
#ifndef GALLERY_H
#define GALLERY_H

#include <stdint.h>

#ifdef __CUDACC__
#define GALLERY_FUNCTION static inline __host__ __device__
#else
#define GALLERY_FUNCTION static inline
#endif

#define GALLERY_MAGIC UINT64_C(0x7972656c6c614721)

enum {
    SIDE = 32,
    PIXELS = SIDE * SIDE,
    TILE_BYTES = PIXELS * 4,
    LEVELS = 6,
    BUCKETS = LEVELS * LEVELS * LEVELS
};

struct gallery {
    uint64_t magic, tiles_at;
    uint32_t tiles;
};

/* Where the index is, in numbers of 4 bytes from the beginning of the file, and where a tile is. */
enum { INDEX_AT = 4096 / 4 };

GALLERY_FUNCTION uint64_t tile_at(const struct gallery *g, uint32_t tile)
{
    return (g->tiles_at + tile * (uint64_t)TILE_BYTES) / 4;
}

/* The sums of the channels of all pixels of a tile or block. */
struct color_sum {
    uint32_t channel[3];
};

GALLERY_FUNCTION unsigned bucket_of(const struct color_sum *sum)
{
    unsigned bucket = 0;
    for (int c = 0; c < 3; c++)
        bucket = bucket * LEVELS + sum->channel[c] / PIXELS * LEVELS / 256;
    return bucket;
}

GALLERY_FUNCTION void add_pixel(struct color_sum *sum, uint32_t pixel)
{
    for (int c = 0; c < 3; c++)
        sum->channel[c] += pixel >> 8 * c & 255;
}

/* The squared distance of two colors. */
GALLERY_FUNCTION uint32_t distance(uint32_t a, uint32_t b)
{
    uint32_t sum = 0;
    for (int c = 0; c < 3; c++) {
        int by = (int)(a >> 8 * c & 255) - (int)(b >> 8 * c & 255);
        sum += (uint32_t)(by * by);
    }
    return sum;
}

#endif
