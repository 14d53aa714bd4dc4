//! Random numbers from the system.
//!
//! The system call is tried before the crate `getrandom`. The crate looks up the C library's
//! function at run time. In a static program the lookup fails, and the crate would then wait for
//! `/dev/random`. On a board without a source of entropy, that device stays empty, but the system
//! call makes the kernel gather entropy.

use std::io;

use rustix::io::Errno;
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
            Err(Errno::NOSYS | Errno::PERM) => return Ok(::getrandom::fill(bytes)?),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
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
}
