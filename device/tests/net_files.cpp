// Files opened by kernels, against the system calls of this program: one random script for both, each on a directory of its
// own. Then what the host allows, numbers that are stale, a file that does not open, the stop. Prints each failure and exits
// with 1.
#include "net_test.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <spinio/file.h>

namespace file = spinio::file;

struct Rng {
    uint64_t state;
    uint64_t next()
    {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return state >> 11;
    }
    uint64_t below(uint64_t limit) { return next() % limit; }
};

// A directory that is removed with all it contains.
struct Directory {
    std::string path = "/tmp/spinio-net-files-XXXXXX";
    Directory() { CHECK(mkdtemp(path.data())); }
    ~Directory()
    {
        if (std::system(("rm -rf '" + path + "'").c_str()))
            failures++;
    }
    std::string operator/(const std::string &name) const { return path + "/" + name; }
};

static std::vector<unsigned char> bytes_of(size_t count, unsigned seed)
{
    std::vector<unsigned char> bytes(count);
    for (auto &byte : bytes)
        byte = (unsigned char)((seed = seed * 1664525 + 1013904223) >> 24);
    return bytes;
}

static void store(const std::string &path, const std::vector<unsigned char> &bytes)
{
    int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    CHECK(fd >= 0 && write(fd, bytes.data(), bytes.size()) == ssize_t(bytes.size()));
    close(fd);
}

constexpr unsigned numbers = 4, steps = 60;
constexpr size_t most = 300000;
constexpr const char *names[] = {"a", "b", "sub/c", "none", "sub", "../outside", "/a", "link", "out", "fifo", "sub/../a", ""};

enum Kind : int { OPEN, READ, WRITE, STAT, CLOSE };

struct Step {
    Kind kind;
    int number, flags;
    char name[24];
    size_t bytes;
    int64_t offset;
};

template <typename Group>
__device__ void play(Group group, const net::Handle &handle, const Step *script, unsigned char *memory, const unsigned char *source, int64_t *results)
{
    __shared__ int open[numbers];
    __shared__ file::Stat stat;
    if (group.leads())
        for (int &number : open)
            number = 12345;
    group.sync();
    for (unsigned i = 0; i < steps; i++) {
        const Step &step = script[i];
        int f = open[step.number];
        int64_t result = 0;
        group.sync();
        switch (step.kind) {
        case OPEN:
            // What is open stays, unless it is closed first.
            file::close(group, handle, f);
            result = file::open(group, handle, step.name, step.flags, 0640);
            if (group.leads())
                open[step.number] = result < 0 ? 12345 : int(result);
            result = result < 0 ? result : 0;
            break;
        case READ:
            result = file::pread(group, handle, f, memory, step.bytes, step.offset);
            // A sum in place of the bytes, so that the script needs no more memory.
            for (int64_t at = 0; group.leads() && at < result; at++)
                results[steps + i] = results[steps + i] * 31 + memory[at];
            break;
        case WRITE:
            result = file::pwrite(group, handle, f, source + step.offset % 1000, step.bytes, step.offset);
            break;
        case STAT:
            result = file::fstat(group, handle, f, &stat);
            group.sync();
            if (result == 0 && group.leads())
                results[steps + i] = int64_t(stat.size * 8 + (stat.mode & 0777));
            break;
        case CLOSE:
            result = file::close(group, handle, f);
            break;
        }
        if (group.leads())
            results[i] = result;
        group.sync();
    }
    for (unsigned i = 0; i < numbers; i++)
        file::close(group, handle, open[i]);
}

__global__ void play_script(net::Handle handle, int who, const Step *script, unsigned char *memory, const unsigned char *source, int64_t *results)
{
    if (who == 0)
        play(net::block(), handle, script, memory, source, results);
    else if (who == 1 && threadIdx.x < 32)
        play(net::warp(), handle, script, memory, source, results);
    else if (who == 2 && threadIdx.x == 0)
        play(net::thread(), handle, script, memory, source, results);
}

