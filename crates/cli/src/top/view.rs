//! The screen.
//!
//! ```text
//!   spinio top   3 processes   12.4 GB/s                      up/down select  space stop  q end
//!   process  calls/s   GB/s    p50    p99   bounce buffers  pinned  program
//!   > 4711     1,204   9.6   810 us  1.2 ms  64 MiB         0 B     python3
//!   ┌ dma 9.1 GB/s ──────────────────┐┌ python3 (process 4711) ──────┐
//!   │ ▁▂▅▇▇▇▆▇                       ││ read   p50 .. p90 .. p99 ..  │
//!   ├ direct 0.50 GB/s ──────────────┤│ refused ...                  │
//! ```

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Paragraph, Row as TableRow, Sparkline, Table, TableState, Wrap};
use spinio_io::stats::{Direction, Gauge};
use spinio_plan::Route;

use super::model::{Model, Row};
use crate::renamed_keys::RESIDENCIES;
use crate::stat::report::{all, quantile, total};
use crate::{color, format};

/// Draws everything.
pub fn draw(frame: &mut Frame<'_>, model: &Model, colour: bool) {
    let rows = model.rows.len().clamp(1, 10) as u16;
    let [head, table, below] =
        Layout::vertical([Constraint::Length(1), Constraint::Length(rows + 1), Constraint::Min(0)]).areas(frame.area());
    frame.render_widget(Paragraph::new(headline(model)), head);
    if model.rows.is_empty() {
        let text = match model.other_versions {
            0 => "no process has made a device request under SPIN".to_owned(),
            n => format!("no process of this version of SPIN; {n} of another"),
        };
        frame.render_widget(Paragraph::new(text), table);
        return;
    }
    let mut state = TableState::default().with_selected(Some(model.selected()));
    frame.render_stateful_widget(processes(model), table, &mut state);
    if let Some(row) = model.rows.get(model.selected()) {
        let [left, right] = Layout::horizontal([Constraint::Percentage(50), Constraint::Percentage(50)]).areas(below);
        routes(frame, left, row, colour);
        frame.render_widget(details(row), right);
    }
}

fn headline(model: &Model) -> Line<'static> {
    let bytes: f64 = model.rows.iter().map(|r| total(&r.delta) as f64 / r.seconds).sum();
    let n = model.rows.len();
    let mut text =
        format!("{n} {}  {} GB/s", if n == 1 { "process" } else { "processes" }, format::gbps(bytes as u64, 1.0));
    if model.other_versions > 0 {
        text += &format!("  {} of another version", model.other_versions);
    }
    if model.state.is_paused() {
        text += "  stopped";
    }
    Line::from(vec![
        Span::styled("spinio top  ", Style::new().add_modifier(Modifier::BOLD)),
        Span::raw(text),
        Span::styled("   up/down select, space stop, q end", Style::new().add_modifier(Modifier::DIM)),
    ])
}

fn processes(model: &Model) -> Table<'static> {
    let head = ["process", "calls/s", "GB/s", "p50", "p99", "bounce buffers", "pinned", "program"];
    let rows = model.rows.iter().map(|r| {
        let latency = all(&r.delta);
        TableRow::new([
            r.total.process.pid.to_string(),
            format!("{:.0}", r.calls()),
            format::gbps(total(&r.delta), r.seconds),
            quantile(&latency, 0.5),
            quantile(&latency, 0.99),
            format::bytes(r.total.gauge(Gauge::BounceBytes).0),
            format::bytes(r.total.gauge(Gauge::Pinned).0),
            r.total.process.name.clone(),
        ])
    });
    let widths = [8, 9, 7, 8, 8, 16, 9, 16].map(Constraint::Length);
    Table::new(rows, widths)
        .header(TableRow::new(head.map(Cell::from)).style(Style::new().add_modifier(Modifier::BOLD)))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
}

