//! Which device a net has for which a Rust program or the Python module names none, on a machine with a GPU: the fake driver.

#[path = "../../sys/tests/fake/mod.rs"]
mod fake;

use spinio_runtime::client::net::{Net, Options};

#[test]
fn net_without_a_context_is_refused_unless_the_emulated_gpu_is_named() {
    let Some(_fake) = fake::open() else { return };
    let refused = Net::open(None, &Options::default()).unwrap_err();
    assert_eq!(refused.errno, libc::ENODEV);
    assert!(refused.text.contains("no CUDA context is current"), "{refused}");
    Net::open(Some("emulated"), &Options::default()).unwrap().close().unwrap();
    // It is in use from now on.
    Net::open(None, &Options::default()).unwrap().close().unwrap();
}
