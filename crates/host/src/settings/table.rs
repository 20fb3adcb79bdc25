//! The manual of the settings. `cargo x docs` writes docs/settings.md from it.

/// One row of the settings table.
pub struct Row {
    /// Name of the environment variable.
    pub name: &'static str,
    /// What may stand there.
    pub values: &'static str,
    /// What holds without it.
    pub default: &'static str,
    /// The manual.
    pub doc: &'static str,
}

/// The settings, in the order of the documentation.
pub const TABLE: &[Row] = &[
    Row {
        name: "SPINIO_DISABLE",
        values: "`1`",
        default: "off",
        doc: "Turns every hook into a plain call to the next function in symbol order.",
    },
    Row {
        name: "SPINIO_ORDERING",
        values: "`relaxed`, `strict`",
        default: "`relaxed`",
        doc: "When a read returns. `relaxed`: up to 64 KiB once the bytes are safe in staging and the copy is \
              queued, above once they have arrived. `strict`: always once they have arrived.",
    },
    Row {
        name: "SPINIO_THREADS",
        values: "1 to 64",
        default: "a quarter of the processors, 2 to 4",
        doc: "Threads that copy for one large request, the calling one included. From 8 on the `dma` route is not used: \
              as many threads copy faster than pages can be registered. Storage is read by up to 8 other threads, \
              whatever stands here.",
    },
    Row {
        name: "SPINIO_STAGING",
        values: "bytes, from `2M`; `K`, `M`, `G`",
        default: "`128M`",
        doc: "Upper bound of pinned staging memory a device. It grows on demand. What is less than `4M` counts as `4M`. \
              A write up to this size is one call of the kernel; a larger one is made in parts. What waits for a stream \
              (`..._async`) has a ring of its own: as much again, and up to twice that rather than keep its caller waiting.",
    },
    Row {
        name: "SPINIO_ROUTES",
        values: "list of `copy`, `dma`, `store`, `direct`, `p2p`",
        default: "all",
        doc: "The routes that may be used. `copy` and, on devices without a DMA engine, `store` always may: \
              they are what every other route falls back to. Without `dma` no batch registers pages either (`gather`); \
              a file that the program holds is registered whatever stands here. A CUDA program with a kernel that never ends sets \
              `copy,direct`, without `dma`: giving registered pages back would wait for that kernel.",
    },
    Row {
        name: "SPINIO_DMA_MIN",
        values: "bytes; `K`, `M`, `G`",
        default: "`2M`",
        doc: "Bytes that must lie together in the page cache for the `dma` route, which registers the pages with the \
              driver, to be taken instead of `copy`.",
    },
    Row {
        name: "SPINIO_BATCH_THREADS",
        values: "1 to 64",
        default: "three quarters of the processors, 2 to 12",
        doc: "Threads that read the pieces of one batch out of the page cache, the calling one included. They are made at \
              the first batch.",
    },
    Row {
        name: "SPINIO_HOLD",
        values: "bytes; `K`, `M`, `G`",
        default: "a quarter of the memory",
        doc: "Upper bound of what held files may have registered, all together: such pages cannot be reclaimed.",
    },
    Row {
        name: "SPINIO_KERNELS",
        values: "absolute path of a folder, or `off`",
        default: "`$XDG_CACHE_HOME/spinio`, else `~/.cache/spinio`",
        doc: "Where code for the GPU that NVRTC has compiled is kept for the next process. `off`: nowhere.",
    },
    Row {
        name: "SPINIO_CACHE",
        values: "`keep`, `auto`, `drop`",
        default: "`auto`",
        doc: "What becomes of pages that reads into devices alone bring into the page cache. `keep`: they stay, as after \
              any read. `auto`: of sequential reads, and of the odd pieces of large ones, the last `SPINIO_CACHE_PAGES` \
              stay, and the rest goes, until somebody else opens the file. `drop`: all go once they have been read. What \
              was cached before, is mapped, or is dirty stays in any case.",
    },
    Row {
        name: "SPINIO_CACHE_PAGES",
        values: "pages of 4 KiB",
        default: "`512`",
        doc: "How many such pages `SPINIO_CACHE=auto` leaves behind the readers, all files together. What the kernel \
              has read ahead of them comes on top.",
    },
    Row {
        name: "SPINIO_EMULATED",
        values: "`size=1G,bar=64M,gbps=12,latency_us=10,p2p=1`, each part optional; `pin_us`, `unpin_us`: what registering pages and giving them back takes",
        default: "`size=1G,bar=0`, unlimited speed",
        doc: "The emulated GPU: its memory, how much of it is host-mapped, bandwidth (GB/s) and latency of its DMA \
              engine, and whether the host-mapped part counts as P2P-mapped.",
    },
    Row {
        name: "SPINIO_NVMMU",
        values: "`prepared`, `shaped`, `plain`",
        default: "`prepared`",
        doc: "What a download of NVMMU does on an array with parity (RAID-5, RAID-6). `plain`: it is written as any \
              program would. `shaped`: whole stripes are written as such, directly. `prepared`: stripes that are \
              covered in part too, with old bytes of their neighbours that were read before, while nobody else has \
              the file open.",
    },
    Row {
        name: "SPINIO_STATS",
        values: "`off`, path of a file, or of a folder with `/` at its end",
        default: "a file for each process, in `$XDG_RUNTIME_DIR/spinio/` or `/dev/shm/spinio-UID/`",
        doc: "Where the counters are kept, so that other processes can read them. The default is what `spinio stat` and \
              `spinio top` read: a file of the process's own, made at its first device request. A folder that is there: \
              the same, in that folder. A file: shared by all processes that name it, made if need be; one that holds \
              anything but such counters is left alone, and the counters stay in the process. `off`: nothing is counted.",
    },
    Row {
        name: "SPINIO_TRACE",
        values: "`1`",
        default: "off",
        doc: "Records every device request in the file of the counters, from the first one on; `spinio trace` sets it for \
              a program that it starts, and can do without for one that runs. The file holds the last 32,768 records; who \
              wants all of them reads along.",
    },
    Row {
        name: "SPINIO_MODEL",
        values: "absolute path of a folder, `default`",
        default: "`$XDG_STATE_HOME/spinio/models`, else `~/.local/state/spinio/models`",
        doc: "Where `spinio calibrate` keeps what it measured, and where it is looked for. `default`: nowhere, so that \
              the built-in cost model holds. `spinio explain` says which model it used.",
    },
    Row {
        name: "SPINIO_CORRECTION",
        values: "`on`, `off`",
        default: "`on`",
        doc: "Whether the costs of a route follow what requests of 1 MiB and more were seen to take, by a factor of 4 at most.",
    },
];
