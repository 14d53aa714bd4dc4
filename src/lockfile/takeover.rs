//! How a lock changes hands (sema-lockfile(5), PROTOCOL): never two holders among processes that
//! keep to this file, whatever comes between two of its steps, and whichever process dies there.
//!
//! A lock file has a name, and an inode behind it. The process that has the inode locked by
//! flock(2) decides alone what becomes of both. From that:
//!
//! 1. A link that replaces nothing makes the name.
//! 2. A taker rewrites a stale file in place: it has the file locked, has seen it under the name
//!    since, and has judged it again after that. If the file is still the lock's file after the
//!    rewrite, the lock is the taker's.
//! 3. A process removes the name only while it has the inode locked, and has seen it under the name
//!    since. The exceptions are a forced release, and the release of a lock that no guard keeps
//!    locked, and that is not stale: no taker has that file locked.
//! 4. Inodes are compared only while they are open, so that a new one cannot have the number of an
//!    old one.
//!
//! So no process of ours can change the name or the file between a taker's look and its rewrite.
//! Other programs only create with `O_EXCL` and remove. If one of them removes the stale file under
//! a taker, the taker has written into a file without a name, and sees that afterwards. It never
//! displaces another file.
//!
//! Each call on [`Files`] is one step, but for the rewrite, which is two. The tests run this code
//! through every order of the steps of several processes.

use std::io;

use crate::sys::directory::FileId;

use super::record::LIVE_LINE;
use super::staleness::Content;

/// What is found under the lock's name.
pub(super) enum Found<F> {
    Nothing,
    /// A file, opened for reading.
    File(F),
    /// A file that we may not read.
    Unreadable,
    /// No file at all: a link, a directory, a device, a pipe, a socket.
    NotAFile,
}

/// What comes of trying to lock a file by flock(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Locking {
    Ours,
    Theirs,
    /// The file system knows no such locks.
    Unknown,
}

/// The steps, each of which others may come before or after, but not into.
pub(super) trait Files {
    /// An open file. It is locked until it is dropped, once it was locked.
    type File;

    /// Makes a file that is complete, and locked, when the lock's name appears; `None` if the name
    /// is taken.
    fn create(&self, record: &[u8]) -> io::Result<Option<Self::File>>;
    /// Opens what is under the lock's name.
    fn open(&self) -> io::Result<Found<Self::File>>;
    /// Opens the same file once more, to rewrite it; `None` if this process may not do that.
    fn open_to_rewrite(&self, file: &Self::File) -> io::Result<Option<Self::File>>;
    /// Locks an open file, without waiting.
    fn lock(&self, file: &Self::File) -> io::Result<Locking>;
    /// Locks an open file, and waits a little for it.
    fn lock_patiently(&self, file: &Self::File) -> io::Result<Locking>;
    /// Reads an open file.
    fn read(&self, file: &Self::File) -> io::Result<Content>;
    /// Which inode an open file is. Not a step: it cannot change.
    fn id(&self, file: &Self::File) -> io::Result<FileId>;
    /// Which inode is under the lock's name.
    fn identity(&self) -> io::Result<Option<FileId>>;
    /// The mode of a new file here. It makes sure that the record has room, and that this process
    /// may make names: without that, nothing is to be changed. Not a step: no other process can see
    /// it.
    fn prepare(&self, record: &[u8]) -> io::Result<u32>;
    /// Empties the file, and writes the record into it, and gives it the mode. After an error the
    /// file is as it was, or has lost the lock's name.
    fn rewrite(&self, file: &Self::File, record: &[u8], mode: u32) -> io::Result<()>;
    /// Removes the lock's name.
    fn remove(&self) -> io::Result<()>;
    /// Waits for processes that judged the file before us, and have yet to act on it. False if
    /// there is no need.
    fn settle(&self, after: After) -> bool;
}

/// What there was before a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    Nothing,
    /// A stale lock, be it that somebody else has taken it away.
    Takeover,
}

/// What we want, and what we think of what is there.
pub(super) struct Claim<'a> {
    /// The record to write, stamped with the present time.
    pub(super) record: &'a dyn Fn() -> Vec<u8>,
    /// Whether the holder will have the file open for as long as it holds the lock.
    pub(super) is_live: bool,
    /// Whether a file with this content may be taken over, if no process has it locked.
    pub(super) may_take: &'a dyn Fn(&Content) -> io::Result<Verdict>,
}

/// Whether a file may be taken over, or removed; if not, why.
pub(super) type Verdict = Result<(), Obstacle>;

/// What comes of trying to take a lock.
pub(super) enum Attempt<F> {
    /// It is ours, and this is its file.
    Granted(F),
    /// It is not, for this reason; with what the file says, where it could be read.
    Held(Obstacle, Option<Content>),
}

/// Why a lock cannot be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// It is not stale.
    NotStale,
    /// It would be stale, but its file is locked: its holder lives, or somebody is just taking it
    /// over.
    Locked,
    /// It is stale, and this user may not replace the file.
    NotRemovable,
    /// It is stale, and the file system knows no locks that would make it safe to take it over.
    NoLocks,
    /// Somebody else had a hand in it at the same time.
    Contended,
    /// This user may not read the file.
    Unreadable,
    /// It is no file, but a link, a directory, a device, a pipe or a socket.
    NotAFile,
    /// It is a file of another program: neither empty nor a record, nor the beginning of one.
    NotALockFile,
}

