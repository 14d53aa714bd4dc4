//! What the processes with clients write down: a line before each request and one after its reply,
//! so that a killed process leaves all it knew.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::support::history::{now, History, Instant, Record, Reply, Request};

/// The file of one process; its threads share it.
pub struct Journal {
    file: File,
    next: AtomicU32,
}

impl Journal {
    pub fn create(path: &Path) -> Journal {
        let file = File::options().append(true).create_new(true).open(path);
        Journal {
            file: file.expect("a new file in our own directory"),
            next: AtomicU32::new(0),
        }
    }

    /// Notes that a request is about to be sent, and gives its number.
    pub fn begin(&self, term: u32, connection: u64, key: u32, request: Request) -> u32 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let words = match request {
            Request::Acquire {
                wait,
                lease,
                weight,
            } => format!("l {} {} {weight}", millis(wait), millis(lease)),
            Request::Enqueue { lease, weight } => format!("e {} {weight}", millis(lease)),
            Request::Wait { wait, lease } => format!("w {} {}", millis(wait), millis(lease)),
            Request::Renew { fence, lease } => format!("n {fence} {}", millis(lease)),
            Request::Release { fence } => format!("r {fence}"),
            Request::Break { fence } => format!("break {fence}"),
        };
        self.line(format!("begin {number} {term} {connection} {key} {words}"));
        number
    }

    pub fn end(&self, number: u32, reply: Reply) {
        let words = match reply {
            Reply::Granted { fence } => format!("granted {fence}"),
            Reply::Queued => "queued".to_owned(),
            Reply::TimedOut => "timeout".to_owned(),
            Reply::Done => "done".to_owned(),
            Reply::Refused => "refused".to_owned(),
            Reply::Lost => "lost".to_owned(),
        };
        self.line(format!("end {number} {words}"));
    }

    /// Notes that a connection is about to be closed, also in one direction.
    pub fn hang_up(&self, connection: u64) {
        self.line(format!("hang-up {connection}"));
    }

    pub fn hung_up(&self, connection: u64) {
        self.line(format!("hung-up {connection}"));
    }

    /// Notes what no client should ever see.
    pub fn complain(&self, what: &str) {
        self.line(format!("complaint {what}"));
    }

    /// One write, so that lines of several threads are not mixed.
    fn line(&self, words: String) {
        let line = format!("{} {words}\n", now().as_nanos());
        (&self.file)
            .write_all(line.as_bytes())
            .expect("there is room");
    }
}

fn millis(time: Duration) -> u128 {
    time.as_millis()
}

/// Adds what is in the journal to the history, and gives the complaints. The process ended between
/// the two instants.
pub fn read(path: &Path, history: &mut History, end: (Instant, Instant)) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap_or_default(); // killed before it began
    let mut open: HashMap<u64, Record> = HashMap::new();
    let mut connections: HashMap<u64, (Instant, Instant)> = HashMap::new();
    let mut complaints = Vec::new();
    for line in text
        .split_inclusive('\n')
        .filter(|line| line.ends_with('\n'))
    {
        let mut words = line.split_whitespace();
        let at = Duration::from_nanos(number(&mut words));
        match words.next() {
            Some("begin") => {
                let id = number(&mut words);
                let record = read_request(&mut words, at, end.1);
                connections.entry(record.connection).or_insert(end);
                open.insert(id, record);
            }
            Some("end") => {
                let mut record = open.remove(&number(&mut words)).expect("it began");
                record.end = at;
                record.reply = read_reply(&mut words);
                history.records.push(record);
            }
            Some("hang-up") => {
                let hang_up = connections.entry(number(&mut words)).or_insert(end);
                hang_up.0 = hang_up.0.min(at);
            }
            Some("hung-up") => {
                let hang_up = connections.entry(number(&mut words)).or_insert(end);
                hang_up.1 = hang_up.1.min(at);
            }
            _ => complaints.push(line.trim().to_owned()),
        }
    }
    history.records.extend(open.into_values());
    history.hang_ups.extend(connections);
    complaints
}

fn number<'a>(words: &mut impl Iterator<Item = &'a str>) -> u64 {
    let word = words.next().expect("a word more");
    word.parse().expect("a number")
}

fn time<'a>(words: &mut impl Iterator<Item = &'a str>) -> Duration {
    Duration::from_millis(number(words))
}

fn count<'a>(words: &mut impl Iterator<Item = &'a str>) -> usize {
    usize::try_from(number(words)).expect("a few")
}

fn read_request<'a>(
    words: &mut impl Iterator<Item = &'a str>,
    begin: Instant,
    end: Instant,
) -> Record {
    let term = u32::try_from(number(words)).expect("a few");
    let connection = number(words);
    let key = u32::try_from(number(words)).expect("a few");
    let request = match words.next() {
        Some("l") => Request::Acquire {
            wait: time(words),
            lease: time(words),
            weight: count(words),
        },
        Some("e") => Request::Enqueue {
            lease: time(words),
            weight: count(words),
        },
        Some("w") => Request::Wait {
            wait: time(words),
            lease: time(words),
        },
        Some("n") => Request::Renew {
            fence: number(words),
            lease: time(words),
        },
        Some("r") => Request::Release {
            fence: number(words),
        },
        _ => Request::Break {
            fence: number(words),
        },
    };
    Record {
        term,
        connection,
        key,
        begin,
        end,
        request,
        reply: Reply::Lost,
    }
}

fn read_reply<'a>(words: &mut impl Iterator<Item = &'a str>) -> Reply {
    match words.next() {
        Some("granted") => Reply::Granted {
            fence: number(words),
        },
        Some("queued") => Reply::Queued,
        Some("timeout") => Reply::TimedOut,
        Some("done") => Reply::Done,
        Some("refused") => Reply::Refused,
        _ => Reply::Lost,
    }
}
