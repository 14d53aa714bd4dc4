//! How many claims a second the servers grant, in turns.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use crate::load::{hold, key_name, Client, Load, Tally};
use crate::machine::{cpu_time, Usage};
use crate::peers::{Server, Spec, SMALL_STACK};
use crate::report::{self, Outcome};
use crate::Plan;

/// How many may hold the key of a semaphore.
const SEMAPHORE_LIMIT: u32 = 4;

/// Requests in flight on a connection that pipelines.
pub const IN_FLIGHT: usize = 64;

/// The lease of keys that are only there, in seconds: longer than a scenario lasts.
const LONG_LEASE: u32 = 3600;

/// A round that is prepared: its connections are there.
type Run<'a> = Box<dyn FnMut(Duration) -> io::Result<Tally> + 'a>;

/// What each connection does, over and over.
#[derive(Clone, Copy, Debug)]
pub enum Work {
    /// Each acquires and releases a key of its own.
    OwnKeys,
    /// All acquire and release one key.
    OneKey,
    /// Two share a key.
    Pairs,
    /// All share a semaphore.
    Semaphore,
    /// As own keys, with many keys and requests in flight on each connection.
    Pipeline,
    /// Each connects, locks, releases and closes.
    Connect,
}

impl Work {
    fn usual_counts(self) -> &'static [usize] {
        match self {
            Work::OwnKeys => &[1, 16, 256, 1000],
            Work::OneKey => &[2, 16, 256],
            Work::Pairs | Work::Semaphore => &[16, 256],
            Work::Pipeline => &[1],
            Work::Connect => &[8],
        }
    }

    pub fn title(self, count: usize) -> String {
        let s = if count == 1 { "" } else { "s" };
        match self {
            Work::OwnKeys => format!("own keys, {count} connection{s}"),
            Work::OneKey => format!("one key, {count} connection{s}"),
            Work::Pairs => format!("a key for each two, {count} connection{s}"),
            Work::Semaphore => {
                format!("a semaphore of {SEMAPHORE_LIMIT}, {count} connection{s}")
            }
            Work::Pipeline => format!("{IN_FLIGHT} in flight, {count} connection{s}"),
            Work::Connect => format!("connect, lock, release, close, {count} at a time"),
        }
    }

    /// The servers that can do it: where a key is contended, a client must be able to wait.
    fn specs(self, plan: &Plan) -> Vec<Spec> {
        let mut specs = plan.specs();
        if matches!(self, Work::OneKey | Work::Pairs | Work::Semaphore) {
            specs.retain(|spec| spec.dialect().can_wait());
        }
        specs
    }

    fn prepare(self, server: &Server, count: usize) -> io::Result<Run<'_>> {
        let mut load = match self {
            Work::OwnKeys => Load::own_keys(server, count)?,
            Work::OneKey => Load::one_key(server, count, 1)?,
            Work::Pairs => Load::pairs(server, count)?,
            Work::Semaphore => Load::one_key(server, count, SEMAPHORE_LIMIT)?,
            Work::Pipeline => Load::pipelined(server, count, IN_FLIGHT)?,
            Work::Connect => return connecting(server, count),
        };
        Ok(Box::new(move |time| load.run(time)))
    }
}

/// Measures `work` for each number of connections.
pub fn rates(plan: &Plan, work: Work) -> io::Result<()> {
    for count in plan.connections_or(work.usual_counts()) {
        rate(plan, work, count)?;
    }
    Ok(())
}

/// Measures and prints one row of figures for each server that can do the work.
pub fn rate(plan: &Plan, work: Work, count: usize) -> io::Result<Vec<Outcome>> {
    let servers = start(plan, &work.specs(plan))?;
    compare(plan, &work.title(count), &servers, |server| {
        work.prepare(server, count)
    })
}

fn start(plan: &Plan, specs: &[Spec]) -> io::Result<Vec<Server>> {
    specs.iter().map(|spec| spec.start(plan)).collect()
}

/// Own keys beside connections that do nothing.
pub fn idle(plan: &Plan) -> io::Result<()> {
    for idle_count in plan.counts_or(&[0, 1000]) {
        for count in plan.connections_or(&[16]) {
            let title = format!("{} beside {idle_count} idle", Work::OwnKeys.title(count));
            let servers = start(plan, &plan.specs())?;
            compare(plan, &title, &servers, |server| {
                let idle = idle_connections(server, idle_count)?;
                let mut load = Load::own_keys(server, count)?;
                Ok(Box::new(move |time| {
                    let _open = &idle;
                    load.run(time)
                }))
            })?;
        }
    }
    Ok(())
}

/// Connections that have asked nothing yet.
pub fn idle_connections(server: &Server, count: usize) -> io::Result<Vec<Client>> {
    (0..count)
        .map(|at| Client::connect(server, &key_name("own", at)))
        .collect()
}

