//! Specs as tables of a configuration: what the readers beside this file make of the text is the spec again. What a spec says that
//! would be so without it is left out.

use std::path::Path;

use ioplane_api::size::Size;
use ioplane_api::spec::{
    BackingSpec, CableSpec, CoreSpec, DirectWord, DiskForm, DiskSpec, EngineWord, ExportForm, ExportSpec,
    FaultSpec, FunctionSpec, GROUP_WEIGHT, GroupSpec, LimitFields, LimitsSpec, MemoryWord, ModeWord, NicForm,
    NicSpec, OptionValue, SourceSpec, SwitchSpec,
};
use toml::Value;

#[derive(Debug, Default)]
pub struct Appended {
    pub text: String,
}

impl Appended {
    fn table(&mut self, kind: &str) {
        self.text.push_str(&format!("\n[[{kind}]]\n"));
    }

    fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.text.push_str(&format!("{key} = {}\n", value.into()));
    }

    /// Unless it is the usual.
    fn other<V: Into<Value> + PartialEq>(&mut self, key: &str, value: V, usual: V) {
        if value != usual {
            self.set(key, value);
        }
    }

    /// If there is one.
    fn some(&mut self, key: &str, value: Option<impl Into<Value>>) {
        if let Some(value) = value {
            self.set(key, value);
        }
    }

    /// TOML is UTF-8: what a path loses here is found when the text is read again.
    fn path(&mut self, key: &str, path: Option<&Path>) {
        self.some(key, path.map(|path| path.display().to_string()));
    }

    /// `64M` where that is exact.
    fn size(&mut self, key: &str, bytes: u64) {
        let text = Size(bytes).to_string();
        match text.parse() {
            Ok(Size(read)) if read == bytes => self.set(key, text),
            _ => self.set(key, bytes as i64),
        }
    }

    /// Under these names, in the order of [`LimitsSpec`].
    fn limits(&mut self, spec: &LimitsSpec, [rate, rate_burst, bandwidth, bandwidth_burst]: LimitFields) {
        self.some(rate, spec.rate.map(|rate| rate as i64));
        self.some(rate_burst, spec.rate_burst.map(|burst| burst as i64));
        spec.bandwidth.into_iter().for_each(|size| self.size(bandwidth, size.0));
        spec.bandwidth_burst.into_iter().for_each(|size| self.size(bandwidth_burst, size.0));
    }

    fn guest_memory(&mut self, word: MemoryWord) {
        self.other("guest_memory", word.word(), MemoryWord::default().word());
    }

    pub fn core(&mut self, spec: &CoreSpec) {
        let usual = CoreSpec::new(spec.id);
        self.table("core");
        self.set("id", i64::from(spec.id));
        self.some("cpu", spec.cpu.map(i64::from));
        self.other("notify", spec.notify.word(), usual.notify.word());
        self.other("spin_us", spec.spin_us as i64, usual.spin_us as i64);
        self.some("p99_us", spec.p99_us.map(|us| us as i64));
        self.some("cpu_percent", spec.cpu_percent.map(i64::from));
        self.other("budget", i64::from(spec.budget), i64::from(usual.budget));
        self.other("yield_policy", spec.yield_policy.word(), usual.yield_policy.word());
        self.some("reserve", spec.reserve.as_deref());
    }

    fn backing(&mut self, backing: &BackingSpec) {
        match backing {
            BackingSpec::File { path, format, direct, engine } => {
                self.path("path", Some(path));
                self.some("format", format.map(|format| format.word()));
                self.other("direct", direct.word(), DirectWord::default().word());
                self.other("engine", engine.word(), EngineWord::default().word());
            }
            BackingSpec::Memory { bytes } => self.size("memory", *bytes),
            BackingSpec::Remote(spec) => {
                self.set("remote", spec.remote.as_str());
                for (key, value) in spec.options() {
                    match value {
                        OptionValue::Number(number) => self.set(key, number as i64),
                        OptionValue::Size(size) => self.size(key, size.0),
                        OptionValue::Text(text) => self.set(key, text),
                    }
                }
            }
        }
    }

    pub fn export(&mut self, spec: &ExportSpec) {
        self.table("export");
        self.set("name", spec.name.as_str());
        self.backing(&spec.backing);
        self.other("read_only", spec.read_only, false);
        self.some("listen", spec.listen.as_ref().map(ToString::to_string));
        self.other("plain", spec.plain, false);
        self.other("tls", spec.tls, false);
        self.some("allow", spec.allow.as_ref().map(ToString::to_string));
        let usual = ExportForm { memory: Some(Size(1 << 20)), ..ExportForm::default() }.spec(&spec.name).ok();
        let usual = usual.map_or(0, |usual| usual.connections);
        self.other("connections", i64::from(spec.connections), i64::from(usual));
        self.path("socket", spec.socket.as_deref());
        self.some("core", spec.core.map(i64::from));
        self.some("group", spec.group.as_deref());
        self.limits(&spec.limits(), ExportSpec::LIMITS);
    }

    pub fn disk(&mut self, spec: &DiskSpec) {
        self.table("disk");
        self.set("name", spec.name.as_str());
        self.backing(&spec.backing);
        let usual = DiskForm { memory: Some(Size(1 << 20)), ..DiskForm::default() }.spec(&spec.name).ok();
        let usual = usual.as_ref();
        self.other("read_only", spec.read_only, false);
        self.other("serial", spec.serial.as_str(), usual.map_or("", |usual| &usual.serial));
        self.other("queues", i64::from(spec.queues), usual.map_or(0, |usual| usual.queues.into()));
        self.other(
            "queue_size",
            i64::from(spec.queue_size),
            usual.map_or(0, |usual| usual.queue_size.into()),
        );
        self.some("block_size", spec.block_size.map(i64::from));
        self.some("at_start", spec.at_start.map(|word| word.word()));
        self.some("core", spec.core.map(i64::from));
        self.path("socket", spec.socket.as_deref());
        self.path("migration_socket", spec.migration_socket.as_deref());
        self.guest_memory(spec.guest_memory);
        self.some("group", spec.group.as_deref());
        self.limits(&spec.limits(), DiskSpec::LIMITS);
    }

    pub fn group(&mut self, spec: &GroupSpec) {
        self.table("group");
        self.set("name", spec.name.as_str());
        self.other("weight", i64::from(spec.weight), i64::from(GROUP_WEIGHT));
        spec.limits().iter().zip(GroupSpec::LIMITS).for_each(|(limits, fields)| self.limits(limits, fields));
    }

    pub fn switch(&mut self, spec: &SwitchSpec) {
        self.table("switch");
        self.set("name", spec.name.as_str());
        self.some("uplink", spec.uplink.as_deref());
        self.some("core", spec.core.map(i64::from));
    }

    /// One `[[nic]]`. Its address is always said: made from the host, it would be another one on the next host.
    pub fn nic(&mut self, spec: &NicSpec) {
        let usual = NicForm { switch: Some(spec.switch.clone()), ..NicForm::default() }.spec(&spec.name).ok();
        let usual = usual.as_ref();
        self.table("nic");
        self.set("name", spec.name.as_str());
        self.set("switch", spec.switch.as_str());
        self.set("mac", spec.mac.to_string());
        self.other("isolated", spec.isolated, false);
        self.other("vlan", spec.vlan.to_string(), "all".to_owned());
        self.other("pairs", i64::from(spec.pairs), usual.map_or(0, |usual| usual.pairs.into()));
        self.other(
            "queue_size",
            i64::from(spec.queue_size),
            usual.map_or(0, |usual| usual.queue_size.into()),
        );
        self.other("mtu", i64::from(spec.mtu), usual.map_or(0, |usual| usual.mtu.into()));
        self.other("link", spec.link.word(), usual.map_or("", |usual| usual.link.word()));
        self.some("core", spec.core.map(i64::from));
        self.path("socket", spec.socket.as_deref());
        self.guest_memory(spec.guest_memory);
        self.some("group", spec.group.as_deref());
        self.limits(&spec.tx_limits(), NicSpec::TX_LIMITS);
        self.limits(&spec.rx_limits(), NicSpec::RX_LIMITS);
    }

    pub fn function(&mut self, spec: &FunctionSpec) {
        self.table("pci");
        self.set("name", spec.name.as_str());
        match &spec.source {
            SourceSpec::Host {
                address,
                mode,
                on_fault,
                forced,
                unsafe_interrupts,
                adopt,
                mapped,
                uplink,
            } => {
                self.set("host", address.to_string());
                self.other("mode", mode.word(), ModeWord::default().word());
                self.other("on_fault", on_fault.to_string(), FaultSpec::default().to_string());
                self.other("force", *forced, false);
                self.other("unsafe_interrupts", *unsafe_interrupts, false);
                self.other("adopt", adopt.to_string(), String::new());
                self.other("mapped", *mapped, false);
                self.some("uplink", uplink.as_deref());
            }
            SourceSpec::Emulated { chip, cable, mac } => {
                self.set("emulate", chip.word());
                match cable {
                    CableSpec::Switch(switch) => self.set("switch", switch.as_str()),
                    CableSpec::Tap(tap) => self.set("tap", tap.as_str()),
                }
                self.set("mac", mac.to_string());
            }
        }
        self.path("socket", spec.socket.as_deref());
        self.guest_memory(spec.guest_memory);
        if let Some(Size(bytes)) = spec.pinned_memory {
            self.size("pinned_memory", bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

    /// Every key that there is, none with its default; and the least of each.
    const WHOLE: &str = r#"
[[core]]
id = 3
cpu = 0
notify = "notified"
spin_us = 70
budget = 33
yield_policy = "dedicated"
[[group]]
name = "all"
weight = 7
iops_limit = 5001
iops_burst = 8
bandwidth_limit = "101M"
bandwidth_burst = 4099
tx_frame_limit = 3
tx_frame_burst = 4
tx_bandwidth_limit = 5001
tx_bandwidth_burst = 6
rx_frame_limit = 99999999
rx_frame_burst = 999999999
rx_bandwidth_limit = "1T"
rx_bandwidth_burst = "1T"
[[group]]
name = "plain"
[[disk]]
name = "whole"
path = "/a b/it's \"one\".img"
format = "raw"
read_only = true
serial = "W1"
queues = 3
queue_size = 64
block_size = 4096
direct = "off"
engine = "threads"
core = 3
socket = "/run/whole.vhost.sock"
migration_socket = "/run/whole.migration.sock"
guest_memory = "any"
group = "all"
iops_limit = 5000
iops_burst = 7
bandwidth_limit = "100M"
bandwidth_burst = 4097
[[disk]]
name = "least"
memory = 1536
[[switch]]
name = "lan"
uplink = "tap0"
core = 3
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
core = 3
socket = "/run/web.vhost.sock"
guest_memory = "any"
group = "all"
tx_frame_limit = 1
tx_frame_burst = 2
tx_bandwidth_limit = 5000
tx_bandwidth_burst = 4
rx_frame_limit = 100000000
rx_frame_burst = 1000000000
rx_bandwidth_limit = "1T"
rx_bandwidth_burst = "1T"
[[nic]]
name = "db"
switch = "lan"
vlan = 7
[[pci]]
name = "soft"
emulate = "ne2000"
switch = "lan"
mac = "02:00:00:00:00:0a"
socket = "/run/soft.vfio.sock"
guest_memory = "any"
[[pci]]
name = "tapped"
emulate = "rtl8139"
tap = "tap1"
[[pci]]
name = "card"
host = "0000:00:05.0"
on_fault = "stop"
force = true
unsafe_interrupts = true
pinned_memory = "1G"
[[pci]]
name = "straight"
host = "0000:00:06.0"
mode = "passthrough"
[[pci]]
name = "moves"
host = "0000:00:07.0"
mode = "migratable"
adopt = "mac,trust"
[[pci]]
name = "works-along"
host = "0000:00:08.0"
mode = "cooperating"
mapped = true
[[disk]]
name = "far"
remote = "nbd://host-a/data"
timeout_s = 30
on_timeout = "pause"
qmp = "/run/far.qmp"
reserve_iops = 6000
reserve_bandwidth = "50M"
retain = "64M"
silence_s = 3
in_doubt = "resend"
at_start = "refuse"
[[export]]
name = "plain"
path = "/srv/plain.img"
[[export]]
name = "data"
memory = "64M"
read_only = true
listen = "127.0.0.1:10809"
plain = true
connections = 4
socket = "/run/data-nbd.sock"
core = 3
[[export]]
name = "closed"
memory = "64M"
listen = "127.0.0.1:10809"
tls = true
allow = "host-b,host-c"
"#;

    #[test]
    fn what_is_written_is_read_again() {
        let read = |text: &str| {
            Config::parse(Path::new("/etc/c.toml"), text).unwrap_or_else(|e| panic!("{e}\n{text}"))
        };
        let config = read(WHOLE);
        let mut appended = Appended::default();
        config.cores.iter().for_each(|(spec, _)| appended.core(spec));
        config.groups.iter().for_each(|(spec, _)| appended.group(spec));
        config.disks.iter().for_each(|(spec, _)| appended.disk(spec));
        config.switches.iter().for_each(|(spec, _)| appended.switch(spec));
        config.nics.iter().for_each(|(spec, _)| appended.nic(spec));
        config.functions.iter().for_each(|(spec, _)| appended.function(spec));
        config.exports.iter().for_each(|(spec, _)| appended.export(spec));
        let again = read(&appended.text);
        fn specs<S: Clone>(all: &[(S, super::super::Place)]) -> Vec<S> {
            all.iter().map(|(spec, _)| spec.clone()).collect()
        }
        assert_eq!(specs(&again.cores), specs(&config.cores));
        assert_eq!(specs(&again.groups), specs(&config.groups));
        assert_eq!(specs(&again.disks), specs(&config.disks));
        assert_eq!(specs(&again.switches), specs(&config.switches));
        assert_eq!(specs(&again.nics), specs(&config.nics));
        assert_eq!(specs(&again.functions), specs(&config.functions));
        assert_eq!(specs(&again.exports), specs(&config.exports));
        // Nothing is said that holds anyway.
        assert!(appended.text.contains("[[group]]\nname = \"plain\"\n\n"), "{}", appended.text);
        assert!(appended.text.contains("[[disk]]\nname = \"least\"\nmemory = 1536\n\n"), "{}", appended.text);
        assert!(
            appended.text.contains("name = \"straight\"\nhost = \"0000:00:06.0\"\nmode = \"passthrough\"\n")
        );
    }
}
