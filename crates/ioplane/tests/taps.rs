//! TAP devices that the daemon makes, in a network namespace of their own.

mod daemon;

use std::io::Write as _;
use std::process::{Child, Command, Stdio};

use daemon::TestDaemon;
use serde_json::Value;

/// A network namespace, for as long as this lives.
struct World(Child);

impl World {
    /// None if this user may not have one.
    fn new() -> Option<World> {
        if !rustix::process::geteuid().is_root() || !std::path::Path::new("/dev/net/tun").exists() {
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: TAP devices were NOT tested: it takes root and /dev/net/tun"
            );
            return None;
        }
        let mut holder = Command::new("unshare");
        holder.args(["--net", "sh", "-c", "echo ready; exec sleep 600"]).stdout(Stdio::piped());
        let mut holder = holder.spawn().unwrap();
        let mut said = [0; 6];
        std::io::Read::read_exact(holder.stdout.as_mut().unwrap(), &mut said).unwrap();
        Some(World(holder))
    }

    fn namespace(&self) -> String {
        format!("--net=/proc/{}/ns/net", self.0.id())
    }

    fn ip(&self, words: &str) {
        let status = Command::new("nsenter").arg(self.namespace()).arg("ip").args(words.split(' ')).status();
        assert!(status.unwrap().success(), "ip {words}");
    }

    /// What `ip` says of a device; nothing if it is not there.
    fn link(&self, name: &str) -> Option<Value> {
        let mut command = Command::new("nsenter");
        let said =
            command.arg(self.namespace()).args(["ip", "-json", "link", "show", name]).output().unwrap();
        let list: Value = serde_json::from_slice(&said.stdout).ok()?;
        list.get(0).cloned()
    }

    fn start(&self, daemon: TestDaemon) -> TestDaemon {
        daemon.start_by(&["nsenter", &self.namespace()])
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn hole_19_a_tap_keeps_its_bridge_across_a_crash() {
    let Some(world) = World::new() else { return };
    let config = "[[switch]]\nname = \"lan\"\nuplink = \"tap7\"\n\
                  [[pci]]\nname = \"card\"\nemulate = \"rtl8139\"\ntap = \"tap8\"\n";
    let mut daemon = world.start(TestDaemon::new(config));
    daemon.until(|| world.link("tap7").is_some() && world.link("tap8").is_some());
    // As the administrator does once it is there.
    world.ip("link add br0 type bridge");
    for tap in ["tap7", "tap8"] {
        world.ip(&format!("link set {tap} master br0"));
        world.ip(&format!("link set {tap} up"));
    }
    let numbers = ["tap7", "tap8"].map(|tap| world.link(tap).unwrap()["ifindex"].clone());
    let kept = |when: &str| {
        for (tap, number) in ["tap7", "tap8"].iter().zip(&numbers) {
            let link = world.link(tap).unwrap_or_else(|| panic!("{tap} is gone {when}"));
            assert_eq!((&link["master"], &link["ifindex"]), (&"br0".into(), number), "{when}: {link}");
        }
    };
    let works = |daemon: &TestDaemon| {
        let status = daemon.json(&["status"]);
        assert_eq!(status["switches"][0]["error"], Value::Null, "{status}");
        daemon.until(|| daemon.json(&["status"])["functions"][0]["state"] == "served");
    };
    works(&daemon);
    daemon.kill9();
    kept("after a crash");
    daemon = world.start(daemon);
    works(&daemon);
    kept("after the start that follows");
    daemon.terminate();
    kept("after a clean end");
    daemon = world.start(daemon);
    works(&daemon);
    daemon.json(&["upgrade"]);
    kept("after an upgrade");
    works(&daemon);
    // With what it was made for it goes.
    daemon.json(&["pci", "remove", "card"]);
    assert!(world.link("tap8").is_none(), "{}", daemon.log());
    assert!(world.link("tap7").is_some());
    daemon.configure("[[switch]]\nname = \"lan\"\n");
    daemon.json(&["reload"]);
    assert!(world.link("tap7").is_none(), "{}", daemon.log());
    // One that somebody else has made stays, whatever was of its name before.
    world.ip("tuntap add dev tap7 mode tap vnet_hdr");
    daemon.json(&["switch", "add", "more", "--uplink", "tap7"]);
    daemon.json(&["switch", "remove", "more"]);
    assert!(world.link("tap7").is_some());
    daemon.kill_whoever_answers();
}

/// Whoever deletes a device that the daemon made knows why: it is not made again behind their back, and taken when it is there.
#[test]
fn hole_19_a_tap_that_was_deleted_is_taken_when_it_is_there_again() {
    let Some(world) = World::new() else { return };
    let daemon = world.start(TestDaemon::new("[[switch]]\nname = \"lan\"\nuplink = \"tap7\"\n"));
    daemon.until(|| world.link("tap7").is_some());
    world.ip("link delete tap7");
    let error = || daemon.json(&["switch", "show", "lan"])["error"].clone();
    let tries = || daemon.json(&["switch", "show", "lan"])["retry"]["tries"].as_u64().unwrap_or(0);
    daemon.until(|| error().as_str().is_some_and(|error| error.contains("has been deleted")));
    daemon.until(|| tries() >= 2);
    assert!(world.link("tap7").is_none());
    world.ip("tuntap add dev tap7 mode tap vnet_hdr");
    daemon.until(|| error().is_null());
    assert_eq!(daemon.json(&["switch", "show", "lan"])["retry"], Value::Null);
}
