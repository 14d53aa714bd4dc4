//! The state file, in which a server leaves for the next one what no client can bring back: while
//! it runs, its lasting grants, and after an orderly end all its holders. See
//! latchd-operations(7), UPGRADES.
//!
//! While the server runs, the file is *open*. An orderly end *closes* it. A server that finds an
//! open file follows a crash, and settles before it grants anything. The file is always replaced as
//! a whole.

pub(crate) mod format;
mod start;
mod unwritten;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use log::{error, info, warn};
use parking_lot::Mutex;

use crate::arbiter::{Arbiter, LastingRecorder};
use crate::fence::allocator::FenceRecord;
use crate::fence::source::fence_of_clock;
use crate::server;
use crate::sys::directory::{open_exclusive, sync_name, Directory, Entry};
use crate::sys::moment::Moment;
use crate::sys::process;
use crate::sys::random;
use crate::sys::trusted::is_own_or_root;
use crate::table::{HolderRecord, LastingChange, LastingGrant, LastingNews, ProofRules, SaltKey};
use crate::text::{reason, unusable_file, Escaped};
use crate::token::Fence;
use format::{
    decode, encode, ClockTimes, Condition, SavedDead, SavedGrant, ServerState, Unreadable,
};
pub use start::Left;
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
    unwritten: Unwritten,
}

/// What the open file says, or is to say.
struct OpenState {
    /// The lock file, which this server keeps locked. This is a separate file, because the state
    /// file is replaced.
    lock: File,
    /// For how long the next server settles if this one crashes now.
    settle: Duration,
    next_fence: u64,
    /// The key of the salts; `None` before it is known.
    salt_key: Option<SaltKey>,
    /// The lasting grants.
    grants: BTreeMap<Fence, LastingGrant>,
    dead: Dead,
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
}

