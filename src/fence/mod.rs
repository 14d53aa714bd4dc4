//! Token generation: rising fences, and random salts that no client can guess.

pub mod allocator;
pub(crate) mod file;
pub mod range;
pub mod source;
