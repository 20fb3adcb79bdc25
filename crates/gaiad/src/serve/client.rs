//! A connection: one map of one file, or a question.

use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::process::Uid;
use spinio_pagecache::leased_messages::{Reply, Request};
use spinio_sys::injection_point;

use crate::admission::{Admitted, Refusal, admit};

use super::channel::{failed, receive, send};
use super::exclusion::LeasedFile;
use super::query;
use super::store::{Client, Next, Store};

pub(super) fn serve(store: &Store, socket: &OwnedFd) {
    let Admitted { peer, counted } = match admit(&store.quotas, socket) {
        Ok(admitted) => admitted,
        Err(Refusal::Told(errno)) => {
            let _ = send(socket, failed(errno), &[]);
            return;
        }
        Err(Refusal::Closed) => return,
    };
    let user = Uid::from_raw(peer.user);
    match receive(socket) {
        Some((Request::Hello { .. }, _)) if !counted.is_within() => drop(send(socket, failed(Errno::USERS), &[])),
        Some((Request::Hello { device }, Some(file))) => {
            let opened = LeasedFile::open(&file);
            // The client's descriptor may be open for writing: then no lease is granted while it is open here.
            drop(file);
            match opened.and_then(|file| store.join(user.as_raw(), device, file)) {
                Ok(client) => {
                    let _ = set_socket_timeout(socket, Timeout::Recv, None);
                    injection_point!("serve: file opened");
                    if send(socket, Reply::Opened, &[]).is_ok() {
                        serve_map(&client, socket);
                    }
                }
                Err(error) => drop(send(socket, failed(error), &[])),
            }
        }
        Some((Request::DropFile, Some(file))) => query::drop_file(store, socket, user, &file),
        Some((request @ (Request::Status | Request::Drop | Request::Stop), None)) => {
            query::answer(store, socket, user, request);
        }
        _ => {}
    }
}

/// Until the client goes.
fn serve_map(client: &Client<'_>, socket: &OwnedFd) {
    while let Some((request, fd)) = receive(socket) {
        let sent = match (request, fd) {
            (Request::Acquire { offset, len }, None) => match client.next(offset, len) {
                Ok(Next::Map { content, first, chunks }) => {
                    let fds: Vec<_> = chunks.iter().map(|chunk| chunk.as_fd()).collect();
                    let sent = send(socket, Reply::Chunks { content, first, count: fds.len() as u32 }, &fds);
                    injection_point!("serve: chunks handed out");
                    sent
                }
                Ok(Next::Fill { content, first, count }) => {
                    let sent = send(socket, Reply::Fill { content, first, count }, &[]);
                    injection_point!("serve: fill handed out");
                    sent
                }
                Ok(Next::FillFrom { content, first, peer, copies }) => {
                    let fds: Vec<_> = copies.iter().map(|copy| copy.as_fd()).collect();
                    let sent = send(socket, Reply::FillFrom { content, first, count: fds.len() as u32, peer }, &fds);
                    injection_point!("serve: copies handed out");
                    sent
                }
                Ok(Next::Ready { content }) => send(socket, Reply::Ready { content }, &[]),
                Err(error) => send(socket, failed(error), &[]),
            },
            (Request::Filled { content, chunk, source }, Some(fd)) => {
                let kept = client.filled(content, chunk, source, fd);
                injection_point!("serve: chunk kept");
                send(socket, Reply::Kept { kept }, &[])
            }
            (Request::Abandon { content, chunk, no_memory }, None) => {
                let bytes = client.abandon(content, chunk, no_memory);
                send(socket, Reply::Freed { bytes }, &[])
            }
            _ => return,
        };
        if sent.is_err() {
            return;
        }
    }
}
