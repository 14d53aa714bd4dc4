//! The end of standard input. A script can close this program's input to end the program.

use std::io::ErrorKind::{Interrupted, WouldBlock};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use rustix::event::{PollFd, PollFlags};
use rustix::process::getpgrp;
use rustix::termios::tcgetpgrp;

use crate::os::event::{wait_for, Event};

/// How long a wait lasts at least, even if the input is closed. This is long enough for a free lock
/// to be granted, whichever of the two threads runs first.
const GRACE: Duration = Duration::from_secs(2);

/// While there is input, how often to check whether this program is in the foreground.
const PAUSE_IN_BACKGROUND: Duration = Duration::from_millis(200);

/// A thread that waits for the end of standard input and discards all input before the end.
pub struct StdinWatch {
    pub closed: Event,
    /// Set after the end of input, but no earlier than two seconds after the start of the wait.
    pub abandoned: Event,
}

impl StdinWatch {
    /// What to say if there is no watch.
    pub const AT_ITS_END: &str = "standard input is at its end: give hold a pipe";

    /// Starts the thread. Returns `None` if the input is at its end already: no script can end this
    /// program by it. A shell gives /dev/null to a job that a script starts with `&`, and so do
    /// cron, docker and systemd.
    pub fn watch() -> io::Result<Option<StdinWatch>> {
        let (input, now) = (io::stdin(), Some(Instant::now()));
        let has_input = wait_for(&mut [PollFd::new(&input, PollFlags::IN)], now)?;
        if has_input && is_in_the_foreground(&input) && is_at_its_end(input.lock()) {
            return Ok(None);
        }
        let (closed, abandoned) = (Event::new()?, Event::new()?);
        let events = (closed.clone(), abandoned.clone());
        let began = Instant::now();
        thread::Builder::new().name("input".into()).spawn(move || {
            // If SIGTTIN were blocked, a read in the background would fail and be taken for the end
            // of input.
            let _ = SigSet::from(Signal::SIGTTIN).thread_unblock();
            let mut input = io::stdin().lock();
            while wait_for_input(&input).is_ok() && !is_at_its_end(&mut input) {}
            let (closed, abandoned) = events;
            closed.set();
            thread::sleep(GRACE.saturating_sub(began.elapsed()));
            abandoned.set();
        })?;
        Ok(Some(StdinWatch { closed, abandoned }))
    }
}

/// Reads what is there, and discards it. Returns whether that was the end of the input: an error
/// counts as the end. But the input may be non-blocking, because another program that shares it may
/// have made it so.
fn is_at_its_end(mut input: impl Read) -> bool {
    match input.read(&mut [0; 4096]) {
        Ok(count) => count == 0,
        Err(error) => !matches!(error.kind(), Interrupted | WouldBlock),
    }
}

/// Blocks until there is input, or its end. Returns only in the foreground: in the background,
/// typed input is for another program, and a read would stop this program (SIGTTIN).
fn wait_for_input(input: &impl AsFd) -> io::Result<()> {
    loop {
        wait_for(&mut [PollFd::new(input, PollFlags::IN)], None)?;
        if is_in_the_foreground(input) {
            return Ok(());
        }
        thread::sleep(PAUSE_IN_BACKGROUND);
    }
}

fn is_in_the_foreground(input: &impl AsFd) -> bool {
    // An error means that the input is not a terminal, or that the terminal has hung up.
    tcgetpgrp(input).map_or(true, |foreground| foreground == getpgrp())
}
