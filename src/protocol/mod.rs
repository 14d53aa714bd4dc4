//! The latch protocol: see latch-protocol(7). Pure functions that convert between lines and values,
//! for server and client.

pub mod abilities;
#[cfg(feature = "programs")]
pub mod counters;
#[cfg(feature = "programs")]
pub mod histories;
pub mod limits;
#[cfg(feature = "programs")]
pub mod metrics;
#[cfg(feature = "programs")]
pub mod queues;
#[cfg(feature = "programs")]
pub mod record;
pub mod reply;
pub mod request;
#[cfg(feature = "programs")]
pub mod stats;

#[cfg(all(test, feature = "programs"))]
mod tests;
