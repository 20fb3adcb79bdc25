//! Settings: one immutable structure, read once from `SPINIO_*`; the preloaded library does so while it is loaded.
//!
//! A new setting is a field with its default, a line in [`Settings::read`], and a row in [`TABLE`], which is the
//! documentation.

mod table;

use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::OnceLock;

use spinio_plan::Route;
use spinio_sys::linux;

pub use self::table::{Row, TABLE, row};

/// The largest small request, in bytes: it returns once its bytes are in a bounce buffer and the
/// copy is queued (CUDA's rule for pageable memory).
pub const SMALL_REQUEST_MAX: usize = 64 << 10;

/// Bytes of one request where a longer transfer is made in parts: a system call moves a little less than 2 GiB.
pub const MAX_PART: usize = 1 << 30;

/// The length of the next part of a transfer of which `left` bytes are left. No part of a longer transfer is so short that
/// it returns when it is only queued.
pub fn next_part(left: usize) -> usize {
    match left {
        0..=MAX_PART => left,
        _ if left - MAX_PART <= SMALL_REQUEST_MAX => MAX_PART / 2,
        _ => MAX_PART,
    }
}

/// What happens to pages that only device reads have read into the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CachePolicy {
    /// They stay, as after any read.
    Keep,
    /// A bounded set of them stays.
    Auto,
    /// They are dropped as soon as they have been read.
    Drop,
}

/// When a call returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ordering {
    /// Up to [`SMALL_REQUEST_MAX`] once queued, above once arrived.
    Relaxed,
    /// Always once complete.
    Strict,
}

/// What NVMMU does for an output on an array with parity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NvmmuStripes {
    /// Nothing: requests are written as they arrive.
    Passthrough,
    /// Full stripes are written as such.
    Aligned,
    /// Also stripes that are covered in part, with the old bytes around the new ones.
    Preread,
}

/// Processor time that long reads may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CpuUse {
    /// As much as makes them fast, where processors are free.
    Auto,
    /// Little: pages are registered instead of copied.
    Low,
}

/// What reads storage around the page cache for single requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StorageEngine {
    /// The ring where it pays.
    Auto,
    /// The ring wherever the kernel has it.
    Ring,
    /// Shadow workers.
    Workers,
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
    /// `SPINIO_CPU`
    pub cpu: CpuUse,
    /// `SPINIO_BOUNCE_LIMIT` in bytes
    pub bounce_limit: u64,
    /// `SPINIO_ROUTES`: the routes that may be used
    pub routes: Vec<Route>,
    /// `SPINIO_STORAGE_ENGINE`
    pub storage_engine: StorageEngine,
    /// `SPINIO_DMA_MIN`: cached bytes from which the pages are registered instead of copied
    pub dma_min: u64,
    /// `SPINIO_PIN_LIMIT` in bytes, 0 for the default
    pub pin_limit: u64,
    /// `SPINIO_BATCH_THREADS`, 0 for the default
    pub batch_threads: usize,
    /// `SPINIO_KERNEL_CACHE_DIR`: directory of compiled device code
    pub kernel_cache_dir: Option<String>,
    /// `SPINIO_READAHEAD_KEEP`
    pub readahead_keep: CachePolicy,
    /// `SPINIO_READAHEAD_PAGES`: pages in the bounded set
    pub readahead_pages: u64,
    /// `SPINIO_EMULATED`: description of the emulated device
    pub emulated: Option<String>,
    /// `SPINIO_NVMMU_STRIPES`: what is done for outputs on arrays with parity
    pub nvmmu_stripes: NvmmuStripes,
    /// `SPINIO_STATS`: `off`, a file for the counters, or with `/` at its end a directory
    pub stats: Option<String>,
    /// `SPINIO_COST_MODEL_DIR`: directory of the calibrations; none: defaults only
    pub cost_model_dir: Option<String>,
    /// `SPINIO_TRACE`
    pub trace: bool,
    /// `SPINIO_GAIA_MEMORY`: bytes of device memory that maps of mounted files may have on each device
    pub gaia_memory: Option<u64>,
    /// `SPINIO_GAIA_SOCKET`: the socket of the daemon of leased files
    pub gaia_socket: Option<String>,
    /// `SPINIO_NET_UPGRADE`: connections inside one net, or with programs and nets of this machine, leave Linux's sockets
    pub net_upgrade: bool,
    /// `SPINIO_NET_THREADS`, 0 for the default
    pub net_threads: usize,
    /// XDG_RUNTIME_DIR, where the counters and the socket are without a setting
    pub runtime_dir: Option<String>,
}

