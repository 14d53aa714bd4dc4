//! Waiting for a lock on a separate thread, and a line on stderr that says what the program waits
//! for and who holds it.

use std::fmt::Display;
use std::io::{self, IsTerminal};
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::retry_on_intr;
use rustix::process::getpgrp;
use rustix::termios::{tcgetpgrp, tcgetwinsize};

use super::failure::Failure;
use crate::supervise::{Event, SignalWatch};

/// How long a program waits before it shows the line.
const FIRST_AFTER: Duration = Duration::from_secs(2);

/// The time between two updates of the line.
const INTERVAL: Duration = Duration::from_secs(10);

/// How long to wait for room on stderr, which may be a full pipe or a terminal stopped by Ctrl-S.
const ROOM_WAIT: Duration = Duration::from_millis(500);

/// Whether a program shows what it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verbosity {
    Never,
    /// Only if stderr is a terminal and this program is in its foreground, in one line that is
    /// removed at the end of the wait.
    OnTerminal,
    /// Even if stderr is not a terminal; the lines then stay.
    Always,
}

impl Verbosity {
    /// The verbosity that `--quiet` and `--verbose` ask for. If both are given, `--quiet` wins.
    pub fn of(is_quiet: bool, is_verbose: bool) -> Verbosity {
        match (is_quiet, is_verbose) {
            (true, _) => Verbosity::Never,
            (false, false) => Verbosity::OnTerminal,
            (false, true) => Verbosity::Always,
        }
    }
}

/// What can end a wait before the lock is granted.
pub struct Interrupts<'a> {
    pub signals: &'a mut SignalWatch,
    /// Set when the standard input is closed, which means that the caller no longer wants the lock.
    pub abandoned: Option<&'a Event>,
    /// The exit status if the standard input is closed.
    pub busy_status: u8,
    /// Tells the waiting thread to end and to drop whatever it has acquired. If this is `None`, the
    /// thread is left behind, and the end of this process closes its connection.
    pub cancel: Option<&'a Event>,
}

/// Runs `work`, which waits for the lock, on a new thread, while this thread handles signals.
/// `about` names the lock in the message, and `line` shows who holds it. If a signal and the grant
/// coincide, the signal wins.
pub fn wait_on_thread<T: Send + 'static>(
    about: impl Display,
    line: WaitingLine,
    interrupts: Interrupts<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    let is_over = Event::new().map_err(Failure::cannot_catch_signals)?;
    let over_setter = is_over.clone();
    let waiting = thread::Builder::new()
        .name("waiting".into())
        .spawn(move || {
            let result = work();
            over_setter.set();
            result
        })
        .map_err(Failure::cannot_start_thread)?;
    let events: Vec<&Event> = [&is_over].into_iter().chain(interrupts.abandoned).collect();
    let killed = interrupts.signals.wait_for(&events).err();
    drop(line);
    if killed.is_none() && is_over.is_set() {
        return Ok(waiting.join().expect("the thread does not panic"));
    }
    if let Some(cancel) = interrupts.cancel {
        cancel.set();
        drop(waiting.join());
    }
    Err(match killed {
        Some(killed) => Failure::silent(killed.follow()),
        None => Failure::new(
            interrupts.busy_status,
            format_args!("{about}: the standard input was closed before the grant"),
        ),
    })
}

/// Shows what the program waits for, first after two seconds and then every ten seconds. Dropping
/// it stops this, and removes the line from a terminal. The drop blocks for at most a second.
pub struct WaitingLine {
    /// Tells the thread that shows the line that the wait is over.
    over: Sender<()>,
    line: Arc<Mutex<Line>>,
}

/// The line that was written last. Its mutex is locked while a line is being written, which may
/// block.
#[derive(Default)]
struct Line {
    /// Whether a line is on the terminal.
    is_shown: bool,
    said: String,
}

impl WaitingLine {
    /// Calls `describe`, which may block, on a new thread. If no thread can be started, no line is
    /// shown.
    pub fn start(
        program: &'static str,
        talk: Verbosity,
        describe: impl Fn() -> String + Send + 'static,
    ) -> WaitingLine {
        let (over, is_over) = channel();
        let line = Arc::<Mutex<Line>>::default();
        let may_speak = talk == Verbosity::Always
            || (talk == Verbosity::OnTerminal && io::stderr().is_terminal());
        if may_speak {
            let line = Arc::clone(&line);
            let describe = move || format!("{program}: {}", describe());
            let _ = thread::Builder::new()
                .name("waiting-line".into())
                .spawn(move || speak(talk, describe, &is_over, &line));
        }
        WaitingLine { over, line }
    }
}

impl Drop for WaitingLine {
    fn drop(&mut self) {
        let _ = self.over.send(());
        let line = self.line.try_lock_for(ROOM_WAIT);
        if line.is_some_and(|line| line.is_shown) {
            write_if_room(b"\r\x1b[K");
        }
    }
}

fn speak(
    talk: Verbosity,
    describe: impl Fn() -> String,
    is_over: &Receiver<()>,
    line: &Mutex<Line>,
) {
    let mut pause = FIRST_AFTER;
    while is_over.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
        pause = INTERVAL;
        let is_on_terminal = has_terminal();
        if !is_on_terminal && talk != Verbosity::Always {
            continue;
        }
        let text = describe();
        let mut line = line.lock();
        // If the wait ends after this check, the drop removes the line.
        if is_over.try_recv() != Err(TryRecvError::Empty) {
            return;
        }
        let written = if is_on_terminal {
            format!("\r\x1b[K{}", fitting(&text))
        } else if line.said == text {
            continue;
        } else {
            format!("{text}\n")
        };
        if write_if_room(written.as_bytes()) {
            line.is_shown |= is_on_terminal;
            line.said = text;
        }
    }
}

/// Whether stderr is a terminal with this program in its foreground. A line from the background
/// would disturb what the user types.
fn has_terminal() -> bool {
    let stderr = io::stderr();
    stderr.is_terminal() && tcgetpgrp(&stderr).map_or(true, |group| group == getpgrp())
}

/// Writes to stderr, and returns whether there was room in time. Does not wait longer, because the
/// line must delay neither a grant nor a signal.
fn write_if_room(bytes: &[u8]) -> bool {
    let stderr = io::stderr();
    let within = Timespec::try_from(ROOM_WAIT).ok();
    let mut watched = [PollFd::new(&stderr, PollFlags::OUT)];
    let has_room = retry_on_intr(|| poll(&mut watched, within.as_ref())) == Ok(1);
    // Written without the standard library's lock of stderr, because every other message needs that
    // lock.
    has_room && rustix::io::write(&stderr, bytes).is_ok()
}

/// Cuts the text to the width of the terminal. The tags of other clients may have wide characters,
/// or characters that reverse the direction of the line; all of these become `?`.
fn fitting(text: &str) -> String {
    let columns = tcgetwinsize(io::stderr()).map_or(0, |size| usize::from(size.ws_col));
    // The last column stays free, because some terminals begin a new line after it.
    match columns.checked_sub(1) {
        Some(room) if room > 0 => {
            let is_narrow = |c: &char| matches!(*c, ' '..='~');
            let narrow = text
                .chars()
                .map(|c| Some(c).filter(is_narrow).unwrap_or('?'));
            narrow.take(room).collect()
        }
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quiet_wins_over_verbose() {
        assert_eq!(Verbosity::of(true, true), Verbosity::Never);
        assert_eq!(Verbosity::of(false, true), Verbosity::Always);
        assert_eq!(Verbosity::of(false, false), Verbosity::OnTerminal);
    }
}
