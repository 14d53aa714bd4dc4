//! How a lock changes hands (sema-lockfile(5), PROTOCOL). Two processes that run this code never
//! hold a lock at the same time, whatever the order of their steps, and wherever one of them dies.
//! Pure: all I/O is behind the trait [`Files`].
//!
//! A lock file has a name and an inode. The process that has the inode locked by flock(2) decides
//! alone what happens to both. Any process that may read the file can lock it, and is a holder
//! while it does: flock(1) runs its commands in this way.
//!
//! 1. A new file is completed and locked under another name, and then linked to the lock's name.
//!    The link replaces nothing. On some file systems, a lock that was taken under one name of a
//!    file does not count under another one. There, the creator makes an empty file under the
//!    lock's name. It then locks the file, checks that it is still empty and still has the name,
//!    and only then writes the record.
//! 2. A taker rewrites a stale file in place. It first locks the file, judges it again, and then
//!    checks that the file still has the name. If the file still has the name after the rewrite,
//!    the lock belongs to the taker. A taker that may not rewrite the file removes the name
//!    instead.
//! 3. A process removes the name only after it has locked the inode, and has then checked that the
//!    inode still has the name. Two kinds of removal need not have the inode locked: a forced one,
//!    and the release by its holder of a lock that is not stale and that no guard keeps locked. No
//!    taker has the file of such a lock locked.
//! 4. Two inode numbers are compared only while the older inode is open, so that its number cannot
//!    have passed to a new inode.
//!
//! So no process that runs this code can change the name or the file between a taker's check and
//! its rewrite. Other programs only create the file with `O_EXCL` and remove it. If such a program
//! removes the stale file during a takeover, the taker writes into a file without a name and
//! notices that afterwards. A taker never replaces another file.
//!
//! Each call on [`Files`] is one step, except the rewrite, which is three steps. A taker that dies
//! during the rewrite leaves its own record, perhaps followed by the end of the old one. Locking
//! counts as one step although it takes several system calls. If another process tries to lock the
//! file between two of them, its attempt can fail, but nothing else can go wrong. The tests run
//! this code through every order of the steps of several processes.

use std::io;
use std::time::Duration;

use crate::os::directory::{Directory, Entry, FileId};

use super::file_system::FileSystem;
use super::staleness::{Content, Flock};

/// The maximum time to wait for a file that another process has locked.
pub(super) const LOCK_PATIENCE: Duration = Duration::from_millis(200);

/// The maximum number of rounds in one attempt. Another round is needed if the name has passed to
/// another file. A user who may write to the directory can cause that again and again, but callers
/// have a time limit.
const MAX_ROUNDS: u32 = 8;

/// The steps of the protocol. A step of another process can come between two steps, but not into
/// one.
pub(super) trait Files {
    /// An open file. Once locked, it stays locked until it is dropped.
    type File;

