//! KVM's tracepoints, read into numbers that mean something.

use serde::{Deserialize, Serialize};

use crate::error::{ExitsError, Result};
use crate::format::{Field, Format};
use crate::queues::QueuePorts;
use crate::reason::{Isa, Reason};
use crate::tracefs::Tracefs;

/// What an exit was about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Detail {
    /// Nothing more is known.
    Nothing,
    /// An I/O port.
    Port {
        /// Which.
        port: u16,
        /// Bytes at a time.
        width: u8,
        /// OUT, not IN.
        write: bool,
        /// The queue of which a legacy virtio device is told, where that was asked for: [`QueuePorts`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        queue: Option<u16>,
    },
    /// A guest-physical address that a device has.
    Memory {
        /// Where.
        address: u64,
        /// Bytes; zero if the kernel does not say.
        width: u8,
        /// A store.
        write: bool,
    },
    /// A model-specific register.
    Msr {
        /// Which.
        index: u32,
        /// WRMSR, not RDMSR.
        write: bool,
    },
    /// A leaf of CPUID.
    Cpuid {
        /// EAX.
        leaf: u32,
    },
    /// A hypercall.
    Hypercall {
        /// Its number.
        number: u32,
    },
    /// A page of memory that the guest could not use so.
    Fault(FaultCause),
}

/// Why the guest could not use a page of its memory: what the processor says of the access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultCause {
    /// The page is not mapped: it was never used, or was taken away.
    Missing,
    /// It is mapped, and the guest may not write to it: its writes are noted (a migration), or it is shared (KSM, after a fork).
    WriteProtected,
    /// It is mapped, and something else is not allowed.
    Protected,
    /// The exit does not say.
    Unknown,
}

/// An event of a vCPU's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The guest was left.
    Exit {
        /// Why.
        reason: Reason,
        /// The guest's instruction pointer.
        rip: u64,
        /// Which vCPU, where the kernel says.
        vcpu: Option<u32>,
        /// What the exit's own fields tell.
        detail: Detail,
    },
    /// The guest goes on.
    Entry {
        /// Which vCPU, where the kernel says.
        vcpu: Option<u32>,
    },
    /// What KVM does about the exit.
    Detail(Detail),
    /// The same, of a read that the VMM must answer; [`Event::Detail`] follows when it has.
    Asked(Detail),
    /// KVM hands over to the VMM.
    UserSpace,
    /// The thread leaves its processor.
    SwitchedOut {
        /// It would have run on; else it waits for something.
        preempted: bool,
    },
    /// It has one again.
    SwitchedIn,
    /// An interrupt is injected.
    Interrupt {
        /// Its vector.
        vector: u8,
    },
    /// An interrupt was accepted for a vCPU. Where the processor delivers interrupts by itself (APICv, AVIC) nothing else is told of it.
    Accepted {
        /// Which one's.
        vcpu: u32,
    },
    /// The window for spinning guests has changed.
    SpinWindow,
    /// The exit was a guest's of the guest: the address is none of the guest's own.
    Nested,
}

/// What a tracepoint tells: its name is compared once, not for each record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tracepoint {
    Exit,
    Entry,
    Pio,
    Mmio,
    FastMmio,
    Msr,
    Cpuid,
    Hypercall,
    PageFault,
    UserSpace,
    Inject,
    Accept,
    SpinWindow,
    Nested,
}

/// What is asked of the kernel. The first leads the group.
const WANTED: [(&str, Tracepoint); 15] = [
    (EXIT, Tracepoint::Exit),
    ("kvm_entry", Tracepoint::Entry),
    ("kvm_pio", Tracepoint::Pio),
    ("kvm_mmio", Tracepoint::Mmio),
    ("kvm_fast_mmio", Tracepoint::FastMmio),
    ("kvm_msr", Tracepoint::Msr),
    ("kvm_cpuid", Tracepoint::Cpuid),
    ("kvm_hypercall", Tracepoint::Hypercall),
    ("kvm_page_fault", Tracepoint::PageFault),
    ("kvm_userspace_exit", Tracepoint::UserSpace),
    ("kvm_inj_virq", Tracepoint::Inject),
    ("kvm_apic_accept_irq", Tracepoint::Accept),
    ("kvm_apicv_accept_irq", Tracepoint::Accept),
    ("kvm_ple_window_update", Tracepoint::SpinWindow),
    ("kvm_nested_vmexit", Tracepoint::Nested),
];
const EXIT: &str = "kvm_exit";

