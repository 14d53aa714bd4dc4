//! How long others wait when much happens at once: leases end, a holder hangs up, a queue drains.

use std::io;
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{kill_process, Pid, Signal};

use crate::load::{enqueue, hold, key_name, Client};
use crate::machine::resident;
use crate::peers::{unexpected, Server, SMALL_STACK};
use crate::report::{median, spread, spread_heading, spread_of_rounds};
use crate::Plan;

/// The lease of keys that are held throughout, in seconds.
const LONG_LEASE: u32 = 3600;

fn start(plan: &Plan) -> io::Result<Vec<Server>> {
    let specs = plan.latch_specs().iter();
    specs.map(|spec| spec.start(plan)).collect()
}

// ---- many held locks --------------------------------------------------------------------------

/// Many held locks: what they take, and how long a client with a key of its own waits for a reply
/// while all of them are listed, end in one instant, or are freed by a disconnect. The longest
/// reply is that of the round in which it was least: where the server keeps its table closed for a
/// while, it does so in every round, and other programs only add to that.
pub fn held(plan: &Plan) -> io::Result<()> {
    for count in plan.counts_or(&[100_000]) {
        spread_heading(&format!("{count} held locks, {}", plan.cores));
        for spec in plan.latch_specs() {
            let server = spec.start(plan)?;
            let mut rounds = Vec::new();
            for _ in 0..plan.rounds {
                rounds.push(held_by(&server, count, plan.time)?);
            }
            for (at, event) in EVENTS.iter().enumerate() {
                let times: Vec<Vec<f64>> = rounds.iter().map(|it| it.replies[at].clone()).collect();
                if times.iter().all(|times| !times.is_empty()) {
                    spread_of_rounds(&format!("{}: {event}", server.name), &times);
                }
            }
            let first = rounds.first().expect("there is one round at least");
            let (name, taken) = (format!("{}: memory", server.name), first.taken * 1e3);
            println!(
                "  {name:<42} {} bytes a lock, taken in {taken:.0} ms",
                first.bytes
            );
        }
    }
    Ok(())
}

/// What the replies of the other client are measured beside.
const EVENTS: [&str; 8] = [
    "no other key",
    "beside the held locks",
    "while stats are asked",
    "while stats of holders are asked",
    "as a disconnect gives up as many places",
    "as a disconnect frees them for waiters",
    "as a disconnect frees them once more",
    "as their leases end in one instant",
];

struct Held {
    /// How long each reply took, for each of [`EVENTS`].
    replies: [Vec<f64>; EVENTS.len()],
    bytes: u64,
    taken: f64,
}

fn held_by(server: &Server, count: usize, time: Duration) -> io::Result<Held> {
    let pause = || {
        thread::sleep(time);
        Ok(())
    };
    let quiet = probe(server, pause)?;
    let memory = || server.process().map_or(Ok(0), resident);
    let (before, began) = (memory()?, Instant::now());
    let holder = hold(server, "held", count, LONG_LEASE)?;
    let taken = began.elapsed().as_secs_f64();
    let bytes = memory()?.saturating_sub(before) / count.max(1) as u64;
    let beside = probe(server, pause)?;
    let ask_for = |request: &str| {
        probe(server, || {
            Client::connect(server, "_")?.ask(request)?;
            thread::sleep(time / 10);
            Ok(())
        })
    };
    let listed = ask_for("stats\n_\n_\n")?;
    let shown = ask_for("stats\nholders\n_\n")?;
    let after_the_end_of = |client: Client| {
        probe(server, || {
            drop(client);
            pause()
        })
    };
    let given_up = after_the_end_of(enqueue(server, "held", count, LONG_LEASE)?)?;
    let waiter = enqueue(server, "held", count, LONG_LEASE)?;
    let handed_over = after_the_end_of(holder)?;
    let freed = after_the_end_of(waiter)?;
    let ended = match server.process() {
        Some(process) => at_the_end_of_leases(server, process, count, time)?,
        None => Vec::new(),
    };
    Ok(Held {
        replies: [
            quiet,
            beside,
            listed,
            shown,
            given_up,
            handed_over,
            freed,
            ended,
        ],
        bytes,
        taken,
    })
}

