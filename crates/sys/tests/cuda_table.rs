//! The function table against a fake driver: every symbol resolves and every prototype fits.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

mod fake;

use spinio_sys::cuda::{AllocationProperties, Context, CuError, Driver, MemoryType, Stream, event, register, stream};

#[test]
fn every_symbol_resolves_and_is_callable() {
    assert!(Driver::cached().is_none() && Driver::loaded().is_none());
    let Some(fake) = fake::open() else { return };
    // The program has loaded it under its own path; it is recognised by the name inside.
    let driver = Driver::loaded().expect("the loaded driver is found");
    assert!(std::ptr::eq(driver, Driver::load().unwrap()) && Driver::cached().is_some());
    assert_eq!(driver.pointer_info(4096), Err(CuError::NOT_INITIALIZED));
    driver.init().unwrap();
    assert_eq!(driver.version(), Ok(13000));
    assert_eq!(driver.device_count(), Ok(2));
    let device = driver.device(1).unwrap();
    assert_eq!(driver.device_name(device).unwrap(), "Fake GPU 1");
    assert_eq!(driver.device_pci(device).unwrap(), "0000:02:00.0");
    assert_eq!(driver.device_memory(device), Ok(1 << 30));

    assert_eq!(driver.current(), Ok(Context(0)));
    assert_eq!(driver.alloc(4096), Err(CuError::INVALID_CONTEXT));
    assert_eq!(driver.primary_is_active(device), Ok(false));
    let context = driver.primary_retain(device).unwrap();
    assert_eq!(driver.primary_is_active(device), Ok(true));
    // SAFETY: the fake driver frees no context.
    unsafe {
        driver.push(context).unwrap();
        assert_eq!(driver.current(), Ok(context));
        assert_eq!(driver.current_device(), Ok(device));
        assert!(driver.context_id(context).unwrap() > 0);
    }

    let at = driver.alloc(10_000).unwrap();
    let info = driver.pointer_info(at + 9_999).unwrap();
    assert_eq!((info.kind, info.context, info.ordinal), (MemoryType::Device, context, 1));
    assert_eq!((info.start, info.len, info.managed), (at, 10_000, false));
    assert_eq!(driver.buffer_id(at), Ok(info.buffer_id));
    assert_eq!(driver.address_range(at + 1), Ok((at, 10_000)));
    assert_eq!(driver.pointer_info(at + 10_000), Err(CuError::INVALID_VALUE));

    let mut host = vec![7u8; 8192];
    let mut back = vec![0u8; 8192];
    // SAFETY: handles are alive and buffers have the given length; the fake driver copies at once.
    unsafe {
        driver.host_register(host.as_mut_ptr(), 8192, register::PORTABLE).unwrap();
        assert_eq!(driver.pointer_info(host.as_ptr() as u64).unwrap().kind, MemoryType::Host);
        let own = driver.stream_create(stream::NON_BLOCKING).unwrap();
        let marker_event = driver.event_create(event::DISABLE_TIMING).unwrap();
        driver.copy_in(at, host.as_ptr(), 8192, own).unwrap();
        driver.event_record(marker_event, own).unwrap();
        driver.stream_wait_event(Stream(0), marker_event).unwrap();
        assert_eq!(driver.event_query(marker_event), Ok(true));
        driver.event_synchronize(marker_event).unwrap();
        driver.copy_out(back.as_mut_ptr(), at, 8192, Stream(0)).unwrap();
        assert_eq!(driver.stream_query(own), Ok(true));
        driver.stream_synchronize(own).unwrap();
        assert_eq!(driver.stream_is_capturing(Stream(0)), Ok(false));
        fake.capture(1);
        assert_eq!(driver.stream_is_capturing(Stream(0)), Err(CuError::STREAM_CAPTURE_IMPLICIT));
        fake.capture(0);
        driver.event_destroy(marker_event).unwrap();
        driver.stream_destroy(own).unwrap();
        driver.host_unregister(host.as_mut_ptr()).unwrap();
        assert_eq!(driver.host_unregister(host.as_mut_ptr()), Err(CuError::HOST_MEMORY_NOT_REGISTERED));
        driver.free(at).unwrap();
        driver.primary_release(device).unwrap();
    }
    assert_eq!(back, host);
    virtual_memory(driver, device);
    assert_eq!(driver.pop(), Ok(context));
    assert_eq!(fake.live_pins() + fake.live_streams() + fake.live_events(), 0);
}

fn virtual_memory(driver: &Driver, device: i32) {
    const LEN: usize = 2 << 20;
    assert_eq!(&driver.device_uuid(device).unwrap(), b"fake GPU number1");
    assert_eq!(driver.allocation_granularity(device), Ok(LEN as u64));
    let at = driver.reserve_addresses(2 * LEN, LEN).unwrap();
    let handle = driver.create_allocation(LEN, AllocationProperties::exportable(device)).unwrap();
    // SAFETY: the handles are alive, the addresses reserved, and nothing else uses them.
    unsafe {
        let fd = driver.export_allocation(handle).unwrap();
        let other = driver.import_allocation(fd).unwrap();
        libc::close(fd);
        driver.map_allocation(at, LEN, handle).unwrap();
        driver.map_allocation(at + LEN as u64, LEN, other).unwrap();
        let (bytes, mut back) = ([7u8; 64], [0u8; 64]);
        let copy_in = || driver.copy_in(at, bytes.as_ptr(), 64, Stream(0));
        assert_eq!(copy_in(), Err(CuError::INVALID_VALUE), "no access was set");
        driver.set_access(at, LEN, device, true).unwrap();
        driver.set_access(at + LEN as u64, LEN, device, false).unwrap();
        copy_in().unwrap();
        // The same memory.
        driver.copy_out(back.as_mut_ptr(), at + LEN as u64, 64, Stream(0)).unwrap();
        assert_eq!(bytes, back);
        // A further handle, by the address.
        let retained = driver.retain_allocation(at).unwrap();
        libc::close(driver.export_allocation(retained).unwrap());
        driver.release_allocation(retained).unwrap();
        assert_eq!(driver.retain_allocation(at + 64), Err(CuError::INVALID_VALUE));
        let refused = driver.copy_in(at + LEN as u64, bytes.as_ptr(), 64, Stream(0));
        assert_eq!(refused, Err(CuError::INVALID_VALUE), "read-only");
        driver.release_allocation(handle).unwrap();
        driver.release_allocation(other).unwrap();
        driver.unmap_allocation(at, LEN).unwrap();
        driver.unmap_allocation(at + LEN as u64, LEN).unwrap();
        driver.free_addresses(at, 2 * LEN).unwrap();
    }
}
