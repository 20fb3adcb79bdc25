//! The home of a file's pages: which version is head, where its bytes are, and what each copy was made from.
//!
//! ```text
//!    the Linux kernel: one owner                         write replicas: one owner per map
//!    page cache of the mount                             GPU memory of a client
//!        │ READ        read_plan, read_done, read            │ acquire   open, filled
//!        │ WRITE       write                                 │ release   commit, INVAL, invalidated, ...
//!        │ SETATTR     truncate                              │ no store  end_epoch
//!        │ INVAL       begin_drop, dropped                   │ discard   end_epoch; drop_copies
//!        │ FALLOCATE   punch           ┌───────────┐         │ gone      drop_owner
//!        └────────────────────────────>│ FilePages │<────────┘
//!              under the file's lock   └──┬─────┬──┘   versions, bases, twins, merge
//!                                         │     │
//!      fsync, timer: write_out   Backing <┘     └> Slots: 4 KiB slots and release records in memory that outlives
//!                        the file below the mount         the server (SlotMemory): snapshots and CPU twins
//!
//!   head of a page:  file ──commit──> slot ──write_out, WRITE──> file
//!   CPU twin:        none ──commit of a page that the kernel may have──> old head ──invalidated──> none
//!   replica page:    absent ─open, filled─> open ─commit─> valid, or absent if merged;  valid ─open─> open
//!                    open ─discard─> absent;  valid ─drop_copies─> absent
//! ```
//!
//! **Versions.** Home orders all changes of a page. The newest is *head*. An owner's copy was made from a version, its
//! *base*; the bytes of a base are a *twin*, kept only while that copy may be merged against it. Where an owner's bytes
//! differ from the twin, it stored; only these bytes go into head. So two owners that store different bytes of one page
//! lose nothing.
//!
//! **The kernel's copy** has no base that home could ask for, and WRITE brings whole pages. So a commit keeps the old
//! head of each page that the kernel may have, its CPU twin, until INVAL has returned; a WRITE in between is merged
//! against it. The model (`tests/model`) shows each of these rules to be necessary:
//! - after such a WRITE the twin is what was written, and the page is invalidated once more: INVAL may have passed it
//!   before;
//! - a READ into the page cache shows that the kernel had no copy: the twin ends there. Else a program that sets a byte
//!   back to the value it had before the release would be ignored;
//! - bytes of a direct write, a truncation or a hole go into the twin too: the kernel's next copy may be made without a
//!   READ, by a program that writes the whole page;
//! - a page that was past the end of the file counts as one that the kernel has: a program that writes there makes the
//!   kernel fill the page with zeros, without a READ. Wholly overwritten pages inside the file need no such care: all
//!   their bytes are stores of the CPU;
//! - a page with a twin takes no other commit, and a release of it does not return ([`Error::Busy`]).
//!
//! **Without a lock**: a READ copies bytes while others go on, and is planned again if a page of it has a new version
//! ([`FilePages::read_done`]). A fill from the backing file is fetched again if that page was overwritten meanwhile,
//! but not if head has only moved on: the copy is an exact version, whose bytes are kept as the base
//! ([`FilePages::filled`]).
//!
//! **From another owner**: a replica's pages are copied to another replica where the first has head, and are checked
//! afterwards (`peers`).
//!
//! **After a crash** of the server everything that was committed is in the slots or in the backing file, and every
//! operation that was not answered is sent again by the kernel and gives the same result: the merged bytes are stored
//! before the twin. Owners, bases and versions of pages without a slot are lost; open epochs fail ([`Error::NotOpen`]),
//! and the kernel may have any page ([`KernelPages::Any`]). What the caller does:
//!
//! ```text
//!   start:     Slots::recover -> files with slots; each: FilePages::recover; each of pending(): INVAL, invalidated
//!   acquire:   the client flushes CPU stores │ lock: open │ fetch │ lock: filled │ fetch again until nothing is left
//!   release:   lock: begin_drop │ INVAL │ lock: dropped │ lock: commit │ INVAL of pages that the kernel got since │
//!              lock: invalidated │ INVAL again until nothing is left │ lock: end_epoch │ reply
//!              Busy, of commit or of end_epoch: wait until another release is invalidated; NoSpace: write_out, again
//! ```
//!
//! The kernel's pages must be 4 KiB blocks (`blksize` of getattr), and the mount uses the write-back cache. On Linux
//! kernels whose write-back outlives the page (before about 6.16) the caller waits by fsync after INVAL, before
//! `invalidated`.
//!
//! Known flaws:
//! - A release takes its pages from the kernel before the commit, so that most need no twin; one that fails then has done
//!   so for nothing.
//! - An owner's copies need up to 8 bytes a page, and a page that changed while an owner has a copy keeps its entry: one for
//!   pages side by side that a release or a write has changed as a run, else one each.
//! - A page that was past the end when the file was first seen costs one twin and one INVAL at its first commit.
//! - A GPU that stores the value it loaded stores nothing. While a hole waits for its reply, the CPU may therefore
//!   still load the bytes from before, although a GPU that had seen the zeros has released.
//! - Of a file that is open with O_DIRECT home cannot tell what a READ is for; there a CPU store of the value from
//!   before a release, made while that release is being invalidated, may be ignored.
//! - After a hole that failed part way, pages that the kernel had keep the bytes from before until it drops them.
//! - Every new version asks each owner of the file, so hundreds of owners of one file cost microseconds a page.
#![forbid(unsafe_code)]

pub mod change_counters;
mod commit;
mod commit_unseen;
mod entry_run;
mod entry_runs;
mod epoch;
mod erase;
mod error;
mod explain;
mod file;
mod free_slots;
mod held_slots;
mod holds;
mod kernel;
mod layout;
pub mod leased_messages;
mod lookup;
pub mod messages;
#[cfg(test)]
#[path = "../tests/model/mod.rs"]
mod model;
mod owner;
mod page;
pub mod page_runs;
mod page_set;
mod peer_copy;
mod peers;
mod recover;
mod rules;
mod runs;
mod share;
mod slot_run;
mod slots;
mod source;
mod staged_pages;

pub use commit::Commit;
pub use epoch::{Ended, Fill};
pub use error::{Error, Result};
pub use explain::{CopyState, PageInfo};
pub use file::{Backing, Counters, FilePages, KernelPages, OwnerId};
pub use held_slots::HeldSlots;
pub use kernel::{ReadInto, ReadPlan, WriteFrom};
pub use layout::{SlotMemory, words};
pub use messages::Access;
pub use page::{PAGE, PageBytes, ZEROS, bytes_inside, merge, offset_of, page_of};
pub use peer_copy::{PeerCopy, Peers};
pub use recover::Recovered;
pub use share::Share;
pub use slot_run::StagedRun;
pub use slots::{Release, SlotRef, Slots, StagedPage};
pub use source::{Copied, Source};
pub use staged_pages::StagedPages;
