//! Leases end on time, and what is asked at that very moment has one answer.

use std::thread;
use std::time::Duration;

use crate::support::amount::amount;
use crate::support::history::{now, History, Instant, Record, Reply, Request};
use crate::support::limited::raise_our_own_limit;
use crate::support::stalls::{fairly, lateness_during};
use crate::support::{fence, parse_grant, processor_time, Client, Daemon};

const LEASE: Duration = Duration::from_secs(1);

#[test]
fn five_hundred_leases_end_on_time_and_never_early() {
    let daemon = Daemon::start(&["--max-per-connection", "1000"]);
    // A slow machine, or a single core, needs long to compute what belongs to so many at once.
    let computed = || processor_time(daemon.pid()) + processor_time(std::process::id());
    fairly(|| {
        let before = computed();
        let mut late = (0..amount(2, 40))
            .flat_map(|_| pass_on(&daemon, 250))
            .collect::<Vec<_>>();
        late.sort_unstable();
        let (p99, worst) = (late[late.len() * 99 / 100], late[late.len() - 1]);
        println!(
            "{} leases: late by {p99:?} at p99, {worst:?} at most",
            late.len()
        );
        if p99 < Duration::from_millis(500).max(4 * (computed() - before)) {
            Ok(())
        } else {
            Err(p99)
        }
    })
    .expect("leases end late");
}

/// How late each of so many keys passed from one client to the next at the end of its lease.
fn pass_on(daemon: &Daemon, count: usize) -> Vec<Duration> {
    let mut holder = daemon.connect();
    let held: Vec<(String, Instant, Instant)> = (0..count)
        .map(|number| {
            let (key, asked) = (format!("k{number}"), now());
            // The server may not have noticed yet that the last round is over.
            holder.acquire_for(&key, 5, 1);
            (key, asked, now())
        })
        .collect();
    thread::scope(|scope| {
        let waiters: Vec<_> = held
            .into_iter()
            .map(|(key, asked, told)| {
                let mut waiter = daemon.connect();
                waiter.send(&format!("l\n{key}\n30\n"));
                scope.spawn(move || {
                    assert!(parse_grant(&waiter.line(), "ok").is_some());
                    let granted = now();
                    // The lease began somewhere between the question and the answer.
                    assert!(granted >= asked + LEASE, "{key} passed on early");
                    granted.saturating_sub(told + LEASE)
                })
            })
            .collect();
        let late = waiters.into_iter().map(|waiter| waiter.join());
        late.map(|late| late.expect("it was granted")).collect()
    })
}

/// The renewal arrives up to two milliseconds before or after the end of the lease, if the machine
/// can do that.
#[test]
fn a_renewal_at_the_end_of_a_lease_is_granted_or_dead() {
    // Pairs of clients: one renews at the end of its lease, the other waits for the key.
    let (pairs, rounds) = amount((48, 3), (250, 400));
    raise_our_own_limit();
    let daemon = Daemon::start(&[]);
    let mut within = Duration::from_millis(2);
    while !was_close(&daemon, pairs, rounds, within) {
        // The slower the machine, the less exactly a renewal meets the end.
        within *= 2;
        assert!(within < LEASE / 2, "the race was never close");
    }
}

