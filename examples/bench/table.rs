//! The table of the README, and the same as a picture.

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
    /// Pairs of acquire and release a second of the bare server.
    bare_rate: f64,
    /// The ratio to the bare server, or `None` if the server cannot do it.
    ratios: Vec<Option<f64>>,
}

pub fn measure(plan: &Plan) -> io::Result<()> {
    let names: Vec<String> = plan.specs()[1..]
        .iter()
        .map(|spec| spec.name().to_owned())
        .collect();
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
        let outcomes = rate(&plan, work, count)?;
        rows.push(row(
            &format!("{}, {cores}", work.title(count)),
            &names,
            &outcomes,
        ));
    }
    let caption = caption()?;
    print!("{}", markdown(&names, &rows, &caption));
    match &plan.svg {
        Some(path) => fs::write(path, svg(&names, &rows, &caption)),
        None => Ok(()),
    }
}

fn row(title: &str, names: &[String], outcomes: &[Outcome]) -> Row {
    let bare = &outcomes[0];
    let ratio = |name: &String| {
        let outcome = outcomes.iter().find(|outcome| outcome.name == *name);
        outcome.map(|outcome| outcome.ratio_to(bare))
    };
    Row {
        title: title.to_owned(),
        bare_rate: median(&bare.rates),
        ratios: names.iter().map(ratio).collect(),
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

fn markdown(names: &[String], rows: &[Row], caption: &str) -> String {
    let mut text = format!(
        "| acquire and release | {} | bare echo, pairs/s |\n",
        names.join(" | ")
    );
    text += &format!("|---|{}\n", "--:|".repeat(names.len() + 1));
    for row in rows {
        let cells: Vec<String> = row.ratios.iter().map(|ratio| shown(*ratio)).collect();
        let (title, cells, rate) = (&row.title, cells.join(" | "), row.bare_rate);
        writeln!(text, "| {title} | {cells} | {rate:.0} |").expect("memory takes it");
    }
    format!("{text}\n{caption}\n")
}

fn shown(ratio: Option<f64>) -> String {
    ratio.map_or("–".to_owned(), |ratio| format!("{ratio:.2}"))
}

// The picture, in pixels.
const WIDTH: f64 = 760.0;
const BAR_LEFT: f64 = 130.0;
const BAR_HEIGHT: f64 = 14.0;
const LINE_HEIGHT: f64 = 18.0;

/// Bars of the ratios, a group for each row. Each group has its own scale, since a server that
/// answers many requests at a time would make all other bars short; a mark is at the bare server.
fn svg(names: &[String], rows: &[Row], caption: &str) -> String {
    let mut drawn = String::new();
    let mut y = 0.0;
    for row in rows {
        y += 2.0 * LINE_HEIGHT;
        text(&mut drawn, (0.0, y - 6.0), "b", &row.title);
        let top = y;
        let longest = row.ratios.iter().flatten().fold(1.0_f64, |a, b| a.max(*b));
        let scale = (WIDTH - BAR_LEFT - 60.0) / longest;
        for (at, (name, ratio)) in names.iter().zip(&row.ratios).enumerate() {
            let Some(ratio) = ratio else {
                continue;
            };
            let class = if at == 0 { "ours" } else { "peer" };
            let (bar, base) = (ratio * scale, y + BAR_HEIGHT - 3.0);
            writeln!(
                drawn,
                r#"<rect class="{class}" x="{BAR_LEFT}" y="{y}" width="{bar:.1}" height="{BAR_HEIGHT}"/>"#
            )
            .expect("memory takes it");
            text(&mut drawn, (0.0, base), class, name);
            text(
                &mut drawn,
                (BAR_LEFT + bar + 6.0, base),
                class,
                &shown(Some(*ratio)),
            );
            y += LINE_HEIGHT;
        }
        let mark = BAR_LEFT + scale;
        writeln!(
            drawn,
            r#"<path class="mark" d="M{mark:.1} {:.1}V{:.1}"/>"#,
            top - 3.0,
            y
        )
        .expect("memory takes it");
    }
    y += 2.0 * LINE_HEIGHT;
    let note = "ratio to a bare echo server of the same messages (the line); longer is better";
    text(&mut drawn, (0.0, y - LINE_HEIGHT), "note", note);
    text(&mut drawn, (0.0, y), "note", caption);
    format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 -6 {:.0} {:.0}" font-family="sans-serif" font-size="12">
<style>
rect, text {{ fill: #888 }} .ours {{ fill: #2a7 }} .b {{ font-weight: bold }}
.mark {{ stroke: #c33; stroke-dasharray: 3 2 }}
</style>
{drawn}</svg>
"#,
        WIDTH + 20.0,
        y + 20.0
    )
}

fn text(drawn: &mut String, (x, y): (f64, f64), class: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    writeln!(
        drawn,
        r#"<text class="{class}" x="{x:.1}" y="{y:.1}">{words}</text>"#
    )
    .expect("memory takes it");
}
