//! The texts that `spinio net` reads, of the nets of this process.

use std::time::{Duration, Instant};

use serde_json::Value;
use spinio_host::Settings;
use spinio_stats::{PublishedText, default_dirs, pid_of, published_text};
use spinio_sys::linux;

/// A text is written four times a second.
const PATIENCE: Duration = Duration::from_secs(120);

/// The texts of all nets of this process.
fn texts() -> Vec<Value> {
    let dirs = default_dirs(Settings::of_process().runtime_dir.as_deref(), linux::geteuid());
    let entries = dirs.iter().filter_map(|dir| std::fs::read_dir(dir).ok()).flatten().flatten();
    let own = entries.filter(|entry| pid_of(&entry.file_name().to_string_lossy(), "net") == Some(std::process::id()));
    own.filter_map(|entry| serde_json::from_str(published_text(&std::fs::read(entry.path()).ok()?)?).ok()).collect()
}

/// Waits until a socket with this local name, or for none with this number, says how its bytes go and why.
pub(crate) fn becomes(local: &str, number: Option<i32>, wanted: [&str; 2]) -> Value {
    let begun = Instant::now();
    loop {
        let texts = texts();
        let sockets = texts.iter().filter_map(|text| text["sockets"].as_array()).flatten();
        let of_it = |it: &&Value| match number {
            Some(number) => it["socket"] == number,
            None => it["local"] == local && it["state"] == "ESTAB",
        };
        let mut found = sockets.filter(of_it);
        if let Some(socket) = found.find(|it| it["transport"] == wanted[0] && it["why"] == wanted[1]) {
            assert!(socket["reason"].as_str().unwrap().len() > 10, "no sentence: {socket}");
            return socket.clone();
        }
        assert!(begun.elapsed() < PATIENCE, "{wanted:?} of {local} {number:?}: {texts:#?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until some net has counted so many connections.
pub(crate) fn counts(name: &str, wanted: u64) {
    let begun = Instant::now();
    while !texts().iter().any(|text| text["connections"][name] == wanted) {
        assert!(begun.elapsed() < PATIENCE, "{name} is not {wanted}: {:#?}", texts());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether the texts are there; says if not.
pub(crate) fn publishes() -> bool {
    let settings = Settings::of_process();
    let dirs = default_dirs(settings.runtime_dir.as_deref(), linux::geteuid());
    let publishes = settings.stats.is_none() && PublishedText::create(&dirs, "published").is_some();
    if !publishes {
        println!("skipped: SPINIO_STATS is set, or no directory is private, so nothing is published");
    }
    publishes
}
