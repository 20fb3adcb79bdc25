//! The layout in C++ and the layout in Rust are the same.

use std::mem::offset_of;
use std::process::Command;

use spinio_ring::doorbell::Op;
use spinio_ring::layout::{
    ADDRESS_BYTES, CLAIM_BYTES, DEVICE_SET_BYTES, DEVICE_SOCKET_BYTES, DOORBELL_BYTES, DOORBELLS, END_BYTES,
    EVENT_SETS, EVENT_WORDS_BYTES, EVENTS, FILE_BUFFER_BYTES, FILE_BUFFERS, FIRST_FILE, Handle, LINE_BYTES,
    MAILBOX_BYTES, PAGE, PATH_BYTES, PEER_BYTES, QUICK_MAILBOXES, RECORD_BYTES, Sizes, WAIT_BYTES, claims, event_words,
    header, record,
};
use spinio_ring::mailbox::Call;
use spinio_ring::{datagram, granule, line, message, peer, position};

const PROGRAM: &str = r#"
#include <cstdio>
#include <initializer_list>
#include <spinio/net/layout.h>
using namespace spinio::net;
using namespace spinio::net::layout;
#define PRINT(x) std::printf("%llu\n", (unsigned long long)(x))
int main()
{
    PRINT(page); PRINT(doorbells); PRINT(doorbell_bytes); PRINT(record_bytes); PRINT(line_bytes); PRINT(mailbox_bytes);
    PRINT(claim_bytes); PRINT(quick_mailboxes); PRINT(address_bytes); PRINT(sizeof(DeviceSocket));
    PRINT(header_stop); PRINT(header_doorbell_head); PRINT(claims_doorbell_tail); PRINT(claims_doorbell_head);
    PRINT(record_state); PRINT(record_receive); PRINT(record_send); PRINT(record_first);
    PRINT(position_bits); PRINT(flag_eof); PRINT(flag_err); PRINT(flag_full);
    PRINT(doorbell_send); PRINT(doorbell_credit); PRINT(doorbell_close); PRINT(doorbell_control);
    PRINT(datagram_header); PRINT(datagram_short_address); PRINT(datagram_dontwait); PRINT(longest_udp); PRINT(longest_udp6);
    PRINT(doorbell_rearm); PRINT(call_socket); PRINT(call_peer_name); PRINT(call_set_option); PRINT(call_get_option); PRINT(call_set); PRINT(call_add);
    PRINT(call_open_file); PRINT(call_send_file); PRINT(file_buffers); PRINT(first_file); PRINT(file_buffer_bytes); PRINT(path_bytes);
    PRINT(claims_file_buffers); PRINT(offsetof(Handle, files));
    PRINT(event_sets_of_a_net); PRINT(events); PRINT(sizeof(DeviceSet)); PRINT(event_words_bytes); PRINT(event_taken); PRINT(event_made); PRINT(event_waits); PRINT(wait_bytes);
    PRINT(offsetof(Handle, pinned)); PRINT(offsetof(Handle, device)); PRINT(offsetof(Handle, sockets)); PRINT(offsetof(Handle, mailboxes)); PRINT(offsetof(Handle, peers));
    PRINT(offsetof(Handle, rings)); PRINT(offsetof(Handle, first)); PRINT(offsetof(Handle, waits));
    PRINT(doorbell_ready); PRINT(sizeof(PeerEnd)); PRINT(offsetof(PeerEnd, consumed)); PRINT(offsetof(PeerEnd, watch)); PRINT(offsetof(PeerEnd, received)); PRINT(offsetof(PeerEnd, message)); PRINT(message_words); PRINT(message_word_bytes); PRINT(end_message); PRINT(moved); PRINT(connecting);
    PRINT(end_watched); PRINT(end_closed); PRINT(end_reset); PRINT(end_shut); PRINT(peer_bit | 1ull << peer_side_bit | 5ull << peer_pair_bit | 12 | 3ull << position_bits);
    PRINT(record_granule); PRINT(shared_bit); PRINT(granule_bytes(8192)); PRINT(remote_bit); PRINT(peer_bytes);
    for (unsigned sockets : {1u, 2u, 64u, 1024u, 65536u}) {
        PRINT(records(sockets)); PRINT(device_lines(sockets)); PRINT(host_lines(sockets)); PRINT(mailboxes(sockets));
        PRINT(device_sockets(sockets)); PRINT(mailbox_claims(sockets));
        PRINT(event_sets(sockets, 5)); PRINT(device_sets(sockets, 5)); PRINT(device_ends(sockets, 5));
    }
}
"#;

