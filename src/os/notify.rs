//! Reports the server's state to systemd. This is sd_notify(3) without its library.

use std::env;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::process;
use std::time::Duration;

/// Sends `state` (lines of `NAME=value`) to the socket that NOTIFY_SOCKET names, if that variable
/// is set. Does not block, because a supervisor that does not read must not hold up the server.
pub fn notify(state: &str) -> io::Result<()> {
    let Some(path) = env::var_os("NOTIFY_SOCKET").filter(|path| !path.is_empty()) else {
        return Ok(());
    };
    // The value is a path, or `@` and a name in the abstract namespace.
    let address = match path.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(&path)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    socket.send_to_addr(state.as_bytes(), &address).map(drop)
}

/// How often to send `WATCHDOG=1`: twice in the time after which the supervisor takes this process
/// for stuck. `None` if there is no such time, or if it is meant for another process.
pub fn watchdog_interval() -> Option<Duration> {
    interval_of(|name| env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
}

/// The interval by the variables that `lookup` knows, as sd_watchdog_enabled(3) reads them.
fn interval_of(lookup: impl Fn(&str) -> Option<String>) -> Option<Duration> {
    let is_ours = match lookup("WATCHDOG_PID") {
        Some(pid) => pid.parse() == Ok(process::id()),
        None => true,
    };
    let patience: u64 = lookup("WATCHDOG_USEC")?.parse().ok()?;
    let is_limited = (1..u64::MAX).contains(&patience);
    (is_ours && is_limited).then(|| Duration::from_micros(patience) / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_watchdog_is_for_the_process_that_it_names() {
        let interval = |usec: Option<&str>, pid: Option<&str>| {
            interval_of(|name| {
                let value = if name == "WATCHDOG_PID" { pid } else { usec };
                value.map(str::to_owned)
            })
        };
        let (own, second) = (process::id().to_string(), Some(Duration::from_secs(1)));
        assert_eq!(interval(Some("2000000"), None), second);
        assert_eq!(interval(Some("2000000"), Some(&own)), second);
        for pid in ["1", "", "x", "-1", "99999999999"] {
            assert_eq!(interval(Some("2000000"), Some(pid)), None, "{pid}");
        }
        for usec in [
            None,
            Some(""),
            Some("0"),
            Some("-1"),
            Some("1s"),
            Some("18446744073709551615"),
        ] {
            assert_eq!(interval(usec, None), None, "{usec:?}");
        }
    }
}
