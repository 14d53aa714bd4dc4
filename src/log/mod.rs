//! The log: lines to stderr, a file or the syslog that never make a lock wait.
//!
//! A line goes into a bounded channel, and a thread of its own writes it. If stderr is full and has
//! no reader, or the disk is full, lines are dropped and counted; how many is written first when
//! there is room again. The form of a line is in [`Log::start`] and
//! [`LineStart`].

mod sink;
pub mod syslog;
mod throttle;
mod utc;

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

use crate::text::{invalid_value, reason};
pub use sink::LogTarget;
use sink::Sink;
pub use throttle::{SourceThrottle, Throttle};
use utc::Utc;

/// How many lines may wait for the writer.
pub const MAX_QUEUED_LINES: usize = 1024;

/// How long the last lines may take to be written. It is that long only where nobody reads them,
/// and long enough for a writer thread that a busy machine keeps waiting.
const LAST_LINES: Duration = Duration::from_secs(2);

/// Whether lines begin with the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timestamps {
    /// Unless the syslog or journald receives them, which add their own.
    Auto,
    Always,
    Never,
}

/// How much is logged, how, and where.
#[derive(Clone, Debug)]
pub struct LogRules {
    pub directives: String,
    pub timestamps: Timestamps,
    pub target: LogTarget,
}

/// Which lines are logged, in the words of env_logger: down to debug, or as the variable RUST_LOG
/// says, or by default. Fails if RUST_LOG is malformed: env_logger would say so on stderr, and
/// panic where it cannot.
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
    /// The lines dropped since the start.
    dropped_count: AtomicUsize,
}

/// What the writer thread receives.
#[derive(Debug)]
enum Message {
    Line(Vec<u8>),
    /// The writer drops it, and so closes its channel.
    Flush(Sender<()>),
    /// Wakes the writer to reopen the file. If the queue is full, any message in it does so.
    Reopen,
}

impl Log {
    /// A log that says nothing, for a server whose stderr is a client's socket.
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

    /// Starts the log of `program` and its writer thread. Call it once in a process. Fails if the
    /// file cannot be opened, or the thread cannot be started.
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

    /// Waits until all lines so far have been written, for two seconds at most. For the end of the
    /// process.
    pub fn flush(&self) {
        let deadline = Instant::now() + LAST_LINES;
        let (flush, flushed) = bounded(0);
        let _ = self.messages.send_deadline(Message::Flush(flush), deadline);
        let _ = flushed.recv_deadline(deadline);
    }

    /// Asks the writer to reopen the log file by its path, and returns at once. Does nothing for
    /// other targets.
    pub fn reopen(&self) {
        self.shared.must_reopen.store(true, Ordering::Relaxed);
        let _ = self.messages.try_send(Message::Reopen);
    }

    /// How many lines have been dropped since the start.
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
    /// The sink has taken only a part of the last line.
    is_torn: bool,
    start: LineStart,
    shared: Arc<WriterStatus>,
    /// How many of the dropped lines have been reported.
    reported_count: usize,
}

impl LogWriter {
    /// Runs until the process ends. Lines that the sink refuses are lost.
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

    /// Writes a line, and before it the number of lost ones.
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

    /// Writes a line of its own, and returns whether the sink took it.
    fn warn(&mut self, text: fmt::Arguments<'_>) -> bool {
        let mut line = Vec::new();
        let written = self.start.write(Level::Warn, &mut line);
        written.and_then(|()| writeln!(line, "{text}")).is_ok() && self.put(&line)
    }

    /// Writes a line behind the end of the last one, and returns whether the sink took it.
    fn put(&mut self, line: &[u8]) -> bool {
        if self.is_torn && self.sink.write(b"\n") == 0 {
            return false;
        }
        let written_len = self.sink.write(line);
        self.is_torn = (1..line.len()).contains(&written_len);
        written_len == line.len()
    }
}

/// The target of env_logger, which writes each line with one call.
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
