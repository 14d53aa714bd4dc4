//! The options of `lfpd`: each in one row, with its type and its default.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use super::peer::PeerRule;
use crate::shared::cli::arguments::{self, FromRows, Parsed};
use crate::shared::cli::options::options;
use crate::shared::cli::rows::{Bond, Program, Rule};
use crate::shared::cli::values;
use crate::shared::log::{self, LogRules, LogTarget, Timestamps};

const LOCK_DIR: &str = "/var/lock";

/// The directories that are searched for lock files by default, in addition to the lock directory.
const SEARCH_DIRS: &str = "/etc/locks:/usr/spool/kermit:/usr/spool/locks:/usr/spool/uucp:\
    /usr/spool/uucp/LCK:/var/lock:/var/lock/modem:/var/spool/lock:/var/spool/locks:/var/spool/uucp:\
    /var/lock/lockdev";

/// The address at which clients of the protocol look for a server.
const USUAL_ADDRESS: &str = "127.0.0.1:50001";

const FIVE_MINUTES: Duration = Duration::from_secs(300);

options! {
    /// Lock files of serial devices for programs that cannot make them: the Lock File Protocol.
    pub(super) struct Options {
        /// serve the socket on descriptor 0, connected or listening (the default)
        inetd: bool,
        /// serve standard input and output, whatever they are
        stdio: bool,
        /// listen on an address of the loopback interface (127.0.0.1:50001); repeat for several
        listen: Vec<SocketAddr> ("address", loopback_address)
            alone (USUAL_ADDRESS, |next| !next.starts_with('-')),
        /// listen on a Unix socket
        unix: Option<PathBuf> ("path", values::path),
        /// make lock files in this directory (/var/lock)
        lock_dir: PathBuf ("path", values::path) else (LOCK_DIR.into()),
        /// respect lock files in these directories, too, separated by colons (the usual places)
        search_dirs: String ("paths") else (SEARCH_DIRS.into()),
        /// choose what happens when a client names another user's process: enforce, log or off
        /// (enforce)
        peer_uid: PeerRule ("rule", peer_rule) else (PeerRule::Enforce),
        /// refuse locks for processes that do not exist
        require_live_pid: bool,
        /// limit the time for each command to arrive (300)
        idle_timeout: Duration ("time", |text| values::seconds(text, 1..=1_000_000))
            else FIVE_MINUTES,
        /// limit the number of connections (256)
        max_connections: usize ("count", |text| values::number(text, 1..=65_536)) else 256,
        /// print the bound port on stdout once listening
        print_port: bool,
        /// write the log to stderr or syslog (stderr)
        log: Option<LogTarget> ("where", LogTarget::parse),
        /// append the log to this file, and open it again at SIGHUP
        log_file: Option<PathBuf> ("path", values::path),
        /// log connections, locks and unlocks
        debug: bool,
    }
}

/// What the program takes on its command line.
pub const SELF: Program = Program {
    rules: RULES,
    ..Program::plain(super::PROGRAM, Options::COMMAND, "lfpd(8)")
};

#[rustfmt::skip]
const RULES: &[Rule] = &[
    (&["--print-port"], Bond::Needs("there is no port without --listen"), &["--listen"]),
    (&["--log-file"], Bond::Excludes, &["--log"]),
    (&["--stdio"], Bond::Excludes, &["--inetd"]),
];

