//! How a lock changes hands (sema-lockfile(5), PROTOCOL). Two processes that run this code never
//! hold one lock at once, in any order of their steps, and wherever one of them dies. Pure.
//!
//! A lock file has a name and an inode. The process that has the inode locked decides alone what
//! becomes of both. Holders and takers lock it for reading by fcntl(2), and then by flock(2). Any
//! process that may read the file can keep it locked by flock(2). Then a write lock by fcntl(2)
//! counts as well: it is not granted while a holder or a taker has the file locked.
//!
//! 1. A link, which replaces nothing, creates the name. Where a lock on a file does not hold under
//!    a second name, the name is created with an empty file. Its creator writes the record only
//!    once it has the file locked, and has seen it empty and under the name since.
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
//! Each call on [`Files`] is one step, except the rewrite, which is three: a taker that dies within
//! it leaves its own record, perhaps with an end of the old one. Between the system calls of a
//! lock, a process has only locks that refuse other processes theirs. The tests run this code
//! through every order of the steps of several processes.

use std::io;
use std::time::Duration;

use crate::sys::directory::{Entry, FileId};

use super::file_system::FileSystem;
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

    /// How a new file gets the lock's name here. Fails where a lock on a file does not hold. Not a
    /// step: no other process changes that.
    fn creation(&self) -> io::Result<Creation>;
    /// Makes a file that is complete and locked when the lock's name appears; `None` if the name is
    /// taken. Fails with [`io::ErrorKind::Unsupported`] if the file system has no hard links.
    fn create_linked(&self, record: &RecordFor<'_>) -> io::Result<Option<Self::File>>;
    /// Makes an empty file under the lock's name; `None` if the name is taken.
    fn create_empty(&self) -> io::Result<Option<Self::File>>;
    /// Locks a new file as a holder does. Waits for [`LOCK_PATIENCE`] at most; `None` if another
    /// process keeps it locked.
    fn lock_new(&self, file: &Self::File) -> io::Result<Option<HeldLocks>>;
    /// Writes the record into an empty file. After an error the lock's name is gone.
    fn write(&self, file: &Self::File, record: &[u8]) -> io::Result<()>;
    /// Opens the file under the lock's name.
    fn open(&self) -> io::Result<Entry<Self::File>>;
    /// Whether the lock's name is a mount point, so that other processes can see another file
    /// there. Not a step.
    fn is_mount_point(&self, file: &Self::File) -> bool;
    /// Opens the same file again for writing; `None` if this process may not write it.
    fn open_to_write(&self, file: &Self::File) -> io::Result<Option<Self::File>>;
    /// Whether a file that is open for writing may be rewritten: it is ours, has one name, and has
    /// been open to no more users than the new one. Not a step: no other process changes that.
    fn may_rewrite(&self, file: &Self::File) -> io::Result<bool>;
    /// Locks an open file. Waits for `patience` at most.
    fn lock(&self, file: &Self::File, patience: Duration) -> io::Result<Flock>;
    /// Reads an open file.
    fn read(&self, file: &Self::File) -> io::Result<Content>;
    /// Waits for longer than a process needs to write a record.
    fn pause(&self);
    /// Which file an open file is. Not a step: that never changes.
    fn id(&self, file: &Self::File) -> io::Result<FileId>;
    /// Which file has the lock's name.
    fn identity(&self) -> io::Result<Option<FileId>>;
    /// Checks that there is room for a record, and that this process may make a file here. Gives
    /// the permissions that a new lock would have.
    fn prepare(&self, record: &[u8]) -> io::Result<u32>;
    /// Sets the mode, writes the record over the old one, and cuts off what is left of that. A
    /// reader can see a mixture. After an error the file is unchanged, or has lost the lock's name.
    fn rewrite(&self, file: &Self::File, record: &[u8], mode: u32) -> io::Result<()>;
    /// Removes the lock's name.
    fn remove(&self) -> io::Result<()>;
    /// Waits for processes that judged the file earlier and may still act on that. False if there
    /// is no need to wait.
    fn settle(&self, after: After) -> bool;
}

/// How a new file gets the lock's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Creation {
    /// By a link to a complete file, or in place if the file system has no hard links.
    ByLink,
    /// In place: here, the lock on a file does not hold under a second name.
    InPlace,
}