/// The throughput of each route that moved bytes recently.
fn routes(frame: &mut Frame<'_>, area: Rect, row: &Row, colour: bool) {
    let used: Vec<Route> = Route::ALL.into_iter().filter(|r| row.history[*r as usize].iter().any(|b| *b > 0)).collect();
    if used.is_empty() {
        frame.render_widget(Paragraph::new("nothing moved lately").block(Block::bordered().title("routes")), area);
        return;
    }
    // One scale for all, so that they can be compared.
    let most = row.history.iter().flatten().copied().max().unwrap_or(1).max(1);
    let areas = Layout::vertical(used.iter().map(|_| Constraint::Max(6))).split(area);
    for (route, area) in used.iter().zip(areas.iter()) {
        let history = &row.history[*route as usize];
        let now = history.back().copied().unwrap_or(0);
        let block = Block::bordered().title(format!("{route} {} GB/s", format::gbps(now, 1.0)));
        let columns = usize::from(block.inner(*area).width);
        let shown: Vec<u64> = history.iter().skip(history.len().saturating_sub(columns)).copied().collect();
        let mut line = Sparkline::default().block(block).data(&shown).max(most);
        if colour {
            line = line.style(Style::new().fg(Color::Indexed(color::of_route(*route))));
        }
        frame.render_widget(line, *area);
    }
}

