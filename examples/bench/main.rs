//! Measures the four programs, and others beside them.
//!
//! ```text
//! cargo build --release && cargo run --release --example bench -- own-keys --peers
//! ```
//!
//! Rates depend on the machine, the day and the neighbours. So each rate is beside that of a bare
//! server: one thread per connection, which reads the bytes of a request and answers with those of
//! a reply. All servers take turns in short rounds. What is left in the *ratio* to the bare server
//! is the work of locking; that figure can be compared between machines and between versions.
//!
//! Mutual exclusion and the order of fences are checked while they are measured. The checker is
//! tried first on the bare server, which grants every claim.
//!
//! Exit status: 0 when all went well, 1 when exclusion did not hold, a server failed, or an option
//! is not valid.

mod load;
mod machine;
mod peers;
mod report;
mod scenarios;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use argh::FromArgs;

use machine::Cores;
use peers::Spec;

/// Measure latchd, latch, sema and lfpd, and others beside them.
#[derive(FromArgs)]
struct Options {
    /// what to measure: own-keys, one-key
    #[argh(positional)]
    scenario: String,
    /// cores for server and generator: one (both on it) or two (one each) (one)
    #[argh(option, default = "Cores::One")]
    cores: Cores,
    /// time of a round, in seconds (0.5)
    #[argh(option, default = "0.5")]
    seconds: f64,
    /// rounds of each server (9)
    #[argh(option, default = "9")]
    rounds: usize,
    /// connections, as a list: 1,16,256
    #[argh(option)]
    connections: Option<List>,
    /// a build of latchd to compare, as name=path; may be given several times
    #[argh(option)]
    server_binary: Vec<Named>,
    /// a server with the same protocol that already runs, as name=address
    #[argh(option)]
    server: Vec<Named>,
    /// also measure redis, memcached and beanstalkd, if they are installed
    #[argh(switch)]
    peers: bool,
}

/// What all scenarios go by.
struct Plan {
    cores: Cores,
    time: Duration,
    rounds: usize,
    connections: Option<List>,
    ours: Vec<Spec>,
    peers: Vec<Spec>,
}

impl Plan {
    /// The bare server first, then ours, then the peers.
    fn specs(&self) -> Vec<Spec> {
        [&[Spec::Bare], &self.ours[..], &self.peers[..]].concat()
    }

    fn connections_or(&self, usual: &[usize]) -> Vec<usize> {
        match &self.connections {
            Some(List(counts)) => counts.clone(),
            None => usual.to_vec(),
        }
    }

    /// The cores, in words.
    fn cores(&self) -> &'static str {
        match self.cores {
            Cores::One => "one core",
            Cores::Two => "two cores",
        }
    }
}

/// Numbers with commas between them.
#[derive(Clone)]
struct List(Vec<usize>);

impl FromStr for List {
    type Err = String;

    fn from_str(text: &str) -> Result<List, String> {
        let numbers = text.split(',').map(|number| match number.parse() {
            Ok(number @ 1..) => Ok(number),
            _ => Err(format!("expected numbers from 1 up, such as 1,16: {text}")),
        });
        numbers.collect::<Result<_, _>>().map(List)
    }
}

/// A name and what it stands for.
struct Named {
    name: String,
    value: String,
}

impl FromStr for Named {
    type Err = String;

    fn from_str(text: &str) -> Result<Named, String> {
        let (name, value) = text
            .split_once('=')
            .ok_or_else(|| format!("expected name=value: {text}"))?;
        Ok(Named {
            name: name.to_owned(),
            value: value.to_owned(),
        })
    }
}

impl FromStr for Cores {
    type Err = String;

    fn from_str(text: &str) -> Result<Cores, String> {
        match text {
            "one" => Ok(Cores::One),
            "two" => Ok(Cores::Two),
            _ => Err(format!("expected one or two: {text}")),
        }
    }
}

fn main() -> ExitCode {
    let options: Options = argh::from_env();
    let outcome = match options.scenario.as_str() {
        peers::BARE_SERVER => peers::bare_server(),
        _ => measure(options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(options: Options) -> io::Result<()> {
    machine::raise_descriptor_limit()?;
    let scenario = options.scenario.clone();
    let plan = plan(options)?;
    scenarios::try_the_checker(&plan)?;
    match scenario.as_str() {
        "own-keys" => scenarios::own_keys(&plan),
        "one-key" => scenarios::one_key(&plan),
        other => Err(io::Error::other(format!("{other}: no such scenario"))),
    }
}

fn plan(options: Options) -> io::Result<Plan> {
    let mut ours = Vec::new();
    for Named { name, value } in options.server_binary {
        let binary = PathBuf::from(value);
        ours.push(Spec::Latchd { name, binary });
    }
    if ours.is_empty() {
        ours.push(Spec::Latchd {
            name: "latchd".to_owned(),
            binary: built("latchd")?,
        });
    }
    for Named { name, value } in options.server {
        let addr: SocketAddr = value
            .parse()
            .map_err(|_| io::Error::other(format!("--server {name}={value}: not an address")))?;
        ours.push(Spec::Running { name, addr });
    }
    Ok(Plan {
        cores: options.cores,
        time: Duration::try_from_secs_f64(options.seconds).map_err(io::Error::other)?,
        rounds: options.rounds.max(1),
        connections: options.connections,
        ours,
        peers: match options.peers {
            true => Spec::installed_peers(),
            false => Vec::new(),
        },
    })
}

/// A program of this package that was built in the same way as this one.
fn built(name: &str) -> io::Result<PathBuf> {
    let program = std::env::current_exe()?.with_file_name("..").join(name);
    match program.exists() {
        true => Ok(program),
        false => {
            let program = program.display();
            Err(io::Error::other(format!(
                "{program}: not there; build it first"
            )))
        }
    }
}
