//! The servers that are compared, and how each is asked for a lock.
//!
//! Every server is a process of its own on a free port of the loopback interface, and keeps nothing
//! on disk. It ends when its `Server` is dropped.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{kill_process, Pid, Signal};

use crate::load::{connect, PATIENCE};
use crate::machine::{pin, Side};
use crate::Plan;

/// Tells this program to be the bare server.
pub const BARE_SERVER: &str = "bare-server";

/// Enough for a thread of a benchmark.
pub const SMALL_STACK: usize = 64 * 1024;

/// The lease that is asked for, in seconds. No round lasts as long.
const LEASE: &str = "600";
const LEASE_MILLIS: &str = "600000";

/// Releases a key of redis only if the token is ours, as its documentation advises.
const COMPARE_AND_DELETE: &str =
    "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('del',KEYS[1]) else return 0 end";

/// A token where the client makes it up.
const OUR_TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// How a server is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// The protocol of latchd, where the first half of a token is its fence.
    Latch,
    /// The same protocol, where tokens have no order.
    LatchWithoutFences,
    /// The bare server: the bytes of latchd, and no locks.
    Bare,
    /// A key that is set if it is free.
    RedisSet,
    /// A list with a token for each holder that there may be.
    RedisList,
    /// A key that is added if it is free.
    Memcached,
    /// A tube with a job for each holder that there may be.
    Beanstalkd,
}

/// What a server said.
pub enum Reply<'a> {
    Granted { token: &'a [u8], fence: Option<u64> },
    Released,
}

impl Dialect {
    /// Whether a client can wait for a key without asking again and again.
    pub fn can_wait(self) -> bool {
        !matches!(self, Dialect::RedisSet | Dialect::Memcached)
    }

    /// Whether the server claims to exclude others, so that it is an error if it does not.
    pub fn excludes(self) -> bool {
        self != Dialect::Bare
    }

    /// Whether the server has the protocol of latchd, and locks.
    pub fn is_latch(self) -> bool {
        matches!(self, Dialect::Latch | Dialect::LatchWithoutFences)
    }

    /// Appends the request for `key`, of which so many may have a slot.
    pub fn acquire(self, key: &str, limit: u32, out: &mut Vec<u8>) {
        let written = match self {
            Dialect::RedisSet => resp(out, &["SET", key, OUR_TOKEN, "NX", "PX", LEASE_MILLIS]),
            Dialect::RedisList => resp(out, &["BLPOP", key, "60"]),
            Dialect::Memcached => write!(out, "add {key} 0 {LEASE} 32\r\n{OUR_TOKEN}\r\n"),
            Dialect::Beanstalkd => write!(out, "reserve-with-timeout 60\r\n"),
            _ if limit == 1 => write!(out, "l\n{key}\n60 {LEASE}\n"),
            _ => write!(out, "sl\n{key}\n60 {limit} {LEASE}\n"),
        };
        written.expect("memory takes it");
    }

    /// Appends the request that releases what was granted with `token`.
    pub fn release(self, key: &str, limit: u32, token: &[u8], out: &mut Vec<u8>) {
        let token = String::from_utf8_lossy(token);
        let written = match self {
            Dialect::RedisSet => resp(out, &["EVAL", COMPARE_AND_DELETE, "1", key, OUR_TOKEN]),
            Dialect::RedisList => resp(out, &["RPUSH", key, OUR_TOKEN]),
            Dialect::Memcached => write!(out, "delete {key}\r\n"),
            Dialect::Beanstalkd => write!(out, "release {token} 0 0\r\n"),
            _ if limit == 1 => write!(out, "r\n{key}\n{token}\n"),
            _ => write!(out, "sr\n{key}\n{token}\n"),
        };
        written.expect("memory takes it");
    }

