//! Where tokens come from: fences that rise, and salts that no client can guess.

pub mod file;
pub mod mint;
