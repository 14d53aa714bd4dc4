//! Who has gone away: one thread watches every connection for the peer's hang-up, and for nothing
//! else.
//!
//! A session that waits for a lock does not read, so it cannot see the end of the stream itself; nor
//! can it see one that hides behind pipelined requests. Each socket is registered once, edge
//! triggered, so the watch costs a connection one system call in its life and delays no reply. A
//! socket that is closed leaves the watch by itself.

use std::io;
use std::os::fd::OwnedFd;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

use super::stream::Stream;

/// Hang-ups fetched at a time.
const BATCH_LEN: usize = 64;

/// Watches sockets for hang-ups: a close, a half-close, a reset, or a peer that has vanished.
#[derive(Debug)]
pub struct HangupWatch {
    epoll: OwnedFd,
}

impl HangupWatch {
    /// A watch over no socket yet.
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        Ok(HangupWatch { epoll })
    }

    /// Watches one more socket under the number `id`. A hang-up that has come already counts.
    pub fn watch(&self, stream: &Stream, id: u64) -> io::Result<()> {
        let events = EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR | EventFlags::ET;
        epoll::add(&self.epoll, stream, EventData::new_u64(id), events)?;
        Ok(())
    }

    /// Calls `report` with the number of each connection whose peer hangs up, once or more often,
    /// until the watch itself fails.
    pub fn run(&self, mut report: impl FnMut(u64)) -> io::Error {
        let empty = Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        };
        let mut events = [empty; BATCH_LEN];
        loop {
            match epoll::wait(&self.epoll, &mut events[..], None) {
                Ok(count) => {
                    for event in &events[..count] {
                        let data = event.data;
                        report(data.u64());
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return error.into(),
            }
        }
    }
}
