// An image collage: each block of an input image is replaced by one of many small images in a file. Which one, only the
// kernel knows that has seen the block; about a quarter of the file is needed. Images that are alike lie together, so
// that what is needed comes in pieces of 256 KiB.
//
//   choose: block ──> number of its image              paste: image and block ──> output
//
//   whole   all of the file is read and copied, one window after the other, and blocks are pasted from each
//   map     of each window, the images that are needed are acquired (runs of them, with short gaps)
//   batch   spinio_batch reads the images that are needed
//   in place  an acquire of all of a map in place: the kernel loads the images from the host's page cache
//   reader  one kernel chooses, reads on demand, and pastes; `limit` bytes of cache
//
// Arguments: file, images of 4 KiB, whose word i is mix(i); blocks; window, in bytes: at most half of
// SPINIO_GAIA_MEMORY; limit. The output is compared with the words that the file was made of.
#ifndef LAB_COLLAGE_H
#define LAB_COLLAGE_H

#include <algorithm>

#include "worker.h"

namespace lab {

enum : unsigned { block_words = 32, image_words = page_bytes / 8, alike = 64 };

// Up to this many images that are not needed are acquired between two that are.
constexpr size_t most_gap = 16;

// One of four neighbouring groups of images that are alike is needed; which one, no pattern tells.
__host__ __device__ inline unsigned image_of(const unsigned long long *block, unsigned images)
{
    unsigned long long seen = 0;
    for (unsigned i = 0; i < block_words; i++)
        seen = mix(seen ^ block[i]);
    unsigned long long groups = images / alike / 4, group = seen / alike % groups;
    return unsigned((group * 4 + mix(group) % 4) * alike + seen % alike);
}

__host__ __device__ inline unsigned long long pasted(const unsigned long long *block, const unsigned long long *image, size_t word)
{
    return image[word] ^ block[word % block_words];
}

__global__ void choose_images(const unsigned long long *input, unsigned blocks, unsigned images, unsigned *chosen)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < blocks)
        chosen[i] = image_of(input + size_t(i) * block_words, images);
}

// Blocks order[0] to before order[count]. images: those from number `first` on; packed: one for each of these blocks.
__global__ void paste_images(const unsigned long long *input, const unsigned *order, unsigned count, const unsigned *chosen,
                             const unsigned long long *images, unsigned first, bool packed, unsigned long long *output)
{
    size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i >= size_t(count) * image_words)
        return;
    unsigned nth = unsigned(i / image_words), block = order[nth];
    size_t word = i % image_words;
    const unsigned long long *image = images + size_t(packed ? nth : chosen[block] - first) * image_words;
    output[size_t(block) * image_words + word] = pasted(input + size_t(block) * block_words, image, word);
}

// A warp for each block, and for the next one when that is done.
__global__ void collage_on_demand(spinio_gaia_reader file, const unsigned long long *input, unsigned blocks, unsigned images,
                                  unsigned long long *output, unsigned *failed)
{
    gaia::reader<unsigned long long> words(file);
    unsigned thread = blockIdx.x * blockDim.x + threadIdx.x, lane = thread % 32, warps = gridDim.x * blockDim.x / 32;
    for (unsigned block = thread / 32; block < blocks; block += warps) {
        const unsigned long long *from = input + size_t(block) * block_words, *image;
        int64_t got = words.pin(uint64_t(image_of(from, images)) * image_words, &image);
        if (got >= image_words)
            for (unsigned word = lane; word < image_words; word += 32)
                output[size_t(block) * image_words + word] = pasted(from, image, word);
        else if (lane == 0)
            atomicAdd(failed, 1u);
        if (got > 0)
            words.unpin(image);
    }
}

// Counts words of the output that are not what the images were made of, and clears it: results of this run must not be
// taken for those of the next one.
__global__ void check_collage(const unsigned long long *input, unsigned blocks, unsigned images, unsigned long long *output,
                              unsigned *wrong)
{
    size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x, word = i % image_words;
    if (i >= size_t(blocks) * image_words)
        return;
    const unsigned long long *from = input + i / image_words * block_words;
    unsigned long long right = mix(size_t(image_of(from, images)) * image_words + word) ^ from[word % block_words];
    if (output[i] != right)
        atomicAdd(wrong, 1u);
    output[i] = 0;
}

class Collage : public Work {
public:
    explicit Collage(const Arguments &arguments)
        : method(arguments.method), fd(open_file(arguments.text("file"), O_RDONLY)), size(size_of(fd)),
          window(arguments.number("window")), images(unsigned(size / page_bytes)), blocks(unsigned(arguments.number("blocks"))),
          input(size_t(blocks) * block_words), output(size_t(blocks) * image_words), chosen(blocks), order(blocks), failed(1),
          host_input(size_t(blocks) * block_words), host_chosen(blocks), host_order(blocks)
    {
        for (size_t i = 0; i < host_input.size(); i++)
            host_input[i] = mix(i ^ 0x636f6c6c616765);
        input.to_device(host_input.data());
        if (method == "reader")
            cache = arguments.number("limit");
        if (method == "whole")
            copy = std::make_unique<Buffer<char>>(window);
        if (method == "batch")
            copy = std::make_unique<Buffer<char>>(size_t(blocks) * page_bytes);
    }

    void prepare() override
    {
        map = nullptr;
        unsigned zero = 0;
        failed.to_device(&zero);
    }