/// The fields of one tracepoint that we read, in an order of their own.
struct Layout {
    name: &'static str,
    tracepoint: Tracepoint,
    fields: [Option<Field>; 6],
}

impl Layout {
    /// A field that is not there is an error: read as zero it would be a reason, an address or a direction that never was.
    fn new(name: &'static str, tracepoint: Tracepoint, format: &Format) -> Result<Layout> {
        // How many of them must be there, in order; what comes then are those that kernels may lack, or another name of the same.
        let (names, must): (&[&str], usize) = match tracepoint {
            Tracepoint::Exit => (&["exit_reason", "guest_rip", "isa", "info1", "info2", "vcpu_id"], 5),
            Tracepoint::Entry => (&["vcpu_id"], 0),
            Tracepoint::Pio => (&["port", "size", "rw", "val"], 3),
            Tracepoint::Mmio => (&["gpa", "len", "type"], 3),
            Tracepoint::FastMmio => (&["gpa"], 1),
            Tracepoint::Msr => (&["ecx", "write"], 2),
            Tracepoint::Cpuid => (&["function"], 1),
            Tracepoint::Hypercall => (&["nr"], 1),
            Tracepoint::Inject => (&["vector", "irq"], 0),
            Tracepoint::Accept => (&["apicid"], 1),
            Tracepoint::PageFault | Tracepoint::UserSpace | Tracepoint::SpinWindow | Tracepoint::Nested => {
                (&[], 0)
            }
        };
        let mut fields = [None; 6];
        for (at, field) in names.iter().enumerate() {
            fields[at] = format.field(field);
            if at < must && fields[at].is_none() {
                return Err(missing(name, field));
            }
        }
        // Older kernels call it `irq`.
        if tracepoint == Tracepoint::Inject && fields[..2] == [None, None] {
            return Err(missing(name, names[0]));
        }
        Ok(Layout { name, tracepoint, fields })
    }
}

fn missing(event: &str, field: &str) -> ExitsError {
    ExitsError::NoField { event: format!("kvm:{event}"), field: field.to_owned() }
}

/// Reads the records of the running kernel.
pub struct Decoder {
    kind: Field,
    thread: Field,
    /// The tracepoints' numbers, side by side: each record's is looked for among them.
    ids: Vec<u64>,
    /// In the same order.
    layouts: Vec<Layout>,
    /// Tracepoints that this kernel does not have.
    pub missing: Vec<&'static str>,
    /// Whose queues are told.
    pub queues: QueuePorts,
}

impl Decoder {
    /// Looks up the tracepoints. Only `kvm_exit` must be there.
    pub fn new(tracefs: &Tracefs) -> Result<Decoder> {
        let exit = tracefs.kvm(EXIT)?;
        let mut broken = None;
        let decoder = Decoder::of(&exit, |name| match tracefs.kvm(name) {
            Ok(format) => Some(format),
            Err(ExitsError::NoTracepoint(_)) => None,
            Err(error) => {
                broken.get_or_insert(error);
                None
            }
        });
        // One that is there and cannot be read is not one that is not there.
        broken.map_or(decoder, Err)
    }

