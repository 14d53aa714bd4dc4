//! What `latch run` and `sema run` cost beside flock(1): all run `true` under a free lock, as whole
//! processes, from their start to their end.
//!
//! They take turns, and which of them begins changes too. `true` alone is what the machine costs
//! anyway. The *ratio* of the medians can be compared between machines, the times cannot. Of each
//! other build of latchd, the programs in the same directory take part.

use std::io;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::peers::Spec;
use crate::report::{quantile, spread, spread_heading};
use crate::Plan;

struct Contender {
    name: String,
    command: Command,
    times: Vec<f64>,
}

impl Contender {
    fn new(name: impl Into<String>, command: Command) -> Contender {
        Contender {
            name: name.into(),
            command,
            times: Vec::new(),
        }
    }

    fn median(&self) -> f64 {
        quantile(&self.times, 0.5)
    }

    fn print_ratio_to(&self, other: &Contender) {
        let ratio = self.median() / other.median();
        println!("ratio of {} to {} {ratio:.2}", self.name, other.name);
    }
}

pub fn measure(plan: &Plan) -> io::Result<()> {
    let file = format!("bench-startup.{}", std::process::id());
    let flock_file = plan.directory.join(&file);
    let sema_file = plan.directory.join(file + ".lock");
    let mut flock = Command::new("flock");
    flock.arg(&flock_file).arg("true");
    let mut contenders = vec![
        Contender::new("flock", flock),
        Contender::new("nothing", Command::new("true")),
    ];
    let is_alone = plan.latch_specs().len() == 1;
    let mut servers = Vec::new();
    for spec in plan.latch_specs() {
        let Spec::Latchd { name, binary, .. } = spec else {
            continue;
        };
        let of = if is_alone {
            String::new()
        } else {
            format!(" of {name}")
        };
        let server = spec.start(plan)?;
        let mut latch = Command::new(binary.with_file_name("latch"));
        let address = server.addr.to_string();
        latch.args(["run", "bench", "--server", &address, "--", "true"]);
        let mut sema = Command::new(binary.with_file_name("sema"));
        sema.arg("run").arg(&sema_file).args(["--", "true"]);
        contenders.push(Contender::new(format!("latch run{of}"), latch));
        contenders.push(Contender::new(format!("sema run{of}"), sema));
        servers.push(server);
    }
    for count in plan.counts_or(&[500]) {
        measure_times(&mut contenders, count)?;
        spread_heading(&format!("{count} times `true` under"));
        for contender in &contenders {
            spread(&contender.name, &contender.times);
        }
        let [flock, _, ours @ ..] = &contenders[..] else {
            break;
        };
        for contender in ours {
            contender.print_ratio_to(flock);
        }
        // The two programs of the first build, and then those of the others.
        for (contender, first) in ours.iter().skip(2).zip(ours.iter().take(2).cycle()) {
            contender.print_ratio_to(first);
        }
    }
    let _ = std::fs::remove_file(flock_file);
    Ok(())
}

/// Runs each contender `count` times.
fn measure_times(contenders: &mut [Contender], count: usize) -> io::Result<()> {
    for contender in &mut *contenders {
        contender.times.clear();
    }
    for round in 0..count {
        for turn in 0..contenders.len() {
            let index = (round + turn) % contenders.len();
            let contender = &mut contenders[index];
            let time = time(&mut contender.command)?;
            contender.times.push(time.as_secs_f64());
        }
    }
    Ok(())
}

fn time(command: &mut Command) -> io::Result<Duration> {
    let began = Instant::now();
    let status = command.status();
    let time = began.elapsed();
    let failed = |why: String| io::Error::other(format!("{command:?}: {why}"));
    match status {
        Ok(status) if status.success() => Ok(time),
        Ok(status) => Err(failed(status.to_string())),
        Err(error) => Err(failed(error.to_string())),
    }
}
