//! The latch protocol: see latch-protocol(7). Pure functions that convert between lines and values,
//! for server and client.

pub mod abilities;
pub mod limits;
pub mod reply;
pub mod request;
pub mod terms;
pub mod token;

#[cfg(all(test, feature = "programs"))]
mod tests;
