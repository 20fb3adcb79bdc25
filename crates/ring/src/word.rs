//! An atomic word of 8 bytes, as the protocols use it.

/// A word that several threads access.
pub trait Word {
    /// Loads it: what its writer stored before is visible afterwards.
    fn load_acquire(&self) -> u64;
    /// Stores it: a thread that loads it sees all that this thread stored before.
    fn store_release(&self, value: u64);
    /// Loads it, without order.
    fn load_relaxed(&self) -> u64;
    /// Stores it, without order.
    fn store_relaxed(&self, value: u64);
    /// Exchanges it if it is `expected`; whether it was. For words in device memory only.
    fn compare_exchange(&self, expected: u64, wanted: u64) -> bool;
}

macro_rules! implement {
    ($atomic:path, $ordering:path) => {
        impl Word for $atomic {
            fn load_acquire(&self) -> u64 {
                use $ordering as Order;
                self.load(Order::Acquire)
            }

            fn store_release(&self, value: u64) {
                use $ordering as Order;
                self.store(value, Order::Release);
            }

            fn load_relaxed(&self) -> u64 {
                use $ordering as Order;
                self.load(Order::Relaxed)
            }

            fn store_relaxed(&self, value: u64) {
                use $ordering as Order;
                self.store(value, Order::Relaxed);
            }

            fn compare_exchange(&self, expected: u64, wanted: u64) -> bool {
                use $ordering as Order;
                self.compare_exchange(expected, wanted, Order::AcqRel, Order::Acquire).is_ok()
            }
        }
    };
}

implement!(std::sync::atomic::AtomicU64, std::sync::atomic::Ordering);
#[cfg(loom)]
implement!(loom::sync::atomic::AtomicU64, loom::sync::atomic::Ordering);