static void play_here(const std::string &root, const Step *script, unsigned char *memory, const unsigned char *source, int64_t *results)
{
    int open_numbers[numbers] = {-1, -1, -1, -1}, directory = open(root.c_str(), O_PATH | O_DIRECTORY);
    CHECK(directory >= 0);
    auto of = [](int64_t result) { return result < 0 ? -int64_t(errno) : result; };
    for (unsigned i = 0; i < steps; i++) {
        const Step &step = script[i];
        int &f = open_numbers[step.number];
        switch (step.kind) {
        case OPEN: {
            if (f >= 0)
                close(f);
            struct open_how how = {};
            how.flags = uint64_t(step.flags | O_NONBLOCK | O_CLOEXEC);
            how.mode = step.flags & O_CREAT ? 0640 : 0;
            how.resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS;
            // EAGAIN: a rename or a mount anywhere on the machine, and the path has `..`; openat2(2) says to try again.
            do
                f = int(syscall(SYS_openat2, directory, step.name, &how, sizeof how));
            while (f < 0 && errno == EAGAIN);
            results[i] = f < 0 ? -errno : 0;
            struct stat stat;
            if (f >= 0 && !fstat(f, &stat) && !S_ISREG(stat.st_mode)) {
                results[i] = S_ISDIR(stat.st_mode) ? -EISDIR : -EINVAL;
                close(f);
                f = -1;
            }
            break;
        }
        case READ:
            results[i] = of(pread(f, memory, step.bytes, step.offset));
            for (int64_t at = 0; at < results[i]; at++)
                results[steps + i] = results[steps + i] * 31 + memory[at];
            break;
        case WRITE:
            results[i] = of(pwrite(f, source + step.offset % 1000, step.bytes, step.offset));
            break;
        case STAT: {
            struct stat stat;
            results[i] = of(fstat(f, &stat));
            if (results[i] == 0)
                results[steps + i] = int64_t(uint64_t(stat.st_size) * 8 + (stat.st_mode & 0777));
            break;
        }
        case CLOSE:
            results[i] = of(close(f));
            f = -1;
            break;
        }
    }
    for (int f : open_numbers)
        if (f >= 0)
            close(f);
    close(directory);
}

static void fill(const Directory &directory)
{
    CHECK(!mkdir((directory / "in").c_str(), 0755) && !mkdir((directory / "in/sub").c_str(), 0755));
    store(directory / "in/a", bytes_of(1000, 1));
    store(directory / "in/b", bytes_of(280001, 2));
    store(directory / "in/sub/c", {});
    store(directory / "outside", bytes_of(10, 3));
    CHECK(!symlink("sub/c", (directory / "in/link").c_str()) && !symlink("../outside", (directory / "in/out").c_str()));
    CHECK(!mkfifo((directory / "in/fifo").c_str(), 0644));
}

static std::vector<unsigned char> content(const std::string &path)
{
    std::vector<unsigned char> bytes(1 << 20);
    int fd = open(path.c_str(), O_RDONLY);
    ssize_t count = fd < 0 ? -1 : pread(fd, bytes.data(), bytes.size(), 0);
    if (fd >= 0)
        close(fd);
    bytes.resize(count < 0 ? 0 : size_t(count));
    return bytes;
}

static void scripts_give_the_results_of_the_system_calls()
{
    Rng random = {0x9e3779b97f4a7c15};
    const int flags[] = {O_RDONLY, O_RDONLY, O_RDWR, O_WRONLY, O_RDWR | O_CREAT, O_RDWR | O_CREAT | O_EXCL, O_RDWR | O_TRUNC, O_WRONLY | O_APPEND};
    unsigned char *memory, *source;
    Step *script;
    int64_t *results;
    CHECK(!cudaMalloc(&memory, most) && !cudaMalloc(&source, most + 1000));
    CHECK(!cudaHostAlloc(&script, steps * sizeof *script, cudaHostAllocDefault));
    CHECK(!cudaHostAlloc(&results, 2 * steps * sizeof *results, cudaHostAllocDefault));
    auto written = bytes_of(most + 1000, 4);
    CHECK(!cudaMemcpy(source, written.data(), written.size(), cudaMemcpyHostToDevice));
    std::vector<unsigned char> here(most);
    for (int round = 0; round < 9; round++) {
        Directory ours, theirs;
        fill(ours);
        fill(theirs);
        for (unsigned i = 0; i < steps; i++) {
            auto kind = Kind(random.below(8));
            Step step = {kind > CLOSE ? i % 3 ? READ : OPEN : kind, int(random.below(numbers)), flags[random.below(8)], {}, 0, 0};
            std::strcpy(step.name, names[random.below(sizeof names / sizeof *names)]);
            const size_t sizes[] = {0, 1, random.below(200), random.below(5000), 131072, random.below(most)};
            step.bytes = sizes[random.below(6)];
            step.offset = random.below(20) ? int64_t(random.below(random.below(2) ? 1000 : 281000)) : -1;
            script[i] = step;
        }
        std::memset(results, 0, 2 * steps * sizeof *results);
        {
            Net net({.files_root = (ours / "in").c_str(), .files_write = true});
            spinio::launch_resident_on(net.stream, play_script, 1, round % 3 == 0 ? 100 : 64, net.handle, round % 3, script, memory, source, results);
            net.wait();
            CHECK(net.stats().violations == 0);
        }
        std::vector<int64_t> wanted(2 * steps);
        play_here(theirs / "in", script, here.data(), written.data(), wanted.data());
        for (unsigned i = 0; i < 2 * steps; i++)
            if (results[i] != wanted[i]) {
                const Step &step = script[i % steps];
                std::printf("round %d step %u: kind %d, name \"%s\", flags %#o, %zu bytes at %lld: %lld, not %lld\n", round, i, step.kind, step.name,
                            step.flags, step.bytes, (long long)step.offset, (long long)results[i], (long long)wanted[i]);
                failures++;
            }
        for (const char *name : {"in/a", "in/b", "in/sub/c", "in/none", "outside"})
            CHECK(content(ours / name) == content(theirs / name));
    }
    cudaFree(memory);
    cudaFree(source);
    cudaFreeHost(script);
    cudaFreeHost(results);
}

