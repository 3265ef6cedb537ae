//! A function, its model, and the guest's view of what is trapped.

use ioplane_hardware::Hardware;
use ioplane_memory::GuestView;
use ioplane_model::{DirectModel, KeepRule, Machine, ModelInput, PageRule, Verdict, Way};

use crate::addresses::GuestAddress;
use crate::error::MovingError;
use crate::kept::{Ahead, Kept};
use crate::mailbox::{GuestMailbox, Latched, Line, Sending};
use crate::plan::{CounterPlan, MovePlan};
use crate::state::{DirectStateV2, Geometry, RingStateV2};
use crate::written::{PageSet, RingLog};

/// What [`Movable::stop`] does about frames that the guest has given to the device and the device has not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unsent {
    /// Waits until they are sent.
    Wait,
    /// The other function sends them: for a port without a link.
    Leave,
}

/// What is logged while memory is copied.
pub(crate) struct Copying {
    view: GuestView,
    logs: Vec<Option<RingLog>>,
    /// To be named at the next call.
    written: PageSet,
    /// To be named once more when the device is at rest.
    late: PageSet,
}

pub(crate) enum Phase {
    Running,
    /// Told to stop; the queues end what they have in hand. Values as they were before that.
    Stopping(Box<DirectStateV2>),
    Stopped(Box<DirectStateV2>),
}

/// A function, its model, and the guest's view of what is trapped.
pub struct Movable<H: Hardware> {
    pub(crate) hardware: H,
    pub(crate) plan: MovePlan,
    pub(crate) machine: Machine,
    pub(crate) mailbox: GuestMailbox,
    pub(crate) sending: Sending,
    pub(crate) latched: Latched,
    pub(crate) kept: Kept,
    /// The guest has asked and goes on holding its mailbox until it knows that it was heard: the answer may come nevertheless.
    over: bool,
    /// What is added to each counter of the hardware for the guest.
    pub(crate) offsets: Vec<u64>,
    /// The high half that goes with the low half that the guest has read last: which counter, and its value.
    pub(crate) half: Option<(u8, u32)>,
    /// No counter was read since the function began anew.
    pub(crate) unread: bool,
    /// Rings that the guest has told to end: they read as on until they have.
    ending: Vec<bool>,
    /// The guest had the rings' pages until now, and may just have told one to end.
    unsure: bool,
    /// Pages that need not be trapped may be mapped.
    maps: bool,
    pub(crate) copying: Option<Copying>,
    pub(crate) phase: Phase,
    /// Messages that replays have sent by the mailbox.
    pub(crate) messages: u64,
    /// What was said for a guest that is to come.
    pub(crate) ahead: Option<Ahead>,
    /// How many messages of that the last replay did not have to say.
    pub(crate) built_upon: u64,
}

impl<H: Hardware> Movable<H> {
    /// A function that was reset and that nobody has driven since.
    pub fn new(hardware: H, model: &'static DirectModel) -> Result<Self, MovingError> {
        let plan = MovePlan::new(model)?;
        let fault = |fault: ioplane_model::ModelFault| MovingError::Model {
            model: model.model.name,
            why: fault.to_string(),
        };
        Ok(Movable {
            hardware,
            machine: Machine::new(model.model).map_err(fault)?,
            mailbox: GuestMailbox::default(),
            sending: Sending::Nothing,
            latched: Latched::default(),
            kept: Kept::default(),
            over: false,
            offsets: vec![0; plan.counters.len()],
            half: None,
            unread: true,
            ending: vec![false; plan.rings.len()],
            unsure: false,
            maps: false,
            copying: None,
            phase: Phase::Running,
            messages: 0,
            ahead: None,
            built_upon: 0,
            plan,
        })
    }

    /// The function, to look at.
    pub fn look_at(&self) -> &H {
        &self.hardware
    }

    /// The function: for the guest's interrupts, and for its accesses to pages that it maps.
    pub fn hardware(&mut self) -> &mut H {
        &mut self.hardware
    }

    /// Messages that replays have sent by the function's mailbox so far. The guest's own are not among them.
    pub fn messages(&self) -> u64 {
        self.messages
    }

