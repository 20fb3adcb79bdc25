//! C programs that use `spinio_gaia.h` and libspinio.so, below a mount of `spinio gaia mount`.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::PROGRAM;
use common::mount::Mount;

/// Compiles a program with the headers and the library that cargo built next to this test.
fn build(dir: &Path, name: &str, source: &str) -> Option<PathBuf> {
    let text = dir.join(format!("{name}.c"));
    std::fs::write(&text, source).unwrap();
    compile("cc", &[], &text, &dir.join(name))
}

fn compile(compiler: &str, more: &[&str], source: &Path, program: &Path) -> Option<PathBuf> {
    let library = std::env::current_exe().unwrap().with_file_name("libspinio.so");
    let folder = |path: &str| format!("-I{}/{path}", env!("CARGO_MANIFEST_DIR"));
    let headers = ["../capi/include", "../preload/tests/c", "../../device/include"].map(folder);
    let rpath = format!("-Wl,-rpath,{}", library.parent().unwrap().display());
    let mut command = Command::new(compiler);
    command
        .args(["-Wall", "-Wextra", "-Werror", "-pthread"])
        .args(more)
        .args(headers)
        .arg("-o")
        .arg(program)
        .arg(source);
    let Ok(done) = command.arg(library).arg(rpath).output() else {
        eprintln!("skipped: no {compiler}");
        return None;
    };
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Some(program.to_owned())
}

fn run(program: &Path, dir: &Path, arguments: &[PathBuf]) {
    run_on(program, dir, arguments, "");
}

/// The same; `device` describes the emulated one.
fn run_on(program: &Path, dir: &Path, arguments: &[PathBuf], device: &str) {
    let mut command = Command::new("timeout");
    command.env("SPINIO_EMULATED", device);
    command.args(["--signal=KILL", "120"]).arg(program).args(arguments).current_dir(dir).env_remove("LD_LIBRARY_PATH");
    let done = command.output().unwrap();
    let text = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success() && text.is_empty(), "{}: {text}", done.status);
}

#[test]
fn c_program_shares_a_file_and_each_misuse_has_an_errno_and_a_sentence() {
    let (Some(mount), dir) = (Mount::new(), common::folder()) else { return };
    let Some(program) = build(dir.path(), "gaia", include_str!("../../preload/tests/c/gaia.c")) else { return };
    let (file, other) = (mount.dir().join("file"), dir.path().join("other"));
    std::fs::write(&file, [7; 3 * 4096 + 100]).unwrap();
    std::fs::write(&other, [7; 4096]).unwrap();
    run(&program, dir.path(), &[file.clone(), other]);
    let bytes = std::fs::read(&file).unwrap();
    assert_eq!((bytes[5], bytes[6], bytes[7], bytes[9], bytes[50]), (1, 2, 3, 57, 7));
}

#[test]
fn map_on_gpu_with_hooks_disabled_is_an_error_of_the_linux_kernel() {
    let (Some(mount), dir) = (Mount::new(), common::folder()) else { return };
    let source = r#"
        #define _GNU_SOURCE
        #include <errno.h>
        #include <fcntl.h>
        #include <sys/mman.h>
        #include <spinio.h>
        #include <spinio_gaia.h>
        int main(int argc, char **argv)
        {
            int fd = argc == 2 && spinio_emulated_stream() ? open(argv[1], O_RDWR) : -1;
            return fd < 0 || mmap(NULL, 1, PROT_READ, MAP_ONGPU, fd, 0) != MAP_FAILED || errno != EOPNOTSUPP;
        }"#;
    let Some(program) = build(dir.path(), "disabled", source) else { return };
    let file = mount.dir().join("file");
    std::fs::write(&file, [0; 4096]).unwrap();
    let run = |disable| Command::new(&program).arg(&file).env("SPINIO_DISABLE", disable).status().unwrap().code();
    assert_eq!((run("1"), run("0")), (Some(0), Some(1)));
}

