//! Watching peers for hang-ups: one thread for all connections that have ever waited.
//!
//! A session that waits for a lock does not read, so it does not see the end of the stream, nor one
//! behind pipelined requests. A socket is registered once, before its first wait, edge-triggered:
//! the watch costs a connection one system call and delays no reply, and nothing if it never waits.
//! A closed socket leaves the watch by itself.
//!
//! The FIN of a peer that has filled our receive window cannot arrive: the kernel has no room for
//! it. So a session that waits for long has the watch report input as well.

use std::io;
use std::os::fd::OwnedFd;

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

use super::stream::Stream;
use crate::log::Throttle;
use crate::text::reason;

/// Hang-ups fetched per system call.
const BATCH_LEN: usize = 64;

const HANG_UPS: EventFlags = EventFlags::RDHUP
    .union(EventFlags::HUP)
    .union(EventFlags::ERR);

/// Whether the watch reports input on a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputReports {
    /// Each time bytes arrive.
    Reported,
    Ignored,
}

/// Watches sockets for hang-ups: a close, a half-close, a reset, or a host that has vanished.
#[derive(Debug)]
pub struct HangupWatch {
    epoll: OwnedFd,
    refusals: Throttle,
}

impl HangupWatch {
    pub fn new() -> io::Result<Self> {
        Ok(HangupWatch {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            refusals: Throttle::default(),
        })
    }

    /// Watches a socket under the number `id`. A hang-up that came before counts. Logs a failure.
    pub fn watch(&self, stream: &Stream, id: u64) -> io::Result<()> {
        let data = EventData::new_u64(id);
        let watched = epoll::add(&self.epoll, stream, data, events(InputReports::Ignored));
        watched.map_err(io::Error::from).inspect_err(|error| {
            let why = reason(error);
            let refusals = &self.refusals;
            refusals.warn(format_args!("turned-away reason=no-watch error=\"{why}\""));
        })
    }

    /// Changes whether the watch reports a socket's input. Bytes that came before count.
    pub fn set_input(&self, stream: &Stream, id: u64, input: InputReports) -> io::Result<()> {
        epoll::modify(&self.epoll, stream, EventData::new_u64(id), events(input))?;
        Ok(())
    }

    /// Calls `hung_up` for each peer that has closed or half-closed its side or has vanished, and
    /// `has_sent` when a socket has input to report. May call either more than once for one event.
    /// Returns only when the watch itself fails.
    pub fn run(&self, hung_up: impl Fn(u64), has_sent: impl Fn(u64)) -> io::Error {
        let mut events = Vec::with_capacity(BATCH_LEN);
        loop {
            match epoll::wait(&self.epoll, spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return error.into(),
            }
            for Event { data, flags } in events.drain(..) {
                match flags.intersects(HANG_UPS) {
                    true => hung_up(data.u64()),
                    false => has_sent(data.u64()),
                }
            }
        }
    }
}

fn events(input: InputReports) -> EventFlags {
    let events = HANG_UPS | EventFlags::ET;
    match input {
        InputReports::Reported => events | EventFlags::IN,
        InputReports::Ignored => events,
    }
}
