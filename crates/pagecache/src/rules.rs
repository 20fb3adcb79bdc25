//! The rules that the model tests break one by one, to see that the model notices.

/// A rule of the protocol that is easily forgotten. Outside tests none can be broken, and [`keep`] costs nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Rule {
    /// A commit keeps the old head of a page that the kernel may have.
    CpuTwin,
    /// The kernel's twin is kept until INVAL has returned.
    TwinUntilInvalidated,
    /// A page that was merged is fetched again.
    FetchMerged,
    /// An acquire inside an epoch makes head the base of a page that it patched.
    BasePatched,
    /// Base bytes in the backing file are copied before they are overwritten.
    CopyBase,
    /// A fill from the backing file counts only if the file was not written meanwhile.
    CheckFill,
    /// A READ counts only if no page of it has a new version since its plan.
    CheckRead,
    /// A READ into the page cache ends the need for the page's twin.
    ReadEndsTwin,
    /// A page whose kernel copy was written back and differs from head is invalidated again.
    InvalidateAgain,
    /// After a write-back with a twin, the twin is the bytes written back.
    TwinFollows,
    /// A direct write goes into the twin too.
    TwinFollowsProgram,
    /// The merged bytes are stored before the twin is.
    HeadBeforeTwin,
    /// Twins of truncated bytes are zeroed.
    TruncateTwin,
    /// A hole or a truncation that failed may have changed bytes.
    FailedErase,
    /// Of two committed snapshots of a page, recovery takes the later one.
    LatestSnapshot,
    /// Slots of releases that were not committed are free after recovery.
    CommittedOnly,
    /// After a restart the kernel may have every page.
    KernelKeepsPages,
    /// A page takes no commit until its last one is invalidated.
    OneRelease,
    /// A release returns after other releases of its pages are invalidated, whether or not it changed them.
    WaitForOthers,
    /// The kernel may have a page that was past the end of the file, without a READ.
    PagesPastTheEnd,
    /// A page that the kernel got while it was taken from it is one that it has.
    DropKeepsGiven,
    /// A page whose stores were dropped is fetched again.
    FetchAbandoned,
    /// An acquire that asks the server nothing knows of every change since the last one.
    CountChanges,
    /// A page that is overwritten without a look at it is no base.
    OverwritesNoBase,
    /// Pages that the kernel may have are not committed by runs.
    RunsAreUncached,
    /// Pages are copied from an owner only if its copy is head.
    PeerCurrent,
    /// A copy from an owner counts only if the owner has the same version, without stores, when it is complete.
    CheckPeer,
    /// A copy from an owner counts only if the owner has lost no page since it was planned.
    CountLosses,
    /// The client copies from an owner that is in no epoch of the pages, and in no call.
    #[cfg(test)]
    PeerClosed,
    /// The client takes the fingerprint of head for a page that it patched, not of the page.
    #[cfg(test)]
    FingerprintOfHead,
}

#[cfg(test)]
impl Rule {
    pub(crate) const ALL: [Rule; 30] = [
        Rule::CpuTwin,
        Rule::TwinUntilInvalidated,
        Rule::FetchMerged,
        Rule::BasePatched,
        Rule::CopyBase,
        Rule::CheckFill,
        Rule::CheckRead,
        Rule::ReadEndsTwin,
        Rule::InvalidateAgain,
        Rule::TwinFollows,
        Rule::TwinFollowsProgram,
        Rule::HeadBeforeTwin,
        Rule::TruncateTwin,
        Rule::FailedErase,
        Rule::LatestSnapshot,
        Rule::CommittedOnly,
        Rule::KernelKeepsPages,
        Rule::OneRelease,
        Rule::WaitForOthers,
        Rule::PagesPastTheEnd,
        Rule::DropKeepsGiven,
        Rule::FetchAbandoned,
        Rule::CountChanges,
        Rule::OverwritesNoBase,
        Rule::RunsAreUncached,
        Rule::PeerCurrent,
        Rule::CheckPeer,
        Rule::CountLosses,
        Rule::PeerClosed,
        Rule::FingerprintOfHead,
    ];
}

#[cfg(test)]
thread_local! {
    pub(crate) static BROKEN: std::cell::Cell<Option<Rule>> = const { std::cell::Cell::new(None) };
}

/// Whether a rule holds.
#[cfg(test)]
pub(crate) fn keep(rule: Rule) -> bool {
    BROKEN.get() != Some(rule)
}

/// Whether a rule holds: always.
#[cfg(not(test))]
#[inline(always)]
pub(crate) const fn keep(_rule: Rule) -> bool {
    true
}
