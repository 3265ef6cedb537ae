//! QEMU's translated SVM, mended in the running process.
//!
//! VMRUN with an interrupt to inject writes its vector to `CPUState::exception_index`, delivers the interrupt itself, and leaves the vector there (`helper_vmrun` in
//! `target/i386/tcg/system/svm_helper.c`, QEMU 7.2 to 11.1). A vCPU that has to leave the loop of translated code before the guest's next intercept takes that vector for
//! an exception and delivers it once more, whether the guest has interrupts on or off. A guest that is in its timer interrupt then waits for a lock that it holds
//! itself (docs/measurements/tcg-vmrun.md). Delivering the interrupt does not need what is written, so that one instruction becomes one that does nothing.
//!
//! Versions differ in offsets, so it is found by what surrounds it, and nothing is written unless exactly one place is found:
//!
//! ```text
//!   mov  %esi, -D(%env)              <-- CPUState comes before the registers that %env leads to
//!   movl $0, N+4(%env)               exception_is_int
//!   movq $-1, N+8(%env)              exception_next_eip
//!   ...
//!   call do_interrupt_x86_hardirq
//! ```

use anyhow::{Context, Result, bail, ensure};
use object::{Object, ObjectSection, ObjectSymbol};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// What VMRUN calls to deliver an interrupt. QEMU exports it for its plugins.
const DELIVERS: &str = "do_interrupt_x86_hardirq";
/// Bytes before that call in which everything is.
const BEFORE: usize = 80;
const CALL: u8 = 0xe8;
/// Bytes of a call.
const CALL_LEN: usize = 5;
/// REX.W, and the opcode of `mov $imm32, disp32(%reg)`.
const MOVE_QUAD: [u8; 2] = [0x48, 0xc7];
/// Bytes of that.
const MOVE_QUAD_LEN: usize = 11;
/// Opcode of `mov %reg32, disp32(%reg)`.
const STORE: u8 = 0x89;
/// Bytes of that.
const STORE_LEN: usize = 6;
/// Does nothing, in as many bytes.
const NOTHING: [u8; STORE_LEN] = [0x66, 0x0f, 0x1f, 0x44, 0x00, 0x00];
/// For a process to become QEMU.
const START: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(5);

/// Mends the QEMU that this process is or becomes; before its guest has run VMRUN. Nobody else is changed, and no file.
pub fn mend(pid: u32) -> Result<()> {
    let folder = format!("/proc/{pid}");
    let program = Path::new(&folder).join("exe");
    let end = Instant::now() + START;
    let base = loop {
        let path = fs::read_link(&program).context("QEMU has ended")?;
        let is_qemu = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("qemu-system"));
        let maps = fs::read_to_string(format!("{folder}/maps"))?;
        match loaded_at(&maps, &path) {
            Some(base) if is_qemu => break base,
            _ => ensure!(Instant::now() < end, "{} is no QEMU", path.display()),
        }
        std::thread::sleep(LOOK);
    };
    let place = base + place(&fs::read(&program)?)?;
    let memory = File::options().write(true).open(format!("{folder}/mem"))?;
    memory.write_all_at(&NOTHING, place).context("write to QEMU's code")
}

/// Where a process has its program.
fn loaded_at(maps: &str, program: &Path) -> Option<u64> {
    let program = program.to_str()?;
    let first = maps.lines().find(|line| line.ends_with(program))?;
    u64::from_str_radix(first.split_once('-')?.0, 16).ok()
}

/// Address of the instruction in a program that is loaded anywhere.
fn place(program: &[u8]) -> Result<u64> {
    let elf = object::File::parse(program)?;
    let delivers = elf.dynamic_symbols().find(|symbol| symbol.name() == Ok(DELIVERS));
    let delivers = delivers.with_context(|| format!("QEMU does not export {DELIVERS}"))?.address();
    let text = elf.section_by_name(".text").context("no .text")?;
    let start = text.address();
    let found = stores(text.data()?, delivers.wrapping_sub(start));
    match found.as_slice() {
        [only] => Ok(start + u64::try_from(*only)?),
        _ => bail!("{} places look like VMRUN's: this QEMU is translated another way", found.len()),
    }
}

/// Where this code has that store, before each call of the function that is at `delivers` of it.
fn stores(code: &[u8], delivers: u64) -> Vec<usize> {
    let calls = code.windows(CALL_LEN).enumerate().filter(|(at, bytes)| {
        let &&[CALL, a, b, c, d] = bytes else { return false };
        let (next, by) = ((at + CALL_LEN) as u64, i64::from(i32::from_le_bytes([a, b, c, d])));
        next.wrapping_add_signed(by) == delivers
    });
    let store = |(call, _): (usize, &[u8])| {
        let first = call.saturating_sub(BEFORE);
        let (moved, base) = next_eip(&code[first..call])?;
        let before = code[first..first + moved].windows(STORE_LEN);
        let mut found = before.enumerate().filter(|(_, bytes)| is_store(bytes, base));
        // What looks so may be a part of another instruction.
        match (found.next(), found.next()) {
            (Some((at, _)), None) => Some(first + at),
            _ => None,
        }
    };
    calls.filter_map(store).collect()
}

/// Where `exception_next_eip` becomes -1, and the number of the register that leads to it.
fn next_eip(code: &[u8]) -> Option<(usize, u8)> {
    code.windows(MOVE_QUAD_LEN).enumerate().find_map(|(at, bytes)| {
        let (field, base) = displaced(bytes[2])?;
        (bytes[..2] == MOVE_QUAD && field == 0 && bytes[7..] == [0xff; 4]).then_some((at, base))
    })
}

/// Whether 32 bits are stored before what that register leads to.
fn is_store(bytes: &[u8], base: u8) -> bool {
    let &[STORE, modrm, a, b, c, d] = bytes else { return false };
    displaced(modrm).is_some_and(|(_, from)| from == base) && i32::from_le_bytes([a, b, c, d]) < 0
}

/// The field and the base of a ModRM byte with a displacement of 32 bits and no SIB byte after it.
fn displaced(modrm: u8) -> Option<(u8, u8)> {
    let (mode, field, base) = (modrm >> 6, modrm >> 3 & 7, modrm & 7);
    (mode == 0b10 && base != 0b100).then_some((field, base))
}
