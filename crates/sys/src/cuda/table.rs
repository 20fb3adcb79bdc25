//! The driver's functions, each looked up once.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::types::{AccessDescription, AllocationProperties};

/// The driver of this process. One, shared by all threads, never closed.
pub struct Driver {
    pub(super) f: Table,
}

/// Why there is no driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadError {
    /// The library could not be opened; the loader's message.
    Open(String),
    /// It opened, but lacks a function that every driver has.
    MissingFunction(&'static str),
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoadError::Open(why) => write!(f, "The CUDA driver could not be loaded: {why}"),
            LoadError::MissingFunction(name) => {
                write!(f, "The CUDA driver lacks {name}: no driver, or one older than CUDA 12")
            }
        }
    }
}

impl std::error::Error for LoadError {}

/// The library every driver installs. Not `libcuda.so`: where a toolkit is installed that may be its stub.
const LIBRARY: &CStr = c"libcuda.so.1";

static DRIVER: OnceLock<Driver> = OnceLock::new();

impl Driver {
    /// The driver that the program has loaded, `None` while it has not. Loads nothing.
    /// Takes the loader's lock until it has found the driver once; afterwards it is a load.
    pub fn loaded() -> Option<&'static Driver> {
        // For a library that is not loaded, the loader searches every directory: five system calls.
        static COUNT_AT_MISS: AtomicU64 = AtomicU64::new(0);
        if let Some(driver) = DRIVER.get() {
            return Some(driver);
        }
        let loaded = libraries_loaded();
        if loaded == COUNT_AT_MISS.load(Relaxed) {
            return None;
        }
        let found = Driver::find(libc::RTLD_NOLOAD | libc::RTLD_LAZY).ok();
        if found.is_none() {
            COUNT_AT_MISS.store(loaded, Relaxed);
        }
        found
    }

    /// The driver if [`Driver::loaded`] or [`Driver::load`] has found it before. One load, for hot paths.
    #[inline]
    pub fn cached() -> Option<&'static Driver> {
        DRIVER.get()
    }

    /// The driver, loaded now if the program has not. For SPIN's own programs, and to count GPUs.
    pub fn load() -> Result<&'static Driver, LoadError> {
        match DRIVER.get() {
            Some(driver) => Ok(driver),
            None => Driver::find(libc::RTLD_NOW),
        }
    }

    fn find(flags: c_int) -> Result<&'static Driver, LoadError> {
        // SAFETY: the name is NUL-terminated. With RTLD_NOLOAD no code of the library runs, and without it running
        // the driver's constructors is intended by the caller.
        let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), flags) };
        if library.is_null() {
            return Err(LoadError::Open(loader_error()));
        }
        // The handle is kept: a call through the table after the driver was unloaded would crash.
        let driver = Driver { f: Table::of(library).map_err(LoadError::MissingFunction)? };
        Ok(DRIVER.get_or_init(|| driver))
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Driver")
    }
}

/// How many libraries this process has ever loaded.
fn libraries_loaded() -> u64 {
    unsafe extern "C" fn read_count(info: *mut libc::dl_phdr_info, _: usize, count: *mut c_void) -> c_int {
        // SAFETY: the loader passes a reference to its record, and `count` is the caller's local.
        unsafe { *count.cast::<u64>() = (*info).dlpi_adds };
        1
    }
    let mut count = 0u64;
    // SAFETY: the function ends the walk at the first library and keeps nothing.
    unsafe { libc::dl_iterate_phdr(Some(read_count), (&raw mut count).cast()) };
    count
}

pub(super) fn loader_error() -> String {
    // SAFETY: dlerror returns null or a NUL-terminated string that this thread owns until its next loader call.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() { "not loaded".to_owned() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
    }
}

/// The type of the driver's callbacks.
type HostFunction = unsafe extern "C" fn(*mut c_void);

macro_rules! table {
    (
        needed { $(fn $need:ident($($need_arg:ty),*) = $need_symbol:literal;)+ }
        newer { $(fn $opt:ident($($opt_arg:ty),*) = $opt_symbol:literal;)+ }
    ) => {
        /// Pointers to the driver's functions. All return a `CUresult`.
        pub(super) struct Table {
            $(pub(super) $need: unsafe extern "C" fn($($need_arg),*) -> c_int,)+
            $(pub(super) $opt: Option<unsafe extern "C" fn($($opt_arg),*) -> c_int>,)+
        }

        impl Table {
            /// Looks everything up; the error is the name of a function that should be there and is not.
            fn of(library: *mut c_void) -> Result<Table, &'static str> {
                Ok(Table {
                    $($need: {
                        // SAFETY: the symbol is the driver's function of this name, whose C prototype this type
                        // repeats.
                        unsafe { function(library, concat!($need_symbol, "\0")) }.ok_or($need_symbol)?
                    },)+
                    $($opt: {
                        // SAFETY: as above.
                        unsafe { function(library, concat!($opt_symbol, "\0")) }
                    },)+
                })
            }
        }
    };
}

/// Looks up one function.
///
/// # Safety
/// `F` must be the type of the function that this name has in the library; the name ends in NUL.
pub(super) unsafe fn function<F: Copy>(library: *mut c_void, name: &'static str) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: the library is open and the name NUL-terminated.
    let at = unsafe { libc::dlsym(library, name.as_ptr().cast()) };
    // SAFETY: not null, as large as a function pointer, and of type F by the contract.
    (!at.is_null()).then(|| unsafe { core::mem::transmute_copy::<*mut c_void, F>(&at) })
}

