//! What a pair of acquire and release costs a server in user instructions, counted by callgrind.
//!
//! The count is the same in every run to a few thousandths, so it shows a change that is far within
//! the scatter of a rate. What else the server does is in a short run and in a long run alike, and
//! is not in their difference. Two pairs are counted: of the only key of the server, and of a key
//! among many that other connections hold. Neither shows the caches, the kernel, or a hand-over.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::load::{hold, key_name, Client};
use crate::peers::{Server, Spec};
use crate::Plan;

/// The pairs of the two runs.
const PAIR_COUNTS: [usize; 2] = [1_000, 6_000];

/// The connections that hold keys beside the pair, and how many each.
const HOLDERS: usize = 200;
const KEYS_PER_HOLDER: usize = 5;

/// Longer than any run, in seconds.
const LEASE: u32 = 3600;

pub fn measure(plan: &Plan) -> io::Result<()> {
    println!("{:24}{:>12}{:>24}", "", "one key", "among 1000 held keys");
    for spec in plan.latch_specs() {
        let Spec::Latchd {
            name,
            binary,
            arguments,
        } = spec
        else {
            continue;
        };
        let log = format!("bench-instructions.{}", std::process::id());
        let start = Start {
            name,
            binary,
            arguments,
            log: plan.directory.join(log),
        };
        let (alone, among_others) = (start.pair_beside(0)?, start.pair_beside(HOLDERS)?);
        println!("{name:24}{alone:>12.0}{among_others:>24.0}");
    }
    Ok(())
}

/// How a server is started, and where callgrind writes what it has counted.
struct Start<'a> {
    name: &'a str,
    binary: &'a Path,
    arguments: &'a [String],
    log: PathBuf,
}

impl Start<'_> {
    /// The instructions of a pair, while so many other connections hold keys.
    fn pair_beside(&self, holder_count: usize) -> io::Result<f64> {
        let [few, many] = PAIR_COUNTS;
        let more = self.count(many, holder_count)? - self.count(few, holder_count)?;
        Ok(more / (many - few) as f64)
    }

    /// The instructions of a server, from its start to its end.
    fn count(&self, pair_count: usize, holder_count: usize) -> io::Result<f64> {
        let mut valgrind = Command::new("valgrind");
        valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]);
        valgrind.arg(format!("--log-file={}", self.log.display()));
        let server = Server::behind(valgrind, self.name, self.binary, self.arguments)?;
        let held = (0..holder_count).map(|at| format!("held{at}"));
        let holders = held.map(|prefix| hold(&server, &prefix, KEYS_PER_HOLDER, LEASE));
        let holders = holders.collect::<io::Result<Vec<Client>>>()?;
        let key = key_name("held", HOLDERS / 2);
        let mut client = Client::connect(&server, &key)?;
        for _ in 0..pair_count {
            let (token, _) = client.acquire(&key)?;
            client.release(&key, &token)?;
        }
        drop((client, holders));
        server.end()?;
        let log = fs::read_to_string(&self.log)?;
        fs::remove_file(&self.log)?;
        let counted = log.lines().find_map(|line| line.split_once("Collected : "));
        let counted = counted.and_then(|(_, counted)| counted.trim().parse().ok());
        counted.ok_or_else(|| io::Error::other(format!("callgrind counts nothing: {log}")))
    }
}
