//! The log lines about claims: all of them, or only those that an operator must see.

use std::fmt;

use log::{info, warn};

use crate::latchd::arbiter::{Arbiter, DescribedEvent, KeyStatus};
use crate::latchd::table::{ConnId, Fate, GrantEnd, Key};
use crate::os::text::Escaped;
use crate::shared::log::Throttle;
use crate::wire::token::Fence;

/// The maximum number of holders that the log names when the server stops.
const NAMED_COUNT: usize = 10;

/// From now on, logs what becomes of claims. Without `logs_grants`, logs only what an operator must
/// see: overdue work, breaks, grants that gave way, and the expiry of leases, except those of kept
/// grants.
pub(super) fn open(arbiter: &Arbiter, logs_grants: bool) {
    let expiries = Throttle::default();
    let tell = move |told: &DescribedEvent<'_>| {
        let event = told.event;
        if !logs_grants && !event.is_alarming {
            return;
        }
        let claim = ClaimOf {
            key: &event.key,
            fence: event.fence,
            conn: event.conn,
            tag: told.tag().map(|tag| &**tag),
            peer: told.peer(event.conn),
        };
        let key = Escaped(event.key.as_str().as_bytes());
        let lasted = event.lasted.as_millis();
        match event.fate {
            Fate::Granted => info!("granted {claim} waited_ms={lasted}"),
            Fate::GaveUp => info!("gave-up {claim} waited_ms={lasted}"),
            Fate::Busy => {
                let holder = told.holder().unwrap_or_default();
                info!("busy {claim} holder={}", Escaped(holder.as_bytes()));
            }
            Fate::Kept(status) => info!("kept {claim} held_ms={lasted} status={status}"),
            Fate::Ended(GrantEnd::Released(Some(status))) => {
                info!("released {claim} held_ms={lasted} status={status}");
            }
            Fate::Ended(GrantEnd::Released(None)) => info!("released {claim} held_ms={lasted}"),
            Fate::Ended(GrantEnd::Abandoned) => info!("abandoned {claim} held_ms={lasted}"),
            Fate::Ended(GrantEnd::GaveWay) => warn!("gave-way {claim} held_ms={lasted}"),
            Fate::Ended(GrantEnd::Expired) if !logs_grants => {
                expiries.warn(format_args!("expired {claim} held_ms={lasted}"));
            }
            Fate::Ended(GrantEnd::Expired) => info!("expired {claim} held_ms={lasted}"),
            Fate::Ended(GrantEnd::Broken(operator)) => {
                let by = shown(told.peer(operator));
                warn!("broken {claim:#} held_ms={lasted} by_conn={operator} peer={by}");
            }
            Fate::Overdue(true) => warn!("overdue key={key} success_age_ms={lasted}"),
            Fate::Overdue(false) => info!("on-time key={key}"),
        }
    };
    arbiter.report_events(Box::new(tell), logs_grants);
}

/// Logs that the server is draining, and names the first of the holders that it waits for.
pub(super) fn log_drain(arbiter: &Arbiter) {
    let (awaited, holders) = arbiter.awaited_holders(NAMED_COUNT);
    let (_, counters) = arbiter.counters();
    info!(
        "draining holders={} awaited={awaited}",
        counters.holder_count
    );
    for claim in holders.iter().filter_map(holder) {
        info!("waiting-for {claim}");
    }
}

/// Logs that the server stops while there are still holders, and names the first of them.
pub(super) fn log_cut_off(arbiter: &Arbiter, reason: &str) {
    let (count, holders) = arbiter.awaited_holders(NAMED_COUNT);
    warn!("stopping reason={reason} holders={count}");
    for claim in holders.iter().filter_map(holder) {
        warn!("cut-off {claim}");
    }
}

/// The claim of the first holder of a key.
fn holder(status: &KeyStatus) -> Option<ClaimOf<'_>> {
    let (holder, (peer, tag)) = (status.queue.holders.first()?, status.clients().next()?);
    Some(ClaimOf {
        key: &status.queue.key,
        fence: holder.held.map(|(fence, _)| fence),
        conn: holder.conn,
        tag,
        peer,
    })
}

/// A claim with its client, which `{:#}` calls the holder, beside another peer.
struct ClaimOf<'a> {
    key: &'a Key,
    fence: Option<Fence>,
    conn: ConnId,
    tag: Option<&'a str>,
    peer: Option<&'a str>,
}

impl fmt::Display for ClaimOf<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "key={}", Escaped(self.key.as_str().as_bytes()))?;
        if let Some(fence) = self.fence {
            write!(f, " fence={}", fence.0)?;
        }
        let role = if f.alternate() { "holder" } else { "peer" };
        let (tag, peer) = (self.tag.unwrap_or_default(), shown(self.peer));
        let tag = Escaped(tag.as_bytes());
        write!(f, " conn={} tag={tag} {role}={peer}", self.conn)
    }
}

fn shown(peer: Option<&str>) -> Escaped<'_> {
    Escaped(peer.unwrap_or("gone").as_bytes())
}
