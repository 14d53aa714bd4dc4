//! The program `latchd`: options, wiring, signals and exit codes. See latchd(8).

mod memory;
mod options;
mod requests;
mod session;

use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam_channel::{after, bounded, never, select, unbounded, Receiver};
use log::{debug, info, warn};
use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXFSZ};
use signal_hook::iterator::Signals;

use crate::arbiter::{Arbiter, Rules};
use crate::cli::arguments::{self, Parsed};
use crate::fence::allocator::{self, Reserver};
use crate::fence::source::{fence_of_clock, ClockFences, Salts};
use crate::log::SourceThrottle;
use crate::net::connections::{Admission, Connections};
use crate::net::hangup::{HangupWatch, Sign};
use crate::net::inherited;
use crate::net::listener::{accept_from_all, Listener};
use crate::net::workers::Workers;
use crate::server::{print, refuse, start_log, CANNOT_START, USAGE};
use crate::sys::notify;
use crate::sys::thread::{spawn, STACK_LEN};
use crate::table::{Caps, ConnId, Holdings};
use crate::text::{reason, Escaped};
use crate::token::FenceSource;
use memory::Amounts;
use options::{Auth, Flags, Options, Sockets, UnixSocket};
use session::SessionRules;

const PROGRAM: &str = "latchd";

/// For how long the last replies and log lines may take to leave at the end.
const FAREWELL: Duration = Duration::from_millis(600);
const LAST_LINES: Duration = Duration::from_millis(300);

/// More than any token with blanks around it; what is behind it makes the token too long.
const MAX_TOKEN_FILE_LEN: u64 = 128 * 1024;

/// Descriptors that are not for connections.
const RESERVED_DESCRIPTORS: u64 = 64;

/// Memory maps that are not for connections, and how many a connection's thread takes.
const RESERVED_MAPS: u64 = 2000;
const MAPS_PER_THREAD: u64 = 4;

/// The part of the address space that is not for stacks, and what a connection takes beside its stack.
const HEAP_SHARE: u64 = 2;
const HEAP_PER_CONNECTION: u64 = 32 * 1024;

/// So many unread bytes behind a wait are taken for a full window: half of the smallest that Linux
/// offers by default.
const FLOOD_LEN: u64 = 32 * 1024;

/// A clock before this was never set: 1 January 2025.
const CLOCK_WAS_SET: Duration = Duration::from_secs(1_735_689_600);

/// Runs the server: reads the arguments and the environment, serves until a signal, and returns what
/// the process shall exit with (latchd(8), EXIT STATUS).
pub fn main() -> ExitCode {
    start_over_with_one_heap();
    let flags: Flags = match arguments::parse_single_dashes(
        PROGRAM,
        &options::BOOLEANS,
        std::env::args_os().skip(1),
    ) {
        Parsed::Run(flags) => flags,
        Parsed::Print(text) => return print(&text),
        Parsed::Usage(reason) => return refuse(PROGRAM, USAGE, reason),
    };
    if let Some(name) = arguments::unreadable_variable(&["LATCHD_", "DFLOCKD_"]) {
        return refuse(
            PROGRAM,
            USAGE,
            format_args!("{name}: the value is not UTF-8"),
        );
    }
    let inherited = match inherited::from_environment() {
        Ok(inherited) => inherited,
        Err(reason) => return refuse(PROGRAM, CANNOT_START, reason),
    };
    let variable = |name: &str| std::env::var(name).ok();
    let options = match Options::new(flags, variable, !inherited.is_empty()) {
        Ok(options) => options,
        Err(reason) => return refuse(PROGRAM, USAGE, reason),
    };
    match run(options, inherited) {
        Ok(status) => status,
        Err(reason) => refuse(PROGRAM, CANNOT_START, reason),
    }
}

