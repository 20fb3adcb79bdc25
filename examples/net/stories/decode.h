// decode.h: one step of a model for several sequences at once: the next token of each. Of a prompt a step takes several tokens, each
// at its place of the batch.
//
//   multiply(): a lane has a row, a warp 32 rows, or a part of their columns where there are more warps than rows
//
//        rows 0-31      rows 32-63     rows 64-95        each weight is read once for all places of a tile
//     ┌───────┬──────┬───────┬──────┬───────┬──────┐
//     │warp 0 │warp 3│warp 1 │warp 4│warp 2 │warp 5│     the parts of a row are added in shared memory
//     └───────┴──────┴───────┴──────┴───────┴──────┘
//
//   attention: a warp has a head of a sequence, or every n-th 32 of its positions where there are more warps than heads. A lane has a
//   position for the score, and columns for the values. The sums are kept relative to the greatest score so far, and the parts are
//   joined in the same way (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
//
// Activations are floats in device memory, since the blocks of a team share them; sums have another order than in PyTorch, so two
// tokens whose scores are equal but for rounding may be exchanged. Known flaws: no tensor cores, and more places than a tile read
// the weights again, so a library's products of matrices are faster for large models with many sequences.
#ifndef STORIES_DECODE_H
#define STORIES_DECODE_H

#include <cmath>

#include "model.h"
#include "team.h"

// Several loads on their way at a time.
#if defined(__CUDACC__)
#define STORIES_UNROLL _Pragma("unroll 8")
#else
#define STORIES_UNROLL
#endif

constexpr unsigned most_warps = 16, tile = 4, columns_at_once = 1024;

// What a team needs for a step, in device memory.
struct Activations {
    float *hidden, *mix, *attended, *inner, *scores; // [place in the batch][...]
    float *values;                                   // [slot][layer][key head][position][head]
    float *keys;                                     // the same, 32 positions side by side: [position / 32][head][position % 32]
};

// A place in the batch of a step: a position of a sequence. Those of one sequence stand side by side.
struct Place {
    unsigned slot, position;
    int token; // at that position
};

// Numbers that one instruction loads.
struct alignas(16) Four {
    float each[4];
};

struct Scratch {
    union {
        struct {
            alignas(16) float input[tile][columns_at_once];
            float parts[most_warps][lanes][tile];
        } product;
        struct {
            alignas(16) float scores[lanes];
            float query[longest_head], sums[longest_head], greatest, sum;
        } attention[most_warps];
    };
    alignas(16) float squares[tile][lanes];
    float scale[tile];
};

class Decoder {
public:
    __device__ Decoder(Team &team, const Model &model, const Activations &all, Scratch &scratch, const Place *places, unsigned count)
        : team(team), model(model), shape(model.shape), all(all), scratch(scratch), places(places), count(count)
    {
    }

    // The scores of the token after each place, in Activations::scores, after a sync of the team.
    __device__ void step()
    {
        embed();
        team.sync();
        for (unsigned layer = 0; layer < shape.layers; layer++) {
            const Layer &weights = model.layers[layer];
            multiply_normed(weights.mix, weights.attention_norm, [&](unsigned i, unsigned row, float value) { keep_mix(layer, i, row, value); });
            team.sync();
            turn_keys(layer);
            team.sync();
            attend(layer);
            team.sync();
            multiply_tiles(
                weights.out, [&](unsigned i, unsigned k) { return attended(i)[k]; }, [&](unsigned i, unsigned row, float value) { hidden(i)[row] += value; });
            team.sync();
            multiply_normed(weights.gate_up, weights.inner_norm, [&](unsigned i, unsigned row, float value) { inner(i)[row] = value; });
            team.sync();
            multiply_tiles(
                weights.down,
                [&](unsigned i, unsigned k) {
                    const float gate = inner(i)[k];
                    return gate / (1 + expf(-gate)) * inner(i)[shape.inner + k];
                },
                [&](unsigned i, unsigned row, float value) { hidden(i)[row] += value; });
            team.sync();
        }
        multiply_normed(model.head, model.norm, [&](unsigned i, unsigned row, float value) { scores(i)[row] = value; });
        team.sync();
    }

private:
    Team &team;
    const Model &model;
    const Shape &shape;
    const Activations &all;
    Scratch &scratch;
    const Place *places;
    unsigned count;

    const unsigned warps = blockDim.x / lanes, warp = threadIdx.x / lanes, lane = threadIdx.x % lanes;

