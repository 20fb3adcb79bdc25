// Owners of copies: maps of one file, each with all of its pages, which do nothing while the laboratory reads and writes
// the file as CPU programs do.
//
// Arguments: file, count.
#ifndef LAB_OWNERS_H
#define LAB_OWNERS_H

#include "worker.h"

namespace lab {

class Owners : public Work {
public:
    explicit Owners(const Arguments &arguments)
    {
        int fd = open_file(arguments.text("file"), O_RDWR);
        for (uint64_t i = 0; i < arguments.number("count"); i++) {
            maps.push_back(std::make_unique<Map>(fd, size_of(fd), SPINIO_GAIA_WRITE));
            maps.back()->acquire();
            maps.back()->release();
        }
        close(fd);
    }

    void run(Figures &) override {}

    uint64_t wrong() override
    {
        return 0;
    }

    uint64_t map_bytes() override
    {
        uint64_t bytes = 0;
        for (auto &map : maps)
            bytes += map->info().device_bytes;
        return bytes;
    }

private:
    std::vector<std::unique_ptr<Map>> maps;
};

inline std::unique_ptr<Work> owners(const Arguments &arguments)
{
    return std::make_unique<Owners>(arguments);
}

} // namespace lab

#endif
