//! The log: writes lines to stderr, a file or the syslog, without delaying the threads that log.
//!
//! Lines go into a bounded channel, from which the writer thread writes them. If stderr is not read
//! or the disk is full, lines are dropped and counted. When there is room again, the number of
//! dropped lines is written first. [`Log::start`] and [`LineStart`] define the form of a line.

mod sink;
pub mod syslog;
mod throttle;

use std::ffi::OsString;
use std::fmt;
use std::io::{self, Write};
use std::os::linux::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use crossbeam_channel::{bounded, Receiver, Sender};
use env_logger::{Builder, Target};
use log::{Level, LevelFilter};

use crate::os::text::{invalid_value, reason, Utc};
pub use sink::LogTarget;
use sink::Sink;
pub use throttle::Throttle;

/// The maximum number of lines that wait for the writer thread.
pub const MAX_QUEUED_LINES: usize = 1024;

/// The maximum time to wait until the last lines have been written. It is long enough for a writer
/// thread on a busy machine, and passes in full only if nothing reads the lines.
const LAST_LINES: Duration = Duration::from_secs(2);

/// Whether each line begins with the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timestamps {
    /// Yes, unless the syslog or journald receives the lines, because these add the time
    /// themselves.
    Auto,
    Always,
    Never,
}

/// What is logged, in which form, and where.
#[derive(Clone, Debug)]
pub struct LogRules {
    pub directives: String,
    pub timestamps: Timestamps,
    pub target: LogTarget,
}

/// The directives for env_logger, which say which lines are logged: the level debug if `debug` is
/// set, or else the value of RUST_LOG, or else none, which means the default. Fails if RUST_LOG is
/// malformed. Without this check, env_logger would complain on stderr, or panic if it could not.
pub fn directives(debug: bool, rust_log: Option<OsString>) -> Result<String, String> {
    const EXPECTED: &str = "expected error, warn, info, debug, trace, off or module=level";
    if debug {
        return Ok(LevelFilter::Debug.to_string());
    }
    let directives = rust_log.unwrap_or_default().into_string();
    let directives = directives.map_err(|_| "RUST_LOG: the value is not UTF-8")?;
    match env_filter::Builder::new().try_parse(&directives) {
        Ok(_) => Ok(directives),
        Err(_) => Err(invalid_value(&directives, "RUST_LOG", EXPECTED)),
    }
}

/// A handle to the running log. Keep it for [`Log::flush`], [`Log::reopen`] and
/// [`Log::dropped_count`].
#[derive(Clone, Debug)]
pub struct Log {
    messages: Sender<Message>,
    shared: Arc<WriterStatus>,
}

/// State shared with the writer thread.
#[derive(Debug, Default)]
struct WriterStatus {
    must_reopen: AtomicBool,
    /// The number of lines dropped since the start.
    dropped_count: AtomicUsize,
}

/// A message to the writer thread.
#[derive(Debug)]
enum Message {
    Line(Vec<u8>),
    /// The writer drops the sender when it has written all earlier lines. That closes the channel,
    /// and [`Log::flush`] returns.
    Flush(Sender<()>),
    /// Wakes the writer to reopen the file. It does not matter if the queue is full and this
    /// message is lost, because any message in the queue wakes the writer.
    Reopen,
}

impl Log {
    /// A log that drops all lines, for a server whose stderr is a client's socket.
    pub fn silent() -> Log {
        Log::with_queue(0).0
    }

    /// A log with a queue of `len` messages, and the receiver of that queue.
    fn with_queue(len: usize) -> (Log, Receiver<Message>) {
        let (sender, messages) = bounded(len);
        let log = Log {
            messages: sender,
            shared: Arc::default(),
        };
        (log, messages)
    }

    /// Starts the log of `program` and its writer thread. May be called only once in a process.
    /// Fails if the log file cannot be opened or the thread cannot be started.
    pub fn start(program: &'static str, rules: &LogRules) -> io::Result<Log> {
        let sink = Sink::open(&rules.target)?;
        let start = LineStart {
            syslog_name: (rules.target == LogTarget::Syslog).then_some(program),
            has_time: rules.has_timestamps(),
        };
        let (log, messages) = Log::with_queue(MAX_QUEUED_LINES);
        let writer = LogWriter {
            is_torn: sink.ends_torn(),
            sink,
            start,
            shared: Arc::clone(&log.shared),
            reported_count: 0,
        };
        thread::Builder::new()
            .name("log".into())
            .stack_size(128 * 1024)
            .spawn(move || writer.run(&messages))?;

        let mut builder = Builder::new();
        builder.filter_level(LevelFilter::Info);
        builder.parse_filters(&rules.directives);
        builder.format(move |line, record| {
            start.write(record.level(), line)?;
            writeln!(line, "{}", record.args())
        });
        builder.target(Target::Pipe(Box::new(log.clone())));
        builder.init();
        Ok(log)
    }

