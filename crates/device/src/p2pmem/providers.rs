//! The providers, and the owner of a mapping: read from `/sys` and `/proc`, on a thread with an unshared fd table.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use std::ffi::CString;

use spinio_sys::linux;

/// A PCI device that publishes memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Provider {
    /// Its PCI address, `0000:03:00.0`.
    pub address: String,
    /// Bytes of memory in total.
    pub size: u64,
    /// Free bytes.
    pub available: u64,
    /// Whether its driver allows other users. The Linux kernel does not check this when `allocate` is mapped; SPIN
    /// does.
    pub published: bool,
}

pub(super) fn providers_under(root: &str) -> Vec<Provider> {
    let Ok(path) = CString::new(root) else { return Vec::new() };
    let names = linux::read_dir(&path).unwrap_or_default();
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
    // SAFETY: `buf` has the length passed to the call.
    while let Ok(got @ 1..) = unsafe { linux::read(fd, buf.as_mut_ptr(), buf.len()) } {
        all.extend_from_slice(&buf[..got]);
    }
    let _ = linux::close(fd);
    Some(all)
}

/// The PCI address of the provider whose memory is mapped at `addr`, from the process's map.
pub(super) fn provider_at(addr: u64) -> Option<String> {
    provider_in(&read_all("/proc/thread-self/maps")?, addr)
}

pub(super) fn provider_in(maps: &[u8], addr: u64) -> Option<String> {
    maps.split(|&b| b == b'\n').find_map(|line| {
        let line = std::str::from_utf8(line).ok()?;
        let (start, rest) = line.split_once('-')?;
        let (end, rest) = rest.split_once(' ')?;
        let range = u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?;
        let directory = rest.strip_suffix("/p2pmem/allocate").filter(|_| range.contains(&addr))?;
        Some(directory.rsplit('/').next()?.to_owned())
    })
}
