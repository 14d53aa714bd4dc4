//! The code of [`takeover`](super::takeover), run through every order in which the steps of several
//! processes can follow each other, with a crash at any point.
//!
//! A process is its program and the answers that it has had so far. To find out what it does next, the
//! program is run again from its start and given those answers; the first step that has none yet is the next.
//! So what is searched is the code itself, and not a description of it.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashSet};
use std::hash::{Hash, Hasher};
use std::io;

use crate::directory::FileId;

use super::record::LIVE_LINE;
use super::staleness::Content;
use super::takeover::{
    acquire, release, remove, After, Attempt, Claim, Files, Found, Locking, Name, Obstacle,
};

/// The owner that the stale file names; no process of the model.
const LONG_GONE: usize = 9;

/// A file that is open: whose it is, and which of its steps has opened it.
type Handle = (usize, usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Path {
    Lock,
    Aside(usize),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Step {
    Create(Name, Vec<u8>),
    /// What a shell does: the name first, the content later, no lock.
    CreateEmpty,
    Open,
    Lock(Handle),
    Read(Handle),
    Identity(Name),
    Exchange,
    MoveAside,
    PutBack,
    Rename,
    Remove(Name),
    /// Takes the lock's name from this file, and from no other.
    RemoveOnly(FileId),
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

/// What the file system cannot do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Lacks {
    exchange: bool,
    /// A planted bug: everybody gets every lock.
    locks: bool,
    /// A planted bug: a taker says at once that whoever has its file locked holds the lock.
    patience: bool,
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
    fn path(process: usize, name: Name) -> Path {
        match name {
            Name::Lock => Path::Lock,
            Name::Aside => Path::Aside(process),
        }
    }

    /// Takes the step of a process that has taken so many before; `alive` are those that live.
    fn take(&mut self, process: usize, number: usize, step: &Step, alive: &[bool]) -> Answer {
        let own = |name: Name| Disk::path(process, name);
        let answer = match step {
            Step::Create(name, bytes) => {
                let mut bytes = bytes.clone();
                if *name == Name::Aside && self.lacks.patience {
                    bytes.extend_from_slice(LIVE_LINE.as_bytes());
                }
                self.create(own(*name), (process, number), &bytes, true)
            }
            Step::CreateEmpty => self.create(Path::Lock, (process, number), &[], false),
            Step::Open => match self.names.get(&Path::Lock) {
                None => Answer::NotFound,
                Some(inode) => {
                    let inode = *inode;
                    self.open.insert((process, number), inode);
                    Answer::Opened((process, number), file_id(inode))
                }
            },
            Step::Lock(handle) => {
                let lacks_locks = self.lacks.locks;
                let inode = self.inode(handle);
                let is_free = inode.locked_by.is_none() || inode.locked_by == Some(*handle);
                if is_free {
                    inode.locked_by = Some(*handle);
                }
                Answer::Locked(if is_free || lacks_locks {
                    Locking::Ours
                } else {
                    Locking::Theirs
                })
            }
            Step::Read(handle) => Answer::Content(self.inode(handle).bytes.clone()),
            Step::Identity(name) => {
                Answer::Identity(self.names.get(&own(*name)).copied().map(file_id))
            }
            Step::Exchange if self.lacks.exchange => Answer::Unsupported,
            Step::Exchange => {
                let (aside, lock) = (
                    self.names.get(&own(Name::Aside)),
                    self.names.get(&Path::Lock),
                );
                match (aside.copied(), lock.copied()) {
                    (Some(aside), Some(lock)) => {
                        self.names.insert(Path::Lock, aside);
                        self.names.insert(own(Name::Aside), lock);
                        Answer::Done
                    }
                    _ => Answer::NotFound,
                }
            }
            Step::MoveAside => self.rename(Path::Lock, own(Name::Aside)),
            Step::Rename => self.rename(own(Name::Aside), Path::Lock),
            Step::PutBack => match (
                self.names.get(&own(Name::Aside)),
                self.names.get(&Path::Lock),
            ) {
                (_, Some(_)) => Answer::Taken,
                (None, None) => Answer::NotFound,
                (Some(aside), None) => {
                    let aside = *aside;
                    self.names.insert(Path::Lock, aside);
                    Answer::Done
                }
            },
            Step::Remove(name) => match self.names.remove(&own(*name)) {
                Some(_) => Answer::Done,
                None => Answer::NotFound,
            },
            Step::RemoveOnly(id) => {
                if self.names.get(&Path::Lock).copied().map(file_id) == Some(*id) {
                    self.names.remove(&Path::Lock);
                }
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

/// A process's view: answers for the steps that it has taken, and none for the next.
struct Replay<'a> {
    process: usize,
    answers: &'a [Answer],
    taken: Cell<usize>,
    next: RefCell<Option<Step>>,
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
            return false;
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

    fn create(&self, name: Name, record: &[u8]) -> io::Result<Option<Open<'a>>> {
        self.opened(Step::Create(name, record.to_vec()))
    }

    fn open(&self) -> io::Result<Found<Open<'a>>> {
        Ok(self.opened(Step::Open)?.map_or(Found::Nothing, Found::File))
    }

    fn lock(&self, file: &Open<'a>) -> io::Result<Locking> {
        match self.step(Step::Lock(file.handle))? {
            Answer::Locked(locking) => Ok(locking),
            other => panic!("{other:?} to a lock"),
        }
    }

    fn lock_patiently(&self, file: &Open<'a>) -> io::Result<Locking> {
        self.lock(file)
    }

    fn read(&self, file: &Open<'a>) -> io::Result<Content> {
        match self.step(Step::Read(file.handle))? {
            Answer::Content(bytes) => Ok(Content { bytes, modified: 0 }),
            other => panic!("{other:?} to a read"),
        }
    }

    fn id(&self, file: &Open<'a>) -> io::Result<FileId> {
        Ok(file.id)
    }

    fn identity(&self, name: Name) -> io::Result<Option<FileId>> {
        match self.step(Step::Identity(name))? {
            Answer::Identity(id) => Ok(id),
            other => panic!("{other:?} to a look"),
        }
    }

    fn exchange(&self) -> io::Result<()> {
        self.done(Step::Exchange)
    }

    fn move_aside(&self) -> io::Result<()> {
        self.done(Step::MoveAside)
    }

    fn put_back(&self) -> io::Result<()> {
        self.done(Step::PutBack)
    }

    fn remove(&self, name: Name) -> io::Result<()> {
        self.done(Step::Remove(name))
    }

    fn append(&self, file: &Open<'a>, line: &str) -> io::Result<()> {
        self.done(Step::Append(file.handle, line.as_bytes().to_vec()))
    }

    fn settle(&self, after: After) -> bool {
        after == After::Takeover
    }

    fn wait_for_undoing(&self, times: u32) -> bool {
        times < 1
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
    let is_stale = |content: &Content| replay.is_stale(content);
    let claim = Claim {
        record: &record,
        is_live,
        is_stale: &is_stale,
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
        let allows = |content: &Content, _: Locking| {
            let is_ours = content.bytes == ours.as_bytes();
            is_ours.then_some(()).ok_or(Obstacle::NotStale)
        };
        remove(&replay, &allows).map(drop)
    })
}

/// Removes the lock if it is stale, and takes nothing.
fn cleaner<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
    let allows = |content: &Content, locking: Locking| {
        let may = locking == Locking::Ours && replay.is_stale(content);
        may.then_some(()).ok_or(Obstacle::NotStale)
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
    replay.done(Step::Remove(Name::Lock))
}

/// Somebody who knows that the file was left by a process that is gone, and removes that file.
fn operator<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
    replay.done(Step::RemoveOnly(file_id((LONG_GONE, 0))))
}

/// Judge, remove, create: what most programs do.
fn naive_by_unlink<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
    if let Some(found) = replay.opened(Step::Open)? {
        if !replay.is_stale(&Files::read(&replay, &found)?) {
            return Ok(());
        }
        let _ = replay.done(Step::Remove(Name::Lock));
    }
    script(replay)
}

/// Look whether it is there, and rename one's own into its place.
fn naive_by_rename<'a>(replay: &'a Replay<'a>) -> io::Result<()> {
    let record = format!("pid={}\n", replay.process).into_bytes();
    let file = replay.opened(Step::Create(Name::Aside, record))?;
    if Files::identity(&replay, Name::Lock)?.is_some() {
        return replay.done(Step::Remove(Name::Aside));
    }
    replay.done(Step::Rename)?;
    drop(file);
    replay.hold()?;
    replay.done(Step::Remove(Name::Lock))
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
    }
}

/// Somebody who removes the file under a takeover may make it leave a name that is as good as dead; that is
/// what the stale timeout is for. But nobody gets a lock that another has.
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
        0,
    );
}

#[test]
fn a_file_system_that_cannot_exchange_is_safe_among_ourselves() {
    let lacks = Lacks {
        exchange: true,
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

#[test]
fn the_search_finds_what_each_part_of_the_takeover_is_for() {
    let no_locks = Lacks {
        locks: true,
        ..Lacks::default()
    };
    assert_caught(
        "without flock",
        &[guarded, guarded, guarded],
        STALE,
        no_locks,
        1,
    );
    let hasty = Lacks {
        patience: true,
        ..Lacks::default()
    };
    let with_foreigners: &[Program] = &[guarded, guarded, script, operator];
    assert_caught(
        "with the line of a live holder at once",
        with_foreigners,
        STALE,
        hasty,
        1,
    );
}
