//! On-line correction of the model by measured times.
//!
//! ```text
//!   a request ends ──> measured / predicted of the side that served it
//!                        │ logarithm, one sample at most a factor of 8
//!                        ▼
//!                      moving mean, a sixteenth a sample ──> factor of the route's costs
//!                                                             1 below 16 samples
//!                                                             1 within 20 %
//!                                                             1/4 to 4, never beyond
//! ```
//!
//! A model gives the cost of a route on a quiet machine; a disk that other processes use, or a bus that is shared,
//! drifts from it. The factor follows the drift, and the planner applies it. It is bounded, because
//! a sample can have another cause: the program slept, the machine swapped. The factor of an unused route decays
//! slowly; otherwise a route that was slow once would never be tried again.
//!
//! The whole state is one word, so that the owner can store it in an atomic; a lost update loses a sample.
//!
//! Known flaws: one factor per route, whatever the size, and the same for the latency and the bandwidth.

/// A route's moving mean.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Correction {
    /// Natural logarithm of measured / predicted.
    log: f32,
    samples: u32,
}

impl Correction {
    /// Factors are between 1 / `BOUND` and `BOUND`.
    pub const MAX_FACTOR: f64 = 4.0;
    /// Samples before anything is corrected.
    pub const MIN_SAMPLES: u32 = 16;
    /// A factor so near to 1 counts as 1.
    pub const DEAD_BAND: f64 = 1.2;
    /// The bound of one sample.
    const MAX_SAMPLE_RATIO: f64 = 8.0;
    const WEIGHT: f32 = 1.0 / 16.0;
    /// Decay of the logarithm, at each request that does not use the route.
    const DECAY: f32 = 1.0 / 256.0;

    /// Adds one sample; invalid times change nothing.
    #[must_use]
    pub fn sample(self, predicted: f64, measured: f64) -> Correction {
        let ratio = measured / predicted;
        if !(ratio > 0.0 && ratio.is_finite()) {
            return self;
        }
        let log = ratio.clamp(1.0 / Correction::MAX_SAMPLE_RATIO, Correction::MAX_SAMPLE_RATIO).ln() as f32;
        let samples = self.samples.saturating_add(1);
        // The plain mean of the first few, so that none of them counts more than another.
        let weight = (1.0 / samples as f32).max(Correction::WEIGHT);
        Correction { log: self.log + (log - self.log) * weight, samples }
    }

    /// After a request that did not use the route.
    #[must_use]
    pub fn decay(self) -> Correction {
        Correction { log: self.log * (1.0 - Correction::DECAY), ..self }
    }

    /// The factor for the route's costs.
    pub fn factor(self) -> f64 {
        let factor = f64::from(self.log).exp();
        let near = (1.0 / Correction::DEAD_BAND..=Correction::DEAD_BAND).contains(&factor);
        if self.samples < Correction::MIN_SAMPLES || near {
            return 1.0;
        }
        factor.clamp(1.0 / Correction::MAX_FACTOR, Correction::MAX_FACTOR)
    }

    /// The number of samples.
    pub fn samples(self) -> u32 {
        self.samples
    }

    /// Packs the state into one word.
    pub fn to_bits(self) -> u64 {
        u64::from(self.samples) << 32 | u64::from(self.log.to_bits())
    }

    /// Unpacks the word.
    pub fn from_bits(bits: u64) -> Correction {
        let log = f32::from_bits(bits as u32);
        if log.is_finite() { Correction { log, samples: (bits >> 32) as u32 } } else { Correction::default() }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn after(samples: usize, ratio: f64) -> Correction {
        (0..samples).fold(Correction::default(), |c, _| c.sample(100.0, 100.0 * ratio))
    }

    #[test]
    fn factor_needs_min_samples_and_converges_to_ratio() {
        assert_eq!(after(15, 3.0).factor(), 1.0);
        let factor = after(16, 3.0).factor();
        assert!((2.99..3.01).contains(&factor), "{factor}");
        assert_eq!(after(100, 1.1).factor(), 1.0);
    }

    #[test]
    fn factor_follows_drift_and_decays() {
        let slow = after(64, 3.0);
        let back = (0..64).fold(slow, |c, _| c.sample(1.0, 1.0));
        assert_eq!(back.factor(), 1.0);
        let left_alone = (0..4096).fold(slow, |c, _| c.decay());
        assert_eq!(left_alone.factor(), 1.0);
        assert!((0..16).fold(slow, |c, _| c.decay()).factor() > 2.5);
    }

    #[test]
    fn outlier_moves_factor_little() {
        let calm = after(64, 1.0).sample(1.0, 1e12);
        assert_eq!(calm.factor(), 1.0);
    }

    #[test]
    fn invalid_times_are_ignored() {
        let c = Correction::default();
        for (predicted, measured) in [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (f64::NAN, 1.0), (1.0, f64::INFINITY)] {
            assert_eq!(c.sample(predicted, measured), c);
        }
    }

    proptest! {
        #[test]
        fn factor_is_bounded_for_any_samples(times in prop::collection::vec((any::<f64>(), any::<f64>()), 0..200), bits in any::<u64>()) {
            let c = times.iter().fold(Correction::from_bits(bits), |c, &(p, m)| c.sample(p, m).decay());
            let bound = Correction::MAX_FACTOR;
            prop_assert!((1.0 / bound..=bound).contains(&c.factor()), "{:?}", c);
            prop_assert_eq!(Correction::from_bits(c.to_bits()), c);
        }
    }
}
