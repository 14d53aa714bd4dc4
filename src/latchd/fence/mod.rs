//! The sources of what tokens are made of: rising fences, and random salts that no client can
//! guess. The table makes the tokens.

pub mod allocator;
pub(crate) mod format;
pub mod range;
pub mod source;
