use super::*;

const ID: ReleaseId = 7;
const TICKET: Ticket = [7; 16];

const HAND_OVER: HandOver = HandOver {
    id: ID,
    first: 0,
    pages: 100,
    device: *b"0123456789abcdef",
    chunk: 512,
    chunks: 3,
    chunk_pages: 512,
    last_pages: 7,
};

fn requests() -> Vec<Vec<u8>> {
    let runs = [Run { first: 0, count: 2 }, Run { first: 2, count: 1 }, Run { first: 90, count: 4 }];
    let mut all = vec![Vec::new(); 18];
    Request::Hello { ticket: TICKET, access: Access::Write, first: 3, pages: 100, kind: MapKind::Registered }
        .encode(&mut all[0]);
    Request::Acquire { first: 1, pages: 2, access: Access::Read, fetch: true, peers: NO_PEERS }.encode(&mut all[1]);
    Request::Filled.encode(&mut all[2]);
    release(&mut all[3], ReleasePart { id: ID, first: 0, pages: 100, last: true, at: 1900, total: 7 }, &runs);
    Request::Was { id: ID }.encode(&mut all[4]);
    Request::Stats.encode(&mut all[5]);
    release(&mut all[6], ReleasePart { id: ID, first: 0, pages: 100, last: false, at: 0, total: 0 }, &[]);
    Request::Status.encode(&mut all[7]);
    Request::Drop { first: 1, pages: u32::MAX, open: true }.encode(&mut all[8]);
    Request::Drop { first: 1, pages: 1, open: false }.encode(&mut all[9]);
    Request::Explain { ticket: TICKET }.encode(&mut all[10]);
    Request::Acquire { first: 1, pages: 2, access: Access::Write, fetch: false, peers: NO_PEERS }.encode(&mut all[11]);
    Request::Acquire { first: 1, pages: 2, access: Access::Read, fetch: false, peers: NO_PEERS }.encode(&mut all[12]);
    hand_over(&mut all[13], HAND_OVER, &runs);
    Request::Lend { first: 1, pages: 2, bytes: 1 << 21, device: TICKET }.encode(&mut all[14]);
    let peers = [1, 2, 3, u64::MAX, 0, 0, 0, 8];
    Request::Acquire { first: 1, pages: 2, access: Access::Write, fetch: true, peers }.encode(&mut all[15]);
    filled_but(&mut all[16], &runs);
    Request::WriteOut.encode(&mut all[17]);
    all
}

fn replies() -> Vec<Vec<u8>> {
    let run = |first, count, source| Fill { run: Run { first, count }, source };
    let list =
        [run(0, 1, Source::File), run(1, 5, Source::Window), run(9, 1, Source::Patch), run(10, 7, Source::Peer(7))];
    let mut all = vec![Vec::new(); 14];
    Reply::Mapped { owner: 1, size: 2, file: 3 }.encode(&mut all[0]);
    fills(&mut all[1], 12345, &list);
    Reply::Committed { pages: 1, merged: 2, bytes: 3 }.encode(&mut all[2]);
    Reply::Was { committed: true }.encode(&mut all[3]);
    Reply::Stats(Stats { commits: 1, merged: 2, unchanged: 3, twins: 4, published: 5 }).encode(&mut all[4]);
    Reply::Failed { errno: 116 }.encode(&mut all[5]);
    let totals = Totals { commits: 8, published: 9, merged: 10, invalidations: 11, invalidated: 12, from_devices: 13 };
    let has = UserUse { connections: 14, mapped: 15, used: 16 };
    let limits = ServerLimits { connections: 17, mapped: 18, of_user: has };
    let (pid, seconds, connections, mapped, used) = (1, 2, 3, 4, 5);
    let status = ServerStatus { pid, seconds, connections, mapped, used, slots: 6, replaced: 7, totals, limits };
    Reply::ServerStatus(status).encode(&mut all[6]);
    let stats = Stats { commits: 1, ..Stats::default() };
    Reply::FileStatus(FileStatus { maps: 1, in_place: 1, owners: 3, dirty: 2, stats, path: b"/a/b" })
        .encode(&mut all[7]);
    Reply::Dropped.encode(&mut all[8]);
    let state = RangeState { unwritten: true, invalidating: true, current: 255, stale: 2, open: 3 };
    explained(&mut all[9], &[(Run { first: 0, count: 7 }, state), (Run { first: 7, count: 1 }, RangeState::default())]);
    let holder = Holder {
        pid: 1,
        user: 2,
        first: 3,
        pages: 4,
        current: 5,
        stale: 6,
        open: 7,
        from_peers: 8,
        kind: MapKind::Coherent,
    };
    Reply::Holder(holder).encode(&mut all[10]);
    Reply::Staged.encode(&mut all[11]);
    Reply::Lent.encode(&mut all[12]);
    Reply::UserStatus(UserStatus { user: 19, has }).encode(&mut all[13]);
    all
}

