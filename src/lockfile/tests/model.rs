//! Runs the code of [`takeover`](crate::lockfile::takeover) through every order of the steps of
//! several processes, with a crash at any point.
//!
//! The state of a process is its program and the results of its steps so far. To find its next
//! step, the search runs the program again from its start and replays those results; the first step
//! without a result is the next. It does so once for each list of results. So the search covers the
//! code itself and not a description of it.
//!
//! Processes of one program differ by their names alone: of the states that become each other when
//! these processes are renamed, the search goes on from one.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};
use std::io;
use std::time::Duration;

use crate::os::directory::{Entry, FileId};

use crate::lockfile::record::{Record, LIVE_LINE};
use crate::lockfile::staleness::{Content, Flock};
use crate::lockfile::takeover::{
    acquire, may_pass, release, remove, After, Creation, Files, HeldLock, Obstacle, Outcome,
    RecordFor, Taker,
};

/// The holder in the stale file, which is no process of the model.
const LONG_GONE: usize = 9;

/// An open file: the process that opened it, and the number of the step that did.
type Handle = (usize, usize);

/// An inode: the process that made it, and the number of the step that did.
type InodeNumber = (usize, usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Name {
    Lock,
    /// A name of this process alone.
    Own(usize),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum FileStep {
    Create(Vec<u8>),
    CreateOwn(Vec<u8>),
    /// As a shell does: the name first, the content later, no flock.
    CreateEmpty,
    Open,
    /// By flock(2), without waiting.
    Lock(Handle),
    Read(Handle),
    OpenToWrite(Handle),
    Identity,
    Remove,
    RemoveOwn,
    /// Renames the process's own name to the lock's name.
    Rename,
    /// Removes the lock if it still has the record of the process that is long gone.
    RemoveLeftover,
    /// Writes at this offset, over what is there.
    Write(Handle, usize, Vec<u8>),
    /// Cuts the file off at this length.
    Truncate(Handle, usize),
    Close(Handle),
    IsAlive(usize),
    Enter,
    Leave,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum StepResult {
    Done,
    NotFound,
    Taken,
    Unsupported,
    Opened(Handle, InodeNumber),
    Locked(Flock),
    Content(Vec<u8>),
    Identity(Option<InodeNumber>),
    Alive(bool),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Inode {
    bytes: Vec<u8>,
    locked_by: Option<Handle>,
}

impl Inode {
    fn flock(&mut self, handle: Handle) -> bool {
        *self.locked_by.get_or_insert(handle) == handle
    }
}

/// A part of the protocol that a search leaves out, so that it must find two holders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Mutation {
    /// Every process gets every flock.
    NoFlock,
    /// A new file is not locked when its name appears.
    UnlockedFile,
    /// A taker does not look at the name before it acts.
    NoLookBefore,
    /// A taker does not read the file again after locking it.
    NoSecondReading,
    /// A taker does not look at the name after it has rewritten the file.
    NoLookAfter,
    /// An empty file counts as stale at once.
    StaleWhenEmpty,
    /// A process that has created an empty file does not look whether it is still empty.
    NoLookAtNewFile,
    /// A guard of another guest counts as gone at once, although its timestamp is young.
    NoHeartbeat,
}

/// Which processes may write the file of another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Writers {
    #[default]
    All,
    First,
    None,
}

/// The variant of the protocol that a search runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Variant {
    writers: Writers,
    /// Processes create the lock in place.
    creates_in_place: bool,
    /// A lock on a file keeps no other process out.
    has_useless_locks: bool,
    /// The file under the second name is another inode, as with FUSE.
    links_make_inodes: bool,
    /// A taker does not wait for processes that judged the file earlier.
    never_settles: bool,
    /// A process can be asleep for so long that the empty file that it has created is old.
    has_old_empty_files: bool,
    /// Only the first process can be asleep for so long.
    first_sleeps_alone: bool,
    /// Each process is in another guest of one snapshot: with equal ids, but with its own locks and
    /// processes. For two processes only.
    has_guests: bool,
    mutation: Option<Mutation>,
}

impl Variant {
    fn may_write(self, process: usize) -> bool {
        match self.writers {
            Writers::All => true,
            Writers::First => process == 0,
            Writers::None => false,
        }
    }
}

/// The state that all processes share.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ModelDisk {
    names: BTreeMap<Name, InodeNumber>,
    inodes: BTreeMap<InodeNumber, Inode>,
    open: BTreeMap<Handle, InodeNumber>,
    variant: Variant,
}

fn file_id(inode: InodeNumber) -> FileId {
    FileId::of_model(inode.0 as u64, inode.1 as u64)
}

impl ModelDisk {
    /// Takes one step of a process; `number` counts its steps before this one.
    fn take(&mut self, process: usize, number: usize, step: &FileStep) -> StepResult {
        let own = Name::Own(process);
        let handle = (process, number);
        let mutation = self.variant.mutation;
        let answer = match step {
            FileStep::Create(bytes) => {
                let is_locked = mutation != Some(Mutation::UnlockedFile);
                let created = self.create(Name::Lock, handle, bytes, is_locked);
                if self.variant.links_make_inodes && created != StepResult::Taken {
                    self.split(handle);
                }
                created
            }
            FileStep::CreateOwn(bytes) => self.create(own, handle, bytes, true),
            FileStep::CreateEmpty => self.create(Name::Lock, handle, &[], false),
            FileStep::Open => self.open(handle),
            FileStep::OpenToWrite(_) if !self.variant.may_write(process) => StepResult::Unsupported,
            FileStep::OpenToWrite(found) => match self.names.get(&Name::Lock) {
                Some(inode) if *inode == self.open[found] => self.open(handle),
                _ => StepResult::NotFound,
            },
            FileStep::Lock(handle) => StepResult::Locked(self.lock(*handle)),
            FileStep::Read(handle) => StepResult::Content(self.inode(handle).bytes.clone()),
            FileStep::Identity => StepResult::Identity(self.names.get(&Name::Lock).copied()),
            FileStep::Rename => self.rename(own, Name::Lock),
            FileStep::Remove => self.remove(Name::Lock),
            FileStep::RemoveOwn => self.remove(own),
            FileStep::RemoveLeftover => {
                let lock = self.names.get(&Name::Lock);
                if lock.is_some_and(|inode| self.inodes[inode].bytes.starts_with(b"pid=9")) {
                    self.names.remove(&Name::Lock);
                }
                StepResult::Done
            }
            FileStep::Write(handle, offset, bytes) => {
                let old = &mut self.inode(handle).bytes;
                let end = offset + bytes.len();
                old.resize(old.len().max(end), 0);
                old[*offset..end].copy_from_slice(bytes);
                StepResult::Done
            }
            FileStep::Truncate(handle, len) => {
                self.inode(handle).bytes.truncate(*len);
                StepResult::Done
            }
            FileStep::Close(handle) => {
                self.close(handle);
                StepResult::Done
            }
            FileStep::IsAlive(_) => unreachable!("the disk does not know"),
            FileStep::Enter | FileStep::Leave => StepResult::Done,
        };
        self.drop_unused_inodes();
        answer
    }

