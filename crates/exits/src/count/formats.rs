//! Where the kernel's records have the fields that our programs read, as type information (BTF) for their loader.
//!
//! The kernel's own is in several files where KVM is a module, and missing where the kernel was built without it. Tracefs describes each tracepoint on every
//! kernel, so the types are made from its formats.

use aya::Endianness;
use aya_obj::btf::{Btf, BtfError};

use crate::format::Format;

/// Magic number and version of BTF (Linux, Documentation/bpf/btf.rst, 2).
const MAGIC: u16 = 0xeb9f;
const VERSION: u8 = 1;
const HEADER: u32 = 24;
const INT: u32 = 1;
const STRUCT: u32 = 4;
/// Sizes that fields have; their types are the first four.
const SIZES: [u32; 4] = [1, 2, 4, 8];

/// Types as BTF has them: each begins with its name's offset, its kind and how many members follow, and its size.
#[derive(Default)]
struct Types {
    words: Vec<u32>,
    /// Each name ends with a zero byte; the name at offset 0 is empty.
    names: Vec<u8>,
}

impl Types {
    fn name(&mut self, name: &str) -> u32 {
        let at = self.names.len() as u32;
        self.names.extend(name.bytes().filter(|byte| *byte != 0));
        self.names.push(0);
        at
    }

    fn begin(&mut self, name: &str, kind: u32, members: u32, size: u32) {
        let name = self.name(name);
        self.words.extend([name, kind << 24 | members, size]);
    }

    fn bytes(&self) -> Vec<u8> {
        let types = 4 * self.words.len() as u32;
        let mut bytes = Vec::new();
        bytes.extend(MAGIC.to_ne_bytes());
        bytes.extend([VERSION, 0]);
        for word in [HEADER, 0, types, types, self.names.len() as u32] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(self.words.iter().flat_map(|word| word.to_ne_bytes()));
        bytes.extend(&self.names);
        bytes
    }
}

/// The types of the records of these tracepoints: `trace_event_raw_NAME`, as the kernel calls them.
pub(super) fn types<'f>(formats: impl IntoIterator<Item = (&'f str, &'f Format)>) -> Result<Btf, BtfError> {
    let mut types = Types { names: vec![0], ..Types::default() };
    for size in SIZES {
        types.begin(&format!("u{}", 8 * size), INT, 0, size);
        // How many bits it has.
        types.words.push(8 * size);
    }
    for (name, format) in formats {
        let mut members = Vec::new();
        let mut end = 0;
        for (field, offset, size) in format.numbers() {
            // The kernel allows no others to be read.
            let Some(kind) = SIZES.iter().position(|own| *own == size).filter(|_| offset % size == 0) else {
                continue;
            };
            end = end.max(offset + size);
            let field = types.name(field);
            members.extend([field, kind as u32 + 1, 8 * offset]);
        }
        types.begin(&format!("trace_event_raw_{name}"), STRUCT, members.len() as u32 / 3, end);
        types.words.extend(members);
    }
    Btf::parse(&types.bytes(), Endianness::default())
}

#[cfg(test)]
mod tests {
    use aya_obj::btf::BtfKind;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_format_becomes_a_type() {
        let text = "ID: 7\n\tfield:unsigned int port;\toffset:12;\tsize:4;\tsigned:0;\n\tfield:char odd;\toffset:17;\tsize:3;\n";
        let format = Format::parse(text).unwrap();
        let types = types([("kvm_pio", &format)]).unwrap();
        assert!(types.id_by_type_name_kind("trace_event_raw_kvm_pio", BtfKind::Struct).is_ok());
        assert!(types.id_by_type_name_kind("trace_event_raw_kvm_msr", BtfKind::Struct).is_err());
    }

    proptest! {
        #[test]
        fn any_format_is_survived(name in "[ -~]{0,20}", fields in proptest::collection::vec(("[ -~]{1,12}", 0u32..70000, 0u32..12), 0..20)) {
            let lines = fields.iter().map(|(field, offset, size)| format!("\tfield:u64 {field};\toffset:{offset};\tsize:{size};\n"));
            let text = format!("ID: 1\n{}", lines.collect::<String>());
            if let Some(format) = Format::parse(&text) {
                prop_assert!(types([(name.as_str(), &format)]).is_ok());
            }
        }
    }
}
