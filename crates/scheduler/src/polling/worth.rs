//! What latency is worth to a queue: whether its requests become more when they are answered sooner.
//!
//! In a closed loop each wake-up that a request waits for makes the next one later, so to arm a queue costs requests. Requests that come by a clock, or from
//! many guests that know nothing of each other, are as many either way: to poll such a queue buys latency alone, at the price of the processor. Which of both a
//! load is cannot be seen in gaps. So a core compares: of windows that follow each other, every second one has the queues in question armed as if latency
//! were worth nothing. A queue whose requests are as many in those, where the core took less processor time, is armed that way from then on. The others are polled on.
//! Both is asked again later.
//!
//! All queues of a core are asked at once, since a loop goes over several of them; each is judged by its own requests.

/// How long a window is, as a power of two of ns: 8.4 ms, some hundred requests.
const WINDOW_LOG2: u32 = 23;

/// Windows of each kind in one comparison, at most, and those before which nothing is said to make no difference.
const PAIRS: u64 = 16;
const FEWEST_PAIRS: u64 = 4;

/// How many times the root of their number requests have to be fewer: of one window, and of all windows together.
const PAIR_ROOTS: u64 = 4;
const SUM_ROOTS: u64 = 3;

/// Requests are as many if no more than one in so many is missing. What comes at the end of an armed window is served, a wake-up later, in the polled one that
/// follows: of a wake-up of 100 us that makes a difference of 2.4 % that is none.
const ALIKE_PARTS: u64 = 32;

/// Requests in a polled window below which a pair says nothing.
const FEWEST_REQUESTS: u64 = 16;

/// From a comparison to the next one of a queue that is polled on, ns: twice as long after each that has found the same. What it costs is requests. The first is
/// short, since one comparison may be wrong: one moment without requests in an armed window looks like a loop, and where one of two queues is not asked at the
/// same time, the core saves nothing.
const PAUSE_NS: (u64, u64) = (64_000_000, 4_000_000_000);
/// For so long a queue has to be in question before it is asked for the first time, ns. What a load costs at its begin says little.
const FIRST_NS: u64 = 32_000_000;
/// The pause of a queue that is armed, and asks whether its load is another one by now: one polled window is enough for that.
const ARMED_PAUSE_NS: u64 = 500_000_000;

/// Which queues a window has armed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Window {
    /// The first: queues join. They are as they were, and nothing is counted.
    Joining,
    Polled,
    Armed,
}

/// The comparisons of one core. Times in ns, of the same clock as those of [`super::QueuePolling`].
#[derive(Debug, Clone, Default)]
pub(super) struct Comparison {
    /// Of this comparison, among all.
    number: u64,
    began_ns: u64,
    ends_ns: u64,
    /// Queues that take part and are not judged yet.
    taking: u32,
    /// The window of the last sample, and the thread's processor time then.
    sampled: (u64, u64),
    /// Processor time in polled windows and in armed ones.
    cpu_ns: [u64; 2],
}

impl Comparison {
    #[inline]
    fn runs(&self, now_ns: u64) -> bool {
        now_ns < self.ends_ns
    }

    /// How many windows have ended; one more than there are once all have.
    fn windows(&self, now_ns: u64) -> u64 {
        (now_ns.saturating_sub(self.began_ns) >> WINDOW_LOG2).min(2 * PAIRS + 1)
    }

    /// Of as many requests as in the last polled window, how many were to come by now in this armed one.
    fn expected(&self, now_ns: u64, polled: u64) -> u64 {
        let of_this = now_ns.saturating_sub(self.began_ns) & ((1 << WINDOW_LOG2) - 1);
        polled.saturating_mul(of_this) >> WINDOW_LOG2
    }

    fn kind(window: u64) -> Window {
        match window {
            0 => Window::Joining,
            odd if odd % 2 == 1 => Window::Polled,
            _ => Window::Armed,
        }
    }

    fn begin(&mut self, now_ns: u64) {
        *self = Comparison {
            number: self.number + 1,
            began_ns: now_ns,
            ends_ns: now_ns + ((1 + 2 * PAIRS) << WINDOW_LOG2),
            ..Comparison::default()
        };
    }

    /// Whether a window has ended since the last sample, so that another is due.
    #[inline]
    pub(super) fn wants_sample(&self, now_ns: u64) -> bool {
        self.taking > 0 && self.windows(now_ns) != self.sampled.0
    }

