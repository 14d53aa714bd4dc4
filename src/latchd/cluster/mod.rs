//! Several servers that act as one service. An election in etcd makes one server active. The active
//! server records every change of holders in etcd before it tells a client. The other servers are
//! standbys: they pass connections on to the active server.
//!
//! **Invariant:** nothing is certain until etcd has confirmed it. Every write and every question to
//! etcd checks the epoch and the batch number. So a server that has been replaced without noticing
//! can change nothing, and confirms nothing to a client.
//!
//! A build without the feature uses `absent.rs` in place of this module.

mod election;
mod etcd;
#[cfg_attr(not(feature = "tls"), path = "etcd_tls/absent.rs")]
mod etcd_tls;
mod first_bytes;
mod journal;
mod record;
mod relay;
mod writer;

pub use relay::Disposition;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, io, process};

use crossbeam_channel::{bounded, Receiver};
use election::Candidate;
use etcd::{EtcdFailure, Gateway, NOT_FOUND};
use etcd_tls::EtcdTls;
use journal::Journal;
use log::{error, info, warn};
use parking_lot::{Condvar, Mutex};
use relay::Relays;
use writer::{JournalWriter, UnreadableRecord};

use crate::latchd::arbiter::{Arbiter, Promised};
use crate::os::exec::exec;
use crate::os::moment::Moment;
use crate::os::text::{reason, unusable_file, Escaped};
use crate::os::thread::spawn;
use crate::os::{names, secret};
use crate::shared::log::Log;
use crate::wire::token::FenceSource;

/// The maximum timeout of a request to etcd.
const MAX_REQUEST_TIME: Duration = Duration::from_secs(1);

/// How long a server that steps down waits until its last changes are written. This time is enough
/// for the members of etcd to elect a new leader among themselves.
const LAST_CHANGES: Duration = Duration::from_secs(3);

/// How long a server that revokes its lease may ask further members of etcd.
const LAST_REQUESTS: Duration = Duration::from_secs(2);

/// A client waits this number of TTLs for an active server. A server that has stepped down stays
/// out of the election for the same time.
const PATIENCE: u32 = 3;

/// The environment variable that tells a server that it has started over. The value is the number
/// of the lease that the server had, or 0 if it had none.
const STARTED_OVER: &str = "LATCHD_STARTED_OVER";

/// The client address of an etcd member.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Member {
    /// `HOST:PORT`.
    address: String,
    /// Whether the address in the option began with `https://`.
    speaks_tls: bool,
}

#[derive(Clone, Debug, Default)]
pub struct ClusterSettings {
    members: Vec<Member>,
    /// The address (`HOST:PORT`) at which the other servers reach this one.
    advertise: String,
    /// The prefix of the keys in etcd. Servers with the same prefix are one service.
    prefix: String,
    /// How long the active server may be silent before another one takes over.
    ttl: Duration,
    /// The user name for etcd and the file with the password, if etcd asks for a user.
    user: Option<(String, PathBuf)>,
    /// The TLS settings for members that speak TLS.
    tls: Option<EtcdTls>,
}

impl ClusterSettings {
    /// Returns empty settings, for the caller to fill in. In a build without the feature, this
    /// function refuses the option that asks for a cluster.
    pub fn wanted_by(_: &str) -> Result<ClusterSettings, String> {
        Ok(ClusterSettings::default())
    }

    /// Adds a member of etcd at `HOST:PORT`.
    pub fn add_member(&mut self, address: String, speaks_tls: bool) {
        self.members.push(Member {
            address,
            speaks_tls,
        });
    }

    /// Sets the address at which the other servers reach this one (`HOST:PORT`), the prefix of the
    /// keys in etcd, and how long the active server may be silent.
    pub fn set_service(&mut self, advertise: String, prefix: String, ttl: Duration) {
        self.advertise = advertise;
        self.prefix = prefix;
        self.ttl = ttl;
    }

    /// Sets the user of etcd, and the file with the password.
    pub fn set_user(&mut self, user: Option<(String, PathBuf)>) {
        self.user = user;
    }

    /// Sets the files for TLS with etcd: the CAs, and this server's certificate and key.
    pub fn set_tls(&mut self, ca: Option<PathBuf>, own: Option<(PathBuf, PathBuf)>) {
        self.tls = EtcdTls::new(ca, own);
    }

