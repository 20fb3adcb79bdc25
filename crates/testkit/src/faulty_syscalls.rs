//! A kernel that fails, shortens or refuses chosen calls, and is otherwise the kernel.

#![expect(unsafe_code, reason = "C calls of tests")]

use std::ffi::{CStr, CString};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use spinio_host::syscalls::{LinuxSyscalls, Syscalls};
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_sys::linux::{
    Advice, CacheStat, DirectAlign, Fd, FdTableError, FdTableRoot, FileExtent, InotifyEvent, NewOwnRing, OwnRing, Ring,
    RingFile, SharedRing, Stat,
};

use crate::AdviceLog;

type Result<T> = core::result::Result<T, Errno>;

/// A call that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "named after the functions of Kernel")]
pub enum Call {
    /// A positioned read for one route.
    Pread(Route),
    Read,
    /// A write for one route.
    Pwritev(Route),
    Reopen,
    DupFromThread,
    /// Whether two threads have one descriptor table.
    SameFdTable,
    DirectAlign,
    FileSystem,
    Cachestat,
    Map,
    NewShadowTable,
    NewIoUring,
    NewSharedRing,
    NewOwnRing,
    /// A read of a thread by its own ring: counted, and made to fail as [`Call::Pread`].
    OwnRingRead,
    TakeLease,
    HasLease,
    HasWriteLease,
    /// Where a file lies.
    Extents,
    /// A lease is broken by force at once.
    LeaseBreakTime,
    /// Anything asked of sysfs or procfs by path.
    Sysfs,
    Advise,
    /// News of watched files, and how to get them.
    Inotify,
    Stat,
    Flags,
}

/// What becomes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The kernel says this.
    Fail(Errno),
    /// It moves only a part of what was asked for, in whole units of so many bytes, at least one.
    Short(usize),
    /// It delivers bytes that are not those of the file, or of the memory that is written.
    Corrupt,
}

#[derive(Clone, Copy, Debug)]
struct Fault {
    call: Call,
    effect: Effect,
    /// Calls left that pass first.
    skip: u64,
    /// Calls left that are hit.
    times: u64,
    /// Of these, how often: every n-th.
    every: u64,
    count: u64,
}

/// The kernel with faults.
#[derive(Debug, Default)]
pub struct FaultySyscalls {
    faults: Mutex<Vec<Fault>>,
    injected: Mutex<u64>,
    calls: Mutex<Vec<(Call, u64)>>,
    advice: AdviceLog,
    has_ring: bool,
}

impl FaultySyscalls {
    /// Without a fault yet.
    pub fn new() -> &'static FaultySyscalls {
        Box::leak(Box::default())
    }

    /// The same with the ring: otherwise shadow workers make all reads of storage, so that these can be made to fail.
    pub fn with_ring() -> &'static FaultySyscalls {
        Box::leak(Box::new(FaultySyscalls { has_ring: true, ..FaultySyscalls::default() }))
    }

    /// From the `nth` such call on (1: the next), `times` times.
    pub fn inject(&self, call: Call, nth: u64, times: u64, effect: Effect) {
        self.faults().push(Fault { call, effect, skip: nth - 1, times, every: 1, count: 0 });
    }

    /// Always.
    pub fn inject_always(&self, call: Call, effect: Effect) {
        self.inject(call, 1, u64::MAX, effect);
    }

    /// Every `every`-th such call, forever.
    pub fn inject_every(&self, call: Call, every: u64, effect: Effect) {
        self.faults().push(Fault { call, effect, skip: 0, times: u64::MAX, every, count: 0 });
    }

    /// No more faults.
    pub fn clear_faults(&self) {
        self.faults().clear();
    }

    /// Calls that were hit so far.
    pub fn injected(&self) -> u64 {
        *self.injected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How often the kernel was called so, hit or not.
    pub fn calls(&self, call: Call) -> u64 {
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.iter().find(|c| c.0 == call).map_or(0, |c| c.1)
    }

    /// The advice on files that the kernel has followed.
    pub fn advice(&self) -> &AdviceLog {
        &self.advice
    }

    fn count(&self, call: Call) {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        match calls.iter_mut().find(|c| c.0 == call) {
            Some(entry) => entry.1 += 1,
            None => calls.push((call, 1)),
        }
    }

    fn faults(&self) -> MutexGuard<'_, Vec<Fault>> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn effect(&self, call: Call) -> Option<Effect> {
        self.count(call);
        let mut faults = self.faults();
        let fault = faults.iter_mut().find(|f| f.call == call && f.times > 0)?;
        if fault.skip > 0 {
            fault.skip -= 1;
            return None;
        }
        fault.count += 1;
        if !fault.count.is_multiple_of(fault.every) {
            return None;
        }
        fault.times -= 1;
        let effect = fault.effect;
        drop(faults);
        *self.injected.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Some(effect)
    }

    fn check(&self, call: Call) -> Result<()> {
        match self.effect(call) {
            Some(Effect::Fail(errno)) => Err(errno),
            _ => Ok(()),
        }
    }

    /// # Safety
    /// `read` must be safe for up to `len` bytes of `buf`.
    unsafe fn with_fault(
        &self,
        call: Call,
        buf: *mut u8,
        len: usize,
        read: impl FnOnce(usize) -> Result<usize>,
    ) -> Result<usize> {
        match self.effect(call) {
            None => read(len),
            Some(Effect::Fail(errno)) => Err(errno),
            Some(Effect::Short(unit)) => read((len / 2 / unit * unit).max(unit.min(len))),
            Some(Effect::Corrupt) => {
                let read_len = read(len)?;
                for at in 0..read_len {
                    // SAFETY: the read filled these bytes.
                    unsafe { buf.add(at).write(!buf.add(at).read()) };
                }
                Ok(read_len)
            }
        }
    }
}

