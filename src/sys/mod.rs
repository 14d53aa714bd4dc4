//! What the programs need of the system: directories, secrets, processes, threads, time, and
//! systemd's notifications.

pub mod directory;
pub mod event;
pub mod memory;
pub mod moment;
pub mod notify;
pub mod process;
pub mod secret;
pub mod thread;
