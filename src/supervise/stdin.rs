//! The end of standard input, by which a script ends a program that it has started.

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

/// How long a wait lasts before closed input ends it. A free lock is granted before, however the
/// two threads run.
const GRACE: Duration = Duration::from_secs(2);

/// How often to check for the foreground while there is input.
const PAUSE_IN_BACKGROUND: Duration = Duration::from_millis(200);

/// A thread that waits for the end of standard input and discards all input before.
pub struct StdinWatch {
    pub closed: Event,
    /// Set after the end of input, once the wait has lasted for two seconds.
    pub abandoned: Event,
}

impl StdinWatch {
    pub fn watch() -> io::Result<StdinWatch> {
        let (closed, abandoned) = (Event::new()?, Event::new()?);
        let events = (closed.clone(), abandoned.clone());
        let began = Instant::now();
        thread::Builder::new().name("input".into()).spawn(move || {
            // Blocked, it would make a read in the background fail, and end the input.
            let _ = SigSet::from(Signal::SIGTTIN).thread_unblock();
            // An input that fails brings nothing more either.
            let _ = read_to_end(io::stdin().lock());
            let (closed, abandoned) = events;
            closed.set();
            thread::sleep(GRACE.saturating_sub(began.elapsed()));
            abandoned.set();
        })?;
        Ok(StdinWatch { closed, abandoned })
    }
}

/// Reads to the end, and drops what it reads. It may be an input that does not block: a program
/// that shares it may have made it so.
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

/// Blocks until there is input, or its end. What is typed while this program is in the background
/// is for another: to read it would stop this one (SIGTTIN).
fn wait_for_input(input: &impl AsFd) -> io::Result<()> {
    loop {
        wait_for(&mut [PollFd::new(input, PollFlags::IN)], None)?;
        // What has no foreground is no terminal, or one that has hung up.
        if tcgetpgrp(input).map_or(true, |foreground| foreground == getpgrp()) {
            return Ok(());
        }
        thread::sleep(PAUSE_IN_BACKGROUND);
    }
}
