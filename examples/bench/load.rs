//! The generator: one thread that drives many connections, and checks what it is granted.
//!
//! A generator that costs more than the server hides what the server costs. So there is no thread
//! for each connection: one thread waits for all of them with epoll, or reads from a single one.
//! It first reads all that has come and only then writes, so that two holders of one key are seen
//! together if the server grants it to both.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::{epoll, Timespec};

use crate::peers::{unexpected, Dialect, Reply, Server};

/// How long a reply may take. Nothing here may block for ever.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// What a round came to.
#[derive(Default)]
pub struct Tally {
    /// Grants within the time of the round, each of them released.
    pub grant_count: u64,
    /// Grants after that, when the last holders and waiters finish.
    pub late_count: u64,
    pub elapsed: Duration,
    /// From when the claim was sent, or the key was released if that was later, to when the grant
    /// was read; in nanoseconds.
    pub latencies: Vec<u32>,
    /// Grants of a key that had as many holders as it may.
    pub overlap_count: usize,
    /// Grants whose fence was not above the last one of the key.
    pub disorder_count: usize,
}

/// A key that lanes acquire and release, and what the generator knows of it.
pub struct Key {
    pub name: String,
    limit: u32,
    holder_count: u32,
    last_fence: u64,
    released_at: Option<Instant>,
}

impl Key {
    /// A lock.
    pub fn new(name: String) -> Key {
        Key::with_limit(name, 1)
    }

    /// A semaphore, or a lock if the limit is 1.
    pub fn with_limit(name: String, limit: u32) -> Key {
        Key {
            name,
            limit,
            holder_count: 0,
            last_fence: 0,
            released_at: None,
        }
    }

    fn enter(&mut self, fence: Option<u64>, tally: &mut Tally) {
        self.holder_count += 1;
        tally.overlap_count += usize::from(self.holder_count > self.limit);
        // The grants of a semaphore may be read in another order than they were given.
        if let Some(fence) = fence.filter(|_| self.limit == 1) {
            tally.disorder_count += usize::from(fence <= self.last_fence);
            self.last_fence = fence;
        }
    }
}

/// One sequence of acquire and release. A connection with several has as many requests in flight.
struct Lane {
    key: usize,
    token: Vec<u8>,
    sent_at: Instant,
}

struct Connection {
    stream: TcpStream,
    input: Vec<u8>,
    output: Vec<u8>,
    /// The lanes whose replies are to come, in the order of their requests.
    in_flight: VecDeque<usize>,
}

/// Connections to one server and the keys that they acquire.
pub struct Load {
    dialect: Dialect,
    keys: Vec<Key>,
    lanes: Vec<Lane>,
    connections: Vec<Connection>,
    lanes_per_connection: usize,
    epoll: Option<OwnedFd>,
}

impl Load {
    /// Connects. Each lane has the key that is in `lane_keys` at its place; each connection has as
    /// many lanes as the next.
    pub fn new(
        server: &Server,
        keys: Vec<Key>,
        lane_keys: &[usize],
        lanes_per_connection: usize,
    ) -> io::Result<Load> {
        let mut load = Load {
            dialect: server.dialect,
            keys,
            lanes: Vec::new(),
            connections: Vec::new(),
            lanes_per_connection,
            epoll: None,
        };
        server.seed(load.keys.iter().map(|key| (key.name.as_str(), key.limit)))?;
        for own in lane_keys.chunks(lanes_per_connection) {
            let names = own.iter().map(|key| load.keys[*key].name.as_str());
            let stream = server.connect(names)?;
            load.connections.push(Connection {
                stream,
                input: Vec::with_capacity(16 * 1024),
                output: Vec::new(),
                in_flight: VecDeque::new(),
            });
        }
        load.lanes.extend(lane_keys.iter().map(|key| Lane {
            key: *key,
            token: Vec::new(),
            sent_at: Instant::now(),
        }));
        if load.connections.len() > 1 {
            load.epoll = Some(watch_all(&load.connections)?);
        }
        Ok(load)
    }

    /// Each of so many connections has a key of its own.
    pub fn own_keys(server: &Server, count: usize) -> io::Result<Load> {
        let keys = (0..count).map(|at| Key::new(key_name("own", at)));
        Load::new(server, keys.collect(), &(0..count).collect::<Vec<_>>(), 1)
    }

    /// All connections want one key.
    pub fn one_key(server: &Server, count: usize, limit: u32) -> io::Result<Load> {
        let name = if limit == 1 { "one" } else { "sem" };
        let key = Key::with_limit(key_name(name, 0), limit);
        Load::new(server, vec![key], &vec![0; count], 1)
    }

    /// Two connections for each key.
    pub fn pairs(server: &Server, count: usize) -> io::Result<Load> {
        let keys = (0..count.div_ceil(2)).map(|at| Key::new(key_name("two", at)));
        let lane_keys: Vec<usize> = (0..count).map(|at| at / 2).collect();
        Load::new(server, keys.collect(), &lane_keys, 1)
    }

