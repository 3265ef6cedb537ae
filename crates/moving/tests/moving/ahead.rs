//! What the driver has said is said ahead on the function that its guest is to have: the stop says the difference, or all of it.

use ioplane_moving::{MOST, MovingError, Unsent, check_said, seal_said};
use ioplane_nic::silicon::{Chip, PfState, spec};

use crate::card::{Card, Igbvf, Ixgbevf, for_each_card};
use crate::driver::Driver;
use crate::hardware::{Around, Host, frame};
use crate::once::{busy, other, vf};
use crate::world::{Ahead, Plan};
use crate::{points, run};

for_each_card!(
    moved_before_each_step_of_its_work_with_what_was_said_ahead,
    moved_again_and_again_with_what_was_said_ahead,
    nothing_of_the_guests_is_taken_before_the_stop,
    what_does_not_hold_any_more_is_said_again,
    what_comes_besides_is_all_that_the_stop_says,
    a_physical_function_that_begins_anew_is_noticed,
    what_is_refused_ahead_is_no_obstacle,
    broken_off_it_leaves_the_guests_groups,
    broken_off_while_it_speaks_it_is_reset,
    an_address_that_was_set_since_is_not_said,
    whatever_a_stranger_has_said_the_guest_goes_on_as_it_was,
);

/// What the physical function keeps for the guest.
fn kept(pf: &PfState) -> impl PartialEq + std::fmt::Debug {
    let PfState { mac, multicast, vlans, more, longest, promiscuous, api, delivers, clear_to_send, .. } =
        pf.clone();
    (mac, multicast, vlans, more, longest, promiscuous, api, delivers, clear_to_send)
}

fn said<C: Card>(driver: &Driver<C>) -> Vec<u8> {
    driver.world.host.movable.said().expect("it runs")
}

/// Where the guest is to go to, and what was said there ahead.
fn ahead<C: Card>(driver: &Driver<C>) -> Host<C> {
    let mut there = other(driver, vf());
    let messages = there.go_ahead(&said(driver)).expect("a host like this one");
    assert!(messages > 3 && messages == there.movable.ahead(), "{messages}");
    there
}

/// The guest goes on there; as it was. How many messages the stop has said, and how many it built upon.
fn moves<C: Card>(driver: &mut Driver<C>, mut there: Host<C>) -> (u64, u64) {
    assert!(driver.world.host.stop(Unsent::Wait));
    let pf = driver.world.host.silicon.vf().pf().clone();
    let state = driver.world.host.movable.save().expect("it stands still");
    there.view.write(0, &driver.world.host.memory()).expect("memory");
    there.movable.load(&state, &there.view).expect("a state");
    there.replay().expect("a host");
    assert_eq!(kept(there.silicon.vf().pf()), kept(&pf));
    let said = (there.movable.messages(), there.movable.built_upon());
    driver.world.go_on(there);
    said
}

/// All messages of a guest that has nothing said ahead.
fn all<C: Card>() -> u64 {
    let mut driver = busy::<C>();
    let there = other(&driver, vf());
    let (messages, built) = moves(&mut driver, there);
    assert_eq!(built, 0);
    driver.finish();
    messages
}

fn moved_before_each_step_of_its_work_with_what_was_said_ahead<C: Card>() {
    let last = points::<C>();
    let mut figures = [(0, 0, 0, 0, 0); 3];
    for point in 1..=last {
        for (at, ahead) in [Ahead::Never, Ahead::Passes, Ahead::Once].into_iter().enumerate() {
            if ahead == Ahead::Once && !point.is_multiple_of(3) {
                continue;
            }
            let world = run::<C>(Plan { ahead, ..Plan::at([point]) });
            assert_eq!((world.missed, world.moves), (0, 1), "moved before point {point}, {ahead:?}");
            let (said, built, accesses) = world.stops;
            let (runs, messages, stood, replaying, most) = figures[at];
            figures[at] = (
                runs + u64::from(built > 0),
                messages + said,
                stood + built,
                replaying + accesses,
                most.max(said),
            );
        }
    }
    let name = C::DIRECT.model.name;
    for (ahead, (runs, messages, stood, accesses, most)) in ["never", "at each pass"].iter().zip(figures) {
        println!(
            "{name}, said ahead {ahead}: {last} moves, {runs} of them upon it; {messages} messages in stops (at most {most}), \
             {stood} ahead of them, {accesses} accesses to replay"
        );
    }
    let [never, passes, once] = figures;
    assert!(never.0 == 0 && once.0 > last / 7 && passes.0 > last * 3 / 4, "{figures:?}");
    assert!(passes.1 < never.1 / 2 && passes.3 < never.3, "{figures:?}");
}

