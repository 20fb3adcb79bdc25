//! What the processes of the daemon may do once they serve: each keeps the capabilities that it needs.
//!
//! ```text
//!   spinio gaia mount ── root, all capabilities ── checks, mount ── keep(Supervisor)
//!      └─ exec ── no more than the supervisor has (no_new_privs) ── keep(Server), keep(Invalidator), keep(Devices)
//!   spinio gaia serve ── binds its socket ── keep(Leases)
//! ```
//!
//! | capability | who | for |
//! |---|---|---|
//! | DAC_READ_SEARCH | server, leases | opening by handle; reading a file of another user again |
//! | DAC_OVERRIDE | server, supervisor | files of all users; the program and the mount point may be in a user's directory |
//! | CHOWN, FOWNER, FSETID, SETFCAP, MKNOD | server | the calls of programs, which the Linux kernel has checked |
//! | SETUID, SETGID | server | new files belong to the caller (identity.rs) |
//! | SYS_ADMIN | supervisor; server for single calls | unmounting; attributes named `trusted.` and `security.` ([`Raised`]) |
//! | SYS_RESOURCE | all but the invalidator and the device process | descriptors on their way to clients that do not receive them are not counted against all others; io-flushers |
//! | LEASE | leases | leases on files of other users |
//!
//! A capability belongs to a thread, and a new thread has those of the thread that makes it: so this comes before the
//! others are made. **It is no boundary**: user 0 owns much of /proc and /sys, and who may override the permissions of
//! files can become root. It limits what a fault does, and what it reaches directly.

use rustix::io::Errno;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_no_new_privs};

/// A process of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Supervisor {
        /// It unmounts by itself, and not through a setuid program.
        unmounts: bool,
    },
    Server,
    Invalidator,
    /// The device process.
    Devices,
    /// The daemon of leased files.
    Leases,
}

const SERVER: CapabilitySet = CapabilitySet::DAC_READ_SEARCH
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::CHOWN)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SYS_RESOURCE);

impl Role {
    /// What it always has, and what it may raise, or hand to a process that it starts.
    fn capabilities(self) -> (CapabilitySet, CapabilitySet) {
        let admin = CapabilitySet::SYS_ADMIN;
        match self {
            Role::Supervisor { .. } => {
                (admin | CapabilitySet::DAC_OVERRIDE | CapabilitySet::SYS_RESOURCE, SERVER | admin)
            }
            Role::Server => (SERVER, SERVER | admin),
            Role::Invalidator | Role::Devices => (CapabilitySet::empty(), CapabilitySet::empty()),
            Role::Leases => {
                let always = CapabilitySet::LEASE | CapabilitySet::DAC_READ_SEARCH | CapabilitySet::SYS_RESOURCE;
                // Its socket may be in the directory of another user.
                (always, always | CapabilitySet::DAC_OVERRIDE)
            }
        }
    }
}

/// The calling thread, and those that it makes, keep what the role needs of what they have.
///
/// # Errors
/// The kernel's; then the process should not go on.
pub(crate) fn keep(role: Role) -> Result<(), Errno> {
    let (always, at_most) = role.capabilities();
    let sets = capabilities(None)?;
    let permitted = sets.permitted & at_most;
    let effective = permitted & always;
    // A user's supervisor unmounts by fusermount3, which must become root.
    if !matches!(role, Role::Supervisor { unmounts: false }) {
        set_no_new_privs(true)?;
    }
    // Its memory has bytes of files of all users. Other users have no such process, and would lose their own /proc/self.
    if rustix::process::geteuid().is_root() {
        set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    }
    set_capabilities(None, CapabilitySets { effective, permitted, inheritable: CapabilitySet::empty() })
}

/// The calling thread has a capability that it only may raise, until this is dropped.
#[derive(Debug)]
pub(crate) struct Raised(CapabilitySet);

impl Raised {
    pub(crate) fn new(wanted: CapabilitySet) -> Raised {
        let Ok(mut sets) = capabilities(None) else { return Raised(CapabilitySet::empty()) };
        let raised = wanted & sets.permitted & !sets.effective;
        sets.effective |= raised;
        let done = raised.is_empty() || set_capabilities(None, sets).is_ok();
        Raised(if done { raised } else { CapabilitySet::empty() })
    }
}

impl Drop for Raised {
    fn drop(&mut self) {
        if !self.0.is_empty()
            && let Ok(mut sets) = capabilities(None)
        {
            sets.effective &= !self.0;
            let _ = set_capabilities(None, sets);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn effective() -> CapabilitySet {
        capabilities(None).unwrap().effective
    }

    #[test]
    fn kept_capabilities_are_those_of_the_role_and_can_be_raised_for_a_call() {
        // On threads of their own, since there is no way back.
        let on_a_thread = |role| {
            std::thread::spawn(move || {
                let before = capabilities(None).unwrap().permitted;
                keep(role).unwrap();
                let (always, at_most) = role.capabilities();
                let now = capabilities(None).unwrap();
                assert_eq!((now.effective, now.permitted), (before & always, before & at_most), "{role:?}");
                assert!(now.inheritable.is_empty());
                let admin = before & at_most & CapabilitySet::SYS_ADMIN;
                let raised = Raised::new(CapabilitySet::SYS_ADMIN | CapabilitySet::SYS_TIME);
                assert_eq!(effective(), before & always | admin, "{role:?}");
                drop(raised);
                assert_eq!(effective(), before & always, "{role:?}");
                // A second thread has no more.
                assert_eq!(std::thread::spawn(effective).join().unwrap(), before & always);
            })
            .join()
            .unwrap();
        };
        let roles =
            [Role::Supervisor { unmounts: false }, Role::Server, Role::Invalidator, Role::Devices, Role::Leases];
        roles.into_iter().for_each(on_a_thread);
    }
}
