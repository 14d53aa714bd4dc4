//! The options of `latchd`: each in one row, with its type, its default and its variables.
//! What they mean together is in `settings`.
//!
//! The command line takes precedence, then `LATCHD_<NAME>`, then `DFLOCKD_<NAME>` (so that a host
//! can move from dflockd to latchd), then the default. An overruled value is not checked.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::os::text::reason;
use crate::shared::cli::arguments::{self, FromRows, Origins, Parsed};
use crate::shared::cli::options::{options, Unless};
use crate::shared::cli::rows::{Bond, Dashes, Program, Rule, CLUSTER, TLS};
use crate::shared::cli::values;
use crate::shared::log::{LogTarget, Timestamps};
use crate::wire::limits::{self, MAX_SECONDS};

use super::host_memory::table_cap;
use super::listen_host::{
    self, host, http_names, http_places, http_port, HttpNames, HttpPlaces, ListenHost, LOCALHOST,
};

const MAX_COUNT: usize = u32::MAX as usize;

/// The default prefix of the keys in etcd.
const PREFIX: &str = "latchd";

/// The prefixes of the options' variables. An underscore follows the prefix.
const PREFIXES: &[&str] = &["LATCHD", "DFLOCKD"];

pub const STATE_FILE: &[&str] = &["--state-file", "--handover-file"];

/// Pairs of options that exclude each other. If one of them is given on the command line, the
/// variable of the other has no effect.
#[rustfmt::skip]
const RIVALS: &[[&str; 2]] = &[
    ["--auto-release-on-disconnect", "--no-auto-release-on-disconnect"],
    ["--auth-token-file", "--auth-token"],
    ["--log", "--log-file"],
    ["--http", "--http-port"],
    ["--state-file", "--handover-file"],
];

/// What else holds between the options, whatever their values are.
#[rustfmt::skip]
const RULES: &[Rule] = &[
    (&["--tls-cert"], Bond::Both, &["--tls-key"]),
    (&["--settle", "--local-clients="], Bond::Needs("there is no --state-file"), STATE_FILE),
    (STATE_FILE, Bond::Excludes, &["--etcd"]),
    (&[], Bond::Usable, &[]),
    (&["--advertise", "--etcd-prefix", "--etcd-ttl", "--etcd-user", "--etcd-password-file",
       "--etcd-cacert", "--etcd-cert", "--etcd-key"], Bond::Needs("needs --etcd"), &["--etcd"]),
    // In a cluster, etcd keeps the fences, and the server runs all the time.
    (&["--fence-state-file", "--inetd", "--idle-exit"], Bond::Excludes, &["--etcd"]),
    (&["--etcd-cert"], Bond::Both, &["--etcd-key"]),
    (&["--etcd-user"], Bond::Both, &["--etcd-password-file"]),
    (&["--http-max-waiting"], Bond::Needs("needs --http-grants"), &["--http-grants"]),
    (&["--http-name", "--http-grants"],
     Bond::Needs("needs --http or --http-port"), &["--http", "--http-port"]),
];

/// The maximum time for which a server settles after a crash, unless the options say how long.
const LONGEST_SETTLE: Duration = Duration::from_secs(60);

/// One value of `--expect`: keys, each with the maximum time from one success to the next.
pub type Expectations = Vec<(String, Duration)>;

