//! The log: lines to stderr that never make a lock wait.
//!
//! A line goes into a bounded channel, and a thread of its own writes it. Where stderr is full and
//! nobody reads it, lines are dropped and counted; the count is the first thing to be written when
//! there is room again.

use std::io::{self, Write};
use std::os::linux::fs::MetadataExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crossbeam_channel::{bounded, Receiver, Sender, TrySendError};
use env_logger::{Builder, Target};
use log::LevelFilter;
use parking_lot::{Condvar, Mutex};

/// The lines that may wait for stderr.
const QUEUE_LEN: usize = 1024;

/// Whether lines begin with the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timestamps {
    /// Unless journald reads stderr and adds its own.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// How much is logged, and how.
#[derive(Clone, Copy, Debug)]
pub struct LogRules {
    /// Log the life of connections too, whatever RUST_LOG says.
    pub debug: bool,
    /// Whether lines begin with the time.
    pub timestamps: Timestamps,
}

/// The running log. Keep it for [`Log::flush`].
pub struct Log {
    queue: Arc<Queue>,
}

struct Queue {
    pending: Mutex<usize>,
    written: Condvar,
    dropped: AtomicUsize,
}

impl Log {
    /// Starts the log and its writer thread. To be called once in a process.
    ///
    /// # Errors
    ///
    /// If no thread can be had.
    pub fn start(rules: LogRules) -> io::Result<Log> {
        let (sender, lines) = bounded(QUEUE_LEN);
        let queue = Arc::new(Queue {
            pending: Mutex::new(0),
            written: Condvar::new(),
            dropped: AtomicUsize::new(0),
        });
        let writer = Arc::clone(&queue);
        thread::Builder::new()
            .name("log".into())
            .stack_size(128 * 1024)
            .spawn(move || writer.write_all(&lines))?;

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
        builder.target(Target::Pipe(Box::new(LogLines {
            lines: sender,
            queue: Arc::clone(&queue),
        })));
        builder.init();
        Ok(Log { queue })
    }

    /// Waits until the lines so far have been written, for at most `limit`.
    pub fn flush(&self, limit: Duration) {
        let mut pending = self.queue.pending.lock();
        self.queue
            .written
            .wait_while_for(&mut pending, |pending| *pending > 0, limit);
    }
}

impl Queue {
    /// The writer thread: until the process ends. What stderr does not take is lost, and that is
    /// all that a log can do about it.
    fn write_all(&self, lines: &Receiver<Vec<u8>>) {
        let mut stderr = io::stderr();
        for line in lines {
            let dropped = self.dropped.swap(0, Ordering::Relaxed);
            if dropped > 0 {
                let _ = writeln!(stderr, "WARN log-lines-lost dropped={dropped}");
            }
            let _ = stderr.write_all(&line);
            *self.pending.lock() -= 1;
            self.written.notify_all();
        }
    }
}

/// Where env_logger puts its lines: one write each.
struct LogLines {
    lines: Sender<Vec<u8>>,
    queue: Arc<Queue>,
}

impl Write for LogLines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        *self.queue.pending.lock() += 1;
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) =
            self.lines.try_send(line.to_vec())
        {
            *self.queue.pending.lock() -= 1;
            self.queue.dropped.fetch_add(1, Ordering::Relaxed);
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
