//! After a crash, a token proves what its client was granted, and nothing else: `--state-file`.

use std::fs;
use std::thread;

use crate::restart::{held, Service};
use crate::settling::kill;
use crate::support::callgrind::{assert_alike, cost_of_call, counting};
use crate::support::needs::{needs, Program};
use crate::support::{eventually, parse_grant, Client, Daemon, Grant, Signal, PATIENCE};

/// What a server leaves that was killed: a grant of each kind, a long one, and a dead one.
struct Left {
    service: Service,
    lock: Grant,
    shared: Grant,
    slot: Grant,
    long: Grant,
    dead: Grant,
}

impl Left {
    fn new() -> Left {
        let service = Service::new(&["--settle", "600"]);
        let first = service.start();
        let (mut client, lock) = held(&service, "lock", 60);
        let mut claim = |command: &str, key: &str, argument: &str| {
            let reply = client.request(command, key, argument);
            parse_grant(&reply, "ok").expect(&reply)
        };
        let shared = claim("l", "many", "0 60 shared");
        let slot = claim("sl", "slot", "0 3 60");
        let long = claim("l", "long", "0 6000");
        let dead = claim("l", "dead", "0 60");
        assert_eq!(service.connect().request("break", "dead", "_"), "ok");
        kill(&first);
        Left {
            service,
            lock,
            shared,
            slot,
            long,
            dead,
        }
    }

    /// What clients may say that do not have what they say: why not, the key, and the argument of
    /// `adopt`.
    fn forged(&self) -> Vec<(&'static str, &'static str, String)> {
        let slot = &self.slot.token;
        let of_no_server_yet = format!("7{}", &slot[1..]);
        vec![
            (
                "the first digit of the salt",
                "slot",
                with_other_digit(slot, 16) + " 60 sem=3",
            ),
            (
                "the last digit of the salt",
                "slot",
                with_other_digit(slot, 31) + " 60 sem=3",
            ),
            (
                "the fence",
                "slot",
                with_other_digit(slot, 15) + " 60 sem=3",
            ),
            (
                "a fence of no server yet",
                "slot",
                of_no_server_yet + " 60 sem=3",
            ),
            ("the key", "dead", format!("{slot} 60 sem=3")),
            (
                "the kind",
                "many",
                format!("{} 60 sem=1", self.shared.token),
            ),
            ("the limit", "slot", format!("{slot} 60 sem=4")),
            ("the weight", "slot", format!("{slot} 60 sem=3 slots=2")),
            ("a dead grant", "dead", format!("{} 60", self.dead.token)),
            (
                "the salt of a grant that is held",
                "long",
                with_other_digit(&self.long.token, 31) + " 60",
            ),
        ]
    }
}

/// The token with another hex digit at this place.
fn with_other_digit(token: &str, at: usize) -> String {
    let digit = if &token[at..=at] == "0" { "1" } else { "0" };
    format!("{}{digit}{}", &token[..at], &token[at + 1..])
}

#[test]
fn a_token_proves_no_more_than_was_granted() {
    let left = Left::new();
    let _second = left.service.start();
    let mut client = left.service.connect();
    for (what, key, argument) in left.forged() {
        assert_eq!(client.request("adopt", key, &argument), "error", "{what}");
    }
    for (key, argument) in [
        ("lock", format!("{} 60", left.lock.token)),
        ("many", format!("{} 60 shared", left.shared.token)),
        ("slot", format!("{} 60 sem=3", left.slot.token)),
        ("long", format!("{} 60", left.long.token)),
    ] {
        assert_eq!(client.request("adopt", key, &argument), "ok 60", "{key}");
    }
}

/// How many more instructions one refusal may take than another: whether a fence is held, dead or
/// too high shows in how long it is looked up. Stopping at the first reason would save more than
/// twice as many.
const SCATTER: f64 = 1000.0;

#[test]
fn a_refused_proof_costs_the_same_whatever_is_wrong() {
    let valgrind = needs!("valgrind");
    let left = Left::new();
    let state = fs::read(left.service.file()).expect("it is written");
    let costs: Vec<_> = thread::scope(|scope| {
        let (valgrind, state) = (&valgrind, &state);
        let forged = left.forged().into_iter();
        let runs: Vec<_> = forged
            .map(|(what, key, argument)| {
                scope.spawn(move || (what, cost_of_refusal(valgrind, state, key, &argument)))
            })
            .collect();
        let costs = runs.into_iter().map(|run| run.join().expect("it ends"));
        costs.collect()
    });
    println!("instructions: {costs:?}");
    assert_alike(&costs, SCATTER);
    // Where the salt differs, nothing may show.
    assert_alike(&costs[..2], 1.0);
}

/// What a server that has this state file spends on the refusal of an adoption, in instructions.
fn cost_of_refusal(valgrind: &Program, state: &[u8], key: &str, argument: &str) -> f64 {
    const TRIES: usize = 10;
    let service = Service::new(&[]);
    fs::write(service.file(), state).expect("there is room");
    let plain = service.command("off", &service.socket());
    let function = "*::table::orphans::*::adopt";
    let daemon = Daemon::from_command(counting(valgrind, function, &plain));
    let mut client = None;
    eventually(6 * PATIENCE, "it serves", || {
        client = Client::try_unix(&service.socket());
        client.is_some()
    });
    let mut client = client.expect("just connected");
    for _ in 0..TRIES {
        assert_eq!(client.request("adopt", key, argument), "error");
    }
    daemon.signal(Signal::TERM);
    assert!(daemon.wait_exit(6 * PATIENCE).is_some(), "it ends");
    cost_of_call(&daemon, TRIES)
}