/// The locks of a holder on its file, for the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeldLocks {
    /// By flock(2).
    pub(super) has_flock: bool,
    /// For reading by fcntl(2).
    pub(super) has_read_lock: bool,
    /// Where the file is, for processes that find it unlocked.
    pub(super) file_system: Option<FileSystem>,
}

/// The record of a process that has these locks on its file, with the present time.
pub(super) type RecordFor<'a> = dyn Fn(HeldLocks) -> Vec<u8> + 'a;

/// What came before a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    Nothing,
    /// A stale lock, which this or another process has removed.
    Takeover,
}

/// What a process that wants the lock writes, and what it may take over.
pub(super) struct Taker<'a> {
    /// The record to write. It names the locks if the holder keeps the file open while it holds the
    /// lock.
    pub(super) record: &'a RecordFor<'a>,
    /// Whether a file with this content may be taken over if no other process has it locked.
    pub(super) may_take: &'a dyn Fn(&Content) -> Verdict,
}

/// Whether a file may be taken over or removed; if not, why.
pub(super) type Verdict = Result<(), Obstacle>;

/// The result of an attempt to take or to remove the lock.
#[must_use]
pub(super) enum Outcome<T> {
    /// The lock is taken: its file. Or it is gone: whether it was there.
    Done(T),
    /// What is in the way, and what the file says, if it could be read.
    Blocked(Obstacle, Option<Content>),
}

/// Why a lock cannot be taken or removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Obstacle {
    /// It is not stale.
    NotStale,
    /// It would be stale, but its file is locked: by a living holder, or by another taker.
    Locked,
    /// It is stale, but this user may neither rewrite nor remove the file.
    NotRemovable,
    /// This user may make no files in the directory.
    UnwritableDirectory,
    /// It is stale, but the file system has no locks that make a takeover safe.
    NoLocks,
    /// Another process acted on it at the same time.
    Contended,
    /// This user may not read the file.
    Unreadable,
    /// It is no file, but a link, a directory, a device, a pipe or a socket.
    NotAFile,
    /// A file is mounted there. Other processes may see another file under this name.
    MountPoint,
    /// The file belongs to another program: it is neither empty nor a record, nor the beginning of
    /// one.
    NotALockFile,
}

impl Obstacle {
    /// Why no wait for the lock can end; `None` if one can.
    pub(crate) fn hopeless_reason(self) -> Option<&'static str> {
        match self {
            Obstacle::NotAFile => Some("not a regular file"),
            Obstacle::MountPoint => Some("it is a mount point, so others may see another file"),
            Obstacle::NotRemovable => Some("stale, but this user may not remove the file"),
            Obstacle::UnwritableDirectory => {
                Some("this user may not create and remove files in the directory")
            }
            Obstacle::NotALockFile => Some("not a lock file"),
            Obstacle::NotStale
            | Obstacle::Locked
            | Obstacle::NoLocks
            | Obstacle::Contended
            | Obstacle::Unreadable => None,
        }
    }
}

