//! The program `lfpd`: see lfpd(8).

pub(crate) mod command;
mod holders;
mod locks;
mod options;
mod peer;
mod reply;
mod session;
pub(crate) mod uucp;
mod wire;

use std::os::fd::{AsFd, BorrowedFd};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use log::{info, warn};
use rustix::net::sockopt;
use rustix::process::getuid;
use rustix::stdio;
use rustix::system::uname;

use crate::os::text::{reason, Escaped};
use crate::shared::cli::arguments::Parsed;
use crate::shared::daemon::{self, refuse, EndSignals, CANNOT_START, USAGE};
use crate::shared::log::{Log, Throttle};
use crate::shared::net::connections::{Admission, Connections};
use crate::shared::net::inherited::{self, Inherited};
use crate::shared::net::listener::{accept_from_all, Listener};
use crate::shared::net::permits::share_of;
use crate::shared::net::workers::Workers;
use holders::{Holders, MAX_HOLDERS};
use locks::{LockRules, Locks};
pub use options::SELF;
use options::{ConnectionSource, Options};
use peer::Peer;
use reply::TURNED_AWAY;
use session::ConversationRules;
use uucp::files::SerialLockFiles;
use wire::Wire;

const PROGRAM: &str = "lfpd";

/// When the server stops, the maximum time for commands that have already arrived.
const FAREWELL: Duration = Duration::from_secs(4);

/// The mode of the Unix socket. Every user may connect; what a client may lock depends on its user.
const UNIX_MODE: u32 = 0o666;

/// The number of descriptors that are needed for anything but connections and watched processes.
const RESERVED_DESCRIPTORS: usize = 64;

/// Runs the server: reads the arguments, serves, and returns the exit status (lfpd(8), EXIT
/// STATUS).
pub fn main() -> ExitCode {
    let options = match options::read(std::env::args_os().skip(1)) {
        Parsed::Run(options) => options,
        Parsed::Print(text) => return daemon::print(PROGRAM, &text),
        Parsed::Usage(reason) => return refuse(PROGRAM, USAGE, reason),
    };
    match start(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err((status, reason)) => refuse(PROGRAM, status, reason),
    }
}

/// Checks the options against the environment, then serves. On failure, returns the exit status and
/// the reason.
fn start(options: &Options) -> Result<(), (u8, String)> {
    let usage = |reason| (USAGE, reason);
    let cannot_start = |reason| (CANNOT_START, reason);
    let inherited = inherited::from_environment(Ok).map_err(cannot_start)?;
    let source = options.source(!inherited.is_empty()).map_err(usage)?;
    if source == ConnectionSource::Inetd && rustix::termios::isatty(stdio::stdin()) {
        let hint = "give --listen 127.0.0.1:50001, or --stdio";
        let reason = format!("descriptor 0 is a terminal, not a socket: {hint}");
        return Err(usage(reason));
    }
    let log = options.log(std::env::var_os("RUST_LOG")).map_err(usage)?;
    let run = |log: &Log| run(options, log, source, inherited);
    daemon::with_log(PROGRAM, &log, run).map_err(cannot_start)
}

/// Serves until a signal tells the server to stop, or until the only connection ends.
fn run(
    options: &Options,
    log: &Log,
    source: ConnectionSource,
    inherited: Vec<Inherited>,
) -> Result<(), String> {
    let signals = daemon::watch_signals(daemon::catch_signals()?, log, || {})?;
    let inherited = match source {
        ConnectionSource::Environment => inherited,
        ConnectionSource::Inetd => vec![inherited::from_stdin().map_err(|error| {
            let reason = match error.raw_os_error() {
                Some(_) => reason(&error),
                None => "it is not a stream socket".into(),
            };
            format!("cannot serve descriptor 0: {reason}")
        })?],
        ConnectionSource::Stdio => {
            let (input, output) = (stdio::stdin(), stdio::stdout());
            serve_one(options, input, output, peer_of_stdin(), &signals);
            return Ok(());
        }
        ConnectionSource::Bound => {
            let unix = options.unix.as_deref();
            let listeners = daemon::listen(&options.listen, unix, UNIX_MODE, None)?;
            return serve_all(options, listeners, &signals);
        }
    };
    let mut listeners = Vec::new();
    let count = inherited.len();
    for socket in inherited {
        match socket {
            Inherited::Listening(listener) => listeners.push(listener),
            Inherited::Connected(socket) if count == 1 => {
                let peer = peer_of(&socket);
                serve_one(options, socket.as_fd(), socket.as_fd(), peer, &signals);
                return Ok(());
            }
            Inherited::Connected(_) => {
                return Err("LISTEN_FDS: a connection must be the only socket".into())
            }
        }
    }
    serve_all(options, listeners, &signals)
}

