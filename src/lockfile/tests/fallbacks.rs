//! A lock behaves in the same way on every file system, whatever that lacks.

use std::env;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::sync::{mpsc, Arc};
use std::thread;

use super::*;
use crate::lockfile::record::LIVE_LINE;
use crate::lockfile::watch::Watch;
use crate::os::directory::lock_within;
use crate::os::event::Event;
use crate::os::process;

const HOUR: Duration = Duration::from_secs(3600);

/// The record of [`DEAD`], as of long ago.
const STALE: &str = "pid=999999999\ntimestamp=1\n";

/// Calls `check` once for every file system, each time with the path of a free lock.
fn everywhere(check: impl Fn(&Path, MissingFeatures)) {
    for missing in every_file_system() {
        println!("{missing:?}");
        let scratch = tempfile::tempdir().expect("a directory");
        check(&scratch.path().join("fallbacks.lock"), missing);
    }
}

fn litter(path: &Path) -> Vec<String> {
    let own = path.file_name().expect("a name").to_string_lossy();
    let mut names = names(path.parent().expect("a directory"));
    names.retain(|name| *name != own);
    names
}

#[test]
fn a_lock_is_taken_is_busy_and_is_released() {
    everywhere(|path, missing| {
        let semaphore = lock_without(path, missing, HOUR);
        let guard = semaphore.try_acquire().expect("a free lock");
        assert!(guard.is_held());
        let text = fs::read_to_string(path).expect("a lock file");
        assert_eq!(text.ends_with(LIVE_LINE), !missing.locks, "{text}");
        assert_eq!(
            LockInfo::parse(&text).expect("a record").pid,
            std::process::id()
        );
        match lock_without(path, missing, HOUR).try_acquire() {
            Err(SemaphoreError::AlreadyLocked { holder_pid, .. }) => {
                assert_eq!(holder_pid, Some(std::process::id()));
            }
            other => panic!("{other:?}"),
        }
        assert!(litter(path).is_empty());
        guard.release().expect("a release");
        assert!(!path.exists() && litter(path).is_empty());
        drop(semaphore.try_acquire().expect("a free lock"));
        assert!(!path.exists() && litter(path).is_empty());
    });
}

#[test]
fn a_living_holder_keeps_an_old_lock() {
    everywhere(|path, missing| {
        let semaphore = lock_without(path, missing, HOUR);
        let guard = semaphore.try_acquire().expect("a free lock");
        // The lock is very old, but its holder is alive.
        let old = fs::read_to_string(path).expect("a record");
        let since = semaphore
            .lock_info()
            .expect("a record")
            .timestamp
            .to_string();
        let old = old.replacen(&since, "0000000001", 1);
        fs::write(path, old).expect("an old record");
        let error = semaphore.try_acquire().expect_err("held").to_string();
        assert!(error.contains("Lock already held"), "{error}");
        assert!(guard.is_held());
    });
}

#[test]
fn a_stale_lock_is_taken_over_where_files_can_be_locked() {
    everywhere(|path, missing| {
        for text in [
            format!("pid={DEAD}\ntimestamp=1\ntag=old\n"),
            stamped(DEAD).print() + LIVE_LINE,
        ] {
            fs::write(path, &text).expect("a stale lock");
            let semaphore = lock_without(path, missing, HOUR);
            let attempt = semaphore.try_acquire();
            assert!(litter(path).is_empty());
            if missing.locks {
                let error = attempt.expect_err("a lock that cannot be taken over safely");
                if text.ends_with(LIVE_LINE) {
                    // It is young, and nothing shows whether its file is locked.
                    assert!(matches!(error, SemaphoreError::AlreadyLocked { .. }));
                    continue;
                }
                let is_final = |error| matches!(error, SemaphoreError::InvalidPath(_));
                assert!(is_final(error));
                assert!(is_final(semaphore.acquire().expect_err("no wait helps")));
                assert!(is_final(semaphore.wait(None).expect_err("not free")));
                assert_eq!(fs::read_to_string(path).expect("a record"), text);
                continue;
            }
            let guard = attempt.expect("a stale lock");
            assert!(semaphore.try_acquire().is_err());
            let info = semaphore.lock_info().expect("a record");
            assert_eq!((info.pid, info.tag), (std::process::id(), None));
            assert!(fs::read_to_string(path)
                .expect("a record")
                .ends_with(LIVE_LINE));
            guard.release().expect("a release");
            assert!(!path.exists() && litter(path).is_empty());
        }
    });
}

