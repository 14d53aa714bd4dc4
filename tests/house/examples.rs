//! The examples do what they say.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use crate::support::mounts::Mount;
use crate::support::needs::needs;
use crate::support::silent::refusing_addr;
use crate::support::stalls::fair_test;
use crate::support::transcript::door_of;
use crate::support::{eventually, program, wait_for_exit, Daemon, PATIENCE};
use rustix::process::{kill_process, kill_process_group, Pid, Signal};

#[test]
fn workers_are_never_more_at_a_time_than_the_limit() {
    let daemon = Daemon::start(&[]);
    let mut pool = Running::start(&mut example("worker_pool", &daemon));
    let (status, printed) = pool.end();
    assert_eq!(status, 0, "{printed}");
    let mut numbers = Vec::new();
    for line in printed.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let ["worker", number, "works,", busy_count, "at", "a", "time"] = words[..] else {
            panic!("{printed}");
        };
        numbers.push(number.parse::<u32>().expect("a number"));
        let busy_count: u32 = busy_count.parse().expect("a number");
        assert!((1..=3).contains(&busy_count), "{printed}");
    }
    numbers.sort_unstable();
    assert_eq!(numbers, (1..=8).collect::<Vec<_>>());
}

#[test]
fn a_holder_that_stood_still_is_refused_by_the_store() {
    let daemon = Daemon::start(&[]);
    let (status, printed) = Running::start(&mut example("fencing", &daemon)).end();
    assert_eq!(
        printed,
        "slow holds the lock, and stands still\nfast holds the lock: written\n\
         slow goes on: refused, a later holder has written\nthe store has what was written by fast\n"
    );
    assert_eq!(status, 0);
}

#[test]
fn a_command_whose_latch_stood_still_is_refused_by_fence_check() {
    let daemon = Daemon::start(&[]);
    let (status, printed) =
        Running::start(script("fencing.sh", &daemon).arg(address(&daemon))).end();
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!(lines.len(), 5, "{printed}");
    assert_eq!(lines[0], "fast: written");
    assert!(lines[1].starts_with("slow: refused, fence "), "{printed}");
    assert_eq!(lines[2], "written by fast");
    let expected = format!("latch: store at {}: the lock was lost: ", address(&daemon));
    assert!(lines[3].starts_with(&expected), "{printed}");
    assert_eq!(lines[4], "latch run has exited with 70");
    assert_eq!(status, 0);
}

#[test]
fn the_next_candidate_leads_when_the_leader_ends() {
    let daemon = Daemon::start(&[]);
    let mut candidates = Candidates::start(&daemon, 3);
    let first = candidates.leader_of_term(1);
    candidates.end(first);
    let second = candidates.leader_of_term(2);
    assert_ne!(first, second);
    candidates.end(second);
    assert!(![first, second].contains(&candidates.leader_of_term(3)));
}

#[test]
fn a_leader_that_is_cut_off_steps_down_before_another_leads() {
    let daemon = Daemon::start(&[]);
    let candidates = Candidates::start(&daemon, 3);
    let first = candidates.leader_of_term(1);
    daemon.signal(Signal::STOP);
    eventually(PATIENCE, "the leader steps down", || {
        candidates.log().contains(&format!("{first} steps down\n"))
    });
    assert_eq!(candidates.log().matches(" leads, ").count(), 1);
    daemon.signal(Signal::CONT);
    candidates.leader_of_term(2);
    let log = candidates.log();
    let says: Vec<&str> = log
        .lines()
        .filter_map(|line| line.split([' ', ',']).nth(1))
        .collect();
    assert_eq!(says, ["leads", "steps", "leads"], "{log}");
}

#[test]
fn a_leader_that_stood_still_learns_that_another_leads() {
    let daemon = Daemon::start(&[]);
    let candidates = Candidates::start(&daemon, 2);
    let first = candidates.leader_of_term(1);
    candidates.signal(first, Signal::STOP);
    assert_ne!(candidates.leader_of_term(2), first);
    assert!(!candidates.log().contains("steps down"));
    candidates.signal(first, Signal::CONT);
    eventually(PATIENCE, "it steps down", || {
        candidates.log().contains(&format!("{first} steps down\n"))
    });
}

