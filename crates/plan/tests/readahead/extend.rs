//! A model of the Linux kernel's read-ahead by markers, and its extension.

use proptest::prelude::*;
use spinio_plan::readahead::{READAHEAD_BYTES, marker_offsets};

const PAGE: u64 = 4096;

/// Cached up to `end`; the marker of the last window, if no read has reached it.
struct KernelModel {
    end: u64,
    mark: Option<u64>,
    window: u64,
}

impl KernelModel {
    fn touch(&mut self, at: u64) {
        if self.mark == Some(at) {
            self.mark = Some(self.end);
            self.end += self.window;
        }
    }
}

proptest! {
    /// Whatever the window, and wherever the mark: the kernel is led as far as it shall be and may, and no further.
    #[test]
    fn kernel_readahead_is_extended_to_limit(
        (at, cached) in (0u64..1 << 30, 1u64..200),
        (window, reported) in (1u64..64, 1u64..64),
        (limit, mark, knows) in (0u64..2 << 20, 0u64..3, any::<bool>()),
    ) {
        let (window, from) = (window * PAGE, at / PAGE * PAGE);
        let window_used = if knows { window } else { reported * PAGE };
        let end = from + cached * PAGE;
        let reach = at + limit;
        let mark = [Some(end.saturating_sub(window)), Some(end - PAGE), None][mark as usize];
        let mut kernel = KernelModel { end, mark, window };
        loop {
            let before = kernel.end;
            let Some(places) = marker_offsets(at, before - from, window_used, READAHEAD_BYTES, reach) else { break };
            for place in places {
                prop_assert!(place < before, "a page that is not in flight");
                kernel.touch(place);
            }
            if kernel.end == before {
                break;
            }
            prop_assert!(!knows || kernel.end <= reach);
            prop_assert!(kernel.end < from + READAHEAD_BYTES + window);
        }
        if knows && mark.is_some() {
            prop_assert!(kernel.end >= from + READAHEAD_BYTES || kernel.end + window > reach);
        }
        prop_assert!(mark.is_some() || kernel.end == end);
    }
}

#[test]
fn kernel_without_readahead_is_left_alone() {
    let (at, window) = (1 << 20, 128 << 10);
    assert_eq!(marker_offsets(at, 0, window, READAHEAD_BYTES, u64::MAX), None);
    assert_eq!(marker_offsets(at, PAGE, 0, READAHEAD_BYTES, u64::MAX), None);
    assert_eq!(marker_offsets(at, READAHEAD_BYTES, window, READAHEAD_BYTES, u64::MAX), None, "enough is on its way");
    assert_eq!(marker_offsets(at, window, window, 0, u64::MAX), None, "it is not to be led at all");
    assert_eq!(marker_offsets(at, window, window, READAHEAD_BYTES, at + 2 * window - 1), None, "not read yet");
    assert_eq!(marker_offsets(at, window, window, READAHEAD_BYTES, at + 2 * window), Some([at, at + window - PAGE]));
    assert_eq!(marker_offsets(0, PAGE, window, READAHEAD_BYTES, u64::MAX), Some([0, 0]));
}
