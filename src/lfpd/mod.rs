//! The program `lfpd`: options, wiring, signals and exit codes. See lfpd(8).

mod command;
mod holders;
mod locks;
mod options;
mod peer;
mod places;
mod reply;
mod session;
mod sock_diag;
mod uucp;
mod wire;

use std::fmt::Display;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{unbounded, Receiver};
use log::{info, warn};
use rustix::net::sockopt;
use rustix::process::{getrlimit, getuid, setrlimit, Resource, Rlimit};
use rustix::stdio;
use rustix::system::uname;
use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXFSZ};
use signal_hook::iterator::Signals;

use crate::cli::arguments::{self, Parsed};
use crate::net::connections::{Admission, Connections};
use crate::net::inherited::{self, Inherited, NotListening};
use crate::net::listener::{accept_from_all, Listener};
use crate::net::workers::Workers;
use crate::server::{print, refuse, start_log, CANNOT_START, USAGE};
use crate::sys::thread::spawn;
use crate::text::{reason, Escaped};
use holders::{Holders, MAX_HOLDERS};
use locks::{LockRules, Locks};
use options::{Flags, Options, Source};
use peer::{NotLocal, Peer};
use places::Places;
use reply::TURNED_AWAY;
use session::ConversationRules;
use uucp::files::SerialLockFiles;
use wire::Wire;

const PROGRAM: &str = "lfpd";

/// For how long what has been received may take to be done at the end, and the last log lines to leave.
const FAREWELL: Duration = Duration::from_secs(4);
const LAST_LINES: Duration = Duration::from_millis(300);

/// Anybody may connect to the Unix socket: who may lock what is decided by the peer's user.
const UNIX_MODE: u32 = 0o666;

/// Descriptors that are neither for connections nor for processes that are watched.
const RESERVED_DESCRIPTORS: usize = 64;

/// Connections of which we do not know yet whether they get a place, beside those that have one.
const MAX_NEWCOMERS: usize = 16;

/// Runs the server: reads the arguments, serves, and returns what the process shall exit with (lfpd(8),
/// EXIT STATUS).
pub fn main() -> ExitCode {
    let arguments = options::with_the_usual_address(std::env::args_os().skip(1));
    let flags: Flags = match arguments::parse(PROGRAM, &options::BOOLEANS, arguments) {
        Parsed::Run(flags) => flags,
        Parsed::Print(text) => return print(&text),
        Parsed::Usage(reason) => return refuse(PROGRAM, USAGE, reason),
    };
    let inherited = match inherited::any_from_environment() {
        Ok(inherited) => inherited,
        Err(reason) => return refuse(PROGRAM, CANNOT_START, reason),
    };
    let options = match Options::new(flags, !inherited.is_empty()) {
        Ok(options) => options,
        Err(reason) => return refuse(PROGRAM, USAGE, reason),
    };
    if options.source == Source::Inetd && rustix::termios::isatty(stdio::stdin()) {
        return refuse(
            PROGRAM,
            USAGE,
            "descriptor 0 is a terminal, not a socket: give --listen 127.0.0.1:50001, or --stdio",
        );
    }
    match run(&options, inherited) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => refuse(PROGRAM, CANNOT_START, reason),
    }
}

/// Serves until told to stop, or until the one connection is over.
fn run(options: &Options, inherited: Vec<Inherited>) -> Result<(), String> {
    let log = start_log(options.log)?;
    let signals =
        watch_signals().map_err(|error| format!("cannot catch signals: {}", reason(&error)))?;
    match connections_from(&options.source, inherited)? {
        Connected::Once(peer) => {
            serve_one(options, stdio::stdin(), stdio::stdout(), peer, &signals)
        }
        Connected::OnceBy(socket) => {
            serve_one(
                options,
                socket.as_fd(),
                socket.as_fd(),
                peer_of(&socket),
                &signals,
            );
        }
        Connected::Often(listeners) => serve_all(options, listeners, &signals)?,
    }
    log.flush(LAST_LINES);
    Ok(())
}

/// How often somebody connects.
enum Connected {
    /// The connection is there, on descriptors 0 and 1.
    Once(Result<Peer, NotLocal>),
    /// The connection is there, on a descriptor of its own.
    OnceBy(OwnedFd),
    /// As often as these let somebody in.
    Often(Vec<Listener>),
}