/// The inode, the permissions, and the number of names.
fn file_of(path: &Path) -> (u64, u32, u64) {
    let file = fs::symlink_metadata(path).expect("a file");
    (file.ino(), file.mode() & 0o7777, file.nlink())
}

#[test]
fn a_stale_file_of_ours_is_rewritten_in_place() {
    let scratch = tempfile::tempdir().expect("a directory");
    let path = scratch.path().join("fallbacks.lock");
    let stale = format!("pid={DEAD}\ntimestamp=1\ntag={}\n", "x".repeat(2000));
    fs::write(&path, stale).expect("a stale lock");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("a mode");
    let (inode, ..) = file_of(&path);
    let semaphore = lock_without(&path, MissingFeatures::default(), HOUR);
    let guard = semaphore.try_acquire().expect("a stale lock");
    let fresh = lock_without(
        &path.with_file_name("fresh"),
        MissingFeatures::default(),
        HOUR,
    );
    let _fresh = fresh.try_acquire().expect("a free lock");
    let (_, mode, _) = file_of(fresh.path());
    assert_eq!(file_of(&path), (inode, mode, 1));
    assert!(guard.is_held() && semaphore.try_acquire().is_err());
    let text = fs::read_to_string(&path).expect("a record");
    assert!(text.ends_with(LIVE_LINE) && !text.contains("xx"), "{text}");
    guard.release().expect("a release");
}

#[test]
fn a_stale_file_with_another_name_is_replaced() {
    let scratch = tempfile::tempdir().expect("a directory");
    let path = scratch.path().join("fallbacks.lock");
    let other = scratch.path().join("other");
    fs::write(&path, STALE).expect("a stale lock");
    fs::hard_link(&path, &other).expect("another name");
    let semaphore = lock_without(&path, MissingFeatures::default(), HOUR);
    let guard = semaphore.try_acquire().expect("a stale lock");
    assert!(guard.is_held());
    assert_ne!(file_of(&path).0, file_of(&other).0);
    assert_eq!(fs::read_to_string(&other).expect("a record"), STALE);
}

#[test]
fn a_lock_renewed_during_a_takeover_is_kept() {
    everywhere(|path, missing| {
        let renewed = format!("pid={DEAD}\ntimestamp=2000000000\n");
        fs::write(path, STALE).expect("a stale lock");
        let directory = Directory::of(path).expect("a directory");
        let files = LockFiles::new(
            &directory,
            path.file_name().expect("a name"),
            quick(missing),
        );
        let taker = Taker {
            record: &|_| stamped(DEAD).print().into_bytes(),
            // The taker judges the old record, and finds the renewed one once it has the file
            // locked.
            may_take: &|content| {
                fs::write(path, &renewed).expect("a renewed lock");
                let is_stale = content.bytes == STALE.as_bytes();
                is_stale.then_some(()).ok_or(Obstacle::NotStale)
            },
        };
        let attempt = takeover::acquire(&files, &taker).expect("an attempt");
        assert!(matches!(attempt, Outcome::Blocked(..)), "{missing:?}");
        assert_eq!(fs::read_to_string(path).expect("a record"), renewed);
        assert!(litter(path).is_empty());
    });
}

