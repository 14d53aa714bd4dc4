//! The code of [`takeover`](crate::lockfile::takeover), run through every order in which the steps
//! of several processes can follow each other, with a crash at any point.
//!
//! A process is its program and the answers that it has had so far. To find out what it does next,
//! the program is run again from its start and given those answers; the first step that has none
//! yet is the next. So what is searched is the code itself, and not a description of it.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashSet};
use std::hash::{Hash, Hasher};
use std::io;

use crate::sys::directory::FileId;

use crate::lockfile::record::LIVE_LINE;
use crate::lockfile::staleness::Content;
use crate::lockfile::takeover::{
    acquire, may_pass, release, remove, After, Attempt, Claim, Files, Found, Locking, Obstacle,
};

/// The owner that the stale file names; no process of the model.
const LONG_GONE: usize = 9;

/// A file that is open: whose it is, and which of its steps has opened it.
type Handle = (usize, usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Path {
    Lock,
    /// A name of this process alone.
    Own(usize),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Step {
    Create(Vec<u8>),
    CreateOwn(Vec<u8>),
    /// What a shell does: the name first, the content later, no lock.
    CreateEmpty,
    Open,
    Lock(Handle),
    Read(Handle),
    OpenToRewrite(Handle),
    Identity,
    Remove,
    RemoveOwn,
    /// Renames the own name to the lock's name.
    Rename,
    /// Removes the lock if it still says what the process that is long gone has left.
    RemoveLeftover,
    Truncate(Handle),
    Append(Handle, Vec<u8>),
    Close(Handle),
    IsAlive(usize),
    Enter,
    Leave,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Answer {
    Done,
    NotFound,
    Taken,
    Unsupported,
    Opened(Handle, FileId),
    Locked(Locking),
    Content(Vec<u8>),
    Identity(Option<FileId>),
    Alive(bool),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Inode {
    bytes: Vec<u8>,
    locked_by: Option<Handle>,
}

/// A part of the protocol that is left out, for the search to find that out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Plant {
    /// Every process gets every flock.
    NoFlock,
    /// A new file is not locked when its name appears.
    UnlockedFile,
    /// A taker does not look at the name before it acts.
    NoLookBefore,
    /// A taker does not read the file again once it has it locked.
    NoSecondReading,
    /// A taker does not look at the name after it has rewritten the file.
    NoLookAfter,
    /// An empty file counts as stale at once.
    StaleWhenEmpty,
}

/// What a search lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Lacks {
    /// No process may rewrite the file of another.
    rewriting: bool,
    planted: Option<Plant>,
}

/// What all processes share.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Disk {
    names: BTreeMap<Path, (usize, usize)>,
    inodes: BTreeMap<(usize, usize), Inode>,
    open: BTreeMap<Handle, (usize, usize)>,
    lacks: Lacks,
}

fn file_id(inode: (usize, usize)) -> FileId {
    FileId::of_model(inode.0 as u64, inode.1 as u64)
}

impl Disk {
    /// Takes the step of a process that has taken so many before; `alive` are those that live.
    fn take(&mut self, process: usize, number: usize, step: &Step, alive: &[bool]) -> Answer {
        let own = Path::Own(process);
        let handle = (process, number);
        let planted = self.lacks.planted;
        let answer = match step {
            Step::Create(bytes) => {
                let is_locked = planted != Some(Plant::UnlockedFile);
                self.create(Path::Lock, handle, bytes, is_locked)
            }
            Step::CreateOwn(bytes) => self.create(own, handle, bytes, true),
            Step::CreateEmpty => self.create(Path::Lock, handle, &[], false),
            Step::Open => self.open(handle),
            Step::OpenToRewrite(_) if self.lacks.rewriting => Answer::Unsupported,
            Step::OpenToRewrite(found) => match self.names.get(&Path::Lock) {
                Some(inode) if *inode == self.open[found] => self.open(handle),
                _ => Answer::NotFound,
            },
            Step::Lock(handle) => {
                let inode = self.inode(handle);
                let is_free = inode.locked_by.is_none() || inode.locked_by == Some(*handle);
                if is_free {
                    inode.locked_by = Some(*handle);
                }
                Answer::Locked(if is_free || planted == Some(Plant::NoFlock) {
                    Locking::Ours
                } else {
                    Locking::Theirs
                })
            }
            Step::Read(handle) => Answer::Content(self.inode(handle).bytes.clone()),
            Step::Identity => Answer::Identity(self.names.get(&Path::Lock).copied().map(file_id)),
            Step::Rename => self.rename(own, Path::Lock),
            Step::Remove => self.remove(Path::Lock),
            Step::RemoveOwn => self.remove(own),
            Step::RemoveLeftover => {
                let lock = self.names.get(&Path::Lock);
                if lock.is_some_and(|inode| self.inodes[inode].bytes.starts_with(b"pid=9")) {
                    self.names.remove(&Path::Lock);
                }
                Answer::Done
            }
            Step::Truncate(handle) => {
                self.inode(handle).bytes.clear();
                Answer::Done
            }
            Step::Append(handle, bytes) => {
                self.inode(handle).bytes.extend_from_slice(bytes);
                Answer::Done
            }
            Step::Close(handle) => {
                self.close(handle);
                Answer::Done
            }
            Step::IsAlive(other) => Answer::Alive(alive.get(*other) == Some(&true)),
            Step::Enter | Step::Leave => Answer::Done,
        };
        let Disk {
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
        answer
    }

    fn create(&mut self, path: Path, handle: Handle, bytes: &[u8], is_locked: bool) -> Answer {
        if self.names.contains_key(&path) {
            return Answer::Taken;
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
        Answer::Opened(handle, file_id(inode))
    }

    fn open(&mut self, handle: Handle) -> Answer {
        match self.names.get(&Path::Lock) {
            None => Answer::NotFound,
            Some(inode) => {
                let inode = *inode;
                self.open.insert(handle, inode);
                Answer::Opened(handle, file_id(inode))
            }
        }
    }

    fn remove(&mut self, path: Path) -> Answer {
        match self.names.remove(&path) {
            Some(_) => Answer::Done,
            None => Answer::NotFound,
        }
    }

    fn rename(&mut self, from: Path, to: Path) -> Answer {
        match self.names.remove(&from) {
            Some(inode) => {
                self.names.insert(to, inode);
                Answer::Done
            }
            None => Answer::NotFound,
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

    /// The kernel closes what a process had open.
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
    }
}

/// How far a taker has got, for the plants.
#[derive(Clone, Debug, Default)]
enum Stage {
    #[default]
    Other,
    /// It has read this, and locked nothing.
    Read(Vec<u8>),
    /// It has this file locked, and has read that before, if anything.
    Locked(FileId, Option<Vec<u8>>),
    /// It has rewritten this file.
    Rewritten(FileId),
}

/// A process's view: answers for the steps that it has taken, and none for the next.
struct Replay<'a> {
    process: usize,
    answers: &'a [Answer],
    taken: Cell<usize>,
    next: RefCell<Option<Step>>,
    planted: Option<Plant>,
    stage: RefCell<Stage>,
}

impl Replay<'_> {
    fn step(&self, step: Step) -> io::Result<Answer> {
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

    fn done(&self, step: Step) -> io::Result<()> {
        match self.step(step)? {
            Answer::NotFound => Err(io::ErrorKind::NotFound.into()),
            Answer::Taken => Err(io::ErrorKind::AlreadyExists.into()),
            Answer::Unsupported => Err(io::ErrorKind::Unsupported.into()),
            _ => Ok(()),
        }
    }

    fn opened(&self, step: Step) -> io::Result<Option<Open<'_>>> {
        Ok(match self.step(step)? {
            Answer::Opened(handle, id) => Some(Open {
                replay: self,
                handle,
                id,
            }),
            _ => None,
        })
    }

    /// The section that no two may be in.
    fn hold(&self) -> io::Result<()> {
        self.stage.take();
        self.done(Step::Enter)?;
        self.done(Step::Leave)
    }

    fn is_stale(&self, content: &Content) -> bool {
        let text = String::from_utf8_lossy(&content.bytes);
        let Some(owner) = text
            .strip_prefix("pid=")
            .and_then(|rest| rest.chars().next())
        else {
            // Nothing in it yet, and young.
            return self.planted == Some(Plant::StaleWhenEmpty);
        };
        let owner = owner.to_digit(10).expect("an owner") as usize;
        let is_gone = || !matches!(self.step(Step::IsAlive(owner)), Ok(Answer::Alive(true)));
        // Whoever is dead has been so for longer than the timeout.
        text.contains(LIVE_LINE) || is_gone()
    }
}

struct Open<'a> {
    replay: &'a Replay<'a>,
    handle: Handle,
    id: FileId,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        let _ = self.replay.step(Step::Close(self.handle));
    }
}

