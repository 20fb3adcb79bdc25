//! Handles, attributes and flags of the driver, as numbers.

/// A context (`CUcontext`); 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Context(pub usize);

/// A stream (`CUstream`); 0 is the legacy default stream of the current context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Stream(pub usize);

/// A kernel of a loaded module (`CUfunction`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Function(pub usize);

/// An event (`CUevent`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Event(pub usize);

/// What kind of memory an address is, from `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryType {
    /// Host memory that CUDA knows: allocated by it or registered with it.
    Host,
    /// Device memory, managed memory included.
    Device,
    /// Anything else.
    Other(u32),
}

/// The driver's attributes of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PointerInfo {
    /// Kind of memory.
    pub kind: MemoryType,
    /// The context it belongs to; 0 for memory of no context (pools, mappings).
    pub context: Context,
    /// Ordinal of its device, -1 where there is none.
    pub ordinal: i32,
    /// First byte of its range.
    pub start: u64,
    /// Bytes of that range.
    pub len: u64,
    /// Managed memory.
    pub managed: bool,
    /// Number of the buffer, never reused in a process; 0 where there is none.
    pub buffer_id: u64,
}

/// `CU_POINTER_ATTRIBUTE_*`.
pub mod pointer {
    #![allow(missing_docs, clippy::allow_attributes, reason = "the driver's own names")]
    pub const CONTEXT: i32 = 1;
    pub const MEMORY_TYPE: i32 = 2;
    pub const BUFFER_ID: i32 = 7;
    pub const IS_MANAGED: i32 = 8;
    pub const DEVICE_ORDINAL: i32 = 9;
    pub const RANGE_START_ADDR: i32 = 11;
    pub const RANGE_SIZE: i32 = 12;
    pub const MAPPED: i32 = 13;
}

/// `CU_DEVICE_ATTRIBUTE_*`.
pub mod attribute {
    #![allow(missing_docs, clippy::allow_attributes, reason = "the driver's own names")]
    pub const KERNEL_EXEC_TIMEOUT: i32 = 17;
    pub const COMPUTE_CAPABILITY_MAJOR: i32 = 75;
    pub const COMPUTE_CAPABILITY_MINOR: i32 = 76;
    pub const HOST_NATIVE_ATOMIC_SUPPORTED: i32 = 86;
    pub const PAGEABLE_MEMORY_ACCESS: i32 = 88;
    pub const CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: i32 = 91;
    pub const HOST_REGISTER_SUPPORTED: i32 = 99;
    pub const PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES: i32 = 100;
    pub const VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: i32 = 102;
    pub const HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: i32 = 103;
    pub const READ_ONLY_HOST_REGISTER_SUPPORTED: i32 = 113;
}

/// `CU_CTX_SCHED_*`: how a thread waits in a context.
pub mod schedule {
    /// The scheduling bits of the context's flags.
    pub const MASK: u32 = 7;
    /// Spin.
    pub const SPIN: u32 = 1;
    /// Spin, and yield to other threads.
    pub const YIELD: u32 = 2;
    /// Sleep.
    pub const BLOCKING: u32 = 4;
}

/// Flags of `cuMemHostRegister`.
pub mod register {
    /// Pinned for every context.
    pub const PORTABLE: u32 = 1;
    /// The device only reads: the only way to register pages that the process may not write.
    pub const READ_ONLY: u32 = 8;
}

/// Flags of `cuStreamCreate`.
pub mod stream {
    /// Not ordered with the legacy default stream.
    pub const NON_BLOCKING: u32 = 1;
}

/// Flags of `cuEventCreate`.
pub mod event {
    /// A wait sleeps.
    pub const BLOCKING_SYNC: u32 = 1;
    /// Only marks a position; cheaper.
    pub const DISABLE_TIMING: u32 = 2;
}

/// `CUstreamCaptureMode`: which calls of a thread may invalidate a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct CaptureMode(pub u32);

impl CaptureMode {
    /// None may: the thread takes responsibility.
    pub const RELAXED: CaptureMode = CaptureMode(2);
}

/// `CUmemLocation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Location {
    kind: i32,
    id: i32,
}

impl Location {
    /// The memory of a device.
    pub fn device(ordinal: i32) -> Location {
        Location { kind: 1, id: ordinal }
    }
}

/// `CUmemAllocationProp`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AllocationProperties {
    kind: i32,
    handle_types: i32,
    location: Location,
    win32_attributes: usize,
    compression: u8,
    gpu_direct_rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

impl AllocationProperties {
    /// Memory of a device that can be exported as a descriptor.
    pub fn exportable(ordinal: i32) -> AllocationProperties {
        AllocationProperties { handle_types: 1, ..AllocationProperties::private(ordinal) }
    }

    /// Memory of a device for this process alone.
    pub fn private(ordinal: i32) -> AllocationProperties {
        AllocationProperties {
            kind: 1,
            handle_types: 0,
            location: Location::device(ordinal),
            win32_attributes: 0,
            compression: 0,
            gpu_direct_rdma: 0,
            usage: 0,
            reserved: [0; 4],
        }
    }
}

/// `CUmemAccessDesc`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AccessDescription {
    /// Who accesses.
    pub location: Location,
    /// 1: loads; 3: loads and stores.
    pub flags: i32,
}

const _: () = {
    assert!(size_of::<AllocationProperties>() == 32);
    assert!(size_of::<AccessDescription>() == 12);
};
