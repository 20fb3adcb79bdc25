//! What a session did, and how its output was written.

/// How far the output of a session could be prepared.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OutputMode {
    /// The session has no output.
    NoOutput,
    /// Downloads are written as they arrive; with the cause.
    Passthrough(String),
    /// Full stripes are written as such; stripes that are covered in part are written as they arrive; with the cause.
    Aligned(String),
    /// Stripes that are covered in part are also written as full stripes, with the old bytes around the new ones.
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
    /// Bytes uploaded to the device.
    pub uploaded: u64,
    /// Bytes downloaded to files.
    pub downloaded: u64,
    /// How the output was written.
    pub mode: OutputMode,
    /// Bytes written as full stripes, filler included.
    pub full_stripe: u64,
    /// Of these, filler: old bytes of the stripes, not the session's.
    pub filler: u64,
    /// Bytes of the output written as they arrived.
    pub unaligned: u64,
    /// Bytes read by preparation, concurrently with the program.
    pub read_ahead: u64,
}
