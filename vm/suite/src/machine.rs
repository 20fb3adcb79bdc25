//! The behaviour of the machine itself, by plain system calls: the basis of SPIN's `p2p` route.
//! When one of these fails, the Linux kernel or the machine changed, not SPIN.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::Duration;

use spinio_sys::Errno;
use spinio_sys::linux;

use crate::case::{Case, Outcome, expect, expect_bytes, fail};
use crate::loop_device::LoopDevice;
use crate::memory::{Memory, P2pMemory, allocator, store_through_mapping};
use crate::place::{Guest, Place, drop_cache, open_direct, remove};

const MIB: usize = 1 << 20;

pub(crate) fn cases() -> Vec<Case> {
    let mut all = vec![Case::new("machine: device memory keeps what the CPU stores", |_| memory_keeps_stores())];
    for place in Place::REACHABLE {
        all.push(Case::new(format!("machine: O_DIRECT read writes into device memory, {}", place.name()), move |g| {
            direct_read(g, place)
        }));
        all.push(Case::new(format!("machine: O_DIRECT write reads from device memory, {}", place.name()), move |g| {
            direct_write(g, place)
        }));
        all.push(Case::new(format!("machine: O_DIRECT read sees dirty pages, {}", place.name()), move |g| {
            sees_dirty(g, place)
        }));
        all.push(Case::new(format!("machine: misalignment is EINVAL, {}", place.name()), move |g| {
            misaligned(g, place)
        }));
    }
    for place in [Place::Ext4, Place::Xfs, Place::Raid0] {
        all.push(Case::new(format!("machine: holes are zeros and the end is short, {}", place.name()), move |g| {
            hole_and_end(g, place)
        }));
    }
    all.push(Case::new("machine: buffered pread stores into device memory", buffered));
    all.push(Case::new("machine: a disk below another root port is refused with EINVAL", unreachable));
    all.push(Case::new("machine: half a RAID-0 reachable: small reads only", half_reachable));
    all.push(Case::new("machine: a loop device is refused with EREMOTEIO", loop_device));
    all
}

/// Run last: every user of device memory, SPIN and its programs included, has freed it.
pub(crate) fn last_cases() -> Vec<Case> {
    let Ok(allocator) = allocator() else { return Vec::new() };
    vec![Case::new("machine: all device memory was freed", move |_| {
        let folder = allocator.with_file_name("");
        let number = |name: &str| fs::read_to_string(folder.join(name)).map(|text| text.trim().to_owned());
        let size = number("size")?;
        // The last references to a page may be dropped a moment after the memory is unmapped.
        for _ in 0..100 {
            if number("available")? == size {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(50));
        }
        expect("bytes available", number("available")?, size)
    })]
}

fn memory_keeps_stores() -> Outcome {
    let mut memory = P2pMemory::allocate(2 * MIB)?;
    memory.fill(0x5a);
    memory.put(4095, b"spin");
    expect_bytes("before", &memory.bytes(4000, 95), &[0x5a; 95])?;
    expect_bytes("stored", &memory.bytes(4095, 4), b"spin")?;
    expect_bytes("after", &memory.bytes(4099, 100), &[0x5a; 100])
}

fn direct_read(guest: &Guest, place: Place) -> Outcome {
    let (path, bytes) = guest.cold(place, "read", 8 * MIB)?;
    let direct = open_direct(&path)?;
    let mut memory = P2pMemory::allocate(8 * MIB + 4096)?;
    // A sector, a page, a run over two chunks of the RAID, everything.
    for (offset, len) in [(512, 512), (4096, 4096), (60 << 10, 72 << 10), (0, 8 * MIB)] {
        memory.fill(0xee);
        expect("bytes read", memory.pread(direct.as_raw_fd(), 0, len, offset as u64), Ok(len))?;
        expect_bytes("device memory", &memory.bytes(0, len), &bytes[offset..offset + len])?;
        expect_bytes("beyond", &memory.bytes(len, 4096), &[0xee; 4096])?;
    }
    remove(&path);
    Ok(())
}

fn direct_write(guest: &Guest, place: Place) -> Outcome {
    let (path, mut bytes) = guest.cold(place, "write", 2 * MIB)?;
    let direct = open_direct(&path)?;
    let buffered = File::open(&path)?;
    let mut seen = vec![0; bytes.len()];
    // Cached first, so that the write has pages to drop.
    buffered.read_exact_at(&mut seen, 0)?;
    let mut memory = P2pMemory::allocate(MIB)?;
    memory.fill(0x33);
    expect("bytes written", memory.pwrite(direct.as_raw_fd(), 0, MIB, 4096), Ok(MIB))?;
    bytes[4096..4096 + MIB].fill(0x33);
    buffered.read_exact_at(&mut seen, 0)?;
    expect_bytes("a buffered reader", &seen, &bytes)?;
    remove(&path);
    Ok(())
}