#[test]
fn the_metrics_are_written_for_the_textfile_collector() {
    needs!("curl");
    let (daemon, url) = daemon_with_metrics(&["--auth-token", "s3cret"]);
    let dir = tempfile::tempdir().expect("a directory");
    let (secret, wrong) = (dir.path().join("secret"), dir.path().join("wrong"));
    fs::write(&secret, "s3cret\n").expect("room");
    fs::write(&wrong, "s3cre\n").expect("room");
    let folder = dir.path().join("collected");
    fs::create_dir(&folder).expect("room");
    let file = folder.join("latchd.prom");
    let write = |url: &str, secret: &Path| {
        let mut command = collector(&daemon, &folder, url);
        let command = command.env("LATCH_AUTH_TOKEN_FILE", secret);
        let (status, printed) = Running::start(command).end();
        let left = fs::read_dir(&folder).expect("the directory").count();
        assert_eq!(left, 1, "only the file is left");
        (status, printed, fs::read_to_string(&file).expect("text"))
    };
    let (status, printed, metrics) = write(&url, &secret);
    assert_eq!((status, printed), (0, String::new()));
    assert!(metrics.contains("\nlatchd_grants_total 0\n"), "{metrics}");
    assert!(metrics.ends_with("_seconds_count 0\n"), "{metrics}");
    let mode = fs::metadata(&file).expect("it is there").mode();
    assert_eq!(mode & 0o777, 0o644, "the collector can read it");
    let (up, rest) = metrics.split_once(" 1\n").expect("the first metric");
    let no_answer = format!("{up} 0\n");
    assert!(no_answer.ends_with("\nlatchd_up 0\n") && !rest.is_empty());
    let (_reserved, gone) = refusing_addr();
    for (url, secret) in [(&url, &wrong), (&format!("http://{gone}/metrics"), &secret)] {
        let (status, printed, metrics) = write(url, secret);
        assert_ne!(status, 0);
        assert!(printed.starts_with("curl: "), "{printed}");
        assert_eq!(metrics, no_answer);
    }
}

#[test]
fn a_full_disk_leaves_the_last_metrics_to_the_collector() {
    let admin = needs!(admin);
    needs!("curl");
    let (daemon, url) = daemon_with_metrics(&[]);
    let disk = Mount::tmpfs(admin, "64k");
    let file = disk.path.join("latchd.prom");
    let write = || Running::start(&mut collector(&daemon, &disk.path, &url)).end();
    assert_eq!(write(), (0, String::new()));
    let metrics = fs::read_to_string(&file).expect("text");
    // Room for the first page of the text, and no more.
    let ballast = File::create(disk.path.join("ballast")).expect("room for a name");
    let mut ballast_len = 0;
    while ballast.write_at(&[0; 4096], ballast_len).is_ok() {
        ballast_len += 4096;
    }
    ballast.set_len(ballast_len - 4096).expect("it is a file");
    assert!(metrics.len() > 4096, "{metrics}");
    assert_ne!(write().0, 0);
    assert_eq!(fs::read_to_string(&file).expect("text"), metrics);
    assert_eq!(fs::read_dir(&disk.path).expect("the disk").count(), 2);
}

/// A daemon that shows its metrics, and their URL.
fn daemon_with_metrics(options: &[&str]) -> (Daemon, String) {
    let daemon = Daemon::start_alone(&[&["--http", "127.0.0.1:0"], options].concat());
    let url = format!("http://{}/metrics", door_of(&daemon));
    (daemon, url)
}

/// The script for the textfile collector.
fn collector(daemon: &Daemon, directory: &Path, url: &str) -> Command {
    let mut command = script("textfile_collector.sh", daemon);
    command.arg(directory).arg(url);
    command
}

#[test]
fn a_report_waits_for_the_one_that_is_being_written() {
    fair_test(a_report_waits_for_the_one_that_is_being_written_once);
}

fn a_report_waits_for_the_one_that_is_being_written_once() {
    let dir = tempfile::tempdir().expect("a directory");
    let lock = dir.path().join("report.lock");
    let report = || Running::start(Command::new(built("lockfile")).arg(&lock));
    let mut first = report();
    eventually(PATIENCE, "the first report is written", || lock.exists());
    let (status, printed) = report().end();
    assert_eq!(status, 0, "{printed}");
    let waited = "which does \"weekly report\"\nwriting\ndone\n";
    assert!(
        printed.starts_with("waiting for process ") && printed.ends_with(waited),
        "{printed}"
    );
    assert_eq!(first.end(), (0, "writing\ndone\n".to_owned()));
    assert!(!lock.exists());
}

