//! `spinio doctor`: every facility SPIN can use, tried on this machine now.
//!
//! ```text
//!   spinio.rs    the library itself, settings, the emulated device      (without these: nothing)
//!   kernel.rs    system calls and flags, tried on a real file           (each has a fall-back)
//!   process.rs   limits, permissions, /proc, /sys, memory
//!   storage.rs   the devices under a file that is given
//!   p2p.rs       which devices publish memory for peer-to-peer, which drives reach it
//!   nvidia.rs    driver, GPUs, what their driver allows
//!   net.rs       sockets of kernels: what would wait for one that serves
//!   transports.rs  and how their bytes can go
//! ```
//!
//! Nothing is inferred from a version: what can be tried is tried. A fact that is not as good as it could be has a
//! consequence, a cause, and a cure.

mod kernel;
mod net;
mod nvidia;
mod p2p;
mod process;
mod spinio;
mod storage;
mod transports;

use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use crate::color::{OutputStyle, TextRole};
use crate::exit::Exit;
use crate::output;
use crate::progress::Spinner;

/// What `spinio doctor` takes.
#[derive(Debug, Args)]
pub struct Doctor {
    /// A file, directory or block device: shows the disks under it as well
    #[arg(value_name = "PATH")]
    path: Option<PathBuf>,
    /// Print JSON: a list of {group, name, state, detail, cause, cure}, and `stack` where a PATH is given
    #[arg(long)]
    json: bool,
}

/// Found or not, and how much that matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Found and usable.
    Found,
    /// Less than it could be; or missing, with a slower replacement.
    Limited,
    /// Not available, which is not an error.
    Absent,
    /// Not available, and SPIN does not work without it.
    Broken,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            State::Found => "found",
            State::Limited => "limited",
            State::Absent => "absent",
            State::Broken => "broken",
        }
    }

    fn symbol(self) -> (&'static str, TextRole) {
        match self {
            State::Found => ("✓", TextRole::Good),
            State::Limited => ("!", TextRole::Weak),
            State::Absent => ("-", TextRole::Dim),
            State::Broken => ("✗", TextRole::Bad),
        }
    }
}

/// One facility.
#[derive(Clone, Debug)]
pub struct Fact {
    group: &'static str,
    name: String,
    state: State,
    detail: String,
    cause: Option<String>,
    cure: Option<String>,
    /// A drawing of several lines, and the same as JSON.
    picture: Option<(String, Value)>,
}

impl Fact {
    /// A facility and what was found.
    pub fn new(group: &'static str, name: impl Into<String>, state: State, detail: impl Into<String>) -> Fact {
        Fact { group, name: name.into(), state, detail: detail.into(), cause: None, cure: None, picture: None }
    }

    /// The cause.
    pub fn because(mut self, cause: impl Into<String>) -> Fact {
        self.cause = Some(cause.into());
        self
    }

    /// Drawn below it; the same as JSON.
    pub fn with_picture(mut self, picture: String, value: Value) -> Fact {
        self.picture = Some((picture, value));
        self
    }

    /// The cure.
    pub fn cure(mut self, cure: impl Into<String>) -> Fact {
        self.cure = Some(cure.into());
        self
    }
}

/// Runs it.
pub fn run(doctor: &Doctor) -> anyhow::Result<Exit> {
    // First: a mistyped path is reported at once.
    let storage = doctor.path.as_deref().map(storage::collect).transpose()?;
    let wait = Spinner::new("Trying what this machine offers");
    let mut facts = Vec::new();
    spinio::collect(&mut facts);
    kernel::collect(&mut facts);
    process::collect(&mut facts);
    facts.extend(storage.into_iter().flatten());
    p2p::collect(&mut facts);
    nvidia::collect(&mut facts);
    net::collect(&mut facts);
    transports::collect(&mut facts);
    drop(wait);
    let text = match doctor.json {
        true => format!("{:#}\n", Value::Array(facts.iter().map(json_of).collect())),
        false => render(&OutputStyle::stdout(), &facts),
    };
    output::print(&text)?;
    Ok(if facts.iter().any(|f| f.state == State::Broken) { Exit::Missing } else { Exit::Ok })
}

