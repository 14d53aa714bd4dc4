//! Single faults, at the worst moment. Each is also played to a server with a planted fault, to see
//! that the test would find it.

use std::time::{Duration, Instant};

use crate::house::{renew, Etcd, Server, TAKE_OVER, TTL};
use crate::proxy::{Fate, Proxy};
use crate::support::needs::{needs, Program};
use crate::support::silent::free_port;
use crate::support::stalls::fair_test;
use crate::support::{eventually, Client, Event, Signal};

/// Longer than an answer takes, and shorter than the TTL.
const A_WHILE: Duration = Duration::from_millis(1500);

/// Faults are planted only in builds for tests.
fn can_plant() -> bool {
    cfg!(debug_assertions)
}

fn is_batch(request: &str) -> bool {
    request.starts_with("POST /v3/kv/txn") && request.contains("request_put")
}

/// Has a batch arrive after its second copy, and returns what is left in the journal.
fn ghosts(programs: &[Program; 2], fault: Option<&str>) -> Vec<String> {
    let etcd = Etcd::start(programs, 1);
    let proxy = Proxy::start(etcd.members[0].client_port);
    let endpoints = format!("{},{}", proxy.endpoint(), etcd.endpoints());
    let server = Server::start_at(free_port(), &endpoints, &[], fault);
    server.wait_until_active(1);
    let mut client = server.connect();
    proxy.decide(|request| {
        if is_batch(request) {
            Fate::Hold
        } else {
            Fate::Pass
        }
    });
    let grant = client.acquire_for("late", 0, 60);
    assert_eq!(client.request("r", "late", &grant.token), "ok");
    assert_eq!(proxy.held_count(), 1);
    proxy.deliver();
    etcd.holders("latchd")
}

#[test]
fn a_batch_that_arrives_late_leaves_no_ghost() {
    let programs = needs!("etcd", "etcdctl");
    assert_eq!(ghosts(&programs, None), Vec::<String>::new());
}

#[test]
fn the_missing_check_of_the_batch_number_is_found() {
    let programs = needs!("etcd", "etcdctl");
    if can_plant() {
        assert_eq!(ghosts(&programs, Some("no-batch-number")).len(), 1);
    }
}

/// Kills a server whose batches do not arrive. Returns whether it has answered a claim, and whether
/// the successor grants the same key.
fn answered_and_granted_again(programs: &[Program; 2], fault: Option<&str>) -> (bool, bool) {
    let etcd = Etcd::start(programs, 1);
    let proxy = Proxy::start(etcd.members[0].client_port);
    let server = Server::start_at(free_port(), &proxy.endpoint(), &[], fault);
    server.wait_until_active(1);
    proxy.decide(|request| {
        if is_batch(request) {
            Fate::Drop
        } else {
            Fate::Pass
        }
    });
    let mut client = server.connect();
    client.send("l\nk\n0 60\n");
    let answer = client.try_line(A_WHILE);
    assert_eq!(server.connect().request("ping", "_", "_"), "ok");
    server.kill();
    let successor = Server::active(&etcd.endpoints(), &[]);
    let again = successor.connect().request("l", "k", "0");
    (answer.is_some(), again.starts_with("ok "))
}

#[test]
fn a_claim_is_not_answered_before_it_is_in_the_journal() {
    let programs = needs!("etcd", "etcdctl");
    assert_eq!(answered_and_granted_again(&programs, None), (false, true));
}

#[test]
fn a_reply_before_the_journal_has_it_is_found() {
    fair_test(a_reply_before_the_journal_has_it_is_found_once);
}

fn a_reply_before_the_journal_has_it_is_found_once() {
    let programs = needs!("etcd", "etcdctl");
    if can_plant() {
        let fault = Some("reply-before-journal");
        assert_eq!(answered_and_granted_again(&programs, fault), (true, true));
    }
}

