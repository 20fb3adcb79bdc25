//! Messages between a client of GAIA and its server, or the daemon of leased files, from either side.
#![no_main]

use libfuzzer_sys::fuzz_target;
use spinio_pagecache::leased_messages as leased;
use spinio_pagecache::messages::{
    self, Fill, MAX_MESSAGE, MAX_PAGES, MAX_RUNS, Reply, Request, Run, TICKET_REPLY, TicketReply, VERSION,
};

/// Kinds of requests and of replies, and one that is none.
const KINDS: [u16; 23] =
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 11, 0x8c, 0x81, 0x82, 0x84, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8a, 0x8b, 0xff];

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    check_leased(bytes);
    ticket(bytes);
    // With a header that fits, so that short inputs reach every kind: kind, number of runs, the body.
    let [kind, count, body @ ..] = bytes else { return };
    let mut message = Vec::new();
    message.extend(KINDS[usize::from(*kind) % KINDS.len()].to_le_bytes());
    message.extend(VERSION.to_le_bytes());
    message.extend(u32::from(*count).to_le_bytes());
    message.extend(body);
    check(&message);
    // Its kinds are 0x21 to 0x27, 0xa1 to 0xa8 and 0xbf; a body of seven numbers is filled up with zeros.
    let kinds = [0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xbf];
    message[0] = kinds[usize::from(*kind) % kinds.len()];
    message[1] = 0;
    if message.len() < leased::MESSAGE {
        message.resize(leased::MESSAGE, 0);
    }
    check_leased(&message);
});

fn check_leased(bytes: &[u8]) {
    let mut again = Vec::new();
    if let Ok(request) = leased::parse_request(bytes) {
        request.encode(&mut again);
        assert_eq!(again, bytes, "a request that is encoded in another way");
        assert!(leased::parse_reply(bytes).is_err(), "a request that is a reply too");
        if let leased::Request::Acquire { offset, len } = request {
            assert!(len > 0 && offset.checked_add(len).is_some_and(|end| end <= leased::MAX_BYTES));
        }
    }
    again.clear();
    if let Ok(reply) = leased::parse_reply(bytes) {
        reply.encode(&mut again);
        assert_eq!(again, bytes, "a reply that is encoded in another way");
        if let leased::Reply::Chunks { content, first, count }
        | leased::Reply::Fill { content, first, count }
        | leased::Reply::FillFrom { content, first, count, .. } = reply
        {
            assert!(count > 0 && count as usize <= leased::MAX_DESCRIPTORS);
            for chunk in first..first + u64::from(count) {
                let len = content.len_of(chunk);
                assert!((leased::MIN_CHUNK..=leased::MAX_CHUNK).contains(&len) && len % leased::MIN_CHUNK == 0);
            }
        }
    }
    assert!(again.len() <= leased::MAX_MESSAGE);
}

fn check(bytes: &[u8]) {
    let mut again = Vec::new();
    if let Ok(request) = messages::parse_request(bytes) {
        request.encode(&mut again);
        assert_eq!(again, bytes, "a request that is encoded in another way");
        assert!(messages::parse_reply(bytes).is_err(), "a request that is a reply too");
        match request {
            Request::Hello { first, pages, .. } | Request::Acquire { first, pages, .. } => inside(first, pages),
            Request::Release { id, first, pages, last, at, total, runs } => {
                inside(first, pages.into());
                let list: Vec<Run> = runs.iter().collect();
                ascending(&list);
                assert_eq!(list.is_empty(), runs.is_empty());
                let mut built = Vec::new();
                messages::release(&mut built, messages::ReleasePart { id, first, pages, last, at, total }, &list);
                assert_eq!(built, bytes, "a release that is built in another way");
            }
            Request::FilledBut { runs } => {
                let list: Vec<Run> = runs.iter().collect();
                ascending(&list);
                let mut built = Vec::new();
                messages::filled_but(&mut built, &list);
                assert_eq!(built, bytes, "pages that were not filled, built in another way");
            }
            Request::HandOver { part, runs } => {
                inside(part.first, part.pages.into());
                inside(part.chunk, u64::from(part.chunks) * u64::from(part.chunk_pages));
                let list: Vec<Run> = runs.iter().collect();
                ascending(&list);
                let mut built = Vec::new();
                messages::hand_over(&mut built, part, &list);
                assert_eq!(built, bytes, "chunks that are handed over in another way");
            }
            Request::Drop { first, pages, .. } | Request::Lend { first, pages, .. } => inside(first, pages.into()),
            Request::Filled | Request::Was { .. } | Request::Stats => {}
            Request::Status | Request::WriteOut | Request::Explain { .. } => {}
        }
    }
    again.clear();
    if let Ok(reply) = messages::parse_reply(bytes) {
        reply.encode(&mut again);
        assert_eq!(again, bytes, "a reply that is encoded in another way");
        if let Reply::FileStatus(status) = reply {
            assert!(status.path.len() <= MAX_RUNS);
        }
        if let Reply::Fills { size, fills } = reply {
            let list: Vec<Fill> = fills.iter().collect();
            ascending(&list.iter().map(|fill| fill.run).collect::<Vec<_>>());
            assert_eq!(list.is_empty(), fills.is_empty());
            let mut built = Vec::new();
            messages::fills(&mut built, size, &list);
            assert_eq!(built, bytes, "fills that are built in another way");
        }
        if let Reply::Explained { ranges } = reply {
            let list: Vec<_> = ranges.iter().collect();
            ascending(&list.iter().map(|(run, _)| *run).collect::<Vec<_>>());
            let mut built = Vec::new();
            messages::explained(&mut built, &list);
            assert_eq!(built, bytes, "ranges that are built in another way");
        }
    }
    assert!(again.len() <= MAX_MESSAGE);
}

fn inside(first: u64, pages: u64) {
    assert!(pages > 0 && first.checked_add(pages).is_some_and(|end| end <= MAX_PAGES));
}

fn ascending(runs: &[Run]) {
    assert!(runs.len() <= MAX_RUNS);
    let mut end = 0;
    for run in runs {
        inside(run.first, run.count.into());
        assert!(run.first >= end, "runs overlap");
        end = run.first + u64::from(run.count);
    }
}

/// The reply to the ioctl, from a file system that is none of ours.
fn ticket(bytes: &[u8]) {
    let mut reply = [0; TICKET_REPLY];
    let used = bytes.len().min(TICKET_REPLY);
    reply[..used].copy_from_slice(&bytes[..used]);
    if let Some(parsed) = TicketReply::from_bytes(&reply) {
        assert_eq!(parsed.to_bytes(), reply);
        assert!((1..=107).contains(&parsed.path().len()) && !parsed.path().contains(&0));
        assert!(TicketReply::new(parsed.ticket, parsed.path()).is_some());
    }
}
