//! The regression recovers known parameters, and survives invalid input.

use proptest::prelude::*;
use spinio_plan::*;

/// 512 B to 64 MiB, by powers of 2 and the places between.
fn sizes() -> impl Iterator<Item = u64> + Clone {
    (9..=26).flat_map(|p| [1u64 << p, 3 << (p - 1)]).filter(|&s| s <= 64 << 20)
}

/// Costs that a device of these days may have.
fn any_planted_cost() -> impl Strategy<Value = Cost> {
    (0u64..2 << 20, 0.2e9..60e9, 1.0..30.0, 500.0..1e5).prop_map(|(cutoff, bandwidth, times, more)| {
        Cost::new(cutoff as f64 / bandwidth * 1e9 * times + more, cutoff, bandwidth).expect("within the rule")
    })
}

/// Factors near 1, the same in every run.
fn noise(seed: u64, share: f64) -> impl FnMut() -> f64 {
    let mut state = seed | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        1.0 + share * ((state >> 11) as f64 / (1u64 << 52) as f64 - 1.0)
    }
}

/// The largest relative difference of two costs over all sizes.
fn max_difference(a: &Cost, b: &Cost) -> f64 {
    sizes().map(|s| (a.time(s) / b.time(s) - 1.0).abs()).fold(0.0, f64::max)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn planted_cost_is_recovered(cost in any_planted_cost()) {
        let samples: Vec<_> = sizes().map(|bytes| Sample { bytes, nanos: cost.time(bytes) }).collect();
        let fit = fit_cost(&samples).expect("good samples");
        prop_assert!(max_difference(&fit.value, &cost) < 0.01, "{:?} for {cost:?}", fit);
        prop_assert!(fit.r2 > 0.9999 && fit.error < 0.005, "{:?}", fit);
    }

    #[test]
    fn planted_cost_is_recovered_from_noise(cost in any_planted_cost(), seed in any::<u64>()) {
        let mut noise = noise(seed, 0.1);
        let samples: Vec<_> = sizes()
            .flat_map(|bytes| [bytes; 5])
            .map(|bytes| Sample { bytes, nanos: cost.time(bytes) * noise() })
            .collect();
        let fit = fit_cost(&samples).expect("good samples");
        prop_assert!(max_difference(&fit.value, &cost) < 0.1, "{:?} for {cost:?}", fit);
        prop_assert!(fit.r2 > 0.9 && fit.error < 0.1, "{:?}", fit);
        prop_assert!(fit.value.fixed() >= fit.value.cutoff() as f64 * fit.value.per_byte() * (1.0 - 1e-9));
    }

    #[test]
    fn planted_queue_cost_is_recovered_from_noise(
        latency in 1e3..2e5, per_command in 100.0..2e4, bandwidth in 0.5e9..60e9, seed in any::<u64>()
    ) {
        let flight = QueueCost::new(latency, per_command, bandwidth);
        let time = |n: u64, s: u64| flight.latency + n as f64 * flight.per_command + s as f64 * flight.per_byte;
        let mut noise = noise(seed, 0.05);
        let batches: Vec<_> = [1u64, 4, 16, 64, 256]
            .into_iter()
            .flat_map(|n| [4096u64, 65536, 1 << 20].map(|s| (n, n * s)))
            .map(|(n, s)| QueueSample { commands: n, bytes: s, nanos: time(n, s) * noise() })
            .collect();
        let fit = fit_queue(&batches).expect("good batches");
        let fitted = |n: u64, s: u64| fit.value.latency + n as f64 * fit.value.per_command + s as f64 * fit.value.per_byte;
        for b in &batches {
            let relative_error = fitted(b.commands, b.bytes) / time(b.commands, b.bytes);
            prop_assert!((0.9..1.1).contains(&relative_error), "{} commands, {} bytes: {relative_error}; {:?} for {flight:?}", b.commands, b.bytes, fit);
        }
    }

    #[test]
    fn any_samples_fit_or_fail(
        samples in prop::collection::vec((any::<u64>(), any::<f64>(), any::<u64>()), 0..20),
        is_bounded in any::<bool>(),
    ) {
        let tamed = |(bytes, nanos, n): (u64, f64, u64)| {
            if is_bounded { (bytes % 1000, (nanos.abs() % 1e6).max(0.0), n % 5) } else { (bytes, nanos, n) }
        };
        let samples: Vec<_> = samples.into_iter().map(tamed).collect();
        let one: Vec<_> = samples.iter().map(|&(bytes, nanos, _)| Sample { bytes, nanos }).collect();
        if let Ok(fit) = fit_cost(&one) {
            prop_assert!(fit.value.time(1 << 20).is_finite() && fit.error.is_finite() && fit.r2 <= 1.0);
        }
        let many: Vec<_> = samples.iter().map(|&(bytes, nanos, commands)| QueueSample { commands, bytes, nanos }).collect();
        if let Ok(fit) = fit_queue(&many) {
            let f = fit.value;
            prop_assert!(f.latency >= 0.0 && f.per_command >= 0.0 && f.per_byte > 0.0 && f.command_time(1 << 20).is_finite());
        }
    }
}

