//! Options as a server reads them, and as a client writes them.

use crate::spec::{IHAVEOPT, MAX_STRING};

/// Bytes of the header of an option.
pub(super) const OPTION_HEADER: usize = 16;

/// The data of an option do not have the form that they must have.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// Takes the data of an option apart, front to back.
pub(super) struct Parser<'a>(pub &'a [u8]);

impl<'a> Parser<'a> {
    fn bytes(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (bytes, rest) = self.0.split_at_checked(len).ok_or(Malformed)?;
        self.0 = rest;
        Ok(bytes)
    }

    pub fn u16(&mut self) -> Result<u16, Malformed> {
        Ok(u16::from_be_bytes(self.bytes(2)?.try_into().map_err(|_| Malformed)?))
    }

    pub fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_be_bytes(self.bytes(4)?.try_into().map_err(|_| Malformed)?))
    }

    pub fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_be_bytes(self.bytes(8)?.try_into().map_err(|_| Malformed)?))
    }

    /// A string of `len` bytes.
    pub fn string(&mut self, len: usize) -> Result<String, Malformed> {
        string(self.bytes(len)?)
    }

    /// A string after its length in 32 bits.
    pub fn counted_string(&mut self) -> Result<String, Malformed> {
        let len = self.u32()?;
        self.string(len as usize)
    }

    /// Nothing more may be there.
    pub fn end(self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed) }
    }
}

/// A string as the specification has it: UTF-8, not too long, without a NUL.
pub(super) fn string(bytes: &[u8]) -> Result<String, Malformed> {
    if bytes.len() > MAX_STRING || bytes.contains(&0) {
        return Err(Malformed);
    }
    std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| Malformed)
}

/// The data of `NBD_OPT_INFO` and `NBD_OPT_GO`: the export, and what is asked.
pub(super) fn info_request(data: &[u8]) -> Result<(String, Vec<u16>), Malformed> {
    let mut parser = Parser(data);
    let name = parser.counted_string()?;
    let count = parser.u16()?;
    let asked = (0..count).map(|_| parser.u16()).collect::<Result<_, _>>()?;
    parser.end()?;
    Ok((name, asked))
}

/// The data of `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`: the export, and the queries.
pub(super) fn context_request(data: &[u8]) -> Result<(String, Vec<String>), Malformed> {
    let mut parser = Parser(data);
    let name = parser.counted_string()?;
    let count = parser.u32()?;
    let mut queries = Vec::new();
    for _ in 0..count {
        queries.push(parser.counted_string()?);
    }
    parser.end()?;
    Ok((name, queries))
}

/// Appends an option.
pub(super) fn write(output: &mut Vec<u8>, option: u32, data: &[u8]) {
    output.extend(IHAVEOPT.to_be_bytes());
    output.extend(option.to_be_bytes());
    output.extend((data.len() as u32).to_be_bytes());
    output.extend(data);
}

/// Appends a string and, before it, its length in 32 bits.
pub(super) fn put_string(data: &mut Vec<u8>, string: &str) {
    data.extend((string.len() as u32).to_be_bytes());
    data.extend(string.as_bytes());
}
