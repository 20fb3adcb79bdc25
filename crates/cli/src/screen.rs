//! A live view on the whole terminal: `spinio top`, `spinio gaia top`.
//!
//! ```text
//!   every tick: view.update() ──> view.draw()      keys: q, Esc, Ctrl-C end; space: pause; up, down: select; others: the view
//! ```
//!
//! The terminal is restored at the end, also of a signal.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::crossterm::execute;
use ratatui::{DefaultTerminal, Frame};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::color::OutputStyle;

/// What is shown.
pub trait View {
    /// Looks at what it shows.
    fn update(&mut self, now: Instant);
    /// Draws all of it.
    fn draw(&self, frame: &mut Frame<'_>, colour: bool);
    /// Another line, below or above.
    fn select(&mut self, step: isize);
    /// Stops, or continues.
    fn pause(&mut self);
    /// Another key.
    fn key(&mut self, _key: KeyCode) {}
}

/// Shows it until a key or a signal ends it.
pub fn show(view: &mut impl View, every: Duration) -> anyhow::Result<()> {
    restore_when_killed();
    let screen = lock_screen();
    let mut terminal = ratatui::try_init().context("Cannot take over the terminal")?;
    drop(screen);
    let ended = watch(&mut terminal, view, every);
    ratatui::restore();
    ended
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

fn watch(terminal: &mut DefaultTerminal, view: &mut impl View, every: Duration) -> anyhow::Result<()> {
    let colour = OutputStyle::stdout().colour;
    loop {
        let looked = Instant::now();
        view.update(looked);
        loop {
            let screen = lock_screen();
            terminal.draw(|frame| view.draw(frame, colour))?;
            drop(screen);
            // Also where no time is left: an update may always take longer than that.
            let left = every.saturating_sub(looked.elapsed());
            if !event::poll(left)? {
                break;
            }
            let Event::Key(key) = event::read()? else { continue };
            if key.kind == KeyEventKind::Release {
                continue;
            }
            match key.code {
                KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
                KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Ok(()),
                KeyCode::Char(' ') => view.pause(),
                KeyCode::Up | KeyCode::Char('k') => view.select(-1),
                KeyCode::Down | KeyCode::Char('j') => view.select(1),
                other => view.key(other),
            }
            // A key that is held down must not stop the updates.
            if left.is_zero() {
                break;
            }
        }
    }
}

/// What is drawn on a screen of this size, a line a row.
#[cfg(test)]
pub fn drawn(width: u16, height: u16, draw: impl FnOnce(&mut ratatui::Frame<'_>)) -> String {
    let mut terminal = ratatui::Terminal::new(ratatui::backend::TestBackend::new(width, height)).unwrap();
    terminal.draw(draw).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let rows = buffer.content().chunks(usize::from(width));
    rows.map(|row| row.iter().map(|c| c.symbol()).collect::<String>() + "\n").collect()
}
