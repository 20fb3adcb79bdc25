//! A kernel that fails, shortens or refuses chosen calls, and is otherwise the kernel.

use std::ffi::{CStr, CString};
use std::sync::{Mutex, MutexGuard, PoisonError};

use spinio_host::syscalls::{Kernel, Linux};
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_sys::linux::{Advice, CacheStat, DirectAlign, Fd, News, Placed, Private, PrivateError, Ring, Stat};

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
    OpenAgain,
    Share,
    /// Whether two threads have one descriptor table.
    OneTable,
    DirectAlign,
    FileSystem,
    Cachestat,
    Map,
    Private,
    Ring,
    TakeLease,
    HasLease,
    HasWriteLease,
    /// Where a file lies.
    Extents,
    /// A lease is broken by force at once.
    BreakTime,
    /// Anything asked of sysfs or procfs by path.
    Sysfs,
    Advise,
    /// A mark of the kernel's read-ahead.
    Touch,
    /// News of watched files, and how to get them.
    Notify,
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
    Lie,
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
pub struct FaultyKernel {
    faults: Mutex<Vec<Fault>>,
    hits: Mutex<u64>,
    calls: Mutex<Vec<(Call, u64)>>,
}

impl FaultyKernel {
    /// Without a fault yet.
    pub fn new() -> &'static FaultyKernel {
        Box::leak(Box::default())
    }

    /// From the `nth` such call on (1: the next), `times` times.
    pub fn hit(&self, call: Call, nth: u64, times: u64, effect: Effect) {
        self.faults().push(Fault { call, effect, skip: nth - 1, times, every: 1, count: 0 });
    }

    /// Always.
    pub fn always(&self, call: Call, effect: Effect) {
        self.hit(call, 1, u64::MAX, effect);
    }

    /// Every `every`-th such call, for ever.
    pub fn now_and_then(&self, call: Call, every: u64, effect: Effect) {
        self.faults().push(Fault { call, effect, skip: 0, times: u64::MAX, every, count: 0 });
    }

    /// No more faults.
    pub fn heal(&self) {
        self.faults().clear();
    }

    /// Calls that were hit so far.
    pub fn hits(&self) -> u64 {
        *self.hits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How often the kernel was called so, hit or not.
    pub fn calls(&self, call: Call) -> u64 {
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.iter().find(|c| c.0 == call).map_or(0, |c| c.1)
    }

    fn count(&self, call: Call) {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        match calls.iter_mut().find(|c| c.0 == call) {
            Some(known) => known.1 += 1,
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
        *self.hits.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Some(effect)
    }

    fn pass(&self, call: Call) -> Result<()> {
        match self.effect(call) {
            Some(Effect::Fail(errno)) => Err(errno),
            _ => Ok(()),
        }
    }

    /// # Safety
    /// `read` must be safe for up to `len` bytes of `buf`.
    unsafe fn damaged(
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
            Some(Effect::Lie) => {
                let got = read(len)?;
                for at in 0..got {
                    // SAFETY: the read filled these bytes.
                    unsafe { buf.add(at).write(!buf.add(at).read()) };
                }
                Ok(got)
            }
        }
    }
}

impl Kernel for FaultyKernel {
    unsafe fn pread(&self, route: Route, fd: Fd, buf: *mut u8, len: usize, offset: u64, flags: u32) -> Result<usize> {
        // SAFETY: passed on to the caller, for at most `len` bytes.
        unsafe { self.damaged(Call::Pread(route), buf, len, |len| Linux.pread(route, fd, buf, len, offset, flags)) }
    }