fn connections_from(source: &Source, inherited: Vec<Inherited>) -> Result<Connected, String> {
    match source {
        Source::Environment => connections_of(inherited),
        Source::Inetd => match inherited::any_from_stdin() {
            Ok(Inherited::Listening(listener)) => Ok(Connected::Often(vec![listener])),
            Ok(Inherited::Connected(socket)) => Ok(Connected::Once(peer_of(&socket))),
            Err(NotListening::Io(error)) => {
                Err(format!("cannot serve descriptor 0: {}", reason(&error)))
            }
            Err(_) => Err("cannot serve descriptor 0: it is not a stream socket".into()),
        },
        Source::Stdio => {
            let stdin = stdio::stdin();
            let is_socket = sockopt::socket_type(stdin).is_ok();
            // Whoever has started us on a pipe or a terminal answers for what comes from there.
            let starter = || Ok(Peer(Some(getuid().as_raw())));
            Ok(Connected::Once(if is_socket {
                peer_of(&stdin)
            } else {
                starter()
            }))
        }
        Source::Bound { tcp, unix } => {
            let mut listeners = Vec::new();
            for addr in tcp {
                let listener = Listener::bind_tcp(*addr);
                listeners.push(listener.map_err(|error| cannot_listen(addr, &error))?);
            }
            if let Some(path) = unix {
                let listener = Listener::bind_unix(path, UNIX_MODE, None);
                listeners.push(listener.map_err(|error| cannot_listen(&shown(path), &error))?);
            }
            Ok(Connected::Often(listeners))
        }
    }
}

/// Either one connection, or sockets to listen on.
fn connections_of(inherited: Vec<Inherited>) -> Result<Connected, String> {
    let mut listeners = Vec::new();
    let count = inherited.len();
    for socket in inherited {
        match socket {
            Inherited::Listening(listener) => listeners.push(listener),
            Inherited::Connected(socket) if count == 1 => return Ok(Connected::OnceBy(socket)),
            Inherited::Connected(_) => {
                return Err("LISTEN_FDS: a connection must be the only socket".into())
            }
        }
    }
    Ok(Connected::Often(listeners))
}

fn peer_of(socket: &impl AsFd) -> Result<Peer, NotLocal> {
    // Each reply is a write of its own, and is to leave at once. Unix sockets do that anyway.
    let _ = sockopt::set_tcp_nodelay(socket, true);
    Peer::of(socket)
}

fn cannot_listen(place: &dyn Display, error: &io::Error) -> String {
    let reason = match error.kind() {
        io::ErrorKind::AddrInUse => "address already in use".into(),
        _ => reason(error),
    };
    format!("cannot listen on {place}: {reason}")
}

fn locks(options: &Options, holders: Option<Holders>) -> Locks {
    let files = SerialLockFiles::new(options.lock_dir.clone(), options.search_dirs.clone());
    let rules = LockRules {
        peer_rule: options.peer_rule,
        require_live_pid: options.require_live_pid,
        chown: options.chown,
        devices: "/dev".into(),
    };
    Locks::new(files, rules, holders)
}

fn session_rules(options: &Options) -> ConversationRules {
    ConversationRules {
        hostname: hostname(),
        idle_timeout: options.idle_timeout,
    }
}

/// The name of this host, fit for the middle of a line.
fn hostname() -> String {
    let name = uname();
    let name = name.nodename().to_bytes();
    let printable = name.iter().filter(|byte| byte.is_ascii_graphic());
    let name: String = printable.map(|byte| char::from(*byte)).collect();
    match name.as_str() {
        "" => "localhost".into(),
        _ => name,
    }
}

/// Serves the one connection until it ends.
fn serve_one(
    options: &Options,
    input: BorrowedFd<'_>,
    output: BorrowedFd<'_>,
    peer: Result<Peer, NotLocal>,
    signals: &EndSignals,
) {
    let locks = locks(options, None);
    let wire = Wire::new(input, output, signals.stop.as_fd());
    session::serve(&wire, peer, None, &locks, &session_rules(options));
}

