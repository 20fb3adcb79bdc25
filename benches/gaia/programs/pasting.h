// Image stitching: kernels find tiles and paste them into a picture, while a CPU program and other GPUs paste theirs.
// Kernels and files are those of examples/gaia/stitching.
//
//   map      kernels store into the map of the picture; release merges
//   private  kernels store into a picture of their own, whose tiles are then stored into the file by the CPU
//
// Arguments: file (the picture), tiles, writer, writers. The laboratory compares the picture.
#ifndef LAB_PASTING_H
#define LAB_PASTING_H

#include "stitching/stitch.h"
#include "worker.h"

namespace lab {

class Pasting : public Work {
public:
    explicit Pasting(const Arguments &arguments) : method(arguments.method)
    {
        int in = open_file(arguments.text("tiles"), O_RDONLY);
        check_system(pread(in, &work.t, sizeof work.t, 0) == ssize_t(sizeof work.t), "pread");
        work.writer = unsigned(arguments.number("writer"));
        work.writers = unsigned(arguments.number("writers"));
        size_t count = size_t(work.t.columns) * work.t.rows, bytes = overview_bytes(&work.t) + tiles_bytes(&work.t);
        images = std::make_unique<Buffer<unsigned char>>(bytes);
        differences = std::make_unique<Buffer<unsigned>>(count * POSITIONS);
        found = std::make_unique<Buffer<unsigned>>(count);
        check(spinio_pread(in, *images, bytes, sizeof work.t) == ssize_t(bytes), "read");
        close(in);
        work.overview = *images;
        work.images = work.overview + overview_bytes(&work.t);
        work.differences = *differences;
        work.found = *found;

        fd = open_file(arguments.text("file"), O_RDWR);
        size = size_of(fd);
        head = size - picture_bytes(&work.t);
        if (method == "map") {
            map = std::make_unique<Map>(fd, size, SPINIO_GAIA_WRITE);
        } else {
            copy = std::make_unique<Buffer<unsigned char>>(size);
            void *memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            check_system(memory != MAP_FAILED, "mmap");
            file = static_cast<unsigned char *>(memory);
            host.resize(size);
        }
    }

    void prepare() override
    {
        if (map)
            map->acquire();
    }

    void run(Figures &figures) override
    {
        uint64_t merged = map ? map->info().pages_merged : 0;
        double begun = now();
        unsigned char *memory = map ? reinterpret_cast<unsigned char *>(map->memory) : *copy;
        if (!stitch(work, memory + head))
            fail("kernels", cudaGetErrorString(cudaGetLastError()));
        figures.add("kernel", now() - begun);
        if (map)
            map->release();
        else
            store();
        figures.add("merged", map ? double(map->info().pages_merged - merged) : 0);
    }

    uint64_t wrong() override
    {
        return 0;
    }

    uint64_t map_bytes() override
    {
        return map ? map->info().device_bytes : 0;
    }

private:
    void store()
    {
        copy->to_host(host.data());
        size_t line = width(&work.t) * 3;
        for (unsigned tile = 0; tile < work.t.columns * work.t.rows; tile++) {
            if (writer_of(&work.t, tile, work.writers) != work.writer)
                continue;
            size_t at = head + tile / work.t.columns * CELL * line + tile % work.t.columns * CELL * 3;
            for (unsigned y = 0; y < CELL; y++, at += line)
                std::memcpy(file + at, &host[at], CELL * 3);
        }
    }

    const std::string method;
    ::Work work = {};
    int fd;
    size_t size, head;
    unsigned char *file = nullptr;
    std::unique_ptr<Map> map;
    std::unique_ptr<Buffer<unsigned char>> images, copy;
    std::unique_ptr<Buffer<unsigned>> differences, found;
    std::vector<unsigned char> host;
};

inline std::unique_ptr<Work> pasting(const Arguments &arguments)
{
    return std::make_unique<Pasting>(arguments);
}

} // namespace lab

#endif
