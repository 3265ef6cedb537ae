//! A kernel module for Debian's kernel that becomes a hot site: a function whose name and place nobody can know before is put in place
//! of the one that reads the PM timer, so that whoever asks the guest for the time causes an exit there, as long as the PM
//! timer is the clock source. No compiler and no headers: what a module must have in common with its kernel is taken from one
//! that came with it.
//!
//! ```text
//!   a module of the kernel's package --struct module's size and places, vermagic, the checksum of module_layout--> this one
//!   .text       random bytes in cells, a function in each; in one of them the read of port 0x608
//!   .init.text  clocksource_acpi_pm.read = that one
//! ```

use anyhow::{Context, Result, ensure};

use crate::planted::Random;

const TEXT_SIZE: usize = 256 << 10;
const CELL: usize = 1024;
/// Into the cell of the hot function.
const EXIT: u64 = 4 + 5;
/// mov edx, 0x608; in eax, dx; and eax, 0xffffff; ret, after the landing pad that indirect calls may want.
const HOT: [u8; 16] = [0xf3, 0x0f, 0x1e, 0xfa, 0xba, 0x08, 0x06, 0, 0, 0xed, 0x25, 0xff, 0xff, 0xff, 0, 0xc3];
/// `MODULE_NAME_LEN`.
const NAME: usize = 56;
/// One entry of `__versions`: a checksum in eight bytes, then the symbol's name.
const VERSION: usize = 64;

#[derive(Clone, Debug)]
pub struct HotModule {
    /// For `insmod`.
    pub ko: Vec<u8>,
    /// What the kernel calls it.
    pub name: String,
    pub hot: String,
    /// Its instruction that exits, from the function's beginning.
    pub offset: u64,
}

impl HotModule {
    /// Another one each time, for the kernel that `template` is a module of and whose `clocksource_acpi_pm` lies at `clock`.
    pub fn new(template: &[u8], clock: u64) -> Result<HotModule> {
        HotModule::from(&mut Random::new(), template, clock)
    }

    fn from(random: &mut Random, template: &[u8], clock: u64) -> Result<HotModule> {
        let template = Elf(template);
        let name = format!("planted_{}", random.word());
        let mut module = template.section(".gnu.linkonce.this_module")?.to_vec();
        let old = template.modinfo("name=")?;
        let at = find(&module, old.as_bytes()).context("struct module has its name")?;
        ensure!(name.len() < NAME && at + NAME <= module.len(), "struct module is too short");
        module[at..at + NAME].fill(0);
        module[at..at + name.len()].copy_from_slice(name.as_bytes());
        let init = template.place_of("init_module")?;
        let magic = template.modinfo("vermagic=")?;
        let info = format!("license=GPL\0name={name}\0vermagic={magic}\0");
        let versions = template.section("__versions")?;
        let is_layout = |entry: &&[u8]| entry[8..].starts_with(b"module_layout\0");
        let layout = versions.chunks_exact(VERSION).find(is_layout).context("module_layout's checksum")?;

        let mut text: Vec<u8> = (0..TEXT_SIZE).map(|_| random.next() as u8).collect();
        let functions: Vec<(String, usize)> = (0..TEXT_SIZE / CELL)
            .map(|cell| {
                let name = format!("{}_{}_{cell}", random.word(), random.word());
                (name, cell * CELL + 16 * random.below(32) as usize)
            })
            .collect();
        let (hot, place) = functions[random.below(functions.len() as u64) as usize].clone();
        text[place..place + HOT.len()].copy_from_slice(&HOT);
        let mut begin = vec![0xf3, 0x0f, 0x1e, 0xfa, 0x48, 0xb8]; // mov rax, hot: its address is put in when it is loaded
        let load = begin.len() as u64;
        begin.extend([0; 8]);
        begin.extend([0x48, 0xb9]); // mov rcx, clock
        begin.extend(clock.to_le_bytes());
        begin.extend([0x48, 0x89, 0x01, 0x31, 0xc0, 0xc3]); // mov [rcx], rax; xor eax, eax; ret

        let mut file = Writer::default();
        file.section(".text", 1, 6, &text, 16);
        file.section(".init.text", 1, 6, &begin, 16);
        file.section(".modinfo", 1, 2, info.as_bytes(), 1);
        file.section("__versions", 1, 2, layout, 32);
        file.section(".gnu.linkonce.this_module", 1, 3, &module, 64);
        let (text, start) = (1, 2);
        for (name, offset) in &functions {
            file.symbol(name, 0x02, text, *offset as u64);
        }
        let locals = file.symbols.len();
        file.symbol("init_module", 0x12, start, 0);
        let symbol = |name: &str| file.names.iter().position(|own| own == name).unwrap_or(0) as u64 + 1;
        let moved = [(load, symbol(&hot)), (init, symbol("init_module"))];
        Ok(HotModule { ko: file.finish(locals, moved), name, hot, offset: EXIT })
    }
}

