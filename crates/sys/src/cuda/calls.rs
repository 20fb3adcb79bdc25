//! One method a driver function.
//!
//! Safe are the calls that only ask, and take nothing that the driver would believe unchecked. The others are
//! `unsafe`: handles must be alive, memory must be what the copy needs.

use std::ffi::{CStr, c_void};

use super::CuError;
use super::table::Driver;
use super::types::{CaptureMode, Context, Event, Function, MemoryType, PointerInfo, Stream, pointer};

type Result<T> = core::result::Result<T, CuError>;

#[inline(always)]
fn check(code: i32) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(CuError(code)) }
}

/// Calls a function of the table and makes a Result of its answer.
macro_rules! cu {
    ($self:ident.$f:ident($($arg:expr),*)) => {
        check(($self.f.$f)($($arg),*))
    };
    ($self:ident.$f:ident?($($arg:expr),*)) => {
        match $self.f.$f {
            Some(f) => check(f($($arg),*)),
            None => Err(CuError::NO_SUCH_FUNCTION),
        }
    };
}

// Initialisation, devices.
impl Driver {
    /// `cuInit`. For our own programs: the library never initialises a driver.
    pub fn init(&self) -> Result<()> {
        // SAFETY: no memory is involved.
        unsafe { cu!(self.init(0)) }
    }

    /// Newest CUDA version that the driver speaks: 13000 for 13.0.
    pub fn version(&self) -> Result<i32> {
        let mut version = 0;
        // SAFETY: `version` lives across the call.
        unsafe { cu!(self.driver_version(&mut version)) }.map(|()| version)
    }

    /// Number of devices.
    pub fn device_count(&self) -> Result<i32> {
        let mut count = 0;
        // SAFETY: `count` lives across the call.
        unsafe { cu!(self.device_count(&mut count)) }.map(|()| count)
    }

    /// The device handle of an ordinal.
    pub fn device(&self, ordinal: i32) -> Result<i32> {
        let mut device = 0;
        // SAFETY: `device` lives across the call.
        unsafe { cu!(self.device_get(&mut device, ordinal)) }.map(|()| device)
    }

    /// Its name.
    pub fn device_name(&self, device: i32) -> Result<String> {
        let mut text = [0u8; 128];
        // SAFETY: `text` lives across the call and is as long as said; the driver ends it with NUL.
        unsafe { cu!(self.device_name(text.as_mut_ptr().cast(), text.len() as i32, device)) }?;
        Ok(text_of(&text))
    }

    /// Its PCI address: `0000:04:00.0`.
    pub fn device_pci(&self, device: i32) -> Result<String> {
        let mut text = [0u8; 32];
        // SAFETY: as above.
        unsafe { cu!(self.device_pci(text.as_mut_ptr().cast(), text.len() as i32, device)) }?;
        Ok(text_of(&text))
    }

    /// Its memory in bytes.
    pub fn device_memory(&self, device: i32) -> Result<u64> {
        let mut bytes = 0;
        // SAFETY: `bytes` lives across the call.
        unsafe { cu!(self.device_memory(&mut bytes, device)) }.map(|()| bytes as u64)
    }

    /// One of [`super::attribute`].
    pub fn device_attribute(&self, device: i32, which: i32) -> Result<i32> {
        let mut value = 0;
        // SAFETY: `value` lives across the call.
        unsafe { cu!(self.device_attribute(&mut value, which, device)) }.map(|()| value)
    }
}

// Addresses.
impl Driver {
    /// The number of the buffer that holds `addr`: it is never given again, so an unchanged number means that the
    /// very same allocation is still there.
    #[inline]
    pub fn buffer_id(&self, addr: u64) -> Result<u64> {
        let mut id = 0u64;
        // SAFETY: `id` has the size of this attribute and lives across the call; any address may be asked about.
        unsafe { cu!(self.pointer_attribute((&raw mut id).cast(), pointer::BUFFER_ID, addr)) }.map(|()| id)
    }

    /// The pool that an address was allocated from; 0 for none.
    pub fn pool_of(&self, addr: u64) -> Result<usize> {
        let mut pool = 0usize;
        // SAFETY: as above.
        unsafe { cu!(self.pointer_attribute((&raw mut pool).cast(), pointer::MEMPOOL_HANDLE, addr)) }.map(|()| pool)
    }

