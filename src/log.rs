//! The log: lines to stderr that never make a lock wait.
//!
//! A line goes into a bounded channel, and a thread of its own writes it. If stderr is full and has
//! no reader, lines are dropped and counted; the count is written first when there is room again.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::io::{self, Write};
use std::os::linux::fs::MetadataExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{bounded, Receiver, Sender};
use env_logger::{Builder, Target};
use log::{log, Level, LevelFilter};
use parking_lot::Mutex;
use rustix::event::{poll, PollFd, PollFlags};
use rustix::io::Errno;

/// How many lines may wait for stderr.
const QUEUE_LEN: usize = 1024;

/// The least time between two lines of one throttle.
const THROTTLE: Duration = Duration::from_secs(1);

/// How many sources have a throttle of their own.
const MAX_SOURCES: usize = 64;

/// Whether lines begin with the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timestamps {
    /// Unless journald reads stderr and adds its own.
    Auto,
    Always,
    Never,
}

/// How much is logged, and how.
#[derive(Clone, Copy, Debug)]
pub struct LogRules {
    /// Log the life of connections too, whatever RUST_LOG says.
    pub debug: bool,
    pub timestamps: Timestamps,
}

/// The running log. Keep it for [`Log::flush`].
pub struct Log(Option<Sender<Message>>);

/// What the writer thread receives.
enum Message {
    Line(Vec<u8>),
    /// The writer drops it, and so closes its channel.
    Flush(Sender<()>),
}

impl Log {
    /// A log that says nothing, for a server whose stderr is a client's socket.
    pub fn silent() -> Log {
        Log(None)
    }

    /// Starts the log and its writer thread. Call it once in a process.
    pub fn start(rules: LogRules) -> io::Result<Log> {
        let (sender, messages) = bounded(QUEUE_LEN);
        let dropped_count = Arc::new(AtomicUsize::new(0));
        let lines = LogLines {
            messages: sender.clone(),
            dropped_count: Arc::clone(&dropped_count),
        };
        thread::Builder::new()
            .name("log".into())
            .stack_size(128 * 1024)
            .spawn(move || write_all(&messages, &dropped_count))?;

        let mut builder = Builder::new();
        builder.filter_level(LevelFilter::Info);
        if rules.debug {
            builder.filter_level(LevelFilter::Debug);
        } else {
            builder.parse_env("RUST_LOG");
        }
        let with_time = rules.timestamps.apply();
        builder.format(move |line, record| {
            if with_time {
                write!(line, "{} ", line.timestamp())?;
            }
            writeln!(line, "{} {}", record.level(), record.args())
        });
        builder.target(Target::Pipe(Box::new(lines)));
        builder.init();
        Ok(Log(Some(sender)))
    }

    /// Waits until the lines so far have been written, for at most `limit`.
    pub fn flush(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let (flush, flushed) = bounded(0);
        if let Some(messages) = &self.0 {
            let _ = messages.send_deadline(Message::Flush(flush), deadline);
            let _ = flushed.recv_deadline(deadline);
        }
    }
}

/// Lets one line through each second and counts the others, so that a peer cannot flood the log.
#[derive(Debug, Default)]
pub struct Throttle(Mutex<Throttled>);

#[derive(Debug, Default)]
struct Throttled {
    last: Option<Instant>,
    held_back: u64,
}

impl Throttle {
    /// Warns, if a line may be logged now, and adds how many were held back since the last one.
    pub fn warn(&self, line: fmt::Arguments<'_>) {
        if let Some(held_back) = self.admit_at(Instant::now()) {
            log!(Level::Warn, "{line} held_back={held_back}");
        }
    }

    fn admit_at(&self, now: Instant) -> Option<u64> {
        self.0.lock().admit(now)
    }
}

impl Throttled {
    fn admit(&mut self, now: Instant) -> Option<u64> {
        if self.is_held_back(now) {
            self.held_back += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.held_back))
    }

    fn is_held_back(&self, now: Instant) -> bool {
        self.last.is_some_and(|last| now - last < THROTTLE)
    }
}

/// A [`Throttle`] for each source, so that none hides another. Beyond a number of active sources,
/// the others share one.
#[derive(Debug)]
pub struct SourceThrottle<S>(Mutex<Sources<S>>);

#[derive(Debug)]
struct Sources<S> {
    known: HashMap<S, Throttled>,
    others: Throttled,
}

