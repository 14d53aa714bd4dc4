//! How a lock changes hands (sema-lockfile(5), PROTOCOL): never two holders among processes that keep
//! to this file, whatever comes between two of its steps, and whoever dies there.
//!
//! A lock file has two lives: its name, and the inode behind it. Who has the inode locked by flock(2)
//! decides alone what becomes of the name. From that:
//!
//! 1. The name comes to be only by a link that replaces nothing, or by an exchange against a stale inode
//!    that the taker has locked, and has seen under the name after it had it locked.
//! 2. It ceases to be only by whoever has its inode locked, and has seen it under the name since.
//! 3. Inodes are compared only while they are open, so that none is taken for another that came after.
//!
//! So nobody of ours can change the name between a taker's look and its exchange, and the exchange displaces
//! just the stale file. Others keep to nothing of this: they create with `O_EXCL`, and they remove. An
//! exchange, unlike a rename, can be undone before anybody finds the name free; so a taker looks at
//! what it has displaced, and gives it back if it is not what it judged.
//!
//! Each call on [`Files`] is one step. The tests run this code through every order of the steps of
//! several processes.

use std::io;

use crate::directory::FileId;

use super::record::LIVE_LINE;
use super::staleness::Content;

/// The names that a process deals with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Name {
    /// The lock itself.
    Lock,
    /// One that nobody else uses.
    Aside,
}

/// What stands under the lock's name.
pub(super) enum Found<F> {
    Nothing,
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

    /// Makes a file that is complete, and locked, when it appears under `name`; `None` if the name is taken.
    fn create(&self, name: Name, record: &[u8]) -> io::Result<Option<Self::File>>;
    /// Opens what stands under the lock's name.
    fn open(&self) -> io::Result<Found<Self::File>>;
    /// Locks an open file, without waiting.
    fn lock(&self, file: &Self::File) -> io::Result<Locking>;
    /// Locks an open file, and waits a little for it.
    fn lock_patiently(&self, file: &Self::File) -> io::Result<Locking>;
    /// Reads an open file.
    fn read(&self, file: &Self::File) -> io::Result<Content>;
    /// Which inode an open file is. Not a step: it cannot change.
    fn id(&self, file: &Self::File) -> io::Result<FileId>;
    /// Which inode stands under `name`.
    fn identity(&self, name: Name) -> io::Result<Option<FileId>>;
    /// Exchanges what stands under the two names.
    fn exchange(&self) -> io::Result<()>;
    /// Renames the lock aside.
    fn move_aside(&self) -> io::Result<()>;
    /// Gives what stands aside the lock's name again, if that is free.
    fn put_back(&self) -> io::Result<()>;
    /// Takes a name away.
    fn remove(&self, name: Name) -> io::Result<()>;
    /// Adds a line to a file of ours.
    fn append(&self, file: &Self::File, line: &str) -> io::Result<()>;
    /// Waits for those who judged what was there before us, and have yet to act on it. False if there is no
    /// need.
    fn settle(&self, after: After) -> bool;
    /// Waits a moment for somebody's undoing; whether to look again.
    fn wait_for_undoing(&self, times: u32) -> bool;
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
    /// Whether a file with this content may be taken over, supposing that nobody has it locked.
    pub(super) is_stale: &'a dyn Fn(&Content) -> bool,
}

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
    /// It would be stale, but its file is locked: its holder lives, or somebody is just taking it over.
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
}

/// Tries to take the lock, once.
pub(super) fn acquire<F: Files>(files: &F, claim: &Claim<'_>) -> io::Result<Attempt<F::File>> {
    let mut after = After::Nothing;
    loop {
        match files.open()? {
            Found::Nothing => {}
            Found::Unreadable => return Ok(Attempt::Held(Obstacle::Unreadable, None)),
            Found::NotAFile => return Ok(Attempt::Held(Obstacle::NotAFile, None)),
            Found::File(found) => match take_over(files, claim, &found)? {
                Some(attempt) => return Ok(attempt),
                // The stale file has gone, by us or by others, and the name is free or stands for something
                // else. Whoever has judged that file as we did may yet act on it.
                None => {
                    after = After::Takeover;
                    continue;
                }
            },
        }
        if let Some(ours) = files.create(Name::Lock, &record(claim, claim.is_live))? {
            return settled(files, after, ours);
        }
    }
}

