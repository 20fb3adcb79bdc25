//! One entry of the page table for a run of pages ([`crate::entry_runs`] has what is done with them).

use crate::slot_run::SlotRun;

/// The entry of pages side by side; the table has the first one.
#[derive(Debug)]
pub(crate) struct EntryRun {
    pub(crate) end: u64,
    pub(crate) version: u64,
    /// As of an [`Entry`](crate::file::Entry), of the page that was written last.
    pub(crate) overwritten: u64,
    /// `None`: in the backing file.
    pub(crate) head: Option<SlotRun>,
}
