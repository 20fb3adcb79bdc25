//! The protocols under a model checker, which runs them in every order that their memory operations allow.
//!
//! Bytes are relaxed atomics: a reader that the protocol does not order after the writer may see the old ones.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering::Relaxed};
use loom::thread;

use crate::doorbell::{self, Consumer, Entry, Op};
use crate::event::{self, Producer, Taker};
use crate::granule::{self, Look as Granule};
use crate::layout::Descriptor;
use crate::mailbox::{Address, Call, Reply, Request};
use crate::message;
use crate::page_requests::{Kernel, NEVER, PageRequest, PageRequests};
use crate::peer::{self, Mark, Notice, Reader, Told, Writer};
use crate::stream::{Look, ReceiveRing, Receiver, SendRing, Sender};
use crate::{Position, Word};

fn words<const N: usize>() -> Arc<[AtomicU64; N]> {
    Arc::new(std::array::from_fn(|_| AtomicU64::new(0)))
}

fn check(work: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(work);
}

#[test]
fn received_bytes_are_there_once_the_line_says_so() {
    check(|| {
        let (ring, lines) = (words::<2>(), words::<2>());
        let first = Position::of(u64::MAX);
        let proxy = {
            let (ring, lines) = (Arc::clone(&ring), Arc::clone(&lines));
            thread::spawn(move || {
                let mut receive_ring = ReceiveRing::new(2, first, 1);
                // Three bytes through a ring of two: the third one has to wait for the first one to be taken.
                for byte in 1..=3 {
                    while receive_ring.room().1 == 0 {
                        assert!(receive_ring.credit(lines[1].load_acquire()).is_ok());
                        thread::yield_now();
                    }
                    ring[receive_ring.room().0].store(byte, Relaxed);
                    receive_ring.advance(1);
                    lines[0].store_release(receive_ring.line(0).word());
                }
            })
        };
        let mut receiver = Receiver::new(2, first, 1);
        let mut expected = 1;
        // The line is zero, and no position of this stream, before the proxy has written it.
        while expected <= 3 {
            let word = lines[0].load_acquire();
            match receiver.look(if word == 0 && expected == 1 { first.bits() } else { word }) {
                Look::Bytes(at, _) => {
                    assert_eq!(ring[at].load(Relaxed), expected, "a byte that has not arrived");
                    expected += 1;
                    lines[1].store_release(receiver.advance(1).0);
                }
                _ => thread::yield_now(),
            }
        }
        assert!(proxy.join().is_ok());
    });
}

#[test]
fn sent_bytes_are_not_overwritten_before_they_are_sent() {
    check(|| {
        let (ring, shared) = (words::<2>(), words::<2>());
        let kernel = {
            let (ring, shared) = (Arc::clone(&ring), Arc::clone(&shared));
            thread::spawn(move || {
                let mut sender = Sender::new(2, Position::of(0));
                for byte in 1..=3 {
                    while sender.room().1 == 0 {
                        sender.look(shared[0].load_acquire());
                        thread::yield_now();
                    }
                    ring[sender.room().0].store(byte, Relaxed);
                    shared[1].store_release(sender.advance(1).bits());
                }
            })
        };
        let mut send_ring = SendRing::new(2, Position::of(0));
        let mut expected = 1;
        while expected <= 3 {
            assert!(send_ring.extend(Position::of(shared[1].load_acquire())).is_ok());
            if send_ring.pending() == 0 {
                thread::yield_now();
                continue;
            }
            assert_eq!(ring[send_ring.next().0].load(Relaxed), expected, "a byte was overwritten, or is not there");
            send_ring.advance(1);
            expected += 1;
            shared[0].store_release(send_ring.line(0).word());
        }
        assert!(kernel.join().is_ok());
    });
}