/// A process that judged the stale file before the takeover may remove our file instead.
#[test]
fn a_takeover_settles_however_it_was_done() {
    for rewriting in [false, true] {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("fallbacks.lock");
        let missing = MissingFeatures {
            rewriting,
            ..MissingFeatures::default()
        };
        let mut semaphore = lock_without(&path, missing, HOUR);
        semaphore.options.files.settle = Settle::AfterTakeover(Duration::from_secs(1));
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            assert!(Instant::now() < deadline, "every removal came too early");
            fs::write(&path, STALE).expect("a stale lock");
            let taken = thread::scope(|scope| {
                let taker = scope.spawn(|| semaphore.try_acquire().map(|guard| guard.is_held()));
                let is_ours = || fs::read_to_string(&path).is_ok_and(|it| it.contains("x-host="));
                while !is_ours() && Instant::now() < deadline {
                    thread::yield_now();
                }
                fs::remove_file(&path).expect("a lock that is not granted yet");
                taker.join().expect("the taker")
            });
            match taken {
                Err(_) => break,
                // The taker was still at work on the file, and has made another one.
                Ok(is_held) => assert!(is_held, "{missing:?}: granted without its file"),
            }
        }
    }
}

/// A look locks the file only if that decides, because it would hinder takers and flock(1).
#[test]
fn a_look_heeds_a_flock_on_a_lock_that_would_be_stale() {
    everywhere(|path, missing| {
        for (timestamp, obstacle) in [(1, Obstacle::Locked), (u64::MAX, Obstacle::NotStale)] {
            fs::write(path, format!("pid={DEAD}\ntimestamp={timestamp}\n")).expect("a lock");
            let taker = fs::File::open(path).expect("a file");
            // A process that another test starts has the last one open until it runs its program.
            assert!(lock_within(&taker, HOUR).expect("a lock"));
            let busy = lock_without(path, missing, HOUR).look().expect("a look");
            let busy = busy.expect("a lock");
            assert_eq!(busy.obstacle, obstacle);
            assert!(!busy.details.is_stale);
        }
    });
}

#[test]
fn a_young_lock_of_the_dead_is_not_taken_over() {
    everywhere(|path, missing| {
        let text = stamped(DEAD).print();
        fs::write(path, &text).expect("a lock");
        assert!(lock_without(path, missing, HOUR).try_acquire().is_err());
        assert_eq!(fs::read_to_string(path).expect("a record"), text);
        assert!(litter(path).is_empty());
    });
}

#[test]
fn a_successors_file_is_left_alone() {
    everywhere(|path, missing| {
        let semaphore = lock_without(path, missing, HOUR);
        let text = "pid=1\ntimestamp=5\n";
        for is_dropped in [false, true] {
            let guard = semaphore.try_acquire().expect("a free lock");
            fs::remove_file(path).expect("a lock file");
            fs::write(path, text).expect("a successor");
            assert!(!guard.is_held());
            if is_dropped {
                drop(guard);
            } else {
                assert!(matches!(guard.release(), Err(SemaphoreError::Lost)));
            }
            assert_eq!(fs::read_to_string(path).expect("a record"), text);
            fs::remove_file(path).expect("a lock file");
        }
    });
}

#[test]
fn a_detached_lock_is_released_on_its_terms() {
    everywhere(|path, missing| {
        let semaphore = lock_without(path, missing, HOUR);
        let info = LockInfo::with_tag("a");
        let take = || semaphore.try_acquire_detached(&info).expect("an attempt");
        assert!(matches!(take(), Attempt::Granted(())));
        assert!(!fs::read_to_string(path)
            .expect("a record")
            .contains("x-live"));
        assert!(matches!(take(), Attempt::Busy(_)));
        let refused = semaphore.release(&ReleaseTerms::default());
        match refused.expect("an attempt") {
            ReleaseOutcome::Kept(busy) => assert_eq!(busy.obstacle, Obstacle::NotStale),
            ReleaseOutcome::Released => panic!("the holder is alive"),
        }
        let own = ReleaseTerms {
            asking: std::process::id(),
            ..ReleaseTerms::default()
        };
        let released = semaphore.release(&own).expect("an attempt");
        assert!(matches!(released, ReleaseOutcome::Released));
        assert!(matches!(
            semaphore.release(&own),
            Err(SemaphoreError::NotLocked)
        ));
        assert!(litter(path).is_empty());
    });
}

