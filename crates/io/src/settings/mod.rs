//! Settings: one immutable structure, read once from `SPINIO_*`, by the preloaded library while it is loaded.
//!
//! The doc text of each row is its manual; `cargo x docs` writes docs/settings.md from it.

use std::sync::OnceLock;

use spinio_plan::Route;
use spinio_sys::linux;

/// How many bytes a request may have and still be a small one: it returns once the
/// bytes are safe in staging and the copy is queued (CUDA's rule for pageable memory).
pub const SMALL: usize = 64 << 10;

/// What becomes of pages that a device read alone brought into the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// They stay, as after any read.
    Keep,
    /// A bounded set of them stays.
    Auto,
    /// They go as soon as they have been read.
    Drop,
}

/// When a call returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ordering {
    /// Up to [`SMALL`] once queued, above once arrived.
    Relaxed,
    /// Always once arrived.
    Strict,
}

/// What NVMMU does for an output on an array with parity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nvmmu {
    /// Nothing: written as it comes.
    Plain,
    /// Whole stripes are written as such.
    Shaped,
    /// Stripes that are covered in part too, with the old bytes of their neighbours.
    Prepared,
}

/// Every setting, after defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `SPINIO_DISABLE`
    pub disable: bool,
    /// `SPINIO_ORDERING`
    pub ordering: Ordering,
    /// `SPINIO_THREADS`, 0 for the default
    pub threads: usize,
    /// `SPINIO_STAGING` in bytes
    pub staging: u64,
    /// `SPINIO_ROUTES`: the routes that may be used
    pub routes: Vec<Route>,
    /// `SPINIO_DMA_MIN`: cached bytes from which the pages are registered instead of copied
    pub dma_min: u64,
    /// `SPINIO_HOLD` in bytes, 0 for the default
    pub hold: u64,
    /// `SPINIO_BATCH_THREADS`, 0 for the default
    pub batch_threads: usize,
    /// `SPINIO_KERNELS`: folder of compiled device code
    pub kernels: Option<String>,
    /// `SPINIO_CACHE`
    pub cache: Cache,
    /// `SPINIO_CACHE_PAGES`: pages in the bounded set
    pub cache_pages: u64,
    /// `SPINIO_EMULATED`: description of the emulated device
    pub emulated: Option<String>,
    /// `SPINIO_NVMMU`: what is done for outputs on arrays with parity
    pub nvmmu: Nvmmu,
    /// `SPINIO_STATS`: `off`, a file for the counters, or with `/` at its end a folder
    pub stats: Option<String>,
    /// `SPINIO_MODEL`: folder of the calibrations; none: defaults only
    pub model: Option<String>,
    /// `SPINIO_CORRECTION`: whether costs follow what is measured
    pub correction: bool,
    /// `SPINIO_TRACE`
    pub trace: bool,
    /// XDG_RUNTIME_DIR, where the counters go by themselves
    pub runtime_folder: Option<String>,
}

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
              A write up to this size is one call of the kernel; a larger one is made in parts.",
    },
    Row {
        name: "SPINIO_ROUTES",
        values: "list of `copy`, `dma`, `store`, `direct`, `p2p`",
        default: "all",
        doc: "The routes that may be used. `copy` and, on devices without a DMA engine, `store` always may: \
              they are what every other route falls back to. A CUDA program with a kernel that never ends sets \
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
        values: "path of a folder, or `off`",
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
        values: "`size=1G,bar=64M,gbps=12,latency_us=10,p2p=1`, each part optional",
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

/// Read while there is one thread: later the program may change its environment while we look.
static AT_LOAD: OnceLock<Settings> = OnceLock::new();

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            disable: false,
            ordering: Ordering::Relaxed,
            threads: 0,
            staging: 128 << 20,
            routes: Route::ALL.to_vec(),
            dma_min: 2 << 20,
            hold: 0,
            batch_threads: 0,
            kernels: None,
            cache: Cache::Auto,
            cache_pages: 512,
            emulated: None,
            nvmmu: Nvmmu::Prepared,
            stats: None,
            model: None,
            correction: true,
            trace: false,
            runtime_folder: None,
        }
    }
}

