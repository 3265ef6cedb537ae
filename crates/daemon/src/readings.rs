//! Reports made of what devices, their hosts and switches say of themselves.

use std::collections::BTreeMap;
use std::sync::Arc;

use ioplane_api::report::{
    Counts, Errors, FaultReport, FrameCounts, LearnedReport, NicQueueReport, PortReport, QueueReport, Role,
    VmReport,
};
use ioplane_api::spec::MacAddress;
use ioplane_device::{Histogram, Meter, MeterReading};
use ioplane_host::vhost_user::{QueueStatus, Status};
use ioplane_network::{Learned, PortReading, SideReading};

fn counts(meter: &MeterReading, times: Times) -> Counts {
    let Times { latency, wait, interrupt } = times;
    let per = |count: u64| if meter.requests == 0 { 0.0 } else { count as f64 / meter.requests as f64 };
    let us = |times: &[u64], part| Histogram::quantile(times, part) as f64 / 1000.0;
    Counts {
        requests: meter.requests,
        bytes: meter.bytes_read + meter.bytes_written,
        bytes_read: meter.bytes_read,
        bytes_written: meter.bytes_written,
        kicks: meter.kicks,
        kicks_per_request: per(meter.kicks),
        kicks_avoided: meter.kicks_avoided,
        interrupts: meter.interrupts,
        interrupts_per_request: per(meter.interrupts),
        interrupts_avoided: meter.interrupts_avoided,
        limited: meter.limited,
        errors: Errors {
            io: meter.errors_io,
            space: meter.errors_space,
            request: meter.errors_request,
            unsupported: meter.unsupported,
        },
        faults: meter.faults,
        replayed: meter.replayed,
        p50_us: us(&latency, 0.5),
        p99_us: us(&latency, 0.99),
        wait_p50_us: us(&wait, 0.5),
        wait_p99_us: us(&wait, 0.99),
        interrupt_p50_us: us(&interrupt, 0.5),
        interrupt_p99_us: us(&interrupt, 0.99),
        latency,
        wait,
        interrupt,
    }
}

/// Buckets of the histograms of a queue: in the device, waiting for the core, to the interrupt.
#[derive(Default)]
struct Times {
    latency: Vec<u64>,
    wait: Vec<u64>,
    interrupt: Vec<u64>,
}

impl Times {
    fn of(meter: &Meter) -> Self {
        let [latency, wait, interrupt] =
            [&meter.latency, &meter.wait, &meter.interrupt].map(Histogram::snapshot);
        Times { latency, wait, interrupt }
    }

    fn add(&mut self, latency: &[u64], wait: &[u64], interrupt: &[u64]) {
        let add = |all: &mut Vec<u64>, one: &[u64]| {
            all.resize(all.len().max(one.len()), 0);
            all.iter_mut().zip(one).for_each(|(all, one)| *all += one);
        };
        add(&mut self.latency, latency);
        add(&mut self.wait, wait);
        add(&mut self.interrupt, interrupt);
    }
}

/// The counts of some queues together.
pub fn sum<'q>(queues: impl IntoIterator<Item = &'q QueueStatus>) -> Counts {
    let (mut meter, mut times) = (MeterReading::default(), Times::default());
    for queue in queues {
        meter.add(&queue.counts);
        times.add(&queue.latency, &queue.wait, &queue.interrupt);
    }
    counts(&meter, times)
}

/// The counts of some queues together, from their meters.
pub fn sum_of_meters<'m>(meters: impl IntoIterator<Item = &'m Arc<Meter>>) -> Counts {
    let (mut all, mut times) = (MeterReading::default(), Times::default());
    for meter in meters {
        let Times { latency, wait, interrupt } = Times::of(meter);
        all.add(&meter.read());
        times.add(&latency, &wait, &interrupt);
    }
    counts(&all, times)
}

/// The queues of a NIC with one role together.
pub fn frames(queues: &[QueueStatus], role: Role) -> FrameCounts {
    sum(queues.iter().filter(|queue| Role::of(queue.index) == role)).into()
}

fn fault((name, text): (&'static str, String)) -> FaultReport {
    FaultReport { name: name.to_owned(), text }
}

pub fn queue(queue: QueueStatus) -> QueueReport {
    let times = Times { latency: queue.latency, wait: queue.wait, interrupt: queue.interrupt };
    QueueReport {
        index: queue.index,
        size: queue.size,
        core: queue.core,
        fault: queue.fault.map(fault),
        choice: None,
        counts: counts(&queue.counts, times),
    }
}

pub fn nic_queue(queue: QueueStatus) -> NicQueueReport {
    let times = Times { latency: queue.latency, wait: queue.wait, interrupt: queue.interrupt };
    NicQueueReport {
        index: queue.index,
        role: Role::of(queue.index),
        size: queue.size,
        core: queue.core,
        fault: queue.fault.map(fault),
        choice: None,
        counts: counts(&queue.counts, times).into(),
    }
}

/// What front ends did wrong, by name of the fault, and the last of it in words.
pub fn faults_of(status: &Status) -> (BTreeMap<String, u64>, Option<String>) {
    let faults = status.faults.iter().map(|(name, count)| (name.to_string(), *count)).collect();
    (faults, status.last_fault.clone())
}

/// What `/proc` says of the process that a front end is in.
pub fn vm(pid: u32) -> VmReport {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    VmReport { pid, name: vm_name(&String::from_utf8_lossy(&line)) }
}

/// The state of a process's main thread, as `/proc/PID/stat` has it (proc(5)); `None` if there is no such process.
pub fn state_of(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next())
}

/// The name in a command line whose arguments end with zeros.
fn vm_name(line: &str) -> String {
    let mut args = line.split('\0');
    let program = args.next().unwrap_or_default().rsplit('/').next().unwrap_or_default();
    let given = args.skip_while(|arg| *arg != "-name").nth(1).and_then(|value| value.split(',').next());
    let name = given.map_or(program, |name| name.strip_prefix("guest=").unwrap_or(name));
    name.chars().filter(|c| !c.is_control()).take(64).collect()
}

pub fn port(reading: PortReading) -> PortReport {
    let drops = |side: &SideReading| -> BTreeMap<String, u64> {
        side.drops.iter().map(|(cause, count)| (cause.name().to_owned(), *count)).collect()
    };
    PortReport {
        name: reading.name,
        uplink: reading.uplink,
        up: reading.up,
        isolated: reading.isolated,
        mac: reading.mac.map(|mac| MacAddress(mac).to_string()),
        learned: reading.learned,
        waiting: reading.waiting as u64,
        sent_frames: reading.sent.frames,
        sent_bytes: reading.sent.bytes,
        sent_drops: drops(&reading.sent),
        received_frames: reading.received.frames,
        received_bytes: reading.received.bytes,
        received_drops: drops(&reading.received),
    }
}

/// An address that a switch has learned.
pub fn learned(learned: Learned) -> LearnedReport {
    LearnedReport {
        mac: MacAddress(learned.mac).to_string(),
        vlan: learned.vlan,
        port: learned.port,
        age_s: learned.age.as_secs(),
        held: learned.held,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_has_the_name_that_its_vmm_was_given() {
        for (line, name) in [
            ("/usr/bin/qemu-system-x86_64\0-nographic\0-name\0web\0", "web"),
            ("qemu-system-x86_64\0-name\0guest=db,debug-threads=on\0", "db"),
            ("/opt/cloud-hypervisor\0--cpus\0two\0", "cloud-hypervisor"),
            ("qemu\0-name", "qemu"),
            ("", ""),
        ] {
            assert_eq!(vm_name(line), name, "{line:?}");
        }
    }
}