#[test]
fn doorbells_of_two_kernels_arrive_once_and_after_what_they_are_about() {
    check(|| {
        let (queue, claims, data) = (words::<4>(), words::<3>(), words::<2>());
        let kernels: Vec<_> = (0..2_u32)
            .map(|socket| {
                let (queue, claims, data) = (Arc::clone(&queue), Arc::clone(&claims), Arc::clone(&data));
                thread::spawn(move || {
                    data[socket as usize].store(7, Relaxed);
                    let entry = Entry::new(Op::Send, Position::of(1), socket, 1);
                    assert!(doorbell::push(&queue[..], &claims[0], &claims[1], &claims[2], entry));
                })
            })
            .collect();
        let (mut consumer, mut seen) = (Consumer::default(), [false; 2]);
        while seen != [true; 2] {
            match consumer.pop(&queue[..]) {
                Some(entry) => {
                    let socket = entry.socket as usize;
                    assert!(!std::mem::replace(&mut seen[socket], true), "an entry came twice");
                    assert_eq!(data[socket].load(Relaxed), 7, "the doorbell came before the bytes");
                }
                None => thread::yield_now(),
            }
        }
        kernels.into_iter().for_each(|kernel| assert!(kernel.join().is_ok()));
    });
}

#[test]
fn doorbells_of_one_socket_arrive_in_their_order_beside_those_of_another() {
    check(|| {
        let (queue, claims) = (words::<8>(), words::<3>());
        let kernel = |socket: u32, count: u64| {
            let (queue, claims) = (Arc::clone(&queue), Arc::clone(&claims));
            thread::spawn(move || {
                for n in 1..=count {
                    let entry = Entry::new(Op::Send, Position::of(n), socket, 1);
                    assert!(doorbell::push(&queue[..], &claims[0], &claims[1], &claims[2], entry));
                }
            })
        };
        let kernels = [kernel(0, 2), kernel(1, 1)];
        let (mut consumer, mut seen) = (Consumer::default(), [0; 2]);
        while seen != [2, 1] {
            match consumer.pop(&queue[..]) {
                Some(entry) => {
                    let last = &mut seen[entry.socket as usize];
                    assert_eq!(entry.position, Position::of(*last + 1), "a doorbell has overtaken an earlier one");
                    *last += 1;
                }
                None => thread::yield_now(),
            }
        }
        kernels.into_iter().for_each(|kernel| assert!(kernel.join().is_ok()));
    });
}

#[test]
fn reply_belongs_to_its_request() {
    check(|| {
        let (mailbox, bell) = (words::<32>(), words::<1>());
        let proxy = {
            let (mailbox, bell) = (Arc::clone(&mailbox), Arc::clone(&bell));
            thread::spawn(move || {
                for number in 1..=2 {
                    while bell[0].load_acquire() != number {
                        thread::yield_now();
                    }
                    let request = Request::load(&mailbox[..16]);
                    assert_eq!((request.call, u64::from(request.argument)), (Ok(Call::Accept), number * 10));
                    let address = Address::of_words([number; 14], 8);
                    Reply { result: request.argument as i32 + 1, address }.store(&mailbox[16..], request.number);
                }
            })
        };
        for number in 1..=2_u32 {
            let argument = number * 10;
            let address = Address::EMPTY;
            let request =
                Request { call: Ok(Call::Accept), flags: 0, number, descriptor: 0, argument, address, time_limit: 0 };
            request.store(&mailbox[..16]);
            bell[0].store_release(number.into());
            let reply = loop {
                match Reply::load(&mailbox[16..], number) {
                    Some(reply) => break reply,
                    None => thread::yield_now(),
                }
            };
            assert_eq!((reply.result, reply.address.words()[0]), (argument as i32 + 1, number.into()));
        }
        assert!(proxy.join().is_ok());
    });
}

