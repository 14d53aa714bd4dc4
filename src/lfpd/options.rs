//! The options of `lfpd`: what the command line says, made into typed values.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use argh::FromArgs;

use super::peer::PeerRule;
use crate::log::{LogRules, Timestamps};
use crate::text::Escaped;

/// Where lock files are looked for beside our own directory.
const SEARCH_DIRS: &str = "/etc/locks:/usr/spool/kermit:/usr/spool/locks:/usr/spool/uucp:\
    /usr/spool/uucp/LCK:/var/lock:/var/lock/modem:/var/spool/lock:/var/spool/locks:/var/spool/uucp:\
    /var/lock/lockdev";

/// Where clients of the protocol look for a server.
const USUAL_ADDRESS: &str = "127.0.0.1:50001";

/// The options that need no value.
pub(super) const BOOLEANS: [&str; 6] = [
    "--inetd",
    "--stdio",
    "--require-live-pid",
    "--chown",
    "--print-port",
    "--debug",
];

/// Lock files of serial devices for programs that cannot make them: the Lock File Protocol.
#[derive(FromArgs, Debug, Default)]
pub(super) struct Flags {
    /// serve the socket on descriptor 0, be it connected or listening (without other options)
    #[argh(option, arg_name = "bool")]
    inetd: Option<String>,
    /// serve standard input and output, whatever they are
    #[argh(option, arg_name = "bool")]
    stdio: Option<String>,
    /// listen on an address of the loopback interface (127.0.0.1:50001); repeat for several
    #[argh(option, arg_name = "address")]
    listen: Vec<String>,
    /// listen on a Unix socket
    #[argh(option, arg_name = "path")]
    unix: Option<String>,
    /// where lock files are made (/var/lock)
    #[argh(option, arg_name = "path")]
    lock_dir: Option<String>,
    /// where else lock files are respected, with colons between (the usual places)
    #[argh(option, arg_name = "paths")]
    search_dirs: Option<String>,
    /// what to do about those who ask for the process of another user: enforce, log or off (enforce)
    #[argh(option, arg_name = "rule")]
    peer_uid: Option<String>,
    /// refuse locks for processes that are not there
    #[argh(option, arg_name = "bool")]
    require_live_pid: Option<String>,
    /// give lock files to the user whose process holds them
    #[argh(option, arg_name = "bool")]
    chown: Option<String>,
    /// how long a command may take to arrive, in seconds (300)
    #[argh(option, arg_name = "seconds")]
    idle_timeout: Option<String>,
    /// the most connections at once (256)
    #[argh(option, arg_name = "count")]
    max_connections: Option<String>,
    /// print the bound port on stdout once listening
    #[argh(option, arg_name = "bool")]
    print_port: Option<String>,
    /// log connections, locks and unlocks
    #[argh(option, arg_name = "bool")]
    debug: Option<String>,
}

/// Gives `--listen` without an address the one where clients look.
pub(super) fn with_the_usual_address(
    arguments: impl Iterator<Item = OsString>,
) -> impl Iterator<Item = OsString> {
    let mut arguments = arguments.peekable();
    std::iter::from_fn(move || {
        let argument = arguments.next()?;
        let has_value = |next: &OsString| !next.as_encoded_bytes().starts_with(b"-");
        if argument == "--listen" && !arguments.peek().is_some_and(has_value) {
            return Some(format!("--listen={USUAL_ADDRESS}").into());
        }
        Some(argument)
    })
}

/// What lfpd has been told.
#[derive(Debug)]
pub(super) struct Options {
    pub(super) source: Source,
    pub(super) lock_dir: PathBuf,
    pub(super) search_dirs: Vec<PathBuf>,
    pub(super) peer_rule: PeerRule,
    pub(super) require_live_pid: bool,
    pub(super) chown: bool,
    pub(super) idle_timeout: Duration,
    pub(super) max_connections: usize,
    pub(super) print_port: bool,
    pub(super) log: LogRules,
}

/// Where connections come from.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// LISTEN_FDS names sockets that listen already.
    Environment,
    /// Whatever socket is on descriptor 0.
    Inetd,
    /// Descriptors 0 and 1 are the connection.
    Stdio,
    /// We bind these, at least one of them.
    Bound {
        tcp: Vec<SocketAddr>,
        unix: Option<PathBuf>,
    },
}

