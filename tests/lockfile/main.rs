//! Lock files as another program uses them: the shapes of the library, the weaknesses of lock
//! files, waiting, and the obstacles that an attacker or bad luck can put in the way.
//!
//! Some tests run this program again as another process or another user.

use std::error::Error;
use std::fs::{self, File, Permissions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::{chown, lchown, symlink, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{self, Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use latchd::lockfile::{
    Alive, Attempt, Busy, Cleaned, LockDetails, LockInfo, Obstacle, ReleaseOutcome, ReleaseTerms,
    Semaphore, SemaphoreConfig, SemaphoreError, SemaphoreGuard, SemaphoreOptions, SemaphoreResult,
    Settle, Slots, Status,
};
use tempfile::TempDir;

mod mounts;
#[path = "../support/mod.rs"]
mod support;

use rustix::fs::FlockOperation;
use rustix::process::{waitid, Pid, WaitId, WaitIdOptions};
use rustix::thread::gettid;
use support::limited::copy_program;
use support::locks::flocked;
use support::needs::{has_inotify, has_pidfds, needs, skipped};
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

    fn lock_of(&self, config: SemaphoreConfig, options: SemaphoreOptions) -> Semaphore {
        Semaphore::with_options(self.path(), config, options).expect("a lock path")
    }

    /// A lock, and the news of its loss.
    fn watched(&self) -> (Semaphore, mpsc::Receiver<()>) {
        let (sender, losses) = mpsc::channel();
        let options = SemaphoreOptions::new().on_lost(move || sender.send(()).expect("a listener"));
        (self.lock_of(SemaphoreConfig::default(), options), losses)
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

/// A waiter hardly ever looks again by itself.
fn config(stale_timeout: Duration) -> SemaphoreConfig {
    SemaphoreConfig {
        stale_timeout: Some(stale_timeout),
        retry_interval: SELDOM,
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

/// The answer of this program as another process, for a user who owns nothing: the line that begins
/// with `=> `.
fn answer_of_nobody(role: &str, lock: &Path) -> String {
    // That user may not see our build directory.
    let place = tempfile::Builder::new()
        .permissions(Permissions::from_mode(0o755))
        .tempdir()
        .expect("a directory");
    let program = place.path().join("program");
    copy_program(std::env::current_exe().expect("this program"), &program);
    let output = Command::new("setpriv")
        .args([format!("--reuid={NOBODY}"), format!("--regid={NOBODY}")])
        .arg("--clear-groups")
        .arg(&program)
        .args(["--exact", "role", "--ignored", "--nocapture"])
        .env("LATCHD_TEST_ROLE", role)
        .env("LATCHD_TEST_LOCK", lock)
        .current_dir("/")
        .output()
        .expect("a process");
    let text = String::from_utf8_lossy(&output.stdout);
    let answer = text.lines().find_map(|line| line.split_once("=> "));
    answer.unwrap_or_else(|| panic!("{output:?}")).1.to_owned()
}

/// The other process.
#[test]
#[ignore = "a part of the others"]
fn role() {
    let (Ok(role), Some(path)) = (
        std::env::var("LATCHD_TEST_ROLE"),
        std::env::var_os("LATCHD_TEST_LOCK"),
    ) else {
        return;
    };
    let lock = Semaphore::with_defaults(PathBuf::from(path));
    let result = lock.and_then(|lock| match role.as_str() {
        "try" => lock.try_acquire().map(drop),
        _ => lock.force_release(),
    });
    println!(
        "=> {}",
        result.map_or_else(|why| why.to_string(), |()| "done".into())
    );
}

/// What `sema` says, if the command runs it.
fn said(mut command: Command) -> String {
    let output = command.stdin(Stdio::null()).output().expect("a process");
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

/// Another process that holds a lock until it is told to end, or killed.
struct Holder {
    child: Child,
}

impl Holder {
    fn start(path: &Path) -> Holder {
        let mut child = Command::new(program("sema"))
            .arg("hold")
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("sema");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe"))
            .read_line(&mut line)
            .expect("it holds the lock");
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
    let io_error = || SemaphoreError::from(io::Error::other("e"));
    for (error, text) in [
        (held(None, None), "Lock already held"),
        (held(Some(5), None), "Lock already held by PID 5"),
        (held(Some(5), Some(7)), "Lock already held by PID 5 since 7"),
        (SemaphoreError::InvalidPath("m".into()), "Invalid path: m"),
        (SemaphoreError::NotLocked, "Lock not held"),
        (SemaphoreError::Timeout, "Timeout waiting for lock"),
        (SemaphoreError::ParseError("m".into()), "Parse error: m"),
        (io_error(), "IO error: e"),
    ] {
        assert_eq!(error.to_string(), text);
    }
    assert!(io_error().source().is_some() && SemaphoreError::Timeout.source().is_none());
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
        let lock = scratch.lock_of(config, SemaphoreOptions::new());
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
fn releasing_nothing_by_force_is_no_error() {
    let scratch = Scratch::new();
    scratch.lock().force_release().expect("nothing to do");
    let lock = scratch.lock();
    let guard = lock.try_acquire().expect("a free lock");
    lock.force_release().expect("a release");
    assert!(!guard.is_held());
    lock.force_release().expect("nothing to do");
    assert!(matches!(
        lock.release(&ReleaseTerms::default()),
        Err(SemaphoreError::NotLocked)
    ));
}

#[test]
fn a_tag_and_a_token_are_in_the_file() {
    let scratch = Scratch::new();
    let options = SemaphoreOptions::new().token("secret\tword ").mode(0o600);
    let lock = scratch.lock_of(SemaphoreConfig::default(), options);
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
        let _reader = flocked(&scratch.path(), FlockOperation::LockShared);
        let released = release(&lock, &terms);
        assert_eq!(released.is_ok(), is_released, "{terms:?} {text}");
        assert_eq!(scratch.path().exists(), !is_released);
    }
}

// The weaknesses of lock files.

#[test]
fn a_lock_is_not_born_stale_after_a_long_wait() {
    let scratch = Scratch::new();
    let lock = scratch.lock_of(config(Duration::from_secs(1)), SemaphoreOptions::new());
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

fn guard_timestamp(scratch: &Scratch) -> String {
    let text = scratch.text();
    let (_, rest) = text.split_once("timestamp=").expect("a timestamp");
    rest[..10].to_owned()
}

#[test]
fn an_unreadable_file_is_held_until_it_is_old() {
    // A power cut during a write leaves NUL bytes in place of what was to be there.
    let zeros = ["\0\0\0", "pid=7\ntimestamp=1\0\0", "pid=\0"];
    let torn = ["", "pid=", "pid=5\n", "pid=5\ntimest", "pid=5\ntag=x\n"];
    for text in torn.into_iter().chain(zeros) {
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
        // A process that another test is starting has our locks for a moment.
        eventually(PATIENCE, "it is stale", || details(&lock).is_stale);
        drop(lock.acquire_timeout(LIMIT).expect("an old file"));
        assert!(scratch.names().is_empty());
    }
}

/// By what the system says of this process and this host.
#[test]
fn a_record_of_ours_is_judged_by_who_and_where_we_are() {
    let scratch = Scratch::new();
    let dead = DEAD.to_string();
    let elsewhere = [("x-host", "elsewhere"), ("x-boot", "another")];
    let old = ("timestamp", "9");
    for (changes, alive, is_stale) in [
        (&[old][..], Alive::Yes, false),
        // The number is that of a later process.
        (&[old, ("x-start", "1")], Alive::No, true),
        (&[("pid", &*dead)], Alive::No, false),
        (&[("pid", &*dead), old], Alive::No, true),
        (&[elsewhere[0], elsewhere[1], old], Alive::Unknown, true),
        (&elsewhere, Alive::Unknown, false),
        (&[("x-pidns", "1"), old], Alive::Unknown, true),
        (&[("x-pidns", "1")], Alive::Unknown, false),
        (&[("x-boot", "of an earlier boot"), old], Alive::No, true),
    ] {
        let lock = scratch.lock_with(record_with(changes));
        let details = details(&lock);
        let found = (details.alive, details.is_stale);
        assert_eq!(found, (alive, is_stale), "{changes:?}");
        assert_eq!(is_held(&lock.try_acquire()), !is_stale, "{changes:?}");
    }
    // This process is younger than the lock.
    let lock = scratch.lock_with(format!("pid={}\ntimestamp=9\n", process::id()));
    assert_eq!(details(&lock).alive, Alive::No);
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
    scratch.lock_with(record_with(&[("timestamp", "9"), ("x-since", "9")]));
    let mut there = Command::new("sh");
    there.args(["-c", &format!("{unshared} sema try \"$0\"")]);
    there.arg(scratch.path());
    let held = format!("Lock already held\n  Holder PID: {}\n", process::id());
    assert!(said(there).starts_with(&held));
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

/// Without unnamed files, too, the clock of the file system tells the age.
#[test]
fn the_age_of_a_file_is_that_of_its_file_system() {
    let [libfaketime, strace] = needs!("libfaketimeMT.so.1", "strace");
    let scratch = Scratch::new();
    scratch.lock_with("");
    let ahead = SystemTime::now() + Duration::from_secs(1000);
    let file = File::options().write(true).open(scratch.path());
    file.expect("a file").set_modified(ahead).expect("a time");
    let no_unnamed = ["-P", ".", "-e", "inject=openat:error=EOPNOTSUPP"];
    let traces = Scratch::new();
    for options in [&["-e", "trace=openat"][..], &no_unnamed] {
        let mut command = strace.command();
        command
            .args(["-f", "-y", "-o"])
            .arg(traces.path())
            .args(options)
            .arg("env")
            .arg(format!("LD_PRELOAD={}", libfaketime.path().display()))
            // The clock of the process is two hours ahead.
            .args(["FAKETIME=+2h", program("sema"), "try"])
            .arg(scratch.path());
        assert!(said(command).contains("Lock already held\n"));
        let trace = traces.text();
        assert!(trace.contains("O_TMPFILE"), "{trace}");
        assert_eq!(
            trace.contains("(INJECTED)"),
            options == no_unnamed,
            "{trace}"
        );
        assert_eq!(scratch.names(), ["a.lock"]);
    }
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

/// Every user, or a group, may plant a link there.
#[test]
fn a_link_counts_only_if_it_is_ours_or_the_directorys_owners() {
    needs!(root);
    let stale = format!("pid={DEAD}\ntimestamp=1\n");
    for mode in [0o777, 0o1777, 0o2775, 0o755] {
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
    scratch.lock_with(&text);
    let stale = "Invalid path: stale, but this user may not remove the file";
    let barred = "Invalid path: this user may not create and remove files in the directory";
    let denied = "IO error: Permission denied";
    for (mode_of_directory, mode_of_file, role, expected) in [
        (0o1777, Some(0o644), "try", stale),
        (0o755, Some(0o644), "try", stale),
        (0o755, Some(0o644), "force", "IO error: permission denied"),
        (0o755, Some(0o600), "force", "IO error: permission denied"),
        (0o755, Some(0o600), "try", barred),
        // Locks can be created in a directory that cannot be listed.
        (0o1733, None, "try", "done"),
        // A directory that this user may not write or search is an error: no process holds a lock
        // there.
        (0o755, None, "try", denied),
        (0o744, None, "try", denied),
    ] {
        let may = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode));
        may(directory, mode_of_directory).expect("a directory");
        match mode_of_file {
            Some(mode) => may(&path, mode).expect("a file"),
            None => drop(fs::remove_file(&path)),
        }
        let answer = answer_of_nobody(role, &path);
        assert!(
            answer.starts_with(expected),
            "{mode_of_directory:o} {role}: {answer}"
        );
        if mode_of_file.is_some() {
            assert_eq!(scratch.text(), text);
        }
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
    let lock = scratch.lock_of(
        config(Duration::from_secs(3600)),
        SemaphoreOptions::new().sync(false),
    );
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
    let lock = scratch.lock_of(config(Duration::from_secs(3600)), SemaphoreOptions::new());
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
    let lock = scratch.lock_of(config(Duration::from_secs(1)), SemaphoreOptions::new());
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
    let lock = scratch.lock_of(config(Duration::from_secs(1)), options);
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
    scratch.lock_with(beaten.replacen(&then, "2000000000", 1));
    let details = details(&lock);
    assert_eq!(details.timestamp, Some(2_000_000_000));
    assert_eq!(details.since, since.parse().ok());
    match lock.try_acquire() {
        Err(SemaphoreError::AlreadyLocked { locked_since, .. }) => {
            assert_eq!(locked_since, details.since);
        }
        other => panic!("{other:?}"),
    }
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
fn a_lock_that_was_lost_stays_lost() {
    let scratch = Scratch::new();
    let (lock, losses) = scratch.watched();
    let guard = lock.try_acquire().expect("a free lock");
    let aside = scratch.0.path().join("aside");
    fs::rename(scratch.path(), &aside).expect("the lock");
    losses.recv_timeout(LIMIT).expect("it is lost");
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
fn settling_notices_a_removal_by_an_old_judgement() {
    fair_test(settling_notices_a_removal_by_an_old_judgement_once);
}

fn settling_notices_a_removal_by_an_old_judgement_once() {
    let scratch = Scratch::new();
    let options = SemaphoreOptions::new().settle(Settle::Always(Duration::from_millis(400)));
    let lock = scratch.lock_of(SemaphoreConfig::default(), options);
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
    let (lock, losses) = scratch.watched();
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