    /// All that decides whose an address is. [`CuError::INVALID_VALUE`] where CUDA does not know it.
    pub fn pointer_info(&self, addr: u64) -> Result<PointerInfo> {
        const WHICH: [i32; 7] = [
            pointer::MEMORY_TYPE,
            pointer::CONTEXT,
            pointer::DEVICE_ORDINAL,
            pointer::RANGE_START_ADDR,
            pointer::RANGE_SIZE,
            pointer::IS_MANAGED,
            pointer::BUFFER_ID,
        ];
        let (mut kind, mut ordinal, mut managed) = (0u32, -1i32, 0u32);
        let (mut context, mut start, mut len, mut id) = (0usize, 0u64, 0usize, 0u64);
        let into: [*mut c_void; WHICH.len()] = [
            (&raw mut kind).cast(),
            (&raw mut context).cast(),
            (&raw mut ordinal).cast(),
            (&raw mut start).cast(),
            (&raw mut len).cast(),
            (&raw mut managed).cast(),
            (&raw mut id).cast(),
        ];
        // SAFETY: there is one variable an attribute, each of that attribute's size, all alive across the call.
        unsafe { cu!(self.pointer_attributes(WHICH.len() as u32, WHICH.as_ptr(), into.as_ptr(), addr)) }?;
        let kind = match kind {
            0 => return Err(CuError::INVALID_VALUE),
            1 => MemoryType::Host,
            2 => MemoryType::Device,
            other => MemoryType::Other(other),
        };
        // IS_MANAGED is one byte wide in some drivers' eyes and an int in others'; either way 0 means no.
        let managed = managed != 0;
        Ok(PointerInfo { kind, context: Context(context), ordinal, start, len: len as u64, managed, buffer_id: id })
    }

    /// The allocation that holds `addr`: first byte and length. Needs a current context.
    pub fn address_range(&self, addr: u64) -> Result<(u64, u64)> {
        let (mut start, mut len) = (0u64, 0usize);
        // SAFETY: both live across the call.
        unsafe { cu!(self.address_range(&mut start, &mut len, addr)) }.map(|()| (start, len as u64))
    }
}

// Contexts.
impl Driver {
    /// The context that is current on this thread; 0 for none.
    #[inline]
    pub fn current(&self) -> Result<Context> {
        let mut context = 0;
        // SAFETY: `context` lives across the call.
        unsafe { cu!(self.ctx_current(&mut context)) }.map(|()| Context(context))
    }

    /// Makes a context current, in place of the one that is.
    ///
    /// # Safety
    /// The context must not have been freed by the driver.
    pub unsafe fn set_current(&self, context: Context) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.ctx_set_current(context.0)) }
    }

    /// Makes a context current, over the one that is.
    ///
    /// # Safety
    /// As [`Driver::set_current`].
    pub unsafe fn push(&self, context: Context) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.ctx_push(context.0)) }
    }

    /// Takes the topmost context off.
    pub fn pop(&self) -> Result<Context> {
        let mut context = 0;
        // SAFETY: `context` lives across the call.
        unsafe { cu!(self.ctx_pop(&mut context)) }.map(|()| Context(context))
    }

    /// The device of the current context.
    pub fn current_device(&self) -> Result<i32> {
        let mut device = 0;
        // SAFETY: `device` lives across the call.
        unsafe { cu!(self.ctx_device(&mut device)) }.map(|()| device)
    }

    /// The flags of the current context, see [`super::schedule`].
    pub fn current_flags(&self) -> Result<u32> {
        let mut flags = 0;
        // SAFETY: `flags` lives across the call.
        unsafe { cu!(self.ctx_flags(&mut flags)) }.map(|()| flags)
    }

    /// Waits for everything in the current context.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: no memory is involved.
        unsafe { cu!(self.ctx_synchronize()) }
    }

    /// A number that no other context of the process ever has, also not one at the same address after a reset.
    ///
    /// # Safety
    /// As [`Driver::set_current`].
    pub unsafe fn context_id(&self, context: Context) -> Result<u64> {
        let mut id = 0;
        // SAFETY: `id` lives across the call; the context is the caller's word.
        unsafe { cu!(self.ctx_id(context.0, &mut id)) }.map(|()| id)
    }

    /// Whether the primary context of a device exists.
    pub fn primary_is_active(&self, device: i32) -> Result<bool> {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: both live across the call.
        unsafe { cu!(self.primary_state(device, &mut flags, &mut active)) }.map(|()| active != 0)
    }

    /// The primary context of a device, made now if there is none; to be released once.
    pub fn primary_retain(&self, device: i32) -> Result<Context> {
        let mut context = 0;
        // SAFETY: `context` lives across the call.
        unsafe { cu!(self.primary_retain(&mut context, device)) }.map(|()| Context(context))
    }

    /// Takes back one [`Driver::primary_retain`]; the last one destroys the context.
    ///
    /// # Safety
    /// The caller must have retained it.
    pub unsafe fn primary_release(&self, device: i32) -> Result<()> {
        // SAFETY: passed on to the caller.
        match unsafe { cu!(self.primary_release_v2?(device)) } {
            // SAFETY: as above; the same function under its older name.
            Err(CuError::NO_SUCH_FUNCTION) => unsafe { cu!(self.primary_release?(device)) },
            other => other,
        }
    }
}

