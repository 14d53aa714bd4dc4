//! The cost of a lock file, compared with the cost of the file alone.
//!
//! Measures acquire and release, with and without fsync, against a bare `open(O_EXCL)`, `write` and
//! `unlink`; the time from a release to the next grant, against a waiter that polls every 100 ms;
//! and `sema try --no-sync` as a process, against `flock -n`.
//!
//! One run measures all figures of a row in turns, so that the *ratio* is comparable between
//! machines. The other figures are not.

use std::error::Error;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use latchd::lockfile::{Semaphore, SemaphoreConfig, SemaphoreOptions};

use crate::report::median;
use crate::{built, Plan};

const POLL: Duration = Duration::from_millis(100);

type Outcome<T> = Result<T, Box<dyn Error>>;

pub fn measure(plan: &Plan) -> io::Result<()> {
    let directory = tempfile::tempdir_in(&plan.directory)?;
    measure_in(plan, directory.path()).map_err(|error| io::Error::other(error.to_string()))
}

fn measure_in(plan: &Plan, directory: &Path) -> Outcome<()> {
    rates(plan, directory)?;
    for count in plan.counts_or(&[100]) {
        handovers(count, directory)?;
        processes(count, directory)?;
    }
    Ok(())
}

/// Acquire and release, in pairs a second.
fn rates(plan: &Plan, directory: &Path) -> Outcome<()> {
    let path = directory.join("rate.lock");
    let with = |is_synced| {
        let options = SemaphoreOptions::new().sync(is_synced);
        Semaphore::with_options(&path, SemaphoreConfig::default(), options)
    };
    let (quick, durable) = (with(false)?, with(true)?);
    let bare = |is_synced: bool| -> Outcome<()> {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&path)?;
        file.write_all(b"pid=12345\ntimestamp=1703520000\n")?;
        if is_synced {
            file.sync_all()?;
        }
        Ok(fs::remove_file(&path)?)
    };
    let locked = |semaphore: &Semaphore| -> Outcome<()> { Ok(semaphore.try_acquire()?.release()?) };
    let mut rates = [const { Vec::new() }; 4];
    for _ in 0..plan.rounds {
        rates[0].push(rate(plan.time, || bare(false))?);
        rates[1].push(rate(plan.time, || locked(&quick))?);
        rates[2].push(rate(plan.time, || bare(true))?);
        rates[3].push(rate(plan.time, || locked(&durable))?);
    }
    let [bare_quick, ours_quick, bare_durable, ours_durable] = rates.map(|rates| median(&rates));
    println!("acquire+release/s      bare file      lock file   ratio");
    println!(
        "  without fsync     {bare_quick:>12.0}   {ours_quick:>12.0}   {:>5.2}",
        ours_quick / bare_quick
    );
    println!(
        "  with fsync        {bare_durable:>12.0}   {ours_durable:>12.0}   {:>5.2}",
        ours_durable / bare_durable
    );
    Ok(())
}

/// How often `act` succeeds in a second.
fn rate(time: Duration, mut act: impl FnMut() -> Outcome<()>) -> Outcome<f64> {
    let start = Instant::now();
    let mut count = 0_u32;
    while start.elapsed() < time {
        act()?;
        count += 1;
    }
    Ok(f64::from(count) / start.elapsed().as_secs_f64())
}

/// The time from a release to the grant of the waiter.
fn handovers(count: usize, directory: &Path) -> Outcome<()> {
    let path = directory.join("handover.lock");
    let woken = handover(count, &path, |path| {
        let semaphore = Semaphore::with_defaults(path).expect("a path");
        let guard = semaphore.acquire().expect("the lock");
        let granted = Instant::now();
        drop(guard);
        granted
    })?;
    let polled = handover(count, &path, |path| loop {
        match OpenOptions::new().write(true).create_new(true).open(path) {
            Ok(_) => {
                let granted = Instant::now();
                fs::remove_file(path).expect("our file");
                return granted;
            }
            Err(_) => thread::sleep(POLL),
        }
    })?;
    println!("release to grant, ms     polling      lock file   ratio");
    println!(
        "  median            {polled:>12.2}   {woken:>12.2}   {:>5.3}",
        woken / polled
    );
    Ok(())
}

/// The median, in milliseconds.
fn handover(count: usize, path: &Path, wait: impl Fn(&Path) -> Instant + Sync) -> Outcome<f64> {
    let semaphore = Semaphore::with_defaults(path)?;
    let mut late = Vec::new();
    for turn in 0..count {
        let guard = semaphore.try_acquire()?;
        let (sender, receiver) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| sender.send(wait(path)));
            // At varying times within the interval of the polling waiter.
            thread::sleep(Duration::from_millis(20 + (turn * 7 % 100) as u64));
            let released = Instant::now();
            drop(guard);
            late.push(receiver.recv()?.duration_since(released).as_secs_f64() * 1000.0);
            Ok::<(), Box<dyn Error>>(())
        })?;
    }
    Ok(median(&late))
}

/// Whole processes, from start to end.
fn processes(count: usize, directory: &Path) -> Outcome<()> {
    let sema = built("sema")?;
    let (ours, theirs) = (
        directory.join("process.lock"),
        directory.join("process.flock"),
    );
    let run = |command: &mut Command| -> Outcome<f64> {
        let start = Instant::now();
        let status = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .status()?;
        let took = start.elapsed().as_secs_f64() * 1000.0;
        if !status.success() {
            return Err(format!("{command:?}: {status}").into());
        }
        Ok(took)
    };
    let mut times = [const { Vec::new() }; 2];
    for _ in 0..count {
        times[0].push(run(Command::new("flock")
            .arg("-n")
            .arg(&theirs)
            .arg("true"))?);
        times[1].push(run(Command::new(&sema)
            .args(["try", "--no-sync"])
            .arg(&ours))?);
        fs::remove_file(&ours)?;
    }
    let [flock, sema] = times.map(|times| median(&times));
    println!("process, ms             flock -n       sema try   ratio");
    println!(
        "  median            {flock:>12.2}   {sema:>12.2}   {:>5.2}",
        sema / flock
    );
    Ok(())
}
