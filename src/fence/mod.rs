//! Where tokens come from: fences that rise, and salts that no client can guess.

pub mod allocator;
pub(crate) mod file;
pub mod source;
