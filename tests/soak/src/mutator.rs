//! Changes files under the workers: every kind of change, and every way to evict pages.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use spinio_testkit::{Rng, file};

use crate::Args;
use crate::counts::EventCounts;
use crate::files::{self, CHANGING, CHANGING_LEN, STEADY, VERSIONS};
use crate::versioned;

pub(crate) fn run(args: &Args, folder: &Path) -> Result<()> {
    let mut rng = Rng::new(args.seed ^ 0x5a5a);
    let end = Instant::now() + Duration::from_secs(args.seconds);
    let (tally, mut longest) = (EventCounts::default(), Duration::ZERO);
    while Instant::now() < end {
        let waited = match rng.below(4) {
            0 => {
                tally.add("published", 1);
                versioned::publish(folder, &mut rng)?
            }
            1 => disturb_file(folder, &tally, &mut rng)?,
            _ => rewrite_file(folder, &mut rng)?,
        };
        longest = longest.max(waited);
        std::thread::sleep(Duration::from_millis(rng.below(30)));
    }
    tally.add("longest_wait", longest.as_millis() as u64);
    println!("{}", tally.line());
    Ok(())
}

/// The time it had to wait for the file.
fn rewrite_file(folder: &Path, rng: &mut Rng) -> Result<Duration> {
    let path = files::changing(folder, rng.below(CHANGING));
    let begun = Instant::now();
    let subject = versioned::open_for_write(&path, false, rng.chance(20))?;
    let waited = begun.elapsed();
    let version = rng.below(u64::from(VERSIONS)) as u8;
    let write = |offset: u64, len: u64| subject.write_all_at(&file::bytes(offset, len as usize, version), offset);
    match rng.below(6) {
        0 => write(0, CHANGING_LEN)?,
        1 => {
            let offset = rng.near_page_edge(CHANGING_LEN);
            write(offset, (CHANGING_LEN - offset).min(1 + rng.below(200_000)))?;
        }
        2 => {
            subject.set_len(rng.near_page_edge(CHANGING_LEN))?;
            std::thread::sleep(Duration::from_millis(rng.below(5)));
            subject.set_len(CHANGING_LEN)?;
        }
        3 => drop(file::punch_hole(&subject, rng.below(CHANGING_LEN / 4096) * 4096, 4096 * (1 + rng.below(64)))),
        4 => {
            // A new file of the same name, while the old one is still open elsewhere.
            let fresh = path.with_extension("new");
            file::create_filled(&fresh, CHANGING_LEN);
            std::fs::rename(&fresh, &path)?;
        }
        _ => file::evict(&subject),
    }
    Ok(waited)
}

fn disturb_file(folder: &Path, tally: &EventCounts, rng: &mut Rng) -> Result<Duration> {
    let n = rng.below(STEADY);
    let path = files::steady(folder, n);
    let begun = Instant::now();
    match rng.below(4) {
        0 => file::evict(&files::open(&path, false)?),
        1 => {
            let pages = files::steady_len(n).div_ceil(4096);
            file::load_pages(&path, (0..pages).filter(|p| p % 7 < 3));
        }
        // Opening for writing breaks read leases.
        how => {
            drop(versioned::open_for_write(&path, false, how == 3)?);
            tally.add("opened", 1);
            return Ok(begun.elapsed());
        }
    }
    Ok(Duration::ZERO)
}
