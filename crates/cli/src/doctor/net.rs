//! Sockets of kernels: what would wait for a kernel that serves, and what closes a transport.

use std::net::{Ipv6Addr, TcpListener};

use spinio_io::Settings;
use spinio_plan::Route;
use spinio_sys::{Errno, linux};

use super::{Fact, State};

const GROUP: &str = "Sockets of GPU kernels";

/// Collects the facts.
pub fn collect(facts: &mut Vec<Fact>) {
    let variable = |name: &str| std::env::var(name).ok();
    facts.push(lazy_loading(variable("CUDA_MODULE_LOADING").as_deref()));
    facts.push(launch_blocking(variable("CUDA_LAUNCH_BLOCKING").as_deref()));
    facts.push(routes(Settings::of_process()));
    facts.push(ipv6());
    facts.push(adopt());
}

fn lazy_loading(value: Option<&str>) -> Fact {
    let name = "CUDA_MODULE_LOADING";
    match value {
        Some(value) if value.eq_ignore_ascii_case("eager") => {
            Fact::new(GROUP, name, State::Found, "EAGER: no kernel is loaded beside one that serves")
        }
        _ => Fact::new(
            GROUP,
            name,
            State::Limited,
            "lazy: the first launch of a kernel waits for one that serves, for ever",
        )
        .because("CUDA loads a kernel's module at its first launch, and loading waits for all running kernels")
        .cure("CUDA_MODULE_LOADING=EAGER; or cudaFuncGetAttributes() of every kernel before the server is launched"),
    }
}

fn launch_blocking(value: Option<&str>) -> Fact {
    let name = "CUDA_LAUNCH_BLOCKING";
    match value {
        None | Some("" | "0") => Fact::new(GROUP, name, State::Found, "off: launches return at once"),
        Some(_) => {
            Fact::new(GROUP, name, State::Limited, "on: the launch of a server does not return until it is stopped")
                .cure("unset CUDA_LAUNCH_BLOCKING")
        }
    }
}

fn routes(settings: &Settings) -> Fact {
    let name = "file reads beside a server";
    if !settings.allows(Route::Dma) {
        return Fact::new(GROUP, name, State::Found, "the route dma is off: no read waits for a running kernel");
    }
    Fact::new(GROUP, name, State::Limited, "a read by the route dma waits for kernels that serve, for ever")
        .because("it gives pages back to the driver, which waits for all running kernels")
        .cure("SPINIO_ROUTES=copy,direct for programs with such a kernel")
}

fn ipv6() -> Fact {
    match TcpListener::bind((Ipv6Addr::LOCALHOST, 0)) {
        Ok(_) => Fact::new(GROUP, "IPv6", State::Found, "::1 can be bound"),
        Err(e) => Fact::new(GROUP, "IPv6", State::Absent, "no sockets of INET6, and no tcp://[::1]:PORT")
            .because(e.to_string()),
    }
}

/// Between two descriptor tables of one process, as `spinio_net_adopt` needs it.
fn adopt() -> Fact {
    let name = "adopt and release";
    match linux::dup_from_thread(linux::gettid(), 0) {
        Ok(fd) => {
            let _ = linux::close(fd);
            Fact::new(GROUP, name, State::Found, "sockets move between program and kernels")
        }
        // Standard input may be closed: then the call has found out that it is.
        Err(Errno::BADF) => Fact::new(GROUP, name, State::Found, "sockets move between program and kernels"),
        Err(e) => Fact::new(GROUP, name, State::Absent, "sockets cannot move between program and kernels")
            .because(format!("pidfd_getfd: {}", std::io::Error::from(e)))
            .cure("in a container: --cap-add SYS_PTRACE, or a seccomp profile that allows pidfd_getfd"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_deadlocks_beside_a_server_has_a_cure() {
        assert_eq!(lazy_loading(Some("eager")).state, State::Found);
        for value in [None, Some("LAZY"), Some("")] {
            let fact = lazy_loading(value);
            assert!(fact.state == State::Limited && fact.cure.is_some());
        }
        assert_eq!([None, Some("0")].map(|v| launch_blocking(v).state), [State::Found; 2]);
        assert_eq!(launch_blocking(Some("1")).state, State::Limited);
        assert_eq!(routes(&Settings::default()).state, State::Limited);
    }
}
