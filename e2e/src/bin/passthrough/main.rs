//! `ioplane-passthrough-bench [--json] [--pings N] [--seconds S]`: two NICs in three modes, in L1 with a guest of stock QEMU and stock drivers.
//!
//! ```text
//!   here:  the models' updates under callgrind, and natively        --> model_instructions_per_update, model_ns_per_update
//!   L1:    a guest with both cards, for each mode                   --> exits, hooked accesses, interrupts, throughput
//!            emulated     ioplane's own RTL8139 and NE2000, on TAPs
//!            virtual      L1's cards, mediated
//!            clustered    the same, QEMU started by `ioplane run`, which clusters exits
//!            page         the same, which shows registers in a page, and does not cluster
//!            page and clustered   both
//!            passthrough  L1's cards as they are
//! ```
//!
//! Exits are counted by L1's KVM, exactly, and told apart by address: those of a card are those in its BARs. Times and rates are those of
//! a translated machine: only their ratios mean something.

mod model;
mod row;

use anyhow::{Context, Result};
use clap::Parser;
use ioplane_e2e::{Inner, L1, Nic, Version};
use ioplane_figures::report::envelope_of;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use model::Update;
use row::Row;

const MINUTE: Duration = Duration::from_secs(60);
const CARDS: [(Nic, &str); 2] = [(Nic::Rtl8139, "rtl8139"), (Nic::Ne2000, "ne2000")];

/// Measures what watching a NIC costs its guest.
#[derive(Parser)]
struct Options {
    /// Print one JSON object in place of the tables
    #[arg(long)]
    json: bool,
    /// Pings of 1,000 bytes for each row [default: 1000; 200 with the NE2000, where one takes 0.3 s]
    #[arg(long)]
    pings: Option<u32>,
    /// Seconds of each stream; 0: none
    #[arg(long, default_value_t = 5)]
    seconds: u32,
    /// Only this card: rtl8139 or ne2000
    #[arg(long)]
    card: Option<String>,
    /// Only what the models' updates cost
    #[arg(long)]
    model: bool,
}

/// A boot of the guest: under this name, with the cards in that mode, and what is measured then.
struct Boot {
    name: &'static str,
    mode: &'static str,
    /// How QEMU is started: without the library, with it, or with a word for its environment too.
    library: Option<&'static str>,
    /// What each row is called, and whether exits are clustered then.
    ways: &'static [(&'static str, bool)],
}

const BOOTS: [Boot; 5] = [
    Boot { name: "emulated", mode: "emulated", library: None, ways: &[("emulated", false)] },
    Boot { name: "virtual", mode: "virtual", library: None, ways: &[("virtual", false)] },
    Boot {
        name: "clustered",
        mode: "virtual",
        library: Some("IOPLANE_EXITS_SHADOW=off"),
        ways: &[("virtual_clustered", true)],
    },
    Boot {
        name: "paged",
        mode: "virtual",
        library: Some(""),
        ways: &[("virtual_page", false), ("virtual_page_clustered", true)],
    },
    Boot { name: "passthrough", mode: "passthrough", library: None, ways: &[("passthrough", false)] },
];

impl Options {
    fn pings(&self, nic: Nic) -> u32 {
        self.pings.unwrap_or(if nic == Nic::Ne2000 { 200 } else { 1000 })
    }
}