#[test]
fn header_and_crate_agree() {
    let dir = tempfile::tempdir().unwrap();
    let (source, program) = (dir.path().join("layout.cpp"), dir.path().join("layout"));
    std::fs::write(&source, PROGRAM).unwrap();
    let headers = concat!(env!("CARGO_MANIFEST_DIR"), "/../../device/include");
    let built = Command::new("c++").args(["-std=c++17", "-I", headers, "-o"]).arg(&program).arg(&source).output();
    let Ok(built) = built else { return eprintln!("skipped: no c++ here") };
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let printed = String::from_utf8(Command::new(&program).output().unwrap().stdout).unwrap();
    let in_header: Vec<u64> = printed.lines().map(|line| line.parse().unwrap()).collect();

    let mut here: Vec<u64> = [
        PAGE,
        DOORBELLS,
        DOORBELL_BYTES,
        RECORD_BYTES,
        LINE_BYTES,
        MAILBOX_BYTES,
        CLAIM_BYTES,
        QUICK_MAILBOXES as usize,
        ADDRESS_BYTES,
        DEVICE_SOCKET_BYTES,
        header::STOP,
        header::DOORBELL_HEAD,
        claims::DOORBELL_TAIL,
        claims::DOORBELL_HEAD,
        record::STATE,
        record::RECEIVE,
        record::SEND,
        record::FIRST,
    ]
    .map(|n| n as u64)
    .to_vec();
    here.extend([position::BITS.into(), line::EOF, line::ERR, line::FULL]);
    here.extend([Op::Send, Op::Credit, Op::Close, Op::Control].map(|op| op as u64));
    here.extend([datagram::HEADER_BYTES, datagram::SHORT_ADDRESS_BYTES].map(|n| n as u64));
    here.extend([datagram::DONTWAIT.into(), datagram::LONGEST_UDP as u64, datagram::LONGEST_UDP6 as u64]);
    here.extend([Op::Rearm as u64, 1, 8, Call::SetOption as u64, Call::GetOption as u64]);
    here.extend([Call::Set as u64, Call::Add as u64]);
    here.extend([Call::OpenFile as u64, Call::SendFile as u64, FILE_BUFFERS.into(), FIRST_FILE.into()]);
    here.extend([FILE_BUFFER_BYTES, PATH_BYTES, claims::FILE_BUFFERS, offset_of!(Handle, files)].map(|n| n as u64));
    here.extend([EVENT_SETS.into(), EVENTS as u64, DEVICE_SET_BYTES as u64, EVENT_WORDS_BYTES as u64]);
    here.extend([event_words::TAKEN as u64, event_words::MADE as u64]);
    here.extend([event_words::WAITS, WAIT_BYTES].map(|n| n as u64));
    // Of the handle.
    here.extend([0, 8, 16, 20, 24, 32, 40, 56]);
    here.extend([Op::Ready as u64, END_BYTES as u64, 8 * peer::CONSUMED as u64, 8 * peer::WATCH as u64]);
    here.extend([8 * peer::RECEIVED, 8 * peer::RECEIVED + 8, message::WORDS, message::WORD_BYTES].map(|n| n as u64));
    here.extend([
        peer::MESSAGE,
        peer::MOVED.into(),
        line::CONNECTING.into(),
        peer::WATCHED,
        peer::CLOSED,
        peer::RESET,
        peer::SHUT,
    ]);
    here.push(peer::Place { pair: 5, second: true, generation: 3, size_log2: 12, shared: false, remote: None }.word());
    here.extend([record::GRANULE as u64, peer::SHARED_BIT, granule::bytes(8192), peer::REMOTE_BIT, PEER_BYTES]);
    for sockets in [1, 2, 64, 1024, 65536] {
        let sizes = Sizes { sockets, mailboxes: 5 };
        let offsets = [
            sizes.records(),
            sizes.device_lines(),
            sizes.host_lines(),
            sizes.mailboxes(),
            sizes.device_sockets(),
            sizes.mailbox_claims(),
            sizes.event_sets(),
            sizes.device_sets(),
            sizes.device_ends(),
        ];
        here.extend(offsets.map(|n| n as u64));
    }
    assert_eq!(in_header, here);
}
