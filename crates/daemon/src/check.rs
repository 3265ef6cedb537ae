//! `ioplane serve --check`: a configuration, looked at as a start would, without starting anything.

use std::path::{Path, PathBuf};

use crate::config::{Config, Problem, Problems};

/// A configuration that a daemon would start with.
#[derive(Debug)]
pub struct Checked {
    pub file: PathBuf,
    /// How many there are of each kind: cores, pools, groups, disks, switches, NICs, PCI functions, exports.
    pub counts: [usize; 8],
    /// What of it this host lacks as far as that can be seen without opening it. A daemon starts without, and tries again.
    pub missing: Vec<Problem>,
    /// Old names of keys. A daemon reads them, and says the same in its log.
    pub warnings: Vec<Problem>,
}

/// Looks at `config`. Nothing is opened, locked or taken, so a daemon may be running with it. May block.
pub fn check(config: &Path) -> Result<Checked, Problems> {
    let config = Config::read(config)?;
    let missing = config.images(|_| true).err().map_or_else(Vec::new, |problems| problems.list);
    let Config { cores, pool, groups, disks, switches, nics, functions, exports, .. } = &config;
    let others = [groups.len(), disks.len(), switches.len(), nics.len(), functions.len(), exports.len()];
    let [groups, disks, switches, nics, functions, exports] = others;
    let counts =
        [cores.len(), usize::from(pool.is_some()), groups, disks, switches, nics, functions, exports];
    Ok(Checked { counts, missing, warnings: config.warnings, file: config.file })
}