table! {
    needed {
        fn init(u32) = "cuInit";
        fn driver_version(*mut c_int) = "cuDriverGetVersion";
        fn pointer_attribute(*mut c_void, c_int, u64) = "cuPointerGetAttribute";
        fn pointer_attributes(u32, *const c_int, *const *mut c_void, u64) = "cuPointerGetAttributes";
        fn address_range(*mut u64, *mut usize, u64) = "cuMemGetAddressRange_v2";
        fn ctx_current(*mut usize) = "cuCtxGetCurrent";
        fn ctx_set_current(usize) = "cuCtxSetCurrent";
        fn ctx_push(usize) = "cuCtxPushCurrent_v2";
        fn ctx_pop(*mut usize) = "cuCtxPopCurrent_v2";
        fn ctx_device(*mut c_int) = "cuCtxGetDevice";
        fn ctx_flags(*mut u32) = "cuCtxGetFlags";
        fn ctx_synchronize() = "cuCtxSynchronize";
        fn ctx_id(usize, *mut u64) = "cuCtxGetId";
        fn primary_state(c_int, *mut u32, *mut c_int) = "cuDevicePrimaryCtxGetState";
        fn primary_retain(*mut usize, c_int) = "cuDevicePrimaryCtxRetain";
        fn device_get(*mut c_int, c_int) = "cuDeviceGet";
        fn device_count(*mut c_int) = "cuDeviceGetCount";
        fn device_name(*mut c_char, c_int, c_int) = "cuDeviceGetName";
        fn device_attribute(*mut c_int, c_int, c_int) = "cuDeviceGetAttribute";
        fn device_memory(*mut usize, c_int) = "cuDeviceTotalMem_v2";
        fn device_pci(*mut c_char, c_int, c_int) = "cuDeviceGetPCIBusId";
        fn host_register(*mut c_void, usize, u32) = "cuMemHostRegister_v2";
        fn host_unregister(*mut c_void) = "cuMemHostUnregister";
        fn copy_in(u64, *const c_void, usize, usize) = "cuMemcpyHtoDAsync_v2";
        fn copy_out(*mut c_void, u64, usize, usize) = "cuMemcpyDtoHAsync_v2";
        fn mem_alloc(*mut u64, usize) = "cuMemAlloc_v2";
        fn mem_free(u64) = "cuMemFree_v2";
        fn stream_create(*mut usize, u32) = "cuStreamCreate";
        fn stream_destroy(usize) = "cuStreamDestroy_v2";
        fn stream_synchronize(usize) = "cuStreamSynchronize";
        fn stream_query(usize) = "cuStreamQuery";
        fn stream_wait_event(usize, usize, u32) = "cuStreamWaitEvent";
        fn event_create(*mut usize, u32) = "cuEventCreate";
        fn event_record(usize, usize) = "cuEventRecord";
        fn event_query(usize) = "cuEventQuery";
        fn event_synchronize(usize) = "cuEventSynchronize";
        fn event_destroy(usize) = "cuEventDestroy_v2";
    }
    newer {
        fn primary_release_v2(c_int) = "cuDevicePrimaryCtxRelease_v2";
        fn primary_release(c_int) = "cuDevicePrimaryCtxRelease";
        fn stream_is_capturing(usize, *mut c_int) = "cuStreamIsCapturing";
        fn exchange_capture_mode(*mut u32) = "cuThreadExchangeStreamCaptureMode";
        fn host_device_pointer(*mut u64, *mut c_void, u32) = "cuMemHostGetDevicePointer_v2";
        fn module_load(*mut usize, *const c_void) = "cuModuleLoadData";
        fn module_function(*mut usize, usize, *const c_char) = "cuModuleGetFunction";
        fn launch(usize, u32, u32, u32, u32, u32, u32, u32, usize, *mut *mut c_void, *mut *mut c_void) = "cuLaunchKernel";
        fn host_function(usize, HostFunction, *mut c_void) = "cuLaunchHostFunc";
        fn stream_wait_value(usize, u64, u32, u32) = "cuStreamWaitValue32_v2";
        fn stream_create_with_priority(*mut usize, u32, c_int) = "cuStreamCreateWithPriority";
        fn stream_priorities(*mut c_int, *mut c_int) = "cuCtxGetStreamPriorityRange";
        fn device_uuid(*mut c_char, c_int) = "cuDeviceGetUuid_v2";
        fn allocation_granularity(*mut usize, *const AllocationProperties, c_int) = "cuMemGetAllocationGranularity";
        fn address_reserve(*mut u64, usize, usize, u64, u64) = "cuMemAddressReserve";
        fn address_free(u64, usize) = "cuMemAddressFree";
        fn allocation_create(*mut u64, usize, *const AllocationProperties, u64) = "cuMemCreate";
        fn allocation_release(u64) = "cuMemRelease";
        fn allocation_export(*mut c_void, u64, c_int, u64) = "cuMemExportToShareableHandle";
        fn allocation_retain(*mut u64, *mut c_void) = "cuMemRetainAllocationHandle";
        fn allocation_import(*mut u64, *mut c_void, c_int) = "cuMemImportFromShareableHandle";
        fn allocation_map(u64, usize, usize, u64, u64) = "cuMemMap";
        fn allocation_unmap(u64, usize) = "cuMemUnmap";
        fn can_access_peer(*mut c_int, c_int, c_int) = "cuDeviceCanAccessPeer";
        fn copy_within(u64, u64, usize, usize) = "cuMemcpyDtoDAsync_v2";
        fn set_access(u64, usize, *const AccessDescription, usize) = "cuMemSetAccess";
    }
}
