//! The numbers of the slots of a semaphore: `LATCH_SLOT`, `LATCH_SLOTS`, and `Guard::slot_numbers`.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::thread;

use crate::reconnecting::{listener, Peer};
use crate::support::latch::{latch, output, text, wait, Latch};
use crate::support::silent::free_port;
use crate::support::wire_cutter::WireCutter;
use crate::support::{eventually, program, Daemon, Signal, PATIENCE};
use latchd::client::{Address, Client, Guard};

/// Prints the number of one slot, and those of several, or `none` without them.
const PRINT: &str = "echo ${LATCH_SLOT-none} ${LATCH_SLOTS-none}";

/// A command under a slot of eight, until its standard input is closed, and the number of its slot.
fn numbered(daemon: &Daemon) -> (Latch, u32) {
    let script = format!("{PRINT}; read line");
    let arguments = ["run", "pool", "--limit", "8", "--", "sh", "-c", &script];
    let mut command = latch(daemon, &arguments);
    let mut child = Latch::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()));
    let mut line = String::new();
    let stdout = child.stdout.take().expect("piped");
    BufReader::new(stdout).read_line(&mut line).expect("a line");
    let number = line.strip_suffix(" none\n").and_then(|it| it.parse().ok());
    (child, number.unwrap_or_else(|| panic!("{line:?}")))
}

/// A guard of one slot of five.
fn guard(server: impl ToString) -> Guard {
    guard_of(1, server)
}

fn guard_of(slots: u32, server: impl ToString) -> Guard {
    let client = Client::new([Address::Tcp(server.to_string())]);
    let claim = client.semaphore("pool", 5).slots(slots).numbered();
    let guard = claim.try_acquire().expect("it answers");
    guard.expect("slots are free")
}

#[test]
fn each_holder_has_a_number_of_its_own_and_the_lowest() {
    let daemon = Daemon::start(&[]);
    let mut holders: Vec<(Latch, u32)> = (0..8).map(|_| numbered(&daemon)).collect();
    let numbers: Vec<u32> = holders.iter().map(|(_, number)| *number).collect();
    assert_eq!(numbers, [0, 1, 2, 3, 4, 5, 6, 7]);
    for number in [6, 2] {
        let holder = holders.iter_mut().find(|(_, its)| *its == number);
        let (holder, _) = holder.expect("it has not ended");
        drop(holder.stdin.take());
        wait(holder);
    }
    let next = [(); 2].map(|()| numbered(&daemon));
    assert_eq!(next.each_ref().map(|(_, number)| *number), [2, 6]);
}

#[test]
fn an_older_server_gives_no_number() {
    const TOKEN: &str = "0123456789abcdef0123456789abcdef";
    let (listener, addr) = listener();
    let server = thread::spawn(move || {
        let mut peer = Peer::accept(&listener);
        assert!(peer.request().starts_with("tag _ "));
        peer.answer("ok");
        assert!(peer.request().starts_with("sl pool "));
        peer.answer(&format!("ok {TOKEN} 60"));
        assert!(peer.request().starts_with("stats holders "));
        peer.answer("error");
        assert_eq!(peer.request(), format!("sr pool {TOKEN}"));
        peer.answer("ok");
    });
    let mut command = Command::new(program("latch"));
    command
        .args(["run", "pool", "--limit", "3", "--", "sh", "-c", PRINT])
        .env("LATCH_SERVER", addr.to_string());
    let ended = output(&mut command);
    server.join().expect("it was asked");
    assert_eq!(text(&ended.stdout), "none none\n", "{ended:?}");
}

#[test]
fn a_number_outlives_the_connection() {
    let daemon = Daemon::start(&[]);
    let proxy = WireCutter::before(daemon.addr());
    let first = guard(proxy.addr());
    let count = proxy.count();
    proxy.wire().cut_client();
    eventually(PATIENCE, "it is held over another connection", || {
        proxy.count() > count && first.is_held() && first.renew()
    });
    let second = guard(daemon.addr());
    assert_eq!([&first, &second].map(Guard::slot_numbers), [[0], [1]]);
}

#[test]
fn a_number_outlives_a_restart_of_the_server() {
    let directory = tempfile::tempdir().expect("a directory");
    let state = directory.path().join("state").display().to_string();
    let port = free_port().to_string();
    let start = || {
        let mut command = Daemon::command();
        command
            .args(["--port", &port, "--print-port"])
            .args(["--state-file", &state]);
        Daemon::from_command(command)
    };
    let mut daemon = start();
    let [first, second] = [1, 2].map(|slots| guard_of(slots, daemon.addr()));
    assert_eq!(second.slot_numbers(), [1, 2]);
    first.release().expect("it is held");
    daemon.signal(Signal::TERM);
    daemon.wait_exit(PATIENCE).expect("it ends");
    daemon = start();
    eventually(PATIENCE, "the holder comes back", || second.renew());
    let next = [(); 2].map(|()| guard(daemon.addr()));
    assert_eq!(next.each_ref().map(Guard::slot_numbers), [[0], [3]]);
}
