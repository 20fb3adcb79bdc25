// move.h: the two methods of moving bytes between files and the device.
//
//   conventional   file ─read─> malloc'ed memory ─cudaMemcpy─> device ─cudaMemcpy─> malloc'ed memory ─write─> file
//   nvmmu          file ─────────────nvmmu_move──────────────> device ─────────────nvmmu_move─────────────> file
//
// The first is Fig. 4 of the NVMMU paper, the second its Fig. 9.
#ifndef MOVE_H
#define MOVE_H

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "program.h"

[[noreturn]] inline void fail(const std::string &what)
{
    std::fprintf(stderr, "%s\n", what.c_str());
    std::exit(1);
}

inline void must(cudaError_t error, const char *what)
{
    if (error != cudaSuccess)
        fail(std::string(what) + ": " + cudaGetErrorString(error));
}

[[noreturn]] inline void fail_errno(const std::string &what)
{
    fail(what + ": " + std::strerror(errno));
}

class Mover {
public:
    virtual ~Mover() = default;
    virtual void begin(const std::string &output, const std::vector<size_t> &inputs, size_t largest_output) = 0;
    virtual void upload(int input, const std::string &file, void *device, size_t bytes) = 0;
    virtual void download(const std::string &file, void *device, size_t bytes) = 0;
    virtual void end() = 0;
};

class Conventional : public Mover {
public:
    void begin(const std::string &output, const std::vector<size_t> &inputs, size_t bytes) override
    {
        for (size_t input : inputs)
            host_inputs.push_back(take(input));
        host_output = take(bytes);
        if ((to = open(output.c_str(), O_WRONLY | O_CREAT, 0644)) < 0)
            fail_errno(output);
    }

    void upload(int input, const std::string &file, void *device, size_t bytes) override
    {
        char *host = host_inputs[size_t(input)];
        int from = open(file.c_str(), O_RDONLY);
        if (from < 0)
            fail_errno(file);
        for (size_t done = 0; done < bytes;) {
            ssize_t got = read(from, host + done, bytes - done);
            if (got <= 0)
                fail_errno("read " + file);
            done += size_t(got);
        }
        close(from);
        must(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), "cudaMemcpy to the device");
    }

    void download(const std::string &file, void *device, size_t bytes) override
    {
        must(cudaMemcpy(host_output, device, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy from the device");
        for (size_t done = 0; done < bytes;) {
            ssize_t put = write(to, host_output + done, bytes - done);
            if (put <= 0)
                fail_errno("write " + file);
            done += size_t(put);
        }
    }

    void end() override
    {
        close(to);
        for (char *host : host_inputs)
            free(host);
        free(host_output);
        host_inputs.clear();
    }

private:
    static char *take(size_t bytes)
    {
        auto memory = static_cast<char *>(malloc(bytes));
        if (!memory)
            fail_errno("malloc");
        return memory;
    }

    std::vector<char *> host_inputs;
    char *host_output = nullptr;
    int to = -1;
};

// Not linked on a GPU, so that the conventional mode runs without the library.
class Nvmmu : public Mover {
public:
    Nvmmu()
    {
        void *library = RTLD_DEFAULT;
        if (!dlsym(library, "nvmmu_move")) {
            const char *path = getenv("SPINIO_LIBRARY");
            if (!(library = dlopen(path ? path : "libspinio.so", RTLD_NOW | RTLD_LOCAL)))
                fail(dlerror());
        }
        find(library, nvmmu_begin, "nvmmuBegin");
        find(library, nvmmu_move, "nvmmu_move");
        find(library, nvmmu_end, "nvmmuEnd");
        find(library, last_error, "spinio_last_error");
    }

    void begin(const std::string &output, const std::vector<size_t> &, size_t) override
    {
        if (!nvmmu_begin(thread, output.c_str()))
            fail(std::string("nvmmuBegin: ") + last_error());
    }

    void upload(int, const std::string &file, void *device, size_t bytes) override
    {
        move(file, device, bytes, to_device);
    }

    void download(const std::string &file, void *device, size_t bytes) override
    {
        move(file, device, bytes, to_host);
    }

    void end() override
    {
        if (!nvmmu_end(thread))
            fail(std::string("nvmmuEnd: ") + last_error());
    }

private:
    static constexpr int thread = 1, to_device = 1, to_host = 2;

    template <typename F>
    static void find(void *library, F &function, const char *name)
    {
        if (!(function = reinterpret_cast<F>(dlsym(library, name))))
            fail(std::string("libspinio.so has no ") + name);
    }

    void move(const std::string &file, void *device, size_t bytes, int direction)
    {
        if (nvmmu_move(file.c_str(), device, 0, int64_t(bytes), direction) != int64_t(bytes))
            fail("nvmmu_move " + file + ": " + last_error());
    }

    int (*nvmmu_begin)(int, const char *);
    int64_t (*nvmmu_move)(const char *, void *, int64_t, int64_t, int);
    int (*nvmmu_end)(int);
    const char *(*last_error)();
};

#endif