/// Stops the server until all leases are over, so that it finds them ended in one instant.
fn at_the_end_of_leases(
    server: &Server,
    process: u32,
    count: usize,
    time: Duration,
) -> io::Result<Vec<f64>> {
    // Long enough to take them all, even on a slow machine.
    let lease = 1 + count as u32 / 20_000;
    let process = Pid::from_raw(process as i32).expect("a process has a number");
    let mut client = Client::connect(server, "probe")?;
    let holder = hold(server, "ends", count, lease)?;
    kill_process(process, Signal::STOP)?;
    thread::sleep(Duration::from_secs(lease.into()));
    kill_process(process, Signal::CONT)?;
    let end = Instant::now() + time;
    let mut times = Vec::new();
    while Instant::now() < end {
        times.push(round_trip(&mut client)?);
    }
    drop(holder);
    Ok(times)
}

/// Acquires and releases a key of its own, over and over, while `event` goes on: how long each
/// reply took, in seconds.
fn probe(server: &Server, event: impl FnOnce() -> io::Result<()>) -> io::Result<Vec<f64>> {
    let is_over = AtomicBool::new(false);
    let mut client = Client::connect(server, "probe")?;
    thread::scope(|scope| {
        let probing = scope.spawn(|| {
            let mut times = vec![round_trip(&mut client)?];
            while !is_over.load(Ordering::Relaxed) {
                times.push(round_trip(&mut client)?);
            }
            io::Result::Ok(times)
        });
        let outcome = event();
        is_over.store(true, Ordering::Relaxed);
        let times = probing.join().expect("the probe returns its errors")?;
        outcome.map(|()| times)
    })
}

/// The longer one of an acquire and a release, in seconds.
fn round_trip(client: &mut Client) -> io::Result<f64> {
    let asked = Instant::now();
    let (token, _) = client.acquire("probe")?;
    let granted = Instant::now();
    client.release("probe", &token)?;
    let longer = granted.duration_since(asked).max(granted.elapsed());
    Ok(longer.as_secs_f64())
}

// ---- many waiters -----------------------------------------------------------------------------

/// A queue that drains: from a release to the grant of the next waiter. The waiters must be served
/// in the order in which they came.
pub fn waiters(plan: &Plan) -> io::Result<()> {
    for count in plan.counts_or(&[1000]) {
        spread_heading(&format!("{count} waiters drained in order, {}", plan.cores));
        let servers = start(plan)?;
        let mut times = vec![Vec::new(); servers.len()];
        let mut totals = times.clone();
        for _ in 0..plan.rounds {
            for (at, server) in servers.iter().enumerate() {
                let (of_each, total) = drain(server, count)?;
                times[at].extend(of_each);
                totals[at].push(total * 1e3);
            }
        }
        for ((server, times), totals) in servers.iter().zip(&times).zip(&totals) {
            spread(&server.name, times);
            println!("  {:<42} {:>10.1} ms", "all of them", median(totals));
        }
    }
    Ok(())
}

/// The seconds of each hand-off, and of all.
fn drain(server: &Server, count: usize) -> io::Result<(Vec<f64>, f64)> {
    const KEY: &str = "queue";
    let mut holder = Client::connect(server, KEY)?;
    let (mut token, mut last_fence) = holder.acquire(KEY)?;
    let mut waiters = (0..count)
        .map(|_| waiter(server, KEY))
        .collect::<io::Result<Vec<_>>>()?;
    let began = Instant::now();
    let mut times = Vec::new();
    for next in &mut waiters {
        let released = Instant::now();
        holder.send_release(KEY, &token)?;
        // A grant to another waiter would leave this one without, until the read times out.
        let (next_token, fence) = next.granted()?;
        times.push(released.elapsed().as_secs_f64());
        holder.reply()?;
        if fence.is_some() && fence <= last_fence {
            return Err(io::Error::other("a fence is not above the last one"));
        }
        (token, last_fence) = (next_token, fence);
        std::mem::swap(&mut holder, next);
    }
    let total = began.elapsed().as_secs_f64();
    holder.release(KEY, &token)?;
    Ok((times, total))
}

/// A connection that is in the queue and blocks.
fn waiter(server: &Server, key: &str) -> io::Result<Client> {
    use std::io::Write;
    let mut waiter = Client::connect(server, key)?;
    let reply = waiter.ask(&format!("e\n{key}\n\n"))?;
    if reply != "queued\n" {
        return Err(unexpected(reply.as_bytes()));
    }
    write!(waiter.stream, "w\n{key}\n60\n")?;
    Ok(waiter)
}