    /// Waits until all earlier lines have been written, for at most two seconds. Called before the
    /// process ends.
    pub fn flush(&self) {
        let deadline = Instant::now() + LAST_LINES;
        let (flush, flushed) = bounded(0);
        let _ = self.messages.send_deadline(Message::Flush(flush), deadline);
        let _ = flushed.recv_deadline(deadline);
    }

    /// Asks the writer to reopen the log file by its path, and returns at once. Does nothing if the
    /// log does not go to a file.
    pub fn reopen(&self) {
        self.shared.must_reopen.store(true, Ordering::Relaxed);
        let _ = self.messages.try_send(Message::Reopen);
    }

    /// The number of lines dropped since the start.
    pub fn dropped_count(&self) -> usize {
        self.shared.dropped_count.load(Ordering::Relaxed)
    }
}

#[derive(Clone, Copy)]
struct LineStart {
    /// The program's name, if the syslog receives the line.
    syslog_name: Option<&'static str>,
    has_time: bool,
}

impl LineStart {
    fn write(self, level: Level, line: &mut impl Write) -> io::Result<()> {
        if let Some(program) = self.syslog_name {
            line.write_all(syslog::header(program, level).as_bytes())?;
        }
        if self.has_time {
            write!(line, "{} ", Utc(SystemTime::now()))?;
        }
        write!(line, "{level} ")
    }
}

struct LogWriter {
    sink: Sink,
    /// Whether the sink has taken only a part of the previous line.
    is_torn: bool,
    start: LineStart,
    shared: Arc<WriterStatus>,
    /// The number of dropped lines that have been reported.
    reported_count: usize,
}

impl LogWriter {
    /// Writes lines until the process ends. Lines that the sink does not take are lost.
    fn run(mut self, messages: &Receiver<Message>) {
        for message in messages {
            if self.shared.must_reopen.swap(false, Ordering::Relaxed) {
                match self.sink.reopen() {
                    Ok(true) => self.is_torn = self.sink.ends_torn(),
                    Ok(false) => {}
                    Err(error) => {
                        let why = reason(&error);
                        let is_put = self.warn(format_args!("cannot-reopen-log error=\"{why}\""));
                        self.count_unless(is_put);
                    }
                }
            }
            match message {
                Message::Line(line) => self.write(&line),
                Message::Flush(flush) => drop(flush),
                Message::Reopen => {}
            }
        }
    }

    /// Writes a line. If lines were lost before it, first writes their number.
    fn write(&mut self, line: &[u8]) {
        let dropped_count = self.shared.dropped_count.load(Ordering::Relaxed);
        let dropped = dropped_count.wrapping_sub(self.reported_count);
        if dropped > 0 && self.warn(format_args!("log-lines-lost dropped={dropped}")) {
            self.reported_count = dropped_count;
        }
        let is_put = self.put(line);
        self.count_unless(is_put);
    }

