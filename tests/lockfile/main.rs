//! Lock files as another program uses them: the shapes of the library, the weaknesses of lock
//! files, waiting, and the obstacles that an attacker or bad luck can put in the way.
//!
//! Some tests run this program again as another process or another user.

use std::error::Error;
use std::fs::{self, File, Permissions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::{chown, lchown, symlink, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{self, Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use latchd::lockfile::{
    Alive, Attempt, Busy, Cleaned, LockDetails, LockInfo, Obstacle, ReleaseOutcome, ReleaseTerms,
    Semaphore, SemaphoreConfig, SemaphoreError, SemaphoreGuard, SemaphoreOptions, SemaphoreResult,
    Settle, Slots, StaleRule, Status,
};
use tempfile::TempDir;

mod mounts;
#[path = "../support/mod.rs"]
mod support;

use rustix::fs::FlockOperation;
use rustix::process::{waitid, Pid, WaitId, WaitIdOptions};
use rustix::thread::gettid;
use support::limited::copy_program;
use support::locks::{flocked, locked_in_every_way};
use support::needs::{has_inotify, has_pidfds, needs, skipped, Program};
use support::stalls::{fair_test, in_time};
use support::{eventually, is_soon, program, wait_until_asleep, PATIENCE};

/// The number of no process.
const DEAD: u32 = 999_999_999;

/// A user who owns nothing.
const NOBODY: u32 = 65_534;

/// Long enough for any event, however busy the host is.
const LIMIT: Duration = Duration::from_secs(20);

/// So long that a waiter that only looks again, for the last time at [`LIMIT`], comes too late.
const SELDOM: Duration = Duration::from_secs(60);

struct Scratch(TempDir);

impl Scratch {
    fn new() -> Scratch {
        Scratch(tempfile::tempdir().expect("a directory"))
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("a.lock")
    }

    fn lock(&self) -> Semaphore {
        Semaphore::with_defaults(self.path()).expect("a lock path")
    }

    /// The lock with this text in its file.
    fn lock_with(&self, text: impl AsRef<[u8]>) -> Semaphore {
        fs::write(self.path(), text).expect("a lock file");
        self.lock()
    }

    fn text(&self) -> String {
        fs::read_to_string(self.path()).expect("a lock file")
    }

    fn make_old(&self, name: &str) {
        let file = File::options()
            .write(true)
            .open(self.0.path().join(name))
            .expect("a file");
        let then = SystemTime::now() - Duration::from_secs(7200);
        file.set_modified(then).expect("an old file");
    }

    fn names(&self) -> Vec<String> {
        names(self.0.path())
    }
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(directory)
        .expect("a directory")
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    names.sort();
    names
}

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("a clock")
        .as_secs()
}

fn config(stale_timeout: Duration, retry_interval: Duration) -> SemaphoreConfig {
    SemaphoreConfig {
        stale_timeout: Some(stale_timeout),
        retry_interval,
        acquire_timeout: Some(LIMIT),
    }
}

fn is_held<T>(attempt: &SemaphoreResult<T>) -> bool {
    matches!(attempt, Err(SemaphoreError::AlreadyLocked { .. }))
}

/// Takes a free lock for the process that `info` names.
fn take_detached(lock: &Semaphore, info: &LockInfo) {
    match lock.try_acquire_detached(info).expect("an attempt") {
        Attempt::Granted(()) => {}
        Attempt::Busy(busy) => panic!("{busy:?}"),
    }
}

fn release(lock: &Semaphore, terms: &ReleaseTerms) -> Result<(), Box<Busy>> {
    match lock.release(terms).expect("an attempt") {
        ReleaseOutcome::Released => Ok(()),
        ReleaseOutcome::Kept(busy) => Err(Box::new(busy)),
    }
}

/// What is known of a lock that is held.
fn details(lock: &Semaphore) -> LockDetails {
    let status = lock.status().expect("a status");
    status.details().expect("a held lock").clone()
}

/// A record of ours for this process, without a guard, with some lines changed. An empty value
/// removes the line.
fn record_with(changes: &[(&str, &str)]) -> String {
    let scratch = Scratch::new();
    take_detached(&scratch.lock(), &LockInfo::new());
    let mut text = String::new();
    for line in scratch.text().lines() {
        let key = line.split('=').next().unwrap_or_default();
        match changes.iter().find(|(name, _)| *name == key) {
            None => text.push_str(&format!("{line}\n")),
            Some((_, "")) => {}
            Some((key, value)) => text.push_str(&format!("{key}={value}\n")),
        }
    }
    for (key, _) in changes {
        assert!(
            scratch.text().contains(&format!("{key}=")),
            "no {key} in {}",
            scratch.text()
        );
    }
    text
}

/// The words that run this program again. It prints a line that begins with `=> `.
fn again(program: &Path, role: &str, lock: &Path) -> Vec<String> {
    let mut words = vec!["env".to_owned()];
    words.push(format!("LATCHD_TEST_ROLE={role}"));
    words.push(format!("LATCHD_TEST_LOCK={}", lock.display()));
    words.push(program.display().to_string());
    words.extend(
        [
            "--exact",
            "role",
            "--ignored",
            "--nocapture",
            "--test-threads=1",
        ]
        .map(str::to_owned),
    );
    words
}

fn this_program() -> PathBuf {
    std::env::current_exe().expect("this program")
}

fn answer_of(mut command: Command) -> String {
    let output = command.stdin(Stdio::null()).output().expect("a process");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let answer = text.lines().find_map(|line| line.split_once("=> "));
    match answer {
        Some((_, answer)) => answer.to_owned(),
        None => panic!(
            "no answer: {text}{}",
            String::from_utf8_lossy(&output.stderr)
        ),
    }
}

/// The answer of another process, started by a shell with these words first.
fn answer(before: &str, role: &str, lock: &Path) -> String {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{before} \"$@\""), "sh"]);
    shell.args(again(&this_program(), role, lock));
    answer_of(shell)
}

/// The answer for a user who owns nothing. `None` if this process cannot become that user.
fn answer_of_nobody(role: &str, lock: &Path) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        skipped(&["root"]);
        return None;
    }
    // That user may not see our build directory.
    let place = tempfile::Builder::new()
        .permissions(Permissions::from_mode(0o755))
        .tempdir()
        .expect("a directory");
    let program = place.path().join("program");
    copy_program(this_program(), &program);
    let mut command = Command::new("setpriv");
    command.args([
        format!("--reuid={NOBODY}"),
        format!("--regid={NOBODY}"),
        "--clear-groups".to_owned(),
    ]);
    command.args(again(&program, role, lock));
    command.current_dir("/");
    Some(answer_of(command))
}

/// The other process.
#[test]
#[ignore = "a part of the others"]
fn role() {
    let Ok(role) = std::env::var("LATCHD_TEST_ROLE") else {
        return;
    };
    let path = PathBuf::from(std::env::var_os("LATCHD_TEST_LOCK").expect("a path"));
    let (role, option) = role.split_once(':').unwrap_or((&role, ""));
    let short = SemaphoreConfig {
        stale_timeout: Some(Duration::from_secs(1)),
        ..SemaphoreConfig::default()
    };
    let options = SemaphoreOptions::new().sync(option != "unsynced");
    let lock = match Semaphore::with_options(&path, short, options) {
        Ok(lock) => lock,
        Err(error) => {
            println!("=> {error}");
            return;
        }
    };
    match role {
        "try" => match lock.try_acquire() {
            Ok(guard) => {
                let text = fs::read_to_string(&path).expect("a record");
                println!("=> granted {}", text.contains("x-live=flock"));
                drop(guard);
            }
            Err(error) => println!("=> {error}; {:?}", names_if_seen(&path)),
        },
        "hold" => {
            let _guard = lock.acquire().expect("the lock");
            println!("=> held");
            let _ = io::stdin().read(&mut [0]);
        }
        "clean" => println!("=> {:?}", lock.clean()),
        "force" => println!(
            "=> {:?}",
            lock.force_release().map_err(|why| why.to_string())
        ),
        "namespace" => {
            let _guard = lock.try_acquire().expect("a free lock");
            let text = fs::read_to_string(&path).expect("a record");
            let line = text.lines().find_map(|line| line.strip_prefix("x-pidns="));
            println!("=> {line:?}");
        }
        "exhaust" => {
            let mut files = Vec::new();
            while let Ok(file) = File::open("/dev/null") {
                files.push(file);
            }
            let without = lock.try_acquire().map(drop);
            files.truncate(files.len() - 1);
            let with_one = lock.try_acquire().map(drop);
            drop(files);
            let with_all = lock.try_acquire();
            let text = fs::read_to_string(&path).unwrap_or_default();
            let is_refused =
                |result: &SemaphoreResult<()>| matches!(result, Err(SemaphoreError::IoError(_)));
            println!(
                "=> {} {} {} {}",
                is_refused(&without),
                is_refused(&with_one),
                with_all.is_ok(),
                text.contains("\nx-boot=") && text.contains("\nx-start=")
            );
        }
        other => panic!("{other}"),
    }
}

fn names_if_seen(path: &Path) -> Vec<String> {
    let directory = path.parent().expect("a directory");
    fs::read_dir(directory).map_or_else(|_| Vec::new(), |_| names(directory))
}

/// Another process that holds a lock until it is told to end, or killed.
struct Holder {
    child: Child,
}

