//! Sizes, times and rates as text. Sizes are powers of 1024, rates powers of 1000.

/// `256 MiB`, `4.0 KiB`, `17 B`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 || value.fract() == 0.0 || value >= 99.95 {
        format!("{value:.0} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// Without control characters, which would reach the terminal: for names that other users have chosen.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// `1.87` from bytes and seconds: GB/s, three digits.
pub fn gbps(n: u64, seconds: f64) -> String {
    if seconds <= 0.0 {
        return "-".to_owned();
    }
    let rate = n as f64 / seconds / 1e9;
    match rate {
        r if r >= 99.95 => format!("{r:.0}"),
        r if r >= 9.995 => format!("{r:.1}"),
        r => format!("{r:.2}"),
    }
}

/// `812 ns`, `3.1 us`, `27 ms`, `1.4 s`.
pub fn time(nanos: f64) -> String {
    let (value, unit) = match nanos {
        n if n < 999.5 => (n, "ns"),
        n if n < 999_500.0 => (n / 1e3, "us"),
        n if n < 999_500_000.0 => (n / 1e6, "ms"),
        n => (n / 1e9, "s"),
    };
    if value >= 9.95 || unit == "ns" { format!("{value:.0} {unit}") } else { format!("{value:.1} {unit}") }
}

/// For clap: `4096`, `64K`, `1.5G`.
pub fn parse(text: &str) -> Result<u64, String> {
    spinio_io::settings::parse_bytes(text).ok_or_else(|| format!("`{text}` is no size: write 4096, 64K, 8M or 1.5G"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(4096), "4 KiB");
        assert_eq!(bytes(256 << 20), "256 MiB");
        assert_eq!(bytes((1 << 20) - 1), "1.0 MiB");
        assert_eq!(bytes(3 << 29), "1.5 GiB");
        assert_eq!(bytes(u64::MAX), "16777216 TiB");
    }

    #[test]
    fn rates() {
        assert_eq!(gbps(1_000_000_000, 0.5), "2.00");
        assert_eq!(gbps(55_400_000_000, 1.0), "55.4");
        assert_eq!(gbps(1, 0.0), "-");
    }

    #[test]
    fn times() {
        assert_eq!(time(812.0), "812 ns");
        assert_eq!(time(3100.0), "3.1 us");
        assert_eq!(time(27e6), "27 ms");
        assert_eq!(time(1.4e9), "1.4 s");
    }
}