/// Stops an active server until another one is, and has as many batches written by that. Returns
/// what the first one says to a holder afterwards.
fn word_of_the_deposed(programs: &[Program; 2], fault: Option<&str>) -> Event {
    let etcd = Etcd::start(programs, 1);
    let first = Server::start_at(free_port(), &etcd.endpoints(), &[], fault);
    first.wait_until_active(1);
    let mut holder = first.connect();
    let grant = holder.acquire_for("k", 0, 120);
    first.daemon.signal(Signal::STOP);
    let second = Server::active(&etcd.endpoints(), &[]);
    let mut client = second.connect();
    assert_eq!(client.request("r", "k", &grant.token), "ok");
    holder.send(&format!("n\nk\n{} 120\n", grant.token));
    first.daemon.signal(Signal::CONT);
    holder.next_event(TAKE_OVER)
}

#[test]
fn a_deposed_server_confirms_no_lock() {
    let programs = needs!("etcd", "etcdctl");
    let word = word_of_the_deposed(&programs, None);
    assert!(matches!(word, Event::Eof | Event::Reset), "{word:?}");
}

#[test]
fn the_missing_check_of_the_epoch_is_found() {
    let programs = needs!("etcd", "etcdctl");
    if can_plant() {
        let word = word_of_the_deposed(&programs, Some("no-epoch"));
        assert_eq!(word, Event::Line(b"ok 120".to_vec()));
    }
}

/// Kills a server, and returns what its successor answers to a claim of a key that is held.
fn answer_to_a_claim_after_a_takeover(programs: &[Program; 2], fault: Option<&str>) -> String {
    let etcd = Etcd::start(programs, 1);
    let first = Server::active(&etcd.endpoints(), &[]);
    let mut holder = first.connect();
    holder.acquire_for("k", 0, 120);
    first.kill();
    let second = Server::start_at(free_port(), &etcd.endpoints(), &[], fault);
    second.wait_until_active(1);
    second.connect().request("l", "k", "0")
}

#[test]
fn an_orphan_keeps_its_lock() {
    let programs = needs!("etcd", "etcdctl");
    assert_eq!(
        answer_to_a_claim_after_a_takeover(&programs, None),
        "timeout"
    );
}

#[test]
fn orphans_that_are_dropped_are_found() {
    let programs = needs!("etcd", "etcdctl");
    if can_plant() {
        let answer = answer_to_a_claim_after_a_takeover(&programs, Some("orphans-dropped"));
        assert!(answer.starts_with("ok "), "{answer}");
    }
}

#[test]
fn lost_and_doubled_answers_cost_no_leadership() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let proxy = Proxy::start(etcd.members[0].client_port);
    // From the first request on: leases and the election, too.
    let mut count = 0;
    proxy.decide(move |request| {
        count += 1;
        match count % 3 {
            _ if request.starts_with("POST /v3/watch") => Fate::Pass,
            0 => Fate::LoseAnswer,
            1 => Fate::Pass,
            _ => Fate::Double,
        }
    });
    let server = Server::active(&proxy.endpoint(), &[]);
    let mut client = server.connect();
    for round in 0..30 {
        let grant = client.acquire_for("k", 0, 60);
        assert_eq!(renew(&mut client, "k", &grant), "ok 60");
        let held = client.acquire_for(&format!("k{round}"), 0, 60);
        assert_eq!(client.request("r", "k", &grant.token), "ok");
        if round % 2 == 0 {
            let key = format!("k{round}");
            assert_eq!(client.request("r", &key, &held.token), "ok");
        }
    }
    assert_eq!(etcd.holders("latchd").len(), 15);
    assert!(
        !server.daemon.log().contains("deposed"),
        "{}",
        server.daemon.log()
    );
}

#[test]
fn a_cut_longer_than_the_ttl_ends_the_connections() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let proxy = Proxy::start(etcd.members[0].client_port);
    let first = Server::active(&proxy.endpoint(), &[]);
    let mut holder = first.connect();
    let grant = holder.acquire_for("k", 0, 120);
    proxy.decide(|_| Fate::Drop);
    holder.send(&format!("n\nk\n{} 120\n", grant.token));
    assert_eq!(first.connect().request("ping", "_", "_"), "ok");
    let end = holder.next_event(TAKE_OVER);
    assert!(matches!(end, Event::Eof | Event::Reset), "{end:?}");
    first.wait_for("deposed", 1);
    proxy.decide(|_| Fate::Pass);
    first.wait_until_active(2);
    assert_eq!(renew(&mut first.connect(), "k", &grant), "ok 120");
}