#[test]
fn event_goes_to_one_of_two_groups_and_none_is_lost() {
    check(|| {
        // A ring of two entries. Each group looks a few times; what is left then is taken at the end.
        let (queue, copies, claims, taken) = (words::<4>(), words::<4>(), words::<4>(), words::<1>());
        let group = {
            let (queue, copies, claims, taken) =
                (Arc::clone(&queue), Arc::clone(&copies), Arc::clone(&claims), Arc::clone(&taken));
            move |looks: usize| {
                let taker = Taker { queue: &queue[..], taken: &taken[0], claims: &claims, copies: &copies[..] };
                let mut seen = Vec::new();
                for _ in 0..looks {
                    if taker.lock() {
                        taker.gather();
                        taker.unlock();
                    }
                    seen.extend(taker.claim().map(|entry| {
                        assert_eq!(entry.listener, Some(entry.socket), "the words of two events");
                        entry.socket.index
                    }));
                }
                seen
            }
        };
        let groups = [
            thread::spawn({
                let group = group.clone();
                move || group(2)
            }),
            thread::spawn({
                let group = group.clone();
                move || group(1)
            }),
        ];
        let (mut producer, mut pushed) = (Producer::default(), Vec::new());
        for index in 0..4 {
            let socket = Descriptor { index, epoch: 1 };
            let entry = event::Entry { socket, events: event::NEW, listener: Some(socket) };
            if producer.push(&queue[..], &taken[0], entry) {
                pushed.push(index);
            }
        }
        let mut seen: Vec<u32> = groups.into_iter().flat_map(|group| group.join().unwrap_or_default()).collect();
        seen.extend(group(4));
        seen.sort_unstable();
        assert_eq!(seen, pushed, "an event came twice, or not at all");
    });
}

/// Three bytes through a ring of two of a connection inside a net, and its end. The words are left from an earlier use.
#[test]
fn bytes_between_ends_are_there_and_come_before_the_end() {
    check(|| {
        let first = Position::of(u64::MAX);
        let (ring, ends) = (words::<2>(), words::<2>());
        let old = Mark { position: first.after(2), generation: 6, flags: peer::CLOSED };
        ends.iter().for_each(|word| word.store_release(old.word()));
        let sender = {
            let (ring, ends) = (Arc::clone(&ring), Arc::clone(&ends));
            thread::spawn(move || {
                let mut writer = Writer::new(2, 7, first);
                for byte in 1..=3 {
                    let at = loop {
                        match writer.room(ends[peer::CONSUMED].load_acquire()) {
                            Ok((_, 0)) => thread::yield_now(),
                            Ok((at, _)) => break at,
                            Err(_) => panic!("impossible words"),
                        }
                    };
                    ring[at].store(byte, Relaxed);
                    ends[peer::TAIL].store_release(writer.advance(1));
                }
                ends[peer::TAIL].store_release(writer.end(peer::CLOSED));
            })
        };
        let (mut reader, mut expected) = (Reader::new(2, 7, first), 1);
        loop {
            match reader.look(ends[peer::TAIL].load_acquire()) {
                Ok((_, 0, true)) => break,
                Ok((_, 0, false)) => thread::yield_now(),
                Ok((at, _, _)) => {
                    assert_eq!(ring[at].load(Relaxed), expected, "a byte that has not arrived");
                    expected += 1;
                    ends[peer::CONSUMED].store_release(reader.advance(1));
                }
                Err(_) => panic!("impossible words"),
            }
        }
        assert_eq!(expected, 4, "the end came before bytes");
        assert!(sender.join().is_ok());
    });
}

/// How the other end of an armed one tells of a byte.
#[derive(Clone, Copy, PartialEq)]
enum Tells {
    /// As kernels do: a look at the watch where the word says so.
    Exchange,
    /// As they do at the end of a connection: a look at the watch in any case.
    Store,
    /// With a look that is only a load where it finds nothing.
    Load,
}

