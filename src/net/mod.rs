//! Sockets: binding, accepting, reading lines within bounds, noticing peers that have gone away.
//!
//! **Invariant:** nothing here knows a protocol's words or the table.

pub mod connections;
pub mod hangup;
pub mod inherited;
pub mod lines;
pub mod listener;
pub mod stream;
mod telnet;
pub mod unix_path;
pub mod workers;
