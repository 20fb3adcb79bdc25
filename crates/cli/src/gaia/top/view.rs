//! The screen, and the same as a plain table.
//!
//! ```text
//!   spinio gaia top  1 mount, 1 daemon   up/down select, f files, space stop, q end
//!   released/s  merges/s  invalidations/s  unwritten           maps  processes  restarts  mount, or socket
//!   12.4 MiB    310       64               1.2 MiB of 2.9 GiB  3     2          0         /data
//!   ┌ released 12.4 MiB/s ───────────────────────────┐
//!   │ ▁▂▅▇▇▇▆▇                                       │  or, after f, a table of the files
//! ```

use comfy_table::Cell as PlainCell;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Paragraph, Row as TableRow, Sparkline, Table, TableState, Wrap};
use spinio_gaiad::{DaemonStatus, LeasedFileStatus};

use super::model::{Holder, Model, MountRow, Row};
use crate::color::OutputStyle;
use crate::gaia::held::ONLY_ROOT;
use crate::gaia::status::uuid;
use crate::{format, table};

const PAGE: u64 = 4096;

const NOTHING: &str = "GAIA is mounted nowhere here, and no daemon for leased files is running";

const MOUNTS: [&str; 8] =
    ["released/s", "merges/s", "invalidations/s", "unwritten", "maps", "processes", "restarts", "mount, or socket"];
const MOUNT_WIDTHS: [u16; 8] = [10, 8, 15, 22, 5, 9, 8, 20];
const FILES: [&str; 6] = ["released/s", "merges/s", "unwritten", "maps", "processes", "file"];
const FILE_WIDTHS: [u16; 6] = [10, 8, 10, 5, 9, 20];
const LEASED: [&str; 6] = ["maps", "held", "of", "user", "device", "file"];
const LEASED_WIDTHS: [u16; 6] = [5, 10, 10, 6, 40, 20];

fn pages(count: f64) -> String {
    format::bytes((count * PAGE as f64) as u64)
}

fn mount_cells(row: &Row) -> [String; 8] {
    let path = row.path.display().to_string();
    let none = || "-".to_owned();
    match &row.holder {
        Holder::Mount(mount) => {
            let server = &mount.status.server;
            let processes: u64 = mount.status.files.iter().map(|file| file.owners).sum();
            [
                pages(mount.rates.published),
                format!("{:.0}", mount.rates.merged),
                format!("{:.0}", mount.rates.invalidations),
                format!("{} of {}", format::bytes(server.used * PAGE), format::bytes(server.slots * PAGE)),
                server.connections.to_string(),
                processes.to_string(),
                server.replaced.to_string(),
                path,
            ]
        }
        Holder::Unasked => [none(), none(), none(), none(), none(), none(), none(), path],
        Holder::Daemon(daemon) => [none(), none(), none(), none(), daemon.maps.to_string(), none(), none(), path],
    }
}

fn file_rows(mount: &MountRow) -> Vec<[String; 6]> {
    let mut all: Vec<_> = mount.status.files.iter().zip(&mount.files).collect();
    // The busiest first.
    all.sort_by(|a, b| b.1.published.total_cmp(&a.1.published));
    let cells = |(file, rates): (&spinio_gaiad::FileStatus, &super::model::Rates)| {
        [
            pages(rates.published),
            format!("{:.0}", rates.merged),
            format::bytes(file.dirty * PAGE),
            file.maps.to_string(),
            file.owners.to_string(),
            format::printable(&file.path),
        ]
    };
    all.into_iter().map(cells).collect()
}

fn leased_rows(daemon: &DaemonStatus) -> Vec<[String; 6]> {
    let cells = |file: &LeasedFileStatus| {
        [
            file.maps.to_string(),
            format::bytes(file.bytes),
            format::bytes(file.size),
            file.user.to_string(),
            uuid(&file.device),
            format::printable(&file.path),
        ]
    };
    daemon.files.iter().map(cells).collect()
}

/// For a pipe: the mounts, and the files of each.
pub fn plain(model: &Model, paint: &OutputStyle) -> String {
    if model.rows.is_empty() {
        return if model.errors.is_empty() { format!("{NOTHING}\n") } else { String::new() };
    }
    let mut all = table::new(paint, &MOUNTS);
    for row in &model.rows {
        all.add_row(mount_cells(row).map(PlainCell::new));
    }
    table::align_columns(&mut all, &[0, 1, 2, 3, 4, 5, 6]);
    let mut text = format!("{}\n", table::text(&all));
    for row in &model.rows {
        let (head, rows) = match &row.holder {
            Holder::Mount(mount) => (FILES, file_rows(mount)),
            Holder::Unasked => continue,
            Holder::Daemon(daemon) => (LEASED, leased_rows(daemon)),
        };
        if !rows.is_empty() {
            let mut files = table::new(paint, &head);
            for cells in rows {
                files.add_row(cells.map(PlainCell::new));
            }
            table::align_columns(&mut files, &[0, 1, 2, 3, 4]);
            text += &format!("\n{}\n{}\n", row.path.display(), table::text(&files));
        }
    }
    text
}

