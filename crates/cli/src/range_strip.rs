//! A range of a file as one line of characters: its residency, and the route of each part.
//!
//! ```text
//!   pages  ████████████░░░░░░░░░░▒▒▒▒▒▒▓▓▓▓██████
//!   route  ccccccccccccddddddddddddddddccccmmmmmm
//! ```
//!
//! Every column is the same number of bytes and shows the kind of most of them. Colour repeats what the character
//! shows, so it is not needed.

use spinio_plan::{Extent, Residency, Route, Schedule};

use crate::color::{OutputStyle, TextRole};
use crate::{format, table};

/// A residency's character, its word in the legend.
fn glyph(residency: Residency) -> (char, &'static str) {
    match residency {
        Residency::Clean => ('█', "cached"),
        Residency::Dirty => ('▓', "dirty"),
        Residency::Absent => ('░', "absent"),
        Residency::Unknown => ('?', "unknown"),
    }
}

const MIXED: char = '▒';

/// A route's letter.
fn letter(route: Route) -> char {
    match route {
        Route::Copy => 'c',
        Route::Dma => 'm',
        Route::Store => 's',
        Route::Direct => 'd',
        Route::P2p => 'p',
        Route::Gather => 'g',
    }
}

/// Bytes of each kind that fall into each of `columns` equal parts of the whole.
fn distribute<K: Copy + PartialEq>(runs: &[(u64, K)], columns: usize) -> Vec<Vec<(K, u64)>> {
    let total: u64 = runs.iter().map(|r| r.0).sum();
    let mut out: Vec<Vec<(K, u64)>> = vec![Vec::new(); columns];
    if total == 0 || columns == 0 {
        return out;
    }
    // In 1/columns of a byte, so that a column need not be a whole number of bytes.
    let (scale, column) = (columns as u128, u128::from(total));
    let mut at: u128 = 0;
    for &(len, kind) in runs {
        let end = at + u128::from(len) * scale;
        while at < end {
            let index = ((at / column) as usize).min(columns - 1);
            let until = end.min((index as u128 + 1) * column);
            // At least 1, so that a run shorter than a column still counts.
            let part = (((until - at) / scale) as u64).max(1);
            match out[index].iter_mut().find(|(k, _)| *k == kind) {
                Some((_, bytes)) => *bytes += part,
                None => out[index].push((kind, part)),
            }
            at = until;
        }
    }
    out
}

/// The kind that most bytes of a column have, and whether another has a quarter or more.
fn majority<K: Copy>(column: &[(K, u64)]) -> Option<(K, bool)> {
    let total: u64 = column.iter().map(|c| c.1).sum();
    column.iter().max_by_key(|c| c.1).map(|&(kind, bytes)| (kind, u128::from(bytes) * 4 <= u128::from(total) * 3))
}

/// The residency of a range, as one line of `columns` characters.
pub fn residency(paint: &OutputStyle, extents: &[Extent], columns: usize) -> String {
    let runs: Vec<_> = extents.iter().map(|e| (e.len, e.residency)).collect();
    line(paint, &distribute(&runs, columns), |(residency, mixed)| {
        (if mixed { MIXED } else { glyph(residency).0 }, TextRole::Pages(residency))
    })
}

/// The routes of a schedule, as one line of `columns` characters.
pub fn schedule(paint: &OutputStyle, schedule: &Schedule, columns: usize) -> String {
    let runs: Vec<_> = schedule.segments.iter().map(|s| (s.len, s.route)).collect();
    line(paint, &distribute(&runs, columns), |(route, _)| (letter(route), TextRole::Route(route)))
}

fn line<K: Copy + PartialEq>(
    paint: &OutputStyle,
    columns: &[Vec<(K, u64)>],
    show: impl Fn((K, bool)) -> (char, TextRole),
) -> String {
    let mut out = String::new();
    // One escape code per run of equal colours, not per character.
    let mut run: Option<(TextRole, String)> = None;
    for column in columns {
        let (c, ink) = majority(column).map_or((' ', TextRole::Dim), &show);
        match &mut run {
            Some((now, text)) if *now == ink => text.push(c),
            _ => {
                if let Some((ink, text)) = run.replace((ink, c.to_string())) {
                    out += &paint.text(ink, &text);
                }
            }
        }
    }
    if let Some((ink, text)) = run {
        out += &paint.text(ink, &text);
    }
    out
}

