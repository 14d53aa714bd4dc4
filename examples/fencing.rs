//! Why a lock alone does not protect anything, and how its fence does: a holder that was stopped
//! for too long goes on, believes that it still holds the lock, and is refused.
//!
//! ```text
//! cargo run --example fencing -- [SERVER]
//! ```
//!
//! SERVER is HOST:PORT or the path of a Unix socket; without it 127.0.0.1:6388.

use std::env;
use std::error::Error;
use std::time::Duration;

use latchd::client::{Address, Client, Slot, Wait};

/// What the lock protects. In earnest this is a database or another server.
#[derive(Default)]
struct Store {
    text: String,
    /// The highest fence that has come with a write.
    highest_fence: u64,
}

impl Store {
    /// Writes, unless a holder with a higher fence has written. Comparing and writing are one step:
    /// no other write comes in between.
    fn write(&mut self, text: &str, fence: u64) -> Result<(), &'static str> {
        if fence < self.highest_fence {
            return Err("refused, a later holder has written");
        }
        self.highest_fence = fence;
        self.text = text.to_owned();
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let server = env::args().nth(1);
    let server: Address = server.as_deref().unwrap_or("127.0.0.1:6388").parse()?;
    let client = Client::new([server]);
    let mut store = Store::default();

    // A plain connection renews nothing, like a process that is swapped out or a suspended host.
    let mut connection = client.connect(client.server_of("store"))?;
    let slot = Slot::LOCK.with_lease(Duration::from_secs(1));
    let slow = connection
        .acquire("store", slot, Wait::No)?
        .ok_or("the lock has another holder")?;
    println!("slow holds the lock, and stands still");

    // The lease ends after a second, and the lock goes to the next one.
    let fast = client.lock("store").acquire()?;
    store.write("by fast", fast.token().fence())?;
    println!("fast holds the lock: written");
    fast.release()?;

    // Nothing tells it how long it has been away. It goes on where it was.
    match store.write("by slow", slow.token.fence()) {
        Ok(()) => println!("slow goes on: written"),
        Err(why) => println!("slow goes on: {why}"),
    }
    println!("the store has what was written {}", store.text);
    Ok(())
}
