//! Replaces `mod.rs` in a build without the feature `cluster`. Its types have no values, so their
//! methods are never called.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Receiver;

use crate::latchd::arbiter::{Arbiter, Promised};
use crate::os::stream::Stream;
use crate::shared::log::Log;
use crate::wire::token::FenceSource;

#[derive(Debug)]
pub enum ClusterSettings {}

/// This server as a node of a cluster.
pub enum ClusterNode {}

/// What is to be done with a connection, or was done with it.
pub enum Disposition {
    ServeHere(Vec<u8>),
    Over,
    Silent,
}

impl ClusterSettings {
    /// Refuses the option that asks for a cluster.
    pub fn wanted_by(option: &str) -> Result<ClusterSettings, String> {
        Err(format!("{option}: needs a build with --features cluster"))
    }

    pub fn add_member(&mut self, _: String, _: bool) {
        match *self {}
    }

    pub fn set_service(&mut self, _: String, _: String, _: Duration) {
        match *self {}
    }

    pub fn set_user(&mut self, _: Option<(String, PathBuf)>) {
        match *self {}
    }

    pub fn set_tls(&mut self, _: Option<PathBuf>, _: Option<(PathBuf, PathBuf)>) {
        match *self {}
    }

    pub fn checked(self) -> Result<ClusterSettings, String> {
        match self {}
    }
}

impl ClusterNode {
    pub fn new(settings: ClusterSettings, _: Log) -> Arc<ClusterNode> {
        match settings {}
    }

    pub fn serve(self: &Arc<Self>, _: &Arc<Arbiter>) -> io::Result<()> {
        match **self {}
    }

    pub fn fences(&self) -> Box<dyn FenceSource> {
        match *self {}
    }

    pub fn relay_or_serve(&self, _: &Arc<Stream>, _: Duration, _: Option<Duration>) -> Disposition {
        match *self {}
    }

    pub fn is_current_epoch(&self, _: &[u8]) -> bool {
        match *self {}
    }

    pub fn role_line(&self) -> String {
        match *self {}
    }

    pub fn figures(&self) -> Option<(u64, Duration)> {
        match *self {}
    }

    pub fn wait_for_journal(&self, _: &Promised) {
        match *self {}
    }

    pub fn is_active(&self) -> bool {
        match *self {}
    }

    pub fn has_active_server(&self) -> bool {
        match *self {}
    }

    pub fn has_started_over(&self) -> bool {
        match *self {}
    }

    pub fn cut_adopters(&self) {
        match *self {}
    }

    pub fn probe_journal(&self) -> Receiver<()> {
        match *self {}
    }

    pub fn leave(&self) {
        match *self {}
    }

    pub fn resign(&self) {
        match *self {}
    }
}
