//! A net on a CUDA device, by the fake driver: its memory is made and given back as the driver asks for it.

#![expect(unsafe_code, reason = "the driver's context")]

#[path = "../../sys/tests/fake/mod.rs"]
mod fake;

use std::io::{ErrorKind, Read};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use spinio_device::{Device, DeviceKind, registry};
use spinio_net::{Net, NetAddress, Options, default_device};
use spinio_sys::cuda::Driver;

/// One test, since the driver's state is the process's.
#[test]
fn net_on_a_cuda_device_gives_its_memory_back_and_a_kernel_that_fails_resets_all_peers() {
    let Some(fake) = fake::open() else { return };
    registry::hint_open(b"/dev/nvidiactl");
    let driver = Driver::loaded().unwrap();
    driver.init().unwrap();
    no_context_is_no_reason_for_the_emulated_device();
    let context = driver.primary_retain(0).unwrap();
    // SAFETY: the fake driver frees no context.
    unsafe { driver.set_current(context) }.unwrap();
    let device = registry::current_device().unwrap();
    assert_eq!(device.id().kind, DeviceKind::Cuda);
    assert_eq!(default_device().unwrap().map(Device::id), Some(device.id()));
    for _ in 0..3 {
        let net = Net::open(device, Options { connections: 4, ..Options::default() }).unwrap();
        let handle = net.handle();
        assert!(handle.pinned != 0 && handle.device != 0 && handle.sockets == 1024);
        let listener = net.listen(&NetAddress::parse("tcp://127.0.0.1:0").unwrap(), 4).unwrap();
        let address = net.address(listener).unwrap().to_string();
        // It is in the backlog: no kernel accepts it.
        TcpStream::connect(address.strip_prefix("tcp://").unwrap()).unwrap();
        net.close().unwrap();
    }
    memory_that_cannot_be_pinned_is_enomem(&fake, device);
    peers_are_reset_if_a_kernel_fails(&fake, device);
    net_of_a_context_that_dies_is_enodev(&fake, device);
}

fn no_context_is_no_reason_for_the_emulated_device() {
    let refused = default_device().err().unwrap();
    assert_eq!(refused.errno.raw_os_error(), libc::ENODEV);
    assert!(refused.to_string().contains("cudaFree(0)"), "{refused}");
}

fn memory_that_cannot_be_pinned_is_enomem(fake: &fake::Fake, device: &'static dyn Device) {
    const OUT_OF_MEMORY: i32 = 2;
    let before = fake.live_pins();
    fake.fail_register(OUT_OF_MEMORY);
    let refused = Net::open(device, Options::default()).err().unwrap();
    assert_eq!(refused.errno.raw_os_error(), libc::ENOMEM, "{refused}");
    fake.fail_register(0);
    assert_eq!(fake.live_pins(), before);
    Net::open(device, Options::default()).unwrap().close().unwrap();
}

/// As by cudaDeviceReset.
fn net_of_a_context_that_dies_is_enodev(fake: &fake::Fake, device: &'static dyn Device) {
    let net = Net::open(device, Options { connections: 4, ..Options::default() }).unwrap();
    let nowhere = NetAddress::parse("unix:@spinio-net-nowhere").unwrap();
    fake.reset(0);
    let begun = Instant::now();
    while net.connect(&nowhere).unwrap_err().errno.raw_os_error() != libc::ENODEV {
        assert!(begun.elapsed() < Duration::from_secs(60), "no call fails with ENODEV");
    }
    // Its memory has gone with it.
    net.close().unwrap();
    let refused = Net::open(device, Options::default()).err().unwrap();
    assert_eq!(refused.errno.raw_os_error(), libc::ENODEV, "{refused}");
}

/// After a kernel's error: an error of the context that stays.
fn peers_are_reset_if_a_kernel_fails(fake: &fake::Fake, device: &'static dyn Device) {
    const LAUNCH_FAILED: i32 = 719;
    let before = fake.live_pins();
    let outside = TcpListener::bind("127.0.0.1:0").unwrap();
    let outside_address = NetAddress::parse(&format!("tcp://{}", outside.local_addr().unwrap())).unwrap();
    let net = Net::open(device, Options { connections: 4, ..Options::default() }).unwrap();
    let listener = net.listen(&NetAddress::parse("tcp://127.0.0.1:0").unwrap(), 4).unwrap();
    let address = net.address(listener).unwrap().to_string();
    let address = address.strip_prefix("tcp://").unwrap();
    let mut waiting = TcpStream::connect(address).unwrap();
    net.connect(&outside_address).unwrap();
    let (mut connected, _) = outside.accept().unwrap();
    connected.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    assert_eq!(connected.read(&mut [0; 1]).unwrap_err().kind(), ErrorKind::WouldBlock, "the device works");
    fake.trap(LAUNCH_FAILED);
    for peer in [&mut waiting, &mut connected] {
        peer.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert_eq!(peer.read(&mut [0; 1]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    }
    let begun = Instant::now();
    while TcpStream::connect(address).is_ok() {
        assert!(begun.elapsed() < Duration::from_secs(60), "the port still takes connections");
    }
    let refused = net.connect(&outside_address).unwrap_err();
    assert_eq!(refused.errno.raw_os_error(), libc::ENODEV);
    assert!(refused.to_string().contains("719"), "{refused}");
    assert_eq!(net.stats().open, 0);
    // The memory of a failed device cannot be given back; that of the host can, where the driver takes it.
    fake.trap(0);
    fake.fail_unmap(LAUNCH_FAILED);
    assert_eq!(net.close().unwrap_err().errno.raw_os_error(), libc::EIO);
    fake.fail_unmap(0);
    assert_eq!(fake.live_pins(), before);
}
