//! Real machines, and the stacks read from them.

use spinio_plan::geometry::{
    BlockStack, Kind, Level, P2pHint, Role, Transport, read_btrfs, read_device, without_device,
};

use crate::machine::Machine;

const FOUR: [(&str, &str); 4] =
    [("nvme0n1", "259:0"), ("nvme1n1", "259:1"), ("nvme2n1", "259:2"), ("nvme3n1", "259:3")];

fn four_drives() -> Machine {
    FOUR.iter().fold(Machine::default(), |m, (name, number)| m.nvme(number, name))
}

fn array(level: &str, chunk: &str, layout: &str) -> BlockStack {
    read_device(&four_drives().md("9:0", level, chunk, layout, &FOUR), "ext4", (9, 0))
}

fn width(stack: &BlockStack) -> Option<u64> {
    stack.stripe().map(|s| s.width())
}

#[test]
fn one_drive() {
    let stack = read_device(&four_drives(), "xfs", (259, 1));
    let top = stack.top.as_ref().expect("a drive");
    assert_eq!(top.name, "nvme1n1");
    assert_eq!(top.kind, Kind::Disk { transport: Transport::Nvme, pci: Some("0000:03:00.0".into()) });
    assert_eq!((top.bytes, stack.read_ahead()), (1 << 30, 128 << 10));
    assert!(stack.is_fast() && stack.stripe().is_none() && P2pHint::from_stack(&stack) == P2pHint::Allowed);
}

#[test]
fn arrays_of_every_level() {
    for (level, chunk, layout, wide, p2p) in [
        ("raid0", "65536", "0", Some(256 << 10), true),
        ("raid1", "0", "0", None, true),
        ("raid10", "524288", "258", Some(1 << 20), true),
        ("raid4", "65536", "0", Some(192 << 10), false),
        ("raid5", "65536", "2", Some(192 << 10), false),
        ("raid6", "65536", "2", Some(128 << 10), false),
        ("linear", "65536", "0", None, false),
        ("container", "0", "0", None, false),
    ] {
        let stack = array(level, chunk, layout);
        assert_eq!(stack.disks().len(), 4, "{level}");
        assert_eq!(width(&stack), wide, "{level}");
        assert_eq!(P2pHint::from_stack(&stack).worth_probing(), p2p, "{level}: {}", P2pHint::from_stack(&stack).text());
        let Kind::Md(md) = &stack.top.as_ref().expect("an array").kind else { panic!("{level} is no array") };
        assert_eq!(md.level, Level::parse(level));
        assert!(stack.is_fast());
    }
}

#[test]
fn writes_single_disk_by_stack() {
    assert!(read_device(&four_drives(), "xfs", (259, 1)).writes_single_disk());
    for level in ["raid0", "linear"] {
        assert!(array(level, "65536", "0").writes_single_disk(), "{level}");
    }
    for level in ["raid1", "raid10", "raid4", "raid5", "raid6", "container"] {
        assert!(!array(level, "65536", "2").writes_single_disk(), "{level}");
    }
    assert!(!without_device("tmpfs").writes_single_disk());
    assert!(!BlockStack::default().writes_single_disk());
}

#[test]
fn degraded_array_reports_rebuild() {
    let machine = four_drives()
        .md("9:0", "raid5", "65536", "2", &FOUR)
        .file("9:0", "md/degraded", "1")
        .file("9:0", "md/raid_disks", "4 (3)")
        .file("9:0", "md/sync_action", "recover")
        .file("9:0", "md/dev-nvme1n1/state", "faulty")
        .file("9:0", "md/dev-nvme1n1/slot", "none")
        .file("9:0", "md/dev-nvme3n1/state", "spare");
    let stack = read_device(&machine, "ext4", (9, 0));
    let top = stack.top.as_ref().expect("an array");
    let roles: Vec<_> = top.members.iter().map(|m| (m.name.as_str(), m.role)).collect();
    assert_eq!(
        roles,
        [
            ("nvme0n1", Role::Active),
            ("nvme2n1", Role::Active),
            ("nvme3n1", Role::Rebuilding),
            ("nvme1n1", Role::Faulty)
        ]
    );
    assert_eq!(
        stack.to_string(),
        "ext4\n\
         └─ md0  raid5, 64 KiB x 3+1, 1 of 4 missing, recover\n   \
            ├─ nvme0n1  nvme, 0000:03:00.0, 1 GiB\n   \
            ├─ nvme2n1  nvme, 0000:03:00.0, 1 GiB\n   \
            ├─ nvme3n1  nvme, 0000:03:00.0, 1 GiB, rebuilding\n   \
            └─ nvme1n1  nvme, 0000:03:00.0, 1 GiB, failed"
    );
}

