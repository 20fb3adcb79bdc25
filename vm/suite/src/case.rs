//! A case: a name, and a check that passes or returns the reason.

use std::fmt::Debug;
use std::ops::AddAssign;
use std::panic::{self, AssertUnwindSafe};

use crate::place::Guest;

/// Why a case did not pass.
#[derive(Debug)]
pub(crate) enum CaseError {
    /// The expected and the actual result.
    Failed(String),
    /// The missing feature of this machine.
    Skipped(String),
}

pub(crate) type Outcome = Result<(), CaseError>;

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

/// The number of cases per result.
#[derive(Default)]
pub(crate) struct CaseCounts {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) skipped: usize,
}

impl AddAssign for CaseCounts {
    fn add_assign(&mut self, more: CaseCounts) {
        self.passed += more.passed;
        self.failed += more.failed;
        self.skipped += more.skipped;
    }
}

/// Runs the cases whose name contains one of `only` (all, if it is empty), one line each.
pub(crate) fn run_all(cases: &[Case], guest: &Guest, only: &[String]) -> CaseCounts {
    let mut tally = CaseCounts::default();
    for case in cases {
        if !only.is_empty() && !only.iter().any(|part| case.name.contains(part.as_str())) {
            continue;
        }
        let begun = std::time::Instant::now();
        let outcome = panic::catch_unwind(AssertUnwindSafe(|| (case.run)(guest)))
            .unwrap_or_else(|_| Err(CaseError::Failed("it panicked".to_owned())));
        let millis = begun.elapsed().as_millis();
        match outcome {
            Ok(()) => {
                tally.passed += 1;
                println!("ok       {} ({millis} ms)", case.name);
            }
            Err(CaseError::Skipped(why)) => {
                tally.skipped += 1;
                println!("skipped  {}: {why}", case.name);
            }
            Err(CaseError::Failed(why)) => {
                tally.failed += 1;
                println!("FAILED   {}: {why}", case.name);
            }
        }
    }
    tally
}

/// A failure with the message `what`.
pub(crate) fn fail<T>(what: impl Into<String>) -> Result<T, CaseError> {
    Err(CaseError::Failed(what.into()))
}

/// Passes if `seen` is `expected`.
pub(crate) fn expect<T: PartialEq + Debug>(what: &str, seen: T, expected: T) -> Outcome {
    if seen == expected { Ok(()) } else { fail(format!("{what}: {seen:?}, expected {expected:?}")) }
}

/// Passes if the bytes are equal; else reports where they differ.
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

impl From<std::io::Error> for CaseError {
    fn from(e: std::io::Error) -> CaseError {
        CaseError::Failed(e.to_string())
    }
}

impl From<spinio_sys::Errno> for CaseError {
    fn from(e: spinio_sys::Errno) -> CaseError {
        CaseError::Failed(e.to_string())
    }
}
