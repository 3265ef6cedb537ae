//! A card whose driver is as Linux's igb: no rate above the link's, no minimum, no state of the link, nothing said of RSS.

use std::cell::RefCell;

use ioplane_api::spec::{TagWord, VfVlan};

use super::*;

const A: MacAddress = MacAddress([2, 0, 0, 0, 0, 0xa]);
const B: MacAddress = MacAddress([2, 0, 0, 0, 0, 0xb]);

struct Card {
    now: RefCell<Said>,
    /// What was set, as it was typed.
    set: RefCell<Vec<String>>,
}

impl Card {
    fn new(address: Option<MacAddress>, settings: VfSettings) -> Card {
        Card { now: RefCell::new(Said { address, settings }), set: RefCell::default() }
    }

    /// By somebody else.
    fn change(&self, setting: VfSetting) {
        let mut now = self.now.borrow_mut();
        match setting {
            VfSetting::Mac(mac) => now.address = mac,
            other => now.settings = with(&now.settings, &[other]),
        }
    }

    fn took(&self) -> Vec<String> {
        self.set.take()
    }
}

impl Place for Card {
    fn said(&self) -> io::Result<Said> {
        Ok(*self.now.borrow())
    }

    fn set(&self, setting: VfSetting) -> io::Result<()> {
        match setting {
            VfSetting::Rate { min, max } if min > 0 || max > 1000 => {
                Err(io::Error::from_raw_os_error(libc::EINVAL))
            }
            VfSetting::State(_) | VfSetting::QueryRss(_) => {
                Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
            }
            other => {
                self.change(other);
                self.set.borrow_mut().push(other.to_string());
                Ok(())
            }
        }
    }

    fn named(&self) -> Named {
        Named { interface: "pf0".into(), number: 1, speed: Some(1000) }
    }
}

fn usual() -> VfSettings {
    VfSettings { spoofchk: Some(true), trust: Some(false), ..VfSettings::default() }
}

fn vlan(id: u16) -> Option<VfVlan> {
    Some(VfVlan { id, qos: 0, proto: TagWord::Dot1q })
}

fn adopt(words: &str) -> AdoptSpec {
    words.parse().expect("settings")
}

fn form(settings: VfSettings) -> PhysicalForm {
    PhysicalForm { address: settings.mac.or(Some(A)), settings }
}

/// As [`Keeper::adopt`], of such a card.
fn take(
    inner: &mut Inner,
    card: &Card,
    folder: &Path,
    form: &PhysicalForm,
    words: &AdoptSpec,
) -> Result<(), VfError> {
    let (own, changes) = inner.plan(card, form, words)?;
    inner.change(card, folder, own, &changes)
}

fn new() -> (tempfile::TempDir, Inner) {
    (tempfile::tempdir().expect("a folder"), Inner::default())
}

#[test]
fn what_narrows_is_taken_over_and_put_back() {
    let (folder, mut inner) = new();
    let card = Card::new(None, usual());
    let there = VfSettings { mac: Some(A), vlan: vlan(5), max_tx_rate: 100, ..usual() };
    take(&mut inner, &card, folder.path(), &form(there), &AdoptSpec::default()).expect("nothing is wider");
    assert_eq!(card.took(), ["mac 02:00:00:00:00:0a", "vlan 5", "max_tx_rate 100"]);
    assert_eq!(administered(&card.said().unwrap(), inner.fixed), there);
    let file = inner.path(folder.path());
    assert!(file.exists(), "it is written down");
    // A daemon that died: another one reads what it was.
    let kept: Kept = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(Some(kept), inner.kept);
    inner.put_back(&card, folder.path()).unwrap();
    assert_eq!(card.took(), ["max_tx_rate 0", "vlan 0", "mac 00:00:00:00:00:00"]);
    assert_eq!(*card.now.borrow(), Said { address: None, settings: usual() });
    assert!(!file.exists() && inner.kept.is_none());
}

