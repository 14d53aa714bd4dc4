//! A daemon to test against and a client to test it with.
//!
//! Everything here is bounded in time: a server that hangs fails its test, it does not hold it up.

// Each test file compiles its own copy of this module and uses only a part of it.
#![allow(dead_code, unreachable_pub)]

pub mod amount;
pub mod at_the_end;
pub mod barrier;
pub mod callgrind;
pub mod clock;
pub mod cluster;
pub mod footprint;
pub mod group;
pub mod history;
pub mod hosts;
pub mod inherited;
pub mod latch;
pub mod limited;
pub mod locks;
pub mod mounts;
pub mod needs;
pub mod random;
#[cfg(feature = "programs")]
pub mod silent;
pub mod stalls;
pub mod syslog;
pub mod terminal;
#[cfg(feature = "tls")]
pub mod tls;
pub mod transcript;
pub mod tunnel;
pub mod wire_cutter;

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{mpsc, Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Pid;
pub use rustix::process::Signal;

/// How long anything may take for which no test states a shorter time: much longer than on any
/// machine, and shorter than the default lease.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// How long a server may take to start, be it under valgrind and beside many others.
const START_PATIENCE: Duration = Duration::from_secs(180);

const POLL_INTERVAL: Duration = Duration::from_millis(3);

/// The path of a program of this package: the one that cargo has built, or the one in the folder
/// that `LATCHD_TEST_PROGRAMS` names.
pub fn program(name: &str) -> &'static str {
    let built = match name {
        "latch" => env!("CARGO_BIN_EXE_latch"),
        "latchd" => env!("CARGO_BIN_EXE_latchd"),
        "lfpd" => env!("CARGO_BIN_EXE_lfpd"),
        "sema" => env!("CARGO_BIN_EXE_sema"),
        _ => panic!("no program is called {name}"),
    };
    match &*needs::GIVEN_PROGRAMS {
        Some(folder) => format!("{}/{name}", folder.display()).leak(),
        None => built,
    }
}

// ---------------------------------------------------------------------------------------------
// The daemon

/// What the clients of a daemon speak on its TCP port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    Plain,
    #[cfg(feature = "tls")]
    Tls,
}

impl Scheme {
    /// Whether this machine has what servers of this scheme need: TLS needs a certificate. If not,
    /// leaves a note.
    pub fn is_available(self) -> bool {
        match self {
            Scheme::Plain => true,
            #[cfg(feature = "tls")]
            Scheme::Tls => needs::programs(["openssl"]).is_some(),
        }
    }
}

/// A running `latchd`, killed when dropped.
pub struct Daemon {
    child: Mutex<Child>,
    pid: u32,
    scheme: Scheme,
    port: Option<u16>,
    log: Arc<Log>,
    /// Another server, through which the clients of this one come.
    standby: Option<Box<Daemon>>,
}

impl Daemon {
    /// Starts a daemon on a free port of 127.0.0.1 with `args` added, and waits until it listens.
    pub fn start(args: &[&str]) -> Daemon {
        Daemon::start_over(Scheme::Plain, args)
    }

    /// Starts a daemon as [`Daemon::start`] does, whose clients speak `scheme`.
    pub fn start_over(scheme: Scheme, args: &[&str]) -> Daemon {
        let mut daemon = Daemon::start_directly(scheme, args);
        if let Some((command, port)) = cluster::standby(&daemon, args) {
            let standby = Daemon::from_command(command);
            standby.wait_for_log("standby active=", START_PATIENCE);
            standby.wait_for_log("listening ", START_PATIENCE);
            daemon.port = Some(port);
            daemon.standby = Some(Box::new(standby));
        }
        daemon
    }

    /// Starts a daemon as [`Daemon::start_over`] does, whose clients never come through another
    /// server. For tests that would mean something else there; tests/standby names them.
    pub fn start_directly(scheme: Scheme, args: &[&str]) -> Daemon {
        let mut command = Daemon::command();
        if let Some(port) = cluster::journal(&mut command, args) {
            command.args(args);
            let mut daemon = Daemon::from_command(command);
            daemon.port = Some(port);
            daemon.wait_for_log("active epoch=", START_PATIENCE);
            return daemon;
        }
        command.args(["--port", "0", "--print-port"]).args(args);
        #[cfg(feature = "tls")]
        if scheme == Scheme::Tls {
            command.args(tls::common().options());
        }
        let mut daemon = Daemon::from_command(command);
        daemon.scheme = scheme;
        daemon
    }