    fn has_empty_lock(&self) -> bool {
        let lock = self.names.get(&Name::Lock);
        lock.is_some_and(|inode| self.inodes[inode].bytes.is_empty())
    }

    fn drop_unused_inodes(&mut self) {
        let ModelDisk {
            names,
            inodes,
            open,
            ..
        } = self;
        inodes.retain(|inode, _| {
            names
                .values()
                .chain(open.values())
                .any(|used| used == inode)
        });
    }

    fn create(&mut self, path: Name, handle: Handle, bytes: &[u8], is_locked: bool) -> StepResult {
        if self.names.contains_key(&path) {
            return StepResult::Taken;
        }
        let inode = handle;
        self.names.insert(path, inode);
        self.open.insert(handle, inode);
        self.inodes.insert(
            inode,
            Inode {
                bytes: bytes.to_vec(),
                locked_by: is_locked.then_some(handle),
            },
        );
        StepResult::Opened(handle, inode)
    }

    /// Gives the lock's name another inode than the one that its creator has open and locked.
    fn split(&mut self, handle: Handle) {
        const SECOND: usize = 1000;
        let second = (handle.0, handle.1 + SECOND);
        let inode = Inode {
            bytes: self.inode(&handle).bytes.clone(),
            locked_by: None,
        };
        self.inodes.insert(second, inode);
        self.names.insert(Name::Lock, second);
    }

    fn open(&mut self, handle: Handle) -> StepResult {
        match self.names.get(&Name::Lock) {
            None => StepResult::NotFound,
            Some(inode) => {
                let inode = *inode;
                self.open.insert(handle, inode);
                StepResult::Opened(handle, inode)
            }
        }
    }

    fn lock(&mut self, handle: Handle) -> Flock {
        if self.variant.mutation == Some(Mutation::NoFlock) {
            return Flock::Acquired;
        }
        let is_of_another = |locked_by: Handle| locked_by.0 != handle.0;
        if self.variant.has_guests && self.inode(&handle).locked_by.is_some_and(is_of_another) {
            return Flock::Acquired;
        }
        if self.inode(&handle).flock(handle) {
            Flock::Acquired
        } else {
            Flock::HeldByOther
        }
    }

    fn remove(&mut self, path: Name) -> StepResult {
        match self.names.remove(&path) {
            Some(_) => StepResult::Done,
            None => StepResult::NotFound,
        }
    }

    fn rename(&mut self, from: Name, to: Name) -> StepResult {
        match self.names.remove(&from) {
            Some(inode) => {
                self.names.insert(to, inode);
                StepResult::Done
            }
            None => StepResult::NotFound,
        }
    }

    fn inode(&mut self, handle: &Handle) -> &mut Inode {
        let inode = self.open[handle];
        self.inodes
            .get_mut(&inode)
            .expect("an open file has an inode")
    }

    fn close(&mut self, handle: &Handle) {
        let inode = self.inode(handle);
        if inode.locked_by == Some(*handle) {
            inode.locked_by = None;
        }
        self.open.remove(handle);
    }

    /// Closes all files of a process, as the kernel does.
    fn end(&mut self, process: usize) {
        let of_process: Vec<Handle> = self
            .open
            .keys()
            .filter(|handle| handle.0 == process)
            .copied()
            .collect();
        for handle in of_process {
            self.close(&handle);
        }
        self.drop_unused_inodes();
    }
}

/// How far a taker has got, for the mutations.
#[derive(Clone, Debug, Default)]
enum Progress {
    #[default]
    Other,
    /// It has read this, and has locked nothing.
    Read(Vec<u8>),
    /// It has this file locked, and may have read this before.
    Locked(FileId, Option<Vec<u8>>),
    /// It has rewritten this file.
    Rewritten(FileId),
    /// It has created an empty file and locked it.
    Created,
}

/// The view of a process: the results of the steps that it has taken.
struct Replay<'a> {
    process: usize,
    answers: &'a [StepResult],
    taken: Cell<usize>,
    next: RefCell<Option<FileStep>>,
    variant: Variant,
    progress: RefCell<Progress>,
}

impl Replay<'_> {
    fn step(&self, step: FileStep) -> io::Result<StepResult> {
        if self.next.borrow().is_some() {
            return Err(io::Error::other("the program has been left"));
        }
        match self.answers.get(self.taken.get()) {
            Some(answer) => {
                self.taken.set(self.taken.get() + 1);
                Ok(answer.clone())
            }
            None => {
                *self.next.borrow_mut() = Some(step);
                Err(io::Error::other("the program has been left"))
            }
        }
    }

    fn done(&self, step: FileStep) -> io::Result<()> {
        match self.step(step)? {
            StepResult::NotFound => Err(io::ErrorKind::NotFound.into()),
            StepResult::Taken => Err(io::ErrorKind::AlreadyExists.into()),
            StepResult::Unsupported => Err(io::ErrorKind::Unsupported.into()),
            _ => Ok(()),
        }
    }

    fn opened(&self, step: FileStep) -> io::Result<Option<OpenFile<'_>>> {
        Ok(match self.step(step)? {
            StepResult::Opened(handle, inode) => Some(OpenFile {
                replay: self,
                handle,
                id: file_id(inode),
            }),
            _ => None,
        })
    }

    /// The section in which only one process may be at a time.
    fn hold(&self) -> io::Result<()> {
        self.progress.take();
        self.done(FileStep::Enter)?;
        self.done(FileStep::Leave)
    }

    fn is_stale(&self, content: &Content) -> bool {
        let text = String::from_utf8_lossy(&content.bytes);
        let Some(owner) = text
            .strip_prefix("pid=")
            .and_then(|rest| rest.chars().next())
        else {
            // An empty file, and a young one.
            let is_of_first = || (0..100).any(|step| content.file == file_id((0, step)));
            let may_be_old = || !self.variant.first_sleeps_alone || is_of_first();
            return self.variant.has_old_empty_files && may_be_old()
                || self.variant.mutation == Some(Mutation::StaleWhenEmpty);
        };
        let owner = owner.to_digit(10).expect("an owner") as usize;
        let is_gone = || {
            !matches!(
                self.step(FileStep::IsAlive(owner)),
                Ok(StepResult::Alive(true))
            )
        };
        // No process of the other guest is seen here, but the heartbeat of a living one is.
        if self.variant.has_guests {
            return self.variant.mutation == Some(Mutation::NoHeartbeat) || is_gone();
        }
        // A process that is dead has been dead for longer than the timeout.
        text.contains(LIVE_LINE) || is_gone()
    }
}

