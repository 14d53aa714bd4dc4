//! One server ends, another goes on.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{ChildStdin, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use latchd::client::Client as ClusterClient;
use rustix::fs::{fcntl_getfl, fcntl_setfl, OFlags};

use crate::house::{renew, Etcd, Server, TAKE_OVER, TTL};
use crate::proxy::{Fate, Proxy};
use crate::support::needs::needs;
use crate::support::silent::free_addr;
use crate::support::silent::free_port;
use crate::support::stalls::{fair_test, in_time};
use crate::support::{eventually, fence, Client, Daemon, Event, Signal, PATIENCE};

#[test]
fn the_successor_of_a_killed_server_keeps_its_holders() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let first = Server::active(&etcd.endpoints(), &[]);
    let second = Server::start(&etcd.endpoints(), &[]);
    let mut holder = first.connect();
    let lock = holder.acquire_for("lock", 0, 60);
    let slot = holder.request("sl", "slots", "0 2 60");
    assert!(slot.starts_with("ok "), "{slot}");
    let gone = holder.acquire_for("gone", 0, 60);
    assert_eq!(holder.request("r", "gone", &gone.token), "ok");
    first.kill();
    second.wait_until_active(1);

    let mut client = second.connect();
    assert_eq!(client.request("l", "lock", "0"), "timeout");
    assert_eq!(renew(&mut client, "lock", &lock), "ok 60");
    assert_eq!(client.request("r", "gone", &gone.token), "error");
    assert_eq!(client.request("sl", "slots", "0 3"), "error_limit_mismatch");
    let mut other_slot = client.request("sl", "slots", "0 2");
    assert!(other_slot.starts_with("ok "), "{other_slot}");
    assert_eq!(client.request("sl", "slots", "0 2"), "timeout");
    assert!(fence(&other_slot.split_off(3)) > fence(&gone.token));
    let slot = slot.split(' ').nth(1).expect("a token");
    assert_eq!(client.request("sr", "slots", slot), "ok");
    assert_eq!(client.request("r", "lock", &lock.token), "ok");
    let next = client.acquire("lock", 0);
    assert!(fence(&next.token) > fence(&lock.token));
}

#[test]
fn only_the_active_server_says_that_work_is_overdue() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let expect = ["--expect", "k=1s"];
    let active = Server::active(&etcd.endpoints(), &[]);
    let standby = Server::start(&etcd.endpoints(), &expect);
    standby.wait_for(" standby ", 1);
    // By then it would be overdue, if the time had begun.
    thread::sleep(Duration::from_millis(1500));
    assert!(!standby.daemon.log().contains("overdue"));
    active.kill();
    standby.wait_until_active(1);
    standby.wait_for(" overdue key=k ", 1);
}

#[test]
fn a_standby_is_ready_while_there_is_an_active_server() {
    let programs = needs!("etcd", "etcdctl");
    let mut etcd = Etcd::start(&programs, 1);
    let door = free_addr();
    let status = |path: &str| {
        let mut client = Client::tcp(door);
        client.send(&format!("GET {path} HTTP/1.0\r\n\r\n"));
        client.line()
    };
    let (ok, unavailable) = ("HTTP/1.1 200 OK\r", "HTTP/1.1 503 Service Unavailable\r");
    let first = Server::active(&etcd.endpoints(), &[]);
    let second = Server::start(&etcd.endpoints(), &["--http", &door.to_string()]);
    second.wait_for("listening http=", 1);
    eventually(TAKE_OVER, "it knows the active server", || {
        status("/ready") == ok
    });
    // The other server has the locks; the counters are each server's own.
    assert_eq!(status("/v1/stats/holders"), unavailable);
    assert_eq!(status("/metrics"), ok);

    etcd.members[0].kill();
    first.kill();
    eventually(TAKE_OVER, "no server is active", || {
        status("/ready") == unavailable
    });
    assert_eq!(status("/health"), ok);

    etcd.members[0].restart();
    second.wait_until_active(1);
    assert_eq!(status("/ready"), ok);
    assert_eq!(status("/v1/stats/holders"), ok);
}