pub(super) fn read(arguments: impl Iterator<Item = OsString>) -> Parsed<Options> {
    arguments::parse(&SELF, arguments)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnectionSource {
    /// The sockets that LISTEN_FDS names.
    Environment,
    /// The socket on descriptor 0, listening or connected.
    Inetd,
    /// Descriptors 0 and 1 are the connection.
    Stdio,
    /// The sockets that the server binds for `--listen` and `--unix`.
    Bound,
}

impl Options {
    /// Where connections come from. `inherits` is whether LISTEN_FDS names sockets for this
    /// process.
    pub(super) fn source(&self, inherits: bool) -> Result<ConnectionSource, String> {
        let binds = !self.listen.is_empty() || self.unix.is_some();
        match (self.stdio, binds) {
            (true, true) => Err("--stdio: cannot be given together with an address".into()),
            (_, true) if self.inetd => {
                Err("--inetd: cannot be given together with an address".into())
            }
            (true, _) => Ok(ConnectionSource::Stdio),
            (_, true) if inherits => Err("--listen, --unix: the sockets are inherited".into()),
            (_, true) => Ok(ConnectionSource::Bound),
            (_, false) if inherits => Ok(ConnectionSource::Environment),
            (_, false) => Ok(ConnectionSource::Inetd),
        }
    }

    /// The directories in which the server respects the locks of other programs.
    pub(super) fn search_dirs(&self) -> Vec<PathBuf> {
        let dirs = self.search_dirs.split(':').filter(|dir| !dir.is_empty());
        dirs.map(PathBuf::from).collect()
    }

    /// Returns the rules for the log. They depend on RUST_LOG, too.
    pub(super) fn log(&self, rust_log: Option<OsString>) -> Result<LogRules, String> {
        Ok(LogRules {
            directives: log::directives(self.debug, rust_log)?,
            timestamps: Timestamps::Auto,
            target: LogTarget::of_options(self.log.as_ref(), self.log_file.as_deref()),
        })
    }
}

/// Parses an address and a port, or a port alone. The address must be one of the loopback
/// interface, so that only this host can reach the server.
fn loopback_address(text: &str) -> Result<SocketAddr, String> {
    let local = |port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let on_localhost = |port| values::digits(port).map(local);
    let address = match text.strip_prefix("localhost:") {
        Some(port) => on_localhost(port),
        None => text.parse().ok().or_else(|| on_localhost(text)),
    };
    let address = address.ok_or("expected ADDRESS:PORT or PORT")?;
    if address.ip().is_loopback() {
        Ok(address)
    } else {
        Err("expected an address of the loopback interface".into())
    }
}

fn peer_rule(text: &str) -> Result<PeerRule, String> {
    let all = [
        ("enforce", PeerRule::Enforce),
        ("log", PeerRule::Log),
        ("off", PeerRule::Off),
    ];
    values::choice(text, all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(arguments: &[&str]) -> Result<Options, String> {
        match read(arguments.iter().map(OsString::from)) {
            Parsed::Run(options) => Ok(options),
            Parsed::Usage(reason) => Err(reason),
            Parsed::Print(text) => panic!("{text}"),
        }
    }

    fn source(arguments: &[&str], inherits: bool) -> Result<ConnectionSource, String> {
        options(arguments)?.source(inherits)
    }

    fn bound(listen: &str) -> Result<String, String> {
        let options = options(&["--listen", listen])?;
        assert_eq!(
            (options.source(false)?, &options.unix),
            (ConnectionSource::Bound, &None)
        );
        Ok(options.listen[0].to_string())
    }

    #[test]
    fn without_options_descriptor_0_decides() {
        let options = options(&[]).expect("fine");
        assert_eq!(options.source(false), Ok(ConnectionSource::Inetd));
        assert_eq!(options.lock_dir, PathBuf::from("/var/lock"));
        assert_eq!(options.search_dirs().len(), 11);
        assert_eq!(options.peer_uid, PeerRule::Enforce);
        assert_eq!(options.idle_timeout, Duration::from_secs(300));
        assert_eq!(options.max_connections, 256);
        assert_eq!(options.source(true), Ok(ConnectionSource::Environment));
    }

    #[test]
    fn only_the_loopback_interface_is_listened_on() {
        for (text, address) in [
            ("50001", "127.0.0.1:50001"),
            ("0", "127.0.0.1:0"),
            ("localhost:7", "127.0.0.1:7"),
            ("127.0.0.1:50001", "127.0.0.1:50001"),
            ("127.1.2.3:1", "127.1.2.3:1"),
            ("[::1]:50001", "[::1]:50001"),
        ] {
            assert_eq!(bound(text).as_deref(), Ok(address));
        }
        for text in [
            "",
            ":50001",
            "65536",
            "+1",
            "0.0.0.0:50001",
            "[::]:50001",
            "192.0.2.1:50001",
            "example.org:50001",
            "127.0.0.1",
            "[::ffff:127.0.0.1]:1",
        ] {
            assert!(bound(text).is_err(), "{text}");
        }
    }

    #[test]
    fn listen_without_an_address_takes_the_usual_one() {
        for (given, expected) in [
            (&["--listen"][..], USUAL_ADDRESS),
            (&["--listen", "--debug"], USUAL_ADDRESS),
            (&["--listen", "7"], "127.0.0.1:7"),
            (&["--listen=7", "--debug"], "127.0.0.1:7"),
        ] {
            let options = options(given).expect("fine");
            assert_eq!(options.listen[0].to_string(), expected, "{given:?}");
            assert_eq!(options.debug, given.contains(&"--debug"));
        }
    }

    #[test]
    fn there_is_one_source_of_connections() {
        for arguments in [
            &["--inetd", "--stdio"][..],
            &["--inetd", "--listen=50001"],
            &["--stdio", "--listen=50001"],
            &["--print-port"],
        ] {
            assert!(source(arguments, false).is_err(), "{arguments:?}");
        }
        assert!(source(&["--listen=50001"], true).is_err());
        assert_eq!(source(&["--stdio"], true), Ok(ConnectionSource::Stdio));
    }

    #[test]
    fn words_of_other_servers_are_answered_with_ours() {
        for (word, expected) in [
            (
                "--bind=0.0.0.0",
                "unknown option: --bind; use --listen ADDRESS:PORT",
            ),
            (
                "-d",
                "unknown option: -d; lfpd stays in the foreground; have inetd, systemd or another \
                 supervisor start it",
            ),
            (
                "50001",
                "unexpected argument: 50001; lfpd takes options only",
            ),
        ] {
            assert_eq!(options(&[word]).expect_err("not ours"), expected);
        }
    }

    #[test]
    fn bad_values_are_named_with_their_option() {
        assert_eq!(
            options(&["--peer-uid", "maybe"]).expect_err("bad"),
            "invalid value 'maybe' for --peer-uid: expected enforce, log or off"
        );
        for value in ["0", "-1", "", "1y", "500ms", "99999999999"] {
            let message = options(&["--idle-timeout", value]).expect_err("bad");
            assert!(message.contains(" for --idle-timeout: "), "{message}");
        }
        assert!(options(&["--idle-timeout", "5m"]).is_ok());
    }
}
