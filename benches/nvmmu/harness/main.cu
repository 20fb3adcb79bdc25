// The command-line program for the twelve benchmarks: one process makes, runs or checks one of them. nvmmu.py runs all.
//
//     programs list                                       a JSON line per program
//     programs make NAME FOLDER bytes=N                   input files NAME.0, NAME.1 ... in FOLDER
//     programs run NAME FOLDER bytes=N mode=M [rounds=R] [cold=1] [overwrite=1]
//                                                         a JSON line per round, and one for the whole process
//     programs check NAME FOLDER bytes=N mode=M           the output file NAME.M against the CPU reference
//
// mode: conventional or nvmmu (move.h). A round is the whole program, from the first open to the last free; one-time
// set-up of the process (the device's context) is done before. cold=1 drops the input files from the page cache before
// each round. The output file is new in each round, unless overwrite=1.
#include <sys/stat.h>

#include <map>
#include <memory>

#include "meter.h"
#include "move.h"

struct Run {
    const Program &program;
    Shape shape;
    std::string directory;
    std::map<std::string, std::string> options;

    std::string input(size_t i) const
    {
        return directory + "/" + program.name + "." + std::to_string(i);
    }
    std::string output() const
    {
        return directory + "/" + program.name + "." + option("mode", "conventional");
    }
    std::string option(const char *name, const char *otherwise) const
    {
        auto found = options.find(name);
        return found == options.end() ? otherwise : found->second;
    }
};

static void write_file(const std::string &path, const char *bytes, size_t size)
{
    int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    for (size_t done = 0; fd >= 0 && done < size;) {
        ssize_t put = write(fd, bytes + done, size - done);
        if (put <= 0)
            fail_errno("write " + path);
        done += size_t(put);
    }
    // fsync: only pages that are on storage can be dropped from the page cache.
    if (fd < 0 || fsync(fd) || close(fd))
        fail_errno(path);
}

static std::vector<char> read_file(const std::string &path, size_t size)
{
    std::vector<char> bytes(size);
    std::FILE *file = std::fopen(path.c_str(), "rb");
    if (!file || std::fread(bytes.data(), 1, size, file) != size)
        fail_errno("read " + path);
    if (std::fgetc(file) != EOF)
        fail(path + " is too long");
    std::fclose(file);
    return bytes;
}

static void drop(const std::string &path)
{
    int fd = open(path.c_str(), O_RDONLY);
    if (fd < 0 || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) || close(fd))
        fail_errno(path);
}

static void make(const Run &run)
{
    for (size_t i = 0; i < run.shape.inputs.size(); i++) {
        std::vector<char> bytes(run.shape.inputs[i]);
        run.program.fill(run.shape, int(i), bytes.data());
        write_file(run.input(i), bytes.data(), bytes.size());
    }
}

struct Round {
    Moment upload{}, compute{}, download{}, around{}, total{};

    Moment movement() const
    {
        Moment sum = upload;
        sum += download;
        sum += around;
        return sum;
    }
};

static Round one_round(const Run &run, Mover &mover)
{
    const Shape &s = run.shape;
    Round round;
    Moment began = Moment::now(), last = began;
    auto took = [&last] {
        Moment now = Moment::now(), passed = now - last;
        last = now;
        return passed;
    };

    mover.begin(run.output(), s.inputs, s.output);
    round.around += took();

    Buffers buffers;
    buffers.scratch = nullptr;
    for (size_t bytes : s.inputs) {
        buffers.inputs.push_back(nullptr);
        must(cudaMalloc(&buffers.inputs.back(), bytes), "cudaMalloc");
    }
    must(cudaMalloc(&buffers.output, s.output), "cudaMalloc");
    if (s.scratch)
        must(cudaMalloc(&buffers.scratch, s.scratch), "cudaMalloc");
    took();

    for (size_t i = 0; i < s.inputs.size(); i++)
        mover.upload(int(i), run.input(i), buffers.inputs[i], s.inputs[i]);
    round.upload = took();

    run.program.compute(s, buffers);
    must(cudaGetLastError(), "launch");
    // Both modes would wait here anyway; so the GPU kernel's time does not count as the download's.
    must(cudaDeviceSynchronize(), "kernel");
    round.compute = took();

    mover.download(run.output(), buffers.output, s.output);
    round.download = took();

    mover.end();
    round.around += took();

    for (void *memory : buffers.inputs)
        must(cudaFree(memory), "cudaFree");
    must(cudaFree(buffers.output), "cudaFree");
    if (s.scratch)
        must(cudaFree(buffers.scratch), "cudaFree");
    round.total = Moment::now() - began;
    return round;
}