impl Options {
    /// Makes sense of the flags. `inherits` says that LISTEN_FDS names sockets for us.
    ///
    /// # Errors
    ///
    /// One line that names the option and says what is wrong with it.
    pub(super) fn new(flags: Flags, inherits: bool) -> Result<Options, String> {
        let print_port = boolean("--print-port", flags.print_port)?;
        let source = source(
            boolean("--inetd", flags.inetd)?,
            boolean("--stdio", flags.stdio)?,
            &flags.listen,
            flags.unix,
            inherits,
        )?;
        let has_port = matches!(&source, Source::Bound { tcp, .. } if !tcp.is_empty());
        if print_port && !has_port {
            return Err("--print-port: there is no port without --listen".into());
        }
        let search_dirs = flags.search_dirs.as_deref().unwrap_or(SEARCH_DIRS);
        Ok(Options {
            source,
            lock_dir: path("--lock-dir", flags.lock_dir)?.unwrap_or_else(|| "/var/lock".into()),
            search_dirs: search_dirs
                .split(':')
                .filter(|dir| !dir.is_empty())
                .map(PathBuf::from)
                .collect(),
            peer_rule: peer_rule(flags.peer_uid)?,
            require_live_pid: boolean("--require-live-pid", flags.require_live_pid)?,
            chown: boolean("--chown", flags.chown)?,
            idle_timeout: Duration::from_secs(
                number("--idle-timeout", flags.idle_timeout, 300, 1_000_000)?.into(),
            ),
            max_connections: number("--max-connections", flags.max_connections, 256, 65_536)?
                .try_into()
                .unwrap_or(usize::MAX),
            print_port,
            log: LogRules {
                debug: boolean("--debug", flags.debug)?,
                timestamps: Timestamps::Auto,
            },
        })
    }
}

fn source(
    is_inetd: bool,
    is_stdio: bool,
    listen: &[String],
    unix: Option<String>,
    inherits: bool,
) -> Result<Source, String> {
    let binds = !listen.is_empty() || unix.is_some();
    match (is_inetd, is_stdio, binds) {
        (true, true, _) => return Err("--stdio: cannot be given together with --inetd".into()),
        (true, _, true) => return Err("--inetd: cannot be given together with an address".into()),
        (_, true, true) => return Err("--stdio: cannot be given together with an address".into()),
        (_, true, false) => return Ok(Source::Stdio),
        (_, false, true) if inherits => {
            return Err("--listen, --unix: the sockets are inherited".into())
        }
        (_, false, false) if inherits => return Ok(Source::Environment),
        (_, false, false) => return Ok(Source::Inetd),
        (false, false, true) => {}
    }
    let tcp = listen.iter().map(|text| loopback_address(text));
    Ok(Source::Bound {
        tcp: tcp.collect::<Result<_, _>>()?,
        unix: path("--unix", unix)?,
    })
}

