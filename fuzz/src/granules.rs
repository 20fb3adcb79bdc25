//! Memory that CPU programs share with kernels, from both sides: the packets that agree on it, and the words in it.
//!
//! ```text
//!   spinio_socket_... of this process ── hostile_net.rs: a door whose holder sends what the input says, and writes the words
//!   a net of this process             ── hostile_program.rs: a program does the same to it, beside an honest one
//! ```
//!
//! An input says the first steps, and a number that it makes says the rest.
#![no_main]

mod hostile_net;
mod hostile_packets;
mod hostile_program;

use std::sync::atomic::AtomicU64;

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use spinio_ring::granule::{Look, PACKET_BYTES, Packet, WORDS};
use spinio_ring::peer::{CLOSED, CONSUMED, LAST_GENERATION, Mark, Reader, TAIL, Writer};
use spinio_ring::{Position, Word};

/// Bytes of an input.
const BYTES: usize = 512;
/// Bytes of a ring.
const RING: u64 = 4096;

fuzz_target!(|bytes: &[u8]| {
    decode(bytes);
    let [side, rest @ ..] = bytes else { return };
    // A packet of the protocol, so that short inputs reach all kinds.
    let mut packet = Packet::Ring.encode();
    packet.truncate(7);
    packet.extend(bytes);
    packet.resize(packet.len().max(24), 0);
    decode(&packet);
    // More bytes, made of those: a fuzzer begins with inputs that are too short for many steps.
    let mut seed =
        rest.iter().fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3));
    let mut long = rest.to_vec();
    while long.len() < BYTES {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        long.push((seed >> 32) as u8);
    }
    let mut input = Unstructured::new(&long);
    // An input that ends is no error: what is missing is 0.
    let _ = match side % 8 {
        0..=2 => hostile_program::play(&mut input),
        3..=5 => hostile_net::play(&mut input),
        _ => words(&mut input),
    };
});

fn decode(bytes: &[u8]) {
    let Some(packet) = Packet::decode(bytes) else { return };
    let again = packet.encode();
    assert_eq!(Packet::decode(&again), Some(packet), "a packet that is decoded in another way");
    assert!(again.len() <= bytes.len() && (bytes.len() > PACKET_BYTES || again.len() <= PACKET_BYTES));
}

/// What both sides make of words, without any socket.
fn words(input: &mut Unstructured<'_>) -> Result<()> {
    let (generation, first) = (input.int_in_range(0..=LAST_GENERATION)?, position(input, 0)?);
    let all: Vec<AtomicU64> =
        (0..WORDS).map(|_| Ok(AtomicU64::new(word(input, generation, first)?))).collect::<Result<_>>()?;
    let look = Look::at(&all, true, generation, first);
    let _ = (look.level(RING, false), look.level(RING, true));
    if let Some(words) = look.last_words(generation) {
        all[TAIL].store_release(words[0]);
        all[CONSUMED].store_release(words[1]);
        let look = Look::at(&all, true, generation, first);
        assert!(look.last_words(generation).is_none() && words.iter().all(|word| Mark::of(*word).flags & CLOSED != 0));
        // The kernel hears of it.
        assert_eq!(look.level(RING, false) & 0x2015, 0x2015, "IN, OUT, HUP, RDHUP");
    }
    let mut reader = Reader::new(RING, generation, first);
    let mut writer = Writer::new(RING, generation, first);
    while !input.is_empty() {
        let next = word(input, generation, first)?;
        if let Ok((at, len, _)) = reader.look(next) {
            assert!(at + len <= RING as usize);
            reader.advance(input.int_in_range(0..=len)?);
        }
        if let Ok((at, len)) = writer.room(next) {
            assert!(at + len <= RING as usize);
            writer.advance(input.int_in_range(0..=len)?);
        }
    }
    Ok(())
}

/// A position near another one, or anywhere.
fn position(input: &mut Unstructured<'_>, near: u64) -> Result<Position> {
    Ok(match input.int_in_range(0..=3)? {
        0 => Position::of(near.wrapping_add(input.arbitrary::<u16>()?.into())),
        1 => Position::of(near.wrapping_sub(input.arbitrary::<u16>()?.into())),
        2 => Position::of(near.wrapping_add(RING * input.arbitrary::<u64>()?.min(2))),
        _ => Position::of(input.arbitrary()?),
    })
}

/// A word of an end: right, of another generation, with flags, or anything.
fn word(input: &mut Unstructured<'_>, generation: u16, near: Position) -> Result<u64> {
    let position = position(input, near.bits())?;
    let flags = u64::from(input.int_in_range(0..=3_u8)?) << 62;
    Ok(match input.int_in_range(0..=7)? {
        0..=5 => Mark { position, generation: generation & LAST_GENERATION, flags }.word(),
        6 => Mark { position, generation: input.arbitrary::<u16>()? & LAST_GENERATION, flags }.word(),
        _ => input.arbitrary()?,
    })
}
