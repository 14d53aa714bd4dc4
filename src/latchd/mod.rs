//! The program `latchd`: see latchd(8).

pub(crate) mod arbiter;
mod auth;
mod claim_log;
#[cfg_attr(not(feature = "cluster"), path = "cluster/absent.rs")]
pub(crate) mod cluster;
mod context;
pub(crate) mod fence;
pub(crate) mod http;
pub(crate) mod line;
pub(crate) mod record;
mod shutdown;
mod start;
pub(crate) mod state_file;
mod statistics;
pub(crate) mod table;

use std::env;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use log::{debug, info, warn};
use parking_lot::RwLock;

use crate::latchd::arbiter::{Arbiter, Rules};
use crate::latchd::cluster::{ClusterNode, ClusterSettings};
use crate::latchd::fence::allocator::Reserver;
use crate::latchd::fence::source::Salts;
use crate::latchd::table::Caps;
use crate::os::notify::notify;
use crate::os::random;
use crate::os::text::reason;
use crate::os::tls::Certificate;
use crate::shared::cli::arguments::{self, Origins, Parsed};
use crate::shared::cli::environment::is_service_link;
use crate::shared::daemon::{self, refuse, EndSignals, CANNOT_START, USAGE};
use crate::shared::log::{Log, Throttle};
use crate::shared::net::connections::Connections;
use crate::shared::net::inherited::{self, Inherited};
use crate::shared::net::listener::Listener;
use crate::wire::abilities::Abilities;
use auth::tokens::{TokenUse, Tokens};
use context::{Offer, ServerContext};
use http::{ChangeCaps, HttpServer};
use start::fences::Fences;
use start::options::Options;
pub use start::options::SELF;
use start::settings::{AuthTokenSource, ServerSettings};
use start::{capacity, fences, host_memory, options, serve, startup_warnings, tls};
use state_file::{Previous, StateFile};

const PROGRAM: &str = "latchd";

/// The bytes of a megabyte, as the log counts them.
const MEGABYTE: u64 = 1024 * 1024;

/// Runs the server: reads the arguments and the environment, serves until a signal, and returns the
/// exit status (latchd(8), EXIT STATUS).
pub fn main() -> ExitCode {
    let is_meant = |name: &str, value: &String| !is_service_link(name, value);
    let variable = |name: &str| env::var(name).ok().filter(|value| is_meant(name, value));
    let (parsed, origins) = options::read(env::args_os().skip(1), &variable);
    let started = match parsed {
        Parsed::Run(options) => start(&options, &origins),
        Parsed::Print(text) => return daemon::print(PROGRAM, &text),
        Parsed::Usage(reason) => Err((USAGE, reason)),
    };
    started.unwrap_or_else(|(status, reason)| refuse(PROGRAM, status, reason))
}

/// Checks the options against the environment, then serves. On failure, returns the exit status and
/// the reason.
fn start(options: &Options, origins: &Origins) -> Result<ExitCode, (u8, String)> {
    let usage = |reason| (USAGE, reason);
    let cannot_start = |reason| (CANNOT_START, reason);
    if let Some(name) = arguments::unreadable_variable(&["LATCHD_", "DFLOCKD_"]) {
        return Err(usage(format!("{name}: the value is not UTF-8")));
    }
    let inherited = inherited::from_environment(Inherited::listening).map_err(cannot_start)?;
    let inherits = !inherited.is_empty();
    let settings = ServerSettings::new(options, origins, inherits, env::var_os("RUST_LOG"));
    let settings = settings.map_err(usage)?;
    let rules = settings.log.clone();
    let run = |log: &Log| run(options, settings, inherited, log);
    daemon::with_log(PROGRAM, &rules, run).map_err(cannot_start)
}

/// What a server has read and opened before it serves.
struct Prepared {
    signals: EndSignals,
    auth_tokens: Option<Arc<Tokens>>,
    admin_tokens: Option<Arc<Tokens>>,
    cluster: Option<ClusterSettings>,
    state: Option<Arc<StateFile>>,
    /// What the previous server has left.
    previous: Previous,
    fences: Fences,
    door: Option<HttpServer>,
    listeners: Arc<[Listener]>,
}

