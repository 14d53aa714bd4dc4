//! What the network does to clients: a cut that neither end is told about, and no delays of our
//! own making.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::limited::limited;
use crate::support::needs::{needs, Program};
use crate::support::stalls::fairly;
use crate::support::{eventually, parse_grant, waiter_count, Client, Daemon, PATIENCE};

/// A watch for hang-ups that looks every 50 ms would take half a minute for these.
#[test]
fn six_hundred_handovers_take_no_fixed_delay() {
    let daemon = Daemon::start(&[]);
    let (mut one, mut other) = (daemon.connect(), daemon.connect());
    fairly(|| {
        let began = Instant::now();
        let mut held = one.acquire("k", 5);
        for _ in 0..300 {
            held = pass_on(&mut one, &held.token, &mut other);
            held = pass_on(&mut other, &held.token, &mut one);
        }
        assert_eq!(one.request("r", "k", &held.token), "ok");
        println!("600 handovers took {:?}", began.elapsed());
        if began.elapsed() < Duration::from_secs(6) {
            Ok(())
        } else {
            Err(began.elapsed())
        }
    })
    .expect("handovers are slow");
}

fn pass_on(from: &mut Client, token: &str, to: &mut Client) -> crate::support::Grant {
    to.send("l\nk\n5\n");
    assert_eq!(from.request("r", "k", token), "ok");
    parse_grant(&to.line(), "ok").expect("its turn")
}

#[test]
fn a_wrong_token_takes_as_long_at_every_door() {
    let directory = tempfile::tempdir().expect("there is room");
    let socket = directory.path().join("socket");
    let path = socket.display().to_string();
    let daemon = Daemon::start(&["--unix", &path, "--auth-token", "secret"]);
    for mut guesser in [daemon.connect(), Client::unix(&socket)] {
        let asked = Instant::now();
        guesser.send("auth\n_\nwrong\n");
        guesser.expect("error_auth");
        guesser.expect_eof();
        let took = asked.elapsed();
        assert!(took >= Duration::from_millis(100), "{took:?}");
    }
}

/// A link goes down without a word to either end. One client holds a key and is silent, the other
/// has been granted one since: the kernel's probes find the first, its timeout for unread bytes
/// the second.
#[test]
#[ignore = "long: cargo test --test promises network -- --ignored"]
fn clients_that_are_cut_off_lose_their_keys_in_35_seconds() {
    needs!(admin);
    let [ip, nc] = needs!("ip", "nc");
    let mut command = limited(&["unshare", "-n"]);
    command.args(["--host", "0.0.0.0"]);
    let daemon = Daemon::from_command(command);
    let far = Ended(
        Command::new("unshare")
            .args(["-n", "sleep", "300"])
            .spawn()
            .expect("it is installed"),
    );
    let (server, client) = (daemon.pid().to_string(), far.0.id().to_string());
    for process in [&server, &client] {
        let network = |process: &str| fs::read_link(format!("/proc/{process}/ns/net")).ok();
        let is_own = || network(process) != network("self");
        eventually(PATIENCE, "it is in a namespace of its own", is_own);
    }
    inside(&server, &ip, "link set lo up");
    let pair = format!("link add near type veth peer name far netns {client}");
    inside(&server, &ip, &pair);
    inside(&server, &ip, "addr add 10.9.8.1/30 dev near");
    inside(&server, &ip, "link set near up");
    inside(&client, &ip, "addr add 10.9.8.2/30 dev far");
    inside(&client, &ip, "link set far up");

    let port = daemon.port();
    let near = || Netcat::start(&nc, &server, &format!("127.0.0.1 {port}"));
    let far = || Netcat::start(&nc, &client, &format!("10.9.8.1 {port}"));
    let (mut silent, mut granted, mut holder) = (far(), far(), near());
    silent.acquire("silent", 0);
    let held = holder.acquire("granted", 0);
    let (mut next, mut next_but_one, mut asking) = (near(), near(), near());
    let mut wait_for_waiters = |key: &str, count: u64| {
        eventually(PATIENCE, "it waits", || {
            asking.send("stats\n_\n_\n");
            let reply = asking.line(PATIENCE);
            let stats = reply.strip_prefix("ok ").expect("statistics");
            let stats = serde_json::from_str(stats).expect("JSON");
            waiter_count(&stats, key) == count
        });
    };
    granted.send("l\ngranted\n600 600\n");
    wait_for_waiters("granted", 1);
    next.send("l\nsilent\n600 600\n");
    wait_for_waiters("silent", 1);
    next_but_one.send("l\ngranted\n600 600\n");
    wait_for_waiters("granted", 2);

    inside(&client, &ip, "link set far down");
    let cut = Instant::now();
    holder.send(&format!("r\ngranted\n{held}\n"));
    assert_eq!(holder.line(PATIENCE), "ok");
    for waiter in [&mut next, &mut next_but_one] {
        let line = waiter.line(Duration::from_secs(60));
        assert!(parse_grant(&line, "ok").is_some(), "{line}");
        println!("passed on {:?} after the cut", cut.elapsed());
    }
    assert!(
        cut.elapsed() < Duration::from_secs(45),
        "{:?}",
        cut.elapsed()
    );
}

fn inside(process: &str, ip: &Program, command: &str) {
    let status = Command::new("nsenter")
        .args(["-t", process, "-n"])
        .arg(ip)
        .args(command.split(' '))
        .status();
    assert!(status.expect("it is installed").success(), "{command}");
}

/// A child that is killed when dropped.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A client in another network namespace.
struct Netcat {
    child: Ended,
    lines: Receiver<String>,
}

impl Netcat {
    fn start(nc: &Program, process: &str, address: &str) -> Netcat {
        let mut child = Command::new("nsenter")
            .args(["-t", process, "-n"])
            .arg(nc)
            .args(address.split(' '))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it is installed");
        let stdout = BufReader::new(child.stdout.take().expect("it is piped"));
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                // The test may be over.
                let _ = sender.send(line);
            }
        });
        Netcat {
            child: Ended(child),
            lines,
        }
    }

    fn send(&mut self, frame: &str) {
        let stdin = self.child.0.stdin.as_mut().expect("it is piped");
        stdin.write_all(frame.as_bytes()).expect("it reads");
    }

    fn line(&mut self, patience: Duration) -> String {
        self.lines.recv_timeout(patience).expect("a reply")
    }

    fn acquire(&mut self, key: &str, wait: u32) -> String {
        self.send(&format!("l\n{key}\n{wait} 600\n"));
        let line = self.line(PATIENCE);
        parse_grant(&line, "ok").expect("it is free").token
    }
}
