//! Whether LD_PRELOAD affects a program, determined from its file.
//!
//! ```text
//!   CMD ─ on PATH? ─ starts with #! ──> its interpreter, and so on
//!                  └ ELF ─ 64-bit x86-64? ─ PT_INTERP? ─ glibc's loader? ─ setuid, capabilities?
//!                                                                        └ DT_NEEDED: AddressSanitizer's runtime?
//! ```
//!
//! The result is only a warning: LD_PRELOAD may affect the program's children, so the program is run nevertheless
//! unless `--strict` was given.
//!
//! Known flaws: of a program that starts another (`env`, `sudo`, `sh -c`) only the program itself is checked, except
//! for `#!/usr/bin/env X`; `sudo` clears LD_PRELOAD and is detected by its setuid bit. A sanitizer's runtime that only
//! a library of the program needs is not detected.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Why LD_PRELOAD does not affect a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// No dynamic loader, so nothing reads LD_PRELOAD.
    Static,
    /// Linked against another C library, whose loader cannot load this library.
    OtherLibc(String),
    /// Not a 64-bit x86-64 program.
    WrongArchitecture,
    /// The loader ignores LD_PRELOAD if the program gains privileges.
    SetId,
    /// As above, through file capabilities.
    Capabilities,
    /// Makes its system calls itself.
    Go,
    /// Needs AddressSanitizer's shared runtime, which refuses to start if another library precedes it.
    Asan(String),
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::Static => f.write_str("is statically linked: it has no loader that would read LD_PRELOAD"),
            Obstacle::OtherLibc(loader) => write!(f, "is loaded by {loader}: libspinio.so needs glibc"),
            Obstacle::WrongArchitecture => {
                f.write_str("is no 64-bit x86-64 program: libspinio.so does not fit into it")
            }
            Obstacle::SetId => f.write_str("is setuid or setgid: the loader ignores LD_PRELOAD there"),
            Obstacle::Capabilities => f.write_str("has file capabilities: the loader ignores LD_PRELOAD there"),
            Obstacle::Asan(runtime) => write!(
                f,
                "is built with AddressSanitizer and does not start under a preload: {runtime} must be the first library. \
                 To run it under SPIN name that first: LD_PRELOAD={runtime} spinio run ..."
            ),
            Obstacle::Go => f.write_str("is a Go program: it makes system calls itself, past the C library"),
        }
    }
}

/// An obstacle in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The program, or its interpreter.
    pub path: PathBuf,
    /// The obstacle.
    pub obstacle: Obstacle,
}

impl Finding {
    /// Whether preloading would do harm, not only have no effect.
    pub fn is_harmful(&self) -> bool {
        matches!(self.obstacle, Obstacle::OtherLibc(_) | Obstacle::Asan(_))
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.path.display(), self.obstacle)
    }
}

/// The file that `execvp` would start.
pub fn resolve(command: &OsStr) -> io::Result<PathBuf> {
    resolve_on(command, std::env::var_os("PATH").as_deref())
}

fn resolve_on(command: &OsStr, path: Option<&OsStr>) -> io::Result<PathBuf> {
    if command.as_bytes().contains(&b'/') {
        return std::fs::metadata(command).map(|_| PathBuf::from(command));
    }
    let mut denied = false;
    for dir in std::env::split_paths(path.unwrap_or(OsStr::new("/bin:/usr/bin"))) {
        let file = if dir.as_os_str().is_empty() { PathBuf::from(command) } else { dir.join(command) };
        match std::fs::metadata(&file) {
            Ok(meta) if meta.is_file() && meta.permissions().mode() & 0o111 != 0 => return Ok(file),
            Ok(meta) => denied |= meta.is_file(),
            Err(e) => denied |= e.kind() == io::ErrorKind::PermissionDenied,
        }
    }
    Err(match denied {
        true => io::Error::new(io::ErrorKind::PermissionDenied, "what PATH finds may not be run"),
        false => io::Error::new(io::ErrorKind::NotFound, "no such program on PATH"),
    })
}

/// The obstacle that prevents SPIN from serving this program; `None` if none is known. A file that cannot be read may
/// still be run: then none is known.
pub fn find_obstacle(program: &Path) -> Option<Finding> {
    let mut at = program.to_owned();
    // The kernel itself follows four interpreters and no more.
    for _ in 0..5 {
        if let Some(obstacle) = is_secure_exec(&at) {
            return Some(Finding { path: at, obstacle });
        }
        // Only what can be executed is opened: a named pipe would wait for a writer.
        if !std::fs::metadata(&at).ok()?.is_file() {
            return None;
        }
        let file = File::open(&at).ok()?;
        let mut head = [0u8; 256];
        let n = file.read_at(&mut head, 0).ok()?;
        match interpreter(&head[..n]) {
            Some(next) => at = next,
            None => return elf(&file, &head[..n]).map(|obstacle| Finding { path: at, obstacle }),
        }
    }
    None
}

