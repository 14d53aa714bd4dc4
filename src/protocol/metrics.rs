//! The counters and gauges of servers in the text format of Prometheus: see latchd-operations(7),
//! MONITORING.

use super::counters::{Amount, Figures, Histogram};

/// The name of the histogram of waits.
const WAIT: &str = "latchd_grant_wait_seconds";

/// A metric: the name of its figure; the label that distinguishes its numbers (empty if there is
/// only one number); its help text.
pub type Metric = (&'static str, &'static str, &'static str);

/// The label whose values are keys, which are any text.
pub const KEY: &str = "key";

pub const COUNTERS: [Metric; 10] = [
    ("grants", "", "Slots granted, at once or after a wait."),
    (
        "releases",
        "",
        "Slots released by their holders, and kept ones whose time was over.",
    ),
    ("renewals", "", "Leases renewed by their holders."),
    (
        "expiries",
        "",
        "Slots that passed on because the lease of a holder ran out.",
    ),
    ("breaks", "", "Slots that an operator took away."),
    (
        "abandonments",
        "",
        "Slots that passed on because the connection closed or the client no longer waited.",
    ),
    (
        "wait_timeouts",
        "",
        "Claims that waited until their timeout without a grant.",
    ),
    ("refusals", "reason", "Requests refused, by reason."),
    ("disconnects", "", "Connections closed."),
    (
        "dropped_log_lines",
        "",
        "Log lines dropped because their receiver did not keep up.",
    ),
];

pub const GAUGES: [Metric; 15] = [
    (
        "connections",
        "",
        "Connections of clients, including any that asks for this.",
    ),
    ("keys", "kind", "Keys held or waited for, by kind."),
    (
        "idle_keys",
        "",
        "Keys known and neither held nor waited for.",
    ),
    ("holders", "", "Slots held."),
    (
        "bound_holders",
        "",
        "Connections that hold slots and cannot come back for them after a restart.",
    ),
    (
        "kept_holders",
        "",
        "Grants kept without a connection, up to --max-kept.",
    ),
    ("waiters", "", "Claims waiting."),
    (
        "fences_left",
        "",
        "Fences reserved in the fence file and not used.",
    ),
    (
        "draining",
        "",
        "Whether the server is about to stop and refuses new claims.",
    ),
    (
        "settling_s",
        "",
        "How long the server will grant nothing, because of a crash before its start.",
    ),
    (
        "oldest_wait_s",
        "kind",
        "How long the client has waited that has waited for longest.",
    ),
    (
        "oldest_hold_s",
        "kind",
        "How long the slot held for longest has been held, without reserved and kept ones.",
    ),
    (
        "worst_case_bytes",
        "",
        "The memory in bytes that the server takes if all its caps are reached at once.",
    ),
    (
        "success_age_s",
        KEY,
        "How long ago work under a key of --expect last succeeded, or else the server started.",
    ),
    (
        "expected_s",
        KEY,
        "How long the time from one success to the next may be, from --expect.",
    ),
];

/// A server: its name, if its series must have a label with that name, and its figures, if the
/// server gave any.
pub type Server = (Option<String>, Option<Figures>);

/// The text for these servers: each metric, followed by the series of all servers.
pub fn exposition(servers: &[Server]) -> String {
    let mut text = Exposition::default();
    text.begin(
        "latchd_up",
        "gauge",
        "Whether the server gave its counters.",
    );
    for (name, figures) in servers {
        let is_up = if figures.is_some() { "1" } else { "0" };
        text.sample("latchd_up", name.as_deref(), &[], is_up);
    }
    let known = || {
        let servers = servers.iter();
        servers.filter_map(|(name, figures)| Some((name.as_deref(), figures.as_ref()?)))
    };
    let help = "The version of the server, as a label.";
    text.begin("latchd_build_info", "gauge", help);
    for (server, figures) in known() {
        if let Some(version) = &figures.version {
            text.sample("latchd_build_info", server, &[("version", version)], "1");
        }
    }
    let metrics = COUNTERS.iter().map(|metric| (metric, "counter", "_total"));
    let metrics = metrics.chain(GAUGES.iter().map(|metric| (metric, "gauge", "")));
    for ((figure, label, help), kind, suffix) in metrics {
        let name = match figure.strip_suffix("_s") {
            Some(figure) => format!("latchd_{figure}_seconds"),
            None => format!("latchd_{figure}{suffix}"),
        };
        text.begin(&name, kind, help);
        for (server, figures) in known() {
            let mut all = figures.counters.iter().chain(&figures.gauges);
            if let Some((_, amount)) = all.find(|(found, _)| found == figure) {
                text.amount(&name, server, label, amount);
            }
        }
    }
    let help = "How long the claims that were queued waited for their grants.";
    text.begin(WAIT, "histogram", help);
    for (server, figures) in known() {
        if let Some(waits) = &figures.waits {
            text.histogram(server, waits);
        }
    }
    text.text
}

/// The text that has been written so far.
#[derive(Default)]
struct Exposition {
    text: String,
    /// The header of the current metric, until the first series of the metric is written.
    header: String,
}

impl Exposition {
    /// Begins a metric. If no series follows, the metric does not appear in the text.
    fn begin(&mut self, name: &str, kind: &str, help: &str) {
        self.header = format!("# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn amount(&mut self, name: &str, server: Option<&str>, label: &str, amount: &Amount) {
        match amount {
            Amount::One(Some(number)) => self.sample(name, server, &[], number),
            Amount::One(None) => {}
            Amount::ByName(numbers) => {
                for (value, number) in numbers {
                    self.sample(name, server, &[(label, value)], number);
                }
            }
        }
    }

    fn histogram(&mut self, server: Option<&str>, waits: &Histogram) {
        let name = format!("{WAIT}_bucket");
        for (bound, count) in &waits.buckets {
            self.sample(&name, server, &[("le", bound)], count);
        }
        self.sample(&name, server, &[("le", "+Inf")], &waits.count);
        self.sample(&format!("{WAIT}_sum"), server, &[], &waits.sum);
        self.sample(&format!("{WAIT}_count"), server, &[], &waits.count);
    }

    fn sample(&mut self, name: &str, server: Option<&str>, labels: &[(&str, &str)], value: &str) {
        self.text += &std::mem::take(&mut self.header);
        let server = server.map(|server| ("server", server));
        let labels = server.iter().chain(labels);
        let labels = labels.map(|(name, value)| format!("{name}=\"{}\"", quoted(value)));
        let labels: Vec<String> = labels.collect();
        self.text += name;
        if !labels.is_empty() {
            self.text += &format!("{{{}}}", labels.join(","));
        }
        self.text += &format!(" {value}\n");
    }
}

/// Escapes the value of a label as the format requires.
fn quoted(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::time::Instant;

    use crate::protocol::counters::Oldest;
    use crate::table::CountersSnapshot;

    /// A figure without a metric would be in the JSON alone, a metric without one in no text.
    #[test]
    fn each_figure_of_a_server_has_its_metric() {
        let snapshot = CountersSnapshot {
            fences_left: Some(1),
            ..CountersSnapshot::default()
        };
        let expected = (Vec::new(), Instant::now());
        let figures = Figures::new(1, 0, 0, 20, &snapshot, &Oldest::default(), &expected);
        let sorted = |mut names: Vec<&'static str>| {
            names.sort_unstable();
            names
        };
        for (figures, metrics) in [
            (&figures.counters, &COUNTERS[..]),
            (&figures.gauges, &GAUGES[..]),
        ] {
            let figures = figures.iter().map(|(name, _)| *name).collect();
            let metrics = metrics.iter().map(|(name, ..)| *name).collect();
            assert_eq!(sorted(figures), sorted(metrics));
        }
        let text = exposition(&[(None, Some(figures))]);
        assert!(text.contains("\nlatchd_grants_total 0\n"), "{text}");
        assert!(text.contains("\nlatchd_keys{kind=\"lock\"} 0\n"), "{text}");
        assert!(
            text.contains("\nlatchd_oldest_wait_seconds{kind=\"lock\"} 0.000\n"),
            "{text}"
        );
    }
}