/// Read while there is one thread: later the program may change its environment during the read.
static PROCESS_SETTINGS: OnceLock<Settings> = OnceLock::new();

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            disable: false,
            ordering: Ordering::Relaxed,
            threads: 0,
            cpu: CpuUse::Auto,
            bounce_limit: 128 << 20,
            routes: Route::ALL.to_vec(),
            storage_engine: StorageEngine::Auto,
            dma_min: 2 << 20,
            pin_limit: 0,
            batch_threads: 0,
            kernel_cache_dir: None,
            readahead_keep: CachePolicy::Auto,
            readahead_pages: 512,
            emulated: None,
            nvmmu_stripes: NvmmuStripes::Preread,
            stats: None,
            cost_model_dir: None,
            trace: false,
            gaia_memory: None,
            gaia_socket: None,
            net_upgrade: true,
            net_threads: 0,
            runtime_dir: None,
        }
    }
}

impl Settings {
    /// Reads the settings through `get` (name to value). A value that cannot be parsed leaves the default; the second
    /// result has one sentence for each such setting. An old name is read if the new one is not set.
    pub fn read(get: impl Fn(&str) -> Option<String>) -> (Settings, Vec<String>) {
        let mut s = Settings::default();
        let mut warnings = Vec::new();
        let mut parse_setting = |name: &str, apply: &mut dyn FnMut(&str) -> bool| {
            let old = row(name).and_then(|row| row.old).and_then(|old| Some((old, get(old)?)));
            let (name, value) = match (get(name), old) {
                (Some(value), Some((old, other))) if other.trim() != value.trim() => {
                    warnings.push(format!("{old}={other} is ignored: {name}={value} is set, its new name"));
                    (name, value)
                }
                (Some(value), _) => (name, value),
                (None, Some(old)) => old,
                (None, None) => return,
            };
            if !apply(value.trim()) {
                warnings.push(format!("{name}={value} is not understood: the default stays"));
            }
        };
        parse_setting("SPINIO_DISABLE", &mut |v| store(&mut s.disable, flag(v)));
        parse_setting("SPINIO_ORDERING", &mut |v| {
            store(&mut s.ordering, choice(v, &[("relaxed", Ordering::Relaxed), ("strict", Ordering::Strict)]))
        });
        parse_setting("SPINIO_THREADS", &mut |v| store(&mut s.threads, count(v, 1..=64)));
        parse_setting("SPINIO_CPU", &mut |v| {
            store(&mut s.cpu, choice(v, &[("auto", CpuUse::Auto), ("low", CpuUse::Low)]))
        });
        parse_setting("SPINIO_BOUNCE_LIMIT", &mut |v| {
            store(&mut s.bounce_limit, parse_bytes(v).filter(|bytes| *bytes >= 2 << 20))
        });
        parse_setting("SPINIO_ROUTES", &mut |v| {
            let named = |name| Route::ALL.into_iter().find(|route| route.name() == name);
            let allowed = v.split(',').map(str::trim).filter(|name| !name.is_empty()).map(named);
            store(&mut s.routes, [Route::Copy, Route::Store].map(Some).into_iter().chain(allowed).collect())
        });
        parse_setting("SPINIO_STORAGE_ENGINE", &mut |v| {
            use StorageEngine::{Auto, Ring, Workers};
            store(&mut s.storage_engine, choice(v, &[("auto", Auto), ("ring", Ring), ("workers", Workers)]))
        });
        parse_setting("SPINIO_DMA_MIN", &mut |v| store(&mut s.dma_min, parse_bytes(v)));
        parse_setting("SPINIO_PIN_LIMIT", &mut |v| store(&mut s.pin_limit, parse_bytes(v).filter(|bytes| *bytes > 0)));
        parse_setting("SPINIO_BATCH_THREADS", &mut |v| store(&mut s.batch_threads, count(v, 1..=64)));
        parse_setting("SPINIO_READAHEAD_KEEP", &mut |v| {
            use CachePolicy::{Auto, Drop, Keep};
            store(&mut s.readahead_keep, choice(v, &[("keep", Keep), ("auto", Auto), ("drop", Drop)]))
        });
        parse_setting("SPINIO_READAHEAD_PAGES", &mut |v| store(&mut s.readahead_pages, count(v, 0..=0x1_0000_0000)));
        s.kernel_cache_dir = kernel_directory(&get);
        parse_setting("SPINIO_KERNEL_CACHE_DIR", &mut |v| store(&mut s.kernel_cache_dir, path_or("off", v)));
        // The device parses it; see `check_settings` of spinio-io.
        parse_setting("SPINIO_EMULATED", &mut |v| store(&mut s.emulated, Some(Some(v.to_owned()))));
        parse_setting("SPINIO_NVMMU_STRIPES", &mut |v| {
            use NvmmuStripes::{Aligned, Passthrough, Preread};
            let old = [("plain", Passthrough), ("shaped", Aligned), ("prepared", Preread)];
            let names = [("passthrough", Passthrough), ("aligned", Aligned), ("preread", Preread)];
            store(&mut s.nvmmu_stripes, choice(v, &names).or_else(|| choice(v, &old)))
        });
        parse_setting("SPINIO_STATS", &mut |v| store(&mut s.stats, (!v.is_empty()).then(|| Some(v.to_owned()))));
        s.cost_model_dir = model_directory(&get);
        parse_setting("SPINIO_COST_MODEL_DIR", &mut |v| store(&mut s.cost_model_dir, path_or("default", v)));
        // Without effect, for one release.
        parse_setting("SPINIO_CORRECTION", &mut |v| on_or_off(v).is_some());
        parse_setting("SPINIO_TRACE", &mut |v| store(&mut s.trace, flag(v)));
        parse_setting("SPINIO_GAIA_MEMORY", &mut |v| {
            store(&mut s.gaia_memory, parse_bytes(v).filter(|bytes| *bytes >= 2 << 20).map(Some))
        });
        parse_setting("SPINIO_GAIA_SOCKET", &mut |v| {
            let fits = v.starts_with('/') && v.len() <= 107;
            store(&mut s.gaia_socket, fits.then(|| Some(v.to_owned())))
        });
        parse_setting("SPINIO_NET_UPGRADE", &mut |v| store(&mut s.net_upgrade, on_or_off(v)));
        parse_setting("SPINIO_NET_THREADS", &mut |v| store(&mut s.net_threads, count(v, 1..=64)));
        s.runtime_dir = get("XDG_RUNTIME_DIR");
        (s, warnings)
    }

