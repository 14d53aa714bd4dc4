//! System services: directories, secrets, processes, random numbers, threads,
//! time, and systemd's notifications.

pub mod backoff;
pub mod base64;
pub mod directory;
pub mod event;
pub mod exec;
pub mod file_locks;
pub mod lookups;
pub mod memory;
pub mod moment;
pub mod names;
pub mod notify;
pub mod operator_socket;
pub mod output;
pub mod process;
pub mod random;
pub mod secret;
pub mod stream;
pub mod text;
pub mod thread;
#[cfg_attr(not(feature = "tls"), path = "tls/absent.rs")]
pub mod tls;
pub mod trusted;
pub mod write;

#[cfg(test)]
pub use tests::{is_soon, short_directory};

/// Whether the same call may succeed later: other threads are using the directory, or no descriptor
/// or memory is left at the moment.
pub fn is_temporary(error: &std::io::Error) -> bool {
    use rustix::io::Errno;
    let code = Errno::from_io_error(error);
    matches!(code, Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM))
        || error.kind() == std::io::ErrorKind::WouldBlock
}

#[cfg(test)]
mod tests {
    /// A directory for a test, whose path is short enough for sockets in it, wherever TMPDIR is.
    pub fn short_directory() -> tempfile::TempDir {
        const MAX_LEN: usize = 60;
        let usual = std::env::temp_dir();
        let is_short = usual.as_os_str().len() <= MAX_LEN;
        let place = if is_short { usual } else { "/tmp".into() };
        tempfile::tempdir_in(place).expect("a directory")
    }

    /// Whether `holds` becomes true within half a minute. Looks every millisecond.
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
}
