//! What a net has done.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A struct of numbers, the counters behind it, and the names, from one list.
macro_rules! counters {
    ($($(#[doc = $text:literal])+ $name:ident,)+) => {
        /// `struct spinio_net_stats`, which only grows at its end.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[repr(C)]
        pub struct Stats {
            $($(#[doc = $text])+ pub $name: u64,)+
        }

        impl Stats {
            /// The names and their values, in the order of the struct.
            pub fn fields(&self) -> [(&'static str, u64); size_of::<Stats>() / size_of::<u64>()] {
                [$((stringify!($name), self.$name),)+]
            }
        }

        /// The same while it changes. Only the proxy writes it.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: Counter,)+
        }

        impl Counters {
            pub(crate) fn stats(&self) -> Stats {
                Stats { $($name: self.$name.get(),)+ }
            }
        }
    };
}

counters! {
    /// Descriptors that kernels or the host have open now.
    open,
    /// Connections that were accepted.
    accepted,
    /// Connections that were made.
    connected,
    /// Bytes from peers.
    bytes_received,
    /// Bytes to peers.
    bytes_sent,
    /// Doorbells of kernels.
    doorbells,
    /// Calls that needed an answer.
    calls,
    /// Words of kernels that were refused.
    violations,
    /// Processor time of the proxy and of the other I/O threads in nanoseconds.
    proxy_ns,
    /// Connections whose both ends are in this net, and whose bytes go through device memory.
    upgraded,
    /// Of the others with both ends in this net: the setting forbids it.
    kept_by_setting,
    /// There were no rings left in device memory.
    kept_by_memory,
    /// As many connections as the backlog allows wait at the listening socket.
    kept_by_backlog,
    /// Another socket than the listening one that has this address took the connection, the address was translated, or the
    /// connecting socket has the name of a path.
    kept_by_name,
    /// Connections to programs of this machine, and to kernels of other nets on it, whose bytes go through memory that both map.
    shared,
    /// Connections of those that asked for such memory when none was left, on either side.
    kept_by_granules,
    /// Connections of kernels to nets of other users.
    kept_by_user,
    /// Connections of kernels to another net that did not answer in time or broke off, or another socket took the connection.
    kept_by_time,
    /// Connections to kernels of other nets whose bytes go through device memory of the reader.
    peer,
    /// How often another I/O thread than the proxy made the system calls of a socket in a pass.
    helped,
    /// Connections that could have left Linux, and for which no descriptor was left, on either side.
    kept_by_descriptors,
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
