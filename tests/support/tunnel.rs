//! A tunnel of stunnel, with one service.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Stdio};
use std::sync::{mpsc, Arc, Mutex};
use std::thread;

use super::needs::Program;
use super::PATIENCE;

/// A running stunnel, killed when dropped.
pub struct Tunnel {
    child: Child,
    addr: SocketAddr,
    _config: tempfile::TempDir,
}

impl Tunnel {
    /// Runs a service that accepts on port 0 of 127.0.0.1, and waits until it does.
    pub fn start(stunnel: &Program, service: &str) -> Tunnel {
        let directory = tempfile::tempdir().expect("there is room for a directory");
        let config = directory.path().join("stunnel.conf");
        let globals = "foreground = yes\nsyslog = no\ndebug = info\npid =\n";
        std::fs::write(&config, format!("{globals}{service}")).expect("there is room");
        let mut child = stunnel
            .command()
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("stunnel is installed");
        let log = BufReader::new(child.stderr.take().expect("it is a pipe"));
        let (sender, bound) = mpsc::channel();
        let log_text = Arc::new(Mutex::new(String::new()));
        let said = Arc::clone(&log_text);
        thread::spawn(move || {
            for line in log.lines().map_while(Result::ok) {
                said.lock().unwrap().push_str(&format!("{line}\n"));
                let addr = line.split_once(" bound to ").map(|(_, addr)| addr);
                if let Some(addr) = addr.and_then(|addr| addr.parse::<SocketAddr>().ok()) {
                    // A log that is not read would hold up the tunnel.
                    let _ = sender.send(addr);
                }
            }
        });
        let mut tunnel = Tunnel {
            child,
            addr: SocketAddr::from(([127, 0, 0, 1], 0)),
            _config: directory,
        };
        tunnel.addr = bound.recv_timeout(PATIENCE).unwrap_or_else(|_| {
            panic!("stunnel does not listen:\n{}", log_text.lock().unwrap());
        });
        tunnel
    }

    /// Where it accepts.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
