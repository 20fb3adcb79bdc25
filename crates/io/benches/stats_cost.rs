//! Measures the cost of counting and tracing for a device read, on the emulated device: `cargo x stats-cost`.
//!
//! Three runtimes in one process, each on its own thread, read the same cached file into the same buffer. They take
//! turns in batches of a fraction of a millisecond: one counts nothing (`SPINIO_STATS=off`), one counts in a file as
//! every process does, one traces as well. The result is the median of the differences between adjacent batches, so
//! that slow periods of the machine affect both. The last column compares the fastest tenth of each.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::sync::mpsc;
use std::time::Instant;

use spinio_io::{Runtime, Settings};
use spinio_testkit::buffer::{Buffer, emulated};

const MODES: [&str; 3] = ["off", "counting", "tracing"];
const FILE: usize = 64 << 20;

/// Bytes of a read, calls in a batch, batches of each mode.
const KINDS: [(usize, usize, usize); 2] = [(4096, 200, 6000), (8 << 20, 1, 1500)];

fn main() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut file = tempfile::tempfile().expect("a file");
    file.write_all(&vec![7; FILE]).expect("space for the file");
    let buffer = Buffer::new(emulated("size=64M"), 8 << 20);
    let counters = format!("{}/", directory.path().display());
    let runtime =
        |stats: &str, trace| Runtime::new(Settings { stats: Some(stats.to_owned()), trace, ..Settings::default() });
    let runtimes = [runtime("off", false), runtime(&counters, false), runtime(&counters, true)];
    println!(
        "{:>9} {:>10} {:>13} {:>14} {:>7} {:>17}",
        "bytes", "", "median (ns)", "more (ns)", "ratio", "of fastest tenth"
    );
    std::thread::scope(|scope| {
        // A thread for each, as in a program: each thread counts in one table.
        let workers = runtimes.each_ref().map(|runtime| {
            let (task_sender, task_receiver) = mpsc::channel::<(usize, usize)>();
            let (time_sender, time_receiver) = mpsc::channel();
            let (file, buffer) = (&file, &buffer);
            scope.spawn(move || {
                while let Ok((bytes, calls)) = task_receiver.recv() {
                    let _ = time_sender.send(batch(runtime, file, buffer, bytes, calls));
                }
            });
            (task_sender, time_receiver)
        });
        for kind in KINDS {
            measure(kind, |mode, bytes, calls| {
                workers[mode].0.send((bytes, calls)).expect("the thread is running");
                workers[mode].1.recv().expect("a time")
            });
        }
    });
}

fn measure((bytes, calls, batches): (usize, usize, usize), batch: impl Fn(usize, usize, usize) -> f64) {
    let mut times = [const { Vec::new() }; MODES.len()];
    for round in 0..batches + 20 {
        for turn in 0..MODES.len() {
            let mode = (round + turn) % MODES.len();
            let elapsed = batch(mode, bytes, calls);
            // The first batches pin memory and start threads: not counted.
            if round >= 20 {
                times[mode].push(elapsed);
            }
        }
    }
    let (off, fast) = (quantile(&times[0], 0.5), quantile(&times[0], 0.1));
    for (mode, name) in MODES.iter().enumerate() {
        let overhead: Vec<f64> = times[mode].iter().zip(&times[0]).map(|(a, b)| a - b).collect();
        let (middle, more) = (quantile(&times[mode], 0.5), quantile(&overhead, 0.5));
        let (ratio, fastest) = (1.0 + more / off, quantile(&times[mode], 0.1) / fast);
        println!("{bytes:>9} {name:>10} {middle:>13.1} {more:>14.1} {ratio:>7.4} {fastest:>17.4}");
    }
}

/// Nanoseconds a call.
fn batch(runtime: &Runtime, file: &File, buffer: &Buffer, bytes: usize, calls: usize) -> f64 {
    let begun = Instant::now();
    for i in 0..calls {
        let at = (i * bytes % FILE) as u64;
        let got = runtime.read(file.as_raw_fd(), Some(at), buffer.target(0), bytes).expect("a read");
        assert_eq!(got, bytes, "a short read");
    }
    begun.elapsed().as_nanos() as f64 / calls as f64
}

fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[(sorted.len() as f64 * q) as usize]
}
