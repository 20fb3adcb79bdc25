//! Whether a device's kernels load and store ordinary memory of the process.

/// How kernels of a device access memory that only the process knows: of `malloc`, of mapped files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PageableAccess {
    /// They do not: memory must be registered with the device first.
    #[default]
    None,
    /// A page that the device does not know is a page fault, which the driver serves from the process's page tables and
    /// takes back when they change (Linux HMM).
    Faults,
    /// The device uses the process's page tables (ATS).
    HostPageTables,
}

impl PageableAccess {
    /// Whether kernels can use it.
    pub fn is_possible(self) -> bool {
        self != PageableAccess::None
    }

    /// The usual name of the technique.
    pub const fn name(self) -> &'static str {
        match self {
            PageableAccess::None => "none",
            PageableAccess::Faults => "HMM",
            PageableAccess::HostPageTables => "host page tables",
        }
    }
}