options! {
    /// Locks, semaphores and leases over the network, in strict order of arrival.
    // A build without a feature has the options of that feature, so that it can refuse them.
    pub struct Options {
        #[group = "Network"]
        /// listen on this address or name of the host (127.0.0.1)
        host: ListenHost ("host", host) else (ListenHost::Address(LOCALHOST)) = ["HOST"],
        /// listen on this TCP port; 0 picks one, off listens on the Unix socket only (6388)
        port: Unless<u16> ("port", port) else (Some(6388)) = ["PORT"],
        /// listen on a Unix socket, too
        unix: Option<PathBuf> ("path", values::path) = ["UNIX"],
        /// set the mode of the Unix socket, in octal (0660)
        unix_mode: u32 ("mode", values::mode) else 0o660 = ["UNIX_MODE"],
        /// set the group of the Unix socket, by name or number
        unix_group: Option<u32> ("group", group) = ["UNIX_GROUP"],
        /// serve the listening socket on descriptor 0 (inetd wait, s6)
        inetd: bool,
        /// print the bound port on stdout once listening
        print_port: bool,
        /// show statistics over HTTP at this address and port; may be given several times
        http: Vec<HttpPlaces> ("host:port", http_places) = ["HTTP"],
        /// show them on this port, at the address of --host; 0: no port (0)
        http_port: Unless<u16> ("port", http_port) else None = ["HTTP_PORT"],
        /// also answer requests over HTTP to this name of the server
        http_name: Vec<HttpNames> ("name", http_names) = ["HTTP_NAME"],
        /// also grant locks over HTTP
        http_grants: bool = ["HTTP_GRANTS"],
        #[group = "Limits"]
        /// limit the number of keys (1024)
        max_locks: usize ("count", count) else 1024 = ["MAX_LOCKS"],
        /// limit the number of grants over all keys (65536, fewer in a small memory)
        max_slots: usize ("count", count) else (table_cap()) = ["MAX_SLOTS"],
        /// limit the number of grants and places in queues of one connection (a quarter of
        /// --max-locks)
        max_per_connection: Option<usize> ("count", count) = ["MAX_PER_CONNECTION"],
        /// limit the number of waiters for one key; 0: no limit (0)
        max_waiters: Unless<usize> ("count", cap) else None = ["MAX_WAITERS"],
        /// limit the number of waiters over all keys (65536, fewer in a small memory)
        max_waiters_total: usize ("count", count) else (table_cap()) = ["MAX_WAITERS_TOTAL"],
        /// limit the number of grants kept without a connection; 0: none (half of --max-locks)
        max_kept: Option<usize> ("count", any_count) = ["MAX_KEPT"],
        /// limit the time for which a grant is kept without a connection (30d)
        max_keep_time: Duration ("time", some_time) else (seconds(30 * 86_400))
            = ["MAX_KEEP_TIME_S"],
        /// limit the time for which a grant is held, renewals included; 0: no limit (0)
        max_hold: Unless<Duration> ("time", unless_0) else None = ["MAX_HOLD_S"],
        /// limit the number of connections; 0: what descriptors and memory allow (0)
        max_connections: Unless<usize> ("count", cap) else None = ["MAX_CONNECTIONS"],
        /// limit the number of connections from one address; 0: no limit (0)
        max_connections_per_ip: Unless<usize> ("count", cap) else None
            = ["MAX_CONNECTIONS_PER_IP"],
        /// limit the number of waiting requests over HTTP, and of sessions (a quarter of
        /// --max-connections)
        http_max_waiting: Option<usize> ("count", count) = ["HTTP_MAX_WAITING"],
        /// limit the time for each request line, and for idle connections (23)
        read_timeout: Duration ("time", some_time) else (seconds(23)) = ["READ_TIMEOUT_S"],
        /// limit the time for a client to accept a reply; 0: no limit (5)
        write_timeout: Unless<Duration> ("time", unless_0) else (Some(seconds(5)))
            = ["WRITE_TIMEOUT_S"],
        /// forget a key that has been idle for this time (60)
        gc_max_idle: Duration ("time", any_time) else (seconds(60))
            = ["GC_MAX_IDLE_S", "GC_MAX_UNUSED_TIME"],
        /// look for idle keys at this interval (5)
        gc_interval: Duration ("time", some_time) else (seconds(5))
            = ["GC_INTERVAL_S", "GC_LOOP_SLEEP"],
        #[group = "Leases"]
        /// set the lease of a request that names none (33)
        default_lease_ttl: Duration ("time", some_time) else (seconds(33))
            = ["DEFAULT_LEASE_TTL_S"],
        /// release what a connection holds when it closes (true)
        auto_release_on_disconnect: bool else true = ["AUTO_RELEASE_ON_DISCONNECT"],
        /// keep what a connection holds until its lease ends
        no_auto_release_on_disconnect: bool,
        /// do nothing; leases end on time without it
        lease_sweep_interval: Duration ("time", some_time) else (seconds(1))
            = ["LEASE_SWEEP_INTERVAL_S"]
            => Ignored("leases end on time without it"),
        #[group = "Files and restarts"]
        /// reserve fences in this file, so that they rise across crashes and clock steps
        fence_state_file: Option<PathBuf> ("path", values::path) = ["FENCE_STATE_FILE"],
        /// keep the locks in this file for the next server
        state_file: Option<PathBuf> ("path", absolute_path) = ["STATE_FILE"],
        /// set the state file, as with --state-file
        handover_file: Option<PathBuf> ("path", absolute_path) = ["HANDOVER_FILE"],
        /// grant nothing for this time after a crash (--default-lease-ttl, at most 60)
        settle: Option<Duration> ("time", some_time) = ["SETTLE_S"],
        /// grant at once after a boot, because all clients run on this host
        local_clients: bool = ["LOCAL_CLIENTS"],
        /// limit the time to wait for holders at a shutdown; 0: no limit (30)
        shutdown_timeout: Unless<Duration> ("time", unless_0) else (Some(seconds(30)))
            = ["SHUTDOWN_TIMEOUT_S"],
        /// exit after this time without a connection or a held slot; 0: never (0)
        idle_exit: Unless<Duration> ("time", unless_0) else None = ["IDLE_EXIT_S"],
        #[group = "Security"]
        /// require this token from clients; ps shows it
        auth_token: Option<String> ("token") = ["AUTH_TOKEN"],
        /// require the token in this file from clients
        auth_token_file: Option<PathBuf> ("path", values::path) = ["AUTH_TOKEN_FILE"],
        /// let clients with the token in this file break grants
        admin_token_file: Option<PathBuf> ("path", values::path) = ["ADMIN_TOKEN_FILE"],
        /// make a Unix socket for latch break, in addition to the port (true, but false with
        /// --port 0)
        operator_socket: Option<bool> = ["OPERATOR_SOCKET"],
        // A build without TLS refuses these options. If it ignored them, the encryption would be
        // lost unnoticed.
        /// speak TLS on the TCP port, with the certificates in this file
        tls_cert: Option<PathBuf> ("path", values::path) = ["TLS_CERT"] in TLS,
        /// read the key of the first certificate from this file
        tls_key: Option<PathBuf> ("path", values::path) = ["TLS_KEY"] in TLS,
        #[group = "Logging"]
        /// write the log to stderr or syslog (stderr)
        log: Option<LogTarget> ("where", LogTarget::parse) = ["LOG"],
        /// append the log to this file, and open it again at SIGHUP
        log_file: Option<PathBuf> ("path", values::path) = ["LOG_FILE"],
        /// begin each log line with the time: auto, always or never (auto: unless journald does)
        log_timestamps: Timestamps ("when", timestamps) else (Timestamps::Auto)
            = ["LOG_TIMESTAMPS"],
        /// log each grant, its end, and each wait that was given up
        log_grants: bool = ["LOG_GRANTS"],
        /// expect the work under this key to succeed within this time, again and again, such as
        /// nightly=26h; may be given several times
        expect: Vec<Expectations> ("key=time", expectations) = ["EXPECT"],
        /// log the life of connections
        debug: bool = ["DEBUG"],
        #[group = "Cluster"]
        /// share locks with the other servers on this etcd: HOST:PORT of each member, with commas
        etcd: Option<String> ("list") = ["ETCD"] in CLUSTER,
        /// let the other servers reach this one there (--host and --port)
        advertise: Option<String> ("host:port") = ["ADVERTISE"] in CLUSTER,
        /// begin keys in etcd with this name, another for each group of servers (latchd)
        etcd_prefix: String ("name", etcd_prefix) else (PREFIX.into())
            = ["ETCD_PREFIX"] in CLUSTER,
        /// let another server take over if the active one is silent for this time (10)
        etcd_ttl: Duration ("time", etcd_ttl) else (seconds(10)) = ["ETCD_TTL_S"] in CLUSTER,
        /// log in to etcd as this user
        etcd_user: Option<String> ("name") = ["ETCD_USER"] in CLUSTER,
        /// read the password of that user from this file
        etcd_password_file: Option<PathBuf> ("path", values::path)
            = ["ETCD_PASSWORD_FILE"] in CLUSTER,
        /// trust the CAs in this file for etcd members that speak TLS
        etcd_cacert: Option<PathBuf> ("path", values::path) = ["ETCD_CACERT"] in CLUSTER,
        /// show the certificate in this file to etcd
        etcd_cert: Option<PathBuf> ("path", values::path) = ["ETCD_CERT"] in CLUSTER,
        /// read the key of that certificate from this file
        etcd_key: Option<PathBuf> ("path", values::path) = ["ETCD_KEY"] in CLUSTER,
        // Options of dflockd that the help leaves out.
        /// address of --http-port (--host)
        http_host: Option<ListenHost> ("host", listen_host::host) = ["HTTP_HOST"] as HIDDEN,
        /// for sessions over HTTP
        http_session_idle_timeout: Option<String> ("value") = ["HTTP_SESSION_IDLE_S"] as HIDDEN
            => Ignored("a session over HTTP may be idle for 40 seconds"),
        /// for sessions over HTTP
        http_max_sessions: Option<String> ("value") = ["HTTP_MAX_SESSIONS"] as HIDDEN
            => Ignored("--http-max-waiting limits them"),
        /// for sessions over HTTP
        http_max_sessions_per_ip: Option<String> ("value")
            = ["HTTP_MAX_SESSIONS_PER_IP"] as HIDDEN
            => Ignored("--max-connections-per-ip limits them"),
        /// a cap on connections over HTTP
        http_max_connections_per_ip: Option<String> ("value")
            = ["HTTP_MAX_CONNECTIONS_PER_IP"] as HIDDEN
            => Ignored("--max-connections-per-ip limits them"),
        /// a cap on requests over HTTP
        http_rate_limit_per_ip: Option<String> ("value") = ["HTTP_RATE_LIMIT_PER_IP"] as HIDDEN
            => Ignored("what waits over HTTP is limited, but no rate is"),
        /// a cap on requests over HTTP
        http_rate_limit_burst: Option<String> ("value") = ["HTTP_RATE_LIMIT_BURST"] as HIDDEN
            => Ignored("what waits over HTTP is limited, but no rate is"),
        /// web pages that may ask over HTTP
        http_cors_allowed_origins: Option<String> ("value")
            = ["HTTP_CORS_ALLOWED_ORIGINS"] as HIDDEN
            => Ignored("no web page of another host is served"),
        /// turns on the cluster of dflockd
        raft_dir: Option<String> ("value") = ["RAFT_DIR"] as HIDDEN
            => Refused("a cluster of dflockd cannot be joined; see latchd-cluster(7)"),
    }
}

