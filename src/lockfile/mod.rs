//! Lock files.

pub(crate) mod process;
