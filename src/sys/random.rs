//! Random numbers of the system.
//!
//! The system call comes first. The crate `getrandom` looks up the C library's function at run
//! time, which a static program does not have, and would wait for `/dev/random` instead: on a board
//! without a source of entropy that stays empty, while the system call makes the kernel gather
//! some.

use std::io;

use rustix::io::Errno;
use rustix::rand::{getrandom, GetRandomFlags};

/// Whether [`fill`] returns at once. Early after the boot of a small board, the kernel has gathered
/// too little yet.
pub fn is_ready() -> bool {
    getrandom(&mut [0u8], GetRandomFlags::NONBLOCK) != Err(Errno::AGAIN)
}

/// Fills `bytes`. Blocks until the kernel has randomness to give, once after the boot. Linux before
/// 3.17 does not know the system call, and some containers forbid it: there the device
/// `/dev/urandom` gives the bytes.
///
/// # Errors
///
/// The system's, if it has neither.
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

/// A random number, as [`fill`] gives it.
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