fn moved_again_and_again_with_what_was_said_ahead<C: Card>() {
    let last = points::<C>();
    for every in [2, 7, 31] {
        let at = (1..last).filter(|point| point.is_multiple_of(every));
        let world = run::<C>(Plan { ahead: Ahead::Passes, ..Plan::at(at) });
        assert_eq!(world.missed, 0, "moved before every {every}th point");
        assert!(world.stops.1 > 0);
    }
}

/// Both functions are of one card, whose switch gives a frame with an address to the one whose filter has it: in doubt to the one that the guest is to
/// have.
fn nothing_of_the_guests_is_taken_before_the_stop<C: Card>() {
    let mut driver = busy::<C>();
    driver.drain();
    let there = ahead(&driver);
    assert!(!there.silicon.vf().is_master());
    let mac = driver.world.mac;
    let source = driver.world.host.silicon.vf().pf().clone();
    let now = there.silicon.vf().pf().clone();
    assert!(!source.more.is_empty() && !source.multicast.is_empty() && source.vlans.len() > 1, "{source:?}");
    assert_eq!((&now.multicast, &now.vlans, now.longest), (&source.multicast, &source.vlans, source.longest));
    assert!(now.mac != source.mac && now.more.is_empty(), "it has none of the guest's addresses: {now:?}");
    let mut tagged = frame(mac, 901, 80);
    let vlan = *source.vlans.last().expect("a VLAN");
    tagged.splice(12..12, [0x81, 0, (vlan >> 8) as u8, vlan as u8]);
    let group = frame([1, 0, 0x5e, 0, 0, 1], 902, 80);
    let mut came = 0;
    for frame in
        [frame(mac, 900, 80), frame(source.more[0], 903, 80), tagged, group, frame([0xff; 6], 904, 80)]
    {
        let exact = frame[0] & 1 == 0 && [now.mac].iter().chain(&now.more).any(|own| frame[..6] == *own);
        assert!(!exact, "the switch would not give it to the source");
        assert!(!there.silicon.vf().receive(&frame), "nobody drives it");
        came += u32::from(driver.world.host.silicon.vf().receive(&frame));
    }
    assert_eq!(came, 5, "the source gets all of them");
    for _ in 0..20 {
        there.silicon.vf().step();
    }
    assert!(there.silicon.vf().take_written().is_empty() && there.silicon.vf().take_sent().is_empty());
    assert_eq!(there.silicon.vf().violations(), []);
}