#[test]
fn the_benchmark_names_what_it_can_measure() {
    let (status, printed) = Running::start(Command::new(built("bench")).arg("speed")).end();
    let names: Vec<&str> = BENCHMARKS.iter().map(|(name, _)| *name).collect();
    assert_eq!(status, 1);
    assert_eq!(
        printed,
        format!("bench: speed: expected {}\n", names.join(", "))
    );
}

#[test]
fn each_scenario_of_the_benchmark_gives_figures() {
    for (name, options) in BENCHMARKS {
        if [
            "instructions",
            "lockfile",
            "lfpd",
            "startup",
            "table",
            "cluster",
        ]
        .contains(name)
        {
            continue; // they have tests of their own, and the first needs valgrind
        }
        let printed = benchmark(name, options);
        let rows = printed.lines().filter(|line| line.contains("latchd"));
        let is_figure = |word: &str| word.parse::<f64>().is_ok_and(|figure| figure >= 0.0);
        let figures = rows
            .flat_map(str::split_whitespace)
            .filter(|it| is_figure(it));
        assert!(figures.count() >= 3, "{name}: {printed}");
    }
}

#[test]
fn the_benchmark_of_lfpd_gives_its_ratio() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().to_str().expect("UTF-8");
    let options = ["--connections", "2", "--count", "3", "--directory", path];
    let printed = benchmark("lfpd", &options);
    let row = printed.lines().nth(2).expect("there is a row");
    let figures: Vec<f64> = row
        .split_whitespace()
        .map(|word| word.parse().expect("a figure"))
        .collect();
    assert_eq!(figures.len(), 4, "{printed}");
    assert!(figures.iter().all(|figure| *figure > 0.0), "{printed}");
}

#[test]
fn the_benchmark_compares_builds_and_running_servers() {
    let daemon = Daemon::start(&[]);
    let latchd = program("latchd");
    let (old, new) = (
        format!("old={latchd}"),
        format!("new={latchd} --default-lease-ttl 60"),
    );
    let running = format!("running={}", address(&daemon));
    let printed = benchmark(
        "one-key",
        &[
            &["--connections", "3", "--server-binary", &old][..],
            &["--server-binary", &new, "--server", &running],
        ]
        .concat(),
    );
    let names: Vec<&str> = printed
        .lines()
        .skip(2)
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert_eq!(names, ["bare", "old", "new", "running"], "{printed}");
}

#[test]
fn the_benchmark_finds_out_a_server_without_locks() {
    let bare = Running::start(Command::new(built("bench")).arg("bare-server"));
    let mut port = String::new();
    eventually(PATIENCE, "it prints its port", || {
        port = bare.printed();
        port.ends_with('\n')
    });
    let server = format!("lax=127.0.0.1:{}", port.trim());
    let mut command = Command::new(built("bench"));
    command.args(["one-key", "--connections", "16", "--rounds", "1"]);
    let (status, printed) = Running::start(command.args(["--server", &server])).end();
    assert_eq!(status, 1, "{printed}");
    let (_, said) = printed.split_once("bench: lax: ").expect("a complaint");
    let count = said.strip_suffix(" overlaps or fences out of order\n");
    let count = count.and_then(|count| count.parse::<u64>().ok());
    assert!(count.is_some_and(|count| count > 0), "{printed}");
}

#[test]
fn the_benchmark_measures_the_peers_that_are_installed() {
    needs!("redis-server", "memcached", "beanstalkd");
    for (name, expected) in [
        (
            "own-keys",
            &["redis", "redis", "memcached", "beanstalkd"][..],
        ),
        ("semaphore", &["redis", "beanstalkd"]),
        ("pipeline", &["redis", "redis", "memcached", "beanstalkd"]),
        ("connect", &["redis", "redis", "memcached", "beanstalkd"]),
    ] {
        let printed = benchmark(name, &["--connections", "6", "--peers"]);
        let rows = printed.lines().skip(4);
        let peers: Vec<&str> = rows
            .filter_map(|line| line.split_whitespace().next())
            .collect();
        assert_eq!(peers, expected, "{printed}");
    }
}