/// An address and a port, or a port alone. Whoever is not on this host must not be heard.
fn loopback_address(text: &str) -> Result<SocketAddr, String> {
    let on_localhost = |port: &str| {
        let port = port
            .bytes()
            .all(|byte| byte.is_ascii_digit())
            .then_some(port)?;
        let port = port.parse().ok()?;
        Some(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
    };
    let address = match text.strip_prefix("localhost:") {
        Some(port) => on_localhost(port),
        None => text.parse().ok().or_else(|| on_localhost(text)),
    };
    let address = address.ok_or_else(|| bad("--listen", "ADDRESS:PORT or PORT", text))?;
    let is_loopback = match address.ip() {
        IpAddr::V4(ip) => ip.is_loopback(),
        IpAddr::V6(ip) => ip.is_loopback(),
    };
    if !is_loopback {
        return Err(bad(
            "--listen",
            "an address of the loopback interface",
            text,
        ));
    }
    Ok(address)
}

fn peer_rule(given: Option<String>) -> Result<PeerRule, String> {
    match given.as_deref() {
        None | Some("enforce") => Ok(PeerRule::Enforce),
        Some("log") => Ok(PeerRule::Log),
        Some("off") => Ok(PeerRule::Off),
        Some(other) => Err(bad("--peer-uid", "enforce, log or off", other)),
    }
}

fn path(option: &str, given: Option<String>) -> Result<Option<PathBuf>, String> {
    match given {
        Some(path) if path.is_empty() => Err(bad(option, "a path", &path)),
        other => Ok(other.map(PathBuf::from)),
    }
}

fn boolean(option: &str, given: Option<String>) -> Result<bool, String> {
    let Some(value) = given else { return Ok(false) };
    match value.to_ascii_lowercase().as_str() {
        "1" | "yes" | "true" => Ok(true),
        "0" | "no" | "false" => Ok(false),
        _ => Err(bad(option, "yes or no", &value)),
    }
}

/// A number from 1 to `max`.
fn number(option: &str, given: Option<String>, default: u32, max: u32) -> Result<u32, String> {
    let Some(value) = given else {
        return Ok(default);
    };
    let is_plain = value.bytes().all(|byte| byte.is_ascii_digit());
    let number = is_plain.then(|| value.parse().ok()).flatten();
    number
        .filter(|number| (1..=max).contains(number))
        .ok_or_else(|| bad(option, &format!("a number from 1 to {max}"), &value))
}

fn bad(option: &str, wanted: &str, value: &str) -> String {
    format!(
        "{option}: {wanted} is wanted, not {}",
        Escaped(value.as_bytes())
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(listen: &str) -> Result<String, String> {
        let flags = Flags {
            listen: vec![listen.into()],
            ..Flags::default()
        };
        Options::new(flags, false).map(|options| match options.source {
            Source::Bound { tcp, unix: None } => tcp[0].to_string(),
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn without_options_descriptor_0_decides() {
        let options = Options::new(Flags::default(), false).expect("fine");
        assert_eq!(options.source, Source::Inetd);
        assert_eq!(options.lock_dir, PathBuf::from("/var/lock"));
        assert_eq!(options.search_dirs.len(), 11);
        assert_eq!(options.peer_rule, PeerRule::Enforce);
        assert_eq!(options.idle_timeout, Duration::from_secs(300));
        assert_eq!(options.max_connections, 256);
        let options = Options::new(Flags::default(), true).expect("fine");
        assert_eq!(options.source, Source::Environment);
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
    fn without_an_address_the_one_of_the_clients_is_listened_on() {
        let read = |arguments: &[&str]| -> Vec<OsString> {
            with_the_usual_address(arguments.iter().map(OsString::from)).collect()
        };
        for (given, read_as) in [
            (&["--listen"][..], &["--listen=127.0.0.1:50001"][..]),
            (
                &["--listen", "--debug"],
                &["--listen=127.0.0.1:50001", "--debug"],
            ),
            (&["--listen", "7"], &["--listen", "7"]),
            (&["--listen=7", "--debug"], &["--listen=7", "--debug"]),
            (&["--unix", "x"], &["--unix", "x"]),
        ] {
            assert_eq!(read(given), read_as, "{given:?}");
        }
    }

    #[test]
    fn there_is_one_source_of_connections() {
        let yes = || Some("true".to_owned());
        let flags = |inetd, stdio, listen: &[&str]| Flags {
            inetd,
            stdio,
            listen: listen.iter().map(|text| text.to_string()).collect(),
            ..Flags::default()
        };
        for flags in [
            flags(yes(), yes(), &[]),
            flags(yes(), None, &["50001"]),
            flags(None, yes(), &["50001"]),
        ] {
            assert!(Options::new(flags, false).is_err());
        }
        assert!(Options::new(flags(None, None, &["50001"]), true).is_err());
        let options = Options::new(flags(None, yes(), &[]), true).expect("fine");
        assert_eq!(options.source, Source::Stdio);
        let no_port = Flags {
            print_port: yes(),
            ..Flags::default()
        };
        assert!(Options::new(no_port, false).is_err());
    }

    #[test]
    fn bad_values_are_named_with_their_option() {
        let flags = Flags {
            peer_uid: Some("maybe".into()),
            ..Flags::default()
        };
        assert_eq!(
            Options::new(flags, false).expect_err("bad"),
            "--peer-uid: enforce, log or off is wanted, not maybe"
        );
        for value in ["0", "-1", "", "1s", "99999999999"] {
            let flags = Flags {
                idle_timeout: Some(value.into()),
                ..Flags::default()
            };
            let message = Options::new(flags, false).expect_err("bad");
            assert!(message.starts_with("--idle-timeout: "), "{message}");
        }
    }
}
