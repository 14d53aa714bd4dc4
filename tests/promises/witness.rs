//! A store that checks fences, and holders that are paused for longer than their leases: they go on
//! to write, and the store refuses what is out of date.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use rustix::process::{kill_process, Pid, Signal};

use crate::support::amount::amount;
use crate::support::at_the_end::AtTheEnd;
use crate::support::{fence, parse_grant, Client, Daemon, PATIENCE};

/// How many holders there are in the process that is paused, each with a key of its own.
const HOLDERS: usize = 50;

/// The most pauses, so that this ends on any machine.
const MAX_PAUSES: usize = 100;

const SETTINGS: &str = "HOLDERS_OF";

#[test]
fn a_store_that_checks_fences_refuses_paused_holders() {
    let daemon = Daemon::start(&[]);
    let store = Store::start();
    let holders = start_holders(daemon.addr(), store.addr);
    let (wanted, mut pauses, mut current) = (amount(50, 500), 0, 0);
    while store.refused() < wanted {
        assert!(pauses < MAX_PAUSES, "{} refused writes", store.refused());
        thread::sleep(Duration::from_millis(100));
        let holders = Pid::from_child(&holders.0);
        kill_process(holders, Signal::STOP).expect("our child");
        current += take_over(&daemon, &store);
        kill_process(holders, Signal::CONT).expect("our child");
        pauses += 1;
    }
    println!(
        "{pauses} pauses: {} writes refused, {current} of the new holders accepted",
        store.refused()
    );
    assert!(current > 0, "no holder was in time");
}

/// Takes each key as its lease ends, and writes. Gives the number of writes by holders that were in
/// time: all of them are accepted.
fn take_over(daemon: &Daemon, store: &Store) -> usize {
    let mut waiters: Vec<Client> = (0..HOLDERS).map(|_| daemon.connect()).collect();
    for (key, waiter) in waiters.iter_mut().enumerate() {
        waiter.send(&format!("l\n{key}\n10 1\n"));
    }
    let mut current = 0;
    for (key, waiter) in waiters.iter_mut().enumerate() {
        let line = waiter.line();
        let grant = parse_grant(&line, "ok").unwrap_or_else(|| panic!("no grant: {line}"));
        let is_accepted = store.write(key, fence(&grant.token));
        // This test may have been kept waiting itself.
        if waiter.request("r", &key.to_string(), &grant.token) == "ok" {
            assert!(is_accepted, "the store refused the holder of {key}");
            current += 1;
        }
    }
    current
}

/// What all holders write to. It takes a write whose fence is not below an earlier one of the key.
struct Store {
    addr: SocketAddr,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    highest: HashMap<usize, u64>,
    refused: usize,
}

impl State {
    fn write(&mut self, key: usize, fence: u64) -> bool {
        let highest = self.highest.entry(key).or_default();
        let is_current = fence >= *highest;
        *highest = fence.max(*highest);
        self.refused += usize::from(!is_current);
        is_current
    }
}

impl Store {
    /// Serves until the process of the tests ends.
    fn start() -> Store {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let store = Store {
            addr: listener.local_addr().expect("an address"),
            state: Arc::default(),
        };
        let state = Arc::clone(&store.state);
        thread::spawn(move || {
            for writer in listener.incoming().flatten() {
                let state = Arc::clone(&state);
                thread::spawn(move || {
                    for line in BufReader::new(writer).lines().map_while(Result::ok) {
                        let (key, fence) = line.split_once(' ').expect("two numbers");
                        let key = key.parse().expect("a number");
                        let fence = fence.parse().expect("a number");
                        state.lock().unwrap().write(key, fence);
                    }
                });
            }
        });
        store
    }

    fn write(&self, key: usize, fence: u64) -> bool {
        self.state.lock().unwrap().write(key, fence)
    }

    fn refused(&self) -> usize {
        self.state.lock().unwrap().refused
    }
}

/// A child that is killed when dropped.
struct Holders(Child);

impl Drop for Holders {
    fn drop(&mut self) {
        // Both fail only if it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start_holders(server: SocketAddr, store: SocketAddr) -> Holders {
    let child = Command::new(std::env::current_exe().expect("a test knows its own path"))
        .args(["--exact", "witness::the_process_of_the_holders"])
        .env(SETTINGS, format!("{server} {store}"))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    Holders(child.expect("a test can run itself"))
}

/// Not a claim: the process of [`start_holders`]. Does nothing when it is run as a test.
#[test]
fn the_process_of_the_holders() {
    let Ok(settings) = std::env::var(SETTINGS) else {
        return;
    };
    let (server, store) = settings.split_once(' ').expect("two addresses");
    let address = |text: &str| -> SocketAddr { text.parse().expect("an address") };
    let (server, store) = (address(server), address(store));
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let _end = AtTheEnd(&is_over);
        for key in 0..HOLDERS {
            let is_over = &is_over;
            scope.spawn(move || {
                let mut client = Client::tcp(server);
                let mut store = TcpStream::connect_timeout(&store, PATIENCE).expect("it listens");
                while !is_over.load(Ordering::Relaxed) {
                    hold_and_write(&mut client, &mut store, key);
                }
            });
        }
        // The end of stdin says that it is time.
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
    });
}

/// Works under a key for a while, and then writes, without a look at the clock.
fn hold_and_write(client: &mut Client, store: &mut TcpStream, key: usize) {
    let name = key.to_string();
    let reply = client.request("l", &name, "5 1");
    let Some(grant) = parse_grant(&reply, "ok") else {
        return;
    };
    thread::sleep(Duration::from_millis(20));
    let line = format!("{key} {}\n", fence(&grant.token));
    store.write_all(line.as_bytes()).expect("the store reads");
    // The lease may be over.
    client.request("r", &name, &grant.token);
}
