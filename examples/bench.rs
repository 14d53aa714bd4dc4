//! What a lock costs, beside what a round trip costs anyway.
//!
//! Measures acquire and release over persistent connections, each on a key of its own and all
//! on one key; connect, lock and close; and how late a key is handed over when its lease ends,
//! when its holder hangs up, and when a waiter gives up.
//!
//! Rates depend on the machine, the day and the neighbours. So each rate is beside that of
//! a bare server, run by the same client code in alternating rounds: one thread per connection,
//! which reads as many bytes as a request has and answers as many as a reply has. What is left
//! in the *ratio* between the two is the work of locking; that figure can be compared between
//! machines and between versions, the others cannot.
//!
//! Mutual exclusion is checked while it is measured: whoever is granted a key must find it free
//! and its fence above the last one. The bare server, which grants everything to everybody, is
//! what the checker is tried on first: it must find violations there, and none in `latchd`.
//!
//! ```text
//! cargo run --release --example bench -- [--quick] [--seconds N]
//! ```
//!
//! `--seconds` is the time for each row and each server (default 2, at most 60). Exit status:
//! 0 when exclusion held, 1 when it did not or a server failed, 2 for bad usage.

mod bench_support;

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use bench_support::{bare_server, role, unexpected, Server, SMALL_STACK};

// Every key has eight bytes, so that the bare server knows the sizes without parsing.
const ACQUIRE_LEN: usize = "l\nkey-0000\n10\n".len();
const RELEASE_LEN: usize = "r\nkey-0000\n0123456789abcdef0123456789abcdef\n".len();
const GRANTED: &[u8] = b"ok 0000000000000001000000000000000f 33\n";
const RELEASED: &[u8] = b"ok\n";

fn main() -> ExitCode {
    match role().as_deref() {
        Some("latchd") => latchd::latchd_main(),
        Some("echo") => report(bare_server(echo).map(|()| Exclusion::Held)),
        _ => match Plan::from_args(std::env::args().skip(1)) {
            Ok(plan) => report(measure(&plan)),
            Err(complaint) => {
                eprintln!("bench: {complaint}\nusage: bench [--quick] [--seconds 1..=60]");
                ExitCode::from(2)
            }
        },
    }
}

#[derive(PartialEq)]
enum Exclusion {
    Held,
    Violated,
}

fn report(outcome: io::Result<Exclusion>) -> ExitCode {
    match outcome {
        Ok(Exclusion::Held) => ExitCode::SUCCESS,
        Ok(Exclusion::Violated) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

struct Plan {
    /// For each row of the table and each of the two servers.
    per_row: Duration,
    /// How often a hang-up is timed.
    hangup_count: usize,
}

impl Plan {
    fn from_args(mut args: impl Iterator<Item = String>) -> Result<Plan, String> {
        let mut plan = Plan {
            per_row: Duration::from_secs(2),
            hangup_count: 200,
        };
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "--quick" => {
                    plan = Plan {
                        per_row: Duration::from_millis(200),
                        hangup_count: 20,
                    }
                }
                "--seconds" => {
                    let value = args.next().ok_or("--seconds needs a value")?;
                    match value.parse() {
                        Ok(seconds @ 1..=60) => plan.per_row = Duration::from_secs(seconds),
                        _ => return Err(format!("--seconds {value}: not from 1 to 60")),
                    }
                }
                // What `cargo bench` and `cargo test` add is not for us.
                "--bench" | "--test" => {}
                other => return Err(format!("unknown argument {other}")),
            }
        }
        Ok(plan)
    }
}

fn measure(plan: &Plan) -> io::Result<Exclusion> {
    let echo = start("echo")?;
    let latchd = start("latchd")?;
    let mut violation_count = 0;

    try_the_checker(&echo)?;

    heading();
    for keys in [Keys::Own, Keys::One] {
        for conn_count in [1, 16, 64, 256] {
            let ours = alternate(plan, &latchd, &echo, |addr, time| {
                pairs(addr, conn_count, keys, time, 0)
            })?;
            violation_count += ours.0.overlap_count + ours.0.disorder_count;
            row(
                &format!("{conn_count} on {}", keys.describe(conn_count)),
                ours,
            );
        }
    }
    let ours = alternate(plan, &latchd, &echo, |addr, time| connects(addr, 8, time))?;
    row("connect, lock, close (8 at a time)", ours);

    println!("\nhand-over                                        p50 ms     max ms");
    let expiry = expiries(latchd.addr, 20)?;
    violation_count += expiry.early_count;
    lateness("after the end of a lease (20 at once)", expiry.late);
    lateness(
        "after the holder hung up",
        holder_hangups(latchd.addr, plan.hangup_count)?,
    );
    lateness(
        "until a waiter that half-closed is dismissed",
        waiter_hangups(latchd.addr, plan.hangup_count)?,
    );

    println!("\nviolations of exclusion or of the order of fences, leases ended early: {violation_count}");
    Ok(if violation_count == 0 {
        Exclusion::Held
    } else {
        Exclusion::Violated
    })
}

