//! Names of devices and hosts, as peers and files may have them.

/// Letters, digits, '-', '_' and '.', beginning with a letter or a digit: 40 at most.
pub(crate) fn is_name(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    (1..=40).contains(&text.len())
        && text.bytes().all(plain)
        && text.starts_with(|first: char| first.is_ascii_alphanumeric())
}

/// What is shown of a text that is refused.
pub(crate) fn shown(text: &str) -> String {
    text.chars().take(60).collect()
}

/// What a peer says, as a terminal may have it.
pub(crate) fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(300).collect()
}

/// Of the names that hosts have in certificates, or give themselves where there are none.
pub(crate) fn is_host(text: &str) -> bool {
    let label = |label: &str| is_name(label) || ((1..=63).contains(&label.len()) && label.bytes().all(plain));
    text.len() <= 253 && !text.is_empty() && text.split('.').all(label)
}

fn plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'-'
}