impl Holder {
    fn start(path: &Path) -> Holder {
        let words = again(&this_program(), "hold", path);
        let mut child = Command::new(&words[0])
            .args(&words[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program");
        let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        assert!(lines.any(|line| line.expect("a line").contains("=> held")));
        Holder { child }
    }

    fn kill(mut self) {
        self.child.kill().expect("a process");
        self.child.wait().expect("its end");
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// The shapes that other programs are written against.

/// Compiles only with exactly these shapes.
#[test]
fn the_types_have_the_shapes_that_programs_expect() {
    let info = LockInfo {
        pid: 1,
        timestamp: 2,
        tag: None,
    };
    let SemaphoreConfig {
        stale_timeout,
        retry_interval,
        acquire_timeout,
    } = SemaphoreConfig::default();
    assert_eq!(stale_timeout, Some(Duration::from_secs(3600)));
    assert_eq!(retry_interval, Duration::from_millis(100));
    assert_eq!(acquire_timeout, None);
    let config = SemaphoreConfig {
        stale_timeout,
        retry_interval,
        acquire_timeout,
    };
    fn is_plain<T: Clone + std::fmt::Debug + Default>(_: &T) {}
    is_plain(&config);
    is_plain(&info);
    let LockInfo {
        pid,
        timestamp,
        tag,
    } = LockInfo::with_tag("t");
    assert_eq!((pid, tag.as_deref()), (process::id(), Some("t")));
    assert!(timestamp <= now());
    assert_eq!(LockInfo::default().pid, process::id());
    let parsed: Result<LockInfo, SemaphoreError> = LockInfo::parse("pid=1\ntimestamp=2\n");
    assert_eq!(parsed.expect("a record").serialize(), info.serialize());
    assert!(info.is_stale(Duration::from_secs(1)));

    let scratch = Scratch::new();
    let lock: Semaphore =
        Semaphore::new(scratch.path().to_str().expect("text"), config).expect("a lock path");
    assert_eq!(lock.path(), scratch.path());
    assert!(!lock.is_locked() && lock.lock_info().is_none());
    let guard: SemaphoreGuard<'_> = lock.try_acquire_with_info(info).expect("a free lock");
    assert!(lock.is_locked());
    assert!(format!("{lock:?} {guard:?}").contains("Semaphore"));
    let error = lock.try_acquire().unwrap_err();
    match &error {
        SemaphoreError::AlreadyLocked {
            holder_pid,
            locked_since,
        } => assert!(*holder_pid == Some(1) && locked_since.is_some()),
        other => panic!("{other}"),
    }
    drop(guard);
    drop(lock.acquire().unwrap());
    drop(lock.acquire_with_info(LockInfo::new()).unwrap());
    drop(lock.acquire_timeout(Duration::ZERO).unwrap());
    lock.force_release().unwrap();
    assert!(Semaphore::is_process_running(process::id()));
    assert!(!Semaphore::is_process_running(DEAD));
}

/// Compiles only with exactly these signatures.
#[test]
fn the_calls_have_the_signatures_that_programs_expect() {
    type Guarded<'a> = SemaphoreResult<SemaphoreGuard<'a>>;
    let _: fn() -> LockInfo = LockInfo::new;
    let _: fn(&'static str) -> LockInfo = LockInfo::with_tag;
    let _: fn(String) -> LockInfo = LockInfo::with_tag;
    let _: fn(&LockInfo) -> String = LockInfo::serialize;
    let _: fn(&str) -> Result<LockInfo, SemaphoreError> = LockInfo::parse;
    let _: fn(&LockInfo, Duration) -> bool = LockInfo::is_stale;
    let _: fn(&'static str, SemaphoreConfig) -> SemaphoreResult<Semaphore> = Semaphore::new;
    let _: fn(&'static Path, SemaphoreConfig) -> SemaphoreResult<Semaphore> = Semaphore::new;
    let _: fn(&'static str) -> SemaphoreResult<Semaphore> = Semaphore::with_defaults;
    let _: fn(PathBuf) -> SemaphoreResult<Semaphore> = Semaphore::with_defaults;
    let _: fn(&Semaphore) -> &Path = Semaphore::path;
    let _: fn(&Semaphore) -> bool = Semaphore::is_locked;
    let _: fn(&Semaphore) -> Option<LockInfo> = Semaphore::lock_info;
    let _: for<'a> fn(&'a Semaphore) -> Guarded<'a> = Semaphore::try_acquire;
    let _: for<'a> fn(&'a Semaphore, LockInfo) -> Guarded<'a> = Semaphore::try_acquire_with_info;
    let _: for<'a> fn(&'a Semaphore) -> Guarded<'a> = Semaphore::acquire;
    let _: for<'a> fn(&'a Semaphore, LockInfo) -> Guarded<'a> = Semaphore::acquire_with_info;
    let _: for<'a> fn(&'a Semaphore, Duration) -> Guarded<'a> = Semaphore::acquire_timeout;
    let _: fn(&Semaphore) -> SemaphoreResult<()> = Semaphore::force_release;
    let _: fn(u32) -> bool = Semaphore::is_process_running;
    let _: fn(io::Error) -> SemaphoreError = SemaphoreError::from;
    let _: fn(Option<u32>, Option<u64>) -> SemaphoreError =
        |holder_pid, locked_since| SemaphoreError::AlreadyLocked {
            holder_pid,
            locked_since,
        };
    let _: fn(String) -> SemaphoreError = SemaphoreError::InvalidPath;
    let _: fn(io::Error) -> SemaphoreError = SemaphoreError::IoError;
    let _: fn(String) -> SemaphoreError = SemaphoreError::ParseError;
    let _: [SemaphoreError; 2] = [SemaphoreError::NotLocked, SemaphoreError::Timeout];
    fn is_shared<T: Send + Sync + std::fmt::Debug>() {}
    is_shared::<Semaphore>();
    is_shared::<SemaphoreGuard<'_>>();

    let scratch = Scratch::new();
    let semaphore = scratch.lock();
    let info = LockInfo::with_tag("build");
    let guard = semaphore.try_acquire_with_info(info.clone()).unwrap();
    let held = semaphore.lock_info().unwrap();
    assert_eq!((held.pid, held.tag), (process::id(), info.tag));
    drop(guard);
    let guard = semaphore.acquire_with_info(LockInfo::with_tag(format!("run {}", 2)));
    drop(guard.unwrap());
}

#[test]
fn errors_have_the_texts_that_programs_expect() {
    let held = |holder_pid, locked_since| SemaphoreError::AlreadyLocked {
        holder_pid,
        locked_since,
    };
    assert_eq!(held(None, None).to_string(), "Lock already held");
    assert_eq!(
        held(Some(5), None).to_string(),
        "Lock already held by PID 5"
    );
    assert_eq!(
        held(Some(5), Some(7)).to_string(),
        "Lock already held by PID 5 since 7"
    );
    assert_eq!(
        SemaphoreError::InvalidPath("m".into()).to_string(),
        "Invalid path: m"
    );
    assert_eq!(SemaphoreError::NotLocked.to_string(), "Lock not held");
    assert_eq!(
        SemaphoreError::Timeout.to_string(),
        "Timeout waiting for lock"
    );
    assert_eq!(
        SemaphoreError::ParseError("m".into()).to_string(),
        "Parse error: m"
    );
    let error = SemaphoreError::from(io::Error::other("e"));
    assert_eq!(error.to_string(), "IO error: e");
    assert!(error.source().is_some() && SemaphoreError::Timeout.source().is_none());
}

#[test]
fn no_duration_is_too_long() {
    let scratch = Scratch::new();
    for duration in [Duration::from_secs(u64::MAX), Duration::MAX, Duration::ZERO] {
        let config = SemaphoreConfig {
            stale_timeout: Some(duration),
            retry_interval: duration,
            acquire_timeout: Some(duration),
        };
        let lock = Semaphore::new(scratch.path(), config).expect("a lock path");
        let guard = lock.acquire().expect("a free lock");
        assert!(is_held(&lock.try_acquire()));
        let status = lock.status().expect("a status");
        assert!(matches!(status, Status::Held(details) if !details.is_stale));
        assert!(matches!(
            lock.acquire_timeout(Duration::from_millis(20)),
            Err(SemaphoreError::Timeout)
        ));
        drop(guard);
        drop(lock.acquire_timeout(Duration::MAX).expect("a free lock"));
    }
}

#[test]
fn a_name_that_is_too_long_is_an_error_and_no_panic() {
    let scratch = Scratch::new();
    let lock = Semaphore::with_defaults(scratch.0.path().join("x".repeat(500))).expect("a path");
    assert!(!lock.is_locked() && lock.lock_info().is_none());
    let _ = lock.force_release();
    assert!(matches!(
        lock.try_acquire(),
        Err(SemaphoreError::IoError(_))
    ));
    assert!(lock.status().is_err());
    assert!(scratch.names().is_empty());
}

#[test]
fn releasing_nothing_by_force_is_no_error() {
    let scratch = Scratch::new();
    scratch.lock().force_release().expect("nothing to do");
    let guard = scratch.lock_with("pid=1\ntimestamp=1\n");
    guard.force_release().expect("a release");
    guard.force_release().expect("nothing to do");
    assert!(matches!(
        guard.release(&ReleaseTerms::default()),
        Err(SemaphoreError::NotLocked)
    ));
}

#[test]
fn a_tag_and_a_token_are_in_the_file() {
    let scratch = Scratch::new();
    let options = SemaphoreOptions::new().token("secret\tword ").mode(0o600);
    let lock = Semaphore::with_options(scratch.path(), SemaphoreConfig::default(), options)
        .expect("a lock path");
    let info = LockInfo::with_tag("nightly \"run\"");
    take_detached(&lock, &info);
    let details = details(&lock);
    assert_eq!(details.tag.as_deref(), Some("nightly \"run\""));
    assert_eq!(
        fs::metadata(scratch.path()).expect("a file").mode() & 0o777,
        0o600
    );
    let asked = |token: &str| {
        let terms = ReleaseTerms {
            token: Some(token.into()),
            ..ReleaseTerms::default()
        };
        release(&lock, &terms)
    };
    assert_eq!(
        asked("other").expect_err("another token").obstacle,
        Obstacle::NotStale
    );
    asked("secret\tword ").expect("the token");
    assert!(scratch.names().is_empty());
}

#[test]
fn a_release_succeeds_only_if_its_terms_are_met() {
    let scratch = Scratch::new();
    let lock = scratch.lock_with(record_with(&[]));
    let by_pid = |pid| ReleaseTerms {
        pid: Some(pid),
        ..ReleaseTerms::default()
    };
    assert!(release(&lock, &ReleaseTerms::default()).is_err());
    assert!(release(&lock, &by_pid(1)).is_err());
    release(&lock, &by_pid(process::id())).expect("its own");

    // Any process can release the lock of a dead holder, even a young one.
    let lock = scratch.lock_with(record_with(&[("pid", "999999999")]));
    release(&lock, &ReleaseTerms::default()).expect("of the dead");

    // Only force releases the lock of a guard.
    let guard = lock.try_acquire().expect("a free lock");
    let busy = release(&lock, &by_pid(process::id())).expect_err("a guard");
    assert_eq!(
        (busy.obstacle, busy.details.alive),
        (Obstacle::Locked, Alive::Yes)
    );
    lock.force_release().expect("force");
    assert!(!guard.is_held());
}

#[test]
fn only_the_holder_itself_releases_a_young_lock_it_cannot_see() {
    let scratch = Scratch::new();
    let own = ReleaseTerms {
        asking: process::id(),
        ..ReleaseTerms::default()
    };
    // A process of another host may have the number that is named, too.
    let named = ReleaseTerms {
        pid: Some(process::id()),
        asking: 1,
        ..ReleaseTerms::default()
    };
    for (what, changes, is_released) in [
        (
            "another boot",
            &[("x-host", "h"), ("x-boot", "b")][..],
            false,
        ),
        ("another container", &[("x-pidns", "1")], false),
        (
            "a host without a boot",
            &[("x-host", "h"), ("x-boot", "")],
            false,
        ),
        ("a host renamed since", &[("x-host", "h")], true),
    ] {
        let text = record_with(changes);
        for terms in [&own, &named] {
            let lock = scratch.lock_with(&text);
            let released = release(&lock, terms);
            assert_eq!(released.is_ok(), is_released, "{what}: {terms:?}");
            if let Err(busy) = released {
                assert_eq!(busy.obstacle, Obstacle::NotStale, "{what}");
                assert_eq!(scratch.text(), text, "{what}");
            }
        }
    }
}

#[test]
fn locks_of_a_reader_block_no_release_by_the_holder() {
    let scratch = Scratch::new();
    let token = ("pid", "1\nx-token=abc");
    let terms = |pid, token: Option<&str>, asking| ReleaseTerms {
        pid,
        token: token.map(str::to_owned),
        asking,
        ..ReleaseTerms::default()
    };
    let own = process::id();
    for (text, terms, is_released) in [
        (record_with(&[]), terms(None, None, own), true),
        (record_with(&[]), terms(Some(own), None, 1), true),
        (record_with(&[token]), terms(None, Some("abc"), own), true),
        (record_with(&[]), terms(Some(1), None, own), false),
        (record_with(&[token]), terms(None, Some("abd"), own), false),
        // A taker may have locked these, as far as the locks can tell.
        (
            record_with(&[("pid", "999999999")]),
            terms(None, None, own),
            false,
        ),
        (
            format!("pid={DEAD}\ntimestamp=1\n"),
            terms(Some(DEAD), None, own),
            false,
        ),
    ] {
        let lock = scratch.lock_with(&text);
        let _reader = locked_in_every_way(&scratch.path());
        let released = release(&lock, &terms);
        assert_eq!(released.is_ok(), is_released, "{terms:?} {text}");
        assert_eq!(scratch.path().exists(), !is_released);
    }
}

#[test]
fn a_flock_of_a_reader_keeps_no_lock_from_anyone() {
    let scratch = Scratch::new();
    let named = ReleaseTerms {
        pid: Some(DEAD),
        ..ReleaseTerms::default()
    };
    let dead = DEAD.to_string();
    let guard = ("pid", format!("{DEAD}\nx-fcntl=read\nx-live=flock"));
    for (text, is_stale) in [
        (record_with(&[]), false),
        (record_with(&[("pid", &dead)]), false),
        (format!("pid={DEAD}\ntimestamp=1\n"), true),
        (record_with(&[(guard.0, &guard.1)]), true),
    ] {
        for operation in [FlockOperation::LockShared, FlockOperation::LockExclusive] {
            let lock = scratch.lock_with(&text);
            let reader = flocked(&scratch.path(), operation);
            let Status::Held(details) = lock.status().expect("a status") else {
                panic!("{text}");
            };
            assert_eq!(details.is_stale, is_stale, "{text}");
            if is_stale {
                let inode = || fs::metadata(scratch.path()).expect("a lock file").ino();
                let found = inode();
                let taken = lock.try_acquire().expect("a stale lock");
                assert!(taken.is_held() && is_held(&lock.try_acquire()));
                // The guard's record promises a flock(2), which the reader has on the old file.
                assert_ne!(inode(), found, "{text}");
                taken.release().expect("a release");
                fs::write(scratch.path(), &text).expect("a lock file");
                drop(reader);
                let _reader = flocked(&scratch.path(), operation);
                assert!(lock.clean().expect("cleaning").lock, "{text}");
                continue;
            }
            let terms = if text.contains(&dead) {
                named.clone()
            } else {
                ReleaseTerms {
                    asking: process::id(),
                    ..ReleaseTerms::default()
                }
            };
            release(&lock, &terms).expect("a release");
            assert!(!scratch.path().exists());
        }
    }
}

/// Such a record is of a holder that has the file locked by flock(2) alone.
#[test]
fn a_flock_keeps_the_lock_of_a_guard_without_a_read_lock() {
    let scratch = Scratch::new();
    let dead = format!("{DEAD}\nx-live=flock");
    let lock = scratch.lock_with(record_with(&[("pid", &dead)]));
    let holder = flocked(&scratch.path(), FlockOperation::LockExclusive);
    assert!(is_held(&lock.try_acquire()));
    let terms = ReleaseTerms {
        pid: Some(DEAD),
        ..ReleaseTerms::default()
    };
    assert!(release(&lock, &terms).is_err());
    drop(holder);
    // A process that another test starts has the file open until it runs its program.
    eventually(PATIENCE, "the lock is free", || lock.try_acquire().is_ok());
}

// The weaknesses of lock files.

#[test]
fn creation_replaces_nothing_and_shows_only_complete_files() {
    let scratch = Scratch::new();
    let lock = scratch.lock();
    let seen = AtomicU32::new(0);
    thread::scope(|scope| {
        let path = scratch.path();
        let (stop, stopped) = mpsc::channel::<()>();
        let seen = &seen;
        let reader = scope.spawn(move || {
            while stopped.try_recv() == Err(mpsc::TryRecvError::Empty) {
                if let Ok(text) = fs::read_to_string(&path) {
                    assert!(
                        text.starts_with("pid=") && text.ends_with("x-live=flock\n"),
                        "{text:?}"
                    );
                    seen.fetch_add(1, Ordering::SeqCst);
                }
            }
        });
        let began = Instant::now();
        let is_over = |limit| began.elapsed() > limit;
        while !is_over(Duration::from_millis(300))
            || (seen.load(Ordering::SeqCst) == 0 && !is_over(LIMIT) && !reader.is_finished())
        {
            let guard = lock.try_acquire().expect("a free lock");
            assert!(is_held(&lock.try_acquire()));
            drop(guard);
        }
        drop(stop);
        reader.join().expect("the reader");
    });
    assert!(seen.load(Ordering::SeqCst) > 0);
}

#[test]
fn one_of_many_takers_gets_a_stale_lock() {
    let scratch = Scratch::new();
    for _ in 0..30 {
        fs::write(scratch.path(), format!("pid={DEAD}\ntimestamp=1\n")).expect("a stale lock");
        let locks: Vec<Semaphore> = (0..8).map(|_| scratch.lock()).collect();
        let granted: Vec<_> = thread::scope(|scope| {
            let takers: Vec<_> = locks
                .iter()
                .map(|lock| scope.spawn(|| lock.try_acquire()))
                .collect();
            takers
                .into_iter()
                .filter_map(|taker| taker.join().expect("a taker").ok())
                .collect()
        });
        assert_eq!(granted.len(), 1);
        drop(granted);
        assert!(scratch.names().is_empty());
    }
}

#[test]
fn a_lock_is_not_born_stale_after_a_long_wait() {
    let scratch = Scratch::new();
    let lock = Semaphore::new(scratch.path(), config(Duration::from_secs(1), SELDOM))
        .expect("a lock path");
    let guard = lock.try_acquire().expect("a free lock");
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let long_ago = LockInfo {
                pid: process::id(),
                timestamp: 1,
                tag: None,
            };
            lock.acquire_with_info(long_ago)
        });
        // Longer than the lock may be old, in whole seconds of the wall's clock.
        thread::sleep(Duration::from_millis(2100));
        let released = now();
        drop(guard);
        let _guard = waiter.join().expect("the waiter").expect("the lock");
        let info = lock.lock_info().expect("a record");
        assert!(info.timestamp >= released, "{} {released}", info.timestamp);
    });
}

