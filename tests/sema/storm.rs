//! Many holders of one lock, killed at random moments: commands under `sema run`, scripts that call
//! `sema` to take and to release the lock, scripts that know only `set -C` and `rm`, and commands
//! under flock(1).

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::Mutex;
use std::time::Instant;

use super::*;
use crate::support::at_the_end::AtTheEnd;
use crate::support::mounts::Mount;
use crate::support::random::{setting, Random};

/// How long one storm lasts, in seconds, and a long one, unless `LATCHD_STORM_SECONDS` says
/// otherwise.
const SECONDS: u64 = 4;
const MANY_SECONDS: u64 = 10;

const WORKERS: u64 = 6;

/// The status of a run whose job was killed.
const KILLED: i32 = 128 + 9;

/// What runs under the lock. It notes itself, and each other one that is alive at the same time.
/// A process that has just been killed can seem alive for a moment.
const JOB: &str = r#"
# The start of a process, unless it is a zombie: its number may be that of a later one.
start() {
    { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return
    set -- ${stat##*) }
    case $1 in [ZX]) ;; *) shift 19; echo "$1" ;; esac
}
lives() { [ -s "inside.$1" ] && [ "$(cat "inside.$1")" = "$(start "$1")" ]; }
start $$ >inside.$$
echo >>grants
for other in inside.*; do
    pid=${other#inside.}
    if [ "$pid" != $$ ] && lives "$pid"; then
        sleep 0.01
        if lives "$pid"; then echo "$pid $$" >>doubles; fi
    fi
done 2>/dev/null
sleep 0.0$1
rm inside.$$
"#;

/// The users of the lock, each as a script whose arguments are the program and what [`JOB`] needs.
/// A lock that no guard keeps is stale a second after its holder's end. The shell names itself: if
/// it is killed while `sema` starts, the parent is process 1, which may be that of a container.
const GUARDED: &str = r#"exec "$0" run f -q --stale 1 --timeout 20 -- sh -c "$JOB" sh "$1""#;
const DETACHED: &str = r#"
"$0" acquire f -q --pid $$ --stale 1 --timeout 20 || exit
eval "$JOB"
"$0" release f -q
"#;
const SCRIPT: &str = r#"
now=$(date +%s)
(set -C; printf 'pid=%s\ntimestamp=%s\n' $$ "$now" >f) 2>/dev/null || exit 0
eval "$JOB"
rm f
"#;

const AMONG_OURSELVES: &[&str] = &[GUARDED, GUARDED, DETACHED, SCRIPT];

/// A command under flock(1). It leaves if `sema` has removed the file in between, or if the file is
/// a lock of `sema acquire`, which flock(1) does not know.
const FLOCKED: &str = r#"
command exec 9<f || exit 0
flock -n 9 && [ f -ef "/proc/$$/fd/9" ] || exit 0
record=$(cat <&9 | tr -d '\0')
case $record in *x-live*) ;; *x-since*) exit 0 ;; esac
eval "$JOB"
"#;

/// What programs leave at the lock's name: files that flock(1) or a power cut leave, and records of
/// holders that have ended. All are old.
const LEFTOVER: &str = r#"
case $1 in
    0 | 1) : ;;
    2) printf '\0\0\0' ;;
    3) printf 'pid=47' ;;
    *) printf 'pid=99999999\ntimestamp=1\n' ;;
esac >"left.$$"
touch -d '1 hour ago' "left.$$"
ln "left.$$" f 2>/dev/null
rm "left.$$"
"#;

/// Removes what may be removed without force.
const CLEANER: &str = r#""$0" clean f -q --stale 1; "$0" release f -q --stale 1 || exit 0"#;

const BESIDE_FLOCK: &[&str] = &[GUARDED, DETACHED, FLOCKED, FLOCKED, LEFTOVER, CLEANER];

