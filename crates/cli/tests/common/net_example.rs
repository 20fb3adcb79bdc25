//! Compiles and runs the examples of `examples/net`, with the command lines of their README, but less optimization.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::PROGRAM;

/// A hang becomes a failure.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Compiles `examples/net/NAME/NAME.cu`. `None`, with a message, without a compiler.
pub fn build(name: &str, optimization: &str, into: &Path) -> Option<PathBuf> {
    let headers = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../device/include");
    let options = ["-std=c++17", optimization, "-I", headers.to_str().unwrap(), "-x", "c++"];
    compile("c++", &options, &format!("{name}/{name}.cu"), &into.join(name))
}

/// Compiles a file of `examples/net`.
pub fn compile(compiler: &str, options: &[&str], source: &str, program: &Path) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let libraries = Path::new(PROGRAM).parent().unwrap().join("deps");
    let mut command = Command::new(compiler);
    command.args(["-pthread", "-Wall", "-Wextra", "-Werror"]).arg("-I").arg(root.join("crates/capi/include"));
    command.args(options).arg(root.join("examples/net").join(source)).args(["-x", "none"]);
    command.arg(libraries.join("libspinio.so"));
    // Not RUNPATH, which LD_LIBRARY_PATH precedes.
    command.arg(format!("-Wl,--disable-new-dtags,-rpath,{}", libraries.display())).arg("-o").arg(program);
    let Ok(compiled) = command.output() else {
        eprintln!("skipped: no {compiler}");
        return None;
    };
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    Some(program.to_owned())
}

/// A running example.
pub struct Example {
    child: Child,
    stdout: BufReader<ChildStdout>,
    pub address: String,
}

impl Example {
    pub fn start(program: &Path, arguments: &[&str]) -> Example {
        let mut command = Command::new(program);
        command.args(arguments).stdout(Stdio::piped());
        let mut child = command.env_remove("LD_PRELOAD").env_remove("SPINIO_EMULATED").spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let address = line.strip_prefix("listening on ").and_then(|rest| rest.split(',').next());
        let address = address.unwrap_or_else(|| panic!("{line}")).to_owned();
        Example { child, stdout, address }
    }

    pub fn connect_tcp(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address.strip_prefix("tcp://").unwrap()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    pub fn connect_unix(&self) -> UnixStream {
        let name = SocketAddr::from_abstract_name(self.address.strip_prefix("unix:@").unwrap()).unwrap();
        let stream = UnixStream::connect_addr(&name).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Ends it as Ctrl-C does; what it printed at its end.
    pub fn interrupt(mut self) -> String {
        kill_process(Pid::from_child(&self.child), Signal::INT).unwrap();
        let mut text = String::new();
        self.stdout.read_to_string(&mut text).unwrap();
        assert!(self.child.wait().unwrap().success());
        text
    }
}

impl Drop for Example {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
