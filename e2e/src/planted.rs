//! A kernel for QEMU's `-kernel` that does nothing but cause exits from functions whose names and addresses nobody can know before:
//! both are random in each run, and the whole is moved by a random multiple of 2 MiB, as Linux moves itself. When it begins it
//! writes one letter to port 0xe9, QEMU's debug console.
//!
//! ```text
//!   physical 16 MiB   PVH entry (32 bits) -> page tables -> 64 bits, at its random virtual address
//!   physical 18 MiB   text: random bytes, and in them a hot function, which reads the PM timer, and some cold ones
//! ```

use std::collections::hash_map::RandomState;
use std::fmt::Write as _;
use std::hash::{BuildHasher, Hasher};

const BASE: u64 = 16 << 20;
const TEXT: u64 = BASE + (2 << 20);
const TEXT_SIZE: usize = 6 << 20;
/// Each function has so much room.
const CELL: usize = 4096;
/// Where physical zero would be, were the kernel not moved.
const KERNEL: u64 = 0xffff_ffff_8000_0000;
/// In the file.
const IMAGE: usize = 0x1000;

/// The kernel and what is known of it.
#[derive(Clone, Debug)]
pub struct Planted {
    /// For `-kernel`, with symbols as linked.
    pub elf: Vec<u8>,
    /// What `/proc/kallsyms` would say in it.
    pub kallsyms: String,
    /// The hot function's name.
    pub hot: String,
    /// The address of its instruction that exits, where it is in the running guest.
    pub address: u64,
    /// How far the kernel is moved.
    pub slide: u64,
}

/// Numbers for what must be different in each run.
pub(crate) struct Random(u64);