    /// Whether the guest's accesses to a page of registers come here. It changes with [`Movable::begin_copy`],
    /// [`Movable::end_copy`], a replay and [`Movable::counters_anew`]; a page that is not in the table is trapped.
    pub fn trapped(&self, page: usize) -> bool {
        match self.plan.table.pages.get(page) {
            Some(PageRule::Mapped) => false,
            Some(PageRule::MappedAtRest) => self.copying.is_some(),
            Some(PageRule::MappedUntilMoved) => {
                self.copying.is_some() || self.offsets.iter().any(|offset| *offset != 0)
            }
            Some(PageRule::Trapped) | None => true,
        }
    }

    /// Which pages of the first 64 need not be trapped now: bit 0 is page 0. None while the function does not run.
    pub fn mappable(&self) -> u64 {
        if !matches!(self.phase, Phase::Running) {
            return 0;
        }
        let pages = (0..self.plan.table.pages.len().min(64)).filter(|page| !self.trapped(*page));
        pages.fold(0, |all, page| all | 1 << page)
    }

    /// Which pages of the first 64 need not be trapped in a function that nobody copies or has moved.
    pub fn mappable_at_best(&self) -> u64 {
        let rules = self.plan.table.pages.iter().take(64).enumerate();
        rules.fold(0, |all, (page, rule)| if *rule == PageRule::Trapped { all } else { all | 1 << page })
    }

    /// From here on pages may be mapped: a reset by the driver does what [`Movable::counters_anew`] does, before a counter can be read.
    pub fn maps(&mut self) {
        self.maps = true;
    }

    /// The guest no longer maps any page. What it wrote there is in the hardware; but it may just have told a queue to end.
    pub fn pages_are_back(&mut self) {
        self.unsure = true;
    }

    /// What is in the way of a change of hands, of what is trapped: region and state.
    pub fn busy(&self) -> Option<(&'static str, &'static str)> {
        self.machine.busy()
    }

