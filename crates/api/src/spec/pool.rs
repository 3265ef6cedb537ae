//! What a pool of I/O cores is to be: cores that are started and ended by the load.

use super::checks::CountField;
use super::{CORES, CoreForm, CoreSpec, CpuList, Flaw, NotifyWord, YieldWord, form, online, spec};

spec! {
    /// The pool, complete.
    PoolSpec {
        /// Cores that there are at least, those that users have asked for included.
        min: u32,
        /// Cores that there are at most, those that users have asked for included.
        max: u32,
        /// Processors to which its cores are pinned, each to one of its own. None: they are not pinned.
        cpus: Option<CpuList>,
        /// How its cores start: polled, adaptive or notified.
        notify: NotifyWord,
        /// Microseconds without work before a polled core stops polling a queue.
        spin_us: u64,
        /// Most requests from one queue in a turn.
        budget: u32,
        /// Whether its cores yield their processors.
        yield_policy: YieldWord,
    }
}

form! {
    /// A pool as somebody asks for it. See [`PoolForm::spec`] for what is left out.
    PoolForm {
        /// Cores that there are at least [default: 1]
        [long, value_name = "N"]
        min: u32,
        /// Cores that there are at most
        [long, value_name = "N"]
        max: u32,
        /// Processors for its cores, as in 2-5,8 [default: its cores are not pinned]
        [long, value_name = "LIST"]
        cpus: CpuList,
        /// How its cores start [default: adaptive]
        [long, value_name = "HOW"]
        notify: NotifyWord,
        /// Microseconds without work before a polled core stops polling a queue and asks for kicks
        [long, value_name = "N"]
        spin_us: u64,
        /// Most requests from one queue in a turn [default: 64]
        [long, value_name = "N"]
        budget: u32,
        /// Whether its cores yield their processors to other threads
        [long, value_name = "HOW"]
        yield_policy: YieldWord,
    }
}

impl PoolForm {
    /// The complete pool. Left out: a minimum of 1; as many cores at most as `cpus` has processors, or the minimum; what a core of which nothing
    /// is said has. Its flaws are to be asked for: [`PoolSpec::flaws`].
    pub fn spec(self) -> PoolSpec {
        let min = self.min.unwrap_or(1);
        let cpus = self.cpus.as_ref().map_or(0, |cpus| cpus.cpus().len() as u32);
        let PoolForm { notify, spin_us, budget, yield_policy, .. } = self;
        let core = CoreForm { notify, spin_us, budget, yield_policy, ..CoreForm::default() }.spec(0);
        PoolSpec {
            min,
            max: self.max.unwrap_or(cpus.max(min)),
            cpus: self.cpus,
            notify: core.notify,
            spin_us: core.spin_us,
            budget: core.budget,
            yield_policy: core.yield_policy,
        }
    }
}

const CORE_COUNTS: std::ops::RangeInclusive<u16> = 1..=CORES as u16;

impl PoolSpec {
    /// A core that the pool starts.
    pub fn core(&self, id: u32, cpu: Option<u32>) -> CoreSpec {
        CoreSpec {
            cpu,
            notify: self.notify,
            spin_us: self.spin_us,
            budget: self.budget,
            yield_policy: self.yield_policy,
            elastic: true,
            ..CoreSpec::new(id)
        }
    }

    /// Everything that is wrong with it on this host.
    pub fn flaws(&self) -> Vec<Flaw> {
        let counts = [("min", self.min), ("max", self.max)];
        let mut flaws: Vec<Flaw> = counts
            .into_iter()
            .filter_map(|(name, count)| {
                CountField { name, range: CORE_COUNTS, power_of_two: false, usual: 1 }.flaw(count)
            })
            .collect();
        if self.max < self.min {
            let reason = format!("max = {} is below min = {}", self.max, self.min);
            flaws.push(Flaw::new("max", reason, format!("give at least {}", self.min)));
        }
        if let Some(cpus) = &self.cpus {
            let missing = cpus.cpus().iter().find(|cpu| !online::is_there(**cpu));
            if let Some(cpu) = missing {
                let remedy = format!("this host has {}; leave cpus out to run unpinned", online::list());
                flaws.push(Flaw::new("cpus", format!("there is no CPU {cpu}"), remedy));
            }
            let count = cpus.cpus().len() as u32;
            if self.max > count {
                let reason = format!("max = {}, and cpus has {count} processors", self.max);
                flaws.push(Flaw::new(
                    "max",
                    reason,
                    "each core has a processor of its own: give more, or a smaller max",
                ));
            }
        }
        flaws.extend(self.core(0, None).flaws());
        flaws
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_follows_from_what_is_said() {
        let spec = PoolForm { cpus: Some("0".parse().unwrap()), ..PoolForm::default() }.spec();
        assert_eq!((spec.min, spec.max, spec.flaws()), (1, 1, vec![]));
        let spec = PoolForm { min: Some(2), ..PoolForm::default() }.spec();
        assert_eq!((spec.min, spec.max, spec.flaws()), (2, 2, vec![]));
        assert!(spec.core(3, None).elastic && !CoreSpec::new(3).elastic);
        for (form, field) in [
            (PoolForm { min: Some(0), max: Some(2), ..PoolForm::default() }, "min"),
            (PoolForm { max: Some(CORES + 1), ..PoolForm::default() }, "max"),
            (PoolForm { min: Some(3), max: Some(2), ..PoolForm::default() }, "max"),
            (PoolForm { max: Some(2), cpus: Some("0".parse().unwrap()), ..PoolForm::default() }, "max"),
            (PoolForm { cpus: Some("4095".parse().unwrap()), ..PoolForm::default() }, "cpus"),
            (PoolForm { budget: Some(0), ..PoolForm::default() }, "budget"),
        ] {
            let flaws = form.clone().spec().flaws();
            assert_eq!(flaws.iter().map(|flaw| flaw.field).collect::<Vec<_>>(), [field], "{form:?}");
        }
    }
}
