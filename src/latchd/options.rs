//! The options of `latchd`: what the command line and the environment say, made into typed values.
//!
//! An explicit flag comes first, then `LATCHD_<NAME>`, then `DFLOCKD_<NAME>` (so that a host can switch
//! over from dflockd), then the default. An empty variable counts as unset; a bad value that counts is
//! an error.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use argh::FromArgs;

use crate::log::{LogRules, Timestamps};
use crate::protocol::limits::MAX_SECONDS;
use crate::text::Escaped;

/// The longest auth token: a longer one could not be presented.
const MAX_AUTH_TOKEN_LEN: usize = 65_536;

/// The options that need no value.
pub(super) const BOOLEANS: [&str; 5] = [
    "--auto-release-on-disconnect",
    "--no-auto-release-on-disconnect",
    "--print-port",
    "--debug",
    "--inetd",
];

/// Locks, semaphores and leases over the network, in strict order of arrival.
#[derive(FromArgs, Debug, Default)]
pub(super) struct Flags {
    /// address to listen on, or localhost (127.0.0.1)
    #[argh(option, arg_name = "address")]
    host: Option<String>,
    /// port to listen on; 0 picks one, off listens on the Unix socket only (6388)
    #[argh(option, arg_name = "port")]
    port: Option<String>,
    /// listen on a Unix socket, too
    #[argh(option, arg_name = "path")]
    unix: Option<String>,
    /// mode of the Unix socket, in octal (0660)
    #[argh(option, arg_name = "mode")]
    unix_mode: Option<String>,
    /// group of the Unix socket, by name or number
    #[argh(option, arg_name = "group")]
    unix_group: Option<String>,
    /// lease of a claim that names none, in seconds (33)
    #[argh(option, arg_name = "seconds")]
    default_lease_ttl: Option<String>,
    /// accepted for compatibility; leases end on time anyway
    #[argh(option, arg_name = "seconds")]
    lease_sweep_interval: Option<String>,
    /// how often idle keys are looked at, in seconds (5)
    #[argh(option, arg_name = "seconds")]
    gc_interval: Option<String>,
    /// for how long a key may be idle before it is dropped, in seconds (60)
    #[argh(option, arg_name = "seconds")]
    gc_max_idle: Option<String>,
    /// the most keys at once (1024)
    #[argh(option, arg_name = "count")]
    max_locks: Option<String>,
    /// the most connections at once; 0: what descriptors and memory maps allow (0)
    #[argh(option, arg_name = "count")]
    max_connections: Option<String>,
    /// the most slots held at once, over all keys (65536)
    #[argh(option, arg_name = "count")]
    max_slots: Option<String>,
    /// the most slots and places in queues for one connection (256)
    #[argh(option, arg_name = "count")]
    max_per_connection: Option<String>,
    /// the most waiters for one key; 0: no cap (0)
    #[argh(option, arg_name = "count")]
    max_waiters: Option<String>,
    /// the most waiters at once, over all keys (65536)
    #[argh(option, arg_name = "count")]
    max_waiters_total: Option<String>,
    /// how long a line may take to arrive, and an unused connection idle, in seconds (23)
    #[argh(option, arg_name = "seconds")]
    read_timeout: Option<String>,
    /// how long a reply may take to leave, in seconds; 0: for ever (5)
    #[argh(option, arg_name = "seconds")]
    write_timeout: Option<String>,
    /// how long a shutdown waits for holders, in seconds; 0: for ever (30)
    #[argh(option, arg_name = "seconds")]
    shutdown_timeout: Option<String>,
    /// release what a connection holds when it closes (true)
    #[argh(option, arg_name = "bool")]
    auto_release_on_disconnect: Option<String>,
    /// let what a connection holds live until its lease ends
    #[argh(option, arg_name = "bool")]
    no_auto_release_on_disconnect: Option<String>,
    /// the token that clients must present; ps shows it
    #[argh(option, arg_name = "token")]
    auth_token: Option<String>,
    /// a file with the token that clients must present
    #[argh(option, arg_name = "path")]
    auth_token_file: Option<String>,
    /// print the bound port on stdout once listening
    #[argh(option, arg_name = "bool")]
    print_port: Option<String>,
    /// begin each log line with the time: auto, always or never (auto: unless journald does)
    #[argh(option, arg_name = "when")]
    log_timestamps: Option<String>,
    /// log the life of connections
    #[argh(option, arg_name = "bool")]
    debug: Option<String>,
    /// reserve fences in this file, so that they rise across crashes and clock steps
    #[argh(option, arg_name = "path")]
    fence_state_file: Option<String>,
    /// serve the listening socket on descriptor 0 (inetd wait, s6)
    #[argh(option, arg_name = "bool")]
    inetd: Option<String>,
    /// leave when nobody has been connected and nothing held for so long, in seconds; 0: never (0)
    #[argh(option, arg_name = "seconds")]
    idle_exit: Option<String>,
    // Known, but not to this build: to ignore them would lose encryption unawares.
    /// refused
    #[argh(option, hidden_help)]
    tls_cert: Option<String>,
    /// refused
    #[argh(option, hidden_help)]
    tls_key: Option<String>,
}

