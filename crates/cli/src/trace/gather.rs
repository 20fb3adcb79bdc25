//! Collects the pieces of each request until it is complete.

use std::collections::{HashMap, VecDeque};

use spinio_io::stats::trace::{Event, Piece, Request};

/// The most requests whose pieces may wait: more than threads can have in flight, so for older ones records were lost.
const MAX_WAITING: usize = 4096;

/// A request with its pieces, in the order of their starts.
#[derive(Debug, PartialEq, Eq)]
pub struct CompleteRequest {
    pub request: Request,
    pub pieces: Vec<Piece>,
}

#[derive(Default)]
pub struct RequestAssembler {
    waiting: HashMap<(u32, u64), Vec<Piece>>,
    order: VecDeque<(u32, u64)>,
}

impl RequestAssembler {
    /// The complete requests.
    pub fn take(&mut self, event: Event) -> Option<CompleteRequest> {
        match event {
            Event::Piece(piece) => {
                let key = (piece.pid, piece.request);
                self.waiting.entry(key).or_insert_with(|| {
                    self.order.push_back(key);
                    Vec::new()
                });
                if let Some(pieces) = self.waiting.get_mut(&key) {
                    pieces.push(piece);
                }
                while self.order.len() > MAX_WAITING {
                    if let Some(oldest) = self.order.pop_front() {
                        self.waiting.remove(&oldest);
                    }
                }
                None
            }
            Event::Request(request) => {
                let mut pieces = self.waiting.remove(&(request.pid, request.id)).unwrap_or_default();
                if !pieces.is_empty() {
                    self.order.retain(|key| *key != (request.pid, request.id));
                }
                pieces.sort_by_key(|p| (p.start, p.offset));
                Some(CompleteRequest { request, pieces })
            }
        }
    }
}

#[cfg(test)]
pub mod tests {
    use spinio_io::stats::Direction;
    use spinio_plan::{Reason, Route};

    use super::*;

    pub fn request(id: u64) -> Request {
        Request {
            id,
            pid: 7,
            tid: 8,
            direction: Direction::Read,
            fd: 3,
            path: Some("/data/a \"b\"".into()),
            device: Some("cuda:0".into()),
            offset: Some(4096),
            len: 3 << 20,
            result: Ok(3 << 20),
            start: 1_000_000,
            duration: 500_000,
            route_reason: None,
        }
    }

    pub fn piece(request: u64, start: u64) -> Piece {
        Piece {
            request,
            pid: 7,
            tid: 9,
            route: Route::Direct,
            reason: Reason::Absent,
            offset: 0,
            bytes: 1 << 20,
            start,
            duration: 200_000,
        }
    }

    #[test]
    fn a_request_comes_out_with_its_own_pieces_in_order() {
        let mut gather = RequestAssembler::default();
        for piece in [piece(1, 30), piece(2, 20), piece(1, 10)] {
            assert_eq!(gather.take(Event::Piece(piece)), None);
        }
        let whole = gather.take(Event::Request(request(1))).unwrap();
        assert_eq!(whole.pieces.iter().map(|p| p.start).collect::<Vec<_>>(), [10, 30]);
        assert_eq!(gather.take(Event::Request(request(1))).unwrap().pieces, []);
        assert_eq!(gather.take(Event::Request(request(2))).unwrap().pieces.len(), 1);
    }

    #[test]
    fn pieces_without_request_are_bounded() {
        let mut gather = RequestAssembler::default();
        (0..10_000).for_each(|id| assert!(gather.take(Event::Piece(piece(id, 1))).is_none()));
        assert_eq!((gather.waiting.len(), gather.order.len()), (MAX_WAITING, MAX_WAITING));
        assert_eq!(gather.take(Event::Request(request(9_999))).unwrap().pieces.len(), 1);
    }
}
