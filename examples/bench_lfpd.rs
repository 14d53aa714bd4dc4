//! What a lock file costs over the Lock File Protocol, beside what a round trip costs anyway.
//!
//! Measures LOCK and UNLOCK in turn over persistent connections, each for a device of its own and
//! all for one directory, and beside it a bare server that reads as many bytes and answers as many,
//! by the same client code in alternating rounds. Then the time from when UNLOCK has been sent to
//! when the file is gone: over a persistent connection, and as RXTX does it, with a connection for
//! each.
//!
//! Rates depend on the machine, the day and the neighbours; the *ratio* can be compared. The lock
//! files are in a directory of their own below the one for temporary files, and are removed at the
//! end.
//!
//! ```text
//! cargo run --release --example bench_lfpd -- [--quick]
//! ```
//!
//! Exit status: 0 when all went well, 1 when a reply was not the expected one, 2 for bad usage.

mod bench_support;

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use bench_support::{bare_server, role, unexpected, Server};

const OKAY: &[u8] = b"200 Command okay.\r\n";
const GREETING: &[u8] = b"220 bare server\r\n";

// Every device has the same length, so that the bare server knows the sizes without parsing.
const DEVICE_LEN: usize = "/dev/bench00".len();

const CONNECTION_COUNTS: [usize; 3] = [1, 4, 16];

fn main() -> ExitCode {
    match role().as_deref() {
        Some("lfpd") => latchd::lfpd_main(),
        Some("bare") => report(bare_server(answer)),
        _ => {
            let arguments: Vec<String> = std::env::args().skip(1).collect();
            let is_known = |argument: &String| {
                // What `cargo bench` and `cargo test` add is not for us.
                ["--quick", "--bench", "--test"].contains(&argument.as_str())
            };
            if !arguments.iter().all(is_known) {
                eprintln!("usage: bench_lfpd [--quick]");
                return ExitCode::from(2);
            }
            let is_quick = arguments.iter().any(|argument| argument == "--quick");
            report(measure(is_quick))
        }
    }
}

