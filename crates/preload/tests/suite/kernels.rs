//! Programs of kernels that an earlier run has compiled: it takes minutes of a processor, and `.ci/run` runs these tests as
//! two users.

use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::path::{Path, PathBuf};

use crate::build::{build_dir, compile, headers};
use crate::device::workspace_path;

/// The program of these arguments of the C++ compiler; `sources` are among them.
pub(crate) fn program(name: &str, sources: &[PathBuf], args: &[&str]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels");
    let kept = folder.join(format!("{name}-{:016x}", sum(sources, args)));
    if kept.exists() {
        return kept;
    }
    let out = build_dir().join(name);
    compile("c++", &out, args);
    // Not an error: another user may have made the folder.
    let _ = keep(&folder, &out, &kept, &format!("{name}-"));
    out
}

/// All that a program is made of.
fn sum(sources: &[PathBuf], args: &[&str]) -> u64 {
    let mut sum = DefaultHasher::new();
    for arg in args {
        sum.write(arg.as_bytes());
        sum.write_u8(0);
    }
    let compiler = std::process::Command::new("c++").arg("--version").output().expect("a compiler");
    sum.write(&compiler.stdout);
    let mut files = vec![workspace_path("device/include"), headers(), workspace_path("crates/preload/tests/c")];
    files.extend(sources.iter().filter_map(|source| source.parent()).map(Path::to_owned));
    while let Some(path) = files.pop() {
        if path.is_dir() {
            let mut inside: Vec<_> =
                fs::read_dir(path).expect("a folder").flatten().map(|entry| entry.path()).collect();
            inside.sort();
            files.append(&mut inside);
        } else {
            sum.write(&fs::read(path).expect("a file"));
        }
    }
    sum.finish()
}

/// Instead of the one that had been compiled before something changed.
fn keep(folder: &Path, out: &Path, kept: &Path, prefix: &str) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    for old in fs::read_dir(folder)?.flatten() {
        if old.file_name().to_string_lossy().strip_prefix(prefix).is_some_and(|sum| sum.len() == 16) {
            fs::remove_file(old.path())?;
        }
    }
    let partial = folder.join(format!(".{}-{prefix}", std::process::id()));
    fs::copy(out, &partial)?;
    fs::rename(partial, kept)
}
