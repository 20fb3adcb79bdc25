//! The machine and the command that records name.

use serde_json::Value;

/// Processors, memory, Linux kernel.
pub fn info() -> Value {
    let line = |path: &str, name: &str| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let found = text.lines().find(|l| l.starts_with(name)).and_then(|l| l.split_once(':'));
        found.map(|(_, value)| value.trim().to_owned())
    };
    serde_json::json!({
        "processors": spinio_sys::linux::available_cpus(),
        "processor": line("/proc/cpuinfo", "model name"),
        "memory": line("/proc/meminfo", "MemTotal"),
        "kernel": rustix::system::uname().release().to_string_lossy(),
    })
}

/// As it was started. An argument need not be UTF-8.
pub fn command() -> String {
    std::env::args_os().skip(1).fold("spinio-lab".to_owned(), |all, word| all + " " + &word.to_string_lossy())
}