    /// How a new file gets the lock's name in this directory. Fails if other processes would not
    /// notice a lock on a file here. This is not a step, because other processes cannot change the
    /// result.
    fn creation(&self) -> io::Result<Creation>;
    /// Makes a file that is complete and locked before it gets the lock's name; `None` if the name
    /// is taken. Fails with [`io::ErrorKind::Unsupported`] if the file system has no hard links.
    fn create_linked(&self, record: &RecordFor<'_>) -> io::Result<Option<Self::File>>;
    /// Makes an empty file under the lock's name; `None` if the name is taken.
    fn create_empty(&self) -> io::Result<Option<Self::File>>;
    /// Locks a new file. Waits for [`LOCK_PATIENCE`] at most; `None` if another process keeps the
    /// file locked.
    fn lock_new(&self, file: &Self::File) -> io::Result<Option<HeldLock>>;
    /// Writes the record into an empty file. If that fails, removes the lock's name if the file
    /// still has it.
    fn write(&self, file: &Self::File, record: &[u8]) -> io::Result<()>;
    /// Opens the file under the lock's name.
    fn open(&self) -> io::Result<Entry<Self::File>>;
    /// Whether the lock's name is a mount point, so that other processes may see another file
    /// there. This is not a step.
    fn is_mount_point(&self, file: &Self::File) -> bool;
    /// Opens the same file again for writing; `None` if this process may not write it.
    fn open_to_write(&self, file: &Self::File) -> io::Result<Option<Self::File>>;
    /// Whether a file that is open for writing may be rewritten: it is ours, has only one name, and
    /// was never open to more users than a new file would be. This is not a step, because other
    /// processes cannot change the result.
    fn may_rewrite(&self, file: &Self::File) -> io::Result<bool>;
    /// Locks an open file. Waits for `patience` at most.
    fn lock(&self, file: &Self::File, patience: Duration) -> io::Result<Flock>;
    /// Reads an open file.
    fn read(&self, file: &Self::File) -> io::Result<Content>;
    /// Waits for longer than a process needs to write a record.
    fn pause(&self);
    /// The identity of an open file. This is not a step, because the identity never changes.
    fn id(&self, file: &Self::File) -> io::Result<FileId>;
    /// The identity of the file that has the lock's name.
    fn identity(&self) -> io::Result<Option<FileId>>;
    /// Checks that there is room for a record, and that this process may make a file here. Returns
    /// the permissions that a new lock file would have.
    fn prepare(&self, record: &[u8]) -> io::Result<u32>;
    /// Sets the mode, writes the record over the old one, and cuts off the rest of the old record.
    /// A reader can see a mixture of both. If this fails, the file is unchanged or has lost the
    /// lock's name.
    fn rewrite(&self, file: &Self::File, record: &[u8], mode: u32) -> io::Result<()>;
    /// Whether this process may remove the lock's name, as far as permissions and attributes of the
    /// file and its directory show. This is not a step, because it only predicts an error.
    fn may_remove(&self) -> io::Result<bool>;
    /// Removes the lock's name.
    fn remove(&self) -> io::Result<()>;
    /// Waits for processes that judged the file earlier and may still act on their judgement.
    /// Returns false if there was no need to wait.
    fn wait_for_earlier_judges(&self, after: After) -> bool;
}

/// How a new file gets the lock's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Creation {
    /// The file is completed and then linked, or made in place if there are no hard links.
    ByLink,
    /// The file is made in place, because a lock on a file does not hold under a second name here.
    InPlace,
}

/// The lock that a holder has on its file, and that its record names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeldLock {
    /// Whether the holder has the file locked by flock(2).
    pub(super) has_flock: bool,
    /// The file system that the file is on, for processes that find the file unlocked.
    pub(super) file_system: Option<FileSystem>,
}

/// Makes the record of a process that has this lock on its file. The record has the current time.
pub(super) type RecordFor<'a> = dyn Fn(HeldLock) -> Vec<u8> + 'a;

/// What happened to the lock before a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    Nothing,
    /// The lock was stale, and this or another process has taken it over or removed its file.
    Takeover,
}

/// A process that wants the lock: the record that it would write, and what it may take over.
pub(super) struct Taker<'a> {
    /// Makes the record to write. The record names the lock if the holder keeps the file open.
    pub(super) record: &'a RecordFor<'a>,
    /// Checks that a file with this content may be taken over if no other process has it locked.
    pub(super) may_take: &'a dyn Fn(&Content) -> Verdict,
}

/// Whether a file may be taken over or removed; the error says why not.
pub(super) type Verdict = Result<(), Obstacle>;

/// The result of an attempt to take or to remove the lock.
#[must_use]
pub(super) enum Outcome<T> {
    /// The attempt has succeeded. An attempt to take the lock returns the lock's file. An attempt
    /// to remove it returns whether there was a lock.
    Done(T),
    /// This obstacle prevents it. The content is that of the file, if it could be read.
    Blocked(Obstacle, Option<Content>),
}

/// Why a lock cannot be taken or removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Obstacle {
    /// The lock is not stale.
    NotStale,
    /// The lock would be stale, but another process has its file locked, and so holds the lock.
    Locked,
    /// The lock is stale, but this user may neither rewrite nor remove the file.
    NotRemovable,
    /// This user may not make files in the directory.
    UnwritableDirectory,
    /// The file system is read-only.
    ReadOnlyFileSystem,
    /// The lock is stale, but the file system has no file locks, which a safe takeover needs.
    NoLocks,
    /// Another process changed the lock at the same time.
    Contended,
    /// This user may not read the file.
    Unreadable,
    /// The path is not that of a regular file, but of a link, a directory, a device, a pipe or a
    /// socket.
    NotAFile,
    /// The path is a mount point. Other processes may see another file there.
    MountPoint,
    /// The file belongs to another program: it is neither empty nor a record, nor the beginning of
    /// a record.
    NotALockFile,
}