static void measure(const Run &run)
{
    std::string mode = run.option("mode", "conventional");
    std::unique_ptr<Mover> mover;
    if (mode == "conventional")
        mover = std::make_unique<Conventional>();
    else if (mode == "nvmmu")
        mover = std::make_unique<Nvmmu>();
    else
        fail("mode must be conventional or nvmmu");
    bool cold = run.option("cold", "0") == "1", overwrite = run.option("overwrite", "0") == "1";
    int rounds = std::atoi(run.option("rounds", "1").c_str());

    // Creates the device's context before any measurement.
    void *first;
    must(cudaMalloc(&first, 1), "cudaMalloc");
    must(cudaFree(first), "cudaFree");
    Energy energy;
    std::optional<double> gpu, processors;
    Moment busy{};
    double gpu_sum = 0, processors_sum = 0;
    for (int i = 0; i < rounds; i++) {
        if (!overwrite)
            unlink(run.output().c_str());
        for (size_t input = 0; cold && input < run.shape.inputs.size(); input++)
            drop(run.input(input));
        gpu = energy.gpu(), processors = Energy::processors();
        Round r = one_round(run, *mover);
        auto gpu_after = energy.gpu(), processors_after = Energy::processors();
        gpu_sum += gpu ? *gpu_after - *gpu : 0;
        processors_sum += processors ? *processors_after - *processors : 0;
        busy += r.total;
        std::printf("{\"program\": \"%s\", \"mode\": \"%s\", \"cold\": %s, \"round\": %d, \"upload\": %.6f, \"compute\": %.6f, "
                    "\"download\": %.6f, \"around\": %.6f, \"movement\": %.6f, \"movement_cpu\": %.6f, \"total\": %.6f, \"total_cpu\": %.6f}\n",
                    run.program.name, mode.c_str(), cold ? "true" : "false", i, r.upload.seconds, r.compute.seconds, r.download.seconds,
                    r.around.seconds, r.movement().seconds, r.movement().cpu, r.total.seconds, r.total.cpu);
    }
    size_t inputs = 0;
    for (size_t bytes : run.shape.inputs)
        inputs += bytes;
    auto joules = [](bool there, double sum) { return there ? std::to_string(sum) : std::string("null"); };
    std::printf("{\"program\": \"%s\", \"mode\": \"%s\", \"cold\": %s, \"rounds\": %d, \"input_bytes\": %zu, \"output_bytes\": %zu, "
                "\"seconds\": %.6f, \"gpu_joules\": %s, \"processor_joules\": %s}\n",
                run.program.name, mode.c_str(), cold ? "true" : "false", rounds, inputs, run.shape.output, busy.seconds,
                joules(gpu.has_value(), gpu_sum).c_str(), joules(processors.has_value(), processors_sum).c_str());
}

static void check(const Run &run)
{
    Files files;
    for (size_t i = 0; i < run.shape.inputs.size(); i++)
        files.inputs.push_back(read_file(run.input(i), run.shape.inputs[i]));
    files.output = read_file(run.output(), run.shape.output);
    Verdict v = run.program.check(run.shape, files);
    std::printf("{\"program\": \"%s\", \"mode\": \"%s\", \"checked\": %zu, \"wrong\": %zu}\n", run.program.name,
                run.option("mode", "conventional").c_str(), v.checked, v.wrong);
    if (v.wrong || !v.checked)
        std::exit(1);
}

int main(int argc, char **argv)
{
    std::string what = argc > 1 ? argv[1] : "";
    if (what == "list") {
        for (const Program &p : programs())
            std::printf("{\"program\": \"%s\", \"suite\": \"%s\", \"about\": \"%s\", \"mib\": %zu}\n", p.name, p.suite, p.about, p.mib);
        return 0;
    }
    std::map<std::string, std::string> options;
    for (int i = 4; i < argc; i++)
        if (const char *is = std::strchr(argv[i], '='))
            options[std::string(argv[i], size_t(is - argv[i]))] = is + 1;
    for (const Program &p : programs()) {
        if (argc < 4 || p.name != std::string(argv[2]))
            continue;
        size_t bytes = options.count("bytes") ? std::strtoull(options["bytes"].c_str(), nullptr, 10) : p.mib << 20;
        Run run{p, p.shape(bytes), argv[3], options};
        if (what == "make")
            return make(run), 0;
        if (what == "run")
            return measure(run), 0;
        if (what == "check")
            return check(run), 0;
    }
    fail("programs list | make NAME FOLDER bytes=N | run NAME FOLDER bytes=N mode=M | check NAME FOLDER bytes=N mode=M");
}
