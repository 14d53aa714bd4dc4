//! A semaphore: of many workers, only so many work at a time, on however many hosts they are.
//!
//! ```text
//! cargo run --example worker_pool -- [SERVER]
//! ```
//!
//! SERVER is HOST:PORT or the path of a Unix socket; without it 127.0.0.1:6388. Start it twice at
//! the same time, and both share the slots.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use std::{env, thread};

use latchd::client::{Address, Client, Error};

const WORKERS: usize = 8;

/// How many may work at a time. All who use the key must say the same.
const LIMIT: u32 = 3;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = env::args().nth(1);
    let server: Address = server.as_deref().unwrap_or("127.0.0.1:6388").parse()?;
    let (client, busy_count) = (&Client::new([server]), &AtomicUsize::new(0));
    thread::scope(|scope| {
        let workers: Vec<_> = (1..=WORKERS)
            .map(|number| scope.spawn(move || work(number, client, busy_count)))
            .collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().expect("a worker returns its errors"))
    })?;
    Ok(())
}

fn work(number: usize, client: &Client, busy_count: &AtomicUsize) -> Result<(), Error> {
    let slot = client.semaphore("worker-pool", LIMIT).acquire()?;
    let now = busy_count.fetch_add(1, Ordering::SeqCst) + 1;
    println!("worker {number} works, {now} at a time");
    thread::sleep(Duration::from_millis(200)); // the work
    busy_count.fetch_sub(1, Ordering::SeqCst);
    slot.release() // dropping it would do the same, and hide an error
}