    /// Returns the settings if their files can be used. Otherwise the error names the unusable
    /// file. The files are read again when they are needed.
    pub fn checked(self) -> Result<ClusterSettings, String> {
        if let Some((_, file)) = &self.user {
            read_password(file)?;
        }
        if let (Some(tls), true) = (&self.tls, self.members.iter().any(|it| it.speaks_tls)) {
            tls.read()?;
        }
        Ok(self)
    }
}

fn read_password(file: &Path) -> Result<String, String> {
    secret::read_first(file).map_err(|error| unusable_file("etcd password", file, reason(&error)))
}

/// This server as a node of a cluster.
pub struct ClusterNode {
    settings: ClusterSettings,
    journal: Arc<Journal>,
    state: Mutex<RoleState>,
    changed: Condvar,
    /// The server is about to stop, and no longer runs for leader. This flag is not part of
    /// `state`: a signal must be able to set it even while a thread that starts over has that mutex
    /// locked.
    is_leaving: AtomicBool,
    log: Log,
    relays: Relays,
}

#[derive(Default)]
struct RoleState {
    role: Role,
    /// This server has won the election, but may not be ready to serve yet.
    is_elected: bool,
    /// This server is stepping down, and the process will end.
    is_resigning: bool,
    /// This server's lease in etcd. If this server is elected, the leader key has this lease.
    lease: Option<u64>,
    /// When this server most recently saw that another one was the leader.
    active_seen: Option<Moment>,
}

/// One term of this server as the leader.
#[derive(Clone, Copy, Debug)]
struct Term {
    epoch: u64,
    /// The version that the leader key must have for the next batch. Each batch raises the version
    /// by one.
    version: u64,
    lease: u64,
    /// When this server sent the latest request that kept the lease alive.
    kept: Moment,
}

impl ClusterNode {
    /// Makes a standby. It does nothing until [`ClusterNode::serve`] is called.
    pub fn new(settings: ClusterSettings, log: Log) -> Arc<ClusterNode> {
        Arc::new(ClusterNode {
            settings,
            journal: Arc::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
            is_leaving: AtomicBool::new(false),
            log,
            relays: Relays::default(),
        })
    }

    /// The source of the arbiter's fences.
    pub fn fences(&self) -> Box<dyn FenceSource> {
        Box::new(Arc::clone(&self.journal))
    }

    /// Blocks until what replies promise is in the journal and, if they promise so, until etcd has
    /// confirmed that this server is still active. Sessions send no reply before that. If etcd
    /// stays silent, this blocks until the server starts over.
    pub fn wait_for_journal(&self, promised: &Promised) {
        self.journal.wait_until_certain(promised);
    }

    /// Starts the threads that run for leader, write the journal and watch the relayed connections.
    /// Fails if a thread cannot be started. Call this before other threads use up the system's
    /// limit.
    pub fn serve(self: &Arc<Self>, arbiter: &Arc<Arbiter>) -> io::Result<()> {
        let node = Arc::clone(self);
        spawn("relays", move || node.watch_role())?;
        let (elected, terms) = bounded(1);
        let (node, arbiter) = (Arc::clone(self), Arc::clone(arbiter));
        spawn("journal", move || {
            for term in terms {
                let mut writer = JournalWriter::new(Arc::clone(&node), Arc::clone(&arbiter), term);
                match writer.take_over() {
                    Ok(()) => writer.run(),
                    Err(UnreadableRecord) => node.step_down(),
                }
            }
        })?;
        let node = Arc::clone(self);
        spawn("election", move || {
            let mut candidate = Candidate::new(Arc::clone(&node));
            loop {
                let term = candidate.run_until_elected();
                node.state.lock().is_elected = true;
                let _ = elected.send(term);
                candidate.stay_elected(&term);
            }
        })
    }

    /// Whether this process is a server that has started over, and replaces an earlier process.
    pub fn has_started_over(&self) -> bool {
        lease_before().is_some()
    }

    fn role(&self) -> Role {
        self.state.lock().role.clone()
    }

    pub fn is_active(&self) -> bool {
        self.state.lock().role.is_own
    }

    /// Whether a client can reach an active server through this one. Another server counts only if
    /// it was seen as the leader within the TTL. If etcd has been out of reach for longer, that
    /// server may have been replaced.
    pub fn has_active_server(&self) -> bool {
        let state = self.state.lock();
        let is_recent = |seen: Moment| seen.elapsed() < self.settings.ttl;
        !self.is_leaving() && (state.role.is_own || state.active_seen.is_some_and(is_recent))
    }

