use super::*;

/// KVM's PIT as far as its state goes (linux/arch/x86/kvm/i8254.c): what ports write, and what KVM_SET_PIT2 does.
struct Pit {
    state: kvm_pit_state2,
    now: Duration,
}

impl Pit {
    fn new() -> Self {
        let mut state = kvm_pit_state2::default();
        for channel in &mut state.channels {
            (channel.mode, channel.count) = (0xff, 0x1_0000);
        }
        Self { state, now: Duration::ZERO }
    }

    fn load(&mut self, channel: usize, count: u32) {
        let loaded = &mut self.state.channels[channel];
        loaded.count = if count == 0 { 0x1_0000 } else { count };
        if channel != 0 {
            loaded.count_load_time = i64::try_from(self.now.as_nanos()).unwrap();
        }
    }

    fn control(&mut self, value: u8) {
        let channel = &mut self.state.channels[usize::from(value >> 6)];
        match value >> 4 & 3 {
            0 => {
                channel.latched_count = channel.latched_count.wrapping_add(77);
                channel.count_latched = channel.rw_mode;
            }
            access => {
                (channel.rw_mode, channel.read_state, channel.write_state) = (access, access, access);
                channel.mode = value >> 1 & 7;
                if channel.mode > 5 {
                    channel.mode -= 4;
                }
                channel.bcd = value & 1;
            }
        }
    }

    fn write(&mut self, channel: usize, value: u8) {
        let written = &mut self.state.channels[channel];
        match written.write_state {
            2 => self.load(channel, u32::from(value) << 8),
            3 => (written.write_latch, written.write_state) = (value, 4),
            4 => {
                written.write_state = 3;
                let low = written.write_latch;
                self.load(channel, u32::from(u16::from_le_bytes([low, value])));
            }
            _ => self.load(channel, value.into()),
        }
    }

    /// As Linux programs it.
    fn program(&mut self, control: u8, count: u16) {
        self.control(control);
        let [low, high] = count.to_le_bytes();
        let channel = usize::from(control >> 6);
        self.write(channel, low);
        self.write(channel, high);
    }

    fn set(&mut self, state: &kvm_pit_state2) {
        self.state = *state;
        for channel in 0..3 {
            self.load(channel, state.channels[channel].count);
        }
    }

    /// One look of the clamp, and what it wants done.
    fn look(&mut self, clamp: &mut PitClamp, hz: Option<u32>) -> PitWish {
        let wish = clamp.look(&self.state, hz, self.now);
        if wish != PitWish::Nothing {
            let with = clamp.with(wish, &self.state);
            clamp.done(wish, &self.state);
            self.set(&with);
        }
        wish
    }

    /// Looks until nothing has changed for long enough.
    fn settle(&mut self, clamp: &mut PitClamp, hz: Option<u32>) -> PitWish {
        self.look(clamp, hz);
        self.now += SETTLED;
        self.look(clamp, hz)
    }

    /// What the VMM is told.
    fn shown(&self, clamp: &PitClamp) -> u32 {
        let mut channels = self.state.channels;
        clamp.show(&mut channels);
        channels[0].count
    }
}

fn pit_hz(count: u32) -> f64 {
    f64::from(PIT_HZ) / f64::from(count)
}

/// Rate generator, both bytes, binary.
const PERIODIC: u8 = 0x34;
const HZ_1000: u16 = 1193;
/// The least for 100 Hz is 11,932, 0x2e9c.
const CLAMPED: u32 = 0x2e9c;
const CLAMP: PitWish = PitWish::Clamp(CLAMPED);

fn at_1000() -> (Pit, PitClamp) {
    let mut pit = Pit::new();
    pit.program(PERIODIC, HZ_1000);
    (pit, PitClamp::default())
}

#[test]
fn a_fast_timer_is_clamped_once_it_has_settled_and_the_vmm_sees_the_guests() {
    let (mut pit, mut clamp) = at_1000();
    for _ in 0..99 {
        assert_eq!(pit.look(&mut clamp, Some(100)), PitWish::Nothing);
        assert_eq!(clamp.state(), ClampState::Settling);
        pit.now += SETTLED / 100;
    }
    pit.now += SETTLED / 100;
    assert_eq!(pit.look(&mut clamp, Some(100)), CLAMP);
    assert!(pit_hz(CLAMPED) <= 100.0 && pit_hz(CLAMPED) > 99.9);
    assert_eq!(pit.look(&mut clamp, Some(100)), PitWish::Nothing, "once");
    assert_eq!((clamp.state(), clamp.counts()), (ClampState::Clamped, (1193, CLAMPED)));
    assert_eq!((pit.state.channels[0].count, pit.shown(&clamp)), (CLAMPED, 1193));
    // All else is as it was.
    let (channel, other) = (pit.state.channels[0], at_1000().0.state.channels[0]);
    assert_eq!(kvm_pit_channel_state { count: 1193, ..channel }, other);

    assert_eq!(pit.look(&mut clamp, None), PitWish::Restore(1193), "off");
    assert_eq!((pit.state.channels[0].count, clamp.state()), (1193, ClampState::Off));
    assert_eq!(pit.look(&mut clamp, None), PitWish::Nothing);
}

