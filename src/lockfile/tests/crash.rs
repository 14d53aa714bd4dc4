//! A process dies before each step of a takeover, a creation and a release.

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::time::SystemTime;

use super::fault_injection::{Death, FaultyFiles};
use super::*;
use crate::lockfile::files::LockFiles;

const NAME: &str = "crash.lock";

/// More steps than any run takes.
const MANY: u64 = 60;

/// Runs a process that dies before a step. Gives whether it reached that step.
fn dies(directory: &Path, missing: u64, step: u64) -> bool {
    let part = [
        ("DIRECTORY", directory.display().to_string()),
        ("MISSING", missing.to_string()),
        ("STEP", step.to_string()),
    ];
    let status = again("lockfile::tests::crash::victim", &part)
        .status()
        .expect("this program");
    assert!(status.success() || status.signal() == Some(9), "{status}");
    !status.success()
}

/// The process that dies: takes the lock and releases it.
#[test]
#[ignore = "a part of the others"]
fn victim() {
    let (Some(directory), Some(missing), Some(step)) =
        (part("DIRECTORY"), number("MISSING"), number("STEP"))
    else {
        return;
    };
    let directory = Directory::open(directory.as_ref()).expect("a directory");
    let missing = every_file_system()
        .nth(usize::try_from(missing).expect("a number"))
        .expect("a number");
    let files = LockFiles::new(&directory, NAME.as_ref(), quick(missing));
    let files = FaultyFiles::new(files, 0, 0, Death::At(step));
    match acquire(&files, &directory, 0) {
        Outcome::Done(file) => assert!(takeover::release(&files, &file).expect("a release")),
        Outcome::Blocked(why, _) => panic!("{why:?}"),
    }
}

/// Tries to take the lock as if this many seconds later.
fn acquire<F: takeover::Files>(files: &F, directory: &Directory, seconds: u64) -> Outcome<F::File> {
    let taker = Taker {
        record: &|_| {
            held(std::process::id(), HolderKind::Guard)
                .print()
                .into_bytes()
        },
        may_take: &|content| may_take_in(seconds, content, directory),
    };
    takeover::acquire(files, &taker).expect("an attempt")
}

/// Takes the lock two hours later. A process that another test is starting can have the file locked
/// for a moment, by the descriptors that it inherited.
fn acquire_in_the_end(files: &LockFiles<'_>, directory: &Directory, what: &str) -> File {
    let over = Instant::now() + Duration::from_secs(10);
    loop {
        match acquire(files, directory, 7200) {
            Outcome::Done(file) => return file,
            Outcome::Blocked(Obstacle::Locked, _) if Instant::now() < over => {}
            Outcome::Blocked(why, _) => panic!("{what}: {why:?}"),
        }
    }
}

/// Sets the times of all files in the directory to three hours ago.
fn make_old(path: &Path) {
    let then = SystemTime::now() - Duration::from_secs(3 * 3600);
    for name in names(path) {
        let file = File::options()
            .write(true)
            .open(path.join(name))
            .expect("a file");
        file.set_modified(then).expect("an old file");
    }
}

fn crash_at_every_step(begin_with: Option<&str>) {
    for (bits, missing) in every_file_system()
        .enumerate()
        .filter(|(_, missing)| !missing.locks)
    {
        let mut deaths = 0;
        for step in 1.. {
            assert!(step < MANY, "it never ends");
            let scratch = tempfile::tempdir().expect("a directory");
            let path = scratch.path();
            if let Some(text) = begin_with {
                fs::write(path.join(NAME), text).expect("a lock");
            }
            let has_died = dies(path, bits as u64, step);
            let what = format!("{missing:?} step {step}: {:?}", names(path));
            if !has_died {
                assert!(names(path).is_empty(), "{what}");
                break;
            }
            deaths += 1;
            recovers(path, missing, &what);
        }
        assert!(deaths >= 3, "{missing:?}: {deaths}");
    }
}

fn recovers(path: &Path, missing: MissingFeatures, what: &str) {
    let directory = Directory::open(path).expect("the directory");
    let files = LockFiles::new(&directory, NAME.as_ref(), quick(missing));
    // It may succeed at once, and must succeed in two hours; then nothing else may.
    let at_once = acquire(&files, &directory, 0);
    let ours = match at_once {
        Outcome::Done(file) => file,
        Outcome::Blocked(..) => acquire_in_the_end(&files, &directory, what),
    };
    let again = acquire(&files, &directory, 7200);
    assert!(matches!(again, Outcome::Blocked(..)), "{what}");
    assert!(
        takeover::release(&files, &ours).expect("a release"),
        "{what}"
    );

    // The rest is litter, which is removed once it is old.
    let semaphore = lock_without(&path.join(NAME), missing, Duration::from_secs(3600));
    let litter = names(path);
    assert!(litter.len() <= 1, "{what}: {litter:?}");
    assert_eq!(
        semaphore.clean().expect("cleaning"),
        Cleaned::default(),
        "{what}"
    );
    make_old(path);
    // A process that another test is starting has our descriptors, and so our locks, until its
    // exec.
    let over = Instant::now() + Duration::from_secs(10);
    let mut cleaned = 0;
    while cleaned < litter.len() && Instant::now() < over {
        cleaned += semaphore.clean().expect("cleaning").temporaries as usize;
    }
    assert_eq!(cleaned, litter.len(), "{what}");
    assert!(names(path).is_empty(), "{what}: {:?}", names(path));
}

#[test]
fn a_crash_at_any_step_of_a_takeover_leaves_a_usable_lock() {
    crash_at_every_step(Some("pid=999999999\ntimestamp=1\n"));
}

#[test]
fn a_crash_at_any_step_of_a_creation_leaves_a_usable_lock() {
    crash_at_every_step(None);
}
