//! The state file, in which a server leaves for the next one what that one must know. While the
//! server runs, these are its lasting grants, which no client can bring back. After an orderly end
//! they are all its holders. See latchd-operations(7), UPGRADES.
//!
//! While the server runs, the file is *open*. An orderly end *closes* it. A server that finds an
//! open file follows a crash, and settles before it grants anything. Changes are appended to the
//! open file. It is replaced as a whole once it has grown or is a minute old, and after a failure.

pub(crate) mod format;
mod start;
mod unwritten;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use log::{error, info, warn};
use parking_lot::Mutex;
use serde_json::Value;

use crate::latchd::arbiter::{Arbiter, Recorder};
use crate::latchd::fence::allocator::FenceRecord;
use crate::latchd::fence::source::fence_of_clock;
use crate::latchd::statistics::histories::write_history;
use crate::latchd::table::{
    Change, HeldGrant, HolderRecord, KeyHistory, News, ProofRules, Recording, SaltKey,
};
use crate::os::directory::replaced::{content, lock_path, ReplacedFile, IN_USE};
use crate::os::directory::{sync_name, Directory};
use crate::os::moment::Moment;
use crate::os::process;
use crate::os::random;
use crate::os::text::{reason, unusable_file, Escaped};
use crate::shared::daemon;
use crate::wire::token::Fence;
use format::{
    decode, encode, encode_batch, ClockTimes, Condition, SavedDead, SavedGrant, ServerState,
    Unreadable,
};
pub use start::Previous;
use start::{Circumstances, SettlingReason};
pub use unwritten::AwaitedWrites;
use unwritten::Unwritten;

/// How long this server waits for the previous one, which is ending, to unlock the lock file.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);

/// The maximum number of dead grants in the file.
const MAX_DEAD: usize = 4096;

/// The pause after a failed write, before the next attempt.
pub const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The path of the state file. While this value exists, no other server uses that path.
pub struct StateFile {
    path: PathBuf,
    /// For how long the next server settles if this one crashes after it has settled.
    settle: Duration,
    boot_id: Option<String>,
    /// Whether a server has used this path before.
    was_used: bool,
    open: Mutex<OpenState>,
    /// The changes that are not in the file, for which sessions wait.
    pub unwritten: Unwritten,
}

/// What the open file says, or is to say.
struct OpenState {
    file: ReplacedFile,
    /// For how long the next server settles if this one crashes now.
    settle: Duration,
    next_fence: u64,
    /// The key of the salts; `None` before it is known.
    salt_key: Option<SaltKey>,
    /// The lasting grants.
    grants: BTreeMap<Fence, HeldGrant>,
    /// What is remembered of keys, as of when the thread of this file replaced it.
    histories: Vec<KeyHistory>,
    /// The dead grants, each with the time until which its client may come back.
    dead: BTreeMap<Fence, Instant>,
    /// Whether the file is open on the disk.
    was_written: bool,
    /// Why the latest attempt to write it has failed.
    failure: Option<String>,
}

/// What a server leaves at an orderly end.
pub struct Handover {
    /// The next fence; `None` if the server had none left.
    pub next_fence: Option<u64>,
    pub settling_left: Duration,
    pub holders: Vec<HolderRecord>,
    pub histories: Vec<KeyHistory>,
}

impl StateFile {
    /// Locks the path of the state file, if the options name one. `settle` is for how long this
    /// server settles after a crash. Blocks for at most a second.
    pub fn lock(path: Option<&Path>, settle: Duration) -> Result<Option<Arc<StateFile>>, String> {
        let Some(path) = path else {
            return Ok(None);
        };
        let locked = ReplacedFile::lock(path, LOCK_PATIENCE)
            .map_err(|error| unusable_file("state", &lock_path(path), reason(&error)))?;
        let in_use = || unusable_file("state", path, IN_USE.to_owned());
        let (file, was_used) = locked.ok_or_else(in_use)?;
        let is_in_memory = Directory::of(path).is_ok_and(|it| it.is_in_memory() == Some(true));
        if is_in_memory {
            warn!(
                "state-in-memory path={} hint=\"a boot loses it; use a path on a disk\"",
                Escaped::path(path)
            );
        }
        Ok(Some(Arc::new(StateFile {
            path: path.to_owned(),
            settle,
            boot_id: process::boot_id().ok(),
            was_used,
            open: Mutex::new(OpenState {
                file,
                settle,
                next_fence: 0,
                salt_key: None,
                grants: BTreeMap::new(),
                histories: Vec::new(),
                dead: BTreeMap::new(),
                was_written: false,
                failure: None,
            }),
            unwritten: Unwritten::default(),
        })))
    }