#[test]
fn cleaning_removes_a_stale_lock_and_nothing_else() {
    everywhere(|path, missing| {
        let semaphore = lock_without(path, missing, HOUR);
        let other = path.with_file_name(".sema-0123456789abcdex~");
        fs::write(&other, "").expect("a file");
        let living = Record {
            timestamp: Some(1),
            ..stamped(std::process::id())
        };
        fs::write(path, living.print()).expect("a lock of the living");
        assert_eq!(semaphore.clean().expect("cleaning"), Cleaned::default());
        fs::write(path, STALE).expect("a stale lock");
        assert_eq!(semaphore.clean().expect("cleaning").lock, !missing.locks);
        assert_eq!(path.exists(), missing.locks);
        assert!(other.exists());
    });
}

/// Runs a process that cannot write a byte to any file. `how` sets what happens to it then.
fn on_a_full_disk(how: &str, path: &Path, missing: usize) -> std::process::ExitStatus {
    let poor = "--exact lockfile::tests::fallbacks::poor --ignored --nocapture --test-threads=1";
    let script = format!("{how}; ulimit -c 0; ulimit -f 0; exec \"$0\" {poor}");
    let mut shell = Command::new("sh");
    shell
        .args(["-c", &script])
        .arg(std::env::current_exe().expect("this program"))
        .env("LATCHD_TEST_LOCK", path)
        .env("LATCHD_TEST_MISSING", missing.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    shell.status().expect("a shell")
}

/// The process that cannot write.
#[test]
#[ignore = "a part of the others"]
fn poor() {
    let (Ok(path), Ok(missing)) = (
        env::var("LATCHD_TEST_LOCK"),
        env::var("LATCHD_TEST_MISSING"),
    ) else {
        return;
    };
    let missing = missing
        .parse()
        .ok()
        .and_then(|at| every_file_system().nth(at));
    let semaphore = lock_without(Path::new(&path), missing.expect("a number"), HOUR);
    let code = match semaphore.try_acquire() {
        Err(SemaphoreError::IoError(_)) => 7,
        Err(_) => 8,
        Ok(_) => 9,
    };
    std::process::exit(code);
}

#[test]
fn a_full_disk_leaves_neither_a_lock_nor_litter() {
    for (bits, missing) in every_file_system().enumerate() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("fallbacks.lock");
        let status = on_a_full_disk("trap '' XFSZ", &path, bits);
        assert_eq!(status.code(), Some(7), "{missing:?}");
        assert!(
            names(scratch.path()).is_empty(),
            "{missing:?}: {:?}",
            names(scratch.path())
        );

        // The stale lock that was there stays, too.
        fs::write(&path, STALE).expect("a stale lock");
        let status = on_a_full_disk("trap '' XFSZ", &path, bits);
        assert_eq!(
            status.code(),
            Some(if missing.locks { 8 } else { 7 }),
            "{missing:?}"
        );
        assert_eq!(fs::read_to_string(&path).expect("a record"), STALE);
        assert!(litter(&path).is_empty(), "{missing:?}: {:?}", litter(&path));
    }
}

#[test]
fn a_crash_before_the_record_blocks_until_the_timeout() {
    const XFSZ: i32 = 25;
    // A parent may have ignored it, as Python does, and a program that is started keeps that. A
    // signal that is caught here has its default disposition there.
    signal_hook::flag::register(XFSZ, Arc::default()).expect("it can be caught");
    for (bits, missing) in every_file_system().enumerate() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("fallbacks.lock");
        let status = on_a_full_disk(":", &path, bits);
        assert_eq!(status.signal(), Some(XFSZ), "{missing:?}");
        let semaphore = lock_without(&path, missing, HOUR);
        if !path.exists() {
            assert!(semaphore.try_acquire().is_ok(), "{missing:?}");
            continue;
        }
        // Until the timeout, another process may be about to write it.
        assert!(semaphore.try_acquire().is_err(), "{missing:?}");
        let file = fs::File::options()
            .write(true)
            .open(&path)
            .expect("an empty file");
        file.set_modified(SystemTime::now() - 2 * HOUR)
            .expect("an old file");
        assert_eq!(
            semaphore.try_acquire().is_ok(),
            !missing.locks,
            "{missing:?}"
        );
    }
}