    /// Of formats that are at hand: of `kvm_exit`, and of the others by name.
    pub fn of(exit: &Format, mut others: impl FnMut(&str) -> Option<Format>) -> Result<Decoder> {
        // All records begin alike, with the tracepoint's number and the thread's.
        let common = |name: &str| exit.field(name).ok_or_else(|| missing(EXIT, name));
        let (kind, thread) = (common("common_type")?, common("common_pid")?);
        let mut ids = vec![exit.id];
        let mut layouts = vec![Layout::new(EXIT, Tracepoint::Exit, exit)?];
        let mut missing = Vec::new();
        for (name, tracepoint) in WANTED.into_iter().skip(1) {
            match others(name) {
                Some(format) => {
                    ids.push(format.id);
                    layouts.push(Layout::new(name, tracepoint, &format)?);
                }
                None => missing.push(name),
            }
        }
        Ok(Decoder { kind, thread, ids, layouts, missing, queues: QueuePorts::default() })
    }

    /// The thread in which a record came about; nothing if it is too short.
    pub fn thread(&self, record: &[u8]) -> Option<u32> {
        self.thread.of(record).map(|id| id as u32)
    }

    /// The tracepoints' numbers, `kvm_exit` first.
    pub fn tracepoints(&self) -> Vec<u64> {
        self.ids.clone()
    }

    /// Their names, in the same order.
    pub fn names(&self) -> Vec<&'static str> {
        self.layouts.iter().map(|layout| layout.name).collect()
    }

    /// Understands one record; nothing if it is too short or of another tracepoint.
    pub fn decode(&self, record: &[u8]) -> Option<Event> {
        let kind = self.kind.of(record)?;
        let layout = &self.layouts[self.ids.iter().position(|id| *id == kind)?];
        let field = |index: usize| layout.fields[index]?.of(record);
        Some(match layout.tracepoint {
            Tracepoint::Exit => {
                let reason = Reason::from_kvm(field(2)?, field(0)?);
                let detail = from_exit(reason, field(3)?, field(4)?);
                Event::Exit { reason, rip: field(1)?, vcpu: field(5).map(|id| id as u32), detail }
            }
            Tracepoint::Entry => Event::Entry { vcpu: field(0).map(|id| id as u32) },
            Tracepoint::Pio => {
                let (port, width, write) = (field(0)? as u16, field(1)? as u8, field(2)? != 0);
                let queue = field(3).filter(|_| write && self.queues.has(port)).map(|value| value as u16);
                Event::Detail(Detail::Port { port, width, write, queue })
            }
            // Type 2 is a write; a read is told when the VMM is asked (0) and when it is answered, by KVM or the VMM (1).
            Tracepoint::Mmio => {
                let kind = field(2)?;
                let detail = Detail::Memory { address: field(0)?, width: field(1)? as u8, write: kind == 2 };
                if kind == 0 { Event::Asked(detail) } else { Event::Detail(detail) }
            }
            Tracepoint::FastMmio => {
                Event::Detail(Detail::Memory { address: field(0)?, width: 0, write: true })
            }
            Tracepoint::Msr => Event::Detail(Detail::Msr { index: field(0)? as u32, write: field(1)? != 0 }),
            Tracepoint::Cpuid => Event::Detail(Detail::Cpuid { leaf: field(0)? as u32 }),
            Tracepoint::Hypercall => Event::Detail(Detail::Hypercall { number: field(0)? as u32 }),
            Tracepoint::PageFault => Event::Detail(Detail::Fault(FaultCause::Unknown)),
            Tracepoint::UserSpace => Event::UserSpace,
            Tracepoint::Inject => Event::Interrupt { vector: field(0).or(field(1))? as u8 },
            Tracepoint::Accept => Event::Accepted { vcpu: field(0)? as u32 },
            Tracepoint::SpinWindow => Event::SpinWindow,
            Tracepoint::Nested => Event::Nested,
        })
    }
}

/// Where the local APIC is, unless a guest moves it.
const APIC: u64 = 0xfee0_0000;