/// Serves until told to stop. An error is one line that says what could not be had, and why.
fn run(options: Options, inherited: Vec<Listener>) -> Result<ExitCode, String> {
    let auth_token = options.auth.as_ref().map(read_auth_token).transpose()?;
    let log = start_log(options.log)?;
    let (fences, reserver) = open_fences(options.fence_file.as_deref())?;
    let salts = Salts::new().map_err(|error| format!("cannot get random numbers: {error}"))?;
    // Until here a signal just ends us, whatever we may be waiting for; from here on it is heard.
    let signals =
        watch_signals().map_err(|error| format!("cannot catch signals: {}", reason(&error)))?;
    let listeners = listen(&options.sockets, inherited)?;
    warn_about(&options);
    let arbiter = Arc::new(Arbiter::new(
        &Rules {
            caps: Caps {
                max_locks: options.max_locks,
                max_slots: options.max_slots,
                max_per_connection: options.max_per_connection,
                max_waiters: options.max_waiters,
                max_waiters_total: options.max_waiters_total,
            },
            holdings: if options.auto_release {
                Holdings::Release
            } else {
                Holdings::Keep
            },
            gc_interval: options.gc_interval,
            gc_max_idle: options.gc_max_idle,
        },
        fences,
        salts,
    ));
    if let Some(reserver) = reserver {
        let arbiter = Arc::clone(&arbiter);
        spawn("fences", move || reserver.run(|| arbiter.tokens_are_back())).map_err(no_thread)?;
    }
    let allowed = what_the_machine_allows();
    let secret_len = auth_token.as_deref().map_or(0, <[u8]>::len);
    let max_connections = options
        .max_connections
        .unwrap_or_else(|| allowed.min(memory::allowed_connections(secret_len)))
        .min(what_memory_allows());
    let worst_case = Amounts {
        connections: max_connections,
        secret_len,
        keys: options.max_locks,
        slots: options.max_slots,
        waiters: options.max_waiters_total,
    }
    .worst_case();
    if options
        .max_connections
        .is_some_and(|wanted| wanted > allowed)
    {
        warn!("few-descriptors max_connections={max_connections} allowed={allowed}");
    }
    let connections = Arc::new(Connections::new(max_connections));
    let session_rules = Arc::new(SessionRules {
        default_lease: options.default_lease,
        read_timeout: options.read_timeout,
        write_timeout: options.write_timeout,
        auth_token,
        auth_refusals: SourceThrottle::default(),
    });

    info!(
        "starting version={} max_connections={max_connections} worst_case_mb={}",
        env!("CARGO_PKG_VERSION"),
        worst_case.div_ceil(1024 * 1024)
    );
    serve(&listeners, &arbiter, &connections, &session_rules)?;
    if let (true, Some(port)) = (
        options.print_port,
        listeners.iter().find_map(|listener| listener.port()),
    ) {
        let printed = writeln!(io::stdout(), "{port}").and_then(|()| io::stdout().flush());
        if !inherited::stderr_is_a_peers() {
            // Under inetd, standard output is the listening socket.
            printed.map_err(|error| format!("cannot print the port: {}", reason(&error)))?;
        }
    }

    if let Err(error) = notify::notify("READY=1\nSTATUS=Serving") {
        warn!("cannot-notify error=\"{error}\"");
    }

    let status = wait_for_the_end(&signals, &arbiter, &connections, &options);
    listeners.iter().for_each(Listener::clean_up);
    log.flush(LAST_LINES);
    Ok(status)
}

/// Where fences come from, and what has to run beside it, if anything.
type Fences = (Box<dyn FenceSource>, Option<Reserver<File>>);

/// Opens the fence file, if there is to be one.
fn open_fences(fence_file: Option<&Path>) -> Result<Fences, String> {
    let clock = fence_of_clock(SystemTime::now());
    let Some(path) = fence_file else {
        return Ok((Box::new(ClockFences::starting_at(clock)), None));
    };
    let opened = allocator::open(path, clock, allocator::RANGE);
    let (fences, reserver) =
        opened.map_err(|why| format!("cannot use the fence file {}: {why}", shown(path)))?;
    Ok((Box::new(fences), Some(reserver)))
}

