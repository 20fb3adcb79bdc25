//! `spinio top`: the processes that use SPIN, live.
//!
//! ```text
//!   every second: processes::list() ──> model.rs: what changed, and how it was before ──> view.rs: the screen
//!   keys: up, down: another process    space: stop and continue    q: end (screen.rs)
//! ```
//!
//! Without a terminal it prints a note, and the output of `spinio stat`.

mod model;
mod view;

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use clap::Args;
use ratatui::Frame;

use self::model::Model;
use crate::color::OutputStyle;
use crate::exit::Exit;
use crate::screen::{self, View};
use crate::stat::{report, seconds};
use crate::{output, processes};

/// What `spinio top` takes.
#[derive(Debug, Args)]
pub struct Top {
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    every: Duration,
}

/// Runs it.
pub fn run(top: &Top) -> anyhow::Result<Exit> {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        output::note("spinio: no terminal to draw on; this is what `spinio stat` prints\n");
        output::print(&report::of_all(&OutputStyle::stdout(), &processes::list()))?;
        return Ok(Exit::Ok);
    }
    screen::show(&mut Model::default(), top.every).map(|()| Exit::Ok)
}

impl View for Model {
    fn update(&mut self, now: Instant) {
        self.update(processes::list(), now);
    }

    fn draw(&self, frame: &mut Frame<'_>, colour: bool) {
        view::draw(frame, self, colour);
    }

    fn select(&mut self, step: isize) {
        self.select(step);
    }

    fn pause(&mut self) {
        self.state.pause();
    }
}
