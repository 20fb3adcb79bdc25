/* Makes what the example stitches: a landscape, and the tiles that a camera takes of it, each up to JITTER pixels away
 * from where it should be.
 *
 *     camera COLUMNS ROWS SEED TILES BLANK SCENE
 *
 * Writes three files: the tiles; the picture without any pixels, a PPM; and the picture as it should become.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tiles.h"

static uint32_t hash(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t x = a * 0x9e3779b1u ^ b * 0x85ebca77u ^ c * 0xc2b2ae3du;
    x = (x ^ x >> 15) * 0x2c1b3c6du;
    x = (x ^ x >> 12) * 0x297a2d39u;
    return x ^ x >> 15;
}

/* Smooth noise from 0 to 65535, whose hills are `size` pixels wide. */
static int noise(int x, int y, int size, uint32_t seed)
{
    /* The origin is far outside, so that all numbers are above 0. */
    unsigned ax = x + (1 << 20), ay = y + (1 << 20), cx = ax / size, cy = ay / size;
    int64_t fx = (ax % size) * 1024 / size, fy = (ay % size) * 1024 / size;
    fx = fx * fx * (3 * 1024 - 2 * fx) >> 20;
    fy = fy * fy * (3 * 1024 - 2 * fy) >> 20;
    int64_t corner[4];
    for (int i = 0; i < 4; i++)
        corner[i] = hash(cx + i % 2, cy + i / 2, seed + size) & 0xffff;
    int64_t above = corner[0] * (1024 - fx) + corner[1] * fx, below = corner[2] * (1024 - fx) + corner[3] * fx;
    return (above * (1024 - fy) + below * fy) >> 20;
}

/* The color of the scene at a place. */
static void scene(int x, int y, uint32_t seed, unsigned char *color)
{
    static const struct {
        int height;
        unsigned char color[3];
    } levels[] = {{0, {18, 42, 92}},     {26000, {40, 92, 150}},  {30000, {196, 184, 132}}, {33000, {92, 132, 64}},
                  {40000, {44, 88, 48}}, {46000, {112, 102, 92}}, {52000, {236, 238, 240}}, {65536, {255, 255, 255}}};
    int height = 0;
    for (int size = 480, part = 2; size >= 7; size /= 2, part *= 2)
        height += noise(x, y, size, seed) / part;
    int i = 0;
    while (height >= levels[i + 1].height)
        i++;
    int at = (height - levels[i].height) * 256 / (levels[i + 1].height - levels[i].height);
    int grain = (int)(hash(x, y, seed) % 13) - 6;
    for (int c = 0; c < 3; c++) {
        int value = (levels[i].color[c] * (256 - at) + levels[i + 1].color[c] * at) / 256 + grain;
        color[c] = value < 0 ? 0 : value > 255 ? 255 : value;
    }
}

static int write_file(const char *path, const char *head, size_t head_size, const void *a, size_t a_size, const void *b,
                      size_t b_size)
{
    FILE *out = fopen(path, "wb");
    if (out && fwrite(head, 1, head_size, out) == head_size && fwrite(a, 1, a_size, out) == a_size &&
        fwrite(b, 1, b_size, out) == b_size && fclose(out) == 0)
        return 1;
    perror(path);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 7) {
        fprintf(stderr, "usage: %s COLUMNS ROWS SEED TILES BLANK SCENE\n", argv[0]);
        return 2;
    }
    struct tiles t = {TILES_MAGIC, strtoul(argv[1], NULL, 10), strtoul(argv[2], NULL, 10)};
    uint32_t seed = strtoul(argv[3], NULL, 10);
    if (t.columns < 1 || t.columns > 256 || t.rows < 1 || t.rows > 256) {
        fprintf(stderr, "%s: COLUMNS and ROWS are 1 to 256\n", argv[0]);
        return 2;
    }
    unsigned char *overview = malloc(overview_bytes(&t)), *tiles = malloc(tiles_bytes(&t));
    unsigned char *picture = malloc(picture_bytes(&t)), *blank = calloc(picture_bytes(&t), 1);
    if (!overview || !tiles || !picture || !blank) {
        perror("memory");
        return 1;
    }
    for (uint64_t y = 0; y < height(&t); y++)
        for (uint64_t x = 0; x < width(&t); x++) {
            unsigned char *color = picture + (y * width(&t) + x) * 3;
            scene(x, y, seed, color);
            if (x % STEP == 0 && y % STEP == 0)
                overview[y / STEP * (width(&t) / STEP) + x / STEP] = color[1];
        }
    unsigned char *color = tiles;
    for (unsigned tile = 0; tile < t.columns * t.rows; tile++) {
        uint32_t away = hash(tile, 1, seed);
        int left = (int)(tile % t.columns * CELL) - (int)(away % (2 * JITTER + 1));
        int top = (int)(tile / t.columns * CELL) - (int)(away / 256 % (2 * JITTER + 1));
        for (int y = 0; y < SIDE; y++)
            for (int x = 0; x < SIDE; x++, color += 3)
                scene(left + x, top + y, seed, color);
    }
    char head[64];
    int head_size = snprintf(head, sizeof head, "P6\n%u %u\n255\n", (unsigned)width(&t), (unsigned)height(&t));
    return !write_file(argv[4], (const char *)&t, sizeof t, overview, overview_bytes(&t), tiles, tiles_bytes(&t)) ||
           !write_file(argv[5], head, head_size, blank, picture_bytes(&t), "", 0) ||
           !write_file(argv[6], head, head_size, picture, picture_bytes(&t), "", 0);
}