impl<'a> Files for &'a Replay<'a> {
    type File = Open<'a>;

    fn create(&self, record: &[u8]) -> io::Result<Option<Open<'a>>> {
        self.opened(Step::Create(record.to_vec()))
    }

    fn open(&self) -> io::Result<Found<Open<'a>>> {
        self.stage.take();
        Ok(self.opened(Step::Open)?.map_or(Found::Nothing, Found::File))
    }

    fn open_to_rewrite(&self, file: &Open<'a>) -> io::Result<Option<Open<'a>>> {
        self.opened(Step::OpenToRewrite(file.handle))
    }

    fn lock(&self, file: &Open<'a>) -> io::Result<Locking> {
        match self.step(Step::Lock(file.handle))? {
            Answer::Locked(locking) => {
                let read = match self.stage.take() {
                    Stage::Read(bytes) => Some(bytes),
                    _ => None,
                };
                self.stage.replace(Stage::Locked(file.id, read));
                Ok(locking)
            }
            other => panic!("{other:?} to a lock"),
        }
    }

    fn lock_patiently(&self, file: &Open<'a>) -> io::Result<Locking> {
        self.lock(file)
    }

    fn read(&self, file: &Open<'a>) -> io::Result<Content> {
        if let (Some(Plant::NoSecondReading), Stage::Locked(_, Some(bytes))) =
            (self.planted, &*self.stage.borrow())
        {
            let bytes = bytes.clone();
            return Ok(Content { bytes, modified: 0 });
        }
        match self.step(Step::Read(file.handle))? {
            Answer::Content(bytes) => {
                if matches!(*self.stage.borrow(), Stage::Other) {
                    self.stage.replace(Stage::Read(bytes.clone()));
                }
                Ok(Content { bytes, modified: 0 })
            }
            other => panic!("{other:?} to a read"),
        }
    }

    fn id(&self, file: &Open<'a>) -> io::Result<FileId> {
        Ok(file.id)
    }

    fn identity(&self) -> io::Result<Option<FileId>> {
        match (self.planted, &*self.stage.borrow()) {
            (Some(Plant::NoLookBefore), Stage::Locked(id, _))
            | (Some(Plant::NoLookAfter), Stage::Rewritten(id)) => return Ok(Some(*id)),
            _ => {}
        }
        match self.step(Step::Identity)? {
            Answer::Identity(id) => Ok(id),
            other => panic!("{other:?} to a look"),
        }
    }

    fn prepare(&self, _: &[u8]) -> io::Result<u32> {
        Ok(0o644)
    }

    fn rewrite(&self, file: &Open<'a>, record: &[u8], _: u32) -> io::Result<()> {
        self.stage.replace(Stage::Rewritten(file.id));
        self.done(Step::Truncate(file.handle))?;
        self.done(Step::Append(file.handle, record.to_vec()))
    }

    fn remove(&self) -> io::Result<()> {
        self.done(Step::Remove)
    }

    fn settle(&self, after: After) -> bool {
        after == After::Takeover
    }
}