/// A checker that has never found anything proves nothing. The bare server gives one token to
/// everybody, so both kinds of violation are there to be found.
fn try_the_checker(echo: &Server) -> io::Result<()> {
    let Tally {
        overlap_count,
        disorder_count,
        ..
    } = pairs(echo.addr, 16, Keys::One, Duration::from_millis(100), 1)?;
    if overlap_count == 0 || disorder_count == 0 {
        return Err(io::Error::other(
            "the checker missed what a server without locks does",
        ));
    }
    println!("tried on a server without locks, the checker found {overlap_count} overlaps, {disorder_count} fences out of order\n");
    Ok(())
}

// ---- the table -------------------------------------------------------------------------------

#[derive(Clone, Copy)]
enum Keys {
    Own,
    One,
}

impl Keys {
    fn describe(self, conn_count: usize) -> &'static str {
        match self {
            Keys::Own if conn_count == 1 => "its own key",
            Keys::Own => "their own keys",
            Keys::One => "one key",
        }
    }
}

/// What some rounds of one row came to.
#[derive(Default)]
struct Tally {
    round_trip_count: u64,
    elapsed: Duration,
    /// In nanoseconds; four seconds and more count as four.
    latencies: Vec<u32>,
    /// Grants of a key that somebody held.
    overlap_count: usize,
    /// Grants of a key whose fence was not above the last one.
    disorder_count: usize,
}

impl Tally {
    fn add(&mut self, other: Tally) {
        self.round_trip_count += other.round_trip_count;
        self.elapsed += other.elapsed;
        self.latencies.extend(other.latencies);
        self.overlap_count += other.overlap_count;
        self.disorder_count += other.disorder_count;
    }

    fn rate(&self) -> f64 {
        self.round_trip_count as f64 / self.elapsed.as_secs_f64()
    }

    fn record(&mut self, began: Instant) {
        self.round_trip_count += 1;
        self.latencies
            .push(u32::try_from(began.elapsed().as_nanos()).unwrap_or(u32::MAX));
    }
}

/// Runs one row on both servers in turn, in four rounds each. The first of a pair of rounds is
/// now the one and now the other, so that a machine that warms up or is called away favours
/// neither.
fn alternate(
    plan: &Plan,
    latchd: &Server,
    echo: &Server,
    round: impl Fn(SocketAddr, Duration) -> io::Result<Tally>,
) -> io::Result<(Tally, Tally)> {
    let (mut ours, mut bare) = (Tally::default(), Tally::default());
    for number in 0..4 {
        let time = plan.per_row / 4;
        if number % 2 == 0 {
            ours.add(round(latchd.addr, time)?);
            bare.add(round(echo.addr, time)?);
        } else {
            bare.add(round(echo.addr, time)?);
            ours.add(round(latchd.addr, time)?);
        }
    }
    Ok((ours, bare))
}

fn heading() {
    println!("{:36}{:>30}   {:>30}", "", "latchd", "bare echo");
    let columns = format!("{:>10}{:>10}{:>10}", "ops/s", "p50 us", "p99 us");
    println!("{:36}{columns}   {columns}   ratio", "acquire and release");
}

fn row(name: &str, (ours, bare): (Tally, Tally)) {
    let ratio = ours.rate() / bare.rate();
    println!("{name:36}{}   {}{ratio:8.2}", columns(ours), columns(bare));
}

fn columns(mut tally: Tally) -> String {
    let rate = tally.rate();
    tally.latencies.sort_unstable();
    let micros = |share| f64::from(percentile(&tally.latencies, share)) / 1e3;
    format!("{rate:10.0}{:10.1}{:10.1}", micros(0.5), micros(0.99))
}

fn lateness(name: &str, mut seconds: Vec<f64>) {
    seconds.sort_unstable_by(f64::total_cmp);
    println!(
        "{name:44}{:11.3}{:11.3}",
        percentile(&seconds, 0.5) * 1e3,
        percentile(&seconds, 1.0) * 1e3
    );
}

fn percentile<T: Copy + Default>(sorted: &[T], share: f64) -> T {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or_default()
}

// ---- rates -----------------------------------------------------------------------------------

/// What the clients know of one key while its grants go round.
#[derive(Default)]
struct Watch {
    holder_count: AtomicUsize,
    last_fence: AtomicU64,
    overlap_count: AtomicUsize,
    disorder_count: AtomicUsize,
}