fn find(bytes: &[u8], part: &[u8]) -> Option<usize> {
    bytes.windows(part.len()).position(|window| window == part)
}

/// A relocatable file of 64 bits, little end first; what is damaged in it is an error.
struct Elf<'a>(&'a [u8]);

impl<'a> Elf<'a> {
    fn number(&self, at: usize, bytes: usize) -> Result<usize> {
        let part = self.0.get(at..at + bytes).context("the module is cut off")?;
        Ok(part.iter().rev().fold(0, |number, byte| (number << 8) | usize::from(*byte)))
    }

    /// The header of the section with that number.
    fn header(&self, index: usize) -> Result<usize> {
        Ok(self.number(40, 8)? + index * 64)
    }

    fn content(&self, index: usize) -> Result<&'a [u8]> {
        let header = self.header(index)?;
        let (at, size) = (self.number(header + 24, 8)?, self.number(header + 32, 8)?);
        self.0.get(at..at + size).context("a section is cut off")
    }

    fn index(&self, name: &str) -> Result<usize> {
        let names = self.content(self.number(62, 2)?)?;
        for index in 0..self.number(60, 2)? {
            let at = self.number(self.header(index)?, 4)?;
            let own = names.get(at..).and_then(|rest| rest.split(|byte| *byte == 0).next());
            if own == Some(name.as_bytes()) {
                return Ok(index);
            }
        }
        anyhow::bail!("the module has no section {name}")
    }

    fn section(&self, name: &str) -> Result<&'a [u8]> {
        self.content(self.index(name)?)
    }

    fn modinfo(&self, key: &str) -> Result<&'a str> {
        let mut words = self.section(".modinfo")?.split(|byte| *byte == 0);
        let found = words.find_map(|word| word.strip_prefix(key.as_bytes()));
        Ok(std::str::from_utf8(found.with_context(|| format!("the module says no {key}"))?)?)
    }

    /// Where `struct module` has the address of that symbol.
    fn place_of(&self, symbol: &str) -> Result<u64> {
        let (symbols, names) = (self.section(".symtab")?, self.section(".strtab")?);
        for entry in self.section(".rela.gnu.linkonce.this_module")?.chunks_exact(24) {
            let offset = Elf(entry).number(0, 8)?;
            let number = Elf(entry).number(12, 4)?;
            let name = Elf(symbols).number(number * 24, 4)?;
            if names.get(name..).is_some_and(|rest| rest.starts_with(format!("{symbol}\0").as_bytes())) {
                return Ok(offset as u64);
            }
        }
        anyhow::bail!("struct module has no {symbol}")
    }
}

/// Puts such a file together.
#[derive(Default)]
struct Writer {
    body: Vec<u8>,
    /// Name, then type, flags, offset, size, link, info, alignment, entry size.
    sections: Vec<(String, [u64; 8])>,
    symbols: Vec<[u64; 4]>,
    names: Vec<String>,
}

