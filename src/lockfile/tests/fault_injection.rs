//! The real steps with injected faults: each can be late, and each can be the last.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io;
use std::thread;
use std::time::Duration;

use rustix::process::{getpid, kill_process, Signal};

use super::*;
use crate::lockfile::files::LockFiles;
use crate::lockfile::takeover::{After, Creation, Files};
use crate::sys::directory::{Entry, FileId};

/// When a process dies.
#[derive(Clone, Copy, Debug)]
pub enum Death {
    Never,
    /// Before the step with this number, counted from 1.
    At(u64),
    /// Before one step in this many.
    Among(u64),
}

pub struct FaultyFiles<'a> {
    pub files: LockFiles<'a>,
    pub random: RefCell<Random>,
    /// The longest delay of a step, in microseconds.
    pub delay: u64,
    pub death: Death,
    /// Takes out the guard of the protocol: every process gets every flock. The tests must find two
    /// holders then.
    pub is_unguarded: bool,
    pub steps: Cell<u64>,
}

impl<'a> FaultyFiles<'a> {
    pub fn new(files: LockFiles<'a>, seed: u64, delay: u64, death: Death) -> FaultyFiles<'a> {
        FaultyFiles {
            files,
            random: RefCell::new(Random(seed)),
            delay,
            death,
            is_unguarded: false,
            steps: Cell::new(0),
        }
    }

    pub fn below(&self, limit: u64) -> u64 {
        self.random.borrow_mut().below(limit)
    }

    pub fn rest(&self) {
        if self.delay > 0 && self.below(2) == 0 {
            thread::sleep(Duration::from_micros(self.below(self.delay)));
        }
    }

    fn step(&self) {
        self.steps.set(self.steps.get() + 1);
        let is_the_last = match self.death {
            Death::Never => false,
            Death::At(step) => self.steps.get() == step,
            Death::Among(steps) => self.below(steps) == 0,
        };
        if is_the_last {
            // As by kill -9.
            let _ = kill_process(getpid(), Signal::KILL);
        }
        self.rest();
    }
}

impl Files for FaultyFiles<'_> {
    type File = File;

    fn creation(&self) -> io::Result<Creation> {
        self.files.creation()
    }

    fn create_linked(&self, record: &RecordFor<'_>) -> io::Result<Option<File>> {
        self.step();
        self.files.create_linked(record)
    }

    fn create_empty(&self) -> io::Result<Option<File>> {
        self.step();
        self.files.create_empty()
    }

    fn lock_new(&self, file: &File) -> io::Result<Option<HeldLocks>> {
        self.step();
        self.files.lock_new(file)
    }

    fn write(&self, file: &File, record: &[u8]) -> io::Result<()> {
        self.step();
        self.files.write(file, record)
    }

    fn is_mount_point(&self, file: &File) -> bool {
        self.files.is_mount_point(file)
    }

    fn pause(&self) {
        self.files.pause();
    }

    fn open(&self) -> io::Result<Entry> {
        self.step();
        self.files.open()
    }

    fn open_to_write(&self, file: &File) -> io::Result<Option<File>> {
        self.step();
        self.files.open_to_write(file)
    }

    fn may_rewrite(&self, file: &File) -> io::Result<bool> {
        self.files.may_rewrite(file)
    }

    fn lock(&self, file: &File, patience: Duration) -> io::Result<Flock> {
        self.step();
        if self.is_unguarded {
            return Ok(Flock::Acquired);
        }
        self.files.lock(file, patience)
    }

    fn read(&self, file: &File) -> io::Result<Content> {
        self.step();
        self.files.read(file)
    }

    fn id(&self, file: &File) -> io::Result<FileId> {
        self.files.id(file)
    }

    fn identity(&self) -> io::Result<Option<FileId>> {
        self.step();
        self.files.identity()
    }

    fn prepare(&self, record: &[u8]) -> io::Result<u32> {
        self.step();
        self.files.prepare(record)
    }

    fn rewrite(&self, file: &File, record: &[u8], mode: u32) -> io::Result<()> {
        self.step();
        self.files.rewrite(file, record, mode)
    }

    fn may_remove(&self) -> io::Result<bool> {
        self.files.may_remove()
    }

    fn remove(&self) -> io::Result<()> {
        self.step();
        self.files.remove()
    }

    fn wait_for_earlier_judges(&self, after: After) -> bool {
        self.step();
        self.files.wait_for_earlier_judges(after)
    }
}