impl<S: Eq + Hash> SourceThrottle<S> {
    /// Warns about `source` as [`Throttle::warn`] does.
    pub fn warn(&self, line: fmt::Arguments<'_>, source: S) {
        if let Some(held_back) = self.admit_at(source, Instant::now()) {
            log!(Level::Warn, "{line} held_back={held_back}");
        }
    }

    fn admit_at(&self, source: S, now: Instant) -> Option<u64> {
        let mut sources = self.0.lock();
        let Sources { known, others } = &mut *sources;
        if known.len() >= MAX_SOURCES && !known.contains_key(&source) {
            known.retain(|_, throttled| {
                let stays = throttled.is_held_back(now);
                others.held_back += if stays { 0 } else { throttled.held_back };
                stays
            });
            if known.len() >= MAX_SOURCES {
                return others.admit(now);
            }
        }
        known.entry(source).or_default().admit(now)
    }
}

impl<S> Default for SourceThrottle<S> {
    fn default() -> Self {
        SourceThrottle(Mutex::new(Sources {
            known: HashMap::new(),
            others: Throttled::default(),
        }))
    }
}

/// The writer thread, which runs until the process ends. Lines that stderr refuses are lost.
fn write_all(messages: &Receiver<Message>, dropped_count: &AtomicUsize) {
    for message in messages {
        let line = match message {
            Message::Line(line) => line,
            Message::Flush(flush) => {
                drop(flush);
                continue;
            }
        };
        let dropped = dropped_count.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            let notice = format!("WARN log-lines-lost dropped={dropped}\n");
            if write_to_stderr(notice.as_bytes()).is_err() {
                dropped_count.fetch_add(dropped, Ordering::Relaxed);
            }
        }
        if write_to_stderr(&line).is_err() {
            dropped_count.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Writes all of it. Waits for room even if another process has made stderr non-blocking.
fn write_to_stderr(mut bytes: &[u8]) -> io::Result<()> {
    let stderr = io::stderr();
    while !bytes.is_empty() {
        match rustix::io::write(&stderr, bytes) {
            Ok(len) => bytes = &bytes[len..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                poll(&mut [PollFd::new(&stderr, PollFlags::OUT)], None)?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// The target of env_logger, which writes each line with one call.
struct LogLines {
    messages: Sender<Message>,
    dropped_count: Arc<AtomicUsize>,
}

impl Write for LogLines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self
            .messages
            .try_send(Message::Line(line.to_vec()))
            .is_err()
        {
            self.dropped_count.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Timestamps {
    fn apply(self) -> bool {
        match self {
            Timestamps::Always => true,
            Timestamps::Never => false,
            Timestamps::Auto => !journald_reads_stderr(),
        }
    }
}

/// Whether JOURNAL_STREAM names the device and inode of our stderr.
fn journald_reads_stderr() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else {
        return false;
    };
    let stderr = std::fs::metadata("/proc/self/fd/2");
    stderr.is_ok_and(|stderr| stream == format!("{}:{}", stderr.st_dev(), stderr.st_ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_one_line_a_second_and_a_count() {
        let throttle = Throttle::default();
        let start = Instant::now();
        assert_eq!(throttle.admit_at(start), Some(0));
        for millis in 1..1000 {
            assert_eq!(
                throttle.admit_at(start + Duration::from_millis(millis)),
                None
            );
        }
        assert_eq!(throttle.admit_at(start + THROTTLE), Some(999));
        assert_eq!(throttle.admit_at(start + 5 * THROTTLE), Some(0));
    }

    #[test]
    fn no_source_hides_another_and_their_number_is_bounded() {
        let throttle = SourceThrottle::default();
        let start = Instant::now();
        let count = MAX_SOURCES as u64;
        for source in 0..count {
            assert_eq!(throttle.admit_at(source, start), Some(0), "{source}");
            assert_eq!(throttle.admit_at(source, start), None, "{source}");
        }
        assert_eq!(throttle.admit_at(count, start), Some(0));
        assert_eq!(throttle.admit_at(count + 1, start), None);
        assert_eq!(throttle.0.lock().known.len(), MAX_SOURCES);
        let later = start + THROTTLE;
        assert_eq!(throttle.admit_at(0, later), Some(1));
        assert_eq!(throttle.admit_at(1000, later), Some(0));
        let sources = throttle.0.lock();
        assert_eq!(sources.known.len(), 2);
        // One of source `count + 1`, and those of the sources that were forgotten.
        assert_eq!(sources.others.held_back, count);
    }
}
