//! Text of guests and VMMs, safe within HTML and SVG.

use std::fmt;

/// Displays text with what HTML and XML take as markup replaced.
pub(super) struct Escaped<'a>(pub &'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                // Not allowed in XML, escaped or not.
                c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => f.write_str("?")?,
                c => write!(f, "{c}")?,
            }
        }
        Ok(())
    }
}
