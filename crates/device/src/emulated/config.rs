//! The configuration of the emulated devices: `size=1G,bar=64M,gbps=12,latency_us=10,p2p=1`, of each of `devices=2`.

use std::fmt;
use std::time::Duration;

/// The parts of the description that were given, and defaults for the rest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// Bytes of memory in total.
    pub size: u64,
    /// Bytes of these that may be host-mapped.
    pub bar: u64,
    /// The host-mapped part is P2P-mapped as well: a storage device can DMA into ordinary memory.
    pub p2p: bool,
    /// Bytes per second of the DMA engine; `None`: unlimited.
    pub bandwidth: Option<f64>,
    /// From enqueueing a copy to its first byte.
    pub latency: Duration,
    /// The time to register a range.
    pub pin_latency: Duration,
    /// The time to unregister pages, as if a kernel of that length were running.
    pub unpin_latency: Duration,
    /// Memory can be mapped in chunks, as GPUs can that have virtual memory management.
    pub vmm: bool,
    /// Kernels access memory of the process that is not registered, as on GPUs with HMM.
    pub hmm: bool,
    /// How many such devices a process has.
    pub devices: u32,
    /// Devices can access each other's memory.
    pub peer: bool,
    /// Bytes per second of copies between two devices; `None`: as other copies.
    pub peer_bandwidth: Option<f64>,
}

/// The most devices of a process.
pub const MAX_DEVICES: u32 = 8;

impl Default for Config {
    fn default() -> Config {
        let (latency, pin, unpin) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
        Config {
            size: 1 << 30,
            bar: 0,
            p2p: false,
            bandwidth: None,
            latency,
            pin_latency: pin,
            unpin_latency: unpin,
            vmm: true,
            hmm: false,
            devices: 1,
            peer: true,
            peer_bandwidth: None,
        }
    }
}

/// An invalid description, in one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError(String);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConfigError {}

const PAGE: u64 = 4096;
const MAX_SIZE: u64 = 1 << 40;

impl Config {
    /// Parses a description: parts in any order, each at most once, all optional; the empty text is the default.
    pub fn parse(text: &str) -> Result<Config, ConfigError> {
        let mut config = Config::default();
        let mut keys_seen = Vec::new();
        for part in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let invalid = |why: &str| ConfigError(format!("Emulated device: {part}: {why}"));
            let (key, value) = part.split_once('=').ok_or_else(|| invalid("expected name=value"))?;
            let (key, value) = (key.trim(), value.trim());
            if keys_seen.contains(&key) {
                return Err(invalid("given twice"));
            }
            keys_seen.push(key);
            match key {
                "size" => config.size = bytes(value).map_err(invalid)?,
                "bar" => config.bar = bytes(value).map_err(invalid)?,
                "p2p" => config.p2p = flag(value).map_err(invalid)?,
                "gbps" => config.bandwidth = Some(positive(value).map_err(invalid)? * 1e9),
                "latency_us" => config.latency = latency(value).map_err(invalid)?,
                "pin_us" => config.pin_latency = latency(value).map_err(invalid)?,
                "unpin_us" => config.unpin_latency = latency(value).map_err(invalid)?,
                "vmm" => config.vmm = flag(value).map_err(invalid)?,
                "hmm" => config.hmm = flag(value).map_err(invalid)?,
                "devices" => config.devices = count(value).map_err(invalid)?,
                "peer" => config.peer = flag(value).map_err(invalid)?,
                "peer_gbps" => config.peer_bandwidth = Some(positive(value).map_err(invalid)? * 1e9),
                _ => {
                    return Err(invalid(
                        "unknown; the parts are size, bar, p2p, gbps, latency_us, pin_us, unpin_us, vmm, hmm, devices, \
                         peer and peer_gbps",
                    ));
                }
            }
        }
        if config.size == 0 {
            return Err(ConfigError("Emulated device: size=0: it needs memory".into()));
        }
        if config.bar > config.size {
            return Err(ConfigError(format!(
                "Emulated device: bar={} is larger than size={}: it is a part of size",
                config.bar, config.size
            )));
        }
        Ok(config)
    }

    /// The engine's time for `len` bytes.
    pub(super) fn transfer(&self, len: usize) -> Duration {
        time(len, self.bandwidth)
    }

    /// The same for a copy between two devices.
    pub(super) fn peer_transfer(&self, len: usize) -> Duration {
        time(len, self.peer_bandwidth.or(self.bandwidth))
    }
}

