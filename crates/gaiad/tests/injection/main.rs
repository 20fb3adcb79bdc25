//! A kill at every injection point of the daemon and of the client, each with the promised outcome.
//!
//! ```text
//!   a workload, undisturbed ──> which points it passes, and how often         control.rs
//!   for each of them:  arm it ──> the same workload ──> killed just there     main.rs
//!                                     └─ outcomes, bytes, names as promised   cpu, gpu, client, handoff, restart, serve.rs
//!   at the end: every point of the sources was one of them; nothing is left   common/audit.rs
//! ```
//!
//! The points are in the sources (`injection_point!`), and are found there: a new one that no workload passes fails this
//! test. By default a point is hit on its first and last pass of a workload, and some between; with SPINIO_GAIA_POINTS=all
//! on each. Builds without debug assertions have no points: there all of this is skipped.

#![cfg(debug_assertions)]
#![expect(unsafe_code, reason = "mappings and device memory")]

mod client;
#[path = "../common/mod.rs"]
mod common;
mod control;
mod cpu;
mod gpu;
mod handoff;
mod restart;
mod serve;

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use spinio_sys::injection;

use crate::common::{TestMount, audit};
use crate::control::{Control, points};

/// Passes of a point of one workload that are hit, but for the points that are passed at each word that is stored.
const PASSES: u64 = 2;
const WORDS: u64 = 8;
/// Runs of a workload until its point is hit.
const TRIES: u32 = 3;
/// A server is replaced in a fraction of a second, on a machine that is not busy.
const PATIENCE: Duration = Duration::from_secs(300);
/// Runs that take longer are named: something may have waited for the end of a time.
const SLOW: Duration = Duration::from_secs(5);

#[test]
fn server_role() {
    common::server_role();
}

#[test]
fn client_role() {
    client::role();
}

#[test]
fn leases_role() {
    serve::role();
}

/// One run of a workload.
pub(crate) struct Step<'a> {
    pub(crate) control: &'a Control,
    /// No other run has it.
    pub(crate) round: u64,
    /// What is hit, and on which pass; `None`: before each operation, the next pass.
    target: Option<(&'a str, Option<u64>)>,
    pub(crate) signal: Signal,
    /// Signals that the workload itself has asked for, and how many there were before.
    own: u64,
    before: u64,
}

impl<'a> Step<'a> {
    fn new(control: &'a Control, round: u64, target: Option<(&'a str, Option<u64>)>, signal: Signal) -> Step<'a> {
        Step { control, round, target, signal, own: 0, before: 0 }
    }

    /// The next operation begins.
    pub(crate) fn next(&self) {
        if let Some((point, None)) = self.target {
            self.control.arm(point, 1, self.signal);
        }
    }

    /// The point that is to be hit.
    pub(crate) fn point(&self) -> &str {
        self.target.map_or("", |(point, _)| point)
    }

    /// Arms the point, in a workload whose points are passed after a certain moment.
    pub(crate) fn arm(&self) {
        if let Some((point, pass)) = self.target {
            self.control.arm(point, pass.unwrap_or(1), self.signal);
        }
    }
}

impl fmt::Display for Step<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.target {
            None => write!(f, "undisturbed, run {}", self.round),
            Some((point, pass)) => {
                write!(f, "{} at {point:?}, pass {pass:?}, run {}", self.signal.as_raw(), self.round)
            }
        }
    }
}

/// Which passes of the points of a workload are hit.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hit {
    /// Some of them, one in each run.
    Once,
    /// One in each operation of one run.
    EachOperation,
    /// As `Once`, from the moment on that the workload says.
    Later,
}

/// The mount, and what was hit.
pub(crate) struct World {
    pub(crate) mount: TestMount,
    pub(crate) control: Control,
    round: u64,
    hit: BTreeSet<String>,
    hits: u64,
    kills: u64,
    /// Signals that are counted in `kills` or in the hits of a step.
    counted: u64,
}

impl World {
    pub(crate) fn new(fill: impl FnOnce(&Path)) -> Option<World> {
        World::with_supervisor(fill, |_| ())
    }

    /// With changes to the command of the supervisor.
    fn with_supervisor(fill: impl FnOnce(&Path), change: impl FnOnce(&mut Command)) -> Option<World> {
        let control = tempfile::Builder::new().prefix("spinio-points-").tempdir().unwrap();
        let control = Control::new(&control.keep().join("words"));
        let mount = TestMount::with_supervisor(fill, |supervisor| {
            supervisor.env(injection::VARIABLE, &control.path).env(common::MEMORY, (16 << 20).to_string());
            change(supervisor);
        });
        let Some(mount) = mount else {
            control.remove();
            return None;
        };
        Some(World { mount, control, round: 0, hit: BTreeSet::new(), hits: 0, kills: 0, counted: 0 })
    }

