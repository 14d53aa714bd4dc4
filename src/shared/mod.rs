//! What two programs or more use.

pub(crate) mod cli;
pub(crate) mod daemon;
pub(crate) mod log;
pub(crate) mod net;
pub mod supervise;
