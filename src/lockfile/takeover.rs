//! How a lock changes hands (sema-lockfile(5), PROTOCOL). Two processes that run this code never
//! hold one lock at once, in any order of their steps, and wherever one of them dies. Pure.
//!
//! A lock file has a name and an inode. The process that has the inode locked decides alone what
//! becomes of both. Holders and takers lock it for reading by fcntl(2), and then by flock(2). Any
//! process that may read the file can keep it locked by flock(2). Then a write lock by fcntl(2)
//! counts as well, since it is not granted while a holder or a taker has the file locked.
//!
//! 1. A link, which replaces nothing, creates the name.
//! 2. A taker rewrites a stale file in place. It has the file locked, has judged it again since,
//!    and has seen it under the name after that. If the name still belongs to the file after the
//!    rewrite, the lock belongs to the taker. With a write lock only, it removes the name instead.
//! 3. A process removes the name only while it has the inode locked, and has seen it under the name
//!    since. The exceptions are a forced release, and the release of a lock that no guard keeps
//!    locked, and that is not stale: no taker has that file locked.
//! 4. Inodes are compared only while they are open, so that a new one cannot have the number of an
//!    old one.
//!
//! So no process that runs this code can change the name or the file between a taker's look and its
//! rewrite. Other programs only create with `O_EXCL` and remove. If one of them removes the stale
//! file during a takeover, the taker writes into a file without a name and sees that afterwards. It
//! never displaces another file.
//!
//! Each call on [`Files`] is one step, except the rewrite, which is two. Between the system calls
//! of a lock, a process has only locks that refuse other processes theirs. The tests run this code
//! through every order of the steps of several processes.

use std::io;
use std::time::Duration;

use crate::sys::directory::{Entry, FileId};

use super::record::Record;
use super::staleness::{Content, Flock};

/// How long this process waits for a file that another process has locked.
pub(super) const LOCK_PATIENCE: Duration = Duration::from_millis(200);

/// How often one attempt starts again because the name went to another file. Who may write to the
/// directory can do that without end, and a caller has a time limit.
const MAX_ROUNDS: u32 = 8;

/// The steps. Those of other processes can come between two steps, but not into one.
pub(super) trait Files {
    /// An open file. Once locked, it stays locked until it is dropped.
    type File;

    /// Makes a file that is complete and locked when the lock's name appears; `None` if the name is
    /// taken.
    fn create(&self, record: &[u8]) -> io::Result<Option<Self::File>>;
    /// Opens the file under the lock's name.
    fn open(&self) -> io::Result<Entry<Self::File>>;
    /// Opens the same file again for writing; `None` if this process may not write it.
    fn open_to_write(&self, file: &Self::File) -> io::Result<Option<Self::File>>;
    /// Whether a file that is open for writing may be rewritten: it is ours, has one name, and has
    /// been open to no more users than the new one. Not a step: no other process changes that.
    fn may_rewrite(&self, file: &Self::File) -> io::Result<bool>;
    /// Locks an open file. Waits for `patience` at most.
    fn lock(&self, file: &Self::File, patience: Duration) -> io::Result<Flock>;
    /// Reads an open file.
    fn read(&self, file: &Self::File) -> io::Result<Content>;
    /// The inode of an open file. Not a step, since it cannot change.
    fn id(&self, file: &Self::File) -> io::Result<FileId>;
    /// The inode under the lock's name.
    fn identity(&self) -> io::Result<Option<FileId>>;
    /// The mode of a new file here. Checks that the disk has room for the record, and that this
    /// process may create names. Not a step, since no other process can see it.
    fn prepare(&self, record: &[u8]) -> io::Result<u32>;
    /// Empties the file, writes the record, and sets the mode. After an error the file is
    /// unchanged, or has lost the lock's name.
    fn rewrite(&self, file: &Self::File, record: &[u8], mode: u32) -> io::Result<()>;
    /// Removes the lock's name.
    fn remove(&self) -> io::Result<()>;
    /// Waits for processes that judged the file earlier and may still act on that. False if there
    /// is no need to wait.
    fn settle(&self, after: After) -> bool;
}