// ---- leases and hang-ups ----------------------------------------------------------------------

/// Leases of one second with a waiter behind each: how late the waiter has the key.
pub fn expiry(plan: &Plan) -> io::Result<()> {
    for count in plan.counts_or(&[100]) {
        let title = format!("after the end of a lease, {count} at once");
        spread_heading(&format!("{title}, {}", plan.cores));
        for server in start(plan)? {
            let late = thread::scope(|scope| {
                let mut threads = Vec::new();
                for at in 0..count {
                    let thread = thread::Builder::new().stack_size(SMALL_STACK);
                    let server = &server;
                    threads.push(thread.spawn_scoped(scope, move || lateness(server, at))?);
                }
                let joined = threads.into_iter().map(|thread| thread.join());
                joined
                    .map(|late| late.expect("clients return their errors"))
                    .collect::<io::Result<Vec<f64>>>()
            })?;
            spread(&server.name, &late);
        }
    }
    Ok(())
}

/// Seconds from the end of the lease, as its holder counts it, to the next grant.
fn lateness(server: &Server, at: usize) -> io::Result<f64> {
    const LEASE: Duration = Duration::from_secs(1);
    let key = key_name("late", at);
    let (mut holder, mut waiter) = (
        Client::connect(server, &key)?,
        Client::connect(server, &key)?,
    );
    let asked = Instant::now();
    let reply = holder.ask(&format!("l\n{key}\n10 {}\n", LEASE.as_secs()))?;
    if !reply.starts_with("ok ") {
        return Err(unexpected(reply.as_bytes()));
    }
    let told = Instant::now();
    let (token, _) = waiter.acquire(&key)?;
    let granted = Instant::now();
    waiter.release(&key, &token)?;
    // The lease began between the question and the answer: it ends no sooner than the one and no
    // later than the other, each a lease on.
    if granted < asked + LEASE {
        return Err(io::Error::other("a lease ended early"));
    }
    Ok(granted
        .saturating_duration_since(told + LEASE)
        .as_secs_f64())
}

/// From when a holder closes to the grant of the waiter, and from when a waiter closes its sending
/// side to the answer that dismisses it.
pub fn disconnect(plan: &Plan) -> io::Result<()> {
    for count in plan.counts_or(&[200]) {
        let servers = start(plan)?;
        for (title, act) in [
            ("from hang-up of the holder to grant", of_holder as Hangup),
            ("from half-close of a waiter to reply", of_waiter),
        ] {
            spread_heading(&format!("{title}, {count} times, {}", plan.cores));
            let mut times = vec![Vec::new(); servers.len()];
            for _ in 0..count {
                for (server, times) in servers.iter().zip(&mut times) {
                    times.push(act(server)?);
                }
            }
            for (server, times) in servers.iter().zip(&times) {
                spread(&server.name, times);
            }
        }
    }
    Ok(())
}

/// Times one hang-up, in seconds.
type Hangup = fn(&Server) -> io::Result<f64>;

const HANGUP_KEY: &str = "hangup";

/// How long a `w` takes to be read by the server, on most days.
const UNTIL_IT_WAITS: Duration = Duration::from_millis(2);

fn of_holder(server: &Server) -> io::Result<f64> {
    let mut holder = Client::connect(server, HANGUP_KEY)?;
    holder.acquire(HANGUP_KEY)?;
    let mut waiter = waiter(server, HANGUP_KEY)?;
    thread::sleep(UNTIL_IT_WAITS);
    let began = Instant::now();
    drop(holder);
    let (token, _) = waiter.granted()?;
    let time = began.elapsed().as_secs_f64();
    waiter.release(HANGUP_KEY, &token)?;
    Ok(time)
}

fn of_waiter(server: &Server) -> io::Result<f64> {
    let mut holder = Client::connect(server, HANGUP_KEY)?;
    let (token, _) = holder.acquire(HANGUP_KEY)?;
    let mut waiter = waiter(server, HANGUP_KEY)?;
    thread::sleep(UNTIL_IT_WAITS);
    let began = Instant::now();
    waiter.stream.shutdown(Shutdown::Write)?;
    let reply = waiter.line()?;
    let time = began.elapsed().as_secs_f64();
    holder.release(HANGUP_KEY, &token)?;
    match reply.as_str() {
        "error\n" => Ok(time),
        other => Err(unexpected(other.as_bytes())),
    }
}