    /// Returns the current role. Blocks while the role is still `seen`, but no longer than
    /// `at_most`.
    fn wait_for_change(&self, seen: &Role, at_most: Duration) -> Role {
        let mut state = self.state.lock();
        self.changed
            .wait_while_for(&mut state, |state| state.role == *seen, at_most);
        state.role.clone()
    }

    /// Blocks while this server takes over, but no longer than three times the TTL. Returns at once
    /// if this server has not been elected. Returns whether this server is active.
    fn wait_until_active(&self) -> bool {
        let mut state = self.state.lock();
        let takes_over = |state: &mut RoleState| state.is_elected && !state.role.is_own;
        self.changed
            .wait_while_for(&mut state, takes_over, self.settings.ttl * PATIENCE);
        state.role.is_own
    }

    /// Stops this server from running for leader. Call this when the server is told to stop.
    pub fn leave(&self) {
        self.is_leaving.store(true, Ordering::SeqCst);
    }

    fn is_leaving(&self) -> bool {
        self.is_leaving.load(Ordering::SeqCst)
    }

    /// Returns a channel that closes as soon as etcd accepts a write. Until then, no other server
    /// can be elected.
    pub fn probe_journal(&self) -> Receiver<()> {
        self.journal.probe()
    }

    /// Steps down, so that another server can take over at once. Blocks for at most six seconds.
    pub fn resign(&self) {
        self.leave();
        if self.is_active() {
            self.journal.wait_until_written(LAST_CHANGES);
        }
        let mut state = self.state.lock();
        // The lease stays in the state. If another thread also resigns, it must wait for the end of
        // the lease, too, before the process may end.
        let Some(lease) = state.lease else {
            return;
        };
        state.is_resigning = true;
        drop(state);
        let why = match self.revoke(lease) {
            Ok(()) => return info!("resigned"),
            Err(EtcdFailure::NoAnswer { reason, .. }) => reason,
            Err(EtcdFailure::Refused { code, message }) => format!("{message} (code {code})"),
        };
        warn!("cannot-resign error={}", Escaped(why.as_bytes()));
    }

    /// Steps down because this server has won an election but cannot take over. The server remains
    /// a standby.
    fn step_down(&self) {
        let lease = self.state.lock().lease.take();
        // If this fails, the lease ends by itself.
        if lease.is_some_and(|lease| self.revoke(lease).is_ok()) {
            info!("resigned");
        }
        self.state.lock().is_elected = false;
        self.changed.notify_all();
    }

    /// Blocks until this server steps down, but no longer than `at_most`. Returns whether it has
    /// stepped down.
    fn steps_down_within(&self, at_most: Duration) -> bool {
        let mut state = self.state.lock();
        self.changed
            .wait_while_for(&mut state, |state| state.is_elected, at_most);
        !state.is_elected
    }

    /// Revokes the lease of the leader key. If a member does not answer, asks the next one, until
    /// each member has been asked once or the time is up.
    fn revoke(&self, lease: u64) -> Result<(), EtcdFailure> {
        let (mut gateway, began) = (self.gateway(), Moment::now());
        let mut left = self.settings.members.len();
        loop {
            let revoked = gateway.revoke_lease(lease);
            left -= 1;
            let may_ask = left > 0 && began.elapsed() < LAST_REQUESTS;
            match revoked {
                Err(EtcdFailure::NoAnswer { .. }) if may_ask => {}
                // The lease has ended by itself, or by a request whose answer was lost.
                Err(EtcdFailure::Refused { code, .. }) if code == NOT_FOUND => return Ok(()),
                revoked => return revoked,
            }
        }
    }

    /// Becomes the active server. If the server has been told to stop, steps down instead and never
    /// returns, because it accepts no more clients, and must not stay active until its present
    /// clients are gone.
    fn become_active(&self, epoch: u64) {
        let mut state = self.state.lock();
        if !self.is_leaving() {
            let address = Some(self.settings.advertise.clone());
            state.role = Role {
                active: Some(Active { epoch, address }),
                is_own: true,
            };
            drop(state);
            self.changed.notify_all();
            return;
        }
        drop(state);
        self.resign();
        self.wait_while_leaving();
    }

    /// Returns at once, unless the server is about to stop: then it never returns.
    fn wait_while_leaving(&self) {
        let mut state = self.state.lock();
        self.changed.wait_while(&mut state, |_| self.is_leaving());
    }

    fn gateway(&self) -> Gateway {
        let timeout = (self.settings.ttl / 3).min(MAX_REQUEST_TIME);
        Gateway::new(&self.settings, timeout)
    }

