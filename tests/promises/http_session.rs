//! A session over HTTP, as clients of the chaos use it in the place of a connection.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use crate::support::is_soon;

/// How long a request may take beside its wait.
const PATIENCE: Duration = Duration::from_secs(40);

/// A session that its client has not ended.
pub struct HttpSession {
    door: SocketAddr,
    id: String,
}

impl HttpSession {
    /// Opens a session, and notes it in the file of its process: without a connection, the death
    /// of the process does not end it.
    pub fn open(door: SocketAddr, notes: &Path) -> io::Result<HttpSession> {
        let (status, body) = ask(door, "POST", "/v1/sessions", "", "", Duration::ZERO, None)?;
        let id = body["session_id"].as_str().filter(|_| status == 200);
        let id = id.ok_or(ErrorKind::ConnectionRefused)?.to_owned();
        let mut notes = File::options().append(true).create(true).open(notes)?;
        notes.write_all(format!("{door} {id}\n").as_bytes())?;
        Ok(HttpSession { door, id })
    }

    /// Sends a request of the session, and returns the status and the body of the answer. Leaves
    /// after `patience`, if there is one.
    pub fn post(
        &self,
        path: &str,
        body: &str,
        wait: Duration,
        patience: Option<Duration>,
    ) -> io::Result<(u16, serde_json::Value)> {
        let header = format!("X-Dflockd-Session: {}\r\n", self.id);
        ask(self.door, "POST", path, &header, body, wait, patience)
    }

    /// Ends the session, unless its server has ended.
    pub fn end(&self) {
        let path = format!("/v1/sessions/{}", self.id);
        // The server may be short of descriptors or of memory.
        is_soon(PATIENCE, || {
            match ask(self.door, "DELETE", &path, "", "", Duration::ZERO, None) {
                Ok((status, _)) => [204, 410].contains(&status),
                Err(error) => error.kind() == ErrorKind::ConnectionRefused,
            }
        });
    }
}

/// The file with the sessions of a process.
pub fn notes(directory: &Path, process: u64) -> PathBuf {
    directory.join(format!("sessions-{process}"))
}

/// Ends the sessions of a process that has died.
pub fn end_all(directory: &Path, process: u64) {
    let text = fs::read_to_string(notes(directory, process)).unwrap_or_default();
    let whole = text.split_inclusive('\n').filter(|it| it.ends_with('\n'));
    let sessions: Vec<HttpSession> = whole
        .filter_map(|line| {
            let (door, id) = line.trim_end().split_once(' ')?;
            let (door, id) = (door.parse().ok()?, id.to_owned());
            Some(HttpSession { door, id })
        })
        .collect();
    // The newest are those that it has not ended itself.
    sessions.iter().rev().for_each(HttpSession::end);
}

fn ask(
    door: SocketAddr,
    method: &str,
    path: &str,
    header: &str,
    body: &str,
    wait: Duration,
    patience: Option<Duration>,
) -> io::Result<(u16, serde_json::Value)> {
    let mut stream = TcpStream::connect_timeout(&door, Duration::from_secs(10))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(wait + PATIENCE))?;
    let len = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: {door}\r\nContent-Length: {len}\r\n{header}\r\n{body}"
    );
    stream.write_all(request.as_bytes())?;
    if let Some(patience) = patience {
        thread::sleep(patience);
        return Err(ErrorKind::Other.into());
    }
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let lost = || io::Error::from(ErrorKind::UnexpectedEof);
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(lost)?;
    let status = head.split(' ').nth(1).and_then(|word| word.parse().ok());
    let body = serde_json::from_str(body).unwrap_or_default();
    Ok((status.ok_or_else(lost)?, body))
}
