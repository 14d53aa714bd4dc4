//! Several servers, one service: one of them is active, by an election in etcd, and journals there
//! who holds what before a client is told. The others pass connections on to it.
//!
//! **Invariant:** nothing is certain until etcd says so. Every write and every question to etcd
//! compares the epoch and the batch number, so a server that has been replaced without knowing
//! changes nothing and tells no client anything.
//!
//! A build without the feature has `absent.rs` in place of this module: the same shape, and no
//! values.

mod election;
mod etcd;
#[cfg_attr(not(feature = "tls"), path = "etcd_tls/absent.rs")]
mod etcd_tls;
mod first_frames;
mod journal;
mod record;
mod relay;
mod trouble;
mod writer;

use std::env;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{bounded, Receiver};
use log::{error, info, warn};
use parking_lot::{Condvar, Mutex};

use crate::arbiter::{Arbiter, Certainty};
use crate::log::Log;
use crate::net::names;
use crate::sys::exec::exec;
use crate::sys::moment::Moment;
use crate::sys::secret;
use crate::sys::thread::spawn;
use crate::text::{reason, unusable_file, Escaped};
use crate::token::{Fence, FenceSource};
use election::Candidate;
use etcd::{EtcdFailure, Gateway, NOT_FOUND};
use etcd_tls::EtcdTls;
use journal::Journal;
use relay::Relays;
use writer::{JournalWriter, UnreadableRecord};

/// The most time that a request to etcd takes.
const MAX_REQUEST_TIME: Duration = Duration::from_secs(1);

/// How long the last changes may take to be written. Enough for etcd to elect a new leader.
const LAST_CHANGES: Duration = Duration::from_secs(3);

/// How long new requests to step down may still begin.
const LAST_REQUESTS: Duration = Duration::from_secs(2);

/// For how many TTLs a client waits for an active server.
const PATIENCE: u32 = 3;

/// Set for a server that has started over: the number of the lease that it had, or 0 for none.
const STARTED_OVER: &str = "LATCHD_STARTED_OVER";

/// The client address of an etcd member.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Member {
    /// `HOST:PORT`.
    address: String,
    /// `https://` was in front.
    speaks_tls: bool,
}

#[derive(Clone, Debug, Default)]
pub struct ClusterSettings {
    members: Vec<Member>,
    /// Where the other servers reach this one: `HOST:PORT`.
    advertise: String,
    /// What the keys in etcd begin with; servers with the same prefix are one service.
    prefix: String,
    /// For how long the active server may be silent.
    ttl: Duration,
    /// The user for etcd, if it asks for one, and the file with the password.
    user: Option<(String, PathBuf)>,
    /// How to speak TLS with the members that do.
    tls: Option<EtcdTls>,
}

impl ClusterSettings {
    /// Settings to be filled in. A build without the feature refuses the option that asks for them.
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

    /// Sets where the other servers reach this one, `HOST:PORT`; what the keys in etcd begin with;
    /// and for how long the active server may be silent.
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

    /// The same settings, if their files can be used, which are read again when they are needed.
    /// The error names the unusable one.
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
    secret::read(file).map_err(|error| unusable_file("etcd password", file, reason(&error)))
}

/// Who is active, as far as this server knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Role {
    /// `None` if no server is known to be active.
    active: Option<Active>,
    /// That is this server; false if none is known.
    is_own: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Active {
    /// One term of one active server. Epochs rise.
    epoch: u64,
    /// Where to reach it: `HOST:PORT`; `None` if its value in etcd is not of that form.
    address: Option<String>,
}

/// This server as one of several.
pub struct ClusterNode {
    settings: ClusterSettings,
    journal: Arc<Journal>,
    state: Mutex<RoleState>,
    changed: Condvar,
    /// The server is about to stop: it does not run for leader any more. Not in the state: a
    /// signal must find it while another thread starts over with the mutex.
    is_leaving: AtomicBool,
    log: Log,
    relays: Relays,
}

#[derive(Default)]
struct RoleState {
    role: Role,
    /// This server is the leader, though it may not serve yet.
    is_elected: bool,
    /// This server is stepping down, and the process ends.
    is_resigning: bool,
    /// The etcd lease of the leader key, if this server wins the election.
    lease: Option<u64>,
    /// When another server was last seen to lead.
    active_seen: Option<Moment>,
}

/// One term of this server.
#[derive(Clone, Copy, Debug)]
struct Term {
    epoch: u64,
    /// The version of the leader key, which counts the batches: the next one expects it.
    version: u64,
    lease: u64,
    /// When the lease was kept alive last: sent, not answered.
    kept: Moment,
}

impl ClusterNode {
    /// A standby. It does nothing until [`ClusterNode::serve`].
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

    /// Where the arbiter gets its fences.
    pub fn fences(&self) -> Box<dyn FenceSource> {
        Box::new(Arc::clone(&self.journal))
    }

    /// The number of a holder's last uncertain change, or 0; without a holder, that of the last
    /// change of all.
    pub fn change_of(&self, holder: Option<Fence>) -> u64 {
        self.journal.change_of(holder)
    }

    /// Blocks until the journal has this change, and this server is still active if the certainty
    /// is that high. Sessions send no reply before. While etcd is silent, that is until the server
    /// starts over.
    pub fn wait_for_journal(&self, change: u64, certainty: Certainty) {
        self.journal.wait_for(change, certainty);
    }

    /// Starts the threads that run for leader, write the journal and watch the relayed connections.
    /// Fails if one cannot be started: call it before other threads take what the system allows.
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

