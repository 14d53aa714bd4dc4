//! Random numbers from the system.
//!
//! The system call comes first, and the device only where the call is missing or forbidden. The
//! call makes the kernel of a board without a source of entropy gather some, whereas `/dev/random`
//! would stay empty there. Whether the call works is learned from the call that is needed: some C
//! libraries answer a call for no bytes themselves, also where the kernel refuses every real one.

use std::fs::File;
use std::io::{self, Read};

use rustix::event::{poll, PollFd, PollFlags};
use rustix::io::{retry_on_intr, Errno};
use rustix::rand::{getrandom, GetRandomFlags};

/// Whether [`fill`] would return at once. Soon after a small board has booted, the kernel may not
/// have gathered enough entropy.
pub fn is_ready() -> bool {
    getrandom(&mut [0u8], GetRandomFlags::NONBLOCK) != Err(Errno::AGAIN)
}

/// Fills `bytes` with random bytes. Soon after boot, blocks until the kernel has gathered enough
/// entropy. Uses `/dev/urandom` if the system call is missing (before Linux 3.17) or forbidden (in
/// some containers).
///
/// # Errors
///
/// Fails with an error of the system if neither the system call nor the device works.
pub fn fill(bytes: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            Err(Errno::NOSYS | Errno::PERM) => return fill_from_device(&mut bytes[filled..]),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Fills `bytes` from `/dev/urandom`. That device never blocks, so this waits for the other one,
/// which can be read once the kernel has gathered enough entropy. A container may lack the other.
fn fill_from_device(bytes: &mut [u8]) -> io::Result<()> {
    if let Ok(random) = File::open("/dev/random") {
        let mut readable = [PollFd::new(&random, PollFlags::IN)];
        retry_on_intr(|| poll(&mut readable, None))?;
    }
    File::open("/dev/urandom")?.read_exact(bytes)
}

/// Returns a random number. Blocks and fails like [`fill`].
pub fn number() -> io::Result<u64> {
    let mut bytes = [0; 8];
    fill(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_numbers_differ() {
        assert!(is_ready());
        assert_ne!(number().expect("a number"), number().expect("a number"));
    }
    #[test]
    fn the_device_gives_numbers_where_the_call_does_not() {
        let [mut one, mut other] = [[0; 16]; 2];
        fill_from_device(&mut one).expect("random bytes");
        fill_from_device(&mut other).expect("random bytes");
        assert_ne!(one, other);
    }
}
