//! The configuration file's keys and words, and the state file that a daemon of today leaves for one of tomorrow.

use std::os::unix::fs::PermissionsExt;

use ioplane_testkit::golden;
use serde_json::{Value, json};

use super::daemon::TestDaemon;
use super::normalize::{Normalizer, pretty};
use super::recorder::MIB;

fn normal(daemon: &TestDaemon) -> Normalizer {
    Normalizer::default().with(daemon.folder.path().display().to_string(), "DIR")
}

/// Each is refused with every key that its tables have, or every word that a key may say, or what else is wrong with it.
const REFUSED: &[&str] = &[
    "[daemon]\nunknown_key = 1\n[[core]]\nunknown_key = 1\n[[group]]\nname = \"g\"\nunknown_key = 1\n[[disk]]\nname = \"d\"\nmemory = \"1M\"\nunknown_key = 1\n[[switch]]\nname = \"s\"\nunknown_key = 1\n\
     [[nic]]\nname = \"n\"\nswitch = \"s\"\nunknown_key = 1\n[[pci]]\nname = \"p\"\nemulate = \"ne2000\"\nswitch = \"s\"\nunknown_key = 1\n",
    "[daemon]\nsocket = 1\nrun_dir = 1\nmetrics = \"0.0.0.0:1\"\nsocket_group = \"no such group\"\nsocket_mode = \"9\"\n",
    "[daemon]\nsocket = \"/run/x/../../xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\"\n",
    "[[core]]\nid = 256\nnotify = \"none\"\nspin_us = 60000001\nbudget = 0\nyield_policy = \"none\"\ncpu = -1\n[[core]]\nid = 256\n",
    "[[disk]]\nname = \"d\"\npath = \"none.img\"\nformat = \"none\"\ndirect = \"none\"\nengine = \"none\"\nguest_memory = \"none\"\n",
    "[[disk]]\nname = \"a b\"\nmemory = \"1000\"\nread_only = \"yes\"\nserial = \"a b\"\nqueues = 65\nqueue_size = 3\nblock_size = 100\n\
     socket = 1\nmigration_socket = 1\ncore = 9\n",
    "[[disk]]\nname = \"d\"\n[[disk]]\nmemory = \"1M\"\n[[disk]]\nname = \"e\"\npath = \"x\"\nmemory = \"1M\"\n",
    "[[disk]]\nname = \"d\"\nmemory = \"1M\"\nsocket = \"x\"\n[[disk]]\nname = \"d\"\nmemory = \"1M\"\nmigration_socket = \"x\"\n",
    "[[switch]]\nname = \"s\"\nuplink = \"a/b\"\ncore = 9\n[[switch]]\nname = \"s\"\n",
    "[[switch]]\nname = \"lan\"\n[[nic]]\nname = \"n\"\nswitch = \"lam\"\nmac = \"none\"\nvlan = \"none\"\npairs = 9\nqueue_size = 63\n\
     mtu = 67\nlink = \"none\"\nisolated = 1\ncore = 9\nguest_memory = \"none\"\n[[nic]]\nname = \"m\"\nswitch = \"lan\"\nvlan = 4095\n",
    "[[switch]]\nname = \"lan\"\n[[pci]]\nname = \"p\"\nhost = \"none\"\nmode = \"none\"\non_fault = \"none\"\nforce = 1\n\
     unsafe_interrupts = 1\npinned_memory = \"none\"\n[[pci]]\nname = \"q\"\nemulate = \"none\"\nswitch = \"lam\"\ntap = \"a/b\"\n\
     mac = \"none\"\nguest_memory = \"none\"\n[[pci]]\nname = \"r\"\n",
    "[[group]]\nweight = 0\n[[group]]\nname = \"vm\"\nweight = 1001\nrx_frame_burst = 1\n[[group]]\nname = \"web\"\n[[group]]\nname = \"web\"\n\
     [[disk]]\nname = \"d\"\nmemory = \"1M\"\ngroup = \"wbe\"\n",
    "[disk]\nname = \"d\"\n[[daemon]]\n[[disc]]\nname = \"d\"\n",
    "name = \n",
];

#[test]
fn what_is_refused() {
    let daemon = TestDaemon::new("");
    let mut said = String::new();
    for config in REFUSED {
        daemon.configure(config);
        let refused = daemon.refuses();
        said += &format!("== code {}\n{config}--\n{}", refused.code, normal(&daemon).text(&refused.err));
    }
    golden!("configuration-refused.text").check(&said);
}

