//! What a request costs in system calls and in instructions, and how deep in the stack a session
//! makes these calls.

use std::collections::HashSet;
use std::fs;

use crate::support::callgrind;
use crate::support::limited::limited;
use crate::support::needs::{needs, Program};
use crate::support::{eventually, Client, Daemon, Signal, PATIENCE};

const PAIR_COUNT: usize = 50;

const SESSION_LOOP: &str = "latchd::latchd::line::session::Session::converse";

/// The functions of this package on the stack of a session's thread, from the thread's first one to
/// [`SESSION_LOOP`]. A request does not return through them, but each may touch another page of the
/// stack.
const LOOP_DEPTH: usize = 7;

/// The calls of the thread that was the last to receive, in order.
fn calls_of_session(trace: &str) -> Vec<String> {
    let calls = trace.lines().filter_map(|line| line.split_once(' '));
    let calls = calls.map(|(thread, call)| (thread, call.trim_start()));
    let mut received = calls.clone().filter(|(_, call)| call.starts_with("recv"));
    let Some((session, _)) = received.next_back() else {
        return Vec::new();
    };
    let of_session = calls.filter(|(thread, _)| *thread == session);
    let names = of_session.filter_map(|(_, call)| call.split_once('('));
    names.map(|(name, _)| name.to_owned()).collect()
}

#[test]
fn an_uncontended_pair_is_two_receives_and_two_sends() {
    let strace = needs!("strace");
    let directory = tempfile::tempdir().expect("there is room");
    let trace = directory.path().join("trace");
    let (strace, trace_path) = (strace.path().to_string_lossy(), trace.to_string_lossy());
    let wrapper = [&strace, "-D", "-f", "-qq", "-o", &trace_path];
    let daemon = Daemon::from_command(limited(&wrapper));
    let mut client: Client = daemon.connect();
    for _ in 0..PAIR_COUNT {
        let grant = client.acquire("k", 10);
        assert_eq!(client.request("r", "k", &grant.token), "ok");
    }
    let mut calls = Vec::new();
    eventually(PATIENCE, "the trace is written", || {
        calls = calls_of_session(&fs::read_to_string(&trace).unwrap_or_default());
        calls.iter().filter(|call| *call == "sendto").count() == 2 * PAIR_COUNT
    });
    // The first pair sees to the socket, and wakes the reaper. A thread that strace has stopped may
    // keep the mutex, which costs a futex now and then.
    let mut sends = calls
        .iter()
        .enumerate()
        .filter(|(_, call)| *call == "sendto");
    let (begin, _) = sends.nth(2).expect("there are more");
    let pairs = || calls[begin..].iter();
    let futex_count = pairs().filter(|call| *call == "futex").count();
    assert!(futex_count < 10, "{calls:?}");
    let expected = ["sendto", "recvfrom"].iter().cycle();
    let mut compared = pairs().filter(|call| *call != "futex").zip(expected);
    let differing = compared.find(|(call, expected)| call != expected);
    assert_eq!(differing, None, "{calls:?}");
}

/// Frames, because what they cost does not show in a time that a test could measure: see
/// `Session::converse`.
#[test]
fn a_session_reads_and_writes_in_the_frame_of_its_loop() {
    let valgrind = needs!("valgrind");
    let directory = tempfile::tempdir().expect("there is room");
    let profile = directory.path().join("profile");
    let out = format!("--callgrind-out-file={}", profile.display());
    let wrapper = [
        &valgrind.path().to_string_lossy(),
        "--tool=callgrind",
        &out,
        "--compress-strings=no",
        // These functions are listed once for each stack, with at most this many callers.
        "--separate-callers60=rustix::net::send_recv::recv",
        "--separate-callers60=rustix::net::send_recv::send",
    ];
    let daemon = Daemon::from_command(limited(&wrapper));
    let mut client = daemon.connect();
    for _ in 0..3 {
        let grant = client.acquire("k", 10);
        assert_eq!(client.request("n", "k", &grant.token), "ok 33");
        assert_eq!(client.request("r", "k", &grant.token), "ok");
    }
    drop(client);
    daemon.signal(Signal::TERM);
    let ended = daemon.wait_exit(6 * PATIENCE);
    assert!(ended.is_some(), "it drains:\n{}", daemon.log());

    let profile = fs::read_to_string(&profile).expect("callgrind writes it at the end");
    for call in ["recv", "send"] {
        let stacks = stacks_of_session(&profile, &format!("rustix::net::send_recv::{call}"));
        assert!(!stacks.is_empty(), "no {call} in the session's loop");
        for stack in stacks {
            assert_eq!(stack[0], SESSION_LOOP, "{call} is called by {stack:#?}");
            assert_eq!(stack.len(), LOOP_DEPTH, "{call} is called by {stack:#?}");
        }
    }
}

/// What a pair of acquire and release may cost in user instructions: of the only key, and of a key
/// among 1000 that 200 other connections hold. Another compiler may need other figures. A change
/// that makes the path of a request shorter lowers them; they leave 3 % of room. They are for
/// programs that cargo has built, which `cargo test` builds without optimizing.
/// `examples/bench/instructions.rs` counts for a release.
const PAIR: [f64; 2] = if cfg!(debug_assertions) {
    [57_160.0, 66_000.0]
} else {
    [7_430.0, 8_500.0]
};

#[test]
fn a_pair_costs_no_more_instructions_than_on_record() {
    let valgrind = needs!("valgrind");
    let cost = [0, 200].map(|holder_count| cost_of_pair(&valgrind, holder_count));
    println!("instructions: {cost:?}");
    for (cost, on_record) in cost.into_iter().zip(PAIR) {
        assert!(cost < 1.03 * on_record, "{cost}, not {on_record}");
    }
}

/// The instructions that each of 1000 more pairs costs the server.
fn cost_of_pair(valgrind: &Program, holder_count: usize) -> f64 {
    let count = |pair_count| {
        let wrapper = [
            &valgrind.path().to_string_lossy(),
            "--tool=callgrind",
            "--callgrind-out-file=/dev/null",
        ];
        let daemon = Daemon::from_command(limited(&wrapper));
        let holders: Vec<Client> = (0..holder_count)
            .map(|holder| {
                let mut client: Client = daemon.connect();
                for number in 0..5 {
                    client.acquire_for(&format!("held{holder}-{number:07}"), 0, 3600);
                }
                client
            })
            .collect();
        let mut client: Client = daemon.connect();
        for _ in 0..pair_count {
            let grant = client.acquire("held-0000100", 60);
            assert_eq!(client.request("r", "held-0000100", &grant.token), "ok");
        }
        drop((client, holders));
        daemon.signal(Signal::TERM);
        assert!(daemon.wait_exit(6 * PATIENCE).is_some(), "it drains");
        callgrind::cost_of_call(&daemon, 1)
    };
    (count(1_200) - count(200)) / 1000.0
}

/// The functions of this package on each stack on which the session's loop calls `function`, the
/// innermost first.
fn stacks_of_session<'a>(profile: &'a str, function: &str) -> HashSet<Vec<&'a str>> {
    let names = profile.lines().filter_map(|line| line.strip_prefix("fn="));
    let of_function = names.filter_map(|name| name.strip_prefix(function)?.strip_prefix('\''));
    let of_loop = of_function.filter(|callers| callers.split('\'').any(|it| it == SESSION_LOOP));
    let is_ours = |name: &&str| name.trim_start_matches(['<', '&']).starts_with("latchd::");
    of_loop
        .map(|callers| callers.split('\'').filter(is_ours).collect())
        .collect()
}
