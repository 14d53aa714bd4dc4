//! The log lines about claims: all of them, or only those that an operator must see.

use std::fmt;

use log::{info, warn};

use crate::arbiter::{Arbiter, KeyStatus, Told};
use crate::log::Throttle;
use crate::table::{ConnId, Fate, GrantEnd, Key};
use crate::text::Escaped;
use crate::token::Fence;

/// The maximum number of holders that the log names when the server stops.
const NAMED_COUNT: usize = 10;

/// From now on, logs what becomes of claims. Without `logs_grants`, logs only what an operator must
/// see: breaks, and the expiry of leases, except those of kept grants.
pub(super) fn open(arbiter: &Arbiter, logs_grants: bool) {
    let expiries = Throttle::default();
    let tell = move |told: &Told<'_>| {
        let (claim, peer) = (Claim::told(told), PeerOf(told, told.event.conn));
        let lasted = told.event.lasted.as_millis();
        if !logs_grants && !told.event.is_alarming {
            return;
        }
        match told.event.fate {
            Fate::Granted => info!("granted {claim} peer={peer} waited_ms={lasted}"),
            Fate::GaveUp => info!("gave-up {claim} peer={peer} waited_ms={lasted}"),
            Fate::Kept(status) => {
                info!("kept {claim} peer={peer} held_ms={lasted} status={status}");
            }
            Fate::Ended(GrantEnd::Released(Some(status))) => {
                info!("released {claim} peer={peer} held_ms={lasted} status={status}");
            }
            Fate::Ended(GrantEnd::Released(None)) => {
                info!("released {claim} peer={peer} held_ms={lasted}");
            }
            Fate::Ended(GrantEnd::Abandoned) => {
                info!("abandoned {claim} peer={peer} held_ms={lasted}");
            }
            Fate::Ended(GrantEnd::Expired) if logs_grants => {
                info!("expired {claim} peer={peer} held_ms={lasted}");
            }
            Fate::Ended(GrantEnd::Expired) => {
                expiries.warn(format_args!("expired {claim} peer={peer} held_ms={lasted}"));
            }
            Fate::Ended(GrantEnd::Broken(operator)) => {
                let by = PeerOf(told, operator);
                warn!("broken {claim} holder={peer} held_ms={lasted} by_conn={operator} peer={by}");
            }
        }
    };
    arbiter.account_to(Box::new(tell), logs_grants);
}

/// Logs that the server is draining, and names the first of the holders that it waits for.
pub(super) fn log_drain(arbiter: &Arbiter) {
    let (awaited, holders) = arbiter.awaited_holders(NAMED_COUNT);
    let (_, counters) = arbiter.counters();
    info!(
        "draining holders={} awaited={awaited}",
        counters.holder_count
    );
    for (claim, peer) in holders.iter().filter_map(holder) {
        info!("waiting-for {claim} peer={peer}");
    }
}

/// Logs that the server stops while there are still holders, and names the first of them.
pub(super) fn log_cut_off(arbiter: &Arbiter, reason: &str) {
    let (count, holders) = arbiter.awaited_holders(NAMED_COUNT);
    warn!("stopping reason={reason} holders={count}");
    for (claim, peer) in holders.iter().filter_map(holder) {
        warn!("cut-off {claim} peer={peer}");
    }
}

/// The claim of the first holder of a key, and that holder's peer.
fn holder(status: &KeyStatus) -> Option<(Claim<'_>, Escaped<'_>)> {
    let (holder, (peer, tag)) = (status.queue.holders.first()?, status.clients().next()?);
    let claim = Claim {
        key: &status.queue.key,
        fence: holder.held.map(|(fence, _)| fence),
        conn: holder.conn,
        tag,
    };
    Some((claim, shown(peer)))
}

struct Claim<'a> {
    key: &'a Key,
    fence: Option<Fence>,
    conn: ConnId,
    tag: Option<&'a str>,
}

impl<'a> Claim<'a> {
    fn told(told: &'a Told<'_>) -> Claim<'a> {
        Claim {
            key: &told.event.key,
            fence: told.event.fence,
            conn: told.event.conn,
            tag: told.tag(),
        }
    }
}

impl fmt::Display for Claim<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "key={}", Escaped(self.key.as_str().as_bytes()))?;
        if let Some(fence) = self.fence {
            write!(f, " fence={}", fence.0)?;
        }
        let tag = Escaped(self.tag.unwrap_or_default().as_bytes());
        write!(f, " conn={} tag={tag}", self.conn)
    }
}

/// The client on a connection. It is looked up only when the log line is written.
struct PeerOf<'a>(&'a Told<'a>, ConnId);

impl fmt::Display for PeerOf<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PeerOf(told, conn) = self;
        shown(told.peer(*conn)).fmt(f)
    }
}

fn shown(peer: Option<&str>) -> Escaped<'_> {
    Escaped(peer.unwrap_or("gone").as_bytes())
}
