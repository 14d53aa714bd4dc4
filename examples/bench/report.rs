//! Medians, ratios and percentiles, and how they are printed.

use std::time::Duration;

use crate::load::Tally;
use crate::machine::Usage;

/// What one server came to in all rounds of a scenario.
#[derive(Default)]
pub struct Outcome {
    pub name: String,
    /// Pairs of acquire and release a second, for each round.
    pub rates: Vec<f64>,
    /// In nanoseconds, of all rounds.
    latencies: Vec<u32>,
    /// What the server used, if this program started it.
    used: Usage,
    /// The processor time of the generator.
    generator: Duration,
    elapsed: Duration,
    count: u64,
    pub violation_count: usize,
}

impl Outcome {
    pub fn new(name: &str) -> Outcome {
        Outcome {
            name: name.to_owned(),
            ..Outcome::default()
        }
    }

    pub fn add(&mut self, tally: Tally, used: Usage, generator: Duration) {
        self.rates
            .push(tally.grant_count as f64 / tally.elapsed.as_secs_f64());
        self.latencies.extend(tally.latencies);
        self.used.cpu += used.cpu;
        self.used.switch_count += used.switch_count;
        self.used.resident = self.used.resident.max(used.resident);
        self.generator += generator;
        self.elapsed += tally.elapsed;
        self.count += tally.grant_count + tally.late_count;
        self.violation_count += tally.overlap_count + tally.disorder_count;
    }

    /// The ratio to another server, which took turns with this one, for each round.
    fn ratios_to(&self, other: &Outcome) -> Vec<f64> {
        let pairs = self.rates.iter().zip(&other.rates);
        pairs.map(|(ours, theirs)| ours / theirs).collect()
    }

    /// The median of the ratios of each round.
    pub fn ratio_to(&self, other: &Outcome) -> f64 {
        median(&self.ratios_to(other))
    }

    /// How many microseconds so large shares of all grants did not take longer than.
    pub fn latencies<const N: usize>(&self, shares: [f64; N]) -> [f64; N] {
        let mut sorted = self.latencies.clone();
        sorted.sort_unstable();
        shares.map(|share| f64::from(percentile(&sorted, share)) / 1e3)
    }
}

/// Prints what the servers came to; the first is the bare server, which the others are measured by.
pub fn print(title: &str, outcomes: &[Outcome]) {
    let (bare, first) = (&outcomes[0], &outcomes[1]);
    println!("{title}");
    println!(
        "  {:<20}{:>9} {:>23} {:>23} {:>9} {:>9} {:>9} {:>8} {:>8} {:>8} {:>6}",
        "",
        "pairs/s",
        "to bare (quartiles)",
        "to first (quartiles)",
        "p50 us",
        "p99 us",
        "p99.9 us",
        "cpu us",
        "switches",
        "rss KB",
        "gen %"
    );
    for outcome in outcomes {
        let [half, most, longest] = outcome.latencies([0.5, 0.99, 0.999]);
        let count = outcome.count.max(1) as f64;
        println!(
            "  {:<20}{:>9.0} {:>23} {:>23} {:>9.1} {:>9.1} {:>9.1} {:>8.1} {:>8.1} {:>8} {:>6.0}",
            outcome.name,
            median(&outcome.rates),
            with_quartiles(&outcome.ratios_to(bare)),
            with_quartiles(&outcome.ratios_to(first)),
            half,
            most,
            longest,
            outcome.used.cpu.as_secs_f64() * 1e6 / count,
            outcome.used.switch_count as f64 / count,
            outcome.used.resident / 1024,
            100.0 * outcome.generator.as_secs_f64() / outcome.elapsed.as_secs_f64()
        );
    }
    println!();
}

fn with_quartiles(ratios: &[f64]) -> String {
    let [first, middle, third] = [0.25, 0.5, 0.75].map(|share| quantile(ratios, share));
    format!("{middle:.3} ({first:.3} {third:.3})")
}

/// Prints the heading of [`spread`].
pub fn spread_heading(title: &str) {
    println!("{title}");
    println!(
        "  {:<42} {:>10} {:>10} {:>10}",
        "", "p50 ms", "p99 ms", "longest"
    );
}

/// Prints how long something took, in milliseconds.
pub fn spread(name: &str, seconds: &[f64]) {
    let [middle, most, longest] = [0.5, 0.99, 1.0].map(|share| quantile(seconds, share) * 1e3);
    println!("  {name:<42} {middle:>10.3} {most:>10.3} {longest:>10.3}");
}

/// As [`spread`] over all rounds, but the longest is that of the round in which it was least: other
/// programs only add to it.
pub fn spread_of_rounds(name: &str, rounds: &[Vec<f64>]) {
    let [middle, most] = [0.5, 0.99].map(|share| quantile(&rounds.concat(), share) * 1e3);
    let longest: Vec<f64> = rounds.iter().map(|times| quantile(times, 1.0)).collect();
    let longest = longest.into_iter().fold(f64::INFINITY, f64::min) * 1e3;
    println!("  {name:<42} {middle:>10.3} {most:>10.3} {longest:>10.3}");
}

pub fn median(figures: &[f64]) -> f64 {
    quantile(figures, 0.5)
}

pub fn quantile(figures: &[f64], share: f64) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    percentile(&sorted, share)
}

/// The figure that so large a share of all does not exceed.
pub fn percentile<T: Copy + Default>(sorted: &[T], share: f64) -> T {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or_default()
}
