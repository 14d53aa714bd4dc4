//! Sockets: binding them, accepting connections, reading lines in bounded memory, noticing
//! hang-ups.
//!
//! **Invariant:** nothing in `net/` knows the commands of a protocol, or the table.

#[cfg(feature = "programs")]
pub mod connections;
#[cfg(feature = "programs")]
pub mod hangup;
#[cfg(feature = "programs")]
pub mod inherited;
#[cfg(feature = "programs")]
pub mod lines;
#[cfg(feature = "programs")]
pub mod listener;
pub mod names;
#[cfg(feature = "programs")]
pub mod permits;
pub mod stream;
#[cfg_attr(not(feature = "tls"), path = "tls/absent.rs")]
pub mod tls;
#[cfg(feature = "programs")]
pub mod unix_path;
#[cfg(feature = "programs")]
pub mod workers;
pub mod write;

/// The listen backlog: the maximum number of complete connections that wait to be accepted.
#[cfg(feature = "programs")]
const BACKLOG: i32 = 4096;
