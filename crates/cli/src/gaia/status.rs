//! `spinio gaia status`: what the mounts of GAIA, and the daemon of leased files, hold.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use comfy_table::Cell;
use serde_json::json;
use spinio_gaiad::{DaemonStatus, FileStatus, LeasedFileStatus, MountStatus, PeerRefusal, UserStatus, UserUse};

use super::held::{Held, ONLY_ROOT};
use crate::color::{OutputStyle, TextRole};
use crate::exit::{self, Exit};
use crate::{format, output, table};

const PAGE: u64 = 4096;

/// What `spinio gaia status` takes.
#[derive(Debug, Args)]
pub struct Status {
    /// Where GAIA is mounted [default: all mounts of this user, and the names of root's]
    directory: Option<PathBuf>,
    /// The socket of the daemon of leased files [default: as for serve]
    #[arg(long, value_name = "PATH", conflicts_with = "directory")]
    socket: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs it. A mount that does not answer is reported after the others.
pub fn run(options: &Status) -> anyhow::Result<Exit> {
    let Held { mounts, roots, daemons, errors } = Held::ask(options.directory.as_ref(), options.socket.as_ref())?;
    if options.json {
        let mut all = as_json(&mounts);
        all.extend(roots.iter().map(|point| json!({ "mount": point.to_string_lossy() })));
        all.extend(daemons_as_json(&daemons));
        output::print(&format!("{:#}\n", serde_json::Value::Array(all)))?;
    } else {
        let paint = OutputStyle::stdout();
        let parts = [render(&mounts, &paint), render_roots(&roots, &paint), render_daemons(&daemons, &paint)];
        let parts: Vec<_> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        output::print(&parts.join("\n"))?;
        if parts.is_empty() && errors.is_empty() {
            output::print(
                "GAIA is mounted nowhere here, and no daemon for leased files is running: `spinio gaia mount DIR` \
                 mounts it, `spinio gaia serve` starts the daemon\n",
            )?;
        }
    }
    if errors.is_empty() { Ok(Exit::Ok) } else { Err(exit::error(Exit::Failed, errors.join("\n"))) }
}

fn as_json(found: &[(PathBuf, MountStatus)]) -> Vec<serde_json::Value> {
    let file = |file: &FileStatus| {
        json!({
            "path": file.path, "maps": file.maps, "maps_in_place": file.in_place, "processes": file.owners, "unwritten_bytes": file.dirty * PAGE,
            "releases": file.stats.commits, "pages_released": file.stats.published, "pages_merged": file.stats.merged,
            "pages_unchanged": file.stats.unchanged, "pages_being_invalidated": file.stats.twins,
        })
    };
    let user = |user: &UserStatus| {
        json!({
            "user": user.user, "maps": user.has.connections, "mapped_bytes": user.has.mapped * PAGE,
            "memory_bytes": user.has.used * PAGE,
        })
    };
    let mounts = found.iter().map(|(point, status)| {
        let (server, limits) = (&status.server, &status.server.limits);
        json!({
            "mount": point.to_string_lossy(), "server_pid": server.pid, "server_seconds": server.seconds,
            "maps": server.connections, "mapped_bytes": server.mapped * PAGE,
            "maps_limit": limits.connections, "mapped_limit_bytes": limits.mapped * PAGE,
            "memory_bytes": server.used * PAGE, "memory_limit_bytes": server.slots * PAGE,
            "user_maps_limit": limits.of_user.connections, "user_mapped_limit_bytes": limits.of_user.mapped * PAGE,
            "user_memory_limit_bytes": limits.of_user.used * PAGE,
            "users": status.users.iter().map(user).collect::<Vec<_>>(),
            "servers_replaced": server.replaced, "releases": server.totals.commits,
            "released_bytes": server.totals.published * PAGE, "pages_merged": server.totals.merged,
            "invalidations": server.totals.invalidations, "pages_invalidated": server.totals.invalidated,
            "cpu_read_bytes_from_devices": server.totals.from_devices * PAGE,
            "files": status.files.iter().map(file).collect::<Vec<_>>(),
        })
    });
    mounts.collect()
}

fn render(found: &[(PathBuf, MountStatus)], paint: &OutputStyle) -> String {
    let mut s = String::new();
    for (point, MountStatus { server, users, files }) in found {
        if !s.is_empty() {
            s.push('\n');
        }
        let _ = writeln!(s, "{}", paint.text(TextRole::Head, &point.display().to_string()));
        let since = format::time(server.seconds as f64 * 1e9);
        let replaced = match server.replaced {
            0 => String::new(),
            1 => ", in place of one that died".to_owned(),
            n => format!(", after {n} that died"),
        };
        let _ = writeln!(s, "  server  process {}, for {since}{replaced}", server.pid);
        let limits = &server.limits;
        let [mapped, most, used, limit] =
            [server.mapped, limits.mapped, server.used, server.slots].map(|pages| format::bytes(pages * PAGE));
        let _ = writeln!(
            s,
            "  maps    {} of at most {}, of {mapped} of at most {most}",
            server.connections, limits.connections
        );
        let _ = writeln!(s, "  memory  {used} of at most {limit} for released bytes that are not in their files yet");
        s += &render_users(users, &limits.of_user);
        if !files.is_empty() {
            let _ = writeln!(s, "\n{}", table::text(&file_table(files, paint)));
        }
    }
    s
}

/// Who has how much, where several users share it.
fn render_users(users: &[UserStatus], most: &UserUse) -> String {
    if users.len() < 2 {
        return String::new();
    }
    let words = |of: &UserUse, bound: &str| {
        let [mapped, used] = [of.mapped, of.used].map(|pages| format::bytes(pages * PAGE));
        format!("maps {bound}{}, of {bound}{mapped}; memory {bound}{used}", of.connections)
    };
    let user = |user: &UserStatus| format!("  user {}: {}\n", user.user, words(&user.has, ""));
    let lines: String = users.iter().map(user).collect();
    format!("{lines}  each user: {}\n", words(most, "at most "))
}

fn render_roots(points: &[PathBuf], paint: &OutputStyle) -> String {
    let row = |point: &PathBuf| {
        let head = paint.text(TextRole::Head, &point.display().to_string());
        format!("{head}\n  {ONLY_ROOT}\n")
    };
    points.iter().map(row).collect::<Vec<_>>().join("\n")
}

fn daemons_as_json(daemons: &[(PathBuf, DaemonStatus)]) -> impl Iterator<Item = serde_json::Value> {
    let file = |file: &LeasedFileStatus| {
        json!({
            "path": file.path, "user": file.user, "device": uuid(&file.device), "maps": file.maps,
            "chunks": file.chunks, "held_bytes": file.bytes, "size": file.size,
            "bytes_from_peer": file.peer_bytes, "peer_refused": file.refused.map(PeerRefusal::sentence),
        })
    };
    let share = |((user, device), bytes): (&(u32, [u8; 16]), &u64)| json!({ "user": user, "device": uuid(device), "held_bytes": bytes });
    daemons.iter().map(move |(socket, daemon)| {
        json!({
            "serve": socket.to_string_lossy(), "pid": daemon.pid, "seconds": daemon.seconds, "maps": daemon.maps,
            "held_bytes": daemon.bytes, "limit_bytes": daemon.limit,
            "users": shares(daemon).iter().map(share).collect::<Vec<_>>(),
            "files": daemon.files.iter().map(file).collect::<Vec<_>>(),
        })
    })
}

/// What each user has of each device: the limit is for these.
fn shares(daemon: &DaemonStatus) -> BTreeMap<(u32, [u8; 16]), u64> {
    let mut held = BTreeMap::new();
    daemon.files.iter().for_each(|file| *held.entry((file.user, file.device)).or_default() += file.bytes);
    held
}

/// A device as CUDA's tools write it, or the name of an emulated one.
pub(super) fn uuid(bytes: &[u8; 16]) -> String {
    if let Some([number @ .., _, _, _]) = bytes.strip_prefix(b"spinio-emu\0\0") {
        return format!("emulated:{}", number[0]);
    }
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

fn render_daemons(daemons: &[(PathBuf, DaemonStatus)], paint: &OutputStyle) -> String {
    let mut s = String::new();
    for (socket, daemon) in daemons {
        let _ = writeln!(s, "{}", paint.text(TextRole::Head, &socket.display().to_string()));
        let since = format::time(daemon.seconds as f64 * 1e9);
        let _ = writeln!(s, "  daemon  process {}, for {since}", daemon.pid);
        let _ = writeln!(s, "  maps    {}, read-only, of {} files", daemon.maps, daemon.files.len());
        let held = shares(daemon);
        let limit = daemon
            .limit
            .map_or_else(String::new, |limit| format!(", at most {} of each GPU for each user", format::bytes(limit)));
        let _ = writeln!(s, "  memory  {} of GPUs{limit}", format::bytes(daemon.bytes));
        for ((user, device), bytes) in held.iter().filter(|_| held.len() > 1) {
            let _ = writeln!(s, "  user {user}: {} of {}", format::bytes(*bytes), uuid(device));
        }
        if !daemon.files.is_empty() {
            // Most machines have one GPU, and a narrow terminal has little room for the path.
            let any_peer = daemon.files.iter().any(|file| file.peer_bytes > 0);
            let shown = |column: usize| column != 2 || any_peer;
            let head = ["maps", "held", "from a GPU", "of", "chunks", "user", "device", "file"];
            let head: Vec<&str> = (0..).zip(head).filter(|(at, _)| shown(*at)).map(|(_, name)| name).collect();
            let mut table = table::new(paint, &head);
            for file in &daemon.files {
                let [bytes, peer, size] = [file.bytes, file.peer_bytes, file.size].map(format::bytes);
                let chunks = file.chunks.to_string();
                let (maps, user) = (file.maps.to_string(), file.user.to_string());
                let device = uuid(&file.device);
                let row = [maps, bytes, peer, size, chunks, user, device, format::printable(&file.path)];
                table.add_row((0..).zip(row).filter(|(at, _)| shown(*at)).map(|(_, text)| Cell::new(text)));
            }
            let numbers: Vec<usize> = (0..head.len() - 2).collect();
            table::align_columns(&mut table, &numbers);
            let _ = writeln!(s, "\n{}", table::text(&table));
            for file in &daemon.files {
                let Some(why) = file.refused else { continue };
                let (path, device) = (format::printable(&file.path), uuid(&file.device));
                let _ = writeln!(s, "  {path} on {device} was not copied from another GPU: {}", why.sentence());
            }
        }
    }
    s
}

fn file_table(files: &[FileStatus], paint: &OutputStyle) -> comfy_table::Table {
    let head = ["maps", "in place", "not in the file yet", "releases", "pages merged", "file"];
    let mut table = table::new(paint, &head);
    for FileStatus { path, maps, in_place, dirty, stats, .. } in files {
        let columns = [
            maps.to_string(),
            in_place.to_string(),
            format::bytes(dirty * PAGE),
            stats.commits.to_string(),
            stats.merged.to_string(),
            format::printable(path),
        ];
        table.add_row(columns.map(Cell::new));
    }
    table::align_columns(&mut table, &[0, 1, 2, 3, 4]);
    table
}

#[cfg(test)]
mod tests {
    use spinio_gaiad::{ServerLimits, ServerStatus, Stats, Totals};

    use super::*;

    fn found() -> Vec<(PathBuf, MountStatus)> {
        let server = ServerStatus {
            pid: 7,
            seconds: 90,
            connections: 2,
            mapped: 512,
            used: 3,
            slots: 1 << 14,
            replaced: 2,
            totals: Totals { published: 9, ..Totals::default() },
            limits: ServerLimits {
                connections: 10,
                mapped: 1024,
                of_user: UserUse { connections: 5, mapped: 512, used: 7 << 11 },
            },
        };
        let user = UserStatus { user: 7, has: UserUse { connections: 2, mapped: 512, used: 3 } };
        let stats = Stats { commits: 5, merged: 1, ..Stats::default() };
        let file = FileStatus { path: "/graph.bin".into(), maps: 2, in_place: 1, owners: 1, dirty: 3, stats };
        vec![("/data".into(), MountStatus { server, users: vec![user], files: vec![file] })]
    }

    #[test]
    fn status_names_mount_server_memory_and_files() {
        let text = render(&found(), &OutputStyle { colour: false, width: 100 });
        for part in [
            "/data\n",
            "process 7",
            "after 2 that died",
            "2 of at most 10, of 2 MiB of at most 4 MiB",
            "12 KiB of at most 64 MiB",
        ] {
            assert!(text.contains(part), "no `{part}` in\n{text}");
        }
        assert!(!text.contains("user"), "one has all:\n{text}");
        let row: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(row, ["2", "1", "12", "KiB", "5", "1", "/graph.bin"]);
    }

    #[test]
    fn users_who_share_a_mount_are_listed_with_their_limits() {
        let mut mounts = found();
        mounts[0].1.users.push(UserStatus { user: 8, has: UserUse { connections: 1, mapped: 1, used: 0 } });
        let text = render(&mounts, &OutputStyle { colour: false, width: 100 });
        for line in [
            "  user 7: maps 2, of 2 MiB; memory 12 KiB\n",
            "  user 8: maps 1, of 4 KiB; memory 0 B\n",
            "  each user: maps at most 5, of at most 2 MiB; memory at most 56 MiB\n",
        ] {
            assert!(text.contains(line), "no `{line}` in\n{text}");
        }
        let json = as_json(&mounts);
        assert_eq!(
            json[0]["users"][0],
            json!({"user": 7, "maps": 2, "mapped_bytes": 2 << 20, "memory_bytes": 12 << 10})
        );
        assert_eq!((&json[0]["user_memory_limit_bytes"], &json[0]["maps_limit"]), (&json!(56 << 20), &json!(10)));
    }

    #[test]
    fn daemon_and_its_files_are_listed() {
        let mut device = *b"spinio-emu\0\0\0\0\0\0";
        device[12] = 3;
        assert_eq!(uuid(&device), "emulated:3");
        let device = 0x0011_2233_4455_6677_8899_aabb_ccdd_eeff_u128.to_be_bytes();
        let (peer_bytes, refused) = (2 << 20, Some(PeerRefusal::NoAccess));
        let (path, bytes) = ("/m".into(), 6 << 20);
        let file = LeasedFileStatus { path, user: 7, device, maps: 2, chunks: 3, bytes, peer_bytes, refused, size: 5 };
        let daemon =
            DaemonStatus { pid: 9, maps: 2, bytes: 6 << 20, limit: Some(8 << 20), files: vec![file], seconds: 1 };
        let text = render_daemons(&[("/s".into(), daemon.clone())], &OutputStyle { colour: false, width: 120 });
        for part in [
            "process 9",
            "6 MiB of GPUs, at most 8 MiB of each GPU for each user",
            "GPU-00112233-4455-6677-8899-aabbccddeeff",
            "/m",
            "2 MiB",
            "not copied from another GPU: the devices cannot",
        ] {
            assert!(text.contains(part), "no `{part}` in\n{text}");
        }
        assert!(!text.contains("user 7:"), "one has all:\n{text}");
        let mut two = daemon.clone();
        two.files.push(LeasedFileStatus { user: 8, bytes: 1 << 20, ..two.files[0].clone() });
        two.files.push(LeasedFileStatus { bytes: 1 << 20, ..two.files[0].clone() });
        let text = render_daemons(&[("/s".into(), two)], &OutputStyle { colour: false, width: 120 });
        assert!(text.contains("user 7: 7 MiB of GPU-0011") && text.contains("user 8: 1 MiB of GPU-0011"), "{text}");
        let json: Vec<_> = daemons_as_json(&[("/s".into(), daemon)]).collect();
        assert_eq!(json[0]["files"][0]["bytes_from_peer"], 2 << 20);
        assert_eq!((&json[0]["files"][0]["held_bytes"], &json[0]["limit_bytes"]), (&json!(6 << 20), &json!(8 << 20)));
    }

    #[test]
    fn names_of_files_reach_no_terminal_raw() {
        let plain = OutputStyle { colour: false, width: 120 };
        let mut mounts = found();
        mounts[0].1.files[0].path = "/\u{1b}[2J".into();
        let text = render(&mounts, &plain);
        assert!(text.contains("/?[2J") && !text.contains('\u{1b}'), "{text:?}");
        let refused = Some(PeerRefusal::NoAccess);
        let (path, device) = ("/\u{9b}2J".to_owned(), [0; 16]);
        let file =
            LeasedFileStatus { path, user: 7, device, maps: 2, chunks: 3, bytes: 1, peer_bytes: 0, refused, size: 5 };
        let daemon = DaemonStatus { files: vec![file], ..DaemonStatus::default() };
        let text = render_daemons(&[("/s".into(), daemon)], &plain);
        assert!(text.matches("/?2J").count() == 2 && !text.contains('\u{9b}'), "{text:?}");
        assert_eq!(as_json(&mounts)[0]["files"][0]["path"], "/\u{1b}[2J", "JSON escapes it");
    }

    #[test]
    fn json_has_the_same_in_bytes() {
        let json = as_json(&found());
        assert_eq!(json[0]["memory_limit_bytes"], 64 << 20);
        assert_eq!(json[0]["files"][0]["unwritten_bytes"], 3 * 4096);
        assert_eq!((&json[0]["servers_replaced"], &json[0]["released_bytes"]), (&json!(2), &json!(9 * 4096)));
        assert_eq!(json[0]["files"][0]["path"], "/graph.bin");
    }
}