impl Obstacle {
    /// Why waiting for the lock cannot help; `None` if it can.
    pub(crate) fn hopeless_reason(self) -> Option<&'static str> {
        match self {
            Obstacle::NotAFile => Some("not a regular file"),
            Obstacle::MountPoint => Some("it is a mount point, so others may see another file"),
            Obstacle::NotRemovable => Some("stale, but this user may not remove the file"),
            Obstacle::UnwritableDirectory => {
                Some("this user may not create and remove files in the directory")
            }
            Obstacle::ReadOnlyFileSystem => Some("the file system is read-only"),
            Obstacle::NoLocks => Some(
                "stale, but the file system does not support locks on files; sema clean --force \
                 removes it",
            ),
            Obstacle::NotALockFile => Some("not a lock file"),
            Obstacle::NotStale | Obstacle::Locked | Obstacle::Contended | Obstacle::Unreadable => {
                None
            }
        }
    }
}

/// Why no lock in this directory can be taken; `None` if nothing is known to prevent it.
pub(super) fn obstacle_in(directory: &Directory) -> Option<Obstacle> {
    if directory.may_change_names() {
        None
    } else if directory.is_read_only() {
        Some(Obstacle::ReadOnlyFileSystem)
    } else {
        Some(Obstacle::UnwritableDirectory)
    }
}

/// What is under the lock's name.
pub(super) enum Found<F> {
    Nothing,
    File(F),
    /// Something that cannot be a lock file, or that this process cannot read.
    Unusable(Obstacle),
}

/// Looks for the lock's file.
pub(super) fn find<F: Files>(files: &F) -> io::Result<Found<F::File>> {
    Ok(match files.open()? {
        Entry::Nothing => Found::Nothing,
        Entry::Unreadable => Found::Unusable(Obstacle::Unreadable),
        Entry::Other => Found::Unusable(Obstacle::NotAFile),
        Entry::File(file) if files.is_mount_point(&file) => Found::Unusable(Obstacle::MountPoint),
        Entry::File(file) => Found::File(file),
    })
}

/// Tries to take the lock once. Returns its file, which is locked.
pub(super) fn acquire<F: Files>(files: &F, taker: &Taker<'_>) -> io::Result<Outcome<F::File>> {
    let mut after = After::Nothing;
    for _ in 0..MAX_ROUNDS {
        match find(files)? {
            Found::Nothing => {}
            Found::Unusable(why) => return Ok(Outcome::Blocked(why, None)),
            Found::File(found) => match take_over(files, taker, found)? {
                Takeover::Taken(file) => return unless_removed(files, After::Takeover, file),
                Takeover::Blocked(why, content) => return Ok(Outcome::Blocked(why, Some(content))),
                // A process that judged the old file as stale may still act on that judgement.
                Takeover::NameGone => {
                    after = After::Takeover;
                    continue;
                }
            },
        }
        if let Some(ours) = create(files, taker)? {
            return unless_removed(files, after, ours);
        }
    }
    Ok(Outcome::Blocked(Obstacle::Contended, None))
}

/// Makes the lock's file; `None` if another process has taken the name.
fn create<F: Files>(files: &F, taker: &Taker<'_>) -> io::Result<Option<F::File>> {
    match files.creation()? {
        Creation::InPlace => create_in_place(files, taker),
        Creation::ByLink => match files.create_linked(taker.record) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                create_in_place(files, taker)
            }
            made => made,
        },
    }
}

/// Makes an empty file under the lock's name, and writes the record afterwards. No process takes an
/// empty file for a stale one before the stale timeout is over.
fn create_in_place<F: Files>(files: &F, taker: &Taker<'_>) -> io::Result<Option<F::File>> {
    let Some(file) = files.create_empty()? else {
        return Ok(None);
    };
    // If this process was suspended for a long time, a taker may have rewritten or removed the
    // empty file. Then the taker decides what happens to the name.
    let Some(lock) = files.lock_new(&file)? else {
        return Ok(None);
    };
    if !still_has_name(files, &file)? || !files.read(&file)?.bytes.is_empty() {
        return Ok(None);
    }
    files.write(&file, &(taker.record)(lock))?;
    Ok(Some(file))
}

/// The result of an attempt to take over a file.
enum Takeover<F> {
    /// The lock is taken. This is its file.
    Taken(F),
    /// The lock is not stale, or cannot be taken over.
    Blocked(Obstacle, Content),
    /// The file no longer has the lock's name, because of this or another process.
    NameGone,
}