/// By NIC, then by mode: `rtl8139.virtual.exits_per_ping`.
#[derive(Serialize)]
struct Report {
    /// The dearer of the two models.
    model_instructions_per_update: Option<f64>,
    models: BTreeMap<&'static str, Update>,
    /// 8139cp's accesses on L1's KVM, by a VMM that maps the page of registers for reading.
    shadow: serde_json::Value,
    #[serde(flatten)]
    cards: BTreeMap<&'static str, BTreeMap<&'static str, Row>>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let begun = Instant::now();
    let say = |line: &str| eprintln!("[{:6.1} s] {line}", begun.elapsed().as_secs_f64());
    let mut models = BTreeMap::new();
    for (_, name) in CARDS {
        models.insert(name, model::update(name)?);
        say(&format!("a model's update: {name}"));
    }
    let dearest = models.values().filter_map(|update| update.instructions).reduce(f64::max);
    let mut report = Report {
        model_instructions_per_update: dearest,
        models,
        shadow: serde_json::Value::Null,
        cards: BTreeMap::new(),
    };
    if !options.model {
        let l1 = L1::boot_with_nics(2048, &CARDS.map(|(nic, _)| nic), &say)?;
        let shadow = l1
            .run(&format!("{} {}", model::example("shadow")?.display(), options.pings(CARDS[0].0)), MINUTE)?;
        report.shadow = serde_json::from_str(&shadow).with_context(|| shadow.clone())?;
        say(&format!("reads from a shadow page: {}", report.shadow));
        for boot in BOOTS {
            let rows = one_boot(&l1, &boot, &options, &say).with_context(|| format!("boot {}", boot.name))?;
            for (name, way, row) in rows {
                report.cards.entry(name).or_default().insert(way, row);
            }
        }
    }
    if options.json {
        println!("{}", serde_json::to_string_pretty(&envelope_of("passthrough", &report)?)?);
    } else {
        print!(
            "{}{}\nshadow page: {}\n",
            model::table(&report.models),
            row::table(&report.cards),
            report.shadow
        );
    }
    Ok(())
}

/// Adds both cards to a daemon in L1.
fn add(l1: &L1, daemon: &Inner<'_>, mode: &str) -> Result<()> {
    for (nic, name) in CARDS {
        let (address, peer, ip) = (nic.address(), nic.peer(), nic.peer_ip());
        if mode == "emulated" {
            let up = peer.replace("peer", "up");
            daemon.text(&format!("pci add {name} --emulate {name} --tap {up} --mac {}", nic.mac()))?;
            l1.run(
                &format!(
                    "ip addr del {ip}/24 dev {peer}; ip addr add {ip}/24 dev {up} && ip link set {up} up"
                ),
                MINUTE,
            )?;
        } else {
            l1.run(&format!("ip addr replace {ip}/24 dev {peer}"), MINUTE)?;
            daemon.text(&format!("pci add {name} --host {address} --mode {mode}"))?;
        }
    }
    Ok(())
}

fn one_boot(
    l1: &L1,
    boot: &Boot,
    options: &Options,
    say: &dyn Fn(&str),
) -> Result<Vec<(&'static str, &'static str, Row)>> {
    let Boot { name: vm, mode, library, ways } = *boot;
    let daemon = l1.serve(vm, "")?;
    add(l1, &daemon, mode)?;
    let names = CARDS.map(|(_, name)| name);
    let before = match library {
        // An access takes a round trip to the daemon, and all of it is translated.
        Some(word) => format!("{word} {}", l1.interposed_patiently()?),
        None => String::new(),
    };
    let guest = l1.debian_after(&before, Version::Newer, vm, &daemon.guest_args(&names, 256)?, "")?;
    let mut rows = Vec::new();
    let wanted = |name: &str| options.card.as_deref().is_none_or(|card| card == name);
    for (nic, name) in CARDS.into_iter().filter(|(_, name)| wanted(name)) {
        guest.raise(nic)?;
        for (way, clusters) in ways {
            if library.is_some() {
                l1.clustering(&format!("{} --vm {vm}", if *clusters { "on" } else { "off" }))?;
            }
            let subject = row::Subject { l1, daemon: &daemon, guest: &guest, vm, nic, name };
            let row = subject
                .measure(options.pings(nic), options.seconds)
                .with_context(|| format!("{name}: {}", daemon.said()))?;
            say(&format!("{name}, {way}: {:.2} exits a ping", row.exits_per_ping));
            rows.push((name, *way, row));
        }
    }
    guest.kill()?;
    for name in names {
        daemon.text(&format!("pci remove {name} --force"))?;
    }
    daemon.stop()?;
    Ok(rows)
}