/// What came before a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    Nothing,
    /// A stale lock, which this or another process has removed.
    Takeover,
}

/// What a process that wants the lock writes, and what it may take over.
pub(super) struct Taker<'a> {
    /// The record to write, with the present time. It says so if the holder keeps the file open
    /// while it holds the lock.
    pub(super) record: &'a dyn Fn() -> Vec<u8>,
    /// Whether a file with this content may be taken over if no other process has it locked.
    pub(super) may_take: &'a dyn Fn(&Content) -> Verdict,
}

/// Whether a file may be taken over or removed; if not, why.
pub(super) type Verdict = Result<(), Obstacle>;

/// The result of an attempt to take or to remove the lock.
#[must_use]
pub(super) enum Tried<T> {
    /// The lock is taken: its file. Or it is gone: whether it was there.
    Done(T),
    /// What is in the way, and what the file says, if it could be read.
    Obstructed(Obstacle, Option<Content>),
}

/// Why a lock cannot be taken or removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Obstacle {
    /// It is not stale.
    NotStale,
    /// It would be stale, but its file is locked: by a living holder, or by another taker.
    Locked,
    /// It is stale, but this user may not replace the file.
    NotRemovable,
    /// It is stale, but the file system has no locks that make a takeover safe.
    NoLocks,
    /// Another process acted on it at the same time.
    Contended,
    /// This user may not read the file.
    Unreadable,
    /// It is no file, but a link, a directory, a device, a pipe or a socket.
    NotAFile,
    /// The file belongs to another program: it is neither empty nor a record, nor the beginning of
    /// one.
    NotALockFile,
}

/// Tries to take the lock once. Returns its file, which is locked.
pub(super) fn acquire<F: Files>(files: &F, taker: &Taker<'_>) -> io::Result<Tried<F::File>> {
    let mut after = After::Nothing;
    for _ in 0..MAX_ROUNDS {
        match files.open()? {
            Entry::Nothing => {}
            Entry::Unreadable => return Ok(Tried::Obstructed(Obstacle::Unreadable, None)),
            Entry::Other => return Ok(Tried::Obstructed(Obstacle::NotAFile, None)),
            Entry::File(found) => match take_over(files, taker, found)? {
                Some(tried) => return Ok(tried),
                // This or another process has removed the stale file. A process that judged the old
                // file as stale may still act on that.
                None => {
                    after = After::Takeover;
                    continue;
                }
            },
        }
        if let Some(ours) = files.create(&(taker.record)())? {
            return settled(files, after, ours);
        }
    }
    Ok(Tried::Obstructed(Obstacle::Contended, None))
}

/// Takes over the lock whose file is `found`. `None` if that was stale, and has lost the lock's
/// name.
fn take_over<F: Files>(
    files: &F,
    taker: &Taker<'_>,
    found: F::File,
) -> io::Result<Option<Tried<F::File>>> {
    let held = |why, content| Ok(Some(Tried::Obstructed(why, Some(content))));
    // A lock that is simply held is only read. Its file is not locked even for a moment.
    let content = files.read(&found)?;
    if let Err(why) = (taker.may_take)(&content) {
        return held(why, content);
    }
    // It may have changed, or lost its name, before this process locked it.
    let locked = lock(files, found, Duration::ZERO)?;
    let (file, judged) = (locked.file, locked.content);
    let can_rewrite = match locked.flock {
        Flock::Ours => locked.is_writable && files.may_rewrite(&file)?,
        // A guard must have its file locked by flock(2).
        Flock::Bystanders => false,
        Flock::Theirs => return held(Obstacle::Locked, judged),
        Flock::Unknown => return held(Obstacle::NoLocks, judged),
    };
    let verdict = (taker.may_take)(&judged);
    // Only after the judgement: a holder may release a lock that another process has locked, but
    // only while it is alive.
    let id = files.id(&file)?;
    if files.identity()? != Some(id) {
        return Ok(None);
    }
    if let Err(why) = verdict {
        return held(why, judged);
    }
    let record = (taker.record)();
    let changed = files.prepare(&record).and_then(|mode| {
        if can_rewrite {
            files.rewrite(&file, &record, mode)
        } else {
            files.remove()
        }
    });
    match changed {
        // If another program has removed the name before the rewrite, the record is in a file
        // without a name and does no harm.
        Ok(()) if can_rewrite && files.identity()? == Some(id) => {
            settled(files, After::Takeover, file).map(Some)
        }
        Ok(()) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if is_forbidden(&error) => held(Obstacle::NotRemovable, judged),
        Err(error) => Err(error),
    }
}