__global__ void open_some(net::Handle handle, const char *path, int flags, int count, int64_t *out)
{
    auto g = net::block();
    for (int i = 0; i < count; i++)
        out[i] = file::open(g, handle, path, flags);
    out[count] = file::close(g, handle, int(out[0]));
    out[count + 1] = file::close(g, handle, int(out[0]));
    out[count + 2] = file::pread(g, handle, int(out[0]), nullptr, 10, 0);
    out[count + 3] = file::open(g, handle, path, flags);
}

static void host_says_which_files_and_how_many()
{
    Directory directory;
    fill(directory);
    char *path;
    CHECK(!cudaHostAlloc(&path, 8192, cudaHostAllocDefault));
    auto opens = [&](const char *root, bool write, const char *name, int flags, int count) {
        Net net({.connections = 4, .files_root = root, .files_write = write, .files = 3});
        std::strcpy(path, name);
        spinio::launch_resident_on(net.stream, open_some, 1, 32, net.handle, static_cast<const char *>(path), flags, count, net.words);
        net.wait();
        return std::vector<int64_t>(net.words, net.words + count + 4);
    };
    std::string in = directory / "in", absolute = directory / "outside";
    auto seen = opens(in.c_str(), false, "a", file::RDONLY, 4);
    CHECK(seen[0] > 0 && seen[1] > 0 && seen[2] > 0 && seen[3] == -EMFILE);
    CHECK(seen[4] == 0 && seen[5] == -EBADF && seen[6] == -EBADF);
    CHECK(seen[7] > 0 && seen[7] != seen[0]);
    CHECK(opens(nullptr, true, "a", file::RDONLY, 1)[0] == -EACCES);
    for (int flags : {file::RDWR, file::WRONLY, file::RDONLY | file::CREAT, file::RDONLY | file::TRUNC})
        CHECK(opens(in.c_str(), false, "a", flags, 1)[0] == -EROFS);
    CHECK(opens(in.c_str(), true, "a", 3, 1)[0] == -EINVAL && opens(in.c_str(), true, "a", O_PATH, 1)[0] == -EINVAL);
    CHECK(opens(in.c_str(), true, std::string(4096, 'x').c_str(), file::RDONLY, 1)[0] == -ENAMETOOLONG);
    CHECK(opens(in.c_str(), true, absolute.c_str(), file::RDONLY, 1)[0] == -EXDEV);
    CHECK(opens("/", false, absolute.c_str(), file::RDONLY, 1)[0] > 0);
    cudaFreeHost(path);
    struct spinio_net_options options = {};
    options.size = sizeof options;
    options.files_root = "/nowhere";
    CHECK(!spinio_net_open(test_device, &options) && errno == ENOENT && std::strstr(spinio_last_error(), "/nowhere"));
    options.files_root = "/";
    options.files = 257;
    CHECK(!spinio_net_open(test_device, &options) && errno == EINVAL);
}

__global__ void numbers_of_others(net::Handle handle, int listener, const char *path, int64_t *out)
{
    auto g = net::block();
    __shared__ char byte;
    int f = file::open(g, handle, path, file::RDONLY);
    out[0] = f;
    out[1] = net::recv(g, handle, f, &byte, 1);
    out[2] = net::close(g, handle, f);
    out[3] = file::pread(g, handle, listener, &byte, 1, 0);
    out[4] = file::close(g, handle, listener);
    out[5] = net::sendfile(g, handle, f, f, 0, 1);
    out[6] = net::sendfile(g, handle, listener, f, 0, 1);
    int s = net::socket(g, handle, net::INET, net::STREAM, 0), packets = net::socket(g, handle, net::UNIX, net::SEQPACKET, 0);
    out[7] = net::sendfile(g, handle, s, f, 0, 1);
    out[8] = net::sendfile(g, handle, packets, f, 0, 1);
    out[9] = file::pread(g, handle, f, &byte, 1, 0);
}