    /// Reads what the previous server has left.
    pub fn read(&self) -> Result<Previous, String> {
        let unusable = |why: String| unusable_file("state", &self.path, why);
        let content = content(&self.path).map_err(|error| self.unusable(&error))?;
        let Some(content) = content else {
            return Ok(Previous::Nothing);
        };
        match decode(&content) {
            Ok(state) => Ok(Previous::State(state)),
            Err(Unreadable::Blank) => Ok(Previous::Blank),
            Err(Unreadable::Foreign) => Err(unusable(format!(
                "latchd has not written it; {START_WITHOUT}"
            ))),
            Err(Unreadable::Newer(version)) => Err(unusable(format!(
                "it has version {version}, of a newer latchd: start that one, or {START_WITHOUT}"
            ))),
            Err(Unreadable::Broken) => Err(unusable(format!("it is damaged; {START_WITHOUT}"))),
        }
    }

    /// The message for a server that cannot start, because the file cannot be read or written.
    pub fn unusable(&self, error: &io::Error) -> String {
        unusable_file("state", &self.path, reason(error))
    }

    /// Restores the grants that the previous server has left, and lets the arbiter settle if it
    /// must. Returns for how long it settles. The caller must then write the file before it serves
    /// clients.
    pub fn restore(
        self: &Arc<Self>,
        previous: &Previous,
        are_clients_local: bool,
        arbiter: &Arbiter,
    ) -> Result<Duration, String> {
        let path = Escaped::path(&self.path);
        let circumstances = Circumstances {
            settle: self.settle,
            was_used: self.was_used,
            boot_id: self.boot_id.as_deref(),
            are_clients_local,
            now: ClockTimes::now(),
        };
        let salt_key = match previous.salt_key() {
            Some(key) => key,
            None => new_salt_key().map_err(daemon::cannot("get random numbers"))?,
        };
        let mut proofs = ProofRules {
            salt_key,
            dead: BTreeSet::new(),
        };
        {
            let (mut open, now) = (self.open.lock(), Instant::now());
            open.salt_key = Some(salt_key);
            for (fence, left) in previous.dead(&circumstances) {
                proofs.dead.insert(fence);
                open.add_dead(fence, now + left);
            }
        }
        let lasting = Recording::Lasting {
            longest_ordinary: self.settle,
        };
        arbiter.record_with(lasting, Box::new(Arc::clone(self)));
        arbiter.make_proofs(proofs);
        let histories = previous.histories(&circumstances, Instant::now());
        self.open.lock().histories.clone_from(&histories);
        arbiter.restore_histories(histories);
        let grants = previous.grants(&circumstances);
        if !arbiter.restore(&grants).is_empty() {
            let why = format!("its holders contradict each other; {START_WITHOUT}");
            return Err(unusable_file("state", &self.path, why));
        }
        if let Previous::State(state) = previous {
            let kept_count = grants.iter().filter(|it| it.is_kept).count();
            match state.condition {
                Condition::Closed => info!("took-over path={path} holders={}", grants.len()),
                Condition::Open => info!(
                    "restored path={path} kept={kept_count} long={}",
                    grants.len() - kept_count
                ),
            }
        }
        let settling = previous.settling(&circumstances);
        self.open.lock().settle = settling.after_crash;
        if settling.why == Some(SettlingReason::BlankFile) {
            error!("state-lost path={path} hint=\"the file is empty; settling as after a crash\"");
        }
        if let Some(why) = settling.why {
            let seconds = settling.now.as_secs_f64().ceil();
            info!("settling seconds={seconds} reason={}", why.word());
            arbiter.settle_for(settling.now);
        }
        Ok(settling.now)
    }

