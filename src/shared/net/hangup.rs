//! Watching peers for hang-ups. One thread watches all connections that have ever waited.
//!
//! A session that waits for a lock does not read, so it cannot see the end of the stream. The end
//! may also come after pipelined requests. The watch registers the session's socket once, before
//! the first wait, and edge-triggered. So it costs one system call per connection that waits, and
//! delays no reply. The kernel removes a closed socket from the watch.
//!
//! If a peer has filled our receive window, the kernel has no room for its FIN. So during a long
//! wait the watch also reports input, and the server cuts off a peer that sends too much.

use std::io;
use std::os::fd::OwnedFd;

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

use crate::os::stream::Stream;
use crate::os::text::reason;
use crate::shared::log::Throttle;

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

    /// Watches a socket, and reports its events with the number `id`. Also reports a hang-up that
    /// came before this call. Logs a failure.
    pub fn watch(&self, stream: &Stream, id: u64) -> io::Result<()> {
        let data = EventData::new_u64(id);
        let watched = epoll::add(&self.epoll, stream, data, events(InputReports::Ignored));
        watched.map_err(io::Error::from).inspect_err(|error| {
            let why = reason(error);
            let refusals = &self.refusals;
            refusals.warn(format_args!("turned-away reason=no-watch error=\"{why}\""));
        })
    }

    /// Changes whether the watch reports a socket's input. It also reports bytes that arrived
    /// before this call.
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
                if flags.intersects(HANG_UPS) {
                    hung_up(data.u64())
                } else {
                    has_sent(data.u64())
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
