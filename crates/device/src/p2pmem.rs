//! PCI memory that the kernel publishes for peer-to-peer DMA: an NVMe controller's memory buffer, or the BAR of any
//! device whose driver says so.
//!
//! ```text
//!   /sys/bus/pci/devices/0000:03:00.0/p2pmem/{size,available,published,allocate}
//!                                                                    └ mmap: the memory itself
//! ```
//!
//! It has no engine: the CPU stores into it, and a storage device can DMA into it. So copies are done when the call
//! returns, every fence is reached, and there is nothing to pin.
//!
//! A program may map `allocate` itself; the `mmap` hook tells of it, and the mapping is a device buffer like any other.
//!
//! Known flaws: a copy into memory that the program unmaps meanwhile faults, as its own store would; a mapping made
//! past the hooks is host memory to us, which is right but slower.

use std::ffi::CString;
use std::sync::{Mutex, PoisonError, mpsc};

use spinio_sys::Errno;
use spinio_sys::linux::{self, PAGE, Private};

use crate::host_memory::{HostMemory, RW, SHARED, system};
use crate::{
    Abilities, Allocation, Device, DeviceAddr, DeviceError, DeviceId, DeviceKind, ErrorKind, Fence, Pin, Pinned,
    QueueId, Wait, registry,
};

type Result<T> = core::result::Result<T, DeviceError>;

const ROOT: &str = "/sys/bus/pci/devices";
const O_RDWR: i32 = 2;

/// A PCI device that publishes memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Provider {
    /// Its PCI address, `0000:03:00.0`.
    pub address: String,
    /// Bytes of memory in all.
    pub size: u64,
    /// Bytes not allocated by anybody.
    pub available: u64,
    /// Whether the kernel may hand it to others; without this it cannot be mapped either.
    pub published: bool,
}

/// One provider as a device.
#[derive(Debug)]
struct P2pmem {
    address: String,
    ordinal: u32,
    owner: u32,
    staging: HostMemory,
}

/// The devices made so far, by PCI address.
static DEVICES: Mutex<Vec<&'static P2pmem>> = Mutex::new(Vec::new());

/// The providers of this machine, in the order of their PCI addresses; a device's ordinal counts them.
pub fn providers() -> Vec<Provider> {
    privately(|| providers_under(ROOT)).unwrap_or_default()
}

/// New memory of a provider.
pub(crate) fn alloc(ordinal: u32, len: usize) -> Result<DeviceAddr> {
    alloc_under(ROOT, ordinal, len)
}

fn alloc_under(root: &'static str, ordinal: u32, len: usize) -> Result<DeviceAddr> {
    let none = DeviceError::new(ErrorKind::Unsupported, "allocation: no such p2pmem provider");
    if len == 0 {
        return Err(DeviceError::new(ErrorKind::Unsupported, "allocation of 0 bytes"));
    }
    let (provider, start) = privately(move || {
        let provider = providers_under(root).into_iter().nth(ordinal as usize).ok_or(none)?;
        let path = format!("{root}/{}/p2pmem/allocate", provider.address);
        Ok((provider, map(&path, len)?))
    })??;
    let known = device(&provider.address, ordinal).and_then(|d| registry::add_range(d.owner, start, len as u64));
    if let Err(e) = known {
        unmap(start, len as u64);
        return Err(e);
    }
    Ok(start)
}

/// Unmaps memory of [`alloc`].
pub(crate) fn free(addr: DeviceAddr) -> Result<()> {
    let unknown = DeviceError::new(ErrorKind::BadAddress, "free of p2pmem");
    let owners: Vec<u32> = devices().iter().map(|d| d.owner).collect();
    let range = owners.into_iter().find_map(|owner| registry::range_of(owner, addr));
    let (start, len) = range.filter(|&(start, _)| start == addr).ok_or(unknown)?;
    registry::remove_range(start, len, |_| true);
    unmap(start, len);
    Ok(())
}

