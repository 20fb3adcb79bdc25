//! What the mounts that this user may ask, and the daemons of leased files, hold: for `spinio gaia status` and `top`.

use std::path::PathBuf;

use spinio_gaiad::{DaemonStatus, MountStatus};

use super::serve;

/// The answers, and one line for each mount or daemon that does not answer.
#[derive(Clone, Debug, Default)]
pub struct Held {
    pub mounts: Vec<(PathBuf, MountStatus)>,
    pub daemons: Vec<(PathBuf, DaemonStatus)>,
    pub errors: Vec<String>,
}

impl Held {
    /// Asks the mount at a directory, or the daemon at a socket; without either, all.
    pub fn ask(directory: Option<&PathBuf>, socket: Option<&PathBuf>) -> anyhow::Result<Held> {
        let points = match directory {
            Some(directory) => vec![directory.clone()],
            None if socket.is_some() => Vec::new(),
            None => {
                let user = rustix::process::geteuid().as_raw();
                // Another user's mount answers that user only.
                let may_ask = |mount: &spinio_gaiad::Mount| mount.user == user || mount.user == 0;
                spinio_gaiad::mounts()?.into_iter().filter(may_ask).map(|mount| mount.point).collect()
            }
        };
        let mut held = Held::default();
        for point in points {
            match spinio_gaiad::status(&point) {
                Ok(status) => held.mounts.push((point, status)),
                Err(error) => held.errors.push(error.to_string()),
            }
        }
        if directory.is_none() {
            for socket in serve::sockets(socket) {
                match spinio_gaiad::query_daemon(&socket) {
                    Ok(Some(daemon)) => held.daemons.push((socket, daemon)),
                    Ok(None) => {}
                    Err(error) => held.errors.push(error.to_string()),
                }
            }
        }
        Ok(held)
    }
}