/// Starts everything that serves; each on its own thread, and none of them ends.
fn serve(
    listeners: &Arc<[Listener]>,
    arbiter: &Arc<Arbiter>,
    connections: &Arc<Connections>,
    session_rules: &Arc<SessionRules>,
) -> Result<(), String> {
    let watch = HangupWatch::new()
        .map_err(|error| format!("cannot watch for hang-ups: {}", reason(&error)))?;
    let watch = Arc::new(watch);
    let workers = {
        let (arbiter, watch) = (Arc::clone(arbiter), Arc::clone(&watch));
        let rules = Arc::clone(session_rules);
        Arc::new(Workers::new(move |admission: Admission| {
            converse(&admission, &arbiter, &watch, &rules);
        }))
    };
    let reaper = Arc::clone(arbiter);
    spawn("reaper", move || reaper.reap()).map_err(no_thread)?;
    let (reporter, senders) = (Arc::clone(arbiter), Arc::clone(connections));
    spawn("hangup", move || {
        let error = watch.run(|id, sign| match sign {
            Sign::HungUp => reporter.hang_up(ConnId(id)),
            Sign::Sent if senders.unread_len(id) >= FLOOD_LEN => {
                debug!("cut-off conn={id} reason=flood-behind-wait");
                reporter.hang_up(ConnId(id));
            }
            Sign::Sent => {}
        });
        panic!("the hang-up watch failed: {error}");
    })
    .map_err(no_thread)?;
    for listener in listeners.iter() {
        let kind = listener.port().map_or("path", |_| "addr");
        info!("listening {kind}={listener}");
    }
    accept_from_all(listeners, connections, &workers).map_err(no_thread)
}

fn no_thread(error: io::Error) -> String {
    format!("cannot start a thread: {}", reason(&error))
}

/// One connection, from its admission to its end.
fn converse(
    admission: &Admission,
    arbiter: &Arc<Arbiter>,
    watch: &HangupWatch,
    rules: &SessionRules,
) {
    let stream = admission.stream();
    let seat = arbiter.connect(ConnId(admission.id()));
    match watch.watch(stream, admission.id()) {
        Ok(()) => session::serve(stream, seat, rules, watch),
        Err(error) => warn!("turned-away reason=no-watch error=\"{error}\""),
    }
}

/// Main's own work: wait for a signal or for everybody to leave, drain, say good-bye (latchd(8),
/// SIGNALS).
fn wait_for_the_end(
    signals: &Receiver<i32>,
    arbiter: &Arbiter,
    connections: &Arc<Connections>,
    options: &Options,
) -> ExitCode {
    if !wait_for_a_signal(signals, arbiter, connections, options.idle_exit) {
        // Whoever has heard READY may have stopped listening since.
        let _ = notify::notify("STOPPING=1\nSTATUS=Nobody is here");
        info!("stopping reason=idle");
        return ExitCode::SUCCESS;
    }
    info!("draining");
    let _ = notify::notify("STOPPING=1\nSTATUS=Draining");
    let drained = arbiter.begin_drain();
    let grace_is_over = options.shutdown_timeout.map_or_else(never, after);
    select! {
        recv(signals) -> _ => {
            warn!("stopping reason=second-signal");
            return ExitCode::from(1);
        }
        recv(drained) -> _ => info!("stopping reason=drained"),
        recv(grace_is_over) -> _ => warn!("stopping reason=shutdown-timeout"),
    }
    // No more requests; the replies to those that have come still go out. Whoever comes only now waits
    // in the backlog for our successor, if the socket is inherited.
    connections.close();
    connections.shut_down_all(Shutdown::Read);
    let (sender, farewell) = bounded::<()>(0);
    let closing = Arc::clone(connections);
    let waiting = spawn("farewell", move || {
        closing.wait_until_none(FAREWELL);
        drop(sender);
    });
    if waiting.is_ok() {
        select! {
            recv(signals) -> _ => return ExitCode::from(1),
            recv(farewell) -> _ => {}
        }
    }
    ExitCode::SUCCESS
}

/// Blocks until a signal comes (`true`), or until nobody has been connected and nothing held for
/// `idle_exit` (`false`; then nobody is let in any more).
fn wait_for_a_signal(
    signals: &Receiver<i32>,
    arbiter: &Arbiter,
    connections: &Connections,
    idle_exit: Option<Duration>,
) -> bool {
    let started = Instant::now();
    let mut look_again = idle_exit;
    loop {
        select! {
            recv(signals) -> _ => return true,
            recv(look_again.map_or_else(never, after)) -> _ => {}
        }
        let Some(idle_exit) = idle_exit else { continue };
        let now = Instant::now();
        let last_held = arbiter.last_held();
        let quiet_since = connections
            .empty_since()
            .unwrap_or(now)
            .max(last_held.unwrap_or(started));
        let idle_for = now.saturating_duration_since(quiet_since);
        if idle_for >= idle_exit && connections.close_if_empty(|| arbiter.last_held() == last_held)
        {
            return false;
        }
        // Whoever is here now keeps us for at least that long.
        look_again = Some(
            idle_exit
                .saturating_sub(idle_for)
                .max(Duration::from_millis(1)),
        );
    }
}

