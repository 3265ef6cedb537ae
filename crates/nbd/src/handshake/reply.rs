//! Option replies as a server writes them.

use super::{BlockSizes, ExportInfo};
use crate::spec::*;

/// Bytes of the header of an option reply.
pub(super) const REPLY_HEADER: usize = 20;

/// Appends an option reply.
pub(super) fn write(output: &mut Vec<u8>, option: u32, kind: u32, parts: &[&[u8]]) {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    output.extend(NBD_REP_MAGIC.to_be_bytes());
    output.extend(option.to_be_bytes());
    output.extend(kind.to_be_bytes());
    output.extend((length as u32).to_be_bytes());
    parts.iter().for_each(|part| output.extend(*part));
}

/// As much of a string as one may have.
pub(super) fn fitting(string: &str) -> &[u8] {
    &string.as_bytes()[..string.floor_char_boundary(MAX_STRING)]
}

/// Appends what `NBD_OPT_INFO` or `NBD_OPT_GO` is told of an export, without the final reply.
pub(super) fn write_info(output: &mut Vec<u8>, option: u32, info: &ExportInfo, flags: u16, asked: &[u16]) {
    let mut put = |kind: u16, parts: [&[u8]; 3]| {
        let kind = kind.to_be_bytes();
        write(output, option, NBD_REP_INFO, &[&kind, parts[0], parts[1], parts[2]]);
    };
    put(NBD_INFO_EXPORT, [&info.bytes.to_be_bytes(), &flags.to_be_bytes(), &[]]);
    if asked.contains(&NBD_INFO_NAME) {
        put(NBD_INFO_NAME, [fitting(&info.name), &[], &[]]);
    }
    if asked.contains(&NBD_INFO_DESCRIPTION) && !info.description.is_empty() {
        put(NBD_INFO_DESCRIPTION, [fitting(&info.description), &[], &[]]);
    }
    // Also to a client that has not asked: it may keep to them all the same.
    if let Some(BlockSizes { minimum, preferred, maximum }) = info.blocks {
        let parts = [minimum, preferred, maximum].map(u32::to_be_bytes);
        put(NBD_INFO_BLOCK_SIZE, [&parts[0], &parts[1], &parts[2]]);
    }
}
