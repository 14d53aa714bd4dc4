//! Token generation: rising fences, and salts that no client can guess.

pub mod allocator;
pub(crate) mod file;
pub mod source;