    /// The core's thread has had so much processor time by now.
    pub(super) fn sample(&mut self, now_ns: u64, cpu_ns: u64) {
        let sampled = (self.windows(now_ns), cpu_ns);
        let (window, before) = std::mem::replace(&mut self.sampled, sampled);
        let used = cpu_ns.saturating_sub(before);
        match Self::kind(window) {
            Window::Joining => {}
            Window::Polled => self.cpu_ns[0] += used,
            Window::Armed => self.cpu_ns[1] += used,
        }
    }

    /// Whether the core took less processor time with the queues armed, by an eighth at least.
    fn saves(&self) -> bool {
        let [polled, armed] = self.cpu_ns;
        armed.saturating_mul(8) <= polled.saturating_mul(7) && polled > 0
    }

    /// A queue that took part is judged, or is another's now.
    fn left(&mut self, now_ns: u64) {
        self.taking -= 1;
        if self.taking == 0 {
            self.ends_ns = self.ends_ns.min(now_ns);
        }
    }
}

/// What is known of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Found {
    /// Nothing: latency is worth what the costs say.
    #[default]
    Nothing,
    /// The queue has fewer requests when it is armed, or arming saves no processor time.
    PollingPays,
    /// It has as many, and arming saves processor time.
    AsMany,
}

/// The part of one queue in a comparison.
#[derive(Debug, Clone, Copy, Default)]
struct Part {
    number: u64,
    /// The window of the last request.
    window: u64,
    /// Requests in this pair of windows: polled, armed.
    pair: [u64; 2],
    /// In the pairs before that have said something, and how many those are.
    sum: [u64; 2],
    pairs: u64,
}

impl Part {
    /// A pair of windows has ended. What that says, if it says anything.
    fn pair_ended(&mut self) -> Option<Found> {
        let [polled, armed] = std::mem::take(&mut self.pair);
        if is_behind(polled, armed, PAIR_ROOTS) {
            return Some(Found::PollingPays);
        }
        // No load has more requests because they wait: it has changed meanwhile. What came before says nothing of it.
        if is_behind(armed, polled, PAIR_ROOTS) {
            (self.sum, self.pairs) = ([0; 2], 0);
        } else if polled >= FEWEST_REQUESTS {
            self.sum = [self.sum[0] + polled, self.sum[1] + armed];
            self.pairs += 1;
        }
        None
    }
}

/// What latency is worth to one queue.
#[derive(Debug, Clone, Default)]
pub(super) struct Worth {
    found: Found,
    due_ns: u64,
    pause_ns: u64,
    part: Option<Part>,
}

impl Worth {
    /// Whether the queue is looked at only for as long as that saves processor time.
    #[inline]
    pub(super) fn is_plain(&self, now_ns: u64, comparison: &Comparison) -> bool {
        self.compares(now_ns, comparison).unwrap_or(self.found == Found::AsMany)
    }

    /// Whether it is armed, or polled, to see what comes of it, and will be served as before in a moment: its gaps are of this window alone.
    #[inline]
    pub(super) fn tries_otherwise(&self, now_ns: u64, comparison: &Comparison) -> bool {
        self.compares(now_ns, comparison).is_some_and(|armed| armed != self.found_plain())
    }

    /// Where the queue takes part in a comparison that is going on: whether it is armed in this window.
    #[inline]
    fn compares(&self, now_ns: u64, comparison: &Comparison) -> Option<bool> {
        let part = self.part.as_ref()?;
        (part.number == comparison.number && comparison.runs(now_ns)).then(|| {
            match Comparison::kind(comparison.windows(now_ns)) {
                Window::Joining => self.found == Found::AsMany,
                kind => kind == Window::Armed,
            }
        })
    }

    /// The same, whatever is being compared.
    pub(super) fn found_plain(&self) -> bool {
        self.found == Found::AsMany
    }

    /// The queue had `requests`. `doubts`: it is polled for the sake of latency alone. True if something else is known of it now.
    #[inline]
    pub(super) fn worked(
        &mut self,
        now_ns: u64,
        requests: u32,
        doubts: bool,
        comparison: &mut Comparison,
    ) -> bool {
        if self.part.is_some() {
            return self.count(now_ns, requests, comparison);
        }
        if !doubts {
            // Gaps may be between both for a moment. After that, what was found says nothing any more.
            if self.due_ns > 0 && now_ns >= self.due_ns + FIRST_NS {
                let was_plain = self.found_plain();
                *self = Worth::default();
                return was_plain;
            }
        } else if self.due_ns == 0 {
            self.due_ns = now_ns + FIRST_NS;
        } else if now_ns >= self.due_ns || comparison.runs(now_ns) {
            self.join(now_ns, comparison);
        }
        false
    }

