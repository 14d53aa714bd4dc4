//! The wire protocol of `latchd`: latch-protocol(7).
//!
//! `request` and `reply` are pure functions between lines and values; `session` is the blocking
//! conversation over one connection.

mod phases;
mod reply;
mod request;
mod session;
mod stats;

pub use session::{serve, SessionRules};
