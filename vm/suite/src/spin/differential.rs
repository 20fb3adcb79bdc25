//! Random requests against a model of the file in host memory: the same count, the same bytes, no byte changed
//! outside them. Between the requests the file is written, mapped and stored to, truncated, punched, cached and
//! dropped from the cache.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, fallocate};

use super::{MIB, below, fresh, memory_for, read_and_check};
use spinio_testkit::Rng;

use crate::case::{Case, CaseError, Outcome};
use crate::memory::store_through_mapping;
use crate::place::{Guest, Place, drop_cache, pattern, remove};

const REQUESTS: usize = 200;
const MOST: usize = 2 * MIB;

pub(super) fn cases() -> Vec<Case> {
    [Place::Ext4, Place::Xfs, Place::Raid0, Place::Far, Place::Half]
        .into_iter()
        .map(|place| {
            Case::new(format!("spin: {REQUESTS} random requests, {}", place.name()), move |g| differential(g, place))
        })
        .collect()
}

fn differential(guest: &Guest, place: Place) -> Outcome {
    let (path, file) = guest.create(place, "differential")?;
    let mut model = pattern(3 * MIB + 1234, 1);
    file.write_all_at(&model, 0)?;
    drop_cache(&file)?;
    let mut random = Rng::new(place as u64);
    let runtime = fresh();
    let mut memory = memory_for(MOST)?;
    for number in 0..REQUESTS {
        disturb(&file, &mut model, &mut random, number as u64)?;
        let unit = *random.choose(&[1, 1, 4, 512, 4096]);
        let offset = below(&mut random, model.len() + 8192) / unit * unit;
        let most = *random.choose(&[1, 100, 4096, 65_536, 300_000, MOST]);
        let len = (1 + below(&mut random, most)).next_multiple_of(unit).min(MOST);
        let skew = if below(&mut random, 2) == 0 { offset % 4096 } else { below(&mut random, 4096) };
        let expected = model.get(offset..model.len().min(offset + len)).unwrap_or_default();
        read_and_check(&runtime, &file, &mut memory, (offset as u64, skew, len), expected).map_err(|e| match e {
            CaseError::Failed(why) => CaseError::Failed(format!("request {number}: {why}")),
            skipped => skipped,
        })?;
    }
    remove(&path);
    Ok(())
}

/// Changes the file, and the model in the same way.
fn disturb(file: &File, model: &mut Vec<u8>, random: &mut Rng, number: u64) -> Outcome {
    let at = below(random, model.len());
    let most = *random.choose(&[10, 5000, 100_000, MIB]);
    let len = 1 + below(random, most);
    let end = model.len().min(at + len);
    match below(random, 12) {
        0 => {
            let new = pattern(len, 1000 + number);
            file.write_all_at(&new, at as u64)?;
            model.resize(model.len().max(at + len), 0);
            model[at..at + len].copy_from_slice(&new);
        }
        1 => {
            let page = at / 4096;
            let whole = (model.len() - page * 4096).min(4096);
            let new = pattern(whole, 1000 + number);
            store_through_mapping(file, page as u64, &new)?;
            model[page * 4096..page * 4096 + whole].copy_from_slice(&new);
        }
        2 => {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(file, flags, at as u64, (end - at) as u64)?;
            model[at..end].fill(0);
        }
        3 => {
            let size = (2 * MIB + below(random, 2 * MIB)).max(1);
            file.set_len(size as u64)?;
            model.resize(size, 0);
        }
        4..=6 => file.read_exact_at(&mut vec![0; end - at], at as u64)?,
        7..=10 => drop_cache(file)?,
        _ => {}
    }
    Ok(())
}
