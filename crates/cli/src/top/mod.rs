//! `spinio top`: the processes that use SPIN, live.
//!
//! ```text
//!   every second: processes::list() ──> model.rs: what changed, and how it was before ──> view.rs: the screen
//!   keys: up, down: another process    space: stop and continue    q: end
//! ```
//!
//! Without a terminal it prints a note, and the output of `spinio stat`.

mod model;
mod view;

use std::io::IsTerminal;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use ratatui::DefaultTerminal;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::crossterm::execute;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use self::model::Model;
use crate::color::OutputStyle;
use crate::exit::Exit;
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
        eprintln!("spinio: no terminal to draw on; this is what `spinio stat` prints");
        output::print(&report::of_all(&OutputStyle::stdout(), &processes::list()))?;
        return Ok(Exit::Ok);
    }
    restore_when_killed();
    let screen = lock_screen();
    let mut terminal = ratatui::try_init().context("Cannot take over the terminal")?;
    drop(screen);
    let ended = watch(&mut terminal, top.every);
    ratatui::restore();
    ended.map(|()| Exit::Ok)
}

/// Held while the screen is written. A signal may arrive at any moment, and what is drawn after the terminal was restored
/// would hide the cursor of the shell.
fn lock_screen() -> MutexGuard<'static, ()> {
    static SCREEN: Mutex<()> = Mutex::new(());
    SCREEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Restores the terminal also when a signal ends this process. (Keys send no signal: Ctrl-C is read as a key.)
fn restore_when_killed() {
    let Ok(mut signals) = Signals::new([SIGHUP, SIGINT, SIGTERM]) else { return };
    let wait = move || {
        if let Some(signal) = signals.forever().next() {
            // Not given back: the process ends.
            let _screen = lock_screen();
            ratatui::restore();
            // The cursor is restored with the terminal's value, which the other thread has.
            let _ = execute!(std::io::stdout(), Show);
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    };
    let _ = std::thread::Builder::new().name("signals".to_owned()).spawn(wait);
}

fn watch(terminal: &mut DefaultTerminal, every: Duration) -> anyhow::Result<()> {
    let colour = OutputStyle::stdout().colour;
    let mut model = Model::default();
    loop {
        let looked = Instant::now();
        model.update(processes::list(), looked);
        loop {
            let screen = lock_screen();
            terminal.draw(|frame| view::draw(frame, &model, colour))?;
            drop(screen);
            let left = every.saturating_sub(looked.elapsed());
            if left.is_zero() || !event::poll(left)? {
                break;
            }
            let Event::Key(key) = event::read()? else { continue };
            if key.kind == KeyEventKind::Release {
                continue;
            }
            match key.code {
                KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
                KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Ok(()),
                KeyCode::Char(' ') => model.pause(),
                KeyCode::Up | KeyCode::Char('k') => model.select(-1),
                KeyCode::Down | KeyCode::Char('j') => model.select(1),
                _ => {}
            }
        }
    }
}