/// A driver unmaps parts of what it has mapped itself; a library with the name of one stands for it.
#[test]
fn driver_may_unmap_a_part_of_a_map_and_the_program_may_not() {
    let (Some(mount), dir) = (Mount::new(), common::folder()) else { return };
    let driver = dir.path().join("libnvidia-test.so");
    let text = dir.path().join("driver.c");
    std::fs::write(&text, "#include <sys/mman.h>\nint drop(void *at) { return munmap(at, 4096) ? -1 : 0; }\n").unwrap();
    let mut cc = Command::new("cc");
    if cc.args(["-O1", "-shared", "-fPIC", "-o"]).arg(&driver).arg(&text).status().is_err() {
        return eprintln!("skipped: no cc");
    }
    let source = r#"
        #include <dlfcn.h>
        #include <errno.h>
        #include <fcntl.h>
        #include <sys/mman.h>
        #include <unistd.h>
        #include <spinio.h>
        #include <spinio_gaia.h>
        int main(int argc, char **argv)
        {
            int fd = argc == 3 && spinio_emulated_stream() ? open(argv[1], O_RDWR) : -1;
            void *driver = dlopen(argv[2], RTLD_NOW), *gpu = spinio_gaia_map(fd, 0, 8192, SPINIO_GAIA_WRITE);
            int (*drop)(void *) = driver ? (int (*)(void *))dlsym(driver, "drop") : 0;
            if (!drop || !gpu || munmap(gpu, 4096) != -1 || errno != EINVAL)
                return 1;
            _exit(drop(gpu) ? 2 : 0);
        }"#;
    let Some(program) = build(dir.path(), "partly", source) else { return };
    let file = mount.dir().join("file");
    std::fs::write(&file, [0; 8192]).unwrap();
    run(&program, dir.path(), &[file, driver]);
}

#[test]
fn c_kernel_reads_the_page_cache_in_place() {
    let (Some(mount), dir) = (Mount::new(), common::folder()) else { return };
    let source = r#"
        #include <errno.h>
        #include <fcntl.h>
        #include <stdio.h>
        #include <string.h>
        #include <unistd.h>
        #include <spinio.h>
        #include <spinio_gaia.h>
        static unsigned char seen;
        static void kernel(void *gpu) { seen = ((volatile unsigned char *)gpu)[5000]; }
        static int fail(const char *what) { return fprintf(stderr, "%s: %s\n", what, spinio_last_error()), 1; }
        int main(int argc, char **argv)
        {
            int fd = argc == 2 && spinio_emulated_stream() ? open(argv[1], O_RDWR) : -1;
            struct spinio_gaia_info info;
            if (spinio_gaia_map(fd, 0, 8192, SPINIO_GAIA_WRITE | SPINIO_GAIA_IN_PLACE) || errno != EINVAL ||
                !strstr(spinio_last_error(), "for reading only"))
                return fail("to write");
            void *gpu = spinio_gaia_map(fd, 0, 8192, SPINIO_GAIA_READ | SPINIO_GAIA_IN_PLACE);
            if (!gpu)
                return fail("map");
            for (unsigned char byte = 1; byte < 4; byte++) {
                if (pwrite(fd, &byte, 1, 5000) != 1 || spinio_gaia_acquire(gpu, 8192, SPINIO_GAIA_READ) != 8192)
                    return fail("acquire");
                spinio_emulated_launch(kernel, gpu, NULL);
                if (spinio_emulated_wait(NULL) || seen != byte)
                    return fprintf(stderr, "%d, not %d\n", seen, byte), 1;
            }
            if (spinio_gaia_acquire_async(gpu, 8192, SPINIO_GAIA_READ, spinio_emulated_stream()) != -1 || errno != ENOTSUP)
                return fail("in stream order");
            if (spinio_gaia_info(gpu, &info, sizeof info) || info.device_bytes || info.bytes_registered < 8192)
                return fail("info");
            return spinio_gaia_release(gpu, 8192, 0) || spinio_gaia_unmap(gpu) ? fail("unmap") : 0;
        }"#;
    let Some(program) = build(dir.path(), "in_place", source) else { return };
    let file = mount.dir().join("file");
    std::fs::write(&file, [0; 8192]).unwrap();
    run(&program, dir.path(), &[file]);
}

