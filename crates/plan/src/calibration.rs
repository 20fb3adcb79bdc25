//! A measured model, and the text it is kept in.
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
//! Lines of a word and its values, in any order after the first. A line that begins with an unknown word
//! belongs to a later version of the same format and is passed over; one that begins with a known word and
//! says nonsense spoils the file, and whoever wanted it goes on with a default.
//!
//! It is read inside other people's programs, where it costs a few microseconds; a table of numbers needs
//! no library for that.
//!
//! Known flaw: a threads count other than the measured one is allowed for by a rule of thumb, see [`Calibration::model`].

use std::fmt::{self, Write};

use crate::cost::{Cost, Model, QueueCost};
use crate::fit::Fit;
use crate::words::Route;

/// First line of the text.
const HEADER: &str = "spinio model 1";
/// More is no model.
const MAX_LEN: usize = 64 << 10;

/// What was measured of one route.
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
    /// What is under the file system.
    pub storage: String,
    /// Its kind: `ext4`, `xfs` ...
    pub file_system: String,
    /// The accelerator.
    pub device: String,
    /// When, in seconds since 1970.
    pub measured_at: u64,
    /// Threads that copied for one request.
    pub threads: usize,
    /// Routes that could be measured, each once.
    pub routes: Vec<RouteFit>,
    /// Nanoseconds a byte to write dirty pages back, where that was measured.
    pub writeback: Option<f64>,
}

/// A route whose costs are being read.
type PartialRoute = (Route, Option<Fit<Cost>>, Option<Fit<QueueCost>>);

/// Why a text is no calibration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    /// Line, counted from 1.
    pub line: usize,
    /// What is wrong with it.
    pub message: &'static str,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.message)
    }
}

impl std::error::Error for ParseError {}

impl Calibration {
    /// What was measured of a route.
    pub fn route(&self, route: Route) -> Option<&RouteFit> {
        self.routes.iter().find(|m| m.route == route)
    }

    /// The default with everything in it replaced that was measured. `storage`: the route on which this request
    /// reaches storage; `threads`: how many copy for it. Fewer than were measured copy as much slower; more are
    /// not believed to copy faster.
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

    /// As text.
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

    /// From text.
    pub fn parse(text: &str) -> Result<Calibration, ParseError> {
        let parse_error = |line, why| ParseError { line: line + 1, message: why };
        if text.len() > MAX_LEN {
            return Err(parse_error(0, "longer than any model"));
        }
        let mut lines = text.lines().enumerate();
        if lines.next().map(|(_, first)| first.trim()) != Some(HEADER) {
            return Err(parse_error(0, "not a model of this version"));
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
                "threads" => out.threads = number("no number of threads")? as usize,
                "writeback" => {
                    out.writeback = Some(
                        rest.parse().ok().filter(|t| is_plausible_time(*t)).ok_or(parse_error(i, "no time a byte"))?,
                    );
                }
                "route" => {
                    out.finish_route(partial.take()).map_err(|why| parse_error(i, why))?;
                    let route = Route::ALL.into_iter().find(|r| r.name() == rest).ok_or(parse_error(i, "no route"))?;
                    if out.route(route).is_some() {
                        return Err(parse_error(i, "a route told twice"));
                    }
                    partial = Some((route, None, None));
                }
                "cost" | "queue" | "flight" => {
                    let (_, cost, flight) = partial.as_mut().ok_or(parse_error(i, "a cost of no route"))?;
                    let [a, b, per_byte, r2, error] = numbers(rest).ok_or(parse_error(i, "not five numbers"))?;
                    let good = is_plausible_time(a) && (0.0..1e18).contains(&b) && (1e-9..1e9).contains(&per_byte);
                    if !(good && r2.is_finite() && is_plausible_time(error)) {
                        return Err(parse_error(i, "numbers that make no cost"));
                    }
                    if word != "cost" {
                        *flight = Some(Fit { value: QueueCost { latency: a, per_command: b, per_byte }, r2, error });
                    } else {
                        let bandwidth = 1e9 / per_byte;
                        // Numbers that were written and read again may break the rule by a rounding.
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

/// Whether nanoseconds, of anything, are believable: at most 30 years.
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
    fn unknown_words_are_skipped_and_bad_values_named() {
        let with = |line: &str| Calibration::parse(&format!("{}{line}\n", example().to_text()));
        assert!(with("colour green").is_ok());
        for (line, why) in [
            ("route warp", "no route"),
            ("route copy", "told twice"),
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