#[test]
fn the_benchmark_draws_its_picture() {
    let dir = tempfile::tempdir().expect("a directory");
    let picture = dir.path().join("table.svg");
    let path = picture.to_str().expect("UTF-8");
    let printed = benchmark("table", &["--svg", path]);
    let row_count = printed.matches("pairs/s").count();
    // Two rows need a second core.
    assert!([7, 9].contains(&row_count), "{printed}");
    let drawn = fs::read_to_string(&picture).expect("a picture");
    assert!(drawn.starts_with("<svg ") && drawn.ends_with("</svg>\n"));
    // Four rows are drawn, one of them with two cores: a bar for latchd in each, and the rate and
    // the p99 of latchd and the bare server.
    let drawn_count = if row_count == 9 { 4 } else { 3 };
    assert_eq!(
        drawn.matches("<rect class=\"ours\"").count(),
        drawn_count,
        "{drawn}"
    );
    assert_eq!(
        drawn.matches("<text class=\"n\"").count(),
        4 * drawn_count,
        "{drawn}"
    );
    // It says what was measured, and can be read on a dark page.
    assert!(
        drawn.contains(concat!("latchd ", env!("CARGO_PKG_VERSION"))),
        "{drawn}"
    );
    assert!(drawn.contains("<rect class=\"page\""), "{drawn}");
}

#[test]
fn the_benchmark_of_lock_files_gives_its_ratios() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().to_str().expect("UTF-8");
    let printed = benchmark("lockfile", &["--count", "2", "--directory", path]);
    let ratios = ["without fsync", "with fsync", "median"].map(|row| {
        let line = printed.lines().find(|line| line.contains(row));
        let ratio = line.and_then(|line| line.split_whitespace().next_back()?.parse::<f64>().ok());
        ratio.unwrap_or_else(|| panic!("{row}: {printed}"))
    });
    // A disk that is busy for a moment may make it 0.00.
    assert!(ratios.iter().all(|ratio| ratio.is_finite()), "{printed}");
}

#[test]
fn the_benchmark_of_the_start_gives_a_ratio() {
    let printed = benchmark("startup", &["--count", "3"]);
    for program in ["latch", "sema"] {
        let row = format!("ratio of {program} run to flock ");
        let ratio = printed.lines().find_map(|line| line.strip_prefix(&row));
        let ratio = ratio.and_then(|ratio| ratio.parse::<f64>().ok());
        assert!(ratio.is_some_and(|ratio| ratio > 0.0), "{printed}");
    }
}

// ---------------------------------------------------------------------------------------------

/// All that the benchmark can measure, with options that make it short.
const BENCHMARKS: &[(&str, &[&str])] = &[
    ("own-keys", &["--connections", "1,3", "--cores", "one"]),
    ("one-key", &["--connections", "2,3"]),
    ("pairs", &["--connections", "4"]),
    ("semaphore", &["--connections", "6"]),
    ("pipeline", &["--connections", "2"]),
    ("connect", &["--connections", "2"]),
    ("paced", &["--connections", "2"]),
    ("idle", &["--connections", "2", "--count", "3"]),
    ("growth", &["--connections", "2", "--count", "0,1000"]),
    ("held", &["--count", "1000"]),
    ("waiters", &["--count", "10"]),
    ("expiry", &["--count", "3"]),
    ("disconnect", &["--count", "3"]),
    ("footprint", &["--count", "10,1000,10"]),
    ("instructions", &[]),
    ("lockfile", &[]),
    ("lfpd", &[]),
    ("startup", &[]),
    ("table", &[]),
    ("cluster", &[]),
];

/// What the benchmark prints, with rounds of a hundredth of a second.
fn benchmark(scenario: &str, options: &[&str]) -> String {
    let mut command = Command::new(built("bench"));
    command
        .args([scenario, "--seconds", "0.01", "--rounds", "2"])
        .args(options);
    // Where its servers would leave the sockets of their operators.
    let run = tempfile::tempdir().expect("a directory");
    command.env("XDG_RUNTIME_DIR", run.path());
    // What this host has set for its own servers and clients.
    for name in [
        "LATCH_AUTH_TOKEN_FILE",
        "LATCHD_AUTH_TOKEN_FILE",
        "LFPD_LOCK_DIR",
    ] {
        command.env(name, "/nonexistent");
    }
    let (status, printed) = Running::start(&mut command).end();
    assert_eq!(status, 0, "{scenario}: {printed}");
    let left = fs::read_dir(run.path()).expect("it is ours").count();
    assert_eq!(left, 0, "{scenario}");
    printed
}