#[test]
fn what_is_slow_enough_or_not_periodic_is_left_alone() {
    for (control, count) in [(PERIODIC, 0), (PERIODIC, 11_932), (0x30, 1193), (0x38, 1193)] {
        let (mut pit, mut clamp) = (Pit::new(), PitClamp::default());
        pit.program(control, count);
        assert_eq!(pit.settle(&mut clamp, Some(100)), PitWish::Nothing);
        assert_eq!(clamp.state(), ClampState::Nothing, "{control:x} {count}");
    }
    for control in [PERIODIC, 0x36, 0x3c, 0x3e] {
        let (mut pit, mut clamp) = (Pit::new(), PitClamp::default());
        pit.program(control, HZ_1000);
        assert_eq!(pit.settle(&mut clamp, Some(100)), CLAMP, "{control:x}");
    }
}

#[test]
fn another_rate_is_told_from_the_clamps() {
    // 0x2e9c is what the clamp sets for a guest with 1,193; a guest that then sets that itself is not clamped any more.
    for again in [HZ_1000, 0x2e9c, 0x2e9d, 0] {
        let (mut pit, mut clamp) = at_1000();
        assert_eq!(pit.settle(&mut clamp, Some(100)), CLAMP);
        pit.program(PERIODIC, again);
        let count = if again == 0 { 0x1_0000 } else { u32::from(again) };
        assert_eq!(pit.shown(&clamp), count, "before the clamp has looked");
        assert_eq!(pit.look(&mut clamp, Some(100)), PitWish::Nothing);
        assert_eq!((pit.state.channels[0].count, clamp.counts()), (count, (count, count)));
        let wish = if again == HZ_1000 { CLAMP } else { PitWish::Nothing };
        assert_eq!(pit.settle(&mut clamp, Some(100)), wish, "{again}");
        let restored = if again == HZ_1000 { PitWish::Restore(1193) } else { PitWish::Nothing };
        assert_eq!(pit.look(&mut clamp, None), restored);
        assert_eq!(pit.state.channels[0].count, count);
    }
    // A guest whose count has the low byte of the least count gets another.
    let (mut pit, mut clamp) = (Pit::new(), PitClamp::default());
    pit.program(PERIODIC, 0x049c);
    assert_eq!(pit.settle(&mut clamp, Some(100)), PitWish::Clamp(0x2e9d));
    // 1193182 / 194.2 is 0x1800, whose low byte is that of a count of which only the high byte is written.
    assert_eq!(marked_count(0x1800, 0xa9), 0x1801);
    assert_eq!(marked_count(0x18ff, 0xff), 0x1901);
}

#[test]
fn high_bytes_alone() {
    let (mut pit, mut clamp) = (Pit::new(), PitClamp::default());
    pit.control(0x24);
    pit.write(0, 4);
    assert_eq!(pit.settle(&mut clamp, Some(100)), CLAMP);
    pit.write(0, 0x2e);
    assert_eq!(pit.shown(&clamp), 0x2e00);
    assert_eq!(pit.look(&mut clamp, Some(100)), PitWish::Nothing);
    assert_eq!(clamp.counts(), (0x2e00, 0x2e00));
}

#[test]
fn a_guest_that_is_writing_is_not_disturbed() {
    let (mut pit, mut clamp) = at_1000();
    assert_eq!(pit.settle(&mut clamp, Some(100)), CLAMP);
    pit.write(0, 0x55);
    for hz in [Some(100), Some(50), None] {
        assert_eq!(pit.look(&mut clamp, hz), PitWish::Nothing, "{hz:?}: one byte of two is written");
        assert_eq!(pit.shown(&clamp), 1193, "until the second one comes");
        assert_ne!(clamp.state(), ClampState::Off, "it is not as the guest has set it");
    }
    pit.write(0, 0x05);
    assert_eq!(pit.look(&mut clamp, None), PitWish::Nothing);
    assert_eq!(pit.state.channels[0].count, 0x555);
    // A control word that makes it no periodic timer: its count comes next.
    let (mut pit, mut clamp) = at_1000();
    assert_eq!(pit.settle(&mut clamp, Some(100)), CLAMP);
    pit.control(0x30);
    for hz in [Some(100), None] {
        assert_eq!(pit.look(&mut clamp, hz), PitWish::Nothing, "{hz:?}");
    }
    pit.write(0, 0);
    pit.write(0, 0);
    assert_eq!(pit.look(&mut clamp, None), PitWish::Nothing);
    assert_eq!(pit.state.channels[0].count, 0x1_0000);
}