    /// Starts a daemon as [`Daemon::start`] does that is no server of a cluster. For tests in which
    /// the end of the server is the loss of its locks.
    pub fn start_alone(args: &[&str]) -> Daemon {
        let mut command = Daemon::command();
        command.args(["--port", "0", "--print-port"]).args(args);
        Daemon::from_command(command)
    }

    /// Starts a daemon which listens on the socket at `path` only, and waits until it does.
    pub fn start_unix(path: &Path, args: &[&str]) -> Daemon {
        let mut command = Daemon::command();
        command
            .args(["--port", "off", "--unix"])
            .arg(path)
            .args(args);
        let daemon = Daemon::from_command(command);
        eventually(PATIENCE, "the Unix socket answers", || {
            UnixStream::connect(path).is_ok()
        });
        daemon
    }

    /// Gives a command which runs `latchd` without arguments. Stdin is empty, stdout and stderr are
    /// collected unless set otherwise.
    pub fn command() -> Command {
        Daemon::command_of(program("latchd"))
    }

    /// The same of another program, which starts `latchd` or becomes it.
    pub fn command_of(program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        // The daemon would warn of the variables of the tests.
        for (name, _) in std::env::vars_os() {
            if inherited::is_of_tests(&name.to_string_lossy()) {
                command.env_remove(name);
            }
        }
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Starts `command`. If `--print-port` is among its arguments, waits for the port.
    pub fn from_command(mut command: Command) -> Daemon {
        let prints_port = command.get_args().any(|arg| arg == "--print-port");
        let mut child = command
            .spawn()
            .expect("latchd was built by cargo beside this test");
        let log = Arc::new(Log::default());
        match child.stderr.take() {
            Some(stderr) => log.collect(stderr),
            None => log.complete.store(true, Ordering::Release), // it goes elsewhere
        }
        let printed = child.stdout.take().map(first_line);
        let mut daemon = Daemon {
            pid: child.id(),
            child: Mutex::new(child),
            port: None,
            scheme: Scheme::Plain,
            log,
            standby: None,
        };
        if prints_port {
            daemon.port =
                Some(daemon.read_port(printed.expect("stdout is needed for --print-port")));
        }
        daemon
    }

    fn read_port(&self, printed: mpsc::Receiver<String>) -> u16 {
        let Ok(line) = printed.recv_timeout(START_PATIENCE) else {
            self.wait_exit(Duration::from_secs(1));
            panic!("latchd printed no port; its log:\n{}", self.log());
        };
        line.trim()
            .parse()
            .unwrap_or_else(|_| panic!("not a port: {line:?}; log:\n{}", self.log()))
    }

    /// The TCP port that clients use. Panics for a daemon which was not asked to print it.
    pub fn port(&self) -> u16 {
        self.port.expect("started with --print-port")
    }

    /// Where the daemon listens, if it was left on 127.0.0.1.
    pub fn addr(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port()))
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Opens a connection.
    pub fn connect(&self) -> Client {
        Client::open(self.scheme, self.addr())
    }

    /// Sends a signal; nothing happens if the daemon is already gone. SIGSTOP has stopped all its
    /// threads when this returns: they answer for a while on a busy machine.
    pub fn signal(&self, signal: Signal) {
        use rustix::process::{kill_process, waitid, WaitId, WaitIdOptions};
        let mut child = self.child.lock().unwrap();
        // Once it is reaped, its pid may belong to a stranger.
        if matches!(child.try_wait(), Ok(None)) {
            let pid = Pid::from_child(&child);
            kill_process(pid, signal).expect("a child of ours can be signalled");
            if signal == Signal::STOP {
                waitid(WaitId::Pid(pid), WaitIdOptions::STOPPED).expect("it stops");
            }
        }
    }

    /// Waits for the end of the process; `None` if it is still running after `limit`.
    pub fn wait_exit(&self, limit: Duration) -> Option<ExitStatus> {
        // Another thread may send a signal in between.
        let look = || self.child.lock().unwrap().try_wait();
        let status = poll_for(limit, || look().expect("it is our child"))?;
        self.log.wait_complete(PATIENCE / 6);
        Some(status)
    }

