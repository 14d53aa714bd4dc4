//! `latch history`: who held a key lately, and how that ended.

use crate::cli::failure::CommandResult;
use crate::client::history::{Expected, History, PastHold};
use crate::text::{exact_time, rough_time, without_hidden};

use super::servers::Target;
use super::stats_table::{or_dash, unquoted};
use super::text_table::{header, Table};
use super::{options, print, shown};

pub(super) fn show(options: &options::History) -> CommandResult {
    let target = Target::new(options.client(None)?, &options.key, None, None);
    let history = target.ask(|connection| connection.history(&options.key));
    let history = history.map_err(|error| target.failure(&error))?;
    print(&if options.json {
        without_hidden(&history.json) + "\n"
    } else {
        table(&options.key, &history).lines().join("\n") + "\n"
    })
}

fn table(key: &str, history: &History) -> Table {
    let title = format!("{}: {}", shown(key), summary(history));
    if history.past.is_empty() {
        return Table::line(title);
    }
    let row = |holder: &PastHold| {
        vec![
            format!("{} ago", rough_time(holder.ended_ago)),
            rough_time(holder.waited),
            rough_time(holder.held),
            unquoted(&holder.end),
            or_dash(holder.status.map(|status| status.to_string())),
            holder.fence.to_string(),
            or_dash(holder.tag.as_deref().map(unquoted)),
        ]
    };
    let rows = history.past.iter().map(row).collect();
    Table {
        header: header("ENDED,WAITED,HELD,END,STATUS,FENCE,TAG"),
        rows,
        ..Table::line(title)
    }
}

/// Says in words when the key was last held, or how the work that is expected is doing.
fn summary(history: &History) -> String {
    match (&history.expected, history.past.first()) {
        (Some(expected), _) => standing(expected),
        (None, Some(latest)) => format!("last held {} ago", rough_time(latest.ended_ago)),
        (None, None) => "no history; it begins when latch run ends a command under the key".into(),
    }
}

fn standing(expected: &Expected) -> String {
    let (state, age) = (unquoted(&expected.state), rough_time(expected.age));
    let last = if expected.has_succeeded {
        format!("last success {age} ago")
    } else {
        format!("no success since {age} ago, when the server started")
    };
    let every = exact_time(expected.within);
    format!("{state}: {last}, expected every {every}")
}
