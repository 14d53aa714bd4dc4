//! What the servers are asked to do.

use std::io;
use std::time::Duration;

use crate::load::{Load, Tally};
use crate::machine::{cpu_time, Usage};
use crate::peers::{Server, Spec};
use crate::report::{self, Outcome};
use crate::Plan;

/// Own keys and one key, with so many connections.
pub fn own_keys(plan: &Plan) -> io::Result<()> {
    for count in plan.connections_or(&[1, 16, 256, 1000]) {
        let title = format!("own keys, {count} connections, {}", plan.cores());
        rates(plan, &title, &plan.specs(), |server| {
            Load::own_keys(server, count)
        })?;
    }
    Ok(())
}

pub fn one_key(plan: &Plan) -> io::Result<()> {
    for count in plan.connections_or(&[2, 16, 256]) {
        let title = format!("one key, {count} connections, {}", plan.cores());
        rates(plan, &title, &waiting(plan), |server| {
            Load::one_key(server, count, 1)
        })?;
    }
    Ok(())
}

/// The servers whose clients can wait.
fn waiting(plan: &Plan) -> Vec<Spec> {
    let mut specs = plan.specs();
    specs.retain(|spec| spec.dialect().can_wait());
    specs
}

/// Starts the servers, lets them take turns, and prints what they came to.
fn rates(
    plan: &Plan,
    title: &str,
    specs: &[Spec],
    prepare: impl Fn(&Server) -> io::Result<Load>,
) -> io::Result<Vec<Outcome>> {
    let servers = specs
        .iter()
        .map(|spec| spec.start(plan))
        .collect::<io::Result<Vec<_>>>()?;
    let outcomes = take_turns(plan, &servers, |server| {
        let mut load = prepare(server)?;
        Ok(move |time| load.run(time))
    })?;
    report::print(title, &outcomes);
    expect_exclusion(&servers, &outcomes)?;
    Ok(outcomes)
}

/// Runs the rounds. Another server begins in each, so that a machine that warms up or is called
/// away favours none.
fn take_turns<R: FnMut(Duration) -> io::Result<Tally>>(
    plan: &Plan,
    servers: &[Server],
    prepare: impl Fn(&Server) -> io::Result<R>,
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

fn expect_exclusion(servers: &[Server], outcomes: &[Outcome]) -> io::Result<()> {
    for (server, outcome) in servers.iter().zip(outcomes) {
        if server.dialect.excludes() && outcome.violation_count > 0 {
            let (name, count) = (&server.name, outcome.violation_count);
            let message = format!("{name}: {count} overlaps or fences out of order");
            return Err(io::Error::other(message));
        }
    }
    Ok(())
}

/// A checker that has never found anything proves nothing. The bare server grants everything with
/// one fence, so both kinds of violation are there.
pub fn try_the_checker(plan: &Plan) -> io::Result<()> {
    let bare = Spec::Bare.start(plan)?;
    let tally = Load::one_key(&bare, 16, 1)?.run(Duration::from_millis(50))?;
    match tally.overlap_count > 0 && tally.disorder_count > 0 {
        true => Ok(()),
        false => Err(io::Error::other(
            "the checker missed what a server without locks does",
        )),
    }
}
