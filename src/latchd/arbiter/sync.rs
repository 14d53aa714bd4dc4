//! The arbiter's mutex, condvar, counter and cell. With `--cfg shuttle` they come from a scheduler
//! that tries thread interleavings, for `tests/interleavings/`.

#[cfg(not(all(test, shuttle)))]
pub use parking_lot::{Condvar, Mutex, MutexGuard};
#[cfg(not(all(test, shuttle)))]
pub use std::cell::Cell;
#[cfg(not(all(test, shuttle)))]
pub use std::sync::atomic::AtomicUsize;

#[cfg(all(test, shuttle))]
pub use super::interleavings::sync::{AtomicUsize, Cell, Condvar, Mutex, MutexGuard};
