//! The system, without a protocol: directories, processes, systemd.

pub mod directory;
pub mod notify;
pub mod process;
