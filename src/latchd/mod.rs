//! The program `latchd`: options, wiring, signals and exit codes. See latchd(8).

mod options;

use std::fmt::Display;
use std::fs;
use std::io::{self, Write};
use std::net::Shutdown;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crossbeam_channel::{after, never, select, unbounded, Receiver};
use log::{debug, info, warn};
use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXFSZ};
use signal_hook::iterator::Signals;

use crate::arguments::{self, Parsed};
use crate::dflock::{self, SessionRules};
use crate::escape::reason;
use crate::logging::Log;
use crate::manager::{Manager, Rules};
use crate::mint::ClockMint;
use crate::net::connections::{Admission, Connections};
use crate::net::hangup::HangupWatch;
use crate::net::listener::Listener;
use crate::net::workers::Workers;
use crate::table::{Caps, ConnId, Holdings};
use options::{Auth, Flags, Options, UnixSocket};

const PROGRAM: &str = "latchd";

/// For how long the last replies and log lines may take to leave at the end.
const FAREWELL: Duration = Duration::from_millis(900);
const LAST_LINES: Duration = Duration::from_millis(100);

/// Descriptors that are not for connections.
const RESERVED_DESCRIPTORS: u64 = 64;

/// Memory maps that are not for connections, and how many a connection's thread takes.
const RESERVED_MAPS: u64 = 2000;
const MAPS_PER_THREAD: u64 = 4;

/// A clock before this was never set: 1 January 2025.
const CLOCK_WAS_SET: Duration = Duration::from_secs(1_735_689_600);

/// Runs the server: reads the arguments and the environment, serves until a signal, and returns what
/// the process shall exit with (latchd(8), EXIT STATUS).
pub fn main() -> ExitCode {
    let flags: Flags =
        match arguments::parse(PROGRAM, &options::BOOLEANS, std::env::args_os().skip(1)) {
            Parsed::Run(flags) => flags,
            Parsed::Print(text) => return print(&text),
            Parsed::Usage(reason) => return bad_usage(reason),
        };
    if let Some(name) = arguments::unreadable_variable(&["LATCHD_", "DFLOCKD_"]) {
        return bad_usage(format_args!("{name}: the value is not UTF-8"));
    }
    let options = match Options::new(flags, |name| std::env::var(name).ok()) {
        Ok(options) => options,
        Err(reason) => return bad_usage(reason),
    };
    match run(options) {
        Ok(status) => status,
        Err(reason) => {
            complain(reason);
            ExitCode::from(1)
        }
    }
}

fn print(text: &str) -> ExitCode {
    match io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::from(1),
    }
}

fn bad_usage(reason: impl Display) -> ExitCode {
    complain(reason);
    ExitCode::from(2)
}

fn complain(reason: impl Display) {
    let _ = writeln!(io::stderr(), "{PROGRAM}: {reason}");
}

