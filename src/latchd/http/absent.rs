//! The stand-in for `mod.rs` in a build without HTTP, whose options refuse to open an HTTP door.

use std::net::IpAddr;
use std::sync::Arc;

use super::connection::SessionRules;
use super::options::ListenHost;
use crate::arbiter::Arbiter;
use crate::net::tls::Certificate;

pub(super) const MAX_CONNECTIONS: usize = 0;

#[derive(Debug)]
pub(super) enum DoorPlace {}

pub(super) enum Door {}

impl DoorPlace {
    /// Refuses the option that asks for the door.
    pub(super) fn wanted_by(
        option: &str,
        _: ListenHost,
        _: u16,
        _: Vec<String>,
    ) -> Result<DoorPlace, String> {
        Err(format!("{option}: needs a build with --features http"))
    }
}

impl Door {
    pub(super) fn bind(
        place: Option<DoorPlace>,
        _: Option<&Arc<Certificate>>,
    ) -> Result<Option<Door>, String> {
        Ok(place.map(|place| match place {}))
    }

    pub(super) fn exposed(&self) -> Option<IpAddr> {
        match *self {}
    }

    pub(super) fn open(self, _: &Arc<Arbiter>, _: &Arc<SessionRules>) -> Result<(), String> {
        match self {}
    }
}