/// Plays rounds with renewals that begin within so much of the end of their lease. Returns whether
/// some of them were in time and some too late.
fn was_close(daemon: &Daemon, pairs: u32, rounds: u32, within: Duration) -> bool {
    let play_all = || -> Vec<Vec<Record>> {
        thread::scope(|scope| {
            let pairs: Vec<_> = (0..pairs)
                .map(|pair| {
                    let (holder, waiter) = (daemon.connect(), daemon.connect());
                    let pair = Pair::new(pair, holder, waiter);
                    scope.spawn(move || pair.play(pairs, rounds, within))
                })
                .collect();
            let records = pairs.into_iter().map(|pair| pair.join());
            records.map(|records| records.expect("it ended")).collect()
        })
    };
    let (histories, lateness) = lateness_during(play_all);
    let history = History {
        records: histories.concat(),
        limits: (0..pairs).map(|key| (key, 1)).collect(),
        slack: Duration::from_secs(2) + 2 * lateness,
        ..History::default()
    };
    let renewed = |reply| {
        let is_renewal = |one: &&Record| matches!(one.request, Request::Renew { .. });
        let renewals = history.records.iter().filter(is_renewal);
        renewals.filter(|one| one.reply == reply).count()
    };
    let (in_time, dead) = (renewed(Reply::Done), renewed(Reply::Refused));
    println!("{in_time} renewed in time, {dead} too late, within {within:?}");
    let found = history.violations();
    assert!(found.is_empty(), "{found:?}");
    in_time > 0 && dead > 0
}

struct Pair {
    key: u32,
    holder: Client,
    waiter: Client,
    records: Vec<Record>,
}

impl Pair {
    fn new(key: u32, holder: Client, waiter: Client) -> Pair {
        let records = Vec::new();
        Pair {
            key,
            holder,
            waiter,
            records,
        }
    }

    fn play(mut self, pairs: u32, rounds: u32, within: Duration) -> Vec<Record> {
        let key = format!("k{}", self.key);
        for round in 0..rounds {
            let begin = now();
            let line = self.holder.request("l", &key, "30 1");
            let Some(token) = self.granted(0, begin, LEASE, &line) else {
                continue;
            };
            let (told, granted) = (now(), fence(&token));

            let asked = now();
            self.waiter.send(&format!("l\n{key}\n30 600\n"));
            let step = 2 * within * ((self.key * 7 + round * 11) % pairs) / pairs;
            let renewal = told + LEASE + step;
            thread::sleep(renewal.saturating_sub(within + now()));

            let begin = now();
            let reply = match self.holder.request("n", &key, &format!("{token} 1")) {
                reply if reply == "ok 1" => Reply::Done,
                _ => Reply::Refused,
            };
            let (fence, lease) = (granted, LEASE);
            self.note(0, begin, Request::Renew { fence, lease }, reply);
            self.let_the_waiter_have_it(&key, asked);
        }
        self.records
    }

    fn let_the_waiter_have_it(&mut self, key: &str, asked: Instant) {
        let line = self.waiter.line();
        let lease = Duration::from_secs(600);
        let Some(token) = self.granted(1, asked, lease, &line) else {
            return;
        };
        let (begin, fence) = (now(), fence(&token));
        let reply = match self.waiter.request("r", key, &token) {
            reply if reply == "ok" => Reply::Done,
            // The checker finds it.
            _ => Reply::Refused,
        };
        self.note(1, begin, Request::Release { fence }, reply);
    }

    /// Notes the reply to a claim, and gives the token. On a machine that is late the wait may end
    /// first, or the lease before the reply.
    fn granted(
        &mut self,
        client: u64,
        begin: Instant,
        lease: Duration,
        line: &str,
    ) -> Option<String> {
        let wait = Duration::from_secs(30);
        let grant = parse_grant(line, "ok");
        let reply = match (&grant, line) {
            (Some(grant), _) => Reply::Granted {
                fence: fence(&grant.token),
            },
            (None, "timeout") => Reply::TimedOut,
            (None, "error_lease_expired") => Reply::Refused,
            _ => panic!("no grant: {line}"),
        };
        let weight = 1;
        let request = Request::Acquire {
            wait,
            lease,
            weight,
        };
        self.note(client, begin, request, reply);
        grant.map(|grant| grant.token)
    }

    fn note(&mut self, client: u64, begin: Instant, request: Request, reply: Reply) {
        self.records.push(Record {
            term: 0,
            connection: u64::from(self.key) * 2 + client,
            key: self.key,
            begin,
            end: now(),
            request,
            reply,
        });
    }
}
