//! Two ways of one thing in turn, until the difference is known or time is up.

use anyhow::{Context, Result, ensure};
use ioplane_figures::compare::interval;
use ioplane_figures::goals::UNRESOLVED;
use ioplane_figures::report::median;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const LEAST_PAIRS: usize = 20;
const MOST_PAIRS: usize = 100;

/// How much more the first way takes than the second, in per cent.
#[derive(Clone, Debug)]
pub struct Compared {
    /// The median of the pairs, or that it is not known closely enough.
    pub percent: Value,
    /// Of that median, with 95 %; what was measured whether it is close enough or not.
    pub interval: Option<[f64; 2]>,
    pub pairs: usize,
}

impl Compared {
    /// Of quotients of pairs; the interval has to be narrower than `bound` per cent.
    pub fn of(ratios: &[f64], bound: f64) -> Compared {
        let percent = |ratio: f64| (ratio - 1.0) * 100.0;
        let ends = interval(ratios).map(|ends| ends.map(percent));
        let close = ratios.len() >= LEAST_PAIRS && ends.is_some_and(|[low, high]| high - low < bound);
        let middle = percent(median(ratios.iter().copied()));
        Compared {
            percent: if close { json!(middle) } else { json!(UNRESOLVED) },
            interval: ends,
            pairs: ratios.len(),
        }
    }

    pub fn is_known(&self) -> bool {
        self.percent.is_number()
    }

    pub fn words(&self) -> String {
        let ends = self.interval.map_or("none".into(), |[low, high]| format!("{low:.2} to {high:.2} %"));
        let middle = self.percent.as_f64().map_or(UNRESOLVED.into(), |middle| format!("{middle:.2} %"));
        format!("{middle}; 95 % interval of the median {ends}, {} pairs", self.pairs)
    }
}

/// Runs both ways, which one first in turn. `run` says what its way, the first if it is true, has taken.
pub fn alternate(bound: f64, limit: Duration, mut run: impl FnMut(bool) -> Result<f64>) -> Result<Compared> {
    let compared = alternate_each(bound, limit, |first| Ok(vec![run(first)?]))?;
    compared.into_iter().next().context("one measure")
}

/// The same for several measures of each run, as many each time; goes on until all are known.
pub fn alternate_each(
    bound: f64,
    limit: Duration,
    mut run: impl FnMut(bool) -> Result<Vec<f64>>,
) -> Result<Vec<Compared>> {
    let end = Instant::now() + limit;
    let mut ratios: Vec<Vec<f64>> = Vec::new();
    let mut pairs = 0;
    loop {
        pairs += 1;
        let begins = pairs % 2 == 1;
        let (one, other) = (run(begins)?, run(!begins)?);
        let (first, second) = if begins { (one, other) } else { (other, one) };
        ratios.resize_with(first.len(), Vec::new);
        ensure!(second.len() == first.len() && second.iter().all(|took| *took > 0.0), "nothing was counted");
        for ((ratios, first), second) in ratios.iter_mut().zip(&first).zip(&second) {
            ratios.push(first / second);
        }
        let compared: Vec<Compared> = ratios.iter().map(|ratios| Compared::of(ratios, bound)).collect();
        if compared.iter().all(Compared::is_known) || pairs == MOST_PAIRS || Instant::now() >= end {
            return Ok(compared);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_closely_enough_is_no_number() {
        let narrow: Vec<f64> = (0..20).map(|n| 1.001 + 0.0001 * f64::from(n % 4)).collect();
        let compared = Compared::of(&narrow, 0.5);
        assert!(compared.is_known() && compared.percent.as_f64().is_some_and(|percent| percent < 0.2));
        let wide: Vec<f64> = (0..20).map(|n| 0.98 + 0.002 * f64::from(n)).collect();
        assert!(!Compared::of(&wide, 0.5).is_known());
        assert!(!Compared::of(&narrow[..3], 0.5).is_known());
    }

    #[test]
    fn either_way_is_the_first_in_turn() {
        let mut order = Vec::new();
        let compared = alternate(0.5, Duration::from_secs(60), |first| {
            order.push(first);
            Ok(if first { 1.5 } else { 1.0 })
        });
        let compared = compared.unwrap();
        assert_eq!((compared.pairs, compared.percent), (LEAST_PAIRS, json!(50.0)));
        assert_eq!(order[..4], [true, false, false, true]);
        assert!(alternate(0.5, Duration::ZERO, |_| Ok(0.0)).is_err());
    }

    #[test]
    fn each_measure_is_compared_with_its_own() {
        let run = |first| Ok(if first { vec![1.5, 1.0] } else { vec![1.0, 2.0] });
        let compared = alternate_each(0.5, Duration::from_secs(60), run).unwrap();
        let percents: Vec<&Value> = compared.iter().map(|compared| &compared.percent).collect();
        assert_eq!(percents, [&json!(50.0), &json!(-50.0)]);
    }
}
