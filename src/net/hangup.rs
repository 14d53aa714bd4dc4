//! Watching peers for hang-ups, on one thread for all connections that have ever waited.
//!
//! A session that waits for a lock does not read, so it cannot see the end of the stream, which may
//! also come after pipelined requests. Its socket is registered once, before the first wait, and
//! edge-triggered. So the watch costs a connection one system call and delays no reply; it costs
//! nothing if the connection never waits. The kernel removes a closed socket from the watch.
//!
//! If a peer has filled our receive window, its FIN cannot arrive, because the kernel has no room
//! for it. So while a wait is long, the watch reports input as well, and the server cuts off a peer
//! that sends too much during the wait.

use std::io;
use std::os::fd::OwnedFd;

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

use super::stream::Stream;
use crate::log::Throttle;
use crate::text::reason;

/// The maximum number of events fetched by one system call.
const BATCH_LEN: usize = 64;

const HANG_UPS: EventFlags = EventFlags::RDHUP
    .union(EventFlags::HUP)
    .union(EventFlags::ERR);

/// Whether the watch reports input on a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputReports {
    /// The watch reports each arrival of bytes.
    Reported,
    Ignored,
}

/// Watches sockets for hang-ups. A hang-up is a close, a half-close, a reset, or a host that has
/// vanished.
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

    /// Watches a socket, whose events are reported with the number `id`. An earlier hang-up is
    /// reported, too. Logs a failure.
    pub fn watch(&self, stream: &Stream, id: u64) -> io::Result<()> {
        let data = EventData::new_u64(id);
        let watched = epoll::add(&self.epoll, stream, data, events(InputReports::Ignored));
        watched.map_err(io::Error::from).inspect_err(|error| {
            let why = reason(error);
            let refusals = &self.refusals;
            refusals.warn(format_args!("turned-away reason=no-watch error=\"{why}\""));
        })
    }

    /// Changes whether the watch reports a socket's input. Bytes that arrived earlier are reported,
    /// too.
    pub fn set_input(&self, stream: &Stream, id: u64, input: InputReports) -> io::Result<()> {
        epoll::modify(&self.epoll, stream, EventData::new_u64(id), events(input))?;
        Ok(())
    }

    /// Calls `hung_up` for each socket whose peer has hung up, and `has_sent` for each socket that
    /// has input to report. May make several calls for one event. Returns only when the watch
    /// itself fails.
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