/// Serves until told to stop. An error is one line that says what could not be had, and why.
fn run(options: Options) -> Result<ExitCode, String> {
    // Before anything can go wrong later on: a signal must find its handler from the first moment.
    let signals =
        watch_signals().map_err(|error| format!("cannot catch signals: {}", reason(&error)))?;
    let auth_token = options.auth.as_ref().map(read_auth_token).transpose()?;
    let listeners = listen(&options)?;
    let log = Log::start(options.log)
        .map_err(|error| format!("cannot start the log: {}", reason(&error)))?;

    let manager = Arc::new(Manager::new(
        &Rules {
            caps: Caps {
                max_locks: options.max_locks,
                max_waiters: options.max_waiters,
            },
            holdings: if options.auto_release {
                Holdings::Release
            } else {
                Holdings::Keep
            },
            gc_interval: options.gc_interval,
            gc_max_idle: options.gc_max_idle,
        },
        Box::new(ClockMint::new(SystemTime::now())),
    ));
    let max_connections = options
        .max_connections
        .unwrap_or_else(what_the_machine_allows);
    let connections = Arc::new(Connections::new(max_connections));
    let session_rules = Arc::new(SessionRules {
        default_lease: options.default_lease,
        read_timeout: options.read_timeout,
        write_timeout: options.write_timeout,
        auth_token,
        max_locks: options.max_locks,
    });

    warn_about(&options);
    info!(
        "starting version={} max_connections={max_connections}",
        env!("CARGO_PKG_VERSION")
    );
    serve(&listeners, &manager, &connections, &session_rules)?;
    if let (true, Some(port)) = (
        options.print_port,
        listeners.iter().find_map(|listener| listener.port()),
    ) {
        let printed = writeln!(io::stdout(), "{port}").and_then(|()| io::stdout().flush());
        printed.map_err(|error| format!("cannot print the port: {}", reason(&error)))?;
    }

    let status = wait_for_the_end(&signals, &manager, &connections, options.shutdown_timeout);
    if let Some(UnixSocket { path, .. }) = &options.unix {
        let _ = fs::remove_file(path);
    }
    log.flush(LAST_LINES);
    Ok(status)
}

/// Starts everything that serves; each on its own thread, and none of them ends.
fn serve(
    listeners: &Arc<[Listener]>,
    manager: &Arc<Manager>,
    connections: &Arc<Connections>,
    session_rules: &Arc<SessionRules>,
) -> Result<(), String> {
    let watch = HangupWatch::new()
        .map_err(|error| format!("cannot watch for hang-ups: {}", reason(&error)))?;
    let watch = Arc::new(watch);
    let workers = {
        let (manager, watch) = (Arc::clone(manager), Arc::clone(&watch));
        let (connections, rules) = (Arc::clone(connections), Arc::clone(session_rules));
        Arc::new(Workers::new(move |admission: Admission| {
            converse(&admission, &manager, &watch, &connections, &rules);
        }))
    };
    let reaper = Arc::clone(manager);
    spawn("reaper", move || reaper.reap())?;
    let reporter = Arc::clone(manager);
    spawn("hangup", move || {
        let error = watch.run(|id| reporter.hang_up(ConnId(id)));
        panic!("the hang-up watch failed: {error}");
    })?;
    for at in 0..listeners.len() {
        let listeners = Arc::clone(listeners);
        let (connections, workers) = (Arc::clone(connections), Arc::clone(&workers));
        let listener = &listeners[at];
        info!(
            "listening {}={listener}",
            if listener.port().is_some() {
                "addr"
            } else {
                "path"
            }
        );
        spawn("accept", move || {
            listeners[at].accept_all(|stream| {
                let Some(admission) = connections.admit(stream) else {
                    debug!("turned-away reason=max-connections");
                    return;
                };
                if let Err(error) = workers.run(admission) {
                    warn!("turned-away reason=no-thread error=\"{error}\"");
                }
            })
        })?;
    }
    Ok(())
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), String> {
    let spawned = thread::Builder::new().name(name.into()).spawn(body);
    spawned
        .map(drop)
        .map_err(|error| format!("cannot start a thread: {}", reason(&error)))
}

/// One connection, from its admission to its end.
fn converse(
    admission: &Admission,
    manager: &Arc<Manager>,
    watch: &HangupWatch,
    connections: &Connections,
    rules: &SessionRules,
) {
    let stream = admission.stream();
    let connection = manager.connect(ConnId(admission.id()));
    let prepared = stream
        .set_write_timeout(rules.write_timeout)
        .and_then(|()| watch.watch(stream, admission.id()));
    match prepared {
        Ok(()) => dflock::serve(stream, connection, rules, connections),
        Err(error) => warn!("turned-away reason=no-watch error=\"{error}\""),
    }
}