    __device__ float *hidden(unsigned i) const { return all.hidden + size_t(i) * shape.hidden; }
    __device__ float *mix(unsigned i) const { return all.mix + size_t(i) * (shape.queries() + shape.keys()); }
    __device__ float *attended(unsigned i) const { return all.attended + size_t(i) * shape.queries(); }
    __device__ float *inner(unsigned i) const { return all.inner + size_t(i) * 2 * shape.inner; }
    __device__ float *scores(unsigned i) const { return all.scores + size_t(i) * shape.vocabulary; }

    // The keys or values of a head, at its first position.
    __device__ float *cached(float *cache, unsigned i, unsigned layer, unsigned key_head) const
    {
        return cache + ((size_t(places[i].slot) * shape.layers + layer) * shape.key_heads + key_head) * shape.positions() * shape.head;
    }

    __device__ void embed() const
    {
        for (unsigned i = team.rank; i < count; i += team.size)
            for (unsigned k = threadIdx.x; k < shape.hidden; k += blockDim.x)
                hidden(i)[k] = from_bfloat(model.embedding[size_t(places[i].token) * shape.hidden + k]);
    }

    // Queries and keys are turned later; values are complete.
    __device__ void keep_mix(unsigned layer, unsigned i, unsigned row, float value) const
    {
        const unsigned turned = shape.queries() + shape.keys();
        if (row < turned)
            mix(i)[row] = value;
        else
            cached(all.values, i, layer, (row - turned) / shape.head)[size_t(places[i].position) * shape.head + (row - turned) % shape.head] = value;
    }

    template <typename Source, typename Sink>
    __device__ void multiply_tiles(const Matrix &matrix, Source source, Sink sink)
    {
        for (unsigned first = 0; first < count; first += tile)
            multiply(matrix, first, source, sink);
    }

    template <typename Sink>
    __device__ void multiply_normed(const Matrix &matrix, const uint16_t *norm, Sink sink)
    {
        for (unsigned first = 0; first < count; first += tile) {
            find_scales(first);
            multiply(
                matrix, first, [&](unsigned i, unsigned k) { return hidden(i)[k] * scratch.scale[i - first] * from_bfloat(norm[k]); }, sink);
        }
    }

    __device__ unsigned in_tile(unsigned first) const { return count - first < tile ? count - first : tile; }

    // One over the root mean square of the hidden numbers.
    __device__ void find_scales(unsigned first)
    {
        for (unsigned b = warp; b < in_tile(first); b += warps) {
            float sum = 0;
            for (unsigned k = lane; k < shape.hidden; k += lanes)
                sum += hidden(first + b)[k] * hidden(first + b)[k];
            scratch.squares[b][lane] = sum;
            __syncwarp();
            if (lane == 0) {
                float all = 0;
                for (float part : scratch.squares[b])
                    all += part;
                scratch.scale[b] = 1 / sqrtf(all / float(shape.hidden) + shape.epsilon);
            }
        }
        __syncthreads();
    }

    // sink(place, row, the sum of matrix[row][k] * source(place, k)), for the places of a tile and the rows of this block.
    template <typename Source, typename Sink>
    __device__ void multiply(const Matrix &matrix, unsigned first, Source source, Sink sink)
    {
        const unsigned groups = matrix.rows / lanes, all_chunks = matrix.columns / columns_of_a_chunk;
        const unsigned mine = groups > team.rank ? (groups - team.rank + team.size - 1) / team.size : 0;
        const unsigned at_once = mine < warps ? mine : warps, splits = mine ? warps / at_once : 0;
        for (unsigned begin = 0; begin < mine; begin += at_once) {
            const unsigned index = begin + warp % at_once, split = warp / at_once, group = team.rank + index * team.size;
            const bool active = split < splits && index < mine;
            float sums[tile] = {};
            for (unsigned from = 0; from < matrix.columns; from += columns_at_once) {
                const unsigned columns = matrix.columns - from < columns_at_once ? matrix.columns - from : columns_at_once;
                // What is staged serves all groups of rows if it is all columns.
                if (begin == 0 || matrix.columns > columns_at_once)
                    stage(first, from, columns, source);
                const Chunk *row = matrix.chunks + (size_t(group) * all_chunks + from / columns_of_a_chunk) * lanes + lane;
                if (active)
                    add_products(in_tile(first), row, columns / columns_of_a_chunk, split, splits, sums);
            }
            if (splits > 1)
                add_parts(active, at_once, split, splits, sums);
            if (active && split == 0)
                for (unsigned b = 0; b < in_tile(first); b++)
                    sink(first + b, group * lanes + lane, sums[b]);
        }
    }

