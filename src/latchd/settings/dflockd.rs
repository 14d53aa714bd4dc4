//! Options of dflockd that do nothing here, or that are refused.

use crate::cli::arguments::Origins;
use crate::cli::rows::{Effect, Row};
use crate::latchd::options::Options;

/// Refuses the option that makes a server of dflockd a member of its cluster. Alone, the server
/// would grant what other members grant, too.
pub(super) fn check(origins: &Origins) -> Result<(), String> {
    let refused = |row: &Row| match row.effect {
        Effect::Refused(why) => Some(format!("{}: {why}", origins.get(&row.long())?)),
        _ => None,
    };
    let mut rows = Options::COMMAND.rows.iter();
    rows.find_map(refused).map_or(Ok(()), Err)
}

/// The options and variables that are set and have no effect, with the reason.
pub(super) fn without_effect(origins: &Origins) -> Vec<(String, &'static str)> {
    let ignored = |row: &Row| match row.effect {
        Effect::Ignored(why) => Some((origins.get(&row.long())?.to_owned(), why)),
        _ => None,
    };
    Options::COMMAND.rows.iter().filter_map(ignored).collect()
}
