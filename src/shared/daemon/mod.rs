//! The start and the end of a server: its messages, its log, its signals and its sockets. Under
//! inetd, stderr may be a client's socket; only the protocol may be written there.

use std::fmt::Display;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use crossbeam_channel::{unbounded, Receiver};
use log::warn;
use nix::sys::signal::SigSet;
use rustix::process::{getrlimit, setrlimit, wait, Resource, Rlimit, WaitOptions};
use signal_hook::consts::signal::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXFSZ};
use signal_hook::iterator::Signals;

use crate::os::directory::naming_directory;
use crate::os::event::Event;
use crate::os::output;
use crate::os::text::{reason, Escaped};
use crate::os::thread;
use crate::shared::log::{syslog, Log, LogRules, LogTarget};
use crate::shared::net::inherited;
use crate::shared::net::listener::Listener;

/// Exit status: the server cannot start.
pub const CANNOT_START: u8 = 1;
/// Exit status: the command line or a variable asks for something impossible.
pub const USAGE: u8 = 2;

/// The number of attempts to find a port that is free at all addresses.
const PORT_ATTEMPTS: u32 = 8;

/// How long a server under inetd that cannot serve waits before it exits.
const PAUSE_BEFORE_RESTART: Duration = Duration::from_secs(1);

/// Prints a text instead of serving, and returns the exit status.
pub fn print(program: &str, text: &str) -> ExitCode {
    match output::print_if_read(text) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => refuse(program, CANNOT_START, output::unprintable(&error)),
    }
}

/// Reports in one line why `program` does not serve, and returns the exit status. The line goes to
/// stderr, unless a client would read it there. Under inetd, the line also goes to the syslog. The
/// exit is then delayed, because inetd starts the next server at once while a client waits.
pub fn refuse(program: &str, status: u8, reason: impl Display) -> ExitCode {
    if !inherited::is_client_socket(io::stderr()) {
        output::complain(program, &reason);
    }
    if inherited::started_by_inetd() {
        syslog::report(program, &reason);
        std::thread::sleep(PAUSE_BEFORE_RESTART);
    }
    ExitCode::from(status)
}

/// Starts the log of `program`, and returns what `serve` returns once all lines have been written:
/// they may say why a server does not start. Blocks for `serve`, then for at most two seconds.
pub fn with_log<T>(
    program: &'static str,
    rules: &LogRules,
    serve: impl FnOnce(&Log) -> Result<T, String>,
) -> Result<T, String> {
    let log = start_log(program, rules)?;
    let served = serve(&log);
    log.flush();
    served
}

/// Starts the log. If a client would read stderr, nothing is logged there, and the messages of
/// panics go to the syslog.
fn start_log(program: &'static str, rules: &LogRules) -> Result<Log, String> {
    if inherited::is_client_socket(io::stderr()) {
        std::panic::set_hook(Box::new(move |panic| {
            syslog::report(program, panic.to_string().replace('\n', " "));
        }));
        if rules.target == LogTarget::Stderr {
            return Ok(Log::silent());
        }
    }
    Log::start(program, rules).map_err(|error| match &rules.target {
        LogTarget::File(path) => {
            let reason = reason(&naming_directory(path, error));
            format!("cannot open the log file {}: {reason}", Escaped::path(path))
        }
        LogTarget::Stderr | LogTarget::Syslog => cannot("start the log")(error),
    })
}

/// Starts a thread. The error is a single-line message.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), String> {
    thread::spawn(name, body).map_err(no_thread)
}

/// The message for a thread that could not be started.
pub fn no_thread(error: io::Error) -> String {
    cannot("start a thread")(error)
}

/// The message for a failed system call. `what` is what the server tried to do.
pub fn cannot(what: &str) -> impl Fn(io::Error) -> String + '_ {
    move |error| format!("cannot {what}: {}", reason(&error))
}

/// SIGTERM and SIGINT, which end a server.
pub struct EndSignals {
    /// One message for each signal.
    pub received: Receiver<()>,
    /// Readable as soon as a signal has arrived.
    pub stop: Event,
}

