//! What the options of `latchd` mean: values that exclude each other are refused, and those options
//! that say one thing together are combined. Nothing is opened or resolved yet.

mod cluster;

use std::ffi::OsString;
use std::path::PathBuf;

use super::listen_host::{without_last_dot, HttpPlaces, ListenHost};
use super::options::{Options, SELF, STATE_FILE};
use crate::latchd::cluster::ClusterSettings;
use crate::latchd::http::HttpAddresses;
use crate::os::secret;
use crate::os::text::{host_and_port, Escaped};
use crate::shared::cli::arguments::Origins;
use crate::shared::cli::rows::{Effect, Row};
use crate::shared::log::{self, LogRules, LogTarget};

#[derive(Debug)]
pub enum Sockets {
    /// The server binds these sockets itself. There is at least one.
    Bound {
        tcp: Option<(ListenHost, u16)>,
        unix: Option<PathBuf>,
    },
    /// Descriptor 0 is a listening socket.
    Stdin,
    /// LISTEN_FDS names listening sockets.
    Environment,
}

/// Where the auth token comes from.
#[derive(Debug)]
pub enum AuthTokenSource {
    /// From the command line, where `ps` shows it.
    Argument(String),
    Variable(String),
    File(PathBuf),
}

/// What the options mean together.
#[derive(Debug)]
pub struct ServerSettings {
    pub sockets: Sockets,
    pub auth: Option<AuthTokenSource>,
    /// Where statistics are shown over HTTP.
    pub http: Option<HttpAddresses>,
    /// `None` for a single server.
    pub cluster: Option<ClusterSettings>,
    pub log: LogRules,
    /// The options and variables of dflockd that are set and have no effect, with the reason.
    pub without_effect: Vec<(String, &'static str)>,
    /// Where `--http-port` comes from, with which dflockd grants locks over HTTP, if it does not do
    /// so here.
    pub read_only_door: Option<String>,
}

impl ServerSettings {
    /// Combines the options into settings. `inherits` says whether LISTEN_FDS names sockets for
    /// this process. `rust_log` is the value of RUST_LOG.
    pub fn new(
        options: &Options,
        origins: &Origins,
        inherits: bool,
        rust_log: Option<OsString>,
    ) -> Result<ServerSettings, String> {
        check(options, origins)?;
        let http_port = options.http_port.filter(|_| !options.http_grants);
        Ok(ServerSettings {
            without_effect: without_effect(origins),
            read_only_door: http_port.and(origins.get("--http-port")).map(str::to_owned),
            cluster: cluster::resolve(options, origins, inherits)?,
            sockets: sockets(options, origins, inherits)?,
            http: http_addresses(options),
            auth: auth(options, origins)?,
            log: log_rules(options, rust_log)?,
        })
    }
}

fn check(options: &Options, origins: &Origins) -> Result<(), String> {
    check_expected(options, origins)?;
    let first = |names: &[&str]| names.iter().find_map(|name| origins.get(name));
    match options.port {
        // Clients would not find the next server.
        Some(0) => first(STATE_FILE).map_or(Ok(()), |origin| {
            Err(format!("{origin}: cannot be given together with --port 0"))
        }),
        None => first(&["--tls-cert"])
            .map_or(Ok(()), |origin| Err(format!("{origin}: there is no port"))),
        Some(_) => Ok(()),
    }
}

/// The options and variables that are set and have no effect, with the reason.
fn without_effect(origins: &Origins) -> Vec<(String, &'static str)> {
    let ignored = |row: &Row| match row.effect {
        Effect::Ignored(why) => Some((origins.get(&row.long())?.to_owned(), why)),
        _ => None,
    };
    SELF.own.rows.iter().filter_map(ignored).collect()
}

/// The maximum number of keys of `--expect`.
const MAX_EXPECTED: usize = 256;

/// Refuses to expect work under a key twice, or under too many keys.
fn check_expected(options: &Options, origins: &Origins) -> Result<(), String> {
    let mut keys: Vec<&str> = options.expected().map(|(key, _)| key).collect();
    keys.sort_unstable();
    let why = match keys.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(twice) => format!("the key {} is given twice", Escaped(twice[0].as_bytes())),
        None if keys.len() > MAX_EXPECTED => format!("more than {MAX_EXPECTED} keys"),
        None => return Ok(()),
    };
    let origin = origins.get("--expect").unwrap_or_default();
    Err(format!("{origin}: {why}"))
}