/// The status and the body of the answer to a request over HTTP.
fn post(door: SocketAddr, path: &str, body: &str) -> (u16, serde_json::Value) {
    let mut stream = TcpStream::connect(door).expect("the door is open");
    stream.set_read_timeout(Some(PATIENCE)).expect("a time");
    let len = body.len();
    let request = format!("POST {path} HTTP/1.0\r\nContent-Length: {len}\r\n\r\n{body}");
    stream.write_all(request.as_bytes()).expect("it takes it");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it closes");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).expect("a status");
    let body = serde_json::from_str(body).unwrap_or_default();
    (status.parse().expect("a number"), body)
}

#[test]
fn a_lock_over_http_outlives_the_server_that_granted_it() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let doors = [free_addr(), free_addr()];
    let [first_door, second_door] = doors.map(|door| door.to_string());
    let first = Server::active(&etcd.endpoints(), &["--http", &first_door, "--http-grants"]);
    let second = Server::start(
        &etcd.endpoints(),
        &["--http", &second_door, "--http-grants"],
    );
    second.wait_for("listening http=", 1);
    let lock = r#"{"lease_ttl_s":60}"#;
    let (status, refused) = post(doors[1], "/v1/locks/k", lock);
    assert_eq!((status, &refused["error"]), (503, &"not_leader".into()));
    let (status, granted) = post(doors[0], "/v1/locks/k", lock);
    assert_eq!(status, 200, "{granted}");
    assert_eq!(post(doors[0], "/v1/locks/gone", lock).0, 200);
    first.kill();
    second.wait_until_active(1);
    let (_, timeout) = post(doors[1], "/v1/locks/k", lock);
    assert_eq!(timeout["status"], "timeout");
    let token = format!("{{\"token\":{}}}", granted["token"]);
    assert_eq!(post(doors[1], "/v1/locks/k/renew", &token).0, 200);
    assert_eq!(post(doors[1], "/v1/locks/k/release", &token).0, 204);
    let (_, next) = post(doors[1], "/v1/locks/k", lock);
    assert!(next["token"].as_str() > granted["token"].as_str(), "{next}");
}

#[test]
fn an_orphan_is_free_when_its_lease_is_over() {
    fair_test(an_orphan_is_free_when_its_lease_is_over_once);
}

fn an_orphan_is_free_when_its_lease_is_over_once() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let first = Server::active(&etcd.endpoints(), &[]);
    let mut holder = first.connect();
    holder.acquire_for("k", 0, 3);
    first.kill();
    let second = Server::active(&etcd.endpoints(), &[]);
    let mut client = second.connect();
    let began = Instant::now();
    client.acquire_for("k", 60, 30);
    // The take-over takes longer than the lease: it has begun anew.
    let waited = began.elapsed();
    assert!(waited > Duration::from_secs(1), "{waited:?}");
    eventually(TAKE_OVER, "the journal forgets the orphan", || {
        etcd.holders("latchd").len() == 1
    });
}

#[test]
fn an_orphan_is_adopted_and_a_renewal_leaves_it_one() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let first = Server::active(&etcd.endpoints(), &[]);
    let mut holder = first.connect();
    let grant = holder.acquire_for("k", 0, 120);
    first.kill();
    let second = Server::active(&etcd.endpoints(), &[]);
    let mut adopter = second.connect();
    let mut other = second.connect();
    assert_eq!(renew(&mut other, "k", &grant), "ok 120");
    drop(other);
    assert_eq!(second.connect().request("l", "k", "1"), "timeout");
    let adopt = format!("{} 120", grant.token);
    assert_eq!(
        adopter.request("hello", "_", "adopt"),
        "ok adopt slots keeps status ages"
    );
    assert_eq!(adopter.request("adopt", "k", &adopt), "ok 120");
    assert_eq!(renew(&mut adopter, "k", &grant), "ok 120");
    drop(adopter);
    second.connect().acquire("k", 10);
}

#[test]
fn a_longer_lease_survives_the_take_over() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let first = Server::active(&etcd.endpoints(), &[]);
    let mut holder = first.connect();
    let mut grant = holder.acquire_for("k", 0, 1);
    grant.lease = 120;
    assert_eq!(renew(&mut holder, "k", &grant), "ok 120");
    first.kill();
    let second = Server::active(&etcd.endpoints(), &[]);
    assert_eq!(second.connect().request("l", "k", "2"), "timeout");
}

