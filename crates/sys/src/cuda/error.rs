//! The driver's error codes.

use std::fmt;

/// What a driver call returned, if not success.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct CuError(pub i32);

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal;)+) => {
        impl CuError {
            $($(#[$doc])* pub const $name: CuError = CuError($code);)+

            /// The driver's own name of the code, where it is one that SPIN can meet.
            pub const fn name(self) -> &'static str {
                match self.0 {
                    $($code => $text,)+
                    _ => "unknown",
                }
            }
        }
    };
}

codes! {
    /// This driver does not have the function at all (a code of this crate, not of the driver).
    NO_SUCH_FUNCTION = -1, "function not in this driver";
    /// Also what pointer queries return for memory that CUDA does not know.
    INVALID_VALUE = 1, "CUDA_ERROR_INVALID_VALUE";
    /// No memory left, on the device or pinned.
    OUT_OF_MEMORY = 2, "CUDA_ERROR_OUT_OF_MEMORY";
    /// The program has not called `cuInit` (or a forked child calls).
    NOT_INITIALIZED = 3, "CUDA_ERROR_NOT_INITIALIZED";
    /// The process is ending.
    DEINITIALIZED = 4, "CUDA_ERROR_DEINITIALIZED";
    /// The library is a toolkit's stub, not a driver.
    STUB_LIBRARY = 34, "CUDA_ERROR_STUB_LIBRARY";
    /// There is no GPU.
    NO_DEVICE = 100, "CUDA_ERROR_NO_DEVICE";
    /// No such ordinal.
    INVALID_DEVICE = 101, "CUDA_ERROR_INVALID_DEVICE";
    /// No context is current, or the current one is dead.
    INVALID_CONTEXT = 201, "CUDA_ERROR_INVALID_CONTEXT";
    /// The kernel refused something.
    OPERATING_SYSTEM = 304, "CUDA_ERROR_OPERATING_SYSTEM";
    /// A handle of a dead or foreign context.
    INVALID_HANDLE = 400, "CUDA_ERROR_INVALID_HANDLE";
    /// The work is not done yet: a result, not a failure.
    NOT_READY = 600, "CUDA_ERROR_NOT_READY";
    /// A GPU kernel of the program accessed a bad address; the context is lost.
    ILLEGAL_ADDRESS = 700, "CUDA_ERROR_ILLEGAL_ADDRESS";
    /// The primary context has been used already.
    PRIMARY_CONTEXT_ACTIVE = 708, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE";
    /// The context was destroyed.
    CONTEXT_IS_DESTROYED = 709, "CUDA_ERROR_CONTEXT_IS_DESTROYED";
    /// The pages are registered already.
    HOST_MEMORY_ALREADY_REGISTERED = 712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED";
    /// The pages are not registered.
    HOST_MEMORY_NOT_REGISTERED = 713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED";
    /// A GPU kernel of the program failed; the context is lost.
    LAUNCH_FAILED = 719, "CUDA_ERROR_LAUNCH_FAILED";
    /// Not allowed here: in a callback of the driver, for one.
    NOT_PERMITTED = 800, "CUDA_ERROR_NOT_PERMITTED";
    /// Not on this device or system.
    NOT_SUPPORTED = 801, "CUDA_ERROR_NOT_SUPPORTED";
    /// The call is not possible while a stream captures.
    STREAM_CAPTURE_UNSUPPORTED = 900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
    /// An earlier call invalidated the capture.
    STREAM_CAPTURE_INVALIDATED = 901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED";
    /// The call would have drawn the legacy default stream into a capture.
    STREAM_CAPTURE_IMPLICIT = 906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT";
}

impl CuError {
    /// The context that the call was about does not exist any more, or will never work again as it is.
    pub const fn is_context_lost(self) -> bool {
        matches!(self, CuError::CONTEXT_IS_DESTROYED | CuError::INVALID_CONTEXT | CuError::DEINITIALIZED)
    }
}

impl fmt::Display for CuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name(), self.0)
    }
}

impl fmt::Debug for CuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for CuError {}
