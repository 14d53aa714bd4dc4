//! The variables in the environment that have our prefixes, but belong to no option.

use std::env;
use std::ffi::OsString;

use log::{debug, warn};

use super::options::SELF;
use crate::cli::arguments;
use crate::cli::service_links::is_service_link;
use crate::text::Escaped;

/// Warns of variables that belong to no option.
pub(super) fn warn_of_unknown() {
    // A variable whose name is not UTF-8 belongs to no option.
    let set = env::vars_os().filter(|(_, value)| !value.is_empty());
    let set = set.filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    let ours = set.filter(|(name, _)| has_prefix(name));
    let is_link =
        |(name, value): &(String, OsString)| is_service_link(name, &value.to_string_lossy());
    let (links, others): (Vec<_>, Vec<_>) = ours.partition(is_link);
    for name in unknown(others.into_iter().map(|(name, _)| name)) {
        let shown = Escaped(name.as_bytes());
        match advice(&name) {
            Some(advice) => warn!("unknown-variable name={shown} hint=\"{advice}\""),
            None => warn!("unknown-variable name={shown}"),
        }
    }
    if !links.is_empty() {
        let mut names: Vec<_> = links.into_iter().map(|(name, _)| name).collect();
        names.sort_unstable();
        debug!(
            "service-variables names={}",
            Escaped(names.join(",").as_bytes())
        );
    }
}

/// What to use instead of an unknown variable, if it is named like an option of another server.
fn advice(name: &str) -> Option<&'static str> {
    let (_, rest) = name.split_once('_')?;
    let option = format!("--{}", rest.to_lowercase().replace('_', "-"));
    arguments::advice(&SELF, "", &option)
}

/// Whether the name of a variable begins with one of our prefixes.
fn has_prefix(name: &str) -> bool {
    let prefix = name.split_once('_').map(|(prefix, _)| prefix);
    prefix.is_some_and(|prefix| SELF.prefixes.contains(&prefix))
}

/// The variables in `names`, which all have one of our prefixes, that belong to no option.
fn unknown(names: impl Iterator<Item = String>) -> Vec<String> {
    /// The variable that a server of a cluster sets for itself when it executes itself again.
    const ITS_OWN: &str = "STARTED_OVER";
    let known = SELF.own.rows.iter().flat_map(|row| row.variables);
    let known_or_own: Vec<&str> = known.chain(&[ITS_OWN]).copied().collect();
    let is_unknown = |name: &String| {
        let (_, rest) = name.split_once('_').unwrap_or_default();
        !known_or_own.contains(&rest)
    };
    let mut unknown: Vec<String> = names.filter(is_unknown).collect();
    unknown.sort_unstable();
    unknown
}
