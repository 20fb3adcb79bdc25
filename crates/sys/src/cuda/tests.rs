//! What holds with and without a driver. The table itself is tested against a stand-in: `tests/cuda_table.rs`.

use super::*;

#[test]
fn errors_carry_the_drivers_names() {
    assert_eq!(CuError(709).to_string(), "CUDA_ERROR_CONTEXT_IS_DESTROYED (709)");
    assert_eq!(CuError(31337).to_string(), "unknown (31337)");
    assert!(CuError::INVALID_CONTEXT.is_gone() && !CuError::NOT_READY.is_gone());
}

#[test]
fn asking_for_the_loaded_driver_loads_none() {
    let maps = || std::fs::read_to_string("/proc/self/maps").unwrap().contains("libcuda.so");
    let before = maps();
    assert_eq!(Driver::loaded().is_some(), before);
    assert_eq!(maps(), before);
}