fn what_does_not_hold_any_more_is_said_again<C: Card>() {
    let all = all::<C>();
    // The same list of groups with another one, a VLAN taken away, the driver began anew.
    let changes: [fn(&mut Driver<C>); 4] = [
        |driver| {
            let mut groups = [0; 16];
            (groups[0], groups[1]) = (spec::MESSAGE_MULTICAST | 1 << 16, 0x123);
            driver.say(&groups);
        },
        |driver| {
            let vlan = *driver.world.host.silicon.vf().pf().vlans.last().expect("a VLAN");
            driver.say(&[spec::MESSAGE_VLAN, vlan.into()]);
        },
        |driver| driver.change_mtu(2500),
        |driver| {
            driver.say(&C::PROMISCUOUS);
        },
    ];
    for change in changes {
        let mut driver = busy::<C>();
        let there = ahead(&driver);
        change(&mut driver);
        let (messages, built) = moves(&mut driver, there);
        assert_eq!(built, 0);
        assert!(messages.abs_diff(all) <= 1, "{messages}, all are {all}");
        driver.traffic(3);
        driver.finish();
        // It goes ahead again, and holds.
        let mut driver = busy::<C>();
        let mut there = ahead(&driver);
        change(&mut driver);
        let before = there.silicon.vf().pf().taken;
        let again = said(&driver);
        there.go_ahead(&again).expect("a host like this one");
        let once = there.silicon.vf().pf().taken;
        assert!(once > before);
        there.go_ahead(&again).expect("a host like this one");
        assert_eq!(there.silicon.vf().pf().taken, once, "nothing is said twice");
        let (messages, built) = moves(&mut driver, there);
        assert!(built > 3 && messages <= 3, "{messages} upon {built}");
        driver.traffic(3);
        driver.finish();
    }
    // The driver has begun anew and said the same again.
    let mut driver = busy::<C>();
    let there = ahead(&driver);
    driver.reset_task();
    let (messages, built) = moves(&mut driver, there);
    assert!(built > 3 && messages <= 3, "{messages} upon {built}");
    driver.finish();
}

/// The address, two further ones, and a VLAN that is new.
fn what_comes_besides_is_all_that_the_stop_says<C: Card>() {
    let mut driver = busy::<C>();
    let there = ahead(&driver);
    driver.say(&[spec::MESSAGE_VLAN | 1 << 16, 77]);
    let (messages, built) = moves(&mut driver, there);
    assert_eq!((messages, built), (4, all::<C>() - 3));
    assert!(driver.world.host.silicon.vf().pf().vlans.contains(&77));
    driver.work();
    driver.finish();
}

fn a_physical_function_that_begins_anew_is_noticed<C: Card>() {
    let changes: [fn(&mut Host<C>); 3] = [
        |there| there.silicon.vf().pf_forgets(),
        |there| there.silicon.vf().pf_says(0x100 | spec::MESSAGE_CTS),
        |there| there.silicon.vf().reset(),
    ];
    for change in changes {
        let mut driver = busy::<C>();
        let mut there = ahead(&driver);
        change(&mut there);
        for _ in 0..8 {
            there.silicon.vf().step();
        }
        let (_, built) = moves(&mut driver, there);
        assert_eq!(built, 0);
        driver.work();
        driver.finish();
    }
    // Also where all was said ahead, and nothing is missing: the administrator has set the guest's address.
    let mut driver = busy::<C>();
    C::one_address(&mut driver);
    let mut there = other(&driver, vf());
    there.silicon.vf().set_mac(driver.world.mac);
    there.go_ahead(&said(&driver)).expect("a host");
    there.silicon.vf().pf_forgets();
    let (_, built) = moves(&mut driver, there);
    assert_eq!(built, 0);
    driver.finish();
}

/// An older driver of the physical function, or an administrator's limit.
fn what_is_refused_ahead_is_no_obstacle<C: Card>() {
    let mut driver = busy::<C>();
    let mut there = other(&driver, vf());
    // More VLANs than there is room for, with what it has already.
    let lying = stranger::<C>(&driver, |kept| {
        let vlan =
            C::DIRECT.mailbox.messages.iter().position(|message| message.name == "SET_LPE").expect("a kind");
        kept.2.retain(|(place, _)| usize::from(*place) != vlan);
        kept.2.push((vlan as u8, vec![spec::MESSAGE_LPE, 60_000]));
    });
    let refused = there.go_ahead(&lying).expect_err("no frame is so long");
    assert!(matches!(refused, MovingError::Refused { message: "SET_LPE" }), "{refused}");
    assert_eq!(there.movable.ahead(), 0);
    for _ in 0..8 {
        there.silicon.vf().step();
    }
    let now = there.silicon.vf().pf().clone();
    assert!(now.multicast.is_empty() && now.vlans.is_empty() && !now.clear_to_send, "it was reset");
    let (messages, built) = moves(&mut driver, there);
    assert_eq!((messages, built), (all::<C>(), 0));
    driver.work();
    driver.finish();
}