/// What the help says about the variables. A test compares it with the rows.
const RULE_FOR_VARIABLES: &str =
    "Each option is also a variable: LATCHD_ and the name of the option in capitals, with _ for -, \
     and with _S at the end for a time. LATCHD_READ_TIMEOUT_S sets --read-timeout. Only --inetd, \
     --print-port and --no-auto-release-on-disconnect have no variable. The names may also begin \
     with DFLOCKD_.";

/// What the program takes on its command line.
pub const SELF: Program = Program {
    dashes: Dashes::OneOrTwo,
    prefixes: PREFIXES,
    rivals: RIVALS,
    rules: RULES,
    features: &[TLS, CLUSTER],
    variables: RULE_FOR_VARIABLES,
    ..Program::plain(crate::latchd::PROGRAM, Options::COMMAND, "latchd(8)")
};

/// Reads the command line and the variables that `lookup` knows. Also returns where each option
/// comes from.
pub fn read(
    arguments: impl Iterator<Item = OsString>,
    lookup: &dyn Fn(&str) -> Option<String>,
) -> (Parsed<Options>, Origins) {
    arguments::parse_with_variables(&SELF, arguments, lookup)
}

impl Options {
    /// The maximum number of kept grants.
    pub fn max_kept(&self) -> usize {
        self.max_kept.unwrap_or(self.max_locks / 2)
    }