    /// The settings of this process. A program with more rights than the user that started it (setuid) ignores its
    /// environment, because the settings name files to be written and code for the GPU.
    pub fn from_env() -> (Settings, Vec<String>) {
        let trusted_env = !linux::is_secure_exec();
        Settings::read(|name| std::env::var(name).ok().filter(|_| trusted_env))
    }

    /// The settings of this process as of the first call, which is made when the library is loaded.
    pub fn of_process() -> &'static Settings {
        if let Some(settings) = PROCESS_SETTINGS.get() {
            return settings;
        }
        // Read before the cell is locked: a child forked while the cell is locked would wait forever.
        let settings = Settings::from_env().0;
        PROCESS_SETTINGS.get_or_init(|| settings)
    }

    /// The limit of the bytes that pinned files have registered.
    pub fn effective_pin_limit(&self) -> u64 {
        if self.pin_limit > 0 { self.pin_limit } else { linux::total_memory() / 4 }
    }

    /// Whether a route may be used.
    pub fn allows(&self, route: Route) -> bool {
        self.routes.contains(&route)
    }
}

/// Stores what a text was parsed to; whether it could be parsed.
fn store<T>(setting: &mut T, parsed: Option<T>) -> bool {
    parsed.map(|value| *setting = value).is_some()
}

/// One of some names.
fn choice<T: Copy>(text: &str, names: &[(&str, T)]) -> Option<T> {
    names.iter().find(|(name, _)| *name == text).map(|(_, value)| *value)
}

/// A number in a range.
fn count<T: FromStr + PartialOrd>(text: &str, range: RangeInclusive<T>) -> Option<T> {
    text.parse().ok().filter(|number| range.contains(number))
}

fn flag(text: &str) -> Option<bool> {
    choice(text, &[("1", true), ("0", false), ("", false)])
}

fn on_or_off(text: &str) -> Option<bool> {
    choice(text, &[("on", true), ("off", false)])
}