#[derive(Debug, Default)]
struct Storm {
    kills: AtomicU32,
    /// The exit statuses of the users that were not killed and failed, with their scripts and how
    /// long they took.
    failures: Mutex<Vec<(i32, &'static str, Duration)>>,
    is_over: AtomicBool,
}

impl Storm {
    fn work(&self, place: &Place, users: &[&'static str], programs: &[PathBuf], seed: u64) {
        let mut random = Random::new(seed);
        while !self.is_over.load(Ordering::SeqCst) {
            let program = &programs[random.below(programs.len() as u64) as usize];
            let holder = users[random.below(users.len() as u64) as usize];
            let mut command = Command::new("sh");
            command
                .args(["-c", holder])
                .arg(program)
                .arg(random.below(8).to_string())
                .env("JOB", JOB)
                .current_dir(&place.directory)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            let started_at = Instant::now();
            let mut child = command.spawn().expect("sema starts");
            if random.one_in(2) {
                thread::sleep(Duration::from_micros(random.below(40_000)));
                self.kill(place, &mut child, &mut random);
            }
            let code = child.wait().expect("a child").code();
            // Another worker may have killed the job.
            if let Some(code) = code.filter(|code| ![0, KILLED].contains(code)) {
                let failure = (code, holder, started_at.elapsed());
                self.failures.lock().expect("no panic").push(failure);
            }
        }
    }

    /// Kills a holder or a taker, and often the job that is inside, too.
    fn kill(&self, place: &Place, child: &mut Child, random: &mut Random) {
        let _ = child.kill();
        self.kills.fetch_add(1, Ordering::SeqCst);
        if random.one_in(2) {
            let jobs = place.names().into_iter();
            let pids = jobs.filter_map(|name| name.strip_prefix("inside.")?.parse().ok());
            for pid in pids.filter_map(Pid::from_raw) {
                let name = fs::read_to_string(format!("/proc/{}/comm", pid.as_raw_nonzero()));
                if name.is_ok_and(|name| name == "sh\n") {
                    let _ = kill_process(pid, Signal::KILL);
                }
            }
        }
    }
}

/// Runs a storm in a directory, and says what happened. Nobody is inside together, and every run
/// that is not killed gets the lock.
fn storm(name: &str, directory: &Path, users: &[&'static str], programs: &[PathBuf], seconds: u64) {
    let seconds = setting("LATCHD_STORM_SECONDS").unwrap_or(seconds);
    let place = Place::within(directory);
    let storm = Storm::default();
    thread::scope(|scope| {
        let _end = AtTheEnd(&storm.is_over);
        for seed in 1..=WORKERS {
            let (storm, place) = (&storm, &place);
            scope.spawn(move || storm.work(place, users, programs, seed));
        }
        thread::sleep(Duration::from_secs(seconds));
    });
    let grants = place.read("grants").lines().count();
    let doubles = fs::read_to_string(place.path("doubles")).unwrap_or_default();
    println!("{name}: {grants} grants, {storm:?}");
    assert_eq!(doubles, "", "{name}: two inside");
    let failures = storm.failures.into_inner().expect("no panic");
    assert_eq!(failures, [], "{name}: a run failed");
    let last = ["run", "f", "--stale", "1", "--timeout", "20", "--", "true"];
    assert_eq!(
        place.status(&last),
        0,
        "{name}: the last holder's lock stays"
    );
}

#[test]
fn in_a_storm_of_kills_no_two_are_inside_and_none_is_stuck() {
    let programs = [PathBuf::from(program("sema"))];
    let directory = std::env::temp_dir();
    storm("here", &directory, AMONG_OURSELVES, &programs, SECONDS);
}

/// The end of a command under flock(1) frees a stale file, and no removal and no takeover comes
/// before it.
#[test]
fn in_a_storm_beside_flock_no_two_are_inside() {
    let (admin, mkfs) = (needs!(admin), needs!("mkfs.ext4"));
    let programs = [PathBuf::from(program("sema"))];
    for (name, mount) in [
        ("ext4", Mount::ext4(admin, &mkfs)),
        ("tmpfs", Mount::tmpfs(admin, "16m")),
        ("overlay", Mount::overlay(admin)),
    ] {
        storm(name, &mount.path, BESIDE_FLOCK, &programs, SECONDS);
    }
}

#[test]
#[ignore = "long: cargo test --release --test sema storm -- --ignored --nocapture"]
fn in_a_storm_on_any_file_system_no_two_are_inside() {
    let (admin, bindfs) = (needs!(admin), needs!("bindfs"));
    let mut programs = vec![PathBuf::from(program("sema"))];
    // Another release of sema, to run beside this one.
    programs.extend(std::env::var_os("LATCHD_STORM_OTHER").map(PathBuf::from));
    let seconds = MANY_SECONDS;
    let overlay = Mount::overlay(admin);
    for (name, directory) in [
        ("here", std::env::temp_dir().as_path()),
        ("tmpfs", Path::new("/dev/shm")),
        ("overlayfs", &overlay.path),
    ] {
        storm(name, directory, AMONG_OURSELVES, &programs, seconds);
    }
    // An older release grants a lock to two here.
    programs.truncate(1);
    let mount = Mount::bindfs(admin, &bindfs);
    storm("bindfs", &mount.path, AMONG_OURSELVES, &programs, seconds);
}