// Memory. All need a current context.
impl Driver {
    /// Pins host memory for the device; flags are [`super::register`].
    ///
    /// # Safety
    /// The range must be mapped, and stay so until it is unregistered.
    pub unsafe fn host_register(&self, ptr: *mut u8, len: usize, flags: u32) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.host_register(ptr.cast(), len, flags)) }
    }

    /// Takes the pin back.
    ///
    /// # Safety
    /// No copy may use it any more.
    pub unsafe fn host_unregister(&self, ptr: *mut u8) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.host_unregister(ptr.cast())) }
    }

    /// Queues a copy into the device.
    ///
    /// # Safety
    /// `src` must be readable and, if pinned, unchanged until the copy is done; the stream alive.
    #[inline]
    pub unsafe fn copy_in(&self, dst: u64, src: *const u8, len: usize, stream: Stream) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.copy_in(dst, src.cast(), len, stream.0)) }
    }

    /// Queues a copy out of the device.
    ///
    /// # Safety
    /// `dst` must be writable until the copy is done; the stream alive.
    #[inline]
    pub unsafe fn copy_out(&self, dst: *mut u8, src: u64, len: usize, stream: Stream) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.copy_out(dst.cast(), src, len, stream.0)) }
    }

    /// New device memory.
    pub fn alloc(&self, len: usize) -> Result<u64> {
        let mut at = 0;
        // SAFETY: `at` lives across the call.
        unsafe { cu!(self.mem_alloc(&mut at, len)) }.map(|()| at)
    }

    /// Frees device memory.
    ///
    /// # Safety
    /// It must come from [`Driver::alloc`] and be in use by nobody.
    pub unsafe fn free(&self, at: u64) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.mem_free(at)) }
    }
}

// Streams and events. All need a current context.
impl Driver {
    /// A new stream; flags are [`super::stream`].
    pub fn stream_create(&self, flags: u32) -> Result<Stream> {
        let mut stream = 0;
        // SAFETY: `stream` lives across the call.
        unsafe { cu!(self.stream_create(&mut stream, flags)) }.map(|()| Stream(stream))
    }

