//! Chaos: processes with clients are killed and stopped, other peers misbehave, the server is
//! killed, told to stop and short of descriptors, all by a schedule from a seed. In the end the
//! checker looks at what the clients wrote down, and nothing may be left over in the server.
//!
//! `CHAOS_SECONDS` says for how long, `CHAOS_SEED` repeats a schedule. Run it with `--nocapture` to
//! see its figures.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::{getrlimit, kill_process, Pid, Resource, Signal};

use crate::clients::{self, LEASES, LIMITS};
use crate::http_session;
use crate::journal;
use crate::noise::annoy;
use crate::place::{Place, Stream};
use crate::service::{House, Service, SHUTDOWN};
use crate::support::amount::amount;
use crate::support::at_the_end::AtTheEnd;
#[cfg(feature = "cluster")]
use crate::support::cluster::Etcd;
use crate::support::footprint::{status_kib, Footprint};
use crate::support::history::{now, History, Instant, Reply, Request, Violation};
use crate::support::limited::limit_to;
#[cfg(any(feature = "cluster", feature = "tls"))]
use crate::support::needs::needs;
use crate::support::random::{self, setting, Random};
use crate::support::stalls::lateness_during;
use crate::support::{poll_for, Scheme, PATIENCE};

/// How many processes with clients there are at a time, usually and in full.
const PROCESSES: (u64, u64) = (4, 16);

/// How many peers misbehave at a time.
const ANNOYING: u64 = 3;

const PING_PAUSE: Duration = Duration::from_millis(20);

/// How long a thread takes to run once the server has looked for the memory for it.
const THREAD_STARTS: Duration = Duration::from_millis(100);

/// How late a server may be on a machine that is idle.
const SLACK: Duration = Duration::from_secs(1);

/// How much later a request over HTTP may be, for which its client opens a connection: the server
/// accepts none while it is short of descriptors, for up to half a second, and then pauses for up
/// to a second.
const ACCEPTANCE: Duration = Duration::from_millis(1500);

/// How much later it may be that writes a journal.
const JOURNAL: Duration = Duration::from_secs(2);

#[test]
fn no_chaos_breaks_a_promise() {
    run(House::Alone(Scheme::Plain));
}

#[test]
fn no_chaos_with_half_the_clients_on_http_breaks_a_promise() {
    run(House::WithHttp);
}

#[cfg(feature = "tls")]
#[test]
fn no_chaos_over_tls_breaks_a_promise() {
    needs!("openssl");
    run(House::Alone(Scheme::Tls));
}

#[cfg(feature = "cluster")]
#[test]
fn no_chaos_in_a_cluster_breaks_a_promise() {
    let programs = needs!("etcd", "etcdctl");
    run(House::Cluster(Etcd::start(&programs, 1)));
}

fn run(house: House) {
    let seconds = setting("CHAOS_SECONDS").unwrap_or(amount(8, 120));
    println!("{seconds} seconds of chaos");
    let directory = tempfile::tempdir().expect("there is room");
    let mut chaos = Chaos::start(house, directory.path(), random::seed());
    let time = Duration::from_secs(seconds);
    let (slowest_ping, lateness) = lateness_during(|| chaos.rage(time));
    // A crowd of threads is served later than one that only sleeps.
    let lateness = lateness.max(slowest_ping);
    chaos.history.slack = SLACK + 2 * lateness;
    if chaos.service.has_http() {
        chaos.history.slack += ACCEPTANCE;
    }
    if chaos.service.is_cluster() {
        chaos.history.slack += JOURNAL;
        chaos.history.heritage = LEASES[LEASES.len() - 1];
        chaos.history.may_end_at(&chaos.service.ends);
    }
    chaos.history.breaks_may_end_connections();
    chaos.report(lateness);

    let violations = chaos.history.violations();
    assert!(violations.is_empty(), "{}", shown(&violations));
    assert!(chaos.complaints.is_empty(), "{:#?}", chaos.complaints);
    chaos.service.expect_nothing_left();
}

fn shown(violations: &[Violation]) -> String {
    let mut counts = std::collections::BTreeMap::new();
    for violation in violations {
        *counts.entry(violation.rule).or_insert(0) += 1;
    }
    let few: Vec<String> = violations
        .iter()
        .take(10)
        .map(|violation| format!("{:?}: {}", violation.rule, violation.story))
        .collect();
    format!("{counts:?}\n{}", few.join("\n"))
}

struct Chaos {
    directory: PathBuf,
    random: Random,
    service: Service,
    crowds: Vec<Crowd>,
    next_process: u64,
    history: History,
    complaints: Vec<String>,
    counts: HashMap<&'static str, u32>,
}

