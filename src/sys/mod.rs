//! What the programs need of the system: directories, processes, threads, systemd's notifications.

pub mod directory;
pub mod event;
pub mod memory;
pub mod notify;
pub mod process;
pub mod thread;