#[test]
fn member_without_p2p_blocks_array() {
    let machine = four_drives().disk("8:0", "pci0000:00/0000:00:17.0/ata1/host0/target0:0:0/0:0:0:0/block/sda").md(
        "9:0",
        "raid0",
        "65536",
        "0",
        &[FOUR[0], ("sda", "8:0")],
    );
    let stack = read_device(&machine, "ext4", (9, 0));
    assert!(!P2pHint::from_stack(&stack).worth_probing());
    assert!(P2pHint::from_stack(&stack).text().starts_with("sda refuses"), "{}", P2pHint::from_stack(&stack).text());
    // A failed one is ignored.
    let machine = machine.file("9:0", "md/dev-sda/state", "faulty");
    assert_eq!(P2pHint::from_stack(&read_device(&machine, "ext4", (9, 0))), P2pHint::Array("md0".into()));
}

#[test]
fn lvm_linear_striped_and_encrypted() {
    let volume = |uuid: &str, minimum: &str, optimal: &str, members: &[(&str, &str)]| {
        let machine = four_drives()
            .disk("254:0", "virtual/block/dm-0")
            .file("254:0", "dm/name", "vg-data")
            .file("254:0", "dm/uuid", uuid)
            .file("254:0", "queue/minimum_io_size", minimum)
            .file("254:0", "queue/optimal_io_size", optimal)
            .slaves("254:0", members);
        read_device(&machine, "ext4", (254, 0))
    };
    let kind = |stack: &BlockStack| stack.top.as_ref().expect("a volume").kind.clone();
    let linear = volume("LVM-abc", "512", "0", &FOUR[..1]);
    assert_eq!((kind(&linear), width(&linear)), (Kind::Linear, None));
    assert_eq!(kind(&volume("LVM-abc", "512", "0", &FOUR[..2])), Kind::Linear);
    let striped = volume("LVM-abc", "65536", "131072", &FOUR[..2]);
    assert_eq!((kind(&striped), width(&striped)), (Kind::Striped { chunk: 65536 }, Some(131_072)));
    assert!(!P2pHint::from_stack(&striped).worth_probing());
    // Without LVM's name: what dmsetup makes.
    assert_eq!(kind(&volume("", "65536", "262144", &FOUR)), Kind::Striped { chunk: 65536 });
    assert_eq!(kind(&volume("", "512", "0", &FOUR[..1])), Kind::Mapper);
    assert_eq!(kind(&volume("CRYPT-LUKS2-abc-root", "512", "0", &FOUR[..1])), Kind::Crypt);
    assert_eq!(kind(&volume("mpath-3600", "512", "0", &FOUR[..2])), Kind::Multipath);
    assert_eq!(kind(&volume("part1-mpath-3600", "512", "0", &FOUR[..1])), Kind::Linear);
}

#[test]
fn lvm_raid_is_recognised_by_images() {
    let images: Vec<(String, String)> = (0..3).map(|i| (format!("dm-{}", i + 1), format!("254:{}", i + 1))).collect();
    let named: Vec<(&str, &str)> = images.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
    let mut machine = four_drives()
        .disk("254:0", "virtual/block/dm-0")
        .file("254:0", "dm/name", "vg-r5")
        .file("254:0", "dm/uuid", "LVM-x")
        .file("254:0", "queue/minimum_io_size", "65536")
        .file("254:0", "queue/optimal_io_size", "131072")
        .slaves("254:0", &named);
    for (i, (name, number)) in named.iter().enumerate() {
        machine = machine
            .disk(number, &format!("virtual/block/{name}"))
            .file(number, "dm/name", &format!("vg-r5_rimage_{i}"))
            .file(number, "dm/uuid", "LVM-y")
            .file("254:0", &format!("slaves/{name}/dm/name"), &format!("vg-r5_rimage_{i}"))
            .slaves(number, &[FOUR[i]]);
    }
    let stack = read_device(&machine, "xfs", (254, 0));
    assert_eq!(stack.top.as_ref().expect("a volume").kind, Kind::LvmRaid { chunk: 65536, data: 2 });
    assert_eq!(stack.disks().len(), 3);
}

