//! A mirror of two disks of which only one can reach the device.
//!
//! ```text
//!   read       the Linux kernel chooses the leg: EINVAL if it is the other one, and md does not retry
//!   write      reaches one leg; md treats the other's refusal as success, and reports success to the writer
//!
//! The second is a flaw of the Linux kernel (seen with 7.3.4): the legs differ from then on, without any report until
//! md checks the array. So device memory must not be written to a mirror unless all of its legs are known to reach the
//! device.

use std::fs::File;
use std::os::fd::AsRawFd;

use spinio_io::{Runtime, Settings};
use spinio_sys::Errno;

use crate::case::{Case, CaseError, Outcome, expect, expect_bytes, fail};
use crate::md::Array;
use crate::memory::{Memory, P2pMemory};
use crate::place::{Guest, Place, drop_cache, open_direct, pattern, remove};
use crate::spin::{MIB, memory_for, read_and_check};

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("machine: half a RAID-1 reachable: reads are right or refused", plain_reads),
        Case::new("machine: half a RAID-1 reachable: a write is lost on the other half, silently", plain_write),
        Case::new("spin: half a RAID-1 reachable: the bytes are right", spin),
        Case::new("spin: half a RAID-1 reachable: writes reach both halves", spin_writes),
    ]
}

fn plain_reads(guest: &Guest) -> Outcome {
    let array = Array::at(guest.disk("mirror")?);
    let (path, bytes) = guest.cold(Place::Mirror, "plain", 2 * MIB)?;
    let direct = open_direct(&path)?;
    let mut memory = P2pMemory::allocate(2 * MIB)?;
    for number in 0..200 {
        let (offset, len) = (number % 16 * 65_536, [4096, 65_536, MIB][number % 3]);
        memory.fill_range(0, len, 0xee);
        match memory.pread(direct.as_raw_fd(), 0, len, offset as u64) {
            Ok(n) => expect_bytes("device memory", &memory.bytes(0, n), &bytes[offset..offset + n])?,
            // EIO is rare: md has retried, and found no leg left to try.
            Err(Errno::INVAL | Errno::IO) => {}
            Err(e) => return fail(format!("a read: {e}, expected EINVAL or EIO")),
        }
    }
    remove(&path);
    expect("members lost", array.degraded()?, 0)
}

fn plain_write(guest: &Guest) -> Outcome {
    let array = Array::at(guest.disk("mirror")?);
    let (path, _) = guest.cold(Place::Mirror, "lost", MIB)?;
    expect("sectors that do not match before", array.mismatches()?, 0)?;
    let mut memory = P2pMemory::allocate(65_536)?;
    memory.fill(0x77);
    let wrote = memory.pwrite(open_direct(&path)?.as_raw_fd(), 0, 65_536, 0);
    let (lost, differ) = (array.degraded()?, array.mismatches()?);
    // The first leg, which has the new bytes, is copied to the other.
    array.repair()?;
    remove(&path);
    expect("sectors that do not match after the repair", array.mismatches()?, 0)?;
    if (wrote, lost, differ > 0) != (Ok(65_536), 0, true) {
        return fail(format!(
            "the Linux kernel's flaw has changed: the write returned {wrote:?}, {lost} members were lost, {differ} sectors \
             differ. What SPIN refuses on mirrors may be thought over"
        ));
    }
    Ok(())
}

fn spin(guest: &Guest) -> Outcome {
    let array = Array::at(guest.disk("mirror")?);
    let (path, bytes) = guest.cold(Place::Mirror, "spin", 8 * MIB)?;
    let file = File::open(&path)?;
    let runtime = Runtime::new(Settings::default());
    let mut memory = memory_for(8 * MIB)?;
    for (offset, len) in [(0, 8 * MIB), (MIB, MIB), (3, 70_000), (0, 8 * MIB), (0, 8 * MIB)] {
        read_and_check(
            &runtime,
            &file,
            &mut memory,
            (offset as u64, offset % 4096, len),
            &bytes[offset..offset + len],
        )?;
        drop_cache(&file)?;
    }
    expect("members lost", array.degraded()?, 0)?;
    remove(&path);
    Ok(())
}

fn spin_writes(guest: &Guest) -> Outcome {
    let array = Array::at(guest.disk("mirror")?);
    let (path, mut bytes) = guest.cold(Place::Mirror, "writes", 8 * MIB)?;
    let (file, own) = (File::options().read(true).write(true).open(&path)?, open_direct(&path)?);
    let runtime = Runtime::new(Settings::default());
    let mut memory = memory_for(8 * MIB)?;
    for (number, to) in [&file, &own, &file, &own].into_iter().enumerate() {
        // Reads have established that storage and device can reach each other.
        read_and_check(&runtime, &file, &mut memory, (0, 0, 8 * MIB), &bytes)?;
        let (offset, len) = (number * MIB, 4 * MIB);
        let new = pattern(len, 40 + number as u64);
        memory.put(0, &new);
        let wrote = runtime.write(to.as_raw_fd(), Some(offset as u64), memory.target(0)?, len);
        expect("bytes written", wrote.map_err(|e| CaseError::Failed(e.to_string()))?, len)?;
        bytes[offset..offset + len].copy_from_slice(&new);
        drop_cache(&file)?;
    }
    expect("members lost", array.degraded()?, 0)?;
    let differ = array.mismatches()?;
    if differ > 0 {
        array.repair()?;
    }
    expect("sectors that do not match", differ, 0)?;
    remove(&path);
    Ok(())
}
