//! Only one process at a time writes a report. A lock file keeps the others out: without a server,
//! and together with shell scripts that use the same file.
//!
//! ```text
//! cargo run --example lockfile -- /tmp/report.lock
//! ```
//!
//! Start it twice: the second waits, and says for which process. Exit status: 0, or 1 if the lock
//! is not granted within ten seconds.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use latchd::lockfile::{LockInfo, Semaphore, SemaphoreConfig, SemaphoreError, SemaphoreOptions};

fn main() -> ExitCode {
    let path = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "/tmp/report.lock".into());
    match report(&path) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lockfile: {path}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn report(path: &str) -> Result<(), SemaphoreError> {
    let is_lost = Arc::new(AtomicBool::new(false));
    let tell = Arc::clone(&is_lost);
    let config = SemaphoreConfig {
        acquire_timeout: Some(Duration::from_secs(10)),
        ..SemaphoreConfig::default()
    };
    let options = SemaphoreOptions::new()
        .heartbeat(true)
        .on_lost(move || tell.store(true, Ordering::SeqCst));
    let semaphore = Semaphore::with_options(path, config, options)?;

    if let Some(holder) = semaphore.lock_info() {
        let tag = holder.tag.as_deref().unwrap_or("something");
        println!("waiting for process {}, which does {tag:?}", holder.pid);
    }
    let guard = semaphore.acquire_with_info(LockInfo::with_tag("weekly report"))?;
    println!("writing");
    for _ in 0..10 {
        // Any process that may write to the directory can remove the lock file. So the holder
        // checks before each step that it still has the lock.
        if is_lost.load(Ordering::SeqCst) {
            return Err(SemaphoreError::Lost);
        }
        thread::sleep(Duration::from_millis(100));
    }
    guard.release()?;
    println!("done");
    Ok(())
}