static void files_and_sockets_are_not_confused()
{
    Directory directory;
    fill(directory);
    Net net({.files_root = directory.path.c_str()});
    std::string address;
    int s = listener(net, "tcp://127.0.0.1:0", address);
    char *path;
    CHECK(!cudaHostAlloc(&path, 64, cudaHostAllocDefault));
    std::strcpy(path, "in/a");
    spinio::launch_resident_on(net.stream, numbers_of_others, 1, 32, net.handle, s, static_cast<const char *>(path), net.words);
    net.wait();
    const int64_t wanted[] = {0, -EBADF, -EBADF, -EBADF, -EBADF, -EBADF, -ENOTCONN, -ENOTCONN, -EOPNOTSUPP, 1};
    CHECK(net.words[0] > 0);
    for (int i = 1; i < 10; i++)
        CHECK(net.words[i] == wanted[i]);
    cudaFreeHost(path);
}

// More blocks than buffers read the same file at once, over and over.
__global__ void read_all(net::Handle handle, const char *path, unsigned char *memory, size_t bytes, int64_t *out)
{
    auto g = net::block();
    unsigned char *mine = memory + blockIdx.x * bytes;
    int f = file::open(g, handle, path, file::RDONLY);
    int64_t got = file::pread(g, handle, f, mine, bytes, 0);
    int64_t closed = file::close(g, handle, f);
    out[blockIdx.x] = closed < 0 ? closed : got;
}

static void many_blocks_read_at_once()
{
    constexpr unsigned blocks = 24;
    Directory directory;
    fill(directory);
    auto wanted = content(directory / "in/b");
    Net net({.files_root = (directory / "in").c_str()});
    unsigned char *memory;
    char *path;
    CHECK(!cudaMalloc(&memory, blocks * wanted.size()) && !cudaHostAlloc(&path, 8, cudaHostAllocDefault));
    std::strcpy(path, "b");
    spinio::launch_resident_on(net.stream, read_all, blocks, 32, net.handle, static_cast<const char *>(path), memory, wanted.size(), net.words);
    net.wait();
    std::vector<unsigned char> all(blocks * wanted.size());
    CHECK(!cudaMemcpy(all.data(), memory, all.size(), cudaMemcpyDeviceToHost));
    for (unsigned i = 0; i < blocks; i++)
        CHECK(net.words[i] == int64_t(wanted.size()) && std::equal(wanted.begin(), wanted.end(), all.begin() + ptrdiff_t(i * wanted.size())));
    cudaFree(memory);
    cudaFreeHost(path);
}

__global__ void open_or_echo(net::Handle handle, int listener, const char *path, int64_t *out)
{
    auto g = net::block();
    if (blockIdx.x == 0) {
        out[0] = file::open(g, handle, path, file::RDONLY);
    } else {
        __shared__ char byte;
        int s = net::accept(g, handle, listener);
        while (net::recv(g, handle, s, &byte, 1) == 1)
            net::send(g, handle, s, &byte, 1);
        net::close(g, handle, s);
    }
}

// A file that does not open, since another process has a lease of it, holds up no socket; and the stop ends the wait.
static void file_that_waits_holds_up_no_socket(bool stop)
{
    Directory directory;
    fill(directory);
    signal(SIGIO, SIG_IGN);
    int leased = open((directory / "in/a").c_str(), O_RDWR);
    if (leased < 0 || fcntl(leased, F_SETLEASE, F_WRLCK)) {
        std::printf("skipped: no leases here: %s\n", std::strerror(errno));
        close(leased);
        return;
    }
    Net net({.files_root = (directory / "in").c_str()});
    std::string address;
    int s = listener(net, "tcp://127.0.0.1:0", address);
    char *path;
    CHECK(!cudaHostAlloc(&path, 8, cudaHostAllocDefault));
    std::strcpy(path, "a");
    spinio::launch_resident_on(net.stream, open_or_echo, 2, 32, net.handle, s, static_cast<const char *>(path), net.words);
    int peer = connect_to(address);
    for (int i = 0; i < 20; i++) {
        char byte = char(i);
        CHECK(send(peer, &byte, 1, MSG_NOSIGNAL) == 1 && recv(peer, &byte, 1, 0) == 1 && byte == char(i));
    }
    CHECK(__atomic_load_n(net.words, __ATOMIC_ACQUIRE) == 0);
    close(peer);
    if (stop)
        CHECK(!spinio_net_stop(net.net));
    else
        CHECK(!fcntl(leased, F_SETLEASE, F_UNLCK));
    net.wait();
    CHECK(stop ? net.words[0] == -ESHUTDOWN : net.words[0] > 0);
    close(leased);
    cudaFreeHost(path);
}

int main()
{
    scripts_give_the_results_of_the_system_calls();
    host_says_which_files_and_how_many();
    files_and_sockets_are_not_confused();
    many_blocks_read_at_once();
    file_that_waits_holds_up_no_socket(false);
    file_that_waits_holds_up_no_socket(true);
    std::printf("%d failures\n", failures);
    return failures != 0;
}
