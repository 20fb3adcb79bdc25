// resident.h: runs grids whose blocks wait for each other and for the program: all at the same time, a CPU thread each.
//
//   run_resident(kernel, grid, block) ──> waits for seats ──> block 0 ── thread
//                                                             block 1 ── thread     started when they are first needed
//                                                             block 2 ── thread
//
// As on a GPU, a grid with more blocks than the device has room for can never be resident and is refused, and one that
// finds the room occupied by others waits until they have ended. A GPU's room depends on the kernel and the size of its
// blocks; here it does not.
//
// Known limit: a grid that does not begin because of another resident grid waits without a sentence, as on a GPU.
#ifndef SPINIO_EMULATION_RESIDENT_H
#define SPINIO_EMULATION_RESIDENT_H

#include <spinio/emulation/grid.h>

namespace spinio::emulation {

// The most blocks of resident grids at the same time.
constexpr unsigned most_resident = 64;

class Residents {
public:
    // Never destroyed, as the pool.
    static Residents &get()
    {
        static Residents *residents = new Residents;
        return *residents;
    }

    // Runs a grid of at most most_resident blocks and returns when it has ended.
    void run(const Body &body, dim3 grid, dim3 block)
    {
        unsigned blocks = grid.x * grid.y * grid.z;
        Job job{body, grid, block, blocks};
        std::unique_lock<std::mutex> lock(mutex);
        ended.wait(lock, [&] { return taken + blocks <= most_resident; });
        taken += blocks;
        while (threads < taken) {
            threads++;
            std::thread([this] { serve(); }).detach();
        }
        for (unsigned number = 0; number < blocks; number++)
            seats.push_back({&job, number});
        wake.notify_all();
        ended.wait(lock, [&] { return job.left == 0; });
        taken -= blocks;
        ended.notify_all();
    }

private:
    struct Job {
        Body body;
        dim3 grid, block;
        unsigned left; // under the mutex
    };

    struct Seat {
        Job *job;
        unsigned number;
    };

    void serve()
    {
        static thread_local Block threads_of_block;
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            wake.wait(lock, [&] { return !seats.empty(); });
            Seat seat = seats.back();
            seats.pop_back();
            lock.unlock();
            Job &job = *seat.job;
            here.blocks = {job.grid.x, job.grid.y, job.grid.z};
            threads_of_block.run(job.body, job.block, block_index(job.grid, seat.number), seat.number % 2);
            lock.lock();
            if (--job.left == 0)
                ended.notify_all();
        }
    }

    std::mutex mutex;
    std::condition_variable wake, ended;
    std::vector<Seat> seats; // blocks that no thread has taken yet
    unsigned taken = 0;      // blocks of grids that have begun
    unsigned threads = 0;    // at least as many
};

inline bool can_be_resident(dim3 grid)
{
    return uint64_t(grid.x) * grid.y * grid.z <= most_resident;
}

inline void run_resident(const Body &body, dim3 grid, dim3 block)
{
    Residents::get().run(body, grid, block);
}

} // namespace spinio::emulation

#endif