/// The sockets to serve. If the sockets are inherited, options for other sockets are refused,
/// because the server would have to ignore them.
fn sockets(options: &Options, origins: &Origins, inherits: bool) -> Result<Sockets, String> {
    let mut binding = ["--host", "--port", "--unix", "--unix-mode", "--unix-group"].iter();
    let given = binding.find_map(|option| origins.get(option));
    if inherits || options.inetd {
        return match given {
            Some(origin) => Err(format!("{origin}: the sockets are inherited")),
            None if inherits => Ok(Sockets::Environment),
            None => Ok(Sockets::Stdin),
        };
    }
    match (options.port, &options.unix) {
        (None, None) => Err("--port off: nothing to listen on without --unix".into()),
        (None, _) if options.print_port => Err("--print-port: there is no port".into()),
        (port, unix) => Ok(Sockets::Bound {
            tcp: port.map(|port| (options.host.clone(), port)),
            unix: unix.clone(),
        }),
    }
}

fn auth(options: &Options, origins: &Origins) -> Result<Option<AuthTokenSource>, String> {
    let Some(token) = &options.auth_token else {
        return Ok(options.auth_token_file.clone().map(AuthTokenSource::File));
    };
    let origin = origins.get("--auth-token").unwrap_or_default();
    let secret = secret::check(token).map_err(|reason| format!("{origin}: {reason}"))?;
    Ok(Some(match origin {
        "--auth-token" => AuthTokenSource::Argument(secret.to_owned()),
        _ => AuthTokenSource::Variable(secret.to_owned()),
    }))
}

/// The rules of the log. `rust_log` is the value of RUST_LOG.
fn log_rules(options: &Options, rust_log: Option<OsString>) -> Result<LogRules, String> {
    Ok(LogRules {
        directives: log::directives(options.debug, rust_log)?,
        timestamps: options.log_timestamps,
        target: LogTarget::of_options(options.log.as_ref(), options.log_file.as_deref()),
    })
}

