//! Sockets of kernels: which transports are open on this machine, named as `spinio net` does, and what closes the others.
//!
//! ```text
//!   a net of the emulated device ── listens ──┬── connects to itself ──> inside a net
//!                                             └── a program connects ──> shared memory
//!   driver ── of each GPU, and of each two ──> device memory that another GPU stores to
//! ```
//!
//! io_uring is not needed, nor may this process trace others (`kernel.yama.ptrace_scope`): `pidfd_getfd` is between its own threads.

use rustix::process::{Resource, getrlimit};
use spinio_device::registry;
use spinio_io::Settings;
use spinio_net::{Net, NetAddress, Options, Socket, SocketOptions};
use spinio_sys::cuda::{Driver, attribute};
use spinio_sys::{Errno, linux};

use super::{Fact, State};

const GROUP: &str = "Sockets of GPU kernels";

/// Descriptors of a net with the default options: one for each of 256 connections, six for each of 32 that share memory.
const DESCRIPTORS: u64 = 256 + 6 * 32;

/// Collects the facts.
pub fn collect(facts: &mut Vec<Fact>) {
    let refused = descriptors_move().err();
    let upgrades = Settings::of_process().net_upgrade;
    match Tried::now() {
        Ok(tried) => {
            facts.push(Fact::new(GROUP, "a net", State::Found, "opens, listens and is connected to"));
            facts.push(inside(tried.inside, upgrades));
            facts.push(shared(tried.program, upgrades, refused));
        }
        Err(why) => facts.push(
            Fact::new(GROUP, "a net", State::Absent, "does not open: kernels have no sockets")
                .because(why)
                .cure("`private descriptors`, `emulated device` and `RLIMIT_NOFILE` above; docs/gpunet.md"),
        ),
    }
    facts.push(adopt(refused));
    facts.push(descriptors(getrlimit(Resource::Nofile).current));
    if let Some(driver) = Driver::load().ok().filter(|driver| driver.init().is_ok()) {
        let count = driver.device_count().unwrap_or(0);
        let has = |ordinal, which| {
            let device = driver.device(ordinal).ok()?;
            driver.device_attribute(device, which).ok().map(|value| value != 0)
        };
        facts.extend(gpus(count, has));
        let device = |ordinal| driver.device(ordinal).unwrap_or(ordinal);
        facts.extend(pairs(count, |a, b| driver.can_access_peer(device(a), device(b)).unwrap_or(false)));
    }
}

/// What came of a net that was opened for it.
struct Tried {
    inside: bool,
    /// Whether a program shares memory with it, and why.
    program: (bool, &'static str),
}

impl Tried {
    fn now() -> Result<Tried, String> {
        let device = registry::emulated().map_err(|e| e.to_string())?;
        let options = Options { sockets: 64, connections: 8, ring_bytes: 4096, idle_us: 500, ..Options::default() };
        let net = Net::open(device, options).map_err(|e| e.to_string())?;
        let tried = Tried::with(&net);
        let _ = net.close();
        tried
    }