impl Watch {
    fn enter(&self, fence: u64) {
        if self.holder_count.fetch_add(1, Ordering::SeqCst) != 0 {
            self.overlap_count.fetch_add(1, Ordering::Relaxed);
        }
        if self.last_fence.swap(fence, Ordering::SeqCst) >= fence {
            self.disorder_count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Must come before the release is sent: after it the key may be anybody's.
    fn leave(&self) {
        self.holder_count.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Acquires and releases over `conn_count` connections for so long. `linger` is for trying the
/// checker: so many milliseconds between the two.
fn pairs(
    addr: SocketAddr,
    conn_count: usize,
    keys: Keys,
    time: Duration,
    linger: u64,
) -> io::Result<Tally> {
    let watches: Vec<Watch> = (0..conn_count).map(|_| Watch::default()).collect();
    let clients = (0..conn_count)
        .map(|_| Client::connect(addr))
        .collect::<io::Result<Vec<_>>>()?;
    let (start, stop) = (Barrier::new(conn_count + 1), AtomicBool::new(false));

    let mut sum = Tally::default();
    thread::scope(|scope| -> io::Result<()> {
        let mut threads = Vec::new();
        for (index, mut client) in clients.into_iter().enumerate() {
            let key = match keys {
                Keys::Own => index,
                Keys::One => 0,
            };
            let (watch, start, stop) = (&watches[key], &start, &stop);
            let work = move || -> io::Result<Tally> {
                let mut tally = Tally::default();
                start.wait();
                start.wait();
                while !stop.load(Ordering::Relaxed) {
                    client.pair(&format!("key-{key:04}"), watch, linger, &mut tally)?;
                }
                Ok(tally)
            };
            threads.push(
                thread::Builder::new()
                    .stack_size(SMALL_STACK)
                    .spawn_scoped(scope, work)?,
            );
        }
        start.wait(); // all are there,
        let began = Instant::now();
        start.wait(); // and none begins before the clock does, even if we are the last to wake
        thread::sleep(time);
        stop.store(true, Ordering::Relaxed);
        for thread in threads {
            sum.add(thread.join().expect("clients return their errors")?);
        }
        // Whoever waits at the stop is still served, and both are counted: the round trip and its
        // time.
        sum.elapsed = began.elapsed();
        Ok(())
    })?;
    for watch in &watches {
        sum.overlap_count += watch.overlap_count.load(Ordering::Relaxed);
        sum.disorder_count += watch.disorder_count.load(Ordering::Relaxed);
    }
    Ok(sum)
}

/// Connects, locks and closes, over and over, in so many threads. Every connection leaves a port
/// in TIME_WAIT, so there are at most two thousand in a round, or they would run out.
fn connects(addr: SocketAddr, thread_count: usize, time: Duration) -> io::Result<Tally> {
    let began = Instant::now();
    let mut sum = Tally::default();
    thread::scope(|scope| -> io::Result<()> {
        let work = |index| {
            move || -> io::Result<Tally> {
                let key = format!("new-{index:04}");
                let mut tally = Tally::default();
                while began.elapsed() < time && tally.round_trip_count < 2_000 / thread_count as u64
                {
                    let connecting = Instant::now();
                    let mut client = Client::connect(addr)?;
                    // The close of the last connection may still be under way: then this one
                    // waits for the key, which is part of what is measured.
                    client.request(&format!("l\n{key}\n10\n"))?;
                    client.granted()?;
                    drop(client);
                    tally.record(connecting);
                }
                Ok(tally)
            }
        };
        let threads: Vec<_> = (0..thread_count)
            .map(|index| scope.spawn(work(index)))
            .collect();
        for thread in threads {
            sum.add(thread.join().expect("clients return their errors")?);
        }
        Ok(())
    })?;
    sum.elapsed = began.elapsed();
    Ok(sum)
}

// ---- hand-over -------------------------------------------------------------------------------

#[derive(Default)]
struct Expiries {
    /// Seconds from the end of the lease, as its holder counts it, to the next grant.
    late: Vec<f64>,
    early_count: usize,
}

/// Lets leases of one second run out, all at once, each with a waiter behind it.
fn expiries(addr: SocketAddr, key_count: usize) -> io::Result<Expiries> {
    const LEASE: Duration = Duration::from_secs(1);
    let one = |index| -> io::Result<(f64, bool)> {
        let key = format!("exp-{index:04}");
        let (mut holder, mut waiter) = (Client::connect(addr)?, Client::connect(addr)?);
        let asked = Instant::now();
        holder.request(&format!("l\n{key}\n10 1\n"))?;
        holder.granted()?;
        let told = Instant::now();
        waiter.request(&format!("l\n{key}\n10\n"))?;
        waiter.granted()?;
        let granted = Instant::now();
        // The lease began between the question and the answer: it ends no sooner than the one
        // and no later than the other, each a lease on.
        let late = granted.duration_since(told).as_secs_f64() - LEASE.as_secs_f64();
        Ok((late.max(0.0), granted < asked + LEASE))
    };
    let mut sum = Expiries::default();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..key_count)
            .map(|index| scope.spawn(move || one(index)))
            .collect();
        for thread in threads {
            let (late, early) = thread.join().expect("clients return their errors")?;
            sum.late.push(late);
            sum.early_count += usize::from(early);
        }
        Ok(sum)
    })
}

/// Seconds from the holder's close to the waiter's grant.
fn holder_hangups(addr: SocketAddr, count: usize) -> io::Result<Vec<f64>> {
    let one = |index| {
        let mut holder = Client::connect(addr)?;
        holder.request(&format!("l\ngon-{index:04}\n10\n"))?;
        holder.granted()?;
        let mut waiter = waiter(addr, &format!("gon-{index:04}"))?;
        let began = Instant::now();
        drop(holder);
        waiter.granted()?;
        Ok(began.elapsed().as_secs_f64())
    };
    (0..count).map(one).collect()
}

/// Seconds from a waiter's half-close to the answer that dismisses it.
fn waiter_hangups(addr: SocketAddr, count: usize) -> io::Result<Vec<f64>> {
    let mut holder = Client::connect(addr)?;
    holder.request("l\nkey-busy\n10\n")?;
    holder.granted()?;
    let one = |_| {
        let mut waiter = waiter(addr, "key-busy")?;
        let began = Instant::now();
        waiter.stream.shutdown(Shutdown::Write)?;
        match waiter.reply()? {
            b"error\n" => Ok(began.elapsed().as_secs_f64()),
            other => Err(unexpected(other)),
        }
    };
    (0..count).map(one).collect()
}

/// A connection that is in the queue and blocks.
fn waiter(addr: SocketAddr, key: &str) -> io::Result<Client> {
    let mut waiter = Client::connect(addr)?;
    waiter.request(&format!("e\n{key}\n\n"))?;
    match waiter.reply()? {
        b"queued\n" => {}
        other => return Err(unexpected(other)),
    }
    waiter.request(&format!("w\n{key}\n10\n"))?;
    thread::sleep(Duration::from_millis(2)); // the `w` has been read by then, on most days
    Ok(waiter)
}

// ---- the client ------------------------------------------------------------------------------

struct Client {
    stream: TcpStream,
    buffer: [u8; 256],
}

impl Client {
    fn connect(addr: SocketAddr) -> io::Result<Client> {
        let stream = TcpStream::connect(addr)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?; // nothing here may hang
        Ok(Client {
            stream,
            buffer: [0; 256],
        })
    }

