//! `spinio gaia top`: the mounts of GAIA and the daemon of leased files, live.
//!
//! ```text
//!   a thread, every second: Held::ask ──> model.rs: rates, and how they were ──> view.rs: the screen, or a plain table
//!   keys: up, down: another mount    f, Enter: its files    space: stop and continue    q: end (screen.rs)
//! ```
//!
//! A server that does not answer delays the thread, and not the keys. Without a terminal, and with `--once`, it looks
//! twice and prints a table.

mod model;
mod view;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use clap::Args;
use ratatui::Frame;
use ratatui::crossterm::event::KeyCode;

use self::model::Model;
use super::held::Held;
use crate::color::OutputStyle;
use crate::exit::{self, Exit};
use crate::output;
use crate::screen::{self, View};
use crate::stat::seconds;

/// The screen shows an answer after this time at most.
const TICK: Duration = Duration::from_millis(200);

/// What `spinio gaia top` takes.
#[derive(Debug, Args)]
pub struct Top {
    /// Where GAIA is mounted [default: all mounts of this user, and the names of root's]
    directory: Option<PathBuf>,
    /// The socket of the daemon of leased files [default: as for serve]
    #[arg(long, value_name = "PATH", conflicts_with = "directory")]
    socket: Option<PathBuf>,
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    every: Duration,
    /// Look twice, print a table, and end
    #[arg(long)]
    once: bool,
}

/// Runs it.
pub fn run(top: &Top) -> anyhow::Result<Exit> {
    let terminal = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    if !top.once && terminal {
        let mut live = Live { model: Model::default(), answers: ask_always(top)? };
        // So that the first picture is not empty.
        if let Ok((held, at)) = live.answers.recv_timeout(TICK * 5) {
            live.model.update(held, at);
        }
        return screen::show(&mut live, TICK.min(top.every)).map(|()| Exit::Ok);
    }
    if !top.once {
        output::note("spinio: no terminal to draw on; this is what `spinio gaia top --once` prints\n");
    }
    let mut model = Model::default();
    for look in 0..2 {
        if look > 0 {
            std::thread::sleep(top.every);
        }
        let held = Held::ask(top.directory.as_ref(), top.socket.as_ref())?;
        model.update(held, Instant::now());
    }
    output::print(&view::plain(&model, &OutputStyle::stdout()))?;
    if model.errors.is_empty() { Ok(Exit::Ok) } else { Err(exit::error(Exit::Failed, model.errors.join("\n"))) }
}

/// The answers, as a thread gets them.
fn ask_always(top: &Top) -> std::io::Result<Receiver<(Held, Instant)>> {
    let (sender, answers) = mpsc::channel();
    let (directory, socket, every) = (top.directory.clone(), top.socket.clone(), top.every);
    let ask = move || {
        loop {
            let asked = Instant::now();
            let held = Held::ask(directory.as_ref(), socket.as_ref())
                .unwrap_or_else(|error| Held { errors: vec![error.to_string()], ..Held::default() });
            if sender.send((held, Instant::now())).is_err() {
                return;
            }
            std::thread::sleep(every.saturating_sub(asked.elapsed()));
        }
    };
    std::thread::Builder::new().name("gaia-status".to_owned()).spawn(ask)?;
    Ok(answers)
}

struct Live {
    model: Model,
    answers: Receiver<(Held, Instant)>,
}

impl View for Live {
    fn update(&mut self, _now: Instant) {
        for (held, at) in self.answers.try_iter() {
            self.model.update(held, at);
        }
    }

    fn draw(&self, frame: &mut Frame<'_>, colour: bool) {
        view::draw(frame, &self.model, colour);
    }

    fn select(&mut self, step: isize) {
        self.model.select(step);
    }

    fn pause(&mut self) {
        self.model.state.pause();
    }

    fn key(&mut self, key: KeyCode) {
        if matches!(key, KeyCode::Char('f') | KeyCode::Enter) {
            self.model.show_files = !self.model.show_files;
        }
    }
}