    /// The first reply in `input` and its length; `None` while it is not whole.
    pub fn reply(self, input: &[u8]) -> io::Result<Option<(usize, Reply<'_>)>> {
        let Some(end) = input.iter().position(|byte| *byte == b'\n') else {
            return Ok(None);
        };
        let (len, line) = (end + 1, input[..end].trim_ascii_end());
        let released = Some((len, Reply::Released));
        let granted = |len, token| Some((len, Reply::Granted { token, fence: None }));
        let found = match self {
            Dialect::RedisSet if line == b"+OK" => granted(len, OUR_TOKEN.as_bytes()),
            Dialect::RedisSet if line == b":1" => released,
            // The length of the list.
            Dialect::RedisList if line.starts_with(b":") => released,
            // The key and the token, each with its length before it: five lines in all.
            Dialect::RedisList if line == b"*2" => {
                let mut ends = input.iter().enumerate().filter(|(_, byte)| **byte == b'\n');
                ends.nth(4)
                    .and_then(|(end, _)| granted(end + 1, OUR_TOKEN.as_bytes()))
            }
            Dialect::Memcached if line == b"STORED" => granted(len, OUR_TOKEN.as_bytes()),
            Dialect::Memcached if line == b"DELETED" => released,
            Dialect::Beanstalkd if line == b"RELEASED" => released,
            // The number and the length of the job, and in the next line its one byte.
            Dialect::Beanstalkd if line.starts_with(b"RESERVED ") => {
                let id = line[b"RESERVED ".len()..]
                    .split(|byte| *byte == b' ')
                    .next();
                let whole = len + "x\r\n".len();
                id.filter(|_| input.len() >= whole)
                    .and_then(|id| granted(whole, id))
            }
            Dialect::Latch | Dialect::LatchWithoutFences | Dialect::Bare if line == b"ok" => {
                released
            }
            Dialect::Latch | Dialect::LatchWithoutFences | Dialect::Bare => {
                let words = line.strip_prefix(b"ok ");
                let token = words.and_then(|words| words.split(|byte| *byte == b' ').next());
                let token = token.ok_or_else(|| unexpected(line))?;
                let fence = (self != Dialect::LatchWithoutFences).then(|| fence(token));
                let fence = fence.transpose()?;
                Some((len, Reply::Granted { token, fence }))
            }
            _ => return Err(unexpected(line)),
        };
        Ok(found)
    }
}

/// The first half of a token, as a number.
fn fence(token: &[u8]) -> io::Result<u64> {
    let half = token
        .get(..16)
        .and_then(|half| std::str::from_utf8(half).ok());
    let fence = half.and_then(|half| u64::from_str_radix(half, 16).ok());
    fence.ok_or_else(|| unexpected(token))
}

/// A request to redis.
fn resp(out: &mut Vec<u8>, words: &[&str]) -> io::Result<()> {
    write!(out, "*{}\r\n", words.len())?;
    for word in words {
        write!(out, "${}\r\n{word}\r\n", word.len())?;
    }
    Ok(())
}

/// Which server to start, or to find.
#[derive(Clone, Debug)]
pub enum Spec {
    Bare,
    Latchd {
        name: String,
        binary: PathBuf,
        arguments: Vec<String>,
    },
    /// latchd with a state file of its own below `directory`. All leases of this program are
    /// ordinary ones: none is longer than the server settles.
    StateFile {
        name: String,
        binary: PathBuf,
        directory: PathBuf,
    },
    Running {
        name: String,
        addr: SocketAddr,
    },
    RedisSet,
    RedisList,
    Memcached,
    Beanstalkd,
    /// Its path is given: a program of this name on the PATH may be another server, in Python.
    Dflockd(PathBuf),
}

impl Spec {
    /// The peers whose programs are installed.
    pub fn installed_peers() -> Vec<Spec> {
        use Spec::{Beanstalkd, Memcached, RedisList, RedisSet};
        let mut peers = vec![RedisSet, RedisList, Memcached, Beanstalkd];
        peers.retain(|spec| spec.program().is_some());
        peers
    }