fn broken_off_it_leaves_the_guests_groups<C: Card>() {
    let driver = busy::<C>();
    let ways: [fn(&mut Host<C>); 4] = [
        |there| assert!(there.movable.forget_ahead().expect("hardware that works")),
        // Somebody uses it.
        |there| assert!(there.movable.read(C::Chip::LAYOUT.link.0).is_ok()),
        |there| there.movable.write(C::Chip::LAYOUT.memory, 7).expect("hardware that works"),
        // A guest whose driver has said nothing yet is to come.
        |there| {
            let nothing = Host::<C>::new(vf()).movable.said().expect("it runs");
            assert_eq!(there.go_ahead(&nothing).expect("a host"), 0);
        },
    ];
    for way in ways {
        let mut there = ahead(&driver);
        way(&mut there);
        let now = there.silicon.vf().pf().clone();
        assert!(now.multicast.is_empty() && now.vlans.is_empty() && !now.clear_to_send, "{now:?}");
        assert_eq!(there.movable.ahead(), 0);
        assert!(!there.movable.forget_ahead().expect("hardware that works"), "once");
    }
    // Also with the guest's state, which is not lost by it.
    let mut driver = driver;
    let mut there = ahead(&driver);
    assert!(driver.world.host.stop(Unsent::Wait));
    let state = driver.world.host.movable.save().expect("it stands still");
    there.view.write(0, &driver.world.host.memory()).expect("memory");
    assert!(matches!(driver.world.host.movable.said(), Err(MovingError::Stopped)));
    there.movable.load(&state, &there.view).expect("a state");
    assert!(matches!(there.go_ahead(&[]), Err(MovingError::Stopped)));
    assert!(there.movable.forget_ahead().expect("hardware that works") && there.movable.is_stopped());
    there.replay().expect("a host");
    assert_eq!(there.movable.built_upon(), 0);
    driver.world.go_on(there);
    driver.work();
    driver.finish();
}

fn broken_off_while_it_speaks_it_is_reset<C: Card>() {
    let mut driver = busy::<C>();
    let words = said(&driver);
    let mut there = other(&driver, vf());
    let mut broken = 0;
    for left in 1..4000 {
        let mut around = Around { silicon: there.silicon.clone(), left, sends: false, waits: 0, filled: 0 };
        match there.movable.go_ahead(&words, &mut around) {
            Ok(_) => break,
            Err(MovingError::Deadline { .. }) => broken += 1,
            Err(other) => panic!("{other}"),
        }
        assert_eq!(there.movable.ahead(), 0);
        let now = there.silicon.vf().pf().clone();
        assert!(now.multicast.is_empty() && now.vlans.is_empty() && !now.clear_to_send, "{now:?}");
    }
    assert!(broken > 10, "{broken}");
    let (_, built) = moves(&mut driver, there);
    assert!(built > 3);
    driver.work();
    driver.finish();
}

/// With the function's settings, at the stop.
fn an_address_that_was_set_since_is_not_said<C: Card>() {
    let mut driver = busy::<C>();
    C::one_address(&mut driver);
    if C::DIRECT.model.name != Igbvf::DIRECT.model.name {
        // Its list is not empty: that is said.
        driver.say(&[ioplane_nic::vf82599::spec::MESSAGE_MACVLAN, 0, 0]);
    }
    let mut there = ahead(&driver);
    let mac = driver.world.mac;
    there.silicon.vf().set_mac(mac);
    there.movable.has_address(mac);
    // One is said nevertheless, to know that the physical function listens.
    let (messages, built) = moves(&mut driver, there);
    assert!(messages == 1 && built > 3, "{messages} upon {built}");
    driver.traffic(3);
    driver.finish();
    // What it is under is another: all is said again.
    let mut driver = busy::<C>();
    let mut there = ahead(&driver);
    there.movable.doubt_ahead();
    assert_eq!((there.movable.ahead(), moves(&mut driver, there)), (0, (all::<C>(), 0)));
}