#[test]
fn a_cut_shorter_than_the_ttl_only_delays() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let proxy = Proxy::start(etcd.members[0].client_port);
    let server = Server::active(&proxy.endpoint(), &["--etcd-ttl", "60"]);
    let mut client = server.connect();
    let held = client.acquire_for("held", 0, 60);
    proxy.decide(|_| Fate::Drop);
    client.send("l\nk\n0 1\n");
    client.nothing_within(A_WHILE);
    server.wait_for("etcd-unavailable member=127.0.0.1:", 1);
    proxy.decide(|_| Fate::Pass);
    let reply = client.line();
    assert!(reply.starts_with("ok "), "{reply}");
    assert_eq!(renew(&mut client, "held", &held), "ok 60");
    assert!(!server.daemon.log().contains("deposed"));
}

#[test]
fn the_loss_of_members_is_survived() {
    let programs = needs!("etcd", "etcdctl");
    let mut etcd = Etcd::start(&programs, 3);
    let server = Server::active(&etcd.endpoints(), &["--etcd-ttl", "60"]);
    let mut client = server.connect();
    let held = client.acquire_for("held", 0, 120);
    // Each in turn: one of them leads.
    for at in 0..3 {
        etcd.members[at].kill();
        client.acquire_for(&format!("k{at}"), 0, 120);
        etcd.members[at].restart();
        etcd.wait_until_healthy();
    }
    for at in 0..3 {
        etcd.members[at].signal(Signal::STOP);
        client.acquire_for(&format!("l{at}"), 0, 120);
        etcd.members[at].signal(Signal::CONT);
    }
    // Without a majority, nothing is granted.
    etcd.members[0].kill();
    etcd.members[1].kill();
    client.send("l\nlast\n0 120\n");
    client.nothing_within(A_WHILE);
    etcd.members[0].restart();
    let granted = client.next_event(TAKE_OVER);
    assert!(
        matches!(&granted, Event::Line(line) if line.starts_with(b"ok ")),
        "{granted:?}"
    );
    assert_eq!(renew(&mut client, "held", &held), "ok 120");
    assert!(!server.daemon.log().contains("deposed"));
    let is_complete = || etcd.holders("latchd").len() == 8;
    eventually(TAKE_OVER, "the journal has all holders", is_complete);
}

#[test]
fn a_user_who_may_write_the_prefix_is_enough() {
    fair_test(a_user_who_may_write_the_prefix_is_enough_once);
}

fn a_user_who_may_write_the_prefix_is_enough_once() {
    let programs = needs!("etcd", "etcdctl");
    try_users(&Etcd::start(&programs, 1), &[]);
}

/// Tries a wrong and a right password, and a user who may write the prefix alone.
pub fn try_users(etcd: &Etcd, further: &[&str]) {
    add_user(etcd);
    assert!(etcd.ctl(&["auth", "enable"]).is_some());
    let directory = tempfile::tempdir().expect("there is room");
    let wrong = password_file(&directory, "wrong");
    let refused = Server::start(&etcd.endpoints(), &with_user(&wrong, further));
    refused.wait_for("etcd-auth-refused", 1);
    std::fs::write(&wrong, "password").expect("there is room");
    refused.wait_until_active(1);
    drop(refused);
    let right = password_file(&directory, "password");
    // A prefix that is not the user's.
    let elsewhere = with_user(&right, &[further, &["--etcd-prefix", "other"]].concat());
    let elsewhere = Server::start(&etcd.endpoints(), &elsewhere);
    elsewhere.wait_for("etcd-auth-refused", 1);
    drop(elsewhere);
    let server = Server::active(&etcd.endpoints(), &with_user(&right, further));
    let mut client = server.connect();
    let grant = client.acquire_for("k", 0, 60);
    server.kill();
    let again = Server::start_at(
        server.port,
        &etcd.endpoints(),
        &with_user(&right, further),
        None,
    );
    again.wait_until_active(1);
    let mut client = again.connect();
    assert_eq!(renew(&mut client, "k", &grant), "ok 60");
    assert_eq!(client.request("r", "k", &grant.token), "ok");
    again.daemon.signal(Signal::TERM);
    again.wait_for("resigned", 1);
}

