//! A server that is killed while it takes over from another one, and the end of the mount.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use spinio_gaiad::Supervisor;

use crate::common::TestMount;
use crate::common::gpu::{Gpu, PAGE, open};
use crate::gpu::{PAGES, Programs, bytes};
use crate::{PATIENCE, Step, World};

/// The server stops in the middle of a change of names and is killed; the next one is killed at the point. A file without
/// a name is open, and there are released pages.
pub(crate) fn in_a_name_change(mount: &TestMount, programs: &mut Programs, step: &mut Step<'_>) {
    let name = mount.dir.join(format!("name-{}", step.round));
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(&name).unwrap();
    file.write_all_at(b"nameless", 0).unwrap();
    std::fs::remove_file(&name).unwrap();
    let byte = programs.leave_released(step);
    std::thread::scope(|scope| {
        step.stop_at("server: name change executed");
        let made = scope.spawn(|| std::fs::create_dir(&name));
        step.await_stop();
        step.arm();
        mount.kill_server();
        made.join().unwrap().unwrap();
    });
    std::fs::remove_dir(&name).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let mut text = [0; 8];
    file.read_exact_at(&mut text, 0).unwrap();
    assert_eq!(&text, b"nameless", "{step}");
    programs.verify_released(byte, step);
    programs.run(step);
}

/// The same in a release that is committed, whose pages the kernel has still.
pub(crate) fn in_a_release(mount: &TestMount, programs: &mut Programs, step: &mut Step<'_>) {
    step.stop_at("server: release committed");
    let byte = std::thread::scope(|scope| {
        let released = scope.spawn(|| programs.leave_released(step));
        step.await_stop();
        step.arm();
        mount.kill_server();
        released.join().unwrap()
    });
    programs.verify_released(byte, step);
    programs.run(step);
}

/// A file with a page table that loses its last name and its last user.
pub(crate) fn file_is_forgotten(mount: &TestMount, step: &mut Step<'_>) {
    let path = mount.dir.join(format!("gone-{}", step.round));
    std::fs::write(&path, [1; PAGE]).unwrap();
    let file = open(&path);
    let gpu = Gpu::new(&file, 1);
    gpu.epoch(1, 2);
    file.sync_all().unwrap();
    std::fs::remove_file(&path).unwrap();
    let (passed, fired) = (step.control.passed("server: file gone"), step.control.fired());
    step.arm();
    drop((gpu, file));
    let begun = Instant::now();
    let is_over = || step.control.passed("server: file gone") > passed || step.control.fired() > fired;
    // A file that no client uses loses its table after a second; on a busy machine, or if the Linux kernel likes, later.
    while !is_over() && begun.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Released pages are written when the mount ends, also if the server dies meanwhile.
pub(crate) fn at_the_end(point: &str, pass: u64) -> Option<bool> {
    let world = World::new(|dir: &Path| std::fs::write(dir.join("file"), [1; PAGES * PAGE]).unwrap())?;
    let World { mount, control, .. } = world;
    let file = open(&mount.dir.join("file"));
    let gpu = Gpu::new(&file, PAGES);
    gpu.epoch(PAGES, 7);
    drop((gpu, file));
    control.arm(point, pass, Signal::KILL);
    let (dir, _root) = mount.unmount();
    let hit = control.fired() > 0;
    control.remove();
    let file = std::fs::File::open(dir.join("file")).unwrap();
    assert_eq!(bytes(&file, PAGES, 5), [7; PAGES], "the server was killed at {point:?}: {hit}");
    Some(hit)
}

/// The mount ends with its supervisor and server, as a machine that crashes: what was synced is there, and a new mount
/// replaces it.
pub(crate) fn supervisor_dies(point: &str) -> Option<()> {
    let World { mut mount, control, .. } =
        World::new(|dir: &Path| std::fs::write(dir.join("file"), [1; PAGE]).unwrap())?;
    let file = open(&mount.dir.join("file"));
    let gpu = Gpu::new(&file, 1);
    gpu.epoch(1, 7);
    file.sync_all().unwrap();
    let killed = [mount.invalidator(), mount.server()];
    control.arm(point, 1, Signal::KILL);
    // A descriptor to keep, and to drop; then a new server and a new invalidator. Where the supervisor is dead, they are not.
    let nameless = mount.dir.join("nameless");
    drop((std::fs::File::create(&nameless).unwrap(), std::fs::remove_file(&nameless).unwrap()));
    let begun = Instant::now();
    let alone = ["supervisor: descriptor kept", "supervisor: descriptor dropped"].contains(&point);
    for process in killed.into_iter().filter(|_| !alone) {
        let process = Pid::from_raw(process as i32).unwrap();
        let dead = pidfd_open(process, PidfdFlags::empty()).unwrap();
        kill_process(process, Signal::KILL).unwrap();
        // An invalidator that is still ending is not replaced before a server needs it.
        rustix::io::retry_on_intr(|| poll(&mut [PollFd::new(&dead, PollFlags::IN)], None)).unwrap();
    }
    while control.fired() == 0 {
        assert!(begun.elapsed() < PATIENCE, "{point:?} is not passed");
        std::thread::sleep(Duration::from_millis(1));
    }
    mount.kill_supervisor();
    let refused = file.sync_all().unwrap_err();
    assert!(matches!(refused.raw_os_error(), Some(103 | 107)), "{point:?}: {refused}");
    drop((gpu, file));
    drop(Supervisor::mount(&mount.dir, 0).unwrap());
    let file = std::fs::File::open(mount.dir.join("file")).unwrap();
    assert_eq!(bytes(&file, 1, 5), [7], "{point:?}");
    let names: Vec<_> = std::fs::read_dir(&mount.dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["file"], "{point:?}");
    control.remove();
    Some(())
}

impl Step<'_> {
    /// The server stops when it passes this.
    fn stop_at(&mut self, point: &str) {
        self.own += 1;
        self.before = self.control.fired();
        self.control.arm(point, 1, Signal::STOP);
    }

    fn await_stop(&self) {
        let begun = Instant::now();
        while self.control.fired() == self.before {
            assert!(begun.elapsed() < PATIENCE, "the server does not stop, {self}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