/// What the exit's own fields say. Most exits say nothing; what KVM does about them does.
fn from_exit(reason: Reason, info1: u64, info2: u64) -> Detail {
    let port = |width: u64, input: bool| Detail::Port {
        port: (info1 >> 16) as u16,
        width: width as u8,
        write: !input,
        queue: None,
    };
    let memory = |address: u64, write: bool| Detail::Memory { address, width: 0, write };
    let fault = |mapped: bool, write: bool| {
        Detail::Fault(match (mapped, write) {
            (false, _) => FaultCause::Missing,
            (true, true) => FaultCause::WriteProtected,
            (true, false) => FaultCause::Protected,
        })
    };
    match (reason.isa, reason.code) {
        // AMD64 APM volume 2, 15.10.2: bit 0 input, bits 4 to 6 the width, bits 16 to 31 the port.
        (Isa::Svm, 0x7b) => port((info1 >> 4) & 7, info1 & 1 != 0),
        // 15.25.6: the page's error code and the guest's address. KVM marks devices' pages by a reserved bit (3).
        (Isa::Svm, 0x400) if info1 & 8 != 0 => memory(info2, info1 & 2 != 0),
        // Bit 0: the page is mapped; bit 1: a write.
        (Isa::Svm, 0x400) => fault(info1 & 1 != 0, info1 & 2 != 0),
        // 15.29.9: an interrupt command; any other register, its offset, and in bit 32 whether it is written.
        (Isa::Svm, 0x401) => memory(APIC + 0x300, true),
        (Isa::Svm, 0x402) => memory(APIC + (info1 & 0xff0), info1 >> 32 & 1 != 0),
        // Intel SDM volume 3, table 28-5: bits 0 to 2 the width less one, bit 3 input, bits 16 to 31 the port.
        (Isa::Vmx, 30) => port((info1 & 7) + 1, info1 & 8 != 0),
        // Table 28-7: bits 3 to 5 are what the page allows, none if it is not mapped; bit 1: a write. Device pages have an exit of their own.
        (Isa::Vmx, 48) => fault(info1 & 0x38 != 0, info1 & 2 != 0),
        // Table 28-6: the offset, and in bits 12 to 15 how: 1 is a store.
        (Isa::Vmx, 44) => memory(APIC + (info1 & 0xfff), (info1 >> 12) & 15 == 1),
        // The end of an interrupt whose vector KVM wants to know of; a store that the APIC page did not do alone.
        (Isa::Vmx, 45) => memory(APIC + 0xb0, true),
        (Isa::Vmx, 56) => memory(APIC + (info1 & 0xfff), true),
        _ => Detail::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HEAD: &str = "\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\
                        \tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n";

    fn decoder() -> Decoder {
        let exit = format!(
            "ID: 10\n{HEAD}\tfield:unsigned int exit_reason;\toffset:8;\tsize:4;\n\
             \tfield:unsigned long guest_rip;\toffset:16;\tsize:8;\n\tfield:u32 isa;\toffset:24;\tsize:4;\n\
             \tfield:u64 info1;\toffset:32;\tsize:8;\n\tfield:unsigned int vcpu_id;\toffset:40;\tsize:4;\n\
             \tfield:u64 info2;\toffset:44;\tsize:8;\n"
        );
        let msr = format!(
            "ID: 11\n{HEAD}\tfield:unsigned write;\toffset:8;\tsize:4;\n\tfield:u32 ecx;\toffset:12;\tsize:4;\n"
        );
        let others = |name: &str| (name == "kvm_msr").then(|| Format::parse(&msr).unwrap());
        Decoder::of(&Format::parse(&exit).unwrap(), others).unwrap()
    }

    /// A kernel that calls a field otherwise, or has it no more: what would be read as zero is an exit of another maker, or a write
    /// that is a read.
    #[test]
    fn hole_21_a_field_that_is_missing_is_an_error() {
        let format = |fields: &[&str]| {
            let lines = fields.iter().enumerate();
            let lines =
                lines.map(|(at, name)| format!("\tfield:u64 {name};\toffset:{};\tsize:8;\n", 8 + 8 * at));
            Format::parse(&format!("ID: 10\n{HEAD}{}", lines.collect::<String>())).unwrap()
        };
        let exit = ["exit_reason", "guest_rip", "isa", "info1", "info2"];
        let others: [(&str, &[&str]); 9] = [
            ("kvm_pio", &["port", "size", "rw"]),
            ("kvm_mmio", &["gpa", "len", "type"]),
            ("kvm_fast_mmio", &["gpa"]),
            ("kvm_msr", &["ecx", "write"]),
            ("kvm_cpuid", &["function"]),
            ("kvm_hypercall", &["nr"]),
            ("kvm_inj_virq", &["irq"]),
            ("kvm_apic_accept_irq", &["apicid"]),
            ("kvm_apicv_accept_irq", &["apicid"]),
        ];
        let of = |exit: &[&str], name: &str, fields: &[&str]| {
            Decoder::of(&format(exit), |wanted| (wanted == name).then(|| format(fields)))
        };
        fn without<'f>(fields: &[&'f str], at: usize) -> Vec<&'f str> {
            let mut fields = fields.to_vec();
            fields[at] = "other";
            fields
        }
        let names = |error: ExitsError, event: &str, field: &str| {
            let text = error.to_string();
            assert!(text.contains(&format!("kvm:{event}")) && text.contains(field), "{text}");
        };
        for at in 0..exit.len() {
            names(of(&without(&exit, at), "", &[]).err().unwrap(), "kvm_exit", exit[at]);
        }
        for (event, fields) in others {
            assert!(of(&exit, event, fields).is_ok(), "{event}");
            for at in 0..fields.len() {
                let field = if event == "kvm_inj_virq" { "vector" } else { fields[at] };
                names(of(&exit, event, &without(fields, at)).err().unwrap(), event, field);
            }
        }
        // One that is there but is no number that can be read: of sixteen bytes.
        let odd = format!("ID: 10\n{HEAD}\tfield:u64 gpa;\toffset:8;\tsize:16;\n");
        let odd = Decoder::of(&format(&exit), |name| {
            (name == "kvm_fast_mmio").then(|| Format::parse(&odd).unwrap())
        });
        names(odd.err().unwrap(), "kvm_fast_mmio", "gpa");
        let headless = Format::parse("ID: 10\n\tfield:u64 exit_reason;\toffset:8;\tsize:8;\n").unwrap();
        assert!(matches!(Decoder::of(&headless, |_| None), Err(ExitsError::NoField { .. })));
    }

    fn exit(isa: u32, reason: u32, info1: u64) -> Vec<u8> {
        let mut record = vec![0; 52];
        record[0] = 10;
        record[8..12].copy_from_slice(&reason.to_le_bytes());
        record[16..24].copy_from_slice(&0x1234_u64.to_le_bytes());
        record[24..28].copy_from_slice(&isa.to_le_bytes());
        record[32..40].copy_from_slice(&info1.to_le_bytes());
        record[40] = 3;
        record
    }

    #[test]
    fn ports_of_both_makers() {
        let detail = |record: &[u8]| match decoder().decode(record) {
            Some(Event::Exit { detail, rip: 0x1234, vcpu: Some(3), .. }) => detail,
            other => panic!("{other:?}"),
        };
        let out = Detail::Port { port: 0x3f8, width: 1, write: true, queue: None };
        assert_eq!(detail(&exit(1, 30, 0x03f8_0000)), out);
        assert_eq!(detail(&exit(2, 0x7b, 0x03f8_0010)), out);
        let input = Detail::Port { port: 0xcfc, width: 4, write: false, queue: None };
        assert_eq!(detail(&exit(1, 30, 0x0cfc_000b)), input);
        assert_eq!(detail(&exit(2, 0x7b, 0x0cfc_0041)), input);
    }

    #[test]
    fn apics_and_pages_of_devices() {
        let memory = |address: u64, write: bool| Detail::Memory { address, width: 0, write };
        let of = |isa: u64, code: u64, info1: u64, info2: u64| {
            from_exit(Reason::from_kvm(isa, code), info1, info2)
        };
        assert_eq!(of(1, 44, 0x10b0, 0), memory(0xfee0_00b0, true));
        assert_eq!(of(1, 44, 0x0390, 0), memory(0xfee0_0390, false));
        assert_eq!(of(1, 45, 0x31, 0), memory(0xfee0_00b0, true));
        assert_eq!(of(1, 56, 0x300, 0), memory(0xfee0_0300, true));
        assert_eq!(of(2, 0x401, 0, 0), memory(0xfee0_0300, true));
        assert_eq!(of(2, 0x402, (1 << 32) | 0x320, 0), memory(0xfee0_0320, true));
        assert_eq!(of(2, 0x400, 0xe, 0xfebf_0010), memory(0xfebf_0010, true));
        let fault = Detail::Fault;
        assert_eq!(of(2, 0x400, 0x6, 0x1000), fault(FaultCause::Missing));
        assert_eq!(of(2, 0x400, 0x7, 0x1000), fault(FaultCause::WriteProtected));
        assert_eq!(of(2, 0x400, 0x15, 0x1000), fault(FaultCause::Protected));
        assert_eq!(of(1, 48, 0x182, 0), fault(FaultCause::Missing));
        assert_eq!(of(1, 48, 0x1aa, 0), fault(FaultCause::WriteProtected));
        assert_eq!(of(1, 48, 0x19c, 0), fault(FaultCause::Protected));
    }

    #[test]
    fn what_is_written_to_some_ports_is_a_queue() {
        let exit = Format::parse(&format!(
            "ID: 10\n{HEAD}\tfield:u64 exit_reason;\toffset:8;\tsize:8;\n\tfield:u64 guest_rip;\toffset:8;\tsize:8;\n\
             \tfield:u64 isa;\toffset:8;\tsize:8;\n\tfield:u64 info1;\toffset:8;\tsize:8;\n\tfield:u64 info2;\toffset:8;\tsize:8;\n"
        ));
        let field = |name: &str, at: u32| format!("\tfield:unsigned {name};\toffset:{at};\tsize:4;\n");
        let fields = ["rw", "port", "size"].iter().zip([8, 12, 16]).map(|(name, at)| field(name, at));
        let text = format!("ID: 12\n{HEAD}{}", fields.collect::<String>());
        let queue = |text: &str, write: u8, port: u16| {
            let pio = |name: &str| (name == "kvm_pio").then(|| Format::parse(text).unwrap());
            let mut decoder = Decoder::of(exit.as_ref().unwrap(), pio).unwrap();
            decoder.queues = QueuePorts::new([0xc050]);
            let mut record = vec![0; 32];
            (record[0], record[8], record[16], record[24]) = (12, write, 2, 3);
            record[12..14].copy_from_slice(&port.to_le_bytes());
            match decoder.decode(&record) {
                Some(Event::Detail(Detail::Port { queue, .. })) => queue,
                other => panic!("{other:?}"),
            }
        };
        let told = text.clone() + &field("val", 24);
        assert_eq!(
            (queue(&told, 1, 0xc050), queue(&told, 0, 0xc050), queue(&told, 1, 0xc051)),
            (Some(3), None, None)
        );
        // A kernel that does not tell the value.
        assert_eq!(queue(&text, 1, 0xc050), None);
    }

    #[test]
    fn tracepoints_that_are_missing_are_named() {
        let decoder = decoder();
        assert_eq!(decoder.tracepoints(), [10, 11]);
        assert_eq!(decoder.missing.len(), WANTED.len() - 2);
        let record = [11, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0x80, 0, 0, 0xc0];
        let written = Event::Detail(Detail::Msr { index: 0xc000_0080, write: true });
        assert_eq!(decoder.decode(&record), Some(written));
        assert_eq!(decoder.decode(&record[..12]), None);
        assert_eq!(decoder.decode(&[9; 64]), None);
    }

    proptest! {
        #[test]
        fn any_record_is_survived(mut record in proptest::collection::vec(any::<u8>(), 2..80), kind in 9u8..13) {
            (record[0], record[1]) = (kind, 0);
            let _ = decoder().decode(&record);
        }
    }
}