/// The lock of a holder whose file system no record names.
const LOCKED: HeldLock = HeldLock {
    has_flock: true,
    file_system: None,
};

/// The content of a file of the model. Reads only the lines that the protocol looks at: the
/// search does this millions of times.
fn content(file: &OpenFile<'_>, bytes: Vec<u8>) -> Content {
    let text = std::str::from_utf8(&bytes).unwrap_or_default();
    let record = Record {
        is_live: text.contains(LIVE_LINE),
        ..Record::default()
    };
    Content {
        record: Box::new(record),
        is_lock_file: true,
        bytes,
        modified: 0,
        file: file.id,
        file_system: None,
    }
}

struct OpenFile<'a> {
    replay: &'a Replay<'a>,
    handle: Handle,
    id: FileId,
}

impl Drop for OpenFile<'_> {
    fn drop(&mut self) {
        let _ = self.replay.step(FileStep::Close(self.handle));
    }
}

impl<'a> Files for &'a Replay<'a> {
    type File = OpenFile<'a>;

    fn creation(&self) -> io::Result<Creation> {
        match self.variant {
            Variant {
                has_useless_locks: true,
                ..
            } => Err(io::Error::other("useless locks")),
            Variant {
                creates_in_place: true,
                ..
            } => Ok(Creation::InPlace),
            _ => Ok(Creation::ByLink),
        }
    }

    fn create_linked(&self, record: &RecordFor<'_>) -> io::Result<Option<OpenFile<'a>>> {
        self.opened(FileStep::Create(record(LOCKED)))
    }

    fn create_empty(&self) -> io::Result<Option<OpenFile<'a>>> {
        self.opened(FileStep::CreateEmpty)
    }

    fn lock_new(&self, file: &OpenFile<'a>) -> io::Result<Option<HeldLock>> {
        match self.step(FileStep::Lock(file.handle))? {
            StepResult::Locked(flock) => {
                self.progress.replace(Progress::Created);
                Ok((flock == Flock::Acquired).then_some(LOCKED))
            }
            other => panic!("{other:?} to a lock"),
        }
    }

    fn write(&self, file: &OpenFile<'a>, record: &[u8]) -> io::Result<()> {
        self.done(FileStep::Write(file.handle, 0, record.to_vec()))
    }

    fn is_mount_point(&self, _: &OpenFile<'a>) -> bool {
        false
    }

    fn pause(&self) {}

    fn open(&self) -> io::Result<Entry<OpenFile<'a>>> {
        self.progress.take();
        Ok(self
            .opened(FileStep::Open)?
            .map_or(Entry::Nothing, Entry::File))
    }

    fn open_to_write(&self, file: &OpenFile<'a>) -> io::Result<Option<OpenFile<'a>>> {
        self.opened(FileStep::OpenToWrite(file.handle))
    }

    fn may_rewrite(&self, _: &OpenFile<'a>) -> io::Result<bool> {
        Ok(true)
    }

    fn lock(&self, file: &OpenFile<'a>, _: Duration) -> io::Result<Flock> {
        match self.step(FileStep::Lock(file.handle))? {
            StepResult::Locked(flock) => {
                let read = match self.progress.take() {
                    Progress::Read(bytes) => Some(bytes),
                    _ => None,
                };
                self.progress.replace(Progress::Locked(file.id, read));
                Ok(flock)
            }
            other => panic!("{other:?} to a lock"),
        }
    }

    fn read(&self, file: &OpenFile<'a>) -> io::Result<Content> {
        match (self.variant.mutation, &*self.progress.borrow()) {
            (Some(Mutation::NoSecondReading), Progress::Locked(_, Some(bytes))) => {
                return Ok(content(file, bytes.clone()));
            }
            (Some(Mutation::NoLookAtNewFile), Progress::Created) => {
                return Ok(content(file, Vec::new()));
            }
            _ => {}
        }
        match self.step(FileStep::Read(file.handle))? {
            StepResult::Content(bytes) => {
                if matches!(*self.progress.borrow(), Progress::Other) {
                    self.progress.replace(Progress::Read(bytes.clone()));
                }
                Ok(content(file, bytes))
            }
            other => panic!("{other:?} to a read"),
        }
    }

    fn id(&self, file: &OpenFile<'a>) -> io::Result<FileId> {
        Ok(file.id)
    }

    fn identity(&self) -> io::Result<Option<FileId>> {
        match (self.variant.mutation, &*self.progress.borrow()) {
            (Some(Mutation::NoLookBefore), Progress::Locked(id, _))
            | (Some(Mutation::NoLookAfter), Progress::Rewritten(id)) => return Ok(Some(*id)),
            _ => {}
        }
        match self.step(FileStep::Identity)? {
            StepResult::Identity(inode) => Ok(inode.map(file_id)),
            other => panic!("{other:?} to a look"),
        }
    }

    fn prepare(&self, _: &[u8]) -> io::Result<u32> {
        Ok(0o644)
    }

    fn rewrite(&self, file: &OpenFile<'a>, record: &[u8], _: u32) -> io::Result<()> {
        self.progress.replace(Progress::Rewritten(file.id));
        // The kernel copies the record a part at a time. A reader sees any of the states between.
        let old_len = STALE_LIVE.map_or(0, str::len);
        let mut padded = record.to_vec();
        padded.resize(record.len().max(old_len), b'\n');
        let (head, tail) = padded.split_at("pid=0\n".len());
        self.done(FileStep::Write(file.handle, 0, head.to_vec()))?;
        self.done(FileStep::Write(file.handle, head.len(), tail.to_vec()))?;
        self.done(FileStep::Truncate(file.handle, record.len()))
    }

    fn may_remove(&self) -> io::Result<bool> {
        Ok(true)
    }

    fn remove(&self) -> io::Result<()> {
        self.done(FileStep::Remove)
    }

    fn wait_for_earlier_judges(&self, after: After) -> bool {
        after == After::Takeover && !self.variant.never_settles
    }
}

/// What a process does from its start to its end.
type Program = for<'a> fn(&'a Replay<'a>) -> io::Result<()>;