/// Several candidates of the example `leader`, which print to one file, so that the order of what
/// they say is that in which they said it.
struct Candidates {
    running: Vec<Running>,
    directory: tempfile::TempDir,
}

impl Candidates {
    fn start(daemon: &Daemon, count: usize) -> Candidates {
        let directory = tempfile::tempdir().expect("there is room for a directory");
        let running = (0..count)
            .map(|_| {
                let log = File::options()
                    .create(true)
                    .append(true)
                    .open(directory.path().join("log"));
                Running::printing_to(&mut example("leader", daemon), log.expect("a file"))
            })
            .collect();
        daemon.wait_for_waiters("leader", count as u64 - 1);
        Candidates { running, directory }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).expect("text")
    }

    /// Waits for the leader of the term that is the `number`th to begin, and gives its process
    /// number.
    fn leader_of_term(&self, number: usize) -> u32 {
        let mut leader = None;
        eventually(3 * PATIENCE, &format!("term {number} begins"), || {
            let log = self.log();
            let mut terms = log
                .lines()
                .filter_map(|line| line.split_once(" leads, term "));
            leader = terms
                .nth(number - 1)
                .and_then(|(name, _)| name.parse().ok());
            leader.is_some()
        });
        leader.expect("just read")
    }

    fn signal(&self, candidate: u32, signal: Signal) {
        let running = self.running.iter().find(|it| it.child.id() == candidate);
        let pid = Pid::from_child(&running.expect("it is one of them").child);
        kill_process(pid, signal).expect("it runs");
    }

    fn end(&mut self, candidate: u32) {
        self.running.retain(|it| it.child.id() != candidate);
    }
}

/// A process and its group, killed when dropped.
struct Running {
    child: Child,
    output: File,
}

impl Running {
    fn start(command: &mut Command) -> Running {
        Running::printing_to(
            command,
            tempfile::tempfile().expect("there is room for a file"),
        )
    }

    fn printing_to(command: &mut Command, output: File) -> Running {
        let handle = || output.try_clone().expect("descriptors are left");
        let child = command
            .stdin(Stdio::null())
            .stdout(handle())
            .stderr(handle())
            .process_group(0)
            .spawn()
            .expect("it was built");
        Running { child, output }
    }

    /// Waits for the end; its exit status and all that it printed.
    fn end(&mut self) -> (i32, String) {
        let status = wait_for_exit(&mut self.child, 2 * PATIENCE);
        (status.code().expect("an exit status"), self.printed())
    }

    /// All that it has printed until now.
    fn printed(&self) -> String {
        let len = self.output.metadata().expect("it is a file").len();
        let mut printed = vec![0; len as usize];
        self.output.read_exact_at(&mut printed, 0).expect("a file");
        String::from_utf8(printed).expect("UTF-8")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
            let _ = self.child.wait();
        }
    }
}

fn address(daemon: &Daemon) -> String {
    daemon.addr().to_string()
}

/// An example in Rust, against this daemon.
fn example(name: &str, daemon: &Daemon) -> Command {
    let mut command = Command::new(built(name));
    command.arg(address(daemon));
    command
}

/// An example for the shell, which finds `latch` and its server. Its files are its user's alone,
/// unless it says otherwise.
fn script(name: &str, daemon: &Daemon) -> Command {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let mut command = Command::new("sh");
    command
        .args(["-c", "umask 077; exec sh \"$@\"", "sh"])
        .arg(examples.join(name))
        .env("LATCH_SERVER", address(daemon));
    command
}

/// Where an example was built. `cargo test` builds them all, but not with `--test`.
fn built(name: &str) -> PathBuf {
    static BUILD: OnceLock<()> = OnceLock::new();
    BUILD.get_or_init(|| {
        let target = programs().parent().expect("it is below target");
        let mut cargo = Command::new(env!("CARGO"));
        cargo
            .args([
                "build",
                "--quiet",
                "--offline",
                "--examples",
                "--target-dir",
            ])
            .arg(target)
            .current_dir(env!("CARGO_MANIFEST_DIR"));
        if programs().ends_with("release") {
            cargo.arg("--release");
        }
        let status = cargo.status().expect("there is a cargo");
        assert!(status.success(), "{cargo:?}: {status}");
    });
    programs().join("examples").join(name)
}

fn programs() -> &'static Path {
    let latch = Path::new(env!("CARGO_BIN_EXE_latch"));
    latch.parent().expect("a program lies in a directory")
}