/// What a process does from its start to its end.
type Program = for<'a> fn(&'a Replay<'a>) -> io::Result<()>;

fn claim<'a>(
    replay: &'a Replay<'a>,
    is_live: bool,
    then: impl FnOnce(Open<'a>) -> io::Result<()>,
) -> io::Result<()> {
    let record = || format!("pid={}\n", replay.process).into_bytes();
    let may_take = |content: &Content| {
        let is_stale = replay.is_stale(content);
        Ok(is_stale.then_some(()).ok_or(Obstacle::NotStale))
    };
    let claim = Claim {
        record: &record,
        is_live,
        may_take: &may_take,
    };
    match acquire(&replay, &claim)? {
        Attempt::Granted(file) => then(file),
        Attempt::Held(..) => Ok(()),
    }
}

/// A guard: holds the file open for as long as it holds the lock.
fn guarded<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
    claim(replay, true, |file| {
        replay.hold()?;
        release(&replay, &file).map(drop)
    })
}

/// A script that calls one program to take the lock and another to release it.
fn detached<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
    claim(replay, false, |file| {
        drop(file);
        replay.hold()?;
        let ours = format!("pid={}\n", replay.process);
        let allows = |content: &Content, locking: Locking| {
            let is_ours = content.bytes == ours.as_bytes();
            let verdict = is_ours.then_some(()).ok_or(Obstacle::NotStale);
            Ok(verdict.and_then(|()| may_pass(locking, replay.is_stale(content))))
        };
        remove(&replay, &allows).map(drop)
    })
}

