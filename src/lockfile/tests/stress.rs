//! Several processes take a lock that goes stale again and again, each step at a random moment. A
//! witness that knows nothing of locks counts the processes inside.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::ExitStatus;

use rustix::fs::{flock, FlockOperation};

use super::fault_injection::{Death, FaultyFiles};
use super::*;
use crate::lockfile::files::LockFiles;
use crate::sys::random;

const NAME: &str = "stress.lock";

/// The parameters of a run.
#[derive(Clone, Copy)]
struct Run {
    processes: u64,
    /// How often each process is to hold the lock.
    rounds: u64,
    /// The longest run.
    limit: Duration,
    missing: MissingFeatures,
    is_unguarded: bool,
    /// No process keeps the file open, so that the lock is judged by age and process alone.
    is_detached: bool,
    /// A process dies before one step in this many; 0 for never.
    deaths: u64,
    /// The number of shell scripts that create the lock with `set -C` and remove it.
    scripts: u64,
}

impl Default for Run {
    fn default() -> Run {
        Run {
            processes: 6,
            rounds: 1000,
            limit: Duration::from_secs(3),
            missing: MissingFeatures::default(),
            is_unguarded: false,
            is_detached: false,
            deaths: 0,
            scripts: 0,
        }
    }
}

/// The counts of the witness.
#[derive(Debug)]
struct Seen {
    /// Grants to our processes, without the doubles.
    grants: u64,
    /// Further grants while the lock was held.
    doubles: u64,
    /// Holders that found their lock taken away.
    losses: u64,
    /// Grants to shell scripts.
    foreign: u64,
    deaths: u64,
}

/// Counts who is inside. Only one process can create a directory, in every language.
struct Witness(PathBuf);

impl Witness {
    fn note(&self, what: &str) {
        let file = OpenOptions::new()
            .append(true)
            .create(true)
            .open(self.0.join(what));
        file.and_then(|mut file| file.write_all(b"x"))
            .expect("a note");
    }

    fn count(&self, what: &str) -> u64 {
        fs::metadata(self.0.join(what)).map_or(0, |file| file.len())
    }

    fn enter(&self) -> bool {
        let is_alone = fs::create_dir(self.0.join("inside")).is_ok();
        self.note(if is_alone { "grants" } else { "doubles" });
        is_alone
    }

    fn leave(&self) {
        let _ = fs::remove_dir(self.0.join("inside"));
    }
}

/// Another implementation: creates the lock with a record, and removes its own lock.
const SCRIPT: &str = r#"
lock=$1 witness=$2 stop=$3 set=$-
while [ ! -e "$stop" ]; do
    record="pid=$$
timestamp=2000000000
tag=script"
    if (set -C; printf '%s\n' "$record" > "$lock") 2> /dev/null; then
        printf x >> "$witness/foreign"
        if mkdir "$witness/inside" 2> /dev/null; then
            rmdir "$witness/inside"
        else
            printf x >> "$witness/doubles"
        fi
        rm "$lock"
    fi
done
"#;

