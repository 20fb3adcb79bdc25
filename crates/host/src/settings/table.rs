//! The manual of the settings. `cargo x docs` writes docs/settings.md from it.

/// One row of the settings table.
pub struct Row {
    /// Name of the environment variable.
    pub name: &'static str,
    /// Its name in earlier releases, which is read in this release if the new one is not set.
    pub old: Option<&'static str>,
    /// The values that it takes.
    pub values: &'static str,
    /// The default.
    pub default: &'static str,
    /// The manual.
    pub doc: &'static str,
}

impl Row {
    /// Whether the setting is accepted for one release only, and changes nothing.
    pub fn has_no_effect(&self) -> bool {
        self.default == NO_EFFECT
    }
}

const NO_EFFECT: &str = "no effect";

/// The row of a name or of an old name.
pub fn row(name: &str) -> Option<&'static Row> {
    TABLE.iter().find(|row| row.name == name || row.old == Some(name))
}

/// The settings, in the order of the documentation.
pub const TABLE: &[Row] = &[
    Row {
        name: "SPINIO_DISABLE",
        old: None,
        values: "`1`",
        default: "off",
        doc: "Every hook only calls the next function in symbol order.",
    },
    Row {
        name: "SPINIO_ORDERING",
        old: None,
        values: "`relaxed`, `strict`",
        default: "`relaxed`",
        doc: "When a read returns. `relaxed`: a read of up to 64 KiB returns once its bytes are in a bounce buffer and \
              the copy is queued, a larger one once the bytes have arrived. `strict`: every read returns once the \
              bytes have arrived.",
    },
    Row {
        name: "SPINIO_THREADS",
        old: None,
        values: "1 to 64",
        default: "a quarter of the processors, 2 to 4; on 12 processors or more, for requests from 64 MiB on, 8 to 16",
        doc: "Threads that copy for one large request, the calling one included. From 8 on the `dma` route is not \
              used: 8 threads copy faster than pages can be registered. By default a quarter of the processors copy, 2 to \
              4 threads. On 12 processors or more a request of 64 MiB or more has one thread for each 16 MiB: at least 8, \
              at most three quarters of the processors, and never more than 16 (`SPINIO_CPU`). Other threads read \
              storage, whatever this setting is: up to 16, of which 8 for one file system.",
    },
    Row {
        name: "SPINIO_CPU",
        old: None,
        values: "`auto`, `low`",
        default: "`auto`",
        doc: "Processor time that cached reads from 64 MiB on may cost. `auto`: three quarters as many threads copy \
              as the process has processors (affinity mask and cgroup quota), at most 16, where it has 12 or more; fewer, \
              down to 8, where they often wait for the device; and as long as these threads get processors: when they are \
              kept off the processor for a quarter of their time, the next reads take the way of `low`, for 1 \
              second, and up to 32 if it happens again. `low`: pages are registered with the driver, which \
              took a fifth to an eighth of the processor time on H100s and H200s, at 0.5 to 0.65 of the rate.",
    },
    Row {
        name: "SPINIO_BOUNCE_LIMIT",
        old: Some("SPINIO_STAGING"),
        values: "bytes, from `2M`; `K`, `M`, `G`",
        default: "`128M`",
        doc: "Upper limit of pinned memory for bounce buffers, per device. It grows on demand. A value below `4M` \
              counts as `4M`. A write up to this size is a single system call; a larger one is made in chunks. \
              Stream-ordered requests (`..._async`) have bounce buffers of their own: the same amount, and up to twice \
              that where the caller would have to wait otherwise.",
    },
    Row {
        name: "SPINIO_ROUTES",
        old: None,
        values: "list of `copy`, `dma`, `store`, `direct`, `p2p`",
        default: "all",
        doc: "The routes that may be used. `copy` and, on devices without a DMA engine, `store` are always allowed: \
              every other route falls back to them. Without `dma` batches register no pages either (`gather`); a file \
              that the program pins is registered whatever this setting is. A CUDA program with a GPU kernel that \
              never ends sets `copy,direct`, without `dma`: unpinning would wait for that kernel.",
    },
    Row {
        name: "SPINIO_STORAGE_ENGINE",
        old: None,
        values: "`auto`, `ring`, `workers`",
        default: "`auto`",
        doc: "What reads storage around the page cache (`direct`, `p2p`) for single reads. `ring`: an io_uring that a \
              kernel thread polls (SQPOLL), so that a read passes through no other thread of the process; the kernel \
              thread polls for 2 ms after the last read. `workers`: up to 8 threads for one file system and 16 in \
              all, each waiting for one command. `auto`: the ring from 4 processors on, for files of ext4 and XFS and for block devices, \
              where the Linux kernel allows it; and for a read that one peer-to-peer segment moves an io_uring of \
              the calling thread, on any number of processors. Reads of other file systems, and the first after a \
              pause, take the workers.",
    },
    Row {
        name: "SPINIO_DMA_MIN",
        old: None,
        values: "bytes; `K`, `M`, `G`",
        default: "`2M`",
        doc: "Contiguous bytes in the page cache from which the `dma` route, which registers the pages with the \
              driver, is used instead of `copy`.",
    },
    Row {
        name: "SPINIO_BATCH_THREADS",
        old: None,
        values: "1 to 64",
        default: "three quarters of the processors, 2 to 12",
        doc: "Threads that read the operations of one batch from the page cache, the calling one included. They start \
              at the first batch.",
    },
    Row {
        name: "SPINIO_PIN_LIMIT",
        old: Some("SPINIO_HOLD"),
        values: "bytes; `K`, `M`, `G`",
        default: "a quarter of the memory",
        doc: "Upper limit of the bytes that pinned files may have registered, all files together: such pages cannot be \
              reclaimed.",
    },
    Row {
        name: "SPINIO_KERNEL_CACHE_DIR",
        old: Some("SPINIO_KERNELS"),
        values: "absolute path of a directory, or `off`",
        default: "`$XDG_CACHE_HOME/spinio`, else `~/.cache/spinio`",
        doc: "Directory that keeps GPU code compiled by NVRTC for the next process. `off`: no directory.",
    },
    Row {
        name: "SPINIO_READAHEAD_KEEP",
        old: Some("SPINIO_CACHE"),
        values: "`keep`, `auto`, `drop`",
        default: "`auto`",
        doc: "What happens to pages that only reads into devices brought into the page cache. `keep`: they stay, as \
              after any read. `auto`: of sequential reads, and of the unaligned ends of large ones, the last \
              `SPINIO_READAHEAD_PAGES` stay and the others are dropped, until another process opens the file. `drop`: \
              all are dropped once they have been read. Pages that were cached before, are mapped, or are dirty always \
              stay.",
    },
    Row {
        name: "SPINIO_READAHEAD_PAGES",
        old: Some("SPINIO_CACHE_PAGES"),
        values: "pages of 4 KiB",
        default: "`512`",
        doc: "Number of such pages that `SPINIO_READAHEAD_KEEP=auto` keeps, all files together. Pages that the Linux \
              kernel has read ahead are in addition to these.",
    },
    Row {
        name: "SPINIO_EMULATED",
        old: None,
        values: "`size=1G,bar=64M,gbps=12,latency_us=10,p2p=1`, each part optional; `pin_us`, `unpin_us`: the time of registering and of unpinning pages; `vmm=0`: no memory in chunks; `hmm=1`: kernels access all memory of the process; `devices=2`, `peer_gbps=100`, `peer=0`: several devices",
        default: "`size=1G,bar=0`, unlimited speed",
        doc: "The emulated GPU: its memory, how much of it is host-mapped, bandwidth (GB/s) and latency of its DMA \
              engine, and whether the host-mapped part counts as P2P-mapped. `devices` (1 to 8) is how many of them a \
              process has, all alike: `emulated:0`, `emulated:1` ... `peer_gbps` is the bandwidth of copies between two \
              of them, otherwise that of other copies; with `peer=0` they cannot access each other's memory. With `hmm=1` \
              GAIA maps in place are mappings of the file, which kernels also store to.",
    },
    Row {
        name: "SPINIO_NVMMU_STRIPES",
        old: Some("SPINIO_NVMMU"),
        values: "`preread`, `aligned`, `passthrough`",
        default: "`preread`",
        doc: "How NVMMU writes a download to an array with parity (RAID-5, RAID-6). `passthrough`: as any program \
              would. `aligned`: full stripes are written as such, with direct I/O. `preread`: also stripes that are \
              covered in part, with the old bytes of their neighbours, which were read before, while no other process \
              has the file open. The earlier values `plain`, `shaped` and `prepared` mean the same in this release.",
    },
    Row {
        name: "SPINIO_STATS",
        old: None,
        values: "`off`, path of a file, or of a directory with `/` at its end",
        default: "a file for each process, in `$XDG_RUNTIME_DIR/spinio/` or `/dev/shm/spinio-UID/`",
        doc: "Where the counters are kept, so that other processes can read them. The default is what `spinio stat` \
              and `spinio top` read: one file per process, created at its first device request. A path of an existing \
              directory: the same, in that directory. A path of a file: shared by all processes that name it, created \
              if it does not exist; a file with any other content is left alone, and the counters stay in the process. \
              `off`: nothing is counted.",
    },
    Row {
        name: "SPINIO_TRACE",
        old: None,
        values: "`1`",
        default: "off",
        doc: "Records every device request in the file of the counters, from the first one on. `spinio trace` sets it \
              for a program that it starts; for a running process it is not needed. The file holds the last 32,768 \
              records; to get all of them, a reader has to read along.",
    },
    Row {
        name: "SPINIO_COST_MODEL_DIR",
        old: Some("SPINIO_MODEL"),
        values: "absolute path of a directory, `default`",
        default: "`$XDG_STATE_HOME/spinio/models`, else `~/.local/state/spinio/models`",
        doc: "Directory in which `spinio calibrate` stores what it measured, and in which SPIN looks for it. \
              `default`: no directory, so that the built-in cost model is used. `spinio explain` prints which model it \
              used.",
    },
    Row {
        name: "SPINIO_CORRECTION",
        old: None,
        values: "`on`, `off`",
        default: NO_EFFECT,
        doc: "Deprecated: accepted in this release, without effect. On-line cost correction, which this setting \
              switched, was removed: it had no measurable effect.",
    },
    Row {
        name: "SPINIO_GAIA_MEMORY",
        old: None,
        values: "bytes, at least `2M`; `K`, `M`, `G`",
        default: "no limit",
        doc: "Upper limit of the device memory that all maps of files of GAIA mounts have in a process, on each device. \
              What was acquired least recently and is not in use is evicted, as without a limit when the device is full. \
              Maps of leased files, and 16 bytes for each page of a map for writing (4 MiB at most), do not count.",
    },
    Row {
        name: "SPINIO_GAIA_SOCKET",
        old: None,
        values: "an absolute path, up to 107 bytes",
        default: "as `spinio gaia serve` binds it",
        doc: "Socket of the daemon of leased files (`spinio gaia serve`). By default root's daemon is at \
              `/run/spinio/gaia/serve.sock`, that of another user at `$XDG_RUNTIME_DIR/spinio/gaia-serve.sock`; a \
              program of a user who has none of its own asks root's.",
    },
    Row {
        name: "SPINIO_NET_UPGRADE",
        old: None,
        values: "`on`, `off`",
        default: "`on`",
        doc: "Connections of GPU kernels whose both ends are sockets of the same net exchange their bytes in device \
              memory, those with CPU programs that use `spinio_socket_connect()` and those of two nets of this machine in \
              memory that both map. `off`, in the process of the net or of the program: they go through Linux, as all \
              others do. `no_upgrade` of `spinio_net_open()` does that for one net.",
    },
    Row {
        name: "SPINIO_NET_THREADS",
        old: None,
        values: "1 to 64",
        default: "a quarter of the processors, at most 4; below 8 processors 1",
        doc: "Threads that make the system calls of a net's streams, the proxy included, which decides everything. One more \
              helps for each 40 us that the proxy would take alone; these look for more for 20 us after that, and then \
              sleep. With `1` the proxy makes all of them.",
    },
];
