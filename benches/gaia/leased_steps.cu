// What the driver's calls of a leased file's second GPU cost: 8 GiB of exported chunks are imported, mapped beside new ones, and
// copied, group by group, two groups under way.
//
//     nvcc -O2 -std=c++17 benches/gaia/leased_steps.cu -lcuda -o leased_steps && ./leased_steps
//
//     group n:  create, export, map, access ── import, map, access ── copy ...   once it has arrived: read-only, unmap the import
//
// In groups: all of a group is created, imported and mapped before it gets access, its copies are queued together on one stream, and
// nothing is waited for, made read-only or unmapped before the last copy.
//
// Prints the whole and each call's sum in milliseconds for each order of the calls. Needs two GPUs with a link between them. Exit
// status: 1 after an error of the driver, 77 without two GPUs.
#include "driver.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <unistd.h>

constexpr size_t total = size_t(8) << 30;

static std::map<std::string, double> sums;

template <typename Call>
static void timed(const char *what, Call call)
{
    const double begun = now_ms();
    check(call(), what);
    sums[what] += now_ms() - begun;
}

static CUmemAllocationProp exportable(int device)
{
    CUmemAllocationProp wanted = {};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return wanted;
}

static CUmemAccessDesc access_of(int device, bool writable)
{
    CUmemAccessDesc access = {};
    access.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    access.flags = writable ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
    return access;
}

static void report(size_t chunk, const std::string &name, double ms)
{
    std::printf("chunks of %3zu MiB, %-34s %5.1f ms:", chunk >> 20, name.c_str(), ms);
    for (const auto &[what, sum] : sums)
        if (sum > 0.3)
            std::printf(" %s %.1f,", what.c_str(), sum);
    std::printf("\n");
}