    /// Counts a line as lost unless the sink took it.
    fn count_unless(&self, is_put: bool) {
        if !is_put {
            self.shared.dropped_count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Writes a warning of the log itself, and returns whether the sink took it.
    fn warn(&mut self, text: fmt::Arguments<'_>) -> bool {
        let mut line = Vec::new();
        let written = self.start.write(Level::Warn, &mut line);
        written.and_then(|()| writeln!(line, "{text}")).is_ok() && self.put(&line)
    }

    /// Writes a line, and returns whether the sink took it. If the previous line was cut short,
    /// ends that line first.
    fn put(&mut self, line: &[u8]) -> bool {
        if self.is_torn && self.sink.write(b"\n") == 0 {
            return false;
        }
        let written_len = self.sink.write(line);
        self.is_torn = (1..line.len()).contains(&written_len);
        written_len == line.len()
    }
}

/// env_logger writes each line to the log with one call.
impl Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if let Err(_full) = self.messages.try_send(Message::Line(line.to_vec())) {
            self.shared.dropped_count.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl LogRules {
    fn has_timestamps(&self) -> bool {
        match (self.timestamps, &self.target) {
            (Timestamps::Always, _) => true,
            (Timestamps::Never, _) | (Timestamps::Auto, LogTarget::Syslog) => false,
            (Timestamps::Auto, LogTarget::File(_)) => true,
            (Timestamps::Auto, LogTarget::Stderr) => !journald_reads_stderr(),
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
    use std::fs::{self, File};

    #[test]
    fn a_malformed_rust_log_is_refused_unless_it_is_overruled() {
        use std::os::unix::ffi::OsStringExt;
        let read = |debug, rust_log: &str| directives(debug, Some(rust_log.into()));
        for fit in [
            "",
            "warn",
            "OFF",
            "latchd=debug,info",
            "latchd::net=trace/peer",
        ] {
            assert_eq!(read(false, fit).as_deref(), Ok(fit));
        }
        for malformed in ["latchd=loud", "latchd=info=x", "a/b/c", "info,x=\ny"] {
            let message = read(false, malformed).expect_err(malformed);
            let start = format!(
                "invalid value '{}' for RUST_LOG: ",
                malformed.escape_default()
            );
            assert!(message.starts_with(&start), "{message}");
            assert_eq!(read(true, malformed).as_deref(), Ok("DEBUG"));
        }
        let not_text = directives(false, Some(OsString::from_vec(vec![0xFF])));
        assert_eq!(not_text, Err("RUST_LOG: the value is not UTF-8".into()));
        assert_eq!(directives(false, None).as_deref(), Ok(""));
    }

    /// A log with room for one message, and what writes it to `sink`.
    fn log_to(sink: Sink) -> (Log, LogWriter, Receiver<Message>) {
        let (log, messages) = Log::with_queue(1);
        let writer = LogWriter {
            sink,
            is_torn: false,
            start: LineStart {
                syslog_name: None,
                has_time: false,
            },
            shared: Arc::clone(&log.shared),
            reported_count: 0,
        };
        (log, writer, messages)
    }

    #[test]
    fn the_number_of_lost_lines_is_logged_once() {
        let directory = tempfile::tempdir().expect("there is room");
        let path = directory.path().join("log");
        let sink = Sink::open(&LogTarget::File(path.clone())).expect("there is room");
        let (log, mut writer, _) = log_to(sink);
        log.shared.dropped_count.store(3, Ordering::Relaxed);
        writer.write(b"one\n");
        writer.write(b"two\n");
        log.shared.dropped_count.store(5, Ordering::Relaxed);
        writer.write(b"three\n");
        let expected = "WARN log-lines-lost dropped=3\none\ntwo\n\
                        WARN log-lines-lost dropped=2\nthree\n";
        assert_eq!(fs::read_to_string(&path).expect("it is there"), expected);
    }

    #[test]
    fn a_lost_complaint_about_a_reopening_is_counted() {
        let full = File::options().append(true).open("/dev/full");
        let sink = Sink::File("/nowhere/log".into(), full.expect("Linux has it"));
        let (log, writer, messages) = log_to(sink);
        let shared = Arc::clone(&log.shared);
        log.reopen();
        drop(log);
        writer.run(&messages);
        assert_eq!(shared.dropped_count.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_line_torn_before_a_reopening_spoils_no_other() {
        let directory = tempfile::tempdir().expect("there is room");
        let path = directory.path().join("log");
        for (is_renamed, expected) in [(true, "next\n"), (false, "torn\nnext\n")] {
            fs::write(&path, "torn").expect("there is room");
            let sink = Sink::open(&LogTarget::File(path.clone())).expect("there is room");
            let (log, mut writer, messages) = log_to(sink);
            writer.is_torn = true;
            let line = Message::Line(b"next\n".to_vec());
            log.messages.send(line).expect("the queue has room");
            if is_renamed {
                fs::rename(&path, directory.path().join("log.1")).expect("it is there");
            }
            log.reopen();
            drop(log);
            writer.run(&messages);
            assert_eq!(fs::read_to_string(&path).expect("it is there"), expected);
        }
    }

    #[test]
    fn a_reopening_behind_a_full_queue_is_not_lost() {
        let directory = tempfile::tempdir().expect("there is room");
        let path = directory.path().join("log");
        let sink = Sink::open(&LogTarget::File(path.clone())).expect("there is room");
        let (log, writer, messages) = log_to(sink);
        log.messages
            .send(Message::Line(b"line\n".to_vec()))
            .expect("the queue has room");
        fs::rename(&path, directory.path().join("log.1")).expect("it is there");
        log.reopen();
        drop(log);
        writer.run(&messages);
        assert_eq!(fs::read_to_string(&path).expect("a new file"), "line\n");
    }
}
