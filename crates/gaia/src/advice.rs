//! Sync and advice.

use spinio_host::lock;
use spinio_sys::linux::Advice as FileAdvice;

use crate::Result;
use crate::map::Map;

/// What a program will do with a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// It will be acquired soon: the file's pages are read into host memory.
    WillNeed,
    /// It will not be used soon: the replica's pages outside of epochs for writing are dropped, and their memory is given
    /// back.
    DontNeed,
    /// The file's pages will be fetched in order.
    Sequential,
    /// They will be fetched in no order.
    Random,
    /// CPU programs may read them from the replica.
    Lend,
}

impl Map {
    /// Returns when what was released of the range before the call is on storage.
    pub fn sync(&self, offset: u64, len: u64) -> Result<()> {
        self.pages_of(offset, len)?;
        let _turn = self.turn()?;
        self.link.run(|link| link.file.sync())
    }

    /// Says what the program will do with `len` bytes from `offset`.
    pub fn advise(&self, offset: u64, len: u64, advice: Advice) -> Result<()> {
        let range = self.pages_of(offset, len)?;
        let advice = match advice {
            Advice::DontNeed => return self.drop_copies(range),
            Advice::Lend => return self.lend(range),
            Advice::WillNeed => FileAdvice::WillNeed,
            Advice::Sequential => FileAdvice::Sequential,
            Advice::Random => FileAdvice::Random,
        };
        self.attached(&mut lock(&self.state))?;
        self.link.run(move |link| link.advise(range.start, range.len(), advice))
    }
}