fn report(outcome: io::Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench_lfpd: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(is_quick: bool) -> io::Result<()> {
    let (round, rounds, unlock_count) = if is_quick {
        (Duration::from_millis(100), 2, 50)
    } else {
        (Duration::from_millis(500), 4, 1000)
    };
    let directory = LockDirectory::new()?;
    let lfpd = start("lfpd", &directory.0)?;
    let bare = start("bare", &directory.0)?;

    println!("LOCK and UNLOCK, pairs a second");
    println!(
        "{:>12} {:>12} {:>12} {:>8}",
        "connections", "lfpd", "bare echo", "ratio"
    );
    for count in CONNECTION_COUNTS {
        let (mut ours, mut theirs) = (0.0, 0.0);
        for _ in 0..rounds {
            ours += pairs(lfpd.addr, count, round)?;
            theirs += pairs(bare.addr, count, round)?;
        }
        let turns = f64::from(rounds);
        println!(
            "{count:>12} {:>12.0} {:>12.0} {:>8.3}",
            ours / turns,
            theirs / turns,
            ours / theirs
        );
    }

    println!("\nfrom UNLOCK sent to the file gone, microseconds");
    println!("{:>24} {:>8} {:>8} {:>8}", "", "median", "99 %", "longest");
    print_times("one connection", unlocks(&lfpd, &directory, unlock_count)?);
    let (times, left_over_count) = rxtx_unlocks(&lfpd, &directory, unlock_count)?;
    print_times("a connection for each", times);
    println!(
        "{left_over_count} of {unlock_count} files were still there when the call to unlock had returned"
    );
    Ok(())
}

fn print_times(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |share: usize| times[(times.len() * share / 100).min(times.len() - 1)].as_micros();
    println!("{what:>24} {:>8} {:>8} {:>8}", at(50), at(99), at(100));
}

/// Pairs of LOCK and UNLOCK a second over so many connections.
fn pairs(addr: SocketAddr, connection_count: usize, time: Duration) -> io::Result<f64> {
    let started = Instant::now();
    let threads: Vec<_> = (0..connection_count)
        .map(|at| {
            thread::spawn(move || {
                let mut client = Client::connect(addr)?;
                let device = device(at);
                let mut count = 0u32;
                while started.elapsed() < time {
                    client.command("lock", &device)?;
                    client.command("unlock", &device)?;
                    count += 1;
                }
                Ok::<_, io::Error>(count)
            })
        })
        .collect();
    let mut pair_count = 0.0;
    for thread in threads {
        let count = thread
            .join()
            .map_err(|_| io::Error::other("a client panicked"))??;
        pair_count += f64::from(count);
    }
    Ok(pair_count / started.elapsed().as_secs_f64())
}

fn unlocks(server: &Server, directory: &LockDirectory, count: usize) -> io::Result<Vec<Duration>> {
    let mut client = Client::connect(server.addr)?;
    let device = device(0);
    let file = directory.file(&device);
    let mut times = Vec::new();
    for _ in 0..count {
        client.command("lock", &device)?;
        client.send("unlock", &device)?;
        let sent = Instant::now();
        while file.exists() {}
        times.push(sent.elapsed());
        client.receive()?;
    }
    Ok(times)
}

/// As RXTX does it: it takes the greeting for the reply. Also counts how often the file was there
/// then.
fn rxtx_unlocks(
    server: &Server,
    directory: &LockDirectory,
    count: usize,
) -> io::Result<(Vec<Duration>, usize)> {
    let device = device(0);
    let file = directory.file(&device);
    let mut locker = Client::connect(server.addr)?;
    let mut times = Vec::new();
    let mut left_over_count = 0;
    for _ in 0..count {
        locker.command("lock", &device)?;
        let mut socket = TcpStream::connect(server.addr)?;
        socket.write_all(line("unlock", &device).as_bytes())?;
        let sent = Instant::now();
        let mut buffer = [0; 1024];
        let len = socket.read(&mut buffer)?;
        if buffer[..len].first() != Some(&b'2') {
            return Err(unexpected(&buffer[..len]));
        }
        left_over_count += usize::from(file.exists());
        while file.exists() {}
        times.push(sent.elapsed());
        let _ = socket.write_all(b"quit\n");
    }
    Ok((times, left_over_count))
}

fn device(at: usize) -> String {
    format!("/dev/bench{:02}", at % 100)
}

fn line(verb: &str, device: &str) -> String {
    format!("{verb} {device} {:010}\n", std::process::id())
}

struct Client(BufReader<TcpStream>);

impl Client {
    fn connect(addr: SocketAddr) -> io::Result<Client> {
        let stream = TcpStream::connect(addr)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        let mut client = Client(BufReader::new(stream));
        let mut greeting = Vec::new();
        client.0.read_until(b'\n', &mut greeting)?;
        match greeting.starts_with(b"220 ") {
            true => Ok(client),
            false => Err(unexpected(&greeting)),
        }
    }

    fn command(&mut self, verb: &str, device: &str) -> io::Result<()> {
        self.send(verb, device)?;
        self.receive()
    }

    fn send(&mut self, verb: &str, device: &str) -> io::Result<()> {
        self.0.get_mut().write_all(line(verb, device).as_bytes())
    }

    fn receive(&mut self) -> io::Result<()> {
        let mut reply = [0; OKAY.len()];
        self.0.read_exact(&mut reply)?;
        match reply == OKAY {
            true => Ok(()),
            false => Err(unexpected(&reply)),
        }
    }
}

/// A directory for lock files, removed with all that is in it when dropped.
struct LockDirectory(PathBuf);

impl LockDirectory {
    fn new() -> io::Result<LockDirectory> {
        let name = format!("bench_lfpd-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path)?;
        Ok(LockDirectory(path))
    }

    fn file(&self, device: &str) -> PathBuf {
        let name = device.trim_start_matches("/dev/");
        self.0.join(format!("LCK..{name}"))
    }
}

impl Drop for LockDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn start(role: &str, lock_dir: &Path) -> io::Result<Server> {
    Server::start(role, |command| {
        command
            .args(["--listen", "0", "--search-dirs", ""])
            .arg("--lock-dir")
            .arg(lock_dir)
            .env_remove("LISTEN_FDS");
    })
}

fn answer(mut stream: TcpStream) -> io::Result<()> {
    const LOCK_LEN: usize = "lock  0123456789\n".len() + DEVICE_LEN;
    const UNLOCK_LEN: usize = LOCK_LEN + "un".len();
    let mut request = [0; 64];
    stream.set_nodelay(true)?;
    stream.write_all(GREETING)?;
    loop {
        stream.read_exact(&mut request[..LOCK_LEN])?;
        stream.write_all(OKAY)?;
        stream.read_exact(&mut request[..UNLOCK_LEN])?;
        stream.write_all(OKAY)?;
    }
}
