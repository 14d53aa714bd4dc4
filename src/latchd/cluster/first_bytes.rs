//! The first bytes of a connection, by which a server of a cluster decides who serves it. They are
//! read as they arrive, and go on to whichever server that is.

use std::mem;
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::{recv, RecvFlags};

use crate::os::event::wait_until_readable;
use crate::os::stream::Stream;
use crate::wire::request::{CLUSTER, RELAY};

/// The maximum number of bytes to read before the decision. A frame (three lines) that is read here
/// must not be longer.
const MAX_LEN: usize = 1024;

/// What the first bytes of a connection mean.
#[derive(Debug, PartialEq, Eq)]
pub enum Meaning {
    /// Another server passes on a client, because it takes this server for the active one.
    Relay,
    /// The client asks for the role of this server.
    Cluster,
    Other,
    /// The client has closed the connection, and its bytes mean nothing yet.
    End,
}

/// The bytes that have been read from a client, and that nobody has dealt with.
#[derive(Default)]
pub struct FirstBytes(Vec<u8>);

impl FirstBytes {
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    /// What the bytes mean; `None` if that is still unclear at the deadline. Blocks until enough
    /// bytes have arrived.
    pub fn meaning_within(&mut self, client: &Stream, deadline: Instant) -> Option<Meaning> {
        loop {
            let found = match self.0.first() {
                // A client that speaks TLS asks for the role inside TLS, so the active server
                // answers it.
                Some(first) if client.is_tls() && *first != RELAY[0] => Some(Meaning::Other),
                Some(_) => meaning(&self.0),
                None => None,
            };
            if found.is_some() {
                return found;
            }
            if self.read(client, deadline)? == 0 {
                return Some(Meaning::End);
            }
        }
    }

    /// Takes three lines; `None` if they do not arrive by the deadline, or are too long.
    pub fn take_frame(&mut self, client: &Stream, deadline: Instant) -> Option<Vec<u8>> {
        loop {
            let mut ends = (0..self.0.len()).filter(|at| self.0[*at] == b'\n');
            if let Some(end) = ends.nth(2) {
                let rest = self.0.split_off(end + 1);
                return Some(mem::replace(&mut self.0, rest));
            }
            if self.0.len() == MAX_LEN || self.read(client, deadline)? == 0 {
                return None;
            }
        }
    }

    /// Reads the bytes that arrive next, and returns their number: 0 at the end of the stream, and
    /// `None` at the deadline.
    fn read(&mut self, client: &Stream, deadline: Instant) -> Option<usize> {
        let mut piece = [0; MAX_LEN];
        loop {
            match recv(client, &mut piece[self.0.len()..], RecvFlags::DONTWAIT) {
                Ok((len, _)) => {
                    let from = self.0.len();
                    self.0.extend(&piece[from..from + len]);
                    return Some(len);
                }
                Err(Errno::AGAIN | Errno::INTR) if deadline <= Instant::now() => return None,
                Err(Errno::AGAIN | Errno::INTR) => {
                    wait_until_readable(client, deadline);
                }
                Err(_) => return Some(0),
            }
        }
    }
}

/// What bytes mean; `None` while they are too few to tell.
fn meaning(bytes: &[u8]) -> Option<Meaning> {
    let begins = |word: &[u8]| word.iter().zip(bytes).all(|(one, other)| one == other);
    let mut words = [(RELAY, Meaning::Relay), (CLUSTER, Meaning::Cluster)].into_iter();
    let Some((word, meaning)) = words.find(|(word, _)| begins(word)) else {
        return Some(Meaning::Other);
    };
    Some(match bytes.get(word.len())? {
        b'\n' => meaning,
        // A person who types the word in telnet ends the line with CR LF.
        b'\r' if word == CLUSTER => meaning,
        _ => Meaning::Other,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::stream::Socket;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    #[test]
    fn the_first_bytes_are_one_of_two_words_or_neither() {
        for (bytes, expected) in [
            ("", None),
            ("r", None),
            ("relay", None),
            ("relay\n", Some(Meaning::Relay)),
            ("relay\n1", Some(Meaning::Relay)),
            ("relay\r\n", Some(Meaning::Other)),
            ("cluster\r\n", Some(Meaning::Cluster)),
            ("relays\n", Some(Meaning::Other)),
            ("clu", None),
            ("cluster", None),
            ("cluster\n", Some(Meaning::Cluster)),
            ("clusters", Some(Meaning::Other)),
            ("l\nk\n0\n", Some(Meaning::Other)),
            ("\n", Some(Meaning::Other)),
            ("RELAY\n", Some(Meaning::Other)),
        ] {
            assert_eq!(meaning(bytes.as_bytes()), expected, "{bytes:?}");
        }
    }

    #[test]
    fn a_frame_is_taken_without_the_bytes_behind_it() {
        let (mut client, ours) = UnixStream::pair().expect("two descriptors");
        let stream = Stream::new(Socket::Unix(ours));
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut first = FirstBytes::default();
        client.write_all(b"cluster\n_").expect("there is room");
        let found = first.meaning_within(&stream, deadline);
        assert_eq!(found, Some(Meaning::Cluster));
        client.write_all(b"\n_\nl\nk").expect("there is room");
        let frame = first.take_frame(&stream, deadline);
        assert_eq!(frame.as_deref(), Some(&b"cluster\n_\n_\n"[..]));
        drop(client);
        let found = first.meaning_within(&stream, deadline);
        assert_eq!(found, Some(Meaning::Other));
        assert_eq!(first.take_frame(&stream, deadline), None);
        assert_eq!(first.into_bytes(), b"l\nk");
    }

    #[test]
    fn a_client_that_says_too_little_is_noticed() {
        for (begun, closes) in [("", true), ("rel", true), ("", false), ("rel", false)] {
            let (mut client, ours) = UnixStream::pair().expect("two descriptors");
            client.write_all(begun.as_bytes()).expect("there is room");
            let client = (!closes).then_some(client);
            let stream = Stream::new(Socket::Unix(ours));
            let found = FirstBytes::default().meaning_within(&stream, Instant::now());
            assert_eq!(found, closes.then_some(Meaning::End), "{begun:?} {closes}");
            drop(client);
        }
    }
}