/// From now on, catches the signals that must not end a server. [`watch_signals`] acts on them.
/// SIGPIPE is not one of them, because Rust ignores it in every program.
pub fn catch_signals() -> Result<Signals, String> {
    let signals = Signals::new([SIGHUP, SIGUSR1, SIGUSR2, SIGXFSZ, SIGCHLD]);
    let signals = signals.map_err(cannot("catch signals"))?;
    // A parent process that waits for its own signals may have blocked all signals, and this
    // process inherits the blocked signals.
    let _ = SigSet::empty().thread_set_mask();
    Ok(signals)
}

/// Also catches SIGTERM and SIGINT. At SIGHUP, reopens the log file and calls `reload` for other
/// files. Reaps the children that have ended: a server starts none, but may inherit some. Ignores
/// the other signals.
pub fn watch_signals(
    mut signals: Signals,
    log: &Log,
    reload: impl Fn() + Send + 'static,
) -> Result<EndSignals, String> {
    let no_signals = cannot("catch signals");
    for signal in [SIGTERM, SIGINT] {
        signals.add_signal(signal).map_err(&no_signals)?;
    }
    let (sender, received) = unbounded();
    let stop = Event::new().map_err(&no_signals)?;
    let (log, stopping) = (log.clone(), stop.clone());
    let listen = move || {
        reap_children(); // those that ended before the signals were caught
        for signal in signals.forever() {
            match signal {
                SIGTERM | SIGINT => {
                    stopping.set();
                    let _ = sender.send(());
                }
                SIGHUP => {
                    log.reopen();
                    reload();
                }
                _ => reap_children(),
            }
        }
    };
    thread::spawn("signals", listen).map_err(no_signals)?;
    Ok(EndSignals { received, stop })
}

fn reap_children() {
    while matches!(wait(WaitOptions::NOHANG), Ok(Some(_))) {}
}

/// Listens on `addresses`, and on a Unix socket at `path`. `mode` and `group` say who may connect
/// to the Unix socket. The error names the address or path.
pub fn listen(
    addresses: &[SocketAddr],
    path: Option<&Path>,
    mode: u32,
    group: Option<u32>,
) -> Result<Vec<Listener>, String> {
    let mut listeners = bind_all(addresses)?;
    if let Some(path) = path {
        let bound = Listener::bind_unix(path, mode, group);
        let bound = bound.map_err(|error| naming_directory(path, error));
        listeners.push(bound.map_err(|error| cannot_listen(&Escaped::path(path), &error))?);
    }
    Ok(listeners)
}

/// Binds all addresses. If their port is 0, all of them get the same port. If that port is taken at
/// one of the addresses, another port is tried.
fn bind_all(addresses: &[SocketAddr]) -> Result<Vec<Listener>, String> {
    let picks_port = addresses.len() > 1 && addresses[0].port() == 0;
    let mut attempts_left = if picks_port { PORT_ATTEMPTS } else { 1 };
    loop {
        attempts_left -= 1;
        match bind_each(addresses) {
            Err((_, error)) if error.kind() == io::ErrorKind::AddrInUse && attempts_left > 0 => {}
            bound => return bound.map_err(|(address, error)| cannot_listen(&address, &error)),
        }
    }
}

/// Binds each address once. An address that this host does not have is skipped if another address
/// can be bound, because a name may also have addresses of other hosts.
fn bind_each(addresses: &[SocketAddr]) -> Result<Vec<Listener>, (SocketAddr, io::Error)> {
    let (mut listeners, mut lacking) = (Vec::new(), Vec::new());
    for mut address in addresses.iter().copied() {
        if let (0, Some(port)) = (address.port(), listeners.first().and_then(Listener::port)) {
            address.set_port(port);
        }
        match Listener::bind_tcp(address) {
            Ok(listener) => listeners.push(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
                lacking.push((address, error));
            }
            Err(error) => return Err((address, error)),
        }
    }
    if listeners.is_empty() && !lacking.is_empty() {
        return Err(lacking.remove(0));
    }
    for (address, error) in lacking {
        warn!("cannot-listen addr={address} error=\"{}\"", reason(&error));
    }
    Ok(listeners)
}