/// The program mapped a range: if it is p2pmem, it is a device buffer from now on.
pub(crate) fn note(addr: u64, len: u64) {
    let Ok(Some(address)) = privately(move || provider_at(addr)) else { return };
    let ordinal =
        privately(|| providers_under(ROOT)).ok().and_then(|all| all.iter().position(|p| p.address == address));
    let Ok(device) = device(&address, ordinal.map_or(u32::MAX, |n| n as u32)) else { return };
    let _ = registry::add_range(device.owner, DeviceAddr(addr), len.next_multiple_of(PAGE as u64));
}

/// A range of addresses means something else now.
pub(crate) fn forget(addr: u64, len: u64) {
    let owners: Vec<u32> = devices().iter().map(|d| d.owner).collect();
    registry::remove_range(DeviceAddr(addr), len.next_multiple_of(PAGE as u64), |owner| owners.contains(&owner));
}

fn devices() -> std::sync::MutexGuard<'static, Vec<&'static P2pmem>> {
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn device(address: &str, ordinal: u32) -> Result<&'static P2pmem> {
    let mut devices = devices();
    if let Some(device) = devices.iter().find(|d| d.address == address) {
        return Ok(device);
    }
    let device = registry::add_owner(|owner| {
        let device: &'static P2pmem =
            Box::leak(Box::new(P2pmem { address: address.to_owned(), ordinal, owner, staging: HostMemory::default() }));
        device
    })?;
    devices.push(device);
    Ok(device)
}

/// Runs what opens descriptors where the program does not see them.
fn privately<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let failed = DeviceError::new(ErrorKind::Driver, "private thread for p2pmem");
    let family = Private::new().map_err(|_| failed)?;
    let (answer, result) = mpsc::channel();
    family.spawn("spinio-p2pmem", move || drop(answer.send(body())));
    result.recv().map_err(|_| failed)
}

fn providers_under(root: &str) -> Vec<Provider> {
    let Ok(path) = CString::new(root) else { return Vec::new() };
    let names = linux::list(&path).unwrap_or_default();
    let mut found: Vec<Provider> = names
        .into_iter()
        .filter_map(|name| {
            let address = name.into_string().ok()?;
            let number = |file: &str| read_number(&format!("{root}/{address}/p2pmem/{file}"));
            let (size, available) = (number("size")?, number("available")?);
            let published = number("published") == Some(1);
            Some(Provider { address, size, available, published })
        })
        .collect();
    found.sort_by(|a, b| a.address.cmp(&b.address));
    found
}

fn read_number(path: &str) -> Option<u64> {
    read_all(path)?
        .trim_ascii()
        .iter()
        .try_fold(0u64, |n, &b| b.is_ascii_digit().then(|| n.checked_mul(10)?.checked_add(u64::from(b - b'0')))?)
}

fn read_all(path: &str) -> Option<Vec<u8>> {
    let fd = linux::open(&CString::new(path).ok()?, 0, 0).ok()?;
    let mut all = Vec::new();
    let mut buf = [0u8; 4096];
    // SAFETY: `buf` takes as many bytes as the call is told.
    while let Ok(got @ 1..) = unsafe { linux::read(fd, buf.as_mut_ptr(), buf.len()) } {
        all.extend_from_slice(&buf[..got]);
    }
    let _ = linux::close(fd);
    Some(all)
}

fn map(path: &str, len: usize) -> Result<DeviceAddr> {
    let path = CString::new(path).map_err(|_| system("open of p2pmem/allocate", Errno::INVAL))?;
    let fd = linux::open(&path, O_RDWR, 0).map_err(|e| system("open of p2pmem/allocate", e))?;
    let len = len.next_multiple_of(PAGE);
    // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
    let mapped = unsafe { linux::mmap(core::ptr::null_mut(), len, RW, SHARED, fd, 0) };
    let _ = linux::close(fd);
    mapped.map(|at| DeviceAddr(at as u64)).map_err(|e| system("mmap of p2pmem/allocate", e))
}

