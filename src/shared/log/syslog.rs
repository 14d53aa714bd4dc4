//! Messages to the syslog of this host (RFC 3164). They have no time, because the RFC lets the
//! receiver add it, and the receiver knows the time zone.

use std::fmt::Display;
use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process;
use std::time::Duration;

use log::Level;

/// The socket at which the syslog of a host receives messages.
pub const SOCKET: &str = "/dev/log";

/// The facility "daemon", shifted to its place above the severity.
const DAEMON: u8 = 3 << 3;

/// How long a message waits for room in the socket of the syslog.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// Reports why `program` fails, with the severity "error". Waits for at most a second. If no syslog
/// receives the report, it is lost.
pub fn report(program: &str, reason: impl Display) {
    if let Ok(syslog) = Syslog::new(SOCKET) {
        let _ = syslog.send(format!("{}{reason}", header(program, Level::Error)).as_bytes());
    }
}

/// The beginning of a message of `program`: priority, name and process number.
pub fn header(program: &str, level: Level) -> String {
    let severity = match level {
        Level::Error => 3,
        Level::Warn => 4,
        Level::Info => 6,
        Level::Debug | Level::Trace => 7,
    };
    format!("<{}>{program}[{}]: ", DAEMON + severity, process::id())
}

/// A socket for messages to the syslog. It is not connected, so the syslog may be restarted at any
/// time.
pub struct Syslog {
    socket: UnixDatagram,
    receiver: PathBuf,
}

impl Syslog {
    pub fn new(receiver: impl Into<PathBuf>) -> io::Result<Syslog> {
        let socket = UnixDatagram::unbound()?;
        socket.set_write_timeout(Some(SEND_TIMEOUT))?;
        let receiver = receiver.into();
        Ok(Syslog { socket, receiver })
    }

    /// Sends one message, which includes its header. Waits for at most a second.
    pub fn send(&self, message: &[u8]) -> io::Result<()> {
        self.socket.send_to(message, &self.receiver).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::short_directory;
    use std::time::Instant;

    #[test]
    fn a_message_begins_with_its_priority_and_the_process() {
        let pid = process::id();
        for (level, priority) in [
            (Level::Error, 27),
            (Level::Warn, 28),
            (Level::Info, 30),
            (Level::Debug, 31),
        ] {
            let expected = format!("<{priority}>latchd[{pid}]: ");
            assert_eq!(header("latchd", level), expected);
        }
    }

    #[test]
    fn a_syslog_that_starts_later_receives_messages() {
        let directory = short_directory();
        let path = directory.path().join("log");
        let syslog = Syslog::new(&path).expect("a socket");
        assert!(syslog.send(b"too early").is_err());

        let receiver = UnixDatagram::bind(&path).expect("there is room");
        syslog.send(b"in time").expect("it is received");
        let mut message = [0; 64];
        let len = receiver.recv(&mut message).expect("it was sent");
        assert_eq!(&message[..len], b"in time");
    }

    #[test]
    fn a_syslog_that_reads_nothing_is_given_up_on() {
        let directory = short_directory();
        let path = directory.path().join("log");
        let _receiver = UnixDatagram::bind(&path).expect("there is room");
        let syslog = Syslog::new(&path).expect("a socket");
        let started = Instant::now();
        assert!((0..100_000).any(|_| syslog.send(b"x").is_err()));
        assert!(started.elapsed() < 20 * SEND_TIMEOUT);
    }
}