impl Settings {
    /// Reads the settings through `get` (name to value). What cannot be understood keeps its
    /// default and is told in the second value, one sentence a setting.
    pub fn read(get: impl Fn(&str) -> Option<String>) -> (Settings, Vec<String>) {
        let mut s = Settings::default();
        let mut complaints = Vec::new();
        let mut each = |name: &str, apply: &mut dyn FnMut(&str) -> bool| {
            if let Some(value) = get(name)
                && !apply(value.trim())
            {
                complaints.push(format!("{name}={value} is not understood: the default stays"));
            }
        };
        each("SPINIO_DISABLE", &mut |v| match v {
            "1" => {
                s.disable = true;
                true
            }
            "" | "0" => true,
            _ => false,
        });
        each("SPINIO_ORDERING", &mut |v| match v {
            "relaxed" => true,
            "strict" => {
                s.ordering = Ordering::Strict;
                true
            }
            _ => false,
        });
        each("SPINIO_THREADS", &mut |v| match v.parse() {
            Ok(n @ 1..=64) => {
                s.threads = n;
                true
            }
            _ => false,
        });
        each("SPINIO_STAGING", &mut |v| match parse_bytes(v) {
            Some(n) if n >= 2 << 20 => {
                s.staging = n;
                true
            }
            _ => false,
        });
        each("SPINIO_ROUTES", &mut |v| {
            let mut routes = vec![Route::Copy, Route::Store];
            for name in v.split(',').map(str::trim).filter(|n| !n.is_empty()) {
                match Route::ALL.into_iter().find(|r| r.name() == name) {
                    Some(route) => routes.push(route),
                    None => return false,
                }
            }
            s.routes = routes;
            true
        });
        each("SPINIO_DMA_MIN", &mut |v| match parse_bytes(v) {
            Some(n) => {
                s.dma_min = n;
                true
            }
            None => false,
        });
        each("SPINIO_HOLD", &mut |v| match parse_bytes(v) {
            Some(n) if n > 0 => {
                s.hold = n;
                true
            }
            _ => false,
        });
        each("SPINIO_BATCH_THREADS", &mut |v| match v.parse() {
            Ok(n @ 1..=64) => {
                s.batch_threads = n;
                true
            }
            _ => false,
        });
        each("SPINIO_CACHE", &mut |v| {
            s.cache = match v {
                "keep" => Cache::Keep,
                "auto" => Cache::Auto,
                "drop" => Cache::Drop,
                _ => return false,
            };
            true
        });
        each("SPINIO_CACHE_PAGES", &mut |v| match v.parse() {
            Ok(n @ 0..=0x1_0000_0000) => {
                s.cache_pages = n;
                true
            }
            _ => false,
        });
        s.kernels = crate::batch::code::folder(&get);
        each("SPINIO_KERNELS", &mut |v| {
            s.kernels = (v != "off").then(|| v.to_owned());
            v == "off" || v.starts_with('/')
        });
        each("SPINIO_EMULATED", &mut |v| {
            s.emulated = Some(v.to_owned());
            true
        });
        each("SPINIO_NVMMU", &mut |v| {
            s.nvmmu = match v {
                "plain" => Nvmmu::Plain,
                "shaped" => Nvmmu::Shaped,
                "prepared" => Nvmmu::Prepared,
                _ => return false,
            };
            true
        });
        each("SPINIO_STATS", &mut |v| {
            s.stats = (!v.is_empty()).then(|| v.to_owned());
            !v.is_empty()
        });
        s.model = crate::model::folder(&get);
        each("SPINIO_MODEL", &mut |v| {
            match v {
                "default" => s.model = None,
                path if path.starts_with('/') => s.model = Some(path.to_owned()),
                _ => return false,
            }
            true
        });
        each("SPINIO_CORRECTION", &mut |v| match v {
            "on" => true,
            "off" => {
                s.correction = false;
                true
            }
            _ => false,
        });
        each("SPINIO_TRACE", &mut |v| match v {
            "1" => {
                s.trace = true;
                true
            }
            "" | "0" => true,
            _ => false,
        });
        s.runtime_folder = get("XDG_RUNTIME_DIR");
        (s, complaints)
    }