#[test]
fn a_waiter_without_inotify_looks_again() {
    let scratch = tempfile::tempdir().expect("a directory");
    let path = scratch.path().join("polled.lock");
    let semaphore = Semaphore::with_defaults(&path).expect("a lock path");
    let guard = semaphore.try_acquire().expect("a free lock");
    let (sender, looks) = mpsc::channel();
    thread::scope(|scope| {
        let waiter = scope.spawn(move || {
            let waiter = Semaphore::with_defaults(&path).expect("a lock path");
            let limit = WaitLimit::new(Some(Duration::from_secs(20)), None, None);
            // As `acquire` does, but without inotify.
            let blind = Watch(None);
            while let Some(busy) = waiter.look().expect("a look") {
                assert!(!limit.is_over(), "no timeout");
                // The first two looks have a listener.
                let _ = sender.send(());
                let waiters = std::slice::from_ref(&waiter);
                rest(waiters, &[busy], None, &blind, &limit).expect("a rest");
            }
        });
        for _ in 0..2 {
            let look = looks.recv_timeout(Duration::from_secs(10));
            look.expect("the waiter looks again");
        }
        drop(guard);
        waiter.join().expect("the waiter sees it");
    });
}

#[test]
fn a_cancelled_wait_ends() {
    let scratch = tempfile::tempdir().expect("a directory");
    let semaphore =
        Semaphore::with_defaults(scratch.path().join("cancelled.lock")).expect("a lock path");
    let _guard = semaphore.try_acquire().expect("a free lock");
    let flag = Event::new().expect("a flag");
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let limit = WaitLimit::new(Some(Duration::from_secs(30)), Some(&flag), None);
            acquire_any(std::slice::from_ref(&semaphore), &LockInfo::new(), &limit).map(|_| ())
        });
        thread::sleep(Duration::from_millis(50));
        flag.set();
        let outcome = waiter.join().expect("the waiter");
        assert!(
            matches!(outcome, Err(SemaphoreError::Cancelled)),
            "{outcome:?}"
        );
    });
    // No lock will ever be free among none.
    let limit = WaitLimit::new(None, None, None);
    assert!(acquire_any(&[], &LockInfo::new(), &limit).is_err());
}

/// A child of the holder may hold the lock for long, and must not wake the waiters again and again.
#[test]
fn the_end_of_a_holder_wakes_only_once() {
    let mut holder = Command::new("true").spawn().expect("true");
    let over = Instant::now() + Duration::from_secs(10);
    while !process::look_up(holder.id()).is_some_and(|process| process.is_zombie) {
        assert!(Instant::now() < over, "it does not end");
        thread::sleep(Duration::from_millis(1));
    }
    let of = |pid| LockDetails {
        pid: Some(pid),
        alive: Alive::Yes,
        ..LockDetails::default()
    };
    assert!(of(holder.id()).end_of_holder().is_none());
    let own = std::process::id();
    assert_eq!(
        of(own).end_of_holder().is_some(),
        process::pidfd(own).is_ok()
    );
    holder.wait().expect("its status");
}

#[test]
fn a_refused_stale_lock_is_retried_at_the_retry_interval() {
    let scratch = tempfile::tempdir().expect("a directory");
    let path = scratch.path().join("fallbacks.lock");
    fs::write(&path, STALE).expect("a stale lock");
    let poor = MissingFeatures {
        locks: true,
        ..MissingFeatures::default()
    };
    let semaphore = lock_without(&path, poor, HOUR);
    let busy = semaphore.look().expect("a look").expect("a lock");
    assert!(busy.details.is_stale);
    let began = Instant::now();
    let limit = WaitLimit::new(None, None, None);
    let watch = Watch(None);
    rest(
        std::slice::from_ref(&semaphore),
        &[busy],
        None,
        &watch,
        &limit,
    )
    .expect("a rest");
    // This is the retry interval.
    assert!(began.elapsed() >= Duration::from_millis(100));
}