    /// Runs a workload undisturbed, and then for each point that it has passed and `wanted` names, with a signal there.
    pub(crate) fn sweep(
        &mut self,
        hit: Hit,
        signal: Signal,
        wanted: impl Fn(&str) -> bool,
        run: &mut dyn FnMut(&TestMount, &mut Step<'_>),
    ) {
        self.control.clear_passes();
        self.round += 1;
        let mut undisturbed = Step::new(&self.control, self.round, None, signal);
        run(&self.mount, &mut undisturbed);
        self.counted += undisturbed.own;
        for (point, passes) in self.control.passes() {
            // The mount ends with its supervisor: a part of its own.
            if !wanted(&point) || point.starts_with("supervisor") {
                continue;
            }
            let targets: Vec<Option<u64>> = match hit {
                Hit::Once | Hit::Later => chosen(passes, if point.contains("word stored") { WORDS } else { PASSES }),
                Hit::EachOperation => vec![None],
            };
            for pass in targets {
                // What the Linux kernel does when it likes, as forgetting a file, may not come the first time.
                let mut left = TRIES;
                while left > 0 && !self.strike(hit, &point, pass, signal, run) {
                    left -= 1;
                }
            }
        }
    }

    /// One run, with a signal at the point; whether it was sent.
    fn strike(
        &mut self,
        hit: Hit,
        point: &str,
        pass: Option<u64>,
        signal: Signal,
        run: &mut dyn FnMut(&TestMount, &mut Step<'_>),
    ) -> bool {
        self.round += 1;
        let begun = Instant::now();
        let mut step = Step::new(&self.control, self.round, Some((point, pass)), signal);
        if hit == Hit::Once {
            step.arm();
        }
        run(&self.mount, &mut step);
        self.control.disarm();
        if begun.elapsed() > SLOW {
            eprintln!("{step}: {:?}", begun.elapsed());
        }
        // With one of the last step that was sent after its end: a thread may pass a point while it is disarmed.
        let fired = self.control.fired();
        let sent = fired - std::mem::replace(&mut self.counted, fired) - step.own;
        if sent > 0 {
            self.hit.insert(point.to_owned());
        }
        if signal == Signal::KILL {
            self.kills += sent;
        }
        self.hits += sent;
        sent > 0
    }

    /// How many servers were killed.
    fn kills(&self) -> u64 {
        self.kills + self.control.fired() - self.counted
    }

    /// Only those servers have died that were killed, and nothing is left. `servers`: how many of them. It is asked again and
    /// again: a thread that was preempted between its look at the armed point and the signal sends it now.
    fn end(self, servers: impl Fn(&World) -> u64) -> Part {
        let begun = Instant::now();
        while u64::from(self.mount.servers()) != 1 + servers(&self) && begun.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(2));
        }
        let servers = servers(&self);
        let World { mount, control, hit, hits, .. } = self;
        assert_eq!(u64::from(mount.servers()), 1 + servers, "servers");
        audit::nothing_is_left(&mount, servers as usize);
        audit::unmount_and_look(mount);
        control.remove();
        Some((hit, hits))
    }
}

/// The points that a part of the test has hit, and how often; `None`: it cannot run here.
type Part = Option<(BTreeSet<String>, u64)>;

/// The passes that are hit: the first, the last, and some between.
fn chosen(passes: u64, most: u64) -> Vec<Option<u64>> {
    let all = std::env::var_os("SPINIO_GAIA_POINTS").is_some_and(|text| text == "all");
    let count = if all { passes } else { passes.min(most) };
    let spread = (0..count).map(|n| if count == 1 { 1 } else { 1 + n * (passes - 1) / (count - 1) });
    spread.collect::<BTreeSet<_>>().into_iter().map(Some).collect()
}

#[test]
fn every_point_is_survived_as_promised() {
    let (mut hit, mut hits) = (BTreeSet::new(), 0);
    let mut add = |name: &str, part: fn() -> Part| {
        let begun = Instant::now();
        let Some((points, signals)) = part() else { return false };
        eprintln!("{name}: {signals} signals at {} points in {:?}", points.len(), begun.elapsed());
        hit.extend(points);
        hits += signals;
        true
    };
    let has_run = add("CPU programs", cpu_programs)
        && add("GPU programs", gpu_programs)
        && add("servers that take over", restarts)
        && add("clients", clients)
        && add("device memory that is handed over", handoffs)
        && add("device memory that is lost", losses)
        && add("the end", ends)
        && add("supervisors", supervisors)
        && add("the daemon of leased files", serve::part);
    if !has_run {
        return;
    }
    let all: BTreeSet<String> = points().into_values().collect();
    let missed: Vec<_> = all.difference(&hit).collect();
    eprintln!("{hits} signals at {} points", hit.len());
    assert!(missed.is_empty(), "no workload passes these points: {missed:?}");
}

/// Hit in each operation: between these an operation is done and not known to be done.
fn is_name_change(point: &str) -> bool {
    ["server: name change begun", "server: name change executed", "server: name change recorded"].contains(&point)
}

