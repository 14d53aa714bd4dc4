//! A flag that ends the threads of a scope, also if the test fails.

use std::sync::atomic::{AtomicBool, Ordering};

/// Sets the flag when dropped. The closure of a `thread::scope` begins with one: a panic there
/// would otherwise wait for the threads that look at the flag, and would never be shown.
pub struct AtTheEnd<'a>(pub &'a AtomicBool);

impl Drop for AtTheEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