#[test]
fn a_living_holder_is_not_robbed_however_old_its_lock() {
    let scratch = Scratch::new();
    for rule in [StaleRule::AgeAndLiveness, StaleRule::Age] {
        let options = SemaphoreOptions::new().stale_rule(rule);
        let lock = Semaphore::with_options(
            scratch.path(),
            config(Duration::from_secs(1), SELDOM),
            options,
        )
        .expect("a lock path");
        let guard = lock.try_acquire().expect("a free lock");
        let since = guard_timestamp(&scratch);
        fs::write(
            scratch.path(),
            scratch.text().replacen(&since, "0000000009", 1),
        )
        .expect("an old lock");
        assert!(is_held(&lock.try_acquire()), "{rule:?}");
        assert!(guard.is_held());
    }
    // No process has it locked, but its holder is alive.
    let lock = scratch.lock_with(record_with(&[("timestamp", "9")]));
    assert!(is_held(&lock.try_acquire()));
    let details = details(&lock);
    assert!(details.alive == Alive::Yes && !details.is_stale && details.stale_in.is_none());
    // By age alone it can be taken over.
    let options = SemaphoreOptions::new().stale_rule(StaleRule::Age);
    let lock = Semaphore::with_options(scratch.path(), SemaphoreConfig::default(), options)
        .expect("a lock path");
    drop(lock.try_acquire().expect("an old lock"));
}

