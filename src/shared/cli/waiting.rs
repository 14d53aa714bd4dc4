//! Waiting for a lock on a separate thread, and a line on stderr that says what the program waits
//! for and who holds it.

use std::fmt::Display;
use std::io::{self, IsTerminal};
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::retry_on_intr;
use rustix::process::getpgrp;
use rustix::termios::{tcgetpgrp, tcgetwinsize};

use super::failure::Failure;
use crate::shared::supervise::{Event, SignalWatch};

/// How long a program waits before it shows the line.
const FIRST_AFTER: Duration = Duration::from_secs(2);

/// The time between two updates of the line.
const INTERVAL: Duration = Duration::from_secs(10);

/// The wait after which the line is shown even if nobody may be there to read it.
const LONG_WAIT: Duration = Duration::from_secs(600);

/// How long to wait for room on stderr, which may be a full pipe or a terminal stopped by Ctrl-S.
const ROOM_WAIT: Duration = Duration::from_millis(500);

/// Whether a program shows what it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verbosity {
    Never,
    /// If stderr is a terminal and this program is in its foreground, in one line that is removed
    /// at the end of the wait. Otherwise once, after a long wait.
    OnTerminal,
    /// As `Always`, and almost at once.
    AtOnce,
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

    /// Whether a note reaches a person, or a script that asks for it.
    pub fn is_heard(self) -> bool {
        self.is_asked_for() || (self == Verbosity::OnTerminal && io::stderr().is_terminal())
    }

    fn is_asked_for(self) -> bool {
        matches!(self, Verbosity::AtOnce | Verbosity::Always)
    }

    /// Whether to say after this time what the program waits for.
    fn is_due(self, is_on_terminal: bool, waited: Duration, is_said: bool) -> bool {
        is_on_terminal || self.is_asked_for() || (waited >= LONG_WAIT && !is_said)
    }
}

/// Runs `work`, which waits for the lock, on a new thread, while this thread handles signals.
/// `about` names the lock in the message, and `line` shows who holds it. If a signal and the grant
/// coincide, the signal wins. The wait also ends, with the status `busy_status`, when `abandoned`
/// is set because the standard input was closed. If the wait ends without the lock, `give_up` gets
/// the thread.
pub fn wait_on_thread<T: Send + 'static>(
    about: impl Display,
    line: WaitingLine,
    signals: &mut SignalWatch,
    (abandoned, busy_status): (Option<&Event>, u8),
    work: impl FnOnce() -> T + Send + 'static,
    give_up: impl FnOnce(JoinHandle<T>),
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
    let events: Vec<&Event> = [&is_over].into_iter().chain(abandoned).collect();
    let killed = signals.wait_for(&events).err();
    drop(line);
    if killed.is_none() && is_over.is_set() {
        return Ok(waiting.join().expect("the thread does not panic"));
    }
    give_up(waiting);
    Err(match killed {
        Some(killed) => Failure::silent(killed.follow()),
        None => Failure::new(
            busy_status,
            format_args!("{about}: the standard input was closed before the grant"),
        ),
    })
}

/// Shows what the program waits for, first after two seconds and then every ten seconds, or once
/// after a long wait. Dropping it stops this, and removes the line from a terminal. The drop blocks
/// for at most a second.
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
        if talk != Verbosity::Never {
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
    let began = Instant::now();
    let mut pause = FIRST_AFTER / if talk == Verbosity::AtOnce { 10 } else { 1 };
    while is_over.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
        pause = INTERVAL;
        let is_on_terminal = has_terminal();
        let is_said = !line.lock().said.is_empty();
        if !talk.is_due(is_on_terminal, began.elapsed(), is_said) {
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
    #[test]
    fn a_long_wait_is_said_once_to_nobody_in_particular() {
        let talk = Verbosity::OnTerminal;
        let early = LONG_WAIT - INTERVAL;
        assert!(!talk.is_due(false, early, false));
        assert!(talk.is_due(false, LONG_WAIT, false));
        assert!(!talk.is_due(false, 2 * LONG_WAIT, true));
        assert!(talk.is_due(true, early, true));
        assert!(Verbosity::Always.is_due(false, early, true));
    }
}
