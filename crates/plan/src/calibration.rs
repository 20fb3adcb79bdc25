//! A measured model and the text format that stores it.
//!
//! ```text
//!   spinio model 1
//!   storage serial-S4XX1
//!   file-system ext4
//!   device cuda NVIDIA H200
//!   measured 1795305600                     seconds since 1970
//!   threads 4                               that copied for one request
//!   route copy                              then, of this route:
//!   cost 2400 0 0.158 0.999 0.04            C ns, cutoff bytes, ns a byte, R^2, mean error
//!   flight 9000 3000 0.037 0.998 0.06       latency ns, ns a command, ns a byte, R^2, mean error
//!   ...
//!   writeback 0.33                          ns a byte, where it was measured
//! ```
//!
//! Each line is a keyword and its values, in any order after the first line. A line with an unknown keyword belongs to
//! a later version of the format and is skipped. A line with a known keyword and invalid values makes the file invalid;
//! the caller then uses a default model.
//!
//! The file is parsed inside other programs, where parsing costs a few microseconds; a table of numbers needs no
//! library.
//!
//! Known flaw: a thread count other than the measured one is corrected by a rule of thumb, see [`Calibration::model`].

use std::fmt::{self, Write};

use crate::cost::{Cost, Model, QueueCost};
use crate::fit::Fit;
use crate::types::Route;

/// First line of the text.
const HEADER: &str = "spinio model 1";
/// A longer text is rejected.
const MAX_LEN: usize = 64 << 10;

/// The measurements of one route.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouteFit {
    /// Which route.
    pub route: Route,
    /// One transfer at a time.
    pub cost: Fit<Cost>,
    /// Commands in flight together.
    pub queue: Fit<QueueCost>,
}

/// A model as it was measured, for one storage, file system and device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Calibration {
    /// The storage under the file system.
    pub storage: String,
    /// The file system's type: `ext4`, `xfs` ...
    pub file_system: String,
    /// The accelerator.
    pub device: String,
    /// Time of the measurement, in seconds since 1970.
    pub measured_at: u64,
    /// Threads that copied for one request.
    pub threads: usize,
    /// Routes that could be measured, each once.
    pub routes: Vec<RouteFit>,
    /// Nanoseconds per byte to write dirty pages back, if measured.
    pub writeback: Option<f64>,
}

/// A route that is being parsed.
type PartialRoute = (Route, Option<Fit<Cost>>, Option<Fit<QueueCost>>);

/// Why a text is not a valid calibration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    /// Line, counted from 1.
    pub line: usize,
    /// The error.
    pub message: &'static str,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.message)
    }
}

impl std::error::Error for ParseError {}

impl Calibration {
    /// The measurements of a route.
    pub fn route(&self, route: Route) -> Option<&RouteFit> {
        self.routes.iter().find(|m| m.route == route)
    }

    /// The default model with every measured value replaced. `storage`: the route on which this request
    /// reaches storage; `threads`: the number of threads that copy for it. With fewer threads than were measured the
    /// copy is slower in proportion; more threads are not assumed to be faster.
    pub fn model(&self, default: Model, storage: Route, threads: usize) -> Model {
        let mut model = default;
        if let Some(m) = self.route(Route::Copy) {
            (model.cache, model.cache_queue) = (m.cost.value, m.queue.value);
            let fewer = self.threads as f64 / threads.max(1) as f64;
            model.cache_queue.per_byte *= fewer.max(1.0);
        }
        if let Some(m) = self.route(Route::Dma) {
            (model.cache_dma, model.cache_dma_queue) = (m.cost.value, m.queue.value);
        }
        if let Some(m) = self.route(Route::Store) {
            (model.cache_store, model.cache_store_queue) = (m.cost.value, m.queue.value);
        }
        if let Some(m) = self.route(storage) {
            (model.storage, model.storage_queue) = (m.cost.value, m.queue.value);
        }
        model.writeback = self.writeback.unwrap_or(model.writeback);
        model
    }

