//! The rows of the picture in the README, and the picture.

use std::fmt::Write;
use std::fs;
use std::io;
use std::process::Command;

use crate::machine::{allowed_cores, Cores};
use crate::report::{median, Outcome};
use crate::scenarios::{rate, Work};
use crate::Plan;

/// The rows: cores, work and connections, and whether the picture shows it.
const ROWS: [(Cores, Work, usize, bool); 9] = [
    (Cores::One, Work::OwnKeys, 1, false),
    (Cores::One, Work::OwnKeys, 16, true),
    (Cores::One, Work::OwnKeys, 256, true),
    (Cores::One, Work::OneKey, 16, true),
    (Cores::One, Work::OneKey, 256, false),
    (Cores::Two, Work::OneKey, 16, true),
    (Cores::Two, Work::OneKey, 256, false),
    (Cores::One, Work::Connect, 8, false),
    (Cores::One, Work::Pipeline, 1, false),
];

struct Row {
    title: String,
    /// The bare server, ours, and the peers that can do it.
    outcomes: Vec<Outcome>,
}

pub fn measure(plan: &Plan) -> io::Result<()> {
    let versions = versions(plan);
    println!("{versions}\n");
    let mut rows = Vec::new();
    for (cores, work, count, is_pictured) in ROWS {
        if cores == Cores::Two && allowed_cores()?.len() < 2 {
            println!("{}: there is only one core\n", work.title(count));
            continue;
        }
        let plan = Plan {
            cores,
            ..plan.clone()
        };
        let outcomes = rate(&plan, work, count)?;
        if is_pictured {
            let title = format!("{}, {cores}", work.title(count));
            rows.push(Row { title, outcomes });
        }
    }
    if let Some(path) = &plan.svg {
        let when_and_where = when_and_where()?;
        fs::write(path, svg(&rows, &[&versions, &when_and_where]))?;
    }
    Ok(())
}

/// The servers that are compared, with their versions.
fn versions(plan: &Plan) -> String {
    let mut named: Vec<String> = Vec::new();
    for spec in plan.specs() {
        let program = spec.name().split(' ').next().unwrap_or_default();
        let words = spec.version().map(|version| format!("{program} {version}"));
        named.extend(words.filter(|words| !named.contains(words)));
    }
    named.join(", ")
}

/// When, where and how it was measured.
fn when_and_where() -> io::Result<String> {
    let date = Command::new("date").arg("+%Y-%m-%d").output()?.stdout;
    let date = String::from_utf8_lossy(&date).trim().to_owned();
    let kernel = rustix::system::uname();
    let kernel = kernel.release().to_string_lossy().into_owned();
    let core_count = allowed_cores()?.len();
    Ok(format!("{date}, Linux {kernel}, {core_count} cores"))
}

// The picture, in pixels.
const WIDTH: f64 = 640.0;
const BAR_LEFT: f64 = 96.0;
const BAR_RIGHT: f64 = 500.0;
const RATE_RIGHT: f64 = 580.0;
const BAR_HEIGHT: f64 = 12.0;
const LINE_HEIGHT: f64 = 16.0;

/// What the picture has to say of itself.
const NOTES: [&str; 3] = [
    "bars: pairs of acquire and release a second, as a ratio to a bare server that reads and answers",
    "the same bytes with a thread for each connection and locks nothing (line); median of all rounds",
    "right: pairs a second, and the 99th percentile of the time to a grant, in \u{b5}s",
];

/// One panel with the ratios to the bare server, a group of bars for each row, all of one scale.
/// It has a background of its own, since a page may be dark.
fn svg(rows: &[Row], sources: &[&str]) -> String {
    let ratios = |row: &Row| -> Vec<f64> {
        let bare = &row.outcomes[0];
        row.outcomes.iter().map(|it| it.ratio_to(bare)).collect()
    };
    let most = rows.iter().flat_map(ratios).fold(1.0, f64::max);
    let scale = (BAR_RIGHT - BAR_LEFT) / most;
    let mut drawn = String::new();
    let mut y = 0.0;
    for row in rows {
        y += 1.5 * LINE_HEIGHT;
        text(&mut drawn, (0.0, y - 5.0), "b", &row.title);
        figures(&mut drawn, y - 5.0, &row.outcomes[0]);
        let top = y;
        for (at, (outcome, ratio)) in row.outcomes.iter().zip(ratios(row)).enumerate().skip(1) {
            let class = if at == 1 { "ours" } else { "peer" };
            let (bar, base) = (ratio * scale, y + BAR_HEIGHT - 2.0);
            writeln!(
                drawn,
                r#"<rect class="{class}" x="{BAR_LEFT}" y="{y}" width="{bar:.1}" height="{BAR_HEIGHT}"/>"#
            )
            .expect("memory takes it");
            text(&mut drawn, (0.0, base), "", &outcome.name);
            text(
                &mut drawn,
                (BAR_LEFT + bar + 4.0, base),
                "",
                &format!("{ratio:.2}"),
            );
            figures(&mut drawn, base, outcome);
            y += LINE_HEIGHT;
        }
        let mark = BAR_LEFT + scale;
        writeln!(
            drawn,
            r#"<path class="mark" d="M{mark:.1} {top:.1}V{y:.1}"/>"#
        )
        .expect("memory takes it");
    }
    y += LINE_HEIGHT / 2.0;
    for note in NOTES.iter().chain(sources) {
        y += LINE_HEIGHT;
        text(&mut drawn, (0.0, y), "", note);
    }
    let (width, height) = (WIDTH + 20.0, y + 20.0);
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 -4 {width:.0} {height:.0}" font-family="sans-serif" font-size="12">
<style>
.page {{ fill: #fff }} text {{ fill: #111 }} .peer {{ fill: #aaa }} .ours {{ fill: #2a7 }}
.b {{ font-weight: bold }} .n {{ text-anchor: end }} .mark {{ stroke: #c33; stroke-dasharray: 3 2 }}
</style>
<rect class="page" x="-10" y="-4" width="{width:.0}" height="{height:.0}"/>
{drawn}</svg>
"##
    )
}

/// What a server came to, in two columns.
fn figures(drawn: &mut String, y: f64, outcome: &Outcome) {
    let [most] = outcome.latencies([0.99]);
    let rate = grouped(median(&outcome.rates));
    text(drawn, (RATE_RIGHT, y), "n", &rate);
    text(drawn, (WIDTH, y), "n", &grouped(most));
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