/// Own keys while the server knows others, which are held.
pub fn growth(plan: &Plan) -> io::Result<()> {
    for count in plan.connections_or(&[16]) {
        let (mut servers, mut holders) = (vec![Spec::Bare.start(plan)?], Vec::new());
        for spec in plan.latch_specs() {
            for key_count in plan.counts_or(&[0, 10_000, 1_000_000]) {
                let mut server = spec.start(plan)?;
                holders.push(hold(&server, "other", key_count, LONG_LEASE)?);
                server.name = format!("{}, {key_count}", server.name);
                servers.push(server);
            }
        }
        let title = format!("{} beside other keys", Work::OwnKeys.title(count));
        compare(plan, &title, &servers, |server| {
            Work::OwnKeys.prepare(server, count)
        })?;
    }
    Ok(())
}

/// As many threads as `count` connect, lock, release and close, over and over.
fn connecting(server: &Server, count: usize) -> io::Result<Run<'_>> {
    let keys: Vec<String> = (0..count).map(|at| key_name("own", at)).collect();
    server.seed(keys.iter().map(|key| (key.as_str(), 1)))?;
    Ok(Box::new(move |time| {
        let began = Instant::now();
        let mut sum = Tally::default();
        thread::scope(|scope| {
            let mut threads = Vec::new();
            for key in &keys {
                let thread = thread::Builder::new().stack_size(SMALL_STACK);
                let work = move || connect_for(server, key, began + time);
                threads.push(thread.spawn_scoped(scope, work)?);
            }
            for thread in threads {
                let tally = thread.join().expect("clients return their errors")?;
                sum.grant_count += tally.grant_count;
                sum.latencies.extend(tally.latencies);
                sum.disorder_count += tally.disorder_count;
            }
            io::Result::Ok(())
        })?;
        sum.elapsed = began.elapsed();
        Ok(sum)
    }))
}

fn connect_for(server: &Server, key: &str, until: Instant) -> io::Result<Tally> {
    let mut tally = Tally::default();
    let mut last_fence = 0;
    while tally.grant_count == 0 || Instant::now() < until {
        let began = Instant::now();
        let mut client = Client::connect(server, key)?;
        let (token, fence) = client.acquire(key)?;
        client.release(key, &token)?;
        drop(client);
        tally.grant_count += 1;
        let nanos = began.elapsed().as_nanos();
        tally
            .latencies
            .push(u32::try_from(nanos).unwrap_or(u32::MAX));
        if let Some(fence) = fence {
            tally.disorder_count += usize::from(fence <= last_fence);
            last_fence = fence;
        }
    }
    Ok(tally)
}

/// Lets the servers take turns, and prints what they came to.
fn compare<'a>(
    plan: &Plan,
    title: &str,
    servers: &'a [Server],
    prepare: impl Fn(&'a Server) -> io::Result<Run<'a>>,
) -> io::Result<Vec<Outcome>> {
    let outcomes = take_turns(plan, servers, prepare)?;
    report::print(&format!("{title}, {}", plan.cores), &outcomes);
    for (server, outcome) in servers.iter().zip(&outcomes) {
        if server.dialect.excludes() && outcome.violation_count > 0 {
            let (name, count) = (&server.name, outcome.violation_count);
            let message = format!("{name}: {count} overlaps or fences out of order");
            return Err(io::Error::other(message));
        }
    }
    Ok(outcomes)
}

/// Runs the rounds. Another server begins in each, so that a machine that warms up or is called
/// away favours none.
fn take_turns<'a>(
    plan: &Plan,
    servers: &'a [Server],
    prepare: impl Fn(&'a Server) -> io::Result<Run<'a>>,
) -> io::Result<Vec<Outcome>> {
    let mut outcomes: Vec<Outcome> = servers.iter().map(|it| Outcome::new(&it.name)).collect();
    for round in 0..plan.rounds {
        for turn in 0..servers.len() {
            let at = (round + turn) % servers.len();
            let server = &servers[at];
            let failed = |error| io::Error::other(format!("{}: {error}", server.name));
            let mut run = prepare(server).map_err(failed)?;
            run(plan.time / 10).map_err(failed)?; // the threads and buffers are there now
            let (before, began) = (usage(server)?, cpu_time(std::process::id())?);
            let tally = run(plan.time).map_err(failed)?;
            let (generator, after) = (cpu_time(std::process::id())? - began, usage(server)?);
            outcomes[at].add(tally, after.since(before), generator);
        }
    }
    Ok(outcomes)
}

/// What the server has used, if this program started it.
fn usage(server: &Server) -> io::Result<Usage> {
    let used = server.process().map(Usage::of).transpose()?;
    Ok(used.unwrap_or_default())
}

/// A checker that has never found anything proves nothing. The bare server grants everything with
/// one fence, so both kinds of violation are there.
pub fn try_the_checker(plan: &Plan) -> io::Result<()> {
    let bare = Spec::Bare.start(plan)?;
    let mut load = Load::one_key(&bare, 16, 1)?;
    let (mut overlap_count, mut disorder_count) = (0, 0);
    // On a single core or a busy machine, the clients may not meet at once.
    for _ in 0..200 {
        let tally = load.run(Duration::from_millis(50))?;
        overlap_count += tally.overlap_count;
        disorder_count += tally.disorder_count;
        if overlap_count > 0 && disorder_count > 0 {
            return Ok(());
        }
    }
    let message = "the checker missed what a server without locks does";
    Err(io::Error::other(message))
}
