//! The latch protocol: latch-protocol(7). Pure functions between lines and values, for server and
//! client.

pub mod abilities;
#[cfg(feature = "programs")]
pub mod counters;
pub mod limits;
#[cfg(feature = "programs")]
pub mod metrics;
#[cfg(feature = "programs")]
pub mod queues;
pub mod reply;
pub mod request;
#[cfg(feature = "programs")]
pub mod stats;

#[cfg(test)]
mod tests;