/// An end is armed while the other one sends a byte: it is told, or it sees the byte.
fn armed_end_and_a_byte(tells: Tells) {
    check(move || {
        let (tail, watch) = (words::<1>(), words::<1>());
        peer::open(&watch[0], 7);
        let sender = {
            let (tail, watch) = (Arc::clone(&tail), Arc::clone(&watch));
            thread::spawn(move || {
                let word = Writer::new(2, 7, Position::of(0)).advance(1);
                let look = match tells {
                    Tells::Exchange => peer::publish(&tail[0], word),
                    Tells::Store | Tells::Load => {
                        tail[0].store_release(word);
                        tells == Tells::Store || watch[0].load_acquire() & 0xffff != 0
                    }
                };
                if look { peer::take(&watch[0], 7, event::IN) } else { None }
            })
        };
        let arming = peer::arm(&watch[0], 7, event::IN);
        peer::watch_word(&tail[0]);
        let sees = matches!(Reader::new(2, 7, Position::of(0)).look(tail[0].load_acquire()), Ok((_, 1, _)));
        let told = sender.join().unwrap_or_default();
        assert!(arming == Some(1) && (sees || told.is_some()), "nothing tells of the byte");
        // The two doorbells arrive in any order.
        let level = if sees { event::IN } else { 0 };
        for rearm_is_first in [false, true] {
            let mut at_proxy = Told::default();
            let ready = told.map(|arming| Notice { arming, events: event::IN });
            let rearm = Some(Notice { arming: 1, events: level });
            let doorbells = if rearm_is_first { [rearm, ready] } else { [ready, rearm] };
            assert!(doorbells.into_iter().flatten().all(|notice| at_proxy.hear(notice)));
            assert_eq!(at_proxy.level(), event::IN);
        }
    });
}

#[test]
fn armed_end_is_told_of_a_byte_or_sees_it() {
    armed_end_and_a_byte(Tells::Exchange);
}

#[test]
fn armed_end_is_told_of_the_end_or_sees_it() {
    armed_end_and_a_byte(Tells::Store);
}

#[test]
#[should_panic(expected = "nothing tells of the byte")]
fn look_at_a_watch_that_is_only_a_load_misses_it() {
    armed_end_and_a_byte(Tells::Load);
}

#[test]
fn program_that_has_sent_rings_or_the_proxy_sees_the_bytes() {
    check(|| {
        let words: Arc<Vec<AtomicU64>> = Arc::new((0..granule::WORDS).map(|_| AtomicU64::new(0)).collect());
        let program = {
            let words = Arc::clone(&words);
            thread::spawn(move || {
                let mut writer = Writer::new(8, 1, Position::of(0));
                words[peer::TAIL].store_release(writer.advance(3));
                granule::wants(&words, event::IN)
            })
        };
        granule::watch_for(&words, event::IN);
        let seen = Granule::at(&words, true, 1, Position::of(0)).level(8, false) & event::IN != 0;
        assert!(program.join().unwrap() || seen, "an event that is told to no group");
    });
}

/// A byte through the ring, and once the reader has taken it, a message. It is taken from the words, or, with a third byte, from the
/// ring. The words, two of them, so that one may come before the other one, were those of an earlier use of the memory, in which a
/// message ended at the same position.
#[test]
fn message_is_taken_from_its_words_or_from_the_ring() {
    check(|| {
        let (ring, ends, words) = (words::<4>(), words::<2>(), words::<2>());
        let first = Position::of(0);
        message::write(&*words, &[9; 14], first.after(2));
        let word = move |bytes: u64, flags| Mark { position: first.after(bytes), generation: 1, flags }.word();
        let writer = {
            let (ring, ends, words) = (Arc::clone(&ring), Arc::clone(&ends), Arc::clone(&words));
            thread::spawn(move || {
                message::clear(&*words);
                ring[0].store(1, Relaxed);
                ends[peer::TAIL].store_release(word(1, 0));
                while Mark::now(ends[peer::CONSUMED].load_acquire(), 1, first).position != first.after(1) {
                    thread::yield_now();
                }
                message::write(&*words, &[2], first.after(2));
                ends[peer::TAIL].store_relaxed(word(2, peer::MESSAGE));
                ring[1].store(2, Relaxed);
                ends[peer::TAIL].store_release(word(2, 0));
                ring[2].store(3, Relaxed);
                ends[peer::TAIL].store_release(word(3, 0));
            })
        };
        let mut taken = 0;
        while taken < 3 {
            let tail = ends[peer::TAIL].load_acquire();
            let end = Mark::now(tail, 1, first).position;
            let there = end.since(first.after(taken));
            if there == 0 {
                thread::yield_now();
                continue;
            }
            if tail & (peer::MESSAGE | peer::CLOSED) == peer::MESSAGE {
                assert_eq!(there, 1);
                let mut byte = [0];
                if !message::read(&*words, &mut byte, end) {
                    thread::yield_now();
                    continue;
                }
                assert_eq!(u64::from(byte[0]), taken + 1, "a byte of another message");
            } else {
                for at in taken..taken + there {
                    assert_eq!(ring[at as usize].load(Relaxed), at + 1, "a byte that has not arrived");
                }
            }
            taken += there;
            ends[peer::CONSUMED].store_release(word(taken, 0));
        }
        assert!(writer.join().is_ok());
    });
}

