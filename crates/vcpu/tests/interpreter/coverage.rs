//! Which instructions the short form must have carried out.

use std::collections::{BTreeMap, BTreeSet};

use iced_x86::{Code, Mnemonic};

/// Every mnemonic that user code can run, and that the interpreter knows.
const MNEMONICS: &[Mnemonic] = {
    use Mnemonic as M;
    &[
        M::Adc,
        M::Add,
        M::And,
        M::Bsf,
        M::Bsr,
        M::Bswap,
        M::Bt,
        M::Btc,
        M::Btr,
        M::Bts,
        M::Call,
        M::Cbw,
        M::Cdq,
        M::Cdqe,
        M::Clc,
        M::Cld,
        M::Cmc,
        M::Cmova,
        M::Cmovae,
        M::Cmovb,
        M::Cmovbe,
        M::Cmove,
        M::Cmovg,
        M::Cmovge,
        M::Cmovl,
        M::Cmovle,
        M::Cmovne,
        M::Cmovno,
        M::Cmovnp,
        M::Cmovns,
        M::Cmovo,
        M::Cmovp,
        M::Cmovs,
        M::Cmp,
        M::Cmpsb,
        M::Cmpsd,
        M::Cmpsq,
        M::Cmpsw,
        M::Cmpxchg,
        M::Cmpxchg16b,
        M::Cmpxchg8b,
        M::Cqo,
        M::Cwd,
        M::Cwde,
        M::Dec,
        M::Div,
        M::Idiv,
        M::Imul,
        M::Inc,
        M::Ja,
        M::Jae,
        M::Jb,
        M::Jbe,
        M::Je,
        M::Jg,
        M::Jge,
        M::Jl,
        M::Jle,
        M::Jmp,
        M::Jne,
        M::Jno,
        M::Jnp,
        M::Jns,
        M::Jo,
        M::Jp,
        M::Jrcxz,
        M::Js,
        M::Lahf,
        M::Lea,
        M::Leave,
        M::Lodsb,
        M::Lodsd,
        M::Lodsq,
        M::Lodsw,
        M::Loop,
        M::Loope,
        M::Loopne,
        M::Lfence,
        M::Lzcnt,
        M::Mfence,
        M::Mov,
        M::Movsb,
        M::Movsd,
        M::Movsq,
        M::Movsw,
        M::Movsx,
        M::Movsxd,
        M::Movzx,
        M::Mul,
        M::Neg,
        M::Nop,
        M::Not,
        M::Or,
        M::Pause,
        M::Pop,
        M::Popcnt,
        M::Popfq,
        M::Prefetchnta,
        M::Prefetcht0,
        M::Prefetcht1,
        M::Prefetcht2,
        M::Prefetchw,
        M::Push,
        M::Pushfq,
        M::Rcl,
        M::Rcr,
        M::Ret,
        M::Rol,
        M::Ror,
        M::Sahf,
        M::Sar,
        M::Sbb,
        M::Scasb,
        M::Scasd,
        M::Scasq,
        M::Scasw,
        M::Seta,
        M::Setae,
        M::Setb,
        M::Setbe,
        M::Sete,
        M::Setg,
        M::Setge,
        M::Setl,
        M::Setle,
        M::Setne,
        M::Setno,
        M::Setnp,
        M::Setns,
        M::Seto,
        M::Setp,
        M::Sets,
        M::Sfence,
        M::Shl,
        M::Shld,
        M::Shr,
        M::Shrd,
        M::Stc,
        M::Std,
        M::Stosb,
        M::Stosd,
        M::Stosq,
        M::Stosw,
        M::Sub,
        M::Test,
        M::Tzcnt,
        M::Xadd,
        M::Xchg,
        M::Xor,
    ]
};
/// One value of ModR/M among many: it comes up or not.
const RARE: Mnemonic = Mnemonic::Endbr64;
/// How many forms (opcode with operand sizes, by the decoder's count) there were when this was written.
const FORMS: usize = 570;

/// The same in 32-bit mode.
const FORMS_32: usize = 440;

/// And in 16-bit code.
const FORMS_16: usize = 530;

/// What only 64-bit mode has.
const LONG_ONLY: &[Mnemonic] = {
    use Mnemonic as M;
    &[
        M::Cdqe,
        M::Cmpsq,
        M::Cmpxchg16b,
        M::Cqo,
        M::Jrcxz,
        M::Lodsq,
        M::Movsq,
        M::Movsxd,
        M::Popfq,
        M::Pushfq,
        M::Scasq,
        M::Stosq,
    ]
};

pub fn check(executed: &BTreeMap<Code, u64>) {
    check_against(executed, MNEMONICS, FORMS);
}

/// In 32-bit mode.
pub fn check_32(executed: &BTreeMap<Code, u64>) {
    let both = MNEMONICS.iter().filter(|one| !LONG_ONLY.contains(one));
    let all: Vec<Mnemonic> =
        both.copied().chain([Mnemonic::Jecxz, Mnemonic::Popfd, Mnemonic::Pushfd]).collect();
    check_against(executed, &all, FORMS_32);
}

/// In 16-bit code.
pub fn check_16(executed: &BTreeMap<Code, u64>) {
    use Mnemonic as M;
    let others = [M::Jcxz, M::Jecxz, M::Popf, M::Popfd, M::Pushf, M::Pushfd];
    let both = MNEMONICS.iter().filter(|one| !LONG_ONLY.contains(one));
    let all: Vec<Mnemonic> = both.copied().chain(others).collect();
    check_against(executed, &all, FORMS_16);
}

fn check_against(executed: &BTreeMap<Code, u64>, mnemonics: &[Mnemonic], forms: usize) {
    let seen: BTreeSet<Mnemonic> = executed.keys().map(|code| code.mnemonic()).collect();
    let missing: Vec<&Mnemonic> = mnemonics.iter().filter(|one| !seen.contains(one)).collect();
    assert!(missing.is_empty(), "never carried out: {missing:?}");
    let unlisted: Vec<&Mnemonic> =
        seen.iter().filter(|one| !mnemonics.contains(one) && **one != RARE).collect();
    assert!(unlisted.is_empty(), "carried out and not in the list: {unlisted:?}");
    assert!(executed.len() >= forms, "{} forms, there were {forms}", executed.len());
}
