//! Kept grants, and grants with long leases, outlive every end of the server: `--state-file`.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use crate::fences::{inject, may_attach};
use crate::restart::{held, obstruct, stop, unobstruct, Service};
use crate::settling::kill;
use crate::support::at_the_end::AtTheEnd;
use crate::support::needs::needs;
use crate::support::{
    eventually, fence, parse_grant, waiter_count, Client, Event, Grant, PATIENCE,
};

/// Acquires a lock and keeps it for this many seconds.
fn kept(client: &mut Client, key: &str, seconds: u64) -> Grant {
    let grant = client.acquire_for(key, 60, 5);
    let keep = format!("{} {seconds}", grant.token);
    assert_eq!(client.request("keep", key, &keep), format!("ok {seconds}"));
    grant
}

/// What is left of the lease of a lock, in seconds; `None` if it is free.
fn left(service: &Service, key: &str) -> Option<f64> {
    let stats = service.connect().stats();
    let locks = stats["locks"].as_array().expect("a list");
    let lock = locks.iter().find(|lock| lock["key"] == key);
    lock.map(|lock| lock["lease_expires_in_s"].as_f64().expect("a number"))
}

#[test]
fn kept_and_long_grants_survive_a_crash() {
    let service = Service::new(&["--settle", "2"]);
    let first = service.start();
    let mut client = service.connect();
    client.request("tag", "_", "backup");
    let (kept, began) = (kept(&mut client, "kept", 3600), Instant::now());
    let (_holder, long) = held(&service, "long", 600);
    let (_holder, _) = held(&service, "ordinary", 2);
    let (_waiter, late) = {
        let mut waiter = service.connect();
        let before = client.acquire_for("late", 0, 2);
        waiter.send("l\nlate\n60 600\n");
        assert_eq!(client.request("r", "late", &before.token), "ok");
        let reply = waiter.line();
        (waiter, parse_grant(&reply, "ok").expect(&reply))
    };
    kill(&first);

    let second = service.start();
    second.wait_for_log("restored path=", PATIENCE);
    assert!(second.log().contains("kept=1 long=2"), "{}", second.log());
    let passed = began.elapsed().as_secs_f64();
    let is_left = left(&service, "kept").expect("it is there");
    assert!((3599.0 - passed..=3600.0).contains(&is_left), "{is_left}");
    // The client of a long one may have renewed it just before.
    let is_left = left(&service, "long").expect("it is there");
    assert!((590.0..=600.0).contains(&is_left), "{is_left}");
    let mut other = service.connect();
    for (key, grant) in [("kept", &kept), ("long", &long), ("late", &late)] {
        assert_eq!(other.request("adopt", key, &grant.token), "ok 33");
    }
    assert_eq!(left(&service, "ordinary"), None);
    second.wait_for_log("settled", PATIENCE);
    let mut last = service.connect();
    last.acquire("ordinary", 0);
    assert_eq!(last.request("l", "kept", "0"), "timeout");
}

#[test]
fn what_has_ended_before_a_crash_is_not_there_again() {
    let service = Service::new(&["--settle", "1"]);
    let first = service.start();
    let mut client = service.connect();
    let released = kept(&mut client, "released", 3600);
    kept(&mut client, "broken", 3600);
    let (holder, _) = held(&service, "closed", 600);
    let (mut shortened, grant) = held(&service, "shortened", 600);
    let renewal = format!("{} 1", grant.token);
    assert_eq!(shortened.request("n", "shortened", &renewal), "ok 1");
    assert_eq!(client.request("r", "released", &released.token), "ok");
    assert_eq!(client.request("break", "broken", "_"), "ok");
    drop(holder);
    // The next holder is told after the end of the previous one is in the file.
    client.acquire_for("closed", 60, 1);
    kill(&first);
    let second = service.start();
    second.wait_for_log("kept=0 long=0", PATIENCE);
    second.wait_for_log("settled", PATIENCE);
    for key in ["released", "broken", "closed", "shortened"] {
        service.connect().acquire(key, 0);
    }
}

