//! What a lock file costs over the Lock File Protocol, beside what a round trip costs anyway.
//!
//! Measures LOCK and UNLOCK in turn over persistent connections, each for a device of its own and
//! all for one directory, and beside it a bare server that reads as many bytes and answers as many,
//! by the same client code in alternating rounds. Then the time from when UNLOCK has been sent to
//! when the file is gone: over a persistent connection, and as RXTX does it, with a connection for
//! each.
//!
//! The lock files are in a directory of their own, which is removed at the end.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::load::connect;
use crate::machine::{pin, Side};
use crate::peers::{announced, unexpected, Process, SMALL_STACK};
use crate::report::{median, spread, spread_heading};
use crate::{built, Plan};

/// Tells this program to be the bare server for lfpd.
pub const BARE_SERVER: &str = "bare-lfpd";

const OKAY: &[u8] = b"200 Command okay.\r\n";
const GREETING: &[u8] = b"220 bare server\r\n";

// Every device has the same length, so that the bare server knows the sizes without parsing.
const DEVICE_LEN: usize = "/dev/bench00".len();

pub fn measure(plan: &Plan) -> io::Result<()> {
    let directory = tempfile::tempdir_in(&plan.directory)?;
    let mut lfpd = Command::new(built("lfpd")?);
    lfpd.args(["--listen", "0", "--search-dirs", "", "--print-port"])
        .arg("--lock-dir")
        .arg(directory.path());
    let mut bare = Command::new(std::env::current_exe()?);
    bare.arg(BARE_SERVER);
    pin(plan.cores, Side::Server)?;
    let (lfpd, bare) = (start(&mut lfpd)?, start(&mut bare)?);
    pin(plan.cores, Side::Generator)?;

    println!("LOCK and UNLOCK, pairs a second, {}", plan.cores);
    println!(
        "  {:>12} {:>10} {:>10} {:>8}",
        "connections", "lfpd", "bare echo", "ratio"
    );
    for count in plan.connections_or(&[1, 4, 16]) {
        let (mut ours, mut theirs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..plan.rounds {
            let rate = pairs(lfpd.addr, count, plan.time)?;
            let bare_rate = pairs(bare.addr, count, plan.time)?;
            ours.push(rate);
            theirs.push(bare_rate);
            ratios.push(rate / bare_rate);
        }
        println!(
            "  {count:>12} {:>10.0} {:>10.0} {:>8.4}",
            median(&ours),
            median(&theirs),
            median(&ratios)
        );
    }

    println!();
    for count in plan.counts_or(&[1000]) {
        spread_heading("from UNLOCK sent to the file gone");
        spread("one connection", &unlocks(&lfpd, directory.path(), count)?);
        let (times, left_over_count) = rxtx_unlocks(&lfpd, directory.path(), count)?;
        spread("a connection for each", &times);
        println!(
            "  {left_over_count} of {count} files were still there when the call to unlock had returned"
        );
    }
    Ok(())
}

/// A server of the Lock File Protocol, which ends when this is dropped.
struct Lfpd {
    addr: SocketAddr,
    _process: Process,
}

fn start(command: &mut Command) -> io::Result<Lfpd> {
    let (_process, addr) = announced(command)?;
    Ok(Lfpd { addr, _process })
}

/// Pairs of LOCK and UNLOCK a second over so many connections.
fn pairs(addr: SocketAddr, connection_count: usize, time: Duration) -> io::Result<f64> {
    let started = Instant::now();
    let threads = (0..connection_count)
        .map(|at| {
            let thread = thread::Builder::new().stack_size(SMALL_STACK);
            thread.spawn(move || {
                let mut client = Client::connect(addr)?;
                let device = device(at);
                let mut count = 0u32;
                while count == 0 || started.elapsed() < time {
                    client.command("lock", &device)?;
                    client.command("unlock", &device)?;
                    count += 1;
                }
                Ok::<_, io::Error>(count)
            })
        })
        .collect::<io::Result<Vec<_>>>()?;
    let mut pair_count = 0.0;
    for thread in threads {
        let count = thread
            .join()
            .map_err(|_| io::Error::other("a client panicked"))??;
        pair_count += f64::from(count);
    }
    Ok(pair_count / started.elapsed().as_secs_f64())
}

fn unlocks(server: &Lfpd, directory: &Path, count: usize) -> io::Result<Vec<f64>> {
    let mut client = Client::connect(server.addr)?;
    let device = device(0);
    let file = lock_file(directory, &device);
    let mut times = Vec::new();
    for _ in 0..count {
        client.command("lock", &device)?;
        client.send("unlock", &device)?;
        let sent = Instant::now();
        while file.exists() {}
        times.push(sent.elapsed().as_secs_f64());
        client.receive()?;
    }
    Ok(times)
}

/// As RXTX does it: it takes the greeting for the reply. Also counts how often the file was there
/// then.
fn rxtx_unlocks(server: &Lfpd, directory: &Path, count: usize) -> io::Result<(Vec<f64>, usize)> {
    let device = device(0);
    let file = lock_file(directory, &device);
    let mut locker = Client::connect(server.addr)?;
    let mut times = Vec::new();
    let mut left_over_count = 0;
    for _ in 0..count {
        locker.command("lock", &device)?;
        let mut socket = connect(server.addr)?;
        socket.write_all(line("unlock", &device).as_bytes())?;
        let sent = Instant::now();
        let mut buffer = [0; 1024];
        let len = socket.read(&mut buffer)?;
        if buffer[..len].first() != Some(&b'2') {
            return Err(unexpected(&buffer[..len]));
        }
        left_over_count += usize::from(file.exists());
        while file.exists() {}
        times.push(sent.elapsed().as_secs_f64());
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
        let mut client = Client(BufReader::new(connect(addr)?));
        let mut greeting = Vec::new();
        client.0.read_until(b'\n', &mut greeting)?;
        if greeting.starts_with(b"220 ") {
            Ok(client)
        } else {
            Err(unexpected(&greeting))
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
        if reply == OKAY {
            Ok(())
        } else {
            Err(unexpected(&reply))
        }
    }
}

fn lock_file(directory: &Path, device: &str) -> PathBuf {
    let name = device.trim_start_matches("/dev/");
    directory.join(format!("LCK..{name}"))
}

/// The bytes of lfpd.
pub fn echo(mut stream: TcpStream) -> io::Result<()> {
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