fn cannot_listen(place: &dyn Display, error: &io::Error) -> String {
    let reason = match error.kind() {
        io::ErrorKind::AddrInUse => "address already in use".into(),
        _ => reason(error),
    };
    format!("cannot listen on {place}: {reason}")
}

/// Prints the port of the first TCP listener on stdout.
pub fn print_port(listeners: &[Listener]) -> Result<(), String> {
    let Some(port) = listeners.iter().find_map(Listener::port) else {
        return Ok(());
    };
    match output::print(&format!("{port}\n")) {
        // Under inetd, stdout is the listening socket.
        Err(error) if !inherited::is_client_socket(io::stdout()) => {
            Err(output::unprintable(&error))
        }
        _ => Ok(()),
    }
}

/// When dropped, removes the Unix sockets that this process has bound. This also happens if the
/// server cannot start after all. The listeners cannot remove the sockets, because the accepting
/// threads keep the listeners until the process ends.
pub struct CleanUp<'a>(pub &'a [Listener]);

impl Drop for CleanUp<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(Listener::clean_up);
    }
}

/// Keeps a crash from leaving a core file, which would contain the server's secrets.
pub fn leave_no_core() {
    let limit = getrlimit(Resource::Core);
    // A limit of 1 also disables a piped core_pattern; 0 does not.
    let little = limit.maximum.map_or(1, |maximum| maximum.min(1));
    let little = Rlimit {
        current: Some(little),
        ..limit
    };
    // Any process may set a limit up to the maximum, so this cannot fail.
    let _ = setrlimit(Resource::Core, little);
}

/// Raises the limit of descriptors to `wanted`, as far as allowed, and returns the new limit.
pub fn raise_descriptor_limit(wanted: u64) -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let current = limit.current.unwrap_or(u64::MAX);
    let raised = wanted.min(limit.maximum.unwrap_or(u64::MAX)).max(current);
    let raise = Rlimit {
        current: Some(raised).filter(|raised| *raised != u64::MAX),
        ..limit
    };
    match setrlimit(Resource::Nofile, raise) {
        Ok(()) => raised,
        Err(_) => current,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(addresses: &[&str]) -> Result<Vec<String>, String> {
        let parsed = addresses.iter().map(|address| address.parse());
        let parsed: Vec<SocketAddr> = parsed.map(|address| address.expect("valid")).collect();
        let listeners = bind_all(&parsed)?;
        let port = listeners[0].port().expect("it is TCP");
        let same = listeners.iter().all(|it| it.port() == Some(port));
        assert!(same, "{listeners:?}");
        let shown = listeners.iter().map(|it| it.to_string());
        Ok(shown
            .map(|it| it.replace(&port.to_string(), "PORT"))
            .collect())
    }

    #[test]
    fn all_addresses_get_the_port_that_the_first_one_picks() {
        let listening = bound(&["127.0.0.1:0", "127.0.0.2:0", "127.0.0.3:0"]);
        let expected = ["127.0.0.1:PORT", "127.0.0.2:PORT", "127.0.0.3:PORT"];
        assert_eq!(listening, Ok(expected.map(str::to_owned).into()));
    }

    #[test]
    fn an_address_of_another_host_is_skipped_unless_it_is_alone() {
        let elsewhere = "192.0.2.1:0"; // reserved for documentation
        let listening = bound(&[elsewhere, "127.0.0.1:0"]);
        assert_eq!(listening, Ok(vec!["127.0.0.1:PORT".to_owned()]));
        let message = bound(&[elsewhere]).expect_err("it is alone");
        assert!(
            message.starts_with("cannot listen on 192.0.2.1:0: "),
            "{message}"
        );
    }
}
