//! What a server takes while it does nothing: disk, time to start, memory.

use std::fs;
use std::io;
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use crate::load::{hold, key_name, Client};
use crate::machine::resident;
use crate::peers::{Dialect, Server, Spec};
use crate::report::median;
use crate::scenarios::idle_connections;
use crate::{built, Plan};

/// The longest time for which the memory of a server is watched for a change to end.
const SETTLING_TIME: Duration = Duration::from_secs(2);

pub fn measure(plan: &Plan) -> io::Result<()> {
    let counts = plan.counts_or(&[1000, 100_000, 10_000]);
    let at = |index: usize| counts.get(index).or(counts.last()).copied().unwrap_or(1);
    let (connection_count, lock_count, closed_count) = (at(0), at(1), at(2));
    println!("size of the programs, in bytes");
    for program in ["latchd", "latch", "sema", "lfpd"] {
        println!(
            "  {program:<20} {:>9}",
            fs::metadata(built(program)?)?.len()
        );
    }
    if let Ok(all) = built("latch-all") {
        println!("  {:<20} {:>9}", "latch-all", fs::metadata(all)?.len());
    }
    println!("\nservers: memory of {connection_count} idle connections and waiters, {lock_count} held locks, and after {closed_count} connections have closed");
    println!(
        "  {:<20} {:>9} {:>9} {:>9} {:>11} {:>9} {:>10} {:>10}",
        "", "size", "start ms", "idle KB", "KB/connect.", "B/lock", "KB/waiter", "closed KB"
    );
    for spec in plan.specs() {
        footprint(plan, &spec, connection_count, lock_count, closed_count)?;
    }
    Ok(())
}

fn footprint(
    plan: &Plan,
    spec: &Spec,
    connection_count: usize,
    lock_count: usize,
    closed_count: usize,
) -> io::Result<()> {
    let Some(program) = spec.program() else {
        return Ok(()); // it runs elsewhere
    };
    let mut starts = Vec::new();
    for _ in 0..plan.rounds {
        let began = Instant::now();
        let server = spec.start(plan)?;
        TcpStream::connect(server.addr)?;
        starts.push(began.elapsed().as_secs_f64() * 1e3);
    }
    let server = spec.start(plan)?;
    let process = server.process().expect("just started");
    let alone = settled(process)?;

    let idle = idle_connections(&server, connection_count)?;
    let per_connection = per_one(settled(process)?, alone, connection_count);
    let per_waiter = if server.dialect.can_wait() && server.dialect.excludes() {
        Some(waiting(&server, process, idle)?)
    } else {
        None
    };
    let server = spec.start(plan)?;
    let process = server.process().expect("just started");
    let per_lock = match server.dialect {
        Dialect::Bare | Dialect::RedisList | Dialect::Beanstalkd => None,
        _ => {
            let before = settled(process)?;
            let holder = hold(&server, "held", lock_count, 3600)?;
            let after = settled(process)?;
            drop(holder);
            Some(per_one(after, before, lock_count))
        }
    };
    let server = spec.start(plan)?;
    drop(idle_connections(&server, closed_count)?);
    let closed = settled(server.process().expect("just started"))?;

    // The bare server is a part of this program.
    let size = match server.dialect {
        Dialect::Bare => "-".to_owned(),
        _ => fs::metadata(program)?.len().to_string(),
    };
    let shown = |figure: Option<f64>| figure.map_or("-".to_owned(), |it| format!("{it:.1}"));
    println!(
        "  {:<20} {:>9} {:>9.2} {:>9} {:>11.1} {:>9} {:>10} {:>10}",
        server.name,
        size,
        median(&starts),
        alone / 1024,
        per_connection / 1024.0,
        shown(per_lock),
        shown(per_waiter.map(|bytes| bytes / 1024.0)),
        closed / 1024
    );
    Ok(())
}

/// The memory that each of the connections takes beside its own when it waits for one key.
fn waiting(server: &Server, process: u32, mut idle: Vec<Client>) -> io::Result<f64> {
    // The clients of beanstalkd wait for tubes of their own, which takes as much.
    let key = key_name("own", 0);
    server.seed([(key.as_str(), 1)].into_iter())?;
    let mut holder = Client::connect(server, &key)?;
    holder.acquire(&key)?;
    let before = settled(process)?;
    for client in &mut idle {
        client.send_acquire(&key)?;
    }
    Ok(per_one(settled(process)?, before, idle.len()))
}

fn per_one(after: u64, before: u64, count: usize) -> f64 {
    after.saturating_sub(before) as f64 / count.max(1) as f64
}

/// The memory of a process once it has not changed for a while.
fn settled(process: u32) -> io::Result<u64> {
    let deadline = Instant::now() + SETTLING_TIME;
    let (mut last, mut same_count) = (0, 0);
    while same_count < 3 && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(100));
        let now = resident(process)?;
        same_count = if now == last { same_count + 1 } else { 0 };
        last = now;
    }
    Ok(last)
}