    pub fn name(&self) -> &str {
        match self {
            Spec::Bare => "bare server",
            Spec::Latchd { name, .. }
            | Spec::StateFile { name, .. }
            | Spec::Running { name, .. } => name,
            Spec::RedisSet => "redis SET",
            Spec::RedisList => "redis BLPOP",
            Spec::Memcached => "memcached",
            Spec::Beanstalkd => "beanstalkd",
            Spec::Dflockd(_) => "dflockd",
        }
    }

    /// The program, if this starts it.
    pub fn program(&self) -> Option<PathBuf> {
        match self {
            Spec::Bare => std::env::current_exe().ok(),
            Spec::Latchd { binary, .. } | Spec::StateFile { binary, .. } => Some(binary.clone()),
            Spec::Running { .. } => None,
            Spec::RedisSet | Spec::RedisList => find("redis-server"),
            Spec::Memcached => find("memcached"),
            Spec::Beanstalkd => find("beanstalkd"),
            Spec::Dflockd(path) => Some(path.clone()),
        }
    }

    /// The version that the program says, if it can be asked.
    pub fn version(&self) -> Option<String> {
        let option = match self {
            Spec::Bare | Spec::Running { .. } => return None,
            Spec::Beanstalkd => "-v",
            _ => "--version",
        };
        let said = Command::new(self.program()?).arg(option).output().ok()?;
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        let is_version =
            |word: &&str| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit());
        let mut words = said.split(|c: char| c.is_whitespace() || c == '=');
        words.find(is_version).map(str::to_owned)
    }

    pub fn dialect(&self) -> Dialect {
        match self {
            Spec::Bare => Dialect::Bare,
            Spec::Latchd { .. } | Spec::StateFile { .. } => Dialect::Latch,
            Spec::Running { .. } | Spec::Dflockd(_) => Dialect::LatchWithoutFences,
            Spec::RedisSet => Dialect::RedisSet,
            Spec::RedisList => Dialect::RedisList,
            Spec::Memcached => Dialect::Memcached,
            Spec::Beanstalkd => Dialect::Beanstalkd,
        }
    }

    /// Starts the server on the core that the plan gives to servers.
    pub fn start(&self, plan: &Plan) -> io::Result<Server> {
        pin(plan.cores, Side::Server)?;
        let own = |(process, addr)| self.server(addr, Some(process));
        let started = match self {
            Spec::Bare => {
                announced(Command::new(std::env::current_exe()?).arg(BARE_SERVER)).map(own)
            }
            Spec::Latchd {
                binary, arguments, ..
            } => {
                let mut command = Command::new(binary);
                command.args(ANY_PORT).args(LATCHD_OPTIONS).args(arguments);
                announced(&mut command).map(own)
            }
            Spec::StateFile {
                binary, directory, ..
            } => {
                // Its clients look for it where it was, so it refuses to choose a port itself.
                let port = free_port()?;
                // It would settle first if it found a file.
                let own_directory = directory.join(port.to_string());
                match fs::remove_dir_all(&own_directory) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => fs::create_dir_all(&own_directory)?,
                }
                let mut command = Command::new(binary);
                command.args(["--port", &port.to_string(), "--settle", LEASE]);
                command.arg("--state-file").arg(own_directory.join("state"));
                command.args(LATCHD_OPTIONS);
                announced(&mut command).map(own)
            }
            Spec::Running { addr, .. } => Ok(self.server(*addr, None)),
            Spec::RedisSet | Spec::RedisList => self.on_free_port(|port| {
                format!("--port {port} --bind 127.0.0.1 --save  --appendonly no --loglevel warning")
            }),
            Spec::Memcached => self.on_free_port(|port| {
                format!("-l 127.0.0.1 -p {port} -U 0 -u nobody -m 256 -c 20000")
            }),
            Spec::Beanstalkd => self.on_free_port(|port| format!("-l 127.0.0.1 -p {port}")),
            Spec::Dflockd(_) => self
                .on_free_port(|port| format!("--host 127.0.0.1 --port {port} --max-locks 2000000")),
        };
        pin(plan.cores, Side::Generator)?;
        let failed = |error| io::Error::other(format!("cannot start {}: {error}", self.name()));
        started.map_err(failed)
    }

    fn server(&self, addr: SocketAddr, process: Option<Process>) -> Server {
        Server {
            name: self.name().to_owned(),
            dialect: self.dialect(),
            addr,
            process,
        }
    }

    /// A server that has to be told its port.
    fn on_free_port(&self, options: impl Fn(u16) -> String) -> io::Result<Server> {
        let program = self.program();
        let binary = program.ok_or_else(|| io::Error::other("it is not installed"))?;
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()?));
        let child = Command::new(binary)
            .args(options(addr.port()).split(' '))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let mut server = self.server(addr, Some(Process(child)));
        let deadline = Instant::now() + PATIENCE;
        while TcpStream::connect(addr).is_err() {
            let process = server.process.as_mut().expect("just started");
            if process.0.try_wait()?.is_some() || Instant::now() > deadline {
                return Err(io::Error::other("it does not listen"));
            }
            thread::sleep(Duration::from_micros(200));
        }
        Ok(server)
    }
}