#[test]
fn waiters_of_a_killed_server_see_the_end_of_the_stream() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let server = Server::active(&etcd.endpoints(), &[]);
    let mut holder = server.connect();
    holder.acquire("k", 0);
    let mut waiter = server.connect();
    waiter.send("l\nk\n60\n");
    let mut two_phase = server.connect();
    assert_eq!(two_phase.request("e", "k", ""), "queued");
    two_phase.send("w\nk\n60\n");
    waiter.nothing_within(Duration::from_millis(200));
    server.kill();
    for client in [&mut waiter, &mut two_phase] {
        let end = client.next_event(TAKE_OVER);
        assert!(matches!(end, Event::Eof | Event::Reset), "{end:?}");
    }
}

#[test]
fn a_server_that_was_stopped_too_long_says_nothing_more() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let first = Server::active(&etcd.endpoints(), &[]);
    let second = Server::start(&etcd.endpoints(), &[]);
    let mut holder = first.connect();
    let grant = holder.acquire_for("k", 0, 60);
    let mut newcomer = first.connect();
    let mut asking = first.connect();
    for client in [&mut newcomer, &mut asking] {
        assert_eq!(client.request("ping", "_", "_"), "ok");
    }
    first.daemon.signal(Signal::STOP);
    second.wait_until_active(1);
    // These have arrived when the server goes on.
    holder.send(&format!("n\nk\n{} 60\n", grant.token));
    newcomer.send("l\nother\n0\n");
    asking.send(&format!("stats\nholders {}\nk\n", fence(&grant.token)));
    first.daemon.signal(Signal::CONT);
    for client in [&mut holder, &mut newcomer, &mut asking] {
        let end = client.next_event(TAKE_OVER);
        assert!(matches!(end, Event::Eof | Event::Reset), "{end:?}");
    }
    first.wait_for("deposed", 1);
    first.wait_for("standby active=", 1);
    // The connection stays: with its end, the holder would leave.
    let mut client = second.connect();
    assert_eq!(renew(&mut client, "k", &grant), "ok 60");

    // The first one takes its turn again.
    second.kill();
    first.wait_until_active(2);
    assert_eq!(renew(&mut first.connect(), "k", &grant), "ok 60");
}

/// A server that is stopped is as silent as one whose host has vanished.
#[test]
fn a_guard_of_a_silent_server_goes_on_with_the_successor() {
    fair_test(a_guard_of_a_silent_server_goes_on_with_the_successor_once);
}

fn a_guard_of_a_silent_server_goes_on_with_the_successor_once() {
    const LEASE: Duration = Duration::from_secs(30);
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let first = Server::active(&etcd.endpoints(), &[]);
    let second = Server::start(&etcd.endpoints(), &[]);
    second.wait_for("standby active=", 1);
    let cluster = format!("127.0.0.1:{}|127.0.0.1:{}", first.port, second.port);
    let client = ClusterClient::new([cluster.parse().expect("two addresses")]);
    let guard = client.lock("k").lease(LEASE).acquire().expect("granted");
    first.daemon.signal(Signal::STOP);
    assert!(guard.renew(), "{:?}", guard.loss());
    let found = second.connect().request("stats", "holders", "k");
    assert!(found.contains(&format!("\"fence\":\"{}\"", guard.token().fence())));
    first.daemon.signal(Signal::CONT);
    first.wait_for("deposed", 1);
    assert!(guard.renew() && guard.loss().is_none());
    guard.release().expect("held");
    second.connect().acquire("k", 10);
}

#[test]
fn a_server_that_resigns_is_succeeded_at_once() {
    fair_test(a_server_that_resigns_is_succeeded_at_once_once);
}

fn a_server_that_resigns_is_succeeded_at_once_once() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let first = Server::active(&etcd.endpoints(), &["--shutdown-timeout", "1"]);
    let second = Server::start(&etcd.endpoints(), &[]);
    second.wait_for("standby active=", 1);
    let mut holder = first.connect();
    let grant = holder.acquire_for("k", 0, 60);
    first.daemon.signal(Signal::TERM);
    first.wait_for("resigned", 1);
    let resigned = Instant::now();
    second.wait_until_active(1);
    in_time!(resigned.elapsed() < TTL, "{:?}", resigned.elapsed());
    let status = first.daemon.wait_exit(TAKE_OVER).expect("it has ended");
    assert_eq!(status.code(), Some(0));
    // The drain timed out: what the client still held is as if the server had been killed.
    let mut client = second.connect();
    assert_eq!(client.request("l", "k", "0"), "timeout");
    assert_eq!(renew(&mut client, "k", &grant), "ok 60");
}