    /// Begins a comparison, or takes part in one that begins.
    #[cold]
    fn join(&mut self, now_ns: u64, comparison: &mut Comparison) {
        if !comparison.runs(now_ns) {
            comparison.begin(now_ns);
        }
        if Comparison::kind(comparison.windows(now_ns)) == Window::Joining {
            comparison.taking += 1;
            self.part = Some(Part { number: comparison.number, ..Part::default() });
        }
    }

    /// Counts requests of a queue that takes part, and judges it: when a pair of windows has ended, and in an armed one if much is missing.
    fn count(&mut self, now_ns: u64, requests: u32, comparison: &mut Comparison) -> bool {
        let Some(part) = &mut self.part else { return false };
        if part.number != comparison.number {
            // It had no request when its comparison ended.
            self.part = None;
            return false;
        }
        let last = !comparison.runs(now_ns);
        let window = comparison.windows(now_ns);
        let kind = Comparison::kind(window);
        let before = std::mem::replace(&mut part.window, window);
        let found = if before != window && before > 0 && kind == Window::Polled || last {
            // The pair before is whole.
            let told = part.pair_ended();
            told.or_else(|| judge(part.sum, part.pairs, last || window > 2 * PAIRS, self.found))
        } else if kind == Window::Armed && before == window {
            let expected = comparison.expected(now_ns, part.pair[0]);
            falls_behind(expected, part.pair[1]).then_some(Found::PollingPays)
        } else {
            None
        };
        if let Some(found) = found {
            let found =
                if found == Found::AsMany && !comparison.saves() { Found::PollingPays } else { found };
            comparison.left(now_ns);
            return self.judged(found, now_ns);
        }
        match kind {
            Window::Joining => {}
            Window::Polled => part.pair[0] += u64::from(requests),
            Window::Armed => part.pair[1] += u64::from(requests),
        }
        false
    }

    fn judged(&mut self, found: Found, now_ns: u64) -> bool {
        let other = found != self.found;
        self.pause_ns = match found {
            Found::AsMany => ARMED_PAUSE_NS,
            _ if other => PAUSE_NS.0,
            _ => (2 * self.pause_ns).clamp(PAUSE_NS.0, PAUSE_NS.1),
        };
        (self.found, self.due_ns, self.part) = (found, now_ns + self.pause_ns, None);
        other
    }

    /// The load is another one, as its last gaps have it: what was found out about the one before says nothing of it. But gaps of a queue that is armed, since
    /// it has as many requests, are `longer` for that reason alone.
    pub(super) fn forget(&mut self, longer: bool, now_ns: u64, comparison: &mut Comparison) {
        if longer && self.found_plain() {
            return;
        }
        if self.part.is_some_and(|part| part.number == comparison.number) {
            comparison.left(now_ns);
        }
        *self = Worth::default();
    }

    /// The same on another core, whose clock is another.
    pub(super) fn elsewhere(&self) -> Self {
        Worth { found: self.found, ..Worth::default() }
    }
}

/// Whether so many requests of an armed window that has not ended are fewer than expected, by more than chance: five times the root of their number, and an
/// eighth.
fn falls_behind(expected: u64, requests: u64) -> bool {
    let missing = expected.saturating_sub(requests);
    missing * 8 > expected && missing * missing > 25 * expected
}

/// Whether `fewer` requests are fewer than `requests` of other windows by more than chance: by more than a fiftieth, and so many times the root of their number beyond
/// that. Requests at random times differ by 1.4 times that root, and once in 400 times by four times.
fn is_behind(requests: u64, fewer: u64, roots: u64) -> bool {
    let beyond = requests.saturating_sub(fewer).saturating_sub(requests / 50);
    beyond * beyond > roots * roots * requests
}