/// Prepares the server, and serves until it is told to stop. The error is a single-line message.
fn run(
    options: &Options,
    settings: ServerSettings,
    inherited: Vec<Listener>,
    log: &Log,
) -> Result<ExitCode, String> {
    let prepared = prepare(options, settings, inherited, log)?;
    let listeners = Arc::clone(&prepared.listeners);
    // A server that cannot start must remove the paths of its sockets, too.
    let _clean_up = daemon::CleanUp(&listeners);
    serve(options, prepared, log)
}

/// Opens the files and the sockets that the options name. The sockets come last: a client that can
/// connect expects an answer.
fn prepare(
    options: &Options,
    settings: ServerSettings,
    inherited: Vec<Listener>,
    log: &Log,
) -> Result<Prepared, String> {
    daemon::leave_no_core();
    let signals = daemon::catch_signals()?;
    let auth = settings.auth.as_ref();
    let [auth_tokens, admin_tokens] = read_tokens(options, auth)?;
    let cluster = settings.cluster.map(ClusterSettings::checked).transpose()?;
    auth_tokens.iter().for_each(|tokens| tokens.log_rights());
    let state = StateFile::lock(options.state_file(), options.settle())?;
    let previous = match &state {
        Some(state) => state.read()?,
        None => Previous::Nothing,
    };
    let fences = fences::open(
        options.fence_state_file.as_deref(),
        state.is_some(),
        &previous,
    )?;
    let certificate = tls::certificate(options.tls_files())?;
    let reload = {
        let tokens = [auth_tokens.clone(), admin_tokens.clone()];
        let certificate = certificate.clone();
        move || reload(certificate.as_ref(), &tokens)
    };
    // Up to this point SIGTERM ends the process at once, even while it waits for another server to
    // unlock the fence file.
    let signals = daemon::watch_signals(signals, log, reload)?;
    let door = HttpServer::bind(settings.http, certificate.as_ref())?;
    let listeners = serve::listen(options, settings.sockets, inherited, certificate)?;
    tell_of_dflockd(&settings.without_effect, settings.read_only_door.as_deref());
    startup_warnings::warn(options, auth, &listeners, door.as_ref());
    startup_warnings::warn_of_unknown_variables();
    fences::warn_of_clock(options);
    Ok(Prepared {
        signals,
        auth_tokens,
        admin_tokens,
        cluster,
        state,
        previous,
        fences,
        door,
        listeners,
    })
}