fn guard_timestamp(scratch: &Scratch) -> String {
    let text = scratch.text();
    let (_, rest) = text.split_once("timestamp=").expect("a timestamp");
    rest[..10].to_owned()
}

/// The holder is of another user, and cannot even be signalled.
#[test]
fn a_living_holder_of_another_user_is_not_robbed() {
    needs!(root);
    let scratch = Scratch::new();
    fs::set_permissions(scratch.0.path(), Permissions::from_mode(0o777)).expect("a directory");
    scratch.lock_with(format!("pid=1\ntimestamp={}\n", now() - 10));
    if let Some(answer) = answer_of_nobody("try", &scratch.path()) {
        assert!(
            answer.starts_with("Lock already held by PID 1 since"),
            "{answer}"
        );
    }
}

#[test]
fn a_release_leaves_the_successors_file() {
    let scratch = Scratch::new();
    let (first, second) = (scratch.lock(), scratch.lock());
    for by in ["drop", "release"] {
        let robbed = first.try_acquire().expect("a free lock");
        fs::remove_file(scratch.path()).expect("the lock file");
        let successor = second.try_acquire().expect("a free lock");
        assert!(!robbed.is_held() && successor.is_held());
        if by == "drop" {
            drop(robbed);
        } else {
            assert!(matches!(robbed.release(), Err(SemaphoreError::Lost)));
        }
        assert!(successor.is_held());
        successor.release().expect("a release");
    }
}

#[test]
fn an_unreadable_file_is_held_until_it_is_old() {
    for text in ["", "pid=", "pid=5\n", "pid=5\ntimest", "pid=5\ntag=x\n"] {
        let scratch = Scratch::new();
        let lock = scratch.lock_with(text);
        assert!(is_held(&lock.try_acquire()), "{text:?}");
        let status = lock.status().expect("a status");
        assert!(
            matches!(&status, Status::Unreadable(details) if !details.is_stale),
            "{text:?}"
        );
        let busy = release(&lock, &ReleaseTerms::default()).expect_err("young");
        assert_eq!(busy.obstacle, Obstacle::NotStale);
        scratch.make_old("a.lock");
        assert!(details(&lock).is_stale, "{text:?}");
        // A process that another test is starting has our locks for a moment.
        drop(lock.acquire_timeout(LIMIT).expect("an old file"));
        assert!(scratch.names().is_empty());
    }
}

#[test]
fn a_later_process_with_the_same_number_does_not_hold_it() {
    let scratch = Scratch::new();
    // Our record says when its process was started. The other one does not, but this process is
    // younger than the lock.
    for text in [
        record_with(&[("timestamp", "9"), ("x-start", "1")]),
        format!("pid={}\ntimestamp=9\n", process::id()),
    ] {
        let lock = scratch.lock_with(&text);
        assert_eq!(details(&lock).alive, Alive::No, "{text}");
        drop(lock.try_acquire().expect("a stale lock"));
    }
}

#[test]
fn a_lock_of_another_host_is_judged_by_age_alone() {
    let scratch = Scratch::new();
    let elsewhere = [("x-host", "elsewhere"), ("x-boot", "another")];
    for change in [&elsewhere[..], &[("x-pidns", "1")]] {
        let old = record_with(&[&[("timestamp", "9")], change].concat());
        let lock = scratch.lock_with(old);
        assert_eq!(details(&lock).alive, Alive::Unknown);
        drop(lock.try_acquire().expect("an old lock"));
        let lock = scratch.lock_with(record_with(&[&[("pid", "999999999")], change].concat()));
        assert_eq!(details(&lock).alive, Alive::Unknown);
        assert!(is_held(&lock.try_acquire()));
    }
    let before_boot = record_with(&[
        ("x-boot", "00000000-0000-0000-0000-000000000000"),
        ("timestamp", "9"),
    ]);
    let lock = scratch.lock_with(before_boot);
    assert_eq!(details(&lock).alive, Alive::No);
    drop(lock.try_acquire().expect("a lock of an earlier boot"));
}

/// The name of the host may have changed since the grant.
#[test]
fn the_same_boot_is_this_kernel_whatever_the_name_of_the_host() {
    let scratch = Scratch::new();
    let renamed = record_with(&[("x-host", "elsewhere"), ("timestamp", "9")]);
    let lock = scratch.lock_with(&renamed);
    assert_eq!(details(&lock).alive, Alive::Yes);
    assert!(is_held(&lock.try_acquire()));
    // Its guard is gone, and so is its process.
    let dead = renamed.replace(
        &format!("pid={}\n", process::id()),
        &format!("pid={DEAD}\n"),
    );
    let lock = scratch.lock_with(dead);
    assert_eq!(details(&lock).alive, Alive::No);
    drop(lock.try_acquire().expect("a lock of the dead"));
}

/// A cloned host has our name and another boot, and its grants are recent.
#[test]
fn a_grant_of_another_boot_under_our_name_may_be_of_a_clone() {
    let scratch = Scratch::new();
    let boot = ("x-boot", "00000000-0000-0000-0000-000000000000");
    let text = record_with(&[boot]);
    let lock = scratch.lock_with(&text);
    let details = details(&lock);
    assert_eq!((details.alive, details.is_stale), (Alive::Unknown, false));
    assert!(is_held(&lock.try_acquire()));
    assert_eq!(scratch.text(), text);
}

/// The answer of another process for an old lock of a living holder, with errors on this file.
fn answer_without(strace: &Program, file: &str, error: &str, lock: &Path) -> String {
    let inject = format!("inject=openat,readlink,readlinkat:error={error}");
    let options = ["-P", file, "-e", &inject];
    let (answer, trace) = traced(strace, &options, "try", lock);
    assert!(trace.contains("(INJECTED)"), "{trace}");
    answer
}

#[test]
fn a_holder_that_cannot_be_judged_is_not_robbed() {
    let strace = needs!("strace");
    let scratch = Scratch::new();
    let text = record_with(&[("timestamp", "9")]);
    scratch.lock_with(&text);
    let held = format!(
        "Lock already held by PID {} since 9; [\"a.lock\"]",
        process::id()
    );
    for file in ["/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"] {
        for (error, expected) in [
            ("ENOENT", &*held),
            (
                "ENFILE",
                "IO error: Too many open files in system (os error 23)",
            ),
        ] {
            let answer = answer_without(&strace, file, error, &scratch.path());
            assert!(answer.starts_with(expected), "{file}: {answer}");
            assert_eq!(scratch.text(), text, "{file} {error}");
        }
    }
}

/// A kernel without pid namespaces has no such file.
#[test]
fn a_pid_namespace_that_cannot_be_read_is_written_as_unknown() {
    let strace = needs!("strace");
    let scratch = Scratch::new();
    for (error, expected) in [("EACCES", "Some(\"unknown\")"), ("ENOENT", "None")] {
        let inject = format!("inject=readlink,readlinkat:error={error}");
        let options = ["-P", "/proc/self/ns/pid", "-e", &inject];
        let (answer, _) = traced(&strace, &options, "namespace", &scratch.path());
        assert_eq!(answer, expected, "{error}");
    }
}

/// In a time namespace the process and the host seem to start at other times.
#[test]
fn a_taker_in_another_time_namespace_robs_no_living_holder() {
    let unshared = "unshare --time --boottime 1000000 --fork";
    if !Command::new("sh")
        .args(["-c", &format!("{unshared} true")])
        .output()
        .is_ok_and(|run| run.status.success())
    {
        skipped(&["time namespace"]);
        return;
    }
    let scratch = Scratch::new();
    scratch.lock_with(record_with(&[("timestamp", "9")]));
    let held = format!("Lock already held by PID {} since 9; ", process::id());
    let answer = answer(unshared, "try", &scratch.path());
    assert!(answer.starts_with(&held), "{answer}");
    // A grant in the namespace, judged outside.
    let mut there = Command::new("sh");
    there.args([
        "-c",
        &format!("exec {unshared} --kill-child sh -c 'echo $$; exec cat'"),
    ]);
    let mut there = there
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a shell");
    let mut pid = String::new();
    let mut lines = BufReader::new(there.stdout.take().expect("a pipe"));
    lines.read_line(&mut pid).expect("a process number");
    let lock = scratch.lock_with(record_with(&[
        ("timestamp", "9"),
        ("pid", pid.trim()),
        ("x-start", "1"),
    ]));
    let details = details(&lock);
    drop(there.stdin.take());
    there.wait().expect("its end");
    assert_eq!((details.alive, details.is_stale), (Alive::Yes, false));
}

#[test]
fn a_lock_from_the_future_is_as_old_as_its_file() {
    let scratch = Scratch::new();
    for timestamp in [now() + 100_000, u64::MAX] {
        let lock = scratch.lock_with(format!("pid={DEAD}\ntimestamp={timestamp}\n"));
        assert!(is_held(&lock.try_acquire()));
        scratch.make_old("a.lock");
        drop(lock.try_acquire().expect("an old lock"));
    }
}

/// Without unnamed files, too, the clock of the file system tells the age.
#[test]
fn the_age_of_a_file_is_that_of_its_file_system() {
    let [libfaketime, strace] = needs!("libfaketimeMT.so.1", "strace");
    let scratch = Scratch::new();
    scratch.lock_with("");
    let ahead = SystemTime::now() + Duration::from_secs(1000);
    let file = File::options().write(true).open(scratch.path());
    file.expect("a file").set_modified(ahead).expect("a time");
    // The clock of the process is two hours ahead.
    let preload = format!("LD_PRELOAD={}", libfaketime.path().display());
    let words = ["env".into(), preload, "FAKETIME=+2h".into()];
    let no_unnamed = ["-P", ".", "-e", "inject=openat:error=EOPNOTSUPP"];
    for options in [&["-e", "trace=openat"][..], &no_unnamed] {
        let again = again(&this_program(), "try", &scratch.path());
        let words = words.iter().chain(&again);
        let (answer, trace) = traced_words(&strace, options, words);
        assert_eq!(answer, "Lock already held; [\"a.lock\"]", "{trace}");
        assert!(trace.contains("O_TMPFILE"), "{trace}");
        assert_eq!(
            trace.contains("(INJECTED)"),
            options == no_unnamed,
            "{trace}"
        );
        assert_eq!(scratch.names(), ["a.lock"]);
    }
}