/// What latchd has been told.
#[derive(Debug)]
pub(super) struct Options {
    pub(super) sockets: Sockets,
    pub(super) idle_exit: Option<Duration>,
    pub(super) fence_file: Option<PathBuf>,
    pub(super) default_lease: Duration,
    pub(super) gc_interval: Duration,
    pub(super) gc_max_idle: Duration,
    pub(super) max_locks: usize,
    /// `None`: what the machine allows.
    pub(super) max_connections: Option<usize>,
    pub(super) max_slots: usize,
    pub(super) max_per_connection: usize,
    pub(super) max_waiters: Option<usize>,
    pub(super) max_waiters_total: usize,
    pub(super) read_timeout: Duration,
    pub(super) write_timeout: Option<Duration>,
    pub(super) shutdown_timeout: Option<Duration>,
    pub(super) auto_release: bool,
    pub(super) auth: Option<Auth>,
    pub(super) print_port: bool,
    pub(super) log: LogRules,
}

/// Where connections come from.
#[derive(Debug)]
pub(super) enum Sockets {
    /// We bind these, at least one of them.
    Bound {
        tcp: Option<SocketAddr>,
        unix: Option<UnixSocket>,
    },
    /// Descriptor 0 listens already.
    Stdin,
    /// LISTEN_FDS names descriptors that listen already.
    Environment,
}

/// Where and for whom the Unix socket is.
#[derive(Debug)]
pub(super) struct UnixSocket {
    pub(super) path: PathBuf,
    pub(super) mode: u32,
    pub(super) group: Option<u32>,
}

/// Where the auth token comes from.
#[derive(Debug)]
pub(super) enum Auth {
    /// From the command line, where `ps` shows it.
    Argument(Box<[u8]>),
    /// From the environment.
    Variable(Box<[u8]>),
    /// From this file.
    File(PathBuf),
}

