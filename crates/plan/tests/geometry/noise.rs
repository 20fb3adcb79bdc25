//! For any contents of sysfs, no call panics and every call terminates.

use proptest::prelude::*;
use spinio_plan::geometry::{BlockStack, P2pHint, SysfsReader, overlay, read_btrfs, read_device};

/// Texts from a list, chosen by a hash of the path: the same path has the same text.
struct Noise(Vec<String>);

impl Noise {
    fn pick(&self, path: &str, seed: usize) -> Option<String> {
        let hash = path.bytes().fold(seed, |h, b| h.wrapping_mul(31).wrapping_add(usize::from(b)));
        self.0.get(hash % (self.0.len() + 1)).cloned()
    }
}

impl SysfsReader for Noise {
    fn read_text(&self, path: &str) -> Option<String> {
        self.pick(path, 1)
    }

    fn list_dir(&self, path: &str) -> Vec<String> {
        (0..6).filter_map(|salt| self.pick(path, salt)).collect()
    }

    fn read_link(&self, path: &str) -> Option<String> {
        self.pick(path, 2)
    }
}

fn word() -> impl Strategy<Value = String> {
    prop_oneof![
        "[0-9]{1,20}",
        "[0-9]{1,3}:[0-9]{1,3}",
        "raid[0-9]{1,2}|linear|in_sync|faulty|none|idle|recover",
        "dev-[a-z0-9]{0,4}|dm-[0-9]|\\.\\.|\\.|a/b",
        "(LVM|CRYPT|mpath|part1)-.{0,8}",
        "../../devices/(virtual|pci0000:00/0000:00:02.0)/(nvme/nvme0|block|host1)/[a-z0-9]{0,6}",
        ".{0,12}",
    ]
}

fn check(stack: &BlockStack) -> Result<(), TestCaseError> {
    let _ = (P2pHint::from_stack(stack).text(), stack.read_ahead(), stack.is_fast(), stack.disks().len());
    prop_assert!(stack.max_ring_read() >= 4096);
    let picture = stack.to_string();
    prop_assert!(picture.lines().count() <= 2048 && !picture.contains('\x1b'));
    if let Some(stripe) = stack.stripe() {
        prop_assert!(stripe.width() > 0);
        for at in [0, 1, u64::MAX - 1, stripe.width()] {
            prop_assert!(stripe.end_at_chunk(at, 1 << 20) > at);
            let _ = stripe.member(at);
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn noise_yields_valid_stack(words in proptest::collection::vec(word(), 0..40), major in 0u32..1 << 12) {
        let noise = Noise(words);
        check(&read_device(&noise, "ext4", (major, 0)))?;
        check(&read_btrfs(&noise, "x"))?;
    }

    #[test]
    fn noisy_mountinfo_never_panics(text in "([0-9 ]{0,4}[-a-z=,:/\\\\é\n ]{0,40}){0,6}", path in "[/a-z]{0,9}") {
        for id in 0..3 {
            let _ = overlay::candidates(&text, id, &path);
        }
    }
}
