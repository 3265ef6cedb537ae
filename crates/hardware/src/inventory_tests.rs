use super::*;
use crate::fake::Tree;
use std::os::unix::fs::symlink;

const CARD: &str = "0000:00:05.0";

fn model(identity: &Identity) -> Option<String> {
    (identity.vendor == 0x10ec).then(|| "rtl8139".to_owned())
}

fn only(tree: &Tree) -> Found {
    find(tree.root(), CARD.parse().expect("an address"), model).expect("found")
}

#[test]
fn a_card_is_described() {
    let tree = Tree::new();
    tree.add(CARD, Some(7), Some("8139cp"));
    tree.add("0000:00:02.0", Some(1), None);
    let all = list(tree.root(), model).expect("a list");
    let addresses: Vec<String> = all.iter().map(|found| found.address.to_string()).collect();
    assert_eq!(addresses, ["0000:00:02.0", CARD]);
    let card = &all[1];
    assert_eq!(
        (card.identity.device, card.identity.revision, card.class),
        (0x8139, 0x20, "Ethernet controller")
    );
    assert_eq!(
        (card.driver.as_deref(), card.group, card.model.as_deref()),
        (Some("8139cp"), Some(7), Some("rtl8139"))
    );
    let bars: Vec<_> = card.bars.iter().map(|b| (b.index, b.size, b.space, b.prefetchable)).collect();
    assert_eq!(bars, [(0, 256, "ports", false), (1, 256, "memory", false), (3, 0x4000, "memory64", true)]);
    assert!(card.passable(), "{:?}", card.obstacles);
}

#[test]
fn what_stands_in_the_way_is_told_with_advice() {
    let told = |prepare: &dyn Fn(&Tree), why: &str| {
        let tree = Tree::new();
        tree.add(CARD, Some(7), Some("8139cp"));
        prepare(&tree);
        let found = only(&tree);
        let obstacle = found.obstacles.iter().find(|o| o.why.contains(why));
        let obstacle = obstacle.unwrap_or_else(|| panic!("{why}: {:?}", found.obstacles));
        assert!(!obstacle.advice.is_empty() && !found.passable());
        (found.obstacles.len(), obstacle.forcible)
    };
    assert_eq!(told(&|t| t.put(CARD, "class", "0x060400"), "bridge"), (1, false));
    assert_eq!(told(&|t| t.add("0000:00:05.1", Some(7), Some("8139cp")), "shares IOMMU group 7"), (1, false));
    assert_eq!(told(&|t| t.put(CARD, "net/eth0/flags", "0x1003"), "eth0 is up"), (1, true));
    assert_eq!(told(&|t| t.put(CARD, "virtio3/net/eth0/flags", "0x1003"), "eth0 is up"), (1, true));
    assert_eq!(
        told(&|t| t.put(CARD, "ata1/host0/target0/0:0/block/sda/size", "8"), "disks on it: sda"),
        (1, true)
    );
    assert_eq!(told(&|t| t.put(CARD, "sriov_numvfs", "2"), "2 virtual functions"), (1, false));
    assert_eq!(told(&|t| t.put(CARD, "boot_vga", "1"), "console"), (1, true));
    let enslave = |t: &Tree| {
        t.put(CARD, "net/eth0/flags", "0x1002");
        symlink("/sys/class/net/br0", t.function(CARD).join("net/eth0/master")).expect("a link");
    };
    assert_eq!(told(&enslave, "belongs to br0"), (1, true));
    let no_group = |t: &Tree| fs::remove_file(t.function(CARD).join("iommu_group")).expect("removed");
    assert_eq!(told(&no_group, "in no IOMMU group"), (1, false));
    let no_iommu = |t: &Tree| {
        no_group(t);
        fs::remove_dir_all(t.root().join("kernel")).expect("removed");
    };
    assert_eq!(told(&no_iommu, "no IOMMU switched on"), (1, false));
}

#[test]
fn harmless_company_is_no_obstacle() {
    let tree = Tree::new();
    tree.add(CARD, Some(7), Some("8139cp"));
    tree.add("0000:00:05.1", Some(7), None);
    tree.add("0000:00:05.2", Some(7), Some("vfio-pci"));
    tree.put(CARD, "net/eth0/flags", "0x1002");
    // What lies behind a bridge is not the bridge's own.
    tree.put(CARD, "0000:01:00.0/net/eth9/flags", "0x1003");
    let card = only(&tree);
    assert!(card.passable() && card.neighbours.len() == 2, "{card:?}");
    assert_eq!(card.interfaces.len(), 1);
}

#[test]
fn what_is_not_there_is_an_error() {
    let tree = Tree::new();
    let error = find(tree.root(), CARD.parse().expect("an address"), model).expect_err("none").to_string();
    assert!(error.contains("ioplane pci list"), "{error}");
    assert!(list(&tree.root().join("nowhere"), model).is_err());
    assert!(list(tree.root(), model).expect("a list").is_empty());
}

#[test]
fn the_list_of_this_machine_can_be_made() {
    // Whatever it has: nothing must panic.
    for found in list(Path::new("/sys"), model).unwrap_or_default() {
        assert!(serde_json::to_string(&found).is_ok());
    }
}
