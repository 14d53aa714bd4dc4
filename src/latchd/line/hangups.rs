//! What the server does when the client of a waiting request hangs up.

use log::debug;

use crate::latchd::arbiter::Arbiter;
use crate::latchd::table::ConnId;
use crate::shared::net::connections::Connections;
use crate::shared::net::hangup::HangupWatch;

/// A waiter is cut off if this many unread bytes follow its request: it has filled its window, and
/// so can no longer signal that it closes. The number is half of the smallest window that Linux
/// offers by default.
const FLOOD_LEN: u64 = 32 * 1024;

/// Tells the arbiter which peers have hung up, and cuts off waiters that flood their connections.
/// Never returns.
pub fn act_on_hangups(watch: &HangupWatch, arbiter: &Arbiter, connections: &Connections) -> ! {
    let hung_up = |id| arbiter.hang_up(ConnId(id));
    let has_sent = |id| {
        let is_flood = connections.unread_len(id) >= FLOOD_LEN;
        if is_flood && arbiter.cut_off(ConnId(id)) {
            debug!("cut-off conn={id} reason=flood-behind-wait");
        }
    };
    let error = watch.run(hung_up, has_sent);
    panic!("the hang-up watch failed: {error}");
}
