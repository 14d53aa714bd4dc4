//! What the programs need of the system: directories, processes, threads, systemd's notifications.

pub mod directory;
#[cfg(feature = "programs")]
pub mod memory;
#[cfg(feature = "programs")]
pub mod notify;
pub mod process;
#[cfg(feature = "programs")]
pub mod thread;
