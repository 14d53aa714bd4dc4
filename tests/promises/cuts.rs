//! Cuts of the network that neither end is told about. A server that hears nothing ends the
//! connection, and never the grants: their holder may be there still, and believe in its lease.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use latchd::client::Client as Guards;
use rustix::net::sockopt;

use crate::support::hosts::Hosts;
use crate::support::latch::Latch;
use crate::support::limited::with_surroundings_of;
use crate::support::needs::{needs, Program};
use crate::support::{
    eventually, parse_grant, program, wait_for_exit, waiter_count, Client, Daemon, Event, Grant,
    Scheme, PATIENCE,
};

/// When the server has ended the connections of a cut: it has heard nothing for 30 s.
const NOTICED: Duration = Duration::from_secs(36);

/// Longer than a test.
const LONGEST: Duration = Duration::from_secs(300);

/// How late a lease may end on a busy machine.
const LATE: Duration = Duration::from_secs(10);

/// What is cut.
#[derive(Clone, Copy, Debug)]
enum Cut {
    LinkOfClients,
    LinkOfServer,
    /// The server hears its clients, but they do not hear it.
    WayToClients,
}

impl Cut {
    fn set(self, hosts: &Hosts, is_cut: bool) {
        let state = if is_cut { "down" } else { "up" };
        match (self, is_cut) {
            (Cut::LinkOfClients, _) => hosts.far.link(state),
            (Cut::LinkOfServer, _) => hosts.near.link(state),
            (Cut::WayToClients, true) => {
                let clients = hosts.far.address;
                hosts.near.ip(&format!("route add blackhole {clients}/32"));
            }
            (Cut::WayToClients, false) => {
                let clients = hosts.far.address;
                hosts.near.ip(&format!("route del blackhole {clients}/32"));
            }
        }
    }
}

/// A server on the near host, and its clients on both.
struct Server<'a> {
    hosts: &'a Hosts,
    daemon: Daemon,
    scheme: Scheme,
    /// How many clients of the near host are still connected.
    near_count: AtomicUsize,
}

impl<'a> Server<'a> {
    fn start(hosts: &'a Hosts, scheme: Scheme) -> Server<'a> {
        let mut command = hosts.near.command(program("latchd"));
        command.args(["--host", "0.0.0.0", "--port", "0", "--print-port"]);
        #[cfg(feature = "tls")]
        if scheme == Scheme::Tls {
            command.args(crate::support::tls::common().options());
        }
        let daemon = Daemon::from_command(with_surroundings_of(&Daemon::command(), command));
        Server {
            hosts,
            daemon,
            scheme,
            near_count: AtomicUsize::new(0),
        }
    }

    fn near(&self) -> Client {
        let server = self.daemon.addr();
        let near = &self.hosts.near;
        self.near_count.fetch_add(1, Ordering::SeqCst);
        near.within(|| Client::open(self.scheme, server))
    }

    fn far(&self) -> Client {
        let server = self.hosts.near.port(self.daemon.port());
        let far = &self.hosts.far;
        far.within(|| Client::open(self.scheme, server))
    }

    fn holder(&self, key: &str, lease: u64) -> Holder {
        let mut client = self.far();
        let asked = Instant::now();
        let grant = client.acquire_for(key, 0, lease);
        Holder {
            _client: client,
            grant,
            holds_until: asked + Duration::from_secs(lease),
            next: self.next(key),
        }
    }

    /// Waits for the key on the near host. The channel has when it was granted.
    fn next(&self, key: &str) -> Receiver<(Instant, SystemTime)> {
        let (mut client, mut asking) = (self.near(), self.near());
        let waiters = |asking: &mut Client| waiter_count(&asking.stats(), key);
        let before = waiters(&mut asking);
        client.send(&format!("l\n{key}\n600 600\n"));
        eventually(PATIENCE, "it waits", || waiters(&mut asking) > before);
        drop(asking);
        self.near_count.fetch_sub(1, Ordering::SeqCst);
        let (sender, granted) = mpsc::channel();
        thread::spawn(move || {
            // At the end of the test, the server ends before this.
            if let Event::Line(line) = client.next_event(LONGEST) {
                let line = String::from_utf8_lossy(&line);
                assert!(parse_grant(&line, "ok").is_some(), "{line}");
                let _ = sender.send((Instant::now(), SystemTime::now()));
                client.next_event(LONGEST);
            }
        });
        granted
    }

    /// Starts `latch run` on the far host, with a job that heeds no SIGTERM and writes down when it
    /// was last alive.
    fn run(&self, key: &str, options: &[&str], job: &Job<'_>) -> Latch {
        let mut command = self.hosts.far.command(program("latch"));
        let server = self.hosts.near.port(self.daemon.port()).to_string();
        command.env("LATCH_SERVER", server).arg("run").args(options);
        let script = format!(
            "trap '' TERM; end=$(($(date +%s) + {})); \
             while [ $(date +%s) -lt $end ]; do date +%s%N >> {}; sleep 0.1; done",
            job.seconds,
            job.marks.display()
        );
        Latch::start(command.args([key, "--", "sh", "-c", &script]))
    }
}

/// A client of the far host that holds a key, and one of the near host that waits for it.
struct Holder {
    _client: Client,
    grant: Grant,
    /// At least until then, it may believe so.
    holds_until: Instant,
    next: Receiver<(Instant, SystemTime)>,
}

impl Holder {
    /// The next holder begins when the lease is over.
    fn expect_passed_on(&self) {
        let left = self.holds_until.saturating_duration_since(Instant::now());
        let granted = self.next.recv_timeout(left + LATE);
        let (granted, _) = granted.expect("its turn, as the lease is over");
        let late = granted.checked_duration_since(self.holds_until);
        let late = late.unwrap_or_else(|| {
            let early = self.holds_until - granted;
            panic!("two holders, for {early:?}")
        });
        println!("passed on {late:?} after the end of the lease");
    }

