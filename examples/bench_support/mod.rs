//! What the benches of servers have in common: the servers, in processes of their own.

use std::io::{self, BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;

/// Says which server a process is to be; the arguments belong to that server alone.
const ROLE: &str = "BENCH_ROLE";

/// Enough for a thread of a bench.
pub const SMALL_STACK: usize = 64 * 1024;

/// A server in a process of its own, on a port of its own choice; ended when dropped.
pub struct Server {
    child: Child,
    pub addr: SocketAddr,
}

impl Server {
    /// Starts this program once more, for `role`. `directed` says what the server shall know.
    pub fn start(role: &str, directed: impl FnOnce(&mut Command)) -> io::Result<Server> {
        let mut command = Command::new(std::env::current_exe()?);
        directed(&mut command);
        let mut child = command
            .arg("--print-port")
            .env(ROLE, role)
            .env("RUST_LOG", "warn")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().expect("stdout is piped");
        // Built before the port is looked at, so that a server without one is ended too.
        let mut server = Server {
            child,
            addr: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        };
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        let port = line.trim().parse();
        let port = port.map_err(|_| io::Error::other(format!("{role} did not start")))?;
        server.addr.set_port(port);
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself; either way it is gone afterwards.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Which server this process is to be; `None` for the bench itself.
pub fn role() -> Option<String> {
    let role = std::env::var(ROLE).ok()?;
    // If its parent is killed, nothing else ends it.
    thread::spawn(|| {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        std::process::exit(0);
    });
    Some(role)
}

/// The measure of the machine: the same bytes to and fro, nothing in between. A thread for each
/// connection lets `converse` do that.
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

/// The error for a reply that is none of those that the bench asked for.
pub fn unexpected(reply: &[u8]) -> io::Error {
    io::Error::other(format!(
        "unexpected reply {:?}",
        String::from_utf8_lossy(reply)
    ))
}
