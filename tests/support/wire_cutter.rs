//! A proxy in front of a server, whose connections a test can cut, stall or half-close.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use super::{eventually, PATIENCE};

/// A running proxy. It ends with the process.
pub struct WireCutter {
    addr: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    wires: Mutex<Vec<Arc<Wire>>>,
    /// New connections are closed at once.
    hangs_up: AtomicBool,
    hang_up_count: AtomicUsize,
    /// It listens no longer.
    is_closed: AtomicBool,
    /// The replies of the next connection go nowhere.
    swallows_next: AtomicBool,
    /// A new connection ends for the server behind the first requests, but replies are passed on.
    half_closes: AtomicBool,
}

/// One connection through the proxy.
pub struct Wire {
    client: TcpStream,
    server: TcpStream,
    stalls: AtomicBool,
    swallows: AtomicBool,
    half_closes: bool,
    /// What the server has answered, whether it was passed on or not.
    replies: Mutex<Vec<u8>>,
}

impl WireCutter {
    pub fn before(server: SocketAddr) -> WireCutter {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        WireCutter::behind(listener, server)
    }

    /// Runs one that listens here already.
    pub fn behind(listener: TcpListener, server: SocketAddr) -> WireCutter {
        let addr = listener.local_addr().expect("its address");
        let shared = Arc::<Shared>::default();
        let ours = Arc::clone(&shared);
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if ours.is_closed.load(Ordering::SeqCst) {
                    break;
                }
                if ours.hangs_up.load(Ordering::SeqCst) {
                    ours.hang_up_count.fetch_add(1, Ordering::SeqCst);
                    continue;
                }
                let Ok(server) = TcpStream::connect(server) else {
                    continue;
                };
                let swallows = ours.swallows_next.swap(false, Ordering::SeqCst);
                let half_closes = ours.half_closes.load(Ordering::SeqCst);
                let wire = Wire::between(client, server, swallows, half_closes);
                // Who has got an answer over it finds it there.
                ours.wires.lock().unwrap().push(Arc::clone(&wire));
                wire.pass_on();
            }
        });
        WireCutter { addr, shared }
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// How many connections there have been.
    pub fn count(&self) -> usize {
        self.shared.wires.lock().unwrap().len()
    }

    /// The latest connection.
    pub fn wire(&self) -> Arc<Wire> {
        let wires = self.shared.wires.lock().unwrap();
        Arc::clone(wires.last().expect("a client has connected"))
    }

    /// Waits until there have been so many connections.
    pub fn wait_for(&self, count: usize) {
        eventually(PATIENCE, "another connection", || self.count() >= count);
    }

    /// Whether new connections are closed at once.
    pub fn hang_up(&self, hangs_up: bool) {
        self.shared.hangs_up.store(hangs_up, Ordering::SeqCst);
    }

    /// Waits until so many more connections have been closed at once.
    pub fn wait_for_hang_ups(&self, count: usize) {
        let now = || self.shared.hang_up_count.load(Ordering::SeqCst);
        let wanted = now() + count;
        eventually(PATIENCE, "attempts to connect", || now() >= wanted);
    }

    /// Whether one of the connections has had this reply.
    pub fn has_answered(&self, reply: &str) -> bool {
        let wires = self.shared.wires.lock().unwrap();
        wires
            .iter()
            .any(|wire| wire.replies().lines().any(|line| line == reply))
    }

    /// Listens no longer, and cuts all connections.
    pub fn close(&self) {
        self.shared.is_closed.store(true, Ordering::SeqCst);
        // It wakes up for one more connection, and then its listener is gone.
        let mut last = TcpStream::connect(self.addr).expect("it listens");
        let _ = last.read(&mut [0]);
        eventually(PATIENCE, "it listens no longer", || {
            TcpStream::connect(self.addr).is_err()
        });
        let wires = self.shared.wires.lock().unwrap();
        wires.iter().for_each(|wire| wire.cut());
    }

    /// Whether new connections end for the server behind the first requests, while replies are
    /// passed on.
    pub fn half_close_servers(&self, half_closes: bool) {
        self.shared.half_closes.store(half_closes, Ordering::SeqCst);
    }

    /// Has the replies of the next connection go nowhere.
    pub fn swallow_next(&self) {
        self.shared.swallows_next.store(true, Ordering::SeqCst);
    }
}

impl Wire {
    fn between(
        client: TcpStream,
        server: TcpStream,
        swallows: bool,
        half_closes: bool,
    ) -> Arc<Wire> {
        for stream in [&client, &server] {
            stream.set_nodelay(true).expect("TCP knows TCP_NODELAY");
        }
        Arc::new(Wire {
            client,
            server,
            stalls: AtomicBool::new(false),
            swallows: AtomicBool::new(swallows),
            half_closes,
            replies: Mutex::default(),
        })
    }

    /// What the server has answered until now, whether it was passed on or not.
    pub fn replies(&self) -> String {
        String::from_utf8_lossy(&self.replies.lock().unwrap()).into_owned()
    }

    /// Whether the client has had an answer over it.
    pub fn has_passed_replies(&self) -> bool {
        !self.swallows.load(Ordering::SeqCst) && !self.replies.lock().unwrap().is_empty()
    }

    fn pass_on(self: Arc<Wire>) {
        for is_reply in [false, true] {
            let wire = Arc::clone(&self);
            thread::spawn(move || wire.copy(is_reply));
        }
    }

    /// The end of the server's side is passed on.
    fn copy(&self, is_reply: bool) {
        let (mut from, mut to) = if is_reply {
            (&self.server, &self.client)
        } else {
            (&self.client, &self.server)
        };
        let mut chunk = [0; 4096];
        while let Ok(len @ 1..) = from.read(&mut chunk) {
            if self.stalls.load(Ordering::SeqCst) {
                return;
            }
            if is_reply {
                self.replies.lock().unwrap().extend(&chunk[..len]);
            }
            let is_swallowed = is_reply && self.swallows.load(Ordering::SeqCst);
            if !is_swallowed && to.write_all(&chunk[..len]).is_err() {
                return;
            }
            if !is_reply && self.half_closes {
                let _ = to.shutdown(Shutdown::Write);
                return;
            }
        }
        if is_reply {
            // The server has closed it.
            let _ = to.shutdown(Shutdown::Write);
        }
    }

    /// Ends it for the client alone: the server does not notice.
    pub fn cut_client(&self) {
        let _ = self.client.shutdown(Shutdown::Both);
    }

    /// Ends it for the server. The client sees the end once the server has closed its side, with
    /// which it has released what it releases.
    pub fn cut_server(&self) {
        let _ = self.server.shutdown(Shutdown::Write);
    }

    pub fn cut(&self) {
        self.cut_server();
        self.cut_client();
    }

    /// Tells the client that nothing more comes.
    pub fn half_close_client(&self) {
        let _ = self.client.shutdown(Shutdown::Write);
    }

    /// Passes nothing on from now on, in either direction.
    pub fn stall(&self) {
        self.stalls.store(true, Ordering::SeqCst);
    }

    /// Passes no reply on from now on.
    pub fn swallow(&self) {
        self.swallows.store(true, Ordering::SeqCst);
    }
}