    /// The maximum number of grants and places of one connection. By default, one client cannot
    /// take every key, and neither can it together with the kept grants.
    pub fn max_per_connection(&self) -> usize {
        let quarter = (self.max_locks / 4).max(1);
        self.max_per_connection.unwrap_or(quarter)
    }

    /// The keys under which work is expected to succeed, each with the maximum time from one
    /// success to the next.
    pub fn expected(&self) -> impl Iterator<Item = (&str, Duration)> {
        let expected = self.expect.iter().flatten();
        expected.map(|(key, within)| (key.as_str(), *within))
    }

    /// The path of the state file, if there is one.
    pub fn state_file(&self) -> Option<&Path> {
        let path = self.state_file.as_ref().or(self.handover_file.as_ref());
        path.map(PathBuf::as_path)
    }

    /// Whether the server makes an operator socket. With port 0 it makes none unless it is asked
    /// to: each such server would have a socket of another name, and a crash would leave it behind.
    pub fn has_operator_socket(&self) -> bool {
        self.operator_socket.unwrap_or(self.port != Some(0))
    }

    /// For how long the server settles after a crash.
    pub fn settle(&self) -> Duration {
        let default = self.default_lease_ttl.min(LONGEST_SETTLE);
        self.settle.unwrap_or(default)
    }

