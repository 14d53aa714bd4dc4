//! The sockets of a server: binding them, accepting connections, reading lines in bounded memory,
//! noticing hang-ups.
//!
//! **Invariant:** nothing in `net/` knows the commands of a protocol, or the table.

pub mod connections;
pub mod hangup;
pub mod inherited;
pub mod lines;
pub mod listener;
pub mod permits;
pub mod unix_path;
pub mod workers;

/// The listen backlog: the maximum number of complete connections that wait to be accepted.
const BACKLOG: i32 = 4096;
