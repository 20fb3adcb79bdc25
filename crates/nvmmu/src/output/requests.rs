//! The requests that write an output.
//!
//! ```text
//!   full stripes of downloads ─────────┐
//!   stripes that downloads completed ──┼──> O_DIRECT, together                  (only bytes of the session)
//!   stripes with filler ───────────────┴──> O_DIRECT, while the lease lasts  ── broken ───┐
//!   bytes of stripes that are unknown  <──────────────────────────────────────────────────┘ ──> page cache
//! ```
//!
//! Bytes that cannot be written as a stripe are written without filler; only if that fails too, it is an error.

use std::sync::Arc;

use spinio_io::{Part, WriteLease};
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_sys::linux;

use super::stripes::Stripe;
use super::{Output, WriteMode, set_direct};
use crate::{Error, ErrorKind};

impl Output {
    /// Writes the downloaded bytes of stripes that downloads do not fill.
    pub(super) fn write_partial_stripes(&mut self) -> Result<(), Error> {
        let lease = match &self.mode {
            WriteMode::Striped { lease: Some(lease), .. } => Some(Arc::clone(lease)),
            _ => None,
        };
        if let Some(lease) = lease {
            let complete = self.stripes.take(|s| s.is_complete() && s.new_bytes() > 0);
            if !complete.is_empty() {
                match lease.with_lease(|| self.write_preread(&complete, &lease)) {
                    Some((Ok(left), trimmed)) => {
                        if !left.is_empty() {
                            self.stop_filling("another process opened the file");
                        }
                        let stripes = complete.into_iter().enumerate();
                        self.write_back(stripes.filter(|(number, _)| left.contains(number)).map(|(_, s)| s).collect())?;
                        trimmed?;
                    }
                    // The stripe may hit a limit or a bad block that its bytes do not: write them as any program would.
                    // If that fails too, its error is returned.
                    Some((Err(_), trimmed)) => {
                        self.write_back(complete)?;
                        trimmed?;
                    }
                    None => {
                        self.stop_filling("another process opened the file");
                        self.write_back(complete)?;
                    }
                }
            }
        }
        let rest = self.stripes.take(|s| s.new_bytes() > 0);
        self.write_back(rest)
    }

    /// Writes full stripes with filler while the lease lasts, which is checked before each. Returns the stripes that
    /// were not written because the lease was broken, and whether the file was truncated to its size.
    fn write_preread(
        &mut self,
        stripes: &[(u64, Stripe)],
        lease: &WriteLease,
    ) -> (Result<Vec<usize>, Error>, Result<(), Error>) {
        let size = match self.file.run_blocking(|fd| linux::fstat(fd).map(|s| s.size)) {
            Ok(size) => size,
            Err(e) => return (Err(Error::from_errno(e, "write", &self.path)), Ok(())),
        };
        let requests: Vec<_> = stripes.iter().map(|(at, s)| (*at, full_stripe_part(s))).collect();
        let check = lease.check();
        let wrote =
            self.write_direct(|output, route| output.runtime.write_ranges_while(&output.file, &requests, route, check));
        let (mut end, mut wanted) = (0, size);
        for (number, (at, stripe)) in stripes.iter().enumerate() {
            let bytes = stripe.bytes().len() as u64;
            match &wrote {
                Ok(left) if left.contains(&number) => continue,
                Ok(_) => {
                    wanted = wanted.max(stripe.new_ranges().map(|r| at + r.end).max().unwrap_or(0));
                    self.full_stripe_bytes += bytes;
                    self.filler_bytes += bytes - stripe.new_bytes();
                }
                // It may have been written nevertheless, or in part.
                Err(_) => {}
            }
            end = end.max(at + bytes);
        }
        let trimmed = if end > wanted { self.trim_end(wanted, lease) } else { Ok(()) };
        (wrote, trimmed)
    }

    /// Truncates what the last stripe extends past the end: no process can have seen it, unless the lease was lost.
    fn trim_end(&mut self, to: u64, lease: &WriteLease) -> Result<(), Error> {
        self.stripe_map = None;
        let (check, size) = (lease.check(), self.file.run_blocking(|fd| linux::fstat(fd).map(|s| s.size)));
        let exclusive = self.file.run_blocking(move |_| Ok(check())) == Ok(true) || lease.is_recent();
        if !exclusive && size.is_ok_and(|size| size > to) {
            let why =
                format!("another process opened the file before it could be truncated: past byte {to} it has zeros");
            return Err(Error::new(ErrorKind::Failed(Errno::BUSY), "write", why).with_path(&self.path));
        }
        self.file
            .run_blocking(move |fd| linux::ftruncate(fd, to))
            .map_err(|e| Error::from_errno(e, "write", &self.path))
    }

    /// Requests and complete stripes, directly and together.
    pub(super) fn write_stripes(
        &mut self,
        mut requests: Vec<(u64, Part)>,
        stripes: &[(u64, Stripe)],
    ) -> Result<(), Error> {
        requests.extend(stripes.iter().map(|(at, s)| (*at, full_stripe_part(s))));
        if requests.is_empty() {
            return Ok(());
        }
        requests.sort_by_key(|r| r.0);
        self.write_direct(|output, route| output.runtime.write_ranges(&output.file, &requests, route))?;
        self.full_stripe_bytes += stripes.iter().map(|(_, s)| s.bytes().len() as u64).sum::<u64>();
        Ok(())
    }

    /// Writes around the page cache, if possible.
    fn write_direct<T>(&self, write: impl FnOnce(&Output, Route) -> Result<T, spinio_io::Error>) -> Result<T, Error> {
        let direct = self.file.run_blocking(|fd| set_direct(fd, true)).is_ok();
        let wrote = write(self, if direct { Route::Direct } else { Route::Copy });
        let restored = if direct { self.file.run_blocking(|fd| set_direct(fd, false)) } else { Ok(()) };
        let wrote = wrote.map_err(|e| self.download_error(&e))?;
        restored.map(|()| wrote).map_err(|e| Error::from_errno(e, "write", &self.path))
    }

    /// Writes the downloaded bytes of some stripes, and nothing else. If that fails, the bytes are kept: a later flush
    /// tries again, or reports them lost.
    pub(super) fn write_back(&mut self, stripes: Vec<(u64, Stripe)>) -> Result<(), Error> {
        let mut parts = Vec::new();
        for (at, stripe) in &stripes {
            for range in stripe.new_ranges() {
                let bytes = &stripe.bytes()[range.start as usize..range.end as usize];
                parts.push((at + range.start, Part::Host(bytes.as_ptr(), bytes.len())));
            }
        }
        match self.runtime.write_ranges(&self.file, &parts, Route::Copy) {
            Ok(()) => {
                self.unaligned_bytes += parts.iter().map(|(_, part)| part.len() as u64).sum::<u64>();
                Ok(())
            }
            Err(error) => {
                self.stripes.put_back(stripes);
                Err(self.download_error(&error))
            }
        }
    }
}

/// All of a stripe, as one part of a write.
fn full_stripe_part(stripe: &Stripe) -> Part {
    Part::Host(stripe.bytes().as_ptr(), stripe.bytes().len())
}