/// Takes over the lock whose file is `found`. `None` if it was stale, and is no longer the lock's file.
fn take_over<F: Files>(
    files: &F,
    claim: &Claim<'_>,
    found: &F::File,
) -> io::Result<Option<Attempt<F::File>>> {
    let held = |why, content| Ok(Some(Attempt::Held(why, Some(content))));
    // Where it is simply held, nobody's file gets locked even for a moment.
    let content = files.read(found)?;
    if !(claim.is_stale)(&content) {
        return held(Obstacle::NotStale, content);
    }
    match files.lock(found)? {
        Locking::Ours => {}
        Locking::Theirs => return held(Obstacle::Locked, content),
        Locking::Unknown => return held(Obstacle::NoLocks, content),
    }
    // It may have changed, or gone, while we did not have it locked.
    let judged = files.read(found)?;
    let id = files.id(found)?;
    if files.identity(Name::Lock)? != Some(id) {
        return Ok(None);
    }
    if !(claim.is_stale)(&judged) {
        return held(Obstacle::NotStale, judged);
    }
    // The line that says who locks the file holds the lock is withheld as yet: should we die before we have
    // looked at what we displace, nobody shall take that for a reason to take over at once.
    let ours = match files.create(Name::Aside, &record(claim, false)) {
        Ok(Some(ours)) => ours,
        Ok(None) => return held(Obstacle::Contended, judged),
        Err(error) if is_forbidden(&error) => return held(Obstacle::NotRemovable, judged),
        Err(error) => return Err(error),
    };
    let our_id = files.id(&ours)?;
    match files.exchange() {
        Ok(()) => {}
        Err(error) => {
            let _ = files.remove(Name::Aside);
            drop(ours);
            return match error.kind() {
                io::ErrorKind::NotFound => Ok(None),
                io::ErrorKind::PermissionDenied => held(Obstacle::NotRemovable, judged),
                io::ErrorKind::Unsupported => take_away(files, found, id, judged),
                _ => Err(error),
            };
        }
    }
    if !is_what_was_judged(files, found, id, &judged) {
        undo(files, our_id);
        return held(Obstacle::Contended, judged);
    }
    // Only litter now, should that fail.
    let _ = files.remove(Name::Aside);
    let attempt = settled(files, After::Takeover, ours)?;
    if let (Attempt::Granted(ours), true) = (&attempt, claim.is_live) {
        // Without the line, the lock is judged by its age and its process.
        let _ = files.append(ours, LIVE_LINE);
    }
    Ok(Some(attempt))
}

/// Whether the file that stands aside is the one that was judged, and still says the same. If that
/// cannot be told, it is not.
fn is_what_was_judged<F: Files>(files: &F, found: &F::File, id: FileId, judged: &Content) -> bool {
    matches!(files.identity(Name::Aside), Ok(Some(aside)) if aside == id)
        && matches!(files.read(found), Ok(now) if now.bytes == judged.bytes)
}

/// Gives the name back to what we have displaced, which was not what we had judged. Others of our kind
/// may be at the same, so each turn may bring up something else.
fn undo<F: Files>(files: &F, ours: FileId) {
    let mut given = ours;
    let Ok(Some(mut displaced)) = files.identity(Name::Aside) else {
        return;
    };
    // If there is no lock any more, whoever held what we have has released it.
    while files.exchange().is_ok() {
        match files.identity(Name::Aside) {
            Ok(Some(back)) if back != given => {
                given = displaced;
                displaced = back;
            }
            _ => break,
        }
    }
    let _ = files.remove(Name::Aside);
}

/// Takes the stale file away where the file system cannot exchange: then anybody may take the lock, us
/// among them. Between the two steps a foreign process may find the name free, which is why this is second best.
fn take_away<F: Files>(
    files: &F,
    found: &F::File,
    id: FileId,
    judged: Content,
) -> io::Result<Option<Attempt<F::File>>> {
    match files.move_aside() {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Ok(Some(Attempt::Held(Obstacle::NotRemovable, Some(judged))));
        }
        Err(error) => return Err(error),
    }
    if is_what_was_judged(files, found, id, &judged) {
        files.remove(Name::Aside)?;
        return Ok(None);
    }
    let _ = files.put_back();
    let _ = files.remove(Name::Aside);
    Ok(Some(Attempt::Held(Obstacle::Contended, Some(judged))))
}

/// A grant, unless somebody who had judged the file before us has acted on it since.
fn settled<F: Files>(files: &F, after: After, ours: F::File) -> io::Result<Attempt<F::File>> {
    if files.settle(after) && files.identity(Name::Lock)? != Some(files.id(&ours)?) {
        return Ok(Attempt::Held(Obstacle::Contended, None));
    }
    Ok(Attempt::Granted(ours))
}

/// Whether the lock's name still stands for our file. Somebody may be about to give it back to us.
pub(super) fn is_still_ours<F: Files>(files: &F, ours: &F::File) -> io::Result<bool> {
    let id = files.id(ours)?;
    let mut times = 0;
    while files.identity(Name::Lock)? != Some(id) {
        if !files.wait_for_undoing(times) {
            return Ok(false);
        }
        times += 1;
    }
    Ok(true)
}

/// Gives back the lock whose file we have open, and locked since before it had its name. False if it is
/// not ours any more; then nothing is touched.
pub(super) fn release<F: Files>(files: &F, ours: &F::File) -> io::Result<bool> {
    if !is_still_ours(files, ours)? {
        return Ok(false);
    }
    match files.remove(Name::Lock) {
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

/// Removes the lock if `allows` does not object to what its file says, and to who has it locked.
pub(super) fn remove<F: Files>(
    files: &F,
    allows: &dyn Fn(&Content, Locking) -> Result<(), Obstacle>,
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
        if files.identity(Name::Lock)? != Some(files.id(&found)?) {
            continue;
        }
        if let Err(why) = allows(&content, locking) {
            return Ok(Removal::Kept(why, Some(content)));
        }
        return match files.remove(Name::Lock) {
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
fn is_forbidden(error: &io::Error) -> bool {
    use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
    matches!(error.kind(), PermissionDenied | ReadOnlyFilesystem)
}

fn record(claim: &Claim<'_>, is_live: bool) -> Vec<u8> {
    let mut record = (claim.record)();
    if is_live {
        record.extend_from_slice(LIVE_LINE.as_bytes());
    }
    record
}
