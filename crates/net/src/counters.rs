//! What a net has done.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// `struct spinio_net_stats`, which only grows at its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Stats {
    /// Descriptors that kernels or the host have open now.
    pub open: u64,
    /// Connections that were accepted.
    pub accepted: u64,
    /// Connections that were made.
    pub connected: u64,
    /// Bytes from peers.
    pub bytes_received: u64,
    /// Bytes to peers.
    pub bytes_sent: u64,
    /// Doorbells of kernels.
    pub doorbells: u64,
    /// Calls that needed an answer.
    pub calls: u64,
    /// Words of kernels that were refused.
    pub violations: u64,
    /// Processor time of the proxy and of the other I/O threads in nanoseconds.
    pub proxy_ns: u64,
    /// Connections whose both ends are in this net, and whose bytes go through device memory.
    pub upgraded: u64,
    /// Of the others with both ends in this net: the setting forbids it.
    pub kept_by_setting: u64,
    /// There were no rings left in device memory.
    pub kept_by_memory: u64,
    /// As many connections as the backlog allows wait at the listening socket.
    pub kept_by_backlog: u64,
    /// Another socket than the listening one that has this address took the connection, the address was translated, or the
    /// connecting socket has the name of a path.
    pub kept_by_name: u64,
    /// Connections to programs of this machine, and to kernels of other nets on it, whose bytes go through memory that both map.
    pub shared: u64,
    /// Connections of those that asked for such memory when none was left, on either side.
    pub kept_by_granules: u64,
    /// Connections of kernels to nets of other users.
    pub kept_by_user: u64,
    /// Connections of kernels to another net that did not answer in time or broke off, or another socket took the connection.
    pub kept_by_time: u64,
    /// Connections to kernels of other nets whose bytes go through device memory of the reader.
    pub peer: u64,
    /// How often another I/O thread than the proxy made the system calls of a socket in a pass.
    pub helped: u64,
}

/// The same while it changes. Only the proxy writes it.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) open: Counter,
    pub(crate) accepted: Counter,
    pub(crate) connected: Counter,
    pub(crate) bytes_received: Counter,
    pub(crate) bytes_sent: Counter,
    pub(crate) doorbells: Counter,
    pub(crate) calls: Counter,
    pub(crate) violations: Counter,
    pub(crate) proxy_ns: Counter,
    pub(crate) upgraded: Counter,
    pub(crate) kept_by_setting: Counter,
    pub(crate) kept_by_memory: Counter,
    pub(crate) kept_by_backlog: Counter,
    pub(crate) kept_by_name: Counter,
    pub(crate) shared: Counter,
    pub(crate) kept_by_granules: Counter,
    pub(crate) kept_by_user: Counter,
    pub(crate) kept_by_time: Counter,
    pub(crate) peer: Counter,
    pub(crate) helped: Counter,
}

#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, by: u64) {
        self.set(self.get() + by);
    }

    pub(crate) fn set(&self, to: u64) {
        self.0.store(to, Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

impl Counters {
    pub(crate) fn stats(&self) -> Stats {
        Stats {
            open: self.open.get(),
            accepted: self.accepted.get(),
            connected: self.connected.get(),
            bytes_received: self.bytes_received.get(),
            bytes_sent: self.bytes_sent.get(),
            doorbells: self.doorbells.get(),
            calls: self.calls.get(),
            violations: self.violations.get(),
            proxy_ns: self.proxy_ns.get(),
            upgraded: self.upgraded.get(),
            kept_by_setting: self.kept_by_setting.get(),
            kept_by_memory: self.kept_by_memory.get(),
            kept_by_backlog: self.kept_by_backlog.get(),
            kept_by_name: self.kept_by_name.get(),
            shared: self.shared.get(),
            kept_by_granules: self.kept_by_granules.get(),
            kept_by_user: self.kept_by_user.get(),
            kept_by_time: self.kept_by_time.get(),
            peer: self.peer.get(),
            helped: self.helped.get(),
        }
    }
}