/// A port that nobody has at this moment.
fn free_port() -> io::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(listener.local_addr()?.port())
}

/// Starts a server that prints its port.
pub fn announced(command: &mut Command) -> io::Result<(Process, SocketAddr)> {
    let child = command
        .env("RUST_LOG", "error")
        // It is killed, and would leave the socket.
        .env("LATCHD_OPERATOR_SOCKET", "no")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut process = Process(child);
    let mut line = String::new();
    let stdout = process.0.stdout.take().expect("stdout is piped");
    BufReader::new(stdout).read_line(&mut line)?;
    let port = line.trim().parse::<u16>();
    let port = port.map_err(|_| io::Error::other("it prints no port"))?;
    Ok((process, SocketAddr::from((Ipv4Addr::LOCALHOST, port))))
}

/// A port that the server chooses.
pub const ANY_PORT: &[&str] = &["--port", "0"];

/// Prints the port, and sets caps that no scenario meets.
pub const LATCHD_OPTIONS: &[&str] = &[
    "--print-port",
    "--max-locks",
    "2000000",
    "--max-slots",
    "2000000",
    "--max-per-connection",
    "2000000",
    "--max-waiters-total",
    "2000000",
];

/// Where a program of the machine is, also if it is where a user's PATH does not lead.
fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    let places = path.split(':').chain(["/usr/sbin", "/usr/local/sbin"]);
    let mut paths = places.map(|place| Path::new(place).join(program));
    paths.find(|path| path.is_file())
}

/// A server that runs; one that was started ends when this is dropped.
pub struct Server {
    pub name: String,
    pub dialect: Dialect,
    pub addr: SocketAddr,
    process: Option<Process>,
}

impl Server {
    /// Starts a build of latchd as the command of another program, such as valgrind.
    pub fn behind(
        mut wrapper: Command,
        name: &str,
        binary: &Path,
        arguments: &[String],
    ) -> io::Result<Server> {
        wrapper.arg(binary).args(ANY_PORT).args(LATCHD_OPTIONS);
        let (process, addr) = announced(wrapper.args(arguments))?;
        Ok(Server {
            name: name.to_owned(),
            dialect: Dialect::Latch,
            addr,
            process: Some(process),
        })
    }

    /// Asks the server to end, and waits until it has.
    pub fn end(self) -> io::Result<()> {
        if let Some(mut process) = self.process {
            kill_process(Pid::from_child(&process.0), Signal::TERM)?;
            process.0.wait()?;
        }
        Ok(())
    }

    /// The number of the process, if this program started it.
    pub fn process(&self) -> Option<u32> {
        self.process.as_ref().map(|process| process.0.id())
    }

