//! A net on a CUDA device, by the fake driver: its memory is made and given back as the driver asks for it.

#![expect(unsafe_code, reason = "the driver's context")]

#[path = "../../sys/tests/fake/mod.rs"]
mod fake;

use std::net::TcpStream;

use spinio_device::{DeviceKind, registry};
use spinio_net::{Net, NetAddress, Options};
use spinio_sys::cuda::Driver;

#[test]
fn net_opens_and_closes_on_a_cuda_device() {
    let Some(_fake) = fake::open() else { return };
    registry::hint_open(b"/dev/nvidiactl");
    let driver = Driver::loaded().unwrap();
    driver.init().unwrap();
    let context = driver.primary_retain(0).unwrap();
    // SAFETY: the fake driver frees no context.
    unsafe { driver.set_current(context) }.unwrap();
    let device = registry::current_device().unwrap();
    assert_eq!(device.id().kind, DeviceKind::Cuda);
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
}