    pub(crate) fn get(&mut self, offset: u64) -> Result<u32, MovingError> {
        let mut bytes = [0; 4];
        self.hardware.read(self.plan.bar, offset, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    pub(crate) fn put(&mut self, offset: u64, value: u32) -> Result<(), MovingError> {
        Ok(self.hardware.write(self.plan.bar, offset, &value.to_le_bytes())?)
    }

    pub(crate) fn line(&mut self) -> Line<'_, H> {
        Line { hardware: &mut self.hardware, plan: &self.plan, latched: &mut self.latched }
    }

    pub(crate) fn running(&self) -> Result<(), MovingError> {
        if matches!(self.phase, Phase::Running) { Ok(()) } else { Err(MovingError::Stopped) }
    }

    /// The guest reads a register of 32 bits on a trapped page. What the model does not know reads as zero.
    pub fn read(&mut self, offset: u64) -> Result<u32, MovingError> {
        self.running()?;
        self.forget_ahead()?;
        if let Some(word) = self.mailbox_word(offset) {
            return Ok(self.mailbox.words[word]);
        }
        if offset == self.plan.control {
            self.turn()?;
            let bits = self.mailbox.bits;
            self.mailbox.bits &= !self.plan.table.mailbox.latched;
            return Ok(bits);
        }
        if !self.known(Way::Read, offset) {
            return Ok(0);
        }
        let of = |counter: &CounterPlan| counter.low == offset || counter.high == Some(offset);
        match self.plan.counters.iter().position(of) {
            Some(at) => self.counter_read(at, offset),
            None => self.get(offset),
        }
    }

    /// The guest reads a counter. The high half is the one of the moment at which the low one was read.
    fn counter_read(&mut self, at: usize, offset: u64) -> Result<u32, MovingError> {
        self.unread = false;
        let counter = self.plan.counters[at];
        let place = at as u8;
        if counter.low != offset
            && let Some((_, high)) = self.half.take_if(|(own, _)| *own == place)
        {
            return Ok(high);
        }
        let value = self.counter(at)?;
        let high = (value >> 32) as u32;
        if counter.low != offset {
            return Ok(high);
        }
        if counter.high.is_some() {
            self.half = Some((place, high));
        }
        Ok(value as u32)
    }

    /// A counter as the guest sees it.
    fn counter(&mut self, at: usize) -> Result<u64, MovingError> {
        let value = self.hardware_counter(at)?;
        Ok(value.wrapping_add(self.offsets[at]) & self.plan.counters[at].mask)
    }

    /// A counter of the hardware. Halves that do not belong together are read again.
    pub(crate) fn hardware_counter(&mut self, at: usize) -> Result<u64, MovingError> {
        let counter = self.plan.counters[at];
        let Some(high) = counter.high else { return Ok(self.get(counter.low)?.into()) };
        let before = self.get(high)?;
        let mut low = self.get(counter.low)?;
        let now = self.get(high)?;
        if now != before {
            low = self.get(counter.low)?;
        }
        Ok((u64::from(now) << 32 | u64::from(low)) & counter.mask)
    }

    /// The driver has reset the device and has read no counter since: from here on it sees the hardware's own where
    /// [`PageRule::MappedUntilMoved`] is, and whoever maps pages may map them again. `false`: it has read some, and nothing has changed.
    pub fn counters_anew(&mut self) -> bool {
        if self.unread {
            let counters = self.plan.counters.iter().zip(&mut self.offsets);
            counters.filter(|(counter, _)| counter.mapped).for_each(|(_, offset)| *offset = 0);
        }
        self.unread
    }

    /// The guest writes one. What the model does not know, and what is only read, takes no writes.
    pub fn write(&mut self, offset: u64, value: u32) -> Result<(), MovingError> {
        self.running()?;
        self.forget_ahead()?;
        if let Some(word) = self.mailbox_word(offset) {
            self.mailbox.words[word] = value;
            return Ok(());
        }
        if !self.known(Way::Write, offset) {
            return Ok(());
        }
        let pieces = self.machine.at(Way::Write, offset, 4);
        if let Some(register) = pieces.first().and_then(|piece| piece.register)
            && self.machine.hooked(register, Way::Write)
        {
            self.tell(ModelInput::Write { register, value });
        }
        if offset == self.plan.control {
            return self.mailbox_written(value);
        }
        self.ring_written(offset, value)?;
        self.put(offset, value)
    }

    fn known(&self, way: Way, offset: u64) -> bool {
        let pieces = self.machine.at(way, offset, 4);
        offset.is_multiple_of(4)
            && pieces.len() == 1
            && pieces[0].register.is_some_and(|id| self.machine.register(id).width == 4)
    }

    fn tell(&mut self, seen: ModelInput) {
        // These tables check nothing: what the device reaches is what the IOMMU translates.
        let moves = match self.machine.update(seen) {
            Verdict::Done(moves) => moves,
            Verdict::Check(pending) => self.machine.commit(pending),
        };
        if moves.reset() {
            self.begin_anew();
            if self.maps {
                self.counters_anew();
            }
        }
    }

    /// The function was reset past its registers, as a guest does it in configuration space: whatever was kept is over, and the end of
    /// the reset is to be seen in the mailbox.
    pub fn was_reset(&mut self) {
        self.begin_anew();
        self.ahead = None;
        self.machine.reset();
        self.phase = Phase::Running;
    }

    /// Whether it was told to stop and has not stopped yet: it cannot be let go on by itself then.
    pub fn is_stopping(&self) -> bool {
        matches!(self.phase, Phase::Stopping(_))
    }

    /// Whether it stands still, with a state.
    pub fn is_stopped(&self) -> bool {
        matches!(self.phase, Phase::Stopped(_))
    }

    /// Under which addresses the guest receives now. None of one that stands still, or that has no receive ring switched on: its
    /// address may be another function's.
    pub fn addresses(&mut self) -> Result<Vec<GuestAddress>, MovingError> {
        if !matches!(self.phase, Phase::Running) {
            return Ok(Vec::new());
        }
        for at in 0..self.plan.rings.len() {
            let ring = self.plan.rings[at];
            if ring.receives() && self.get(ring.control)? & ring.enable != 0 {
                return Ok(self.kept.addresses(&self.plan.table.mailbox));
            }
        }
        Ok(Vec::new())
    }

    /// Gives the hardware back, as it is.
    pub fn into_hardware(self) -> H {
        self.hardware
    }

    fn begin_anew(&mut self) {
        self.mailbox = GuestMailbox::default();
        self.sending = Sending::Nothing;
        self.latched = Latched::default();
        self.kept = Kept::default();
        (self.half, self.unread, self.over) = (None, true, false);
        self.ending.fill(false);
        for ring in 0..self.plan.rings.len() {
            self.retire(ring);
        }
    }

    fn mailbox_word(&self, offset: u64) -> Option<usize> {
        let at = offset.checked_sub(self.plan.memory)?;
        (at.is_multiple_of(4) && at / 4 < self.plan.words as u64).then_some((at / 4) as usize)
    }

    fn mailbox_written(&mut self, value: u32) -> Result<(), MovingError> {
        let table = &self.plan.table.mailbox;
        let mut refused = false;
        // Whoever asks again before the answer has to wait for the first one's: the other side may be reading it.
        if value & table.request != 0 && !matches!(self.sending, Sending::Asked(_)) {
            let words = self.mailbox.words;
            let place = self.plan.message(words[0]).map(|(place, _)| place);
            self.sending = if place.is_some_and(|place| self.kept.takes(table, place, &words)) {
                Sending::Waits(words)
            } else {
                Sending::Nothing
            };
            refused = matches!(self.sending, Sending::Nothing);
            self.over = value & table.hold != 0;
        }
        if value & (table.acknowledge | table.request) != 0 {
            self.mailbox.unread = false;
        }
        if value & table.hold != 0 {
            self.mailbox.bits |= table.hold;
        } else {
            self.mailbox.bits &= !table.hold;
            self.over = false;
        }
        if refused {
            self.mailbox.words[0] |= table.refused;
            self.mailbox.bits |= table.taken | table.message;
            self.mailbox.unread = true;
        }
        self.turn()
    }

    /// Carries messages between the guest's mailbox and the function's, as far as they go. To be called now and then while
    /// [`Movable::busy`] says something; a guest that looks at its mailbox does so too.
    pub fn turn(&mut self) -> Result<(), MovingError> {
        let table = &self.plan.table.mailbox;
        self.line().look()?;
        for (seen, bit) in [(&mut self.latched.taken, table.taken), (&mut self.latched.ready, table.ready)] {
            if std::mem::take(seen) {
                self.mailbox.bits |= bit;
            }
        }
        // A message waits until the guest has taken the last one and does not write one itself.
        if self.latched.message
            && !self.mailbox.unread
            && (self.mailbox.bits & table.hold == 0 || self.over)
            && let Some(words) = self.line().take()?
        {
            self.arrived(words);
        }
        // What the other side has said would be written over.
        if let Sending::Waits(words) = self.sending
            && !self.latched.message
            && self.line().send(&words)?
        {
            self.sending = Sending::Asked(words);
        }
        self.became(self.mailbox.bits);
        Ok(())
    }

    fn arrived(&mut self, words: [u32; 16]) {
        let table = &self.plan.table.mailbox;
        self.mailbox.words = words;
        self.mailbox.bits |= table.message;
        self.mailbox.unread = true;
        let Sending::Asked(asked) = self.sending else { return };
        if words[0] & table.kind != asked[0] & table.kind {
            return;
        }
        self.sending = Sending::Nothing;
        let Some((place, message)) = self.plan.message(asked[0]) else { return };
        if words[0] & table.accepted != 0 {
            self.kept.accepted(table, place, &asked, &words);
        } else if matches!(message.keep, KeepRule::Begins { .. }) {
            // Linux's igb: it has begun, and the function has no address yet.
            self.kept.accepted(table, place, &asked, &[0; 16]);
        }
    }

    /// Tells the model what the control register says, if a state waits for it.
    fn became(&mut self, value: u32) {
        // Whoever asked is answered by an answer, not by whatever the other side says.
        let answered = matches!(self.sending, Sending::Nothing);
        let waits: Vec<_> = self.machine.awaits().collect();
        for wait in waits {
            let message = wait.mask & self.plan.table.mailbox.message != 0;
            if u64::from(self.machine.register(wait.register).offset) == self.plan.control
                && value & wait.mask == wait.is
                && (answered || !message)
            {
                self.tell(ModelInput::Became { register: wait.register, value });
            }
        }
    }

    /// The guest's memory is copied from here on: the rings' pages are trapped, and what the device writes is logged. To be called
    /// when the guest no longer maps those pages, and before the first page of memory is sent.
    pub fn begin_copy(&mut self, view: GuestView) -> Result<(), MovingError> {
        self.running()?;
        let logs = (0..self.plan.rings.len()).map(|_| None).collect();
        self.copying = Some(Copying { view, logs, written: PageSet::new(), late: PageSet::new() });
        self.unsure = true;
        for at in 0..self.plan.rings.len() {
            let ring = self.plan.rings[at];
            if self.get(ring.control)? & ring.enable != 0 {
                self.log(at, true)?;
            }
        }
        Ok(())
    }

    /// Whether the guest's memory is being copied.
    pub fn is_copying(&self) -> bool {
        self.copying.is_some()
    }

    /// While it is copied, the guest's memory has become another: what the device reaches now is what it can write.
    pub fn copy_of(&mut self, view: GuestView) {
        if let Some(copying) = &mut self.copying {
            copying.view = view;
        }
    }

    /// It is no longer copied: it was called off.
    pub fn end_copy(&mut self) {
        self.copying = None;
    }

    /// Begins to log a ring that is on: `used`, before this.
    fn log(&mut self, at: usize, used: bool) -> Result<(), MovingError> {
        let ring = self.plan.rings[at];
        let geometry = self.geometry(at)?;
        let shape = match ring.buffers {
            Some((shape, _)) => self.get(shape)?,
            None => 0,
        };
        let (head, tail) = (self.get(ring.head)?, self.get(ring.tail)?);
        if let Some(copying) = &mut self.copying {
            copying.logs[at] = RingLog::begin(ring, geometry, shape, (head, tail), used, &copying.view);
        }
        Ok(())
    }

    pub(crate) fn geometry(&mut self, at: usize) -> Result<Geometry, MovingError> {
        let ring = self.plan.rings[at];
        let base = u64::from(self.get(ring.base.0)?) | u64::from(self.get(ring.base.1)?) << 32;
        Ok(Geometry { base, length: self.get(ring.length)?, size: ring.table.size })
    }

    /// A ring ends: nobody knows which of its buffers were written.
    fn retire(&mut self, at: usize) {
        if let Some(copying) = &mut self.copying
            && let Some(mut log) = copying.logs[at].take()
        {
            log.all(&copying.view, &mut copying.late);
            copying.written.extend(&copying.late);
        }
    }

    /// The guest is about to write a register of a ring.
    fn ring_written(&mut self, offset: u64, value: u32) -> Result<(), MovingError> {
        let Some(at) = self.plan.rings.iter().position(|ring| [ring.tail, ring.control].contains(&offset))
        else {
            return Ok(());
        };
        let ring = self.plan.rings[at];
        if offset == ring.control {
            self.ending[at] = value & ring.enable == 0;
        }
        if offset == ring.control && value & ring.enable == 0 {
            self.retire(at);
            return Ok(());
        }
        if offset != ring.tail {
            return Ok(());
        }
        let unknown = self.copying.as_ref().is_some_and(|copying| copying.logs[at].is_none());
        if unknown && self.get(ring.control)? & ring.enable != 0 {
            self.log(at, false)?;
        }
        if let Some(copying) = &mut self.copying
            && let Some(log) = &mut copying.logs[at]
        {
            log.tail_written(value, &copying.view, &mut copying.written);
        }
        Ok(())
    }

    /// Pages that the device wrote since it was asked last, and that were not named since. While the guest runs some are left for
    /// later; once the device is stopped the answer is complete.
    pub fn pages(&mut self) -> PageSet {
        let heads: Vec<u32> = match &self.phase {
            Phase::Stopped(state) => state.rings.iter().map(|ring| ring.head).collect(),
            Phase::Running | Phase::Stopping(_) => Vec::new(),
        };
        let Some(copying) = &mut self.copying else { return PageSet::new() };
        let Copying { view, logs, written, late } = copying;
        let logs = logs.iter_mut().enumerate().filter_map(|(at, log)| Some((at, log.as_mut()?)));
        for (at, log) in logs {
            match heads.get(at) {
                Some(head) => log.at_rest(*head, view, written),
                None => log.so_far(view, written),
            }
        }
        if !heads.is_empty() {
            written.append(late);
        }
        std::mem::take(written)
    }

    /// Brings the device to rest; the guest's processors stand still. `false`: not yet, call again. What is in the way of it passes by
    /// itself: a reset, an answer of the other side, frames to be sent ([`Unsent::Wait`]), write-backs.
    pub fn stop(&mut self, unsent: Unsent) -> Result<bool, MovingError> {
        if matches!(self.phase, Phase::Running) {
            self.turn()?;
            let unsure = std::mem::take(&mut self.unsure);
            if unsure || !self.machine.reusable() || self.ends()? || unsent == Unsent::Wait && !self.sent()? {
                return Ok(false);
            }
            let (state, enabled) = self.look()?;
            for at in 0..self.plan.halt.len() {
                let (offset, value) = self.plan.halt[at];
                let ring = self.plan.rings.iter().position(|ring| ring.control == offset);
                if ring.is_none_or(|at| enabled[at]) {
                    self.put(offset, value)?;
                }
            }
            self.phase = Phase::Stopping(Box::new(state));
        }
        for at in 0..self.plan.rings.len() {
            let ring = self.plan.rings[at];
            if self.get(ring.control)? & ring.enable != 0 {
                return Ok(false);
            }
        }
        if !matches!(self.phase, Phase::Stopping(_)) {
            return Ok(true);
        }
        let mut heads = Vec::with_capacity(self.plan.rings.len());
        for at in 0..self.plan.rings.len() {
            heads.push(self.get(self.plan.rings[at].head)?);
        }
        let counters = self.counted()?;
        if let Phase::Stopping(mut state) = std::mem::replace(&mut self.phase, Phase::Running) {
            for (ring, head) in state.rings.iter_mut().zip(heads).filter(|(ring, _)| ring.on) {
                ring.head = head;
            }
            state.counters = counters;
            self.phase = Phase::Stopped(state);
        }
        Ok(true)
    }

    /// Whether a ring is yet to end that the guest has told to.
    fn ends(&mut self) -> Result<bool, MovingError> {
        for at in 0..self.plan.rings.len() {
            let ring = self.plan.rings[at];
            self.ending[at] = self.ending[at] && self.get(ring.control)? & ring.enable != 0;
        }
        Ok(self.ending.contains(&true))
    }

    /// Whether every frame that was given to the device has left.
    fn sent(&mut self) -> Result<bool, MovingError> {
        for at in 0..self.plan.rings.len() {
            let ring = self.plan.rings[at];
            let on = !ring.receives() && self.get(ring.control)? & ring.enable != 0;
            if on && self.get(ring.head)? != self.get(ring.tail)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The counters as the guest sees them.
    fn counted(&mut self) -> Result<Vec<u64>, MovingError> {
        (0..self.offsets.len()).map(|at| self.counter(at)).collect()
    }

    /// Everything that is saved, before the queues are switched off; and which of them read as on. One without a length does nothing:
    /// a reset may leave it so.
    fn look(&mut self) -> Result<(DirectStateV2, Vec<bool>), MovingError> {
        let mut registers = Vec::with_capacity(self.plan.saved.len());
        for at in 0..self.plan.saved.len() {
            let register = self.plan.saved[at];
            registers.push(self.get(register.offset)? & register.mask);
        }
        let mut rings = Vec::with_capacity(self.plan.rings.len());
        let mut enabled = Vec::with_capacity(self.plan.rings.len());
        for at in 0..self.plan.rings.len() {
            let ring = self.plan.rings[at];
            enabled.push(self.get(ring.control)? & ring.enable != 0);
            let length = self.plan.saved.iter().position(|register| register.offset == ring.length);
            let on = enabled[at] && length.is_some_and(|at| registers[at] > 0);
            let (head, tail) = if on { (self.get(ring.head)?, self.get(ring.tail)?) } else { (0, 0) };
            rings.push(RingStateV2 { on, head, tail });
        }
        let state = DirectStateV2 {
            model: self.plan.table.model.name.to_owned(),
            registers,
            rings,
            counters: Vec::new(),
            half: self.half,
            mailbox: self.mailbox.clone(),
            kept: self.kept.clone(),
        };
        Ok((state, enabled))
    }

    /// The state of a device that was stopped, at most [`MOST`] bytes.
    pub fn save(&self) -> Result<Vec<u8>, MovingError> {
        match &self.phase {
            Phase::Stopped(state) => Ok(state.encode()?),
            Phase::Running | Phase::Stopping(_) => Err(MovingError::Running),
        }
    }

    /// Takes the state of another function, a stranger's, for a guest with this memory. It is taken whole, or refused and nothing
    /// has changed. The hardware is not touched before [`Movable::replay`].
    pub fn load(&mut self, bytes: &[u8], view: &GuestView) -> Result<(), MovingError> {
        self.phase = Phase::Stopped(Box::new(DirectStateV2::load(&self.plan, view.map(), bytes)?));
        Ok(())
    }
}