impl Options {
    /// Makes sense of the flags and of the variables that `variable` looks up. `inherits` says that
    /// LISTEN_FDS names sockets for us.
    ///
    /// # Errors
    ///
    /// One line that names the option or variable and says what is wrong with it.
    pub(super) fn new(
        flags: Flags,
        variable: impl Fn(&str) -> Option<String>,
        inherits: bool,
    ) -> Result<Options, String> {
        let sources = Sources {
            variable: &variable,
        };
        sources.refuse_tls(flags.tls_cert, flags.tls_key)?;
        let binding = Binding {
            host: sources.find("--host", flags.host, &["HOST"]),
            port: sources.find("--port", flags.port, &["PORT"]),
            unix: sources.find("--unix", flags.unix, &["UNIX"]),
            unix_mode: sources.find("--unix-mode", flags.unix_mode, &["UNIX_MODE"]),
            unix_group: sources.find("--unix-group", flags.unix_group, &["UNIX_GROUP"]),
        };
        let is_inetd = sources.boolean("--inetd", flags.inetd, &[], false)?;
        let sockets = match (inherits, is_inetd) {
            (true, _) => binding.must_be_empty(Sockets::Environment)?,
            (false, true) => binding.must_be_empty(Sockets::Stdin)?,
            (false, false) => binding.sockets()?,
        };
        let print_port = sources.boolean("--print-port", flags.print_port, &[], false)?;
        if print_port && matches!(sockets, Sockets::Bound { tcp: None, .. }) {
            return Err("--print-port: there is no port".into());
        }
        let fence_file = sources.find(
            "--fence-state-file",
            flags.fence_state_file,
            &["FENCE_STATE_FILE"],
        );
        let fence_file = fence_file.map(|setting| setting.path()).transpose()?;
        let seconds = |flag, given, names, default, range| {
            let value = sources.number(flag, given, names, default, range)?;
            Ok::<_, String>(Duration::from_secs(value))
        };
        let unless_zero = |duration: Duration| (!duration.is_zero()).then_some(duration);
        seconds(
            "--lease-sweep-interval",
            flags.lease_sweep_interval,
            &["LEASE_SWEEP_INTERVAL_S"],
            1,
            1..=MAX_SECONDS,
        )?;
        Ok(Options {
            sockets,
            idle_exit: unless_zero(seconds(
                "--idle-exit",
                flags.idle_exit,
                &["IDLE_EXIT_S"],
                0,
                0..=MAX_SECONDS,
            )?),
            fence_file,
            default_lease: seconds(
                "--default-lease-ttl",
                flags.default_lease_ttl,
                &["DEFAULT_LEASE_TTL_S"],
                33,
                1..=MAX_SECONDS,
            )?,
            gc_interval: seconds(
                "--gc-interval",
                flags.gc_interval,
                &["GC_INTERVAL_S", "GC_LOOP_SLEEP"],
                5,
                1..=MAX_SECONDS,
            )?,
            gc_max_idle: seconds(
                "--gc-max-idle",
                flags.gc_max_idle,
                &["GC_MAX_IDLE_S", "GC_MAX_UNUSED_TIME"],
                60,
                0..=MAX_SECONDS,
            )?,
            max_locks: sources.count("--max-locks", flags.max_locks, "MAX_LOCKS", 1024, 1)?,
            max_connections: sources.cap(
                "--max-connections",
                flags.max_connections,
                "MAX_CONNECTIONS",
            )?,
            max_slots: sources.count("--max-slots", flags.max_slots, "MAX_SLOTS", 65_536, 1)?,
            max_per_connection: sources.count(
                "--max-per-connection",
                flags.max_per_connection,
                "MAX_PER_CONNECTION",
                256,
                1,
            )?,
            max_waiters: sources.cap("--max-waiters", flags.max_waiters, "MAX_WAITERS")?,
            max_waiters_total: sources.count(
                "--max-waiters-total",
                flags.max_waiters_total,
                "MAX_WAITERS_TOTAL",
                65_536,
                1,
            )?,
            read_timeout: seconds(
                "--read-timeout",
                flags.read_timeout,
                &["READ_TIMEOUT_S"],
                23,
                1..=MAX_SECONDS,
            )?,
            write_timeout: unless_zero(seconds(
                "--write-timeout",
                flags.write_timeout,
                &["WRITE_TIMEOUT_S"],
                5,
                0..=MAX_SECONDS,
            )?),
            shutdown_timeout: unless_zero(seconds(
                "--shutdown-timeout",
                flags.shutdown_timeout,
                &["SHUTDOWN_TIMEOUT_S"],
                30,
                0..=MAX_SECONDS,
            )?),
            auto_release: sources.auto_release(
                flags.auto_release_on_disconnect,
                flags.no_auto_release_on_disconnect,
            )?,
            auth: sources.auth(flags.auth_token, flags.auth_token_file)?,
            print_port,
            log: LogRules {
                debug: sources.boolean("--debug", flags.debug, &["DEBUG"], false)?,
                timestamps: sources.timestamps(flags.log_timestamps)?,
            },
        })
    }
}