impl Syscalls for FaultySyscalls {
    unsafe fn pread(&self, route: Route, fd: Fd, buf: *mut u8, len: usize, offset: u64, flags: u32) -> Result<usize> {
        // SAFETY: passed on to the caller, for at most `len` bytes.
        unsafe {
            self.with_fault(Call::Pread(route), buf, len, |len| LinuxSyscalls.pread(route, fd, buf, len, offset, flags))
        }
    }

    unsafe fn read(&self, fd: Fd, buf: *mut u8, len: usize) -> Result<usize> {
        // SAFETY: passed on to the caller, for at most `len` bytes.
        unsafe { self.with_fault(Call::Read, buf, len, |len| LinuxSyscalls.read(fd, buf, len)) }
    }

    unsafe fn pwritev(
        &self,
        route: Route,
        fd: Fd,
        vectors: &[[usize; 2]],
        at: Option<u64>,
        flags: u32,
    ) -> Result<usize> {
        // SAFETY: passed on to the caller, for at most these vectors.
        let write = |vectors: &[[usize; 2]]| unsafe { LinuxSyscalls.pwritev(route, fd, vectors, at, flags) };
        match self.effect(Call::Pwritev(route)) {
            None => write(vectors),
            Some(Effect::Fail(errno)) => Err(errno),
            Some(Effect::Short(unit)) => {
                let len: usize = vectors.iter().map(|v| v[1]).sum();
                let mut left = (len / 2 / unit * unit).max(unit.min(len));
                let mut shorter = Vec::new();
                for &[at, len] in vectors {
                    shorter.push([at, len.min(left)]);
                    left -= len.min(left);
                }
                shorter.retain(|v| v[1] > 0);
                write(&shorter)
            }
            Some(Effect::Corrupt) => {
                let mut corrupted = Vec::new();
                for &[at, len] in vectors {
                    // SAFETY: the caller's promise: memory that stays readable.
                    let original = unsafe { core::slice::from_raw_parts(at as *const u8, len) };
                    corrupted.extend(original.iter().map(|b| !b));
                }
                let len = corrupted.len();
                corrupted.resize(len + 4096, 0);
                let skip = corrupted.as_ptr().align_offset(4096);
                corrupted.copy_within(..len, skip);
                write(&[[corrupted[skip..].as_ptr() as usize, len]])
            }
        }
    }

    fn reopen(&self, tid: u32, fd: Fd, flags: i32) -> Result<Fd> {
        self.check(Call::Reopen)?;
        LinuxSyscalls.reopen(tid, fd, flags)
    }

    fn dup_from_thread(&self, tid: u32, fd: Fd) -> Result<Fd> {
        self.check(Call::DupFromThread)?;
        LinuxSyscalls.dup_from_thread(tid, fd)
    }

    fn same_fd_table(&self, tid: u32, other_tid: u32) -> Result<bool> {
        self.check(Call::SameFdTable)?;
        LinuxSyscalls.same_fd_table(tid, other_tid)
    }

    fn direct_align(&self, fd: Fd) -> Result<Option<DirectAlign>> {
        self.check(Call::DirectAlign)?;
        LinuxSyscalls.direct_align(fd)
    }

    fn file_system(&self, fd: Fd) -> Result<u64> {
        self.check(Call::FileSystem)?;
        LinuxSyscalls.file_system(fd)
    }

    fn extents(&self, fd: Fd, offset: u64, len: u64, max_count: usize) -> Result<Vec<FileExtent>> {
        self.check(Call::Extents)?;
        LinuxSyscalls.extents(fd, offset, len, max_count)
    }

    fn fstat(&self, fd: Fd) -> Result<Stat> {
        self.check(Call::Stat)?;
        LinuxSyscalls.fstat(fd)
    }

    fn status_flags(&self, fd: Fd) -> Result<i32> {
        self.check(Call::Flags)?;
        LinuxSyscalls.status_flags(fd)
    }

    fn cachestat(&self, fd: Fd, offset: u64, len: u64) -> Result<CacheStat> {
        self.check(Call::Cachestat)?;
        LinuxSyscalls.cachestat(fd, offset, len)
    }

    fn map(&self, fd: Fd, len: usize) -> Result<*mut u8> {
        self.check(Call::Map)?;
        LinuxSyscalls.map(fd, len)
    }