    /// Keeps the file up to date while the server runs: writes the changes of lasting grants, and
    /// notes when the server has settled. Another thread records the fences. Never returns.
    pub fn keep_up_to_date(&self, settling: Duration, arbiter: &Arbiter) -> ! {
        let mut is_settling = !settling.is_zero();
        let mut is_writable = true;
        loop {
            let settles_until = arbiter.settling_until();
            if is_settling && settles_until.is_none() {
                info!("settled");
                self.note_settled();
                is_settling = false;
            }
            if self.unwritten.is_due() {
                if !matches!(self.open.lock().file.is_appendable(), Ok(true)) {
                    let histories = arbiter.histories(None, usize::MAX);
                    self.open.lock().histories = histories;
                }
                let _ = self.write_open(&mut self.open.lock());
            }
            let has_failed = self.unwritten.has_failed();
            if has_failed == is_writable {
                is_writable = !has_failed;
                arbiter.set_writable(is_writable);
                // Logged only now, after the arbiter knows.
                let path = Escaped::path(&self.path);
                match &self.open.lock().failure {
                    Some(why) => warn!("state-not-written path={path} error=\"{why}\""),
                    None => info!("state-written-again path={path}"),
                }
            }
            self.unwritten.wait_for_work(has_failed, settles_until);
        }
    }

    /// Whether the settling of the next server would not cover this lease, so that the client
    /// relies on the file.
    pub fn is_long(&self, lease: Duration) -> bool {
        lease > self.settle
    }

    /// Writes that the arbiter has settled: a crash from now on needs only `self.settle`.
    fn note_settled(&self) {
        let mut open = self.open.lock();
        if open.settle != self.settle {
            open.settle = self.settle;
            let _ = self.write_open(&mut open);
        }
    }

    /// Writes the open file with all changes so far.
    fn write_open(&self, open: &mut OpenState) -> io::Result<()> {
        let (changes, number) = self.unwritten.take();
        let changed = changes.iter().map(|change| change.fence).collect();
        changes.into_iter().for_each(|change| open.apply(change));
        let written = if let Ok(true) = open.file.is_appendable() {
            let batch = encode_batch(&self.open_state(open, Some(changed)));
            open.file.append(batch.as_bytes())
        } else {
            let snapshot = encode(&self.open_state(open, None));
            let replaced = open.file.replace(snapshot.as_bytes());
            let synced = replaced.and_then(|it| sync_name(&self.path).map(|()| it));
            synced.map(|it| open.file.replaced = Some(it))
        };
        open.failure = written.as_ref().err().map(reason);
        match &written {
            Ok(()) => {
                open.was_written = true;
                self.unwritten.note_written(number);
            }
            Err(_) if open.was_written => self.unwritten.failed(RETRY_AFTER),
            // The server is not serving yet, and does not start.
            Err(_) => {}
        }
        written
    }

    /// What the open file must say at this time: everything, or a batch about these grants.
    fn open_state(&self, open: &OpenState, changed: Option<BTreeSet<Fence>>) -> ServerState {
        let (now, time) = (Instant::now(), ClockTimes::now());
        let is_batch = changed.is_some();
        let all = open.grants.keys().chain(open.dead.keys());
        let fences = changed.unwrap_or_else(|| all.copied().collect());
        let (mut grants, mut dead) = (BTreeMap::new(), Vec::new());
        for fence in fences {
            let grant = open.grants.get(&fence).and_then(|it| it.saved(now, time));
            let until = open.dead.get(&fence).copied().unwrap_or(now);
            let left = until.saturating_duration_since(now);
            // The file may have the grant before the batch.
            if !left.is_zero() || is_batch && grant.is_none() {
                let end = time.after(left);
                dead.push(SavedDead { fence, left, end });
            }
            grants.extend(grant.map(|grant| (fence, grant)));
        }
        let histories = open.histories.iter().filter(|_| !is_batch);
        ServerState {
            condition: Condition::Open,
            next_fence: open.next_fence,
            settle: open.settle,
            settling_left: Duration::ZERO,
            boot_id: self.boot_id.clone(),
            written_at: time,
            salt_key: open.salt_key,
            grants,
            histories: histories.map(|it| saved(it, now)).collect(),
            dead,
        }
    }

