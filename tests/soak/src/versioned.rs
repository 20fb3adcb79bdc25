//! Files whose allowed contents are known at any moment: so that an outdated byte is detected.
//!
//! The mutator announces that an edition begins, opens the file for writing (which unpins it for all users), writes
//! it all, closes it, and announces its end. A read may have seen every edition from the last that had
//! ended before it to the last that had begun when it returned; that is [`Window`]. Both numbers are stored in a file.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use spinio_testkit::oracle::Window;
use spinio_testkit::{Rng, file};

/// The number of files.
pub(crate) const EDITIONS: u64 = 3;

/// The longest wait of a writer of a pinned file: less than the time after which the Linux kernel lets it write
/// by force (45 s), so that a writer that succeeds was let through by SPIN.
const WRITE_TIMEOUT: Duration = Duration::from_secs(40);

/// Bytes of such a file.
pub(crate) fn len(n: u64) -> u64 {
    [9_001, (2 << 20) + 777, 1 << 20][n as usize % 3]
}

pub(crate) fn path(folder: &Path, n: u64) -> PathBuf {
    folder.join(format!("edition-{n}"))
}

/// The numbers of a file.
pub(crate) struct EditionLog(File);

impl EditionLog {
    pub(crate) fn open(folder: &Path, n: u64) -> Result<EditionLog> {
        let path = folder.join(format!("edition-{n}.numbers"));
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        Ok(EditionLog(file.with_context(|| format!("cannot open {}", path.display()))?))
    }

    fn number(&self, at: u64) -> Result<u64> {
        // The Linux kernel may be in the middle of a write; not twice at the same offset.
        let mut last = None;
        loop {
            let mut bytes = [0; 8];
            let got = self.0.read_at(&mut bytes, at)?;
            ensure!(got == 0 || got == 8, "a torn number");
            let number = u64::from_le_bytes(bytes);
            if last == Some(number) {
                return Ok(number);
            }
            last = Some(number);
        }
    }

    fn begun(&self) -> Result<u64> {
        self.number(0)
    }

    fn ended(&self) -> Result<u64> {
        self.number(8)
    }

    /// Runs a read; then returns the allowed editions.
    pub(crate) fn read<T>(&self, read: impl FnOnce() -> Result<T>) -> Result<(T, Window)> {
        let oldest = self.ended()?;
        let seen = read()?;
        Ok((seen, Window { oldest, newest: self.begun()? }))
    }
}

/// Fails unless `seen`, the result of reading `requested` bytes at `offset`, is in the window.
pub(crate) fn check(n: u64, window: Window, offset: u64, requested: u64, seen: &[u8]) -> Result<()> {
    // A rewrite may begin by truncating the file, and then unwritten bytes are zeros.
    let under_way = window.newest > window.oldest;
    let expect = requested.min(len(n).saturating_sub(offset));
    ensure!(
        seen.len() as u64 == expect || (under_way && (seen.len() as u64) < expect),
        "edition-{n}: {} bytes at {offset}, not {expect}, in {window:?}",
        seen.len()
    );
    let wrong = window.first_wrong(offset, seen, |_, b| under_way && b == 0);
    ensure!(
        wrong.is_none(),
        "edition-{n}: an outdated byte at {wrong:?}, read of {requested} at {offset}, in {window:?}"
    );
    Ok(())
}

/// The mutator: a new edition. Returns the time until the file was opened.
pub(crate) fn publish(folder: &Path, rng: &mut Rng) -> Result<Duration> {
    let n = rng.below(EDITIONS);
    let (path, numbers) = (path(folder, n), EditionLog::open(folder, n)?);
    let edition = numbers.begun()? + 1;
    numbers.0.write_all_at(&edition.to_le_bytes(), 0)?;
    let begun = Instant::now();
    let subject = open_for_write(&path, rng.chance(40), rng.chance(40))?;
    let waited = begun.elapsed();
    subject.write_all_at(&file::bytes(0, len(n) as usize, edition as u8), 0)?;
    drop(subject);
    numbers.0.write_all_at(&edition.to_le_bytes(), 8)?;
    Ok(waited)
}

/// Opens a possibly pinned file for writing. `impatient`: with O_NONBLOCK repeatedly, before a blocking open.
pub(crate) fn open_for_write(path: &Path, truncate: bool, nonblocking: bool) -> Result<File> {
    let begun = Instant::now();
    let open = |flags| OpenOptions::new().write(true).truncate(truncate).custom_flags(flags).open(path);
    if nonblocking {
        // The file may be pinned again between two tries, so these need not ever succeed.
        for _ in 0..50 {
            match open(libc::O_NONBLOCK) {
                Ok(file) => return Ok(file),
                Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => std::thread::sleep(Duration::from_millis(1)),
                Err(e) => return Err(e).context(format!("cannot open {} without waiting", path.display())),
            }
        }
    }
    let file = open(0).with_context(|| format!("cannot open {} for writing", path.display()))?;
    ensure!(begun.elapsed() < WRITE_TIMEOUT, "a writer of {} waited for {:?}", path.display(), begun.elapsed());
    Ok(file)
}
