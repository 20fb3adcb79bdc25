//! Random reads of storage that is not in the page cache, into the emulated device: what the disk gives a program that
//! reads with O_DIRECT, what plain `pread` and copy gives, and what SPIN gives with either engine, by turns in one run.
//!
//! ```text
//!   cargo bench -p spinio-io --bench absent_reads -- FILE [SECONDS A ROW]
//! ```
//!
//! FILE: of at least 1 GiB, on the storage to be measured; its pages are evicted. Figures: microseconds of one read,
//! median, and all threads' MB/s. `limit` reads into host memory.

#![expect(unsafe_code, reason = "O_DIRECT into aligned memory")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::{Duration, Instant};

use spinio_device::{DeviceKind, registry};
use spinio_host::settings::StorageEngine;
use spinio_io::{Runtime, Settings, Target};
use spinio_sys::linux::{self, Advice};

const SIZES: [usize; 7] = [16 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20, 8 << 20];

type ReadAt = Box<dyn FnMut(u64) + Send>;

fn target(len: usize) -> Target {
    let addr = registry::alloc(DeviceKind::Emulated, 0, len, false).expect("device memory");
    Target { allocation: registry::find(addr.0 as *const u8, len).expect("the allocation made above"), addr }
}

fn limit(path: &str, size: usize) -> ReadAt {
    let file = File::options().read(true).custom_flags(linux::O_DIRECT as i32).open(path).expect("O_DIRECT");
    let layout = std::alloc::Layout::from_size_align(size, 4096).expect("a size");
    // SAFETY: the size is not 0; the memory is never freed, the program ends.
    let memory = unsafe { std::slice::from_raw_parts_mut(std::alloc::alloc_zeroed(layout), size) };
    Box::new(move |at| file.read_exact_at(memory, at).expect("a read"))
}

fn evict(file: &File, at: u64, size: usize) {
    linux::fadvise(file.as_raw_fd(), at, size as u64, Advice::DontNeed).expect("advice");
}

fn plain(path: &str, size: usize, runtime: &'static Runtime) -> ReadAt {
    let (file, to) = (File::open(path).expect("a file"), target(size));
    let mut memory = vec![0; size];
    Box::new(move |at| {
        file.read_exact_at(&mut memory, at).expect("a read");
        runtime.put(to, &memory).expect("a copy");
        evict(&file, at, size);
    })
}

fn spin(path: &str, size: usize, runtime: &'static Runtime) -> ReadAt {
    let (file, to) = (File::open(path).expect("a file"), target(size));
    Box::new(move |at| {
        assert_eq!(runtime.read(file.as_raw_fd(), Some(at), to, size).expect("a read"), size);
        if size <= 64 << 10 {
            // Small reads take the page cache.
            evict(&file, at, size);
        }
    })
}

/// The median microseconds of a read, and MB/s.
fn measure(readers: Vec<ReadAt>, size: usize, len: u64, time: Duration) -> (f64, f64) {
    let begun = Instant::now();
    let all: Vec<Vec<f64>> = std::thread::scope(|scope| {
        let read_all = |(seed, mut read): (usize, ReadAt)| {
            let (mut state, mut times) = (seed as u64 * 77 + 12345 + len, Vec::new());
            while begun.elapsed() < time {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let at = (state >> 16) % (len / size as u64) * size as u64;
                let started = Instant::now();
                read(at);
                times.push(started.elapsed().as_secs_f64() * 1e6);
            }
            times
        };
        let spawned: Vec<_> =
            readers.into_iter().enumerate().map(|reader| scope.spawn(move || read_all(reader))).collect();
        spawned.into_iter().map(|thread| thread.join().expect("a reader")).collect()
    });
    let seconds = begun.elapsed().as_secs_f64();
    let mut times: Vec<f64> = all.into_iter().flatten().collect();
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], times.len() as f64 * size as f64 / seconds / 1e6)
}

fn main() {
    let mut args = std::env::args().skip(1).filter(|arg| !arg.starts_with("--"));
    let Some(path) = args.next() else { return println!("absent_reads: no FILE to read: nothing measured") };
    let time = Duration::from_secs_f64(args.next().map_or(1.0, |s| s.parse().expect("seconds")));
    let file = File::open(&path).expect("the file");
    let len = file.metadata().expect("its length").len();
    linux::fadvise(file.as_raw_fd(), 0, 0, Advice::DontNeed).expect("advice");
    let runtime = |storage_engine| -> &'static Runtime {
        Box::leak(Box::new(Runtime::new(Settings { storage_engine, ..Settings::default() })))
    };
    let (workers, ring) = (runtime(StorageEngine::Workers), runtime(StorageEngine::Ring));
    println!("    size threads | limit (O_DIRECT)  | plain + copy      | workers           | ring");
    for size in SIZES {
        for threads in [1, 4] {
            let before = ring.ring_reads();
            let all = |make: &dyn Fn() -> ReadAt| measure((0..threads).map(|_| make()).collect(), size, len, time);
            let rows = [
                all(&|| limit(&path, size)),
                all(&|| plain(&path, size, workers)),
                all(&|| spin(&path, size, workers)),
                all(&|| spin(&path, size, ring)),
            ];
            let text: Vec<String> = rows.iter().map(|(us, mbs)| format!("{us:7.0} us {mbs:5.0}/s")).collect();
            let used = ring.ring_reads() - before;
            println!("{:>7}K {threads:>7} | {}   {used} ring reads", size >> 10, text.join(" | "));
        }
    }
}