/// What is under the lock's name.
pub(super) enum Found<F> {
    Nothing,
    File(F),
    /// No file that can be a lock, or none that this process can read.
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
                Takeover::Taken(file) => return settled(files, After::Takeover, file),
                Takeover::Blocked(why, content) => return Ok(Outcome::Blocked(why, Some(content))),
                // A process that judged the old file as stale may still act on that.
                Takeover::NameGone => {
                    after = After::Takeover;
                    continue;
                }
            },
        }
        if let Some(ours) = create(files, taker)? {
            return settled(files, after, ours);
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

/// Makes a file that is not complete yet when its name appears. No process takes an empty file for
/// a stale one before the timeout is over.
fn create_in_place<F: Files>(files: &F, taker: &Taker<'_>) -> io::Result<Option<F::File>> {
    let Some(file) = files.create_empty()? else {
        return Ok(None);
    };
    // If this process was asleep for very long, a taker may have rewritten or removed the empty
    // file. That process decides what becomes of the name.
    let Some(locks) = files.lock_new(&file)? else {
        return Ok(None);
    };
    if !is_still_ours(files, &file)? || !files.read(&file)?.bytes.is_empty() {
        return Ok(None);
    }
    files.write(&file, &(taker.record)(locks))?;
    Ok(Some(file))
}

/// The result of an attempt to take over a file.
enum Takeover<F> {
    /// The lock is taken. This is its file.
    Taken(F),
    /// The lock is not stale, or cannot be taken over.
    Blocked(Obstacle, Content),
    /// The file has lost the lock's name, by this or by another process.
    NameGone,
}

/// Takes over the lock whose file is `found`, if it is stale.
fn take_over<F: Files>(
    files: &F,
    taker: &Taker<'_>,
    found: F::File,
) -> io::Result<Takeover<F::File>> {
    // A lock that is simply held is only read. Its file is not locked even for a moment.
    let content = files.read(&found)?;
    if let Err(why) = (taker.may_take)(&content) {
        return Ok(Takeover::Blocked(why, content));
    }
    // Fails where a lock would not keep another taker out.
    files.creation()?;
    // It may have changed, or lost its name, before this process locked it.
    let locked = lock(files, found, Duration::ZERO)?;
    let (file, judged) = (locked.file, locked.content);
    let can_rewrite = match locked.flock {
        Flock::Acquired => locked.is_writable && files.may_rewrite(&file)?,
        // A guard must have its file locked by flock(2).
        Flock::HeldByNonParticipant => false,
        Flock::HeldByOther => return Ok(Takeover::Blocked(Obstacle::Locked, judged)),
        Flock::Unknown => return Ok(Takeover::Blocked(Obstacle::NoLocks, judged)),
    };
    let verdict = (taker.may_take)(&judged);
    // Only after the judgement: a holder may release a lock that another process has locked, but
    // only while it is alive.
    let id = files.id(&file)?;
    if files.identity()? != Some(id) {
        return Ok(Takeover::NameGone);
    }
    if let Err(why) = verdict {
        return Ok(Takeover::Blocked(why, judged));
    }
    let record = (taker.record)(HeldLocks {
        has_flock: true,
        has_read_lock: true,
        file_system: judged.file_system,
    });
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
        Ok(()) if can_rewrite && files.identity()? == Some(id) => Ok(Takeover::Taken(file)),
        Ok(()) => Ok(Takeover::NameGone),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Takeover::NameGone),
        Err(error) if is_forbidden(&error) => Ok(Takeover::Blocked(Obstacle::NotRemovable, judged)),
        Err(error) => Err(error),
    }
}

/// A file that this process has tried to lock.
pub(super) struct LockedFile<F> {
    file: F,
    is_writable: bool,
    pub(super) flock: Flock,
    /// What it says now that it is locked.
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
    let mut content = files.read(&file)?;
    if flock == Flock::HeldByOther && !patience.is_zero() {
        content = read_settled(files, &file, content)?;
    }
    Ok(LockedFile {
        file,
        is_writable,
        flock: flock.of_record(&content.record),
        content,
    })
}

/// Reads a file that another process may be rewriting until two reads agree. Otherwise a mixture
/// with the new time could look like a lock that is not stale, which no taker has locked.
fn read_settled<F: Files>(files: &F, file: &F::File, mut content: Content) -> io::Result<Content> {
    for _ in 0..MAX_ROUNDS {
        files.pause();
        let again = files.read(file)?;
        if again == content {
            break;
        }
        content = again;
    }
    Ok(content)
}

/// A grant, unless a process that judged the file earlier has acted on that since.
fn settled<F: Files>(files: &F, after: After, ours: F::File) -> io::Result<Outcome<F::File>> {
    if files.settle(after) && !is_still_ours(files, &ours)? {
        return Ok(Outcome::Blocked(Obstacle::Contended, None));
    }
    Ok(Outcome::Done(ours))
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
        Flock::HeldByOther if is_stale => Err(Obstacle::Locked),
        _ => Ok(()),
    }
}

/// Removes the lock if `allows` permits that for its content and its flock. False if there was no
/// lock.
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
        let content = locked.content;
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

/// Whether this user, or every user, lacks the right to change names here.
pub(super) fn is_forbidden(error: &io::Error) -> bool {
    use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
    matches!(error.kind(), PermissionDenied | ReadOnlyFilesystem)
}