fn details(row: &Row) -> Paragraph<'static> {
    let s = &row.total;
    let mut lines = Vec::new();
    for direction in Direction::ALL {
        let (now, ever) = (row.delta.calls(direction), s.calls(direction));
        if ever.calls > 0 {
            let of = if now.calls > 0 { &now.latency } else { &ever.latency };
            lines.push(Line::from(format!(
                "{:<6} p50 {}  p90 {}  p99 {}{}",
                direction.name(),
                quantile(of, 0.5),
                quantile(of, 0.9),
                quantile(of, 0.99),
                if now.calls > 0 { "" } else { "  (since it began)" },
            )));
            let failed = if ever.failed > 0 { format!(", {} failed", ever.failed) } else { String::new() };
            lines.push(Line::from(format!("       {} calls, {}{failed}", ever.calls, format::bytes(ever.bytes))));
        }
    }
    let memory = [Gauge::BounceBytes, Gauge::Pinned, Gauge::PinnedFileBytes];
    let memory = memory.iter().filter(|g| s.gauge(**g).1 > 0).map(|g| {
        let (now, max) = s.gauge(*g);
        format!("{} {} (most {})", g.name(), format::bytes(now), format::bytes(max))
    });
    lines.extend(memory.map(Line::from));
    let pages: Vec<String> = RESIDENCIES
        .iter()
        .filter(|(r, _)| s.pages(*r) > 0)
        .map(|(r, name)| format!("{} {name}", s.pages(*r)))
        .collect();
    if !pages.is_empty() {
        lines.push(Line::from(format!("pages surveyed: {}", pages.join(", "))));
    }
    lines.extend(s.refusals.iter().map(|r| Line::from(format!("refused {}: {}", r.count, r.reason))));
    let title = format!("{} (process {})", s.process.name, s.process.pid);
    // Reasons are sentences.
    Paragraph::new(lines).wrap(Wrap { trim: false }).block(Block::bordered().title(title))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use spinio_io::stats::{Histogram, Process, Snapshot, trace::file};
    use spinio_plan::Reason;

    use super::*;
    use crate::processes::{CounterFile, ProcessList};
    use crate::screen::drawn;

    fn screen(model: &Model, width: u16, height: u16) -> String {
        drawn(width, height, |frame| draw(frame, model, true))
    }

    fn snapshot(pid: u32, bytes: u64) -> Snapshot {
        let mut s = Snapshot {
            process: Process { pid, name: format!("prog{pid}"), ..Default::default() },
            ..Default::default()
        };
        let calls = if bytes > 0 { 20 } else { 10 };
        let mut latency = Histogram::default();
        latency.add(1_000_000, calls);
        s.read.calls = calls;
        s.read.bytes = bytes;
        s.read.latency = latency.clone();
        s.rows.push(spinio_io::stats::RouteRow {
            direction: Direction::Read,
            route: Route::Dma,
            reason: Reason::CachedLarge,
            pieces: calls,
            bytes,
            nanos: 10,
            latency,
        });
        s.gauges[Gauge::BounceBytes as usize] = [8 << 20, 16 << 20];
        s
    }

    /// As found on this machine.
    fn found(directory: &std::path::Path, snapshots: Vec<Snapshot>) -> ProcessList {
        let counters = |s: Snapshot| {
            let path = directory.join(s.process.pid.to_string());
            std::fs::write(&path, vec![0; file::COUNTERS_BYTES]).unwrap();
            let mut counters = CounterFile::open(&path).unwrap();
            counters.snapshot = s;
            counters
        };
        ProcessList { processes: snapshots.into_iter().map(counters).collect(), other_versions: 0 }
    }

    #[test]
    fn screen_shows_processes_routes_and_latencies() {
        let directory = tempfile::tempdir().unwrap();
        let (mut model, begun) = (Model::default(), Instant::now());
        assert!(screen(&model, 100, 10).contains("no process has made a device request"));
        model.update(found(directory.path(), vec![snapshot(11, 0), snapshot(12, 0)]), begun);
        model.update(
            found(directory.path(), vec![snapshot(11, 2_000_000_000), snapshot(12, 0)]),
            begun + Duration::from_secs(1),
        );
        let shown = screen(&model, 100, 24);
        assert!(shown.contains("2 processes  2.00 GB/s"), "{shown}");
        assert!(shown.contains("dma 2.00 GB/s"), "{shown}");
        assert!(
            shown.contains("prog11 (process 11)") && shown.contains("bounce buffers 8 MiB (most 16 MiB)"),
            "{shown}"
        );
        assert!(shown.contains('█'), "the throughput is drawn: {shown}");
        model.select(1);
        let shown = screen(&model, 100, 24);
        assert!(shown.contains("prog12 (process 12)") && shown.contains("nothing moved lately"), "{shown}");
        // Too wide for its half: it wraps.
        assert!(screen(&model, 70, 24).contains("began)"), "{}", screen(&model, 70, 24));
        model.select(5);
        assert_eq!(model.selected(), 1);
        // One ends: the other is selected.
        model.update(found(directory.path(), vec![snapshot(11, 2_000_000_000)]), begun + Duration::from_secs(2));
        assert!(screen(&model, 100, 24).contains("1 process  0.00 GB/s"));
    }

    #[test]
    fn any_screen_size_is_drawn() {
        let directory = tempfile::tempdir().unwrap();
        let mut model = Model::default();
        model.update(found(directory.path(), (1..40).map(|pid| snapshot(pid, 1 << 30)).collect()), Instant::now());
        for (width, height) in [(1, 1), (10, 3), (20, 8), (300, 80)] {
            let _ = screen(&model, width, height);
        }
    }

    #[test]
    fn first_update_after_a_pause_has_no_rates() {
        let directory = tempfile::tempdir().unwrap();
        let (mut model, begun) = (Model::default(), Instant::now());
        let gigabytes = |n: u64| found(directory.path(), vec![snapshot(11, n * 1_000_000_000)]);
        model.update(gigabytes(1), begun);
        model.update(gigabytes(3), begun + Duration::from_secs(1));
        let history = model.rows[0].history.clone();
        model.state.pause();
        model.update(gigabytes(9), begun + Duration::from_secs(2));
        model.state.pause();
        model.update(gigabytes(100), begun + Duration::from_secs(60));
        assert!(screen(&model, 100, 24).contains("1 process  0.00 GB/s"), "{}", screen(&model, 100, 24));
        assert_eq!(model.rows[0].history, history);
        model.update(gigabytes(101), begun + Duration::from_secs(61));
        assert!(screen(&model, 100, 24).contains("1 process  1.00 GB/s"), "{}", screen(&model, 100, 24));
    }

    #[test]
    fn paused_screen_does_not_change() {
        let directory = tempfile::tempdir().unwrap();
        let mut model = Model::default();
        model.state.pause();
        model.update(found(directory.path(), vec![snapshot(1, 1)]), Instant::now());
        assert!(model.rows.is_empty() && screen(&model, 100, 5).contains("stopped"));
    }
}
