//! Whatever sysfs and mountinfo say: everything ends, and what comes out can be reckoned with.
#![no_main]

use arbitrary::{Arbitrary, Unstructured};
use libfuzzer_sys::fuzz_target;
use spinio_plan::geometry::{P2p, Source, Stack, btrfs, device, overlay};
use spinio_plan::shape::{Run, Shape};

/// Files, folders and links of a machine: each path has one answer, which a hash of it chooses.
#[derive(Debug)]
struct Machine {
    answers: Vec<String>,
}

/// What is worth saying, so that the fuzzer need not find it; a word of the input stands among these.
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
    fn answer(&self, path: &str, salt: u64) -> Option<String> {
        let hash =
            path.bytes().fold(salt ^ 0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        let at = (hash >> 32) as usize % (self.answers.len() + WORDS.len() + 2);
        self.answers.get(at).cloned().or_else(|| WORDS.get(at - self.answers.len().min(at)).map(|w| (*w).to_owned()))
    }
}

impl Source for Machine {
    fn text(&self, path: &str) -> Option<String> {
        self.answer(path, 1)
    }

    fn list(&self, path: &str) -> Vec<String> {
        (10..16).filter_map(|salt| self.answer(path, salt)).collect()
    }

    fn link(&self, path: &str) -> Option<String> {
        self.answer(path, 2)
    }
}

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    answers: Vec<&'a str>,
    number: (u16, u16),
    uuid: &'a str,
    mountinfo: &'a str,
    path: &'a str,
    at: u64,
    most: u64,
}

fuzz_target!(|bytes: &[u8]| {
    let Ok(input) = Input::arbitrary(&mut Unstructured::new(bytes)) else { return };
    let machine = Machine { answers: input.answers.iter().map(|a| (*a).to_owned()).collect() };
    let number = (u32::from(input.number.0), u32::from(input.number.1));
    judge(&device(&machine, "ext4", number), &input);
    judge(&btrfs(&machine, input.uuid), &input);
    for id in [0, 27, 36] {
        let found = overlay::candidates(input.mountinfo, id, input.path);
        assert!(found.iter().all(|folder| folder.starts_with('/')), "a folder that depends on where one is: {found:?}");
    }
});

fn judge(stack: &Stack, input: &Input<'_>) {
    let disks = stack.disks().len();
    assert!(disks <= 1024, "more layers than there may be");
    let _ = (P2p::of(stack).text(), stack.read_ahead(), stack.is_fast(), stack.writes_once());
    let picture = stack.to_string();
    assert!(!picture.chars().any(|c| c.is_control() && c != '\n'), "a picture that steers a terminal: {picture:?}");
    let Some(stripe) = stack.stripe() else { return };
    assert!(stripe.width() > 0 && stripe.chunk > 0 && stripe.members >= stripe.data);
    for at in [0, 1, stripe.width(), input.at] {
        // No file reaches to the end of 64 bits.
        let at = at.min(i64::MAX as u64);
        let whole = stripe.whole_chunks(at, input.most);
        let limit = at.saturating_add(input.most.max(1));
        let shape = Shape::new(stripe.width(), stripe.phase.unwrap_or(0), [Run { file: 1, device: at, len: input.at }]);
        let cut = shape.end_of_portion(at, input.most);
        assert!(cut.is_none_or(|cut| cut > at && cut <= limit), "{stripe:?} cuts {at} + {} at {cut:?}", input.most);
        assert!(whole > at && whole <= limit, "{stripe:?} ends {at} + {} at {whole}", input.most);
        assert!(stripe.member(at).is_none_or(|member| member < stripe.members));
    }
}
