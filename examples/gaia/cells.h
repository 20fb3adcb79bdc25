/* The file of the example: 64-bit cells. Cell i belongs to writer i mod 4, so every page, and every cache line, has
 * bytes of all four writers. A round adds a constant of the writer to each of its cells: the file shows every update
 * that is lost, done twice or invented.
 */
#ifndef CELLS_H
#define CELLS_H

#include <stdint.h>

#ifdef __CUDACC__
#define CELLS_FUNCTION static inline __host__ __device__
#else
#define CELLS_FUNCTION static inline
#endif

enum { WRITERS = 4 };

/* What a writer adds in a round. */
CELLS_FUNCTION uint64_t increment(unsigned writer)
{
    return UINT64_C(0x0123456789abcdef) + writer * UINT64_C(0x1111111111111111);
}

/* A cell after this many rounds. */
CELLS_FUNCTION uint64_t cell_after(uint64_t i, unsigned rounds)
{
    return i * UINT64_C(0x9e3779b97f4a7c15) + rounds * increment(i % WRITERS);
}

#endif
