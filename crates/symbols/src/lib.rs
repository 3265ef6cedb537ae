//! The guest's functions: from its `/proc/kallsyms`, a `System.map`, or an unstripped `vmlinux`. And functions of programs of this host, by
//! where they are in their file: [`ProgramSymbols`].
//!
//! Linux moves itself by a random multiple of 2 MiB when it boots (KASLR). A file that was written before that is moved after
//! it: see [`Symbols::fit`].
//!
//! Files are hostile: what is kept of one is bounded, and what cannot be understood is left out and said.
//!
//! Must not know: why a VM exits, KVM, QEMU, the daemon.
#![forbid(unsafe_code)]

mod elf;
mod fit;
mod function;
mod map;
mod program;

use std::path::Path;

use ioplane_plain::FileError;

pub use fit::{Confidence, Fit, Instruction};
pub use function::GuestFunction;
pub use program::{ProgramFunction, ProgramSymbols};

use elf::Text;

/// Short for results of this crate.
pub(crate) type Result<T> = std::result::Result<T, FileError>;

/// So many symbols are read: ten times what Linux with all modules has.
const SYMBOLS: usize = 4_000_000;
/// And so many bytes of names.
const NAMES: usize = 256 << 20;
/// Names longer than this are cut (Linux has 512 at most).
const NAME: usize = 512;
/// A function that is the last before a gap is not longer than this.
const REACH: u64 = 1 << 20;

/// A function's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Symbol {
    address: u64,
    /// Zero where it is not known: then it ends where the next one begins.
    size: u64,
    /// Into [`Symbols::names`].
    name: (u32, u32),
    /// Belongs to a module, which KASLR moves by itself.
    module: bool,
}

/// What the file was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// `/proc/kallsyms` of a running kernel: addresses are where they are.
    Kallsyms,
    /// `System.map`: as linked.
    Map,
    /// An ELF file: as linked.
    Elf,
}

/// The functions of one kernel.
#[derive(Debug)]
pub struct Symbols {
    symbols: Vec<Symbol>,
    names: String,
    text: Option<Text>,
    slide: u64,
    /// What the file was.
    pub origin: Origin,
    /// What the reader must know: cut short, odd lines.
    pub notes: Vec<String>,
}

impl Symbols {
    /// Reads a file, whatever it is.
    pub fn read(path: &Path) -> Result<Symbols> {
        use std::io::Read;
        let mut head = Vec::new();
        let file = std::fs::File::open(path).map_err(FileError::of(path))?;
        file.take(4).read_to_end(&mut head).map_err(FileError::of(path))?;
        (if head == *b"\x7fELF" { elf::read(path)? } else { map::read(path)? }).sorted(path)
    }

    /// The same of bytes; `path` is for messages.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Symbols> {
        let elf = bytes.starts_with(b"\x7fELF");
        let mut rest = bytes;
        let symbols =
            if elf { elf::parse(std::io::Cursor::new(bytes), path)? } else { map::parse(&mut rest, path)? };
        symbols.sorted(path)
    }

    fn sorted(self, path: &Path) -> Result<Symbols> {
        let mut symbols = self;
        if symbols.symbols.is_empty() {
            let what =
                "names no function; give the guest's /proc/kallsyms, read as root, or an unstripped vmlinux";
            return Err(FileError::malformed(path, what));
        }
        // Aliases: the first name of an address stays.
        symbols.symbols.sort_by_key(|symbol| symbol.address);
        symbols.symbols.dedup_by_key(|symbol| symbol.address);
        Ok(symbols)
    }

    fn empty(origin: Origin) -> Symbols {
        Symbols { symbols: Vec::new(), names: String::new(), text: None, slide: 0, origin, notes: Vec::new() }
    }

    /// Adds a function; false when there are too many.
    fn add(&mut self, address: u64, size: u64, name: &str, module: bool) -> bool {
        if self.symbols.len() >= SYMBOLS || self.names.len() > NAMES - NAME {
            return false;
        }
        let end = name.floor_char_boundary(NAME);
        let start = self.names.len() as u32;
        // What a guest wrote does not reach a terminal as it is.
        self.names.extend(name[..end].chars().map(|c| if c.is_control() { '?' } else { c }));
        let length = self.names.len() as u32 - start;
        self.symbols.push(Symbol { address, size, name: (start, length), module });
        true
    }

    /// How many functions there are.
    pub fn len(&self) -> usize {
        self.symbols.len()
    }

    /// Whether there is none; never after [`Symbols::read`].
    pub fn is_empty(&self) -> bool {
        self.symbols.is_empty()
    }

    /// How far the guest's kernel has moved from where the file has it.
    pub fn slide(&self) -> u64 {
        self.slide
    }

    /// The function at an address of the guest, and how far into it that is.
    pub fn name(&self, address: u64) -> Option<(&str, u64)> {
        let at = address.checked_sub(self.slide)?;
        let symbol = self.find(at)?;
        if symbol.module && self.slide != 0 {
            return None;
        }
        Some((self.name_of(symbol)?, at - symbol.address))
    }

    /// The same, to keep.
    pub fn function(&self, address: u64) -> Option<GuestFunction> {
        let (name, offset) = self.name(address)?;
        Some(GuestFunction { name: name.to_owned(), offset })
    }

    /// The function that an address as linked is in, by its size: one whose size is not known has none.
    fn covering(&self, at: u64) -> Option<&str> {
        let next = self.symbols.partition_point(|symbol| symbol.address <= at);
        let symbol = self.symbols.get(next.checked_sub(1)?)?;
        (at - symbol.address < symbol.size).then(|| self.name_of(symbol)).flatten()
    }

    fn name_of(&self, symbol: &Symbol) -> Option<&str> {
        let (start, length) = (symbol.name.0 as usize, symbol.name.1 as usize);
        self.names.get(start..start + length)
    }

    fn find(&self, at: u64) -> Option<&Symbol> {
        let next = self.symbols.partition_point(|symbol| symbol.address <= at);
        let symbol = self.symbols.get(next.checked_sub(1)?)?;
        let size = match (symbol.size, self.symbols.get(next)) {
            (0, Some(next)) => (next.address - symbol.address).min(REACH),
            (0, None) => REACH,
            (size, _) => size,
        };
        (at - symbol.address < size).then_some(symbol)
    }
}

#[cfg(test)]
mod tests;
