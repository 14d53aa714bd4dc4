//! The end of the standard input, by which a script ends a program that it has started.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use crate::sys::event::Event;

/// How long a wait is before an input that is closed ends it. A lock that is free is granted
/// before, however the two threads run.
const GRACE: Duration = Duration::from_secs(2);

/// The end of the standard input, which a thread waits for. What comes before is not used.
pub struct StdinWatch {
    /// Set at the end.
    pub closed: Event,
    /// Set after the end, but not before the wait has lasted for two seconds.
    pub abandoned: Event,
}

impl StdinWatch {
    /// Begins to read.
    pub fn watch() -> io::Result<StdinWatch> {
        let (closed, abandoned) = (Event::new()?, Event::new()?);
        let events = (closed.clone(), abandoned.clone());
        let began = Instant::now();
        thread::Builder::new().name("input".into()).spawn(move || {
            let _ = io::copy(&mut io::stdin(), &mut io::sink());
            let (closed, abandoned) = events;
            closed.set();
            thread::sleep(GRACE.saturating_sub(began.elapsed()));
            abandoned.set();
        })?;
        Ok(StdinWatch { closed, abandoned })
    }
}
