//! Positions in a stream: bytes since its beginning, modulo 2^48, so that flags fit beside one in a word.

/// A position. 2^48 bytes are far more than any ring has, so the distance of two positions in a ring is unambiguous.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position(u64);

/// Bits of a position.
pub const BITS: u32 = 48;
/// The bits of a word that a position occupies.
pub const MASK: u64 = (1 << BITS) - 1;

impl Position {
    /// The position in the low bits of a word.
    pub const fn of(word: u64) -> Position {
        Position(word & MASK)
    }

    /// Its bits.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// The position `bytes` further on.
    #[must_use]
    pub const fn after(self, bytes: u64) -> Position {
        Position(self.0.wrapping_add(bytes) & MASK)
    }

    /// Bytes from an earlier position to this one.
    pub const fn since(self, earlier: Position) -> u64 {
        self.0.wrapping_sub(earlier.0) & MASK
    }

    /// The place in a ring of `size` bytes, a power of two, and the bytes from there to its end.
    pub const fn place(self, size: u64) -> (usize, usize) {
        let at = self.0 & (size - 1);
        (at as usize, (size - at) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_wrap_at_2_to_the_48() {
        let last = Position::of(u64::MAX);
        assert_eq!(last.bits(), MASK);
        assert_eq!(last.after(1), Position::of(0));
        assert_eq!(Position::of(10).since(last.after(1).after(0)), 10);
        assert_eq!(last.after(5).since(last), 5);
        assert_eq!(last.place(4096), (4095, 1));
    }
}
