//! The parts that the programs' command lines have in common.

pub mod arguments;
pub mod failure;
pub mod help;
pub mod locks_around;
pub mod output;
pub mod rows;
pub mod service_links;
pub mod values;
pub mod waiting;
pub mod words;
