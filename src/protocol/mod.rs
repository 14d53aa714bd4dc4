//! The latch protocol: latch-protocol(7). Pure functions between lines and values.

pub mod reply;
pub mod request;
#[cfg(feature = "programs")]
pub mod stats;
