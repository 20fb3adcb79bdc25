//! What a server tells of itself and of its files.

use super::{BadMessage, Cursor};

/// Counters of a file since its server started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Releases committed.
    pub commits: u64,
    /// Pages merged.
    pub merged: u64,
    /// Released pages that were equal to head.
    pub unchanged: u64,
    /// Twins kept now.
    pub twins: u64,
    /// Pages whose released bytes were new.
    pub published: u64,
}

/// What a server holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerStatus {
    /// Its process.
    pub pid: u64,
    /// Seconds since it started.
    pub seconds: u64,
    /// Connections of clients.
    pub connections: u64,
    /// Pages of their maps.
    pub mapped: u64,
    /// Pages that released bytes and twins occupy.
    pub used: u64,
    /// Pages that they may occupy.
    pub slots: u64,
    /// Servers of the mount before this one.
    pub replaced: u64,
    /// Counters of this server.
    pub totals: Totals,
    /// How much there may be.
    pub limits: ServerLimits,
}

/// What clients of a server may have; [`ServerStatus::slots`] is one more limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerLimits {
    /// Connections.
    pub connections: u64,
    /// Pages of maps.
    pub mapped: u64,
    /// Of one user.
    pub of_user: UserUse,
}

/// What one user has, or may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UserUse {
    /// Connections of clients.
    pub connections: u64,
    /// Pages of their maps.
    pub mapped: u64,
    /// Pages that their released bytes and twins occupy.
    pub used: u64,
}

/// What a server holds for one user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UserStatus {
    /// The user.
    pub user: u64,
    /// What is held.
    pub has: UserUse,
}

/// Counters of all files since the server started, also of those that it has no page table of any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Releases committed.
    pub commits: u64,
    /// Pages whose released bytes were new.
    pub published: u64,
    /// Pages merged.
    pub merged: u64,
    /// Requests to the Linux kernel to drop pages.
    pub invalidations: u64,
    /// The pages that they were for.
    pub invalidated: u64,
    /// Pages that CPU reads have got from memory of devices.
    pub from_devices: u64,
}

/// What a server holds of one file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileStatus<'a> {
    /// Maps of it.
    pub maps: u64,
    /// Of these, maps in place.
    pub in_place: u64,
    /// Processes that have these maps.
    pub owners: u64,
    /// Pages that were released and not written to the file.
    pub dirty: u64,
    /// Counters.
    pub stats: Stats,
    /// Its path below the mount, at most [`MAX_RUNS`] bytes of it.
    pub path: &'a [u8],
}

impl ServerLimits {
    pub(super) fn numbers(&self) -> [u64; 5] {
        let UserUse { connections, mapped, used } = self.of_user;
        [self.connections, self.mapped, connections, mapped, used]
    }
}

impl Cursor<'_> {
    pub(super) fn limits(&mut self) -> Result<ServerLimits, BadMessage> {
        Ok(ServerLimits { connections: self.number()?, mapped: self.number()?, of_user: self.user_use()? })
    }

    pub(super) fn user_use(&mut self) -> Result<UserUse, BadMessage> {
        Ok(UserUse { connections: self.number()?, mapped: self.number()?, used: self.number()? })
    }

    pub(super) fn stats(&mut self) -> Result<Stats, BadMessage> {
        Ok(Stats {
            commits: self.number()?,
            merged: self.number()?,
            unchanged: self.number()?,
            twins: self.number()?,
            published: self.number()?,
        })
    }

    pub(super) fn totals(&mut self) -> Result<Totals, BadMessage> {
        Ok(Totals {
            commits: self.number()?,
            published: self.number()?,
            merged: self.number()?,
            invalidations: self.number()?,
            invalidated: self.number()?,
            from_devices: self.number()?,
        })
    }
}
