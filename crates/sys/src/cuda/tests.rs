//! Tests that hold with and without a driver. The table itself is tested against a fake driver: `tests/cuda_table.rs`.

use super::*;

#[test]
fn error_names_match_driver() {
    assert_eq!(CuError(709).to_string(), "CUDA_ERROR_CONTEXT_IS_DESTROYED (709)");
    assert_eq!(CuError(31337).to_string(), "unknown (31337)");
    assert!(CuError::INVALID_CONTEXT.is_context_lost() && !CuError::NOT_READY.is_context_lost());
}

#[test]
fn loaded_does_not_load_driver() {
    let maps = || std::fs::read_to_string("/proc/self/maps").unwrap().contains("libcuda.so");
    let before = maps();
    assert_eq!(Driver::loaded().is_some(), before);
    assert_eq!(maps(), before);
}