    /// Formats the calibration as text.
    pub fn to_text(&self) -> String {
        let mut s = format!("{HEADER}\n");
        let one_line = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let _ = writeln!(s, "storage {}", one_line(&self.storage));
        let _ = writeln!(s, "file-system {}", one_line(&self.file_system));
        let _ = writeln!(s, "device {}", one_line(&self.device));
        let _ = writeln!(s, "measured {}\nthreads {}", self.measured_at, self.threads);
        for RouteFit { route, cost, queue: flight } in &self.routes {
            let (c, f) = (&cost.value, &flight.value);
            let _ = writeln!(s, "route {route}");
            let _ = writeln!(s, "cost {} {} {} {} {}", c.fixed(), c.cutoff(), c.per_byte(), cost.r2, cost.error);
            let _ = writeln!(s, "flight {} {} {} {} {}", f.latency, f.per_command, f.per_byte, flight.r2, flight.error);
        }
        if let Some(writeback) = self.writeback {
            let _ = writeln!(s, "writeback {writeback}");
        }
        s
    }

    /// Parses the text.
    pub fn parse(text: &str) -> Result<Calibration, ParseError> {
        let parse_error = |line, why| ParseError { line: line + 1, message: why };
        if text.len() > MAX_LEN {
            return Err(parse_error(0, "longer than any model file"));
        }
        let mut lines = text.lines().enumerate();
        if lines.next().map(|(_, first)| first.trim()) != Some(HEADER) {
            return Err(parse_error(0, "not a model file of this version"));
        }
        let mut out = Calibration::default();
        let mut partial: Option<PartialRoute> = None;
        for (i, line) in lines {
            let line = line.trim();
            let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
            let number = |why| rest.parse().map_err(|_| parse_error(i, why));
            match word {
                "storage" => out.storage = rest.to_owned(),
                "file-system" => out.file_system = rest.to_owned(),
                "device" => out.device = rest.to_owned(),
                "measured" => out.measured_at = number("no time")?,
                "threads" => out.threads = number("not a number of threads")? as usize,
                "writeback" => {
                    out.writeback = Some(
                        rest.parse().ok().filter(|t| is_plausible_time(*t)).ok_or(parse_error(i, "no time a byte"))?,
                    );
                }
                "route" => {
                    out.finish_route(partial.take()).map_err(|why| parse_error(i, why))?;
                    let route = Route::ALL.into_iter().find(|r| r.name() == rest).ok_or(parse_error(i, "no route"))?;
                    if out.route(route).is_some() {
                        return Err(parse_error(i, "duplicate route"));
                    }
                    partial = Some((route, None, None));
                }
                "cost" | "queue" | "flight" => {
                    let (_, cost, flight) = partial.as_mut().ok_or(parse_error(i, "cost without a route"))?;
                    let [a, b, per_byte, r2, error] = numbers(rest).ok_or(parse_error(i, "expected five numbers"))?;
                    let good = is_plausible_time(a) && (0.0..1e18).contains(&b) && (1e-9..1e9).contains(&per_byte);
                    if !(good && r2.is_finite() && is_plausible_time(error)) {
                        return Err(parse_error(i, "invalid cost parameters, no cost"));
                    }
                    if word != "cost" {
                        *flight = Some(Fit { value: QueueCost { latency: a, per_command: b, per_byte }, r2, error });
                    } else {
                        let bandwidth = 1e9 / per_byte;
                        // Formatting and parsing may violate the rule by a rounding error.
                        let least = b.trunc() * (1e9 / bandwidth);
                        let fixed = if a >= least * (1.0 - 1e-9) { a.max(least) } else { a };
                        let value =
                            Cost::new(fixed, b as u64, bandwidth).map_err(|_| parse_error(i, "cutting is cheaper"))?;
                        *cost = Some(Fit { value, r2, error });
                    }
                }
                _ => {}
            }
        }
        let last = text.lines().count();
        out.finish_route(partial).map_err(|why| parse_error(last, why))?;
        Ok(out)
    }

    fn finish_route(&mut self, partial: Option<PartialRoute>) -> Result<(), &'static str> {
        match partial {
            None => Ok(()),
            Some((route, Some(cost), Some(flight))) => {
                self.routes.push(RouteFit { route, cost, queue: flight });
                Ok(())
            }
            Some(_) => Err("a route without both of its costs"),
        }
    }
}

/// Whether a time in nanoseconds is plausible: at most 30 years.
fn is_plausible_time(nanos: f64) -> bool {
    (0.0..1e18).contains(&nanos)
}

