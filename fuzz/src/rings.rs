//! What the proxy reads that kernels write, by itself: doorbells, positions, records of datagrams, and the words of event rings and of
//! groups that wait.
#![no_main]

use std::sync::atomic::AtomicU64;

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use spinio_ring::datagram::{HEADER_BYTES, Header};
use spinio_ring::doorbell::{Consumer, Op};
use spinio_ring::event::{self, Producer};
use spinio_ring::layout::{ADDRESS_BYTES, Descriptor};
use spinio_ring::line::Consumed;
use spinio_ring::stream::{ReceiveRing, SendRing};
use spinio_ring::wait::Waiter;
use spinio_ring::{Position, Word};

const RINGS: [u64; 3] = [4096, 8192, 65536];
/// Entries of a queue; a net's has 4096.
const PLACES: usize = 16;

fuzz_target!(|bytes: &[u8]| {
    let [kind, rest @ ..] = bytes else { return };
    let mut input = Unstructured::new(rest);
    // An input that ends is no error.
    let _ = match kind % 5 {
        0 => doorbells(&mut input),
        1 => sends(&mut input),
        2 => datagrams(&mut input),
        3 => receives(&mut input),
        _ => events_and_waits(&mut input),
    };
});

/// A position near another one, or anywhere.
fn position(input: &mut Unstructured<'_>, near: Position) -> Result<Position> {
    Ok(match input.int_in_range(0..=3)? {
        0..=1 => near.after(input.arbitrary::<u16>()?.into()),
        2 => Position::of(near.bits().wrapping_sub(input.arbitrary::<u16>()?.into())),
        _ => Position::of(input.arbitrary()?),
    })
}

fn words(count: usize) -> Vec<AtomicU64> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

/// Each entry is taken once, and only while both its words are of the round.
fn doorbells(input: &mut Unstructured<'_>) -> Result<()> {
    let queue = words(2 * PLACES);
    let mut consumer = Consumer::default();
    let mut taken = 0_u64;
    while !input.is_empty() {
        for _ in 0..input.int_in_range(0..=4)? {
            let at = input.choose_index(queue.len())?;
            // Both laps, and everything else.
            let lap = u64::from(input.arbitrary::<bool>()?) << 63;
            queue[at].store_release(input.arbitrary::<u64>()? & !(1 << 63) | lap);
        }
        let before = taken;
        let searches = input.arbitrary()?;
        while let Some(entry) = if searches { consumer.search(&queue) } else { consumer.pop(&queue) } {
            taken += 1;
            assert!(taken - before <= 2 * PLACES as u64, "an entry comes again and again");
            assert!(entry.epoch <= 0x7fff && entry.position.bits() < 1 << 48);
            assert!(entry.op.is_ok() || entry.op.is_err_and(|op| op <= 0x7f && op != Op::Send as u8));
        }
        assert!(consumer.holes() < PLACES);
        let head = AtomicU64::new(0);
        consumer.publish(&head);
        assert!(head.load_acquire() <= taken, "places are free that were not taken");
    }
    Ok(())
}

/// What is sent of a ring lies in it, and is what kernels have said.
fn sends(input: &mut Unstructured<'_>) -> Result<()> {
    let (size, first) = (*input.choose(&RINGS)?, Position::of(input.arbitrary()?));
    let mut ring = SendRing::new(size, first);
    while !input.is_empty() {
        let (tail, before) = (position(input, ring.tail())?, ring.tail());
        match ring.extend(tail) {
            Ok(()) => assert!(ring.tail() == before || ring.tail() == tail),
            Err(_) => assert!(ring.tail() == before),
        }
        assert!(ring.pending() <= size);
        let (at, len) = ring.next();
        assert!(at + len <= size as usize && len as u64 <= ring.pending() && (len > 0 || ring.pending() == 0));
        ring.advance(input.int_in_range(0..=len)?);
        assert_eq!(ring.has_half_free(), ring.pending() <= size / 2);
    }
    Ok(())
}

/// A record that is accepted lies in what the doorbell has said, with its address.
fn datagrams(input: &mut Unstructured<'_>) -> Result<()> {
    let size = 2 * *input.choose(&RINGS)?;
    let mut ring = SendRing::new(size, Position::of(input.arbitrary::<u64>()? & !15));
    while !input.is_empty() {
        // A kernel may ring for any position.
        let _ = ring.extend(position(input, ring.tail())?);
        let pending = ring.pending();
        if pending == 0 {
            continue;
        }
        let mut header = Header::of(input.arbitrary()?);
        if input.arbitrary()? {
            header.stored = input.int_in_range(0..=2 * size as u32)?;
            header.address_len = input.int_in_range(0..=ADDRESS_BYTES as u8 + 1)?;
        }
        let Ok(header) = Header::check(header.words(), pending) else { break };
        let (record, address) = (header.record_bytes(), header.long_address_words() * 8);
        assert!(record as u64 <= pending && record % 16 == 0 && record >= HEADER_BYTES);
        assert!(header.stored as usize + HEADER_BYTES <= header.long_address_at());
        assert_eq!(header.long_address_at() + address, record);
        assert!(
            usize::from(header.address_len) <= ADDRESS_BYTES && (address == 0 || address >= header.address_len.into())
        );
        ring.advance(record);
        assert_eq!(ring.pending(), pending - record as u64);
    }
    Ok(())
}

/// A word of a kernel frees no more than was received.
fn receives(input: &mut Unstructured<'_>) -> Result<()> {
    let (size, first) = (*input.choose(&RINGS)?, Position::of(input.arbitrary()?));
    let epoch = input.int_in_range(1..=0x7fff)?;
    let mut ring = ReceiveRing::new(size, first, epoch);
    while !input.is_empty() {
        let epoch = if input.ratio(7, 8)? { epoch } else { input.arbitrary()? };
        let consumed = Consumed { position: position(input, ring.received())?, epoch };
        let word = if input.ratio(7, 8)? { consumed.word() } else { input.arbitrary()? };
        let unread = ring.unread();
        match ring.credit(word) {
            Ok(()) => assert!(ring.unread() <= unread),
            Err(_) => assert_eq!(ring.unread(), unread),
        }
        let (at, len) = ring.room();
        assert!(at + len <= size as usize && ring.unread() + len as u64 <= size);
        ring.advance(input.int_in_range(0..=len)?);
    }
    Ok(())
}

/// A wrong word makes no room in a ring of events, and waiting groups are people's matter only.
fn events_and_waits(input: &mut Unstructured<'_>) -> Result<()> {
    let (queue, taken) = (words(2 * PLACES), AtomicU64::new(0));
    let mut producer = Producer::default();
    let (mut pushed, mut most) = (0_u64, 0_u64);
    while !input.is_empty() {
        taken.store_release(if input.arbitrary()? {
            most + input.int_in_range(0..=PLACES as u64)?
        } else {
            input.arbitrary()?
        });
        let word = taken.load_acquire();
        let entry =
            event::Entry { socket: Descriptor::of(input.arbitrary()?), events: input.arbitrary()?, listener: None };
        if producer.push(&queue, &taken, entry) {
            pushed += 1;
            most = if word <= pushed { most.max(word) } else { most };
            assert!(pushed - most <= PLACES as u64, "an entry is overwritten that was not taken");
        }
        let (word, at) = (input.arbitrary()?, position(input, Position::of(0))?);
        for waiter in [Waiter::of(word, at), Waiter::of_span(word)].into_iter().flatten() {
            assert!(waiter.block <= 0xf_ffff && waiter.thread <= 0x3ff);
        }
    }
    Ok(())
}