/// An absolute path, or the word for none.
fn path_or(none: &str, text: &str) -> Option<Option<String>> {
    if text == none { Some(None) } else { text.starts_with('/').then(|| Some(text.to_owned())) }
}

/// The directory of calibrations without a setting: `$XDG_STATE_HOME/spinio/models`, or below `$HOME/.local/state`.
fn model_directory(get: impl Fn(&str) -> Option<String>) -> Option<String> {
    xdg_directory(get, "XDG_STATE_HOME", ".local/state").map(|directory| format!("{directory}/models"))
}

/// The directory of compiled device code without a setting: `$XDG_CACHE_HOME/spinio`, or below `$HOME/.cache`.
fn kernel_directory(get: impl Fn(&str) -> Option<String>) -> Option<String> {
    xdg_directory(get, "XDG_CACHE_HOME", ".cache")
}

/// `spinio` in a user's directory of one kind; relative paths are ignored.
fn xdg_directory(get: impl Fn(&str) -> Option<String>, name: &str, below_home: &str) -> Option<String> {
    let absolute = |name: &str| get(name).filter(|path| path.starts_with('/'));
    let base = absolute(name).or_else(|| Some(format!("{}/{below_home}", absolute("HOME")?)))?;
    Some(format!("{base}/spinio"))
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
    if let Ok(integer) = digits.parse::<u64>() {
        return integer.checked_mul(unit);
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
    fn long_transfers_have_no_short_part() {
        for more in [0, 1, 4096, SMALL_REQUEST_MAX, SMALL_REQUEST_MAX + 1, MAX_PART, MAX_PART + 1, 3 * MAX_PART + 5000]
        {
            let mut left = MAX_PART + more;
            while left > 0 {
                let part = next_part(left);
                assert!(part > SMALL_REQUEST_MAX && part <= MAX_PART, "{part} of {left} bytes");
                left -= part;
            }
        }
        assert_eq!((next_part(0), next_part(1), next_part(MAX_PART)), (0, 1, MAX_PART));
    }

    #[test]
    fn empty_environment_gives_defaults() {
        assert_eq!(read(&[]), (Settings::default(), vec![]));
    }

    #[test]
    fn invalid_values_warn_and_keep_defaults() {
        let (s, warnings) = read(&[("SPINIO_THREADS", "many"), ("SPINIO_ROUTES", "copy,warp")]);
        assert_eq!(s, Settings::default());
        assert_eq!(warnings.len(), 2);
        assert!(warnings[0].contains("SPINIO_THREADS=many"));
    }

    #[test]
    fn safe_routes_are_always_allowed() {
        let (s, _) = read(&[("SPINIO_ROUTES", "direct")]);
        assert!(s.allows(Route::Copy) && s.allows(Route::Direct) && !s.allows(Route::Dma));
    }

    #[test]
    fn cost_model_dir_must_be_absolute() {
        let cost_model_dir = |pairs: &[(&str, &str)]| read(pairs).0.cost_model_dir;
        assert_eq!(cost_model_dir(&[("HOME", "/home/a")]).as_deref(), Some("/home/a/.local/state/spinio/models"));
        assert_eq!(cost_model_dir(&[("HOME", "/home/a"), ("SPINIO_COST_MODEL_DIR", "default")]), None);
        assert_eq!(
            cost_model_dir(&[("HOME", "/home/a"), ("SPINIO_COST_MODEL_DIR", "/models")]).as_deref(),
            Some("/models")
        );
        let (s, warnings) = read(&[("SPINIO_COST_MODEL_DIR", "here"), ("SPINIO_CORRECTION", "off")]);
        assert_eq!((s.cost_model_dir, warnings.len()), (None, 1), "the second has no effect");
    }

    #[test]
    fn kernel_cache_dir_must_be_absolute() {
        let kernel_cache_dir = |value: &str| {
            let (s, warnings) = read(&[("HOME", "/home/a"), ("SPINIO_KERNEL_CACHE_DIR", value)]);
            (s.kernel_cache_dir, warnings.len())
        };
        let default = Some("/home/a/.cache/spinio".to_owned());
        assert_eq!(kernel_cache_dir("here"), (default.clone(), 1), "the default stays");
        assert_eq!(kernel_cache_dir(""), (default, 1));
        assert_eq!(kernel_cache_dir("/code"), (Some("/code".to_owned()), 0));
        assert_eq!(kernel_cache_dir("off"), (None, 0));
    }

    #[test]
    fn default_directories_follow_the_environment() {
        fn of<'a>(pairs: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<String> + 'a {
            |name| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned())
        }
        assert_eq!(model_directory(of(&[])), None);
        assert_eq!(model_directory(of(&[("HOME", "/home/a")])).as_deref(), Some("/home/a/.local/state/spinio/models"));
        let both = [("HOME", "/home/a"), ("XDG_STATE_HOME", "/state")];
        assert_eq!(model_directory(of(&both)).as_deref(), Some("/state/spinio/models"));
        let relative = [("HOME", "/home/a"), ("XDG_STATE_HOME", "state")];
        assert_eq!(model_directory(of(&relative)).as_deref(), Some("/home/a/.local/state/spinio/models"));
        assert_eq!(kernel_directory(of(&[("HOME", "/home/a")])).as_deref(), Some("/home/a/.cache/spinio"));
        let cache = [("HOME", "/home/a"), ("XDG_CACHE_HOME", "/c")];
        assert_eq!(kernel_directory(of(&cache)).as_deref(), Some("/c/spinio"));
        assert_eq!(kernel_directory(of(&[("HOME", "relative")])), None);
    }

    #[test]
    fn parse_bytes_units() {
        assert_eq!(parse_bytes("4096"), Some(4096));
        assert_eq!(parse_bytes("64K"), Some(65536));
        assert_eq!(parse_bytes("1.5GiB"), Some(3 << 29));
        assert_eq!(parse_bytes("-1"), None);
        assert_eq!(parse_bytes(""), None);
        assert_eq!(parse_bytes("é"), None);
        assert_eq!(parse_bytes("99999999999T"), None);
    }

    #[test]
    fn every_documented_setting_is_read() {
        for row in TABLE {
            let was_read = std::cell::Cell::new(false);
            Settings::read(|name| {
                was_read.set(was_read.get() || name == row.name);
                None
            });
            assert!(was_read.get(), "{} is documented but never read", row.name);
        }
    }

    /// A value of each setting that differs from its default, and another one.
    fn two_values(name: &str) -> [&'static str; 2] {
        match name {
            "SPINIO_KERNEL_CACHE_DIR" | "SPINIO_COST_MODEL_DIR" => ["/a", "/b"],
            "SPINIO_PIN_LIMIT" | "SPINIO_BOUNCE_LIMIT" => ["8M", "16M"],
            "SPINIO_NVMMU_STRIPES" => ["aligned", "passthrough"],
            "SPINIO_READAHEAD_KEEP" => ["keep", "drop"],
            "SPINIO_READAHEAD_PAGES" => ["7", "8"],
            _ => panic!("{name} was renamed: give it two values here"),
        }
    }

    fn renamed() -> impl Iterator<Item = (&'static str, &'static str)> {
        TABLE.iter().filter_map(|row| Some((row.name, row.old?)))
    }

    #[test]
    fn old_setting_names_are_read() {
        assert_eq!(renamed().count(), 7);
        for (name, old) in renamed() {
            let [value, _] = two_values(name);
            let with_old = read(&[(old, value)]);
            assert_eq!(with_old, read(&[(name, value)]), "{old}");
            assert!(with_old.0 != Settings::default() && with_old.1.is_empty(), "{old}");
            let (s, warnings) = read(&[(old, "?")]);
            assert!(s == Settings::default() && warnings[0].contains(old), "{warnings:?}");
        }
        for (value, old) in [("passthrough", "plain"), ("aligned", "shaped"), ("preread", "prepared")] {
            assert_eq!(read(&[("SPINIO_NVMMU", old)]), read(&[("SPINIO_NVMMU_STRIPES", value)]), "{old}");
        }
    }

    #[test]
    fn new_setting_wins_over_old() {
        for (name, old) in renamed() {
            let [value, other] = two_values(name);
            assert_eq!(read(&[(old, other), (name, value)]).0, read(&[(name, value)]).0, "{old}");
        }
    }

    #[test]
    fn differing_old_setting_is_reported() {
        for (name, old) in renamed() {
            let [value, other] = two_values(name);
            let (_, warnings) = read(&[(old, other), (name, value)]);
            assert!(warnings.len() == 1 && warnings[0].contains(old) && warnings[0].contains(name), "{warnings:?}");
            assert!(read(&[(old, value), (name, value)]).1.is_empty(), "{old}: the same value is no conflict");
        }
    }
}
