//! `spinio gaia status`: what the mounts of GAIA hold.

use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use comfy_table::Cell;
use serde_json::json;
use spinio_gaiad::{FileStatus, MountStatus};

use crate::color::{OutputStyle, TextRole};
use crate::exit::{self, Exit};
use crate::{format, output, table};

const PAGE: u64 = 4096;

/// What `spinio gaia status` takes.
#[derive(Debug, Args)]
pub struct Status {
    /// Where GAIA is mounted [default: all mounts]
    directory: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs it. A mount that does not answer is reported after the others.
pub fn run(options: &Status) -> anyhow::Result<Exit> {
    let points = match &options.directory {
        Some(directory) => vec![directory.clone()],
        None => spinio_gaiad::mounts()?.into_iter().map(|mount| mount.point).collect(),
    };
    let (mut found, mut errors) = (Vec::new(), Vec::new());
    for point in points {
        match spinio_gaiad::status(&point) {
            Ok(status) => found.push((point, status)),
            Err(error) => errors.push(error.to_string()),
        }
    }
    if options.json {
        output::print(&format!("{:#}\n", as_json(&found)))?;
    } else {
        output::print(&render(&found, &OutputStyle::stdout()))?;
        if found.is_empty() && errors.is_empty() {
            output::print("GAIA is mounted nowhere here: `spinio gaia mount DIR` mounts it\n")?;
        }
    }
    if errors.is_empty() { Ok(Exit::Ok) } else { Err(exit::error(Exit::Failed, errors.join("\n"))) }
}

fn as_json(found: &[(PathBuf, MountStatus)]) -> serde_json::Value {
    let file = |file: &FileStatus| {
        json!({
            "path": file.path, "maps": file.maps, "unwritten_bytes": file.dirty * PAGE,
            "releases": file.stats.commits, "pages_merged": file.stats.merged,
            "pages_unchanged": file.stats.unchanged, "pages_being_invalidated": file.stats.twins,
        })
    };
    let mounts = found.iter().map(|(point, status)| {
        let server = &status.server;
        json!({
            "mount": point.to_string_lossy(), "server_pid": server.pid, "server_seconds": server.seconds,
            "maps": server.connections, "mapped_bytes": server.mapped * PAGE,
            "memory_bytes": server.used * PAGE, "memory_limit_bytes": server.slots * PAGE,
            "files": status.files.iter().map(file).collect::<Vec<_>>(),
        })
    });
    mounts.collect()
}

fn render(found: &[(PathBuf, MountStatus)], paint: &OutputStyle) -> String {
    let mut s = String::new();
    for (point, MountStatus { server, files }) in found {
        if !s.is_empty() {
            s.push('\n');
        }
        let _ = writeln!(s, "{}", paint.text(TextRole::Head, &point.display().to_string()));
        let since = format::time(server.seconds as f64 * 1e9);
        let _ = writeln!(s, "  server  process {}, for {since}", server.pid);
        let _ = writeln!(s, "  maps    {}, of {}", server.connections, format::bytes(server.mapped * PAGE));
        let (used, limit) = (format::bytes(server.used * PAGE), format::bytes(server.slots * PAGE));
        let _ = writeln!(s, "  memory  {used} of at most {limit} for released bytes that are not in their files yet");
        if !files.is_empty() {
            let _ = writeln!(s, "\n{}", table::text(&file_table(files, paint)));
        }
    }
    s
}

fn file_table(files: &[FileStatus], paint: &OutputStyle) -> comfy_table::Table {
    let head = ["maps", "not in the file yet", "releases", "pages merged", "file"];
    let mut table = table::new(paint, &head);
    for FileStatus { path, maps, dirty, stats } in files {
        let columns = [
            maps.to_string(),
            format::bytes(dirty * PAGE),
            stats.commits.to_string(),
            stats.merged.to_string(),
            path.clone(),
        ];
        table.add_row(columns.map(Cell::new));
    }
    table::align_columns(&mut table, &[0, 1, 2, 3]);
    table
}

#[cfg(test)]
mod tests {
    use spinio_gaiad::{ServerStatus, Stats};

    use super::*;

    fn found() -> Vec<(PathBuf, MountStatus)> {
        let server = ServerStatus { pid: 7, seconds: 90, connections: 2, mapped: 512, used: 3, slots: 1 << 14 };
        let stats = Stats { commits: 5, merged: 1, ..Stats::default() };
        let file = FileStatus { path: "/graph.bin".into(), maps: 2, dirty: 3, stats };
        vec![("/data".into(), MountStatus { server, files: vec![file] })]
    }

    #[test]
    fn status_names_mount_server_memory_and_files() {
        let text = render(&found(), &OutputStyle { colour: false, width: 100 });
        for part in ["/data\n", "process 7", "2, of 2 MiB", "12 KiB of at most 64 MiB"] {
            assert!(text.contains(part), "no `{part}` in\n{text}");
        }
        let row: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(row, ["2", "12", "KiB", "5", "1", "/graph.bin"]);
    }

    #[test]
    fn json_has_the_same_in_bytes() {
        let json = as_json(&found());
        assert_eq!(json[0]["memory_limit_bytes"], 64 << 20);
        assert_eq!(json[0]["files"][0]["unwritten_bytes"], 3 * 4096);
        assert_eq!(json[0]["files"][0]["path"], "/graph.bin");
    }
}
