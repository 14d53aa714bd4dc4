//! TLS in a build without the feature `tls`: the API of `mod.rs`, with an uninhabited type.

use std::path::PathBuf;
use std::time::Instant;

use super::address::Address;
use super::error::Error;
use crate::os::stream::Stream;
use crate::os::tls::lacking;

/// How to speak TLS with servers. Only a build with the feature `tls` has values of this type.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Tls {}

impl Tls {
    /// Refuses the option or variable that asks for TLS.
    pub(super) fn wanted_by(
        asking: &str,
        _: Option<PathBuf>,
        _: Option<String>,
    ) -> Result<Tls, Error> {
        Err(Error::Environment(lacking(asking)))
    }

    pub(super) fn speak(&self, _: Stream, _: &Address, _: Instant) -> Result<Stream, Error> {
        match *self {}
    }
}