fn json_of(fact: &Fact) -> Value {
    let mut value = json!({
        "group": fact.group,
        "name": fact.name,
        "state": fact.state.name(),
        "detail": fact.detail,
        "cause": fact.cause,
        "cure": fact.cure,
    });
    if let Some((_, stack)) = &fact.picture {
        value["stack"] = stack.clone();
    }
    value
}

fn render(paint: &OutputStyle, facts: &[Fact]) -> String {
    let mut s = String::new();
    let mut group = "";
    let column = facts.iter().map(|f| f.name.chars().count()).max().unwrap_or(0);
    for fact in facts {
        if fact.group != group {
            group = fact.group;
            let gap = if s.is_empty() { "" } else { "\n" };
            let _ = writeln!(s, "{gap}{}", paint.text(TextRole::Head, group));
        }
        let (symbol, ink) = fact.state.symbol();
        let _ = writeln!(s, "  {} {:<column$}  {}", paint.text(ink, symbol), fact.name, fact.detail);
        for line in fact.picture.iter().flat_map(|(picture, _)| picture.lines()) {
            let _ = writeln!(s, "      {line}");
        }
        let mut more = |label: &str, text: &Option<String>| {
            if let Some(text) = text {
                wrap(&mut s, paint, &format!("{label} {text}"), column + 6);
            }
        };
        more("cause:", &fact.cause);
        more("cure: ", &fact.cure);
    }
    let count = |state| facts.iter().filter(|f| f.state == state).count();
    let _ = writeln!(
        s,
        "\n{} found, {} limited, {} absent, {} broken",
        count(State::Found),
        count(State::Limited),
        count(State::Absent),
        count(State::Broken)
    );
    s
}

/// Writes a sentence at an indent, wrapped at spaces.
fn wrap(s: &mut String, paint: &OutputStyle, text: &str, indent: usize) {
    let room = paint.width.saturating_sub(indent).max(30);
    let mut line = String::new();
    for word in text.split(' ') {
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > room {
            let _ = writeln!(s, "{:indent$}{}", "", paint.text(TextRole::Dim, &line));
            line = "       ".to_owned();
        } else if !line.is_empty() {
            line.push(' ');
        }
        line += word;
    }
    let _ = writeln!(s, "{:indent$}{}", "", paint.text(TextRole::Dim, &line));
}

/// The text of a small file of /proc or /sys, trimmed; `None` if it cannot be read.
fn text_of(path: impl AsRef<std::path::Path>) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|t| t.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: OutputStyle = OutputStyle { colour: false, width: 60 };

    #[test]
    fn fact_is_one_line_with_indented_cure() {
        let facts = [
            Fact::new("Kernel", "cachestat", State::Found, "answers"),
            Fact::new("Kernel", "io_uring", State::Limited, "refused").because("a sysctl").cure("set it to 0"),
        ];
        let text = render(&PLAIN, &facts);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "Kernel");
        assert_eq!(lines[1], "  ✓ cachestat  answers");
        assert_eq!(lines[2], "  ! io_uring   refused");
        assert_eq!(lines[3], "               cause: a sysctl");
        assert_eq!(lines[4], "               cure:  set it to 0");
        assert_eq!(lines[6], "1 found, 1 limited, 0 absent, 0 broken");
    }

    #[test]
    fn long_cures_wrap_without_losing_words() {
        let cure = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen";
        let text = render(&PLAIN, &[Fact::new("G", "n", State::Absent, "d").cure(cure)]);
        assert!(text.lines().all(|l| l.chars().count() <= 60), "{text}");
        let words: Vec<_> = text.split_whitespace().collect();
        assert!(cure.split(' ').all(|w| words.contains(&w)));
    }

    #[test]
    fn json_has_every_field() {
        let value = json_of(&Fact::new("G", "n", State::Broken, "d").cure("c"));
        assert_eq!(value["state"], "broken");
        assert_eq!(value["cause"], Value::Null);
        assert_eq!(value["cure"], "c");
    }
}