    /// Destroys a stream once its work is done.
    ///
    /// # Safety
    /// The stream must be alive and nobody use it any more.
    pub unsafe fn stream_destroy(&self, stream: Stream) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.stream_destroy(stream.0)) }
    }

    /// Waits for a stream, in the manner of its context.
    ///
    /// # Safety
    /// The stream must be alive.
    pub unsafe fn stream_synchronize(&self, stream: Stream) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.stream_synchronize(stream.0)) }
    }

    /// Whether everything on a stream is done.
    ///
    /// # Safety
    /// The stream must be alive.
    pub unsafe fn stream_is_idle(&self, stream: Stream) -> Result<bool> {
        // SAFETY: passed on to the caller.
        ready(unsafe { cu!(self.stream_query(stream.0)) })
    }

    /// Makes later work on the stream wait for an event.
    ///
    /// # Safety
    /// Both must be alive.
    pub unsafe fn stream_wait(&self, stream: Stream, event: Event) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.stream_wait_event(stream.0, event.0, 0)) }
    }

    /// Whether work on the stream would be captured, or (an error) spoil a capture. Never spoils one itself.
    /// A driver without graphs says no.
    ///
    /// # Safety
    /// The stream must be alive.
    #[inline]
    pub unsafe fn stream_is_capturing(&self, stream: Stream) -> Result<bool> {
        let mut status = 0;
        // SAFETY: `status` lives across the call; the stream is the caller's word.
        match unsafe { cu!(self.stream_is_capturing?(stream.0, &mut status)) } {
            Ok(()) => Ok(status != 0),
            Err(CuError::NO_SUCH_FUNCTION) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// The context of a stream.
    ///
    /// # Safety
    /// The stream must be alive.
    pub unsafe fn stream_context(&self, stream: Stream) -> Result<Context> {
        let mut context = 0;
        // SAFETY: `context` lives across the call; the stream is the caller's word.
        unsafe { cu!(self.stream_ctx?(stream.0, &mut context)) }.map(|()| Context(context))
    }

    /// Sets how this thread's calls are checked against captures under way; returns what held before.
    /// `None` in a driver that has no such thing.
    #[inline]
    pub fn exchange_capture_mode(&self, mode: CaptureMode) -> Option<CaptureMode> {
        let mut value = mode.0;
        // SAFETY: `value` lives across the call.
        unsafe { cu!(self.exchange_capture_mode?(&mut value)) }.ok().map(|()| CaptureMode(value))
    }

    /// A new event; flags are [`super::event`].
    pub fn event_create(&self, flags: u32) -> Result<Event> {
        let mut event = 0;
        // SAFETY: `event` lives across the call.
        unsafe { cu!(self.event_create(&mut event, flags)) }.map(|()| Event(event))
    }

    /// Puts the event at the present end of the stream.
    ///
    /// # Safety
    /// Both must be alive.
    pub unsafe fn event_record(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.event_record(event.0, stream.0)) }
    }

    /// Whether everything before the event is done.
    ///
    /// # Safety
    /// The event must be alive.
    pub unsafe fn event_is_done(&self, event: Event) -> Result<bool> {
        // SAFETY: passed on to the caller.
        ready(unsafe { cu!(self.event_query(event.0)) })
    }

    /// Waits for the event: spinning, or asleep if it was made so.
    ///
    /// # Safety
    /// The event must be alive.
    pub unsafe fn event_synchronize(&self, event: Event) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.event_synchronize(event.0)) }
    }

    /// Destroys the event.
    ///
    /// # Safety
    /// The event must be alive and nobody use it any more.
    pub unsafe fn event_destroy(&self, event: Event) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.event_destroy(event.0)) }
    }
}

// Kernels. All need a current context.
impl Driver {
    /// Where the device sees registered host memory.
    pub fn host_device_pointer(&self, ptr: *const u8) -> Result<u64> {
        let mut at = 0;
        // SAFETY: `at` lives across the call; the driver judges the pointer, which it does not follow.
        unsafe { cu!(self.host_device_pointer?(&mut at, ptr.cast_mut().cast(), 0)) }.map(|()| at)
    }

    /// Loads code (a cubin, or PTX that ends in NUL) and looks up one kernel. The module stays for the life of its
    /// context.
    ///
    /// # Safety
    /// `code` must be whole: the driver reads as much as its headers say.
    pub unsafe fn load_kernel(&self, code: &[u8], name: &CStr) -> Result<Function> {
        let (mut module, mut function) = (0, 0);
        // SAFETY: `module` lives across the call; the code is the caller's word.
        unsafe { cu!(self.module_load?(&mut module, code.as_ptr().cast())) }?;
        // SAFETY: loaded in the line above; the name is NUL-terminated.
        unsafe { cu!(self.module_function?(&mut function, module, name.as_ptr())) }.map(|()| Function(function))
    }

    /// Queues a call of a host function, which must not call the driver.
    ///
    /// # Safety
    /// The stream must be alive, and the function be one that may be called once with the argument, on any thread.
    pub unsafe fn call_host(
        &self,
        stream: Stream,
        function: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    ) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.host_function?(stream.0, function, argument)) }
    }

    /// Queues a kernel: `blocks` of `threads`.
    ///
    /// # Safety
    /// The function and the stream must be alive, and each parameter point to what the kernel takes in that place;
    /// what the kernel does with memory is the caller's word.
    pub unsafe fn launch(
        &self,
        function: Function,
        blocks: u32,
        threads: u32,
        stream: Stream,
        parameters: &mut [*mut c_void],
    ) -> Result<()> {
        let none = core::ptr::null_mut();
        let with = parameters.as_mut_ptr();
        // SAFETY: passed on to the caller.
        unsafe { cu!(self.launch?(function.0, blocks, 1, 1, threads, 1, 1, 0, stream.0, with, none)) }
    }
}

/// "Not ready" is an answer.
fn ready(answer: Result<()>) -> Result<bool> {
    match answer {
        Ok(()) => Ok(true),
        Err(CuError::NOT_READY) => Ok(false),
        Err(e) => Err(e),
    }
}

fn text_of(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}