    /// One acquire and one release, watched.
    fn pair(&mut self, key: &str, watch: &Watch, linger: u64, tally: &mut Tally) -> io::Result<()> {
        let acquiring = Instant::now();
        self.request(&format!("l\n{key}\n10\n"))?;
        let token = self.granted()?;
        tally.record(acquiring);

        watch.enter(u64::from_str_radix(&token[..16], 16).map_err(io::Error::other)?);
        if linger > 0 {
            thread::sleep(Duration::from_millis(linger));
        }
        watch.leave();

        let releasing = Instant::now();
        self.request(&format!("r\n{key}\n{token}\n"))?;
        match self.reply()? {
            RELEASED => tally.record(releasing),
            other => return Err(unexpected(other)),
        }
        Ok(())
    }

    fn request(&mut self, request: &str) -> io::Result<()> {
        self.stream.write_all(request.as_bytes())
    }

    /// The token of a grant.
    fn granted(&mut self) -> io::Result<String> {
        let reply = self.reply()?;
        match reply.strip_prefix(b"ok ").and_then(|rest| rest.get(..32)) {
            Some(token) if token.iter().all(u8::is_ascii_hexdigit) => {
                Ok(String::from_utf8_lossy(token).into_owned())
            }
            _ => Err(unexpected(reply)),
        }
    }

    /// One line, its end included.
    fn reply(&mut self) -> io::Result<&[u8]> {
        let mut len = 0;
        while !self.buffer[..len].ends_with(b"\n") {
            match self.stream.read(&mut self.buffer[len..])? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => len += read,
            }
        }
        Ok(&self.buffer[..len])
    }
}

// ---- the servers -----------------------------------------------------------------------------

fn start(role: &str) -> io::Result<Server> {
    Server::start(role, |command| {
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy();
            if name.starts_with("LATCHD_") || name.starts_with("DFLOCKD_") {
                command.env_remove(&*name);
            }
        }
        command.args(["--port", "0"]);
    })
}

fn echo(mut stream: TcpStream) -> io::Result<()> {
    let mut request = [0; 64];
    stream.set_nodelay(true)?;
    loop {
        stream.read_exact(&mut request[..ACQUIRE_LEN])?;
        stream.write_all(GRANTED)?;
        stream.read_exact(&mut request[..RELEASE_LEN])?;
        stream.write_all(RELEASED)?;
    }
}