/// Those of `names` that begin with `DFLOCKD_` and are no variable of any option.
pub(super) fn unknown_variables(names: impl Iterator<Item = String>) -> Vec<String> {
    // An option that is not given looks for its variables.
    let known = RefCell::new(HashSet::new());
    let note = |name: &str| {
        known.borrow_mut().insert(name.to_owned());
        None
    };
    let _ = Options::new(Flags::default(), note, false);
    let known = known.into_inner();
    let mut unknown: Vec<String> = names
        .filter(|name| name.starts_with("DFLOCKD_") && !known.contains(name))
        .collect();
    unknown.sort_unstable();
    unknown
}

/// Where values come from.
struct Sources<'a> {
    variable: &'a dyn Fn(&str) -> Option<String>,
}

/// A value, and what to call the place where it stands.
struct Setting {
    origin: String,
    value: String,
}

impl Setting {
    fn path(&self) -> Result<PathBuf, String> {
        if self.value.is_empty() {
            return Err(self.bad("a path"));
        }
        Ok(PathBuf::from(&self.value))
    }

    fn bad(&self, wanted: &str) -> String {
        format!(
            "{}: {wanted} is wanted, not {}",
            self.origin,
            Escaped(self.value.as_bytes())
        )
    }
}

impl Sources<'_> {
    /// The flag if given, else the first variable that is set.
    fn find(&self, flag: &str, given: Option<String>, names: &[&str]) -> Option<Setting> {
        if let Some(value) = given {
            return Some(Setting {
                origin: flag.to_owned(),
                value,
            });
        }
        ["LATCHD", "DFLOCKD"]
            .iter()
            .find_map(|prefix| self.find_variable(prefix, names))
    }

    fn find_variable(&self, prefix: &str, names: &[&str]) -> Option<Setting> {
        names.iter().find_map(|name| {
            let origin = format!("{prefix}_{name}");
            let value = (self.variable)(&origin).filter(|value| !value.is_empty())?;
            Some(Setting { origin, value })
        })
    }

    fn number(
        &self,
        flag: &str,
        given: Option<String>,
        names: &[&str],
        default: u64,
        range: std::ops::RangeInclusive<u64>,
    ) -> Result<u64, String> {
        let Some(setting) = self.find(flag, given, names) else {
            return Ok(default);
        };
        let digits = setting.value.trim();
        let value = digits
            .bytes()
            .all(|byte| byte.is_ascii_digit())
            .then(|| digits.parse().ok());
        value
            .flatten()
            .filter(|value| range.contains(value))
            .ok_or_else(|| {
                setting.bad(&format!(
                    "a number from {} to {}",
                    range.start(),
                    range.end()
                ))
            })
    }

    fn count(
        &self,
        flag: &str,
        given: Option<String>,
        name: &str,
        default: u64,
        min: u64,
    ) -> Result<usize, String> {
        let count = self.number(flag, given, &[name], default, min..=u64::from(u32::MAX))?;
        Ok(usize::try_from(count).unwrap_or(usize::MAX))
    }

    /// A count for which zero means "no cap of its own".
    fn cap(&self, flag: &str, given: Option<String>, name: &str) -> Result<Option<usize>, String> {
        Ok(Some(self.count(flag, given, name, 0, 0)?).filter(|cap| *cap > 0))
    }

    fn boolean(
        &self,
        flag: &str,
        given: Option<String>,
        names: &[&str],
        default: bool,
    ) -> Result<bool, String> {
        match self.find(flag, given, names) {
            None => Ok(default),
            Some(setting) => parse_boolean(&setting),
        }
    }

    /// Refuses TLS, which this build lacks. One option without the other is wrong in any build, and
    /// is refused as that.
    fn refuse_tls(&self, cert: Option<String>, key: Option<String>) -> Result<(), String> {
        let cert = self.find("--tls-cert", cert, &["TLS_CERT"]);
        let key = self.find("--tls-key", key, &["TLS_KEY"]);
        let (setting, why) = match (cert, key) {
            (None, None) => return Ok(()),
            (Some(cert), Some(_)) => (cert, "needs a build with the feature tls"),
            (Some(one), None) | (None, Some(one)) => {
                (one, "both --tls-cert and --tls-key must be provided")
            }
        };
        Err(format!("{}: {why}", setting.origin))
    }

    fn auto_release(&self, yes: Option<String>, no: Option<String>) -> Result<bool, String> {
        const YES: &str = "--auto-release-on-disconnect";
        const NO: &str = "--no-auto-release-on-disconnect";
        match (yes, no) {
            (Some(_), Some(_)) => Err(format!("{NO}: cannot be given together with {YES}")),
            (yes, None) => self.boolean(YES, yes, &["AUTO_RELEASE_ON_DISCONNECT"], true),
            (None, no) => Ok(!self.boolean(NO, no, &[], true)?),
        }
    }

    fn timestamps(&self, given: Option<String>) -> Result<Timestamps, String> {
        let Some(setting) = self.find("--log-timestamps", given, &["LOG_TIMESTAMPS"]) else {
            return Ok(Timestamps::Auto);
        };
        match setting.value.as_str() {
            "auto" => Ok(Timestamps::Auto),
            "always" => Ok(Timestamps::Always),
            "never" => Ok(Timestamps::Never),
            _ => Err(setting.bad("auto, always or never")),
        }
    }

    /// The token and its file exclude each other at each level; a flag beats every variable.
    fn auth(&self, token: Option<String>, file: Option<String>) -> Result<Option<Auth>, String> {
        const TOKEN: &str = "--auth-token";
        const FILE: &str = "--auth-token-file";
        let from = |setting: Setting| Setting {
            value: setting.value.trim().to_owned(),
            ..setting
        };
        let flags = (
            token.map(|value| Setting {
                origin: TOKEN.into(),
                value,
            }),
            file.map(|value| Setting {
                origin: FILE.into(),
                value,
            }),
        );
        let variables = ["LATCHD", "DFLOCKD"].map(|prefix| {
            (
                self.find_variable(prefix, &["AUTH_TOKEN"]),
                self.find_variable(prefix, &["AUTH_TOKEN_FILE"]),
            )
        });
        for (is_flag, level) in [(true, flags)]
            .into_iter()
            .chain(variables.map(|level| (false, level)))
        {
            match level {
                (None, None) => {}
                (Some(token), Some(file)) => {
                    return Err(format!(
                        "{}: cannot be given together with {}",
                        token.origin, file.origin
                    ));
                }
                (None, Some(file)) => return Ok(Some(Auth::File(file.path()?))),
                (Some(token), None) => {
                    let token = from(token);
                    let secret = usable_token(&token.value)
                        .map_err(|reason| format!("{}: {reason}", token.origin))?;
                    return Ok(Some(if is_flag {
                        Auth::Argument(secret)
                    } else {
                        Auth::Variable(secret)
                    }));
                }
            }
        }
        Ok(None)
    }
}