    /// Connects, for these keys.
    pub fn connect<'a>(&self, keys: impl Iterator<Item = &'a str>) -> io::Result<TcpStream> {
        let mut stream = connect(self.addr)?;
        if self.dialect == Dialect::Beanstalkd {
            let watched: String = keys.map(|key| format!("watch {key}\r\n")).collect();
            let line_count = watched.matches('\n').count() + 1;
            converse(
                &mut stream,
                &format!("{watched}ignore default\r\n"),
                line_count,
            )?;
        }
        Ok(stream)
    }

    /// Puts a token for each possible holder where the dialect needs that.
    pub fn seed<'a>(&self, keys: impl Iterator<Item = (&'a str, u32)>) -> io::Result<()> {
        let mut stream = match self.dialect {
            Dialect::RedisList | Dialect::Beanstalkd => connect(self.addr)?,
            _ => return Ok(()),
        };
        for (key, limit) in keys {
            let mut request = Vec::new();
            if self.dialect == Dialect::Beanstalkd {
                self.seed_tube(&mut stream, key, limit)?;
                continue;
            }
            resp(&mut request, &["DEL", key])?;
            for _ in 0..limit {
                resp(&mut request, &["RPUSH", key, OUR_TOKEN])?;
            }
            let request = String::from_utf8(request).expect("it is text");
            converse(&mut stream, &request, limit as usize + 1)?;
        }
        Ok(())
    }

    /// Jobs stay in their tube from one round to the next.
    fn seed_tube(&self, stream: &mut TcpStream, key: &str, limit: u32) -> io::Result<()> {
        let asked = format!("use {key}\r\nstats-tube {key}\r\n");
        let lines = converse(stream, &asked, 2)?;
        let is_new = lines.contains("NOT_FOUND") || lines.contains("current-jobs-ready: 0\n");
        if is_new {
            let put = format!("put 0 0 {LEASE} 1\r\nx\r\n").repeat(limit as usize);
            converse(stream, &put, limit as usize)?;
        }
        Ok(())
    }
}

/// A process that ends when this is dropped.
pub struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself; either way it is gone afterwards.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends `request`, and reads until at least so many lines have come and a line is whole.
fn converse(stream: &mut TcpStream, request: &str, line_count: usize) -> io::Result<String> {
    stream.write_all(request.as_bytes())?;
    let (mut read, mut buffer) = (String::new(), [0; 4096]);
    while read.matches('\n').count() < line_count || !read.ends_with('\n') {
        match stream.read(&mut buffer)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            len => read.push_str(&String::from_utf8_lossy(&buffer[..len])),
        }
    }
    Ok(read)
}

/// The measure of the machine: a thread for each connection, which lets `converse` take as many
/// bytes as a request has and answer as many as a reply has, and does nothing in between.
pub fn bare_server(converse: fn(TcpStream) -> io::Result<()>) -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    println!("{}", listener.local_addr()?.port());
    for stream in listener.incoming() {
        let stream = stream?;
        // A client that hangs up ends its thread; that is no error.
        thread::Builder::new()
            .stack_size(SMALL_STACK)
            .spawn(move || converse(stream))?;
    }
    Ok(())
}

/// The bytes of latchd, one write for each reply.
pub fn echo(mut stream: TcpStream) -> io::Result<()> {
    const GRANTED: &[u8] = b"ok 0000000000000001000000000000000f 33\n";
    let mut buffer = [0; 128];
    let (mut len, mut line_count) = (0, 0);
    stream.set_nodelay(true)?;
    loop {
        let read = stream.read(&mut buffer[len..])?;
        if read == 0 {
            return Ok(());
        }
        let mut start = 0;
        for at in len..len + read {
            line_count += usize::from(buffer[at] == b'\n');
            if line_count == 3 {
                let is_release = buffer[start..start + 2].contains(&b'r');
                stream.write_all(if is_release { b"ok\n" } else { GRANTED })?;
                (start, line_count) = (at + 1, 0);
            }
        }
        buffer.copy_within(start..len + read, 0);
        len = len + read - start;
    }
}

/// The error for a reply that is none of those that a scenario may meet.
pub fn unexpected(reply: &[u8]) -> io::Error {
    let reply = String::from_utf8_lossy(&reply[..reply.len().min(80)]);
    io::Error::other(format!("unexpected reply {reply:?}"))
}