/// A channel of the signals that end us. Those that must not end us are caught and forgotten;
/// SIGPIPE is ignored from the start in every Rust program.
fn watch_signals() -> io::Result<Receiver<i32>> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2, SIGXFSZ])?;
    let (sender, receiver) = unbounded();
    spawn("signals", move || {
        for signal in signals.forever() {
            if matches!(signal, SIGTERM | SIGINT) && sender.send(signal).is_err() {
                return;
            }
        }
    })?;
    Ok(receiver)
}

fn listen(sockets: &Sockets, inherited: Vec<Listener>) -> Result<Arc<[Listener]>, String> {
    match sockets {
        Sockets::Environment => Ok(inherited.into()),
        Sockets::Stdin => match inherited::from_stdin() {
            Ok(listener) => Ok(Arc::new([listener])),
            Err(why) => Err(format!("cannot listen on descriptor 0: {why}")),
        },
        Sockets::Bound { tcp, unix } => {
            let mut listeners = Vec::new();
            if let Some(addr) = tcp {
                let listener = Listener::bind_tcp(*addr);
                listeners.push(listener.map_err(|error| cannot_listen(addr, &error))?);
            }
            if let Some(UnixSocket { path, mode, group }) = unix {
                let listener = Listener::bind_unix(path, *mode, *group);
                listeners.push(listener.map_err(|error| cannot_listen(&shown(path), &error))?);
            }
            Ok(listeners.into())
        }
    }
}

/// A path for a message: in one line, whatever is in it.
fn shown(path: &Path) -> Escaped<'_> {
    Escaped(path.as_os_str().as_bytes())
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
                format!("cannot use the auth token file {}: {reason}", shown(path))
            })
        }
    }
}

fn read_token_file(path: &Path) -> Result<Box<[u8]>, String> {
    let mut content = String::new();
    let file = File::open(path).map_err(|error| reason(&error))?;
    let mut file = file.take(MAX_TOKEN_FILE_LEN);
    file.read_to_string(&mut content)
        .map_err(|error| reason(&error))?;
    options::usable_token(&content)
}

fn warn_about(options: &Options) {
    if matches!(options.auth, Some(Auth::Argument(_))) {
        warn!("token-in-arguments hint=\"ps shows it; use --auth-token-file\"");
    }
    // A name that is not UTF-8 is nothing that dflockd knew.
    let names = std::env::vars_os().filter(|(_, value)| !value.is_empty());
    let names = names.filter_map(|(name, _)| name.into_string().ok());
    for name in options::unknown_variables(names) {
        warn!("unknown-variable name={}", Escaped(name.as_bytes()));
    }
    if options.fence_file.is_some() {
        return;
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

/// How many connections descriptors, memory maps and address space allow, after asking for as many
/// descriptors as the process may have.
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
    let for_threads = maps.saturating_sub(RESERVED_MAPS) / MAPS_PER_THREAD;

    let allowed = usize::try_from(for_connections.min(for_threads)).unwrap_or(usize::MAX);
    allowed.min(what_memory_allows()).max(1)
}

/// How many connections a limited address space allows. Were all of it taken by stacks, the next
/// allocation would be the end of the process.
fn what_memory_allows() -> usize {
    let address_space = getrlimit(Resource::As).current.unwrap_or(u64::MAX);
    let for_stacks = address_space / HEAP_SHARE / (STACK_LEN as u64 + HEAP_PER_CONNECTION);
    usize::try_from(for_stacks).unwrap_or(usize::MAX).max(1)
}

/// Starts the program over with a single heap where the address space is limited: the C library would
/// give many threads a heap of their own, and reserve 64 MB for each. Returns if that is not needed, or
/// cannot be done.
fn start_over_with_one_heap() {
    const HEAPS: &str = "MALLOC_ARENA_MAX";
    if getrlimit(Resource::As).current.is_none() || std::env::var_os(HEAPS).is_some() {
        return;
    }
    if let Ok(program) = std::env::current_exe() {
        let mut arguments = std::env::args_os();
        let name = arguments.next().unwrap_or_else(|| PROGRAM.into());
        let _ = Command::new(program)
            .arg0(name)
            .args(arguments)
            .env(HEAPS, "1")
            .exec();
    }
}
