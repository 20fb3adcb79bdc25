//! Tables: one style everywhere, colour by meaning, no wider than the terminal.

use comfy_table::{
    Cell, CellAlignment, Color, ColumnConstraint, ContentArrangement, Table, TableComponent, Width, presets,
};
use spinio_io::stats::{Direction, Snapshot};
use spinio_plan::Route;

use crate::color::{self, OutputStyle};
use crate::format;

/// An empty table with this head.
pub fn new(paint: &OutputStyle, head: &[&str]) -> Table {
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_style(TableComponent::HeaderLines, '─')
        .set_style(TableComponent::MiddleHeaderIntersections, '─')
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(paint.width as u16)
        .set_header(head.iter().map(Cell::new));
    if paint.colour {
        table.enforce_styling();
    } else {
        table.force_no_tty();
    }
    table
}

/// Right-aligns columns of numbers, and keeps all but the last column from wrapping.
pub fn align_columns(table: &mut Table, numbers: &[usize]) {
    let last = table.column_count().saturating_sub(1);
    for (i, column) in table.column_iter_mut().enumerate() {
        if numbers.contains(&i) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        if i < last {
            column.set_constraint(ColumnConstraint::ContentWidth);
        } else {
            column.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(16)));
        }
    }
}

/// The text of a table, without trailing blanks.
pub fn text(table: &Table) -> String {
    table.trim_fmt()
}

/// The name of a route in its colour.
pub fn route(route: Route) -> Cell {
    Cell::new(route.name()).fg(Color::AnsiValue(color::of_route(route)))
}

/// The routes of a snapshot: bytes and reasons.
pub fn of_snapshot(paint: &OutputStyle, snapshot: &Snapshot) -> Table {
    let moved = snapshot.rows.iter().fold(0u64, |sum, l| sum.saturating_add(l.bytes));
    // Most programs only read; then the direction is omitted.
    let single_route = snapshot.rows.iter().all(|l| l.direction == Direction::Read);
    let mut head = vec!["route", "pieces", "bytes", "share", "p50", "p99", "why"];
    if !single_route {
        head.insert(0, "");
    }
    let mut table = new(paint, &head);
    for line in &snapshot.rows {
        let time = |q| line.latency.quantile(q).map_or("-".to_owned(), |nanos| format::time(nanos as f64));
        let mut row = vec![
            route(line.route),
            Cell::new(line.pieces),
            Cell::new(format::bytes(line.bytes)),
            Cell::new(share(line.bytes, moved)),
            Cell::new(time(0.5)),
            Cell::new(time(0.99)),
            Cell::new(line.reason),
        ];
        if !single_route {
            row.insert(0, Cell::new(line.direction.name()));
        }
        table.add_row(row);
    }
    let first = usize::from(!single_route) + 1;
    align_columns(&mut table, &[first, first + 1, first + 2, first + 3, first + 4]);
    table
}

/// `37 %`; never 0 for a part or 100 for less than all.
pub fn share(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".to_owned();
    }
    let percent = part as f64 * 100.0 / whole as f64;
    match percent {
        p if p > 0.0 && p < 1.0 => "<1 %".to_owned(),
        p if p > 99.0 && part < whole => ">99 %".to_owned(),
        p => format!("{p:.0} %"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_is_never_rounded_to_0_or_100() {
        assert_eq!(share(1, 1000), "<1 %");
        assert_eq!(share(999, 1000), ">99 %");
        assert_eq!(share(1000, 1000), "100 %");
        assert_eq!(share(0, 1000), "0 %");
        assert_eq!(share(0, 0), "-");
    }
}