    /// What the daemon has written to stderr so far.
    pub fn log(&self) -> String {
        self.log.text.lock().unwrap().clone()
    }

    /// Waits until `text` is in the log; panics if it does not within `limit`.
    pub fn wait_for_log(&self, text: &str, limit: Duration) {
        self.wait_for_logs(text, 1, limit);
    }

    /// Waits until `text` is in the log so many times; panics if it is not `within` the time given.
    pub fn wait_for_logs(&self, text: &str, times: usize, within: Duration) {
        let is_there = || self.log().matches(text).count() >= times;
        assert!(
            is_soon(within, is_there),
            "not {times} times {text:?} in the log within {within:?}:\n{}",
            self.log()
        );
    }

    /// Asks for the statistics over a connection of its own, which they count.
    pub fn stats(&self) -> serde_json::Value {
        self.connect().stats()
    }

    /// Waits until `count` clients wait for `key`.
    pub fn wait_for_waiters(&self, key: &str, count: u64) {
        let mut client = self.connect();
        eventually(PATIENCE, &format!("{count} waiters for {key}"), || {
            waiter_count(&client.stats(), key) == count
        });
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let child = self
            .child
            .get_mut()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        // Both fail only if it has ended by itself, which is as good.
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// How many wait for `key` by the word of `stats`, be it a lock or a semaphore.
pub fn waiter_count(stats: &serde_json::Value, key: &str) -> u64 {
    let listed = ["locks", "semaphores"]
        .iter()
        .filter_map(|list| stats[list].as_array())
        .flatten();
    listed
        .filter(|entry| entry["key"] == key)
        .filter_map(|entry| entry["waiters"].as_u64())
        .sum()
}

/// Stderr of the daemon, read by a thread so that the pipe never fills up.
#[derive(Default)]
struct Log {
    text: Mutex<String>,
    complete: AtomicBool,
}

impl Log {
    fn collect(self: &Arc<Self>, mut stderr: impl Read + Send + 'static) {
        let log = Arc::clone(self);
        thread::spawn(move || {
            let mut chunk = [0; 4096];
            while let Ok(count @ 1..) = stderr.read(&mut chunk) {
                let text = String::from_utf8_lossy(&chunk[..count]).into_owned();
                log.text.lock().unwrap().push_str(&text);
            }
            log.complete.store(true, Ordering::Release);
        });
    }

    fn wait_complete(&self, limit: Duration) {
        is_soon(limit, || self.complete.load(Ordering::Acquire));
    }
}

/// Delivers the first line of `stdout`, if there is one, and then reads on to its end: a closed
/// pipe would be an error for whatever the daemon prints later.
fn first_line(stdout: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut stdout = BufReader::new(stdout);
        let mut line = String::new();
        if matches!(stdout.read_line(&mut line), Ok(1..)) {
            // No test listens if the daemon was not asked for its port.
            let _ = sender.send(line);
        }
        let _ = io::copy(&mut stdout, &mut io::sink());
    });
    receiver
}

// ---------------------------------------------------------------------------------------------
// The client

/// A grant as the client sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    pub token: String,
    /// In seconds.
    pub lease: u64,
}

/// What came next from the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A line, without its LF.
    Line(Vec<u8>),
    /// The end of the stream after a whole line, or after nothing.
    Eof,
    /// The end of the stream in the middle of a line.
    Torn(Vec<u8>),
    /// The connection was reset.
    Reset,
    /// Nothing within the time given.
    Nothing,
}

/// One connection to a server.
pub struct Client {
    stream: Stream,
    /// Received and not yet handed out.
    received: Vec<u8>,
}

impl Client {
    /// Connects over TCP, and speaks `scheme`.
    pub fn open(scheme: Scheme, addr: SocketAddr) -> Client {
        match scheme {
            Scheme::Plain => Client::tcp(addr),
            #[cfg(feature = "tls")]
            Scheme::Tls => {
                let Stream::Tcp(socket) = Client::tcp(addr).stream else {
                    unreachable!("it is a TCP stream");
                };
                let stream = tls::TlsClient::over(socket)
                    .unwrap_or_else(|error| panic!("no TLS with {addr}: {error}"));
                Client::over(Stream::Tls(stream))
            }
        }
    }