    /// Writes the changes that are not in the file yet, for the sessions whose replies wait for
    /// them. If that fails, they are written with the next ones.
    pub fn catch_up(&self) {
        if self.unwritten.is_any() {
            let _ = self.write_open(&mut self.open.lock());
        }
    }

    /// Closes the file, so that it survives a power cut. Afterwards nothing else is written. After
    /// an error the file stays open, because this server continues.
    pub fn close(&self, handover: Handover) -> io::Result<()> {
        let mut open = self.open.lock();
        // The hand-over has no dead grants, so they are written first.
        if self.unwritten.is_any() {
            self.write_open(&mut open)?;
        }
        open.histories = handover.histories;
        let state = self.open_state(&open, None);
        let holders = handover.holders.into_iter();
        let by_fence = |it: HolderRecord| (it.token.fence, handed_over(it, state.written_at));
        let closed = ServerState {
            condition: Condition::Closed,
            // Without a fence, all reserved ones have been used.
            next_fence: handover.next_fence.unwrap_or(open.next_fence),
            settling_left: handover.settling_left,
            grants: holders.map(by_fence).collect(),
            ..state
        };
        open.file.replace(encode(&closed).as_bytes())?;
        if let Err(error) = sync_name(&self.path) {
            // This server goes on, so the closed file would not stay true. Without any file, the
            // next server settles, too.
            let state = self.open_state(&open, None);
            if open.file.replace(encode(&state).as_bytes()).is_err() {
                let _ = fs::remove_file(&self.path);
            }
            return Err(error);
        }
        std::mem::forget(open);
        let (path, holders) = (Escaped::path(&self.path), closed.grants.len());
        info!("handed-over path={path} holders={holders}");
        Ok(())
    }
}

impl Drop for StateFile {
    /// Removes the lock file if this server has created it, but could not start. Otherwise the next
    /// server would take it for the trace of a lost state file, and settle.
    fn drop(&mut self) {
        let is_unused = !self.was_used && !self.open.get_mut().was_written;
        if is_unused {
            self.open.get_mut().file.forget_use();
        }
    }
}

impl OpenState {
    fn apply(&mut self, change: Change) {
        let Change { fence, news, .. } = change;
        match news {
            News::Held(grant) => drop(self.grants.insert(fence, grant)),
            News::Ended => drop(self.grants.remove(&fence)),
            News::Dead(until) => self.add_dead(fence, until),
        }
    }

    /// Adds a dead grant. If there are too many, forgets those whose clients can no longer come
    /// back, and then the oldest one.
    fn add_dead(&mut self, fence: Fence, until: Instant) {
        let now = Instant::now();
        self.dead.insert(fence, until);
        if self.dead.len() > MAX_DEAD {
            self.dead.retain(|_, until| *until > now);
        }
        if self.dead.len() > MAX_DEAD {
            self.dead.pop_first();
        }
    }
}

/// What is remembered of a key, as the file has it at this time.
fn saved(history: &KeyHistory, now: Instant) -> Value {
    let mut json = Vec::new();
    let history = KeyHistory {
        at: now,
        ..history.clone()
    };
    write_history(&history, &mut json);
    serde_json::from_slice(&json).expect("it is JSON")
}

fn new_salt_key() -> io::Result<SaltKey> {
    let mut key = [0; 16];
    random::fill(&mut key)?;
    Ok(SaltKey(key))
}

impl HeldGrant {
    /// The grant as the open file has it at this time; `None` if its lease is over.
    fn saved(&self, now: Instant, time: ClockTimes) -> Option<SavedGrant> {
        let left = self.until.map(|until| until.saturating_duration_since(now));
        (left != Some(Duration::ZERO)).then(|| SavedGrant {
            record: HolderRecord {
                age: Some(now.saturating_duration_since(self.since)),
                lease: left.unwrap_or(self.record.lease),
                ..self.record.clone()
            },
            end: left.map(|left| time.after(left)),
            written_at: time,
        })
    }
}

/// A holder as the closed file has it at this time. The time of a kept grant runs on while there is
/// no server. The clients of other grants cannot renew their leases then.
fn handed_over(record: HolderRecord, written_at: ClockTimes) -> SavedGrant {
    SavedGrant {
        end: record.is_kept.then(|| written_at.after(record.lease)),
        record,
        written_at,
    }
}