#[test]
fn a_server_resigns_though_the_first_member_is_dead() {
    fair_test(a_server_resigns_though_the_first_member_is_dead_once);
}

fn a_server_resigns_though_the_first_member_is_dead_once() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let endpoints = format!("127.0.0.1:{},{}", free_port(), etcd.endpoints());
    let server = Server::active(&endpoints, &[]);
    server.daemon.signal(Signal::TERM);
    server.daemon.wait_exit(TAKE_OVER).expect("it has ended");
    assert_eq!(etcd.ctl(&["get", "latchd/leader"]).as_deref(), Some(""));
    server.wait_for("resigned", 1);
}

/// Its threads learn that there is no leader while it still waits for the answer.
#[test]
fn a_server_that_has_resigned_is_not_deposed() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let ways = [(); 3].map(|()| Proxy::start(etcd.members[0].client_port));
    let is_revoke = |request: &str| request.starts_with("POST /v3/lease/revoke");
    ways[0].decide(move |request| {
        if is_revoke(request) {
            Fate::LoseAnswer
        } else {
            Fate::Pass
        }
    });
    for silent in &ways[1..] {
        silent.decide(move |request| {
            if is_revoke(request) {
                thread::sleep(TTL);
            }
            Fate::Pass
        });
    }
    let endpoints = ways.each_ref().map(Proxy::endpoint).join(",");
    let server = Server::active(&endpoints, &[]);
    server.daemon.signal(Signal::TERM);
    let status = server.daemon.wait_exit(TAKE_OVER).expect("it has ended");
    let log = server.daemon.log();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(!log.contains("deposed"), "{log}");
}

/// A server that lets no client in would stay the leader for as long as its clients stay.
#[test]
fn a_server_told_to_stop_while_it_takes_over_resigns() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let proxy = Proxy::start(etcd.members[0].client_port);
    proxy.decide(|request| {
        if request.starts_with("POST /v3/kv/range") {
            Fate::Drop
        } else {
            Fate::Pass
        }
    });
    let first = Server::start(&proxy.endpoint(), &[]);
    eventually(TAKE_OVER, "it is elected", || {
        etcd.ctl(&["get", "latchd/leader"])
            .is_some_and(|found| !found.is_empty())
    });
    let mut client = first.connect();
    client.send("l\nk\n10\n");
    first.daemon.signal(Signal::TERM);
    first.wait_for("draining", 1);
    proxy.decide(|_| Fate::Pass);
    let told = Instant::now();
    let second = Server::active(&etcd.endpoints(), &[]);
    in_time!(told.elapsed() < 3 * TTL, "{:?}", told.elapsed());
    drop(client);
    let status = first.daemon.wait_exit(TAKE_OVER).expect("it has ended");
    assert_eq!(status.code(), Some(0), "{}", first.daemon.log());
    second.connect().acquire("k", 10);
}

/// The thread that starts over waits for the log, and that takes its time.
#[test]
fn a_server_told_to_stop_while_it_starts_over_ends() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let mut reader = Command::new("sleep");
    let mut reader = reader.arg("600").stdin(Stdio::piped()).spawn();
    let reader = reader.as_mut().expect("it is installed");
    let port = free_port();
    let mut command = Daemon::command();
    command
        .args(["--port", &port.to_string(), "--etcd", &etcd.endpoints()])
        .args(["--advertise", &format!("127.0.0.1:{port}")])
        .args(["--etcd-ttl", &TTL.as_secs().to_string()])
        .stderr(full(reader.stdin.take().expect("it is piped")));
    let daemon = Daemon::from_command(command);
    let server = Server { daemon, port };
    eventually(TAKE_OVER, "it is active", || {
        let client = Client::try_tcp(([127, 0, 0, 1], port).into());
        client.is_some_and(|mut client| {
            let role = client.request("cluster", "_", "_");
            role.starts_with("ok active ")
        })
    });
    let mut client = server.connect();
    etcd.ctl(&["del", "latchd/leader"]);
    client.send("l\nk\n0\n");
    // It starts over with its role locked.
    eventually(TAKE_OVER, "it says its role no longer", || {
        let mut asking = server.connect();
        asking.send("cluster\n_\n_\n");
        asking.next_event(Duration::from_millis(500)) == Event::Nothing
    });
    server.daemon.signal(Signal::TERM);
    let ended = server.daemon.wait_exit(TAKE_OVER);
    let _ = reader.kill();
    let _ = reader.wait();
    ended.expect("it has ended");
}