#[test]
fn a_counter_that_is_read_is_a_clock() {
    let (mut pit, mut clamp) = at_1000();
    pit.look(&mut clamp, Some(100));
    pit.control(0);
    assert_eq!(pit.settle(&mut clamp, Some(100)), PitWish::Nothing);
    assert_eq!(clamp.state(), ClampState::ReadsCounter);
    // While it is clamped: undone at once.
    let (mut pit, mut clamp) = at_1000();
    assert_eq!(pit.settle(&mut clamp, Some(100)), CLAMP);
    pit.control(0);
    assert_eq!(pit.look(&mut clamp, Some(100)), PitWish::Restore(1193));
    assert_eq!(
        (pit.settle(&mut clamp, Some(100)), clamp.state()),
        (PitWish::Nothing, ClampState::ReadsCounter)
    );
    // Until it is programmed anew, or the clamp is switched.
    pit.program(PERIODIC, 1194);
    assert_eq!(pit.settle(&mut clamp, Some(100)), CLAMP);
    pit.control(0);
    assert_eq!(pit.look(&mut clamp, Some(100)), PitWish::Restore(1194));
    pit.look(&mut clamp, None);
    assert_eq!(pit.settle(&mut clamp, Some(100)), CLAMP);
    // What is latched of another channel is no clock of ticks.
    pit.control(0x80);
    assert_eq!((pit.look(&mut clamp, Some(100)), clamp.state()), (PitWish::Nothing, ClampState::Clamped));
}

#[test]
fn what_is_refused() {
    type Change = fn(&mut Pit);
    let cases: [(Change, ClampState); 3] = [
        (|pit| pit.state.flags |= KVM_PIT_FLAGS_HPET_LEGACY, ClampState::Hpet),
        (|pit| pit.program(0x35, HZ_1000), ClampState::Decimal),
        (
            |pit| {
                pit.program(0xb6, 1193);
                pit.state.channels[2].gate = 1;
            },
            ClampState::Speaker,
        ),
    ];
    for (change, state) in cases {
        let (mut pit, mut clamp) = at_1000();
        change(&mut pit);
        assert_eq!(pit.settle(&mut clamp, Some(100)), PitWish::Nothing);
        assert_eq!(clamp.state(), state);
    }
    // The gate of channel 2 stays open after Linux has measured its clock with a single run, which was over long ago.
    let (mut pit, mut clamp) = at_1000();
    pit.program(0xb0, 0xffff);
    pit.state.channels[2].gate = 1;
    assert_eq!(pit.settle(&mut clamp, Some(100)), CLAMP);
    assert_eq!(clamp.state(), ClampState::Clamped);
}

#[test]
fn a_measurement_with_channel_2_is_waited_for() {
    let (mut pit, mut clamp) = at_1000();
    for _ in 0..5 {
        pit.now += SETTLED / 2;
        pit.program(0xb0, 0xffff);
        assert_eq!(
            (pit.look(&mut clamp, Some(100)), clamp.state()),
            (PitWish::Nothing, ClampState::Settling)
        );
    }
    pit.now += SETTLED;
    assert_eq!(pit.look(&mut clamp, Some(100)), CLAMP);
    // What the clamp itself has loaded again is no measurement.
    assert_eq!((pit.look(&mut clamp, Some(100)), clamp.state()), (PitWish::Nothing, ClampState::Clamped));
}

#[test]
fn real_mode_is_refused_until_the_timer_is_programmed_anew() {
    let (mut pit, mut clamp) = at_1000();
    pit.look(&mut clamp, Some(100));
    pit.now += SETTLED;
    assert_eq!(clamp.look(&pit.state, Some(100), pit.now), CLAMP);
    clamp.failed(ClampState::RealMode);
    assert_eq!((pit.settle(&mut clamp, Some(100)), clamp.state()), (PitWish::Nothing, ClampState::RealMode));
    pit.program(PERIODIC, 1194);
    assert_eq!(pit.settle(&mut clamp, Some(100)), CLAMP);
}

#[test]
fn the_rate_changes_while_it_is_clamped() {
    let (mut pit, mut clamp) = at_1000();
    assert_eq!(pit.settle(&mut clamp, Some(100)), CLAMP);
    let PitWish::Clamp(slower) = pit.look(&mut clamp, Some(50)) else { panic!("{:?}", clamp.state()) };
    assert!(pit_hz(slower) <= 50.0 && pit_hz(slower) > 49.9);
    assert_eq!((pit.shown(&clamp), pit.look(&mut clamp, Some(50))), (1193, PitWish::Nothing));
    // 1193 is 1000.15 Hz: more than 1000.
    assert!(matches!(pit.look(&mut clamp, Some(1000)), PitWish::Clamp(1194..=1196)));
    assert_eq!(pit.look(&mut clamp, None), PitWish::Restore(1193));
}

