//! `--limit`: the time that a run, or all of it, may take.

use std::time::Duration;

/// A time in seconds; not so long that adding it to the present would overflow.
pub fn parse(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("`{text}` is no number of seconds"))?;
    match seconds {
        s if s > 0.0 && s <= 86_400.0 => Ok(Duration::from_secs_f64(s)),
        _ => Err("above 0 and at most 86400 seconds".to_owned()),
    }
}
