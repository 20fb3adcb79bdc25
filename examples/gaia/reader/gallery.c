/* Makes a gallery: tiles of all colors, with shades, discs, stripes and squares.
 *
 *     gallery FILE TILES_PER_BUCKET SEED
 *
 * Prints the number of tiles and the bytes of the file. Exit status: 0 done, 1 an error (message on stderr), 2 usage.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gallery.h"

static uint32_t hash(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t x = a * 0x9e3779b1u ^ b * 0x85ebca77u ^ c * 0xc2b2ae3du;
    x = (x ^ x >> 15) * 0x2c1b3c6du;
    x = (x ^ x >> 12) * 0x297a2d39u;
    return x ^ x >> 15;
}

/* How bright a pattern is at a place, from -15 to 15. */
static int pattern(uint32_t kind, int x, int y)
{
    int turned = kind >> 2 & 1 ? SIDE - 1 - x : x, across = kind >> 3 & 1 ? y : turned;
    switch (kind & 3) {
    case 0: /* a shade, from one edge or corner to the opposite one */
        return kind >> 4 & 1 ? (turned + y) / 2 - 15 : across - 15;
    case 1: { /* a disc */
        int dx = 2 * x - SIDE + 1, dy = 2 * y - SIDE + 1;
        return dx * dx + dy * dy < SIDE * SIDE / 2 ? 15 : -15;
    }
    case 2: /* stripes */
        return across / (kind >> 4 & 1 ? 4 : 8) % 2 ? 15 : -15;
    default: /* squares */
        return (x / 8 + y / 8) % 2 ? 15 : -15;
    }
}

/* A tile whose mean color is in the bucket. */
static void draw(uint32_t *tile, unsigned bucket, uint32_t random)
{
    int places[PIXELS], mean = 0, levels[3] = {bucket / (LEVELS * LEVELS), bucket / LEVELS % LEVELS, bucket % LEVELS};
    for (int i = 0; i < PIXELS; i++)
        mean += places[i] = pattern(random, i % SIDE, i / SIDE);
    memset(tile, 0, TILE_BYTES);
    for (int c = 0; c < 3; c++) {
        int low = (levels[c] * 256 + LEVELS - 1) / LEVELS, high = ((levels[c] + 1) * 256 + LEVELS - 1) / LEVELS - 1;
        int base = low + 2 + (int)(hash(random, c, 1) % (unsigned)(high - low - 3));
        /* No color is cut off, which would change the mean. */
        int most = base < 255 - base ? base : 255 - base, strength = 1 + (int)(hash(random, 9, 2) % 3);
        for (int i = 0; i < PIXELS; i++) {
            int by = (places[i] * PIXELS - mean) * strength / PIXELS;
            by = by * (most < 48 ? most : 48) / 96;
            tile[i] |= (uint32_t)(base + by) << 8 * c;
        }
    }
}

int main(int argc, char **argv)
{
    uint32_t each = argc == 4 ? strtoul(argv[2], NULL, 10) : 0, seed = argc == 4 ? strtoul(argv[3], NULL, 10) : 0;
    if (each < 1 || each > 4096) {
        fprintf(stderr, "usage: %s FILE TILES_PER_BUCKET SEED; 1 to 4096 tiles\n", argv[0]);
        return 2;
    }
    struct gallery g = {GALLERY_MAGIC, 8192, BUCKETS * each};
    uint32_t head[2048] = {0}, tile[PIXELS];
    memcpy(head, &g, sizeof g);
    for (unsigned bucket = 0; bucket <= BUCKETS; bucket++)
        head[INDEX_AT + bucket] = bucket * each;
    FILE *out = fopen(argv[1], "wb");
    int good = out && fwrite(head, sizeof head, 1, out) == 1;
    for (uint32_t i = 0; good && i < g.tiles; i++) {
        struct color_sum sum = {{0}};
        draw(tile, i / each, hash(i, seed, 0));
        for (int at = 0; at < PIXELS; at++)
            add_pixel(&sum, tile[at]);
        if (bucket_of(&sum) != i / each) {
            fprintf(stderr, "%s: tile %u is in bucket %u\n", argv[0], i, bucket_of(&sum));
            return 1;
        }
        good = fwrite(tile, sizeof tile, 1, out) == 1;
    }
    if (!good || fclose(out) != 0) {
        perror(argv[1]);
        return 1;
    }
    printf("%u %llu\n", g.tiles, (unsigned long long)(g.tiles_at + g.tiles * (uint64_t)TILE_BYTES));
    return 0;
}