/// Tries to take the lock, once.
pub(super) fn acquire<F: Files>(files: &F, claim: &Claim<'_>) -> io::Result<Attempt<F::File>> {
    let mut after = After::Nothing;
    loop {
        match files.open()? {
            Found::Nothing => {}
            Found::Unreadable => return Ok(Attempt::Held(Obstacle::Unreadable, None)),
            Found::NotAFile => return Ok(Attempt::Held(Obstacle::NotAFile, None)),
            Found::File(found) => match take_over(files, claim, found)? {
                Some(attempt) => return Ok(attempt),
                // We or another process have removed the stale file, and the name is free or is
                // another file's. A process that judged the old file as we did may yet act on it.
                None => {
                    after = After::Takeover;
                    continue;
                }
            },
        }
        if let Some(ours) = files.create(&record(claim))? {
            return settled(files, after, ours);
        }
    }
}

/// Takes over the lock whose file is `found`. `None` if it was stale, and is no longer the lock's
/// file.
fn take_over<F: Files>(
    files: &F,
    claim: &Claim<'_>,
    found: F::File,
) -> io::Result<Option<Attempt<F::File>>> {
    let held = |why, content| Ok(Some(Attempt::Held(why, Some(content))));
    // A lock that is simply held is only read: its file is not locked even for a moment.
    let content = files.read(&found)?;
    if let Err(why) = (claim.may_take)(&content)? {
        return held(why, content);
    }
    let writable = files.open_to_rewrite(&found)?;
    let can_rewrite = writable.is_some();
    let file = writable.unwrap_or(found);
    match files.lock(&file)? {
        Locking::Ours => {}
        Locking::Theirs => return held(Obstacle::Locked, content),
        Locking::Unknown => return held(Obstacle::NoLocks, content),
    }
    // It may have changed, or lost its name, before we had it locked.
    let judged = files.read(&file)?;
    let id = files.id(&file)?;
    if files.identity()? != Some(id) {
        return Ok(None);
    }
    if let Err(why) = (claim.may_take)(&judged)? {
        return held(why, judged);
    }
    let record = record(claim);
    let changed = files.prepare(&record).and_then(|mode| {
        if can_rewrite {
            files.rewrite(&file, &record, mode)
        } else {
            files.remove()
        }
    });
    match changed {
        // If another program has removed the name before the rewrite, we have written into a file
        // without a name, and have harmed nothing.
        Ok(()) if can_rewrite && files.identity()? == Some(id) => {
            settled(files, After::Takeover, file).map(Some)
        }
        Ok(()) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if is_forbidden(&error) => held(Obstacle::NotRemovable, judged),
        Err(error) => Err(error),
    }
}

/// A grant, unless a process that had judged the file before us has acted on it since.
fn settled<F: Files>(files: &F, after: After, ours: F::File) -> io::Result<Attempt<F::File>> {
    if files.settle(after) && !is_still_ours(files, &ours)? {
        return Ok(Attempt::Held(Obstacle::Contended, None));
    }
    Ok(Attempt::Granted(ours))
}

/// Whether the lock's name is still that of our file.
pub(super) fn is_still_ours<F: Files>(files: &F, ours: &F::File) -> io::Result<bool> {
    Ok(files.identity()? == Some(files.id(ours)?))
}

/// Gives back the lock whose file we have open, and locked since the grant. False if it is not ours
/// any more; then nothing is touched.
pub(super) fn release<F: Files>(files: &F, ours: &F::File) -> io::Result<bool> {
    if !is_still_ours(files, ours)? {
        return Ok(false);
    }
    match files.remove() {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// What comes of removing a lock that is not, or not only, ours.
pub(super) enum Removal {
    /// There was none.
    Nothing,
    Removed,
    /// It was not to be, for this reason; with what the file says, where it could be read.
    Kept(Obstacle, Option<Content>),
}

/// Whether a release that names the lock may go on, whoever has the file locked: any process that
/// may read it can have that, but of a stale one a taker can, too. `is_stale` supposes that no
/// process has the file locked.
pub(super) fn may_pass(locking: Locking, is_stale: bool) -> Verdict {
    match locking {
        Locking::Theirs if is_stale => Err(Obstacle::Locked),
        _ => Ok(()),
    }
}

/// Removes the lock if `allows` does not object to what its file says, and to who has it locked.
pub(super) fn remove<F: Files>(
    files: &F,
    allows: &dyn Fn(&Content, Locking) -> io::Result<Verdict>,
) -> io::Result<Removal> {
    loop {
        let found = match files.open()? {
            Found::Nothing => return Ok(Removal::Nothing),
            Found::Unreadable => return Ok(Removal::Kept(Obstacle::Unreadable, None)),
            Found::NotAFile => return Ok(Removal::Kept(Obstacle::NotAFile, None)),
            Found::File(found) => found,
        };
        let locking = files.lock_patiently(&found)?;
        let content = files.read(&found)?;
        if files.identity()? != Some(files.id(&found)?) {
            continue;
        }
        if let Err(why) = allows(&content, locking)? {
            return Ok(Removal::Kept(why, Some(content)));
        }
        return match files.remove() {
            Ok(()) => Ok(Removal::Removed),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Removal::Nothing),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                Ok(Removal::Kept(Obstacle::NotRemovable, Some(content)))
            }
            Err(error) => Err(error),
        };
    }
}

/// This user may not change the names here, or nobody may.
pub(super) fn is_forbidden(error: &io::Error) -> bool {
    use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
    matches!(error.kind(), PermissionDenied | ReadOnlyFilesystem)
}

fn record(claim: &Claim<'_>) -> Vec<u8> {
    let mut record = (claim.record)();
    if claim.is_live {
        record.extend_from_slice(LIVE_LINE.as_bytes());
    }
    record
}