/// Where the HTTP server will listen, if the options ask for one.
fn http_addresses(options: &Options) -> Option<HttpAddresses> {
    let host = options.http_host.as_ref().unwrap_or(&options.host);
    let beside = options.http_port.map(|port| (host.clone(), port));
    let places = options.http.iter().flatten().cloned().chain(beside);
    let places: HttpPlaces = places.collect();
    if places.is_empty() {
        return None;
    }
    let advertised = options.advertise.as_deref().and_then(host_and_port);
    let advertised = advertised.map(|(host, _)| host.to_owned());
    let hosts = places.iter().map(|(host, _)| host).chain([&options.host]);
    let names = hosts.map(ListenHost::to_string).chain(advertised);
    let names = names.chain(options.http_name.iter().flatten().cloned());
    let names = names.map(|name| without_last_dot(&name).to_owned());
    Some(HttpAddresses {
        names: names.collect(),
        places,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;
    use std::net::SocketAddr;

    use crate::latchd::start::options;
    use crate::shared::cli::arguments::Parsed;

    fn read_all(
        arguments: &[&str],
        variables: &[(&str, &str)],
    ) -> Result<(Options, Origins), String> {
        let variables: HashMap<&str, &str> = variables.iter().copied().collect();
        let lookup = |name: &str| variables.get(name).map(|value| (*value).to_owned());
        let (parsed, origins) = options::read(arguments.iter().map(OsString::from), &lookup);
        match parsed {
            Parsed::Run(options) => check(&options, &origins).map(|()| (options, origins)),
            Parsed::Usage(reason) => Err(reason),
            Parsed::Print(text) => panic!("{text}"),
        }
    }

    fn auth(
        arguments: &[&str],
        variables: &[(&str, &str)],
    ) -> Result<Option<AuthTokenSource>, String> {
        let (options, origins) = read_all(arguments, variables)?;
        super::auth(&options, &origins)
    }

    #[test]
    fn no_auto_release_overrules_the_variable_but_not_the_flag() {
        let yes = ("LATCHD_AUTO_RELEASE_ON_DISCONNECT", "yes");
        let no = "--no-auto-release-on-disconnect";
        let (options, _) = read_all(&[no], &[yes]).expect("they go together");
        assert!(!options.auto_release());
        let (options, _) = read_all(&["--no-auto-release-on-disconnect=no"], &[]).expect("fine");
        assert!(options.auto_release());
        let old = ("DFLOCKD_AUTO_RELEASE_ON_DISCONNECT", "no");
        let (options, _) = read_all(&[], &[old]).expect("it is alone");
        assert!(!options.auto_release());
        assert!(read_all(&[no, "--auto-release-on-disconnect"], &[]).is_err());
    }

    #[test]
    fn the_token_has_the_order_of_sources_of_other_options() {
        let (ours, old) = (("LATCHD_AUTH_TOKEN", "ours"), ("DFLOCKD_AUTH_TOKEN", "old"));
        let file = ("LATCHD_AUTH_TOKEN_FILE", "f");
        let old_file = ("DFLOCKD_AUTH_TOKEN_FILE", "f");
        let empty = ("LATCHD_AUTH_TOKEN", "");
        let flag = ["--auth-token", " flag\n"];
        let file_flag = ["--auth-token-file", "f"];
        for (arguments, variables, expected) in [
            (&flag[..], [ours, old], "argument flag"),
            (&flag, [file, old], "argument flag"),
            (&file_flag, [ours, old], "file f"),
            (&[], [ours, old], "variable ours"),
            (&[], [ours, old_file], "variable ours"),
            (&[], [file, old], "file f"),
            (&[], [empty, old], "variable old"),
            (&[], [empty, file], "file f"),
        ] {
            let found = auth(arguments, &variables).expect("one a level");
            let found = match found.expect("there is one") {
                AuthTokenSource::Argument(token) => format!("argument {token}"),
                AuthTokenSource::Variable(token) => format!("variable {token}"),
                AuthTokenSource::File(path) => format!("file {}", path.display()),
            };
            assert_eq!(found, expected, "{arguments:?} {variables:?}");
        }
        assert!(auth(&[flag, file_flag].concat(), &[]).is_err());
        assert!(auth(&[], &[ours, file]).is_err());
        assert!(auth(&[], &[old, old_file]).is_err());
    }

    #[test]
    fn the_log_goes_to_one_place_and_a_flag_beats_both_variables() {
        let target = |arguments: &[&str], variables: &[(&str, &str)]| {
            let (options, _) = read_all(arguments, variables)?;
            log_rules(&options, None).map(|rules| rules.target)
        };
        let (file, syslog) = (("LATCHD_LOG_FILE", "f"), ("DFLOCKD_LOG", "syslog"));
        assert_eq!(target(&[], &[]), Ok(LogTarget::Stderr));
        assert_eq!(target(&[], &[syslog]), Ok(LogTarget::Syslog));
        assert_eq!(
            target(&[], &[file, syslog]),
            Ok(LogTarget::File("f".into()))
        );
        assert_eq!(target(&["--log", "stderr"], &[file]), Ok(LogTarget::Stderr));
        assert_eq!(
            target(&["--log", "syslog", "--log-file", "f"], &[]),
            Err("--log-file: cannot be given together with --log".into())
        );
        assert_eq!(
            target(&["--log", "file"], &[]),
            Err("invalid value 'file' for --log: expected stderr or syslog".into())
        );
    }

    #[test]
    fn an_unusable_token_is_refused_without_being_shown() {
        for token in ["", " \t\n", "a\nb", "a\rb"] {
            let message = auth(&["--auth-token", token], &[]).expect_err("unusable");
            assert!(message.starts_with("--auth-token: the token "), "{message}");
        }
        let twice = ["--auth-token=hunter2", "--auth-token=hunter2"];
        let message = auth(&twice, &[]).expect_err("twice");
        assert!(!message.contains("hunter2"), "{message}");
    }

    #[test]
    fn a_host_is_an_address_or_a_name() {
        let tcp = |host: &str| -> Result<Vec<String>, String> {
            let (options, origins) = read_all(&["--host", host], &[])?;
            let Sockets::Bound { tcp, .. } = sockets(&options, &origins, false)? else {
                panic!("nothing is inherited");
            };
            let (host, port) = tcp.expect("a port");
            let addresses = host.addresses(port)?;
            Ok(addresses.iter().map(SocketAddr::to_string).collect())
        };
        let one = |address: &str| Ok(vec![address.to_owned()]);
        assert_eq!(tcp("::1"), one("[::1]:6388"));
        assert_eq!(tcp("[::1]"), one("[::1]:6388"));
        assert_eq!(tcp("localhost"), one("127.0.0.1:6388"));
        assert_eq!(tcp("127.1"), one("127.0.0.1:6388"));
        for zone in ["lo", "1"] {
            assert_eq!(tcp(&format!("fe80::1%{zone}")), one("[fe80::1%1]:6388"));
            assert_eq!(tcp(&format!("[fe80::1%{zone}]")), one("[fe80::1%1]:6388"));
        }
        let bad = [
            "[127.0.0.1]",
            "127.0.0.1:1",
            "",
            "a b",
            "[a]",
            "fe80::1%",
            "a%lo",
        ];
        for host in bad {
            let message = tcp(host).expect_err(host);
            assert!(message.starts_with("invalid value"), "{message}");
        }
        let message = tcp("no-such-host.invalid").expect_err("it has no address");
        assert!(
            message.starts_with("cannot resolve no-such-host.invalid: "),
            "{message}"
        );
    }
}
