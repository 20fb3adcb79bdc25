//! Settings: one immutable structure, read once from `SPINIO_*`, by the preloaded library while it is loaded.
//!
//! A new setting is a field with its default, a line in [`Settings::read`], and a row in [`TABLE`], which is the manual.

mod table;

use std::sync::OnceLock;

use spinio_plan::Route;
use spinio_sys::linux;

pub use self::table::{Row, TABLE};

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
        s.kernels = kernel_folder(&get);
        each("SPINIO_KERNELS", &mut |v| {
            match v {
                "off" => s.kernels = None,
                path if path.starts_with('/') => s.kernels = Some(path.to_owned()),
                _ => return false,
            }
            true
        });
        each("SPINIO_EMULATED", &mut |v| {
            // The device parses it; see `check_settings` of spinio-io.
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
        s.model = model_folder(&get);
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

/// The folder of calibrations without a setting: `$XDG_STATE_HOME/spinio/models`, or below `$HOME/.local/state`.
pub fn model_folder(get: impl Fn(&str) -> Option<String>) -> Option<String> {
    xdg_folder(get, "XDG_STATE_HOME", ".local/state").map(|folder| format!("{folder}/models"))
}

/// The folder of compiled device code without a setting: `$XDG_CACHE_HOME/spinio`, or below `$HOME/.cache`.
fn kernel_folder(get: impl Fn(&str) -> Option<String>) -> Option<String> {
    xdg_folder(get, "XDG_CACHE_HOME", ".cache")
}

/// `spinio` in a user's directory of one kind; relative paths are none.
fn xdg_folder(get: impl Fn(&str) -> Option<String>, name: &str, below_home: &str) -> Option<String> {
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
    fn code_is_kept_under_absolute_paths_only() {
        let kernels = |value: &str| {
            let (s, complaints) = read(&[("HOME", "/home/a"), ("SPINIO_KERNELS", value)]);
            (s.kernels, complaints.len())
        };
        let default = Some("/home/a/.cache/spinio".to_owned());
        assert_eq!(kernels("here"), (default.clone(), 1), "the default stays");
        assert_eq!(kernels(""), (default, 1));
        assert_eq!(kernels("/code"), (Some("/code".to_owned()), 0));
        assert_eq!(kernels("off"), (None, 0));
    }

    #[test]
    fn default_folders_follow_the_environment() {
        fn of<'a>(pairs: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<String> + 'a {
            |name| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned())
        }
        assert_eq!(model_folder(of(&[])), None);
        assert_eq!(model_folder(of(&[("HOME", "/home/a")])).as_deref(), Some("/home/a/.local/state/spinio/models"));
        let both = [("HOME", "/home/a"), ("XDG_STATE_HOME", "/state")];
        assert_eq!(model_folder(of(&both)).as_deref(), Some("/state/spinio/models"));
        let relative = [("HOME", "/home/a"), ("XDG_STATE_HOME", "state")];
        assert_eq!(model_folder(of(&relative)).as_deref(), Some("/home/a/.local/state/spinio/models"));
        assert_eq!(kernel_folder(of(&[("HOME", "/home/a")])).as_deref(), Some("/home/a/.cache/spinio"));
        let cache = [("HOME", "/home/a"), ("XDG_CACHE_HOME", "/c")];
        assert_eq!(kernel_folder(of(&cache)).as_deref(), Some("/c/spinio"));
        assert_eq!(kernel_folder(of(&[("HOME", "relative")])), None);
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
