//! What the demo prints.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use comfy_table::Cell;

use super::writers::{Counters, Writer};
use crate::color::{OutputStyle, TextRole};
use crate::compiler::Gpu;
use crate::{format, table};

const PAGE: u64 = 4096;

/// The results of the demo.
pub struct Report<'a> {
    /// Bytes of the file.
    pub size: u64,
    /// Rounds of each writer.
    pub rounds: u32,
    /// Where the GPU kernels ran.
    pub gpu: Gpu,
    /// The mount.
    pub directory: &'a Path,
    /// Of all rounds.
    pub seconds: f64,
    /// For each kill the time until another server answered.
    pub kills: Vec<Duration>,
    /// What the writers printed.
    pub counters: [Counters; 4],
    /// Where the file was compared, and how many cells were wrong.
    pub wrong: Vec<(&'static str, u64)>,
}

impl Report<'_> {
    /// Whether every byte was right everywhere.
    pub fn is_right(&self) -> bool {
        self.wrong.iter().all(|(_, count)| *count == 0)
    }

    fn sum(&self, name: &str) -> u64 {
        self.counters.iter().filter_map(|counters| counters.get(name)).sum()
    }

    /// Updates of one writer.
    fn updates(&self) -> u64 {
        self.size / 8 / Writer::ALL.len() as u64 * u64::from(self.rounds)
    }

    /// The text.
    pub fn render(&self, paint: &OutputStyle) -> String {
        let mut s = String::new();
        let mut line = |label: &str, text: &str| {
            let _ = writeln!(s, "{} {text}", paint.text(TextRole::Head, &format!("{label:<8}")));
        };
        let pages = self.size / PAGE;
        let file = format!(
            "{} below {}: {pages} pages, each with bytes of all four writers",
            format::bytes(self.size),
            self.directory.display()
        );
        line("file", &file);
        line("CPU", "update.c, an ordinary C program: once with pread and pwrite, once with mmap");
        let device = match self.gpu {
            Gpu::Cuda => "both on the first CUDA GPU",
            Gpu::Emulated(_) => "each on an emulated device: a GPU in software",
        };
        line("GPU", &format!("update.cu, CUDA C++, in two processes, {device}"));
        if let Gpu::Emulated(why) = self.gpu {
            line("", &paint.text(TextRole::Weak, &format!("({why})")));
        }
        let _ = writeln!(s, "\n{}\n", table::text(&self.table(paint)));
        self.server(paint, &mut s);
        self.verdict(paint, &mut s);
        next_steps(paint, &mut s);
        s
    }

    fn table(&self, paint: &OutputStyle) -> comfy_table::Table {
        let head =
            ["writer", "updates", "published", "pages merged", "from file", "from released pages", "epochs redone"];
        let mut table = table::new(paint, &head);
        for writer in Writer::ALL {
            let counters = &self.counters[writer as usize];
            let gpu = counters.contains_key("releases");
            let shown = |name: &str, text: fn(u64) -> String| {
                if gpu { text(counters.get(name).copied().unwrap_or(0)) } else { "-".to_owned() }
            };
            let count = |n: u64| n.to_string();
            table.add_row(
                [
                    writer.name().to_owned(),
                    self.updates().to_string(),
                    shown("bytes_published", format::bytes),
                    shown("pages_merged", count),
                    shown("bytes_from_file", format::bytes),
                    shown("bytes_from_snapshots", format::bytes),
                    shown("epochs_lost", count),
                ]
                .map(Cell::new),
            );
        }
        table::align_columns(&mut table, &[1, 2, 3, 4, 5, 6]);
        table
    }

    fn server(&self, paint: &OutputStyle, s: &mut String) {
        let mut line = |label: &str, text: &str| {
            let _ = writeln!(s, "{} {text}", paint.text(TextRole::Head, &format!("{label:<8}")));
        };
        let rounds = self.rounds;
        line(
            "rounds",
            &format!("{rounds} of each writer, all at the same time, in {}", format::time(self.seconds * 1e9)),
        );
        let merged = self.sum("pages_merged");
        let committed = self.sum("pages_committed");
        line("merges", &format!("{merged} of {committed} pages that kernels had changed: others had changed them too"));
        if let Some(longest) = self.kills.iter().max() {
            let longest = format::time(longest.as_nanos() as f64);
            let text = match self.kills.len() {
                1 => format!("killed (SIGKILL) while all wrote; another answered after {longest}"),
                n => format!("killed (SIGKILL) {n} times while all wrote; another answered after at most {longest}"),
            };
            line("server", &text);
        }
    }

    fn verdict(&self, paint: &OutputStyle, s: &mut String) {
        for (place, count) in &self.wrong {
            let cells = self.size / 8;
            let (mark, text) = if *count == 0 {
                (paint.text(TextRole::Good, "✓"), format!("every byte is right: {place}"))
            } else {
                let text = format!("{count} of {cells} cells are wrong: {place}. This is a bug: please report it");
                (paint.text(TextRole::Bad, "✗"), text)
            };
            let _ = writeln!(s, "{mark} {text}");
        }
        if self.is_right() {
            let all = self.updates() * Writer::ALL.len() as u64;
            let _ = writeln!(s, "  all {all} updates are there, each once");
        }
    }
}

fn next_steps(paint: &OutputStyle, s: &mut String) {
    let _ = writeln!(s, "\n{}", paint.text(TextRole::Head, "Now your own files:"));
    let steps = [
        ("gaia mount DIR", "the files of DIR stay where they are, and GPU programs can map them (spinio_gaia.h)"),
        ("gaia status", "which files are mapped, what was released and merged"),
        ("gaia demo --kills 20", "the same, while the server dies twenty times"),
    ];
    let me = crate::output::command_name();
    for (command, what) in steps {
        let _ = writeln!(s, "  {me} {command:<20} {}", paint.text(TextRole::Dim, what));
    }
}