fn taker<'a>(
    replay: &'a Replay<'a>,
    is_live: bool,
    then: impl FnOnce(OpenFile<'a>) -> io::Result<()>,
) -> io::Result<()> {
    let lines = if is_live { LIVE_LINE } else { "" };
    let record = |_| format!("pid={}\n{lines}", replay.process).into_bytes();
    let may_take = |content: &Content| {
        let is_stale = replay.is_stale(content);
        is_stale.then_some(()).ok_or(Obstacle::NotStale)
    };
    let taker = Taker {
        record: &record,
        may_take: &may_take,
    };
    match acquire(&replay, &taker)? {
        Outcome::Done(file) => then(file),
        Outcome::Blocked(..) => Ok(()),
    }
}

/// A guard, which has the file open while it holds the lock.
fn guarded<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
    taker(replay, true, |file| {
        replay.hold()?;
        release(&replay, &file).map(drop)
    })
}

/// A script that calls one program to take the lock and another to release it.
fn detached<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
    taker(replay, false, |file| {
        drop(file);
        replay.hold()?;
        let ours = format!("pid={}\n", replay.process);
        let allows = |content: &Content, flock: Flock| {
            let is_ours = content.bytes == ours.as_bytes();
            let verdict = is_ours.then_some(()).ok_or(Obstacle::NotStale);
            verdict.and_then(|()| may_pass(flock, replay.is_stale(content)))
        };
        remove(&replay, &allows).map(drop)
    })
}

/// A command under flock(1), on a file that is there. It does not run if the file is the lock of a
/// living process, which need not have it locked, or has lost its name meanwhile.
fn flocker<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
    let Some(found) = replay.opened(FileStep::Open)? else {
        return Ok(());
    };
    if replay.step(FileStep::Lock(found.handle))? != StepResult::Locked(Flock::Acquired) {
        return Ok(());
    }
    let content = Files::read(&replay, &found)?;
    let is_free = content.bytes.is_empty() || replay.is_stale(&content);
    if is_free && Files::identity(&replay)? == Some(found.id) {
        replay.hold()?;
    }
    Ok(())
}

/// Releases the lock of the process that is long gone, by its number.
fn releaser<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
    let allows = |content: &Content, flock: Flock| {
        let is_named = content.bytes.starts_with(b"pid=9");
        let verdict = is_named.then_some(()).ok_or(Obstacle::NotStale);
        verdict.and_then(|()| may_pass(flock, replay.is_stale(content)))
    };
    remove(&replay, &allows).map(drop)
}

/// Removes the lock, whoever holds it.
fn by_force<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
    remove(&replay, &|_, _| Ok(())).map(drop)
}

/// Removes the lock if it is stale, and takes nothing.
fn cleaner<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
    let allows = |content: &Content, flock: Flock| {
        let may = flock == Flock::Acquired && replay.is_stale(content);
        may.then_some(()).ok_or(Obstacle::NotStale)
    };
    remove(&replay, &allows).map(drop)
}

/// A shell script: `set -C; echo pid=$$ > lock`, and later `rm lock`.
fn script<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
    let Some(file) = replay.opened(FileStep::CreateEmpty)? else {
        return Ok(());
    };
    let record = format!("pid={}\n", replay.process);
    replay.done(FileStep::Write(file.handle, 0, record.into_bytes()))?;
    drop(file);
    replay.hold()?;
    replay.done(FileStep::Remove)
}

/// A person who knows that a process which is gone has left the file, and removes that file.
fn operator<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
    replay.done(FileStep::RemoveLeftover)
}

/// Judges, removes, creates: as most programs do.
fn naive_by_unlink<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
    if let Some(found) = replay.opened(FileStep::Open)? {
        if !replay.is_stale(&Files::read(&replay, &found)?) {
            return Ok(());
        }
        let _ = replay.done(FileStep::Remove);
    }
    script(replay)
}

/// Checks that the name is free, and renames its own file to it.
fn naive_by_rename<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
    let record = format!("pid={}\n", replay.process).into_bytes();
    let file = replay.opened(FileStep::CreateOwn(record))?;
    if Files::identity(&replay)?.is_some() {
        return replay.done(FileStep::RemoveOwn);
    }
    replay.done(FileStep::Rename)?;
    drop(file);
    replay.hold()?;
    replay.done(FileStep::Remove)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Runs,
    Holds,
    Ended,
    Crashed,
}

/// What a process has done so far, and what it does next.
struct ModelProcess {
    name: usize,
    /// The number of the process before its last step, in the list of the search.
    before: usize,
    answers: Vec<StepResult>,
    next: Option<FileStep>,
    phase: Phase,
}

/// The numbers of the processes that have ended in either way, in the list of the search.
const ENDED: usize = 0;
const CRASHED: usize = 1;

/// The most processes in a search. Those that are left over have ended from the beginning.
const MAX_PROCESSES: usize = 4;

/// The state of a search: numbers in its lists.
#[derive(Clone, Copy)]
struct State {
    disk: usize,
    processes: [usize; MAX_PROCESSES],
    crashes_left: usize,
}

impl State {
    /// The state in one number, which is faster to hash and to compare.
    fn packed(&self) -> u128 {
        let parts = [self.crashes_left, self.disk].into_iter();
        parts.chain(self.processes).fold(0, |packed, part| {
            assert!(part < 1 << 21, "a number too big for its part");
            packed << 21 | part as u128
        })
    }
}

/// Another name for each process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Renaming([usize; MAX_PROCESSES]);

impl Renaming {
    /// Those that turn a search into itself, without the one that changes nothing.
    fn symmetries(programs: &[Program], variant: Variant) -> Vec<Renaming> {
        let digits = |number: usize| std::array::from_fn(|at| number >> (2 * at) & 3);
        let all = (0..1 << (2 * MAX_PROCESSES)).map(|number| Renaming(digits(number)));
        all.filter(|renaming| {
            let changes = (0..MAX_PROCESSES).any(|process| renaming.0[process] != process);
            let is_symmetry = (0..MAX_PROCESSES).all(|process| {
                let renamed = renaming.0[process];
                let is_alike = match (programs.get(process), programs.get(renamed)) {
                    (Some(old), Some(new)) => std::ptr::fn_addr_eq(*old, *new),
                    _ => renamed == process,
                };
                is_alike
                    && renaming.0.contains(&process)
                    && variant.may_write(process) == variant.may_write(renamed)
            });
            changes && is_symmetry
        })
        .collect()
    }

    /// The holder that is long gone keeps its name.
    fn process(self, process: usize) -> usize {
        self.0.get(process).copied().unwrap_or(process)
    }

    /// Renames a [`Handle`] or an [`InodeNumber`].
    fn pair(self, (process, number): (usize, usize)) -> (usize, usize) {
        (self.process(process), number)
    }

