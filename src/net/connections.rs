//! The open connections: how many there may be, and how to reach them all at the end.

use std::collections::HashMap;
use std::net::Shutdown;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::stream::Stream;

/// All open connections, with a cap on their number.
#[derive(Debug)]
pub struct Connections {
    max_connections: usize,
    open: Mutex<Open>,
    one_closed: Condvar,
}

#[derive(Debug)]
struct Open {
    last_id: u64,
    streams: HashMap<u64, Arc<Stream>>,
}

/// A connection's place under the cap; dropping it frees the place.
#[derive(Debug)]
pub struct Admission {
    connections: Arc<Connections>,
    id: u64,
    stream: Arc<Stream>,
}

impl Connections {
    /// No connection yet, and never more than `max_connections` at once.
    pub fn new(max_connections: usize) -> Self {
        Connections {
            max_connections,
            open: Mutex::new(Open {
                last_id: 0,
                streams: HashMap::new(),
            }),
            one_closed: Condvar::new(),
        }
    }

    /// Gives a connection a number and a place; `None` if no place is free.
    pub fn admit(self: &Arc<Self>, stream: Stream) -> Option<Admission> {
        let mut open = self.open.lock();
        if open.streams.len() >= self.max_connections {
            return None;
        }
        open.last_id += 1;
        let id = open.last_id;
        let stream = Arc::new(stream);
        open.streams.insert(id, Arc::clone(&stream));
        Some(Admission {
            connections: Arc::clone(self),
            id,
            stream,
        })
    }

    /// How many connections are open.
    pub fn count(&self) -> usize {
        self.open.lock().streams.len()
    }

    /// Ends one or both directions of every connection.
    pub fn shut_down_all(&self, how: Shutdown) {
        for stream in self.open.lock().streams.values() {
            stream.shutdown(how);
        }
    }

    /// Blocks until no connection is open, for at most `limit`.
    pub fn wait_until_none(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut open = self.open.lock();
        while !open.streams.is_empty() {
            if self.one_closed.wait_until(&mut open, deadline).timed_out() {
                return;
            }
        }
    }
}

impl Admission {
    /// The connection's number: from 1 up, never used twice.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The connection's socket.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.connections.open.lock().streams.remove(&self.id);
        self.connections.one_closed.notify_all();
    }
}
