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
    /// The parameter of the escape code.
    fn code(self) -> u8 {
        match self {
            TextRole::Good => 32,
            TextRole::Weak => 33,
            TextRole::Bad => 31,
            TextRole::Head => 1,
            TextRole::Dim => 2,
            TextRole::Route(route) => match of_route(route) {
                dark @ 0..8 => 30 + dark,
                light => 82 + light,
            },
            TextRole::Pages(Residency::Clean) => 32,
            TextRole::Pages(Residency::Dirty) => 31,
            TextRole::Pages(Residency::Absent) => 90,
            TextRole::Pages(Residency::Unknown) => 33,
        }
    }
}

/// The colour of a route, the same in text, tables and screens: an index of the terminal's palette, below 16.
pub fn of_route(route: Route) -> u8 {
    match route {
        Route::Copy => 6,
        Route::Dma => 2,
        Route::Store => 4,
        Route::Direct => 3,
        Route::P2p => 5,
        Route::Gather => 14,
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

    #[test]
    fn routes_have_the_escape_codes_of_their_colours() {
        let style = OutputStyle { colour: true, width: 80 };
        let codes = Route::ALL.map(|route| style.text(TextRole::Route(route), "")[2..4].to_owned());
        assert_eq!(codes, ["36", "32", "34", "33", "35", "96"]);
    }
}
