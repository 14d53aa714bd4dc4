//! Soak: all that clients do, for a long time. Memory, descriptors and threads stay as they are.
//!
//! `SOAK_SECONDS` says for how long:
//!
//! ```text
//! SOAK_SECONDS=3600 cargo test --release --test promises soak -- --ignored --nocapture
//! ```

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::noise::annoy;
use crate::place::Place;
use crate::support::at_the_end::AtTheEnd;
use crate::support::footprint::Footprint;
use crate::support::random::{self, setting, Random};
use crate::support::{eventually, parse_grant, Client, Daemon, PATIENCE};

const CLIENTS: u64 = 12;
const ANNOYING: u64 = 4;

type Figure = fn(&Footprint) -> u64;

/// The shortest lease that a client asks for.
const LEASE: Duration = Duration::from_secs(1);

/// How often the server is looked at.
const LOOKS: u32 = 40;

#[test]
#[ignore = "long: SOAK_SECONDS=3600 cargo test --test promises soak -- --ignored --nocapture"]
fn memory_and_descriptors_stay_flat_however_long_it_runs() {
    let time = Duration::from_secs(setting("SOAK_SECONDS").unwrap_or(60));
    let seed = random::seed();
    let directory = tempfile::tempdir().expect("there is room");
    let socket = directory.path().join("socket");
    let fences = directory.path().join("fences");
    let daemon = Daemon::start(&[
        "--unix",
        &socket.display().to_string(),
        "--fence-state-file",
        &fences.display().to_string(),
        "--read-timeout",
        "60",
        "--write-timeout",
        "2",
        "--gc-max-idle",
        "1",
    ]);
    daemon.stats();
    let calm = Footprint::of(daemon.pid());
    let place = Place {
        term: Some(0),
        addr: daemon.addr(),
        socket,
        ca: None,
        http: None,
    };
    let (is_over, claims) = (AtomicBool::new(false), AtomicU64::new(0));
    let looks = thread::scope(|scope| {
        let _end = AtTheEnd(&is_over);
        for number in 0..CLIENTS + ANNOYING {
            let (mut random, place) = (Random::new(seed ^ number), &place);
            let (is_over, claims, daemon) = (&is_over, &claims, &daemon);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    if number < ANNOYING {
                        annoy(place, &mut random);
                    } else {
                        claims.fetch_add(session(daemon, &mut random), Ordering::Relaxed);
                    }
                }
            });
        }
        let looks = (0..LOOKS).map(|_| {
            thread::sleep(time / LOOKS);
            let look = Footprint::of(daemon.pid());
            println!("{look:?} after {} claims", claims.load(Ordering::Relaxed));
            look
        });
        let looks: Vec<Footprint> = looks.collect();
        is_over.store(true, Ordering::Relaxed);
        looks
    });
    let half = looks.len() / 2;
    expect_flat(&looks[half / 2..half], &looks[half..]);
    eventually(3 * PATIENCE, "all that was taken is given back", || {
        let left = Footprint::of(daemon.pid());
        left.descriptors <= calm.descriptors && left.threads <= calm.threads
    });
    println!("in the end {:?}", Footprint::of(daemon.pid()));
}

/// The second half of the run takes no more than the second quarter did, but for the scatter. A
/// look may meet a crowd, so that medians are compared: a leak lifts all of them.
fn expect_flat(before: &[Footprint], after: &[Footprint]) {
    let median = |looks: &[Footprint], of: Figure| {
        let mut figures: Vec<u64> = looks.iter().map(of).collect();
        figures.sort_unstable();
        figures[figures.len() / 2]
    };
    let figures: [(&str, Figure, u64); 3] = [
        ("descriptors", |look| look.descriptors as u64, 20),
        ("threads", |look| look.threads as u64, 70),
        ("KiB of memory", |look| look.resident, 1024),
    ];
    for (what, of, scatter) in figures {
        let (before, after) = (median(before, of), median(after, of));
        println!("{what}: {before} as a rule, and then {after}");
        let bound = before + before / 10 + scatter;
        assert!(after <= bound, "{what} grew from {before} to {after}");
    }
}

/// One connection that does what clients do; gives the number of its claims.
fn session(daemon: &Daemon, random: &mut Random) -> u64 {
    let mut client = daemon.connect();
    let rounds = 1 + random.below(200);
    for _ in 0..rounds {
        let key = format!("key-{}", random.below(900));
        let asked = Instant::now();
        let reply = match random.below(4) {
            0 => ask(&mut client, "l", &key, "0 1"),
            1 => ask(&mut client, "l", &key, "1 2"),
            _ => enqueue_and_wait(&mut client, &key),
        };
        let grant = parse_grant(&reply, "ok").or_else(|| parse_grant(&reply, "acquired"));
        let Some(grant) = grant else {
            assert!(reply == "timeout" || reply.starts_with("error"), "{reply}");
            continue;
        };
        if random.one_in(20) {
            ask(&mut client, "n", &key, &format!("{} 1", grant.token));
        }
        if random.one_in(100) {
            ask(&mut client, "stats", "_", "_");
        }
        // Some keys stay held until the connection ends, or the lease does.
        if !random.one_in(50) {
            let reply = ask(&mut client, "r", &key, &grant.token);
            // A client that had to wait for a processor for so long has lost its lease.
            assert!(reply == "ok" || asked.elapsed() >= LEASE, "{reply}");
        }
    }
    if random.one_in(3) {
        client.reset();
    }
    rounds
}

fn enqueue_and_wait(client: &mut Client, key: &str) -> String {
    match ask(client, "e", key, "2") {
        reply if reply == "queued" => ask(client, "w", key, "1"),
        reply => reply,
    }
}

/// Sends a request and waits for its reply, also on a machine with much else to do.
fn ask(client: &mut Client, command: &str, key: &str, argument: &str) -> String {
    client.send(&format!("{command}\n{key}\n{argument}\n"));
    let reply = client.try_line(12 * PATIENCE);
    reply.unwrap_or_else(|| panic!("no reply to {command}"))
}