    /// Each of so many connections has `in_flight` keys of its own, and as many requests in flight.
    pub fn pipelined(server: &Server, count: usize, in_flight: usize) -> io::Result<Load> {
        let lanes: Vec<usize> = (0..count * in_flight).collect();
        let keys = lanes.iter().map(|at| Key::new(key_name("own", *at)));
        Load::new(server, keys.collect(), &lanes, in_flight)
    }

    /// Acquires and releases on all lanes for so long, then waits until all is released.
    pub fn run(&mut self, time: Duration) -> io::Result<Tally> {
        let mut tally = Tally::default();
        let mut replies = Vec::new();
        let mut ready = Vec::with_capacity(self.connections.len());
        for at in 0..self.connections.len() {
            let first = at * self.lanes_per_connection;
            let last = self.lanes.len().min(first + self.lanes_per_connection);
            for lane in first..last {
                self.acquire(at, lane);
            }
            self.flush(at)?;
        }
        let began = Instant::now();
        let mut busy_count = self.lanes.len();
        while busy_count > 0 {
            self.wait(&mut ready)?;
            for at in &ready {
                self.read(*at, &mut replies, &mut tally)?;
            }
            if tally.elapsed.is_zero() && began.elapsed() >= time {
                tally.elapsed = began.elapsed();
            }
            for (at, lane, is_granted) in replies.drain(..) {
                if is_granted {
                    self.release(at, lane);
                } else if tally.elapsed.is_zero() {
                    self.acquire(at, lane);
                } else {
                    busy_count -= 1;
                }
            }
            for at in &ready {
                self.flush(*at)?;
            }
        }
        Ok(tally)
    }

    /// The connections that something has arrived on; a single one is read without asking.
    fn wait(&self, ready: &mut Vec<usize>) -> io::Result<()> {
        ready.clear();
        let Some(epoll) = &self.epoll else {
            ready.push(0);
            return Ok(());
        };
        let timeout = Timespec::try_from(PATIENCE).expect("it is short");
        let mut events = [const { std::mem::MaybeUninit::uninit() }; 256];
        let (events, _) = epoll::wait(epoll, &mut events, Some(&timeout))?;
        ready.extend(events.iter().map(|event| event.data.u64() as usize));
        if ready.is_empty() {
            Err(io::ErrorKind::TimedOut.into())
        } else {
            Ok(())
        }
    }

    /// Reads once, and notes the lanes of all whole replies, and whether each was a grant.
    fn read(
        &mut self,
        at: usize,
        replies: &mut Vec<(usize, usize, bool)>,
        tally: &mut Tally,
    ) -> io::Result<()> {
        let connection = &mut self.connections[at];
        if connection.input.spare_capacity_mut().is_empty() {
            connection.input.reserve(16 * 1024);
        }
        if rustix::io::read(&connection.stream, spare_capacity(&mut connection.input))? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let now = Instant::now();
        let mut used = 0;
        while let Some((len, reply)) = self.dialect.reply(&connection.input[used..])? {
            let lane_at = connection.in_flight.pop_front();
            let lane_at = lane_at.ok_or_else(|| unexpected(&connection.input[used..]))?;
            let lane = &mut self.lanes[lane_at];
            let is_granted = match reply {
                Reply::Released => false,
                Reply::Granted { token, fence } => {
                    lane.token.clear();
                    lane.token.extend_from_slice(token);
                    let key = &mut self.keys[lane.key];
                    key.enter(fence, tally);
                    if tally.elapsed.is_zero() {
                        let since = key
                            .released_at
                            .map_or(lane.sent_at, |at| at.max(lane.sent_at));
                        let nanos = now.duration_since(since).as_nanos();
                        tally
                            .latencies
                            .push(u32::try_from(nanos).unwrap_or(u32::MAX));
                        tally.grant_count += 1;
                    } else {
                        tally.late_count += 1;
                    }
                    true
                }
            };
            replies.push((at, lane_at, is_granted));
            used += len;
        }
        connection.input.drain(..used);
        Ok(())
    }

    fn acquire(&mut self, at: usize, lane_at: usize) {
        let (connection, lane) = (&mut self.connections[at], &mut self.lanes[lane_at]);
        let key = &self.keys[lane.key];
        self.dialect
            .acquire(&key.name, key.limit, &mut connection.output);
        lane.sent_at = Instant::now();
        connection.in_flight.push_back(lane_at);
    }

    fn release(&mut self, at: usize, lane_at: usize) {
        let (connection, lane) = (&mut self.connections[at], &self.lanes[lane_at]);
        let key = &mut self.keys[lane.key];
        self.dialect
            .release(&key.name, key.limit, &lane.token, &mut connection.output);
        key.holder_count -= 1;
        key.released_at = Some(Instant::now());
        connection.in_flight.push_back(lane_at);
    }

    fn flush(&mut self, at: usize) -> io::Result<()> {
        let connection = &mut self.connections[at];
        if !connection.output.is_empty() {
            connection.stream.write_all(&connection.output)?;
            connection.output.clear();
        }
        Ok(())
    }
}

