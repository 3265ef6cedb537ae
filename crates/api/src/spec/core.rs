//! What an I/O core is to be.

use super::checks::CountField;
use super::{Flaw, NotifyWord, YieldWord, form, group_flaw, named, online, set_group, spec};

spec! {
    /// An I/O core.
    CoreSpec {
        /// Its number.
        id: u32,
        /// The processor it is pinned to.
        cpu: Option<u32>,
        /// Polled, adaptive or notified.
        notify: NotifyWord,
        /// Microseconds without work before a polled core sleeps.
        spin_us: u64,
        /// Microseconds within which an adaptive core is to take up 99 % of requests.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        p99_us: Option<u64>,
        /// The most of a processor that an adaptive core may take, percent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cpu_percent: Option<u32>,
        /// Most requests from one queue in a turn.
        budget: u32,
        /// Whether it yields its processor.
        #[serde(rename = "manners", alias = "yield_policy")]
        yield_policy: YieldWord,
        /// The group of which it serves the queues, and which is served by no core that is not reserved for it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reserve: Option<String>,
        /// Its queues are moved away, and none is placed here.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        drain: bool,
        /// The pool has started it, and ends it.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        elastic: bool,
    }
}

form! {
    /// A core as somebody asks for it. See [`CoreForm::spec`] for what is left out.
    CoreForm {
        /// The processor to pin it to [default: not pinned]
        [long, value_name = "CPU"]
        cpu: u32,
        /// How it starts [default: adaptive]
        [long, value_name = "HOW"]
        notify: NotifyWord,
        /// Microseconds without work before a polled core stops polling a queue and asks for kicks
        [long, value_name = "N"]
        spin_us: u64,
        /// Microseconds within which an adaptive core is to take up 99 % of requests; 0 for no objective [default: none]
        [long, value_name = "N"]
        p99_us: u64,
        /// The most of its processor that an adaptive core may take, percent; 0 for no ceiling [default: none]
        [long, value_name = "N"]
        cpu_percent: u32,
        /// Most requests from one queue in a turn [default: 64]
        [long, value_name = "N"]
        budget: u32,
        /// Whether it yields its processor to other threads
        [long, alias = "manners", value_name = "HOW"]
        yield_policy was "manners": YieldWord,
        /// Serve only the devices of this group here, and nowhere else
        [long, value_name = "GROUP"]
        reserve: String,
    }
}

form! {
    /// A change of a core while it runs. What is left out stays as it is.
    CoreChangeForm {
        /// Polled, adaptive or notified
        [long, value_name = "HOW"]
        notify: NotifyWord,
        /// Microseconds without work before a polled core stops polling a queue and asks for kicks
        [long, value_name = "N"]
        spin_us: u64,
        /// Microseconds within which an adaptive core is to take up 99 % of requests; 0 for no objective
        [long, value_name = "N"]
        p99_us: u64,
        /// The most of its processor that an adaptive core may take, percent; 0 for no ceiling
        [long, value_name = "N"]
        cpu_percent: u32,
        /// Whether its queues are moved to other cores, and no queue is placed here
        [long, value_name = "BOOL"]
        drain: bool,
        /// The group whose devices alone are served here, and nowhere else; an empty name is none
        [long, value_name = "GROUP"]
        reserve: String,
    }
}

impl CoreForm {
    /// The complete core, of this number. Its flaws are to be asked for: [`CoreSpec::flaws`].
    pub fn spec(self, id: u32) -> CoreSpec {
        let usual = CoreSpec::new(id);
        CoreSpec {
            id,
            cpu: self.cpu,
            notify: self.notify.unwrap_or(usual.notify),
            spin_us: self.spin_us.unwrap_or(usual.spin_us),
            p99_us: asked(self.p99_us),
            cpu_percent: asked(self.cpu_percent),
            budget: self.budget.unwrap_or(usual.budget),
            yield_policy: self.yield_policy.unwrap_or(usual.yield_policy),
            reserve: named(self.reserve),
            ..usual
        }
    }
}

/// What is asked of a core: 0 is nothing.
fn asked<N: Default + PartialEq>(value: Option<N>) -> Option<N> {
    value.filter(|value| *value != N::default())
}

/// Most cores, and the end of their numbers.
pub const CORES: u32 = 256;

/// What holds if nobody says: the daemon's tests hold these two against the defaults of the crate `cores`.
const SPIN_US: u64 = 50_000;
const BUDGETS: CountField = CountField { name: "budget", range: 1..=4096, power_of_two: false, usual: 64 };

impl CoreSpec {
    /// A core of which nothing is said but its number.
    pub fn new(id: u32) -> Self {
        CoreSpec {
            id,
            cpu: None,
            notify: NotifyWord::default(),
            spin_us: SPIN_US,
            p99_us: None,
            cpu_percent: None,
            budget: BUDGETS.usual.into(),
            yield_policy: YieldWord::default(),
            reserve: None,
            drain: false,
            elastic: false,
        }
    }

    /// The core after a change.
    pub fn changed(&self, change: &CoreChangeForm) -> CoreSpec {
        let mut next = self.clone();
        next.notify = change.notify.unwrap_or(self.notify);
        next.spin_us = change.spin_us.unwrap_or(self.spin_us);
        next.p99_us = change.p99_us.map_or(self.p99_us, |p99_us| asked(Some(p99_us)));
        next.cpu_percent = change.cpu_percent.map_or(self.cpu_percent, |percent| asked(Some(percent)));
        next.drain = change.drain.unwrap_or(self.drain);
        set_group(&mut next.reserve, change.reserve.clone());
        // Whoever reserves a core has asked for it: the pool does not end it, and it comes back after a restart.
        next.elastic &= next.reserve.is_none();
        next
    }

    /// Everything that is wrong with it on this host.
    pub fn flaws(&self) -> Vec<Flaw> {
        let mut flaws = Vec::new();
        if self.id >= CORES {
            flaws.push(Flaw::new(
                "id",
                format!("id = {}", self.id),
                format!("number the cores from 0 to {}", CORES - 1),
            ));
        }
        if let Some(cpu) = self.cpu
            && !online::is_there(cpu)
        {
            let remedy = format!("this host has {}; leave cpu out to run unpinned", online::list());
            flaws.push(Flaw::new("cpu", format!("there is no CPU {cpu}"), remedy));
        }
        if self.spin_us > 60_000_000 {
            flaws.push(Flaw::new(
                "spin_us",
                format!("spin_us = {}", self.spin_us),
                "give at most a minute: 60000000",
            ));
        }
        if let Some(p99_us) = self.p99_us.filter(|p99_us| *p99_us > 1_000_000) {
            let remedy = "give at most a second: 1000000; 0 for none";
            flaws.push(Flaw::new("p99_us", format!("p99_us = {p99_us}"), remedy));
        }
        if let Some(percent) = self.cpu_percent.filter(|percent| *percent > 100) {
            let remedy = "a core has one processor: give 1 to 100; 0 for no ceiling";
            flaws.push(Flaw::new("cpu_percent", format!("cpu_percent = {percent}"), remedy));
        }
        flaws.extend(BUDGETS.flaw(self.budget));
        flaws.extend(group_flaw(self.reserve.as_deref()).map(|flaw| Flaw { field: "reserve", ..flaw }));
        flaws
    }
}
