//! Bus addresses that an IOMMU translates.

/// Ranges of bus addresses, for a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranges(pub Vec<(u64, u64)>);

impl std::fmt::Display for Ranges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (n, (start, end)) in self.0.iter().take(8).enumerate() {
            write!(f, "{}{start:#x} to {end:#x}", if n > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}