#[test]
fn requests_survive_encoding() {
    for bytes in requests() {
        let mut again = Vec::new();
        parse_request(&bytes).unwrap().encode(&mut again);
        assert_eq!(again, bytes);
        assert!(bytes.len() <= MAX_MESSAGE);
    }
    let all = requests();
    let Ok(Request::Release { id, last, runs, pages, at, total, .. }) = parse_request(&all[3]) else { panic!() };
    assert_eq!((id, last, pages, at, total), (ID, true, 100, 1900, 7));
    assert_eq!(runs.iter().map(|r| r.count).collect::<Vec<_>>(), [2, 1, 4]);
}

#[test]
fn hand_over_names_chunks_that_are_possible() {
    let mut bytes = Vec::new();
    hand_over(&mut bytes, HAND_OVER, &[Run { first: 600, count: 1 }]);
    let Ok(Request::HandOver { part, runs }) = parse_request(&bytes) else { panic!() };
    assert_eq!((part, runs.iter().count()), (HAND_OVER, 1));
    for wrong in [
        HandOver { chunks: 0, ..HAND_OVER },
        HandOver { chunks: MAX_CHUNKS as u32 + 1, ..HAND_OVER },
        HandOver { last_pages: 0, ..HAND_OVER },
        HandOver { last_pages: 513, ..HAND_OVER },
        HandOver { chunk: MAX_PAGES - 1, ..HAND_OVER },
        HandOver { chunk: u64::MAX, ..HAND_OVER },
        HandOver { pages: 0, ..HAND_OVER },
    ] {
        bytes.clear();
        hand_over(&mut bytes, wrong, &[]);
        assert_eq!(parse_request(&bytes), Err(BadMessage::Run), "{wrong:?}");
    }
}

#[test]
fn replies_survive_encoding() {
    for bytes in replies() {
        let mut again = Vec::new();
        parse_reply(&bytes).unwrap().encode(&mut again);
        assert_eq!(again, bytes);
    }
    let all = replies();
    let Ok(Reply::Fills { size, fills }) = parse_reply(&all[1]) else { panic!() };
    assert_eq!(size, 12345);
    let Ok(Reply::Explained { ranges }) = parse_reply(&all[9]) else { panic!() };
    let states: Vec<_> = ranges.iter().map(|(run, state)| (run.count, state.current, state.unwritten)).collect();
    assert_eq!(states, [(7, 255, true), (1, 0, false)]);
    let sources: Vec<_> = fills.iter().map(|f| f.source).collect();
    assert_eq!(sources, [Source::File, Source::Window, Source::Patch, Source::Peer(7)]);
}

#[test]
fn source_that_is_none_is_refused() {
    for (source, is_good) in [(Source::Peer(7), true), (Source::Peer(8), false), (Source::Peer(255), false)] {
        let mut bytes = Vec::new();
        fills(&mut bytes, 1, &[Fill { run: Run { first: 0, count: 1 }, source }]);
        assert_eq!(parse_reply(&bytes).is_ok(), is_good, "{source:?}");
    }
    for flags in [5, 1 << 8, 4 | 1 << 16, 4 | 1 << 24] {
        let mut bytes = Vec::new();
        start(&mut bytes, FILLS, 1);
        numbers(&mut bytes, &[1]);
        encode_run(&mut bytes, Run { first: 0, count: 1 }, flags);
        assert_eq!(parse_reply(&bytes), Err(BadMessage::Kind), "{flags:#x}");
    }
}

#[test]
fn truncated_and_extended_messages_are_refused() {
    for bytes in requests() {
        for len in 0..bytes.len() {
            assert!(parse_request(&bytes[..len]).is_err(), "{len} of {}", bytes.len());
        }
        assert_eq!(parse_request(&[&bytes[..], &[0]].concat()), Err(BadMessage::Length));
    }
    for bytes in replies() {
        (0..bytes.len()).for_each(|len| assert!(parse_reply(&bytes[..len]).is_err()));
        assert_eq!(parse_reply(&[&bytes[..], &[0; 16]].concat()), Err(BadMessage::Length));
    }
}