fn unmap(start: DeviceAddr, len: u64) {
    // SAFETY: the mapping was ours or the program's p2pmem, and it is being freed.
    let _ = unsafe { linux::munmap(start.0 as *mut u8, (len as usize).next_multiple_of(PAGE)) };
}

/// The PCI address of the provider whose memory is mapped at `addr`, from the process's map.
fn provider_at(addr: u64) -> Option<String> {
    provider_in(&read_all("/proc/thread-self/maps")?, addr)
}

fn provider_in(maps: &[u8], addr: u64) -> Option<String> {
    maps.split(|&b| b == b'\n').find_map(|line| {
        let line = std::str::from_utf8(line).ok()?;
        let (start, rest) = line.split_once('-')?;
        let (end, rest) = rest.split_once(' ')?;
        let range = u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?;
        let folder = rest.strip_suffix("/p2pmem/allocate").filter(|_| range.contains(&addr))?;
        Some(folder.rsplit('/').next()?.to_owned())
    })
}

impl P2pmem {
    fn check(&self, addr: DeviceAddr, len: usize, operation: &'static str) -> Result<()> {
        let inside =
            registry::range_of(self.owner, addr).is_some_and(|(start, range)| start.0 + range - addr.0 >= len as u64);
        if inside { Ok(()) } else { Err(DeviceError::new(ErrorKind::BadAddress, operation)) }
    }
}

impl Device for P2pmem {
    fn id(&self) -> DeviceId {
        DeviceId { kind: DeviceKind::P2pmem, ordinal: self.ordinal }
    }

    fn describe(&self) -> String {
        format!("PCI memory of {}, published for peer-to-peer", self.address)
    }

    fn abilities(&self) -> Abilities {
        Abilities { pins: false, copies: false, max_pin: 0 }
    }

    fn allocation(&'static self, addr: DeviceAddr, _want: u64) -> Option<Allocation> {
        let (start, len) = registry::range_of(self.owner, addr)?;
        let page = addr.0 & !(PAGE as u64 - 1);
        let mut resident = [0u8];
        // SAFETY: whether the page is mapped is the question.
        if unsafe { linux::mincore(page as *const u8, &mut resident) } == Err(Errno::NOMEM) {
            // Unmapped behind the hooks' back.
            forget(start.0, len);
            return None;
        }
        Some(Allocation { device: self, start, len, host_mapped: true, p2p_mapped: true })
    }

    fn staging(&self, len: usize) -> Result<Pinned> {
        self.staging.take(len)
    }

    fn free_staging(&self, memory: Pinned) {
        self.staging.give(memory);
    }

    fn program_queue(&self) -> (QueueId, bool) {
        (QueueId(0), false)
    }

    fn lease_queue(&self) -> Result<QueueId> {
        Ok(QueueId(0))
    }

    fn return_queue(&self, _queue: QueueId) {}

    unsafe fn copy_in(&self, _queue: QueueId, dst: DeviceAddr, src: *const u8, len: usize) -> Result<()> {
        self.check(dst, len, "copy to p2pmem")?;
        // SAFETY: `src` is the caller's promise; `dst` lies in a live mapping.
        unsafe { stream(dst.0 as *mut u8, src, len) };
        Ok(())
    }

    unsafe fn copy_out(&self, _queue: QueueId, dst: *mut u8, src: DeviceAddr, len: usize) -> Result<()> {
        self.check(src, len, "copy from p2pmem")?;
        // SAFETY: as for copy_in, the other way round.
        unsafe { stream(dst, src.0 as *const u8, len) };
        Ok(())
    }

    fn fence(&self, _queue: QueueId) -> Result<Fence> {
        Ok(Fence(0))
    }