impl ClockTimes {
    fn now() -> ClockTimes {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        ClockTimes {
            wall: since_epoch.unwrap_or_default(),
            boot: Moment::now().since_boot(),
        }
    }
}

impl Recorder for Arc<StateFile> {
    fn record(&mut self, changes: Vec<Change>) {
        self.unwritten.record(changes);
    }

    fn is_written(&self, key: &str) -> bool {
        self.unwritten.is_written(key)
    }

    /// The server goes on until it closes the file.
    fn stop(&mut self) {}
}

impl FenceRecord for Arc<StateFile> {
    /// While the file cannot be written, fences that the clock has passed may be used nonetheless:
    /// the next server begins above them, because it begins at the clock.
    fn record_end(&mut self, end: u64) -> io::Result<()> {
        let mut open = self.open.lock();
        let previous_end = std::mem::replace(&mut open.next_fence, end);
        let Err(error) = self.write_open(&mut open) else {
            return Ok(());
        };
        if open.was_written && end <= fence_of_clock(SystemTime::now()) {
            return Ok(());
        }
        open.next_fence = previous_end;
        Err(error)
    }
}

impl SettlingReason {
    fn word(self) -> &'static str {
        match self {
            SettlingReason::Crash => "crash",
            SettlingReason::NoFile => "no-file",
            SettlingReason::BlankFile => "empty-file",
            SettlingReason::NotOver => "not-over",
        }
    }
}

const START_WITHOUT: &str = "move it away to start without the locks in it";

#[cfg(test)]
mod tests {
    use super::*;

    use std::io::Write;
    use std::os::unix::fs::MetadataExt;

    use crate::latchd::table::{ConnId, Key};
    use crate::wire::terms::Terms;
    use crate::wire::token::{Salt, Token};

    fn file_in(directory: &Path) -> Arc<StateFile> {
        let locked = StateFile::lock(Some(&directory.join("state")), Duration::from_secs(1));
        locked.expect("it is free").expect("there is a path")
    }

    fn dead(fence: u64) -> Change {
        Change {
            key: Key::from("k"),
            fence: Fence(fence),
            news: News::Dead(Instant::now() + Duration::from_secs(3600)),
        }
    }

    /// The fences of the dead in the file.
    fn dead_in(file: &StateFile) -> Vec<u64> {
        match file.read() {
            Ok(Previous::State(state)) => state.dead.iter().map(|it| it.fence.0).collect(),
            other => panic!("{other:?}"),
        }
    }

    /// How many descriptors of this process lead to the file, whether or not it has a name.
    fn descriptor_count(file: &Path) -> usize {
        let links = fs::read_dir("/proc/self/fd").expect("a list");
        let links = links.filter_map(|link| fs::read_link(link.ok()?.path()).ok());
        links.filter(|link| link == file).count()
    }

    #[test]
    fn who_waits_for_a_lock_file_that_is_removed_makes_another() {
        let directory = tempfile::tempdir().expect("a directory");
        let lock_path = lock_path(&directory.path().join("state"));
        let failed = file_in(directory.path());
        let next = std::thread::scope(|scope| {
            let next = scope.spawn(|| file_in(directory.path()));
            while descriptor_count(&lock_path) < 2 && !next.is_finished() {
                std::thread::yield_now();
            }
            drop(failed);
            next.join().expect("no panic")
        });
        assert!(next.open.lock().file.is_locked().expect("it is there"));
    }

    fn write(file: &StateFile) -> io::Result<()> {
        file.write_open(&mut file.open.lock())
    }