    /// Whether a client that ends its stream gives up what it holds.
    pub fn auto_release(&self) -> bool {
        self.auto_release_on_disconnect && !self.no_auto_release_on_disconnect
    }

    /// The certificate file and the key file for TLS on the TCP port.
    pub fn tls_files(&self) -> Option<(PathBuf, PathBuf)> {
        self.tls_cert.clone().zip(self.tls_key.clone())
    }

    /// The files that other users must not change. The flag tells whether the file is also one that
    /// other users must not read.
    pub fn guarded_files(&self) -> impl Iterator<Item = (&Path, bool)> {
        let secrets = [
            &self.auth_token_file,
            &self.admin_token_file,
            &self.etcd_password_file,
            &self.tls_key,
            &self.state_file,
            &self.handover_file,
        ];
        let secrets = secrets.into_iter().flatten().map(|path| (&**path, true));
        let others = [&self.fence_state_file, &self.log_file];
        secrets.chain(others.into_iter().flatten().map(|path| (&**path, false)))
    }

    /// Whether clients on the TCP port must speak TLS.
    pub fn speaks_tls(&self) -> bool {
        self.tls_cert.is_some()
    }
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn some_time(text: &str) -> Result<Duration, String> {
    values::seconds(text, 1..=MAX_SECONDS)
}

fn any_time(text: &str) -> Result<Duration, String> {
    values::seconds(text, 0..=MAX_SECONDS)
}

fn unless_0(text: &str) -> Result<Unless<Duration>, String> {
    Ok(Some(any_time(text)?).filter(|time| !time.is_zero()))
}

fn count(text: &str) -> Result<usize, String> {
    values::number(text, 1..=MAX_COUNT)
}

fn any_count(text: &str) -> Result<usize, String> {
    values::number(text, 0..=MAX_COUNT)
}

/// A count for which 0 means "no cap".
fn cap(text: &str) -> Result<Unless<usize>, String> {
    Ok(Some(any_count(text)?).filter(|cap| *cap > 0))
}

fn etcd_prefix(text: &str) -> Result<String, String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
    let fits = (1..=64).contains(&text.len()) && text.chars().all(is_plain) && !text.ends_with('/');
    fits.then(|| text.to_owned())
        .ok_or_else(|| "expected 1 to 64 of A-Z a-z 0-9 . _ - /, without a / at its end".into())
}

fn etcd_ttl(text: &str) -> Result<Duration, String> {
    values::seconds(text, 5..=300)
}

fn port(text: &str) -> Result<Unless<u16>, String> {
    if text == "off" {
        return Ok(None);
    }
    let port = values::digits(text).map(Some);
    port.ok_or_else(|| "expected 0-65535 or off".into())
}

/// Reads a group's number. A name is looked up in /etc/group, because a static build cannot look it
/// up through the C library.
fn group(text: &str) -> Result<u32, String> {
    let found = text.parse().ok().or_else(|| {
        let groups = fs::read_to_string("/etc/group").ok()?;
        groups.lines().find_map(|line| {
            let mut fields = line.split(':');
            let is_it = fields.next() == Some(text);
            is_it.then(|| fields.nth(1)?.parse().ok()).flatten()
        })
    });
    // The highest number means "no group" to the system.
    found
        .filter(|id| *id != u32::MAX)
        .ok_or_else(|| "expected a group of this host".into())
}

/// Reads a path, and resolves it against the working directory: every message and log line names
/// the file by a path that also holds for the next server.
fn absolute_path(text: &str) -> Result<PathBuf, String> {
    let path = std::path::absolute(values::path(text)?);
    path.map_err(|error| reason(&error))
}

/// Reads `KEY=TIME`, or several with commas.
fn expectations(text: &str) -> Result<Expectations, String> {
    let expectation = |text: &str| {
        let (key, within) = text.trim().rsplit_once('=')?;
        let within = some_time(within).ok()?;
        limits::is_key(key).then(|| (key.to_owned(), within))
    };
    let expectations: Option<Expectations> = text.split(',').map(expectation).collect();
    expectations.ok_or_else(|| "expected KEY=TIME, such as nightly=26h".into())
}

