//! A proxy before a member of etcd, which does to requests what networks do.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Pass,
    /// It does not arrive.
    Drop,
    /// It is carried out, and the answer does not arrive.
    LoseAnswer,
    /// It is carried out twice, and answered once.
    Double,
    /// It arrives later than the client waits for it, and the answer does not.
    Late(Duration),
    /// It arrives when the test says so.
    Hold,
}

type Policy = Box<dyn FnMut(&str) -> Fate + Send>;

/// A proxy. It ends with the test process.
pub struct Proxy {
    pub port: u16,
    member: u16,
    policy: Arc<Mutex<Policy>>,
    held: Arc<Mutex<Vec<String>>>,
}

impl Proxy {
    /// A proxy before the member at a port. It passes everything.
    pub fn start(member: u16) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let proxy = Proxy {
            port: listener.local_addr().expect("an address").port(),
            member,
            policy: Arc::new(Mutex::new(Box::new(|_: &str| Fate::Pass))),
            held: Arc::default(),
        };
        let (policy, held) = (Arc::clone(&proxy.policy), Arc::clone(&proxy.held));
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (policy, held) = (Arc::clone(&policy), Arc::clone(&held));
                thread::spawn(move || {
                    // An end of either side ends the connection.
                    let _ = serve(&client, member, &policy, &held);
                    let _ = client.shutdown(Shutdown::Both);
                });
            }
        });
        proxy
    }

    pub fn endpoint(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Decides about each request from now on.
    pub fn decide(&self, policy: impl FnMut(&str) -> Fate + Send + 'static) {
        *self.policy.lock().unwrap() = Box::new(policy);
    }

    pub fn held_count(&self) -> usize {
        self.held.lock().unwrap().len()
    }

    /// Has the requests arrive that were held, and returns the answers.
    pub fn deliver(&self) -> Vec<String> {
        let held = std::mem::take(&mut *self.held.lock().unwrap());
        let deliver = |request: &String| {
            let answer = forward(request, self.member, None).expect("etcd answers");
            String::from_utf8_lossy(&answer).into_owned()
        };
        held.iter().map(deliver).collect()
    }
}

fn serve(
    mut client: &TcpStream,
    member: u16,
    policy: &Mutex<Policy>,
    held: &Mutex<Vec<String>>,
) -> io::Result<()> {
    loop {
        let request = read_request(&mut client)?;
        let fate = policy.lock().unwrap()(&request);
        match fate {
            Fate::Pass => {
                forward(&request, member, Some(client))?;
                continue;
            }
            Fate::Double => {
                forward(&request, member, None)?;
                forward(&request, member, Some(client))?;
                continue;
            }
            Fate::Drop => {}
            Fate::LoseAnswer => drop(forward(&request, member, None)?),
            Fate::Hold => held.lock().unwrap().push(request),
            Fate::Late(time) => {
                thread::spawn(move || {
                    thread::sleep(time);
                    let _ = forward(&request, member, None);
                });
            }
        }
        return Ok(());
    }
}

/// Reads a request, and has the member close the connection behind its answer.
fn read_request(client: &mut impl Read) -> io::Result<String> {
    let mut bytes = Vec::new();
    let mut some = [0; 4096];
    loop {
        let text = String::from_utf8_lossy(&bytes);
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let len = head.split("Content-Length: ").nth(1);
            let len = len.and_then(|rest| rest.split("\r\n").next()?.parse::<usize>().ok());
            if body.len() >= len.unwrap_or(0) {
                return Ok(format!("{head}\r\nConnection: close\r\n\r\n{body}"));
            }
        }
        match client.read(&mut some)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            len => bytes.extend_from_slice(&some[..len]),
        }
    }
}

/// Has the member carry out a request. The answer goes to the client, if there is one, while it
/// arrives.
fn forward(request: &str, member: u16, client: Option<&TcpStream>) -> io::Result<Vec<u8>> {
    let mut upstream = TcpStream::connect(("127.0.0.1", member))?;
    upstream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    let mut some = [0; 4096];
    loop {
        let len = upstream.read(&mut some)?;
        if len == 0 {
            return Ok(answer);
        }
        match client {
            Some(mut client) => client.write_all(&some[..len])?,
            None => answer.extend_from_slice(&some[..len]),
        }
    }
}