    /// Connects over TCP.
    pub fn tcp(addr: SocketAddr) -> Client {
        let stream = TcpStream::connect_timeout(&addr, PATIENCE)
            .unwrap_or_else(|error| panic!("cannot connect to {addr}: {error}"));
        // Each write is to arrive as written, not joined with the next.
        stream.set_nodelay(true).expect("TCP knows TCP_NODELAY");
        Client::over(Stream::Tcp(stream))
    }

    /// Connects over TCP from another address of this host.
    pub fn tcp_from(source: [u8; 4], addr: SocketAddr) -> Client {
        use rustix::net::{bind, connect, socket, AddressFamily, SocketType};
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a descriptor");
        bind(&socket, &SocketAddr::from((source, 0))).expect("the host has the address");
        connect(&socket, &addr).unwrap_or_else(|error| panic!("cannot connect: {error}"));
        Client::over(Stream::Tcp(socket.into()))
    }

    /// Connects over TCP; `None` if the server does not listen.
    pub fn try_tcp(addr: SocketAddr) -> Option<Client> {
        let stream = TcpStream::connect_timeout(&addr, PATIENCE).ok()?;
        stream.set_nodelay(true).ok()?;
        Some(Client::over(Stream::Tcp(stream)))
    }

    /// Connects to a Unix socket.
    pub fn unix(path: &Path) -> Client {
        let stream = UnixStream::connect(path)
            .unwrap_or_else(|error| panic!("cannot connect to {}: {error}", path.display()));
        Client::over(Stream::Unix(stream))
    }

    /// Connects to a Unix socket; `None` if no server listens.
    pub fn try_unix(path: &Path) -> Option<Client> {
        let stream = UnixStream::connect(path).ok()?;
        Some(Client::over(Stream::Unix(stream)))
    }

    fn over(stream: Stream) -> Client {
        stream
            .set_write_timeout(PATIENCE)
            .expect("the timeout is not zero");
        Client {
            stream,
            received: Vec::new(),
        }
    }

    /// Writes `text` in one go.
    pub fn send(&mut self, text: &str) {
        self.send_bytes(text.as_bytes());
    }

    /// Writes `bytes` in one go.
    pub fn send_bytes(&mut self, bytes: &[u8]) {
        self.try_send(bytes)
            .unwrap_or_else(|error| panic!("cannot send {}: {error}", shown(bytes)));
    }

    /// Writes `bytes` in one go, to a server which may be gone.
    pub fn try_send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// A second handle which can write while this one reads.
    pub fn writer(&self) -> Box<dyn Write + Send> {
        match &self.stream {
            Stream::Tcp(stream) => Box::new(stream.try_clone().expect("descriptors are left")),
            Stream::Unix(stream) => Box::new(stream.try_clone().expect("descriptors are left")),
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => Box::new(stream.clone()),
        }
    }