    template <typename Source>
    __device__ void stage(unsigned first, unsigned from, unsigned columns, Source source)
    {
        __syncthreads();
        for (unsigned b = 0; b < in_tile(first); b++)
            for (unsigned k = threadIdx.x; k < columns; k += blockDim.x)
                scratch.product.input[b][k] = source(first + b, from + k);
        __syncthreads();
    }

    // This lane's row times the staged numbers.
    __device__ void add_products(unsigned there, const Chunk *row, unsigned chunks, unsigned split, unsigned splits, float (&sums)[tile]) const
    {
        if (there == 1)
            add_products_of<1>(row, chunks, split, splits, sums);
        else if (there == 2)
            add_products_of<2>(row, chunks, split, splits, sums);
        else
            add_products_of<tile>(row, chunks, split, splits, sums);
    }

    template <unsigned places_there>
    __device__ void add_products_of(const Chunk *row, unsigned chunks, unsigned split, unsigned splits, float (&sums)[tile]) const
    {
        STORIES_UNROLL
        for (unsigned c = split; c < chunks; c += splits) {
            const Chunk weights = row[size_t(c) * lanes];
            for (unsigned b = 0; b < places_there; b++) {
                const Four *input = reinterpret_cast<const Four *>(scratch.product.input[b] + c * columns_of_a_chunk);
                for (unsigned half = 0; half < 2; half++) {
                    const Four numbers = input[half];
                    for (unsigned k = 0; k < 2; k++) {
                        const uint32_t pair = weights.pairs[half * 2 + k];
                        sums[b] += as_float(pair << 16) * numbers.each[2 * k] + as_float(pair & 0xffff0000u) * numbers.each[2 * k + 1];
                    }
                }
            }
        }
    }

    // Adds what the other warps have of the same rows, on the first of them.
    __device__ void add_parts(bool active, unsigned at_once, unsigned split, unsigned splits, float (&sums)[tile])
    {
        if (active)
            for (unsigned b = 0; b < tile; b++)
                scratch.product.parts[warp][lane][b] = sums[b];
        __syncthreads();
        if (active && split == 0)
            for (unsigned other = 1; other < splits; other++)
                for (unsigned b = 0; b < tile; b++)
                    sums[b] += scratch.product.parts[warp + other * at_once][lane][b];
    }

    __device__ void attend(unsigned layer)
    {
        if (shape.head <= lanes)
            attend_with<1>(layer);
        else if (shape.head <= 2 * lanes)
            attend_with<2>(layer);
        else
            attend_with<longest_head / lanes>(layer);
    }

    // `columns`: of the head, for each lane.
    template <unsigned columns>
    __device__ void attend_with(unsigned layer)
    {
        const unsigned units = count * shape.heads, mine = units > team.rank ? (units - team.rank + team.size - 1) / team.size : 0;
        const unsigned at_once = mine < warps ? mine : warps, parts = mine ? warps / at_once : 0;
        for (unsigned begin = 0; begin < mine; begin += at_once) {
            const unsigned index = begin + warp % at_once, part = warp / at_once, unit = team.rank + index * team.size;
            const bool active = part < parts && index < mine;
            if (active)
                attend_part<columns>(layer, unit / shape.heads, unit % shape.heads, part, parts);
            __syncthreads();
            if (active && part == 0)
                join_parts(unit / shape.heads, unit % shape.heads, at_once, parts);
            __syncthreads();
        }
    }

    // Turns the pairs (k, k + half) of a head by the angles of its position.
    __device__ float turned(const float *head, unsigned k, unsigned position) const
    {
        const unsigned half = shape.head / 2;
        const float *turn = model.turns + (size_t(position) * half + k % half) * 2;
        return head[k] * turn[0] + (k < half ? -head[k + half] : head[k - half]) * turn[1];
    }

    __device__ void turn_keys(unsigned layer)
    {
        for (unsigned unit = team.rank * warps + warp; unit < count * shape.key_heads; unit += team.size * warps) {
            const unsigned i = unit / shape.key_heads, head = unit % shape.key_heads, position = places[i].position;
            float *keys = cached(all.keys, i, layer, head) + size_t(position / lanes) * shape.head * lanes + position % lanes;
            for (unsigned k = lane; k < shape.head; k += lanes)
                keys[k * lanes] = turned(mix(i) + shape.queries() + head * shape.head, k, position);
        }
    }

