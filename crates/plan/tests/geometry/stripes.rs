//! Stripe arithmetic against its definition.

use proptest::prelude::*;
use spinio_plan::geometry::{Layout, Stripe};

fn any_stripe() -> impl Strategy<Value = Stripe> {
    let phase = prop_oneof![Just(None), (0u64..1 << 24).prop_map(Some)];
    (3u32..14, 0u32..3, 9u32..22, phase).prop_map(|(data, parity, chunk, phase)| {
        let layout = if parity > 0 { Layout::LeftSymmetric(parity) } else { Layout::RoundRobin };
        Stripe { chunk: 1 << chunk, data, members: data + parity, parity, layout, phase }
    })
}

proptest! {
    #[test]
    fn read_ends_on_chunk_boundary(stripe in any_stripe(), at in 0u64..1 << 50, max_len in 1u64..1 << 24) {
        let end = stripe.end_at_chunk(at, max_len);
        prop_assert!(end > at && end - at <= max_len);
        let whole = (end + stripe.phase.unwrap_or(0)).is_multiple_of(stripe.chunk);
        prop_assert!(whole || end - at == max_len);
        prop_assert!(whole || max_len < 2 * stripe.chunk);
    }

    #[test]
    fn stripe_chunks_are_on_distinct_members(stripe in any_stripe(), n in 0u64..1 << 30) {
        let stripe = Stripe { phase: Some(0), ..stripe };
        let start = n * stripe.width();
        let mut members: Vec<_> =
            (0..u64::from(stripe.data)).map(|i| stripe.member(start + i * stripe.chunk).unwrap()).collect();
        prop_assert!(members.iter().all(|m| *m < stripe.members));
        members.sort_unstable();
        members.dedup();
        prop_assert_eq!(members.len(), stripe.data as usize);
    }

    #[test]
    fn members_are_read_evenly(stripe in any_stripe()) {
        let stripe = Stripe { phase: Some(0), ..stripe };
        let stripe_count = u64::from(stripe.data * stripe.members);
        let mut counts = vec![0u32; stripe.members as usize];
        for chunk in 0..stripe_count {
            counts[stripe.member(chunk * stripe.chunk).unwrap() as usize] += 1;
        }
        prop_assert!(counts.iter().all(|c| *c == stripe.data), "{:?}", counts);
    }
}
