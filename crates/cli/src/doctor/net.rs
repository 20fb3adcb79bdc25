//! Sockets of kernels: what would wait for a kernel that serves. transports.rs: which transports are open.

use std::net::{Ipv6Addr, TcpListener};

use spinio_io::Settings;
use spinio_plan::Route;

use super::{Fact, State};

const GROUP: &str = "Sockets of GPU kernels";

/// Collects the facts.
pub fn collect(facts: &mut Vec<Fact>) {
    let variable = |name: &str| std::env::var(name).ok();
    facts.push(lazy_loading(variable("CUDA_MODULE_LOADING").as_deref()));
    facts.push(launch_blocking(variable("CUDA_LAUNCH_BLOCKING").as_deref()));
    facts.push(channels(variable("CUDA_DEVICE_MAX_CONNECTIONS").as_deref()));
    facts.push(routes(Settings::of_process()));
    facts.push(ipv6());
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
        .because("CUDA loads a kernel at its first launch (the default since CUDA 12.2), and loading waits for all running kernels")
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

/// Channels of the hardware, below which work of one stream waits for that of another one.
const CHANNELS: u32 = 8;

fn channels(value: Option<&str>) -> Fact {
    let name = "CUDA_DEVICE_MAX_CONNECTIONS";
    match value.map(|value| value.trim().parse::<u32>()) {
        None => Fact::new(GROUP, name, State::Found, "not set: 8 streams have a channel each"),
        Some(Ok(count)) if count >= CHANNELS => {
            Fact::new(GROUP, name, State::Found, format!("{count} streams have a channel each"))
        }
        Some(_) => Fact::new(
            GROUP,
            name,
            State::Limited,
            "few: work of another stream may wait for a kernel that serves, for ever",
        )
        .because("streams that share a channel of the GPU run in its order")
        .cure("unset CUDA_DEVICE_MAX_CONNECTIONS, or set it to the number of streams, at least 8"),
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
        assert_eq!([None, Some("8"), Some("32")].map(|v| channels(v).state), [State::Found; 3]);
        for value in ["1", "7", "", "many"] {
            let fact = channels(Some(value));
            assert!(fact.state == State::Limited && fact.cure.is_some(), "{value}");
        }
    }
}