    fn record(self, bytes: &[u8]) -> Vec<u8> {
        match bytes {
            [b'p', b'i', b'd', b'=', owner, rest @ ..] => {
                let owner = self.process(usize::from(owner - b'0'));
                [format!("pid={owner}").as_bytes(), rest].concat()
            }
            other => other.to_vec(),
        }
    }

    fn step(self, step: &FileStep) -> FileStep {
        match step {
            FileStep::Create(bytes) => FileStep::Create(self.record(bytes)),
            FileStep::CreateOwn(bytes) => FileStep::CreateOwn(self.record(bytes)),
            FileStep::Write(handle, offset, bytes) => {
                FileStep::Write(self.pair(*handle), *offset, self.record(bytes))
            }
            FileStep::Lock(handle) => FileStep::Lock(self.pair(*handle)),
            FileStep::Read(handle) => FileStep::Read(self.pair(*handle)),
            FileStep::OpenToWrite(handle) => FileStep::OpenToWrite(self.pair(*handle)),
            FileStep::Truncate(handle, len) => FileStep::Truncate(self.pair(*handle), *len),
            FileStep::Close(handle) => FileStep::Close(self.pair(*handle)),
            FileStep::IsAlive(process) => FileStep::IsAlive(self.process(*process)),
            FileStep::CreateEmpty
            | FileStep::Open
            | FileStep::Identity
            | FileStep::Remove
            | FileStep::RemoveOwn
            | FileStep::Rename
            | FileStep::RemoveLeftover
            | FileStep::Enter
            | FileStep::Leave => step.clone(),
        }
    }

    fn result(self, result: &StepResult) -> StepResult {
        match result {
            StepResult::Opened(handle, inode) => {
                StepResult::Opened(self.pair(*handle), self.pair(*inode))
            }
            StepResult::Content(bytes) => StepResult::Content(self.record(bytes)),
            StepResult::Identity(inode) => {
                StepResult::Identity(inode.map(|inode| self.pair(inode)))
            }
            StepResult::Done
            | StepResult::NotFound
            | StepResult::Taken
            | StepResult::Unsupported
            | StepResult::Locked(_)
            | StepResult::Alive(_) => result.clone(),
        }
    }

    fn disk(self, disk: &ModelDisk) -> ModelDisk {
        let name = |name: &Name| match name {
            Name::Lock => Name::Lock,
            Name::Own(process) => Name::Own(self.process(*process)),
        };
        let inode = |inode: &Inode| Inode {
            bytes: self.record(&inode.bytes),
            locked_by: inode.locked_by.map(|handle| self.pair(handle)),
        };
        ModelDisk {
            names: (disk.names.iter())
                .map(|(of, number)| (name(of), self.pair(*number)))
                .collect(),
            inodes: (disk.inodes.iter())
                .map(|(number, of)| (self.pair(*number), inode(of)))
                .collect(),
            open: (disk.open.iter())
                .map(|(handle, number)| (self.pair(*handle), self.pair(*number)))
                .collect(),
            variant: disk.variant,
        }
    }
}

/// A fast hash. It need not withstand an attacker, and the search spends most of its time on it.
type FastHash = BuildHasherDefault<ByMultiplication>;

#[derive(Default)]
struct ByMultiplication(u64);