/// A file that this process has tried to lock.
pub(super) struct LockedFile<F> {
    file: F,
    is_writable: bool,
    pub(super) flock: Flock,
    /// What it says since.
    content: Content,
}

/// Locks the file, for writing if this process may write it, and reads it. Waits for `patience` at
/// most.
pub(super) fn lock<F: Files>(
    files: &F,
    found: F::File,
    patience: Duration,
) -> io::Result<LockedFile<F::File>> {
    let writable = files.open_to_write(&found)?;
    let is_writable = writable.is_some();
    let file = writable.unwrap_or(found);
    let flock = files.lock(&file, patience)?;
    let content = files.read(&file)?;
    Ok(LockedFile {
        file,
        is_writable,
        flock: flock.of_record(&Record::parse(&content.bytes)),
        content,
    })
}

/// A grant, unless a process that judged the file earlier has acted on that since.
fn settled<F: Files>(files: &F, after: After, ours: F::File) -> io::Result<Tried<F::File>> {
    if files.settle(after) && !is_still_ours(files, &ours)? {
        return Ok(Tried::Obstructed(Obstacle::Contended, None));
    }
    Ok(Tried::Done(ours))
}

/// Whether the lock's name still belongs to our file.
pub(super) fn is_still_ours<F: Files>(files: &F, ours: &F::File) -> io::Result<bool> {
    Ok(files.identity()? == Some(files.id(ours)?))
}

/// Releases the lock whose file this process has had open and locked since the grant. False if the
/// lock is lost; then nothing changes.
pub(super) fn release<F: Files>(files: &F, ours: &F::File) -> io::Result<bool> {
    Ok(is_still_ours(files, ours)? && remove_name(files)?)
}

/// Returns whether the name was there.
fn remove_name<F: Files>(files: &F) -> io::Result<bool> {
    match files.remove() {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether a release that names the lock may go on although another process has the file locked:
/// any process that may read the file can have locked it, but if the lock is stale, so can a taker.
/// `is_stale` supposes that no process has the file locked.
pub(super) fn may_pass(flock: Flock, is_stale: bool) -> Verdict {
    match flock {
        Flock::Theirs if is_stale => Err(Obstacle::Locked),
        _ => Ok(()),
    }
}

/// Removes the lock if `allows` permits that for its content and its flock. False if there was no
/// lock.
pub(super) fn remove<F: Files>(
    files: &F,
    allows: &dyn Fn(&Content, Flock) -> Verdict,
) -> io::Result<Tried<bool>> {
    for _ in 0..MAX_ROUNDS {
        let found = match files.open()? {
            Entry::Nothing => return Ok(Tried::Done(false)),
            Entry::Unreadable => return Ok(Tried::Obstructed(Obstacle::Unreadable, None)),
            Entry::Other => return Ok(Tried::Obstructed(Obstacle::NotAFile, None)),
            Entry::File(found) => found,
        };
        let locked = lock(files, found, LOCK_PATIENCE)?;
        let content = locked.content;
        let verdict = allows(&content, locked.flock);
        if files.identity()? != Some(files.id(&locked.file)?) {
            continue;
        }
        if let Err(why) = verdict {
            return Ok(Tried::Obstructed(why, Some(content)));
        }
        return match remove_name(files) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                Ok(Tried::Obstructed(Obstacle::NotRemovable, Some(content)))
            }
            removed => removed.map(Tried::Done),
        };
    }
    Ok(Tried::Obstructed(Obstacle::Contended, None))
}

/// Whether this user, or every user, lacks the right to change names here.
pub(super) fn is_forbidden(error: &io::Error) -> bool {
    use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
    matches!(error.kind(), PermissionDenied | ReadOnlyFilesystem)
}
