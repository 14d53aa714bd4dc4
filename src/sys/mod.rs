//! System services for the programs: directories, secrets, processes, random numbers, threads,
//! time, and systemd's notifications.

pub mod clock;
pub mod directory;
pub mod event;
#[cfg(feature = "cluster")]
pub mod exec;
pub mod file_locks;
pub mod lookups;
pub mod memory;
pub mod moment;
pub mod notify;
pub mod operator_socket;
pub mod process;
pub mod random;
pub mod secret;
pub mod thread;
pub mod trusted;