fn cpu_programs() -> Part {
    let mut world = World::new(|_| ())?;
    let (names, content) = (cpu::names(), cpu::content());
    let mut change_names = |mount: &TestMount, step: &mut Step<'_>| cpu::run(mount, &names, step);
    world.sweep(Hit::EachOperation, Signal::KILL, is_name_change, &mut change_names);
    world.sweep(Hit::Once, Signal::KILL, |point| !is_name_change(point), &mut change_names);
    world.sweep(Hit::Once, Signal::KILL, |point| !is_name_change(point), &mut |mount, step| {
        cpu::run(mount, &content, step);
    });
    world.end(World::kills)
}

fn gpu_programs() -> Part {
    let mut world = World::new(|dir| std::fs::write(dir.join("file"), [0; gpu::PAGES * 4096]).unwrap())?;
    let mut programs = gpu::Programs::new(common::gpu::open(&world.mount.dir.join("file")));
    world.sweep(Hit::Once, Signal::KILL, |_| true, &mut |_, step| programs.run(step));
    drop(programs);
    let forgotten = |point: &str| point == "server: file gone" || point == "server: node forgotten";
    world.sweep(Hit::Later, Signal::KILL, forgotten, &mut |mount, step| restart::file_is_forgotten(mount, step));
    world.end(World::kills)
}

/// Each run replaces a server.
fn restarts() -> Part {
    let mut world = World::new(|dir| std::fs::write(dir.join("file"), [0; gpu::PAGES * 4096]).unwrap())?;
    let mut programs = gpu::Programs::new(common::gpu::open(&world.mount.dir.join("file")));
    let starts = [
        "server: started",
        "server: kept descriptors received",
        "server: attached",
        "server: requests asked for again",
        "server: request received again",
        "server: journal cleared",
        "server: name change answered",
        "server: page table word stored",
    ];
    let settles = ["server: invalidation asked for", "server: twins dropped", "server: file settled"];
    world.sweep(Hit::Later, Signal::KILL, |point| starts.contains(&point), &mut |mount, step| {
        restart::in_a_name_change(mount, &mut programs, step);
    });
    world.sweep(Hit::Later, Signal::KILL, |point| settles.contains(&point), &mut |mount, step| {
        restart::in_a_release(mount, &mut programs, step);
    });
    programs.file.sync_all().unwrap();
    drop(programs);
    world.end(|world| world.kills() + world.round)
}

fn clients() -> Part {
    let fill = |dir: &Path| std::fs::File::create(dir.join("file")).unwrap().set_len(client::FILE).unwrap();
    let mut world = World::new(fill)?;
    let mut programs = gpu::Programs::new(common::gpu::open(&world.mount.dir.join("file")));
    let is_client = |point: &str| point.starts_with("client");
    for signal in [Signal::KILL, Signal::STOP] {
        let mut client = client::Client::new(false);
        world.sweep(Hit::Once, signal, is_client, &mut |mount, step| client.run(mount, &mut programs, step));
        client.end();
        let mut client = client::Client::new(true);
        let in_parts = |point: &str| point == "client: part of a release sent";
        world.sweep(Hit::Once, signal, in_parts, &mut |mount, step| client.run(mount, &mut programs, step));
        client.end();
    }
    programs.file.sync_all().unwrap();
    drop(programs);
    world.end(|_| 0)
}

fn handoffs() -> Part {
    let mut world = World::new(|dir| std::fs::write(dir.join("file"), vec![0; handoff::FILE]).unwrap())?;
    let mut program = handoff::Program::new(common::gpu::open(&world.mount.dir.join("file")));
    let of_server = |point: &str| point.starts_with("server: chunks") || point.starts_with("server: bytes");
    world.sweep(Hit::Once, Signal::KILL, of_server, &mut |_, step| program.run(step));
    let servers = world.kills();
    let of_device = |point: &str| point.starts_with("device process");
    world.sweep(Hit::Once, Signal::KILL, of_device, &mut |_, step| program.run(step));
    drop(program);
    world.end(|_| servers)
}

fn losses() -> Part {
    let fill = |dir: &Path| std::fs::write(dir.join("file"), vec![0; handoff::FILE]).unwrap();
    let mut world = World::with_supervisor(fill, common::survive_file_limit)?;
    let mut program = handoff::Program::new(common::gpu::open(&world.mount.dir.join("file")));
    let found = |point: &str| point == "server: loss found";
    world.sweep(Hit::Once, Signal::KILL, found, &mut |mount, step| program.lose(mount, step));
    drop(program);
    world.end(World::kills)
}

/// A mount for each point.
fn ends() -> Part {
    let mut hit = BTreeSet::new();
    let points = ["server: unmounted", "server: released pages written", "server: all written"];
    for point in points {
        if restart::at_the_end(point, 1)? {
            hit.insert(point.to_owned());
        }
    }
    let hits = hit.len() as u64;
    Some((hit, hits))
}

/// A mount for each point.
fn supervisors() -> Part {
    let mut hit = BTreeSet::new();
    for point in points().into_values().filter(|point| point.starts_with("supervisor")) {
        restart::supervisor_dies(&point)?;
        hit.insert(point);
    }
    let hits = hit.len() as u64;
    Some((hit, hits))
}
