//! Host name lookup with a deadline. The system's resolver blocks for as long as its name servers
//! are silent, so it runs on a thread that the caller abandons at its deadline.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::text::in_brackets;

/// How many names are looked up at once, each on its own thread. Further callers wait.
const MAX_LOOKUPS: usize = 16;

/// How long a late answer is kept for the caller's next attempt.
const KEPT_FOR: Duration = Duration::from_secs(10);

/// The stack of a lookup thread, in bytes.
const STACK_LEN: usize = 128 * 1024;

/// Resolves `HOST:PORT`. An IPv6 address is in brackets and may have a zone, by number or by name.
/// Fails with [`io::ErrorKind::TimedOut`] at the deadline.
pub fn look_up(host_and_port: &str, deadline: Instant) -> io::Result<Vec<SocketAddr>> {
    static ALL: Lookups = Lookups::new(resolve);
    match host_and_port.parse() {
        Ok(addr) => Ok(vec![addr]),
        Err(_) => ALL.look_up(host_and_port, deadline),
    }
}

fn resolve(host_and_port: &str) -> io::Result<Vec<SocketAddr>> {
    let (host, port) = host_and_port
        .rsplit_once(':')
        .ok_or(io::ErrorKind::InvalidInput)?;
    let port: u16 = port.parse().map_err(io::Error::other)?;
    // The system resolver knows zone names, but not brackets.
    let host = in_brackets(host).unwrap_or(host);
    Ok((host, port).to_socket_addrs()?.collect())
}

type Resolve = fn(&str) -> io::Result<Vec<SocketAddr>>;

/// The pending lookups. Callers that ask for the same name share one.
struct Lookups {
    resolve: Resolve,
    by_name: Mutex<BTreeMap<String, Arc<Lookup>>>,
    /// Notified of every answer.
    answered: Condvar,
}

/// A lookup's answer, with the time at which it arrived.
type Lookup = OnceLock<(Instant, io::Result<Vec<SocketAddr>>)>;

impl Lookups {
    const fn new(resolve: Resolve) -> Lookups {
        Lookups {
            resolve,
            by_name: Mutex::new(BTreeMap::new()),
            answered: Condvar::new(),
        }
    }

    fn look_up(&'static self, name: &str, deadline: Instant) -> io::Result<Vec<SocketAddr>> {
        let mut by_name = self.by_name.lock().unwrap_or_else(PoisonError::into_inner);
        let mut ours: Option<Arc<Lookup>> = None;
        loop {
            if ours.is_none() {
                ours = self.join_or_start(&mut by_name, name)?;
            }
            if let Some((lookup, (_, answer))) = ours.as_ref().and_then(|it| Some((it, it.get()?)))
            {
                // The next caller starts a new lookup; those waiting on this one still hold it.
                if by_name.get(name).is_some_and(|it| Arc::ptr_eq(it, lookup)) {
                    by_name.remove(name);
                }
                return match answer {
                    Ok(addrs) => Ok(addrs.clone()),
                    Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
                };
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let waited = self.answered.wait_timeout(by_name, left);
            (by_name, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The lookup of this name, started if necessary; `None` if too many are pending.
    fn join_or_start(
        &'static self,
        by_name: &mut BTreeMap<String, Arc<Lookup>>,
        name: &str,
    ) -> io::Result<Option<Arc<Lookup>>> {
        by_name.retain(|_, lookup| lookup.get().is_none_or(|(at, _)| at.elapsed() < KEPT_FOR));
        if let Some(lookup) = by_name.get(name) {
            return Ok(Some(Arc::clone(lookup)));
        }
        let under_way = by_name.values().filter(|lookup| lookup.get().is_none());
        if under_way.count() >= MAX_LOOKUPS {
            return Ok(None);
        }
        let (lookup, name) = (Arc::<Lookup>::default(), name.to_owned());
        let (answer, wanted) = (Arc::clone(&lookup), name.clone());
        thread::Builder::new()
            .name("name-lookup".into())
            .stack_size(STACK_LEN)
            .spawn(move || {
                let resolved = (self.resolve)(&wanted);
                // Locked while notifying: a caller that found no answer is already asleep.
                let _by_name = self.by_name.lock();
                let _ = answer.set((Instant::now(), resolved));
                self.answered.notify_all();
            })?;
        by_name.insert(name, Arc::clone(&lookup));
        Ok(Some(lookup))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const MOMENT: Duration = Duration::from_millis(10);
    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn a_slow_lookup_is_left_behind_and_its_answer_found_later() {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        static GO_ON: Mutex<()> = Mutex::new(());
        static SLOW: Lookups = Lookups::new(|_| {
            COUNT.fetch_add(1, Ordering::SeqCst);
            drop(GO_ON.lock());
            Ok(vec![SocketAddr::from(([127, 0, 0, 1], 7))])
        });
        let held = GO_ON.lock();
        for _ in 0..3 {
            let error = SLOW.look_up("slow:7", Instant::now() + MOMENT);
            let error = error.expect_err("no answer yet");
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        }
        drop(held);
        let addrs = SLOW.look_up("slow:7", Instant::now() + PATIENCE);
        assert_eq!(addrs.expect("an answer").len(), 1);
        assert_eq!(COUNT.load(Ordering::SeqCst), 1);
        // An answer that has been given is not given again.
        let addrs = SLOW.look_up("slow:7", Instant::now() + PATIENCE);
        assert_eq!(addrs.expect("an answer").len(), 1);
        assert_eq!(COUNT.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn silent_name_servers_cost_a_bounded_number_of_threads() {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        static GO_ON: Mutex<()> = Mutex::new(());
        static SLOW: Lookups = Lookups::new(|_| {
            COUNT.fetch_add(1, Ordering::SeqCst);
            drop(GO_ON.lock());
            Ok(Vec::new())
        });
        let held = GO_ON.lock();
        for number in 0..3 * MAX_LOOKUPS {
            let name = format!("slow{number}:7");
            assert!(SLOW.look_up(&name, Instant::now()).is_err());
        }
        drop(held);
        let last = SLOW.look_up("another:7", Instant::now() + PATIENCE);
        assert!(last.is_ok(), "{last:?}");
        assert!(COUNT.load(Ordering::SeqCst) <= MAX_LOOKUPS + 1);
    }

    #[test]
    fn an_address_with_a_zone_needs_no_name_server() {
        let index = std::fs::read_to_string("/sys/class/net/lo/ifindex").expect("a loopback");
        let index: u32 = index.trim().parse().expect("a number");
        for zone in ["lo".to_owned(), index.to_string()] {
            let addrs = look_up(&format!("[fe80::1%{zone}]:7"), Instant::now() + PATIENCE);
            let addrs = addrs.expect("a zone");
            let [SocketAddr::V6(addr)] = addrs[..] else {
                panic!("{addrs:?}");
            };
            assert_eq!((addr.scope_id(), addr.port()), (index, 7), "{zone}");
        }
    }
}
