//! Which values a load may return: happens-before, byte by byte.
//!
//! A store is an interval. One of the CPU is a moment; one of a GPU kernel begins with the acquire before it and ends
//! when its release has returned; truncations, holes and direct writes last from request to reply. One store precedes
//! another if it ends before the other begins, if the same agent made it earlier, or if the other's program had just
//! loaded its value. What a kernel has loaded of an epoch's pages has ended too, once their release has returned. A
//! load may not return a store that precedes another one that precedes the load.

use super::PAGES;

/// Positions of the bytes that programs use, in every page.
pub(super) const POSITIONS: [usize; BYTES_OF_PAGE] = [0, 1, 9, 4095];

/// How many they are.
pub(super) const BYTES_OF_PAGE: usize = 4;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Agent {
    Cpu,
    Gpu(usize),
}

#[derive(Clone, Debug)]
pub(super) struct Store {
    agent: Agent,
    value: u8,
    start: u64,
    end: u64,
    /// Committed, or of the CPU.
    visible: bool,
    /// Never happened: its epoch was lost, or it lies past the end of the file.
    lost: bool,
    /// The store whose value its program had just loaded.
    after: Option<usize>,
    /// Its value may be set again after a restart of the server, until it ends.
    repeats: bool,
}

/// Names a store: its byte, and its place in the byte's list.
pub(super) type StoreId = (usize, usize);

pub(super) struct Oracle {
    stores: Vec<Vec<Store>>,
}

/// The number of a byte that programs use.
pub(super) fn byte(page: usize, position: usize) -> usize {
    page * POSITIONS.len() + position
}

/// Its offset in the file.
pub(super) fn offset(byte: usize) -> u64 {
    (byte / POSITIONS.len() * crate::PAGE + POSITIONS[byte % POSITIONS.len()]) as u64
}

impl Oracle {
    pub(super) fn new() -> Oracle {
        let zero = Store {
            agent: Agent::Cpu,
            value: 0,
            start: 0,
            end: 0,
            visible: true,
            lost: false,
            after: None,
            repeats: false,
        };
        Oracle { stores: vec![vec![zero]; PAGES * BYTES_OF_PAGE] }
    }

    /// A store that a program makes now, after it loaded the byte's value from `loaded`.
    pub(super) fn store(
        &mut self,
        byte: usize,
        agent: Agent,
        start: u64,
        now: u64,
        value: u8,
        loaded: Option<u8>,
    ) -> StoreId {
        let after = loaded.and_then(|loaded| self.only_store_of(byte, agent, loaded));
        let cpu = agent == Agent::Cpu;
        let end = if cpu { now } else { u64::MAX };
        self.stores[byte].push(Store { agent, value, start, end, visible: cpu, lost: false, after, repeats: false });
        (byte, self.stores[byte].len() - 1)
    }

    /// A store by a request of the kernel: it ends with the reply.
    pub(super) fn request(&mut self, byte: usize, now: u64, value: u8) -> StoreId {
        let id = self.store(byte, Agent::Cpu, now, u64::MAX, value, None);
        self.stores[byte][id.1].repeats = true;
        id
    }

    /// The store of another GPU whose value a GPU kernel has just loaded, if only one can be meant.
    pub(super) fn seen(&self, byte: usize, agent: Agent, value: u8) -> Option<StoreId> {
        let index = self.only_store_of(byte, agent, value)?;
        let other = self.stores[byte][index].agent;
        (other != Agent::Cpu && other != agent).then_some((byte, index))
    }

    /// Whether a request that stores to this byte has no reply yet.
    pub(super) fn is_in_flight(&self, byte: usize) -> bool {
        self.stores[byte].iter().any(|store| store.repeats && store.end == u64::MAX)
    }

    fn only_store_of(&self, byte: usize, agent: Agent, value: u8) -> Option<usize> {
        let seen = |store: &Store| store.value == value && !store.lost && (store.visible || store.agent == agent);
        let mut found = self.stores[byte].iter().enumerate().filter(|(_, store)| seen(store));
        let (index, store) = found.next()?;
        let certain = found.next().is_none() && !(store.repeats && store.end == u64::MAX);
        certain.then_some(index)
    }

    pub(super) fn set_visible(&mut self, id: StoreId) {
        self.stores[id.0][id.1].visible = true;
    }

    pub(super) fn set_end(&mut self, id: StoreId, now: u64) {
        let end = &mut self.stores[id.0][id.1].end;
        *end = now.min(*end);
    }

    pub(super) fn lose(&mut self, id: StoreId) {
        self.stores[id.0][id.1].lost = true;
    }

    /// Whether a load may return this value, if it must see what ended by `start`.
    pub(super) fn allows(&self, byte: usize, agent: Agent, start: u64, value: u8) -> bool {
        let stores = &self.stores[byte];
        let seen = |store: &Store| !store.lost && (store.visible || store.agent == agent);
        let mine = |store: &Store| agent != Agent::Cpu && store.agent == agent;
        stores.iter().enumerate().any(|(index, store)| {
            let replaced = stores.iter().enumerate().any(|(other, later)| {
                let precedes = store.end <= later.start
                    || later.after == Some(index)
                    || (store.agent == later.agent && store.agent != Agent::Cpu && index < other);
                other != index && precedes && seen(later) && (later.end <= start || mine(later))
            });
            store.value == value && seen(store) && !replaced
        })
    }

    /// The stores of a byte, for the report of a failure.
    pub(super) fn list(&self, byte: usize) -> String {
        self.stores[byte].iter().map(|store| format!("    {store:?}\n")).collect()
    }
}