    void run(Figures &figures) override
    {
        if (method == "reader")
            return run_reader(figures);
        if (method == "map")
            map = std::make_unique<Map>(fd, size, SPINIO_GAIA_READ);
        if (method == "in place")
            map = std::make_unique<Map>(fd, size, SPINIO_GAIA_READ | SPINIO_GAIA_IN_PLACE);
        spinio::launch(choose_images, (blocks + 127) / 128, 128u, static_cast<unsigned long long *>(input), blocks, images,
                       static_cast<unsigned *>(chosen));
        wait_for_kernels();
        chosen.to_host(host_chosen.data());
        for (unsigned i = 0; i < blocks; i++)
            host_order[i] = i;
        std::sort(host_order.begin(), host_order.end(), [&](unsigned a, unsigned b) { return host_chosen[a] < host_chosen[b]; });
        order.to_device(host_order.data());
        if (method == "batch") {
            read_batch();
            paste(0, blocks, *copy, 0, true);
            figures.add("fetched", double(blocks) * page_bytes);
            return;
        }
        if (method == "in place") {
            map->acquire();
            paste(0, blocks, map->memory, 0, false);
            figures.add("fetched", double(map->fetched()));
            return;
        }
        unsigned begin = 0;
        for (size_t at = 0; at < size; at += window) {
            size_t bytes = std::min(window, size - at);
            unsigned first = unsigned(at / page_bytes), past = unsigned((at + bytes) / page_bytes), end = begin;
            while (end < blocks && host_chosen[host_order[end]] < past)
                end++;
            if (map)
                acquire(begin, end);
            else
                read_window(at, bytes);
            if (begin < end)
                paste(begin, end, map ? map->memory + at : *copy, first, false);
            for (auto [run, length] : runs)
                map->release(run, length);
            begin = end;
        }
        figures.add("fetched", map ? double(map->fetched()) : double(size));
        figures.add("evicted", map ? double(map->info().chunks_evicted) : 0);
    }

    uint64_t wrong() override
    {
        size_t words = size_t(blocks) * image_words;
        spinio::launch(check_collage, unsigned((words + 255) / 256), 256u, static_cast<unsigned long long *>(input), blocks, images,
                       static_cast<unsigned long long *>(output), static_cast<unsigned *>(failed));
        wait_for_kernels();
        unsigned wrong = 0;
        failed.to_host(&wrong);
        return wrong;
    }

    uint64_t map_bytes() override
    {
        return map ? map->info().device_bytes : cache;
    }

private:
    void run_reader(Figures &figures)
    {
        Reader file(fd, cache, SPINIO_GAIA_RANDOM);
        spinio::launch(collage_on_demand, reader_blocks, reader_block, file.handle, static_cast<unsigned long long *>(input), blocks,
                       images, static_cast<unsigned long long *>(output), static_cast<unsigned *>(failed));
        wait_for_kernels();
        figures.add("fetched", double(file.fetched()));
    }

    void acquire(unsigned begin, unsigned end)
    {
        runs.clear();
        for (unsigned i = begin; i < end; i++) {
            size_t at = host_chosen[host_order[i]] * page_bytes;
            if (!runs.empty() && at <= runs.back().first + runs.back().second + most_gap * page_bytes)
                runs.back().second = at + page_bytes - runs.back().first;
            else
                runs.push_back({at, page_bytes});
        }
        for (auto [run, length] : runs)
            map->acquire(run, length);
    }

    void read_window(size_t at, size_t bytes)
    {
        std::vector<char> piece(std::min(piece_bytes, bytes));
        for (size_t done = 0; done < bytes;) {
            ssize_t got = pread(fd, piece.data(), std::min(piece.size(), bytes - done), off_t(at + done));
            check_system(got > 0, "pread");
            check_cuda(cudaMemcpy(*copy + done, piece.data(), size_t(got), cudaMemcpyHostToDevice), "copy to the device");
            done += size_t(got);
        }
    }

    void read_batch()
    {
        std::vector<struct spinio_read_op> reads(blocks);
        for (unsigned i = 0; i < blocks; i++) {
            reads[i] = {};
            reads[i].fd = fd;
            reads[i].buffer = *copy + size_t(i) * page_bytes;
            reads[i].size = page_bytes;
            reads[i].offset = host_chosen[host_order[i]] * page_bytes;
        }
        check(spinio_batch(reads.data(), blocks) == ssize_t(blocks * page_bytes), "batch");
    }

    void paste(unsigned begin, unsigned end, const char *from, unsigned first, bool packed)
    {
        size_t words = size_t(end - begin) * image_words;
        spinio::launch(paste_images, unsigned((words + 255) / 256), 256u, static_cast<unsigned long long *>(input),
                       static_cast<unsigned *>(order) + begin, end - begin, static_cast<unsigned *>(chosen),
                       reinterpret_cast<const unsigned long long *>(from), first, packed, static_cast<unsigned long long *>(output));
        wait_for_kernels();
    }

    const std::string method;
    const int fd;
    const size_t size, window;
    size_t cache = 0; // of a reader
    const unsigned images, blocks;
    Buffer<unsigned long long> input, output;
    Buffer<unsigned> chosen, order;
    Buffer<unsigned> failed; // images that the kernel could not read, and words that are wrong
    std::vector<unsigned long long> host_input;
    std::vector<unsigned> host_chosen, host_order;
    std::unique_ptr<Map> map;
    std::unique_ptr<Buffer<char>> copy;
    std::vector<std::pair<size_t, size_t>> runs;
};

inline std::unique_ptr<Work> collage(const Arguments &arguments)
{
    return std::make_unique<Collage>(arguments);
}

} // namespace lab

#endif