/// What is to be said of a queue with so many requests in polled windows and in armed ones, in so many pairs that have said nothing by themselves. `last`: nothing
/// more comes. From four pairs on they are as many if one in [`ALIKE_PARTS`] is missing at most, at the end if one in 20 is. Where they were as many `before`, one pair with one in
/// 20 missing is enough, or four pairs that do not say otherwise.
fn judge([polled, armed]: [u64; 2], pairs: u64, last: bool, before: Found) -> Option<Found> {
    let missing = polled.saturating_sub(armed);
    let within_a_twentieth = missing * 20 <= polled;
    if pairs == 0 {
        // There was too little to say anything else than before.
        last.then_some(before)
    } else if is_behind(polled, armed, SUM_ROOTS) {
        Some(Found::PollingPays)
    } else if before == Found::AsMany && (within_a_twentieth || pairs >= FEWEST_PAIRS) {
        // A loop that loses a third of its requests may lose them by chance in one pair, and not in four.
        Some(Found::AsMany)
    } else if pairs >= FEWEST_PAIRS && missing * ALIKE_PARTS <= polled {
        Some(Found::AsMany)
    } else if last {
        Some(if within_a_twentieth { Found::AsMany } else { Found::PollingPays })
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_requests_are_told_from_as_many() {
        let first = |polled, armed, pairs, last| judge([polled, armed], pairs, last, Found::Nothing);
        assert_eq!(first(100, 100, 1, false), None, "too early");
        assert_eq!(first(400, 399, 4, false), Some(Found::AsMany));
        assert_eq!(first(400, 450, 4, false), Some(Found::AsMany));
        assert_eq!(first(400, 360, 4, false), None, "chance, perhaps");
        assert_eq!(first(1_600, 1_530, 16, true), Some(Found::AsMany));
        assert_eq!(first(1_600, 1_510, 16, true), Some(Found::PollingPays));
        assert_eq!(first(10_000, 9_400, 8, false), Some(Found::PollingPays));
        assert_eq!(first(0, 0, 0, true), Some(Found::Nothing));
        assert_eq!(judge([100, 96], 1, false, Found::AsMany), Some(Found::AsMany));
        // A loop that loses a third of its requests: not told from chance by one pair, and by four.
        assert_eq!(judge([56, 37], 1, false, Found::AsMany), None);
        assert_eq!(judge([4 * 56, 4 * 37], 4, false, Found::AsMany), Some(Found::PollingPays));
        assert_eq!(judge([400, 365], 4, false, Found::AsMany), Some(Found::AsMany));
        assert_eq!(judge([0, 0], 0, true, Found::PollingPays), Some(Found::PollingPays));
    }

    #[test]
    fn a_load_that_changes_meanwhile_is_not_taken_for_one_that_comes_anyway() {
        let pair =
            |polled, armed| Part { pair: [polled, armed], sum: [400, 400], pairs: 3, ..Part::default() };
        let mut more = pair(100, 300);
        assert_eq!((more.pair_ended(), more.pairs), (None, 0));
        let mut silent = pair(0, 0);
        assert_eq!((silent.pair_ended(), silent.pairs), (None, 3));
        assert_eq!(pair(300, 100).pair_ended(), Some(Found::PollingPays));
        let mut steady = pair(100, 98);
        assert_eq!((steady.pair_ended(), steady.pairs, steady.sum), (None, 4, [500, 498]));
    }

    /// Requests every `polled_ns` in polled windows and every `armed_ns` in armed ones, where the core takes such parts of a processor, in thousandths.
    fn compared(polled_ns: u64, armed_ns: u64, permille: [u64; 2]) -> (Worth, Comparison) {
        let (mut worth, mut comparison) = (Worth::default(), Comparison::default());
        let (mut now, mut cpu) = (1_000, 0);
        while worth.found == Found::Nothing && now < 1_000_000_000 {
            let plain = worth.is_plain(now, &comparison);
            let step = if plain { armed_ns } else { polled_ns };
            now += step;
            cpu += step * permille[usize::from(plain)] / 1000;
            if comparison.wants_sample(now) {
                comparison.sample(now, cpu);
            }
            worth.worked(now, 1, true, &mut comparison);
        }
        (worth, comparison)
    }

    #[test]
    fn a_loop_that_waits_for_its_answers_is_polled() {
        let (worth, comparison) = compared(40_000, 95_000, [1000, 400]);
        assert_eq!(worth.found, Found::PollingPays);
        // A part of an armed window told.
        assert_eq!(comparison.windows(comparison.ends_ns), 2);
        assert!(comparison.ends_ns & ((1 << WINDOW_LOG2) - 1) < 4_000_000);
        assert_eq!(compared(40_000, 44_000, [1000, 400]).0.found, Found::PollingPays);
    }

    #[test]
    fn requests_that_come_anyway_are_not_polled_for() {
        assert_eq!(compared(70_000, 70_000, [900, 450]).0.found, Found::AsMany);
        // Unless arming takes as much.
        assert_eq!(compared(20_000, 20_000, [900, 850]).0.found, Found::PollingPays);
    }

    #[test]
    fn each_queue_of_a_core_is_judged_by_its_own_requests() {
        let mut comparison = Comparison::default();
        // The first waits for its answers, the second comes by a clock: next request, and the times between two where it is polled or armed.
        let mut queues = [(Worth::default(), 10, [40_000, 95_000]), (Worth::default(), 20, [70_000, 70_000])];
        let mut cpu = 0;
        while queues[1].0.found == Found::Nothing {
            let (worth, next, between) = queues.iter_mut().min_by_key(|queue| queue.1).unwrap();
            let now = *next;
            assert!(now < 1_000_000_000);
            let plain = worth.is_plain(now, &comparison);
            cpu += if plain { 10_000 } else { 30_000 };
            if comparison.wants_sample(now) {
                comparison.sample(now, cpu);
            }
            worth.worked(now, 1, true, &mut comparison);
            *next += between[usize::from(plain)];
        }
        assert_eq!(queues.map(|queue| queue.0.found), [Found::PollingPays, Found::AsMany]);
    }

    #[test]
    fn a_queue_joins_at_the_begin_only_and_the_last_one_ends_it() {
        let mut comparison = Comparison::default();
        let due = || Worth { due_ns: 1, ..Worth::default() };
        let (mut first, mut second, mut late) = (due(), due(), due());
        first.worked(1, 1, true, &mut comparison);
        second.worked(1_000_000, 1, true, &mut comparison);
        late.worked(1 << (WINDOW_LOG2 + 1), 1, true, &mut comparison);
        assert_eq!((comparison.taking, late.part.is_none()), (2, true));
        first.forget(false, 1_000, &mut comparison);
        assert!(comparison.runs(1_000));
        second.forget(true, 1_000, &mut comparison);
        assert!(!comparison.runs(1_000));
        // One that is asked about nothing takes part in none.
        late.worked(1 << 40, 1, false, &mut comparison);
        assert!(!comparison.runs(1 << 40));
    }

    #[test]
    fn gaps_that_a_window_has_made_are_known() {
        let mut comparison = Comparison::default();
        let mut polled = Worth { due_ns: 1, ..Worth::default() };
        let mut armed = Worth { due_ns: 1, found: Found::AsMany, ..Worth::default() };
        for worth in [&mut polled, &mut armed] {
            worth.worked(1, 1, true, &mut comparison);
        }
        // Joining, polled, armed.
        for (window, tries) in [(0, [false, false]), (1, [false, true]), (2, [true, false])] {
            let now = 1 + (window << WINDOW_LOG2);
            assert_eq!([&polled, &armed].map(|worth| worth.tries_otherwise(now, &comparison)), tries);
        }
        // Longer gaps are what arming has made of them; shorter ones are of another load.
        armed.forget(true, 2, &mut comparison);
        polled.forget(true, 2, &mut comparison);
        assert_eq!((armed.found, polled.part.is_none()), (Found::AsMany, true));
        armed.forget(false, 2, &mut comparison);
        assert_eq!((armed.found, armed.part.is_none()), (Found::Nothing, true));
    }

    #[test]
    fn one_that_is_armed_is_polled_again_where_arming_saves_nothing_any_more() {
        let (mut worth, mut comparison) = compared(70_000, 70_000, [900, 450]);
        let (mut now, mut cpu) = (1_000_000_000, 0);
        while worth.found == Found::AsMany && now < 3_000_000_000 {
            now += 70_000;
            cpu += 60_000;
            if comparison.wants_sample(now) {
                comparison.sample(now, cpu);
            }
            worth.worked(now, 1, true, &mut comparison);
        }
        assert_eq!(worth.found, Found::PollingPays);
        // And one that is not polled for its latency alone any more is asked nothing.
        assert!(!worth.worked(now + 1_000_000_000, 1, false, &mut comparison));
        assert_eq!((worth.found, worth.due_ns), (Found::Nothing, 0));
    }

    #[test]
    fn a_queue_without_requests_when_its_comparison_ends_takes_part_in_the_next() {
        let mut comparison = Comparison::default();
        let due = || Worth { due_ns: 1, ..Worth::default() };
        let (mut silent, mut other) = (due(), due());
        silent.worked(1, 1, true, &mut comparison);
        other.worked(1 << 40, 1, true, &mut comparison);
        silent.worked(1 << 40, 1, true, &mut comparison);
        assert_eq!((comparison.taking, silent.part.is_some()), (1, false));
        silent.worked(1 << 40, 1, true, &mut comparison);
        assert_eq!((comparison.taking, silent.part.is_some()), (2, true));
    }
}