/// Serves whoever the listeners let in, each on a thread, until a signal.
fn serve_all(
    options: &Options,
    listeners: Vec<Listener>,
    signals: &EndSignals,
) -> Result<(), String> {
    let max_holders = allow_descriptors(options.max_connections);
    let holders = Holders::new(max_holders)
        .map_err(|error| format!("cannot watch processes: {}", reason(&error)))?;
    let locks = Arc::new(locks(options, Some(holders)));
    let reaper = Arc::clone(&locks);
    spawn("reaper", move || reaper.reap()).map_err(no_thread)?;

    let connections = Connections::new(options.max_connections.saturating_add(MAX_NEWCOMERS))
        .with_farewell(TURNED_AWAY);
    let connections = Arc::new(connections);
    let workers = {
        let (locks, rules) = (Arc::clone(&locks), session_rules(options));
        let places = Arc::new(Places::new(options.max_connections));
        let stop = Arc::clone(&signals.stop);
        Arc::new(Workers::new(move |admission: Admission| {
            converse(admission, &places, &locks, &rules, stop.as_fd());
        }))
    };
    info!("starting version={}", env!("CARGO_PKG_VERSION"));
    if let Err(error) = std::fs::metadata(&options.lock_dir) {
        let (path, reason) = (shown(&options.lock_dir), reason(&error));
        warn!("no-lock-directory path={path} error=\"{reason}\"");
    }
    let listeners: Arc<[Listener]> = listeners.into();
    for listener in listeners.iter() {
        info!("listening at={listener}");
    }
    accept_from_all(&listeners, &connections, &workers).map_err(no_thread)?;
    if options.print_port {
        let port = listeners.iter().find_map(Listener::port).unwrap_or(0);
        let printed = writeln!(io::stdout(), "{port}").and_then(|()| io::stdout().flush());
        printed.map_err(|error| format!("cannot print the port: {}", reason(&error)))?;
    }

    // Fails only if nobody listens to signals any more, which is as good a reason to stop.
    let _ = signals.received.recv();
    info!("stopping");
    connections.close();
    connections.wait_until_none(FAREWELL);
    locks.finish();
    listeners.iter().for_each(Listener::clean_up);
    Ok(())
}

/// One connection, from its admission to its end.
fn converse(
    admission: Admission,
    places: &Arc<Places>,
    locks: &Locks,
    rules: &ConversationRules,
    stop: BorrowedFd<'_>,
) {
    let admission = Arc::new(admission);
    let socket = admission.stream().as_fd();
    let peer = Peer::of(&socket);
    let user = *peer.as_ref().unwrap_or(&Peer(None));
    let Some(place) = places.take(user, &admission) else {
        // No lingering: a user who has its share could fill the room for newcomers with that.
        return admission.stream().send_once(TURNED_AWAY);
    };
    let wire = Wire::new(socket, socket, stop);
    session::serve(&wire, peer, Some(&place), locks, rules);
}

fn no_thread(error: io::Error) -> String {
    format!("cannot start a thread: {}", reason(&error))
}

/// The signals that end us.
struct EndSignals {
    received: Receiver<i32>,
    /// Readable once one has come.
    stop: Arc<OwnedFd>,
}

/// Catches the signals that end us. Those that must not end us are caught and forgotten; SIGPIPE is
/// ignored from the start in every Rust program.
fn watch_signals() -> io::Result<EndSignals> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2, SIGXFSZ])?;
    let (sender, received) = unbounded();
    let (alarm, stop) = UnixStream::pair()?;
    spawn("signals", move || {
        for signal in signals.forever() {
            if matches!(signal, SIGTERM | SIGINT) {
                let _ = alarm.shutdown(std::net::Shutdown::Both);
                let _ = sender.send(signal);
            }
        }
    })?;
    Ok(EndSignals {
        received,
        stop: Arc::new(stop.into()),
    })
}

/// Asks for as many descriptors as we may need, and returns how many processes may be watched with what
/// we get: a descriptor each, and at least a quarter of all.
fn allow_descriptors(max_connections: usize) -> usize {
    let limit = getrlimit(Resource::Nofile);
    let others = RESERVED_DESCRIPTORS.saturating_add(max_connections);
    let wanted = others.saturating_add(MAX_HOLDERS) as u64;
    let current = limit.current.unwrap_or(wanted);
    let raised = wanted.min(limit.maximum.unwrap_or(wanted)).max(current);
    let raise = Rlimit {
        current: Some(raised),
        ..limit
    };
    let allowed = match setrlimit(Resource::Nofile, raise) {
        Ok(()) => raised,
        Err(_) => current,
    };
    let allowed = usize::try_from(allowed).unwrap_or(usize::MAX);
    let spare = allowed.saturating_sub(others).max(allowed / 4);
    spare.min(MAX_HOLDERS)
}

/// A path for a message: in one line, whatever is in it.
fn shown(path: &Path) -> Escaped<'_> {
    Escaped(path.as_os_str().as_bytes())
}
