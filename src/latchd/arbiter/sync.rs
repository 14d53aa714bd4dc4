//! The arbiter's mutex, condvar and counter. With `--cfg shuttle` they come from a scheduler that
//! tries thread interleavings, for `tests/interleavings/`.

#[cfg(not(all(test, shuttle)))]
pub use parking_lot::{Condvar, Mutex, MutexGuard};
#[cfg(not(all(test, shuttle)))]
pub use std::sync::atomic::AtomicUsize;

#[cfg(all(test, shuttle))]
pub use super::interleavings::sync::{AtomicUsize, Condvar, Mutex, MutexGuard};