/// A file with this password, which is also its name.
fn password_file(directory: &tempfile::TempDir, password: &str) -> String {
    let path = directory.path().join(password);
    std::fs::write(&path, password).expect("there is room");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&path, mode).expect("it is ours");
    path.to_string_lossy().into_owned()
}

/// The options for the user of [`add_user`], and further ones.
fn with_user<'a>(password_file: &'a str, further: &[&'a str]) -> Vec<&'a str> {
    let user = ["--etcd-user", "latchd", "--etcd-password-file"];
    [&user[..], &[password_file], further].concat()
}

/// A user `latchd` in etcd who may write the prefix, with the authentication still off.
fn add_user(etcd: &Etcd) {
    for command in [
        "user add root:secret",
        "user grant-role root root",
        "role add locks",
        "role grant-permission locks readwrite latchd/ latchd0",
        "user add latchd:password",
        "user grant-role latchd locks",
    ] {
        let words: Vec<&str> = command.split(' ').collect();
        assert!(etcd.ctl(&words).is_some(), "{command}");
    }
}

#[test]
fn authentication_can_be_turned_on_and_off_under_load() {
    let programs = needs!("etcd", "etcdctl");
    turn_authentication_on_and_off(&Etcd::start(&programs, 1), &[]);
}

/// Turns the authentication of etcd on and off while a server is active and another one is a
/// standby. The active one goes on, and the standby can take over.
pub fn turn_authentication_on_and_off(etcd: &Etcd, further: &[&str]) {
    add_user(etcd);
    let directory = tempfile::tempdir().expect("there is room");
    let password = password_file(&directory, "password");
    let options = with_user(&password, further);
    let server = Server::active(&etcd.endpoints(), &options);
    let standby = Server::start(&etcd.endpoints(), &options);
    standby.wait_for("standby active=", 1);
    let mut client = server.connect();
    let held = client.acquire_for("held", 0, 60);
    let work = |client: &mut Client| {
        let grant = client.acquire_for("k", 0, 60);
        assert_eq!(client.request("r", "k", &grant.token), "ok");
        assert_eq!(renew(client, "held", &held), "ok 60");
    };
    let (on, off) = (["auth", "enable"], ["auth", "disable"]);
    let root = ["--user", "root:secret"];
    let off = [root, off].concat();
    for command in [&on[..], &off, &on, &off, &on] {
        work(&mut client);
        assert!(etcd.ctl(command).is_some(), "{command:?}");
        work(&mut client);
    }
    // Longer than the TTL: the lease of the leader key goes on, too.
    let began = Instant::now();
    while began.elapsed() < TTL + Duration::from_secs(1) {
        work(&mut client);
        std::thread::sleep(Duration::from_millis(50));
    }
    let log = server.daemon.log();
    assert!(!log.contains("deposed"), "{log}");
    server.kill();
    standby.wait_until_active(1);
    assert_eq!(renew(&mut standby.connect(), "held", &held), "ok 60");
}

#[test]
fn a_leader_without_an_address_is_not_shown_to_clients() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    assert!(etcd
        .ctl(&["put", "latchd/leader", "evil\nok forged"])
        .is_some());
    let server = Server::start(&etcd.endpoints(), &[]);
    server.wait_for("bad-address active=", 1);
    let role = server.connect().request("cluster", "_", "_");
    assert!(
        role.starts_with("ok standby ") && role.ends_with(" -"),
        "{role}"
    );
    assert!(etcd.ctl(&["del", "latchd/leader"]).is_some());
    server.wait_until_active(1);
}

#[test]
fn a_server_steps_down_before_a_record_it_cannot_read() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let name = "latchd/h/0000000000000001";
    assert!(etcd.ctl(&["put", name, "x weight=2 key=k"]).is_some());
    // The keys of a service whose prefix begins with ours.
    assert!(etcd
        .ctl(&["put", "latchd/h/leader", "127.0.0.1:1"])
        .is_some());
    let server = Server::start(&etcd.endpoints(), &[]);
    server.wait_for(&format!("bad-record key={name}"), 1);
    server.wait_for("resigned", 1);
    assert_eq!(etcd.ctl(&["get", "latchd/leader"]).as_deref(), Some(""));
    assert!(!server
        .daemon
        .log()
        .contains("bad-record key=latchd/h/leader"));
    let role = server.connect().request("cluster", "_", "_");
    assert_eq!(role, "ok standby 0 -");
    // It runs again later, in case that the record is gone.
    assert!(etcd.ctl(&["del", name]).is_some());
    server.wait_until_active(1);
}