    fn follow(&self, _queue: QueueId, _fence: &Fence) -> Result<()> {
        Ok(())
    }

    fn is_done(&self, _fence: &Fence) -> Result<bool> {
        Ok(true)
    }

    fn wait(&self, _fence: &Fence, _how: Wait) -> Result<()> {
        Ok(())
    }

    fn release_fence(&self, _fence: Fence) {}

    fn drain(&self, _queue: QueueId, _how: Wait) -> Result<()> {
        Ok(())
    }

    unsafe fn pin(&self, _ptr: *const u8, _len: usize) -> Result<Pin> {
        Err(DeviceError::new(ErrorKind::Unsupported, "pin for p2pmem"))
    }

    unsafe fn copy_pinned(&self, _: QueueId, _: DeviceAddr, _: &Pin, _: usize, _: usize) -> Result<()> {
        Err(DeviceError::new(ErrorKind::Unsupported, "pin for p2pmem"))
    }

    fn unpin(&self, _pin: Pin) {}
}

/// Copies with stores of 16 bytes past the caches: on uncached PCI memory a byte at a time, which the string
/// instructions may become, is a transaction a byte.
///
/// # Safety
/// `src` must be readable and `dst` writable for `len` bytes.
unsafe fn stream(dst: *mut u8, src: *const u8, len: usize) {
    use core::arch::x86_64::{_mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    let head = dst.align_offset(16).min(len);
    let middle = (len - head) / 16;
    // SAFETY: every access lies in the caller's ranges; `dst.add(head)` is aligned to 16 wherever it is stored to.
    unsafe {
        for at in (0..head).chain(head + middle * 16..len) {
            dst.add(at).write_volatile(src.add(at).read_volatile());
        }
        for block in 0..middle {
            let at = head + block * 16;
            _mm_stream_si128(dst.add(at).cast(), _mm_loadu_si128(src.add(at).cast()));
        }
        _mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    fn tree() -> (tempfile::TempDir, &'static str) {
        let root = tempfile::tempdir().unwrap();
        for (address, size) in [("0000:05:00.0", "8192\n"), ("0000:03:00.0", "65536\n")] {
            let folder = root.path().join(address).join("p2pmem");
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("size"), size).unwrap();
            fs::write(folder.join("available"), size).unwrap();
            fs::write(folder.join("published"), "1\n").unwrap();
            fs::write(folder.join("allocate"), vec![0; 65536]).unwrap();
        }
        fs::create_dir_all(root.path().join("0000:01:00.0")).unwrap();
        let path = root.path().to_str().unwrap().to_owned().leak();
        (root, path)
    }

    #[test]
    fn providers_come_in_the_order_of_their_addresses() {
        let (_root, path) = tree();
        let found = providers_under(path);
        let addresses: Vec<&str> = found.iter().map(|p| p.address.as_str()).collect();
        assert_eq!(addresses, ["0000:03:00.0", "0000:05:00.0"]);
        assert_eq!((found[1].size, found[1].available, found[1].published), (8192, 8192, true));
        assert_eq!(providers_under("/proc/self/no-such-folder"), []);
    }

    #[test]
    fn memory_is_found_copied_to_and_gone_after_free() {
        let (root, path) = tree();
        let addr = alloc_under(path, 1, 5000).unwrap();
        let at = |n: u64| addr.offset(n).0 as *const u8;
        let allocation = registry::find(at(17), 1).unwrap();
        assert_eq!((allocation.start, allocation.len), (addr, 5000));
        assert!(allocation.host_mapped && allocation.p2p_mapped);
        assert_eq!(allocation.room(addr.offset(4999)), 1);
        assert!(registry::find(at(5000), 1).is_none());

        let bytes: Vec<u8> = (0..4000).map(|n| (n % 251) as u8).collect();
        let queue = QueueId(0);
        let device = allocation.device;
        // SAFETY: `bytes` outlives the copy, which is done when the call returns.
        unsafe { device.copy_in(queue, addr.offset(3), bytes.as_ptr(), bytes.len()) }.unwrap();
        let file = fs::read(Path::new(path).join("0000:05:00.0/p2pmem/allocate")).unwrap();
        assert_eq!(file[..3], [0; 3]);
        assert_eq!(file[3..4003], bytes);
        assert_eq!(file[4003..], vec![0; 65536 - 4003]);
        let mut back = vec![0; 4000];
        // SAFETY: `back` outlives the copy.
        unsafe { device.copy_out(queue, back.as_mut_ptr(), addr.offset(3), 4000) }.unwrap();
        assert_eq!(back, bytes);
        // SAFETY: refused, so nothing is copied.
        let past = unsafe { device.copy_in(queue, addr.offset(1001), bytes.as_ptr(), 4000) };
        assert_eq!(past.unwrap_err().kind, ErrorKind::BadAddress);

        registry::free(addr).unwrap();
        assert!(registry::find(at(0), 1).is_none());
        assert_eq!(registry::free(addr).unwrap_err().kind, ErrorKind::BadAddress);
        assert_eq!(alloc_under(path, 2, 1).unwrap_err().kind, ErrorKind::Unsupported);
        drop(root);
    }

    #[test]
    fn a_mapping_unmapped_behind_our_back_is_host_memory_again() {
        let (_root, path) = tree();
        let addr = alloc_under(path, 0, 8192).unwrap();
        unmap(addr, 8192);
        assert!(registry::find(addr.0 as *const u8, 1).is_none());
    }

    #[test]
    fn forgetting_a_part_leaves_the_rest() {
        let (_root, path) = tree();
        let addr = alloc_under(path, 0, 5 * PAGE).unwrap();
        let at = |page: usize| addr.offset((page * PAGE) as u64).0 as *const u8;
        registry::forget_mapping(at(2), PAGE);
        let len = |page: usize| registry::find(at(page), 1).map(|a| a.len as usize / PAGE);
        assert_eq!([len(0), len(1), len(2), len(3), len(4)], [Some(2), Some(2), None, Some(2), Some(2)]);
        registry::forget_mapping(at(0), 5 * PAGE);
        assert_eq!([len(0), len(4)], [None, None]);
        unmap(addr, 5 * PAGE as u64);
    }

    #[test]
    fn the_process_map_names_the_provider() {
        let maps = b"7f0000000000-7f0000010000 rw-p 00000000 00:00 0 \n\
            7f1000000000-7f1000010000 rw-s 00000000 00:15 9 /sys/devices/pci0000:00/0000:00:02.0/0000:03:00.0/p2pmem/allocate\n";
        assert_eq!(provider_in(maps, 0x7f10_0000_1000).as_deref(), Some("0000:03:00.0"));
        assert_eq!(provider_in(maps, 0x7f10_0001_0000), None);
        assert_eq!(provider_in(maps, 0x7f00_0000_0000), None);
    }

    #[test]
    fn an_ordinary_mapping_is_not_taken_for_p2pmem() {
        let page = vec![0u8; 2 * PAGE];
        registry::note_mapping(page.as_ptr(), page.len());
        assert!(registry::find(page.as_ptr(), 1).is_none());
    }

    #[test]
    fn any_alignment_is_copied_exactly() {
        let src: Vec<u8> = (0..200).collect();
        for from in 0..20 {
            for to in 0..20 {
                for len in [0, 1, 15, 16, 17, 40, 100] {
                    let mut dst = vec![255u8; 200];
                    // SAFETY: both ranges lie in their vectors.
                    unsafe { stream(dst.as_mut_ptr().add(to), src.as_ptr().add(from), len) };
                    assert_eq!(dst[to..to + len], src[from..from + len]);
                    assert!(dst[..to].iter().chain(&dst[to + len..]).all(|&b| b == 255));
                }
            }
        }
    }
}
