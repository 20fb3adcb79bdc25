//! NVRTC, the compiler for code that runs on the device: a library that a program may or may not include.
//!
//! Frameworks contain it in their own directories, so one that is already loaded is used first, found by its SONAME;
//! then one that the loader finds.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;

use super::table::{function, loader_error};

type Program = usize;

/// The compiler. Never closed.
pub struct Compiler {
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    version: (i32, i32),
}

/// Why there is no code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CompileError {
    /// There is no NVRTC; the loader's message.
    NoCompiler(String),
    /// It has not all the functions that are needed.
    MissingFunction(&'static str),
    /// It refused: code and log.
    Failed(i32, String),
}

impl fmt::Display for CompileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CompileError::NoCompiler(why) => write!(f, "NVRTC could not be loaded: {why}"),
            CompileError::MissingFunction(name) => write!(f, "NVRTC lacks {name}"),
            CompileError::Failed(code, log) => write!(f, "NVRTC returned {code}: {log}"),
        }
    }
}

impl std::error::Error for CompileError {}

/// Its SONAMEs, newest first.
const LIBRARIES: [&CStr; 3] = [c"libnvrtc.so.13", c"libnvrtc.so.12", c"libnvrtc.so"];

impl Compiler {
    /// The compiler of this process: a loaded one, else one that can be loaded.
    pub fn open() -> Result<Compiler, CompileError> {
        for flags in [libc::RTLD_NOLOAD | libc::RTLD_LAZY, libc::RTLD_LAZY | libc::RTLD_LOCAL] {
            for name in LIBRARIES {
                // SAFETY: the name is NUL-terminated; running the constructors of a compiler is intended.
                let library = unsafe { libc::dlopen(name.as_ptr(), flags) };
                if !library.is_null() {
                    return Compiler::from_library(library);
                }
            }
        }
        Err(CompileError::NoCompiler(loader_error()))
    }

    fn from_library(library: *mut c_void) -> Result<Compiler, CompileError> {
        macro_rules! find {
            ($name:literal) => {
                // SAFETY: the symbol is NVRTC's function of this name, whose C prototype the field repeats.
                unsafe { function(library, concat!($name, "\0")) }.ok_or(CompileError::MissingFunction($name))?
            };
        }
        let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int = find!("nvrtcVersion");
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both live across the call.
        unsafe { version(&mut major, &mut minor) };
        Ok(Compiler {
            create: find!("nvrtcCreateProgram"),
            compile: find!("nvrtcCompileProgram"),
            destroy: find!("nvrtcDestroyProgram"),
            size: find!("nvrtcGetCUBINSize"),
            cubin: find!("nvrtcGetCUBIN"),
            log_size: find!("nvrtcGetProgramLogSize"),
            log: find!("nvrtcGetProgramLog"),
            version: (major, minor),
        })
    }

    /// Major and minor version.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Machine code of `source` for an architecture such as `sm_90`. Needs a stack of several MiB.
    pub fn compile(&self, source: &CStr, architecture: &str) -> Result<Vec<u8>, CompileError> {
        let mut program = 0;
        let none = core::ptr::null();
        // SAFETY: `program` and the texts live across the call; there are no headers.
        let made = unsafe { (self.create)(&mut program, source.as_ptr(), c"spinio.cu".as_ptr(), 0, none, none) };
        if made != 0 {
            return Err(CompileError::Failed(made, String::new()));
        }
        let code = self.build(program, architecture);
        // SAFETY: created above, and used no more.
        unsafe { (self.destroy)(&mut program) };
        code
    }

    fn build(&self, program: Program, architecture: &str) -> Result<Vec<u8>, CompileError> {
        let refused = |code| CompileError::Failed(code, self.build_log(program));
        let architecture = CString::new(format!("--gpu-architecture={architecture}")).map_err(|_| refused(-1))?;
        let options = [architecture.as_ptr(), c"--std=c++17".as_ptr()];
        // SAFETY: the program lives, the options are NUL-terminated and live across the call.
        match unsafe { (self.compile)(program, options.len() as c_int, options.as_ptr()) } {
            0 => {}
            code => return Err(refused(code)),
        }
        let mut len = 0;
        // SAFETY: the program lives and `len` lives across the call.
        match unsafe { (self.size)(program, &mut len) } {
            0 if len > 0 => {}
            code => return Err(refused(code)),
        }
        let mut out = vec![0u8; len];
        // SAFETY: `out` is as long as the previous call reported.
        match unsafe { (self.cubin)(program, out.as_mut_ptr().cast()) } {
            0 => Ok(out),
            code => Err(refused(code)),
        }
    }

    fn build_log(&self, program: Program) -> String {
        let mut len = 0;
        // SAFETY: the program lives and `len` lives across the call.
        if unsafe { (self.log_size)(program, &mut len) } != 0 || len == 0 {
            return String::new();
        }
        let mut text = vec![0u8; len];
        // SAFETY: `text` is as long as the previous call reported.
        unsafe { (self.log)(program, text.as_mut_ptr().cast()) };
        String::from_utf8_lossy(&text).trim_end_matches(['\0', '\n']).to_owned()
    }
}

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NVRTC {}.{}", self.version.0, self.version.1)
    }
}