/// On a device whose kernels access all memory of the process.
#[test]
fn c_kernel_stores_to_the_page_cache_in_place() {
    let (Some(mount), dir) = (Mount::new(), common::folder()) else { return };
    let source = r#"
        #include <errno.h>
        #include <fcntl.h>
        #include <stdio.h>
        #include <sys/mman.h>
        #include <unistd.h>
        #include <spinio.h>
        #include <spinio_gaia.h>
        static void kernel(void *gpu) { ((volatile unsigned char *)gpu)[5000]++; }
        static int fail(const char *what) { return fprintf(stderr, "%s: %s\n", what, spinio_last_error()), 1; }
        int main(int argc, char **argv)
        {
            int fd = argc == 3 && spinio_emulated_stream() ? open(argv[1], O_RDWR) : -1, plain = open(argv[2], O_RDWR);
            struct spinio_gaia_info info;
            unsigned char byte = 0;
            void *gpu = spinio_gaia_map(fd, 0, 8192, SPINIO_GAIA_WRITE | SPINIO_GAIA_IN_PLACE);
            if (!gpu)
                return fail("map");
            for (unsigned char round = 1; round < 4; round++) {
                if (spinio_gaia_acquire(gpu, 8192, SPINIO_GAIA_WRITE) != 8192)
                    return fail("acquire");
                spinio_emulated_launch(kernel, gpu, NULL);
                if (spinio_gaia_release(gpu, 8192, 0) || pread(fd, &byte, 1, 5000) != 1 || byte != round)
                    return fail("release");
            }
            spinio_gaia_acquire(gpu, 4096, SPINIO_GAIA_OVERWRITE);
            if (spinio_gaia_release(gpu, 4096, SPINIO_GAIA_DISCARD) != -1 || errno != ENOTSUP)
                return fail("discard");
            if (spinio_gaia_release(gpu, 4096, SPINIO_GAIA_DISCARD) || spinio_gaia_sync(gpu, 8192))
                return fail("discard of nothing");
            void *stream = spinio_emulated_stream();
            ssize_t published = 7;
            if (spinio_gaia_acquire_async(gpu, 8192, SPINIO_GAIA_WRITE, stream))
                return fail("acquire in stream order");
            spinio_emulated_launch(kernel, gpu, stream);
            if (spinio_gaia_release_async(gpu, 8192, 0, stream, &published) || spinio_gaia_sync(gpu, 8192) || published ||
                pread(fd, &byte, 1, 5000) != 1 || byte != 4)
                return fail("release in stream order");
            if (spinio_gaia_info(gpu, &info, sizeof info) || info.in_place != 2 || info.device_bytes || info.releases != 4)
                return fail("info");
            if (spinio_gaia_map(plain, 0, 4096, SPINIO_GAIA_WRITE | SPINIO_GAIA_IN_PLACE) || errno != ENOTSUP)
                return fail("without a mount, to write");
            void *read = spinio_gaia_map(plain, 0, 4096, SPINIO_GAIA_READ | SPINIO_GAIA_IN_PLACE);
            byte = 9;
            if (!read || spinio_gaia_acquire(read, 4096, SPINIO_GAIA_READ) != 4096 || pwrite(plain, &byte, 1, 7) != 1 ||
                ((volatile unsigned char *)read)[7] != 9 || spinio_gaia_unmap(read))
                return fail("without a mount");
            return munmap(gpu, 8192) ? fail("unmap") : 0;
        }"#;
    let Some(program) = build(dir.path(), "coherent", source) else { return };
    let (file, plain) = (mount.dir().join("file"), dir.path().join("plain"));
    std::fs::write(&file, [0; 8192]).unwrap();
    std::fs::write(&plain, [0; 4096]).unwrap();
    run_on(&program, dir.path(), &[file, plain], "hmm=1");
}

