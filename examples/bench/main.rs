//! Measures the four programs, and others beside them.
//!
//! ```text
//! cargo build --release && cargo run --release --example bench -- own-keys --peers
//! target/release/examples/bench one-key --server-binary old=/tmp/latchd \
//!     --server-binary new=target/release/latchd --cores two
//! ```
//!
//! Measure a change to the path of a request beside the commits in `figures.md`, which says why.
//! The ratio to the first server is then that to the first `--baseline`:
//!
//! ```text
//! target/release/examples/bench own-keys --baseline 37bd583
//! ```
//!
//! What the HTTP door costs while it is asked once a second (long rounds, so that each is):
//!
//! ```text
//! while sleep 1; do curl -s localhost:6399/metrics localhost:6399/v1/stats; done >/dev/null &
//! target/release/examples/bench own-keys --connections 16 --seconds 3 \
//!     --server-binary shut=target/release/latchd \
//!     --server-binary 'open=target/release/latchd --http 127.0.0.1:6399'
//! ```
//!
//! Rates depend on the machine, the day and the neighbours. So each rate is beside that of a bare
//! server: one thread per connection, which reads the bytes of a request and answers with those of
//! a reply. All servers take turns in short rounds. What is left in the *ratio* to the bare server
//! is the work of locking; that figure can be compared between machines and between versions.
//!
//! The columns: pairs of acquire and release a second; the ratios to the bare server and to the
//! first other one, each the median of the rounds; from when a claim was sent, or its key was
//! released if that was later, to when its grant was read; the processor time and the context
//! switches of the server for each pair, and its memory; the share of the time in which the
//! generator used the processor. With two cores and nearly 100 there, the generator is the limit.
//!
//! Mutual exclusion and the order of fences are checked while they are measured. The checker is
//! tried first on the bare server, which grants every claim.
//!
//! Exit status: 0 when all went well, 1 when exclusion did not hold, a server failed, or an option
//! is not valid.

mod baseline;
mod cluster;
mod events;
mod footprint;
mod instructions;
mod lfpd;
mod load;
mod lockfile;
mod machine;
mod paced;
mod peers;
mod report;
mod scenarios;
mod startup;
mod table;
#[cfg(feature = "tls")]
mod tls;

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use argh::FromArgs;

use machine::Cores;
use peers::Spec;
use scenarios::Work;

type Scenario = fn(&Plan) -> io::Result<()>;

/// What can be measured, in the order of `--help`.
const SCENARIOS: &[(&str, Scenario)] = &[
    ("own-keys", |plan| scenarios::rates(plan, Work::OwnKeys)),
    ("one-key", |plan| scenarios::rates(plan, Work::OneKey)),
    ("pairs", |plan| scenarios::rates(plan, Work::Pairs)),
    ("semaphore", |plan| scenarios::rates(plan, Work::Semaphore)),
    ("pipeline", |plan| scenarios::rates(plan, Work::Pipeline)),
    ("connect", |plan| scenarios::rates(plan, Work::Connect)),
    ("paced", paced::measure),
    ("idle", scenarios::idle),
    ("growth", scenarios::growth),
    ("held", events::held),
    ("waiters", events::waiters),
    ("expiry", events::expiry),
    ("disconnect", events::disconnect),
    ("footprint", footprint::measure),
    ("instructions", instructions::measure),
    ("lockfile", lockfile::measure),
    ("lfpd", lfpd::measure),
    ("startup", startup::measure),
    ("table", table::measure),
    #[cfg(feature = "tls")]
    ("tls", tls::measure),
    ("cluster", cluster::measure),
];

/// Measure latchd, latch, sema and lfpd, and others beside them.
#[derive(FromArgs)]
struct Options {
    /// own-keys, one-key, pairs, semaphore, pipeline, connect: claims granted a second. paced: how
    /// long a grant takes at a fixed rate. idle, growth: own keys beside idle connections, or
    /// beside other keys. held, waiters, expiry, disconnect: how long others wait at such an event.
    /// footprint: size and memory. instructions: those of a pair, under valgrind. lockfile, lfpd,
    /// startup: sema, lfpd, and latch run beside sema run. table: the picture of the README. tls:
    /// own keys over TLS beside stunnel. cluster: latchd on etcd. These two need builds with those
    /// features
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
    /// idle connections, other keys, held locks, waiters, leases or hang-ups, as a list
    #[argh(option)]
    count: Option<List>,
    /// a build of latchd to compare, as name=path, or with options behind the path, as
    /// 'name=path --option'; may be given several times
    #[argh(option)]
    server_binary: Vec<Named>,
    /// a commit whose programs are measured, too; they are built once, in target/baseline; may be
    /// given several times
    #[argh(option)]
    baseline: Vec<String>,
    /// also measure the first build with a state file, in --directory
    #[argh(switch)]
    state_file: bool,
    /// a server with the protocol of latchd that already runs, as name=address
    #[argh(option)]
    server: Vec<Named>,
    /// also measure redis, memcached and beanstalkd, if they are on the PATH
    #[argh(switch)]
    peers: bool,
    /// also measure the dflockd of this path, the server in Go
    #[argh(option)]
    dflockd: Option<PathBuf>,
    /// a file for the picture
    #[argh(option)]
    svg: Option<PathBuf>,
    /// where lockfile, lfpd, startup and --state-file put files; /dev/shm is memory (/dev/shm)
    #[argh(option, default = "memory()")]
    directory: PathBuf,
}