#[test]
fn a_full_etcd_is_named_and_recovers() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start_with(&programs, 1, &["--quota-backend-bytes", "1000000"]);
    let server = Server::active(&etcd.endpoints(), &["--etcd-ttl", "60"]);
    let mut client = server.connect();
    let grant = client.acquire_for("k", 0, 300);
    fill(&etcd);
    client.send("l\nother\n0 300\n");
    server.wait_for("etcd-refuses code=8", 1);
    client.nothing_within(Duration::from_millis(200));
    make_room(&etcd);
    let reply = client.next_event(TAKE_OVER);
    assert!(
        matches!(&reply, Event::Line(line) if line.starts_with(b"ok ")),
        "{reply:?}"
    );
    assert_eq!(renew(&mut client, "k", &grant), "ok 300");
    server.wait_for("etcd-takes-writes", 1);
}

/// Fills etcd until it refuses to write.
fn fill(etcd: &Etcd) {
    let filler = "x".repeat(100_000);
    let is_full = || etcd.ctl(&["put", "filler", &filler]).is_none();
    eventually(TAKE_OVER, "etcd is full", is_full);
}

#[test]
fn a_full_etcd_costs_nobody_a_held_lock() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start_with(&programs, 1, &["--quota-backend-bytes", "1000000"]);
    let server = Server::active(&etcd.endpoints(), &[]);
    let mut holder = server.connect();
    let held = holder.acquire_for("held", 0, 10);
    let mut releasing = server.connect();
    let released = releasing.acquire_for("released", 0, 300);
    fill(&etcd);
    releasing.send(&format!("r\nreleased\n{}\n", released.token));
    server.wait_for("etcd-refuses code=8", 1);
    let mut claiming = server.connect();
    claiming.send("l\nfree\n0 300\n");
    // For longer than the TTL, and than the lease.
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(12) {
        assert_eq!(renew(&mut holder, "held", &held), "ok 10");
        std::thread::sleep(Duration::from_millis(100));
    }
    claiming.nothing_within(Duration::from_millis(1));
    releasing.nothing_within(Duration::from_millis(1));
    let log = server.daemon.log();
    assert!(!log.contains("deposed"), "{log}");
    // A server that starts now finds the active one, and passes clients on.
    let standby = Server::start(&etcd.endpoints(), &[]);
    standby.wait_for("INFO standby active=", 1);
    assert_eq!(renew(&mut standby.connect(), "held", &held), "ok 10");
    drop(claiming);
    make_room(&etcd);
    assert_eq!(releasing.line(), "ok");
    server.wait_for("etcd-takes-writes", 1);
    // The claim is granted first, and ends because its client has closed its connection.
    eventually(TAKE_OVER, "one holder is left", || {
        etcd.holders("latchd").len() == 1
    });
}

/// No other server could take over.
#[test]
fn a_full_etcd_delays_a_hand_over() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start_with(&programs, 1, &["--quota-backend-bytes", "1000000"]);
    let server = Server::active(&etcd.endpoints(), &[]);
    let mut holder = server.connect();
    assert!(holder.request("hello", "_", "adopt").starts_with("ok "));
    let held = holder.acquire_for("held", 0, 60);
    fill(&etcd);
    server.daemon.signal(Signal::TERM);
    server.wait_for("etcd-refuses code=8", 1);
    for _ in 0..5 {
        assert_eq!(renew(&mut holder, "held", &held), "ok 60");
        std::thread::sleep(Duration::from_millis(100));
    }
    make_room(&etcd);
    let status = server.daemon.wait_exit(TAKE_OVER).expect("it ends");
    let log = server.daemon.log();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(log.contains("stopping reason=handed-over"), "{log}");
    let next = Server::active(&etcd.endpoints(), &[]);
    assert_eq!(renew(&mut next.connect(), "held", &held), "ok 60");
}

