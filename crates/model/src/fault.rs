//! What is wrong with a table, or with a saved state.

use std::fmt;

/// A model that does not run.
#[derive(Debug, thiserror::Error)]
pub enum ModelFault {
    /// The table contradicts itself or has holes.
    #[error("model {model} is not sound:{}", list(.findings))]
    Unsound {
        /// Which.
        model: &'static str,
        /// Everything that is wrong with it.
        findings: Vec<TableFlaw>,
    },
    /// A saved state is not one of this model's. The device has to be reset instead.
    #[error("the saved state is not one of model {model}: {why}; reset the device instead of restoring it")]
    State {
        /// Which.
        model: &'static str,
        /// What about it.
        why: String,
    },
}

/// One thing that is wrong with a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableFlaw {
    /// Where: region and state, or the list.
    pub place: String,
    /// What is wrong.
    pub what: String,
    /// What to do about it.
    pub remedy: String,
}

impl fmt::Display for TableFlaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.place, self.what, self.remedy)
    }
}

fn list(findings: &[TableFlaw]) -> String {
    findings.iter().map(|finding| format!("\n  {finding}")).collect()
}
