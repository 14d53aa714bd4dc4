//! A syslog of the test's own, at /dev/log in a mount namespace.

use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::Duration;
use std::{fs, str};

use super::needs::skipped;
use super::PATIENCE;

/// A directory in the place of /dev, and the socket `log` in it.
pub struct Syslog {
    directory: tempfile::TempDir,
    socket: UnixDatagram,
}

impl Syslog {
    /// Opens the socket; `None`, with a note, if this process may not mount.
    pub fn new() -> Option<Syslog> {
        let directory = tempfile::tempdir().expect("there is room");
        let path = directory.path().join("log");
        let socket = UnixDatagram::bind(&path).expect("there is room");
        fs::create_dir(directory.path().join("shm")).expect("there is room");
        // Servers may be other users.
        for (path, mode) in [(directory.path(), 0o755), (&path, 0o666)] {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("it is ours");
        }
        let syslog = Syslog { directory, socket };
        let probe = syslog.reached_by(&Command::new("true")).output();
        if !probe.is_ok_and(|probe| probe.status.success()) {
            skipped(&["mount namespace"]);
            return None;
        }
        Some(syslog)
    }

    /// The command `of` where /dev/log is this syslog. Its descriptors are to be set anew.
    pub fn reached_by(&self, of: &Command) -> Command {
        // Temporary files may be in /dev/shm.
        const SCRIPT: &str = r#"
            [ ! -d /dev/shm ] || mount --bind /dev/shm "$0/shm" || exit
            mount --rbind "$0" /dev && exec "$@"
        "#;
        let mut command = Command::new("unshare");
        command
            .args(["-m", "sh", "-c", SCRIPT])
            .arg(self.directory.path())
            .arg(of.get_program())
            .args(of.get_args());
        for (name, value) in of.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    }

    /// The next message.
    pub fn next(&self) -> String {
        self.next_within(PATIENCE).expect("a message comes")
    }

    /// The next message; `None` if none comes within `limit`.
    pub fn next_within(&self, limit: Duration) -> Option<String> {
        self.socket
            .set_read_timeout(Some(limit))
            .expect("the limit is not zero");
        let mut message = [0; 4096];
        loop {
            match self.socket.recv(&mut message) {
                Ok(len) => {
                    let message = str::from_utf8(&message[..len]).expect("a log is ASCII");
                    return Some(message.to_owned());
                }
                // A read with a timeout is not restarted after a signal.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return None,
            }
        }
    }
}
