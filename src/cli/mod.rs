//! The parts that the programs' command lines have in common.

pub mod arguments;
pub mod failure;
mod help;
pub mod locks_around;
pub mod output;
pub mod service_links;
pub mod values;
pub mod waiting;
pub mod words;
