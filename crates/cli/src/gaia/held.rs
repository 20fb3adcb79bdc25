//! What mounts and the daemons of leased files hold: for `spinio gaia status` and `top`.

use std::path::PathBuf;

use spinio_gaiad::{DaemonStatus, MountStatus};

use super::serve;

/// The answers, and one line for each mount or daemon that does not answer.
#[derive(Clone, Debug, Default)]
pub struct Held {
    pub mounts: Vec<(PathBuf, MountStatus)>,
    /// Mounts of root's, which this user uses and may not ask.
    pub roots: Vec<PathBuf>,
    pub daemons: Vec<(PathBuf, DaemonStatus)>,
    pub errors: Vec<String>,
}

/// Why there are no numbers of `Held::roots`.
pub const ONLY_ROOT: &str = "root's mount, for all users: only root may ask what it holds";

impl Held {
    /// Asks the mount at a directory, or the daemon at a socket; without either, all that answer this user.
    pub fn ask(directory: Option<&PathBuf>, socket: Option<&PathBuf>) -> anyhow::Result<Held> {
        let mut held = Held::default();
        let points = match directory {
            Some(directory) => vec![directory.clone()],
            None if socket.is_some() => Vec::new(),
            None => {
                let user = rustix::process::geteuid().as_raw();
                let (own, others): (Vec<_>, Vec<_>) =
                    spinio_gaiad::mounts()?.into_iter().partition(|mount| mount.user == user);
                // That of a third user is of no use to this one.
                let roots = others.into_iter().filter(|mount| mount.user == 0);
                held.roots = roots.map(|mount| mount.point).collect();
                own.into_iter().map(|mount| mount.point).collect()
            }
        };
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