    /// Waits for a line or the end, for at most `limit`.
    pub fn next_event(&mut self, limit: Duration) -> Event {
        let deadline = Deadline::after(limit);
        let mut chunk = [0; 16 * 1024];
        let mut searched = 0;
        loop {
            let unsearched = &self.received[searched..];
            if let Some(at) = unsearched.iter().position(|&byte| byte == b'\n') {
                let length = searched + at;
                let mut line: Vec<u8> = self.received.drain(..=length).collect();
                line.pop();
                return Event::Line(line);
            }
            searched = self.received.len();
            if deadline.is_over() && limit > Duration::ZERO {
                return Event::Nothing;
            }
            // A timeout of zero would mean "for ever" to the kernel.
            let patience = deadline.remaining().max(Duration::from_millis(1));
            self.stream
                .set_read_timeout(patience)
                .expect("the timeout is not zero");
            match self.stream.read(&mut chunk) {
                Ok(0) if self.received.is_empty() => return Event::Eof,
                Ok(0) => return Event::Torn(std::mem::take(&mut self.received)),
                Ok(count) => self.received.extend_from_slice(&chunk[..count]),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                        if limit == Duration::ZERO =>
                    {
                        return Event::Nothing;
                    }
                    io::ErrorKind::WouldBlock
                    | io::ErrorKind::TimedOut
                    | io::ErrorKind::Interrupted => {}
                    // The end of a TLS stream that was not announced is none in good order.
                    io::ErrorKind::ConnectionReset
                    | io::ErrorKind::BrokenPipe
                    | io::ErrorKind::UnexpectedEof => return Event::Reset,
                    _ => panic!("cannot read from the server: {error}"),
                },
            }
        }
    }

    /// The next `count` bytes, whatever they are; fewer if no more come within `limit`.
    pub fn next_bytes(&mut self, count: usize, limit: Duration) -> Vec<u8> {
        let deadline = Deadline::after(limit);
        let mut chunk = [0; 1024];
        while self.received.len() < count && !deadline.is_over() {
            // A timeout of zero would mean "for ever" to the kernel.
            let patience = deadline.remaining().max(Duration::from_millis(1));
            self.stream
                .set_read_timeout(patience)
                .expect("the timeout is not zero");
            match self.stream.read(&mut chunk) {
                Ok(count @ 1..) => self.received.extend_from_slice(&chunk[..count]),
                // A read with a timeout is not begun again after a signal.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => break,
            }
        }
        let count = count.min(self.received.len());
        self.received.drain(..count).collect()
    }

    /// The next reply line without its LF; panics if none comes in time.
    pub fn line(&mut self) -> String {
        match self.next_event(PATIENCE) {
            Event::Line(line) => text(line),
            other => panic!("expected a reply line, got {}", described(&other)),
        }
    }

    /// The next reply line if it comes within `limit`; panics if the stream ends instead.
    pub fn try_line(&mut self, limit: Duration) -> Option<String> {
        match self.next_event(limit) {
            Event::Line(line) => Some(text(line)),
            Event::Nothing => None,
            other => panic!(
                "expected a reply line or silence, got {}",
                described(&other)
            ),
        }
    }

    /// Reads a line, which must be exactly `reply`.
    pub fn expect(&mut self, reply: &str) {
        let line = self.line();
        assert_eq!(line, reply, "the server's reply is not the expected one");
    }

    /// Waits for the end of the stream; a reply or a reset before it is a failure.
    pub fn expect_eof(&mut self) {
        let event = self.next_event(PATIENCE);
        assert_eq!(
            event,
            Event::Eof,
            "expected the end of the stream, got {}",
            described(&event)
        );
    }

    /// Insists on silence for `time`, with the connection left open.
    pub fn nothing_within(&mut self, time: Duration) {
        let event = self.next_event(time);
        assert_eq!(
            event,
            Event::Nothing,
            "expected silence, got {}",
            described(&event)
        );
    }

    /// Sends one request in one write and gives its reply.
    pub fn request(&mut self, command: &str, key: &str, argument: &str) -> String {
        self.send(&format!("{command}\n{key}\n{argument}\n"));
        self.line()
    }

    /// Takes the lock `key`, waiting for at most `wait_timeout` seconds; panics unless granted.
    pub fn acquire(&mut self, key: &str, wait_timeout: u64) -> Grant {
        let reply = self.request("l", key, &wait_timeout.to_string());
        parse_grant(&reply, "ok").unwrap_or_else(|| panic!("no grant of {key}: {reply:?}"))
    }

    /// Takes the lock `key` with a lease of `lease` seconds; panics unless granted.
    pub fn acquire_for(&mut self, key: &str, wait_timeout: u64, lease: u64) -> Grant {
        let reply = self.request("l", key, &format!("{wait_timeout} {lease}"));
        parse_grant(&reply, "ok").unwrap_or_else(|| panic!("no grant of {key}: {reply:?}"))
    }

    /// The server's statistics.
    pub fn stats(&mut self) -> serde_json::Value {
        let reply = self.request("stats", "_", "_");
        let json = reply
            .strip_prefix("ok ")
            .unwrap_or_else(|| panic!("no statistics: {reply:?}"));
        serde_json::from_str(json).unwrap_or_else(|error| panic!("no JSON: {error}: {json}"))
    }

    /// Says that nothing more will be sent (a FIN), and goes on listening.
    pub fn half_close(&mut self) {
        // Fails only if the server has closed already, which the next read will show.
        let _ = match &self.stream {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Stream::Unix(stream) => stream.shutdown(Shutdown::Write),
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => stream.half_close(),
        };
    }

    /// Ends the connection with an RST instead of a FIN, and at once: a socket that is closed stays
    /// open while a process that another thread starts has a copy.
    pub fn reset(self) {
        rustix::net::connect_unspec(&self.stream).expect("a TCP socket can be disconnected");
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Reads `<word> <token> <lease>`, to the byte as existing clients do.
pub fn parse_grant(reply: &str, word: &str) -> Option<Grant> {
    let (token, lease) = reply
        .strip_prefix(word)?
        .strip_prefix(' ')?
        .split_once(' ')?;
    let is_token = token.len() == 32
        && token
            .bytes()
            .all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    let is_count = !lease.is_empty() && lease.bytes().all(|byte| byte.is_ascii_digit());
    (is_token && is_count).then(|| Grant {
        token: token.to_owned(),
        lease: lease.parse().unwrap_or(u64::MAX),
    })
}

/// The half of a token which orders grants.
pub fn fence(token: &str) -> u64 {
    let digits = token
        .get(..16)
        .unwrap_or_else(|| panic!("not a token: {token:?}"));
    u64::from_str_radix(digits, 16).unwrap_or_else(|_| panic!("not a token: {token:?}"))
}

/// `bytes` in one readable line: what is not printable ASCII is escaped.
pub fn shown(bytes: &[u8]) -> String {
    let mut shown = String::new();
    for &byte in bytes {
        match byte {
            b'\n' => shown.push_str("\\n"),
            b'\r' => shown.push_str("\\r"),
            b'\t' => shown.push_str("\\t"),
            b'\\' => shown.push_str("\\\\"),
            b' '..=b'~' => shown.push(char::from(byte)),
            _ => shown.push_str(&format!("\\x{byte:02x}")),
        }
    }
    shown
}

/// An event in words, for messages.
pub fn described(event: &Event) -> String {
    match event {
        Event::Line(line) => format!("the line \"{}\"", shown(line)),
        Event::Eof => "the end of the stream".to_owned(),
        Event::Torn(bytes) => format!(
            "the end of the stream after \"{}\" without LF",
            shown(bytes)
        ),
        Event::Reset => "a connection reset".to_owned(),
        Event::Nothing => "nothing".to_owned(),
    }
}

fn text(line: Vec<u8>) -> String {
    String::from_utf8(line).unwrap_or_else(|error| panic!("a reply which is not UTF-8: {error}"))
}

enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
    #[cfg(feature = "tls")]
    Tls(tls::TlsClient),
}