impl Hasher for ByMultiplication {
    fn write(&mut self, bytes: &[u8]) {
        for some in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..some.len()].copy_from_slice(some);
            self.write_u64(u64::from_ne_bytes(word));
        }
    }

    fn write_u128(&mut self, number: u128) {
        self.write_u64(number as u64);
        self.write_u64((number >> 64) as u64);
    }

    fn write_u8(&mut self, number: u8) {
        self.write_u64(number.into());
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn write_u64(&mut self, number: u64) {
        let mixed = self.0.rotate_left(23) ^ number ^ 0x243f_6a88_85a3_08d3;
        let product = u128::from(mixed) * 0x9e37_79b9_7f4a_7c15;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// The state and the results of a search.
struct Search {
    programs: Vec<Program>,
    variant: Variant,
    /// Each process in each state of its own that was met.
    processes: Vec<ModelProcess>,
    /// Where each result takes a process, by their numbers in the list.
    successors: HashMap<(usize, StepResult), usize, FastHash>,
    /// Each disk that was met, and its number.
    disks: Vec<ModelDisk>,
    disk_numbers: HashMap<ModelDisk, usize, FastHash>,
    /// Where the next step of a process takes a disk and the process, by their numbers.
    steps: HashMap<(usize, usize), (usize, usize), FastHash>,
    /// Where the end of a process, by its name, takes a disk.
    ends: HashMap<(usize, usize), usize, FastHash>,
    symmetries: Vec<Renaming>,
    /// The number of each process at its beginning.
    beginnings: [usize; MAX_PROCESSES],
    /// What a symmetry makes of a process and of a disk, all by their numbers.
    renamed_processes: HashMap<(usize, usize), usize, FastHash>,
    renamed_disks: HashMap<(usize, usize), usize, FastHash>,
    /// Of the states that the symmetries turn into each other, the first, packed.
    seen: HashSet<u128, FastHash>,
    /// The steps to here: a process, and its number in the list before the step; or its crash.
    path: Vec<(usize, usize)>,
    /// The steps to two holders at once.
    double_grant: Option<Vec<String>>,
    /// The steps to an end that leaves a file behind, without a crash.
    litter: Option<Vec<String>>,
    /// A path to a lock file without a record that the last process leaves.
    empty_file: Option<Vec<String>>,
}

impl Search {
    fn run(programs: &[Program], lock: Option<&str>, variant: Variant, crashes: usize) -> Search {
        let mut disk = ModelDisk {
            names: BTreeMap::new(),
            inodes: BTreeMap::new(),
            open: BTreeMap::new(),
            variant,
        };
        if let Some(content) = lock {
            let inode = (LONG_GONE, 0);
            disk.names.insert(Name::Lock, inode);
            let bytes = content.as_bytes().to_vec();
            disk.inodes.insert(
                inode,
                Inode {
                    bytes,
                    locked_by: None,
                },
            );
        }
        let at_end = |phase| ModelProcess {
            name: 0,
            before: 0,
            answers: Vec::new(),
            next: None,
            phase,
        };
        let mut search = Search {
            programs: programs.to_vec(),
            variant,
            processes: vec![at_end(Phase::Ended), at_end(Phase::Crashed)],
            successors: HashMap::default(),
            disks: Vec::new(),
            disk_numbers: HashMap::default(),
            steps: HashMap::default(),
            ends: HashMap::default(),
            symmetries: Renaming::symmetries(programs, variant),
            beginnings: [ENDED; MAX_PROCESSES],
            renamed_processes: HashMap::default(),
            renamed_disks: HashMap::default(),
            seen: HashSet::default(),
            path: Vec::new(),
            double_grant: None,
            litter: None,
            empty_file: None,
        };
        for process in 0..programs.len() {
            search.beginnings[process] = search.advance(process, ENDED, Vec::new(), Phase::Runs);
        }
        let state = State {
            disk: search.number_of(disk),
            processes: search.beginnings,
            crashes_left: crashes,
        };
        search.explore(state);
        println!("{} states", search.seen.len());
        search
    }

    /// Finds the next step of a process that has these results, and gives its number in the list.
    fn advance(
        &mut self,
        process: usize,
        before: usize,
        answers: Vec<StepResult>,
        phase: Phase,
    ) -> usize {
        let replay = Replay {
            process,
            answers: &answers,
            taken: Cell::new(0),
            next: RefCell::new(None),
            variant: self.variant,
            progress: RefCell::default(),
        };
        let _ = (self.programs[process])(&replay);
        let Some(next) = replay.next.into_inner() else {
            return ENDED;
        };
        self.processes.push(ModelProcess {
            name: process,
            before,
            answers,
            next: Some(next),
            phase,
        });
        self.processes.len() - 1
    }

    fn number_of(&mut self, disk: ModelDisk) -> usize {
        if let Some(number) = self.disk_numbers.get(&disk) {
            return *number;
        }
        self.disks.push(disk.clone());
        self.disk_numbers.insert(disk, self.disks.len() - 1);
        self.disks.len() - 1
    }

    fn explore(&mut self, state: State) {
        if self.double_grant.is_some() {
            return;
        }
        let first = self.first_of(&state);
        if !self.seen.insert(first) {
            return;
        }
        let phases = state.processes.iter().map(|at| self.processes[*at].phase);
        if phases.filter(|phase| *phase == Phase::Holds).count() > 1 {
            self.double_grant = Some(self.path_in_words());
            return;
        }
        let mut is_over = true;
        for process in 0..MAX_PROCESSES {
            let at = state.processes[process];
            if at == ENDED || at == CRASHED {
                continue;
            }
            is_over = false;
            let mut after = state;
            (after.disk, after.processes[process]) = self.take(&state, process);
            self.path.push((process, at));
            self.explore(after);
            self.path.pop();
            if state.crashes_left > 0 {
                let mut after = state;
                after.crashes_left -= 1;
                after.processes[process] = CRASHED;
                after.disk = self.end(state.disk, process);
                self.path.push((process, CRASHED));
                self.explore(after);
                self.path.pop();
            }
        }
        let has_crashed = state.processes.contains(&CRASHED);
        if is_over && !has_crashed && !self.disks[state.disk].names.is_empty() {
            self.litter = Some(self.path_in_words());
        }
        if is_over && self.disks[state.disk].has_empty_lock() {
            self.empty_file = Some(self.path_in_words());
        }
    }

    /// The first of the states that the symmetries make of this one, packed.
    fn first_of(&mut self, state: &State) -> u128 {
        let mut first = state.packed();
        for symmetry in 0..self.symmetries.len() {
            let renaming = self.symmetries[symmetry];
            let mut renamed = *state;
            renamed.disk = self.renamed_disk(symmetry, state.disk);
            for (process, at) in state.processes.iter().enumerate() {
                renamed.processes[renaming.process(process)] = self.renamed(symmetry, *at);
            }
            first = first.min(renamed.packed());
        }
        first
    }

    fn renamed_disk(&mut self, symmetry: usize, disk: usize) -> usize {
        if let Some(renamed) = self.renamed_disks.get(&(symmetry, disk)) {
            return *renamed;
        }
        let renamed = self.symmetries[symmetry].disk(&self.disks[disk]);
        let renamed = self.number_of(renamed);
        self.renamed_disks.insert((symmetry, disk), renamed);
        renamed
    }

    /// What a symmetry makes of a process: what has the same results under the other names.
    fn renamed(&mut self, symmetry: usize, at: usize) -> usize {
        if at == ENDED || at == CRASHED {
            return at;
        }
        if let Some(renamed) = self.renamed_processes.get(&(symmetry, at)) {
            return *renamed;
        }
        let renaming = self.symmetries[symmetry];
        let ModelProcess { name, before, .. } = self.processes[at];
        let got = self.processes[at].answers.last();
        let renamed = match got.map(|got| renaming.result(got)) {
            None => self.beginnings[renaming.process(name)],
            Some(got) => {
                let before = self.renamed(symmetry, before);
                self.after(before, got)
            }
        };
        let next = self.processes[at].next.as_ref();
        let expected = next.map(|step| renaming.step(step));
        assert_eq!(self.processes[renamed].next, expected, "no symmetry");
        self.renamed_processes.insert((symmetry, at), renamed);
        renamed
    }

    fn path_in_words(&self) -> Vec<String> {
        let words = |(process, at): &(usize, usize)| match &self.processes[*at].next {
            Some(step) => format!("{process}: {step:?}"),
            None => format!("{process}: crash"),
        };
        self.path.iter().map(words).collect()
    }

    /// Closes all files of a process, and gives the number of the disk after that.
    fn end(&mut self, disk: usize, process: usize) -> usize {
        if let Some(after) = self.ends.get(&(disk, process)) {
            return *after;
        }
        let mut after = self.disks[disk].clone();
        after.end(process);
        let after = self.number_of(after);
        self.ends.insert((disk, process), after);
        after
    }

    /// Takes the next step of a process, and gives the numbers of the disk and the process after
    /// it.
    fn take(&mut self, state: &State, process: usize) -> (usize, usize) {
        let at = state.processes[process];
        if let Some(after) = self.steps.get(&(state.disk, at)) {
            return *after;
        }
        let step = self.processes[at].next.clone().expect("it has not ended");
        let (disk, answer) = match step {
            FileStep::IsAlive(other) => {
                let other = state.processes.get(other).map(|at| &self.processes[*at]);
                let runs = |other: &ModelProcess| matches!(other.phase, Phase::Runs | Phase::Holds);
                (state.disk, StepResult::Alive(other.is_some_and(runs)))
            }
            _ => {
                let mut disk = self.disks[state.disk].clone();
                let answer = disk.take(process, self.processes[at].answers.len(), &step);
                (self.number_of(disk), answer)
            }
        };
        let after = match self.after(at, answer) {
            ENDED => (self.end(disk, process), ENDED),
            after => (disk, after),
        };
        // Whether another process is alive does not depend on the disk.
        if !matches!(step, FileStep::IsAlive(_)) {
            self.steps.insert((state.disk, at), after);
        }
        after
    }

    /// Where a result takes a process.
    fn after(&mut self, at: usize, got: StepResult) -> usize {
        if let Some(after) = self.successors.get(&(at, got.clone())) {
            return *after;
        }
        let before = &self.processes[at];
        let phase = match before.next {
            Some(FileStep::Enter) => Phase::Holds,
            Some(FileStep::Leave) => Phase::Runs,
            _ => before.phase,
        };
        let mut answers = before.answers.clone();
        answers.push(got.clone());
        let after = self.advance(before.name, at, answers, phase);
        self.successors.insert((at, got), after);
        after
    }
}

/// The record of a holder that did not promise to keep the file locked.
const STALE: Option<&str> = Some("pid=9\n");
/// The record of a holder that promised to keep the file locked.
const STALE_LIVE: Option<&str> = Some("pid=9\nx-live=flock\n");
/// What the processes find, and its name.
const LOCKS: [(&str, Option<&str>); 3] = [
    ("stale", STALE),
    ("left by a guard", STALE_LIVE),
    ("free", None),
];

#[test]
fn two_guests_of_one_snapshot_never_hold_a_lock_together() {
    let guests: [Program; 2] = [guarded, guarded];
    for creates_in_place in [false, true] {
        let variant = Variant {
            creates_in_place,
            has_guests: true,
            ..Variant::default()
        };
        let _ = assert_never_two("two guests", &guests, None, variant, 1);
        let mutant = Variant {
            mutation: Some(Mutation::NoHeartbeat),
            ..variant
        };
        assert_caught("two guests", &guests, None, mutant, 0);
    }
}

fn assert_never_two(
    what: &str,
    programs: &[Program],
    lock: Option<&str>,
    variant: Variant,
    crashes: usize,
) -> Search {
    let search = Search::run(programs, lock, variant, crashes);
    if let Some(path) = &search.double_grant {
        panic!("{what}: two holders\n{}", path.join("\n"));
    }
    search
}

/// Asserts that there are never two holders, that nothing is left at the end, and that even a crash
/// leaves no file without a record.
fn assert_safe(
    what: &str,
    programs: &[Program],
    lock: Option<&str>,
    variant: Variant,
    crashes: usize,
) {
    let search = assert_never_two(what, programs, lock, variant, crashes);
    if let Some(path) = search.litter {
        panic!("{what}: something is left\n{}", path.join("\n"));
    }
    if let Some(path) = search.empty_file.filter(|_| !variant.creates_in_place) {
        panic!(
            "{what}: a file without a record is left\n{}",
            path.join("\n")
        );
    }
}

fn assert_caught(
    what: &str,
    programs: &[Program],
    lock: Option<&str>,
    variant: Variant,
    crashes: usize,
) {
    let search = Search::run(programs, lock, variant, crashes);
    assert!(
        search.double_grant.is_some(),
        "{what}: the search does not see two holders"
    );
}

#[test]
fn no_order_of_steps_and_no_crash_gives_one_lock_to_two() {
    let all = Variant::default();
    for (what, lock) in LOCKS {
        assert_safe(what, &[guarded, guarded, guarded], lock, all, 1);
        assert_safe(what, &[guarded, guarded, detached], lock, all, 0);
        assert_safe(what, &[guarded, detached, cleaner], lock, all, 0);
        assert_never_two(what, &[guarded, detached, releaser], lock, all, 1);
        assert_never_two(what, &[guarded, guarded, releaser], lock, all, 0);
    }
}

/// An operator who removes the file during a takeover can make the taker begin anew. But no process
/// gets a lock that another process holds.
#[test]
fn scripts_and_an_operator_with_rm_cause_no_second_holder() {
    let all = Variant::default();
    let hasty = Variant {
        never_settles: true,
        ..all
    };
    assert_never_two("hasty", &[guarded, script, operator], STALE, hasty, 0);
    for (what, lock) in LOCKS {
        assert_never_two(what, &[guarded, script, script], lock, all, 1);
        assert_never_two(what, &[guarded, script, operator], lock, all, 1);
        assert_never_two(what, &[guarded, guarded, script], lock, all, 1);
    }
}

/// The searches that take the longest. The other tests have the same programs, but never four at a
/// time; a guard beside a detached holder and a third without a crash; takers that may not rewrite
/// as three without a crash or two with one; a script instead of the last guard where only the
/// first process may write; and where empty files are old, two at a time.
#[test]
#[ignore = "long: cargo test --release --lib model:: -- --ignored"]
fn the_longest_searches_find_no_second_holder() {
    let all = Variant::default();
    let four: &[Program] = &[guarded, guarded, script, operator];
    assert_never_two("stale", four, STALE, all, 1);
    for (what, lock) in [("stale", STALE), ("left by a guard", STALE_LIVE)] {
        let three: &[Program] = &[guarded, guarded, guarded];
        assert_safe(what, three, lock, without_rewriting(), 1);
    }
    for (what, lock) in LOCKS {
        let three: &[Program] = &[guarded, detached, cleaner];
        assert_safe(what, three, lock, without_rewriting(), 1);
        assert_safe(what, three, lock, all, 1);
        assert_safe(what, &[guarded, guarded, detached], lock, all, 1);
    }
    for third in [cleaner as Program, flocker] {
        let three: &[Program] = &[guarded, detached, third];
        assert_never_two("slow", three, None, slow_in_place(), 0);
    }
    let three: &[Program] = &[guarded, guarded, flocker];
    assert_never_two("free", three, None, in_place(), 0);
    let three: &[Program] = &[detached, guarded, guarded];
    assert_never_two("stale", three, STALE, first_writes(), 0);
    for (what, lock) in LOCKS {
        let four: &[Program] = &[guarded, guarded, detached, flocker];
        assert_never_two(what, four, lock, all, 0);
    }
}

fn without_rewriting() -> Variant {
    Variant {
        writers: Writers::None,
        ..Variant::default()
    }
}

fn first_writes() -> Variant {
    Variant {
        writers: Writers::First,
        ..Variant::default()
    }
}

fn in_place() -> Variant {
    Variant {
        creates_in_place: true,
        links_make_inodes: true,
        ..Variant::default()
    }
}

fn slow_in_place() -> Variant {
    Variant {
        has_old_empty_files: true,
        ..in_place()
    }
}

#[test]
fn takers_that_may_not_rewrite_are_safe_among_ourselves() {
    let variant = without_rewriting();
    for (what, lock) in LOCKS {
        assert_safe(what, &[guarded, guarded, guarded], lock, variant, 0);
        assert_safe(what, &[guarded, guarded], lock, variant, 1);
        assert_safe(what, &[guarded, detached, cleaner], lock, variant, 0);
    }
    // A writer takes the lock over and releases it between two steps of the guard. The process
    // that has the lock after that may be any: a script makes for the fewest states.
    let three: &[Program] = &[detached, guarded, script];
    assert_never_two("stale", three, STALE, first_writes(), 0);
}

#[test]
fn creations_in_place_cause_no_second_holder() {
    let (variant, slow) = (in_place(), slow_in_place());
    assert_never_two("stale", &[guarded, guarded, detached], STALE, variant, 0);
    assert_never_two("free", &[guarded, flocker], None, slow, 1);
    assert_never_two("free", &[guarded, detached, releaser], None, variant, 0);
    assert_never_two("free", &[guarded, script, script], None, variant, 1);
    assert_never_two("slow", &[guarded, detached], None, slow, 1);
    assert_never_two("slow", &[guarded, cleaner], None, slow, 1);
    assert_never_two("slow", &[detached, cleaner], None, slow, 1);
    // The taker of an old empty file removes it, and makes another one.
    let removing = Variant {
        writers: Writers::None,
        first_sleeps_alone: true,
        ..slow
    };
    assert_never_two("slow", &[guarded, detached], None, removing, 1);
}

/// As with FUSE, where a link would give the lock to two.
#[test]
fn the_search_finds_the_double_grant_of_links_to_another_inode() {
    let variant = Variant {
        links_make_inodes: true,
        ..Variant::default()
    };
    assert_caught("a link", &[guarded, guarded], None, variant, 0);
}

/// Whoever has the file locked holds the lock, whatever is in the file. Only force does not heed
/// that.
#[test]
fn a_command_under_flock_has_no_second_holder_beside_it() {
    let old_empty = Variant {
        has_old_empty_files: true,
        ..Variant::default()
    };
    let locks = LOCKS.into_iter().chain([("empty", Some(""))]);
    for (what, lock) in locks {
        for writers in [Writers::All, Writers::First, Writers::None] {
            let variant = Variant {
                writers,
                ..old_empty
            };
            for programs in [
                &[guarded as Program, guarded, flocker][..],
                &[guarded, detached, flocker],
                &[guarded, releaser, flocker],
                &[guarded, cleaner, flocker],
                &[guarded, flocker, flocker],
            ] {
                assert_never_two(what, programs, lock, variant, 1);
            }
        }
        if lock.is_some() {
            let programs: &[Program] = &[guarded, by_force, flocker];
            assert_caught(what, programs, lock, old_empty, 0);
        }
    }
}

#[test]
fn the_search_finds_the_double_grant_of_naive_algorithms() {
    let all = Variant::default();
    let (unlinking, renaming): ([Program; 2], [Program; 2]) =
        ([naive_by_unlink; 2], [naive_by_rename; 2]);
    assert_caught("unlink and create", &unlinking, STALE, all, 0);
    assert_caught("rename into place", &renaming, None, all, 0);
}

/// Runs each part of the takeover with processes that need it: there are two holders without that
/// part, and never two with it.
#[test]
fn without_any_part_of_the_takeover_there_are_two_holders() {
    use Mutation::*;
    use Writers::{All, None as Nobody};
    let rows: &[(Mutation, Writers, &[Program], Option<&str>)] = &[
        (NoFlock, All, &[guarded, guarded], STALE),
        (NoFlock, All, &[guarded, flocker], STALE),
        (UnlockedFile, All, &[guarded, guarded], None),
        (NoLookBefore, Nobody, &[guarded, guarded], STALE),
        (NoSecondReading, All, &[detached, guarded], STALE),
        (NoLookAfter, All, &[guarded, script, operator], STALE),
        (NoLookAtNewFile, All, &[guarded, detached], None),
        (StaleWhenEmpty, All, &[guarded, script], None),
    ];
    for (plant, writers, programs, lock) in rows {
        let with = |mutation| Variant {
            writers: *writers,
            creates_in_place: *plant == Mutation::NoLookAtNewFile,
            has_old_empty_files: *plant == Mutation::NoLookAtNewFile,
            mutation,
            ..Variant::default()
        };
        let what = format!("{plant:?}");
        assert_caught(&what, programs, *lock, with(Some(*plant)), 0);
        assert_never_two(&what, programs, *lock, with(None), 0);
    }
}

/// Another process replaces the lock's file between every two steps of a program: each look at the
/// name finds another stale file. Returns how many steps the program takes.
fn steps_beside_a_replacer(program: Program, variant: Variant) -> usize {
    const TOO_MANY: usize = 1000;
    let mut answers = Vec::new();
    while answers.len() < TOO_MANY {
        let replay = Replay {
            process: 0,
            answers: &answers,
            taken: Cell::new(0),
            next: RefCell::new(None),
            variant,
            progress: RefCell::default(),
        };
        let _ = program(&replay);
        let Some(next) = replay.next.into_inner() else {
            return answers.len();
        };
        let inode = (LONG_GONE, answers.len());
        answers.push(match next {
            FileStep::Create(_) => StepResult::Taken,
            FileStep::Open => StepResult::Opened((0, answers.len()), inode),
            FileStep::OpenToWrite(_) => StepResult::NotFound,
            FileStep::Lock(_) => StepResult::Locked(Flock::Acquired),
            FileStep::Read(_) => StepResult::Content(b"pid=9\n".to_vec()),
            FileStep::Identity => StepResult::Identity(Some(inode)),
            FileStep::IsAlive(_) => StepResult::Alive(false),
            FileStep::Close(_) => StepResult::Done,
            step => panic!("{step:?}, although the file has lost its name"),
        });
    }
    panic!("an attempt without an end");
}

#[test]
fn an_attempt_ends_although_the_file_is_replaced_for_ever() {
    fn taking<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
        let taker = Taker {
            record: &|_| Vec::new(),
            may_take: &|_| Ok(()),
        };
        let taken = acquire(&replay, &taker)?;
        assert!(matches!(taken, Outcome::Blocked(Obstacle::Contended, None)));
        Ok(())
    }
    fn removing<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
        let removed = remove(&replay, &|_, _| Ok(()))?;
        assert!(matches!(
            removed,
            Outcome::Blocked(Obstacle::Contended, None)
        ));
        Ok(())
    }
    for program in [taking as Program, removing] {
        assert!(steps_beside_a_replacer(program, Variant::default()) > 10);
    }
}

#[test]
fn where_locks_are_useless_no_stale_file_is_locked_or_taken() {
    fn taking<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
        let is_refused = taker(replay, true, |_| panic!("taken")).is_err();
        assert!(is_refused, "it goes on");
        Ok(())
    }
    let variant = Variant {
        has_useless_locks: true,
        ..Variant::default()
    };
    // It opens the file, reads it, sees that the holder is gone, and closes it.
    assert_eq!(steps_beside_a_replacer(taking, variant), 4);
}