/// A pipe with no room left.
fn full(mut pipe: ChildStdin) -> Stdio {
    let flags = fcntl_getfl(&pipe).expect("it is open");
    fcntl_setfl(&pipe, flags | OFlags::NONBLOCK).expect("it is open");
    for size in [4096, 1] {
        while pipe.write(&b"#".repeat(size)).is_ok() {}
    }
    fcntl_setfl(&pipe, flags).expect("it is open");
    pipe.into()
}

#[test]
fn a_standby_leaves_without_disturbing_the_active_server() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let first = Server::active(&etcd.endpoints(), &[]);
    let second = Server::start(&etcd.endpoints(), &[]);
    second.wait_for("standby active=", 1);
    let mut holder = first.connect();
    let grant = holder.acquire_for("k", 0, 60);
    second.daemon.signal(Signal::TERM);
    let status = second.daemon.wait_exit(TAKE_OVER).expect("it has ended");
    assert_eq!(status.code(), Some(0));
    assert_eq!(renew(&mut holder, "k", &grant), "ok 60");
}

#[test]
fn a_standby_that_leaves_refuses_new_connections() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let _first = Server::active(&etcd.endpoints(), &[]);
    let second = Server::start(&etcd.endpoints(), &[]);
    second.wait_for("standby active=", 1);
    let mut holder = second.connect();
    holder.acquire_for("k", 0, 60);
    second.daemon.signal(Signal::TERM);
    // It stays for its holder.
    eventually(PATIENCE, "it refuses connections", || {
        TcpStream::connect(("127.0.0.1", second.port)).is_err()
    });
    assert_eq!(holder.request("ping", "_", "_"), "ok");
}

#[test]
fn a_server_that_restarts_need_not_wait_for_itself() {
    fair_test(a_server_that_restarts_need_not_wait_for_itself_once);
}

fn a_server_that_restarts_need_not_wait_for_itself_once() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let first = Server::active(&etcd.endpoints(), &[]);
    let mut holder = first.connect();
    let grant = holder.acquire_for("k", 0, 60);
    first.kill();
    let began = Instant::now();
    let again = Server::start_at(first.port, &etcd.endpoints(), &[], None);
    again.wait_until_active(1);
    // It would take the whole TTL otherwise.
    in_time!(began.elapsed() < TTL, "{:?}", began.elapsed());
    assert_eq!(renew(&mut again.connect(), "k", &grant), "ok 60");
}

#[test]
fn a_standby_warns_that_it_cannot_reach_the_active_server() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let elsewhere = format!("127.0.0.1:{}", free_port());
    etcd.ctl(&["put", "latchd/leader", &elsewhere])
        .expect("etcd answers");
    let standby = Server::start(&etcd.endpoints(), &[]);
    standby.wait_for("INFO standby active=", 1);
    standby.connect().send("l\nk\n0\n");
    let said = format!("WARN cannot-relay active={elsewhere} error=\"connection refused\"");
    standby.wait_for(&said, 1);
}

#[test]
fn two_servers_with_one_address_take_no_turns() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let first = Server::active(&etcd.endpoints(), &[]);
    let mut command = Daemon::command();
    command
        .args(["--port", &free_port().to_string()])
        .args(["--etcd", &etcd.endpoints(), "--etcd-ttl", "5"])
        .args(["--advertise", &format!("127.0.0.1:{}", first.port)]);
    // The second one takes the first for what it was before it was started again.
    let second = Daemon::from_command(command);
    second.wait_for_log("INFO active epoch=", TAKE_OVER);
    // It asks etcd with the next claim.
    first.connect().send("l\nk\n0\n");
    first.wait_for("deposed", 1);
    let said = format!("ERROR same-advertise address=127.0.0.1:{} ", first.port);
    first.wait_for(&said, 1);
    // By the wall's clock: the leases of etcd, which decide whose turn it is, run on that.
    thread::sleep(Duration::from_secs(3));
    assert!(!second.log().contains("deposed"), "{}", second.log());
}