#[test]
fn what_allows_more_needs_the_administrator() {
    let card = Card::new(Some(B), VfSettings { vlan: vlan(5), max_tx_rate: 50, ..usual() });
    for (settings, word, command) in [
        (VfSettings { mac: Some(A), ..usual() }, "mac", "mac 02:00:00:00:00:0a"),
        (VfSettings { mac: None, ..usual() }, "mac", "mac 00:00:00:00:00:00"),
        (VfSettings { vlan: vlan(6), ..usual() }, "vlan", "vlan 6"),
        (VfSettings { vlan: None, ..usual() }, "vlan", "vlan 0"),
        (VfSettings { spoofchk: Some(false), ..usual() }, "spoofchk", "spoofchk off"),
        (VfSettings { trust: Some(true), ..usual() }, "trust", "trust on"),
        (VfSettings { max_tx_rate: 51, ..usual() }, "rate", "max_tx_rate 51"),
        (VfSettings { max_tx_rate: 0, ..usual() }, "rate", "max_tx_rate 0"),
    ] {
        let (folder, mut inner) = new();
        // All but the one that is looked at is as it is here.
        let own = VfSettings { mac: Some(B), ..card.said().unwrap().settings };
        let one = settings.get(SettingWord::of(word).unwrap()).unwrap();
        let form = form(with(&own, &[one]));
        let error = take(&mut inner, &card, folder.path(), &form, &AdoptSpec::default()).unwrap_err();
        let VfError::Wider { word: said, command: typed, .. } = &error else { panic!("{error}") };
        assert_eq!((*said, typed.as_str()), (word, format!("ip link set pf0 vf 1 {command}").as_str()));
        assert_eq!(card.took(), [""; 0], "nothing was touched");
        let others =
            adopt("all").to_string().replace("all", "mac,vlan,spoofchk,trust,rate").replace(word, "state");
        take(&mut inner, &card, folder.path(), &form, &adopt(&others)).unwrap_err();
        take(&mut inner, &card, folder.path(), &form, &adopt(word)).expect("it is allowed");
        assert_eq!(card.took(), [command]);
        inner.put_back(&card, folder.path()).unwrap();
        assert_eq!(card.took().len(), 1);
    }
}

#[test]
fn a_guest_that_chose_the_address_that_is_fixed_here_keeps_it() {
    let (folder, mut inner) = new();
    let card = Card::new(Some(A), usual());
    let free = PhysicalForm { address: Some(A), settings: usual() };
    take(&mut inner, &card, folder.path(), &free, &AdoptSpec::default()).expect("it has that address");
    assert_eq!(card.took(), [""; 0]);
    let other = PhysicalForm { address: Some(B), settings: usual() };
    let error =
        take(&mut inner, &card, folder.path(), &other, &AdoptSpec::default()).unwrap_err().to_string();
    assert_eq!(
        error,
        "its guest has `mac 00:00:00:00:00:00` at the physical function of its host, and `mac 02:00:00:00:00:0a` where it is to go allows less"
    );
}

#[test]
fn what_cannot_be_set_changes_nothing() {
    let (folder, mut inner) = new();
    let card = Card::new(None, usual());
    let fast = VfSettings { mac: Some(A), vlan: vlan(5), max_tx_rate: 2000, ..usual() };
    let error = take(&mut inner, &card, folder.path(), &form(fast), &AdoptSpec::default()).unwrap_err();
    assert!(
        error.to_string().starts_with("`ip link set pf0 vf 1 max_tx_rate 2000` is refused: Invalid argument"),
        "{error}"
    );
    assert!(error.to_string().ends_with(" (pf0 has 1000 Mbit/s)"), "{error}");
    assert_eq!(card.took(), ["mac 02:00:00:00:00:0a", "vlan 5", "vlan 0", "mac 00:00:00:00:00:00"]);
    assert!(inner.kept.is_none() && !inner.path(folder.path()).exists());
    for (settings, said) in [
        (
            VfSettings { query_rss: Some(true), ..usual() },
            "which the driver of pf0, where it is to go, does not offer",
        ),
        (VfSettings { state: VfLinkWord::Enable, ..usual() }, "vf 1 state enable` is refused"),
        (VfSettings { vlan: vlan(4095), ..usual() }, "make no sense: VLAN 4095"),
        (VfSettings { min_tx_rate: 2, max_tx_rate: 1, ..usual() }, "make no sense: at least 2"),
    ] {
        let error = take(&mut inner, &card, folder.path(), &form(settings), &adopt("all")).unwrap_err();
        assert!(error.to_string().contains(said), "{error}");
    }
    // What the other host's driver says is off is off where there is none.
    let off = VfSettings { query_rss: Some(false), ..usual() };
    take(&mut inner, &card, folder.path(), &PhysicalForm { address: None, settings: off }, &adopt("trust"))
        .unwrap();
}

