//! A case: a name, and code that holds or says why not.

use std::fmt::Debug;
use std::ops::AddAssign;
use std::panic::{self, AssertUnwindSafe};

use crate::place::Guest;

/// Why a case did not pass.
#[derive(Debug)]
pub(crate) enum Miss {
    /// What was expected and what was seen.
    Failed(String),
    /// What this machine lacks.
    Skipped(String),
}

pub(crate) type Outcome = Result<(), Miss>;

/// One case.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) run: Box<dyn Fn(&Guest) -> Outcome>,
}

impl Case {
    pub(crate) fn new(name: impl Into<String>, run: impl Fn(&Guest) -> Outcome + 'static) -> Case {
        Case { name: name.into(), run: Box::new(run) }
    }
}

/// How many cases ended in which way.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) skipped: usize,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, more: Tally) {
        self.passed += more.passed;
        self.failed += more.failed;
        self.skipped += more.skipped;
    }
}

/// Runs the cases whose name holds one of `only` (all, if there is none), a line each.
pub(crate) fn run_all(cases: &[Case], guest: &Guest, only: &[String]) -> Tally {
    let mut tally = Tally::default();
    for case in cases {
        if !only.is_empty() && !only.iter().any(|part| case.name.contains(part.as_str())) {
            continue;
        }
        let begun = std::time::Instant::now();
        let outcome = panic::catch_unwind(AssertUnwindSafe(|| (case.run)(guest)))
            .unwrap_or_else(|_| Err(Miss::Failed("it panicked".to_owned())));
        let millis = begun.elapsed().as_millis();
        match outcome {
            Ok(()) => {
                tally.passed += 1;
                println!("ok       {} ({millis} ms)", case.name);
            }
            Err(Miss::Skipped(why)) => {
                tally.skipped += 1;
                println!("skipped  {}: {why}", case.name);
            }
            Err(Miss::Failed(why)) => {
                tally.failed += 1;
                println!("FAILED   {}: {why}", case.name);
            }
        }
    }
    tally
}

/// A failure, said with `what`.
pub(crate) fn fail<T>(what: impl Into<String>) -> Result<T, Miss> {
    Err(Miss::Failed(what.into()))
}

/// Holds if `seen` is what was `expected`.
pub(crate) fn expect<T: PartialEq + Debug>(what: &str, seen: T, expected: T) -> Outcome {
    if seen == expected { Ok(()) } else { fail(format!("{what}: {seen:?}, expected {expected:?}")) }
}

/// Holds if the bytes are the same; else says where they part.
pub(crate) fn expect_bytes(what: &str, seen: &[u8], expected: &[u8]) -> Outcome {
    expect(&format!("{what}: length"), seen.len(), expected.len())?;
    match seen.iter().zip(expected).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(at) => {
            let wrong = seen.iter().zip(expected).filter(|(a, b)| a != b).count();
            fail(format!(
                "{what}: {wrong} of {} bytes differ, the first at {at}: {:#04x}, expected {:#04x}",
                seen.len(),
                seen[at],
                expected[at]
            ))
        }
    }
}

impl From<std::io::Error> for Miss {
    fn from(e: std::io::Error) -> Miss {
        Miss::Failed(e.to_string())
    }
}

impl From<spinio_sys::Errno> for Miss {
    fn from(e: spinio_sys::Errno) -> Miss {
        Miss::Failed(e.to_string())
    }
}