/// A process with clients.
struct Crowd {
    process: u64,
    child: Child,
    /// When it was stopped, and when it is to go on.
    stopped: Option<(Instant, Instant)>,
}

impl Drop for Crowd {
    fn drop(&mut self) {
        // Both fail only if it has ended, or was reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Chaos {
    fn start(house: House, directory: &Path, seed: u64) -> Chaos {
        let mut chaos = Chaos {
            directory: directory.to_owned(),
            random: Random::new(seed),
            service: Service::start(house, directory),
            crowds: Vec::new(),
            next_process: 1,
            history: History {
                limits: (0..).zip(LIMITS).collect(),
                ..History::default()
            },
            complaints: Vec::new(),
            counts: HashMap::new(),
        };
        for _ in 0..amount(PROCESSES.0, PROCESSES.1) {
            chaos.add_crowd();
        }
        chaos
    }

    /// Does harm for so long, and then lets all clients finish. Gives the time of the slowest ping.
    fn rage(&mut self, time: Duration) -> Duration {
        let begin = now();
        // The last run of the server is a long one.
        let (last_start, end) = (begin + time * 6 / 10, begin + time);
        let is_over = AtomicBool::new(false);
        let directory = self.directory.clone();
        let seeds: Vec<u64> = (0..ANNOYING).map(|_| self.random.next()).collect();
        let slowest_ping = thread::scope(|scope| {
            let pings = scope.spawn(|| slowest_ping(&directory, &is_over));
            for seed in seeds {
                let (mut random, directory, is_over) = (Random::new(seed), &directory, &is_over);
                scope.spawn(move || {
                    while !is_over.load(Ordering::Relaxed) {
                        let place = Place::any(directory, &mut random);
                        annoy(&place, &mut random);
                    }
                });
            }
            let end_of_noise = AtTheEnd(&is_over);
            while now() < end {
                self.harm(now() < last_start);
                thread::sleep(Duration::from_millis(50 + self.random.below(150)));
                self.continue_those_due(now());
            }
            drop(end_of_noise);
            pings.join().expect("it gives up in time")
        });
        self.continue_those_due(Instant::MAX);
        while let Some(mut crowd) = self.crowds.pop() {
            drop(crowd.child.stdin.take());
            let begin = now();
            let status = poll_for(6 * PATIENCE, || crowd.child.try_wait().expect("our child"));
            if !status.is_some_and(|status| status.success()) {
                let complaint = format!("clients that were told to end: {status:?}");
                self.complaints.push(complaint);
            }
            self.bury(crowd.process, (begin, now()));
        }
        slowest_ping
    }

    fn harm(&mut self, may_restart: bool) {
        let server = usize::try_from(self.random.below(self.service.server_count()));
        let server = server.expect("an index");
        match self.random.below(40) {
            0..=2 if may_restart && self.service.ends.len() % 2 == 0 => self.kill_server(server),
            0..=2 if may_restart => self.drain_server(server),
            3..=4 => self.impose_a_limit(server),
            5..=16 => self.stop_crowd(),
            17..=24 => self.kill_crowd(),
            _ => {}
        }
    }

    fn kill_server(&mut self, server: usize) {
        self.count("server killed");
        self.service.ends.push(now());
        let daemon = self.service.daemon(server);
        daemon.signal(Signal::KILL);
        daemon.wait_exit(PATIENCE).expect("it was killed");
        self.restart(server);
    }

    fn drain_server(&mut self, server: usize) {
        self.count("server drained");
        self.service.ends.push(now());
        self.service.daemon(server).signal(Signal::TERM);
        let patience = SHUTDOWN + PATIENCE;
        let ended = poll_for(patience, || {
            self.continue_those_due(now());
            self.service.daemon(server).wait_exit(Duration::ZERO)
        });
        if ended.and_then(|status| status.code()) != Some(0) {
            let log = self.service.daemon(server).log();
            self.complaints
                .push(format!("the drain ended with {ended:?}: {log}"));
        }
        self.restart(server);
    }

    fn restart(&mut self, server: usize) {
        let log = self.service.daemon(server).log();
        let bad_lines = log.lines().filter(|line| line.contains("panicked"));
        self.complaints.extend(bad_lines.map(str::to_owned));
        self.service.restart(server);
    }

    /// Leaves a server few descriptors, or little memory, beside what it has, for a moment.
    fn impose_a_limit(&mut self, server: usize) {
        let pid = self.service.daemon(server).pid();
        let (resource, limit) = if self.random.one_in(2) {
            self.count("descriptors limited");
            let count = Footprint::of(pid).descriptors as u64;
            (Resource::Nofile, count + self.random.below(8))
        } else {
            self.count("memory limited");
            let leaving = |mib: u64| (status_kib(pid, "VmSize:") + (mib << 10)) << 10;
            // So little keeps the server from starting threads. One that it has looked for
            // memory for would end it if that were taken away before the thread runs.
            limit_to(pid, Resource::As, Some(leaving(16)));
            thread::sleep(THREAD_STARTS);
            (Resource::As, leaving(1 + self.random.below(40)))
        };
        limit_to(pid, resource, Some(limit));
        thread::sleep(Duration::from_millis(100 + self.random.below(400)));
        limit_to(pid, resource, getrlimit(resource).current);
        let daemon = self.service.daemon(server);
        if let Some(status) = daemon.wait_exit(Duration::ZERO) {
            let complaint = format!("a limit ended the server: {status}: {}", daemon.log());
            self.complaints.push(complaint);
            self.restart(server);
        }
    }

    fn stop_crowd(&mut self) {
        let index = self.any_crowd();
        let time = Duration::from_millis(100 + self.random.below(2500));
        let crowd = &mut self.crowds[index];
        if crowd.stopped.is_none() {
            let begin = now();
            kill_process(Pid::from_child(&crowd.child), Signal::STOP).expect("our child");
            crowd.stopped = Some((begin, begin + time));
            self.count("clients stopped");
        }
    }

    fn continue_those_due(&mut self, time: Instant) {
        for crowd in &mut self.crowds {
            let Some((begin, _)) = crowd.stopped.filter(|(_, end)| *end <= time) else {
                continue;
            };
            kill_process(Pid::from_child(&crowd.child), Signal::CONT).expect("our child");
            crowd.stopped = None;
            let stops = self.history.stops.entry(crowd.process).or_default();
            stops.push((begin, now()));
        }
    }

    fn kill_crowd(&mut self) {
        let index = self.any_crowd();
        let mut crowd = self.crowds.swap_remove(index);
        let begin = now();
        crowd.child.kill().expect("our child");
        crowd.child.wait().expect("our child");
        http_session::end_all(&self.directory, crowd.process);
        self.bury(crowd.process, (begin, now()));
        self.count("clients killed");
        self.add_crowd();
    }

    fn any_crowd(&mut self) -> usize {
        let count = self.crowds.len() as u64;
        usize::try_from(self.random.below(count)).expect("an index")
    }

    fn add_crowd(&mut self) {
        let process = self.next_process;
        self.next_process += 1;
        self.crowds.push(Crowd {
            process,
            child: clients::start(&self.directory, process, self.random.next()),
            stopped: None,
        });
    }

    /// Reads what a process has left.
    fn bury(&mut self, process: u64, end: (Instant, Instant)) {
        let path = clients::journal(&self.directory, process);
        let complaints = journal::read(&path, &mut self.history, end);
        self.complaints.extend(complaints);
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_insert(0) += 1;
    }

    /// Prints figures, and insists that there was something to check.
    fn report(&self, lateness: Duration) {
        let records = &self.history.records;
        let replied = |reply: Reply| records.iter().filter(|one| one.reply == reply).count();
        let is_waiting = |request| matches!(request, Request::Wait { .. });
        let waits = records.iter().filter(|one| is_waiting(one.request)).count();
        let grants = self.history.grant_count();
        println!(
            "{} requests, {grants} grants, {waits} second phases",
            records.len()
        );
        println!(
            "{} timed out, {} refused, {} without a reply",
            replied(Reply::TimedOut),
            replied(Reply::Refused),
            replied(Reply::Lost)
        );
        println!(
            "{} connections, {:?}",
            self.history.hang_ups.len(),
            self.counts
        );
        println!("the machine was late by {lateness:?} at most");
        assert!(grants > 100, "too few grants to prove anything");
    }
}

/// How long the server took for a ping at the most, over a connection that it had already.
fn slowest_ping(directory: &Path, is_over: &AtomicBool) -> Duration {
    let (mut random, mut slowest) = (Random::new(0), Duration::ZERO);
    while !is_over.load(Ordering::Relaxed) {
        let Ok(mut stream) = Place::any(directory, &mut random).unix() else {
            thread::sleep(PING_PAUSE);
            continue;
        };
        let mut is_known = false;
        while let Some(took) = ping(&mut stream).filter(|_| !is_over.load(Ordering::Relaxed)) {
            // One of several servers may have to wait for another to become active.
            if is_known {
                slowest = slowest.max(took);
            }
            is_known = true;
            thread::sleep(PING_PAUSE);
        }
    }
    slowest
}

fn ping(stream: &mut Stream) -> Option<Duration> {
    let begin = now();
    stream.set_read_timeout(6 * PATIENCE).ok()?;
    stream.write_all(b"ping\n_\n_\n").ok()?;
    stream.read_exact(&mut [0; 3]).ok()?;
    Some(now() - begin)
}