    template <unsigned columns>
    __device__ void attend_part(unsigned layer, unsigned i, unsigned head, unsigned part, unsigned parts)
    {
        auto &mine = scratch.attention[warp];
        const unsigned position = places[i].position, key_head = head / (shape.heads / shape.key_heads);
        const float *keys = cached(all.keys, i, layer, key_head), *values = cached(all.values, i, layer, key_head);
        for (unsigned k = lane; k < shape.head; k += lanes)
            mine.query[k] = turned(mix(i) + head * shape.head, k, position) / sqrtf(float(shape.head));
        float greatest = -INFINITY, sum = 0, sums[columns] = {};
        for (unsigned from = part * lanes; from <= position; from += parts * lanes) {
            const unsigned there = position + 1 - from < lanes ? position + 1 - from : lanes;
            const float *of_lane = keys + size_t(from) * shape.head + lane;
            __syncwarp();
            float score = 0;
            STORIES_UNROLL
            for (unsigned k = 0; k < shape.head; k++)
                score += mine.query[k] * of_lane[k * lanes];
            mine.scores[lane] = lane < there ? score : -INFINITY;
            __syncwarp();
            const float before = greatest;
            for (float one : mine.scores)
                greatest = fmaxf(greatest, one);
            __syncwarp();
            mine.scores[lane] = lane < there ? expf(score - greatest) : 0;
            __syncwarp();
            const float shrunk = expf(before - greatest);
            sum *= shrunk;
            for (float &one : sums)
                one *= shrunk;
            for (float weight : mine.scores)
                sum += weight;
            const float *row = values + size_t(from) * shape.head + lane;
            STORIES_UNROLL
            for (unsigned p = 0; p < there; p++)
                for (unsigned d = 0; d < columns; d++)
                    if (d * lanes + lane < shape.head)
                        sums[d] += mine.scores[p] * row[p * shape.head + d * lanes];
        }
        for (unsigned d = 0; d < columns; d++)
            if (d * lanes + lane < shape.head)
                mine.sums[d * lanes + lane] = sums[d];
        if (lane == 0) {
            mine.greatest = greatest;
            mine.sum = sum;
        }
    }

    // The parts of a head are those of every n-th warp, from this one on.
    __device__ void join_parts(unsigned i, unsigned head, unsigned step, unsigned parts)
    {
        float greatest = -INFINITY, sum = 0;
        for (unsigned part = 0; part < parts; part++)
            greatest = fmaxf(greatest, scratch.attention[warp + part * step].greatest);
        for (unsigned part = 0; part < parts; part++)
            sum += scratch.attention[warp + part * step].sum * expf(scratch.attention[warp + part * step].greatest - greatest);
        for (unsigned k = lane; k < shape.head; k += lanes) {
            float value = 0;
            for (unsigned part = 0; part < parts; part++)
                value += scratch.attention[warp + part * step].sums[k] * expf(scratch.attention[warp + part * step].greatest - greatest);
            attended(i)[head * shape.head + k] = value / sum;
        }
    }
};

// Bits that look random, of a seed and two numbers (the finalizer of SplitMix64).
__device__ inline uint64_t random_bits(uint64_t seed, uint64_t position, uint64_t token)
{
    uint64_t bits = seed + 0x9e3779b97f4a7c15 * (position << 32 | token) + 0x9e3779b97f4a7c15;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111eb;
    return bits ^ bits >> 31;
}

// Below it, a division would make infinite scores: as 0.
constexpr float coldest = 1e-4f;

// The next token of a sequence, by a warp: the greatest score, of temperature 0; else each token with its probability, since the
// greatest of the scores with a random number of Gumbel's distribution added has it.
__device__ inline int sample(const float *scores, unsigned vocabulary, float temperature, uint64_t seed, unsigned position)
{
    const unsigned lane = threadIdx.x % lanes;
    float best = -INFINITY;
    unsigned token = 0;
    for (unsigned i = lane; i < vocabulary; i += lanes) {
        float score = scores[i];
        if (temperature >= coldest) {
            // Exact, and below 1: of 24 bits the greatest would be rounded to it.
            const float uniform = (float(random_bits(seed, position, i) >> 41) + 0.5f) / 8388608;
            score = score / temperature - logf(-logf(uniform));
        }
        if (score > best)
            best = score, token = i;
    }
    for (unsigned step = lanes / 2; step; step /= 2) {
        const float other = __shfl_xor_sync(0xffffffff, best, step);
        const unsigned its_token = __shfl_xor_sync(0xffffffff, token, step);
        if (other > best || (other == best && its_token < token))
            best = other, token = its_token;
    }
    return int(token);
}

#endif