impl Stream {
    fn set_read_timeout(&self, timeout: Duration) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.set_read_timeout(Some(timeout)),
            Stream::Unix(stream) => stream.set_read_timeout(Some(timeout)),
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => stream.set_read_timeout(timeout),
        }
    }

    fn set_write_timeout(&self, timeout: Duration) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.set_write_timeout(Some(timeout)),
            Stream::Unix(stream) => stream.set_write_timeout(Some(timeout)),
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => stream.set_write_timeout(timeout),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Tcp(stream) => stream.as_fd(),
            Stream::Unix(stream) => stream.as_fd(),
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => stream.as_fd(),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.read(buffer),
            Stream::Unix(stream) => stream.read(buffer),
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => stream.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.write(bytes),
            Stream::Unix(stream) => stream.write(bytes),
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(()) // neither kind keeps anything back
    }
}

// ---------------------------------------------------------------------------------------------
// Time

/// A point in time after which waiting ends.
#[derive(Debug, Clone, Copy)]
pub struct Deadline(Instant);

impl Deadline {
    /// The deadline `limit` from now.
    pub fn after(limit: Duration) -> Deadline {
        Deadline(Instant::now() + limit)
    }

    /// What is left of it; zero when it is over.
    pub fn remaining(&self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    /// Whether nothing is left.
    pub fn is_over(&self) -> bool {
        self.remaining().is_zero()
    }
}

/// Waits until `holds` is true, looking every few milliseconds; panics if it is not so `within` the
/// time given. `what` finishes the sentence "it did not come true that …".
pub fn eventually(within: Duration, what: &str, holds: impl FnMut() -> bool) {
    assert!(
        is_soon(within, holds),
        "it did not come true within {within:?} that {what}"
    );
}

/// Whether `holds` becomes true `within` the time given. Looks every few milliseconds.
pub fn is_soon(within: Duration, mut holds: impl FnMut() -> bool) -> bool {
    poll_for(within, || holds().then_some(())).is_some()
}

/// What `look` finds `within` the time given. Looks at once, and then every few milliseconds.
pub fn poll_for<T>(within: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Deadline::after(within);
    loop {
        let found = look();
        if found.is_some() || deadline.is_over() {
            return found;
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Waits until a thread of this process sleeps, as it does while it waits for an event.
pub fn wait_until_asleep(thread: Pid) {
    let stat = format!("/proc/self/task/{}/stat", thread.as_raw_nonzero());
    eventually(PATIENCE, "the thread sleeps", || {
        std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") S "))
    });
}

/// How a child ends; it is killed, and the test fails, if it does not `within` the time given.
pub fn wait_for_exit(child: &mut Child, within: Duration) -> ExitStatus {
    let status = poll_for(within, || child.try_wait().expect("it is our child"));
    status.unwrap_or_else(|| {
        // Fails only if it has ended since.
        let _ = child.kill();
        panic!("process {} is still running after {within:?}", child.id())
    })
}

/// The rows of a table of command lines: the arguments, and what is after the bar. In an argument,
/// `\s` is a blank and `\e` an escape; `''` is an empty one. What begins with `#` is a comment.
pub fn rows_of(table: &str) -> impl Iterator<Item = (Vec<String>, &str)> {
    let rows = table.lines().filter(|row| !row.starts_with('#'));
    rows.map(|row| {
        let (words, text) = row.split_once("| ").expect("two columns");
        let word = |word: &str| match word {
            "''" => String::new(),
            word => word.replace("\\s", " ").replace("\\e", "\x1b"),
        };
        (words.split_whitespace().map(word).collect(), text)
    })
}

/// What proc(5) has of a process from its state on: that, its parent, its group, its session, its
/// terminal, the group which has that, and so on. `None` if the process is gone.
pub fn stat_of(pid: u32) -> Option<Vec<String>> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Its name may have anything in it.
    let (_, after_name) = stat.rsplit_once(") ")?;
    Some(after_name.split_whitespace().map(str::to_owned).collect())
}

/// The standard input of a program that needs none: the null device, or a line and the end for
/// `hold`, which refuses an input at its end.
pub fn no_input(arguments: &[&str]) -> Stdio {
    let command = arguments.iter().find(|word| !word.starts_with('-'));
    if command != Some(&"hold") {
        return Stdio::null();
    }
    let (mut ours, its) = UnixStream::pair().expect("descriptors are left");
    ours.write_all(b"\n").expect("there is room");
    OwnedFd::from(its).into()
}

/// The processes that `parent` has started and not reaped yet.
pub fn children_of(parent: u32) -> Vec<Pid> {
    let parent = parent.to_string();
    let processes = std::fs::read_dir("/proc").expect("it is Linux").flatten();
    processes
        .filter_map(|process| process.file_name().to_str()?.parse().ok())
        .filter(|&pid| stat_of(pid).is_some_and(|fields| fields[1] == parent))
        .filter_map(|pid| Pid::from_raw(i32::try_from(pid).ok()?))
        .collect()
}

/// Waits for a second in which each of these processes takes no more processor time than `most`.
/// A process may still be busy with what went before; one that spins never has such a second.
pub fn come_to_rest(pids: &[u32], most: Duration) {
    let times = || pids.iter().copied().map(processor_time);
    let mut spent = Duration::MAX;
    for _ in 0..10 {
        let before: Vec<Duration> = times().collect();
        thread::sleep(Duration::from_secs(1));
        let taken = times().zip(before).map(|(after, before)| after - before);
        spent = taken.max().expect("there is a process");
        if spent <= most {
            return;
        }
    }
    panic!("{spent:?} of processor time in a second of silence: it spins");
}

/// What the process has used so far, in its own code and in the kernel.
pub fn processor_time(pid: u32) -> Duration {
    let fields = stat_of(pid).expect("the process is there");
    let ticks: u64 = fields[11..=12]
        .iter()
        .map(|ticks| ticks.parse::<u64>().expect("a number"))
        .sum();
    Duration::from_millis(ticks * 10) // a tick is 10 ms wherever Linux runs
}
