//! Kept grants, and grants with long leases, outlive every end of the server: `--state-file`.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use crate::fences::{inject, may_attach};
use crate::restart::Service;
use crate::settling::kill;
use crate::support::at_the_end::AtTheEnd;
use crate::support::needs::needs;
use crate::support::{
    eventually, fence, parse_grant, waiter_count, Client, Event, Signal, PATIENCE,
};

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
    for _ in 0..3 {
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

/// A client that does not hear of its grant cannot come back for it.
#[test]
fn a_server_that_ends_first_tells_of_what_it_has_granted() {
    let strace = needs!("strace");
    if !may_attach(&strace) {
        return;
    }
    let service = Service::new(&[]);
    let daemon = service.start();
    let (mut holder, mut other) = (service.connect(), service.connect());
    holder.request("hello", "_", "adopt");
    let recover = inject(&strace, &daemon, "fsync:delay_enter=1000000");
    holder.send("l\nk\n0 3600\n");
    eventually(PATIENCE, "it is granted", || {
        let stats = other.stats();
        stats["locks"].as_array().map(Vec::len) == Some(1)
    });
    daemon.signal(Signal::TERM);
    daemon.wait_for_log("draining", PATIENCE);
    let reply = loop {
        match holder.next_event(Duration::from_millis(50)) {
            Event::Line(reply) => break String::from_utf8(reply).expect("UTF-8"),
            Event::Nothing => assert_eq!(other.request("ping", "_", "_"), "ok"),
            _ => panic!("it has ended"),
        }
    };
    recover();
    let grant = parse_grant(&reply, "ok").expect(&reply);
    daemon.wait_exit(PATIENCE).expect("it ends");
    let _next = service.start();
    let adopted = service
        .connect()
        .request("adopt", "k", &format!("{} 9", grant.token));
    assert_eq!(adopted, "ok 9");
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