#[test]
fn what_the_vmm_sets_begins_anew() {
    let (mut pit, mut clamp) = at_1000();
    assert_eq!(pit.settle(&mut clamp, Some(100)), CLAMP);
    // As after a migration: the other side's.
    let mut other = pit.state;
    clamp.show(&mut other.channels);
    clamp = PitClamp::default();
    pit.set(&other);
    assert_eq!((pit.look(&mut clamp, Some(100)), clamp.state()), (PitWish::Nothing, ClampState::Settling));
    assert_eq!(pit.settle(&mut clamp, Some(100)), CLAMP);
}

mod random {
    use proptest::prelude::*;

    use super::*;
    use crate::kvm::{HIGHEST_HZ, LOWEST_HZ};

    #[derive(Clone, Debug)]
    enum Step {
        Control(u8),
        Write(usize, u8),
        Gate(bool),
        Time(u64),
        Look(Option<u32>),
        /// The guest programs its timer, and the clamp has time to set it.
        Clamped(u16, u32),
        Vmm,
    }

    fn step() -> impl Strategy<Value = Step> {
        let few = prop_oneof![Just(0_u8), Just(4), Just(0xa9), Just(0x9c), Just(0x2e), any::<u8>()];
        prop_oneof![
            // No BCD and no read-back, which have tests of their own.
            prop_oneof![
                Just(0x34_u8),
                Just(0x36),
                Just(0x24),
                Just(0x14),
                Just(0x30),
                Just(0xb0),
                Just(0xb6)
            ]
            .prop_map(Step::Control),
            (0_usize..3, few).prop_map(|(channel, value)| Step::Write(channel, value)),
            any::<bool>().prop_map(Step::Gate),
            (0_u64..12_000).prop_map(Step::Time),
            prop_oneof![Just(None), (LOWEST_HZ..=HIGHEST_HZ).prop_map(Some)].prop_map(Step::Look),
            (prop_oneof![Just(1193_u16), 1_u16..2000], LOWEST_HZ..=HIGHEST_HZ)
                .prop_map(|(count, hz)| Step::Clamped(count, hz)),
            Just(Step::Vmm),
        ]
    }

    proptest! {
        /// Two PITs get the same from a guest, and the clamp has one of them: what it shows is the other, and off is off.
        #[test]
        fn the_vmm_always_sees_what_the_guest_has_set(steps in prop::collection::vec(step(), 1..200)) {
            let (mut clamped, mut plain, mut clamp) = (Pit::new(), Pit::new(), PitClamp::default());
            // A control word between the two bytes of a count leaves a low byte that belongs to none; a count comes next.
            let mut torn = false;
            for step in steps {
                let writing = plain.state.channels[0].write_state == SECOND_BYTE;
                match step {
                    Step::Control(value) if value >> 6 == 0 => torn |= writing,
                    Step::Clamped(..) => torn = false,
                    Step::Write(0, _) => torn &= !writing && plain.state.channels[0].write_state == 3,
                    _ => {}
                }
                for pit in [&mut clamped, &mut plain] {
                    match step {
                        Step::Control(value) => pit.control(value),
                        Step::Write(channel, value) => pit.write(channel, value),
                        Step::Gate(gate) => pit.state.channels[2].gate = gate.into(),
                        Step::Clamped(count, _) => {
                            pit.program(PERIODIC, count);
                            pit.now += SETTLED;
                        }
                        Step::Time(milliseconds) => pit.now += Duration::from_millis(milliseconds),
                        Step::Look(_) | Step::Vmm => {}
                    }
                }
                match step {
                    Step::Look(hz) => {
                        clamped.look(&mut clamp, hz);
                    }
                    Step::Clamped(_, hz) => {
                        clamped.settle(&mut clamp, Some(hz));
                    }
                    Step::Vmm => {
                        let mut state = clamped.state;
                        clamp.show(&mut state.channels);
                        clamp = PitClamp::default();
                        clamped.set(&state);
                    }
                    _ => {}
                }
                let mut shown = clamped.state.channels;
                clamp.show(&mut shown);
                if !torn {
                    prop_assert_eq!(shown[0], plain.state.channels[0]);
                }
            }
            // Whatever it was in the midst of, the guest programs its timer and the clamp is taken off.
            for pit in [&mut clamped, &mut plain] {
                pit.program(PERIODIC, HZ_1000);
            }
            clamped.settle(&mut clamp, Some(100));
            clamped.look(&mut clamp, None);
            prop_assert_eq!(clamped.state.channels[0], plain.state.channels[0]);
        }
    }
}
