#![expect(unsafe_code, reason = "driver calls and device memory")]
use std::fs;
use std::path::Path;

use super::providers::provider_in;
use super::*;

fn sysfs_tree() -> (tempfile::TempDir, &'static str) {
    let root = tempfile::tempdir().unwrap();
    for (address, size) in [("0000:05:00.0", "8192\n"), ("0000:03:00.0", "65536\n")] {
        let directory = root.path().join(address).join("p2pmem");
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("size"), size).unwrap();
        fs::write(directory.join("available"), size).unwrap();
        fs::write(directory.join("published"), "1\n").unwrap();
        fs::write(directory.join("allocate"), vec![0; 65536]).unwrap();
    }
    fs::create_dir_all(root.path().join("0000:01:00.0")).unwrap();
    let path = root.path().to_str().unwrap().to_owned().leak();
    (root, path)
}

#[test]
fn providers_are_ordered_by_address() {
    let (_root, path) = sysfs_tree();
    let found = providers_under(path);
    let addresses: Vec<&str> = found.iter().map(|p| p.address.as_str()).collect();
    assert_eq!(addresses, ["0000:03:00.0", "0000:05:00.0"]);
    assert_eq!((found[1].size, found[1].available, found[1].published), (8192, 8192, true));
    assert_eq!(providers_under("/proc/self/no-such-folder"), []);
}

#[test]
fn memory_is_found_until_free() {
    let (root, path) = sysfs_tree();
    let addr = alloc_under(path, 1, 5000).unwrap();
    let at = |n: u64| addr.offset(n).0 as *const u8;
    let allocation = registry::find(at(17), 1).unwrap();
    assert_eq!((allocation.start, allocation.len), (addr, 5000));
    assert!(allocation.host_mapped && allocation.p2p_mapped);
    assert_eq!(allocation.bytes_left(addr.offset(4999)), 1);
    assert!(registry::find(at(5000), 1).is_none());

    let bytes: Vec<u8> = (0..4000).map(|n| (n % 251) as u8).collect();
    let queue = StreamId(0);
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
fn unhooked_munmap_is_detected() {
    let (_root, path) = sysfs_tree();
    let addr = alloc_under(path, 0, 8192).unwrap();
    unmap(addr, 8192);
    assert!(registry::find(addr.0 as *const u8, 1).is_none());
}

#[test]
fn unregistering_part_keeps_rest() {
    let (_root, path) = sysfs_tree();
    let addr = alloc_under(path, 0, 5 * PAGE).unwrap();
    let at = |page: usize| addr.offset((page * PAGE) as u64).0 as *const u8;
    registry::unregister_mapping(at(2), PAGE);
    let len = |page: usize| registry::find(at(page), 1).map(|a| a.len as usize / PAGE);
    assert_eq!([len(0), len(1), len(2), len(3), len(4)], [Some(2), Some(2), None, Some(2), Some(2)]);
    registry::unregister_mapping(at(0), 5 * PAGE);
    assert_eq!([len(0), len(4)], [None, None]);
    unmap(addr, 5 * PAGE as u64);
}

#[test]
fn proc_maps_names_provider() {
    let maps = b"7f0000000000-7f0000010000 rw-p 00000000 00:00 0 \n\
        7f1000000000-7f1000010000 rw-s 00000000 00:15 9 /sys/devices/pci0000:00/0000:00:02.0/0000:03:00.0/p2pmem/allocate\n";
    assert_eq!(provider_in(maps, 0x7f10_0000_1000).as_deref(), Some("0000:03:00.0"));
    assert_eq!(provider_in(maps, 0x7f10_0001_0000), None);
    assert_eq!(provider_in(maps, 0x7f00_0000_0000), None);
}

#[test]
fn ordinary_mapping_is_not_p2pmem() {
    let page = vec![0u8; 2 * PAGE];
    registry::register_mapping(page.as_ptr(), page.len());
    assert!(registry::find(page.as_ptr(), 1).is_none());
}

#[test]
fn copy_is_exact_for_any_alignment() {
    let src: Vec<u8> = (0..200).collect();
    for from in 0..20 {
        for to in 0..20 {
            for len in [0, 1, 15, 16, 17, 40, 100] {
                let mut dst = vec![255u8; 200];
                // SAFETY: both ranges lie in their vectors.
                unsafe { nontemporal_copy(dst.as_mut_ptr().add(to), src.as_ptr().add(from), len) };
                assert_eq!(dst[to..to + len], src[from..from + len]);
                assert!(dst[..to].iter().chain(&dst[to + len..]).all(|&b| b == 255));
            }
        }
    }
}

#[test]
fn unpublished_provider_is_refused_and_never_device_memory() {
    let (root, path) = sysfs_tree();
    let published = root.path().join("0000:05:00.0/p2pmem/published");
    for value in ["0\n", "2\n", "", "x\n"] {
        fs::write(&published, value).unwrap();
        assert_eq!(alloc_under(path, 1, 4096).unwrap_err().kind, ErrorKind::Unsupported, "published is {value:?}");
        let addr = map(&format!("{path}/0000:05:00.0/p2pmem/allocate"), 4096).unwrap();
        note_under(path, addr.0, 4096);
        assert!(registry::find(addr.0 as *const u8, 1).is_none(), "published is {value:?}");
        unmap(addr, 4096);
    }
    fs::remove_file(&published).unwrap();
    assert!(alloc_under(path, 1, 4096).is_err());
    // The other provider still works, and so does this one once it is published.
    let other = alloc_under(path, 0, 4096).unwrap();
    registry::free(other).unwrap();
    fs::write(&published, "1\n").unwrap();
    let addr = map(&format!("{path}/0000:05:00.0/p2pmem/allocate"), 4096).unwrap();
    note_under(path, addr.0, 4096);
    assert!(registry::find(addr.0 as *const u8, 1).is_some());
    registry::free(addr).unwrap();
}