#[test]
fn partition_has_its_disk_as_member() {
    let machine = four_drives()
        .disk("259:9", "pci0000:00/0000:00:02.0/0000:03:00.0/nvme/nvme0/nvme0n1/nvme0n1p1")
        .file("259:9", "partition", "1")
        .file("259:9", "start", "2048")
        .file("259:9", "../dev", "259:0")
        .file("259:9", "../queue/read_ahead_kb", "4096");
    let stack = read_device(&machine, "ext4", (259, 9));
    let top = stack.top.as_ref().expect("a partition");
    assert_eq!(top.kind, Kind::Partition { start: 1 << 20 });
    assert_eq!((top.members[0].name.as_str(), stack.read_ahead()), ("nvme0n1", 4 << 20));
    assert_eq!(P2pHint::from_stack(&stack), P2pHint::Allowed);
}

#[test]
fn ring_reads_of_a_block_device_fit_a_request_of_its_queue() {
    for (kib, expected) in [
        ("128", 128),
        ("512", 512),
        ("1280", 1024),
        ("509", 508),
        ("32", 32),
        ("4", 4),
        ("2", 4),
        ("", 128),
        ("x", 128),
    ] {
        let machine = four_drives().file("259:1", "queue/max_sectors_kb", kib);
        assert_eq!(read_device(&machine, "", (259, 1)).max_ring_read(), expected << 10, "{kib:?}");
        assert_eq!(
            read_device(&machine, "ext4", (259, 1)).max_ring_read(),
            u64::MAX,
            "the kernel splits reads of files"
        );
    }
    // A partition has the queue of its disk.
    let machine = four_drives()
        .disk("259:9", "pci0000:00/0000:00:02.0/0000:03:00.0/nvme/nvme0/nvme0n1/nvme0n1p1")
        .file("259:9", "partition", "1")
        .file("259:9", "../queue/max_sectors_kb", "256");
    assert_eq!(read_device(&machine, "", (259, 9)).max_ring_read(), 256 << 10);
    assert_eq!(read_device(&machine, "", (8, 0)).max_ring_read(), 128 << 10, "an unknown device");
}

#[test]
fn loop_and_deviceless_stacks() {
    let machine =
        Machine::default().disk("7:0", "virtual/block/loop0").file("7:0", "loop/backing_file", "/images/a b.img");
    let stack = read_device(&machine, "ext4", (7, 0));
    assert_eq!(stack.top.as_ref().expect("a loop").kind, Kind::Loop { file: "/images/a b.img".into() });
    assert!(!stack.is_fast() && !P2pHint::from_stack(&stack).worth_probing());
    assert_eq!(read_device(&machine, "ext4", (8, 0)).top, None);
    assert!(!P2pHint::from_stack(&without_device("nfs")).worth_probing());
}

#[test]
fn btrfs_over_two_drives() {
    let machine = four_drives()
        .at("/sys/fs/btrfs/aa-bb/devices/nvme0n1/dev", "259:0")
        .at("/sys/fs/btrfs/aa-bb/devices/nvme1n1/dev", "259:1")
        .at("/sys/fs/btrfs/aa-bb/allocation/data/raid0/total_bytes", "1")
        .at("/sys/fs/btrfs/aa-bb/allocation/data/flags", "1")
        .at("/sys/fs/btrfs/aa-bb/bdi/read_ahead_kb", "4096");
    let stack = read_btrfs(&machine, "aa-bb");
    assert_eq!(stack.top.as_ref().expect("layers").kind, Kind::Btrfs { profile: "raid0".into() });
    assert_eq!((width(&stack), stack.read_ahead()), (Some(128 << 10), 4 << 20));
    let alone = four_drives().at("/sys/fs/btrfs/cc/devices/nvme0n1/dev", "259:0");
    assert_eq!(read_btrfs(&alone, "cc").top.expect("a drive").name, "nvme0n1");
    assert_eq!(read_btrfs(&alone, "../..").top, None);
}

#[test]
fn cyclic_device_terminates() {
    let machine = Machine::default().md("9:0", "raid0", "65536", "0", &[("md0", "9:0"), ("md0b", "9:0")]);
    let stack = read_device(&machine, "ext4", (9, 0));
    assert!(stack.to_string().len() < 1 << 20);
}
