//! The latch protocol: see latch-protocol(7). Pure functions that convert between lines and values,
//! for server and client.

pub mod abilities;
pub mod counters;
pub mod limits;
pub mod metrics;
pub mod queues;
#[cfg(feature = "programs")]
pub mod record;
pub mod reply;
pub mod request;
pub mod stats;

#[cfg(test)]
mod tests;