/// Main's own work: wait for a signal, drain, say good-bye (latchd(8), SIGNALS).
fn wait_for_the_end(
    signals: &Receiver<i32>,
    manager: &Manager,
    connections: &Connections,
    shutdown_timeout: Option<Duration>,
) -> ExitCode {
    let _ = signals.recv();
    info!("draining");
    let drained = manager.begin_drain();
    let grace_is_over = shutdown_timeout.map_or_else(never, after);
    select! {
        recv(signals) -> _ => {
            warn!("stopping reason=second-signal");
            return ExitCode::from(1);
        }
        recv(drained) -> _ => info!("stopping reason=drained"),
        recv(grace_is_over) -> _ => warn!("stopping reason=shutdown-timeout"),
    }
    // No more requests; the replies to those that have come still go out.
    connections.shut_down_all(Shutdown::Read);
    connections.wait_until_none(FAREWELL);
    ExitCode::SUCCESS
}

/// A channel of the signals that end us. Those that must not end us are caught and forgotten;
/// SIGPIPE is ignored from the start in every Rust program.
fn watch_signals() -> io::Result<Receiver<i32>> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2, SIGXFSZ])?;
    let (sender, receiver) = unbounded();
    thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for signal in signals.forever() {
                if matches!(signal, SIGTERM | SIGINT) && sender.send(signal).is_err() {
                    return;
                }
            }
        })?;
    Ok(receiver)
}

fn listen(options: &Options) -> Result<Arc<[Listener]>, String> {
    let mut listeners = Vec::new();
    if let Some(addr) = options.tcp {
        let listener = Listener::bind_tcp(addr);
        listeners.push(listener.map_err(|error| cannot_listen(&addr, &error))?);
    }
    if let Some(UnixSocket { path, mode, group }) = &options.unix {
        let listener = Listener::bind_unix(path, *mode, *group);
        listeners.push(listener.map_err(|error| cannot_listen(&path.display(), &error))?);
    }
    Ok(listeners.into())
}

fn cannot_listen(place: &dyn Display, error: &io::Error) -> String {
    let reason = match error.kind() {
        io::ErrorKind::AddrInUse => "address already in use".into(),
        _ => reason(error),
    };
    format!("cannot listen on {place}: {reason}")
}

fn read_auth_token(auth: &Auth) -> Result<Box<[u8]>, String> {
    match auth {
        Auth::Argument(token) | Auth::Variable(token) => Ok(token.clone()),
        Auth::File(path) => {
            let token = read_token_file(path);
            token.map_err(|reason| {
                format!(
                    "cannot use the auth token file {}: {reason}",
                    path.display()
                )
            })
        }
    }
}

fn read_token_file(path: &Path) -> Result<Box<[u8]>, String> {
    let content = fs::read_to_string(path).map_err(|error| reason(&error))?;
    options::usable_token(&content)
}

fn warn_about(options: &Options) {
    if matches!(options.auth, Some(Auth::Argument(_))) {
        warn!("token-in-arguments hint=\"ps shows it; use --auth-token-file\"");
    }
    let since_epoch = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    if since_epoch < CLOCK_WAS_SET {
        warn!(
            "clock-not-set hint=\"fences begin at the clock, and so may repeat after a restart\""
        );
    }
}

/// How many connections descriptors and memory maps allow, after asking for as many descriptors as
/// the process may have.
fn what_the_machine_allows() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    let descriptors = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    };
    let descriptors = descriptors.unwrap_or(u64::MAX);
    let for_connections = descriptors
        .saturating_sub(RESERVED_DESCRIPTORS)
        .max(descriptors / 2);

    let maps = fs::read_to_string("/proc/sys/vm/max_map_count");
    let maps: u64 = maps
        .ok()
        .and_then(|maps| maps.trim().parse().ok())
        .unwrap_or(65_530);
    let for_threads = (maps.saturating_sub(RESERVED_MAPS) / MAPS_PER_THREAD).max(1);

    usize::try_from(for_connections.min(for_threads)).unwrap_or(usize::MAX)
}