/// A user who may read the file, and locks it.
fn reader<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
    if let Some(found) = replay.opened(Step::Open)? {
        Files::lock(&replay, &found)?;
    }
    Ok(())
}

/// Releases the lock of the process that is long gone, by its number.
fn releaser<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
    let allows = |content: &Content, locking: Locking| {
        let is_named = content.bytes.starts_with(b"pid=9");
        let verdict = is_named.then_some(()).ok_or(Obstacle::NotStale);
        Ok(verdict.and_then(|()| may_pass(locking, replay.is_stale(content))))
    };
    remove(&replay, &allows).map(drop)
}

/// Removes the lock if it is stale, and takes nothing.
fn cleaner<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
    let allows = |content: &Content, locking: Locking| {
        let may = locking == Locking::Ours && replay.is_stale(content);
        Ok(may.then_some(()).ok_or(Obstacle::NotStale))
    };
    remove(&replay, &allows).map(drop)
}

/// A shell script: `set -C; echo pid=$$ > lock`, and later `rm lock`.
fn script<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
    let Some(file) = replay.opened(Step::CreateEmpty)? else {
        return Ok(());
    };
    let record = format!("pid={}\n", replay.process);
    replay.done(Step::Append(file.handle, record.into_bytes()))?;
    drop(file);
    replay.hold()?;
    replay.done(Step::Remove)
}

/// Somebody who knows that the file was left by a process that is gone, and removes that file.
fn operator<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
    replay.done(Step::RemoveLeftover)
}

/// Judge, remove, create: what most programs do.
fn naive_by_unlink<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
    if let Some(found) = replay.opened(Step::Open)? {
        if !replay.is_stale(&Files::read(&replay, &found)?) {
            return Ok(());
        }
        let _ = replay.done(Step::Remove);
    }
    script(replay)
}

