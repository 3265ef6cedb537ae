//! How a VMM has set up a function that its guest relies on.

use ioplane_pci::spec;

/// How a VMM has set a function up: of its configuration space what a guest's driver relies on, and which vectors are wired.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetUp {
    /// The command register, as the guest sees it.
    pub command: u16,
    /// The six BARs, as the guest sees them.
    pub bars: [u32; 6],
    /// Message control of MSI-X; 0 without MSI-X.
    pub msix: u16,
    /// The vectors of MSI-X that signal somebody, ascending.
    pub vectors: Vec<u16>,
}

impl SetUp {
    /// Bits of the command register without which a driver's function does not work. INTx is switched off by whoever moves a guest.
    const COMMAND: u16 = spec::COMMAND_IO | spec::COMMAND_MEMORY | spec::COMMAND_MASTER;

    /// What of this a function that is set up as `now` lacks.
    pub(crate) fn lacks(&self, now: &SetUp) -> Option<String> {
        let Self { command, bars, msix, vectors } = self;
        if (command ^ now.command) & Self::COMMAND != 0 {
            return Some(format!("its command register is {:#06x} and was {command:#06x}", now.command));
        }
        if let Some(at) = (0..bars.len()).find(|at| bars[*at] != now.bars[*at]) {
            return Some(format!("its BAR {at} is {:#010x} and was {:#010x}", now.bars[at], bars[at]));
        }
        if (msix ^ now.msix) & spec::MSIX_ENABLE != 0 {
            return Some(format!("its MSI-X control is {:#06x} and was {msix:#06x}", now.msix));
        }
        let missing = vectors.iter().find(|vector| !now.vectors.contains(vector))?;
        Some(format!("its vector {missing} signals nobody"))
    }
}