#[test]
fn hostile_bytes_never_panic_and_parsed_runs_are_in_bounds() {
    let mut state = 1u64;
    let mut random = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize
    };
    let seeds: Vec<Vec<u8>> = requests().into_iter().chain(replies()).collect();
    for round in 0..300_000 {
        let mut bytes = match round % 4 {
            0 => (0..random() % 80).map(|_| random() as u8).collect(),
            _ => seeds[random() % seeds.len()].clone(),
        };
        for _ in 0..random() % 4 {
            if !bytes.is_empty() {
                let at = random() % bytes.len();
                bytes[at] = [0, 1, 0x7f, 0x80, 0xff, random() as u8][random() % 6];
            }
        }
        bytes.truncate(bytes.len() - (random() % 8).min(bytes.len()) * usize::from(round % 3 == 0));
        if let Ok(Request::Release { runs, at, .. }) = parse_request(&bytes) {
            assert!(u64::from(at) + runs.iter().map(|run| u64::from(run.count)).sum::<u64>() <= STAGE.into());
            let mut end = 0;
            for run in runs.iter() {
                assert!(run.count > 0 && run.first >= end && run.first + u64::from(run.count) <= MAX_PAGES);
                end = run.first + u64::from(run.count);
            }
        }
        let _ = parse_reply(&bytes);
    }
}

#[test]
fn lists_out_of_order_or_bounds_are_refused() {
    let parse_at = |at, runs: &[Run]| {
        let mut bytes = Vec::new();
        release(&mut bytes, ReleasePart { id: ID, first: 0, pages: 100, last: true, at, total: u32::MAX }, runs);
        parse_request(&bytes).map(drop)
    };
    let parse = |runs: &[Run]| parse_at(0, runs);
    let run = |first, count| Run { first, count };
    assert_eq!(parse(&[run(1, 1), run(2, 1)]), Ok(()));
    assert_eq!(parse(&[run(2, 1), run(1, 1)]), Err(BadMessage::Run));
    assert_eq!(parse(&[run(1, 2), run(2, 1)]), Err(BadMessage::Run));
    assert_eq!(parse(&[run(1, 0)]), Err(BadMessage::Run));
    assert_eq!(parse(&[run(u64::MAX, 1)]), Err(BadMessage::Run));
    assert_eq!(parse(&[run(MAX_PAGES, 1)]), Err(BadMessage::Run));
    assert_eq!(parse_at(1, &[run(1, 1), run(5, STAGE - 2)]), Ok(()));
    assert_eq!(parse_at(2, &[run(1, 1), run(5, STAGE - 2)]), Err(BadMessage::Run));
    assert_eq!(parse_at(u32::MAX, &[run(1, 1)]), Err(BadMessage::Run));
    for (first, pages) in [(0, 0), (1, MAX_PAGES), (u64::MAX, 2)] {
        let mut bytes = Vec::new();
        Request::Acquire { first, pages, access: Access::Read, fetch: true, peers: NO_PEERS }.encode(&mut bytes);
        assert_eq!(parse_request(&bytes), Err(BadMessage::Run));
    }
    for (first, pages) in [(0, 0), (MAX_PAGES, 1), (u64::MAX, 2)] {
        let mut bytes = Vec::new();
        Request::Drop { first, pages, open: true }.encode(&mut bytes);
        assert_eq!(parse_request(&bytes), Err(BadMessage::Run));
    }
    let mut bytes = Vec::new();
    Request::Stats.encode(&mut bytes);
    bytes[2] = 9;
    assert_eq!(parse_request(&bytes), Err(BadMessage::Version(9)));
}

#[test]
fn ticket_carries_the_path() {
    let reply = TicketReply::new(TICKET, b"/run/spinio/gaia").unwrap();
    let parsed = TicketReply::from_bytes(&reply.to_bytes()).unwrap();
    assert_eq!((parsed.ticket, parsed.path()), (TICKET, &b"/run/spinio/gaia"[..]));
    assert!(TicketReply::new(TICKET, &[b'a'; 108]).is_none());
    assert!(TicketReply::from_bytes(&[0; TICKET_REPLY]).is_none());
    assert!(TicketReply::from_bytes(&[b'a'; TICKET_REPLY]).is_none());
    assert_eq!((TICKET_IOCTL, REFUSALS_IOCTL), (0x8080_5301, 0x8008_5302));
}