#[test]
fn status_names_mounts_and_mapped_files() {
    let (Some(mount), dir) = (Mount::new(), common::folder()) else { return };
    let source = r#"
        #include <fcntl.h>
        #include <stdio.h>
        #include <spinio.h>
        #include <spinio_gaia.h>
        static void kernel(void *gpu) { *(unsigned char *)gpu = 1; }
        int main(int argc, char **argv)
        {
            int fd = argc == 2 ? open(argv[1], O_RDWR) : -1;
            void *gpu = spinio_emulated_stream() ? spinio_gaia_map(fd, 0, 8192, SPINIO_GAIA_WRITE) : NULL;
            if (!gpu || spinio_gaia_acquire(gpu, 8192, SPINIO_GAIA_WRITE) < 0)
                return fprintf(stderr, "%s\n", spinio_last_error()), 1;
            spinio_emulated_launch(kernel, gpu, NULL);
            if (spinio_gaia_release(gpu, 8192, 0) < 0)
                return fprintf(stderr, "%s\n", spinio_last_error()), 1;
            return puts("released") < 0 || fflush(stdout) || getchar() != EOF;
        }"#;
    let Some(program) = build(dir.path(), "mapped", source) else { return };
    let file = mount.dir().join("file");
    std::fs::write(&file, [0; 8192]).unwrap();
    let mut child = Command::new("timeout")
        .args(["--signal=KILL", "120"])
        .arg(program)
        .arg(&file)
        .env_remove("LD_LIBRARY_PATH")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.as_mut().unwrap()), &mut line).unwrap();
    assert_eq!(line, "released\n");
    let status = |arguments: &[&str]| {
        let assert = common::spinio().args(["gaia", "status"]).args(arguments).arg(mount.dir()).assert().success();
        common::stdout(&assert)
    };
    let json: serde_json::Value = serde_json::from_str(&status(&["--json"])).unwrap();
    assert_eq!(json[0]["maps"], 1);
    assert_eq!(json[0]["mapped_bytes"], 8192);
    let of_file = &json[0]["files"][0];
    assert_eq!((&of_file["path"], &of_file["maps"], &of_file["releases"]), (&"/file".into(), &1.into(), &1.into()));
    assert!(status(&[]).contains("/file"));
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    let elsewhere = common::spinio().args(["gaia", "status"]).arg(dir.path()).assert().code(1);
    assert!(common::stderr(&elsewhere).contains("not mounted"));
}

/// The limit of released bytes is what was asked for, and is named where it cannot be that.
#[test]
fn limit_of_released_bytes_is_that_of_the_command() {
    let Some(mount) = Mount::with(&["--dirty", "16M"]) else { return };
    let status = |arguments: &[&str]| {
        let assert = common::spinio().args(["gaia", "status"]).args(arguments).arg(mount.dir()).assert().success();
        common::stdout(&assert)
    };
    let json: serde_json::Value = serde_json::from_str(&status(&["--json"])).unwrap();
    let share = if common::is_root() { 14 << 20 } else { 16 << 20 };
    assert_eq!(
        (&json[0]["memory_limit_bytes"], &json[0]["user_memory_limit_bytes"]),
        (&(16 << 20).into(), &share.into())
    );
    assert!(status(&[]).contains("0 B of at most 16 MiB"), "{}", status(&[]));
    let refused = |bytes: &str| {
        let mut command = common::spinio();
        let assert = command.args(["gaia", "mount", "--dirty", bytes]).arg(mount.dir()).assert().code(2);
        common::stderr(&assert)
    };
    for (bytes, why) in [("15M", "at least 16M"), ("many", "at least 16M"), ("1000000G", "of memory")] {
        assert!(refused(bytes).contains(why), "{}", refused(bytes));
    }
}

