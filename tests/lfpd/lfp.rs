//! An `lfpd` to test against, and a stand-in for the one client that is in use.

// Each test file compiles its own copy of this module and uses only a part of it.
#![allow(dead_code, unreachable_pub)]

use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::limited::{behind, with_surroundings_of};
use crate::support::{program, Client, Daemon, PATIENCE};

pub const OKAY: &str = "200 Command okay.\r";
pub const BUSY: &str = "450 : File busy\r";
pub const DENIED: &str = "550 : Permission denied.\r";

/// Sends a line, and reads the reply.
pub fn ask(client: &mut Client, line: &str) -> String {
    client.send(&format!("{line}\n"));
    client.line()
}

/// A running `lfpd` with lock directories of its own.
pub struct Lfpd {
    pub daemon: Daemon,
    dirs: tempfile::TempDir,
}

impl Lfpd {
    /// Starts a server on a free port of 127.0.0.1.
    pub fn start(args: &[&str]) -> Lfpd {
        let dirs = lock_dirs();
        let mut command = command(dirs.path());
        command
            .args(["--listen", "127.0.0.1:0", "--print-port"])
            .args(args);
        Lfpd {
            daemon: Daemon::from_command(command),
            dirs,
        }
    }

    /// Starts one behind `wrapper`, a command that limits it and then becomes it.
    pub fn start_behind(wrapper: &[&str]) -> Lfpd {
        let dirs = lock_dirs();
        let plain = command(dirs.path());
        let mut limited = behind(wrapper, &plain);
        limited.args(["--listen", "127.0.0.1:0", "--print-port"]);
        Lfpd {
            daemon: Daemon::from_command(with_surroundings_of(&plain, limited)),
            dirs,
        }
    }

    /// Opens a connection and reads the greeting.
    pub fn connect(&self) -> Client {
        let mut client = self.daemon.connect();
        greeted(&mut client);
        client
    }

    pub fn addr(&self) -> SocketAddr {
        self.daemon.addr()
    }

    /// The path of a lock file in the server's own directory.
    pub fn lock_file(&self, name: &str) -> PathBuf {
        self.dirs.path().join("own").join(name)
    }

    /// The path of a lock file in another directory.
    pub fn other_file(&self, name: &str) -> PathBuf {
        self.dirs.path().join("other").join(name)
    }

    /// What is in the server's own directory.
    pub fn files(&self) -> Vec<String> {
        names_in(&self.dirs.path().join("own"))
    }
}

/// Two empty directories, `own` and `other`.
pub fn lock_dirs() -> tempfile::TempDir {
    // In memory if possible: each lock is synced, and a busy disk takes its time for that.
    let dirs = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
    let dirs = dirs.expect("a directory");
    for name in ["own", "other"] {
        fs::create_dir(dirs.path().join(name)).expect("a directory");
    }
    dirs
}

/// Gives a command which runs `lfpd` on the lock directories below `dirs`.
pub fn command(dirs: &Path) -> Command {
    let mut command = Command::new(program("lfpd"));
    for name in [
        "LISTEN_FDS",
        "LISTEN_PID",
        "LISTEN_FDNAMES",
        "RUST_LOG",
        "JOURNAL_STREAM",
    ] {
        command.env_remove(name);
    }
    command
        .arg("--lock-dir")
        .arg(dirs.join("own"))
        .arg("--search-dirs")
        .arg(dirs.join("other"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

pub fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).expect("a directory");
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("an entry").file_name())
        .map(|name| name.to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Reads the greeting.
pub fn greeted(client: &mut Client) {
    let greeting = client.line();
    assert!(
        greeting.starts_with("220 ") && greeting.ends_with(") ready\r"),
        "{greeting:?}"
    );
}

/// The number of a process that was, and is not any more.
pub fn dead_pid() -> u32 {
    let mut child = Command::new("true").spawn().expect("true");
    child.wait().expect("its end");
    child.id()
}

/// A process that is there until this is dropped.
pub struct Alive(Child);

impl Alive {
    pub fn new() -> Alive {
        Alive::as_user(rustix::process::geteuid().as_raw())
    }

    /// One of this user.
    pub fn as_user(user: u32) -> Alive {
        let mut sleep = Command::new("sleep");
        Alive(sleep.arg("600").uid(user).spawn().expect("sleep"))
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The client of rxtx, byte for byte: a connection for each command, of whose answer it reads the
/// first byte only.
pub struct Rxtx {
    pub server: SocketAddr,
}

/// What came of a call of the client.
pub struct Call {
    pub succeeded: bool,
    /// From before it connected until it had sent its command; for a lock, until it had the
    /// greeting.
    pub sent_after: Duration,
}

impl Rxtx {
    /// Waits for a greeting, whatever it says; sends, and looks at the first byte of the answer.
    pub fn lock(&self, device: &str, pid: u32) -> io::Result<Call> {
        let started = Instant::now();
        let mut socket = self.connect()?;
        first_byte(&mut socket)?;
        let sent_after = started.elapsed();
        socket.write_all(format!("lock {device} {pid}\n").as_bytes())?;
        let succeeded = first_byte(&mut socket)? == Some(b'2');
        let _ = socket.write_all(b"quit\n");
        Ok(Call {
            succeeded,
            sent_after,
        })
    }

    /// Sends, and takes the greeting for the answer.
    pub fn unlock(&self, device: &str, pid: u32) -> io::Result<Call> {
        let started = Instant::now();
        let mut socket = self.connect()?;
        socket.write_all(format!("unlock {device} {pid}\n").as_bytes())?;
        let sent_after = started.elapsed();
        let succeeded = first_byte(&mut socket)? == Some(b'2');
        let _ = socket.write_all(b"quit\n");
        Ok(Call {
            succeeded,
            sent_after,
        })
    }

    fn connect(&self) -> io::Result<TcpStream> {
        let socket = TcpStream::connect(self.server)?;
        // The real one would wait for ever.
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(socket)
    }
}

/// One `recv` of 1024 bytes.
fn first_byte(socket: &mut TcpStream) -> io::Result<Option<u8>> {
    let mut buffer = [0; 1024];
    let len = loop {
        match socket.read(&mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            read => break read?,
        }
    };
    Ok(buffer[..len].first().copied())
}