    unsafe fn read(&self, fd: Fd, buf: *mut u8, len: usize) -> Result<usize> {
        // SAFETY: passed on to the caller, for at most `len` bytes.
        unsafe { self.damaged(Call::Read, buf, len, |len| Linux.read(fd, buf, len)) }
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
        let write = |vectors: &[[usize; 2]]| unsafe { Linux.pwritev(route, fd, vectors, at, flags) };
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
            Some(Effect::Lie) => {
                let mut lies = Vec::new();
                for &[at, len] in vectors {
                    // SAFETY: the caller's promise: memory that stays readable.
                    let true_bytes = unsafe { core::slice::from_raw_parts(at as *const u8, len) };
                    lies.extend(true_bytes.iter().map(|b| !b));
                }
                let len = lies.len();
                lies.resize(len + 4096, 0);
                let skip = lies.as_ptr().align_offset(4096);
                lies.copy_within(..len, skip);
                write(&[[lies[skip..].as_ptr() as usize, len]])
            }
        }
    }

    fn open_again(&self, tid: u32, fd: Fd, flags: i32) -> Result<Fd> {
        self.pass(Call::OpenAgain)?;
        Linux.open_again(tid, fd, flags)
    }

    fn share(&self, tid: u32, fd: Fd) -> Result<Fd> {
        self.pass(Call::Share)?;
        Linux.share(tid, fd)
    }

    fn have_one_table(&self, one: u32, other: u32) -> Result<bool> {
        self.pass(Call::OneTable)?;
        Linux.have_one_table(one, other)
    }

    fn direct_align(&self, fd: Fd) -> Result<Option<DirectAlign>> {
        self.pass(Call::DirectAlign)?;
        Linux.direct_align(fd)
    }

    fn file_system(&self, fd: Fd) -> Result<u64> {
        self.pass(Call::FileSystem)?;
        Linux.file_system(fd)
    }

    fn extents(&self, fd: Fd, offset: u64, len: u64, most: usize) -> Result<Vec<Placed>> {
        self.pass(Call::Extents)?;
        Linux.extents(fd, offset, len, most)
    }

    fn fstat(&self, fd: Fd) -> Result<Stat> {
        self.pass(Call::Stat)?;
        Linux.fstat(fd)
    }

    fn flags(&self, fd: Fd) -> Result<i32> {
        self.pass(Call::Flags)?;
        Linux.flags(fd)
    }

    fn cachestat(&self, fd: Fd, offset: u64, len: u64) -> Result<CacheStat> {
        self.pass(Call::Cachestat)?;
        Linux.cachestat(fd, offset, len)
    }

    fn map(&self, fd: Fd, len: usize) -> Result<*mut u8> {
        self.pass(Call::Map)?;
        Linux.map(fd, len)
    }

    fn text(&self, path: &CStr, most: usize) -> Result<Vec<u8>> {
        self.pass(Call::Sysfs)?;
        Linux.text(path, most)
    }

    fn list(&self, path: &CStr) -> Result<Vec<CString>> {
        self.pass(Call::Sysfs)?;
        Linux.list(path)
    }

    fn link(&self, path: &CStr) -> Result<Vec<u8>> {
        self.pass(Call::Sysfs)?;
        Linux.link(path)
    }

    fn advise(&self, fd: Fd, offset: u64, len: u64, advice: Advice) -> Result<()> {
        self.pass(Call::Advise)?;
        Linux.advise(fd, offset, len, advice)
    }

    fn touch(&self, fd: Fd, offset: u64) -> Result<()> {
        self.pass(Call::Touch)?;
        Linux.touch(fd, offset)
    }

    fn notify(&self) -> Result<Fd> {
        self.pass(Call::Notify)?;
        Linux.notify()
    }

    fn watch(&self, notify: Fd, fd: Fd) -> Result<i32> {
        self.pass(Call::Notify)?;
        Linux.watch(notify, fd)
    }

    fn watch_changes(&self, notify: Fd, fd: Fd) -> Result<i32> {
        self.pass(Call::Notify)?;
        Linux.watch_changes(notify, fd)
    }

    fn news(&self, notify: Fd) -> Result<Vec<News>> {
        self.pass(Call::Notify)?;
        Linux.news(notify)
    }

    fn private(&self) -> core::result::Result<Private, PrivateError> {
        self.pass(Call::Private).map_err(PrivateError::Table)?;
        Linux.private()
    }

    fn ring(&self, entries: u32) -> Result<Ring> {
        self.pass(Call::Ring)?;
        Linux.ring(entries)
    }

    fn take_lease(&self, fd: Fd, tid: u32) -> Result<()> {
        self.pass(Call::TakeLease)?;
        Linux.take_lease(fd, tid)
    }

    fn has_lease(&self, fd: Fd) -> bool {
        self.pass(Call::HasLease).is_ok() && Linux.has_lease(fd)
    }

    fn has_write_lease(&self, fd: Fd) -> bool {
        self.pass(Call::HasWriteLease).is_ok() && Linux.has_write_lease(fd)
    }

    fn lease_break_time(&self) -> Option<u64> {
        if self.pass(Call::BreakTime).is_ok() { Linux.lease_break_time() } else { Some(0) }
    }

    fn landed(&self, result: Result<usize>) -> Result<usize> {
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
    fn faults_hit_the_calls_they_name() {
        let kernel = FaultyKernel::new();
        let tries = |n: usize| (0..n).map(|_| kernel.pass(Call::Map).is_ok()).collect::<Vec<_>>();
        kernel.hit(Call::Map, 2, 2, Effect::Fail(Errno::NOMEM));
        assert_eq!(tries(4), [true, false, false, true]);
        assert_eq!(kernel.pass(Call::Cachestat), Ok(()));
        kernel.heal();
        kernel.now_and_then(Call::Map, 3, Effect::Fail(Errno::NOMEM));
        assert_eq!(tries(6), [true, true, false, true, true, false]);
        assert_eq!(kernel.hits(), 4);
    }
}