fn watch_all(connections: &[Connection]) -> io::Result<OwnedFd> {
    let watch = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for (at, connection) in connections.iter().enumerate() {
        let data = epoll::EventData::new_u64(at as u64);
        epoll::add(&watch, &connection.stream, data, epoll::EventFlags::IN)?;
    }
    Ok(watch)
}

/// Names of one length, so that all requests of a scenario have one.
pub fn key_name(prefix: &str, number: usize) -> String {
    format!("{prefix}-{number:07}")
}

/// A connection that blocks, with one request at a time.
pub struct Client {
    dialect: Dialect,
    pub stream: TcpStream,
    input: Vec<u8>,
}

/// A grant: the token, and the fence if there is one.
pub type Granted = (Vec<u8>, Option<u64>);

impl Client {
    /// Connects, for this key.
    pub fn connect(server: &Server, key: &str) -> io::Result<Client> {
        Ok(Client {
            dialect: server.dialect,
            stream: server.connect([key].into_iter())?,
            input: Vec::new(),
        })
    }

    pub fn acquire(&mut self, key: &str) -> io::Result<Granted> {
        self.send_acquire(key)?;
        self.granted()
    }

    pub fn send_acquire(&mut self, key: &str) -> io::Result<()> {
        let mut request = Vec::new();
        self.dialect.acquire(key, 1, &mut request);
        self.stream.write_all(&request)
    }

    pub fn release(&mut self, key: &str, token: &[u8]) -> io::Result<()> {
        self.send_release(key, token)?;
        self.reply().map(|_| ())
    }

    pub fn send_release(&mut self, key: &str, token: &[u8]) -> io::Result<()> {
        let mut request = Vec::new();
        self.dialect.release(key, 1, token, &mut request);
        self.stream.write_all(&request)
    }

    /// Waits for a grant.
    pub fn granted(&mut self) -> io::Result<Granted> {
        self.reply()?.ok_or_else(|| unexpected(b"released"))
    }

    /// Waits for a reply: a grant, or `None` for a release.
    pub fn reply(&mut self) -> io::Result<Option<Granted>> {
        loop {
            if let Some((len, reply)) = self.dialect.reply(&self.input)? {
                let granted = match reply {
                    Reply::Granted { token, fence } => Some((token.to_vec(), fence)),
                    Reply::Released => None,
                };
                self.input.drain(..len);
                return Ok(granted);
            }
            self.read()?;
        }
    }

    /// Sends a request of the protocol of latchd, and waits for a line.
    pub fn ask(&mut self, request: &str) -> io::Result<String> {
        self.stream.write_all(request.as_bytes())?;
        self.line()
    }

    pub fn line(&mut self) -> io::Result<String> {
        loop {
            // A long line comes in many parts, and the end is in the last.
            if self.input.ends_with(b"\n") {
                return String::from_utf8(std::mem::take(&mut self.input))
                    .map_err(io::Error::other);
            }
            self.read()?;
        }
    }

    fn read(&mut self) -> io::Result<()> {
        self.input.reserve(64 * 1024);
        match rustix::io::read(&self.stream, spare_capacity(&mut self.input))? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }
}

/// Takes so many keys on one connection, many at a time, and holds them until it is dropped.
pub fn hold(server: &Server, prefix: &str, count: usize, lease: u32) -> io::Result<Client> {
    const AT_A_TIME: usize = 500;
    let mut client = Client::connect(server, prefix)?;
    for first in (0..count).step_by(AT_A_TIME) {
        let mut requests = Vec::new();
        let numbers = first..count.min(first + AT_A_TIME);
        for number in numbers.clone() {
            let key = key_name(prefix, number);
            if server.dialect.is_latch() {
                write!(requests, "l\n{key}\n60 {lease}\n")?
            } else {
                server.dialect.acquire(&key, 1, &mut requests)
            }
        }
        client.stream.write_all(&requests)?;
        for _ in numbers {
            client.granted()?;
        }
    }
    Ok(client)
}

/// Takes the places behind [`hold`] of the same prefix, and never collects what is granted.
pub fn enqueue(server: &Server, prefix: &str, count: usize, lease: u32) -> io::Result<Client> {
    const AT_A_TIME: usize = 500;
    let mut client = Client::connect(server, prefix)?;
    for first in (0..count).step_by(AT_A_TIME) {
        let mut requests = Vec::new();
        let numbers = first..count.min(first + AT_A_TIME);
        let mut expected: Vec<u8> = Vec::new();
        for number in numbers {
            let key = key_name(prefix, number);
            write!(requests, "e\n{key}\n{lease}\n")?;
            expected.extend(b"queued\n");
        }
        client.stream.write_all(&requests)?;
        while client.input.len() < expected.len() {
            client.read()?;
        }
        if client.input == expected {
            client.input.clear()
        } else {
            return Err(unexpected(&client.input));
        }
    }
    Ok(client)
}

/// A TCP connection whose reads and writes end at some time.
pub fn connect(addr: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&addr, PATIENCE)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}
