//! What users feel: how long a grant takes while the server is far from its limit.
//!
//! Each connection claims a key of its own at fixed times, whatever became of its last claim. The
//! time of a grant counts from when its claim was due, so a server that falls behind is not spared
//! the claims that it delays.

use std::fs;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

use crate::load::{key_name, Client};
use crate::peers::{Server, Spec, SMALL_STACK};
use crate::report::{spread, spread_heading};
use crate::Plan;

/// Claims a second, over all connections.
pub const RATE: u32 = 1000;

const USUAL_COUNTS: &[usize] = &[16];

/// A connection that can take and give back its key, over and over. It returns when it was granted.
pub type Pair<'a> = Box<dyn FnMut() -> io::Result<Instant> + Send + 'a>;

/// Measures the bare server, ours, the first of ours with a fence file, and the peers.
pub fn measure(plan: &Plan) -> io::Result<()> {
    let directory = plan
        .directory
        .join(format!("bench-paced-{}", std::process::id()));
    fs::create_dir_all(&directory)?;
    let mut specs = plan.specs();
    if let Some(Spec::Latchd {
        name,
        binary,
        arguments,
    }) = plan.ours.first()
    {
        let fences = directory.join("fences").display().to_string();
        let arguments = arguments.clone().into_iter();
        let with_file = Spec::Latchd {
            name: format!("{name}, fence file"),
            binary: binary.clone(),
            arguments: arguments
                .chain(["--fence-state-file".to_owned(), fences])
                .collect(),
        };
        specs.insert(1 + plan.ours.len(), with_file);
    }
    let measured = measure_all(plan, &specs);
    fs::remove_dir_all(&directory)?;
    measured
}

fn measure_all(plan: &Plan, specs: &[Spec]) -> io::Result<()> {
    let servers: io::Result<Vec<Server>> = specs.iter().map(|spec| spec.start(plan)).collect();
    let servers = servers?;
    for count in plan.connections_or(USUAL_COUNTS) {
        let mut times = vec![Vec::new(); servers.len()];
        for round in 0..plan.rounds {
            for turn in 0..servers.len() {
                let at = (round + turn) % servers.len();
                let server = &servers[at];
                let pairs = (0..count).map(|number| pair(server, &key_name("own", number)));
                let pairs: io::Result<Vec<Pair>> = pairs.collect();
                let failed = |error| io::Error::other(format!("{}: {error}", server.name));
                let round = pairs.and_then(|pairs| run(pairs, plan.time));
                times[at].extend(round.map_err(failed)?);
            }
        }
        spread_heading(&title(count, plan));
        for (server, times) in servers.iter().zip(&times) {
            spread(&server.name, times);
        }
        println!();
    }
    Ok(())
}

pub fn title(count: usize, plan: &Plan) -> String {
    let cores = plan.cores;
    format!("a grant at {RATE} a second, {count} connections, {cores}")
}

fn pair<'a>(server: &Server, key: &str) -> io::Result<Pair<'a>> {
    server.seed([(key, 1)].into_iter())?;
    let (mut client, key) = (Client::connect(server, key)?, key.to_owned());
    Ok(Box::new(move || {
        let (token, _) = client.acquire(&key)?;
        let granted_at = Instant::now();
        client.release(&key, &token)?;
        Ok(granted_at)
    }))
}

/// Lets each connection claim at its times, for so long. Returns how long the grants took, in
/// seconds.
pub fn run(pairs: Vec<Pair>, time: Duration) -> io::Result<Vec<f64>> {
    let connection_count = u32::try_from(pairs.len()).expect("they are few");
    let interval = Duration::from_secs(1) * connection_count / RATE;
    let began = Instant::now();
    let mut all = Vec::new();
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for (at, pair) in (0..connection_count).zip(pairs) {
            // Their times are spread evenly.
            let first = began + interval * at / connection_count;
            let thread = thread::Builder::new().stack_size(SMALL_STACK);
            let work = move || claim_at(first, interval, began + time, pair);
            threads.push(thread.spawn_scoped(scope, work)?);
        }
        for thread in threads {
            all.extend(thread.join().expect("clients return their errors")?);
        }
        io::Result::Ok(())
    })?;
    Ok(all)
}

fn claim_at(
    first: Instant,
    interval: Duration,
    end: Instant,
    mut pair: Pair,
) -> io::Result<Vec<f64>> {
    let mut times = Vec::new();
    let mut due = first;
    while due < end {
        thread::sleep(due.saturating_duration_since(Instant::now()));
        times.push(pair()?.duration_since(due).as_secs_f64());
        due += interval;
    }
    Ok(times)
}