/// A client that keeps keys of its own, each for an hour, and releases some.
fn keep_and_release(client: &mut Client, name: usize, confirmed: &Mutex<Vec<(String, String)>>) {
    let mut ask = |command: &str, key: &str, argument: &str| {
        client
            .try_send(format!("{command}\n{key}\n{argument}\n").as_bytes())
            .ok()?;
        match client.next_event(PATIENCE) {
            Event::Line(line) => Some(String::from_utf8(line).expect("UTF-8")),
            _ => None,
        }
    };
    let mut round = |key: &str| -> Option<()> {
        let grant = parse_grant(&ask("l", key, "60 5")?, "ok")?;
        let kept = ask("keep", key, &format!("{} 3600", grant.token))?;
        if kept != "ok 3600" {
            return Some(());
        }
        let mine = (key.to_owned(), grant.token.clone());
        confirmed.lock().expect("no panic").push(mine.clone());
        if key.ends_with('3') {
            // From here on it may have ended.
            confirmed.lock().expect("no panic").retain(|it| *it != mine);
            assert_eq!(ask("r", key, &grant.token)?, "ok");
            // Nobody else asks for this key.
            let again = parse_grant(&ask("l", key, "0 5")?, "ok");
            assert!(again.is_some(), "it is not free");
        }
        Some(())
    };
    let stamp = Instant::now();
    let mut count = 0;
    while round(&format!("{name}-{stamp:?}-{count}").replace(' ', "")).is_some() && count < 200 {
        count += 1;
    }
}

#[test]
fn every_kept_grant_that_was_confirmed_survives_a_crash() {
    const ROUNDS: u64 = 6;
    let service = Service::new(&["--settle", "1", "--max-locks", "100000"]);
    let mut daemon = service.start();
    let (confirmed, is_over) = (Mutex::new(Vec::new()), AtomicBool::new(false));
    thread::scope(|scope| {
        let _end = AtTheEnd(&is_over);
        for name in 0..3 {
            let (service, confirmed, is_over) = (&service, &confirmed, &is_over);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    match Client::try_unix(&service.socket()) {
                        Some(mut client) => keep_and_release(&mut client, name, confirmed),
                        None => thread::sleep(Duration::from_millis(1)),
                    }
                }
            });
        }
        for round in 0..ROUNDS {
            let before = confirmed.lock().expect("no panic").len();
            eventually(PATIENCE, "grants are kept", || {
                confirmed.lock().expect("no panic").len() > before + 5
            });
            thread::sleep(Duration::from_millis(7 * round));
            kill(&daemon);
            let sure = confirmed.lock().expect("no panic").clone();
            daemon = service.start();
            let mut observer = service.connect();
            for (key, token) in &sure {
                assert_eq!(observer.request("n", key, token), "ok 33", "{key}");
            }
        }
        is_over.store(true, Ordering::Relaxed);
        kill(&daemon);
    });
}

#[test]
fn the_time_of_a_kept_grant_runs_on_without_a_server() {
    let service = Service::new(&["--idle-exit", "1", "--settle", "1"]);
    for has_crashed in [false, true] {
        let first = service.start();
        let grant = kept(&mut service.connect(), "k", 3);
        let kept_at = Instant::now();
        if has_crashed {
            kill(&first);
        } else {
            let status = first.wait_exit(PATIENCE).expect("it is idle");
            assert_eq!(status.code(), Some(0), "{}", first.log());
            assert!(!service.is_open());
        }
        let text = fs::read_to_string(service.file()).expect("it is written");
        assert!(text.contains(&grant.token), "{text}");
        thread::sleep(Duration::from_secs(3).saturating_sub(kept_at.elapsed()));
        let second = service.start();
        if has_crashed {
            second.wait_for_log("settled", PATIENCE);
        }
        let mut next = service.connect();
        let grant = next.acquire("k", 0);
        assert_eq!(next.request("r", "k", &grant.token), "ok");
        stop(&second);
    }
}

/// The client cannot come back, so the lock is held for nobody.
#[test]
fn a_lock_that_no_client_can_adopt_is_kept_for_a_limited_time() {
    let service = Service::new(&[
        "--max-keep-time",
        "1h",
        "--shutdown-timeout",
        "1",
        "--settle",
        "1",
    ]);
    for has_crashed in [true, false] {
        let first = service.start();
        let mut old = service.connect();
        old.request("l", "k", "9 9223372036");
        let (_adopter, grant) = held(&service, "mine", 9_223_372_036);
        if has_crashed {
            kill(&first)
        } else {
            stop(&first)
        }
        let second = service.start();
        let is_left = left(&service, "k").expect("it is there");
        assert!((3590.0..=3600.0).contains(&is_left), "{is_left}");
        let is_left = left(&service, "mine").expect("it is there");
        assert!(is_left > 9e9, "{is_left}");
        assert_eq!(service.connect().request("r", "mine", &grant.token), "ok");
        assert_eq!(service.connect().request("break", "k", "_"), "ok");
        second.wait_exit(Duration::ZERO);
        stop(&second);
    }
}

