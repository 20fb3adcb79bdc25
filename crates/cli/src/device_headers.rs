//! The headers of `device/`, for programs with GPU kernels that demos and the laboratory compile: this command contains them.

use std::path::Path;

use anyhow::Context;

macro_rules! headers {
    ($directory:literal: $($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../../", $directory, "/", $name)))),*]
    };
}

const DEVICE: &[(&str, &str)] = headers!("device/include":
    "spinio/file.h",
    "spinio/gaia.h",
    "spinio/gaia_device.h",
    "spinio/gpunet.h",
    "spinio/http.h",
    "spinio/kernel.h",
    "spinio/quads.h",
    "spinio/standard.h",
    "spinio/stop.h",
    "spinio/text.h",
    "spinio/wait.h",
    "spinio/word.h",
    "spinio/http/connection.h",
    "spinio/http/reply.h",
    "spinio/net.h",
    "spinio/net/check.h",
    "spinio/net/control.h",
    "spinio/net/datagram.h",
    "spinio/net/doorbell.h",
    "spinio/net/ends.h",
    "spinio/net/event.h",
    "spinio/net/file.h",
    "spinio/net/group.h",
    "spinio/net/layout.h",
    "spinio/net/line.h",
    "spinio/net/message.h",
    "spinio/net/options.h",
    "spinio/net/peer.h",
    "spinio/net/poll.h",
    "spinio/net/span.h",
    "spinio/net/stream.h",
    "spinio/emulation/atomics.h",
    "spinio/emulation/block.h",
    "spinio/emulation/fiber.h",
    "spinio/emulation/grid.h",
    "spinio/emulation/print.h",
    "spinio/emulation/resident.h",
    "spinio/emulation/runtime.h",
    "spinio/emulation/sanitizers.h",
    "spinio/emulation/shuffles.h",
    "spinio/emulation/warp.h",
    "spinio/emulation/words.h",
);

const HOST: &[(&str, &str)] = headers!("crates/capi/include": "spinio.h", "spinio_gaia.h", "spinio_net.h");

/// Writes them below a directory.
pub fn write(dir: &Path) -> anyhow::Result<()> {
    write_files(dir, DEVICE)?;
    write_files(dir, HOST)
}

/// Writes files: names below a directory, and texts.
pub fn write_files(dir: &Path, files: &[(&str, &str)]) -> anyhow::Result<()> {
    for (name, text) in files {
        let path = dir.join(name);
        let made = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        made.and_then(|()| std::fs::write(&path, text)).with_context(|| format!("Cannot write {}", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_header_is_here() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../device/include");
        for part in ["spinio", "spinio/emulation", "spinio/http", "spinio/net"] {
            let entries = std::fs::read_dir(directory.join(part)).unwrap().map(Result::unwrap);
            for entry in entries.filter(|entry| entry.file_type().unwrap().is_file()) {
                let name = format!("{part}/{}", entry.file_name().to_str().unwrap());
                assert!(DEVICE.iter().any(|(have, _)| *have == name), "{name} is missing");
            }
        }
    }
}