/// Living holders keep their locks, however far ahead our clock is.
#[test]
fn a_clock_that_jumps_ahead_robs_no_living_holder() {
    let scratch = Scratch::new();
    let lock = scratch.lock_with(record_with(&[("timestamp", "1")]));
    assert!(is_held(&lock.try_acquire()));
}

#[test]
fn cleaning_spares_what_may_still_be_used() {
    let scratch = Scratch::new();
    let lock = scratch.lock();
    let own = process::id();
    let random = "0123456789abcdef";
    let doomed = [
        format!("a.lock.{DEAD}.{random}.tmp"),
        format!(".sema-{random}~"),
    ];
    let spared = [
        format!("a.lock.{own}.{random}.tmp"),
        format!("a.lock.{DEAD}.0123456789abcde.tmp"),
        format!("a.lock.{DEAD}.0123456789ABCDEF.tmp"),
        format!("a.lock.+5.{random}.tmp"),
        format!("b.lock.{DEAD}.{random}.tmp"),
        format!("{DEAD}.{random}.tmp"),
        "a.lock.tmp".to_owned(),
        "a.lock.old".to_owned(),
        ".sema-0123~".to_owned(),
    ];
    for name in doomed.iter().chain(&spared) {
        fs::write(scratch.0.path().join(name), "").expect("a file");
    }
    assert_eq!(lock.clean().expect("cleaning"), Cleaned::default());
    for name in doomed.iter().chain(&spared) {
        scratch.make_old(name);
    }
    let link = format!("a.lock.{DEAD}.fedcba9876543210.tmp");
    symlink(
        scratch.0.path().join(&spared[0]),
        scratch.0.path().join(&link),
    )
    .expect("a link");
    // While a process has it locked, it is in use.
    let in_use = File::open(scratch.0.path().join(&doomed[1])).expect("a file");
    rustix::fs::flock(&in_use, rustix::fs::FlockOperation::LockExclusive).expect("a lock");
    assert_eq!(lock.clean().expect("cleaning").temporaries, 1);
    drop(in_use);
    // A process that another test is starting has our locks for a moment.
    let over = Instant::now() + LIMIT;
    while lock.clean().expect("cleaning").temporaries == 0 {
        assert!(Instant::now() < over, "{:?}", scratch.names());
    }
    let mut left = spared.to_vec();
    left.push(link);
    left.sort();
    assert_eq!(scratch.names(), left);
}

#[test]
fn a_stale_lock_is_cleaned_in_a_directory_without_listing() {
    needs!(root);
    let scratch = Scratch::new();
    scratch.lock_with(format!("pid={DEAD}\ntimestamp=1\n"));
    fs::set_permissions(scratch.0.path(), Permissions::from_mode(0o733)).expect("a directory");
    let answer = answer_of_nobody("clean", &scratch.path()).expect("we are root");
    assert_eq!(answer, "Ok(Cleaned { lock: true, temporaries: 0 })");
    assert!(scratch.names().is_empty());
}

#[test]
fn a_link_is_followed_only_if_it_is_not_planted() {
    let scratch = Scratch::new();
    let target = scratch.0.path().join("target.lock");
    symlink(&target, scratch.path()).expect("a link");
    let lock = scratch.lock();
    let guard = lock.try_acquire().expect("a free lock");
    assert!(guard.is_held() && fs::symlink_metadata(&target).expect("the target").is_file());
    drop(guard);
    assert_eq!(scratch.names(), ["a.lock"]);

    // A link that appears after the path was resolved is not followed.
    fs::remove_file(scratch.path()).expect("the link");
    let lock = scratch.lock();
    symlink(&target, scratch.path()).expect("a link");
    assert!(is_held(&lock.try_acquire()));
    assert!(!target.exists());
    fs::write(&target, format!("pid={DEAD}\ntimestamp=1\n")).expect("a stale lock");
    assert!(is_held(&lock.try_acquire()));
    assert!(lock.lock_info().is_none());
    let _ = lock.clean();
    assert!(target.exists());

    fs::remove_file(scratch.path()).expect("the link");
    symlink("a.lock", scratch.path()).expect("a link to itself");
    assert!(matches!(
        Semaphore::with_defaults(scratch.path()),
        Err(SemaphoreError::InvalidPath(_))
    ));
}

/// Every user may plant a link there.
#[test]
fn a_link_of_another_user_in_a_shared_directory_is_refused() {
    needs!(root);
    let scratch = Scratch::new();
    symlink(scratch.0.path().join("target.lock"), scratch.path()).expect("a link");
    lchown(scratch.path(), Some(NOBODY), Some(NOBODY)).expect("another owner");
    fs::set_permissions(scratch.0.path(), Permissions::from_mode(0o1777))
        .expect("a shared directory");
    let refused = Semaphore::with_defaults(scratch.path());
    assert!(
        matches!(refused, Err(SemaphoreError::InvalidPath(_))),
        "{refused:?}"
    );
    // A link of the owner of the directory is followed.
    chown(scratch.0.path(), Some(NOBODY), None).expect("another owner");
    drop(scratch.lock().try_acquire().expect("a free lock"));
}

/// A group may plant a link there.
#[test]
fn a_link_counts_only_if_it_is_ours_or_the_directorys_owners() {
    needs!(root);
    let stale = format!("pid={DEAD}\ntimestamp=1\n");
    for mode in [0o777, 0o2775, 0o755] {
        let scratch = Scratch::new();
        let victim = scratch.0.path().join("victim");
        fs::write(&victim, &stale).expect("a file");
        symlink(&victim, scratch.path()).expect("a link");
        drop(scratch.lock().try_acquire().expect("by a link of ours"));
        fs::write(&victim, &stale).expect("a file");
        let mode = Permissions::from_mode(mode);
        fs::set_permissions(scratch.0.path(), mode.clone()).expect("a shared directory");
        lchown(scratch.path(), Some(NOBODY), Some(NOBODY)).expect("another owner");
        let refused = Semaphore::with_defaults(scratch.path());
        let Err(SemaphoreError::InvalidPath(reason)) = refused else {
            panic!("{mode:?}: {refused:?}");
        };
        let expected = "it is a symbolic link of another user: ";
        assert!(reason.starts_with(expected), "{reason}");
        assert_eq!(fs::read_to_string(&victim).expect("a file"), stale);
        chown(scratch.0.path(), Some(NOBODY), None).expect("another owner");
        drop(scratch.lock().try_acquire().expect("by the owner's link"));
    }
}

#[test]
fn a_path_that_is_no_file_is_neither_opened_nor_removed() {
    use rustix::fs::{makedev, mknodat, FileType, Mode, CWD};
    let scratch = Scratch::new();
    let path = scratch.path();
    let make = |kind, device| mknodat(CWD, &path, kind, Mode::from_raw_mode(0o666), device);
    let check = |what: &str| {
        let lock = scratch.lock();
        let began = Instant::now();
        assert!(lock.is_locked(), "{what}");
        assert!(is_held(&lock.try_acquire()), "{what}");
        assert!(lock.lock_info().is_none(), "{what}");
        let status = lock.status().expect("a status");
        assert!(
            matches!(&status, Status::Unreadable(details) if !details.is_stale),
            "{what}"
        );
        assert!(!lock.clean().expect("cleaning").lock, "{what}");
        assert!(release(&lock, &ReleaseTerms::default()).is_err(), "{what}");
        let forced = lock.force_release();
        assert!(
            matches!(forced, Err(SemaphoreError::InvalidPath(_))),
            "{what}: {forced:?}"
        );
        let _ = lock
            .acquire_timeout(Duration::from_millis(20))
            .expect_err(what);
        assert!(lock.is_locked(), "{what}");
        in_time!(began.elapsed() < LIMIT, "{what}");
    };
    make(FileType::Fifo, 0).expect("a pipe");
    check("a pipe");
    fs::remove_file(&path).expect("the pipe");
    if rustix::process::geteuid().is_root()
        && make(FileType::CharacterDevice, makedev(1, 5)).is_ok()
    {
        check("a device");
        fs::remove_file(&path).expect("the device");
    } else {
        skipped(&["root that may make a device"]);
    }
    let socket = UnixListener::bind(&path).expect("a socket");
    check("a socket");
    drop(socket);
    fs::remove_file(&path).expect("the socket");
    fs::create_dir(&path).expect("a directory");
    check("a directory");
}

#[test]
fn a_huge_file_is_not_read_to_its_end() {
    let scratch = Scratch::new();
    let lock = scratch.lock_with("pid=1\ntimestamp=1\n");
    let file = File::options()
        .write(true)
        .open(scratch.path())
        .expect("a file");
    file.set_len(1 << 40).expect("a huge file");
    scratch.make_old("a.lock");
    assert!(matches!(
        lock.try_acquire(),
        Err(SemaphoreError::NotALockFile(path)) if path == scratch.path()
    ));
    assert!(lock.lock_info().is_none());
    assert!(scratch.path().exists());
}

#[test]
fn a_wait_for_a_file_that_is_no_lock_file_ends_at_once() {
    let scratch = Scratch::new();
    let text = "an ordinary file\n";
    let lock = scratch.lock_with(text);
    scratch.make_old("a.lock");
    let is_refused = |result: SemaphoreResult<()>| {
        let error = result.expect_err("no lock file");
        let expected = format!("{} is not a lock file", scratch.path().display());
        assert_eq!(error.to_string(), expected);
    };
    is_refused(lock.try_acquire().map(drop));
    is_refused(lock.acquire().map(drop));
    is_refused(lock.try_acquire_detached(&LockInfo::new()).map(drop));
    is_refused(lock.wait(None));
    is_refused(lock.status().map(drop));
    is_refused(lock.clean().map(drop));
    is_refused(lock.release(&ReleaseTerms::default()).map(drop));
    is_refused(lock.force_release());
    assert!(lock.is_locked() && lock.lock_info().is_none());
    assert_eq!(scratch.text(), text);
}

