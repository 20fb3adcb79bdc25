//! Faults of the network from a seed, for tests: what a Linux kernel may do at any time and seldom does.
//!
//! Each system call that moves bytes may move one byte only, be interrupted, or come later. The results of calls stay the same:
//! the seed changes only how many steps they take.

use spinio_sys::Errno;

/// What happens to a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Nothing.
    None,
    /// It moves one byte.
    Short,
    /// EINTR.
    Interrupted,
    /// It is made in a later pass.
    Late,
}

/// The faults to come; none with the seed 0.
#[derive(Debug)]
pub(crate) struct Faults {
    state: u64,
}

impl Faults {
    pub(crate) fn new(seed: u32) -> Faults {
        // Neighbouring seeds are far apart.
        Faults { state: u64::from(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) }
    }

    /// Faults for the calls of one socket in one pass, which another thread may make at the same time as others.
    pub(crate) fn split(&mut self) -> Faults {
        if self.state != 0 {
            self.next();
        }
        // Never 0: that would be no faults.
        Faults { state: if self.state == 0 { 0 } else { self.state.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1 } }
    }

    /// Makes the next call, which moves up to `len` bytes; `None` if it is not made in this pass.
    pub(crate) fn apply(
        &mut self,
        len: usize,
        call: impl FnOnce(usize) -> Result<usize, Errno>,
    ) -> Option<Result<usize, Errno>> {
        match self.next() {
            Fault::None => Some(call(len)),
            Fault::Short => Some(call(1)),
            Fault::Interrupted => Some(Err(Errno::INTR)),
            Fault::Late => None,
        }
    }

    /// What happens to the next call: three of four are hit.
    pub(crate) fn next(&mut self) -> Fault {
        if self.state == 0 {
            return Fault::None;
        }
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        match self.state >> 32 & 7 {
            0 | 1 => Fault::None,
            2..=5 => Fault::Short,
            6 => Fault::Interrupted,
            _ => Fault::Late,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_0_has_no_faults_and_others_have_all() {
        let mut none = Faults::new(0);
        assert!((0..100).all(|_| none.next() == Fault::None));
        let mut some = Faults::new(1);
        let seen: Vec<Fault> = (0..100).map(|_| some.next()).collect();
        for fault in [Fault::None, Fault::Short, Fault::Interrupted, Fault::Late] {
            assert!(seen.contains(&fault), "{fault:?}");
        }
    }

    #[test]
    fn sockets_that_are_split_off_have_faults_of_their_own() {
        assert!((0..100).all(|_| Faults::new(0).split().next() == Fault::None));
        let mut some = Faults::new(1);
        let seen: Vec<Fault> = (0..100).map(|_| some.split().next()).collect();
        for fault in [Fault::None, Fault::Short, Fault::Interrupted, Fault::Late] {
            assert!(seen.contains(&fault), "{fault:?}");
        }
    }
}
