//! What a session did, and what it could promise.

/// How far the output of a session could be prepared.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OutputMode {
    /// No output was named.
    NoOutput,
    /// Downloads are written as they come; why.
    Passthrough(String),
    /// Whole stripes are written as such; stripes that are covered in part are written as they come; why.
    Aligned(String),
    /// Stripes that are covered in part are written whole too, with the old bytes of their neighbours.
    Preread,
}

impl std::fmt::Display for OutputMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            OutputMode::NoOutput => f.write_str("no output was named"),
            OutputMode::Passthrough(why) => write!(f, "passthrough: {why}"),
            OutputMode::Aligned(why) => write!(f, "aligned, not preread: {why}"),
            OutputMode::Preread => f.write_str("preread"),
        }
    }
}

/// What a session did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Bytes brought to the device.
    pub uploaded: u64,
    /// Bytes brought to files.
    pub downloaded: u64,
    /// How the output was written.
    pub mode: OutputMode,
    /// Bytes written as whole stripes, neighbours' bytes included.
    pub full_stripe: u64,
    /// Of these, bytes that were not the session's: old ones of neighbours.
    pub filler: u64,
    /// Bytes of the output written as they came.
    pub unaligned: u64,
    /// Bytes read by preparation, while others worked.
    pub read_ahead: u64,
}
