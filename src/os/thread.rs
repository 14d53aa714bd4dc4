//! Starting threads if there is enough memory.

use std::io;
use std::thread;

use super::memory::{self, Purpose};

/// The length of a thread's stack in bytes. A session needs little; unoptimised code needs more.
pub const STACK_LEN: usize = if cfg!(debug_assertions) {
    512 * 1024
} else {
    128 * 1024
};

/// The memory that a thread needs besides its stack, in bytes, for a signal stack and a session's
/// buffers.
const THREAD_EXTRA: usize = 64 * 1024;

/// Starts a detached thread with a stack of [`STACK_LEN`]. Fails if too little memory would be
/// left, because the process ends if an allocation fails or if a thread cannot get a signal stack.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    spawn_boxed(name, Box::new(body))
}

fn spawn_boxed(name: &str, body: Box<dyn FnOnce() + Send>) -> io::Result<()> {
    let Some(reservation) = memory::reserve(STACK_LEN + THREAD_EXTRA, Purpose::Newcomer) else {
        return Err(io::Error::other("too little memory is left"));
    };
    let thread = thread::Builder::new()
        .name(name.into())
        .stack_size(STACK_LEN);
    let begin = move || {
        drop(reservation);
        body();
    };
    thread.spawn(begin).map(drop)
}