/// The legend of [`residency`], with the bytes of each kind that occurs.
pub fn residency_legend(paint: &OutputStyle, extents: &[Extent]) -> String {
    let total: u64 = extents.iter().map(|e| e.len).sum();
    let mut parts = Vec::new();
    for residency in [Residency::Clean, Residency::Dirty, Residency::Absent, Residency::Unknown] {
        let bytes: u64 = extents.iter().filter(|e| e.residency == residency).map(|e| e.len).sum();
        if bytes > 0 {
            let (c, word) = glyph(residency);
            let c = paint.text(TextRole::Pages(residency), &c.to_string());
            parts.push(format!("{c} {word} {} ({})", format::bytes(bytes), table::share(bytes, total)));
        }
    }
    if parts.len() > 1 {
        parts.push(format!("{MIXED} mixed"));
    }
    parts.join("   ")
}

/// The legend of [`schedule`], with the bytes of each kind that occurs.
pub fn schedule_legend(paint: &OutputStyle, schedule: &Schedule) -> String {
    let total: u64 = schedule.segments.iter().map(|s| s.len).sum();
    let mut parts = Vec::new();
    for route in Route::ALL {
        let bytes: u64 = schedule.segments.iter().filter(|s| s.route == route).map(|s| s.len).sum();
        if bytes > 0 {
            let c = paint.text(TextRole::Route(route), &letter(route).to_string());
            parts.push(format!("{c} {route} {} ({})", format::bytes(bytes), table::share(bytes, total)));
        }
    }
    parts.join("   ")
}

#[cfg(test)]
mod tests {
    use spinio_plan::{Reason, Segment};

    use super::*;

    const PLAIN: OutputStyle = OutputStyle { colour: false, width: 80 };
    const COLOUR: OutputStyle = OutputStyle { colour: true, width: 80 };

    fn extents(runs: &[(u64, Residency)]) -> Vec<Extent> {
        runs.iter().map(|&(len, residency)| Extent { len, residency }).collect()
    }

    #[test]
    fn columns_are_equal_shares() {
        let e = extents(&[(4096, Residency::Clean), (8192, Residency::Absent), (4096, Residency::Dirty)]);
        assert_eq!(residency(&PLAIN, &e, 8), "██░░░░▓▓");
        assert_eq!(residency(&PLAIN, &e, 4), "█░░▓");
    }

    #[test]
    fn column_of_two_residencies_is_mixed() {
        let every_other: Vec<_> = (0..64).map(|i| (4096, [Residency::Clean, Residency::Absent][i % 2])).collect();
        assert_eq!(residency(&PLAIN, &extents(&every_other), 4), "▒▒▒▒");
        let mostly = extents(&[(15 * 4096, Residency::Absent), (4096, Residency::Clean)]);
        assert_eq!(residency(&PLAIN, &mostly, 1), "░");
    }

    #[test]
    fn more_columns_than_bytes_and_empty_range() {
        assert_eq!(residency(&PLAIN, &extents(&[(3, Residency::Clean)]), 10), "██████████");
        assert_eq!(residency(&PLAIN, &[], 4), "    ");
        assert_eq!(residency(&PLAIN, &extents(&[(u64::MAX, Residency::Clean)]), 3), "███");
    }

    #[test]
    fn colour_code_is_written_once_per_run() {
        let e = extents(&[(8192, Residency::Clean), (8192, Residency::Absent)]);
        assert_eq!(residency(&COLOUR, &e, 4), "\x1b[32m██\x1b[0m\x1b[90m░░\x1b[0m");
    }

    #[test]
    fn routes_have_letters_and_legend() {
        let segment = |offset, len, route| Segment { offset, len, route, reason: Reason::Cached, refused: None };
        let mut s = Schedule::default();
        s.segments = vec![segment(0, 1 << 20, Route::Copy), segment(1 << 20, 3 << 20, Route::Direct)];
        assert_eq!(schedule(&PLAIN, &s, 8), "ccdddddd");
        assert_eq!(schedule_legend(&PLAIN, &s), "c copy 1 MiB (25 %)   d direct 3 MiB (75 %)");
    }

    #[test]
    fn legend_lists_present_kinds_only() {
        let e = extents(&[(1 << 20, Residency::Clean), (1 << 20, Residency::Absent)]);
        assert_eq!(residency_legend(&PLAIN, &e), "█ cached 1 MiB (50 %)   ░ absent 1 MiB (50 %)   ▒ mixed");
        assert_eq!(residency_legend(&PLAIN, &e[..1]), "█ cached 1 MiB (100 %)");
    }

    #[test]
    fn route_letters_are_unique() {
        let mut letters: Vec<_> = Route::ALL.into_iter().map(letter).collect();
        letters.sort_unstable();
        letters.dedup();
        assert_eq!(letters.len(), Route::ALL.len());
    }
}