impl Random {
    /// Another sequence each time.
    pub(crate) fn new() -> Random {
        Random(RandomState::new().build_hasher().finish() | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub(crate) fn word(&mut self) -> String {
        (0..4).map(|_| ["ka", "ro", "mi", "tes", "lun", "vo", "pre", "sil"][self.below(8) as usize]).collect()
    }
}

struct Function {
    name: String,
    /// Into the text.
    offset: usize,
}

impl Planted {
    /// Another one each time.
    pub fn new() -> Planted {
        let mut random = Random::new();
        let slide = random.below(440) << 21;
        let mut text: Vec<u8> = (0..TEXT_SIZE).map(|_| random.next() as u8).collect();
        let functions: Vec<Function> = (0..TEXT_SIZE / CELL)
            .map(|cell| Function {
                name: format!("{}_{}", random.word(), random.word()),
                offset: cell * CELL + random.below(1024) as usize,
            })
            .collect();
        // Different cells, one for each part.
        let mut cells: Vec<usize> = Vec::new();
        while cells.len() < 6 {
            let cell = random.below(functions.len() as u64) as usize;
            if !cells.contains(&cell) {
                cells.push(cell);
            }
        }
        let hot: &[u8] = &[0xba, 0x08, 0x06, 0, 0, 0xed, 0xc3]; // mov edx, 0x608; in eax, dx; ret
        let cold: [&[u8]; 4] = [
            &[0x53, 0x31, 0xc0, 0x0f, 0xa2, 0x5b, 0xc3], // push rbx; xor eax, eax; cpuid; pop rbx; ret
            &[0xb9, 0x1b, 0, 0, 0, 0x0f, 0x32, 0xc3],    // mov ecx, IA32_APIC_BASE; rdmsr; ret
            &[0xb0, 0x01, 0xe6, 0x80, 0xc3],             // mov al, 1; out 0x80, al; ret
            &[0xe4, 0x71, 0xc3],                         // in al, 0x71; ret
        ];
        let mut put = |cell: usize, code: &[u8]| {
            let at = functions[cell].offset;
            text[at..at + code.len()].copy_from_slice(code);
        };
        put(cells[0], hot);
        for (cell, code) in cells[1..5].iter().zip(cold) {
            put(*cell, code);
        }
        let main = functions[cells[5]].offset;
        put(
            cells[5],
            &main_loop(main, &cells[..5].iter().map(|cell| functions[*cell].offset).collect::<Vec<_>>()),
        );

        let linked = |offset: usize| KERNEL + TEXT + offset as u64;
        let mut kallsyms = format!("{:016x} T _text\n", linked(0) + slide);
        for function in &functions {
            let _ = writeln!(kallsyms, "{:016x} t {}", linked(function.offset) + slide, function.name);
        }
        let mut image = boot(slide, linked(main) + slide);
        image.resize((TEXT - BASE) as usize, 0);
        image.extend(&text);
        Planted {
            elf: elf(&image, &functions),
            kallsyms,
            hot: functions[cells[0]].name.clone(),
            address: linked(functions[cells[0]].offset) + 5 + slide,
            slide,
        }
    }
}

impl Default for Planted {
    fn default() -> Self {
        Planted::new()
    }
}

/// For ever: the first function 64 times, then each of the others once.
fn main_loop(at: usize, functions: &[usize]) -> Vec<u8> {
    let mut code = vec![0xbb, 64, 0, 0, 0]; // mov ebx, 64
    let call = |code: &mut Vec<u8>, to: usize| {
        code.push(0xe8);
        let next = (at + code.len() + 4) as i64;
        code.extend(((to as i64 - next) as i32).to_le_bytes());
    };
    call(&mut code, functions[0]);
    code.extend([0xff, 0xcb, 0x75, 0xf7]); // dec ebx; jnz to the call
    for function in &functions[1..] {
        call(&mut code, *function);
    }
    let back = -(code.len() as i32 + 5);
    code.push(0xe9);
    code.extend(back.to_le_bytes());
    code
}

/// The PVH entry and what leads to 64 bits. Page tables: memory as it is, and the kernel's half, moved.
fn boot(slide: u64, main: u64) -> Vec<u8> {
    let [tables, identity, high, low_pages, high_pages, gdt] =
        [0x1000, 0x2000, 0x3000, 0x4000, 0x5000, 0x6000].map(|offset| BASE + offset);
    let mut code: Vec<u8> = Vec::new();
    let mut put = |bytes: &[u8]| code.extend_from_slice(bytes);
    put(&[0xfa, 0xb8]); // cli; mov eax, tables
    put(&(tables as u32).to_le_bytes());
    put(&[0x0f, 0x22, 0xd8]); // mov cr3, eax
    put(&[0x0f, 0x20, 0xe0, 0x83, 0xc8, 0x20, 0x0f, 0x22, 0xe0]); // cr4 |= PAE
    put(&[0xb9, 0x80, 0, 0, 0xc0, 0x0f, 0x32, 0x0d, 0, 1, 0, 0, 0x0f, 0x30]); // EFER |= LME
    put(&[0x0f, 0x20, 0xc0, 0x0d, 1, 0, 0, 0x80, 0x0f, 0x22, 0xc0]); // cr0 |= PG | PE
    put(&[0x0f, 0x01, 0x15]); // lgdt
    put(&(gdt as u32 + 0x20).to_le_bytes());
    put(&[0xea]); // far jump to the next instruction, now 64 bits
    let after = BASE as u32 + code.len() as u32 + 6;
    code.extend(after.to_le_bytes());
    code.extend([0x08, 0x00]);
    code.extend([0x48, 0xbc]); // mov rsp, stack
    code.extend((BASE + 0x1_0000).to_le_bytes());
    code.extend([0xb0, b'!', 0xe6, 0xe9]); // mov al, '!'; out 0xe9, al
    code.extend([0x48, 0xb8]); // mov rax, main
    code.extend(main.to_le_bytes());
    code.extend([0xff, 0xe0]); // jmp rax

    let mut image = vec![0; 0x1_0000];
    image[..code.len()].copy_from_slice(&code);
    let mut entry = |table: u64, index: u64, value: u64| {
        let at = (table - BASE + index * 8) as usize;
        image[at..at + 8].copy_from_slice(&value.to_le_bytes());
    };
    // Present and writable; with bit 7 a page of 2 MiB.
    entry(tables, 0, identity | 3);
    entry(identity, 0, low_pages | 3);
    entry(tables, 511, high | 3);
    entry(high, 510, high_pages | 3);
    for page in 0..512_u64 {
        entry(low_pages, page, (page << 21) | 0x83);
        if let Some(physical) = (page << 21).checked_sub(slide) {
            entry(high_pages, page, physical | 0x83);
        }
    }
    entry(gdt, 1, 0x00af_9a00_0000_ffff);
    entry(gdt, 2, 0x00cf_9200_0000_ffff);
    // lgdt's operand: the limit, then the address.
    entry(gdt, 4, 0x17 | (gdt << 16));
    image
}

/// An ELF file with one segment, PVH's note, and symbols as linked.
fn elf(image: &[u8], functions: &[Function]) -> Vec<u8> {
    let mut names = vec![0u8];
    let mut symbols = vec![0u8; 24];
    for (number, function) in functions.iter().enumerate() {
        let end = functions.get(number + 1).map_or(TEXT_SIZE, |next| next.offset);
        symbols.extend((names.len() as u32).to_le_bytes());
        // A local function of section 1.
        symbols.extend([0x02, 0, 1, 0]);
        symbols.extend((KERNEL + TEXT + function.offset as u64).to_le_bytes());
        symbols.extend(((end - function.offset) as u64).to_le_bytes());
        names.extend(function.name.as_bytes());
        names.push(0);
    }
    let section_names = b"\0.text\0.symtab\0.strtab\0.shstrtab\0";
    let mut file = vec![0; IMAGE];
    file.extend(image);
    let symbols_at = file.len();
    file.extend(&symbols);
    let names_at = file.len();
    file.extend(&names);
    let section_names_at = file.len();
    file.extend(section_names);
    file.resize(file.len().next_multiple_of(8), 0);
    let sections_at = file.len();
    let text_at = IMAGE + (TEXT - BASE) as usize;
    let sections: [[u64; 10]; 5] = [
        [0; 10],
        // Name, type, flags, address, offset, size, link, info, alignment, entry size.
        [1, 1, 6, KERNEL + TEXT, text_at as u64, TEXT_SIZE as u64, 0, 0, 4096, 0],
        [7, 2, 0, 0, symbols_at as u64, symbols.len() as u64, 3, functions.len() as u64 + 1, 8, 24],
        [15, 3, 0, 0, names_at as u64, names.len() as u64, 0, 0, 1, 0],
        [23, 3, 0, 0, section_names_at as u64, section_names.len() as u64, 0, 0, 1, 0],
    ];
    for section in sections {
        for (index, field) in section.into_iter().enumerate() {
            if matches!(index, 0 | 1 | 6 | 7) {
                file.extend((field as u32).to_le_bytes());
            } else {
                file.extend(field.to_le_bytes());
            }
        }
    }
    let note_at = 0x200;
    let mut note = Vec::new();
    for word in [4u32, 8, 18] {
        note.extend(word.to_le_bytes());
    }
    note.extend(b"Xen\0");
    note.extend(BASE.to_le_bytes());
    file[note_at..note_at + note.len()].copy_from_slice(&note);

    let mut head: Vec<u8> = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    for half in [2u16, 62] {
        head.extend(half.to_le_bytes());
    }
    head.extend(1u32.to_le_bytes());
    for long in [BASE, 64, sections_at as u64] {
        head.extend(long.to_le_bytes());
    }
    head.extend(0u32.to_le_bytes());
    for half in [64u16, 56, 2, 64, sections.len() as u16, 4] {
        head.extend(half.to_le_bytes());
    }
    let size = image.len() as u64;
    // Type, flags, then offset, virtual and physical address, size in the file and in memory, alignment.
    for (kind, flags, fields) in [
        (1u32, 7u32, [IMAGE as u64, KERNEL + BASE, BASE, size, size, 4096]),
        (4, 4, [note_at as u64, 0, 0, note.len() as u64, note.len() as u64, 4]),
    ] {
        head.extend(kind.to_le_bytes());
        head.extend(flags.to_le_bytes());
        for field in fields {
            head.extend(field.to_le_bytes());
        }
    }
    file[..head.len()].copy_from_slice(&head);
    file
}