    fn expect_held(&self) {
        assert!(self.next.try_recv().is_err(), "two holders");
    }
}

/// What a job under `latch run` does.
struct Job<'a> {
    seconds: u64,
    marks: &'a Path,
}

impl Job<'_> {
    /// When the job was last seen alive.
    fn last_alive(&self) -> SystemTime {
        let marks = fs::read_to_string(self.marks).expect("it has begun");
        // It may have been killed before the end of a line.
        let (whole, _) = marks.rsplit_once('\n').expect("a line");
        let last = whole.lines().last().expect("a line");
        let nanos = last.parse().expect("the time");
        SystemTime::UNIX_EPOCH + Duration::from_nanos(nanos)
    }

    /// The next holder begins when the job has ended.
    fn expect_passed_on(&self, next: &Receiver<(Instant, SystemTime)>, within: Duration) {
        let granted = next.recv_timeout(within);
        let (_, granted) = granted.expect("its turn, as the job is over");
        // It is not there any more, and so writes no more.
        thread::sleep(Duration::from_millis(300));
        let after = granted.duration_since(self.last_alive());
        let after = after.unwrap_or_else(|error| panic!("two at once, for {:?}", error.duration()));
        println!("passed on {after:?} after the end of the job");
    }
}

#[test]
fn no_cut_makes_a_second_holder() {
    needs!(admin);
    let ip = needs!("ip");
    thread::scope(|scope| {
        for cut in [Cut::LinkOfClients, Cut::LinkOfServer, Cut::WayToClients] {
            let ip = &ip;
            scope.spawn(move || survive(cut, ip));
        }
    });
}