#[test]
fn what_somebody_sets_meanwhile_stays() {
    let (folder, mut inner) = new();
    let card = Card::new(Some(B), usual());
    let there = VfSettings { mac: Some(A), max_tx_rate: 100, trust: Some(true), ..usual() };
    take(&mut inner, &card, folder.path(), &form(there), &adopt("mac,trust")).unwrap();
    card.took();
    card.change(VfSetting::Rate { min: 0, max: 70 });
    // A guest that is trusted.
    card.change(VfSetting::Mac(Some(MacAddress([2, 0, 0, 0, 0, 0xc]))));
    inner.put_back(&card, folder.path()).unwrap();
    assert_eq!(card.took(), ["trust off", "mac 02:00:00:00:00:0b"]);
    assert_eq!(card.now.borrow().settings.max_tx_rate, 70);
}

#[test]
fn which_address_is_fixed_is_seen() {
    let trusted = VfSettings { trust: Some(true), ..usual() };
    for (fixed, now, settings, expected) in [
        (None, None, usual(), None),
        // The guest's own.
        (None, Some(A), usual(), None),
        (Some(A), Some(A), usual(), Some(A)),
        // By the administrator, since.
        (Some(A), Some(B), usual(), Some(B)),
        // By a guest that may.
        (Some(A), Some(B), trusted, Some(A)),
    ] {
        let said = Said { address: now, settings };
        assert_eq!(administered(&said, fixed).mac, expected, "{fixed:?} {now:?}");
    }
}

#[test]
fn an_address_that_a_guest_has_taken_along_is_nobodys_until_the_next_one_comes() {
    let (folder, mut inner) = new();
    let card = Card::new(Some(A), VfSettings { max_tx_rate: 100, ..usual() });
    inner.fixed = Some(A);
    let gone = inner.carried(&card).unwrap();
    assert_eq!((gone.address, gone.settings.mac, gone.settings.max_tx_rate), (Some(A), Some(A), 100));
    inner.left(&card, folder.path()).unwrap();
    assert_eq!(card.took(), ["mac 00:00:00:00:00:00"]);
    assert!(inner.withheld && inner.path(folder.path()).exists());
    inner.put_back(&card, folder.path()).unwrap();
    assert_eq!(card.took(), ["mac 02:00:00:00:00:0a"]);
    assert!(!inner.withheld && !inner.path(folder.path()).exists());
    assert_eq!(card.now.borrow().settings.max_tx_rate, 100, "of the administrator's nothing is taken away");
}

#[test]
fn a_guest_that_leaves_again_leaves_what_was_there_before_it_came() {
    let (folder, mut inner) = new();
    let card = Card::new(Some(B), usual());
    let there = VfSettings { mac: Some(A), vlan: vlan(5), trust: Some(true), ..usual() };
    take(&mut inner, &card, folder.path(), &form(there), &adopt("all")).unwrap();
    card.took();
    assert_eq!(inner.carried(&card).unwrap().settings, there);
    inner.left(&card, folder.path()).unwrap();
    assert_eq!(card.took(), ["trust off", "vlan 0", "mac 02:00:00:00:00:0b"]);
    assert_eq!(*card.now.borrow(), Said { address: Some(B), settings: usual() });
    assert!(inner.kept.is_none() && !inner.withheld && !inner.path(folder.path()).exists());
}

#[test]
fn one_that_is_left_without_a_guest_that_went_on_is_as_it_was() {
    let (folder, mut inner) = new();
    let card = Card::new(Some(B), usual());
    inner.fixed = Some(B);
    inner.left(&card, folder.path()).unwrap();
    inner.put_back(&card, folder.path()).unwrap();
    assert_eq!(*card.now.borrow(), Said { address: Some(B), settings: usual() });
}