/// What the options say about the sockets to bind.
struct Binding {
    host: Option<Setting>,
    port: Option<Setting>,
    unix: Option<Setting>,
    unix_mode: Option<Setting>,
    unix_group: Option<Setting>,
}

impl Binding {
    /// Inherited sockets are bound already: whoever wants them elsewhere must not be ignored.
    fn must_be_empty(self, sockets: Sockets) -> Result<Sockets, String> {
        let settings = [
            self.host,
            self.port,
            self.unix,
            self.unix_mode,
            self.unix_group,
        ];
        match settings.into_iter().flatten().next() {
            Some(setting) => Err(format!("{}: the sockets are inherited", setting.origin)),
            None => Ok(sockets),
        }
    }

    fn sockets(self) -> Result<Sockets, String> {
        let tcp = tcp_address(self.host, self.port)?;
        let unix = unix_socket(self.unix, self.unix_mode, self.unix_group)?;
        if tcp.is_none() && unix.is_none() {
            return Err("--port off: nothing to listen on without --unix".into());
        }
        Ok(Sockets::Bound { tcp, unix })
    }
}

/// Addresses only: to resolve a name would need the host's resolver, which a small host may not have and
/// a static build cannot use.
fn tcp_address(host: Option<Setting>, port: Option<Setting>) -> Result<Option<SocketAddr>, String> {
    let ip = match host {
        None => IpAddr::V4(Ipv4Addr::LOCALHOST),
        Some(setting) if setting.value == "localhost" => IpAddr::V4(Ipv4Addr::LOCALHOST),
        Some(setting) => {
            let text = setting.value.as_str();
            let bare = text
                .strip_prefix('[')
                .and_then(|text| text.strip_suffix(']'));
            let parsed = match bare {
                Some(bare) => bare.parse().map(IpAddr::V6),
                None => text.parse(),
            };
            parsed.map_err(|_| setting.bad("an IP address or localhost"))?
        }
    };
    let port = match port {
        None => 6388,
        Some(setting) if setting.value == "off" => return Ok(None),
        Some(setting) => setting
            .value
            .parse()
            .ok()
            .filter(|_| setting.value.bytes().all(|byte| byte.is_ascii_digit()))
            .ok_or_else(|| setting.bad("a number from 0 to 65535 or off"))?,
    };
    Ok(Some(SocketAddr::new(ip, port)))
}

