//! What `latch run` costs beside flock(1): both run `true` under a free lock, as whole processes,
//! from their start to their end.
//!
//! The two take turns, and which of them begins changes too, so that a machine that warms up or is
//! called away favours neither. `true` alone stands beside them as what the machine costs anyway.
//! The *ratio* of the medians can be compared between machines, the times cannot.
//!
//! ```text
//! cargo build --release && cargo run --release --example bench_startup -- [ROUNDS]
//! ```
//!
//! ROUNDS is how often each of them is run (default 500).

use std::env;
use std::error::Error;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn main() -> Result<(), Box<dyn Error>> {
    let round_count: usize = env::args().nth(1).as_deref().unwrap_or("500").parse()?;
    if round_count == 0 {
        return Err("there is nothing to measure in no rounds".into());
    }
    let (server, address) = Server::start()?;
    let file = env::temp_dir().join(format!("bench_startup.{}", std::process::id()));

    let mut latch = Command::new(sibling("latch")?);
    latch.args(["run", "bench", "--server", &address, "--", "true"]);
    let mut flock = Command::new("flock");
    flock.arg(&file).arg("true");
    let mut contenders = [
        ("latch run", latch),
        ("flock", flock),
        ("nothing", Command::new("true")),
    ];
    let mut times = [const { Vec::new() }; 3];
    for round in 0..round_count {
        for turn in 0..contenders.len() {
            let index = (round + turn) % contenders.len();
            times[index].push(time(&mut contenders[index].1)?);
        }
    }
    drop(server);
    let _ = std::fs::remove_file(file);

    println!("{round_count} times `true` under     p50 us    p90 us");
    for ((name, _), times) in contenders.iter().zip(&mut times) {
        times.sort_unstable();
        let micros = |index: usize| times[index].as_secs_f64() * 1e6;
        println!(
            "{name:26}{:10.0}{:10.0}",
            micros(round_count / 2),
            micros(round_count * 9 / 10)
        );
    }
    let median = |index: usize| times[index][round_count / 2].as_secs_f64();
    println!("ratio of latch run to flock{:9.2}", median(0) / median(1));
    Ok(())
}

fn time(command: &mut Command) -> Result<Duration, Box<dyn Error>> {
    let began = Instant::now();
    let status = command.status()?;
    let time = began.elapsed();
    if !status.success() {
        return Err(format!("{command:?}: {status}").into());
    }
    Ok(time)
}

/// A `latchd` on a port of its own choice; ended when dropped.
struct Server(Child);

impl Server {
    fn start() -> Result<(Server, String), Box<dyn Error>> {
        let mut child = Command::new(sibling("latchd")?)
            .args(["--port", "0", "--print-port"])
            .env("RUST_LOG", "warn")
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().expect("stdout is piped");
        let server = Server(child);
        let mut port = String::new();
        BufReader::new(stdout).read_line(&mut port)?;
        Ok((server, format!("127.0.0.1:{}", port.trim())))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself; either way it is gone afterwards.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A program of this package, built in the same way: it lies one directory up.
fn sibling(name: &str) -> Result<PathBuf, Box<dyn Error>> {
    let path = env::current_exe()?.with_file_name("..").join(name);
    match path.exists() {
        true => Ok(path),
        false => Err(format!("{}: not there; build it first", path.display()).into()),
    }
}