/// Draws everything.
pub fn draw(frame: &mut Frame<'_>, model: &Model, colour: bool) {
    let rows = model.rows.len().clamp(1, 8) as u16;
    let errors = model.errors.len().min(3) as u16;
    let layout = [Constraint::Length(1), Constraint::Length(rows + 1), Constraint::Length(errors), Constraint::Min(0)];
    let [head, mounts, complaints, below] = Layout::vertical(layout).areas(frame.area());
    frame.render_widget(Paragraph::new(headline(model)), head);
    let lines: Vec<Line<'_>> = model.errors.iter().map(|error| Line::from(error.as_str())).collect();
    frame.render_widget(Paragraph::new(lines), complaints);
    let Some(row) = model.rows.get(model.selected()) else {
        if model.errors.is_empty() {
            frame.render_widget(Paragraph::new(NOTHING), mounts);
        }
        return;
    };
    let table = live_table(MOUNTS, MOUNT_WIDTHS, model.rows.iter().map(mount_cells));
    let table = table.row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut state = TableState::default().with_selected(Some(model.selected()));
    frame.render_stateful_widget(table, mounts, &mut state);
    let path = row.path.display();
    match &row.holder {
        Holder::Mount(mount) if !model.show_files => released(frame, below, mount, colour),
        Holder::Mount(mount) => {
            let files = live_table(FILES, FILE_WIDTHS, file_rows(mount).into_iter());
            frame.render_widget(files.block(Block::bordered().title(format!("files of {path}"))), below);
        }
        Holder::Unasked => {
            let text = Paragraph::new(ONLY_ROOT).wrap(Wrap { trim: false });
            frame.render_widget(text.block(Block::bordered().title(path.to_string())), below);
        }
        Holder::Daemon(daemon) => {
            let limit =
                daemon.limit.map_or_else(String::new, |most| format!(" of at most {} each", format::bytes(most)));
            let title = format!("{path}: {} of GPUs{limit}", format::bytes(daemon.bytes));
            let files = live_table(LEASED, LEASED_WIDTHS, leased_rows(daemon).into_iter());
            frame.render_widget(files.block(Block::bordered().title(title)), below);
        }
    }
}

fn headline(model: &Model) -> Line<'static> {
    let mounts = model.rows.iter().filter(|row| !matches!(row.holder, Holder::Daemon(_))).count();
    let count = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let mut text = format!("{}, {}", count(mounts, "mount"), count(model.rows.len() - mounts, "daemon"));
    if model.state.is_paused() {
        text += "  stopped";
    }
    Line::from(vec![
        Span::styled("spinio gaia top  ", Style::new().add_modifier(Modifier::BOLD)),
        Span::raw(text),
        Span::styled("   up/down select, f files, space stop, q end", Style::new().add_modifier(Modifier::DIM)),
    ])
}

fn live_table<const N: usize>(
    head: [&'static str; N],
    widths: [u16; N],
    rows: impl Iterator<Item = [String; N]>,
) -> Table<'static> {
    // The last column has what is left.
    let constraint = |(at, width)| if at + 1 == N { Constraint::Min(width) } else { Constraint::Length(width) };
    Table::new(rows.map(TableRow::new), widths.into_iter().enumerate().map(constraint))
        .header(TableRow::new(head.map(Cell::from)).style(Style::new().add_modifier(Modifier::BOLD)))
}

