//! What the demo prints.

use std::fmt::Write;
use std::path::Path;

use comfy_table::Cell;
use rustix::io::Errno;
use spinio_io::stats::Snapshot;

use super::file::State;
use super::program::ReaderOutput;
use crate::color::{OutputStyle, TextRole};
use crate::{format, table};

/// One run of the reader under SPIN.
pub struct DemoRun {
    /// The requested state.
    pub state: State,
    /// The share that was resident when the reader started.
    pub resident: Option<f64>,
    /// The reader's output.
    pub answer: ReaderOutput,
    /// The counters of the library.
    pub snapshot: Snapshot,
}

/// The results of the demo.
pub struct Report<'a> {
    /// Bytes of the file.
    pub size: u64,
    /// Its path.
    pub path: &'a Path,
    /// What is wrong with that directory.
    pub warning: Option<String>,
    /// The error of `pread` without SPIN; `None` if it worked.
    pub plain_errno: Option<Errno>,
    /// The three runs.
    pub outcomes: Vec<DemoRun>,
}

impl Report<'_> {
    /// Whether every byte of every run was correct.
    pub fn is_equal(&self) -> bool {
        self.outcomes.iter().all(|o| o.answer.bytes == self.size && o.answer.equal == self.size)
    }

    /// The text.
    pub fn render(&self, paint: &OutputStyle) -> String {
        let mut s = String::new();
        self.head(paint, &mut s);
        let _ = writeln!(s, "\n{}\n", table::text(&self.table(paint)));
        self.verdict(paint, &mut s);
        self.notes(paint, &mut s);
        next_steps(paint, &mut s);
        s
    }

    fn device(&self) -> &str {
        self.outcomes.first().map_or("", |o| &o.answer.device)
    }

    fn is_emulated(&self) -> bool {
        self.device().starts_with("emulated")
    }

    fn head(&self, paint: &OutputStyle, s: &mut String) {
        let mut line = |label: &str, text: &str| {
            let _ = writeln!(s, "{} {text}", paint.text(TextRole::Head, &format!("{label:<8}")));
        };
        line("file", &format!("{} in {}", format::bytes(self.size), self.path.display()));
        if self.is_emulated() {
            line("device", &format!("{}: a GPU in software, since no CUDA GPU was found or asked for", self.device()));
            let note = "GB/s below are those of this software on this machine's CPU and memory, not of any GPU";
            line("", &paint.text(TextRole::Weak, note));
        } else {
            line("device", self.device());
        }
        line("program", "reader.c, an ordinary C program: open, then pread in steps of 8 MiB");
        match self.plain_errno {
            Some(Errno::FAULT) => line("", "without SPIN its pread fails: EFAULT (Bad address)"),
            Some(errno) => line("", &format!("without SPIN its pread fails: {errno}")),
            None => line("", "without SPIN its pread works too: the CPU can write to this memory"),
        }
    }

    fn table(&self, paint: &OutputStyle) -> comfy_table::Table {
        let mut table = table::new(paint, &["file state", "route", "bytes", "GB/s", "why this route"]);
        for outcome in &self.outcomes {
            let seconds = outcome.answer.seconds;
            let mut state = outcome.state.name();
            for line in &outcome.snapshot.rows {
                table.add_row(vec![
                    Cell::new(state),
                    table::route(line.route),
                    Cell::new(format::bytes(line.bytes)),
                    Cell::new(format::gbps(line.bytes, seconds)),
                    Cell::new(line.reason),
                ]);
                state = "";
            }
            let whole = [
                state.to_owned(),
                "all".to_owned(),
                format::bytes(outcome.answer.bytes),
                format::gbps(outcome.answer.bytes, seconds),
            ];
            if outcome.snapshot.rows.len() != 1 {
                table.add_row(whole);
            }
        }
        table::align_columns(&mut table, &[2, 3]);
        table
    }

    fn verdict(&self, paint: &OutputStyle, s: &mut String) {
        if self.is_equal() {
            let text = format!(
                "every byte on the device equals a plain pread of the file: {} x {} bytes",
                self.outcomes.len(),
                self.size
            );
            let _ = writeln!(s, "{} {text}", paint.text(TextRole::Good, "✓"));
            return;
        }
        for o in self.outcomes.iter().filter(|o| o.answer.equal != self.size || o.answer.bytes != self.size) {
            let text = format!(
                "{}: {} of {} bytes were read, and byte {} is the first that differs. This is a bug: please report it",
                o.state.name(),
                o.answer.bytes,
                self.size,
                o.answer.equal
            );
            let _ = writeln!(s, "{} {text}", paint.text(TextRole::Bad, "✗"));
        }
    }

    /// What the user must know to read the table correctly.
    fn notes(&self, paint: &OutputStyle, s: &mut String) {
        let mut note = |text: String| {
            let _ = writeln!(s, "{} {text}", paint.text(TextRole::Weak, "!"));
        };
        if let Some(warning) = &self.warning {
            note(warning.clone());
        }
        for o in &self.outcomes {
            let name = o.state.name();
            match o.resident {
                Some(share) if !o.state.matches(share) => note(format!(
                    "{name}: this state could not be produced: {:.0} % of the file was in the page cache",
                    share * 100.0
                )),
                None => note(format!("{name}: not checked, this kernel does not report what is in the page cache")),
                Some(_) => {}
            }
            if o.snapshot.rows.is_empty() {
                note(format!("{name}: the library left no counters, so routes and reasons are unknown"));
            }
        }
        let first: Vec<String> = self.outcomes.iter().map(|o| format::time(o.answer.first_call * 1e9)).collect();
        let _ = writeln!(
            s,
            "  GB/s: the bytes of a row over the time of the whole run; rows of one state run concurrently and add up.\n  \
             The first pread of each run, included, starts SPIN: it took {}.",
            first.join(", ")
        );
    }
}

