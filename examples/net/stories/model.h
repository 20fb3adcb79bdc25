// model.h: a model of the Llama architecture in device memory.
//
//   token ── embedding ──> hidden ──┬─ norm ── queries, keys, values ── attention ── out ──+──┬─ norm ── gate, up ── down ──+──> next layer
//                                   └──────────────────────────────────────────────────────┘  └────────────────────────────┘
//   after the last layer: norm ── head ──> one number for each token of the vocabulary
//
// Weights are bfloat16, as in the file. Matrices are packed, so that the 32 lanes of a warp, each with one row, read 512 bytes side
// by side:
//
//   [32 rows][8 columns]: row 0, columns 0 to 7 | row 1, columns 0 to 7 | ... | row 31 ...      then the next 8 columns of these rows
#ifndef STORIES_MODEL_H
#define STORIES_MODEL_H

#include <cmath>

#include <spinio/kernel.h>
#include <spinio/standard.h>

struct Shape {
    unsigned hidden, layers, inner, vocabulary, context;
    unsigned heads, key_heads, head; // heads of queries, of keys and values, and the size of each
    int begin, end;                  // tokens
    float epsilon, theta;

    __host__ __device__ unsigned queries() const { return heads * head; }
    __host__ __device__ unsigned keys() const { return key_heads * head; }
    // Room for so many: their keys stand 32 side by side.
    __host__ __device__ unsigned positions() const { return (context + 31) / 32 * 32; }
    // Tokens are bytes, so a prompt may be text.
    __host__ __device__ bool is_of_bytes() const { return vocabulary == 256; }
};

constexpr unsigned lanes = 32, columns_of_a_chunk = 8, longest_head = 128;

struct alignas(16) Chunk {
    uint32_t pairs[columns_of_a_chunk / 2];
};

struct Matrix {
    const Chunk *chunks;
    unsigned rows, columns;
};

struct Layer {
    const uint16_t *attention_norm, *inner_norm;
    Matrix mix;     // queries, keys, values
    Matrix out;
    Matrix gate_up; // gate, up
    Matrix down;
};

struct Model {
    Shape shape;
    const uint16_t *embedding, *norm;
    Matrix head;
    const Layer *layers;
    const float *turns; // [position][pair of a head]: cosine, sine
};

// The bits of a float.
__device__ inline float as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

__device__ inline float from_bfloat(uint16_t bits)
{
    return as_float(uint32_t(bits) << 16);
}

// Packs rows of a matrix, from row `first` of `to` on.
__global__ void pack(const uint16_t *from, unsigned rows, unsigned columns, Chunk *to, unsigned first)
{
    const size_t chunks = size_t(rows) * (columns / columns_of_a_chunk);
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < chunks; i += size_t(gridDim.x) * blockDim.x) {
        const unsigned row = unsigned(i / (columns / columns_of_a_chunk)), chunk = unsigned(i % (columns / columns_of_a_chunk));
        const unsigned place = first + row;
        Chunk packed;
        for (unsigned k = 0; k < columns_of_a_chunk; k += 2) {
            const uint16_t *pair = from + size_t(row) * columns + chunk * columns_of_a_chunk + k;
            packed.pairs[k / 2] = pair[0] | uint32_t(pair[1]) << 16;
        }
        to[(size_t(place / lanes) * (columns / columns_of_a_chunk) + chunk) * lanes + place % lanes] = packed;
    }
}

// The angles by which positions turn queries and keys.
__global__ void make_turns(Shape shape, float *turns)
{
    const unsigned half = shape.head / 2;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < shape.context * half; i += gridDim.x * blockDim.x) {
        const float angle = float(i / half) * powf(shape.theta, -float(i % half) / float(half));
        turns[2 * i] = cosf(angle);
        turns[2 * i + 1] = sinf(angle);
    }
}

#endif