/// The encoding of kept messages.
type Kept = (bool, [u32; 2], Vec<(u8, Vec<u32>)>, Vec<(u8, u32, Vec<u32>)>, Vec<(u8, Vec<Vec<u32>>)>);

/// What a driver has said, changed by somebody.
fn stranger<C: Card>(driver: &Driver<C>, change: impl FnOnce(&mut Kept)) -> Vec<u8> {
    let (model, mut kept): (String, Kept) =
        postcard::from_bytes(&said(driver)[HEADER..]).expect("as it is encoded");
    change(&mut kept);
    seal_said(&postcard::to_stdvec(&(model, kept)).expect("it can be encoded"))
}

const HEADER: usize = 12;

/// What passes may be said, or is refused; whatever it is, it is no rule of the silicon, and the guest has what it had.
fn whatever_a_stranger_has_said_the_guest_goes_on_as_it_was<C: Card>() {
    let mut driver = busy::<C>();
    let words = said(&driver);
    check_said(C::DIRECT, &words).expect("as it was said");
    assert_eq!(seal_said(&words[HEADER..]), words, "the test seals as the code does");
    for at in 0..words.len() {
        let mut flipped = words.clone();
        flipped[at] ^= 0x10;
        check_said(C::DIRECT, &flipped).expect_err("it was damaged");
    }
    check_said(C::DIRECT, &vec![0; MOST + 1]).expect_err("too long");
    assert!(driver.world.host.stop(Unsent::Wait));
    let pf = driver.world.host.silicon.vf().pf().clone();
    let state = driver.world.host.movable.save().expect("it stands still");
    check_said(C::DIRECT, &state).expect_err("a state is something else");
    let memory = driver.world.host.memory();
    let (mut spoken, mut upon, mut refusals) = (0, 0, 0);
    let body = &words[HEADER..];
    for at in 0..body.len() {
        for value in [0, 1, 2, 7, 15, 0x7f, 0x80, 0xff, body[at] ^ 1, body[at] ^ 0x10] {
            let mut other = body.to_vec();
            other[at] = value;
            let other = seal_said(&other);
            let mut there = Host::<C>::new(vf());
            let outcome = there.go_ahead(&other);
            assert_eq!(check_said(C::DIRECT, &other).is_err(), matches!(outcome, Err(MovingError::State(_))));
            match outcome {
                Ok(_) => spoken += 1,
                Err(MovingError::State(_) | MovingError::Refused { .. }) => refusals += 1,
                Err(other) => panic!("byte {at} as {value:#x}: {other}"),
            }
            there.view.write(0, &memory).expect("memory");
            there.movable.load(&state, &there.view).expect("a state");
            there.replay().expect("a host");
            upon += u32::from(there.movable.built_upon() > 0);
            assert_eq!(kept(there.silicon.vf().pf()), kept(&pf), "byte {at} as {value:#x}");
            assert_eq!(there.silicon.vf().violations(), [], "byte {at} as {value:#x}");
        }
    }
    assert!(
        spoken > 100 && refusals > 100 && upon > 20,
        "{spoken} spoken, {upon} held, {refusals} were refused"
    );
}

/// A version that was agreed upon later than what was said ahead is said with all the rest.
#[test]
fn another_version_of_messages_is_agreed_upon_anew() {
    let mut driver = busy::<Ixgbevf>();
    let older =
        stranger::<Ixgbevf>(&driver, |kept| kept.2.retain(|(_, words)| words[0] != 8 && words[0] != 0xc));
    let mut there = other(&driver, vf());
    // In version 1.0 it may not say how long its frames are, on a port for long ones.
    assert!(there.go_ahead(&older).is_err());
    let (messages, built) = moves(&mut driver, there);
    assert_eq!((messages, built), (all::<Ixgbevf>(), 0));
    driver.finish();
}