/// Compacts, defragments and disarms the alarm.
fn make_room(etcd: &Etcd) {
    let listed = etcd.ctl(&["get", "filler", "-w", "fields"]);
    let listed = listed.expect("etcd answers");
    let mut lines = listed.lines();
    let revision = lines.find_map(|line| line.strip_prefix("\"Revision\" : "));
    for command in [
        &["compact", revision.expect("it has one")][..],
        &["defrag"],
        &["alarm", "disarm"],
    ] {
        assert!(etcd.ctl(command).is_some(), "{command:?}");
    }
}

#[test]
fn long_replies_take_no_uncertain_grant_along() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let proxy = Proxy::start(etcd.members[0].client_port);
    let server = Server::active(&proxy.endpoint(), &["--etcd-ttl", "60"]);
    for long in [
        "stats\n_\n_\n",
        "stats\nqueues\n_\n",
        "stats\ncounters\n_\n",
    ] {
        let mut client = server.connect();
        assert_eq!(client.request("ping", "_", "_"), "ok");
        proxy.decide(|_| Fate::Drop);
        // More than the server collects before it writes.
        client.send(&format!("l\nk\n0 60\n{}", long.repeat(100)));
        client.nothing_within(Duration::from_millis(500));
        proxy.decide(|_| Fate::Pass);
        let reply = client.line();
        assert!(reply.starts_with("ok "), "{reply}");
        let token = reply.split(' ').nth(1).expect("a token").to_owned();
        assert_eq!(server.connect().request("r", "k", &token), "ok");
    }
}

#[test]
fn a_grant_that_is_told_late_has_its_whole_lease() {
    fair_test(a_grant_that_is_told_late_has_its_whole_lease_once);
}

fn a_grant_that_is_told_late_has_its_whole_lease_once() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let proxy = Proxy::start(etcd.members[0].client_port);
    let server = Server::active(&proxy.endpoint(), &["--etcd-ttl", "60"]);
    let mut client = server.connect();
    let mut other = server.connect();
    assert_eq!(other.request("ping", "_", "_"), "ok");
    proxy.decide(|_| Fate::Drop);
    client.send("l\nk\n0 4\n");
    client.nothing_within(Duration::from_secs(2));
    proxy.decide(|_| Fate::Pass);
    let reply = client.line();
    let told = Instant::now();
    assert!(reply.ends_with(" 4"), "{reply}");
    other.acquire("k", 60);
    // Without this, two seconds would be left.
    let lasted = told.elapsed();
    assert!(lasted > Duration::from_secs(3), "{lasted:?}");
}

#[test]
fn no_lease_ends_before_its_holder_is_told() {
    fair_test(no_lease_ends_before_its_holder_is_told_once);
}

fn no_lease_ends_before_its_holder_is_told_once() {
    let programs = needs!("etcd", "etcdctl");
    let etcd = Etcd::start(&programs, 1);
    let proxy = Proxy::start(etcd.members[0].client_port);
    let server = Server::active(&proxy.endpoint(), &["--etcd-ttl", "60"]);
    let mut client = server.connect();
    let mut other = server.connect();
    proxy.decide(|_| Fate::Drop);
    client.send("l\nk\n0 3\n");
    client.nothing_within(Duration::from_millis(100));
    other.send("l\nk\n60 60\n");
    other.nothing_within(Duration::from_secs(5));
    proxy.decide(|_| Fate::Pass);
    assert!(client.line().starts_with("ok "));
    other.nothing_within(Duration::from_millis(1500));
    assert!(other.line().starts_with("ok "));
}

#[test]
fn a_server_waits_for_etcd_and_passes_over_the_dead() {
    let programs = needs!("etcd", "etcdctl");
    let mut etcd = Etcd::start(&programs, 1);
    etcd.members[0].kill();
    let endpoints = format!("127.0.0.1:{},{}", free_port(), etcd.endpoints());
    let server = Server::start(&endpoints, &[]);
    server.wait_for("etcd-unavailable", 1);
    server.wait_for(" error=\"connection refused\" held_back=0", 1);
    let mut client = server.connect();
    client.send("l\nk\n0\n");
    client.nothing_within(Duration::from_millis(200));
    etcd.members[0].restart();
    let reply = client.next_event(TAKE_OVER);
    assert!(
        matches!(&reply, Event::Line(line) if line.starts_with(b"ok ")),
        "{reply:?}"
    );
}