/// The kernel sets AT_SECURE for the loader if IDs or capabilities change.
fn is_secure_exec(path: &Path) -> Option<Obstacle> {
    let meta = std::fs::metadata(path).ok()?;
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let mode = meta.permissions().mode();
    if (mode & 0o4000 != 0 && meta.uid() != uid) || (mode & 0o2010 == 0o2010 && meta.gid() != gid) {
        return Some(Obstacle::SetId);
    }
    let mut value = [0u8; 64];
    let has_capabilities = rustix::fs::getxattr(path, c"security.capability", &mut value).is_ok_and(|n| n > 0);
    (has_capabilities && uid != 0).then_some(Obstacle::Capabilities)
}

/// The interpreter of a script. `#!/usr/bin/env X` is X: `env` itself is never of interest.
fn interpreter(head: &[u8]) -> Option<PathBuf> {
    let line = head.strip_prefix(b"#!")?.split(|b| *b == b'\n').next()?;
    let mut words = line.split(|b| matches!(b, b' ' | b'\t')).filter(|w| !w.is_empty());
    let first = Path::new(OsStr::from_bytes(words.next()?)).to_owned();
    if first.file_name() == Some(OsStr::new("env")) {
        let program = words.find(|w| !w.starts_with(b"-") && !w.contains(&b'='))?;
        return resolve(OsStr::from_bytes(program)).ok();
    }
    Some(first)
}

/// Reads an ELF file's program headers, as far as they determine how it is loaded.
fn elf(file: &File, head: &[u8]) -> Option<Obstacle> {
    const PT_INTERP: u32 = 3;
    const PT_NOTE: u32 = 4;
    const PT_LOAD: u32 = 1;
    const PT_DYNAMIC: u32 = 2;
    const X86_64: u16 = 62;
    if head.len() < 64 || !head.starts_with(b"\x7fELF") {
        return None;
    }
    if head[4] != 2 || u16_at(head, 18) != X86_64 {
        return Some(Obstacle::WrongArchitecture);
    }
    let (table, size, count) = (u64_at(head, 32), u64::from(u16_at(head, 54)), u64::from(u16_at(head, 56)));
    let (mut loader, mut is_go) = (None, false);
    let (mut dynamic, mut loads) = (Vec::new(), Vec::new());
    for i in 0..count.min(128) {
        let mut entry = [0u8; 56];
        file.read_exact_at(&mut entry, table.checked_add(i * size)?).ok()?;
        let (kind, offset, len) = (u32_at(&entry, 0), u64_at(&entry, 8), u64_at(&entry, 32));
        let mut content = vec![0u8; len.min(4096) as usize];
        match kind {
            PT_LOAD => loads.push(Load { address: u64_at(&entry, 16), offset, len }),
            PT_DYNAMIC => {
                dynamic = vec![0u8; len.min(64 << 10) as usize];
                file.read_exact_at(&mut dynamic, offset).ok()?;
            }
            PT_INTERP | PT_NOTE if file.read_exact_at(&mut content, offset).is_ok() => {
                if kind == PT_INTERP {
                    content.truncate(content.iter().position(|b| *b == 0).unwrap_or(content.len()));
                    loader = Some(OsString::from(OsStr::from_bytes(&content)));
                } else {
                    // A note: name length, content length, type, name.
                    is_go |= content.get(12..16) == Some(b"Go\0\0");
                }
            }
            _ => {}
        }
    }
    match loader {
        None => Some(Obstacle::Static),
        Some(name) if !name.as_bytes().windows(8).any(|w| w == b"ld-linux") => {
            Some(Obstacle::OtherLibc(name.to_string_lossy().into_owned()))
        }
        Some(_) if is_go => Some(Obstacle::Go),
        Some(_) => asan(&needed(file, &dynamic, &loads).unwrap_or_default()).map(Obstacle::Asan),
    }
}

/// A part of the file that is mapped.
struct Load {
    address: u64,
    offset: u64,
    len: u64,
}

/// The libraries that an ELF file needs, by its dynamic section.
fn needed(file: &File, dynamic: &[u8], loads: &[Load]) -> Option<Vec<String>> {
    const DT_NEEDED: u64 = 1;
    const DT_STRTAB: u64 = 5;
    const DT_STRSZ: u64 = 10;
    const MOST: u64 = 64 << 20;
    let entries = || dynamic.chunks_exact(16).map(|entry| (u64_at(entry, 0), u64_at(entry, 8)));
    let value = |tag: u64| entries().find(|&(t, _)| t == tag).map(|(_, value)| value);
    let address = value(DT_STRTAB)?;
    let load = loads.iter().find(|l| (l.address..l.address.saturating_add(l.len)).contains(&address))?;
    let mut strings = vec![0u8; value(DT_STRSZ)?.min(MOST).min(file.metadata().ok()?.len()) as usize];
    file.read_exact_at(&mut strings, load.offset.checked_add(address - load.address)?).ok()?;
    let name = |at: u64| {
        let text = strings.get(usize::try_from(at).ok()?..)?.split(|b| *b == 0).next()?;
        Some(String::from_utf8_lossy(text).into_owned())
    };
    Some(entries().filter(|&(tag, _)| tag == DT_NEEDED).filter_map(|(_, at)| name(at)).collect())
}

