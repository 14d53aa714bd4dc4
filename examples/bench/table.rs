//! The rows of the picture in the README, and the picture.

use std::fmt::Write;
use std::fs;
use std::io;
use std::process::Command;

use crate::machine::{allowed_cores, Cores};
use crate::report::{median, Outcome};
use crate::scenarios::{rate, Work};
use crate::Plan;

/// The rows: cores, work and connections.
const ROWS: [(Cores, Work, usize); 9] = [
    (Cores::One, Work::OwnKeys, 1),
    (Cores::One, Work::OwnKeys, 16),
    (Cores::One, Work::OwnKeys, 256),
    (Cores::One, Work::OneKey, 16),
    (Cores::One, Work::OneKey, 256),
    (Cores::Two, Work::OneKey, 16),
    (Cores::Two, Work::OneKey, 256),
    (Cores::One, Work::Connect, 8),
    (Cores::One, Work::Pipeline, 1),
];

struct Row {
    title: String,
    /// The bare server, ours, and the peers that can do it.
    outcomes: Vec<Outcome>,
}

pub fn measure(plan: &Plan) -> io::Result<()> {
    let mut rows = Vec::new();
    for (cores, work, count) in ROWS {
        if cores == Cores::Two && allowed_cores()?.len() < 2 {
            println!("{}: there is only one core\n", work.title(count));
            continue;
        }
        let plan = Plan {
            cores,
            ..plan.clone()
        };
        rows.push(Row {
            title: format!("{}, {cores}", work.title(count)),
            outcomes: rate(&plan, work, count)?,
        });
    }
    match &plan.svg {
        Some(path) => fs::write(path, svg(&rows, &caption()?)),
        None => Ok(()),
    }
}

/// When, where and how it was measured.
fn caption() -> io::Result<String> {
    let date = Command::new("date").arg("+%Y-%m-%d").output()?.stdout;
    let date = String::from_utf8_lossy(&date).trim().to_owned();
    let kernel = rustix::system::uname();
    let kernel = kernel.release().to_string_lossy().into_owned();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let core_count = allowed_cores()?.len();
    let command = arguments.join(" ");
    Ok(format!(
        "{date}, Linux {kernel}, {core_count} cores: bench {command}"
    ))
}

// The picture, in pixels.
const WIDTH: f64 = 760.0;
const BAR_LEFT: f64 = 90.0;
const BAR_RIGHT: f64 = 530.0;
const RATIO_RIGHT: f64 = 580.0;
const RATE_RIGHT: f64 = 685.0;
const BAR_HEIGHT: f64 = 12.0;
const LINE_HEIGHT: f64 = 16.0;

/// What the picture has to say of itself.
const NOTES: [&str; 3] = [
    "red: a bare server, which has a thread for each connection, reads the same bytes and answers",
    "as many without locking anything; bars: the ratio to it, the median of all rounds",
    "p99: from the claim, or the release of its key if that was later, to the grant",
];

/// Bars of the ratios, a group for each row. Each group has its own scale, since a server that
/// answers many requests at a time would make all other bars short; a mark is at the bare server.
fn svg(rows: &[Row], caption: &str) -> String {
    let mut drawn = String::new();
    for (right, name) in [
        (RATIO_RIGHT, "ratio"),
        (RATE_RIGHT, "pairs a second"),
        (WIDTH, "p99, \u{b5}s"),
    ] {
        text(&mut drawn, (right, 0.0), "n", name);
    }
    let mut y = 0.0;
    for Row { title, outcomes } in rows {
        let bare = &outcomes[0];
        y += 2.0 * LINE_HEIGHT;
        text(&mut drawn, (0.0, y - 5.0), "b", title);
        figures(&mut drawn, y - 5.0, "bare", bare, bare);
        let top = y;
        let ratios: Vec<f64> = outcomes.iter().map(|it| it.ratio_to(bare)).collect();
        let scale = (BAR_RIGHT - BAR_LEFT) / ratios.iter().fold(1.0, |a, b| b.max(a));
        for (at, (outcome, ratio)) in outcomes.iter().zip(&ratios).enumerate().skip(1) {
            let class = if at == 1 { "ours" } else { "peer" };
            let (bar, base) = (ratio * scale, y + BAR_HEIGHT - 2.0);
            writeln!(
                drawn,
                r#"<rect class="{class}" x="{BAR_LEFT}" y="{y}" width="{bar:.1}" height="{BAR_HEIGHT}"/>"#
            )
            .expect("memory takes it");
            text(&mut drawn, (0.0, base), class, &outcome.name);
            figures(&mut drawn, base, class, outcome, bare);
            y += LINE_HEIGHT;
        }
        let mark = BAR_LEFT + scale;
        writeln!(
            drawn,
            r#"<path class="mark" d="M{mark:.1} {top:.1}V{y:.1}"/>"#
        )
        .expect("memory takes it");
    }
    y += LINE_HEIGHT;
    for note in NOTES.iter().copied().chain([caption]) {
        y += LINE_HEIGHT;
        text(&mut drawn, (0.0, y), "note", note);
    }
    format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 -16 {:.0} {:.0}" font-family="sans-serif" font-size="12">
<style>
rect, text {{ fill: #888 }} .ours {{ fill: #2a7 }} .bare {{ fill: #c33 }}
.b {{ font-weight: bold }} .n {{ text-anchor: end }} .mark {{ stroke: #c33; stroke-dasharray: 3 2 }}
</style>
{drawn}</svg>
"#,
        WIDTH + 20.0,
        y + 30.0
    )
}

/// What a server came to, in three columns.
fn figures(drawn: &mut String, y: f64, class: &str, outcome: &Outcome, bare: &Outcome) {
    let [most] = outcome.latencies([0.99]);
    for (right, figure) in [
        (RATIO_RIGHT, format!("{:.2}", outcome.ratio_to(bare))),
        (RATE_RIGHT, grouped(median(&outcome.rates))),
        (WIDTH, grouped(most)),
    ] {
        text(drawn, (right, y), &format!("{class} n"), &figure);
    }
}

/// A number with a blank before the last three digits.
fn grouped(number: f64) -> String {
    let number = number.round() as u64;
    match number {
        0..=999 => number.to_string(),
        _ => format!("{} {:03}", number / 1000, number % 1000),
    }
}

fn text(drawn: &mut String, (x, y): (f64, f64), class: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    writeln!(
        drawn,
        r#"<text class="{class}" x="{x:.1}" y="{y:.1}">{words}</text>"#
    )
    .expect("memory takes it");
}
