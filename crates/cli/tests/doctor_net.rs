//! `spinio doctor` on sockets of kernels: each thing that closes a transport or lets a program wait for its own kernel is named with
//! its cause and cure, in an environment that has it.

mod common;

use common::{PROGRAM, folder, spinio, stdout};
use serde_json::Value;

const GROUP: &str = "Sockets of GPU kernels";

/// Starts a program for which `pidfd_getfd` is refused, as by a container engine.
const SANDBOX: &str = r#"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <unistd.h>

int main(int count, char **arguments)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 438, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {4, filter};
    if (count < 2 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        return perror("sandbox"), 77;
    execv(arguments[1], arguments + 1);
    return perror("exec"), 78;
}
"#;

fn of_sockets(text: &str) -> Vec<Value> {
    let all: Vec<Value> = serde_json::from_str(text).unwrap();
    all.into_iter().filter(|fact| fact["group"] == GROUP).collect()
}

fn doctor(variables: &[(&str, &str)]) -> Vec<Value> {
    let mut command = spinio();
    for name in ["CUDA_MODULE_LOADING", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"] {
        command.env_remove(name);
    }
    command.envs(variables.iter().copied()).args(["doctor", "--json"]);
    of_sockets(&stdout(&command.assert().success()))
}

fn fact<'a>(facts: &'a [Value], name: &str) -> &'a Value {
    facts.iter().find(|fact| fact["name"] == name).unwrap_or_else(|| panic!("no fact `{name}`: {facts:#?}"))
}

/// A fact is this, with a cause and a cure that contain these words.
fn is(fact: &Value, state: &str, cause: &str, cure: &str) {
    let has = |key: &str, words: &str| words.is_empty() || fact[key].as_str().is_some_and(|text| text.contains(words));
    assert!(fact["state"] == state && has("cause", cause) && has("cure", cure), "{fact:#}");
}

#[test]
fn variables_of_cuda_that_let_a_program_wait_for_its_own_kernel_are_named() {
    let facts = doctor(&[]);
    is(fact(&facts, "CUDA_MODULE_LOADING"), "limited", "first launch", "CUDA_MODULE_LOADING=EAGER");
    is(fact(&facts, "CUDA_LAUNCH_BLOCKING"), "found", "", "");
    is(fact(&facts, "CUDA_DEVICE_MAX_CONNECTIONS"), "found", "", "");
    is(fact(&facts, "file reads beside a server"), "limited", "gives pages back", "SPINIO_ROUTES=copy,direct");
    let facts = doctor(&[
        ("CUDA_MODULE_LOADING", "EAGER"),
        ("CUDA_LAUNCH_BLOCKING", "1"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        ("SPINIO_ROUTES", "copy,direct"),
    ]);
    is(fact(&facts, "CUDA_MODULE_LOADING"), "found", "", "");
    is(fact(&facts, "CUDA_LAUNCH_BLOCKING"), "limited", "", "unset CUDA_LAUNCH_BLOCKING");
    is(fact(&facts, "CUDA_DEVICE_MAX_CONNECTIONS"), "limited", "share a channel", "unset CUDA_DEVICE_MAX_CONNECTIONS");
    is(fact(&facts, "file reads beside a server"), "found", "", "");
}

#[test]
fn setting_closes_both_transports_and_a_device_without_mappings_the_net() {
    let facts = doctor(&[("SPINIO_NET_UPGRADE", "off")]);
    for transport in ["transport loopback", "transport shared"] {
        is(fact(&facts, transport), "limited", "SPINIO_NET_UPGRADE=off", "unset SPINIO_NET_UPGRADE");
    }
    let facts = doctor(&[("SPINIO_EMULATED", "vmm=0")]);
    is(fact(&facts, "a net"), "absent", "no virtual memory management", "emulated device");
}

#[test]
fn sandbox_that_refuses_pidfd_getfd_closes_shared_memory_but_not_the_net() {
    let facts = doctor(&[]);
    if fact(&facts, "adopt and release")["state"] != "found" {
        return eprintln!("skipped: this sandbox refuses pidfd_getfd itself");
    }
    is(fact(&facts, "transport loopback"), "found", "", "");
    is(fact(&facts, "transport shared"), "found", "", "");
    let dir = folder();
    let Some(sandbox) = common::compile(dir.path(), "sandbox", SANDBOX, &[]) else { return };
    let done = std::process::Command::new(sandbox).args([PROGRAM, "doctor", "--json"]).output().unwrap();
    if done.status.code() == Some(77) {
        return eprintln!("skipped: no filters here: {}", String::from_utf8_lossy(&done.stderr));
    }
    let facts = of_sockets(&String::from_utf8(done.stdout).unwrap());
    is(fact(&facts, "a net"), "found", "", "");
    is(fact(&facts, "transport loopback"), "found", "", "");
    is(fact(&facts, "transport shared"), "limited", "pidfd_getfd", "SYS_PTRACE");
    is(fact(&facts, "adopt and release"), "absent", "pidfd_getfd", "SYS_PTRACE");
}

#[test]
fn few_descriptors_are_named() {
    let script = format!("ulimit -n 300 && exec '{PROGRAM}' doctor --json");
    let done = std::process::Command::new("bash").args(["-c", &script]).output().unwrap();
    let facts = of_sockets(&String::from_utf8(done.stdout).unwrap());
    is(fact(&facts, "descriptors of a net"), "limited", "backlog", "ulimit -n 1024");
}

#[test]
fn gpus_that_store_into_each_others_memory_are_a_transport() {
    let dir = folder();
    let fake = concat!(env!("CARGO_MANIFEST_DIR"), "/../sys/tests/fake/libcuda.c");
    let source = std::fs::read_to_string(fake).unwrap();
    let with = |name: &str, source: &str| {
        let place = dir.path().join(name);
        std::fs::create_dir(&place).unwrap();
        common::compile(&place, "libcuda.so.1", source, &["-shared", "-fPIC", "-pthread"])?;
        Some(doctor(&[("LD_LIBRARY_PATH", place.to_str().unwrap())]))
    };
    let Some(facts) = with("all", &source) else { return };
    is(fact(&facts, "transport peer"), "found", "", "");
    let changed = source.replace("{ *can = d != peer; return OK; }", "{ (void)d, (void)peer; *can = 0; return OK; }");
    assert_ne!(changed, source);
    let facts = with("none", &changed).unwrap();
    is(fact(&facts, "transport peer"), "limited", "no peer access between cuda: 0 and 1", "NVLink");
}