#[test]
fn while_the_file_cannot_be_written_nothing_new_lasts() {
    let service = Service::new(&["--settle", "2"]);
    let daemon = service.start();
    let mut client = service.connect();
    let first = kept(&mut client, "kept", 600);
    let (mut holder, long) = held(&service, "long", 600);
    let ordinary = client.acquire_for("ordinary", 0, 2);
    obstruct(&service);
    // The first change notices it. Its reply waits no longer than that.
    assert_eq!(client.request("r", "kept", &first.token), "ok");
    daemon.wait_for_log("state-not-written", PATIENCE);
    let refused = |client: &mut Client| client.request("l", "k", "0 600");
    eventually(PATIENCE, "it refuses what would last", || {
        let reply = refused(&mut client);
        if let Some(grant) = parse_grant(&reply, "ok") {
            panic!("it was granted: {grant:?}");
        }
        reply == "error"
    });
    let keep = format!("{} 600", ordinary.token);
    assert_eq!(client.request("keep", "ordinary", &keep), "error");
    let renewal = |grant: &Grant| format!("{} 1000", grant.token);
    assert_eq!(client.request("n", "ordinary", &renewal(&ordinary)), "ok 2");
    assert_eq!(holder.request("n", "long", &renewal(&long)), "ok 600");
    let again = client.acquire_for("kept", 0, 2);
    assert_eq!(client.request("r", "kept", &again.token), "ok");
    unobstruct(&service);
    daemon.wait_for_log("state-written-again", PATIENCE);
    eventually(PATIENCE, "leases last again", || {
        holder.request("n", "long", &renewal(&long)) == "ok 1000"
    });
    kill(&daemon);
    let _next = service.start();
    assert_eq!(left(&service, "kept"), None);
    assert!(left(&service, "long").expect("it is there") > 900.0);
}

/// It is the one that finds out. To wait for the disk would hold up the client and the key.
#[test]
fn a_claim_that_finds_the_disk_full_is_refused() {
    let service = Service::new(&["--settle", "2"]);
    let daemon = service.start();
    let (mut client, mut other) = (service.connect(), service.connect());
    let claims: [fn(&mut Client, &mut Client, &Service) -> String; 3] = [
        |_, other, service| {
            obstruct(service);
            other.request("l", "k", "0 600")
        },
        |_, other, service| {
            obstruct(service);
            let reply = other.request("e", "k", "600");
            assert_eq!(other.request("w", "k", "0"), "error_lease_expired");
            reply
        },
        |client, other, service| {
            let before = client.acquire_for("k", 0, 2);
            other.send("l\nk\n60 600\n");
            eventually(PATIENCE, "it waits", || {
                waiter_count(&client.stats(), "k") == 1
            });
            obstruct(service);
            client.request("r", "k", &before.token);
            other.line()
        },
    ];
    for (failures, claim) in (1..).zip(claims) {
        assert_eq!(claim(&mut client, &mut other, &service), "error");
        let grant = client.acquire_for("k", 0, 2);
        assert_eq!(client.request("r", "k", &grant.token), "ok");
        unobstruct(&service);
        eventually(PATIENCE, "the file is written again", || {
            daemon.log().matches("state-written-again").count() == failures
        });
    }
    kill(&daemon);
    let _next = service.start();
    assert_eq!(left(&service, "k"), None);
}

#[test]
fn replies_wait_for_the_disk_only_if_they_concern_the_file() {
    let strace = needs!("strace");
    if !may_attach(&strace) {
        return;
    }
    let service = Service::new(&["--settle", "60"]);
    let daemon = service.start();
    let (mut keeper, mut other, mut next) =
        (service.connect(), service.connect(), service.connect());
    let grant = keeper.acquire("kept", 0);
    let recover = inject(&strace, &daemon, "fsync:delay_enter=1000000");
    let text = || fs::read_to_string(service.file()).expect("it is written");
    keeper.send(&format!("keep\nkept\n{} 3600\n", grant.token));
    for _ in 0..20 {
        let ordinary = other.acquire("ordinary", 0);
        assert_eq!(other.request("r", "ordinary", &ordinary.token), "ok");
    }
    assert!(!text().contains(&grant.token), "it is written already");
    keeper.nothing_within(Duration::ZERO);
    keeper.expect("ok 3600");
    assert!(text().contains(&grant.token));

    next.send("l\nkept\n60\n");
    eventually(PATIENCE, "it waits", || {
        waiter_count(&other.stats(), "kept") == 1
    });
    keeper.send(&format!("r\nkept\n{}\n", grant.token));
    let reply = next.line();
    assert!(parse_grant(&reply, "ok").is_some(), "{reply}");
    assert!(
        !text().contains(&grant.token),
        "the key may have two holders"
    );
    keeper.expect("ok");
    recover();
}

