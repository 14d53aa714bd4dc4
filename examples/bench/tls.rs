//! Own keys over TLS: latchd that speaks it, beside stunnel in front of one that does not. Then how
//! long a grant takes at a fixed rate, with TLS and without.
//!
//! The clients are the same for both, one thread each, and share the machine with the servers.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use latchd::client::{Address, Connection, Settings, Slot, Tls, Wait};

use crate::load::{key_name, Tally, PATIENCE};
use crate::machine::{pin, Side, Usage};
use crate::paced;
use crate::peers::{announced, ANY_PORT, LATCHD_OPTIONS};
use crate::report::{median, spread, spread_heading, Outcome};
use crate::{built, Plan};

const USUAL_COUNTS: &[usize] = &[1, 16, 64];

/// Measures for each number of connections, and prints the rates and their ratio.
pub fn measure(plan: &Plan) -> io::Result<()> {
    let directory = plan
        .directory
        .join(format!("bench-tls-{}", std::process::id()));
    fs::create_dir_all(&directory)?;
    let measured = measure_in(plan, &directory);
    fs::remove_dir_all(&directory)?;
    measured
}

fn measure_in(plan: &Plan, directory: &Path) -> io::Result<()> {
    let latchd = || -> io::Result<Command> {
        let mut command = Command::new(built("latchd")?);
        command.args(ANY_PORT).args(LATCHD_OPTIONS);
        Ok(command)
    };
    pin(plan.cores, Side::Server)?;
    make_certificate(directory)?;
    let file = |name: &str| directory.join(name);
    let mut with_tls = latchd()?;
    with_tls.arg("--tls-cert").arg(file("cert.pem"));
    let (_direct, direct) = announced(with_tls.arg("--tls-key").arg(file("key.pem")))?;
    let (_plain, plain) = announced(&mut latchd()?)?;
    let tunnel = Tunnel::start(directory, plain)?;
    pin(plan.cores, Side::Generator)?;
    let mut settings = Settings::default();
    let ca = Tls::with_ca_file(file("cert.pem"));
    settings.tls = Some(ca.map_err(io::Error::other)?);
    for count in plan.connections_or(USUAL_COUNTS) {
        let servers = [
            ("latchd with TLS", direct),
            ("stunnel and latchd", tunnel.addr),
        ];
        let mut outcomes = servers.map(|(name, _)| Outcome::new(name));
        for round in 0..plan.rounds {
            for turn in 0..servers.len() {
                let at = (round + turn) % servers.len();
                let tally = own_keys(servers[at].1, &settings, count, plan.time)?;
                outcomes[at].add(tally, Usage::default(), Duration::ZERO);
            }
        }
        let [ours, theirs] = &outcomes;
        println!("own keys over TLS, {count} connections, {}", plan.cores);
        println!("{:<20} {:>10} {:>8}", "", "pairs/s", "ratio");
        for outcome in [ours, theirs] {
            let (rate, ratio) = (median(&outcome.rates), outcome.ratio_to(theirs));
            println!("{:<20} {rate:>10.0} {ratio:>8.2}", outcome.name);
        }
        println!();
        spread_heading(&paced::title(count, plan));
        let contenders = [
            ("latchd with TLS", direct, &settings),
            ("latchd without TLS", plain, &Settings::default()),
        ];
        let mut times = contenders.map(|_| Vec::new());
        for round in 0..plan.rounds {
            for turn in 0..contenders.len() {
                let at = (round + turn) % contenders.len();
                let (_, addr, settings) = contenders[at];
                times[at].extend(paced::run(paced_pairs(addr, settings, count)?, plan.time)?);
            }
        }
        for ((name, ..), times) in contenders.iter().zip(&times) {
            spread(name, times);
        }
        println!();
    }
    Ok(())
}

