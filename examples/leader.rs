//! Leader election: one of several candidates leads, and when it ends, the next one does.
//!
//! Start it in several terminals, on one host or on many. Then end the one that leads with
//! Control-C, or let it stand still with Control-Z for longer than the lease.
//!
//! ```text
//! cargo run --example leader -- [SERVER]
//! ```
//!
//! SERVER is HOST:PORT or the path of a Unix socket; without it 127.0.0.1:6388.

use std::error::Error;
use std::time::Duration;
use std::{env, process, thread};

use latchd::client::{Address, Client, Guard};

/// For how long there may be no leader when one falls silent. One that ends is replaced at once.
const LEASE: Duration = Duration::from_secs(3);

/// How long a step of the work may take: less than the quarter of the lease by which `is_held`
/// turns false before another candidate can lead.
const STEP: Duration = Duration::from_millis(100);

fn main() -> Result<(), Box<dyn Error>> {
    let server = env::args().nth(1);
    let server: Address = server.as_deref().unwrap_or("127.0.0.1:6388").parse()?;
    let client = Client::new([server]);
    loop {
        match client.lock("leader").lease(LEASE).acquire() {
            Ok(guard) => lead(&guard),
            Err(error) => {
                eprintln!("{}: {error}", process::id());
                thread::sleep(Duration::from_secs(1));
            }
        }
    }
}

/// Leads for as long as that is certain. The fence is the number of the term: what the leader
/// commands should refuse a leader with a lower one, see the example `fencing`.
fn lead(guard: &Guard) {
    println!("{} leads, term {}", process::id(), guard.token().fence());
    while guard.is_held() {
        thread::sleep(STEP); // the work of a leader
    }
    println!("{} steps down", process::id());
}
