// grid.h: runs the blocks of grids on a pool of CPU threads.
//
//   run_grid(kernel, grid, block) ──> next block number <── caller, worker, worker ...   each takes a few at a time
//
// A block runs on the CPU thread that took it: its shared memory is that thread's `static thread_local`. Blocks are taken
// in order, but run in any order: as on a GPU, a block must not wait for one with a higher number. Grids whose blocks
// wait for each other are resident.h's.
//
// Grids of several callers run side by side. Workers help the oldest that has blocks left; each caller runs blocks of its
// own grid, so that a grid goes on even if all workers are in blocks that wait for it.
//
// Known limit: a forked child has no pool, and a grid would never end there. It has no emulated device either.
#ifndef SPINIO_EMULATION_GRID_H
#define SPINIO_EMULATION_GRID_H

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include <spinio/emulation/block.h>

namespace spinio::emulation {

// Above this number, threads only wait for memory.
constexpr unsigned most_workers = 16;
// CUDA's limit.
constexpr unsigned most_threads_in_a_block = 1024;

inline uint3 block_index(dim3 grid, uint64_t number)
{
    uint64_t row = number / grid.x;
    return {unsigned(number % grid.x), unsigned(row % grid.y), unsigned(row / grid.y)};
}

class Pool {
public:
    // The pool of this process. It is never destroyed: a detached worker may outlive main.
    static Pool &get()
    {
        static Pool *pool = new Pool;
        return *pool;
    }

    // Runs a grid and returns when it has finished.
    void run(const Body &body, dim3 grid, dim3 block)
    {
        Job job{body, grid, block, uint64_t(grid.x) * grid.y * grid.z};
        // A block of a small kernel takes a few microseconds, as long as fetching its number under contention.
        job.batch = std::clamp<uint64_t>(job.blocks / (workers * 16), 1, 64);
        if (job.blocks > 1) {
            {
                std::lock_guard<std::mutex> lock(mutex);
                jobs.push_back(&job);
            }
            wake.notify_all();
        }
        job.work();
        std::unique_lock<std::mutex> lock(mutex);
        jobs.erase(std::remove(jobs.begin(), jobs.end(), &job), jobs.end());
        done.wait(lock, [&] { return job.active == 0; });
    }

private:
    struct Job {
        Body body;
        dim3 grid, block;
        uint64_t blocks;
        uint64_t batch = 1;
        std::atomic<uint64_t> next{0};
        int active = 0; // under the pool's mutex

        Job(const Body &body, dim3 grid, dim3 block, uint64_t blocks) : body(body), grid(grid), block(block), blocks(blocks) {}

        void work()
        {
            static thread_local Block threads;
            here.blocks = {grid.x, grid.y, grid.z};
            for (;;) {
                uint64_t first = next.fetch_add(batch, std::memory_order_relaxed);
                if (first >= blocks)
                    return;
                for (uint64_t at = first; at < std::min(first + batch, blocks); at++) {
                    threads.run(body, block, block_index(grid, at), at % 2);
                }
            }
        }
    };

    Pool() : workers(std::clamp(std::thread::hardware_concurrency(), 1u, most_workers))
    {
        for (unsigned i = 1; i < workers; i++)
            std::thread([this] { serve(); }).detach();
    }

    void serve()
    {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            Job *job = nullptr;
            wake.wait(lock, [&] { return (job = oldest()) != nullptr; });
            job->active++;
            lock.unlock();
            job->work();
            lock.lock();
            if (--job->active == 0)
                done.notify_all();
        }
    }

    // The oldest grid with blocks that nothing has taken yet.
    Job *oldest()
    {
        for (Job *job : jobs)
            if (job->next.load(std::memory_order_relaxed) < job->blocks)
                return job;
        return nullptr;
    }

    const unsigned workers;
    std::mutex mutex;
    std::condition_variable wake, done;
    std::vector<Job *> jobs;
};

// Whether CUDA would accept these sizes.
inline bool is_launchable(dim3 grid, dim3 block)
{
    uint64_t threads = uint64_t(block.x) * block.y * block.z;
    return threads > 0 && threads <= most_threads_in_a_block && block.z <= 64 && grid.x > 0 && grid.x < 1u << 31 &&
           grid.y > 0 && grid.y < 1u << 16 && grid.z > 0 && grid.z < 1u << 16;
}

inline void run_grid(const Body &body, dim3 grid, dim3 block)
{
    Pool::get().run(body, grid, block);
}

} // namespace spinio::emulation

#endif