#[test]
fn example_of_the_header_compiles_and_works() {
    let (Some(mount), dir) = (Mount::new(), common::folder()) else { return };
    let header = include_str!("../../capi/include/spinio_gaia.h");
    let code: Vec<&str> = header.lines().filter_map(|line| line.strip_prefix(" *     ")).collect();
    let includes = ["fcntl.h", "stdio.h", "spinio.h", "spinio_gaia.h"].map(|name| format!("#include <{name}>\n"));
    let source = includes.concat() + &code.join("\n");
    let Some(program) = build(dir.path(), "example", &source) else { return };
    std::fs::write(mount.dir().join("shared.bin"), [41; 8192]).unwrap();
    run(&program, &mount.dir(), &[]);
    let bytes = std::fs::read(mount.dir().join("shared.bin")).unwrap();
    assert_eq!(bytes[..2], [42, 41]);
}

/// A daemon of leased files, which is gone when this is dropped.
struct Daemon(tempfile::TempDir);

impl Daemon {
    fn new() -> Daemon {
        let daemon = Daemon(tempfile::Builder::new().prefix("spinio-gaia-serve-").tempdir_in("/tmp").unwrap());
        let mut command = Command::new("timeout");
        // With pipes: the command must end, and its daemon must not keep them open.
        let done = command.args(["60", PROGRAM, "gaia", "serve", "--socket"]).arg(daemon.socket()).output().unwrap();
        assert!(done.status.success() && done.stderr.is_empty(), "{done:?}");
        daemon
    }

    fn socket(&self) -> PathBuf {
        self.0.path().join("serve.sock")
    }

    fn gaia(&self, arguments: &[&str]) -> (bool, String) {
        let mut command = Command::new("timeout");
        command.args(["60", PROGRAM, "gaia"]).args(arguments).arg("--socket").arg(self.socket());
        let done = command.output().unwrap();
        let text = [done.stdout, done.stderr].concat();
        (done.status.success(), String::from_utf8_lossy(&text).into_owned())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.gaia(&["serve", "--stop"]);
    }
}

#[test]
fn c_programs_share_a_leased_file() {
    let (daemon, dir) = (Daemon::new(), common::folder());
    let source = include_str!("../../preload/tests/c/gaia_leased.c");
    let Some(program) = build(dir.path(), "gaia_leased", source) else { return };
    let file = dir.path().join("file");
    let len = (5 << 20) + 100;
    std::fs::write(&file, (0..len).map(|n| (n % 251) as u8).collect::<Vec<_>>()).unwrap();
    for read in [len, 0] {
        let mut command = Command::new("timeout");
        command.args(["--signal=KILL", "120"]).arg(&program).arg(&file).arg(read.to_string()).current_dir(dir.path());
        let done = command.env_remove("LD_LIBRARY_PATH").env("SPINIO_GAIA_SOCKET", daemon.socket()).output().unwrap();
        let text = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success() && text.is_empty(), "{}: {text}", done.status);
    }
    let (_, text) = daemon.gaia(&["status"]);
    assert!(text.contains("6 MiB") && text.contains(&file.display().to_string()), "{text}");
    let (_, json) = daemon.gaia(&["status", "--json"]);
    assert!(json.contains("\"held_bytes\": 6291456") && json.contains("emulated:0"), "{json}");
    let (done, text) = daemon.gaia(&["serve"]);
    assert!(!done && text.contains("serves this socket already"), "{text}");
    let (done, text) = daemon.gaia(&["drop"]);
    assert!(done && text.contains("dropped 6 MiB"), "{text}");
    assert!(daemon.gaia(&["serve", "--stop"]).0);
    let (done, text) = daemon.gaia(&["serve", "--stop"]);
    assert!(!done && text.contains("no daemon"), "{text}");
    assert!(!daemon.socket().exists());
}