/// The throughput of releases, and the numbers of the server.
fn released(frame: &mut Frame<'_>, area: Rect, mount: &MountRow, colour: bool) {
    let [left, right] = Layout::horizontal([Constraint::Percentage(50), Constraint::Percentage(50)]).areas(area);
    let block = Block::bordered().title(format!("released {}/s", pages(mount.rates.published)));
    let columns = usize::from(block.inner(left).width);
    let shown: Vec<u64> = mount.history.iter().skip(mount.history.len().saturating_sub(columns)).copied().collect();
    let most = mount.history.iter().copied().max().unwrap_or(1).max(1);
    let mut line = Sparkline::default().block(block).data(&shown).max(most);
    if colour {
        line = line.style(Style::new().fg(Color::Green));
    }
    frame.render_widget(line, left);

    let (server, rates) = (&mount.status.server, &mount.rates);
    let totals = server.totals;
    let lines = [
        format!("releases       {:.0}/s, {} in all", rates.releases, totals.commits),
        format!("released       {} in all", format::bytes(totals.published * PAGE)),
        format!("pages merged   {:.0}/s, {} in all", rates.merged, totals.merged),
        format!("invalidations  {:.0}/s, {} in all", rates.invalidations, totals.invalidations),
        format!("  their pages  {:.0}/s, {} in all", rates.invalidated, totals.invalidated),
        format!("mapped         {}", format::bytes(server.mapped * PAGE)),
        format!("files          {} with maps or unwritten pages", mount.status.files.len()),
    ];
    let since = format::time(server.seconds as f64 * 1e9);
    let title = format!("server {}, for {since}", server.pid);
    let text = Paragraph::new(lines.map(Line::from).to_vec()).wrap(Wrap { trim: false });
    frame.render_widget(text.block(Block::bordered().title(title)), right);
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use spinio_gaiad::{FileStatus, MountStatus, ServerStatus, Stats, Totals};

    use super::*;
    use crate::gaia::held::Held;
    use crate::screen::drawn;

    fn screen(model: &Model, width: u16, height: u16) -> String {
        drawn(width, height, |frame| draw(frame, model, true))
    }

    /// A mount whose file had so many pages released.
    fn held(pid: u64, published: u64) -> Held {
        let totals = Totals { commits: published / 256, published, merged: published / 2, ..Totals::default() };
        let server =
            ServerStatus { pid, connections: 3, used: 5, slots: 1 << 18, replaced: pid, totals, ..Default::default() };
        let stats = Stats { published, merged: published / 2, ..Stats::default() };
        let file = FileStatus { path: "/graph.bin".into(), maps: 3, in_place: 0, owners: 2, dirty: 5, stats };
        let mounts = vec![("/data".into(), MountStatus { server, users: Vec::new(), files: vec![file] })];
        Held { mounts, daemons: vec![("/s".into(), DaemonStatus { maps: 4, ..Default::default() })], ..Held::default() }
    }

    fn cells(text: &str, of: &str) -> Vec<String> {
        let line = text.lines().find(|line| line.trim_end().ends_with(of)).unwrap_or_else(|| panic!("no {of}: {text}"));
        line.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn rates_are_of_the_time_between_two_answers() {
        let (mut model, begun) = (Model::default(), Instant::now());
        assert!(screen(&model, 100, 5).contains("mounted nowhere"));
        model.update(held(1, 1000), begun);
        assert_eq!(cells(&screen(&model, 160, 20), "/data")[..2], ["0", "B"]);
        model.update(held(1, 2024), begun + Duration::from_secs(2));
        let shown = screen(&model, 160, 20);
        // 1024 pages in two seconds.
        assert_eq!(
            cells(&shown, "/data"),
            ["2", "MiB", "256", "0", "20", "KiB", "of", "1", "GiB", "3", "2", "1", "/data"],
            "{shown}"
        );
        assert!(shown.contains("released 2 MiB/s") && shown.contains('█') && shown.contains("1012 in all"), "{shown}");
        assert!(shown.contains("1 mount, 1 daemon"), "{shown}");
        // Another server counts from zero.
        model.update(held(2, 512), begun + Duration::from_secs(3));
        assert_eq!(cells(&screen(&model, 160, 20), "/data")[..3], ["2", "MiB", "256"]);
    }

    #[test]
    fn files_are_shown_on_a_key_and_in_a_pipe() {
        let (mut model, begun) = (Model::default(), Instant::now());
        model.update(held(1, 0), begun);
        model.update(held(1, 256), begun + Duration::from_secs(1));
        model.show_files = true;
        let row = ["1", "MiB", "128", "20", "KiB", "3", "2", "/graph.bin"];
        let shown = screen(&model, 160, 20).replace('│', " ");
        assert_eq!(cells(&shown, "/graph.bin"), row, "{shown}");
        let text = plain(&model, &OutputStyle { colour: false, width: 160 });
        assert_eq!(cells(&text, "/graph.bin"), row, "{text}");
        assert_eq!(cells(&text, "/s")[4], "4", "{text}");
        model.select(1);
        assert!(screen(&model, 160, 20).contains("/s: 0 B of GPUs"), "{}", screen(&model, 160, 20));
    }

    #[test]
    fn mount_that_does_not_answer_is_named() {
        let mut model = Model::default();
        let errors = vec!["/data: the server has not answered for 10 s".to_owned()];
        model.update(Held { errors, ..Held::default() }, Instant::now());
        assert!(screen(&model, 100, 6).contains("has not answered"));
        assert_eq!(plain(&model, &OutputStyle { colour: false, width: 100 }), "");
    }

    #[test]
    fn mount_that_may_not_be_asked_has_no_numbers() {
        let mut model = Model::default();
        model.update(Held { roots: vec!["/shared".into()], ..Held::default() }, Instant::now());
        assert!(screen(&model, 100, 12).contains("only root may ask"), "{}", screen(&model, 100, 12));
        let text = plain(&model, &OutputStyle { colour: false, width: 160 });
        assert_eq!(cells(&text, "/shared"), ["-", "-", "-", "-", "-", "-", "-", "/shared"], "{text}");
    }

    #[test]
    fn any_screen_size_is_drawn() {
        let mut model = Model::default();
        model.update(held(1, 1 << 40), Instant::now());
        for (width, height) in [(1, 1), (10, 3), (20, 8), (300, 80)] {
            let _ = screen(&model, width, height);
        }
    }

    #[test]
    fn paused_screen_does_not_change() {
        let mut model = Model::default();
        model.state.pause();
        model.update(held(1, 1), Instant::now());
        assert!(model.rows.is_empty() && screen(&model, 100, 5).contains("stopped"));
    }
}