fn survive(cut: Cut, ip: &Program) {
    let directory = tempfile::tempdir().expect("there is room");
    let hosts = Hosts::new(ip);
    let server = Server::start(&hosts, Scheme::Plain);
    let mut asking = server.near();

    // One whose lease is over before the server notices, and some whose leases are not.
    let short = [5, 33].map(|lease| server.holder(&format!("for-{lease}"), lease));
    let long = server.holder("for-42", 42);
    let longest = server.holder("for-600", 600);
    // One waits for another key, and loses its place, but not what it holds.
    let mut waiting = server.holder("held", 600);
    let wanted = asking.acquire_for("wanted", 0, 600);
    waiting._client.send("l\nwanted\n600 600\n");
    await_waiters(&mut asking, "wanted", 1);
    let next_of_wanted = server.next("wanted");
    // One is granted a key into the silence, and one reads none of its replies.
    let late = asking.acquire_for("late", 0, 600);
    let mut granted_late = server.far();
    granted_late.send("l\nlate\n600 600\n");
    await_waiters(&mut asking, "late", 1);
    let next_of_late = server.next("late");
    let deaf = server.holder("deaf", 600);
    let mut writer = deaf._client.writer();
    let flood = b"stats\n_\n_\n".repeat(200_000);
    thread::spawn(move || writer.write_all(&flood));
    let tls = tls(&hosts);
    let of_tls = tls.as_ref().map(|tls| {
        let holders = [33, 600].map(|lease| tls.holder(&format!("for-{lease}"), lease));
        holders
    });
    let address = hosts.near.port(server.daemon.port()).to_string();
    let guard = hosts.far.within(|| {
        let guards = Guards::new([address.parse().expect("an address")]);
        let lease = Duration::from_secs(600);
        guards.lock("guarded").lease(lease).acquire().expect("free")
    });
    let next_of_guard = server.next("guarded");
    let marks = ["default", "600"].map(|name| directory.path().join(name));
    let jobs = [(90, &marks[0]), (45, &marks[1])];
    let jobs = jobs.map(|(seconds, marks)| Job { seconds, marks });
    let mut runs = [
        server.run("job", &[], &jobs[0]),
        server.run("job-600", &["--lease", "600"], &jobs[1]),
    ];
    for marks in &marks {
        let has_begun = || fs::read(marks).is_ok_and(|marks| marks.contains(&b'\n'));
        eventually(PATIENCE, "the job runs", has_begun);
    }
    let next_of_jobs = ["job", "job-600"].map(|key| server.next(key));

    cut.set(&hosts, true);
    let began = Instant::now();
    assert_eq!(asking.request("r", "late", &late.token), "ok");
    for holder in &short {
        holder.expect_passed_on();
    }
    jobs[0].expect_passed_on(&next_of_jobs[0], PATIENCE);
    thread::sleep(NOTICED.saturating_sub(began.elapsed()));
    let orphans = asking.request("stats", "holders", "for-600");
    assert!(orphans.contains("\"conn_id\":0,\"peer\":null"), "{orphans}");
    // All connections of the cut are gone, and all places of those that waited.
    await_waiters(&mut asking, "wanted", 1);
    let stats = asking.stats();
    // A server that still hears a client waits longer for it.
    if !matches!(cut, Cut::WayToClients) {
        let near = server.near_count.load(Ordering::SeqCst);
        assert_eq!(stats["connections"], near);
    }
    assert_eq!(asking.request("r", "wanted", &wanted.token), "ok");
    next_of_wanted.recv_timeout(PATIENCE).expect("its turn");

    cut.set(&hosts, false);
    long.expect_passed_on();
    let mut back = server.far();
    let token = &longest.grant.token;
    assert_eq!(back.request("adopt", "for-600", token), "ok 33");
    assert_eq!(
        back.request("n", "for-600", &format!("{token} 600")),
        "ok 600"
    );
    jobs[1].expect_passed_on(&next_of_jobs[1], PATIENCE);
    let [default, longer] = &mut runs;
    assert_eq!(wait_for_exit(longer, PATIENCE).code(), Some(0));
    assert!(wait_for_exit(default, PATIENCE).code() != Some(0));
    for holder in [&longest, &waiting, &deaf] {
        holder.expect_held();
    }
    assert!(next_of_late.try_recv().is_err(), "two holders");
    assert!(next_of_guard.try_recv().is_err(), "two holders");
    assert!(guard.is_held());
    guard.release().expect("it is held");
    next_of_guard.recv_timeout(PATIENCE).expect("its turn");
    if let Some([short, longest]) = &of_tls {
        short.expect_passed_on();
        longest.expect_held();
    }
    assert_eq!(back.request("r", "for-600", token), "ok");
    longest.next.recv_timeout(PATIENCE).expect("its turn");
}

/// Waits until so many wait for a key: one that was sent has arrived, or one is gone.
fn await_waiters(asking: &mut Client, key: &str, count: u64) {
    eventually(PATIENCE, "the queue is as expected", || {
        waiter_count(&asking.stats(), key) == count
    });
}

/// A server for clients with TLS, if this build has it.
fn tls(hosts: &Hosts) -> Option<Server<'_>> {
    #[cfg(feature = "tls")]
    if Scheme::Tls.is_available() {
        return Some(Server::start(hosts, Scheme::Tls));
    }
    let _ = hosts;
    None
}

/// The system of the holder probes its connection, hears no answer, and tells the server so with a
/// reset, which arrives.
#[test]
fn a_reset_by_the_system_of_a_holder_frees_nothing() {
    needs!(admin);
    let ip = needs!("ip");
    let hosts = Hosts::new(&ip);
    let server = Server::start(&hosts, Scheme::Plain);
    let holder = server.holder("k", 12);
    let socket = &holder._client;
    sockopt::set_socket_keepalive(socket, true).expect("an option");
    sockopt::set_tcp_keepidle(socket, Duration::from_secs(2)).expect("an option");
    sockopt::set_tcp_keepintvl(socket, Duration::from_secs(1)).expect("an option");
    sockopt::set_tcp_keepcnt(socket, 2).expect("an option");
    Cut::WayToClients.set(&hosts, true);
    let mut asking = server.near();
    eventually(PATIENCE, "the connection is reset", || {
        let reply = asking.request("stats", "holders", "k");
        reply.contains("\"conn_id\":0,\"peer\":null")
    });
    assert!(Instant::now() < holder.holds_until, "it comes too late");
    holder.expect_passed_on();
}