#[test]
fn the_card_forgets_the_address_that_a_guest_has_chosen() {
    let (folder, mut inner) = new();
    let card = Card::new(Some(A), usual());
    assert_eq!(inner.carried(&card).unwrap(), PhysicalForm { address: Some(A), settings: usual() });
    inner.left(&card, folder.path()).unwrap();
    assert_eq!((card.took(), inner.withheld), (vec!["mac 00:00:00:00:00:00".to_owned()], false));
}

#[test]
fn what_a_dead_daemon_left_of_a_function_that_is_gone_is_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let address: PciAddress = "0000:01:10.0".parse().unwrap();
    let mut inner = Inner { address, ..Inner::default() };
    let kept = Kept { own: usual(), given: usual() };
    inner.remember(folder.path(), Some(kept)).unwrap();
    let sysfs = tempfile::tempdir().unwrap();
    let all = recover_settings(sysfs.path(), folder.path());
    assert!(matches!(&all[..], [(at, Ok(()))] if *at == address), "{all:?}");
    assert!(!inner.path(folder.path()).exists());
    fs::write(inner.path(folder.path()), "{").unwrap();
    let all = recover_settings(sysfs.path(), folder.path());
    assert!(matches!(&all[..], [(_, Err(VfError::Record { .. }))]), "{all:?}");
}

#[test]
fn what_allows_a_guest_more_is_told_from_what_does_not() {
    use VfSetting::*;
    for (new, old, more) in [
        (Mac(Some(A)), Mac(None), false),
        (Mac(Some(A)), Mac(Some(A)), false),
        (Mac(Some(A)), Mac(Some(B)), true),
        (Mac(None), Mac(Some(B)), true),
        (Vlan(vlan(5)), Vlan(None), false),
        (Vlan(vlan(5)), Vlan(vlan(6)), true),
        (Vlan(None), Vlan(vlan(6)), true),
        (Spoofchk(true), Spoofchk(false), false),
        (Spoofchk(false), Spoofchk(true), true),
        (Trust(true), Trust(false), true),
        (Trust(false), Trust(true), false),
        (Rate { min: 0, max: 100 }, Rate { min: 0, max: 0 }, false),
        (Rate { min: 0, max: 100 }, Rate { min: 0, max: 99 }, true),
        (Rate { min: 0, max: 0 }, Rate { min: 0, max: 99 }, true),
        (Rate { min: 1, max: 0 }, Rate { min: 0, max: 0 }, true),
        (State(VfLinkWord::Auto), State(VfLinkWord::Disable), true),
        (State(VfLinkWord::Disable), State(VfLinkWord::Auto), false),
        (QueryRss(true), QueryRss(false), true),
        (QueryRss(false), QueryRss(true), false),
    ] {
        assert_eq!(allows_more(new, old), more, "{new} after {old}");
    }
}

#[test]
fn what_filters_depend_on_is_seen_to_change() {
    let (folder, mut inner) = new();
    let card = Card::new(Some(B), usual());
    let since = |inner: &Inner| inner.since_noted(&card.said().unwrap());
    assert_eq!(since(&inner), None, "it was not noted");
    inner.noted = Some(card.said().unwrap().settings);
    assert_eq!(since(&inner), Some(B.0));
    // A guest comes under its own address, and may do more.
    let there =
        VfSettings { mac: Some(A), spoofchk: Some(false), trust: Some(true), max_tx_rate: 10, ..usual() };
    take(&mut inner, &card, folder.path(), &form(there), &adopt("all")).expect("it is allowed");
    assert_eq!(since(&inner), Some(A.0));
    card.change(VfSetting::Mac(None));
    assert_eq!(since(&inner), Some([0; 6]));
    for change in [VfSetting::Vlan(vlan(5)), VfSetting::State(VfLinkWord::Disable)] {
        card.change(change);
        assert_eq!(since(&inner), None, "{change:?}");
        inner.noted = Some(card.said().unwrap().settings);
        assert!(since(&inner).is_some());
    }
}