/// Look whether it is there, and rename one's own into its place.
fn naive_by_rename<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
    let record = format!("pid={}\n", replay.process).into_bytes();
    let file = replay.opened(Step::CreateOwn(record))?;
    if Files::identity(&replay)?.is_some() {
        return replay.done(Step::RemoveOwn);
    }
    replay.done(Step::Rename)?;
    drop(file);
    replay.hold()?;
    replay.done(Step::Remove)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Life {
    Runs,
    Holds,
    Ended,
    Crashed,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Process {
    answers: Vec<Answer>,
    next: Option<Step>,
    life: Life,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    disk: Disk,
    processes: Vec<Process>,
    crashes_left: u32,
}

/// What a search has found.
struct Search {
    programs: Vec<Program>,
    seen: HashSet<u128>,
    path: Vec<String>,
    /// The way to two holders at once.
    double_grant: Option<Vec<String>>,
    /// Ways to an end without a crash that leave something behind.
    litter: Option<Vec<String>>,
}

impl Search {
    fn run(programs: &[Program], lock: Option<&str>, lacks: Lacks, crashes: u32) -> Search {
        let mut disk = Disk {
            names: BTreeMap::new(),
            inodes: BTreeMap::new(),
            open: BTreeMap::new(),
            lacks,
        };
        if let Some(content) = lock {
            let inode = (LONG_GONE, 0);
            disk.names.insert(Path::Lock, inode);
            let bytes = content.as_bytes().to_vec();
            disk.inodes.insert(
                inode,
                Inode {
                    bytes,
                    locked_by: None,
                },
            );
        }
        let mut search = Search {
            programs: programs.to_vec(),
            seen: HashSet::new(),
            path: Vec::new(),
            double_grant: None,
            litter: None,
        };
        let mut state = State {
            disk,
            processes: vec![
                Process {
                    answers: Vec::new(),
                    next: None,
                    life: Life::Runs,
                };
                programs.len()
            ],
            crashes_left: crashes,
        };
        for process in 0..programs.len() {
            search.advance(&mut state, process);
        }
        search.explore(&state);
        println!("{} states", search.seen.len());
        search
    }

    /// Finds out what a process does next.
    fn advance(&self, state: &mut State, process: usize) {
        let of = &mut state.processes[process];
        let replay = Replay {
            process,
            answers: &of.answers,
            taken: Cell::new(0),
            next: RefCell::new(None),
            planted: state.disk.lacks.planted,
            stage: RefCell::default(),
        };
        let _ = (self.programs[process])(&replay);
        let next = replay.next.into_inner();
        if next.is_none() {
            of.life = Life::Ended;
            of.answers.clear();
            state.disk.end(process);
        }
        of.next = next;
    }

    fn explore(&mut self, state: &State) {
        if self.double_grant.is_some() || !self.seen.insert(digest(state)) {
            return;
        }
        let holders = state
            .processes
            .iter()
            .filter(|process| process.life == Life::Holds);
        if holders.count() > 1 {
            self.double_grant = Some(self.path.clone());
            return;
        }
        let mut is_over = true;
        for process in 0..state.processes.len() {
            let Some(step) = state.processes[process].next.clone() else {
                continue;
            };
            is_over = false;
            let mut after = state.clone();
            self.take(&mut after, process, &step);
            self.path.push(format!("{process}: {step:?}"));
            self.explore(&after);
            self.path.pop();
            if state.crashes_left > 0 {
                let mut after = state.clone();
                after.crashes_left -= 1;
                after.processes[process].life = Life::Crashed;
                after.processes[process].next = None;
                after.processes[process].answers.clear();
                after.disk.end(process);
                self.path.push(format!("{process}: crash"));
                self.explore(&after);
                self.path.pop();
            }
        }
        let has_crashed = state
            .processes
            .iter()
            .any(|process| process.life == Life::Crashed);
        if is_over && !has_crashed && !state.disk.names.is_empty() {
            self.litter = Some(self.path.clone());
        }
    }

    fn take(&self, state: &mut State, process: usize, step: &Step) {
        let alive: Vec<bool> = state
            .processes
            .iter()
            .map(|process| matches!(process.life, Life::Runs | Life::Holds))
            .collect();
        let number = state.processes[process].answers.len();
        let answer = state.disk.take(process, number, step, &alive);
        let of = &mut state.processes[process];
        of.answers.push(answer);
        match step {
            Step::Enter => of.life = Life::Holds,
            Step::Leave => of.life = Life::Runs,
            _ => {}
        }
        self.advance(state, process);
    }
}

fn digest(state: &State) -> u128 {
    let half = |seed: u64| {
        let mut hasher = std::hash::DefaultHasher::new();
        seed.hash(&mut hasher);
        state.hash(&mut hasher);
        u128::from(hasher.finish())
    };
    (half(1) << 64) | half(2)
}

/// What a holder has left that had promised nothing.
const STALE: Option<&str> = Some("pid=9\n");
/// What a holder has left that had promised to have it locked.
const STALE_LIVE: Option<&str> = Some("pid=9\nx-live=flock\n");

fn assert_never_two(
    what: &str,
    programs: &[Program],
    lock: Option<&str>,
    lacks: Lacks,
    crashes: u32,
) -> Search {
    let search = Search::run(programs, lock, lacks, crashes);
    if let Some(path) = &search.double_grant {
        panic!("{what}: two holders\n{}", path.join("\n"));
    }
    search
}

/// Never two holders, and nothing left at the end.
fn assert_safe(what: &str, programs: &[Program], lock: Option<&str>, lacks: Lacks, crashes: u32) {
    let search = assert_never_two(what, programs, lock, lacks, crashes);
    if let Some(path) = search.litter {
        panic!("{what}: something is left\n{}", path.join("\n"));
    }
}

fn assert_caught(what: &str, programs: &[Program], lock: Option<&str>, lacks: Lacks, crashes: u32) {
    let search = Search::run(programs, lock, lacks, crashes);
    assert!(
        search.double_grant.is_some(),
        "{what}: the search does not see two holders"
    );
}

#[test]
fn no_order_of_steps_and_no_crash_gives_one_lock_to_two() {
    let all = Lacks::default();
    for (what, lock) in [
        ("stale", STALE),
        ("left by a guard", STALE_LIVE),
        ("free", None),
    ] {
        assert_safe(what, &[guarded, guarded, guarded], lock, all, 1);
        assert_safe(what, &[guarded, guarded, detached], lock, all, 1);
        assert_safe(what, &[guarded, detached, cleaner], lock, all, 1);
        // The release of a detached holder goes through under the reader's lock.
        assert_never_two(what, &[guarded, detached, reader], lock, all, 1);
        assert_never_two(what, &[guarded, detached, releaser], lock, all, 1);
        assert_never_two(what, &[guarded, guarded, releaser], lock, all, 0);
        assert_never_two(what, &[guarded, reader, releaser], lock, all, 1);
    }
}

/// An operator who removes the file under a takeover may make the taker begin anew. But no process
/// gets a lock that another has.
#[test]
fn scripts_and_an_operator_with_rm_bring_about_no_second_holder() {
    let all = Lacks::default();
    for (what, lock) in [
        ("stale", STALE),
        ("left by a guard", STALE_LIVE),
        ("free", None),
    ] {
        assert_never_two(what, &[guarded, script, script], lock, all, 1);
        assert_never_two(what, &[guarded, script, operator], lock, all, 1);
        assert_never_two(what, &[guarded, guarded, script], lock, all, 1);
    }
    assert_never_two(
        "stale",
        &[guarded, guarded, script, operator],
        STALE,
        all,
        1,
    );
}

#[test]
fn takers_that_may_not_rewrite_are_safe_among_ourselves() {
    let lacks = Lacks {
        rewriting: true,
        ..Lacks::default()
    };
    for (what, lock) in [
        ("stale", STALE),
        ("left by a guard", STALE_LIVE),
        ("free", None),
    ] {
        assert_safe(what, &[guarded, guarded, guarded], lock, lacks, 1);
        assert_safe(what, &[guarded, detached, cleaner], lock, lacks, 1);
    }
}

#[test]
fn the_search_finds_the_double_grant_of_naive_algorithms() {
    let all = Lacks::default();
    assert_caught(
        "unlink and create",
        &[naive_by_unlink, naive_by_unlink],
        STALE,
        all,
        0,
    );
    assert_caught(
        "rename into place",
        &[naive_by_rename, naive_by_rename],
        None,
        all,
        0,
    );
}

/// Each part of the takeover, with processes that need it: without it they are two, with it they
/// are not.
#[test]
fn the_search_finds_what_each_part_of_the_takeover_is_for() {
    let rows: &[(Plant, bool, &[Program], Option<&str>)] = &[
        (Plant::NoFlock, false, &[guarded, guarded], STALE),
        (Plant::UnlockedFile, false, &[guarded, guarded], None),
        (Plant::NoLookBefore, true, &[guarded, guarded], STALE),
        (Plant::NoSecondReading, false, &[detached, guarded], STALE),
        (
            Plant::NoLookAfter,
            false,
            &[guarded, script, operator],
            STALE,
        ),
        (Plant::StaleWhenEmpty, false, &[guarded, script], None),
    ];
    for (plant, rewriting, programs, lock) in rows {
        let with = |planted| Lacks {
            rewriting: *rewriting,
            planted,
        };
        let what = format!("{plant:?}");
        assert_caught(&what, programs, *lock, with(Some(*plant)), 0);
        assert_never_two(&what, programs, *lock, with(None), 0);
    }
}
