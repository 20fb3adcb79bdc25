//! Texts from users and files: settings and stored calibrations.
#![no_main]

use libfuzzer_sys::fuzz_target;
use spinio_host::settings::{Settings, TABLE, parse_bytes};
use spinio_plan::Calibration;

fuzz_target!(|text: &str| {
    // One text as every setting, and its lines as one setting each.
    let (whole, _) = Settings::read(|_| Some(text.to_owned()));
    assert!((2 << 20) <= whole.bounce_limit && whole.threads <= 64);
    let (each, complaints) = Settings::read(|name| {
        TABLE.iter().position(|r| r.name == name).and_then(|i| text.lines().nth(i)).map(Into::into)
    });
    assert!(each.threads <= 64);
    assert!(complaints.iter().all(|c| c.contains("SPINIO_")), "a message without the setting's name");

    if let Some(bytes) = parse_bytes(text)
        && text.trim().parse::<u64>().is_ok()
    {
        assert_eq!(text.trim().parse(), Ok(bytes));
    }

    if let Ok(calibration) = Calibration::parse(text) {
        let again = Calibration::parse(&calibration.to_text()).expect("the output of to_text");
        assert_eq!(again.to_text(), calibration.to_text(), "to_text and parse do not round-trip");
    }
});