fn numbers<const N: usize>(text: &str) -> Option<[f64; N]> {
    let mut out = [0.0; N];
    let mut words = text.split_whitespace();
    for slot in &mut out {
        *slot = words.next()?.parse().ok()?;
    }
    words.next().is_none().then_some(out)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fit<T>(value: T) -> Fit<T> {
        Fit { value, r2: 0.99, error: 0.02 }
    }

    fn measured(route: Route, fixed: f64, bandwidth: f64) -> RouteFit {
        let cost = Cost::new(fixed, 4096, bandwidth).expect("a cost");
        RouteFit { route, cost: fit(cost), queue: fit(QueueCost::new(fixed, 100.0, bandwidth)) }
    }

    fn example() -> Calibration {
        Calibration {
            storage: "serial-S4 XX1".into(),
            file_system: "ext4".into(),
            device: "emulated GPU".into(),
            measured_at: 1_795_305_600,
            threads: 4,
            routes: vec![measured(Route::Copy, 9e3, 27e9), measured(Route::Direct, 70e3, 2e9)],
            writeback: Some(0.5),
        }
    }

    #[test]
    fn queue_costs_are_read_under_both_names() {
        let text = example().to_text();
        assert!(text.contains("\nflight "), "versions before this one read no other word: {text}");
        assert_eq!(Calibration::parse(&text.replace("\nflight ", "\nqueue ")), Calibration::parse(&text));
        assert_eq!(Calibration::parse(&text).unwrap().routes.len(), 2);
    }

    fn approx_eq(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-9 * (a.abs() + b.abs())
    }

    #[test]
    fn text_round_trips() {
        let (all, read) = (example(), Calibration::parse(&example().to_text()).expect("our own text"));
        assert_eq!((&read.storage, &read.file_system, &read.device), (&all.storage, &all.file_system, &all.device));
        assert_eq!((read.measured_at, read.threads, read.writeback), (all.measured_at, all.threads, all.writeback));
        assert_eq!(read.routes.len(), 2);
        for (a, b) in all.routes.iter().zip(&read.routes) {
            assert_eq!((a.route, a.queue), (b.route, b.queue));
            assert!(
                approx_eq(a.cost.value.fixed(), b.cost.value.fixed()) && a.cost.value.cutoff() == b.cost.value.cutoff()
            );
            assert!(approx_eq(a.cost.value.per_byte(), b.cost.value.per_byte()));
        }
    }

    #[test]
    fn unknown_keywords_are_skipped_and_bad_values_reported() {
        let with = |line: &str| Calibration::parse(&format!("{}{line}\n", example().to_text()));
        assert!(with("colour green").is_ok());
        for (line, why) in [
            ("route warp", "no route"),
            ("route copy", "duplicate route"),
            ("route dma", "both of its costs"),
            ("cost 1 2 3", "five numbers"),
            ("cost 1 4096 1 1 1", "cutting"),
            ("flight -1 0 1 1 1", "no cost"),
            ("flight nan 0 1 1 1", "no cost"),
            ("writeback -3", "no time"),
            ("threads many", "threads"),
        ] {
            let parsed = with(line).expect_err(line).to_string();
            assert!(parsed.contains(why), "{line}: {parsed}");
        }
        assert!(Calibration::parse("").is_err() && Calibration::parse("spinio model 2\n").is_err());
    }

    #[test]
    fn model_replaces_measured_routes_only() {
        let default = Model::nvme();
        let model = example().model(default, Route::Direct, 4);
        assert_eq!(model.storage_queue.latency, 70e3);
        assert_eq!(model.cache_queue.latency, 9e3);
        assert_eq!(model.cache_dma, default.cache_dma);
        assert_eq!(model.writeback, 0.5);
        assert_eq!(example().model(default, Route::P2p, 4).storage, default.storage);
        let half = example().model(default, Route::Direct, 2).cache_queue.per_byte;
        assert!(approx_eq(half, 2.0 * model.cache_queue.per_byte));
        assert_eq!(example().model(default, Route::Direct, 16).cache_queue, model.cache_queue);
    }

    proptest! {
        #[test]
        fn parse_never_panics(text in "(spinio model 1\n)?((cost|flight|route|threads|writeback|measured) ?[-0-9a-z. ]{0,30}\n){0,8}") {
            let _ = Calibration::parse(&text);
        }

        #[test]
        fn parse_of_corrupted_line_never_panics(at in 0usize..400, byte in any::<char>()) {
            let mut text: Vec<char> = example().to_text().chars().collect();
            let at = at % text.len();
            text[at] = byte;
            if let Ok(read) = Calibration::parse(&text.into_iter().collect::<String>()) {
                let model = read.model(Model::nvme(), Route::Direct, 2);
                prop_assert!(model.storage.time(1 << 20).is_finite() && model.cache_queue.command_time(1 << 20).is_finite());
            }
        }
    }
}