fn run(run: &Run) -> Seen {
    let scratch = tempfile::tempdir().expect("a directory");
    let locks = scratch.path().join("locks");
    let witness = Witness(scratch.path().join("witness"));
    fs::create_dir(&locks).expect("a directory");
    fs::create_dir(&witness.0).expect("a directory");
    let stop = scratch.path().join("stop");
    // All processes begin with a stale file.
    fs::write(locks.join(NAME), format!("pid={DEAD}\ntimestamp=1\n")).expect("a stale lock");

    let mut seed = random::number().expect("a seed");
    println!("seed {seed}");
    let mut start = |process: u64| {
        seed = seed.wrapping_add(1);
        let part = [
            ("SCRATCH", scratch.path().display().to_string()),
            ("PROCESS", process.to_string()),
            ("ROUNDS", run.rounds.to_string()),
            ("SEED", seed.to_string()),
            ("UNGUARDED", u64::from(run.is_unguarded).to_string()),
            ("DETACHED", u64::from(run.is_detached).to_string()),
            ("DEATHS", run.deaths.to_string()),
            ("MISSING", missing_to_bits(run.missing).to_string()),
        ];
        Ended(
            again("lockfile::tests::stress::worker", &part)
                .spawn()
                .expect("this program"),
        )
    };
    let scripts: Vec<Ended> = (0..run.scripts)
        .map(|_| {
            let mut script = Command::new("sh");
            script.args(["-c", SCRIPT, "sh"]);
            script.args([&locks.join(NAME), &witness.0, &stop]);
            Ended(script.spawn().expect("a shell"))
        })
        .collect();
    let mut workers: Vec<Option<Ended>> = (0..run.processes)
        .map(|process| Some(start(process)))
        .collect();
    let began = Instant::now();
    let mut deaths = 0;
    let is_seen = || run.is_unguarded && witness.count("doubles") > 0;
    while !is_seen() && workers.iter().any(Option::is_some) {
        // On a machine that is late, all kinds of processes have their turn first.
        let has_grants = witness.count("grants") > 0;
        let has_scripts = run.scripts == 0 || witness.count("foreign") > 0;
        let has_deaths = run.deaths == 0 || deaths > 0;
        let is_mixed = has_grants && has_scripts && has_deaths;
        if began.elapsed() > run.limit * if is_mixed { 1 } else { 20 } {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
        for (process, worker) in workers.iter_mut().enumerate() {
            let Some(status) = worker.as_mut().and_then(|worker| worker.0.try_wait().ok()?) else {
                continue;
            };
            if run.deaths > 0 && was_killed(status) {
                deaths += 1;
                *worker = Some(start(process as u64));
            } else {
                assert!(status.success(), "a worker ended with {status}");
                *worker = None;
            }
        }
    }
    fs::write(&stop, "").expect("a sign");
    for worker in workers.into_iter().flatten().chain(scripts) {
        let mut worker = worker;
        let patience = Instant::now() + Duration::from_secs(10);
        while matches!(worker.0.try_wait(), Ok(None)) && Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(
            matches!(worker.0.try_wait(), Ok(Some(_))),
            "a process hangs"
        );
    }
    // The lock can be taken again, whatever happened.
    let directory = Directory::open(&locks).expect("the directory");
    let files = LockFiles::new(&directory, NAME.as_ref(), quick(run.missing));
    let taker = Taker {
        record: &|_| {
            held(std::process::id(), HolderKind::Guard)
                .print()
                .into_bytes()
        },
        may_take: &|content| may_take_in(7200, content, &directory),
    };
    let last = takeover::acquire(&files, &taker).expect("an attempt");
    let is_free = matches!(last, Outcome::Done(_));
    assert!(is_free || run.is_unguarded, "the lock is stuck");
    let seen = Seen {
        grants: witness.count("grants"),
        doubles: witness.count("doubles"),
        losses: witness.count("losses"),
        foreign: witness.count("foreign"),
        deaths,
    };
    println!("{seen:?}");
    seen
}

fn was_killed(status: ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt;
    status.signal() == Some(9)
}

fn missing_to_bits(missing: MissingFeatures) -> u64 {
    let bits = [
        missing.unnamed_files,
        missing.links,
        missing.rewriting,
        missing.locks,
    ];
    bits.iter()
        .rev()
        .fold(0, |sum, bit| sum * 2 + u64::from(*bit))
}

/// One of the processes.
#[test]
#[ignore = "a part of the others"]
fn worker() {
    let Some(scratch) = part("SCRATCH").map(PathBuf::from) else {
        return;
    };
    let witness = Witness(scratch.join("witness"));
    let stop = scratch.join("stop");
    let directory = Directory::open(&scratch.join("locks")).expect("a directory");
    let value = |name: &str| number(name).expect(name);
    let missing = every_file_system().nth(usize::try_from(value("MISSING")).expect("a number"));
    let files = LockFiles::new(&directory, NAME.as_ref(), quick(missing.expect("a number")));
    let deaths = value("DEATHS");
    let death = if deaths > 0 {
        Death::Among(deaths)
    } else {
        Death::Never
    };
    let mut files = FaultyFiles::new(files, value("SEED"), 300, death);
    files.is_unguarded = value("UNGUARDED") == 1;
    // In a run with deaths, locks are old at once, and living holders are known to live. Without
    // the guard of the protocol, a lock that is young and lost would block all processes, so all
    // locks are stale there.
    let is_all_stale = files.is_unguarded && value("DETACHED") == 0;
    let ahead = if deaths > 0 || is_all_stale { 7200 } else { 0 };
    let dead_pid = 900_000_000 + u32::try_from(value("PROCESS")).expect("a number");

    let mut grants = 0;
    while grants < value("ROUNDS") && !stop.exists() {
        let is_mixed = deaths == 0 && !files.is_unguarded;
        let is_live = value("DETACHED") == 0 && (!is_mixed || files.below(3) > 0);
        let pid = if is_live && !is_all_stale {
            std::process::id()
        } else {
            dead_pid
        };
        let holder = if is_live {
            HolderKind::Guard
        } else {
            HolderKind::Detached
        };
        let taker = Taker {
            record: &|_| held(pid, holder).print().into_bytes(),
            may_take: &|content| may_take_in(ahead, content, &directory),
        };
        let Outcome::Done(file) = takeover::acquire(&files, &taker).expect("an attempt") else {
            files.rest();
            continue;
        };
        grants += 1;
        if !is_live {
            // This process keeps the file open, to make it old later.
            flock(&file, FlockOperation::Unlock).expect("a lock");
        }
        let is_alone = witness.enter();
        files.rest();
        if is_alone {
            witness.leave();
        }
        let is_released = files.below(3) == 0;
        if is_live && is_released {
            if !takeover::release(&files, &file).expect("a release") {
                witness.note("losses");
            }
        } else if is_live {
            // As if killed: no process has the file locked any more.
            drop(file);
        } else if is_released {
            let own = |content: &Content, _| match content.record.pid {
                Some(pid) if pid == dead_pid => Ok(()),
                _ => Err(Obstacle::NotStale),
            };
            let removed = takeover::remove(&files, &own).expect("a release");
            if !matches!(removed, Outcome::Done(true)) {
                witness.note("losses");
            }
        } else {
            let at = format!("pid={dead_pid}\ntimestamp=").len();
            file.write_all_at(b"0000000001", at as u64)
                .expect("an old timestamp");
        }
    }
}

#[test]
fn six_processes_on_one_stale_lock_are_never_two_inside() {
    let seen = run(&Run::default());
    assert!(seen.grants > 0);
    assert_eq!((seen.doubles, seen.losses), (0, 0), "{seen:?}");
}

/// Runs until the witness has seen two inside.
fn must_be_seen(unguarded: &Run) {
    for _ in 0..8 {
        if run(unguarded).doubles > 0 {
            return;
        }
    }
    panic!("the witness is blind");
}

#[test]
fn the_witness_sees_two_inside_without_the_guard() {
    must_be_seen(&Run {
        is_unguarded: true,
        limit: Duration::from_secs(4),
        ..Run::default()
    });
}

#[test]
fn the_witness_sees_two_inside_with_unguarded_removals() {
    must_be_seen(&Run {
        is_unguarded: true,
        is_detached: true,
        limit: Duration::from_secs(4),
        missing: MissingFeatures {
            rewriting: true,
            ..MissingFeatures::default()
        },
        ..Run::default()
    });
}

#[test]
fn takers_that_may_not_rewrite_are_never_two_inside_either() {
    let seen = run(&Run {
        missing: MissingFeatures {
            rewriting: true,
            ..MissingFeatures::default()
        },
        rounds: 150,
        ..Run::default()
    });
    assert!(seen.grants > 0);
    assert_eq!((seen.doubles, seen.losses), (0, 0), "{seen:?}");
}

#[test]
fn with_locks_and_no_other_feature_they_are_never_two_inside() {
    let seen = run(&Run {
        missing: MissingFeatures {
            unnamed_files: true,
            links: true,
            rewriting: true,
            locks: false,
        },
        rounds: 150,
        ..Run::default()
    });
    assert!(seen.grants > 0);
    assert_eq!((seen.doubles, seen.losses), (0, 0), "{seen:?}");
}

#[test]
fn processes_that_die_at_any_step_never_leave_two_inside() {
    let seen = run(&Run {
        deaths: 150,
        limit: Duration::from_secs(3),
        ..Run::default()
    });
    assert!(seen.grants > 0 && seen.deaths > 0, "{seen:?}");
    assert_eq!((seen.doubles, seen.losses), (0, 0), "{seen:?}");
}

#[test]
fn scripts_that_create_and_remove_are_never_inside_with_us() {
    let seen = run(&Run {
        processes: 4,
        rounds: 150,
        scripts: 2,
        ..Run::default()
    });
    assert!(seen.grants > 0 && seen.foreign > 0, "{seen:?}");
    assert_eq!((seen.doubles, seen.losses), (0, 0), "{seen:?}");
}

#[test]
#[ignore = "long: cargo test --release --lib sixteen -- --ignored --nocapture"]
fn sixteen_processes_have_ten_thousand_turns_each() {
    let seen = run(&Run {
        processes: 16,
        rounds: 10_000,
        limit: Duration::from_secs(1200),
        ..Run::default()
    });
    println!("{seen:?}");
    assert_eq!((seen.grants, seen.doubles, seen.losses), (160_000, 0, 0));
}

/// For an idle hour.
#[test]
#[ignore = "takes five minutes"]
fn for_a_long_time_they_are_never_two_inside() {
    for missing in every_file_system().filter(|missing| !missing.locks) {
        for (deaths, scripts) in [(0, 0), (150, 0), (0, 2)] {
            // A taker that removes the file may hit the file of a script in the microseconds after
            // its look.
            if missing.rewriting && scripts > 0 {
                continue;
            }
            let seen = run(&Run {
                missing,
                deaths,
                scripts,
                rounds: 3000,
                limit: Duration::from_secs(15),
                ..Run::default()
            });
            assert_eq!((seen.doubles, seen.losses), (0, 0), "{missing:?} {seen:?}");
        }
    }
}
