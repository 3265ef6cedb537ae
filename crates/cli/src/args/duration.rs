//! Durations as people write them, the same for every option: `500ms`, `10s`, `2m`, `1.5h`; a number alone is seconds.

use std::time::Duration;

/// What is said of a text that is none.
const WRONG: &str = "a duration is a number and us, ms, s, m or h, such as 500ms or 10s";
/// The longest: what is meant to last longer has no end.
const MOST: Duration = Duration::from_secs(10 * 24 * 3600);

/// Reads one, more than nothing and at most ten days.
pub fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let scale = match &text[digits.len()..] {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" | "" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err(WRONG.into()),
    };
    let plain = digits.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    if !plain || !digits.starts_with(|c: char| c.is_ascii_digit()) {
        return Err(WRONG.into());
    }
    let number: f64 = digits.parse().map_err(|_| WRONG)?;
    let duration = Duration::try_from_secs_f64(number * scale).map_err(|_| WRONG)?;
    if duration.is_zero() || duration > MOST {
        return Err("a duration is more than nothing and at most ten days".into());
    }
    Ok(duration)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read() {
        for (text, ms) in [
            ("10", 10_000),
            ("10s", 10_000),
            ("0.5", 500),
            ("500ms", 500),
            ("250000us", 250),
            ("2m", 120_000),
            ("2min", 120_000),
            ("1.5h", 5_400_000),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in
            ["", "s", "ten", "10 s", "10x", "-1s", "+1s", "0", "0ms", "inf", "nan", "1e3", "241h", ".5s"]
        {
            assert!(duration(text).is_err(), "{text}");
        }
    }
}
