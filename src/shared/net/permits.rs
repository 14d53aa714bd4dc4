//! Caps on what clients have at once: in total, and from each source.

use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;

/// The minimum value of [`share_of`].
const MIN_SHARE: usize = 8;

/// The maximum number for one user, or for strangers, if `count` is the maximum for all clients: a
/// quarter of it, but at least `MIN_SHARE`.
pub fn share_of(count: usize) -> usize {
    (count / 4).max(MIN_SHARE)
}

/// Where a client comes from, for a cap on what one source has at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// An address, or an IPv6 network of 64 bits.
    Address(IpAddr),
    /// A user of this host. All unknown users together count as one source.
    User(Option<u32>),
}

/// What each source has, sorted by source.
#[derive(Debug, Default)]
pub struct PerSource(Vec<(Source, usize)>);

impl PerSource {
    /// Counts one more from `source`, which may have at most `max`. Returns whether it may.
    #[must_use]
    pub fn add(&mut self, source: Source, max: usize) -> bool {
        match self.place_of(source) {
            Ok(at) if self.0[at].1 < max => self.0[at].1 += 1,
            Err(at) if max > 0 => self.0.insert(at, (source, 1)),
            _ => return false,
        }
        true
    }

    /// Counts one less from `source`.
    pub fn remove(&mut self, source: Source) {
        if let Ok(at) = self.place_of(source) {
            self.0[at].1 -= 1;
            if self.0[at].1 == 0 {
                self.0.remove(at);
            }
        }
    }

    /// The index at which `source` is counted, or the index at which to insert it.
    fn place_of(&self, source: Source) -> Result<usize, usize> {
        self.0.binary_search_by_key(&source, |(known, _)| *known)
    }
}

/// Permits for something, of which each address may have a limited number at once.
#[derive(Debug)]
pub struct Permits {
    max: usize,
    max_per_address: Option<usize>,
    taken: Mutex<(usize, PerSource)>,
}

/// One of the permits, which is free again when this is dropped.
#[derive(Debug)]
pub struct Permit {
    permits: Arc<Permits>,
    source: Option<Source>,
}

/// The cap because of which a client gets no permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PermitCap {
    Total,
    PerAddress,
}

impl Permits {
    pub fn new(max: usize, max_per_address: Option<usize>) -> Arc<Permits> {
        Arc::new(Permits {
            max,
            max_per_address,
            taken: Mutex::default(),
        })
    }

    /// Takes a permit for a client at `address`. A client without an address counts only for the
    /// total.
    pub fn take(self: &Arc<Self>, address: Option<IpAddr>) -> Result<Permit, PermitCap> {
        let mut taken = self.taken.lock();
        let (count, per_source) = &mut *taken;
        if *count >= self.max {
            return Err(PermitCap::Total);
        }
        let counted = self.max_per_address.zip(address.map(Source::Address));
        if counted.is_some_and(|(max, source)| !per_source.add(source, max)) {
            return Err(PermitCap::PerAddress);
        }
        *count += 1;
        Ok(Permit {
            permits: Arc::clone(self),
            source: counted.map(|(_, source)| source),
        })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut taken = self.permits.taken.lock();
        taken.0 -= 1;
        if let Some(source) = self.source {
            taken.1.remove(source);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl PerSource {
        pub fn is_empty(&self) -> bool {
            self.0.is_empty()
        }
    }

    #[test]
    fn a_permit_counts_for_its_address_and_for_the_total() {
        let permits = Permits::new(3, Some(2));
        let [one, other] = [1, 2].map(|last| Some(IpAddr::from([127, 0, 0, last])));
        let first = permits.take(one).expect("room");
        let _second = permits.take(one).expect("room");
        assert_eq!(permits.take(one).err(), Some(PermitCap::PerAddress));
        let _third = permits.take(other).expect("room for another address");
        assert_eq!(permits.take(None).err(), Some(PermitCap::Total));
        drop(first);
        assert!(permits.take(one).is_ok());
    }
}