/// Every key that there is, none with its default.
const WHOLE: &str = r#"
[[core]]
id = 0
cpu = 0
notify = "notified"
spin_us = 70
budget = 33
yield_policy = "dedicated"
[[core]]
id = 7
notify = "notified"
[[core]]
id = 8
notify = "notified"
[[group]]
name = "vm"
weight = 3
iops_limit = 100000
[[disk]]
name = "whole"
path = "whole.img"
format = "raw"
read_only = true
serial = "W1"
queues = 3
queue_size = 64
block_size = 4096
direct = "off"
engine = "threads"
core = 7
socket = "whole.vhost.sock"
group = "vm"
migration_socket = "whole.migration.sock"
guest_memory = "any"
[[disk]]
name = "least"
path = "least.img"
[[disk]]
name = "removed"
memory = "1M"
[[disk]]
name = "replaced"
memory = "2M"
queues = 2
[[switch]]
name = "lan"
core = 7
[[switch]]
name = "removed"
[[nic]]
name = "web"
switch = "lan"
mac = "02:00:00:00:00:01"
isolated = true
vlan = "trunk:10,20"
pairs = 2
queue_size = 512
mtu = 9000
link = "down"
core = 7
socket = "web.vhost.sock"
guest_memory = "any"
[[nic]]
name = "gone"
switch = "lan"
mac = "02:00:00:00:00:02"
[[pci]]
name = "soft"
emulate = "rtl8139"
switch = "lan"
mac = "02:00:00:00:00:0a"
socket = "soft.vfio.sock"
guest_memory = "any"
[[pci]]
name = "old"
emulate = "ne2000"
switch = "lan"
mac = "02:00:00:00:00:0b"
"#;

fn images(daemon: &TestDaemon) {
    daemon.image("whole.img", MIB);
    daemon.image("least.img", MIB);
}

/// A state file without what differs from host to host, still one that can be loaded: numbers of images.
fn regular(daemon: &TestDaemon, mut state: Value) -> Value {
    for record in state["entries"]["disks"].as_object_mut().unwrap().values_mut() {
        if let Some(image) = record.get_mut("image").and_then(Value::as_object_mut) {
            image.values_mut().for_each(|number| *number = json!(0));
        }
    }
    normal(daemon).value(state)
}

fn state(daemon: &TestDaemon) -> Value {
    let text = std::fs::read_to_string(daemon.path("state.json")).unwrap();
    regular(daemon, serde_json::from_str(&text).unwrap())
}

/// What of the status a restart must not change.
fn served(daemon: &TestDaemon) -> Value {
    let status = daemon.json(&["status"]);
    let fields = [
        "name",
        "origin",
        "state",
        "socket",
        "migration_socket",
        "size",
        "serial",
        "read_only",
        "mac",
        "vlan",
        "mtu",
        "link",
        "mode",
        "group",
        "weight",
    ];
    let all = ["disks", "nics", "functions", "switches", "groups"]
        .into_iter()
        .flat_map(|kind| status[kind].as_array().unwrap().clone());
    let lasting = all.map(|one| fields.iter().map(|field| one[*field].clone()).collect::<Value>());
    let cores = status["cores"]
        .as_array()
        .unwrap()
        .iter()
        .map(|core| json!([core["id"], core["notify"], core["spin_us"]]));
    normal(daemon).value(lasting.chain(cores).collect())
}

#[test]
fn the_state_file() {
    let mut daemon = TestDaemon::new(WHOLE);
    images(&daemon);
    daemon.start();
    let ask = |method: &str, path: &str, body: Value| {
        let (status, answer) = daemon.http(method, path, &body.to_string());
        assert!(status < 300, "{method} {path}: {answer}");
    };
    ask("PUT", "/v1/groups/added-group", json!({ "weight": 2, "tx_frame_limit": 7 }));
    ask("PATCH", "/v1/groups/vm", json!({ "weight": 4 }));
    ask("PUT", "/v1/disks/added", json!({ "memory": "1M", "group": "added-group" }));
    ask("POST", "/v1/queues/move", json!({ "disk": "replaced", "queue": 1, "core": 7 }));
    ask("PATCH", "/v1/disks/replaced", json!({ "memory": "4M" }));
    ask("DELETE", "/v1/disks/removed", json!(null));
    ask("DELETE", "/v1/switches/removed", json!(null));
    ask("PUT", "/v1/switches/added", json!({}));
    ask("PUT", "/v1/nics/added-nic", json!({ "switch": "added", "mac": "02:00:00:00:00:03" }));
    ask("PATCH", "/v1/nics/web", json!({ "link": "up" }));
    ask("DELETE", "/v1/nics/gone", json!(null));
    ask(
        "PUT",
        "/v1/pci/added-pci",
        json!({ "emulate": "rtl8139", "switch": "added", "mac": "02:00:00:00:00:0c" }),
    );
    ask("DELETE", "/v1/pci/old", json!(null));
    ask("DELETE", "/v1/cores/8", json!(null));
    ask("POST", "/v1/cores", json!({ "notify": "notified", "yield_policy": "nice" }));
    ask("PATCH", "/v1/cores/0", json!({ "spin_us": 99 }));
    let before = served(&daemon);
    let golden = golden!("state.json");
    golden.check(&pretty(&state(&daemon)));
    drop(daemon);

    // A daemon finds what is stored, and has the same.
    let mut daemon = TestDaemon::new(WHOLE);
    images(&daemon);
    let stored = golden.text().replace("DIR", &daemon.folder.path().display().to_string());
    std::fs::write(daemon.path("state.json"), stored).unwrap();
    std::fs::set_permissions(daemon.path("state.json"), PermissionsExt::from_mode(0o600)).unwrap();
    daemon.start();
    daemon.until(|| served(&daemon) == before);
    assert_eq!(state(&daemon), serde_json::from_str::<Value>(&golden.text()).unwrap());
}
