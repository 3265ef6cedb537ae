use super::*;
use crate::fake::Tree;
use std::cell::Cell;

const CARD: &str = "0000:00:05.0";
const FORCED: Accepted = Accepted { in_use: true, unsafe_interrupts: false };

fn card() -> PciAddress {
    CARD.parse().expect("an address")
}

/// Runs `test` with a tree that acts as the kernel does, and a folder for records.
fn with(tree: &Tree, test: impl FnOnce(&Sysfs<'_>, &Path)) {
    let act = |path: &Path, text: &str| tree.act(path, text);
    let folder = tree.root().join("leases");
    test(&Sysfs::acting(tree.root(), &act), &folder);
}

/// What a crash does: the lock is gone, nothing is given back.
fn crash(mut lease: Lease) {
    lease.file = None;
}

fn give(sysfs: &Sysfs<'_>, mut lease: Lease) -> Result<(), LeaseError> {
    let _file = lease.file.take();
    give_back(sysfs, &lease.record, &lease.path, Instant::now())
}

#[test]
fn a_function_is_taken_and_given_back() {
    let tree = Tree::new();
    tree.add(CARD, Some(3), Some("8139cp"));
    with(&tree, |sysfs, folder| {
        let may_take = || Lease::may_take(tree.root(), card(), folder, Accepted::default());
        may_take().expect("it is free");
        assert!(!folder.exists() && tree.bound_to(CARD).as_deref() == Some("8139cp"), "untouched");
        let lease = take(sysfs, tree.root(), card(), folder, Accepted::default()).expect("taken");
        assert_eq!(tree.bound_to(CARD).as_deref(), Some(VFIO));
        assert!(matches!(may_take(), Err(LeaseError::Leased(_))));
        assert_eq!(lease.driver(), Some("8139cp"));
        assert!(lease.path.exists());
        let again = take(sysfs, tree.root(), card(), folder, Accepted::default()).expect_err("leased");
        assert!(matches!(again, LeaseError::Leased(_)), "{again}");
        assert!(recover_in(sysfs, folder).is_empty(), "its holder lives");
        let path = lease.path.clone();
        give(sysfs, lease).expect("given back");
        assert_eq!(tree.bound_to(CARD).as_deref(), Some("8139cp"));
        assert!(!path.exists());
        assert_eq!(text(&tree.function(CARD).join("driver_override")).as_deref(), Some(""));
    });
}

/// What is to be done about what stands in the way.
fn advice(error: &LeaseError) -> String {
    let LeaseError::Refused { obstacles, .. } = error else { panic!("{error}") };
    obstacles.iter().map(|obstacle| obstacle.advice.clone()).collect::<Vec<_>>().join("; ")
}

#[test]
fn what_is_in_use_is_refused_unless_forced() {
    let tree = Tree::new();
    tree.add(CARD, Some(3), Some("8139cp"));
    tree.put(CARD, "net/eth1/flags", "0x1003");
    with(&tree, |sysfs, folder| {
        let error = take(sysfs, tree.root(), card(), folder, Accepted::default()).expect_err("up");
        assert!(error.to_string().contains("eth1 is up"), "{error}");
        let asked = Lease::may_take(tree.root(), card(), folder, Accepted::default()).expect_err("up");
        assert!(asked.to_string().contains("eth1 is up"), "{asked}");
        Lease::may_take(tree.root(), card(), folder, FORCED).expect("forced");
        let none = "0000:07:00.0".parse().expect("an address");
        let asked = Lease::may_take(tree.root(), none, folder, FORCED).expect_err("there is none");
        assert!(matches!(asked, LeaseError::NoSuchFunction(_)));
        assert!(advice(&error).contains("ip link set eth1 down"), "{error:?}");
        assert!(!folder.exists() && tree.bound_to(CARD).as_deref() == Some("8139cp"), "untouched");
        let lease = take(sysfs, tree.root(), card(), folder, FORCED).expect("forced");
        give(sysfs, lease).expect("given back");
        tree.put(CARD, "net/eth1/flags", "0x1002");
        give(sysfs, take(sysfs, tree.root(), card(), folder, Accepted::default()).expect("down"))
            .expect("given back");
    });
}

#[test]
fn force_does_not_help_against_a_shared_group() {
    let tree = Tree::new();
    tree.add(CARD, Some(3), Some("8139cp"));
    tree.add("0000:00:05.1", Some(3), Some("8139cp"));
    with(&tree, |sysfs, folder| {
        let error = take(sysfs, tree.root(), card(), folder, FORCED).expect_err("shared").to_string();
        assert!(error.contains("0000:00:05.1") && error.contains("group 3"), "{error}");
    });
}

#[test]
fn after_a_crash_it_is_given_back_or_taken_over() {
    let tree = Tree::new();
    tree.add(CARD, Some(3), Some("8139cp"));
    with(&tree, |sysfs, folder| {
        crash(take(sysfs, tree.root(), card(), folder, Accepted::default()).expect("taken"));
        assert_eq!(tree.bound_to(CARD).as_deref(), Some(VFIO));
        let lease = take(sysfs, tree.root(), card(), folder, Accepted::default()).expect("taken over");
        assert_eq!(lease.driver(), Some("8139cp"), "what it was before the crash");
        crash(lease);
        let all = recover_in(sysfs, folder);
        assert!(matches!(&all[..], [one] if one.address == card() && one.outcome.is_ok()), "{all:?}");
        assert_eq!(tree.bound_to(CARD).as_deref(), Some("8139cp"));
        assert!(recover_in(sysfs, folder).is_empty());
    });
}

/// What a process leaves is found by one of another version.
#[test]
fn a_record_stays_readable() {
    let stored = r#"{"address":"0000:00:05.0","driver":"8139cp","wanted":null}"#;
    let tree = Tree::new();
    tree.add(CARD, Some(3), Some("8139cp"));
    with(&tree, |sysfs, folder| {
        let lease = take(sysfs, tree.root(), card(), folder, Accepted::default()).expect("taken");
        let path = lease.path.clone();
        assert!(path.ends_with("0000:00:05.0.json"), "{}", path.display());
        assert_eq!(std::fs::read_to_string(&path).expect("a record"), stored);
        crash(lease);
        std::fs::write(&path, stored).expect("written");
        let all = recover_in(sysfs, folder);
        assert!(matches!(&all[..], [one] if one.address == card() && one.outcome.is_ok()), "{all:?}");
        assert_eq!(tree.bound_to(CARD).as_deref(), Some("8139cp"));
    });
}

/// The process dies after each single write, of taking and of giving back: what comes after puts all right.
#[test]
fn a_crash_at_any_point_is_put_right() {
    for writes in 0..8 {
        let tree = Tree::new();
        tree.add(CARD, Some(3), Some("8139cp"));
        let left = Cell::new(writes);
        let folder = tree.root().join("leases");
        let act = |path: &Path, text: &str| match left.get() {
            0 => Err(io::Error::other("the process is dead")),
            n => {
                left.set(n - 1);
                tree.act(path, text)
            }
        };
        let dying = Sysfs::acting(tree.root(), &act);
        if let Ok(lease) = take(&dying, tree.root(), card(), &folder, Accepted::default()) {
            let _ = give(&dying, lease);
        }
        with(&tree, |sysfs, folder| {
            for one in recover_in(sysfs, folder) {
                one.outcome.expect("given back");
            }
        });
        assert_eq!(tree.bound_to(CARD).as_deref(), Some("8139cp"), "after {writes} writes");
    }
}

#[test]
fn a_driver_that_is_gone_is_an_error_and_stays_on_record() {
    let tree = Tree::new();
    tree.add(CARD, Some(3), Some("8139cp"));
    with(&tree, |sysfs, folder| {
        crash(take(sysfs, tree.root(), card(), folder, Accepted::default()).expect("taken"));
        // There is, but it does not want the card any more.
        let stubborn = |path: &Path, text: &str| match path.ends_with("drivers_probe") {
            true => Ok(()),
            false => tree.act(path, text),
        };
        let all = recover_in(&Sysfs::acting(tree.root(), &stubborn), folder);
        let error = all[0].outcome.as_ref().expect_err("no driver").to_string();
        assert!(error.contains("has no driver") && error.contains("8139cp"), "{error}");
        assert!(recover_in(sysfs, folder)[0].outcome.is_ok(), "it was remembered");
        assert_eq!(tree.bound_to(CARD).as_deref(), Some("8139cp"));
    });
}

#[test]
fn what_somebody_else_has_rebound_is_left_alone() {
    let tree = Tree::new();
    tree.add(CARD, Some(3), None);
    with(&tree, |sysfs, folder| {
        crash(take(sysfs, tree.root(), card(), folder, Accepted::default()).expect("taken"));
        fs::remove_file(tree.function(CARD).join("driver")).expect("unbound");
        std::os::unix::fs::symlink(tree.driver("8139cp"), tree.function(CARD).join("driver")).expect("bound");
        assert!(recover_in(sysfs, folder)[0].outcome.is_ok());
        assert_eq!(tree.bound_to(CARD).as_deref(), Some("8139cp"));
    });
    // And one without a driver goes back to having none.
    fs::remove_file(tree.function(CARD).join("driver")).expect("unbound");
    with(&tree, |sysfs, folder| {
        let lease = take(sysfs, tree.root(), card(), folder, Accepted::default()).expect("taken");
        assert_eq!(tree.bound_to(CARD).as_deref(), Some(VFIO));
        give(sysfs, lease).expect("given back");
        assert_eq!(tree.bound_to(CARD), None);
    });
}

#[test]
fn records_are_not_believed() {
    let tree = Tree::new();
    tree.add(CARD, Some(3), Some("8139cp"));
    with(&tree, |sysfs, folder| {
        fs::create_dir_all(folder).expect("a folder");
        for bytes in ["", "{", "[]", "{\"address\":\"0000:00:06.0\",\"driver\":null,\"wanted\":null}"] {
            fs::write(folder.join(format!("{CARD}.json")), bytes).expect("written");
            assert!(recover_in(sysfs, folder)[0].outcome.is_err());
        }
        // The card has been unplugged since.
        let gone = "{\"address\":\"0000:00:07.0\",\"driver\":\"8139cp\",\"wanted\":null}";
        fs::remove_file(folder.join(format!("{CARD}.json"))).expect("removed");
        fs::write(folder.join("0000:00:07.0.json"), gone).expect("written");
        assert!(recover_in(sysfs, folder)[0].outcome.is_ok());
        assert!(recover_in(sysfs, folder).is_empty());
    });
}

/// VFIO alone would refuse where its parameter is N and take the card, without a word, where it is Y.
#[test]
fn hole_15_a_host_without_interrupt_remapping_hands_nothing_on() {
    let tree = Tree::new();
    tree.add(CARD, Some(3), Some("8139cp"));
    let both = Accepted { in_use: true, unsafe_interrupts: true };
    let parameter = tree.root().join("module/vfio_iommu_type1/parameters/allow_unsafe_interrupts");
    fs::create_dir_all(parameter.parent().expect("a folder")).expect("a folder");
    tree.interrupts("  8:  1  IO-APIC   8-edge  rtc0\n 24:  7  PCI-MSI 32768-edge  eth0\n");
    with(&tree, |sysfs, folder| {
        let refused = |accepted| {
            let error = take(sysfs, tree.root(), card(), folder, accepted).expect_err("refused");
            assert!(error.to_string().contains("no interrupt remapping"), "{error}");
            assert!(advice(&error).contains("intremap"), "{error:?}");
            assert_eq!(tree.bound_to(CARD).as_deref(), Some("8139cp"), "untouched");
        };
        for (told, refuses) in [
            (None, &[Accepted::default(), FORCED, both][..]),
            (Some("N\n"), &[Accepted::default(), FORCED, both]),
            (Some("Y\n"), &[Accepted::default(), FORCED]),
        ] {
            if let Some(told) = told {
                fs::write(&parameter, told).expect("written");
            }
            refuses.iter().for_each(|accepted| refused(*accepted));
        }
        give(sysfs, take(sysfs, tree.root(), card(), folder, both).expect("accepted")).expect("given back");
        // Where they are remapped nobody has to accept anything.
        tree.interrupts(
            "  8:  1  IR-IO-APIC   8-edge  rtc0\n 24:  7  IR-PCI-MSI-0000:00:05.0  0-edge  eth0\n",
        );
        give(sysfs, take(sysfs, tree.root(), card(), folder, Accepted::default()).expect("safe"))
            .expect("given back");
    });
}
