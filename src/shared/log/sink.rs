//! The targets of log lines: stderr, a file, or the syslog.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::event::{poll, PollFd, PollFlags};
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::syslog::{Syslog, SOCKET};
use crate::os::directory::FileId;
use crate::os::trusted;

/// The mode of a new log file, before the umask.
const FILE_MODE: u32 = 0o640;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LogTarget {
    #[default]
    Stderr,
    Syslog,
    File(PathBuf),
}

impl LogTarget {
    /// The target that `--log` or `--log-file` asks for.
    pub fn of_options(log: Option<&LogTarget>, file: Option<&Path>) -> LogTarget {
        match file {
            Some(path) => LogTarget::File(path.to_owned()),
            None => log.cloned().unwrap_or_default(),
        }
    }

    /// The target that `--log` names.
    pub fn parse(text: &str) -> Result<LogTarget, String> {
        match text {
            "stderr" => Ok(LogTarget::Stderr),
            "syslog" => Ok(LogTarget::Syslog),
            _ => Err("expected stderr or syslog".into()),
        }
    }
}

pub enum Sink {
    Stderr,
    Syslog(Syslog),
    File(PathBuf, File),
}

impl Sink {
    pub fn open(target: &LogTarget) -> io::Result<Sink> {
        Ok(match target {
            LogTarget::Stderr => Sink::Stderr,
            LogTarget::Syslog => Sink::Syslog(Syslog::new(SOCKET)?),
            LogTarget::File(path) => Sink::File(path.clone(), open_file(path)?),
        })
    }

    /// Whether the file ends within a line, because the previous server was killed or the disk was
    /// full.
    pub fn ends_torn(&self) -> bool {
        match self {
            Sink::File(path, file) => last_byte(path, file).is_ok_and(|last| last != b'\n'),
            Sink::Stderr | Sink::Syslog(_) => false,
        }
    }

    /// Opens the log file again by its path. Returns `false` if the log does not go to a file. If
    /// opening fails, the old file stays in use.
    pub fn reopen(&mut self) -> io::Result<bool> {
        let Sink::File(path, file) = self else {
            return Ok(false);
        };
        *file = open_file(path)?;
        Ok(true)
    }

    /// Writes a whole line, which must end with a line feed, and returns how many bytes the target
    /// has taken. Blocks while the target has no room.
    pub fn write(&self, line: &[u8]) -> usize {
        match self {
            Sink::Stderr => write_all(&io::stderr(), line),
            Sink::File(_, file) => write_all(file, line),
            Sink::Syslog(syslog) => {
                let sent = syslog.send(line.strip_suffix(b"\n").unwrap_or(line));
                sent.map_or(0, |()| line.len())
            }
        }
    }
}

/// Opens a file to append to. Fails at once for a FIFO without a reader.
fn open_file(path: &Path) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE;
    trusted::open(path, flags, FILE_MODE)
}

/// The last byte of a file. Opens the file again, because `file` is open only for writing.
fn last_byte(path: &Path, file: &File) -> io::Result<u8> {
    let metadata = file.metadata()?;
    // Only a regular file can be read without side effects.
    let at = match metadata.len().checked_sub(1) {
        Some(at) if metadata.is_file() => at,
        _ => return Err(io::ErrorKind::UnexpectedEof.into()),
    };
    let mut last = [0];
    let again = trusted::open(path, OFlags::RDONLY, 0)?;
    if FileId::of(&again)? != FileId::of(file)? {
        return Err(io::ErrorKind::NotFound.into());
    }
    again.read_exact_at(&mut last, at)?;
    Ok(last[0])
}

/// Writes all of `bytes`, or as much as the target takes before an error, and returns how much.
/// Waits for room even if the descriptor is non-blocking, because another process may have made
/// stderr non-blocking.
fn write_all(target: &impl AsFd, bytes: &[u8]) -> usize {
    let mut written_len = 0;
    while written_len < bytes.len() {
        match rustix::io::write(target, &bytes[written_len..]) {
            Ok(len) => written_len += len,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if poll(&mut [PollFd::new(target, PollFlags::OUT)], None).is_ok() => {
            }
            Err(_) => break,
        }
    }
    written_len
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::thread;

    #[test]
    fn a_descriptor_made_non_blocking_loses_nothing() {
        let (mut reader, writer) = UnixStream::pair().expect("a socket pair");
        writer.set_nonblocking(true).expect("it is open");
        let line = b"x".repeat(1 << 20);
        let len = line.len();
        let written = thread::spawn(move || write_all(&writer, &line));
        let mut received = Vec::new();
        reader.read_to_end(&mut received).expect("the line");
        assert_eq!(
            (written.join().expect("it ends"), received.len()),
            (len, len)
        );
    }
}