fn sees_dirty(guest: &Guest, place: Place) -> Outcome {
    let (path, mut bytes) = guest.cold(place, "dirty", MIB)?;
    let file = File::options().read(true).write(true).open(&path)?;
    let direct = open_direct(&path)?;
    let mut memory = P2pMemory::allocate(MIB)?;
    for round in 0..4u8 {
        file.write_all_at(&[round; 100], 8000)?;
        bytes[8000..8100].fill(round);
        store_through_mapping(&file, 9, &[!round; 77])?;
        bytes[9 * 4096..9 * 4096 + 77].fill(!round);
        expect("bytes read", memory.pread(direct.as_raw_fd(), 0, MIB, 0), Ok(MIB))?;
        expect_bytes("after a write and a store", &memory.bytes(0, MIB), &bytes)?;
    }
    remove(&path);
    Ok(())
}

fn misaligned(guest: &Guest, place: Place) -> Outcome {
    let (path, _) = guest.cold(place, "misaligned", MIB)?;
    let direct = open_direct(&path)?;
    let fd = direct.as_raw_fd();
    let Some(align) = linux::direct_io_align(fd)? else {
        return fail("statx reports no alignment");
    };
    let mut memory = P2pMemory::allocate(MIB)?;
    expect("offset 1", memory.pread(fd, 0, 4096, 1), Err(Errno::INVAL))?;
    expect("length 1", memory.pread(fd, 0, 1, 0), Err(Errno::INVAL))?;
    expect("address 1", memory.pread(fd, 1, 4096, 0), Err(Errno::INVAL))?;
    let offset = u64::from(align.offset);
    expect("half the offset alignment of statx", memory.pread(fd, 0, 4096, offset / 2), Err(Errno::INVAL))?;
    let address = align.memory as usize;
    expect("the address alignment of statx", memory.pread(fd, address, 4096, offset), Ok(4096))?;
    remove(&path);
    Ok(())
}

fn hole_and_end(guest: &Guest, place: Place) -> Outcome {
    let (path, file) = guest.create(place, "hole")?;
    file.write_all_at(&[1; 4096], 0)?;
    file.write_all_at(&[2; 100], MIB as u64)?;
    drop_cache(&file)?;
    let direct = open_direct(&path)?;
    let mut memory = P2pMemory::allocate(2 * MIB)?;
    memory.fill(0xee);
    expect("bytes read", memory.pread(direct.as_raw_fd(), 0, 2 * MIB, 0), Ok(MIB + 100))?;
    let mut expected = vec![0; MIB + 100];
    expected[..4096].fill(1);
    expected[MIB..].fill(2);
    expect_bytes("up to the end", &memory.bytes(0, MIB + 100), &expected)?;
    expect("at the end", memory.pread(direct.as_raw_fd(), 0, 4096, 2 * MIB as u64), Ok(0))?;
    remove(&path);
    Ok(())
}

fn buffered(guest: &Guest) -> Outcome {
    let (path, bytes) = guest.cold(Place::Tmpfs, "buffered", 200_000)?;
    let file = File::open(&path)?;
    let mut memory = P2pMemory::allocate(MIB)?;
    expect("bytes read", memory.pread(file.as_raw_fd(), 3, 70_001, 99), Ok(70_001))?;
    expect_bytes("device memory", &memory.bytes(3, 70_001), &bytes[99..70_100])?;
    remove(&path);
    Ok(())
}

fn unreachable(guest: &Guest) -> Outcome {
    let (path, _) = guest.cold(Place::Far, "far", MIB)?;
    let direct = open_direct(&path)?;
    let mut memory = P2pMemory::allocate(MIB)?;
    expect("a page", memory.pread(direct.as_raw_fd(), 0, 4096, 0), Err(Errno::INVAL))?;
    expect("all", memory.pread(direct.as_raw_fd(), 0, MIB, 0), Err(Errno::INVAL))?;
    remove(&path);
    Ok(())
}

fn half_reachable(guest: &Guest) -> Outcome {
    let (path, _) = guest.cold(Place::Half, "half", MIB)?;
    let direct = open_direct(&path)?;
    let mut memory = P2pMemory::allocate(MIB)?;
    // Which member stores which chunk depends on the position of the file's extents.
    let chunks: Vec<_> = (0..2)
        .map(|c| memory.pread(direct.as_raw_fd(), 0, 4096, c * (64 << 10)).map_err(|e| e == Errno::INVAL))
        .collect();
    let mut sorted = chunks.clone();
    sorted.sort();
    expect("a page of each of two chunks", sorted, vec![Ok(4096), Err(true)])?;
    match memory.pread(direct.as_raw_fd(), 0, MIB, 0) {
        Err(Errno::INVAL) => {}
        Ok(n) if n < MIB => {}
        other => return fail(format!("all: {other:?}, expected EINVAL or a short read")),
    }
    remove(&path);
    Ok(())
}

fn loop_device(guest: &Guest) -> Outcome {
    let (path, _) = guest.cold(Place::Ext4, "loop", MIB)?;
    let device = LoopDevice::over(&path)?;
    let direct = open_direct(device.path())?;
    let mut memory = P2pMemory::allocate(MIB)?;
    expect("a page", memory.pread(direct.as_raw_fd(), 0, 4096, 0), Err(Errno::REMOTEIO))?;
    remove(&path);
    Ok(())
}