impl Writer {
    fn section(&mut self, name: &str, kind: u64, flags: u64, bytes: &[u8], align: u64) {
        self.put(name, [kind, flags, 0, 0, 0, 0, align, 0], bytes);
    }

    fn put(&mut self, name: &str, mut header: [u64; 8], bytes: &[u8]) {
        self.body.resize(self.body.len().next_multiple_of(64), 0);
        (header[2], header[3]) = (64 + self.body.len() as u64, bytes.len() as u64);
        self.body.extend_from_slice(bytes);
        self.sections.push((name.into(), header));
    }

    /// Information byte, section, value.
    fn symbol(&mut self, name: &str, info: u64, section: u64, value: u64) {
        self.names.push(name.into());
        self.symbols.push([info, section, value, if info == 0x12 { 0 } else { HOT.len() as u64 }]);
    }

    /// `moved`: where .init.text and struct module want the address of which symbol.
    fn finish(mut self, locals: usize, moved: [(u64, u64); 2]) -> Vec<u8> {
        let own = self.sections.len() as u64;
        let (rela, symtab) = (own + 1, own + 3);
        for ((name, target), (offset, symbol)) in
            [(".rela.init.text", 2), (".rela.gnu.linkonce.this_module", 5)].into_iter().zip(moved)
        {
            // R_X86_64_64.
            let entry = [offset, (symbol << 32) | 1, 0].map(u64::to_le_bytes).concat();
            self.put(name, [4, 0x40, 0, 0, symtab, target, 8, 24], &entry);
        }
        debug_assert_eq!(rela + 2, symtab);
        let (mut strings, mut table) = (vec![0u8], vec![0u8; 24]);
        for (name, [info, section, value, size]) in self.names.iter().zip(&self.symbols) {
            table.extend((strings.len() as u32).to_le_bytes());
            table.extend([*info as u8, 0]);
            table.extend((*section as u16).to_le_bytes());
            table.extend([*value, *size].map(u64::to_le_bytes).concat());
            strings.extend(name.as_bytes());
            strings.push(0);
        }
        self.put(".symtab", [2, 0, 0, 0, symtab + 1, locals as u64 + 1, 8, 24], &table);
        self.put(".strtab", [3, 0, 0, 0, 0, 0, 1, 0], &strings);
        let mut names = vec![0u8];
        let mut heads = vec![0u8; 64];
        self.sections.push((".shstrtab".into(), [3, 0, 0, 0, 0, 0, 1, 0]));
        let places: Vec<usize> = self
            .sections
            .iter()
            .map(|(name, _)| {
                let at = names.len();
                names.extend(name.as_bytes());
                names.push(0);
                at
            })
            .collect();
        let last = self.sections.pop();
        if let Some((name, header)) = last {
            self.put(&name, header, &names);
        }
        for ((_, [kind, flags, offset, size, link, info, align, entry]), name) in
            self.sections.iter().zip(places)
        {
            heads.extend((name as u32).to_le_bytes());
            heads.extend((*kind as u32).to_le_bytes());
            heads.extend([*flags, 0, *offset, *size].map(u64::to_le_bytes).concat());
            heads.extend([*link as u32, *info as u32].map(u32::to_le_bytes).concat());
            heads.extend([*align, *entry].map(u64::to_le_bytes).concat());
        }
        self.body.resize(self.body.len().next_multiple_of(64), 0);
        let table = 64 + self.body.len() as u64;
        let mut file: Vec<u8> = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
        file.extend([1u16, 62].map(u16::to_le_bytes).concat());
        file.extend(1u32.to_le_bytes());
        file.extend([0, 0, table].map(u64::to_le_bytes).concat());
        file.extend(0u32.to_le_bytes());
        let count = self.sections.len() as u16 + 1;
        file.extend([64u16, 0, 0, 64, count, count - 1].map(u16::to_le_bytes).concat());
        file.extend(&self.body);
        file.extend(heads);
        file
    }
}