#[test]
fn a_takeover_skips_other_names_and_contradictions() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    for (name, value) in [
        ("latchd/fence", "1900000000000000000"),
        ("latchd/h/0000000000000001", "l 1 60 00000000000000ff good"),
        ("latchd/h/0000000000000002", "l 1 60 00000000000000ff good"),
        (
            "latchd/h/0000000000000003",
            "n kind=s limit=2 lease=60 salt=00000000000000ff kept=yes tag=a%20b key=kept",
        ),
        ("latchd/h/4", "l 1 60 00000000000000ff k"),
    ] {
        etcd.ctl(&["put", name, value]).expect("etcd answers");
    }
    let server = Server::active(&etcd.endpoints(), &[]);
    server.wait_for("bad-record key=latchd/h/0000000000000002", 1);
    assert_eq!(server.daemon.log().matches("bad-record").count(), 1);
    let mut client = server.connect();
    let holders = client.request("stats", "holders", "kept");
    assert!(holders.contains("\"tag\":\"a b\""), "{holders}");
    let token = "000000000000000100000000000000ff";
    assert_eq!(client.request("n", "good", &format!("{token} 60")), "ok 60");
    // Fences begin above those that have been used, even if those were ahead of the clock.
    assert!(fence(&client.acquire("k", 0).token) > 1_900_000_000_000_000_000);
}

#[test]
fn holders_with_long_keys_are_restored() {
    const COUNT: usize = 45;
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let long = "x".repeat(100_000);
    for at in 0..=COUNT {
        let key = if at == COUNT { "good" } else { &long };
        let record = format!("s 99 60 00000000000000ff {key}");
        let name = format!("latchd/h/{at:016x}");
        etcd.ctl(&["put", &name, &record]).expect("etcd answers");
    }
    // All of it together is a longer answer than the server takes.
    let server = Server::active(&etcd.endpoints(), &[]);
    server.wait_for(&format!("holders={}", COUNT + 1), 1);
}

#[test]
fn many_holders_are_restored() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    restores_locks(&etcd, 2500);
}

#[test]
#[ignore = "long: cargo test --features cluster --test cluster hundred -- --ignored --nocapture"]
fn a_hundred_thousand_holders_are_restored() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let server = restores_locks(&etcd, 100_000);
    let log = server.daemon.log();
    let active = log.lines().find(|line| line.contains("INFO active epoch="));
    println!("{}", active.expect("it is active"));
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.daemon.pid()));
    let status = status.expect("it runs");
    let size = |name| {
        status
            .lines()
            .find(|line| line.starts_with(name))
            .expect("a size")
    };
    println!("{} {}", size("VmHWM"), size("VmRSS"));
}

/// Takes so many locks, kills their server, and checks that another one has them; returns that.
fn restores_locks(etcd: &Etcd, count: usize) -> Server {
    // As long as a key may be: the pages of the journal are as long as they can get.
    let key = |at: usize| format!("{at:0256}");
    let cap = (2 * count).to_string();
    let caps = ["--max-locks", "--max-slots", "--max-per-connection"];
    let caps = caps.map(|option| [option, &cap]).concat();
    let first = Server::active(&etcd.endpoints(), &caps);
    let mut holder = first.connect();
    let mut tokens = Vec::new();
    for some in 0..count / 500 {
        let ask = |at: usize| format!("l\n{}\n0 3600\n", key(some * 500 + at));
        let asks: String = (0..500).map(ask).collect();
        holder.send(&asks);
        for _ in 0..500 {
            let reply = holder.line();
            let token = reply.split(' ').nth(1);
            tokens.push(token.unwrap_or_else(|| panic!("{reply}")).to_owned());
        }
    }
    assert_eq!(etcd.holder_count("latchd"), count);
    first.kill();
    let second = Server::start(&etcd.endpoints(), &caps);
    second
        .daemon
        .wait_for_log("INFO active epoch=", 10 * TAKE_OVER);
    let mut client = second.connect();
    for at in [0, 999, 1000, 1001, count - 1] {
        assert_eq!(client.request("l", &key(at), "0"), "timeout");
        assert_eq!(client.request("r", &key(at), &tokens[at]), "ok");
    }
    second
}