    fn read_sysfs(&self, path: &CStr, max_len: usize) -> Result<Vec<u8>> {
        self.check(Call::Sysfs)?;
        LinuxSyscalls.read_sysfs(path, max_len)
    }

    fn list_dir(&self, path: &CStr) -> Result<Vec<CString>> {
        self.check(Call::Sysfs)?;
        LinuxSyscalls.list_dir(path)
    }

    fn read_link(&self, path: &CStr) -> Result<Vec<u8>> {
        self.check(Call::Sysfs)?;
        LinuxSyscalls.read_link(path)
    }

    fn advise(&self, fd: Fd, offset: u64, len: u64, advice: Advice) -> Result<()> {
        self.check(Call::Advise)?;
        LinuxSyscalls.advise(fd, offset, len, advice)?;
        self.advice.record(fd, offset, len, advice);
        Ok(())
    }

    fn inotify_init(&self) -> Result<Fd> {
        self.check(Call::Inotify)?;
        LinuxSyscalls.inotify_init()
    }

    fn watch_opens(&self, inotify: Fd, fd: Fd) -> Result<i32> {
        self.check(Call::Inotify)?;
        LinuxSyscalls.watch_opens(inotify, fd)
    }

    fn watch_changes(&self, inotify: Fd, fd: Fd) -> Result<i32> {
        self.check(Call::Inotify)?;
        LinuxSyscalls.watch_changes(inotify, fd)
    }

    fn inotify_events(&self, inotify: Fd) -> Result<Vec<InotifyEvent>> {
        self.check(Call::Inotify)?;
        LinuxSyscalls.inotify_events(inotify)
    }

    fn new_shadow_table(&self) -> core::result::Result<FdTableRoot, FdTableError> {
        self.check(Call::NewShadowTable).map_err(FdTableError::Unshare)?;
        LinuxSyscalls.new_shadow_table()
    }

    fn new_io_uring(&self, entries: u32) -> Result<Ring> {
        self.check(Call::NewIoUring)?;
        LinuxSyscalls.new_io_uring(entries)
    }

    fn take_lease(&self, fd: Fd, tid: u32) -> Result<()> {
        self.check(Call::TakeLease)?;
        LinuxSyscalls.take_lease(fd, tid)
    }

    fn has_lease(&self, fd: Fd) -> bool {
        self.check(Call::HasLease).is_ok() && LinuxSyscalls.has_lease(fd)
    }

    fn has_write_lease(&self, fd: Fd) -> bool {
        self.check(Call::HasWriteLease).is_ok() && LinuxSyscalls.has_write_lease(fd)
    }

    fn lease_break_time(&self) -> Option<u64> {
        if self.check(Call::LeaseBreakTime).is_ok() { LinuxSyscalls.lease_break_time() } else { Some(0) }
    }

    fn new_own_ring(&self, slots: u32) -> Result<NewOwnRing> {
        self.check(Call::NewOwnRing)?;
        LinuxSyscalls.new_own_ring(slots)
    }

    unsafe fn read_by_own_ring(
        &self,
        route: Route,
        ring: (&OwnRing, RingFile),
        (buf, len): (*mut u8, usize),
        offset: u64,
        on_wait: &mut dyn FnMut(),
    ) -> Result<usize> {
        self.count(Call::OwnRingRead);
        // SAFETY: passed on to the caller, for at most `len` bytes.
        let read = |len| unsafe { LinuxSyscalls.read_by_own_ring(route, ring, (buf, len), offset, on_wait) };
        // SAFETY: as above.
        unsafe { self.with_fault(Call::Pread(route), buf, len, read) }
    }

    fn new_shared_ring(&self, entries: u32, slots: u32, idle: Duration) -> Result<SharedRing> {
        self.check(Call::NewSharedRing)?;
        if !self.has_ring {
            return Err(Errno::NOSYS);
        }
        LinuxSyscalls.new_shared_ring(entries, slots, idle)
    }

    fn on_completion(&self, result: Result<usize>) -> Result<usize> {
        match self.effect(Call::Pread(Route::Direct)) {
            Some(Effect::Fail(errno)) => result.and(Err(errno)),
            Some(Effect::Short(unit)) => result.map(|n| n / 2 / unit * unit),
            _ => result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_affect_named_calls() {
        let kernel = FaultySyscalls::new();
        let tries = |n: usize| (0..n).map(|_| kernel.check(Call::Map).is_ok()).collect::<Vec<_>>();
        kernel.inject(Call::Map, 2, 2, Effect::Fail(Errno::NOMEM));
        assert_eq!(tries(4), [true, false, false, true]);
        assert_eq!(kernel.check(Call::Cachestat), Ok(()));
        kernel.clear_faults();
        kernel.inject_every(Call::Map, 3, Effect::Fail(Errno::NOMEM));
        assert_eq!(tries(6), [true, true, false, true, true, false]);
        assert_eq!(kernel.injected(), 4);
    }
}
