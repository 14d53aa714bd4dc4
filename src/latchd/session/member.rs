//! What a session does beside its own as that of one of several servers.

use super::{Ending, Session};
use crate::protocol::request::{CLUSTER, RELAY};
use crate::protocol::stats;

impl Session<'_> {
    /// Serves a frame that only one of several servers knows; `None` if it is another.
    pub(super) fn serve_frame_of_member(&mut self) -> Option<Result<(), Ending>> {
        let office = self.rules.office.as_ref()?;
        let is_first = std::mem::replace(&mut self.is_first, false);
        let [command, epoch, _] = self.reader.frame();
        match command {
            RELAY if is_first && !office.is_meant_by(epoch) => Some(Err(Ending::NotMeant)),
            RELAY if is_first => {
                // The words that a person may type first come from the client behind the relay.
                self.placeholders_left = Some(0);
                self.is_relayed = true;
                self.finish_frame();
                Some(Ok(()))
            }
            CLUSTER => {
                let line = office.role_line();
                self.finish_frame();
                self.outbox.out.extend(line.bytes().chain([b'\n']));
                Some(self.outbox.flush_if_full())
            }
            _ => None,
        }
    }

    /// Appends what `stats` says of this server.
    pub(super) fn append_figures(&mut self) {
        let figures = self
            .rules
            .office
            .as_ref()
            .and_then(|office| office.figures());
        if let Some((epoch, journal_time)) = figures {
            let orphans = self.seat.arbiter().orphan_count();
            stats::append_cluster(epoch, orphans, journal_time, &mut self.outbox.out);
        }
    }
}
