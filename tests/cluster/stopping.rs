//! A server that stops in order: what its clients hear, and how long it takes.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use latchd::client::{Address, Client as Guards};

use crate::house::{Etcd, Server, TAKE_OVER, TTL};
use crate::support::amount::amount;
use crate::support::at_the_end::AtTheEnd;
use crate::support::latch::{wait, Latch};
use crate::support::limited::raise_our_own_limit;
use crate::support::needs::needs;
use crate::support::silent::free_port;
use crate::support::stalls::{fair_test, in_time};
use crate::support::{eventually, program, Client, Event, Grant, Signal, PATIENCE};

/// Says what the client can do, and has a lock granted.
pub fn acquire_as_adopter(client: &mut Client, key: &str) -> Grant {
    assert!(client.request("hello", "_", "adopt").starts_with("ok "));
    client.acquire_for(key, 0, 60)
}

/// The addresses of the servers, as one cluster.
fn cluster(servers: &[&Server]) -> String {
    let addresses = servers
        .iter()
        .map(|server| format!("127.0.0.1:{}", server.port));
    addresses.collect::<Vec<String>>().join("|")
}

fn exits_well(server: &Server) {
    let status = server.daemon.wait_exit(TAKE_OVER).expect("it ends");
    assert_eq!(status.code(), Some(0), "{}", server.daemon.log());
}

#[test]
fn a_hand_over_waits_for_clients_that_cannot_adopt() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let first = Server::active(&etcd.endpoints(), &[]);
    let second = Server::start(&etcd.endpoints(), &[]);
    second.wait_for("standby active=", 1);
    let mut adopter = first.connect();
    let held = acquire_as_adopter(&mut adopter, "held");
    // One of them comes through the standby.
    let (mut other, mut relayed) = (first.connect(), second.connect());
    let others = other.acquire_for("others", 0, 60);
    relayed.acquire_for("relayed", 0, 60);
    let mut waiter = first.connect();
    waiter.send("l\nothers\n60\n");
    first.daemon.signal(Signal::TERM);
    first.wait_for("handing-over", 1);
    // It serves and grants meanwhile, and dismisses no waiter.
    let mut late = first.connect();
    let grant = late.acquire("late", 0);
    assert_eq!(late.request("r", "late", &grant.token), "ok");
    assert_eq!(other.request("r", "others", &others.token), "ok");
    assert!(waiter.line().starts_with("ok "));
    drop(waiter);
    assert_eq!(late.request("ping", "_", "_"), "ok");
    drop(relayed);
    for client in [&mut adopter, &mut late] {
        let end = client.next_event(TAKE_OVER);
        assert!(matches!(end, Event::Eof | Event::Reset), "{end:?}");
    }
    exits_well(&first);
    second.wait_until_active(1);
    let mut client = second.connect();
    assert_eq!(client.request("l", "held", "0"), "timeout");
    let adopt = format!("{} 60", held.token);
    assert_eq!(client.request("adopt", "held", &adopt), "ok 60");
    // The last release and the last disconnect are in the journal.
    for free in ["others", "relayed", "late"] {
        client.acquire(free, 0);
    }
}

/// One of them holds the lock at any time, while the others wait.
#[test]
fn clients_that_cannot_adopt_do_not_keep_a_server_from_stopping() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let first = Server::active(&etcd.endpoints(), &["--shutdown-timeout", "4"]);
    let second = Server::start(&etcd.endpoints(), &[]);
    second.wait_for("standby active=", 1);
    let directory = tempfile::tempdir().expect("there is room");
    let works = LOCKS.map(|lock| directory.path().join(lock));
    let (jobs, ports) = (Jobs::default(), [first.port, second.port]);
    thread::scope(|scope| {
        let _end = AtTheEnd(&jobs.are_over);
        for number in [0, 2, 4, 6] {
            let (work, jobs) = (&works[0], &jobs);
            scope.spawn(move || work_plainly(&ports, number, work, jobs));
        }
        jobs.wait_for_more(3);
        first.daemon.signal(Signal::TERM);
        exits_well(&first);
        second.wait_until_active(1);
    });
    let log = first.daemon.log();
    assert!(log.contains("stopping reason=handed-over"), "{log}");
}