/// Takes over the lock whose file is `found`, if it is stale.
fn take_over<F: Files>(
    files: &F,
    taker: &Taker<'_>,
    found: F::File,
) -> io::Result<Takeover<F::File>> {
    // The file of a lock that is not stale is only read, and not locked even for a moment.
    let content = files.read(&found)?;
    if let Err(why) = (taker.may_take)(&content) {
        return Ok(Takeover::Blocked(why, content));
    }
    // A takeover needs a lock on the file that keeps other takers out.
    check_place(files)?;
    // The file may have changed, or lost its name, before this process locked it. So it is judged
    // again.
    let locked = lock(files, found, Duration::ZERO)?;
    let (file, judged) = (locked.file, locked.content);
    if let Err(why) = locks_others_out(locked.flock) {
        return Ok(Takeover::Blocked(why, judged));
    }
    let verdict = (taker.may_take)(&judged);
    // Check the name only after the judgement. The holder of a lock that is not stale may release
    // it even while this process has the file locked, and that would take the name away after an
    // earlier check. The holder of a stale lock may not.
    if !still_has_name(files, &file)? {
        return Ok(Takeover::NameGone);
    }
    if let Err(why) = verdict {
        return Ok(Takeover::Blocked(why, judged));
    }
    let record = (taker.record)(HeldLock {
        has_flock: true,
        file_system: judged.file_system,
    });
    let changed = files.prepare(&record).and_then(|mode| {
        if locked.may_rewrite {
            files.rewrite(&file, &record, mode)
        } else {
            files.remove()
        }
    });
    match changed {
        // If another program has removed the name before the rewrite, the record is in a file
        // without a name, where it does no harm.
        Ok(()) if locked.may_rewrite && still_has_name(files, &file)? => Ok(Takeover::Taken(file)),
        Ok(()) => Ok(Takeover::NameGone),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Takeover::NameGone),
        Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {
            Ok(Takeover::Blocked(Obstacle::ReadOnlyFileSystem, judged))
        }
        Err(error) if is_forbidden(&error) => Ok(Takeover::Blocked(Obstacle::NotRemovable, judged)),
        Err(error) => Err(error),
    }
}

/// Whether this process could take the lock now: it is free, or it is stale and [`acquire`] would
/// take it over. Changes nothing.
pub(super) fn could_acquire<F: Files>(
    files: &F,
    may_take: &dyn Fn(&Content) -> Verdict,
) -> io::Result<Outcome<()>> {
    let found = match find(files)? {
        Found::Nothing => return Ok(Outcome::Done(())),
        Found::Unusable(why) => return Ok(Outcome::Blocked(why, None)),
        Found::File(found) => found,
    };
    // `acquire` fails if a lock on the file would not keep other takers out, so fail, too.
    check_place(files)?;
    let locked = lock(files, found, Duration::ZERO)?;
    let may_change = locked.may_rewrite || files.may_remove()?;
    let verdict = locks_others_out(locked.flock)
        .and_then(|()| may_take(&locked.content))
        .and_then(|()| may_change.then_some(()).ok_or(Obstacle::NotRemovable));
    Ok(match verdict {
        Ok(()) => Outcome::Done(()),
        Err(why) => Outcome::Blocked(why, Some(locked.content)),
    })
}

/// Checks that an attempt to lock a file keeps all other takers out.
fn locks_others_out(flock: Flock) -> Verdict {
    match flock {
        Flock::Acquired => Ok(()),
        Flock::HeldByOther => Err(Obstacle::Locked),
        Flock::Unknown => Err(Obstacle::NoLocks),
    }
}

/// A file that this process has tried to lock, and the result.
pub(super) struct LockAttempt<F> {
    file: F,
    may_rewrite: bool,
    pub(super) flock: Flock,
    /// The content of the file, read after the attempt.
    content: Content,
}

/// Tries for at most `patience` to lock the file, and then reads it. Opens it for writing first, if
/// this process may write it.
pub(super) fn lock<F: Files>(
    files: &F,
    found: F::File,
    patience: Duration,
) -> io::Result<LockAttempt<F::File>> {
    let writable = files.open_to_write(&found)?;
    let is_writable = writable.is_some();
    let file = writable.unwrap_or(found);
    let flock = files.lock(&file, patience)?;
    let content = files.read(&file)?;
    Ok(LockAttempt {
        may_rewrite: is_writable && files.may_rewrite(&file)?,
        file,
        flock,
        content,
    })
}