/// A directory in memory, or that of temporary files where there is none, as in small containers.
fn memory() -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    if memory.is_dir() {
        memory
    } else {
        std::env::temp_dir()
    }
}

/// What all scenarios go by.
#[derive(Clone)]
struct Plan {
    cores: Cores,
    /// The time of a round.
    time: Duration,
    rounds: usize,
    connections: Option<List>,
    counts: Option<List>,
    ours: Vec<Spec>,
    peers: Vec<Spec>,
    svg: Option<PathBuf>,
    directory: PathBuf,
}

impl Plan {
    /// The bare server first, then ours, then the peers.
    fn specs(&self) -> Vec<Spec> {
        [&[Spec::Bare], &self.ours[..], &self.peers[..]].concat()
    }

    /// The servers with the protocol of latchd.
    fn latch_specs(&self) -> &[Spec] {
        &self.ours
    }

    fn connections_or(&self, usual: &[usize]) -> Vec<usize> {
        List::or(&self.connections, usual)
    }

    fn counts_or(&self, usual: &[usize]) -> Vec<usize> {
        List::or(&self.counts, usual)
    }
}

/// Numbers with commas between them.
#[derive(Clone)]
struct List(Vec<usize>);

impl List {
    fn or(given: &Option<List>, usual: &[usize]) -> Vec<usize> {
        let given = given.as_ref().map(|List(numbers)| numbers.clone());
        given.unwrap_or_else(|| usual.to_vec())
    }
}

impl FromStr for List {
    type Err = String;

    fn from_str(text: &str) -> Result<List, String> {
        let numbers = text.split(',').map(|number| match number.parse() {
            Ok(number) => Ok(number),
            Err(_) => Err(format!("expected numbers, such as 1,16: {text}")),
        });
        numbers.collect::<Result<_, _>>().map(List)
    }
}

/// A name and a value.
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
    drop_variables();
    let outcome = match options.scenario.as_str() {
        peers::BARE_SERVER => peers::bare_server(peers::echo),
        lfpd::BARE_SERVER => peers::bare_server(lfpd::echo),
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

/// Drops the variables that set options of what is installed on this host, so that what is measured
/// does not hear them.
fn drop_variables() {
    const PREFIXES: &[&str] = &["LATCH_", "LATCHD_", "DFLOCKD_", "LFPD_", "LISTEN_", "SEMA_"];
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if PREFIXES.iter().any(|prefix| text.starts_with(prefix)) {
            std::env::remove_var(&name);
        }
    }
}

fn measure(options: Options) -> io::Result<()> {
    machine::raise_descriptor_limit()?;
    let named = SCENARIOS.iter().find(|(name, _)| *name == options.scenario);
    let Some((_, scenario)) = named else {
        let names: Vec<&str> = SCENARIOS.iter().map(|(name, _)| *name).collect();
        let message = format!("{}: expected {}", options.scenario, names.join(", "));
        return Err(io::Error::other(message));
    };
    let state_files = options.state_file.then(|| {
        let name = format!("bench-state-{}", std::process::id());
        options.directory.join(name)
    });
    let plan = plan(options, state_files.as_deref())?;
    scenarios::try_the_checker(&plan)?;
    let measured = scenario(&plan);
    if let Some(directory) = state_files {
        fs::remove_dir_all(directory)?;
    }
    measured
}

/// With `state_files`, the first build is measured once more, with a state file in this directory.
fn plan(options: Options, state_files: Option<&Path>) -> io::Result<Plan> {
    let mut ours = Vec::new();
    for commit in &options.baseline {
        let (name, binary) = baseline::latchd_at(commit)?;
        ours.push(Spec::Latchd {
            name,
            binary,
            arguments: Vec::new(),
        });
    }
    for Named { name, value } in options.server_binary {
        // The path may have blanks in it.
        let (binary, arguments) = value.split_at(value.find(" -").unwrap_or(value.len()));
        ours.push(Spec::Latchd {
            name,
            binary: binary.into(),
            arguments: arguments.split_whitespace().map(str::to_owned).collect(),
        });
    }
    if ours.len() == options.baseline.len() {
        ours.push(Spec::Latchd {
            name: "latchd".to_owned(),
            binary: built("latchd")?,
            arguments: Vec::new(),
        });
    }
    if let (Some(directory), Some(Spec::Latchd { name, binary, .. })) = (state_files, ours.first())
    {
        ours.push(Spec::StateFile {
            name: format!("{name}, state"),
            binary: binary.clone(),
            directory: directory.to_owned(),
        });
    }
    for Named { name, value } in options.server {
        let addr: SocketAddr = value
            .parse()
            .map_err(|_| io::Error::other(format!("--server {name}={value}: not an address")))?;
        ours.push(Spec::Running { name, addr });
    }
    let mut peers = Vec::new();
    if options.peers {
        peers.extend(Spec::installed_peers());
    }
    peers.extend(options.dflockd.map(Spec::Dflockd));
    Ok(Plan {
        cores: options.cores,
        time: Duration::try_from_secs_f64(options.seconds).map_err(io::Error::other)?,
        rounds: options.rounds.max(1),
        connections: options.connections,
        counts: options.count,
        svg: options.svg,
        directory: options.directory,
        ours,
        peers,
    })
}

/// A program of this package that was built in the same way as this one.
fn built(name: &str) -> io::Result<PathBuf> {
    let program = std::env::current_exe()?.with_file_name("..").join(name);
    if program.exists() {
        Ok(program)
    } else {
        let program = program.display();
        Err(io::Error::other(format!(
            "{program}: not there; build it first"
        )))
    }
}
