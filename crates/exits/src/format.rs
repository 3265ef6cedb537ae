//! The layout of a tracepoint's records, as the running kernel's `format` file states it. No offset is written down here:
//! kernels differ.

use std::path::Path;

use ioplane_plain::file_text;

use crate::error::{ExitsError, Result};

/// A `format` file is some kilobytes long.
const LIMIT: u64 = 1 << 18;

/// Where a number lies in a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    offset: usize,
    size: usize,
}

impl Field {
    /// The field's value, not sign-extended; nothing if the record is too short.
    pub fn of(&self, record: &[u8]) -> Option<u64> {
        let from = record.get(self.offset..)?;
        // The sizes that fields have: one load each.
        Some(match self.size {
            8 => u64::from_le_bytes(*from.first_chunk()?),
            4 => u32::from_le_bytes(*from.first_chunk()?).into(),
            2 => u16::from_le_bytes(*from.first_chunk()?).into(),
            size => from.get(..size)?.iter().rev().fold(0, |value, byte| (value << 8) | u64::from(*byte)),
        })
    }
}

/// A tracepoint's number and its fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Format {
    /// What `perf_event_open` and `common_type` call it.
    pub id: u64,
    fields: Vec<(String, Field)>,
}

impl Format {
    /// Reads a `format` file.
    pub fn read(path: &Path) -> Result<Format> {
        let text = file_text(path, LIMIT)?;
        Format::parse(&text).ok_or_else(|| ExitsError::malformed(path, "is not a tracepoint's format"))
    }

    /// Parses one; nothing if it has no number or no fields.
    pub fn parse(text: &str) -> Option<Format> {
        let mut id = None;
        let mut fields = Vec::new();
        for line in text.lines() {
            if let Some(number) = line.strip_prefix("ID:") {
                id = number.trim().parse().ok();
            } else if let Some(field) = line.trim_start().strip_prefix("field:") {
                fields.extend(parse_field(field));
            }
        }
        if fields.is_empty() {
            return None;
        }
        Some(Format { id: id?, fields })
    }

    /// Its fields that are numbers: name, offset and size in bytes.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = (&str, u32, u32)> {
        // Both are below 65,536.
        self.fields.iter().map(|(name, field)| (name.as_str(), field.offset as u32, field.size as u32))
    }

    /// A field that older or newer kernels may not have.
    pub fn field(&self, name: &str) -> Option<Field> {
        self.fields.iter().find(|(own, _)| own == name).map(|(_, field)| *field)
    }
}

/// `unsigned int exit_reason; offset:8; size:4; signed:0;`: numbers of up to eight bytes only.
fn parse_field(line: &str) -> Option<(String, Field)> {
    let mut parts = line.split(';').map(str::trim);
    let name = parts.next()?.rsplit([' ', '*']).next()?;
    let (mut offset, mut size) = (None, None);
    for part in parts {
        match part.split_once(':') {
            Some(("offset", number)) => offset = number.parse().ok(),
            Some(("size", number)) => size = number.parse().ok(),
            _ => {}
        }
    }
    let (offset, size): (usize, usize) = (offset?, size?);
    let sound = (1..=8).contains(&size) && offset < 1 << 16 && !name.contains('[');
    sound.then(|| (name.to_owned(), Field { offset, size }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Of Linux 6.12, shortened.
    const EXIT: &str = "name: kvm_exit\nID: 1609\nformat:\n\
        \tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\
        \tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n\n\
        \tfield:unsigned int exit_reason;\toffset:8;\tsize:4;\tsigned:0;\n\
        \tfield:unsigned long guest_rip;\toffset:16;\tsize:8;\tsigned:0;\n\
        \tfield:char name[16];\toffset:24;\tsize:16;\tsigned:0;\n\n\
        print fmt: \"vcpu %u\", REC->vcpu_id\n";

    #[test]
    fn fields_are_found_where_the_kernel_says() {
        let format = Format::parse(EXIT).unwrap();
        assert_eq!(format.id, 1609);
        let mut record = [0u8; 24];
        record[8] = 0x7b;
        record[16..24].copy_from_slice(&0xffff_ffff_8100_0000_u64.to_le_bytes());
        assert_eq!(format.field("exit_reason").unwrap().of(&record), Some(0x7b));
        assert_eq!(format.field("guest_rip").unwrap().of(&record), Some(0xffff_ffff_8100_0000));
        assert_eq!(format.field("guest_rip").unwrap().of(&record[..20]), None);
        assert_eq!(format.field("name[16]"), None);
        assert_eq!(format.field("vcpu_id"), None);
    }

    #[test]
    fn what_is_no_format_is_refused() {
        assert_eq!(Format::parse(""), None);
        assert_eq!(Format::parse("ID: x\n\tfield:int a;\toffset:0;\tsize:4;"), None);
        assert_eq!(Format::parse("ID: 3\n"), None);
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "\\PC{0,200}", record in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Some(format) = Format::parse(&format!("ID: 1\n\tfield:{text}\n{text}")) {
                for (_, field) in &format.fields {
                    let _ = field.of(&record);
                }
            }
        }
    }
}
