//! The parts that the programs' command lines have in common.

pub mod arguments;
pub mod environment;
pub mod failure;
pub mod help;
pub mod options;
pub mod rows;
pub mod values;
pub mod waiting;
pub mod words;
