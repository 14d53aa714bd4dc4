//! What `latch run` costs beside flock(1): both run `true` under a free lock, as whole processes,
//! from their start to their end.
//!
//! They take turns, and which of them begins changes too. `true` alone is what the machine costs
//! anyway. The *ratio* of the medians can be compared between machines, the times cannot.

use std::env;
use std::io;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::report::{quantile, spread, spread_heading};
use crate::{built, Plan};

pub fn measure(plan: &Plan) -> io::Result<()> {
    let server = plan.latch_specs()[0].start(plan)?;
    let file = env::temp_dir().join(format!("bench-startup.{}", std::process::id()));
    let mut latch = Command::new(built("latch")?);
    let address = server.addr.to_string();
    latch.args(["run", "bench", "--server", &address, "--", "true"]);
    let mut flock = Command::new("flock");
    flock.arg(&file).arg("true");
    let mut contenders = [
        ("latch run", latch),
        ("flock", flock),
        ("nothing", Command::new("true")),
    ];
    for count in plan.counts_or(&[500]) {
        let mut times = [const { Vec::new() }; 3];
        for round in 0..count {
            for turn in 0..contenders.len() {
                let index = (round + turn) % contenders.len();
                times[index].push(time(&mut contenders[index].1)?.as_secs_f64());
            }
        }
        spread_heading(&format!("{count} times `true` under"));
        for ((name, _), times) in contenders.iter().zip(&times) {
            spread(name, times);
        }
        let median = |index: usize| quantile(&times[index], 0.5);
        println!("ratio of latch run to flock {:.2}", median(0) / median(1));
    }
    let _ = std::fs::remove_file(file);
    Ok(())
}

fn time(command: &mut Command) -> io::Result<Duration> {
    let began = Instant::now();
    let status = command.status()?;
    let time = began.elapsed();
    if !status.success() {
        return Err(io::Error::other(format!("{command:?}: {status}")));
    }
    Ok(time)
}