fn unix_socket(
    path: Option<Setting>,
    mode: Option<Setting>,
    group: Option<Setting>,
) -> Result<Option<UnixSocket>, String> {
    let mode = match mode {
        None => 0o660,
        Some(setting) => u32::from_str_radix(&setting.value, 8)
            .ok()
            .filter(|mode| *mode <= 0o777 && !setting.value.starts_with('+'))
            .ok_or_else(|| setting.bad("an octal mode from 0 to 0777"))?,
    };
    let group = match group {
        None => None,
        Some(setting) => {
            let id = group_id(&setting.value);
            Some(id.ok_or_else(|| setting.bad("a group of this host"))?)
        }
    };
    let path = path.map(|setting| setting.path()).transpose()?;
    Ok(path.map(|path| UnixSocket { path, mode, group }))
}

/// Checks a trimmed token: an empty one would let everybody in, and one with a line end could never be
/// presented.
///
/// # Errors
///
/// What is wrong with it. The token itself is never part of a message.
pub(super) fn usable_token(token: &str) -> Result<Box<[u8]>, String> {
    let token = token.trim();
    if token.is_empty() {
        Err("the token is empty".into())
    } else if token.contains(['\r', '\n']) {
        Err("the token has a line end in it".into())
    } else if token.len() > MAX_AUTH_TOKEN_LEN {
        Err(format!(
            "the token is longer than {MAX_AUTH_TOKEN_LEN} bytes"
        ))
    } else {
        Ok(token.as_bytes().into())
    }
}

fn parse_boolean(setting: &Setting) -> Result<bool, String> {
    match setting.value.to_ascii_lowercase().as_str() {
        "1" | "yes" | "true" => Ok(true),
        "0" | "no" | "false" => Ok(false),
        _ => Err(setting.bad("yes or no")),
    }
}