fn timestamps(text: &str) -> Result<Timestamps, String> {
    let all = [
        ("auto", Timestamps::Auto),
        ("always", Timestamps::Always),
        ("never", Timestamps::Never),
    ];
    values::choice(text, all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::cli::rows::{Form, Row};
    use std::collections::HashMap;

    fn lease(flag: Option<&str>, variables: &[(&str, &str)]) -> Result<u64, String> {
        let arguments = flag.map(|value| ["--default-lease-ttl", value]);
        let arguments: Vec<&str> = arguments.into_iter().flatten().collect();
        let variables: HashMap<&str, &str> = variables.iter().copied().collect();
        let lookup = |name: &str| variables.get(name).map(|value| (*value).to_owned());
        match read(arguments.iter().map(OsString::from), &lookup).0 {
            Parsed::Run(options) => Ok(options.default_lease_ttl.as_secs()),
            Parsed::Usage(reason) => Err(reason),
            Parsed::Print(text) => panic!("{text}"),
        }
    }

    #[test]
    fn each_option_is_a_variable_by_the_rule_of_the_manual() {
        // The hidden ones have the names that dflockd gives them.
        let rows = Options::COMMAND.rows.iter().filter(|row| !row.is_hidden);
        let (_, exceptions) = RULE_FOR_VARIABLES.split_once("Only ").expect("exceptions");
        let mut without: Vec<&str> = exceptions.split([' ', ',']).collect();
        without.retain(|word| word.starts_with("--"));
        for row in rows {
            let is_time = row.form == Form::Valued("time");
            let unit = if is_time { "_S" } else { "" };
            let name = row.name.to_uppercase() + unit;
            let is_without = without.contains(&row.long().as_str());
            let expected = (!is_without).then_some(name.as_str());
            assert_eq!(row.variables.first().copied(), expected, "{}", row.name);
        }
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
        let bad = ("LATCHD_DEFAULT_LEASE_TTL_S", "soon");
        assert_eq!(lease(Some("1"), &[bad]), Ok(1));
        assert_eq!(lease(Some("1m30s"), &[]), Ok(90));
    }

    #[test]
    fn each_number_has_its_range() {
        let (count, time) = (MAX_COUNT as u64, MAX_SECONDS);
        let ranges = [
            (
                "max-locks max-slots max-per-connection max-waiters-total",
                1,
                count,
            ),
            ("http-max-waiting", 1, count),
            (
                "max-waiters max-connections max-connections-per-ip max-kept",
                0,
                count,
            ),
            (
                "default-lease-ttl lease-sweep-interval gc-interval",
                1,
                time,
            ),
            ("max-keep-time read-timeout settle", 1, time),
            (
                "gc-max-idle max-hold write-timeout shutdown-timeout idle-exit",
                0,
                time,
            ),
            ("etcd-ttl", 5, 300),
        ];
        let is_number = |row: &&Row| matches!(row.form, Form::Valued("count" | "time"));
        for row in Options::COMMAND.rows.iter().filter(is_number) {
            let option = row.long();
            let is_it = |name: &str| name == &option[2..];
            let range = ranges.iter().find(|it| it.0.split(' ').any(is_it));
            let (_, least, most) = range.unwrap_or_else(|| panic!("no range of {option}"));
            let is_in_range = |value: i128| {
                let arguments = [option.as_str(), &value.to_string()].map(OsString::from);
                let refusal = match read(arguments.into_iter(), &|_| None).0 {
                    Parsed::Usage(reason) => reason,
                    _ => String::new(),
                };
                !refusal.contains(&format!("invalid value '{value}' for {option}"))
            };
            let (least, most) = (i128::from(*least), i128::from(*most));
            let around = [least - 1, least, most, most + 1].map(is_in_range);
            assert_eq!(around, [false, true, true, false], "{option}");
        }
    }

    #[test]
    fn a_bad_value_names_its_place() {
        let expected = "expected 1-9223372036 in whole seconds, such as 90 or 1m30s \
                        (units: ms, s, m, h, d, w)";
        for bad in ["0", "-1", "+1", "1.5", "x", "", "9223372037"] {
            let message = lease(Some(bad), &[]).expect_err(bad);
            assert_eq!(
                message,
                format!("invalid value '{bad}' for --default-lease-ttl: {expected}")
            );
        }
        let message =
            lease(None, &[("DFLOCKD_DEFAULT_LEASE_TTL_S", "soon")]).expect_err("no number");
        assert_eq!(
            message,
            format!("invalid value 'soon' for DFLOCKD_DEFAULT_LEASE_TTL_S: {expected}")
        );
    }
}
