//! System services: directories, secrets, processes, random numbers, threads,
//! time, and systemd's notifications.

// The libraries need only parts of these modules.
#![cfg_attr(not(feature = "programs"), allow(dead_code))]

pub mod backoff;
pub mod clock;
pub mod deadline;
pub mod directory;
pub mod event;
#[cfg(feature = "cluster")]
pub mod exec;
#[cfg(feature = "programs")]
pub mod file_locks;
pub mod lookups;
pub mod memory;
pub mod moment;
#[cfg(feature = "programs")]
pub mod notify;
#[cfg(feature = "programs")]
pub mod operator_socket;
pub mod process;
pub mod random;
pub mod secret;
#[cfg(feature = "programs")]
pub mod thread;
pub mod trusted;
pub mod user;

/// A directory for a test, whose path is short enough for sockets in it, wherever TMPDIR is.
#[cfg(test)]
pub fn short_directory() -> tempfile::TempDir {
    const MAX_LEN: usize = 60;
    let usual = std::env::temp_dir();
    let is_short = usual.as_os_str().len() <= MAX_LEN;
    let place = if is_short { usual } else { "/tmp".into() };
    tempfile::tempdir_in(place).expect("a directory")
}

/// Whether `holds` becomes true within half a minute. Looks every millisecond.
#[cfg(test)]
pub fn is_soon(mut holds: impl FnMut() -> bool) -> bool {
    let began = std::time::Instant::now();
    while !holds() {
        if began.elapsed() > std::time::Duration::from_secs(30) {
            return false;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    true
}