    /// The settings of this process. A program that has more rights than who started it (setuid) believes none of its
    /// environment: it names files to be written, and code for the GPU.
    pub fn from_env() -> (Settings, Vec<String>) {
        let believed = !linux::has_gained_rights();
        Settings::read(|name| std::env::var(name).ok().filter(|_| believed))
    }

    /// The settings of this process as they were when it was loaded, if anybody asked then, else as they are now.
    pub fn of_process() -> &'static Settings {
        if let Some(known) = AT_LOAD.get() {
            return known;
        }
        // Read before the cell is locked: a child forked while it is would wait for ever.
        let read = Settings::from_env().0;
        AT_LOAD.get_or_init(|| read)
    }

    /// How many bytes held files may have registered.
    pub fn held_bytes(&self) -> u64 {
        if self.hold > 0 { self.hold } else { linux::memory() / 4 }
    }

    /// Whether a route may be used.
    pub fn allows(&self, route: Route) -> bool {
        self.routes.contains(&route)
    }
}

/// A number of bytes: `4096`, `64K`, `1.5G`; powers of 1024.
pub fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim().trim_end_matches(['B', 'b']).trim_end_matches('i');
    let (digits, unit) = match text.char_indices().last()? {
        (at, 'k' | 'K') => (&text[..at], 1u64 << 10),
        (at, 'm' | 'M') => (&text[..at], 1 << 20),
        (at, 'g' | 'G') => (&text[..at], 1 << 30),
        (at, 't' | 'T') => (&text[..at], 1 << 40),
        _ => (text, 1),
    };
    if let Ok(whole) = digits.parse::<u64>() {
        return whole.checked_mul(unit);
    }
    let value = digits.parse::<f64>().ok()? * unit as f64;
    (value.is_finite() && (0.0..9e18).contains(&value)).then_some(value as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> (Settings, Vec<String>) {
        Settings::read(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()))
    }

    #[test]
    fn nothing_set_gives_the_defaults() {
        assert_eq!(read(&[]), (Settings::default(), vec![]));
    }

    #[test]
    fn what_is_not_understood_is_told_and_changes_nothing() {
        let (s, complaints) = read(&[("SPINIO_THREADS", "many"), ("SPINIO_ROUTES", "copy,warp")]);
        assert_eq!(s, Settings::default());
        assert_eq!(complaints.len(), 2);
        assert!(complaints[0].contains("SPINIO_THREADS=many"));
    }

    #[test]
    fn routes_always_keep_the_safe_ones() {
        let (s, _) = read(&[("SPINIO_ROUTES", "direct")]);
        assert!(s.allows(Route::Copy) && s.allows(Route::Direct) && !s.allows(Route::Dma));
    }

    #[test]
    fn models_are_found_by_absolute_paths_only() {
        let model = |pairs: &[(&str, &str)]| read(pairs).0.model;
        assert_eq!(model(&[("HOME", "/home/a")]).as_deref(), Some("/home/a/.local/state/spinio/models"));
        assert_eq!(model(&[("HOME", "/home/a"), ("SPINIO_MODEL", "default")]), None);
        assert_eq!(model(&[("HOME", "/home/a"), ("SPINIO_MODEL", "/models")]).as_deref(), Some("/models"));
        let (s, complaints) = read(&[("SPINIO_MODEL", "here"), ("SPINIO_CORRECTION", "off")]);
        assert_eq!((s.model, s.correction, complaints.len()), (None, false, 1));
    }

    #[test]
    fn bytes() {
        assert_eq!(parse_bytes("4096"), Some(4096));
        assert_eq!(parse_bytes("64K"), Some(65536));
        assert_eq!(parse_bytes("1.5GiB"), Some(3 << 29));
        assert_eq!(parse_bytes("-1"), None);
        assert_eq!(parse_bytes(""), None);
        assert_eq!(parse_bytes("é"), None);
        assert_eq!(parse_bytes("99999999999T"), None);
    }

    #[test]
    fn every_row_is_read() {
        for row in TABLE {
            let asked = std::cell::Cell::new(false);
            Settings::read(|name| {
                asked.set(asked.get() || name == row.name);
                None
            });
            assert!(asked.get(), "{} is documented but never read", row.name);
        }
    }
}
