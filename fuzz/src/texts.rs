//! Texts that users and files give: settings and stored calibrations.
#![no_main]

use libfuzzer_sys::fuzz_target;
use spinio_io::settings::{Settings, TABLE, parse_bytes};
use spinio_plan::Calibration;

fuzz_target!(|text: &str| {
    // One text as every setting, and its lines as one setting each.
    let (whole, _) = Settings::read(|_| Some(text.to_owned()));
    assert!((2 << 20) <= whole.staging && whole.threads <= 64);
    let (each, complaints) = Settings::read(|name| {
        TABLE.iter().position(|r| r.name == name).and_then(|i| text.lines().nth(i)).map(Into::into)
    });
    assert!(each.threads <= 64);
    assert!(complaints.iter().all(|c| c.contains("SPINIO_")), "a complaint that names no setting");

    if let Some(bytes) = parse_bytes(text)
        && text.trim().parse::<u64>().is_ok()
    {
        assert_eq!(text.trim().parse(), Ok(bytes));
    }

    if let Ok(calibration) = Calibration::parse(text) {
        let again = Calibration::parse(&calibration.to_text()).expect("what we wrote ourselves");
        assert_eq!(again.to_text(), calibration.to_text(), "written, read and written again, it differs");
    }
});