/// Compiled into this directory.
fn fake_driver(dir: &Path) -> PathBuf {
    let driver = dir.join("libcuda.so.1");
    let fake = concat!(env!("CARGO_MANIFEST_DIR"), "/../sys/tests/fake/libcuda.c");
    let flags = ["-O1", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1", "-o"];
    assert!(Command::new("cc").args(flags).arg(&driver).arg(fake).status().unwrap().success());
    driver
}

/// The program of the GPU suite, so that it is right when it comes to a GPU.
#[test]
fn maps_in_stream_order_of_the_gpu_suite_pass_on_the_fake_driver() {
    let (Some(mount), dir) = (Mount::new(), common::folder()) else { return };
    let (source, program) = (concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/gpu/maps.c"), dir.path().join("maps"));
    let headers = concat!("-I", env!("CARGO_MANIFEST_DIR"), "/../capi/include");
    let flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-pthread", headers, "-o"];
    let Ok(built) = Command::new("cc").args(flags).arg(&program).arg(source).arg("-ldl").status() else {
        return eprintln!("skipped: no cc");
    };
    assert!(built.success());
    fake_driver(dir.path());
    let library = std::env::current_exe().unwrap().with_file_name("libspinio.so");
    // With few channels nothing runs beside a stopped stream, so that none may be stopped.
    for channels in ["8", "1"] {
        let mut command = Command::new("timeout");
        command.args(["--signal=KILL", "120"]).arg(&program).arg(mount.dir().join("file"));
        command.env("CUDA_DEVICE_MAX_CONNECTIONS", channels);
        let done = command.env("LD_PRELOAD", &library).env("LD_LIBRARY_PATH", dir.path()).output().unwrap();
        let text = [done.stdout, done.stderr].concat();
        assert!(done.status.success(), "{channels}, {}: {}", done.status, String::from_utf8_lossy(&text));
    }
}

/// Its driver is a fake one; what a GPU does is tested there.
#[test]
fn c_program_maps_files_into_cuda_memory() {
    let (daemon, mount, dir) = (Daemon::new(), Mount::new(), common::folder());
    let source = include_str!("../../preload/tests/c/gaia_cuda.c");
    let Some(program) = build(dir.path(), "gaia_cuda", source) else { return };
    let driver = fake_driver(dir.path());
    let bytes: Vec<u8> = (0..(5 << 20) + 100).map(|n| (n % 251) as u8).collect();
    let leased = dir.path().join("leased");
    std::fs::write(&leased, &bytes).unwrap();
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", "120"]).arg(&program).arg(&driver).arg(&leased).current_dir(dir.path());
    let shared = mount.as_ref().map(|mount| mount.dir().join("shared"));
    if let Some(shared) = &shared {
        std::fs::write(shared, &bytes).unwrap();
        command.arg(shared);
    }
    let done = command.env_remove("LD_LIBRARY_PATH").env("SPINIO_GAIA_SOCKET", daemon.socket()).output().unwrap();
    let text = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success() && text.is_empty(), "{}: {text}", done.status);
    if let Some(shared) = shared {
        let now = std::fs::read(shared).unwrap();
        let at = 3 << 20;
        assert!(now[..at] == bytes[..at] && &now[at..at + 6] == b"stored" && now[at + 6..] == bytes[at + 6..]);
    }
}

#[test]
fn scopes_of_cxx_publish_drop_and_throw() {
    let (Some(mount), dir) = (Mount::new(), common::folder()) else { return };
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../device/tests/gaia_epochs.cpp");
    let Some(program) = compile("c++", &["-std=c++17"], &source, &dir.path().join("epochs")) else { return };
    let file = mount.dir().join("file");
    std::fs::write(&file, [0; 3 * 4096]).unwrap();
    run(&program, dir.path(), &[file]);
}