    fn with(net: &Net) -> Result<Tried, String> {
        let text = |e: spinio_net::Error| e.to_string();
        let name = format!("unix:@spinio-doctor-{}", std::process::id());
        let address = NetAddress::parse(&name).map_err(text)?;
        net.listen(&address, 8).map_err(text)?;
        net.connect(&address).map_err(text)?;
        let inside = net.stats().upgraded == 1;
        let program = Socket::connect(&address, SocketOptions::default()).map_err(text)?;
        let (transport, why) = program.transport();
        Ok(Tried { inside, program: (transport == "shared", why) })
    }
}

fn inside(works: bool, upgrades: bool) -> Fact {
    let name = "transport loopback";
    match works {
        true => Fact::new(GROUP, name, State::Found, "bytes between blocks of one net go through device memory"),
        false => closed(name, "bytes between blocks of one net go through Linux", upgrades, "it stayed with Linux"),
    }
}

fn shared((works, why): (bool, &str), upgrades: bool, refused: Option<Errno>) -> Fact {
    let name = "transport shared";
    if works {
        return Fact::new(GROUP, name, State::Found, "with programs of this user, and between the kernels of two nets");
    }
    let detail = "programs, and kernels of other nets, talk to kernels through Linux";
    match refused.filter(|_| upgrades) {
        Some(errno) => Fact::new(GROUP, name, State::Limited, detail).because(of_getfd(errno)).cure(GETFD_CURE),
        None => closed(name, detail, upgrades, why),
    }
}

/// A transport that is closed, by the setting or for this reason.
fn closed(name: &str, detail: &str, upgrades: bool, why: &str) -> Fact {
    let fact = Fact::new(GROUP, name, State::Limited, detail);
    match upgrades {
        true => fact.because(why),
        false => fact.because("SPINIO_NET_UPGRADE=off").cure("unset SPINIO_NET_UPGRADE"),
    }
}

const GETFD_CURE: &str = "in a container: --cap-add SYS_PTRACE, or a seccomp profile that allows pidfd_getfd";

fn of_getfd(errno: Errno) -> String {
    format!("pidfd_getfd: {}", std::io::Error::from(errno))
}

/// Whether descriptors move between two tables of this process: sockets that a program gives to kernels, and memory files of the net.
fn descriptors_move() -> Result<(), Errno> {
    match linux::dup_from_thread(linux::gettid(), 0) {
        Ok(fd) => {
            let _ = linux::close(fd);
            Ok(())
        }
        // Standard input may be closed: then the call has found out that it is.
        Err(Errno::BADF) => Ok(()),
        Err(errno) => Err(errno),
    }
}

fn adopt(refused: Option<Errno>) -> Fact {
    let name = "adopt and release";
    match refused {
        None => Fact::new(GROUP, name, State::Found, "sockets move between program and kernels"),
        Some(errno) => Fact::new(GROUP, name, State::Absent, "sockets cannot move between program and kernels")
            .because(of_getfd(errno))
            .cure(GETFD_CURE),
    }
}

fn descriptors(limit: Option<u64>) -> Fact {
    let name = "descriptors of a net";
    match limit {
        Some(limit) if limit < DESCRIPTORS + 64 => {
            Fact::new(GROUP, name, State::Limited, format!("{limit}: a net of default size has up to {DESCRIPTORS}"))
                .because("without one, connections wait in the backlog, and programs talk through Linux")
                .cure("ulimit -n 1024; or fewer `connections` and `shared_connections` of spinio_net_open()")
        }
        _ => Fact::new(GROUP, name, State::Found, format!("enough for the {DESCRIPTORS} of a net of default size")),
    }
}

/// What each GPU lacks for a net: has(ordinal, attribute), None if the driver does not know it.
fn gpus(count: i32, has: impl Fn(i32, i32) -> Option<bool>) -> Vec<Fact> {
    let mut facts = Vec::new();
    for ordinal in 0..count {
        let gpu = format!("cuda:{ordinal}");
        if has(ordinal, attribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) == Some(false) {
            facts.push(
                Fact::new(GROUP, format!("{gpu} net"), State::Absent, "does not open")
                    .because("the GPU has no virtual memory management"),
            );
        } else if has(ordinal, attribute::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) == Some(false) {
            let detail = "kernels of other GPUs do not store into this one's memory: they share pinned memory";
            facts.push(
                Fact::new(GROUP, format!("{gpu} net"), State::Limited, detail)
                    .because("its driver exports no device memory as a descriptor"),
            );
        }
        if has(ordinal, attribute::KERNEL_EXEC_TIMEOUT) == Some(true) {
            facts.push(
                Fact::new(GROUP, format!("{gpu} time limit"), State::Limited, "ends kernels that serve, after seconds")
                    .because("the driver limits the time of kernels, since a display uses this GPU")
                    .cure("a GPU without a display"),
            );
        }
    }
    facts
}

/// Whether the kernels of each two GPUs can talk through device memory.
fn pairs(count: i32, can_access: impl Fn(i32, i32) -> bool) -> Vec<Fact> {
    let mut without = Vec::new();
    for a in 0..count {
        without.extend(
            (a + 1..count).filter(|b| !can_access(a, *b) || !can_access(*b, a)).map(|b| format!("{a} and {b}")),
        );
    }
    let name = "transport peer";
    let fact = |state, detail: &str| Fact::new(GROUP, name, state, detail);
    match (count, without.is_empty()) {
        (..2, _) => Vec::new(),
        (_, true) => vec![fact(State::Found, "kernels of each two GPUs store into each other's memory")],
        (_, false) => vec![
            fact(State::Limited, "not between all GPUs: kernels of the others share pinned memory")
                .because(format!("no peer access between cuda: {}", without.join(", ")))
                .cure("GPUs below one PCIe switch or with NVLink; nvidia-smi topo -p2p n"),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setting_and_sandbox_close_shared_memory_and_are_named() {
        assert_eq!(shared((true, "a net"), true, None).state, State::Found);
        let off = shared((false, "SPINIO_NET_UPGRADE=off"), false, None);
        assert_eq!((off.state, off.cure.as_deref()), (State::Limited, Some("unset SPINIO_NET_UPGRADE")));
        let refused = shared((false, "no net that shares memory listens there"), true, Some(Errno::PERM));
        assert!(refused.cause.unwrap().contains("pidfd_getfd") && refused.cure.unwrap().contains("SYS_PTRACE"));
        let other = shared((false, "the net did not answer in time"), true, None);
        assert_eq!(other.cause.as_deref(), Some("the net did not answer in time"));
        assert_eq!(inside(false, false).cause.as_deref(), Some("SPINIO_NET_UPGRADE=off"));
        assert_eq!([adopt(None).state, adopt(Some(Errno::NOSYS)).state], [State::Found, State::Absent]);
    }

    #[test]
    fn few_descriptors_have_a_cure() {
        assert!(descriptors(Some(256)).cure.is_some_and(|cure| cure.contains("ulimit -n 1024")));
        assert_eq!([Some(1024), None].map(|limit| descriptors(limit).state), [State::Found; 2]);
    }

    #[test]
    fn gpus_that_lack_something_for_a_net_are_named() {
        let lacks = |ordinal, which| {
            Some(match ordinal {
                0 => which != attribute::KERNEL_EXEC_TIMEOUT,
                1 => which == attribute::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                _ => which != attribute::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            })
        };
        let seen: Vec<_> = gpus(3, lacks).into_iter().map(|fact| (fact.name, fact.state)).collect();
        let wanted =
            [("cuda:1 net", State::Absent), ("cuda:2 net", State::Limited), ("cuda:2 time limit", State::Limited)];
        assert_eq!(seen, wanted.map(|(name, state)| (name.to_owned(), state)));
        assert!(gpus(1, |_, _| None).is_empty(), "an old driver does not know");
    }

    #[test]
    fn gpus_without_peer_access_are_named() {
        assert!(pairs(1, |_, _| unreachable!("there is no other")).is_empty());
        assert_eq!(pairs(3, |_, _| true)[0].state, State::Found);
        let fact = pairs(3, |a, b| (a, b) != (2, 0)).remove(0);
        assert_eq!((fact.state, fact.cause.as_deref()), (State::Limited, Some("no peer access between cuda: 0 and 2")));
    }
}