fn next_steps(paint: &OutputStyle, s: &mut String) {
    let _ = writeln!(s, "\n{}", paint.text(TextRole::Head, "Now your own program:"));
    let command_path = crate::output::command_name();
    let steps = [
        ("run --stats -- CMD", "run a program under SPIN, then see which routes its reads took"),
        ("explain FILE", "see which route each part of a file would take now, and why"),
        ("doctor", "see what this machine offers, what is missing, and what to do about it"),
    ];
    for (command, what) in steps {
        let _ = writeln!(s, "  {command_path} {command:<20} {}", paint.text(TextRole::Dim, what));
    }
}

#[cfg(test)]
mod tests {
    use spinio_io::stats::{Direction, Histogram, RouteRow};
    use spinio_plan::{Reason, Route};

    use super::*;

    const PLAIN: OutputStyle = OutputStyle { colour: false, width: 120 };

    fn outcome(state: State, resident: Option<f64>, equal: u64, lines: &[(Route, Reason, u64)]) -> DemoRun {
        let line = |&(route, reason, bytes)| RouteRow {
            direction: Direction::Read,
            route,
            reason,
            pieces: 1,
            bytes,
            nanos: 1,
            latency: Histogram::default(),
        };
        let lines = lines.iter().map(line).collect();
        DemoRun {
            state,
            resident,
            answer: ReaderOutput {
                device: "emulated:0".into(),
                bytes: 1 << 30,
                seconds: 0.5,
                first_call: 0.001,
                equal,
                errno: None,
            },
            snapshot: Snapshot { rows: lines, ..Snapshot::default() },
        }
    }

    fn report(outcomes: Vec<DemoRun>) -> Report<'static> {
        Report {
            size: 1 << 30,
            path: Path::new("/var/tmp/data"),
            warning: None,
            plain_errno: Some(Errno::FAULT),
            outcomes,
        }
    }

    fn half() -> DemoRun {
        let lines = [(Route::Copy, Reason::Cached, 1 << 29), (Route::Direct, Reason::Absent, 1 << 29)];
        outcome(State::HalfCached, Some(0.5), 1 << 30, &lines)
    }

    #[test]
    fn rows_of_state_sum_to_total() {
        let text = report(vec![half()]).render(&PLAIN);
        let row = |word: &str| text.lines().find(|l| l.contains(word)).unwrap_or_else(|| panic!("{word} in\n{text}"));
        assert!(row(" copy ").contains("half-cached") && row(" copy ").contains("1.07"));
        assert!(row(" direct ").contains("1.07") && row(" direct ").contains("not in the page cache"));
        assert!(row(" all ").contains("2.15") && row(" all ").contains("1 GiB"));
        assert!(text.contains("✓ every byte") && text.contains("EFAULT"));
    }

    #[test]
    fn single_route_has_no_sum_row() {
        let text = report(vec![outcome(State::Cold, Some(0.0), 1 << 30, &[(Route::Direct, Reason::Absent, 1 << 30)])])
            .render(&PLAIN);
        assert!(!text.lines().any(|l| l.contains(" all ")), "{text}");
    }

    #[test]
    fn differing_byte_is_reported_and_fails() {
        let bad = report(vec![outcome(State::Cached, Some(1.0), 4096, &[])]);
        assert!(!bad.is_equal());
        let text = bad.render(&PLAIN);
        assert!(text.contains("✗ cached") && text.contains("byte 4096") && !text.contains("✓"), "{text}");
    }

    #[test]
    fn unreached_state_is_reported() {
        let text = report(vec![outcome(State::Cold, Some(1.0), 1 << 30, &[])]).render(&PLAIN);
        assert!(text.contains("cold: this state could not be produced: 100 %"), "{text}");
        let text = report(vec![outcome(State::Cold, None, 1 << 30, &[])]).render(&PLAIN);
        assert!(text.contains("cold: not checked"), "{text}");
    }

    #[test]
    fn emulated_device_is_labelled() {
        let text = report(vec![half()]).render(&PLAIN);
        assert!(text.contains("a GPU in software") && text.contains("not of any GPU"));
    }

    #[test]
    fn report_ends_with_next_steps() {
        let text = report(vec![half()]).render(&PLAIN);
        let last: Vec<_> = text.lines().rev().take(3).collect();
        assert!(
            last[2].contains("run --stats -- CMD") && last[1].contains("explain FILE") && last[0].contains("doctor")
        );
    }
}
