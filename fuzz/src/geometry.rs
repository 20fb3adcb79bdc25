//! Any contents of sysfs and mountinfo: every call terminates, and its results are in bounds.
#![no_main]

use arbitrary::{Arbitrary, Unstructured};
use libfuzzer_sys::fuzz_target;
use spinio_plan::geometry::{BlockStack, P2pHint, SysfsReader, overlay, read_btrfs, read_device};
use spinio_plan::stripe_layout::{DeviceExtent, StripeLayout};

/// Files, directories and links of a machine: a hash of each path chooses its text.
#[derive(Debug)]
struct Machine {
    texts: Vec<String>,
}

/// Meaningful texts, so that the fuzzer need not find them; the texts of the input are added to these.
const WORDS: [&str; 24] = [
    "raid0",
    "raid1",
    "raid4",
    "raid5",
    "raid6",
    "raid10",
    "linear",
    "in_sync",
    "spare",
    "faulty",
    "none",
    "65536",
    "2",
    "4",
    "259:1",
    "259:2",
    "8:0",
    "dev-sda",
    "dev-sdb",
    "../../devices/virtual/block/md0",
    "../../devices/pci0000:00/0000:00:02.0/nvme/nvme0/nvme0n1",
    "LVM-abc",
    "CRYPT-LUKS2-x",
    "mpath-x",
];

impl Machine {
    fn text_for(&self, path: &str, salt: u64) -> Option<String> {
        let hash =
            path.bytes().fold(salt ^ 0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        let at = (hash >> 32) as usize % (self.texts.len() + WORDS.len() + 2);
        self.texts.get(at).cloned().or_else(|| WORDS.get(at - self.texts.len().min(at)).map(|w| (*w).to_owned()))
    }
}

impl SysfsReader for Machine {
    fn read_text(&self, path: &str) -> Option<String> {
        self.text_for(path, 1)
    }

    fn list_dir(&self, path: &str) -> Vec<String> {
        (10..16).filter_map(|salt| self.text_for(path, salt)).collect()
    }

    fn read_link(&self, path: &str) -> Option<String> {
        self.text_for(path, 2)
    }
}

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    texts: Vec<&'a str>,
    number: (u16, u16),
    uuid: &'a str,
    mountinfo: &'a str,
    path: &'a str,
    at: u64,
    most: u64,
}

fuzz_target!(|bytes: &[u8]| {
    let Ok(input) = Input::arbitrary(&mut Unstructured::new(bytes)) else { return };
    let machine = Machine { texts: input.texts.iter().map(|a| (*a).to_owned()).collect() };
    let number = (u32::from(input.number.0), u32::from(input.number.1));
    check(&read_device(&machine, "ext4", number), &input);
    check(&read_btrfs(&machine, input.uuid), &input);
    for id in [0, 27, 36] {
        let found = overlay::candidates(input.mountinfo, id, input.path);
        assert!(found.iter().all(|folder| folder.starts_with('/')), "a relative path: {found:?}");
    }
});

fn check(stack: &BlockStack, input: &Input<'_>) {
    let disks = stack.disks().len();
    assert!(disks <= 1024, "more layers than the limit");
    let _ = (P2pHint::from_stack(stack).text(), stack.read_ahead(), stack.is_fast(), stack.writes_single_disk());
    let tree = stack.to_string();
    assert!(!tree.chars().any(|c| c.is_control() && c != '\n'), "control characters in the tree: {tree:?}");
    let Some(stripe) = stack.stripe() else { return };
    assert!(stripe.width() > 0 && stripe.chunk > 0 && stripe.members >= stripe.data);
    for at in [0, 1, stripe.width(), input.at] {
        // File offsets are at most i64::MAX.
        let at = at.min(i64::MAX as u64);
        let whole = stripe.end_at_chunk(at, input.most);
        let limit = at.saturating_add(input.most.max(1));
        let layout = StripeLayout::new(
            stripe.width(),
            stripe.phase.unwrap_or(0),
            [DeviceExtent { file: 1, device: at, len: input.at }],
        );
        let end = layout.end_of_chunk(at, input.most);
        assert!(end.is_none_or(|end| end > at && end <= limit), "{stripe:?} splits {at} + {} at {end:?}", input.most);
        assert!(whole > at && whole <= limit, "{stripe:?} ends {at} + {} at {whole}", input.most);
        assert!(stripe.member(at).is_none_or(|member| member < stripe.members));
    }
}