#[test]
fn a_client_proves_its_lock_after_a_crash() {
    let service = Service::new(&["--settle", "5"]);
    let first = service.start();
    let (_holder, lock) = held(&service, "lock", 5);
    let (mut client, _) = held(&service, "other", 5);
    let slots = {
        let reply = client.request("sl", "s", "0 3 5 slots=2");
        parse_grant(&reply, "ok").expect(&reply)
    };
    kill(&first);
    let second = service.start();
    let mut client = service.connect();
    let adopt = |token: &str, words: &str| format!("{token} 5{words}");
    assert_eq!(
        client.request("adopt", "lock", &adopt(&lock.token, " shared")),
        "error"
    );
    assert_eq!(
        client.request("adopt", "lock", &adopt(&lock.token, "")),
        "ok 5"
    );
    assert_eq!(
        client.request("adopt", "s", &adopt(&slots.token, " sem=3")),
        "error"
    );
    let words = " sem=3 slots=2 number=0,2";
    assert_eq!(
        client.request("adopt", "s", &adopt(&slots.token, words)),
        "ok 5"
    );
    let shown = client.request("stats", "holders", "s");
    assert!(shown.contains(r#""slot_numbers":[0, 2]"#), "{shown}");
    assert_eq!(
        client.request("adopt", "s", &adopt(&slots.token, " sem=0")),
        "error"
    );
    assert_eq!(client.request("r", "lock", &lock.token), "ok");
    assert_eq!(
        client.request("adopt", "lock", &adopt(&lock.token, "")),
        "error"
    );
    second.wait_for_log("settled", PATIENCE);
    client.acquire_for("lock", 0, 5);
}

#[test]
fn a_key_that_was_brought_back_and_released_is_free() {
    let service = Service::new(&["--settle", "600"]);
    let first = service.start();
    let (_holder, lock) = held(&service, "lock", 60);
    kill(&first);
    let _second = service.start();
    let (mut client, mut next) = (service.connect(), service.connect());
    next.send("l\nlock\n60\n");
    eventually(PATIENCE, "it waits", || {
        waiter_count(&client.stats(), "lock") == 1
    });
    let proof = format!("{} 60", lock.token);
    assert_eq!(client.request("adopt", "lock", &proof), "ok 60");
    assert_eq!(client.request("r", "lock", &lock.token), "ok");
    let reply = next.line();
    assert!(parse_grant(&reply, "ok").is_some(), "{reply}");
    assert_eq!(client.request("l", "other", "0"), "timeout");
}

/// A request has no room for so many.
#[test]
fn many_slot_numbers_survive_a_crash_in_the_file() {
    let service = Service::new(&["--settle", "60"]);
    let first = service.start();
    let mut client = service.connect();
    let reply = client.request("sl", "s", "0 1000 5 slots=100");
    let grant = parse_grant(&reply, "ok").expect(&reply);
    let asked = format!("holders {}", fence(&grant.token));
    let numbers = |client: &mut Client| {
        let shown = client.request("stats", &asked, "s");
        let (_, numbers) = shown.split_once("slot_numbers\":[").expect(&shown);
        numbers.split(']').next().map(str::to_owned)
    };
    let before = numbers(&mut client);
    kill(&first);
    let _second = service.start();
    let mut client = service.connect();
    let adopted = client.request("adopt", "s", &format!("{} 5", grant.token));
    assert_eq!(adopted, "ok 5");
    assert_eq!(numbers(&mut client), before);
}

#[test]
fn a_dead_token_is_refused_after_any_number_of_crashes() {
    let service = Service::new(&["--settle", "60"]);
    let first = service.start();
    let (broken_holder, broken) = held(&service, "broken", 50);
    let (cut_holder, cut) = held(&service, "cut", 50);
    let (_released_holder, released) = held(&service, "released", 50);
    let mut operator = service.connect();
    assert_eq!(operator.request("break", "broken", "_"), "ok");
    assert_eq!(operator.request("r", "released", &released.token), "ok");
    drop((cut_holder, broken_holder));
    // The next holder is told once it is written that the previous one has lost its lock.
    let next: Vec<Grant> = ["broken", "cut", "released"]
        .map(|key| operator.acquire_for(key, 60, 50))
        .into();
    kill(&first);
    let mut daemon = service.start();
    for _ in 0..2 {
        let mut client = service.connect();
        for (key, dead) in [("broken", &broken), ("cut", &cut), ("released", &released)] {
            let reply = client.request("adopt", key, &format!("{} 50", dead.token));
            assert_eq!(reply, "error", "{key}");
        }
        for (key, alive) in ["broken", "cut", "released"].iter().zip(&next) {
            let reply = client.request("adopt", key, &format!("{} 50", alive.token));
            assert_eq!(reply, "ok 50", "{key}");
        }
        kill(&daemon);
        daemon = service.start();
    }
}
