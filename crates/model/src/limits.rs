//! How large a model may be: what fits into the sets of bits and the numbers by which it runs.

/// Most regions of a model.
pub(crate) const REGIONS: usize = 8;
/// Most states of a model, over all of its regions.
pub(crate) const STATES: usize = 64;
/// Most registers of a model that a monitor runs, and those of any model that can be hooked: the first.
pub(crate) const REGISTERS: usize = 128;
/// Most registers of a model whose rings the guest drives past the monitor.
pub(crate) const DIRECT_REGISTERS: usize = 250;
/// Most registers whose values one function of a model is given.
pub const VALUES: usize = 8;
/// Most bytes of registers: for each there is a number of a register, by way and bank.
pub(crate) const LARGEST: u16 = 0xc000;
