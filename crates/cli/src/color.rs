//! Colour, if the output can show it and the user wants it.
//!
//! Off when the stream is no terminal, when NO_COLOR is set to anything, or when TERM is `dumb`;
//! on without a terminal only when CLICOLOR_FORCE is set (to anything but 0).

use std::env;
use std::io::IsTerminal;

use spinio_plan::{Residency, Route};

/// The meaning of a piece of text, which determines its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextRole {
    /// Found, equal, fast.
    Good,
    /// Works, but could be better.
    Weak,
    /// Wrong or missing.
    Bad,
    /// A heading.
    Head,
    /// Less important.
    Dim,
    /// A route.
    Route(Route),
    /// A residency.
    Pages(Residency),
}

impl TextRole {
    fn code(self) -> &'static str {
        match self {
            TextRole::Good => "32",
            TextRole::Weak => "33",
            TextRole::Bad => "31",
            TextRole::Head => "1",
            TextRole::Dim => "2",
            TextRole::Route(Route::Copy) => "36",
            TextRole::Route(Route::Dma) => "32",
            TextRole::Route(Route::Store) => "34",
            TextRole::Route(Route::Direct) => "33",
            TextRole::Route(Route::P2p) => "35",
            TextRole::Route(Route::Gather) => "96",
            TextRole::Pages(Residency::Clean) => "32",
            TextRole::Pages(Residency::Dirty) => "31",
            TextRole::Pages(Residency::Absent) => "90",
            TextRole::Pages(Residency::Unknown) => "33",
        }
    }
}

/// Whether to colour, and how wide the line is, for one output stream.
#[derive(Clone, Copy, Debug)]
pub struct OutputStyle {
    /// Escape codes are allowed.
    pub colour: bool,
    /// Columns; 120 if there is no terminal.
    pub width: usize,
}

impl OutputStyle {
    /// For a stream.
    pub fn of(stream: &(impl IsTerminal + rustix::fd::AsFd)) -> OutputStyle {
        let set = |name| env::var_os(name).is_some_and(|v| !v.is_empty());
        let forced = env::var_os("CLICOLOR_FORCE").is_some_and(|v| !v.is_empty() && v != "0");
        let dumb = env::var_os("TERM").is_some_and(|v| v == "dumb");
        let colour = !set("NO_COLOR") && (forced || (stream.is_terminal() && !dumb));
        let width = rustix::termios::tcgetwinsize(stream).map_or(0, |w| usize::from(w.ws_col));
        let width =
            if width == 0 { env::var("COLUMNS").ok().and_then(|c| c.parse().ok()).unwrap_or(120) } else { width };
        OutputStyle { colour, width: width.clamp(40, 400) }
    }

    /// For standard output.
    pub fn stdout() -> OutputStyle {
        OutputStyle::of(&std::io::stdout())
    }

    /// For standard error.
    pub fn stderr() -> OutputStyle {
        OutputStyle::of(&std::io::stderr())
    }

    /// The text in its colour.
    pub fn text(&self, ink: TextRole, text: &str) -> String {
        if self.colour { format!("\x1b[{}m{text}\x1b[0m", ink.code()) } else { text.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_unchanged_without_colour() {
        assert_eq!(OutputStyle { colour: false, width: 80 }.text(TextRole::Bad, "no"), "no");
        assert_eq!(OutputStyle { colour: true, width: 80 }.text(TextRole::Bad, "no"), "\x1b[31mno\x1b[0m");
    }
}