/// Serves until it is told to stop.
fn serve(options: &Options, prepared: Prepared, log: &Log) -> Result<ExitCode, String> {
    let listeners = prepared.listeners;
    let node = prepared
        .cluster
        .map(|settings| ClusterNode::new(settings, log.clone()));
    let fences = node
        .as_ref()
        .map_or(prepared.fences, |node| (node.fences(), None));
    let (arbiter, reserver) = start_arbiter(options, fences)?;
    let state = prepared.state;
    let settling = match &state {
        Some(file) => file.restore(&prepared.previous, options.local_clients, &arbiter)?,
        None => Duration::ZERO,
    };
    let secret_len = prepared
        .auth_tokens
        .as_ref()
        .map_or(0, |tokens| tokens.max_len());
    let max_connections = capacity::max_connections(options, secret_len);
    let worst_case = report_capacity(options, max_connections, secret_len);
    // Connections over the limits are closed without a word.
    let connections = Connections::new(max_connections, options.max_connections_per_ip, b"");
    let connections = connections.requiring_auth(prepared.auth_tokens.is_some());
    let connections = Arc::new(connections);
    let context = Arc::new(ServerContext {
        offer: offer(options),
        read_timeout: options.read_timeout,
        write_timeout: options.write_timeout,
        auto_release: options.auto_release(),
        auth_tokens: prepared.auth_tokens,
        admin_tokens: prepared.admin_tokens,
        operator_socket: Listener::path_beside_port(&listeners),
        auth_refusals: Throttle::default(),
        right_refusals: Throttle::default(),
        malformed: Throttle::default(),
        cap_warnings: Throttle::default(),
        log: log.clone(),
        node: node.clone(),
        state: state.clone(),
        replies: RwLock::default(),
        worst_case,
        connections: Arc::clone(&connections),
    });
    if let Some(node) = &node {
        node.serve(&arbiter).map_err(daemon::no_thread)?;
    }
    let end = shutdown::ServerEnd {
        signals: &prepared.signals.received,
        arbiter: &arbiter,
        listeners: &listeners,
        options,
        context: &context,
    };
    let caps = options
        .http_grants
        .then(|| grant_caps(options, &connections));
    let open_door = |door: HttpServer| door.open(&arbiter, &context, caps, &connections);
    let keep = |reserver| start_file_threads(reserver, state.as_ref(), settling, &arbiter);
    let started = reserver
        .map_or(Ok(()), keep)
        .and_then(|()| serve::start(&listeners, &arbiter, &context))
        .and_then(|()| prepared.door.map_or(Ok(None), open_door))
        .and_then(|over_http| {
            tell_of_start(options, &listeners, node.as_deref())?;
            Ok(over_http)
        });
    let status = match started {
        Ok(over_http) => end.run(over_http),
        Err(reason) => {
            // The state file is open already, but no client has been served: leave it as it was.
            end.give_back();
            return Err(reason);
        }
    };
    node.iter().for_each(|node| node.resign());
    Ok(status)
}

fn grant_caps(options: &Options, connections: &Connections) -> ChangeCaps {
    ChangeCaps {
        max_waiting: capacity::max_waiting(options, connections.max()),
        max_per_address: options.max_connections_per_ip,
        max_kept: options.max_kept(),
        max_keep_time: options.max_keep_time,
    }
}

fn offer(options: &Options) -> Offer {
    let max_lease = options.max_hold.unwrap_or(Duration::MAX);
    let survives_restart = options.etcd.is_some() || options.state_file().is_some();
    Offer {
        default_lease: options.default_lease_ttl.min(max_lease),
        max_lease,
        abilities: Abilities::ADOPT
            .and(Abilities::SLOTS)
            .and(Abilities::STATUS)
            .and(Abilities::SURVIVES_RESTART.when(survives_restart))
            .and(Abilities::AGES.when(survives_restart))
            .and(Abilities::PROOFS.when(options.state_file().is_some()))
            .and(Abilities::LINGERS.when(!options.auto_release())),
    }
}

/// Logs how many connections there may be. Returns the memory in bytes that the server takes if all
/// caps are reached at once. That figure is logged as a warning if it is more than the machine
/// can spare: with the default caps it is far from what a server ever takes.
fn report_capacity(options: &Options, max_connections: usize, secret_len: usize) -> u64 {
    let worst_case = capacity::worst_case(options, max_connections, secret_len);
    let worst_case_mb = worst_case.div_ceil(MEGABYTE);
    let version = env!("CARGO_PKG_VERSION");
    info!("starting version={version} max_connections={max_connections}");
    let memory = host_memory::memory();
    if worst_case > memory / 2 {
        let memory_mb = memory / MEGABYTE;
        warn!("high-caps worst_case_mb={worst_case_mb} memory_mb={memory_mb}");
    } else {
        debug!("caps worst_case_mb={worst_case_mb}");
    }
    worst_case
}