static void finish(CUdeviceptr to, const std::vector<int> &fds)
{
    check(cuMemUnmap(to, total), "cuMemUnmap");
    check(cuMemAddressFree(to, total), "cuMemAddressFree");
    for (int fd : fds)
        close(fd);
    // The driver clears what was freed.
    usleep(300'000);
}

// What is done when.
struct Order {
    const char *name;
    bool seal_at_end, unmap_at_end, one_reservation, import, copies;
};

struct Group {
    CUdeviceptr imported = 0;
    std::vector<int> fds;
};

static void transfer(const Order &order, size_t chunk, const std::vector<int> &peer, CUdeviceptr peer_at, CUstream *streams)
{
    sums.clear();
    const double begun = now_ms();
    const size_t count = total / chunk;
    const auto own = exportable(1);
    const auto write = access_of(1, true), read = access_of(1, false);
    CUdeviceptr to = 0, imports = 0;
    timed("reserve", [&] { return cuMemAddressReserve(&to, total, 0, 0, 0); });
    if (order.one_reservation)
        timed("reserve", [&] { return cuMemAddressReserve(&imports, total, 0, 0, 0); });
    std::vector<Group> groups(count);
    auto unmap = [&](size_t i) {
        if (!groups[i].imported || !order.import)
            return;
        timed("unmap import", [&] { return cuMemUnmap(groups[i].imported, chunk); });
        if (!order.one_reservation)
            timed("free", [&] { return cuMemAddressFree(groups[i].imported, chunk); });
        groups[i].imported = 0;
    };
    auto seal = [&](size_t i) {
        if (!order.seal_at_end)
            timed("seal", [&] { return cuMemSetAccess(to + i * chunk, chunk, &read, 1); });
    };
    for (size_t i = 0; i < count; i++) {
        // The copies of the two groups before may be under way.
        if (i >= 3)
            seal(i - 3);
        const CUdeviceptr at = to + i * chunk;
        CUmemGenericAllocationHandle made;
        timed("create", [&] { return cuMemCreate(&made, chunk, &own, 0); });
        int fd = -1;
        timed("export", [&] { return cuMemExportToShareableHandle(&fd, made, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0); });
        groups[i].fds.push_back(fd);
        timed("map", [&] { return cuMemMap(at, chunk, 0, made, 0); });
        timed("access", [&] { return cuMemSetAccess(at, chunk, &write, 1); });
        timed("release", [&] { return cuMemRelease(made); });
        CUdeviceptr from = peer_at + i * chunk;
        if (order.import) {
            if (order.one_reservation)
                from = imports + i * chunk;
            else
                timed("reserve", [&] { return cuMemAddressReserve(&from, chunk, 0, 0, 0); });
            CUmemGenericAllocationHandle theirs;
            timed("import", [&] { return cuMemImportFromShareableHandle(&theirs, reinterpret_cast<void *>(uintptr_t(peer[i])), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR); });
            timed("map import", [&] { return cuMemMap(from, chunk, 0, theirs, 0); });
            timed("release import", [&] { return cuMemRelease(theirs); });
            timed("access import", [&] { return cuMemSetAccess(from, chunk, &read, 1); });
            groups[i].imported = from;
        } else {
            timed("allow loads", [&] { return cuMemSetAccess(from, chunk, &write, 1); });
        }
        if (i >= 2)
            timed("wait", [&] { return cuStreamSynchronize(streams[i % 2]); });
        if (i >= 2 && !order.unmap_at_end)
            unmap(i - 2);
        if (order.copies)
            timed("copy", [&] { return cuMemcpyDtoDAsync(at, from, chunk, streams[i % 2]); });
    }
    for (int i : {0, 1})
        timed("wait", [&] { return cuStreamSynchronize(streams[i]); });
    if (order.seal_at_end)
        timed("seal", [&] { return cuMemSetAccess(to, total, &read, 1); });
    else
        for (size_t i = count - 3; i < count; i++)
            seal(i);
    for (size_t i = 0; i < count; i++)
        unmap(i);
    report(chunk, order.name, now_ms() - begun);
    if (imports)
        check(cuMemAddressFree(imports, total), "cuMemAddressFree");
    std::vector<int> fds;
    for (const Group &group : groups)
        fds.insert(fds.end(), group.fds.begin(), group.fds.end());
    finish(to, fds);
}

// The first group is a chunk, each other one twice as large as the one before, up to so many chunks.
static void transfer_in_groups(size_t largest, size_t chunk, const std::vector<int> &peer, CUstream stream)
{
    sums.clear();
    const double begun = now_ms();
    const size_t count = total / chunk;
    const auto own = exportable(1);
    const auto write = access_of(1, true), read = access_of(1, false);
    CUdeviceptr to = 0, imports = 0;
    timed("reserve", [&] { return cuMemAddressReserve(&to, total, 0, 0, 0); });
    timed("reserve", [&] { return cuMemAddressReserve(&imports, total, 0, 0, 0); });
    std::vector<int> fds(count);
    size_t wanted = 1;
    for (size_t first = 0; first < count; wanted = std::min(2 * wanted, largest)) {
        const size_t end = std::min(first + wanted, count), at = first * chunk, len = (end - first) * chunk;
        for (size_t i = first; i < end; i++) {
            CUmemGenericAllocationHandle made;
            timed("create", [&] { return cuMemCreate(&made, chunk, &own, 0); });
            timed("export", [&] { return cuMemExportToShareableHandle(&fds[i], made, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0); });
            timed("map", [&] { return cuMemMap(to + i * chunk, chunk, 0, made, 0); });
            timed("release", [&] { return cuMemRelease(made); });
        }
        for (size_t i = first; i < end; i++) {
            CUmemGenericAllocationHandle theirs;
            timed("import", [&] { return cuMemImportFromShareableHandle(&theirs, reinterpret_cast<void *>(uintptr_t(peer[i])), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR); });
            timed("map import", [&] { return cuMemMap(imports + i * chunk, chunk, 0, theirs, 0); });
            timed("release import", [&] { return cuMemRelease(theirs); });
        }
        timed("access", [&] { return cuMemSetAccess(to + at, len, &write, 1); });
        timed("access import", [&] { return cuMemSetAccess(imports + at, len, &read, 1); });
        for (size_t i = first; i < end; i++)
            timed("copy", [&] { return cuMemcpyDtoDAsync(to + i * chunk, imports + i * chunk, chunk, stream); });
        first = end;
    }
    timed("wait", [&] { return cuStreamSynchronize(stream); });
    timed("seal", [&] { return cuMemSetAccess(to, total, &read, 1); });
    timed("unmap import", [&] { return cuMemUnmap(imports, total); });
    timed("free", [&] { return cuMemAddressFree(imports, total); });
    report(chunk, "in groups of up to " + std::to_string(largest), now_ms() - begun);
    finish(to, fds);
}

int main()
{
    if (!begin_on_second_of_two())
        return 77;
    CUstream streams[2];
    for (CUstream &stream : streams)
        check(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    for (size_t chunk : {256, 512, 64}) {
        const size_t bytes = chunk << 20;
        const auto theirs = exportable(0);
        CUdeviceptr peer_at;
        std::vector<int> peer(total / bytes);
        check(cuMemAddressReserve(&peer_at, total, 0, 0, 0), "cuMemAddressReserve");
        for (size_t i = 0; i < peer.size(); i++) {
            CUmemGenericAllocationHandle made;
            check(cuMemCreate(&made, bytes, &theirs, 0), "cuMemCreate");
            check(cuMemExportToShareableHandle(&peer[i], made, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), "cuMemExportToShareableHandle");
            check(cuMemMap(peer_at + i * bytes, bytes, 0, made, 0), "cuMemMap");
            check(cuMemRelease(made), "cuMemRelease");
        }
        const auto access = access_of(0, true);
        check(cuMemSetAccess(peer_at, total, &access, 1), "cuMemSetAccess");
        for (int round = 0; round < 3; round++) {
            for (size_t largest : {1, 4, 16})
                transfer_in_groups(largest, bytes, peer, streams[0]);
            for (const Order &order : {
                     Order{"one after the other", false, false, false, true, true},
                     Order{"without the copies", false, false, false, true, false},
                     Order{"read-only at the end", true, false, false, true, true},
                     Order{"imports unmapped at the end", false, true, false, true, true},
                     Order{"one reservation, both at the end", true, true, true, true, true},
                     Order{"without imports", false, false, false, false, true},
                     Order{"without imports, read-only at the end", true, false, false, false, true},
                 })
                transfer(order, bytes, peer, peer_at, streams);
        }
        check(cuMemUnmap(peer_at, total), "cuMemUnmap");
        check(cuMemAddressFree(peer_at, total), "cuMemAddressFree");
        for (int fd : peer)
            close(fd);
        usleep(300'000);
    }
}