#[test]
fn a_tag_cannot_forge_a_record() {
    let scratch = Scratch::new();
    let info = LockInfo::with_tag("x\npid=1\r\nx-boot=none\u{1b}[2J");
    take_detached(&scratch.lock(), &info);
    let read = scratch.lock().lock_info().expect("a record");
    assert_eq!(read.pid, process::id());
    assert_eq!(read.tag.as_deref(), Some("x pid=1  x-boot=none [2J"));
}

#[test]
fn what_is_no_process_or_has_ended_holds_nothing() {
    let scratch = Scratch::new();
    let mut zombie = Command::new("true").spawn().expect("true");
    let id = WaitId::Pid(Pid::from_child(&zombie));
    waitid(id, WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).expect("its end");
    for pid in [0, zombie.id(), i32::MAX as u32 + 1, u32::MAX] {
        let lock = scratch.lock_with(format!("pid={pid}\ntimestamp=9\n"));
        assert_eq!(details(&lock).alive, Alive::No, "{pid}");
        drop(lock.try_acquire().expect("a stale lock"));
    }
    zombie.wait().expect("its status");
}

#[test]
fn a_holder_lives_as_long_as_any_of_its_threads() {
    let python3 = needs!("python3");
    let scratch = Scratch::new();
    let python = "import ctypes, threading, time\n\
                  threading.Thread(target=time.sleep, args=(600,)).start()\n\
                  ctypes.CDLL(None).pthread_exit(None)";
    let mut holder = python3
        .command()
        .args(["-c", python])
        .spawn()
        .expect("python3");
    let pid = holder.id();
    let status = || fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let is_zombie = is_soon(LIMIT, || status().contains("State:\tZ"));
    let lock = scratch.lock_with(format!("pid={pid}\ntimestamp={}\n", now()));
    let alive = details(&lock).alive;
    holder.kill().expect("it runs");
    holder.wait().expect("its end");
    assert!(is_zombie, "its first thread goes on");
    assert_eq!(alive, Alive::Yes);
}

#[test]
fn a_stale_lock_that_this_user_cannot_replace_is_no_holder() {
    needs!(root);
    let scratch = Scratch::new();
    let directory = scratch.0.path();
    let text = format!("pid={DEAD}\ntimestamp=1\n");
    let path = scratch.path();
    let why = "Invalid path: stale, but this user may not remove the file";
    let refused = format!("{why}: {}; [\"a.lock\"]", path.display());
    scratch.lock_with(&text);
    for mode in [0o1777, 0o755] {
        fs::set_permissions(directory, Permissions::from_mode(mode)).expect("a directory");
        let Some(answer) = answer_of_nobody("try", &scratch.path()) else {
            return;
        };
        assert_eq!(answer, refused, "{mode:o}");
        assert_eq!(scratch.text(), text);
    }
    let forbidden = "Err(\"IO error: permission denied\")";
    assert_eq!(
        answer_of_nobody("force", &scratch.path()).as_deref(),
        Some(forbidden)
    );
    // This user may not read it either.
    fs::set_permissions(scratch.path(), Permissions::from_mode(0o600)).expect("a file");
    assert_eq!(
        answer_of_nobody("force", &scratch.path()).as_deref(),
        Some(forbidden)
    );
    let answer = answer_of_nobody("try", &scratch.path()).expect("we are root");
    let why = "Invalid path: this user may not create and remove files in the directory";
    assert!(answer.starts_with(why), "{answer}");
    // Locks can be created in a directory that cannot be listed.
    fs::remove_file(scratch.path()).expect("the lock");
    fs::set_permissions(directory, Permissions::from_mode(0o1733)).expect("a directory");
    let answer = answer_of_nobody("try", &scratch.path()).expect("we are root");
    assert_eq!(answer, "granted true");
    // A directory that this user may not write or search is an error: no process holds a lock
    // there.
    for mode in [0o755, 0o744] {
        fs::set_permissions(directory, Permissions::from_mode(mode)).expect("a directory");
        let answer = answer_of_nobody("try", &scratch.path()).expect("we are root");
        assert!(
            answer.starts_with("IO error: Permission denied"),
            "{mode:o}: {answer}"
        );
    }
}

/// Its owner may have it open for writing, and may write it again.
#[test]
fn a_stale_file_of_another_user_is_replaced() {
    needs!(root);
    let scratch = Scratch::new();
    let lock = scratch.lock_with(format!("pid={DEAD}\ntimestamp=1\n"));
    chown(scratch.path(), Some(NOBODY), Some(NOBODY)).expect("another owner");
    let theirs = File::open(scratch.path()).expect("the lock file");
    let guard = lock.try_acquire().expect("a stale lock");
    let ours = fs::metadata(scratch.path()).expect("the lock file");
    let theirs = theirs.metadata().expect("the other file");
    assert!(guard.is_held() && ours.uid() == 0);
    assert_ne!(ours.ino(), theirs.ino());
    drop(guard);
    assert!(scratch.names().is_empty());
}

/// Another host may still have to give up its lease on the file (Samba, NFS).
#[test]
fn a_file_that_cannot_be_opened_for_the_moment_is_held() {
    let strace = needs!("strace");
    let scratch = Scratch::new();
    let text = format!("pid={DEAD}\ntimestamp=1\n");
    scratch.lock_with(&text);
    let options = ["-P", "a.lock", "-e", "inject=openat:error=EAGAIN"];
    let (answer, trace) = traced(&strace, &options, "try", &scratch.path());
    assert!(trace.contains("(INJECTED)"), "{trace}");
    assert_eq!(answer, "Lock already held; [\"a.lock\"]");
    assert_eq!(scratch.text(), text);
}

#[test]
fn waiting_for_a_stale_lock_ends_at_once() {
    let scratch = Scratch::new();
    let lock = scratch.lock_with(format!("pid={DEAD}\ntimestamp=1\n"));
    lock.wait(Some(Duration::ZERO)).expect("a stale lock");
    assert!(scratch.path().exists());
    let lock = scratch.lock_with(record_with(&[]));
    assert!(matches!(
        lock.wait(Some(Duration::from_millis(50))),
        Err(SemaphoreError::Timeout)
    ));
    fs::remove_file(scratch.path()).expect("the lock");
    lock.wait(Some(Duration::ZERO)).expect("a free lock");
}

/// No event can make room for a lock there.
#[test]
fn a_wait_where_no_lock_file_can_be_ends_at_once() {
    let scratch = Scratch::new();
    fs::create_dir(scratch.path()).expect("a directory");
    let lock = scratch.lock();
    let limit = Duration::from_secs(5);
    let waits = [
        lock.acquire_timeout(limit).map(drop),
        lock.wait(Some(limit)),
    ];
    let reason = format!("not a regular file: {}", scratch.path().display());
    for outcome in waits {
        match outcome {
            Err(SemaphoreError::InvalidPath(said)) => assert_eq!(said, reason),
            other => panic!("{other:?}"),
        }
    }
}

/// The system calls of a process that takes and releases a lock, by strace.
fn traced(strace: &Program, options: &[&str], role: &str, lock: &Path) -> (String, String) {
    traced_words(strace, options, &again(&this_program(), role, lock))
}

fn traced_words<'a>(
    strace: &Program,
    options: &[&str],
    words: impl IntoIterator<Item = &'a String>,
) -> (String, String) {
    let scratch = Scratch::new();
    let trace = scratch.0.path().join("trace");
    let mut command = strace.command();
    command
        .args(["-f", "-y", "-o"])
        .arg(&trace)
        .args(options)
        .args(words);
    let answer = answer_of(command);
    (answer, fs::read_to_string(trace).expect("a trace"))
}

#[test]
fn a_record_is_on_the_disk_before_it_has_a_name() {
    let strace = needs!("strace");
    let scratch = Scratch::new();
    let options = ["-e", "trace=fsync,fdatasync,linkat"];
    let (answer, trace) = traced(&strace, &options, "try", &scratch.path());
    assert_eq!(answer, "granted true");
    let (synced, linked) = (trace.find("sync("), trace.find("linkat("));
    assert!(synced.is_some() && synced < linked, "{trace}");
    let (_, trace) = traced(&strace, &options, "try:unsynced", &scratch.path());
    assert!(
        !trace.contains("sync(") && trace.contains("linkat("),
        "{trace}"
    );
}

#[test]
fn a_step_that_the_kernel_refuses_has_a_fallback() {
    let strace = needs!("strace");
    let scratch = Scratch::new();
    for (fault, is_taken_over, is_live) in [
        ("linkat:error=EPERM", true, true),
        ("linkat:error=EOPNOTSUPP", true, true),
        ("fcntl:error=EINVAL", true, true),
        ("fcntl:error=ENOLCK", true, true),
        ("flock:error=ENOLCK", false, false),
        ("flock:error=EOPNOTSUPP", false, false),
        ("flock:error=EBADF", false, false),
    ] {
        let inject = format!("inject={fault}");
        let options = ["-e", "trace=linkat,flock,fcntl", "-e", &inject];
        let (answer, trace) = traced(&strace, &options, "try", &scratch.path());
        assert_eq!(answer, format!("granted {is_live}"), "{fault}");
        assert!(scratch.names().is_empty(), "{fault}: {:?}", scratch.names());
        assert!(trace.contains("(INJECTED)"), "{fault}");
        scratch.lock_with(format!("pid={DEAD}\ntimestamp=1\n"));
        // With a second name, the file is replaced and not rewritten.
        let other = scratch.0.path().with_extension("link");
        fs::hard_link(scratch.path(), &other).expect("another name");
        let (answer, trace) = traced(&strace, &options, "try", &scratch.path());
        fs::remove_file(other).expect("another name");
        assert!(trace.contains("(INJECTED)"), "{fault}: {trace}");
        if is_taken_over {
            assert_eq!(answer, "granted true", "{fault}");
        } else {
            let why = "Invalid path: stale, but the file system does not support locks on files";
            assert!(answer.starts_with(why), "{fault}: {answer}");
            fs::remove_file(scratch.path()).expect("the stale lock");
        }
        assert!(scratch.names().is_empty(), "{fault}: {:?}", scratch.names());
    }
}