/// Prints the port, and tells the supervisor that clients can connect. In a cluster, STATUS is set
/// elsewhere, because it shows the server's role.
fn tell_of_start(
    options: &Options,
    listeners: &[Listener],
    node: Option<&ClusterNode>,
) -> Result<(), String> {
    let is_anew = node.is_some_and(ClusterNode::has_started_over);
    // A server that has started over has already printed its port.
    if options.print_port && !is_anew {
        daemon::print_port(listeners)?;
    }
    let state = match options.etcd {
        Some(_) => "READY=1",
        None => "READY=1\nSTATUS=Serving",
    };
    if let Err(error) = notify(state) {
        warn!("cannot-notify error=\"{}\"", reason(&error));
    }
    Ok(())
}

fn start_arbiter(
    options: &Options,
    (fences, reserver): Fences,
) -> Result<(Arc<Arbiter>, Option<Reserver>), String> {
    if !random::is_ready() {
        warn!("waiting-for-randomness");
    }
    let salts = Salts::new().map_err(daemon::cannot("get random numbers"))?;
    let rules = Rules {
        caps: Caps {
            max_locks: options.max_locks,
            max_grants: options.max_slots,
            max_per_connection: options.max_per_connection(),
            max_waiters: options.max_waiters,
            max_waiters_total: options.max_waiters_total,
            max_kept: options.max_kept(),
            max_keep_time: options.max_keep_time,
            max_hold: options.max_hold.unwrap_or(Duration::MAX),
        },
        gc_interval: options.gc_interval,
        gc_max_idle: options.gc_max_idle,
    };
    let arbiter = Arc::new(Arbiter::new(&rules, fences, salts));
    arbiter.expect(options.expected());
    claim_log::open(&arbiter, options.log_grants);
    // In a cluster, clients tell the active server how their work has ended.
    if options.etcd.is_none() {
        arbiter.expect_anew();
    }
    Ok((arbiter, reserver))
}

/// Opens the state file, if there is one, and starts the threads that write it and the fence file.
fn start_file_threads(
    mut reserver: Reserver,
    state: Option<&Arc<StateFile>>,
    settling: Duration,
    arbiter: &Arc<Arbiter>,
) -> Result<(), String> {
    if let Some(state) = state.cloned() {
        let recorded = reserver.also_record(Box::new(Arc::clone(&state)));
        recorded.map_err(|error| state.unusable(&error))?;
        let arbiter = Arc::clone(arbiter);
        daemon::spawn("state", move || state.keep_up_to_date(settling, &arbiter))?;
    }
    let arbiter = Arc::clone(arbiter);
    daemon::spawn("fences", move || {
        reserver.run(|| arbiter.grant_owed_slots());
    })
}

/// Reads the auth tokens and the admin tokens that the options ask for.
fn read_tokens(
    options: &Options,
    auth: Option<&AuthTokenSource>,
) -> Result<[Option<Arc<Tokens>>; 2], String> {
    let auth_tokens = auth.map(|auth| match auth {
        AuthTokenSource::Argument(secret) | AuthTokenSource::Variable(secret) => {
            Ok(Tokens::single(secret.as_bytes()))
        }
        AuthTokenSource::File(path) => Tokens::read(TokenUse::Auth, path),
    });
    let admin_tokens = options.admin_token_file.as_deref();
    let admin_tokens = admin_tokens.map(|path| Tokens::read(TokenUse::Admin, path));
    Ok([
        auth_tokens.transpose()?.map(Arc::new),
        admin_tokens.transpose()?.map(Arc::new),
    ])
}

/// Reads again what can be changed without a restart.
fn reload(certificate: Option<&Arc<Certificate>>, tokens: &[Option<Arc<Tokens>>; 2]) {
    certificate.into_iter().for_each(tls::reload);
    tokens.iter().flatten().for_each(|tokens| tokens.reload());
}

/// Says what options and variables of dflockd do not do here.
fn tell_of_dflockd(without_effect: &[(String, &str)], read_only_door: Option<&str>) {
    for (origin, why) in without_effect {
        warn!("no-effect setting={origin} hint=\"{why}\"");
    }
    if let Some(origin) = read_only_door {
        info!(
            "http-is-read-only setting={origin} hint=\"statistics, metrics and health alone; \
             a POST is refused without --http-grants\""
        );
    }
}