/// Connections that each acquire and release a key of their own.
fn paced_pairs(
    addr: SocketAddr,
    settings: &Settings,
    count: usize,
) -> io::Result<Vec<paced::Pair<'static>>> {
    let server = Address::Tcp(addr.to_string());
    let pairs = (0..count).map(|at| {
        let opened = Connection::open(&server, settings);
        let mut connection = opened.map_err(io::Error::other)?;
        let key = key_name("paced", at);
        let pair = move || {
            let granted = connection.acquire(&key, Slot::LOCK, Wait::No);
            let granted_at = Instant::now();
            let grant = granted.map_err(io::Error::other)?;
            let token = grant.expect("no other client has this key").token;
            let released = connection.release(&key, Slot::LOCK, token);
            released.map(|()| granted_at).map_err(io::Error::other)
        };
        Ok(Box::new(pair) as paced::Pair)
    });
    pairs.collect()
}

/// Makes a self-signed certificate and its key in `directory`.
fn make_certificate(directory: &Path) -> io::Result<()> {
    let words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj \
                 /CN=latchd -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -addext \
                 basicConstraints=CA:FALSE -keyout key.pem -out cert.pem";
    let made = Command::new("openssl")
        .args(words.split_whitespace())
        .current_dir(directory)
        .output()?;
    if made.status.success() {
        Ok(())
    } else {
        Err(io::Error::other(String::from_utf8_lossy(&made.stderr)))
    }
}

/// Each of so many connections acquires and releases a key of its own, for so long.
fn own_keys(
    addr: SocketAddr,
    settings: &Settings,
    count: usize,
    time: Duration,
) -> io::Result<Tally> {
    let server = Address::Tcp(addr.to_string());
    let connections = (0..count).map(|_| Connection::open(&server, settings));
    let connections: Result<Vec<Connection>, _> = connections.collect();
    let connections = connections.map_err(io::Error::other)?;
    let began = Instant::now();
    let mut sum = Tally::default();
    thread::scope(|scope| {
        let clients: Vec<_> = (0..count)
            .zip(connections)
            .map(|(at, connection)| {
                let key = key_name("own", at);
                scope.spawn(move || pairs(connection, &key, began + time))
            })
            .collect();
        for client in clients {
            let done = client.join().expect("clients return their errors");
            sum.grant_count += done.map_err(io::Error::other)?;
        }
        io::Result::Ok(())
    })?;
    sum.elapsed = began.elapsed();
    Ok(sum)
}

fn pairs(
    mut connection: Connection,
    key: &str,
    until: Instant,
) -> Result<u64, latchd::client::Error> {
    let mut count = 0;
    while count == 0 || Instant::now() < until {
        let grant = connection.acquire(key, Slot::LOCK, Wait::No)?;
        let grant = grant.expect("no other client has this key");
        connection.release(key, Slot::LOCK, grant.token)?;
        count += 1;
    }
    Ok(count)
}

/// A stunnel, killed when dropped.
struct Tunnel {
    child: Child,
    addr: SocketAddr,
}

impl Tunnel {
    fn start(directory: &Path, server: SocketAddr) -> io::Result<Tunnel> {
        let addr = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
        let config = directory.join("stunnel.conf");
        let shown = directory.display();
        fs::write(
            &config,
            format!(
                "foreground = yes\nsyslog = no\ndebug = err\npid =\n[latchd]\naccept = {addr}\n\
                 connect = {server}\ncert = {shown}/cert.pem\nkey = {shown}/key.pem\n\
                 socket = l:TCP_NODELAY=1\nsocket = r:TCP_NODELAY=1\n"
            ),
        )?;
        let child = Command::new("stunnel")
            .arg(&config)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| io::Error::other(format!("cannot start stunnel: {error}")))?;
        let mut tunnel = Tunnel { child, addr };
        let deadline = Instant::now() + PATIENCE;
        while TcpStream::connect(addr).is_err() {
            if tunnel.child.try_wait()?.is_some() || Instant::now() > deadline {
                return Err(io::Error::other("stunnel does not listen"));
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(tunnel)
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