fn sample(bytes: u64, nanos: f64) -> Sample {
    Sample { bytes, nanos }
}

#[test]
fn papers_drive_cutoff_is_recovered() {
    let paper = Cost::new(584_000.0, 512 << 10, 2.65e9).expect("the paper's");
    let samples: Vec<_> = sizes().map(|s| sample(s, paper.time(s))).collect();
    let fit = fit_cost(&samples).expect("good samples").value;
    let off = fit.cutoff() as f64 / f64::from(512 << 10);
    assert!((0.99..1.01).contains(&off), "cutoff {}", fit.cutoff());
    assert!((fit.fixed() / 584_000.0 - 1.0).abs() < 1e-3);
}

#[test]
fn linear_times_have_no_cutoff() {
    let samples: Vec<_> = sizes().map(|s| sample(s, 3_000.0 + s as f64 * 0.2)).collect();
    let fit = fit_cost(&samples).expect("good samples").value;
    assert!(fit.cutoff() <= 512, "{fit:?}");
}

#[test]
fn splitting_reward_is_not_fitted() {
    // Flat at 10 us up to 1 MiB, then 1 GB/s: two halves would be 'cheaper' than the whole.
    let time = |s: u64| 10_000.0 + s.saturating_sub(1 << 20) as f64;
    let samples: Vec<_> = sizes().map(|s| sample(s, time(s))).collect();
    let fit = fit_cost(&samples).expect("good samples");
    let cost = fit.value;
    assert!(cost.fixed() >= cost.cutoff() as f64 * cost.per_byte() * (1.0 - 1e-9), "{cost:?}");
    for s in sizes() {
        assert!(2.0 * cost.time(s / 2) >= cost.time(s) * (1.0 - 1e-9), "{s}");
    }
}

#[test]
fn unfittable_samples_are_refused() {
    assert_eq!(fit_cost(&[]), Err(FitError::TooFew));
    assert_eq!(fit_cost(&[sample(4096, 10.0), sample(4096, 11.0)]), Err(FitError::TooFew));
    assert_eq!(fit_cost(&[sample(4096, 10.0), sample(0, 11.0)]), Err(FitError::InvalidTime));
    for nanos in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert_eq!(fit_cost(&[sample(4096, 10.0), sample(8192, nanos)]), Err(FitError::InvalidTime));
    }
    let none = [QueueSample { commands: 0, bytes: 1, nanos: 1.0 }, QueueSample { commands: 1, bytes: 2, nanos: 1.0 }];
    assert_eq!(fit_queue(&none), Err(FitError::InvalidTime));
}

#[test]
fn single_command_samples_give_latency_only() {
    let batches: Vec<_> =
        sizes().map(|bytes| QueueSample { commands: 1, bytes, nanos: 20_000.0 + bytes as f64 * 0.5 }).collect();
    let flight = fit_queue(&batches).expect("good batches").value;
    assert_eq!(flight.per_command, 0.0);
    assert!((flight.latency / 20_000.0 - 1.0).abs() < 1e-6 && (flight.per_byte / 0.5 - 1.0).abs() < 1e-6);
}
