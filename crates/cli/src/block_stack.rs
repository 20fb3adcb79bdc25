//! The block devices under a file, as text and as JSON.

use serde_json::{Value, json};
use spinio_plan::geometry::{BlockStack, Kind, Layer, P2pHint, Role};

use crate::format;

/// The tree, indented, and its consequences.
pub fn tree_text(stack: &BlockStack, indent: usize) -> String {
    let mut lines: Vec<String> = stack.to_string().lines().map(|l| format!("{:indent$}{l}", "")).collect();
    if stack.top.is_some() {
        lines.push(format!("{:indent$}{}", "", stripes(stack)));
        lines.push(format!("{:indent$}{}", "", P2pHint::from_stack(stack).text()));
    }
    lines.join("\n")
}

/// The stripes, in a sentence.
pub fn stripes(stack: &BlockStack) -> String {
    match stack.stripe() {
        None => "no stripes".to_owned(),
        Some(s) => {
            let width = format::bytes(s.width());
            let why = if s.parity > 0 { ": writes of whole ones need no reads" } else { "" };
            format!("stripes of {width}, {} chunks of {}{why}", s.data, format::bytes(s.chunk))
        }
    }
}

/// Everything that is known.
pub fn json(stack: &BlockStack) -> Value {
    json!({
        "file_system": stack.file_system,
        "read_ahead": stack.read_ahead(),
        "stripe": stack.stripe().map(|s| json!({
            "chunk": s.chunk,
            "data": s.data,
            "members": s.members,
            "parity": s.parity,
            "width": s.width(),
            "phase": s.phase,
        })),
        "p2p": P2pHint::from_stack(stack).worth_probing(),
        "p2p_reason": P2pHint::from_stack(stack).text(),
        "layers": stack.top.as_ref().map(layer),
    })
}

fn layer(layer: &Layer) -> Value {
    let (kind, mut more) = match &layer.kind {
        Kind::Disk { transport, pci } => ("disk", json!({ "transport": transport.name(), "pci": pci })),
        Kind::Partition { start } => ("partition", json!({ "start": start })),
        Kind::Md(md) => (
            "md",
            json!({
                "level": md.level.name(), "chunk": md.chunk, "raid_disks": md.disks, "degraded": md.degraded,
                "layout": md.layout, "sync_action": md.action,
            }),
        ),
        Kind::Linear => ("linear", json!({})),
        Kind::Striped { chunk } => ("striped", json!({ "chunk": chunk })),
        Kind::LvmRaid { chunk, data } => ("lvm-raid", json!({ "chunk": chunk, "data": data })),
        Kind::Crypt => ("crypt", json!({})),
        Kind::Multipath => ("multipath", json!({})),
        Kind::Thin => ("thin", json!({})),
        Kind::Mapper => ("mapper", json!({})),
        Kind::Loop { file } => ("loop", json!({ "file": file })),
        Kind::Bcache => ("bcache", json!({})),
        Kind::Btrfs { profile } => ("btrfs", json!({ "profile": profile })),
        Kind::Unknown => ("unknown", json!({})),
    };
    more["name"] = json!(layer.name);
    more["number"] = json!(layer.number.map(|(major, minor)| format!("{major}:{minor}")));
    more["kind"] = json!(kind);
    more["bytes"] = json!(layer.bytes);
    more["role"] = json!(match layer.role {
        Role::Active => "active",
        Role::Rebuilding => "rebuilding",
        Role::Spare => "spare",
        Role::Faulty => "failed",
    });
    more["members"] = layer.members.iter().map(self::layer).collect();
    more
}
