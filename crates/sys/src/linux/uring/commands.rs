//! A read that is cut into commands, which begin in order and end in any order. Pure: no ring, no system call.
//!
//! ```text
//!   0 ──────── size ──────── 2 size ──────── 3 size ── len
//!     whole          short: the bytes end here
//! ```
//!
//! A read delivers the bytes before the first that is missing, as `pread` does.

use rustix::io::Errno;

use super::Result;

/// The commands of one read.
#[derive(Debug)]
pub(super) struct Commands {
    /// Bytes of each command but the last.
    size: usize,
    len: usize,
    /// Where the next one begins.
    next: usize,
    /// All bytes below this were read, or may still be.
    end: usize,
    /// Why they end there; `None`: the file does.
    error: Option<Errno>,
}

impl Commands {
    /// Of `len` bytes, at most `size` each.
    pub(super) fn new(len: usize, size: usize) -> Commands {
        Commands { size: size.max(1), len, next: 0, end: len, error: None }
    }

    /// The next one: where it begins and its bytes; `None`: all have begun, or the bytes end before it.
    pub(super) fn next(&mut self) -> Option<(usize, usize)> {
        let at = self.next;
        if at >= self.end {
            return None;
        }
        self.next = self.len.min(at + self.size);
        Some((at, self.next - at))
    }

    /// Whether [`Commands::next`] has one.
    pub(super) fn has_next(&self) -> bool {
        self.next < self.end
    }

    /// Records what came of the command that begins at `at`.
    pub(super) fn ended(&mut self, at: usize, result: Result<usize>) {
        let whole = self.size.min(self.len.saturating_sub(at));
        let (got, error) = result.map_or_else(|errno| (0, Some(errno)), |got| (got, None));
        if (error.is_some() || got < whole) && at + got < self.end {
            (self.end, self.error) = (at + got, error);
        }
    }

    /// The last `count` that [`Commands::next`] gave do not begin, because of an error.
    pub(super) fn refused(&mut self, count: usize, errno: Errno) {
        let begun = self.next.div_ceil(self.size).saturating_sub(count);
        self.ended(begun * self.size, Err(errno));
    }

    /// Bytes before the first that is missing, when all that have begun have ended; the error if the first byte is.
    pub(super) fn result(&self) -> Result<usize> {
        match self.error {
            Some(errno) if self.end == 0 => Err(errno),
            _ => Ok(self.end),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(commands: &mut Commands) -> Vec<(usize, usize)> {
        std::iter::from_fn(|| commands.next()).collect()
    }

    #[test]
    fn commands_cover_the_read_once_and_none_is_longer() {
        for len in 1..40 {
            for size in 1..45 {
                let mut commands = Commands::new(len, size);
                let parts = all(&mut commands);
                let mut at = 0;
                for &(begin, bytes) in &parts {
                    assert_eq!(begin, at);
                    assert!((1..=size).contains(&bytes));
                    at += bytes;
                }
                assert_eq!((at, parts.len()), (len, len.div_ceil(size)), "{len} bytes by {size}");
                parts.iter().rev().for_each(|&(at, bytes)| commands.ended(at, Ok(bytes)));
                assert_eq!((commands.result(), commands.has_next()), (Ok(len), false));
            }
        }
    }

    /// Every outcome of every command of a read of ten bytes in four, in two orders, against the plain rule.
    #[test]
    fn bytes_end_before_the_first_that_is_missing() {
        const PARTS: [(usize, usize); 4] = [(0, 3), (3, 3), (6, 3), (9, 1)];
        // 0 to 3 bytes, or an error.
        let outcome = |code: usize| if code == 4 { Err(Errno::IO) } else { Ok(code) };
        for code in 0..5_usize.pow(4) {
            let outcomes =
                [0, 1, 2, 3].map(|at| outcome(code / 5_usize.pow(at) % 5).map(|n| n.min(PARTS[at as usize].1)));
            let mut expected = Ok(0);
            for (at, result) in outcomes.iter().enumerate() {
                match result {
                    Ok(got) => expected = expected.map(|all| all + got),
                    Err(errno) if at == 0 => expected = Err(*errno),
                    Err(_) => {}
                }
                if result.is_err() || *result != Ok(PARTS[at].1) {
                    break;
                }
            }
            for order in [[0, 1, 2, 3], [3, 1, 2, 0]] {
                let mut commands = Commands::new(10, 3);
                assert_eq!(all(&mut commands), PARTS);
                order.iter().for_each(|&at| commands.ended(PARTS[at].0, outcomes[at]));
                assert_eq!(commands.result(), expected, "{outcomes:?} in the order {order:?}");
            }
        }
    }

    #[test]
    fn nothing_begins_past_the_end_of_the_bytes() {
        let mut commands = Commands::new(10, 3);
        assert_eq!((commands.next(), commands.next()), (Some((0, 3)), Some((3, 3))));
        commands.ended(3, Ok(2));
        assert_eq!((commands.next(), commands.has_next()), (None, false));
        commands.ended(0, Ok(3));
        assert_eq!(commands.result(), Ok(5));
    }

    #[test]
    fn refused_commands_end_the_bytes_where_they_begin() {
        for (begun, count, expected) in [(4, 1, Ok(9)), (4, 2, Ok(6)), (4, 4, Err(Errno::AGAIN)), (2, 1, Ok(3))] {
            let mut commands = Commands::new(10, 3);
            let parts: Vec<_> = (0..begun).filter_map(|_| commands.next()).collect();
            commands.refused(count, Errno::AGAIN);
            assert!(!commands.has_next());
            parts[..begun - count].iter().for_each(|&(at, bytes)| commands.ended(at, Ok(bytes)));
            assert_eq!(commands.result(), expected, "{count} of {begun}");
        }
    }
}
