//! A second GPU gets a leased or a mounted file that the first one has.

use std::time::Duration;

use super::group::{Group, Work};
use super::leased::Daemon;
use crate::gaia::experiment::{Cell, Method, Setting};
use crate::gaia::stage::Stage;
use crate::gaia::worker::Figures;

/// The driver clears memory that was freed, 17 ms for 8 GiB, and a map that gets it at once waits for that. Chunks of a leased file
/// are freed once the daemon has dropped them.
const CLEARING: Duration = Duration::from_millis(250);

struct Second {
    group: Group,
    daemon: Option<Daemon>,
    maps: bool,
}

/// One process has both devices. The file is beside the mount, or in it.
pub fn second(stage: &Stage, method: &Method, setting: &Setting) -> anyhow::Result<Box<dyn Cell>> {
    anyhow::ensure!(stage.devices > 1, "there is only one GPU here");
    let file = stage.constant_words(method.name == "mounted", "model", setting.get("size")?)?;
    let daemon = (method.name == "map").then(|| Daemon::start(stage)).transpose()?;
    let worker = Work::new("second", method, &file).with_all_devices().start(stage, 0)?;
    let maps = matches!(method.name, "map" | "mounted");
    Ok(Box::new(Second { group: Group { workers: vec![worker] }, daemon, maps }))
}

impl Cell for Second {
    /// The first device keeps what it has mapped.
    fn prepare(&mut self, run: usize) -> anyhow::Result<()> {
        self.group.prepare(run)?;
        self.daemon.as_ref().map_or(Ok(()), |daemon| daemon.drop_unmapped(1))?;
        if self.maps {
            std::thread::sleep(CLEARING);
        }
        Ok(())
    }

    fn run(&mut self) -> anyhow::Result<Figures> {
        self.group.run()
    }

    fn wrong(&mut self) -> anyhow::Result<u64> {
        self.group.wrong()
    }
}