    #[test]
    fn a_removed_lock_file_is_locked_again_before_a_write() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("state");
        let file = file_in(directory.path());
        for _ in 0..2 {
            fs::remove_file(lock_path(&path)).expect("it is there");
            write(&file).expect("it can be written");
            assert!(StateFile::lock(Some(&path), Duration::from_secs(1)).is_err());
        }
    }

    #[test]
    fn no_server_writes_the_file_of_another_one() {
        let directory = tempfile::tempdir().expect("a directory");
        let lock_path = lock_path(&directory.path().join("state"));
        let file = file_in(directory.path());
        write(&file).expect("it can be written");
        fs::remove_file(&lock_path).expect("it is there");
        let mut other = file_in(directory.path());
        other.record(vec![dead(7)]);
        write(&other).expect("it can be written");
        for _ in 0..2 {
            let refused = write(&file).expect_err("the other one has it");
            assert_eq!(refused.to_string(), IN_USE);
            assert_eq!(dead_in(&file), [7]);
        }
        drop(other);
        write(&file).expect("it is alone again");
        assert!(dead_in(&file).is_empty());
    }

    /// Lets the next write replace the file.
    fn fail(file: &StateFile) {
        file.open.lock().file.replaced = None;
    }

    fn inode(directory: &Path) -> u64 {
        let file = fs::metadata(directory.join("state"));
        file.expect("it is there").ino()
    }

    #[test]
    fn a_file_that_another_process_has_changed_is_replaced() {
        let directory = tempfile::tempdir().expect("a directory");
        let [state, copy] = ["state", "copy"].map(|name| directory.path().join(name));
        let changes: [(&str, &dyn Fn() -> io::Result<()>); 4] = [
            ("nothing", &|| Ok(())),
            ("removed", &|| fs::remove_file(&state)),
            ("restored", &|| {
                fs::copy(&state, &copy)?;
                fs::rename(&copy, &state)
            }),
            ("cut", &|| {
                let file = fs::File::options().write(true).open(&state)?;
                file.set_len(file.metadata()?.len() - 1)
            }),
        ];
        let mut file = file_in(directory.path());
        write(&file).expect("it can be written");
        let held = fs::File::open(&state).expect("no other gets its inode number");
        for (fence, (name, change)) in (1..).zip(changes) {
            change().expect(name);
            file.record(vec![dead(fence)]);
            write(&file).expect("it can be written");
            assert!(dead_in(&file).into_iter().eq(1..=fence), "{name}");
            let is_same = inode(directory.path()) == held.metadata().expect("it is open").ino();
            assert_eq!(is_same, name == "nothing", "{name}");
        }
    }

    #[test]
    fn after_a_failure_the_file_is_replaced() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut file = file_in(directory.path());
        write(&file).expect("it can be written");
        let _held = fs::File::open(directory.path().join("state")).expect("it is there");
        let first = inode(directory.path());
        // What the failed attempt has left is not on the disk for sure, nor a whole batch.
        let torn = fs::File::options()
            .append(true)
            .open(directory.path().join("state"));
        torn.expect("it is there")
            .write_all(b"\n0123")
            .expect("there is room");
        fail(&file);
        file.record(vec![dead(1)]);
        write(&file).expect("it can be written");
        assert_ne!(inode(directory.path()), first);
        assert_eq!(dead_in(&file), [1]);
    }

    /// A change of a random grant of a few.
    fn random_change(random: &mut impl FnMut(u64) -> u64) -> Change {
        let fence = Fence(random(40) + 1);
        let key = Key::from("k");
        let (now, hour) = (Instant::now(), Duration::from_secs(3600));
        let token = Token {
            fence,
            salt: Salt(0),
        };
        let is_kept = random(2) == 0;
        let record = HolderRecord {
            is_kept,
            ..HolderRecord::new(
                "k",
                Terms::LOCK,
                token,
                hour * u32::try_from(random(9) + 1).expect("small"),
            )
        };
        let news = match random(4) {
            0 => News::Ended,
            1 => News::Dead(now + hour),
            _ => News::Held(HeldGrant {
                record,
                conn: ConnId(0),
                since: now,
                // The leases of some are over by the time they are written.
                until: is_kept.then(|| now + hour * u32::try_from(random(2)).expect("small")),
            }),
        };
        Change { key, fence, news }
    }

    /// All that the file says but the times of the writing.
    fn said(file: &StateFile) -> String {
        let Ok(Previous::State(mut state)) = file.read() else {
            panic!("it is written");
        };
        state.written_at = ClockTimes::default();
        // Each batch that concerns a dead grant has it again.
        state.dead.retain(|dead| !dead.left.is_zero());
        state.dead.sort_by_key(|dead| dead.fence);
        state.dead.dedup_by_key(|dead| dead.fence);
        for dead in &mut state.dead {
            (dead.left, dead.end) = (Duration::ZERO, ClockTimes::default());
        }
        for grant in state.grants.values_mut() {
            (grant.written_at, grant.record.age) = (ClockTimes::default(), None);
            if grant.end.is_some() {
                (grant.end, grant.record.lease) = (Some(ClockTimes::default()), Duration::ZERO);
            }
        }
        format!("{state:?}")
    }

    #[test]
    fn appended_changes_say_the_same_as_a_whole_file() {
        let seed = random::number().expect("the kernel has randomness");
        println!("seed {seed}");
        let mut state = seed | 1;
        let mut random = move |below| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        };
        let [appended, whole] = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
        let (mut appending, mut replacing) = (file_in(appended.path()), file_in(whole.path()));
        write(&appending).expect("it can be written");
        let first = inode(appended.path());
        for _ in 0..60 {
            let changes: Vec<_> = (0..random(4)).map(|_| random_change(&mut random)).collect();
            let (next_fence, settle) = (random(1000), Duration::from_secs(random(9)));
            for file in [&mut appending, &mut replacing] {
                file.record(changes.clone());
                let mut open = file.open.lock();
                (open.next_fence, open.settle) = (next_fence, settle);
            }
            fail(&replacing);
            for file in [&appending, &replacing] {
                write(file).expect("it can be written");
            }
            assert_eq!(said(&appending), said(&replacing));
        }
        assert_eq!(inode(appended.path()), first, "it was never replaced");
    }

    #[test]
    fn the_file_stays_as_small_as_what_it_says() {
        const WRITES: u64 = 250;
        const CHANGES: u64 = 400;
        let directory = tempfile::tempdir().expect("a directory");
        let mut file = file_in(directory.path());
        write(&file).expect("it can be written");
        let len = || {
            fs::metadata(directory.path().join("state"))
                .expect("it is there")
                .len()
        };
        let (mut last, mut replaced_len, mut appended) = (inode(directory.path()), len(), 0);
        for round in 0..WRITES {
            // A hundred of the grants go on, and the others end.
            let changes = (0..CHANGES / 2).flat_map(|at| {
                let fence = Fence(if at < 100 { at } else { round * CHANGES + at } + 1);
                let token = Token {
                    fence,
                    salt: Salt(0),
                };
                let key = Key::from("k");
                let held = News::Held(HeldGrant {
                    record: HolderRecord::new("k", Terms::LOCK, token, Duration::from_secs(3600)),
                    conn: ConnId(0),
                    since: Instant::now(),
                    until: None,
                });
                let end = if at < 100 { held.clone() } else { News::Ended };
                [held, end].map(|news| Change {
                    key: key.clone(),
                    fence,
                    news,
                })
            });
            file.record(changes.collect());
            let before = len();
            write(&file).expect("it can be written");
            if inode(directory.path()) == last {
                appended += 1;
                let batch = len() - before;
                assert!(
                    len() <= batch + (2 * replaced_len).max(65_536),
                    "{} after {round}",
                    len()
                );
            } else {
                (last, replaced_len) = (inode(directory.path()), len());
                assert!(len() < 100 * 400, "{}", len());
            }
        }
        assert!(appended > 0);
        drop(file);
    }

    #[test]
    fn a_grant_that_died_just_before_the_end_is_in_the_file() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut file = file_in(directory.path());
        file.record(vec![dead(7)]);
        let nobody = Handover {
            next_fence: Some(8),
            settling_left: Duration::ZERO,
            holders: Vec::new(),
            histories: Vec::new(),
        };
        file.close(nobody).expect("it can be written");
        assert_eq!(dead_in(&file), [7]);
    }

    #[test]
    fn the_file_has_the_newest_dead_grants() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut file = file_in(directory.path());
        let most = u64::try_from(MAX_DEAD).expect("a small number");
        file.record((1..=most + 1).map(dead).collect());
        write(&file).expect("it can be written");
        assert!(dead_in(&file).into_iter().eq(2..=most + 1));
    }
}
