//! The latch protocol over a connection: its opening, its session, and how requests are carried
//! out.

pub mod connection;
pub mod ending;
pub mod hangups;
pub mod opening;
pub mod requests;
pub mod session;
