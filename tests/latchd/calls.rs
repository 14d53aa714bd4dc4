//! What a request costs in system calls.

use std::fs;
use std::process::Command;

use crate::support::limited::{behind, with_surroundings_of};
use crate::support::needs::needs;
use crate::support::{eventually, program, Client, Daemon, PATIENCE};

const PAIR_COUNT: usize = 50;

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
    let mut plain = Command::new(program("latchd"));
    plain.args(["--port", "0", "--print-port"]);
    let command = with_surroundings_of(&Daemon::command(), behind(&wrapper, &plain));
    let daemon = Daemon::from_command(command);
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