impl StateFile {
    /// Locks the path of the state file, if the options name one. `settle` is for how long this
    /// server settles after a crash. Blocks for at most a second.
    pub fn lock(path: Option<&Path>, settle: Duration) -> Result<Option<Arc<StateFile>>, String> {
        let Some(path) = path else {
            return Ok(None);
        };
        let lock_path = lock_path(path);
        let unusable = |why: String| unusable_file("state", &lock_path, why);
        let locked = lock_file(&lock_path, LOCK_PATIENCE);
        let (lock, was_used) = locked.map_err(|error| unusable(reason(&error)))?;
        let lock = lock.ok_or_else(|| unusable_file("state", path, IN_USE.to_owned()))?;
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
                lock,
                settle,
                next_fence: 0,
                salt_key: None,
                grants: BTreeMap::new(),
                dead: Dead::default(),
                was_written: false,
                failure: None,
            }),
            unwritten: Unwritten::default(),
        })))
    }

    /// Reads what the previous server has left.
    pub fn read(&self) -> Result<Left, String> {
        let unusable = |why: String| unusable_file("state", &self.path, why);
        let content = self.content().map_err(|error| self.unusable(&error))?;
        let Some(content) = content else {
            return Ok(Left::Nothing);
        };
        match decode(&content) {
            Ok(state) => Ok(Left::State(state)),
            Err(Unreadable::Blank) => Ok(Left::Blank),
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

    fn content(&self) -> io::Result<Option<Vec<u8>>> {
        let name = self.path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let mut file = match Directory::of(&self.path)?.open_file(name)? {
            Entry::Nothing => return Ok(None),
            Entry::File(file) => file,
            Entry::Unreadable => return Err(io::ErrorKind::PermissionDenied.into()),
            Entry::Other => return Err(io::Error::other("it is not a regular file")),
        };
        refuse_owner(file.metadata()?.uid())?;
        let mut content = Vec::new();
        file.read_to_end(&mut content)?;
        Ok(Some(content))
    }

    /// Restores the grants that the previous server has left, and lets the arbiter settle if it
    /// must. Returns for how long. The caller must then write the file before it serves clients.
    pub fn restore(
        self: &Arc<Self>,
        left: &Left,
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
        let salt_key = match left.salt_key() {
            Some(key) => key,
            None => new_salt_key().map_err(server::cannot("get random numbers"))?,
        };
        let dead = left.dead(&circumstances);
        let proofs = ProofRules {
            salt_key,
            dead: dead.iter().filter_map(|(fence, _)| *fence).collect(),
            are_dead_missing: dead.iter().any(|(fence, _)| fence.is_none()),
        };
        {
            let (mut open, now) = (self.open.lock(), Instant::now());
            open.salt_key = Some(salt_key);
            for (fence, left) in dead {
                open.dead.add(fence, now + left);
            }
        }
        arbiter.record_lasting_grants(self.settle, proofs, Box::new(Arc::clone(self)));
        let grants = left.grants(&circumstances);
        if !arbiter.restore(&grants).is_empty() {
            let why = format!("its holders contradict each other; {START_WITHOUT}");
            return Err(unusable_file("state", &self.path, why));
        }
        if let Left::State(state) = left {
            let kept_count = grants.iter().filter(|it| it.is_kept).count();
            match state.condition {
                Condition::Closed => info!("took-over path={path} holders={}", grants.len()),
                Condition::Open => info!(
                    "restored path={path} kept={kept_count} long={}",
                    grants.len() - kept_count
                ),
            }
        }
        let settling = left.settling(&circumstances);
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
            let settled_at = arbiter.settling_until();
            if is_settling && settled_at.is_none() {
                info!("settled");
                self.note_settled();
                is_settling = false;
            }
            if self.unwritten.is_due() {
                let _ = self.write_open(&mut self.open.lock());
            }
            let has_failed = self.unwritten.has_failed();
            if has_failed == is_writable {
                is_writable = !has_failed;
                // Only then is it logged: whoever reads the line can rely on it.
                arbiter.set_lasting_writable(is_writable);
                self.log_failure();
            }
            self.unwritten.wait_for_work(has_failed, settled_at);
        }
    }

    /// Whether any change of a lasting grant is not in the file yet.
    pub fn has_unwritten(&self) -> bool {
        self.unwritten.is_any()
    }

    /// What a reply that concerns the key must wait for, before it is sent: see [`Self::wait`]. A
    /// client relies on a lease that the settling of the next server would not cover, and on a
    /// grant that is kept.
    pub fn awaited(&self, key: &str, lease: Option<Duration>, is_kept: bool) -> AwaitedWrites {
        let is_long = lease.is_some_and(|lease| lease > self.settle);
        self.unwritten.awaited(key, is_kept || is_long)
    }

    /// Blocks until these changes are in the file. While the file cannot be written, waits only for
    /// the changes that the client relies on.
    pub fn wait(&self, awaited: AwaitedWrites) {
        self.unwritten.wait(awaited);
    }

    /// Blocks until these changes are in the file, and returns whether they are. While the file
    /// cannot be written, they are not.
    pub fn try_wait(&self, awaited: AwaitedWrites) -> bool {
        self.unwritten.try_wait(awaited)
    }

    /// From now on, the next server settles for no longer than this one would after a crash.
    fn note_settled(&self) {
        let mut open = self.open.lock();
        if open.settle != self.settle {
            open.settle = self.settle;
            let _ = self.write_open(&mut open);
        }
    }

    /// Logs that the file cannot be written, or that it can be written again.
    fn log_failure(&self) {
        let path = Escaped::path(&self.path);
        match &self.open.lock().failure {
            Some(why) => warn!("state-not-written path={path} error=\"{why}\""),
            None => info!("state-written-again path={path}"),
        }
    }

    /// Writes the open file if any change is not in it yet.
    fn write_unwritten(&self, open: &mut OpenState) -> io::Result<()> {
        if self.has_unwritten() {
            self.write_open(open)
        } else {
            Ok(())
        }
    }

    /// Writes the open file with all changes so far.
    fn write_open(&self, open: &mut OpenState) -> io::Result<()> {
        let (changes, number) = self.unwritten.take();
        changes.into_iter().for_each(|change| open.apply(change));
        let state = self.open_state(open);
        let written = self
            .replace(&state, &mut open.lock)
            .and_then(|()| sync_name(&self.path));
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

    fn open_state(&self, open: &OpenState) -> ServerState {
        let (now, time) = (Instant::now(), ClockTimes::now());
        let grants = open.grants.values();
        let grants = grants.filter_map(|grant| grant.saved(now, time));
        self.state_at(time, open, grants.collect())
    }

    /// The state of an open file that is written at this time, with these grants.
    fn state_at(&self, time: ClockTimes, open: &OpenState, grants: Vec<SavedGrant>) -> ServerState {
        let now = Instant::now();
        ServerState {
            condition: Condition::Open,
            next_fence: open.next_fence,
            settle: open.settle,
            settling_left: Duration::ZERO,
            boot_id: self.boot_id.clone(),
            written_at: time.wall,
            salt_key: open.salt_key,
            dead: open.dead.saved(now, time),
            grants,
        }
    }

    /// Writes the changes that are not in the file yet, for the sessions whose replies wait for
    /// them. If that fails, they are written with the next ones.
    pub fn catch_up(&self) {
        let _ = self.write_unwritten(&mut self.open.lock());
    }

    /// Closes the file, so that it survives a power cut. Afterwards nothing else is written. After
    /// an error the file stays open, because this server continues.
    pub fn close(&self, handover: Handover) -> io::Result<()> {
        let mut open = self.open.lock();
        // The dead among the changes are in no hand-over.
        self.write_unwritten(&mut open)?;
        let time = ClockTimes::now();
        let holders = handover.holders.into_iter();
        let grants = holders.map(|holder| handed_over(holder, time)).collect();
        let closed = ServerState {
            condition: Condition::Closed,
            // Without a fence, all reserved ones have been used.
            next_fence: handover.next_fence.unwrap_or(open.next_fence),
            settling_left: handover.settling_left,
            ..self.state_at(time, &open, grants)
        };
        self.replace(&closed, &mut open.lock)?;
        if let Err(error) = sync_name(&self.path) {
            // The closed file is in place, and will soon be out of date. Without any file, the next
            // server settles, too.
            let state = self.open_state(&open);
            if self.replace(&state, &mut open.lock).is_err() {
                let _ = fs::remove_file(&self.path);
            }
            return Err(error);
        }
        std::mem::forget(open);
        info!(
            "handed-over path={} holders={}",
            Escaped::path(&self.path),
            closed.grants.len()
        );
        Ok(())
    }

    /// Replaces the file, whose content is then on the disk, though perhaps without its name.
    fn replace(&self, state: &ServerState, lock: &mut File) -> io::Result<()> {
        self.keep_locked(lock)?;
        let staged = beside(&self.path, ".new");
        stage(&staged, encode(state).as_bytes())
            .and_then(|()| fs::rename(&staged, &self.path))
            .inspect_err(|_| drop(fs::remove_file(&staged)))
    }

    /// Locks the lock file again if someone has removed it. Otherwise another server could use the
    /// state file, too. Fails if one does.
    fn keep_locked(&self, lock: &mut File) -> io::Result<()> {
        let path = lock_path(&self.path);
        if !is_at(&path, lock)? {
            let (again, _) = lock_file(&path, Duration::ZERO)?;
            *lock = again.ok_or_else(|| io::Error::other(IN_USE))?;
        }
        Ok(())
    }
}

impl Drop for StateFile {
    /// Removes the lock file if this server has created it, but could not start. Otherwise the next
    /// server would take it for the trace of a lost state file, and settle.
    fn drop(&mut self) {
        let is_unused = !self.was_used && !self.open.get_mut().was_written;
        if is_unused && fs::symlink_metadata(&self.path).is_err_and(|error| is_missing(&error)) {
            let _ = fs::remove_file(lock_path(&self.path));
        }
    }
}

impl OpenState {
    fn apply(&mut self, change: LastingChange) {
        let LastingChange { fence, news, .. } = change;
        match news {
            LastingNews::Lasts(grant) => drop(self.grants.insert(fence, grant)),
            LastingNews::Over => drop(self.grants.remove(&fence)),
            LastingNews::Dead(until) => self.dead.add(Some(fence), until),
        }
    }
}

/// The dead grants, each with the time when its lease would have ended.
#[derive(Default)]
struct Dead {
    known: BTreeMap<Fence, Instant>,
    /// When the leases of those that had no room would have ended.
    missing_until: Option<Instant>,
}

impl Dead {
    /// Adds a dead grant, or with `None` those that were missing in the previous file. Forgets
    /// those whose leases would be over, and the oldest one if there are too many.
    fn add(&mut self, fence: Option<Fence>, until: Instant) {
        let Some(fence) = fence else {
            self.missing_until = self.missing_until.max(Some(until));
            return;
        };
        let now = Instant::now();
        self.known.insert(fence, until);
        if self.known.len() > MAX_DEAD {
            self.known.retain(|_, until| *until > now);
        }
        if self.known.len() > MAX_DEAD {
            let oldest = self.known.pop_first();
            self.missing_until = self.missing_until.max(oldest.map(|(_, until)| until));
        }
    }

    fn saved(&self, now: Instant, time: ClockTimes) -> Vec<SavedDead> {
        let missing = self.missing_until.map(|until| (None, until));
        let known = self.known.iter();
        let known = known.map(|(fence, until)| (Some(*fence), *until));
        let all = missing.into_iter().chain(known);
        let saved = all.filter(|(_, until)| *until > now).map(|(fence, until)| {
            let left = until.saturating_duration_since(now);
            SavedDead {
                fence,
                left,
                end: time.after(left),
            }
        });
        saved.collect()
    }
}

fn new_salt_key() -> io::Result<SaltKey> {
    let mut key = [0; 16];
    random::fill(&mut key)?;
    Ok(SaltKey(key))
}

impl LastingGrant {
    /// The grant as the open file has it at this time; `None` if its lease is over.
    fn saved(&self, now: Instant, time: ClockTimes) -> Option<SavedGrant> {
        let record = self.record.clone();
        let Some(until) = self.until else {
            return Some(SavedGrant { record, end: None });
        };
        let lease = until.saturating_duration_since(now);
        (!lease.is_zero()).then(|| SavedGrant {
            record: HolderRecord { lease, ..record },
            end: Some(time.after(lease)),
        })
    }
}

/// A holder as the closed file has it at this time. The time of a kept grant runs on while there is
/// no server. The clients of other grants cannot renew their leases then.
fn handed_over(record: HolderRecord, time: ClockTimes) -> SavedGrant {
    let end = record.is_kept.then(|| time.after(record.lease));
    SavedGrant { record, end }
}

impl ClockTimes {
    fn now() -> ClockTimes {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        ClockTimes {
            wall: since_epoch.unwrap_or_default(),
            boot: Moment::now().since_boot(),
        }
    }

    fn after(self, time: Duration) -> ClockTimes {
        ClockTimes {
            wall: self.wall.saturating_add(time),
            boot: self.boot.saturating_add(time),
        }
    }
}

impl LastingRecorder for Arc<StateFile> {
    fn record(&mut self, changes: &mut Vec<LastingChange>) {
        self.unwritten.record(changes);
    }

    fn is_written(&self, key: &str) -> bool {
        self.unwritten.is_written(key)
    }
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

/// Opens and locks a file; `None` if another process has locked it. Also returns whether the file
/// was there. Waits for the other process for at most `patience`.
fn lock_file(path: &Path, patience: Duration) -> io::Result<(Option<File>, bool)> {
    // The owner is checked first: another user who owns the file may have locked it, and this
    // server would then wait for that lock.
    loop {
        let was_there = match fs::symlink_metadata(path) {
            Ok(metadata) => {
                refuse_owner(metadata.uid())?;
                true
            }
            Err(error) if is_missing(&error) => false,
            Err(error) => return Err(error),
        };
        let Some(lock) = open_exclusive(path, 0o600, patience)? else {
            return Ok((None, was_there));
        };
        refuse_owner(lock.metadata()?.uid())?;
        // A server that could not start may have removed the file while this one waited for it. The
        // next server would lock another file then.
        if is_at(path, &lock)? {
            return Ok((Some(lock), was_there));
        }
    }
}

/// Whether the path leads to this open file.
fn is_at(path: &Path, file: &File) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(found) => {
            let file = file.metadata()?;
            Ok((found.dev(), found.ino()) == (file.dev(), file.ino()))
        }
        Err(error) if is_missing(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

fn is_missing(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
}

/// Refuses a file of another user, because that user could change, remove or lock it.
fn refuse_owner(owner: u32) -> io::Result<()> {
    if is_own_or_root(owner) {
        Ok(())
    } else {
        Err(io::Error::other("it belongs to another user"))
    }
}

const IN_USE: &str = "another server is using it";

const START_WITHOUT: &str = "move it away to start without the locks in it";

/// The path of the file that a server locks while it uses this state file.
fn lock_path(path: &Path) -> PathBuf {
    beside(path, ".lock")
}

/// The path with a suffix added to its file name.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Creates a file, and returns when its content is on the disk.
fn stage(path: &Path, content: &[u8]) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if !is_missing(&error) => return Err(error),
        _ => {}
    }
    // The file contains tags and tokens, which other users must not read.
    let mut options = File::options();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Key;

    fn file_in(directory: &Path) -> Arc<StateFile> {
        let locked = StateFile::lock(Some(&directory.join("state")), Duration::from_secs(1));
        locked.expect("it is free").expect("there is a path")
    }

    fn dead(fence: u64) -> LastingChange {
        LastingChange {
            key: Key::from("k"),
            fence: Fence(fence),
            news: LastingNews::Dead(Instant::now() + Duration::from_secs(3600)),
        }
    }

    /// The fences of the dead in the file.
    fn dead_in(file: &StateFile) -> Vec<Option<u64>> {
        match file.read() {
            Ok(Left::State(state)) => {
                let dead = state.dead.iter();
                dead.map(|it| it.fence.map(|fence| fence.0)).collect()
            }
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
        assert!(is_at(&lock_path, &next.open.lock().lock).expect("it is there"));
    }

    fn write(file: &StateFile) -> io::Result<()> {
        file.write_open(&mut file.open.lock())
    }

    #[test]
    fn a_removed_lock_file_is_locked_again_before_a_write() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("state");
        let file = file_in(directory.path());
        fs::remove_file(lock_path(&path)).expect("it is there");
        write(&file).expect("it can be written");
        assert!(StateFile::lock(Some(&path), Duration::from_secs(1)).is_err());
    }

    #[test]
    fn no_server_writes_the_file_of_another_one() {
        let directory = tempfile::tempdir().expect("a directory");
        let lock_path = lock_path(&directory.path().join("state"));
        let file = file_in(directory.path());
        write(&file).expect("it can be written");
        fs::remove_file(&lock_path).expect("it is there");
        let mut other = file_in(directory.path());
        other.record(&mut vec![dead(7)]);
        write(&other).expect("it can be written");
        for _ in 0..2 {
            let refused = write(&file).expect_err("the other one has it");
            assert_eq!(refused.to_string(), IN_USE);
            assert_eq!(dead_in(&file), [Some(7)]);
        }
        drop(other);
        write(&file).expect("it is alone again");
        assert!(dead_in(&file).is_empty());
    }

    #[test]
    fn a_grant_that_died_just_before_the_end_is_in_the_file() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut file = file_in(directory.path());
        file.record(&mut vec![dead(7)]);
        let nobody = Handover {
            next_fence: Some(8),
            settling_left: Duration::ZERO,
            holders: Vec::new(),
        };
        file.close(nobody).expect("it can be written");
        assert_eq!(dead_in(&file), [Some(7)]);
    }

    #[test]
    fn the_file_says_if_dead_grants_are_missing() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut file = file_in(directory.path());
        let most = u64::try_from(MAX_DEAD).expect("a small number");
        for (count, first, missing) in [(most, 1, None), (most + 1, 2, Some(None))] {
            file.record(&mut vec![dead(count)]);
            let others = (1..count).map(dead);
            file.record(&mut others.collect());
            let written = file.write_open(&mut file.open.lock());
            written.expect("it can be written");
            let known = (first..=count).map(Some);
            let expected: Vec<_> = missing.into_iter().chain(known).collect();
            assert_eq!(dead_in(&file), expected);
        }
    }
}