#[test]
fn a_takeover_needs_neither_links_nor_renames() {
    let strace = needs!("strace");
    let scratch = Scratch::new();
    scratch.lock_with(format!("pid={DEAD}\ntimestamp=1\n"));
    let options = [
        "-e",
        "trace=link,linkat,rename,renameat,renameat2,symlinkat",
    ];
    let (answer, trace) = traced(&strace, &options, "try", &scratch.path());
    assert_eq!(answer, "granted true");
    assert!(
        !trace.contains("link") && !trace.contains("rename"),
        "{trace}"
    );
}

#[test]
fn a_process_that_finds_the_lock_free_watches_nothing() {
    let strace = needs!("strace");
    let scratch = Scratch::new();
    let options = ["-e", "trace=linkat,inotify_init1"];
    let (answer, trace) = traced(&strace, &options, "hold", &scratch.path());
    assert_eq!(answer, "held");
    assert!(
        trace.contains("linkat(") && !trace.contains("inotify"),
        "{trace}"
    );
}

// Other implementations.

#[test]
fn other_implementations_and_this_one_read_each_other() {
    let scratch = Scratch::new();
    let lock = scratch.lock_with("pid=4711\ntimestamp=1700000000\ntag=backup\n");
    let info = lock.lock_info().expect("a record");
    assert_eq!(
        (info.pid, info.timestamp, info.tag.as_deref()),
        (4711, 1_700_000_000, Some("backup"))
    );
    fs::remove_file(scratch.path()).expect("the lock");

    let made = Command::new("sh")
        .args(["-c", "set -C; echo pid=$$ > \"$1\"", "sh"])
        .arg(scratch.path())
        .status();
    assert!(made.expect("a shell").success());
    assert!(is_held(&lock.try_acquire()));
    assert!(details(&lock).pid.is_some());
    fs::remove_file(scratch.path()).expect("the lock");

    let _guard = lock
        .try_acquire_with_info(LockInfo::with_tag("a tag"))
        .expect("a free lock");
    let made = Command::new("sh")
        .args(["-c", "set -C; : > \"$1\"", "sh"])
        .arg(scratch.path())
        .output();
    assert!(!made.expect("a shell").status.success());
    let text = scratch.text();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], format!("pid={}", process::id()));
    assert!(lines[1]
        .strip_prefix("timestamp=")
        .is_some_and(|digits| digits.parse::<u64>().is_ok()));
    assert_eq!(lines[2], "tag=a tag");
    assert!(lines[3..].iter().all(|line| line.starts_with("x-")));
}

// Waiting.

#[test]
fn a_release_wakes_a_waiter_at_once() {
    if !has_inotify() {
        return skipped(&["inotify"]);
    }
    fair_test(a_release_wakes_a_waiter_at_once_once);
}

fn a_release_wakes_a_waiter_at_once_once() {
    let scratch = Scratch::new();
    let lock = Semaphore::with_options(
        scratch.path(),
        config(Duration::from_secs(3600), SELDOM),
        SemaphoreOptions::new().sync(false),
    )
    .expect("a lock path");
    let mut times: Vec<Duration> = (0..40)
        .map(|_| {
            let guard = lock.try_acquire().expect("a free lock");
            thread::scope(|scope| {
                let (lock, (sender, receiver)) = (&lock, mpsc::channel());
                let waiter = scope.spawn(move || {
                    sender.send(gettid()).expect("the test waits");
                    let _guard = lock.acquire().expect("the lock");
                    Instant::now()
                });
                wait_until_asleep(receiver.recv().expect("the waiter starts"));
                let released = Instant::now();
                drop(guard);
                waiter.join().expect("the waiter") - released
            })
        })
        .collect();
    times.sort();
    let median = times[times.len() / 2];
    println!(
        "from a release to the next grant: {median:?} in the median, {:?} at worst",
        times[times.len() - 1]
    );
    in_time!(median < Duration::from_millis(100), "{median:?}");
}

#[test]
fn a_holder_that_is_killed_wakes_a_waiter() {
    if !has_pidfds() {
        return skipped(&["pidfds"]);
    }
    let scratch = Scratch::new();
    let lock = Semaphore::new(scratch.path(), config(Duration::from_secs(3600), SELDOM))
        .expect("a lock path");
    let holder = Holder::start(&scratch.path());
    assert_eq!(lock.lock_info().expect("a record").pid, holder.child.id());
    thread::scope(|scope| {
        let (lock, (sender, receiver)) = (&lock, mpsc::channel());
        let waiter = scope.spawn(move || {
            sender.send(gettid()).expect("the test waits");
            lock.acquire().map(drop)
        });
        wait_until_asleep(receiver.recv().expect("the waiter starts"));
        assert!(!waiter.is_finished());
        let began = Instant::now();
        holder.kill();
        waiter.join().expect("the waiter").expect("the lock");
        in_time!(
            began.elapsed() < LIMIT / 2,
            "only the last look has seen it"
        );
    });
}

#[test]
fn a_waiter_wakes_when_the_lock_becomes_stale() {
    let scratch = Scratch::new();
    scratch.lock_with(format!("pid={DEAD}\ntimestamp={}\n", now()));
    let lock = Semaphore::new(scratch.path(), config(Duration::from_secs(1), SELDOM))
        .expect("a lock path");
    assert!(is_held(&lock.try_acquire()));
    let stale_in = details(&lock).stale_in.expect("it will be stale");
    in_time!(stale_in <= Duration::from_secs(2));
    let began = Instant::now();
    drop(lock.acquire().expect("the lock"));
    in_time!(
        began.elapsed() < LIMIT / 2,
        "only the last look has seen it"
    );
}

#[test]
fn a_waiter_gives_up_in_time() {
    let scratch = Scratch::new();
    let lock = scratch.lock();
    let guard = lock.try_acquire().expect("a free lock");
    let began = Instant::now();
    let timeout = Duration::from_millis(150);
    assert!(matches!(
        lock.acquire_timeout(timeout),
        Err(SemaphoreError::Timeout)
    ));
    in_time!(began.elapsed() >= timeout && began.elapsed() < LIMIT);
    assert!(matches!(
        lock.acquire_timeout(Duration::ZERO),
        Err(SemaphoreError::Timeout)
    ));
    assert!(guard.is_held());
}

// Holding.

#[test]
fn a_heartbeat_moves_the_timestamp_but_not_x_since() {
    let scratch = Scratch::new();
    let options = SemaphoreOptions::new().heartbeat(true);
    let lock = Semaphore::with_options(
        scratch.path(),
        config(Duration::from_secs(1), SELDOM),
        options,
    )
    .expect("a lock path");
    let guard = lock.try_acquire().expect("a free lock");
    let (since, text) = (guard_timestamp(&scratch), scratch.text());
    let aged = text.replacen(&since, "0000000009", 1);
    fs::write(scratch.path(), &aged).expect("an old lock");
    eventually(LIMIT, "the heart beats", || {
        guard_timestamp(&scratch) != "0000000009"
    });
    let (beaten, then) = (scratch.text(), guard_timestamp(&scratch));
    assert!(then >= since);
    assert_eq!(beaten, text.replacen(&since, &then, 1));
    assert!(beaten.contains(&format!("x-since={}", since.trim_start_matches('0'))));
    assert!(guard.is_held());
    guard.release().expect("a release");
    assert!(scratch.names().is_empty());
}