    /// Ends all connections and starts again as a standby with an empty table. Safety does not
    /// depend on this, because etcd refuses every write of a deposed server.
    fn start_over(&self, reason: &str) -> ! {
        let mut state = self.state.lock();
        // If another thread resigns, this thread waits here until the process ends.
        self.changed
            .wait_while(&mut state, |state| state.is_resigning);
        if !state.role.is_own && state.role.active.is_some() {
            warn!("starting-over reason=\"{reason}\"");
        } else {
            error!("deposed reason=\"{reason}\"");
        }
        self.log.flush();
        if !self.is_leaving() {
            exec_again(state.lease.unwrap_or(0));
        }
        // The mutex stays locked until the exit, so that no other thread starts over.
        process::exit(1)
    }

    /// The answer to a request for the role.
    pub fn role_line(&self) -> String {
        self.role().line()
    }

    /// The epoch of this server's own term, and the smoothed duration of a batch of the journal;
    /// `None` if this server is not active.
    pub fn figures(&self) -> Option<(u64, Duration)> {
        Some((self.role().own_epoch()?, self.journal.round_time()))
    }

    /// Whether `epoch`, which a standby has sent, is the epoch of this server's own term.
    pub fn is_current_epoch(&self, epoch: &[u8]) -> bool {
        let own = self.role().own_epoch();
        own.is_some_and(|own| own.to_string().as_bytes() == epoch)
    }
}

/// The lease that this server had before it started over, or 0 if it had no lease. `None` if the
/// server has not started over.
fn lease_before() -> Option<u64> {
    let lease = env::var(STARTED_OVER).ok()?;
    Some(lease.parse().unwrap_or(0))
}

/// Replaces the process with a new process of the same program, and passes the lease to it. Returns
/// only if that fails.
fn exec_again(lease: u64) {
    let lease = lease.to_string();
    // The first path is wrong if an upgrade has replaced the program's file.
    let programs = [env::current_exe().ok(), Some("/proc/self/exe".into())];
    for program in programs.into_iter().flatten() {
        let Err(error) = exec(&program, env::args_os(), &[(STARTED_OVER, &lease)]);
        error!("cannot-start-over error=\"{}\"", reason(&error));
    }
}

/// Resolves `place`, which is `HOST:PORT`, and calls `attempt` for its addresses in order until it
/// succeeds. The name must be resolved by `deadline`.
fn first_of<T>(
    place: &str,
    deadline: Instant,
    mut attempt: impl FnMut(&SocketAddr) -> io::Result<T>,
) -> io::Result<T> {
    let mut last = io::Error::other("the name has no address");
    for address in names::look_up(place, deadline)? {
        match attempt(&address) {
            Ok(made) => return Ok(made),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Whether a test has planted this fault, to check that the other tests find it. Always `false` in
/// a release build.
fn is_fault_planted(fault: &str) -> bool {
    cfg!(debug_assertions) && env::var_os("LATCHD_PLANTED_FAULT").is_some_and(|name| name == fault)
}

/// Which server is active, as far as this server knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Role {
    /// `None` if no server is known to be active.
    pub active: Option<Active>,
    /// Whether this server is the active one.
    pub is_own: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Active {
    /// The number of a term of an active server. Each term has a higher epoch than the previous
    /// one.
    pub epoch: u64,
    /// Where to reach the active server, as `HOST:PORT`; `None` if the value of the leader key does
    /// not have this form.
    pub address: Option<String>,
}

impl Role {
    /// The role in words, for the supervisor.
    pub fn status(&self) -> String {
        match &self.active {
            Some(Active { epoch, .. }) if self.is_own => format!("Active, epoch {epoch}"),
            Some(Active { epoch, address }) => {
                let address = address.as_deref().unwrap_or("a server without an address");
                format!("Standby of {address}, epoch {epoch}")
            }
            None => "Standby, no server is known to be active".to_owned(),
        }
    }

    /// The answer to a request for the role.
    fn line(&self) -> String {
        match &self.active {
            Some(Active { epoch, address }) => {
                let role = if self.is_own { "active" } else { "standby" };
                format!("ok {role} {epoch} {}", address.as_deref().unwrap_or("-"))
            }
            None => "ok standby 0 -".to_owned(),
        }
    }

    /// The epoch of this server's own term; `None` if this server is not active.
    fn own_epoch(&self) -> Option<u64> {
        let active = self.active.as_ref().filter(|_| self.is_own);
        active.map(|active| active.epoch)
    }
}
