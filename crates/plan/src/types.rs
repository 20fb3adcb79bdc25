//! The types of the router: residency, extent, route, reason, segment, schedule.

use std::fmt;

/// The location of a page's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Residency {
    /// On storage only.
    Absent,
    /// In the page cache, the same as on storage.
    Clean,
    /// In the page cache, newer than on storage.
    Dirty,
    /// It cannot be queried.
    Unknown,
}

impl Residency {
    /// Whether the page cache can serve it without storage, as far as is known.
    pub const fn is_cached(self) -> bool {
        matches!(self, Residency::Clean | Residency::Dirty)
    }
}

/// A run of bytes of one residency. Extents of a request are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes, never 0.
    pub len: u64,
    /// Of every byte in it.
    pub residency: Residency,
}

/// How the bytes of a segment travel from the file to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Route {
    /// Page cache, CPU copy into a bounce buffer, DMA.
    Copy,
    /// Page cache, DMA directly out of its pages.
    Dma,
    /// Page cache, CPU stores into a host-mapped buffer.
    Store,
    /// Storage, O_DIRECT into a bounce buffer, DMA.
    Direct,
    /// Storage, DMA into the device's memory.
    P2p,
    /// Page cache mapped for the device, fetched by a GPU kernel.
    Gather,
}

impl Route {
    /// All routes, in display order.
    pub const ALL: [Route; 6] = [Route::Copy, Route::Dma, Route::Store, Route::Direct, Route::P2p, Route::Gather];

    /// The name used in settings, tables and docs.
    pub const fn name(self) -> &'static str {
        match self {
            Route::Copy => "copy",
            Route::Dma => "dma",
            Route::Store => "store",
            Route::Direct => "direct",
            Route::P2p => "p2p",
            Route::Gather => "gather",
        }
    }

    /// Whether the route is served by the page cache rather than by storage.
    pub const fn from_cache(self) -> bool {
        matches!(self, Route::Copy | Route::Dma | Route::Store | Route::Gather)
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal,)+) => {
        /// Why a segment took its route, or why a faster route was refused.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Reason { $($(#[doc = $doc])+ $name,)+ }

        impl Reason {
            /// All reasons, in numeric order.
            pub const ALL: &'static [Reason] = &[$(Reason::$name,)+];

            /// The sentence shown to the user.
            pub const fn text(self) -> &'static str {
                match self { $(Reason::$name => $text,)+ }
            }
        }
    };
}

reasons! {
    /// At or under the small bound.
    Small = "small request: one page-cache read, with the kernel's read-ahead",
    /// Resident, and the page cache is the cheapest source.
    Cached = "in the page cache",
    /// Resident, and long enough to pay for registering the pages.
    CachedLarge = "in the page cache, long enough to DMA out of its pages",
    /// Dirty: storage would have to be written first.
    Dirty = "dirty in the page cache: not on storage yet",
    /// Resident, but fetched together with absent neighbours.
    Merged = "cached, but cheaper to fetch with its absent neighbours",
    /// Not resident.
    Absent = "not in the page cache",
    /// An edge that is too small or misaligned for the route of its neighbours.
    Edge = "edge that is not aligned for direct I/O",
    /// Residency cannot be queried for this file; the read itself finds out.
    Unknown = "residency cannot be queried: the read finds out",
    /// The file has no direct I/O.
    NoDirectIo = "the file system offers no direct I/O for this file",
    /// The kernel does not open the file again for this process.
    NoShadowFd = "the file cannot be opened a second time by this process",
    /// No second fd table.
    NoWorkers = "no worker threads: the kernel gives no unshared fd table",
    /// Pipe, socket, character device.
    Stream = "not a file with offsets: copied through bounce buffers",
    /// The buffer is not P2P-mapped.
    NoP2pMapping = "the device's memory is not mapped for peer-to-peer DMA",
    /// Storage cannot reach the device.
    P2pUnreachable = "this storage cannot DMA into this device",
    /// The P2P probe read did not match.
    P2pUntrusted = "the peer-to-peer probe read differed from another route",
    /// Offset, length or address is not aligned for P2P.
    P2pMisaligned = "offset or address is not aligned for peer-to-peer DMA",
    /// A write that more than one disk has to get.
    P2pMirror = "a mirror may lose a peer-to-peer write on one of its sides without an error",
    /// The CPU can store to the buffer.
    HostMapped = "the CPU can store into this buffer",
    /// Registering page-cache pages failed.
    PinRefused = "the pages could not be registered with the driver",
    /// One request at a time registers pages.
    Concurrent = "several large reads at once: one of them registers pages, the others copy",
    /// Enough threads to copy faster.
    ManyThreads = "enough threads to copy faster than pages can be registered",
    /// Unpinning waits for GPU kernels.
    PinStalls = "unpinning was seen to wait for the program's own GPU kernels",
    /// No pinned memory could be had.
    NoPinnedMemory = "no pinned memory for bounce buffers",
    /// The chosen route failed and this one finished the work.
    Fallback = "the first route failed: this one finished the work",
    /// The program's own O_DIRECT descriptor.
    AppODirect = "opened with O_DIRECT by the program: its own descriptor is used",
    /// The program captures a graph.
    Capturing = "a graph is being captured: only copies on an internal stream",
    /// A write, by default.
    IntoCache = "a write goes into the page cache, in a single system call",
    /// A write that does not stop at the page cache, or is cheaper without it.
    CacheBypass = "a write that is cheaper when it bypasses the page cache",
    /// A write that waits for storage.
    Synchronous = "O_SYNC or O_DSYNC: the write waits for storage anyway",
    /// Splitting the write would take a second system call.
    NotAtomic = "direct I/O would not be atomic with respect to other writers",
    /// RLIMIT_FSIZE, a lease or O_APPEND.
    AppFdOnly = "only the program's own descriptor may write here (O_APPEND, a lease, a size limit, flags)",
    /// A write above the bounce buffer limit.
    Chunked = "larger than the bounce buffer limit: written in chunks",
    /// A write aligned to the stripes of an array.
    FullStripes = "full stripes of an array: nothing has to be read for their parity",
    /// A setting chose the route.
    BySetting = "chosen by a setting",
    /// Short requests one after another.
    ReadAhead = "sequential and short: through the page cache, where the kernel reads ahead",
    /// The file is pinned.
    Pinned = "the file is pinned: its pages are registered already",
    /// No longer used: workers copied the end of a long read while its start was registered. The number stays reserved.
    TailCopy = "in the page cache: copied while other pages of the request were registered",
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.text())
    }
}

/// A byte range with one route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First byte, counted from the start of the request.
    pub offset: u64,
    /// Length in bytes, never 0.
    pub len: u64,
    /// How it travels.
    pub route: Route,
    /// Why.
    pub reason: Reason,
    /// Why a faster route was refused, where one was.
    pub refused: Option<Reason>,
}