#[test]
fn a_holder_is_told_once_that_its_lock_is_lost() {
    type Way = (&'static str, fn(&Path));
    let ways: [Way; 3] = [
        ("removed", |path| fs::remove_file(path).expect("a lock")),
        ("renamed", |path| {
            fs::rename(path, path.with_extension("old")).expect("a lock")
        }),
        ("replaced", |path| {
            let other = path.with_extension("new");
            fs::write(&other, "pid=1\ntimestamp=5\n").expect("a successor");
            fs::rename(other, path).expect("a lock");
        }),
    ];
    for (way, lose) in ways {
        let scratch = Scratch::new();
        let (sender, receiver) = mpsc::channel();
        let options = SemaphoreOptions::new().on_lost(move || {
            // As much stack as a thread usually has.
            let room = [1_u8; 512 * 1024];
            sender
                .send(std::hint::black_box(&room)[0])
                .expect("a listener");
        });
        let lock = Semaphore::with_options(scratch.path(), SemaphoreConfig::default(), options)
            .expect("a path");
        let guard = lock.try_acquire().expect("a free lock");
        assert!(
            receiver.recv_timeout(Duration::from_millis(50)).is_err(),
            "{way}: nothing is lost yet"
        );
        lose(&scratch.path());
        receiver.recv_timeout(LIMIT).expect(way);
        assert!(!guard.is_held(), "{way}");
        let left = scratch.names();
        drop(guard);
        assert_eq!(scratch.names(), left, "{way}");
        assert!(
            receiver.recv_timeout(Duration::from_millis(50)).is_err(),
            "{way}: told twice"
        );
    }
}

#[test]
fn a_holder_is_told_nothing_of_its_own_release() {
    let scratch = Scratch::new();
    let (sender, receiver) = mpsc::channel::<()>();
    let options = SemaphoreOptions::new().on_lost(move || sender.send(()).expect("a listener"));
    let lock = Semaphore::with_options(scratch.path(), SemaphoreConfig::default(), options)
        .expect("a lock path");
    for _ in 0..20 {
        lock.try_acquire()
            .expect("a free lock")
            .release()
            .expect("a release");
    }
    assert!(receiver.try_recv().is_err());
}

#[test]
fn a_lock_that_was_lost_stays_lost() {
    let scratch = Scratch::new();
    let (sender, receiver) = mpsc::channel();
    let options = SemaphoreOptions::new().on_lost(move || sender.send(()).expect("a listener"));
    let lock = Semaphore::with_options(scratch.path(), SemaphoreConfig::default(), options)
        .expect("a lock path");
    let guard = lock.try_acquire().expect("a free lock");
    let aside = scratch.0.path().join("aside");
    fs::rename(scratch.path(), &aside).expect("the lock");
    receiver.recv_timeout(LIMIT).expect("it is lost");
    fs::rename(&aside, scratch.path()).expect("the lock");
    assert!(!guard.is_held());
}

// Paths.

#[test]
fn paths_that_cannot_be_locks_are_refused() {
    let scratch = Scratch::new();
    let directory = scratch.0.path().display().to_string();
    fs::write(scratch.0.path().join("file"), "").expect("a file");
    for path in [
        String::new(),
        " \t".to_owned(),
        format!("{directory}/a\0b"),
        format!("{directory}/../a.lock"),
        "../a.lock".to_owned(),
        format!("{directory}/"),
        ".".to_owned(),
        "/".to_owned(),
        format!("{directory}/none/a.lock"),
        format!("{directory}/file/a.lock"),
    ] {
        let refused = Semaphore::with_defaults(&path);
        assert!(
            matches!(refused, Err(SemaphoreError::InvalidPath(_))),
            "{path:?}: {refused:?}"
        );
    }
    for name in ["a..lock", "..a", "a b.lock", "ü.lock", ".lock", "-x"] {
        let lock = Semaphore::with_defaults(scratch.0.path().join(name)).expect(name);
        drop(lock.try_acquire().expect(name));
    }
    assert_eq!(scratch.names(), ["file"]);
}

#[test]
fn an_absolute_path_works_without_a_working_directory() {
    let (scratch, gone) = (Scratch::new(), Scratch::new());
    let before = format!("cd '{0}' && rmdir '{0}' &&", gone.0.path().display());
    assert_eq!(answer(&before, "try", &scratch.path()), "granted true");
}

#[test]
fn a_relative_path_means_the_same_file_wherever_the_process_is() {
    let scratch = Scratch::new();
    let before = format!("cd '{}' &&", scratch.0.path().display());
    // This process holds the lock; the other one asks for it by its relative path.
    let lock = scratch.lock();
    let _guard = lock.try_acquire().expect("a free lock");
    let answer = answer(&before, "try", Path::new("a.lock"));
    assert!(
        answer.starts_with(&format!("Lock already held by PID {}", process::id())),
        "{answer}"
    );
}

// Bad luck.

#[test]
fn a_directory_that_is_made_anew_is_another_lock() {
    let scratch = Scratch::new();
    let directory = scratch.0.path().join("d");
    fs::create_dir(&directory).expect("a directory");
    let lock = Semaphore::with_defaults(directory.join("a.lock")).expect("a lock path");
    let guard = lock.try_acquire().expect("a free lock");
    fs::remove_dir_all(&directory).expect("the directory");
    assert!(!guard.is_held());
    assert!(matches!(
        lock.try_acquire(),
        Err(SemaphoreError::IoError(_))
    ));
    fs::create_dir(&directory).expect("a directory");
    let successor = lock.try_acquire().expect("a free lock");
    drop(guard);
    assert!(successor.is_held());
}

#[test]
fn without_descriptors_a_lock_is_refused_and_nothing_is_left() {
    let scratch = Scratch::new();
    let answer = answer("ulimit -n 40;", "exhaust", &scratch.path());
    // With descriptors again, the record is complete.
    assert_eq!(answer, "true true true true");
    assert!(scratch.names().is_empty(), "{:?}", scratch.names());
}

/// Runs a process on a small file system of its own. `None` if this process may not create one.
fn on_a_file_system(prepare: &str, options: &str, role: &str) -> Option<String> {
    let scratch = Scratch::new();
    let directory = scratch.0.path().display();
    let mount = format!("mount -t tmpfs -o {options} none '{directory}'");
    let probe = Command::new("unshare")
        .args(["-m", "sh", "-c", &mount])
        .output();
    if !probe.is_ok_and(|probe| probe.status.success()) {
        skipped(&["mount namespace"]);
        return None;
    }
    let script = format!("{mount} && cd '{directory}' && {prepare} && cd / && exec \"$@\"");
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", &script, "sh"]).args(again(
        &this_program(),
        role,
        &scratch.path(),
    ));
    Some(answer_of(command))
}

#[test]
fn on_a_full_disk_a_lock_is_refused_and_nothing_is_left() {
    let fill = "head -c 4096 /dev/zero > full";
    if let Some(answer) = on_a_file_system(fill, "size=4k", "try") {
        assert_eq!(
            answer,
            "IO error: No space left on device (os error 28); [\"full\"]"
        );
    }
    let stale = format!("printf 'pid={DEAD}\\ntimestamp=1\\n' > a.lock");
    if let Some(answer) = on_a_file_system(&stale, "size=4k", "try") {
        assert_eq!(
            answer,
            "IO error: No space left on device (os error 28); [\"a.lock\"]"
        );
    }
}

#[test]
fn without_room_for_a_file_clean_cannot_tell_an_age_and_fails() {
    let empty = "touch -d @1 a.lock";
    for (inodes, expected) in [
        (2, "Err(IoError(Os { code: 28, "),
        (3, "Ok(Cleaned { lock: true, "),
    ] {
        let options = format!("nr_inodes={inodes}");
        if let Some(answer) = on_a_file_system(empty, &options, "clean") {
            assert!(answer.starts_with(expected), "{inodes}: {answer}");
        }
    }
}

#[test]
fn on_a_read_only_file_system_a_stale_lock_is_an_error() {
    let freeze = "mount -o remount,ro \"$PWD\"";
    let stale = format!("printf 'pid={DEAD}\\ntimestamp=1\\n' > a.lock && {freeze}");
    if let Some(answer) = on_a_file_system(&stale, "size=64k", "try") {
        let why = "Invalid path: the file system is read-only: ";
        assert!(answer.starts_with(why), "{answer}");
    }
    if let Some(answer) = on_a_file_system(freeze, "size=64k", "try") {
        assert_eq!(answer, "IO error: Read-only file system (os error 30); []");
    }
}

#[test]
fn settling_notices_a_removal_by_an_old_judgement() {
    fair_test(settling_notices_a_removal_by_an_old_judgement_once);
}

fn settling_notices_a_removal_by_an_old_judgement_once() {
    let scratch = Scratch::new();
    let options = SemaphoreOptions::new().settle(Settle::Always(Duration::from_millis(400)));
    let lock = Semaphore::with_options(scratch.path(), SemaphoreConfig::default(), options)
        .expect("a lock path");
    thread::scope(|scope| {
        let taker = scope.spawn(|| lock.try_acquire().map(drop));
        let over = Instant::now() + LIMIT;
        while fs::remove_file(scratch.path()).is_err() && Instant::now() < over {
            thread::yield_now();
        }
        assert!(is_held(&taker.join().expect("the taker")));
    });
    let mut file = File::create(scratch.path()).expect("a file");
    file.write_all(format!("pid={DEAD}\ntimestamp=1\n").as_bytes())
        .expect("a stale lock");
    drop(lock.try_acquire().expect("a stale lock"));
}

#[test]
fn an_owned_guard_outlives_its_semaphore_in_a_thread() {
    let scratch = Scratch::new();
    let lock = scratch.lock();
    let guard = lock.try_acquire().expect("a free lock").into_owned();
    drop(lock);
    assert!(is_held(&scratch.lock().try_acquire().map(drop)));
    let (sender, told) = mpsc::channel();
    let (go_on, waits) = mpsc::channel::<()>();
    let working = thread::spawn(move || {
        sender.send(guard.is_held()).expect("a listener");
        let _ = waits.recv();
        drop(guard);
    });
    assert_eq!(told.recv_timeout(LIMIT), Ok(true));
    assert!(is_held(&scratch.lock().try_acquire().map(drop)));
    drop(go_on);
    working.join().expect("no panic");
    let again = scratch
        .lock()
        .try_acquire()
        .expect("free again")
        .into_owned();
    again.release().expect("still ours");
    assert!(!scratch.path().exists());
}

#[test]
fn an_owned_guard_still_watches_over_its_lock() {
    let scratch = Scratch::new();
    let (sender, losses) = mpsc::channel();
    let options = SemaphoreOptions::new().on_lost(move || sender.send(()).expect("a listener"));
    let config = SemaphoreConfig::default();
    let lock = Semaphore::with_options(scratch.path(), config, options).expect("a lock path");
    let guard = lock.try_acquire().expect("a free lock").into_owned();
    fs::remove_file(scratch.path()).expect("a lock file");
    assert_eq!(losses.recv_timeout(LIMIT), Ok(()));
    assert!(!guard.is_held());
    assert!(matches!(guard.release(), Err(SemaphoreError::Lost)));
}

#[test]
fn slots_are_shared_with_sema_and_have_one_holder_each() {
    let scratch = Scratch::new();
    let path = scratch.0.path().join("pool");
    let config = SemaphoreConfig {
        acquire_timeout: Some(Duration::from_millis(20)),
        ..SemaphoreConfig::default()
    };
    let slots = |count| Slots::new(&path, count, config.clone(), SemaphoreOptions::new());
    let two = slots(2).expect("a lock path");
    let first = two.try_acquire().expect("a free slot");
    let sema = |arguments: &[&str]| {
        let mut command = Command::new(program("sema"));
        let command = command.arg(arguments[0]).arg(&path).args(&arguments[1..]);
        command.output().expect("it starts").status.code()
    };
    let pid = process::id().to_string();
    assert_eq!(sema(&["try", "--slots", "2", "--pid", &pid]), Some(0));
    assert_eq!(scratch.names(), ["pool.0.lock", "pool.1.lock"]);
    let error = two.try_acquire().expect_err("all are held");
    assert!(matches!(error, SemaphoreError::AlreadyLocked { .. }));
    let error = two.acquire().expect_err("all are held");
    assert!(matches!(error, SemaphoreError::Timeout));
    first.release().expect("it is held");
    drop(two.acquire().expect("a free slot"));
    let error = slots(0).expect_err("no slots");
    assert!(matches!(error, SemaphoreError::InvalidPath(_)));
}