    /// Whether this process has started over, so that this is not the start of the server.
    pub fn has_started_over(&self) -> bool {
        lease_before().is_some()
    }

    fn role(&self) -> Role {
        self.state.lock().role.clone()
    }

    pub fn is_active(&self) -> bool {
        self.state.lock().role.is_own
    }

    /// Whether clients find an active server behind this one. An active server that has not been
    /// seen for the TTL, because etcd is out of reach, may be one no more.
    #[cfg_attr(not(feature = "http"), allow(dead_code))]
    pub fn has_active_server(&self) -> bool {
        let state = self.state.lock();
        let is_recent = |seen: Moment| seen.elapsed() < self.settings.ttl;
        !self.is_leaving() && (state.role.is_own || state.active_seen.is_some_and(is_recent))
    }

    /// What this server is now. Blocks while that is what was `seen`, but no longer than `at_most`.
    fn wait_for_change(&self, seen: &Role, at_most: Duration) -> Role {
        let mut state = self.state.lock();
        self.changed
            .wait_while_for(&mut state, |state| state.role == *seen, at_most);
        state.role.clone()
    }

    /// Blocks while this server takes over, for three times the TTL at most. Returns whether it is
    /// active then; false at once if it has not been elected.
    fn wait_until_active(&self) -> bool {
        let mut state = self.state.lock();
        let takes_over = |state: &mut RoleState| state.is_elected && !state.role.is_own;
        self.changed
            .wait_while_for(&mut state, takes_over, self.settings.ttl * PATIENCE);
        state.role.is_own
    }

    /// Does not run for leader from now on. Call it when the server is told to stop.
    pub fn leave(&self) {
        self.is_leaving.store(true, Ordering::SeqCst);
    }

    fn is_leaving(&self) -> bool {
        self.is_leaving.load(Ordering::SeqCst)
    }

    /// The channel closes as soon as etcd takes a write: until then no other server could be
    /// elected.
    pub fn probe_journal(&self) -> Receiver<()> {
        self.journal.probe()
    }

    /// Steps down, so that another server takes over at once. Blocks for six seconds at most.
    pub fn resign(&self) {
        self.leave();
        if self.is_active() {
            self.journal.wait_until_written(LAST_CHANGES);
        }
        let mut state = self.state.lock();
        // Another thread may be about to resign, too. The process must not end before the lease.
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

    /// Steps down after an election that this server has won, because it cannot take over. It stays
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

    /// Blocks for a while, or until this server steps down; tells whether it does.
    fn steps_down_within(&self, at_most: Duration) -> bool {
        let mut state = self.state.lock();
        self.changed
            .wait_while_for(&mut state, |state| state.is_elected, at_most);
        !state.is_elected
    }

    /// Ends the lease of the leader key. Asks each member once while there is time.
    fn revoke(&self, lease: u64) -> Result<(), EtcdFailure> {
        let (mut gateway, began) = (self.gateway(), Moment::now());
        let mut left = self.settings.members.len();
        loop {
            let revoked = gateway.revoke_lease(lease);
            left -= 1;
            let may_ask = left > 0 && began.elapsed() < LAST_REQUESTS;
            match revoked {
                Err(EtcdFailure::NoAnswer { .. }) if may_ask => {}
                // It has ended by itself, or by a request whose answer was lost.
                Err(EtcdFailure::Refused { code, .. }) if code == NOT_FOUND => return Ok(()),
                revoked => return revoked,
            }
        }
    }

    /// Becomes the active server. One that has been told to stop steps down instead, and does not
    /// return: it lets no client in, but would be active until its present clients are gone.
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

    /// Never returns once the server is about to stop.
    fn wait_while_leaving(&self) {
        let mut state = self.state.lock();
        self.changed.wait_while(&mut state, |_| self.is_leaving());
    }

    fn gateway(&self) -> Gateway {
        let timeout = (self.settings.ttl / 3).min(MAX_REQUEST_TIME);
        Gateway::new(&self.settings, timeout)
    }

    /// Ends all connections and begins as a standby, with nothing of the old table. Safety does not
    /// depend on it: whatever this process did before, etcd refuses to write.
    fn start_over(&self, reason: &str) -> ! {
        let mut state = self.state.lock();
        // This server has stepped down by itself: this thread waits for the end of the process.
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
        // The mutex is never released, so that no other thread starts over.
        process::exit(1)
    }
}

/// The lease that this process had before it started over, if it has: 0 for none.
fn lease_before() -> Option<u64> {
    let lease = env::var(STARTED_OVER).ok()?;
    Some(lease.parse().unwrap_or(0))
}

/// Replaces the process with a new one of the same program, which knows its lease. Returns if that
/// fails.
fn exec_again(lease: u64) {
    let lease = lease.to_string();
    // An upgrade may have replaced the file.
    let programs = [env::current_exe().ok(), Some("/proc/self/exe".into())];
    for program in programs.into_iter().flatten() {
        let Err(error) = exec(&program, env::args_os(), &[(STARTED_OVER, &lease)]);
        error!("cannot-start-over error=\"{}\"", reason(&error));
    }
}

/// Looks up a place, `HOST:PORT`, until `deadline` at most, and tries its addresses in their order.
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

/// Whether a test has planted this fault, to see that it is found. Never in a release build.
fn is_planted(fault: &str) -> bool {
    cfg!(debug_assertions) && env::var_os("LATCHD_PLANTED_FAULT").is_some_and(|name| name == fault)
}