/// AddressSanitizer's shared runtime (GCC's, Clang's), unless the user preloads one.
fn asan(needed: &[String]) -> Option<String> {
    let is_asan = |name: &str| name.starts_with("libasan.so") || name.starts_with("libclang_rt.asan");
    let preloaded = std::env::var_os("LD_PRELOAD").unwrap_or_default();
    let mut preloaded = preloaded.as_bytes().split(|b| matches!(b, b':' | b' ' | b'\t' | b'\n'));
    let file_name =
        |entry: &[u8]| String::from_utf8_lossy(entry.rsplit(|b| *b == b'/').next().unwrap_or(entry)).into_owned();
    if preloaded.any(|entry| is_asan(&file_name(entry))) {
        return None;
    }
    needed.iter().find(|name| is_asan(name)).cloned()
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).and_then(|b| b.try_into().ok()).map_or(0, u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A 64-bit ELF file with these program headers.
    fn image(machine: u16, class: u8, segments: &[(u32, &[u8])]) -> tempfile::NamedTempFile {
        let mut bytes = vec![0u8; 64 + 56 * segments.len()];
        bytes[..5].copy_from_slice(&[0x7f, b'E', b'L', b'F', class]);
        bytes[18..20].copy_from_slice(&machine.to_le_bytes());
        bytes[32..40].copy_from_slice(&64u64.to_le_bytes());
        bytes[54..56].copy_from_slice(&56u16.to_le_bytes());
        bytes[56..58].copy_from_slice(&(segments.len() as u16).to_le_bytes());
        for (i, (kind, content)) in segments.iter().enumerate() {
            let (at, offset) = (64 + 56 * i, bytes.len() as u64);
            bytes[at..at + 4].copy_from_slice(&kind.to_le_bytes());
            bytes[at + 8..at + 16].copy_from_slice(&offset.to_le_bytes());
            bytes[at + 32..at + 40].copy_from_slice(&(content.len() as u64).to_le_bytes());
            bytes.extend_from_slice(content);
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        file
    }

    fn obstacle(file: &tempfile::NamedTempFile) -> Option<Obstacle> {
        find_obstacle(file.path()).map(|f| f.obstacle)
    }

    const GLIBC: (u32, &[u8]) = (3, b"/lib64/ld-linux-x86-64.so.2\0");

    #[test]
    fn elf_obstacle_depends_on_loader() {
        assert_eq!(obstacle(&image(62, 2, &[GLIBC])), None);
        assert_eq!(obstacle(&image(62, 2, &[(1, b"x")])), Some(Obstacle::Static));
        assert_eq!(obstacle(&image(62, 1, &[GLIBC])), Some(Obstacle::WrongArchitecture));
        assert_eq!(obstacle(&image(183, 2, &[GLIBC])), Some(Obstacle::WrongArchitecture));
        assert_eq!(
            obstacle(&image(62, 2, &[(3, b"/lib/ld-musl-x86_64.so.1\0")])),
            Some(Obstacle::OtherLibc("/lib/ld-musl-x86_64.so.1".into()))
        );
        let note = b"\x04\0\0\0\x04\0\0\0\x04\0\0\0Go\0\0abcd";
        assert_eq!(obstacle(&image(62, 2, &[GLIBC, (4, note)])), Some(Obstacle::Go));
    }

    #[test]
    fn damaged_elf_does_not_panic() {
        let file = image(62, 2, &[GLIBC]);
        let whole = std::fs::read(file.path()).unwrap();
        for len in 0..whole.len() {
            std::fs::write(file.path(), &whole[..len]).unwrap();
            find_obstacle(file.path());
        }
        for at in 0..64 {
            let mut bytes = whole.clone();
            bytes[at] = 0xff;
            std::fs::write(file.path(), &bytes).unwrap();
            find_obstacle(file.path());
        }
    }

    #[test]
    fn script_uses_interpreters_obstacle() {
        let fixed = image(62, 2, &[]);
        let script = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(script.path(), format!("#! {} -x\necho\n", fixed.path().display())).unwrap();
        assert_eq!(
            find_obstacle(script.path()),
            Some(Finding { path: fixed.path().into(), obstacle: Obstacle::Static })
        );
        std::fs::write(script.path(), "#!/usr/bin/env -S A=1 sh -e\n").unwrap();
        assert_eq!(find_obstacle(script.path()), None);
        // A script that names itself terminates nevertheless.
        std::fs::write(script.path(), format!("#!{}\n", script.path().display())).unwrap();
        assert_eq!(find_obstacle(script.path()), None);
    }

    #[test]
    fn commands_resolve_as_in_shell() {
        let dir = tempfile::tempdir().unwrap();
        let tool = dir.path().join("tool");
        std::fs::write(&tool, "").unwrap();
        let path = OsString::from(format!("/nowhere:{}", dir.path().display()));
        let find = || resolve_on(OsStr::new("tool"), Some(&path));
        assert_eq!(find().unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        std::fs::set_permissions(&tool, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(find().unwrap(), tool);
        assert_eq!(resolve_on(OsStr::new("other"), Some(&path)).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(resolve_on(OsStr::new("/nowhere/x"), None).is_err());
    }
}
