//! Readiness for systemd: a unit of `Type=notify` counts as started when its process says so, and units that are ordered
//! after it begin then (`sd_notify(3)`).

use std::ffi::OsString;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use crate::output;

/// Set by systemd.
const SOCKET: &str = "NOTIFY_SOCKET";

/// Says that this process serves, if it was started by a service manager that wants to know.
pub(super) fn notify() {
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    if let Err(error) = send(&socket) {
        let socket = socket.display();
        output::note(&format!("spinio gaia: cannot say to {socket} that this process is ready: {error}\n"));
    }
}

fn send(socket: &OsString) -> std::io::Result<()> {
    let address = match socket.as_bytes().split_first() {
        // An abstract name.
        Some((b'@', name)) => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(b"READY=1\n", &address).map(drop)
}
