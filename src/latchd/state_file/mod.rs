//! The state file, in which a server leaves for the next one what no client can bring back, and
//! after an orderly end all its holders. See latchd(8), UPGRADES.
//!
//! While the server runs, the file is *open*. An orderly end *closes* it. A server that finds an
//! open file follows a crash, and settles before it grants anything. The file is always replaced as
//! a whole.

pub(crate) mod format;
mod start;

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use log::{error, info, warn};
use parking_lot::Mutex;

use crate::arbiter::Arbiter;
use crate::fence::allocator::{FenceRecord, Reserver};
use crate::fence::source::fence_of_clock;
use crate::sys::directory::{open_exclusive, sync_name, Directory, Entry};
use crate::sys::process;
use crate::sys::trusted::is_own_or_root;
use crate::table::HolderRecord;
use crate::text::{reason, unusable_file, Escaped};
use format::{decode, encode, Condition, ServerState, Unreadable};
pub use start::Left;
use start::{Circumstances, SettlingReason};

/// How long this server waits for the previous one, which is ending, to unlock the lock file.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);

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
    /// Locked for the life of the process. This is a separate file, because the state file is
    /// replaced.
    _lock: File,
}

/// What the open file says, or is to say.
struct OpenState {
    /// For how long the next server settles if this one crashes now.
    settle: Duration,
    next_fence: u64,
    /// Whether the file is open on the disk.
    was_written: bool,
    /// When to try again to write it; `None` if it is on the disk as it is here.
    retry_at: Option<Instant>,
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
        let lock_path = beside(path, ".lock");
        let unusable = |why: String| unusable_file("state", &lock_path, why);
        let (lock, was_used) = lock_file(&lock_path).map_err(|error| unusable(reason(&error)))?;
        let lock = lock.ok_or_else(|| {
            let why = "another server is using it".to_owned();
            unusable_file("state", path, why)
        })?;
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
                settle,
                next_fence: 0,
                was_written: false,
                retry_at: None,
            }),
            _lock: lock,
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

    /// Restores the holders that the previous server has left, and lets the arbiter settle if it
    /// must. Returns for how long. The caller must then write the file before it serves clients.
    pub fn restore(
        &self,
        left: &Left,
        are_clients_local: bool,
        arbiter: &Arbiter,
    ) -> Result<Duration, String> {
        let path = Escaped::path(&self.path);
        if let Left::State(state) = left {
            if !arbiter.restore(&state.holders).is_empty() {
                let why = format!("its holders contradict each other; {START_WITHOUT}");
                return Err(unusable_file("state", &self.path, why));
            }
            if state.condition == Condition::Closed {
                info!("took-over path={path} holders={}", state.holders.len());
            }
        }
        let settling = left.settling(&Circumstances {
            settle: self.settle,
            was_used: self.was_used,
            boot_id: self.boot_id.as_deref(),
            are_clients_local,
        });
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

    /// Keeps the file up to date until the server ends: reserves fences, and notes when the server
    /// has settled. Does not return while the server runs.
    pub fn keep_up_to_date(&self, mut reserver: Reserver, settling: Duration, arbiter: &Arbiter) {
        let mut is_settling = !settling.is_zero();
        loop {
            let settled_at = arbiter.settling_until();
            if is_settling && settled_at.is_none() {
                info!("settled");
                self.note_settled();
                is_settling = false;
            }
            self.retry(Instant::now());
            let next_look = [settled_at, self.open.lock().retry_at];
            let next_look = next_look.into_iter().flatten().min();
            let served = reserver.serve_one(next_look, || arbiter.grant_owed_slots());
            if served.is_break() {
                return;
            }
        }
    }

    /// From now on, the next server settles for no longer than this one would after a crash.
    fn note_settled(&self) {
        let mut open = self.open.lock();
        if open.settle != self.settle {
            open.settle = self.settle;
            let _ = self.write_open(&mut open);
        }
    }

    /// Tries again to write the file, if an earlier attempt has failed and it is time.
    fn retry(&self, now: Instant) {
        let mut open = self.open.lock();
        if open.retry_at.is_some_and(|at| at <= now) {
            let _ = self.write_open(&mut open);
        }
    }

    /// Writes the open file. Logs the first failure, and the end of the failures.
    fn write_open(&self, open: &mut OpenState) -> io::Result<()> {
        let written = self
            .replace(&self.open_state(open))
            .and_then(|()| sync_name(&self.path));
        let had_failed = open.retry_at.is_some();
        let path = Escaped::path(&self.path);
        match &written {
            Ok(()) => {
                open.was_written = true;
                open.retry_at = None;
                if had_failed {
                    info!("state-written-again path={path}");
                }
            }
            Err(error) if open.was_written => {
                open.retry_at = Some(Instant::now() + RETRY_AFTER);
                if !had_failed {
                    let why = reason(error);
                    warn!("state-not-written path={path} error=\"{why}\"");
                }
            }
            // The server is not serving yet, and does not start.
            Err(_) => {}
        }
        written
    }

    fn open_state(&self, open: &OpenState) -> ServerState {
        ServerState {
            condition: Condition::Open,
            next_fence: open.next_fence,
            settle: open.settle,
            settling_left: Duration::ZERO,
            boot_id: self.boot_id.clone(),
            holders: Vec::new(),
        }
    }

    /// Closes the file, so that it survives a power cut. Afterwards nothing else is written. After
    /// an error the file stays open, because this server continues.
    pub fn close(&self, handover: Handover) -> io::Result<()> {
        let open = self.open.lock();
        let closed = ServerState {
            condition: Condition::Closed,
            // Without a fence, all reserved ones have been used.
            next_fence: handover.next_fence.unwrap_or(open.next_fence),
            settling_left: handover.settling_left,
            holders: handover.holders,
            ..self.open_state(&open)
        };
        self.replace(&closed)?;
        if let Err(error) = sync_name(&self.path) {
            // The closed file is in place, and will soon be out of date. Without any file, the next
            // server settles, too.
            if self.replace(&self.open_state(&open)).is_err() {
                let _ = fs::remove_file(&self.path);
            }
            return Err(error);
        }
        std::mem::forget(open);
        info!(
            "handed-over path={} holders={}",
            Escaped::path(&self.path),
            closed.holders.len()
        );
        Ok(())
    }

    /// Replaces the file, whose content is then on the disk, though perhaps without its name.
    fn replace(&self, state: &ServerState) -> io::Result<()> {
        let staged = beside(&self.path, ".new");
        stage(&staged, encode(state).as_bytes())
            .and_then(|()| fs::rename(&staged, &self.path))
            .inspect_err(|_| drop(fs::remove_file(&staged)))
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
/// was there.
fn lock_file(path: &Path) -> io::Result<(Option<File>, bool)> {
    // The owner is checked first: another user who owns the file may have locked it, and this
    // server would then wait for that lock.
    let was_there = match fs::symlink_metadata(path) {
        Ok(metadata) => {
            refuse_owner(metadata.uid())?;
            true
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(error) => return Err(error),
    };
    let lock = open_exclusive(path, 0o600, LOCK_PATIENCE)?;
    if let Some(lock) = &lock {
        refuse_owner(lock.metadata()?.uid())?;
    }
    Ok((lock, was_there))
}

/// Refuses a file of another user, because that user could change, remove or lock it.
fn refuse_owner(owner: u32) -> io::Result<()> {
    match is_own_or_root(owner) {
        true => Ok(()),
        false => Err(io::Error::other("it belongs to another user")),
    }
}

const START_WITHOUT: &str = "move it away to start without the locks in it";

/// The path with a suffix added to its file name.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Creates a file, and returns when its content is on the disk.
fn stage(path: &Path, content: &[u8]) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
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
