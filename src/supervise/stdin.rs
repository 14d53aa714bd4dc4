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

use crate::sys::event::{wait_for, Event};

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
    pub fn watch() -> io::Result<StdinWatch> {
        let (closed, abandoned) = (Event::new()?, Event::new()?);
        let events = (closed.clone(), abandoned.clone());
        let began = Instant::now();
        thread::Builder::new().name("input".into()).spawn(move || {
            // If SIGTTIN were blocked, a read in the background would fail and be taken for the end
            // of input.
            let _ = SigSet::from(Signal::SIGTTIN).thread_unblock();
            // An error also counts as the end of input.
            let _ = read_to_end(io::stdin().lock());
            let (closed, abandoned) = events;
            closed.set();
            thread::sleep(GRACE.saturating_sub(began.elapsed()));
            abandoned.set();
        })?;
        Ok(StdinWatch { closed, abandoned })
    }
}

/// Reads the input to its end, and discards it. The input may be non-blocking, because another
/// program that shares it may have made it so.
fn read_to_end(mut input: impl Read + AsFd) -> io::Result<()> {
    let mut chunk = [0; 4096];
    loop {
        wait_for_input(&input)?;
        match input.read(&mut chunk) {
            Ok(0) => return Ok(()),
            Err(error) if !matches!(error.kind(), Interrupted | WouldBlock) => return Err(error),
            _ => {}
        }
    }
}

/// Blocks until there is input, or its end. Returns only in the foreground: in the background,
/// typed input is for another program, and a read would stop this program (SIGTTIN).
fn wait_for_input(input: &impl AsFd) -> io::Result<()> {
    loop {
        wait_for(&mut [PollFd::new(input, PollFlags::IN)], None)?;
        // An error means that the input is not a terminal, or that the terminal has hung up.
        if tcgetpgrp(input).map_or(true, |foreground| foreground == getpgrp()) {
            return Ok(());
        }
        thread::sleep(PAUSE_IN_BACKGROUND);
    }
}