/// The content of a file after an attempt to lock it, of which `content` is the first read. If
/// another process has the file locked, it may be rewriting the file, so `read_later` is called
/// until two reads in a row agree. A mixture of the old and the new record must not be judged: it
/// may have the time of the new one. It would then look like a lock that is not stale, and so like
/// one that no taker has locked.
fn until_stable(
    flock: Flock,
    mut content: Content,
    mut read_later: impl FnMut() -> io::Result<Content>,
) -> io::Result<Content> {
    if flock != Flock::HeldByOther {
        return Ok(content);
    }
    for _ in 0..MAX_ROUNDS {
        let again = read_later()?;
        if again == content {
            break;
        }
        content = again;
    }
    Ok(content)
}

/// Returns our new file, unless it has lost the lock's name. Another process may have judged the
/// old file and then have removed ours, so this waits for such a process first.
fn unless_removed<F: Files>(
    files: &F,
    after: After,
    ours: F::File,
) -> io::Result<Outcome<F::File>> {
    if files.wait_for_earlier_judges(after) && !still_has_name(files, &ours)? {
        return Ok(Outcome::Blocked(Obstacle::Contended, None));
    }
    Ok(Outcome::Done(ours))
}

/// Fails if other processes would not notice a lock on a file in this directory.
fn check_place(files: &impl Files) -> io::Result<()> {
    files.creation().map(drop)
}

/// Whether the file still has the lock's name.
pub(super) fn still_has_name<F: Files>(files: &F, file: &F::File) -> io::Result<bool> {
    Ok(files.identity()? == Some(files.id(file)?))
}

/// Releases the lock of a guard. `ours` is its file, which the guard has kept open and locked since
/// the grant. If the lock is lost, returns false and changes nothing.
pub(super) fn release<F: Files>(files: &F, ours: &F::File) -> io::Result<bool> {
    Ok(still_has_name(files, ours)? && remove_name(files)?)
}

/// Removes the lock's name. Returns whether it was there.
fn remove_name<F: Files>(files: &F) -> io::Result<bool> {
    match files.remove() {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Checks that a holder may release a lock whose file another process may have locked. If the lock
/// is not stale, no taker has the file locked, so the release disturbs none. `is_stale` tells
/// whether the lock would be stale if no process had its file locked.
pub(super) fn may_pass(flock: Flock, is_stale: bool) -> Verdict {
    match flock {
        Flock::HeldByOther if is_stale => Err(Obstacle::Locked),
        _ => Ok(()),
    }
}

/// Removes the lock if `allows` permits that for its content and its flock. The result is false if
/// there was no lock.
pub(super) fn remove<F: Files>(
    files: &F,
    allows: &dyn Fn(&Content, Flock) -> Verdict,
) -> io::Result<Outcome<bool>> {
    for _ in 0..MAX_ROUNDS {
        let found = match find(files)? {
            Found::Nothing => return Ok(Outcome::Done(false)),
            Found::Unusable(why) => return Ok(Outcome::Blocked(why, None)),
            Found::File(found) => found,
        };
        let locked = lock(files, found, LOCK_PATIENCE)?;
        let content = until_stable(locked.flock, locked.content, || {
            files.pause();
            files.read(&locked.file)
        })?;
        let verdict = allows(&content, locked.flock);
        if files.identity()? != Some(files.id(&locked.file)?) {
            continue;
        }
        if let Err(why) = verdict {
            return Ok(Outcome::Blocked(why, Some(content)));
        }
        return match remove_name(files) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                Ok(Outcome::Blocked(Obstacle::NotRemovable, Some(content)))
            }
            removed => removed.map(Outcome::Done),
        };
    }
    Ok(Outcome::Blocked(Obstacle::Contended, None))
}

/// Whether the error means that this user may not change names here, or that the file system is
/// read-only.
pub(super) fn is_forbidden(error: &io::Error) -> bool {
    use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
    matches!(error.kind(), PermissionDenied | ReadOnlyFilesystem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_may_be_rewritten_is_read_until_it_rests() {
        let content = |text: &str| {
            let bytes = text.as_bytes().to_vec();
            Content::new(bytes, 0, FileId::of_model(0, 0), None)
        };
        for (flock, reads, expected) in [
            (
                Flock::HeldByOther,
                &["old", "mixed", "new", "new"][..],
                "new",
            ),
            (Flock::HeldByOther, &["new", "new"], "new"),
            (Flock::Acquired, &["old"], "old"),
        ] {
            let mut reads = reads.iter().map(|text| content(text));
            let first = reads.next().expect("a read");
            let read_later = || Ok(reads.next().expect("no further read"));
            let found = until_stable(flock, first, read_later).expect("a content");
            assert_eq!(found, content(expected));
            assert_eq!(reads.count(), 0, "it stopped too early");
        }
    }
}