/// The words have a message that was received, as the bytes after it that went through the ring alone. The next bytes may end where the
/// tags repeat: then they are no message, since the reader may see its tail before its words.
#[test]
fn words_of_the_last_message_are_not_taken_for_the_next_one() {
    for between in [126, 127] {
        check(move || {
            let (ring, ends, words) = (words::<1>(), words::<1>(), words::<2>());
            let first = Position::of(0);
            message::write(&*words, &[9; 14], first);
            let end = first.after(between + 1);
            let word = move |flags| Mark { position: end, generation: 1, flags }.word();
            let writer = {
                let (ring, ends, words) = (Arc::clone(&ring), Arc::clone(&ends), Arc::clone(&words));
                thread::spawn(move || {
                    if message::has_other_tag(end, first) {
                        message::write(&*words, &[2], end);
                        ends[peer::TAIL].store_relaxed(word(peer::MESSAGE));
                    }
                    ring[0].store(2, Relaxed);
                    ends[peer::TAIL].store_release(word(0));
                })
            };
            loop {
                let tail = ends[peer::TAIL].load_acquire();
                let mut byte = [0];
                let there = Mark::now(tail, 1, first).position == end;
                if there && tail & peer::MESSAGE == 0 {
                    byte[0] = ring[0].load(Relaxed) as u8;
                } else if !there || !message::read(&*words, &mut byte, end) {
                    thread::yield_now();
                    continue;
                }
                assert_eq!(byte, [2], "a byte of another message, or one that has not arrived");
                break;
            }
            assert!(writer.join().is_ok());
        });
    }
}

/// Kernels need two pages, and there is one slot: the filler gives it for the second one when the bytes of the first one are
/// taken, and for neither those of the other are seen.
#[test]
fn staged_bytes_are_those_of_the_page_that_was_asked_for() {
    struct World {
        ring: [AtomicU64; 2],
        done: [AtomicU64; 2],
        taken: [AtomicU64; 1],
        given: [AtomicU64; 1],
        slot: AtomicU64,
    }

    impl World {
        fn requests(&self) -> PageRequests<'_, AtomicU64> {
            PageRequests { ring: &self.ring, done: &self.done, taken: &self.taken, given: &self.given }
        }
    }

    check(|| {
        let array = |value| AtomicU64::new(value);
        let world = Arc::new(World {
            ring: [array(0), array(0)],
            done: [array(0), array(0)],
            taken: [array(NEVER)],
            given: [array(NEVER)],
            slot: array(0),
        });
        let kernels = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                let kernel = Kernel(world.requests());
                [0, 1].map(|ticket| kernel.ask(ticket, PageRequest { page: 10 + ticket, frame: ticket }));
                for ticket in 0..2 {
                    let (slot, bytes) = loop {
                        match kernel.answer(ticket, ticket) {
                            Some(answer) => break answer.unwrap(),
                            None => thread::yield_now(),
                        }
                    };
                    assert_eq!((slot, bytes), (0, 4096));
                    assert_eq!(world.slot.load(Relaxed), 10 + ticket, "the bytes of another page");
                    kernel.take(ticket, slot);
                }
            })
        };
        let fillers = world.requests();
        for ticket in 0..2 {
            let (request, slot) = loop {
                match fillers.request(ticket).and_then(|request| Some((request, fillers.take_slot(ticket, 0)?))) {
                    Some(found) => break found,
                    None => thread::yield_now(),
                }
            };
            world.slot.store(request.page, Relaxed);
            fillers.finish(ticket, request.frame, slot, 4096);
        }
        kernels.join().unwrap();
    });
}
