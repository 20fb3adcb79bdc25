//! Third-party programs that a GPU machine may lack: stress-ng and gRPC for C++ with their libraries, and the wheels of the peers.
//!
//! `spinio-lab bench` starts `stress-ng` from PATH, so the pack has a directory for PATH: the program, its libraries,
//! and a script of its name. The C library is omitted: a newer one there serves programs of an older one here.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::copy;
use crate::tools;

/// The GPU machine's Python.
const PYTHON: &str = "3.12";

/// The libraries that the rows of benches/gpu, benches/safetensors and benches/gpunet compare with SPIN.
const PEERS: [&str; 7] =
    ["kvikio-cu13", "libkvikio-cu13", "rapids-logger", "fastsafetensors", "pyzmq", "grpcio", "typing-extensions"];

/// Of the C library: these must be the loader's.
const SYSTEM: [&str; 8] = ["libc", "libm", "libpthread", "librt", "libdl", "libresolv", "libutil", "ld-linux-x86-64"];

const START: &str = "#!/bin/sh
here=$(cd \"$(dirname \"$0\")\" && pwd)
LD_LIBRARY_PATH=$here/lib exec \"$here/program\" \"$@\"
";

/// This machine's stress-ng, if installed.
pub(crate) fn stress_ng(folder: &Path) -> Result<()> {
    let Some(program) = in_path("stress-ng") else {
        println!("no stress-ng here: there will be no background load there");
        return Ok(());
    };
    let lib = folder.join("lib");
    fs::create_dir_all(&lib)?;
    copy(&program, &folder.join("program"))?;
    libraries(&program, &lib)?;
    let start = folder.join("stress-ng");
    fs::write(&start, START)?;
    fs::set_permissions(&start, fs::Permissions::from_mode(0o755))?;
    // A script that does not start here does not start there.
    tools::output(tools::command(&start).arg("--version")).map(drop)
}

/// The library through which benches/gpunet/gpunet.cu uses gRPC for C++, if that is installed here.
pub(super) fn grpc(root: &Path, folder: &Path) -> Result<()> {
    if !Path::new("/usr/include/grpcpp/grpcpp.h").exists() {
        println!("no gRPC for C++ here (libgrpc++-dev): only the one of Python is measured there");
        return Ok(());
    }
    fs::create_dir_all(folder)?;
    let library = folder.join("libgrpc_peer.so");
    let mut cc = tools::command("c++");
    cc.args(["-O2", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", "-o"]).arg(&library);
    cc.arg(root.join("benches/gpunet/grpc_peer.cpp")).args(["-lgrpc++", "-lgrpc"]);
    // DT_RPATH: it is also for the libraries that its libraries need.
    tools::run(cc.arg("-Wl,--disable-new-dtags,-rpath,$ORIGIN"))?;
    libraries(&library, folder)
}

/// Copies the libraries of a program that are not the C library's.
fn libraries(program: &Path, folder: &Path) -> Result<()> {
    for line in tools::output(tools::command("ldd").arg(program))?.lines() {
        // "\tlibz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x00007f...)"
        let Some((name, found)) = line.trim().split_once(" => ") else { continue };
        let path = found.split(" (").next().unwrap_or(found);
        if !SYSTEM.iter().any(|s| name.starts_with(&format!("{s}.so"))) {
            copy(Path::new(path), &folder.join(name))?;
        }
    }
    Ok(())
}

fn in_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// Wheels for the GPU machine's Python, independent of this machine's.
pub(super) fn peers(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    let mut pip = tools::command("python3");
    pip.args(["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--implementation", "cp"]);
    pip.args(["--python-version", PYTHON, "--dest"]).arg(folder);
    for glibc in ["2_28", "2_27", "2_24", "2_17"] {
        pip.args(["--platform", &format!("manylinux_{glibc}_x86_64")]);
    }
    tools::run(pip.args(["--platform", "manylinux2014_x86_64"]).args(PEERS))?;
    let made = fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?.count();
    ensure!(made == PEERS.len(), "{made} wheels instead of {}", PEERS.len());
    Ok(())
}