/// A group's number, from the host's own list: the C library's way would not work in a static build.
fn group_id(group: &str) -> Option<u32> {
    if let Ok(id) = group.parse() {
        // The highest number means "no group" to the system.
        return Some(id).filter(|id| *id != u32::MAX);
    }
    let groups = fs::read_to_string("/etc/group").ok()?;
    groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        let is_it = fields.next() == Some(group);
        is_it.then(|| fields.nth(1)?.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn options(flags: Flags, variables: &[(&str, &str)]) -> Result<Options, String> {
        let variables: HashMap<&str, &str> = variables.iter().copied().collect();
        let variable = |name: &str| variables.get(name).map(|value| (*value).to_owned());
        Options::new(flags, variable, false)
    }

    fn lease(flag: Option<&str>, variables: &[(&str, &str)]) -> Result<u64, String> {
        let flags = Flags {
            default_lease_ttl: flag.map(str::to_owned),
            ..Flags::default()
        };
        options(flags, variables).map(|options| options.default_lease.as_secs())
    }

    #[test]
    fn a_flag_beats_our_variable_which_beats_the_old_one() {
        let ours = ("LATCHD_DEFAULT_LEASE_TTL_S", "2");
        let old = ("DFLOCKD_DEFAULT_LEASE_TTL_S", "3");
        assert_eq!(lease(Some("1"), &[ours, old]), Ok(1));
        assert_eq!(lease(None, &[ours, old]), Ok(2));
        assert_eq!(lease(None, &[old]), Ok(3));
        assert_eq!(lease(None, &[]), Ok(33));
        assert_eq!(
            lease(None, &[("LATCHD_DEFAULT_LEASE_TTL_S", ""), old]),
            Ok(3)
        );
    }

    #[test]
    fn a_bad_value_names_its_place() {
        for (flag, bad) in [
            ("0", "0"),
            ("-1", "-1"),
            ("+1", "+1"),
            ("1.5", "1.5"),
            ("x", "x"),
            ("", "\"\""),
            ("9223372037", "9223372037"),
        ] {
            let message = lease(Some(flag), &[]).expect_err(flag);
            assert_eq!(
                message,
                format!("--default-lease-ttl: a number from 1 to 9223372036 is wanted, not {bad}")
            );
        }
        let message =
            lease(None, &[("DFLOCKD_DEFAULT_LEASE_TTL_S", "soon")]).expect_err("no number");
        assert!(
            message.starts_with("DFLOCKD_DEFAULT_LEASE_TTL_S: "),
            "{message}"
        );
    }

    #[test]
    fn a_token_in_a_flag_beats_every_variable() {
        let flags = || Flags {
            auth_token: Some(" secret\n".into()),
            ..Flags::default()
        };
        let auth = options(flags(), &[("LATCHD_AUTH_TOKEN_FILE", "/nowhere")])
            .expect("one a level")
            .auth;
        assert!(matches!(auth, Some(Auth::Argument(token)) if *token == *b"secret"));
        let both = Flags {
            auth_token_file: Some("f".into()),
            ..flags()
        };
        assert!(options(both, &[]).is_err());
        let auth = options(
            Flags::default(),
            &[
                ("DFLOCKD_AUTH_TOKEN", "old"),
                ("LATCHD_AUTH_TOKEN_FILE", "f"),
            ],
        );
        assert!(matches!(
            auth.expect("one a level").auth,
            Some(Auth::File(_))
        ));
    }

    #[test]
    fn an_unusable_token_is_refused_without_being_shown() {
        for token in ["", " \t\n", "a\nb", "a\rb"] {
            let flags = Flags {
                auth_token: Some(token.into()),
                ..Flags::default()
            };
            let message = options(flags, &[]).expect_err("unusable");
            assert!(message.starts_with("--auth-token: the token "), "{message}");
        }
    }

    #[test]
    fn addresses_are_taken_with_and_without_brackets_and_names_are_not() {
        let tcp = |host: &str| {
            let flags = Flags {
                host: Some(host.into()),
                ..Flags::default()
            };
            options(flags, &[]).map(|options| match options.sockets {
                Sockets::Bound { tcp, .. } => tcp.expect("a port").to_string(),
                other => panic!("{other:?}"),
            })
        };
        assert_eq!(tcp("::1").as_deref(), Ok("[::1]:6388"));
        assert_eq!(tcp("[::1]").as_deref(), Ok("[::1]:6388"));
        assert_eq!(tcp("localhost").as_deref(), Ok("127.0.0.1:6388"));
        for host in ["example.org", "[127.0.0.1]", "127.0.0.1:1", ""] {
            assert!(tcp(host).is_err(), "{host}");
        }
    }

    #[test]
    fn what_this_build_lacks_is_refused_also_from_the_environment() {
        let flags = Flags {
            tls_key: Some("x".into()),
            ..Flags::default()
        };
        let variables = [("DFLOCKD_TLS_CERT", "x")];
        let message = options(flags, &variables).expect_err("refused");
        assert_eq!(
            message,
            "DFLOCKD_TLS_CERT: needs a build with the feature tls"
        );
        let message = options(Flags::default(), &variables).expect_err("refused");
        assert_eq!(
            message,
            "DFLOCKD_TLS_CERT: both --tls-cert and --tls-key must be provided"
        );
    }
}
