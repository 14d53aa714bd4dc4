//! The log: lines to stderr that never make a lock wait.
//!
//! A line goes into a bounded channel, and a thread of its own writes it. If stderr is full and has
//! no reader, lines are dropped and counted; the count is written first when there is room again.

mod throttle;

use std::io::{self, Write};
use std::os::linux::fs::MetadataExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{bounded, Receiver, Sender};
use env_logger::{Builder, Target};
use log::LevelFilter;
use rustix::event::{poll, PollFd, PollFlags};
use rustix::io::Errno;

pub use throttle::{SourceThrottle, Throttle};

/// How many lines may wait for stderr.
const QUEUE_LEN: usize = 1024;

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
