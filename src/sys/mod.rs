//! What the programs need of the system: directories, secrets, processes, threads, time, and
//! systemd's notifications.

pub mod directory;
pub mod event;
#[cfg(feature = "programs")]
pub mod exec;
#[cfg(any(feature = "programs", feature = "tls"))]
pub mod memory;
pub mod moment;
#[cfg(feature = "programs")]
pub mod notify;
#[cfg(feature = "programs")]
pub mod operator_socket;
pub mod process;
pub mod secret;
#[cfg(feature = "programs")]
pub mod thread;