fn peer_of_stdin() -> Option<Peer> {
    match sockopt::socket_type(stdio::stdin()) {
        Ok(_) => peer_of(&stdio::stdin()),
        // The peer on a pipe or a terminal counts as the user who started this server.
        Err(_) => Some(Peer(Some(getuid().as_raw()))),
    }
}

fn peer_of(socket: &impl AsFd) -> Option<Peer> {
    // Each reply is one write and must leave at once. A Unix socket does not have this option, and
    // does not need it.
    let _ = sockopt::set_tcp_nodelay(socket, true);
    Peer::of(socket)
}

fn locks(options: &Options, holders: Option<Holders>) -> Locks {
    let files = SerialLockFiles::new(options.lock_dir.clone(), options.search_dirs());
    let rules = LockRules {
        peer_rule: options.peer_uid,
        require_live_pid: options.require_live_pid,
        devices: "/dev".into(),
    };
    Locks::new(files, rules, holders)
}

fn session_rules(options: &Options) -> ConversationRules {
    let name = uname();
    let name = name.nodename().to_bytes();
    // The greeting contains the name as one word of ASCII.
    let printable = name.iter().filter(|byte| byte.is_ascii_graphic());
    let name: String = printable.map(|byte| char::from(*byte)).collect();
    ConversationRules {
        hostname: match name.as_str() {
            "" => "localhost".into(),
            _ => name,
        },
        idle_timeout: options.idle_timeout,
    }
}

fn serve_one(
    options: &Options,
    input: BorrowedFd<'_>,
    output: BorrowedFd<'_>,
    peer: Option<Peer>,
    signals: &EndSignals,
) {
    let locks = locks(options, None);
    let wire = Wire::new(input, output, signals.stop.as_fd());
    session::serve(&wire, peer, &locks, &session_rules(options));
}

/// Serves each connection on a thread until a signal arrives.
fn serve_all(
    options: &Options,
    listeners: Vec<Listener>,
    signals: &EndSignals,
) -> Result<(), String> {
    let listeners: Arc<[Listener]> = listeners.into();
    let _clean_up = daemon::CleanUp(&listeners);
    let max_holders = allow_descriptors(options.max_connections);
    let holders = Holders::new(max_holders).map_err(daemon::cannot("watch processes"))?;
    let locks = Arc::new(locks(options, Some(holders)));
    let reaper = Arc::clone(&locks);
    daemon::spawn("reaper", move || reaper.reap())?;

    let connections = Arc::new(Connections::new(options.max_connections, None, TURNED_AWAY));
    let workers = {
        let (locks, rules) = (Arc::clone(&locks), session_rules(options));
        let (max_of_user, refusals) = (share_of(options.max_connections), Throttle::default());
        let stop = signals.stop.clone();
        Workers::new(move |mut admission: Admission| {
            let peer = Peer::of(&admission.stream.as_fd());
            let user = peer.and_then(|peer| peer.0);
            if let Err(cap) = admission.count_for_user(user, max_of_user) {
                refusals.warn(format_args!("turned-away reason={cap}"));
                // Do not linger on close here: the connection would count towards the cap until the
                // close was done.
                admission.stream.send_once(TURNED_AWAY);
                return;
            }
            let socket = admission.stream.as_fd();
            let wire = Wire::new(socket, socket, stop.as_fd());
            session::serve(&wire, peer, &locks, &rules);
        })
    };
    info!("starting version={}", env!("CARGO_PKG_VERSION"));
    if let Err(error) = std::fs::metadata(&options.lock_dir) {
        let (path, reason) = (Escaped::path(&options.lock_dir), reason(&error));
        warn!("no-lock-directory path={path} error=\"{reason}\"");
    }
    accept_from_all("addr", &listeners, &connections, &workers).map_err(daemon::no_thread)?;
    if options.print_port {
        daemon::print_port(&listeners)?;
    }

    // Receiving fails only if the thread for signals has ended, which is a reason to stop as well.
    let _ = signals.received.recv();
    info!("stopping");
    connections.close();
    connections.wait_until_none(FAREWELL, FAREWELL);
    locks.finish();
    Ok(())
}

/// Raises the descriptor limit as far as the server needs. Returns the number of processes that it
/// can watch. Each of them needs a descriptor. At least a quarter of all descriptors is reserved
/// for them.
fn allow_descriptors(max_connections: usize) -> usize {
    let others = RESERVED_DESCRIPTORS.saturating_add(max_connections);
    let wanted = others.saturating_add(MAX_HOLDERS) as u64;
    let allowed = daemon::raise_descriptor_limit(wanted);
    let allowed = usize::try_from(allowed).unwrap_or(usize::MAX);
    let spare = allowed.saturating_sub(others).max(allowed / 4);
    spare.min(MAX_HOLDERS)
}
