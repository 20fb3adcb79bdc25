//! The signal mask of the calling thread.

#![expect(unsafe_code, reason = "libc calls on signal sets")]

use core::cell::Cell;
use core::mem::MaybeUninit;
use std::time::{Duration, Instant};

/// Signals that a thread raises by its own instruction or system call. The kernel kills a thread that blocks them.
const SYNCHRONOUS: [i32; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];

/// Between two looks for a signal that ends the process: as soon as a person notices.
pub const SIGNAL_INTERVAL: Duration = Duration::from_millis(20);

/// A thread that holds the program's signals for longer than an instant.
#[derive(Clone, Copy)]
struct Held {
    /// What the program itself blocks.
    mask: libc::sigset_t,
    checked: Instant,
}

thread_local! {
    static HELD: Cell<Option<Held>> = const { Cell::new(None) };
}

/// From here on the calling thread holds signals by this guard, and lets some through where it waits
/// ([`deliver_default_signals`]); `None`: it holds none any more.
pub fn hold_signals_by(guard: Option<&SignalGuard>) {
    HELD.set(guard.map(|guard| Held { mask: guard.0, checked: Instant::now() }));
}

/// Whether the calling thread holds signals by a guard.
pub fn holds_signals() -> bool {
    HELD.get().is_some()
}

/// The same, for the beginning of a call. A handler of SIGSEGV runs although signals are held: if it has jumped out of the call
/// that held them, the mask is what it was before, and the guard is of no use. Another mask is that of a handler that may
/// still return into that call.
pub fn holds_signals_still() -> bool {
    let Some(held) = HELD.get() else { return false };
    if is_same(&SignalGuard::block_asynchronous().0, &held.mask) {
        hold_signals_by(None);
    }
    holds_signals()
}

fn is_same(a: &libc::sigset_t, b: &libc::sigset_t) -> bool {
    // SAFETY: both are initialised; a number that is no signal is a member of neither.
    (1..=libc::SIGRTMAX()).all(|signal| unsafe { libc::sigismember(a, signal) == libc::sigismember(b, signal) })
}

/// For a thread that waits or has more to do, while it holds signals: lets those pending ones through whose action is the
/// default, such as to end or to stop the process. Those with a handler go on waiting. Cheap to call often: it looks for them
/// every 20 ms.
pub fn deliver_default_signals() {
    let Some(held) = HELD.get() else { return };
    if held.checked.elapsed() >= SIGNAL_INTERVAL {
        HELD.set(Some(Held { checked: Instant::now(), ..held }));
        unblock_pending_defaults(&held.mask);
    }
}

fn unblock_pending_defaults(program: &libc::sigset_t) {
    let mut pending = MaybeUninit::<libc::sigset_t>::uninit();
    let mut defaults = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the calls initialise the sets, and `action` where they return 0; all are local.
    let (defaults, any) = unsafe {
        libc::sigemptyset(defaults.as_mut_ptr());
        if libc::sigpending(pending.as_mut_ptr()) != 0 {
            return;
        }
        let mut any = false;
        for signal in (1..=libc::SIGRTMAX()).filter(|&signal| libc::sigismember(pending.as_ptr(), signal) == 1) {
            let mut action = MaybeUninit::<libc::sigaction>::uninit();
            let is_default = libc::sigaction(signal, core::ptr::null(), action.as_mut_ptr()) == 0
                && action.assume_init_ref().sa_sigaction == libc::SIG_DFL;
            // The program's own mask stays in force.
            if is_default && libc::sigismember(program, signal) == 0 {
                libc::sigaddset(defaults.as_mut_ptr(), signal);
                any = true;
            }
        }
        (defaults.assume_init(), any)
    };
    if any {
        set_mask(libc::SIG_UNBLOCK, &defaults);
        set_mask(libc::SIG_BLOCK, &defaults);
    }
}

/// The calling thread handles no signal of the program until this is dropped.
pub struct SignalGuard(libc::sigset_t);

impl SignalGuard {
    /// Blocks all but those that glibc needs itself.
    pub fn block_all() -> SignalGuard {
        SignalGuard(set_mask(libc::SIG_SETMASK, &full_set()))
    }

    /// The same, but those that a thread raises itself: for code that may fault, or that a seccomp filter may trap.
    pub fn block_asynchronous() -> SignalGuard {
        let mut set = full_set();
        for signal in SYNCHRONOUS {
            // SAFETY: an initialised set and a valid number.
            unsafe { libc::sigdelset(&raw mut set, signal) };
        }
        SignalGuard(set_mask(libc::SIG_BLOCK, &set))
    }

    /// Whether all that [`SignalGuard::block_asynchronous`] blocks was blocked before.
    pub fn changed_nothing(&self) -> bool {
        let held = |signal: &i32| {
            // SAFETY: an initialised set and a valid number.
            SYNCHRONOUS.contains(signal) || unsafe { libc::sigismember(&raw const self.0, *signal) } == 1
        };
        // The two that the kernel never blocks, and those of glibc.
        let blockable = |signal: &i32| {
            !matches!(*signal, libc::SIGKILL | libc::SIGSTOP) && (*signal < 32 || *signal >= libc::SIGRTMIN())
        };
        (1..=libc::SIGRTMAX()).filter(blockable).all(|signal| held(&signal))
    }

    /// What was blocked before, as the Linux kernel has it: bit n is signal n + 1.
    pub(super) fn previous_mask(&self) -> u64 {
        // SAFETY: an initialised set, which begins with these bits.
        unsafe { (&raw const self.0).cast::<u64>().read_unaligned() }
    }
}

impl Drop for SignalGuard {
    fn drop(&mut self) {
        set_mask(libc::SIG_SETMASK, &self.0);
    }
}

/// glibc's, without the two signals that it needs for pthread_cancel and setuid.
fn full_set() -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the call initialises the set.
    unsafe {
        libc::sigfillset(set.as_mut_ptr());
        set.assume_init()
    }
}

/// Changes the mask; returns what it was.
fn set_mask(how: i32, set: &libc::sigset_t) -> libc::sigset_t {
    let mut old = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: an initialised set; the call initialises `old`, as it fails for an unknown `how` only.
    unsafe {
        libc::pthread_sigmask(how, set, old.as_mut_ptr());
        old.assume_init()
    }
}