fn time(len: usize, bandwidth: Option<f64>) -> Duration {
    bandwidth.map_or(Duration::ZERO, |b| Duration::from_secs_f64(len as f64 / b))
}

type Parsed<T> = Result<T, &'static str>;

/// Bytes, rounded up to pages.
fn bytes(text: &str) -> Parsed<u64> {
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'k' | b'K') => (&text[..text.len() - 1], 1u64 << 10),
        Some(b'm' | b'M') => (&text[..text.len() - 1], 1 << 20),
        Some(b'g' | b'G') => (&text[..text.len() - 1], 1 << 30),
        _ => (text, 1),
    };
    let integer = digits.parse::<u64>().map_err(|_| "expected a number of bytes such as 4096, 64M or 1G")?;
    match integer.checked_mul(unit) {
        Some(n) if n <= MAX_SIZE => Ok(n.next_multiple_of(PAGE)),
        _ => Err("more than 1024G"),
    }
}

fn flag(text: &str) -> Parsed<bool> {
    match text {
        "1" => Ok(true),
        "0" => Ok(false),
        _ => Err("expected 0 or 1"),
    }
}

fn count(text: &str) -> Parsed<u32> {
    match text.parse::<u32>() {
        Ok(n) if (1..=MAX_DEVICES).contains(&n) => Ok(n),
        _ => Err("expected a number of devices, 1 to 8"),
    }
}

fn positive(text: &str) -> Parsed<f64> {
    match text.parse::<f64>() {
        Ok(n) if n.is_finite() && n >= 1e-6 => Ok(n),
        _ => Err("expected a bandwidth in GB/s, at least 0.000001"),
    }
}

fn latency(text: &str) -> Parsed<Duration> {
    match text.parse::<f64>() {
        Ok(n) if (0.0..=1e7).contains(&n) => Ok(Duration::from_secs_f64(n / 1e6)),
        _ => Err("expected microseconds, 0 to 10000000"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_optional_and_in_any_order() {
        assert_eq!(Config::parse(""), Ok(Config::default()));
        assert_eq!(
            Config::parse(
                "latency_us=10, gbps=12,bar=64M,size=1G,p2p=1,pin_us=6,unpin_us=7,vmm=0,hmm=1,devices=8,peer=0,peer_gbps=200"
            ),
            Ok(Config {
                size: 1 << 30,
                bar: 64 << 20,
                p2p: true,
                bandwidth: Some(12e9),
                latency: Duration::from_micros(10),
                pin_latency: Duration::from_micros(6),
                unpin_latency: Duration::from_micros(7),
                vmm: false,
                hmm: true,
                devices: 8,
                peer: false,
                peer_bandwidth: Some(200e9),
            })
        );
        assert_eq!(Config::parse("size=5000").unwrap().size, 8192);
    }

    #[test]
    fn invalid_config_is_reported() {
        for (text, needle) in [
            ("size", "name=value"),
            ("size=", "number of bytes"),
            ("size=-1", "number of bytes"),
            ("size=0", "size=0"),
            ("size=1é", "number of bytes"),
            ("size=9999999999G", "1024G"),
            ("size=1M,bar=2M", "larger than size"),
            ("size=1M,size=2M", "twice"),
            ("gbps=0", "GB/s"),
            ("gbps=nan", "GB/s"),
            ("latency_us=1e99", "microseconds"),
            ("p2p=yes", "0 or 1"),
            ("devices=0", "1 to 8"),
            ("devices=9", "1 to 8"),
            ("peer_gbps=-1", "GB/s"),
            ("speed=3", "the parts are"),
        ] {
            let error = Config::parse(text).unwrap_err().to_string();
            assert!(error.contains(needle), "{text}: {error}");
        }
    }

    #[test]
    fn transfer_time_is_bytes_over_bandwidth() {
        assert_eq!(Config::default().transfer(1 << 30), Duration::ZERO);
        let config = Config::parse("gbps=2").unwrap();
        assert_eq!(config.transfer(2_000_000), Duration::from_millis(1));
        assert_eq!(config.peer_transfer(2_000_000), Duration::from_millis(1));
        assert_eq!(Config::parse("gbps=2,peer_gbps=4").unwrap().peer_transfer(2_000_000), Duration::from_micros(500));
    }
}
