//! Rules of crates/ring, which models and the proxy run, and of the proxy (crates/net).

use super::checks::Check::{self, Cargo, KernelRaces, Kernels, Models};
use super::{Mutant, hostile, quick, rule, unit};

const WORD: &str = "crates/ring/src/word.rs";
const DOORBELL: &str = "crates/ring/src/doorbell.rs";
const EVENT: &str = "crates/ring/src/event.rs";
const STREAM: &str = "crates/ring/src/stream.rs";
const MAILBOX: &str = "crates/ring/src/mailbox.rs";
const PROXY_DOORBELLS: &str = "crates/net/src/proxy/doorbells.rs";
const PROXY_STREAM: &str = "crates/net/src/proxy/stream.rs";
const PROXY_STREAM_IO: &str = "crates/net/src/proxy/stream_io.rs";
const PROXY_EVENTS: &str = "crates/net/src/proxy/events.rs";
const SOCKETS: &str = "crates/net/src/proxy/sockets.rs";

const fn proxy(name: &'static str) -> Check {
    Cargo("spinio-net", &["--lib"], name)
}

pub(super) const RULES: &[Mutant] = &[
    quick(rule(
        "release",
        "words are stored with release order",
        WORD,
        ["self.store(value, Order::Release)", "self.store(value, Order::Relaxed)"],
        &[Models("received_bytes_are_there")],
    )),
    quick(rule(
        "acquire",
        "words are loaded with acquire order",
        WORD,
        ["self.load(Order::Acquire)", "self.load(Order::Relaxed)"],
        &[Models("received_bytes_are_there")],
    )),
    quick(rule(
        "claim-doorbell",
        "a place of the doorbell queue is claimed by compare-and-swap",
        DOORBELL,
        ["if tail.compare_exchange(ticket, ticket.wrapping_add(1)) {", "tail.store_release(ticket + 1);\n        {"],
        &[Models("doorbells_of_two_kernels")],
    )),
    rule(
        "refuse-doorbell",
        "a full doorbell queue refuses",
        DOORBELL,
        ["if ticket.wrapping_sub(now) >= DOORBELLS as u64 {", "if ticket.wrapping_sub(now) > DOORBELLS as u64 {"],
        &[unit("a_full_queue_refuses")],
    ),
    quick(rule(
        "lap-of-second-word",
        "an entry is complete once both laps are right",
        DOORBELL,
        ["(e0 & LAP == due && e1 & LAP == due)", "(e0 & LAP == due)"],
        &[Models("doorbells_of_two_kernels")],
    )),
    rule(
        "lap-of-first-word",
        "an entry is complete once both laps are right",
        DOORBELL,
        ["(e0 & LAP == due && e1 & LAP == due)", "(e1 & LAP == due)"],
        &[unit("entry_with_one_word_is_not_complete")],
    ),
    rule(
        "lap-changes",
        "each round of the doorbell queue has the other lap",
        DOORBELL,
        ["is_multiple_of(2) { LAP } else { 0 };\n    ((ticket", "is_multiple_of(1) { LAP } else { 0 };\n    ((ticket"],
        &[unit("entries_come_out_in_order")],
    ),
    rule(
        "holes",
        "an entry that is claimed and not written holds up no other one",
        DOORBELL,
        ["(0..room.min(most as u64))", "(0..room.min(1 + most as u64 * 0))"],
        &[unit("entries_after_one_that_is_never_written")],
    ),
    quick(rule(
        "doorbell-order",
        "an entry is taken only if all before it are still holes once it was seen",
        DOORBELL,
        [
            "while let Some(earlier) = self.open_before(ticket).find_map(complete) {",
            "while let Some(earlier) = self.open_before(self.head).find_map(complete) {",
        ],
        &[Models("doorbells_of_one_socket")],
    )),
    quick(rule(
        "event-words",
        "the second word of an event is there before the first one",
        EVENT,
        [
            "        queue[at + 1].store_release(e1);\n        queue[at].store_release(e0 | lap(self.tail, entries));\n",
            "        queue[at].store_release(e0 | lap(self.tail, entries));\n        queue[at + 1].store_release(e1);\n",
        ],
        &[Models("event_goes_to_one_of_two_groups")],
    )),
    rule(
        "event-lap",
        "an event counts once its lap is of this round",
        EVENT,
        ["if e0 & LAP != lap(tail, entries) {", "if e0 == 0 {"],
        &[Cargo("spinio-ring", &["--test", "model_event"], "")],
    ),
    quick(rule(
        "event-claim",
        "an event is claimed by compare-and-swap, after it was read",
        EVENT,
        [
            "if self.claims[HEAD].compare_exchange(head, head + 1) {",
            "self.claims[HEAD].store_release(head + 1);\n            {",
        ],
        &[Models("event_goes_to_one_of_two_groups")],
    )),
    rule(
        "event-lock",
        "one group at a time reads host memory",
        EVENT,
        ["self.claims[LOCK].compare_exchange(0, 1)", "{ self.claims[LOCK].store_release(1); true }"],
        &[Models("event_goes_to_one_of_two_groups")],
    ),
    rule(
        "event-room",
        "an event of a full ring is held back",
        EVENT,
        ["if !self.has_room(queue, taken) {", "if !self.has_room(queue, taken) && false {"],
        &[unit("impossible_words_of_kernels_make_no_room"), Cargo("spinio-ring", &["--test", "model_event"], "")],
    ),
    rule(
        "event-taken",
        "the kernels' word makes room only within what was pushed",
        EVENT,
        ["if (self.taken..=self.tail).contains(&now) {", "{"],
        &[unit("impossible_words_of_kernels_make_no_room")],
    ),
    rule(
        "event-armed",
        "a socket makes one event, and the next one after it was armed again",
        EVENT,
        ["if self.armed && events != 0 {", "if events != 0 {"],
        &[unit("failures_are_told_unasked_and_only_while_armed")],
    ),
    rule(
        "room-of-receiver",
        "bytes are received only where the kernel has taken the last ones",
        STREAM,
        ["(at, to_end.min((self.size - self.unread()) as usize))", "(at, to_end)"],
        &[Models("received_bytes_are_there")],
    ),
    rule(
        "room-of-sender",
        "bytes are sent only where the proxy has sent the last ones",
        STREAM,
        ["(at, to_end.min((self.size - self.tail.since(self.sent)) as usize))", "(at, to_end)"],
        &[Models("sent_bytes_are_not_overwritten")],
    ),
    rule(
        "check-position",
        "a doorbell's position lies within the ring",
        STREAM,
        ["if tail.since(self.sent) > self.size {", "if false {"],
        &[unit("doorbell_outside_the_ring")],
    ),
    rule(
        "older-position",
        "a doorbell that is seen late says nothing new",
        STREAM,
        ["if self.tail.since(tail) <= self.size {", "if false {"],
        &[unit("doorbell_outside_the_ring")],
    ),
    rule(
        "check-credit",
        "a kernel has taken no bytes that it was not given",
        STREAM,
        ["if consumed.position.since(self.consumed) > self.received.since(self.consumed) {", "if false {"],
        &[unit("credit_for_bytes_that_were_not_received")],
    ),
    rule(
        "check-epoch",
        "a host line of another epoch says nothing",
        STREAM,
        ["if consumed.epoch != self.epoch {", "if false {"],
        &[unit("credit_for_bytes_that_were_not_received")],
    ),
    rule(
        "bytes-before-errors",
        "bytes that have arrived come before an error and before the end",
        STREAM,
        ["0 if received.flags & ERR != 0 => Look::Failed,", "_ if received.flags & ERR != 0 => Look::Failed,"],
        &[unit("bytes_come_before_errors_and_the_end")],
    ),
    quick(rule(
        "reply-last",
        "the word with the number of a reply is stored last",
        MAILBOX,
        [
            "    pub fn store<W: Word>(&self, reply: &[W], number: u32) {\n",
            "    pub fn store<W: Word>(&self, reply: &[W], number: u32) {\n        reply[0].store_release(u64::from(self.result as u32) | u64::from(number) << 32);\n",
        ],
        &[Models("reply_belongs_to_its_request")],
    )),
    rule(
        "reply-number",
        "a reply counts only with the number of the request",
        MAILBOX,
        ["if (w0 >> 32) as u32 != number {", "if w0 == 0 {"],
        &[unit("request_and_reply_keep_all_fields")],
    ),
    // The proxy.
    rule(
        "proxy-stale",
        "a word of a stale descriptor does nothing",
        SOCKETS,
        ["slot.socket.as_mut().filter(|_| slot.epoch == descriptor.epoch)", "slot.socket.as_mut()"],
        &[proxy("slots_are_used_again")],
    ),
    rule(
        "proxy-violation",
        "a wrong position resets its connection",
        PROXY_DOORBELLS,
        ["Err(_) => self.violation(descriptor.index),\n        }\n    }", "Err(_) => {}\n        }\n    }"],
        &[hostile("wrong_position_resets")],
    ),
    rule(
        "proxy-close",
        "what a close says was sent is sent, also if it is seen before the doorbells that say so",
        PROXY_DOORBELLS,
        ["                self.sent_up_to(descriptor, entry.position);\n", ""],
        &[hostile("close_that_is_seen_before_a_send")],
    ),
    rule(
        "proxy-shutdown",
        "so is what a shutdown says",
        PROXY_DOORBELLS,
        [
            "            self.sent_up_to(Descriptor::of(request.descriptor), sent);\n",
            "            self.sent_up_to(Descriptor::of(0), sent);\n",
        ],
        &[hostile("shutdown_that_is_seen_before_a_send")],
    ),
    rule(
        "proxy-mailbox",
        "a mailbox has one request at a time",
        PROXY_DOORBELLS,
        [
            "if std::mem::replace(waiting, true) {",
            "if std::mem::replace(waiting, true) && self.doorbells.is_blocked() {",
        ],
        &[hostile("second_request_of_a_mailbox")],
    ),
    rule(
        "proxy-search",
        "doorbells after many holes are found",
        PROXY_DOORBELLS,
        ["            taken += self.search_doorbells(now);\n", ""],
        &[hostile("doorbell_that_is_claimed")],
    ),
    rule(
        "proxy-credit",
        "the host line is checked before bytes are received into the ring",
        PROXY_STREAM,
        ["if receives && socket.credit(&self.memory, index).is_err() {", "if false {"],
        &[hostile("wrong_position_resets")],
    ),
    rule(
        "proxy-errno",
        "the errno is there before the flag that refers to it",
        PROXY_STREAM_IO,
        [
            "                    // The errno is there before the flag that refers to it.\n                    self.store_sent(memory);\n",
            "",
        ],
        &[Kernels("net")],
    ),
    rule(
        "proxy-told",
        "an event that was told is not told again",
        PROXY_EVENTS,
        ["            socket.watch.told();\n", ""],
        &[Kernels("net_events")],
    ),
    rule(
        "proxy-received",
        "the received position is stored with release order, after the bytes",
        SOCKETS,
        [
            "[0].store_release(self.receive_ring.line(self.flags).word());",
            "[0].store(self.receive_ring.line(self.flags).word(), std::sync::atomic::Ordering::Relaxed);",
        ],
        &[KernelRaces("net_costs")],
    ),
    rule(
        "proxy-sent",
        "the sent position is stored with release order, after the bytes were sent",
        SOCKETS,
        [
            "[1].store_release(self.send_ring.line(self.errno).word());",
            "[1].store(self.send_ring.line(self.errno).word(), std::sync::atomic::Ordering::Relaxed);",
        ],
        // Not an echo, in which what is received later is in order after it.
        &[KernelRaces("net_faults")],
    ),
];