/// A grant is told once it is in etcd. Grants on their way at the end would lock their keys for
/// clients that do not know their tokens.
#[test]
fn a_hand_over_leaves_no_grant_that_no_client_knows() {
    const CLIENTS: usize = 24;
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 3);
    let first = Server::active(&etcd.endpoints(), &["--max-locks", "100000"]);
    let second = Server::start(&etcd.endpoints(), &[]);
    second.wait_for("standby active=", 1);
    let (port, granted) = (first.port, AtomicUsize::new(0));
    let known = thread::scope(|scope| {
        let granted = &granted;
        let clients: Vec<_> = (0..CLIENTS)
            .map(|number| {
                scope.spawn(move || {
                    let mut client = Client::tcp(([127, 0, 0, 1], port).into());
                    client.send("hello\n_\nadopt\n");
                    assert!(client.line().starts_with("ok "));
                    let mut known = 0;
                    loop {
                        let claim = format!("l\n{number}-{known}\n0 600\n");
                        let _ = client.try_send(claim.as_bytes());
                        match client.next_event(TAKE_OVER) {
                            Event::Line(line) => assert!(line.starts_with(b"ok ")),
                            _ => return known,
                        }
                        known += 1;
                        granted.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        eventually(PATIENCE, "grants are on their way", || {
            granted.load(Ordering::Relaxed) > 2 * CLIENTS
        });
        first.daemon.signal(Signal::TERM);
        let known = clients.into_iter().map(|it| it.join().expect("no panic"));
        known.sum::<usize>()
    });
    exits_well(&first);
    assert_eq!(etcd.holder_count("latchd"), known);
    second.wait_until_active(1);
}

#[test]
fn a_hand_over_with_many_holders_is_quick() {
    fair_test(a_hand_over_with_many_holders_is_quick_once);
}

fn a_hand_over_with_many_holders_is_quick_once() {
    let programs = needs!("etcd", "etcdctl");
    let count = amount(300, 5000);
    raise_our_own_limit();
    let etcd = Etcd::start(&programs, 3);
    let room = ["--max-connections", "6000", "--max-locks", "6000"];
    let first = Server::active(&etcd.endpoints(), &room);
    let second = Server::start(&etcd.endpoints(), &room);
    second.wait_for("standby active=", 1);
    let mut holders: Vec<Client> = (0..count).map(|_| first.connect()).collect();
    for (number, holder) in holders.iter_mut().enumerate() {
        holder.send(&format!("hello\n_\nadopt\nl\n{number}\n0 60\n"));
    }
    let token = |holder: &mut Client| {
        assert!(holder.line().starts_with("ok "));
        let granted = holder.line();
        let token = granted.split(' ').nth(1);
        token.unwrap_or_else(|| panic!("{granted}")).to_owned()
    };
    let tokens: Vec<String> = holders.iter_mut().map(token).collect();
    let told = Instant::now();
    first.daemon.signal(Signal::TERM);
    // Through the standby that takes over.
    let mut next = second.connect();
    first.wait_for("stopping reason=handed-over", 1);
    next.send("l\nnext\n0\n");
    while !next_grant(&mut next, &second) {
        assert!(told.elapsed() < TAKE_OVER, "{}", second.daemon.log());
    }
    let gap = told.elapsed();
    println!("{count} holders: {gap:?} from SIGTERM to the next grant");
    in_time!(gap < TTL, "{gap:?}");
    exits_well(&first);
    drop(holders);
    let mut again: Vec<Client> = (0..count).map(|_| second.connect()).collect();
    for (number, (client, token)) in again.iter_mut().zip(&tokens).enumerate() {
        let adopt = format!("adopt\n{number}\n{token} 60\n");
        client.send(&format!("hello\n_\nadopt\n{adopt}"));
    }
    for client in &mut again {
        assert!(client.line().starts_with("ok "));
        client.expect("ok 60");
    }
    println!("all of them are back after {:?}", told.elapsed());
}

/// Whether the reply is a grant. If the connection has ended, the claim is made again.
fn next_grant(client: &mut Client, server: &Server) -> bool {
    match client.next_event(TAKE_OVER) {
        Event::Line(line) => line.starts_with(b"ok "),
        _ => {
            *client = server.connect();
            client.send("l\nnext\n0\n");
            false
        }
    }
}

#[test]
fn a_standby_that_stops_ends_none_of_the_jobs_behind_it() {
    const JOBS: usize = 20;
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let active = Server::active(&etcd.endpoints(), &[]);
    for _ in 0..amount(1, 5) {
        let standby = Server::start(&etcd.endpoints(), &[]);
        standby.wait_for("standby active=", 1);
        let mut holder = active.connect();
        let grant = holder.acquire_for("k", 0, 60);
        // Half of them know no other server, and wait until it is back.
        let servers = [vec![&standby], vec![&standby, &active]];
        let job = |number: usize| {
            let mut command = Command::new(program("latch"));
            command
                .args(["run", "k", "--retry", "--server"])
                .arg(cluster(&servers[number % 2]))
                .args(["--", "true"])
                .env_remove("LATCH_AUTH_TOKEN_FILE")
                .stdin(Stdio::null());
            Latch::start(&mut command)
        };
        let mut jobs: Vec<Latch> = (0..JOBS).map(job).collect();
        let waiters = |count: u64| {
            let stats = active.connect().stats();
            stats["locks"][0]["waiters"] == count
        };
        eventually(PATIENCE, "all of them wait", || waiters(JOBS as u64));
        standby.daemon.signal(Signal::TERM);
        exits_well(&standby);
        let _again = Server::start_at(standby.port, &etcd.endpoints(), &[], None);
        eventually(PATIENCE, "all of them wait again", || waiters(JOBS as u64));
        assert_eq!(holder.request("r", "k", &grant.token), "ok");
        for job in &mut jobs {
            assert_eq!(wait(job), Some(0));
        }
    }
}

/// Work that fails if other work is done under the same lock.
struct Exclusive<'a>(&'a Path);

impl<'a> Exclusive<'a> {
    fn begin(directory: &'a Path) -> Exclusive<'a> {
        fs::create_dir(directory).expect("no other holder works");
        Exclusive(directory)
    }
}

impl Drop for Exclusive<'_> {
    fn drop(&mut self) {
        let _ = fs::remove_dir(self.0);
    }
}

const JOB_TIME: Duration = Duration::from_millis(30);

/// Two locks: each is asked for by clients of all kinds.
const LOCKS: [&str; 2] = ["one", "two"];

/// The jobs of all clients of a test.
#[derive(Default)]
struct Jobs {
    are_over: AtomicBool,
    done_count: AtomicUsize,
}

impl Jobs {
    fn go_on(&self) -> bool {
        !self.are_over.load(Ordering::Relaxed)
    }

    fn note_done(&self) {
        self.done_count.fetch_add(1, Ordering::Relaxed);
    }

    fn done_count(&self) -> usize {
        self.done_count.load(Ordering::Relaxed)
    }

    fn wait_for_more(&self, count: usize) {
        let wanted = self.done_count() + count;
        eventually(PATIENCE, "more jobs are done", || {
            self.done_count() >= wanted
        });
    }
}

/// Does jobs as a client that knows no `adopt` and has a connection for each.
fn work_plainly(ports: &[u16], number: usize, work: &Path, jobs: &Jobs) {
    let key = LOCKS[number % 2];
    let mut tries = number;
    while jobs.go_on() {
        tries += 1;
        let port = ports[tries % ports.len()];
        let Some(mut client) = Client::try_tcp(([127, 0, 0, 1], port).into()) else {
            thread::sleep(Duration::from_millis(20));
            continue;
        };
        let _ = client.try_send(format!("l\n{key}\n60 60\n").as_bytes());
        let granted = match client.next_event(TAKE_OVER) {
            Event::Line(line) if line == b"error_draining" => {
                thread::sleep(Duration::from_millis(20));
                continue;
            }
            Event::Line(line) => String::from_utf8(line).expect("text"),
            Event::Eof | Event::Reset => continue,
            other => panic!("{other:?}"),
        };
        let token = granted
            .split(' ')
            .nth(1)
            .filter(|_| granted.starts_with("ok "));
        let token = token.unwrap_or_else(|| panic!("a claim was answered with {granted}"));
        let at_work = Exclusive::begin(work);
        thread::sleep(JOB_TIME);
        drop(at_work);
        let _ = client.try_send(format!("r\n{key}\n{token}\n").as_bytes());
        match client.next_event(TAKE_OVER) {
            Event::Line(line) => assert_eq!(line, b"ok", "the lock was lost"),
            // The server may hand over in the very moment in which the last lock is free.
            Event::Eof | Event::Reset => {}
            other => panic!("{other:?}"),
        }
        jobs.note_done();
    }
}

/// Does jobs with the library.
fn work_with_guards(servers: &str, number: usize, work: &Path, jobs: &Jobs) {
    let server: Address = servers.parse().expect("addresses");
    let client = Guards::new([server]);
    let lock = client
        .lock(LOCKS[number % 2])
        .lease(Duration::from_secs(60));
    while jobs.go_on() {
        // An error is that of the connection: the program asks again.
        let Ok(guard) = lock.acquire() else {
            thread::sleep(Duration::from_millis(20));
            continue;
        };
        let at_work = Exclusive::begin(work);
        thread::sleep(JOB_TIME);
        assert_eq!(guard.loss(), None);
        drop(at_work);
        guard.release().expect("it was held to the end");
        jobs.note_done();
    }
}

/// Runs jobs under `latch run`, with a status of their own.
fn work_in_commands(servers: &str, number: usize, work: &Path, jobs: &Jobs) {
    const SCRIPT: &str = r#"mkdir "$1" || exit 9; sleep 0.03; rmdir "$1"; exit 3"#;
    while jobs.go_on() {
        let mut command = Command::new(program("latch"));
        command
            .args(["run", LOCKS[number % 2], "--retry", "--server", servers])
            .args(["--lease", "60", "--", "sh", "-c", SCRIPT, "sh"])
            .arg(work)
            .env_remove("LATCH_AUTH_TOKEN_FILE")
            .stdin(Stdio::null());
        assert_eq!(wait(&mut Latch::start(&mut command)), Some(3));
        jobs.note_done();
    }
}

#[test]
fn a_rolling_upgrade_ends_no_job() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 3);
    let ports = [(); 3].map(|()| free_port());
    let start = |port: u16| Server::start_at(port, &etcd.endpoints(), &[], None);
    let mut servers = ports.map(start);
    eventually(TAKE_OVER, "one is active", || {
        let mut logs = servers.iter().map(|server| server.daemon.log());
        logs.any(|log| log.contains("INFO active epoch="))
    });
    let directory = tempfile::tempdir().expect("there is room");
    let works = LOCKS.map(|lock| directory.path().join(lock));
    let list = cluster(&servers.each_ref());
    let jobs = Jobs::default();
    thread::scope(|scope| {
        let _end = AtTheEnd(&jobs.are_over);
        for number in 0..4 {
            let (work, list, jobs) = (&works[number % 2], &list, &jobs);
            scope.spawn(move || work_plainly(&ports, number, work, jobs));
            scope.spawn(move || work_with_guards(list, number, work, jobs));
            scope.spawn(move || work_in_commands(list, number, work, jobs));
        }
        for turn in 0..amount(3, 30) {
            jobs.wait_for_more(8);
            let server = &mut servers[turn % 3];
            let told = Instant::now();
            server.daemon.signal(Signal::TERM);
            exits_well(server);
            println!("server {turn} has ended after {:?}", told.elapsed());
            *server = start(server.port);
            eventually(TAKE_OVER, "it has its part", || {
                let log = server.daemon.log();
                ["INFO standby active=", "INFO active epoch="]
                    .iter()
                    .any(|role| log.contains(role))
            });
        }
    });
    println!("{} jobs", jobs.done_count());
}
