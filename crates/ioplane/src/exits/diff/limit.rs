//! `--fail-if`: what a comparison must not exceed.
//!
//! ```text
//!   LIMIT   = MEASURE [ "[" NAME "]" ] COMPARE VALUE
//!   MEASURE = "exits/s" | "user/s" | "us/exit"
//!   COMPARE = ">" | ">=" | "<" | "<="
//!   VALUE   = NUMBER                the value of AFTER itself
//!           | ("+" | "-") NUMBER    its difference from BEFORE
//!           | ("+" | "-") NUMBER "%"   the same, in percent of BEFORE
//! ```

use std::fmt;

/// Larger numbers mean nothing.
const MOST: f64 = 1e18;
/// What is said of a text that cannot be read.
const GRAMMAR: &str = "write MEASURE[NAME] COMPARE VALUE: exits/s, user/s or us/exit; optionally a reason, function, register or device in \
     brackets; >, >=, < or <=; then a number, or the change since before: +10, -10, +10% or -10%. Such as: exits/s>+10%";

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitMeasure {
    /// Exits a second.
    Exits,
    /// Of these, those that went on to the VMM.
    User,
    /// Host time of one exit, in microseconds.
    Time,
}

impl ExitMeasure {
    const ALL: [(&'static str, ExitMeasure); 3] =
        [("exits/s", ExitMeasure::Exits), ("user/s", ExitMeasure::User), ("us/exit", ExitMeasure::Time)];
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Bound {
    /// A value of AFTER.
    Value(f64),
    /// AFTER less BEFORE.
    Change(f64),
    /// The same in percent of BEFORE.
    Percent(f64),
}

/// One limit.
#[derive(Clone, Debug, PartialEq)]
pub struct ExitLimit {
    /// As it was typed.
    pub text: String,
    /// What is compared.
    pub measure: ExitMeasure,
    /// Of which reason, function, register or device; nothing for all exits.
    pub name: Option<String>,
    below: bool,
    equal: bool,
    bound: Bound,
}

impl ExitLimit {
    /// Reads one.
    pub fn parse(text: &str) -> Result<ExitLimit, String> {
        read(text).ok_or_else(|| format!("{:?} is not a limit; {GRAMMAR}", ioplane_plain::excerpt(&text)))
    }

    /// With which value AFTER is compared.
    pub fn threshold(&self, before: f64) -> f64 {
        match self.bound {
            Bound::Value(value) => value,
            Bound::Change(change) => before + change,
            Bound::Percent(percent) => before * (1.0 + percent / 100.0),
        }
    }

    /// Whether BEFORE must be known.
    pub fn is_relative(&self) -> bool {
        !matches!(self.bound, Bound::Value(_))
    }

    /// Whether AFTER is what must not be.
    pub fn is_met(&self, before: f64, after: f64) -> bool {
        let threshold = self.threshold(before);
        let beyond = if self.below { after < threshold } else { after > threshold };
        beyond || (self.equal && after == threshold)
    }
}

impl fmt::Display for ExitLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&ioplane_plain::plain(&self.text))
    }
}

fn read(text: &str) -> Option<ExitLimit> {
    let (measure, rest) = ExitMeasure::ALL
        .into_iter()
        .find_map(|(word, measure)| Some((measure, text.trim().strip_prefix(word)?.trim_start())))?;
    let (name, rest) = match rest.strip_prefix('[') {
        // Names of functions of a module have brackets themselves.
        Some(rest) => {
            let (name, rest) = rest.rsplit_once(']')?;
            (
                Some(name.trim()).filter(|name| !name.is_empty()).map(str::to_owned).map(Some)?,
                rest.trim_start(),
            )
        }
        None => (None, rest),
    };
    let (below, rest) = match rest.strip_prefix('<') {
        Some(rest) => (true, rest),
        None => (false, rest.strip_prefix('>')?),
    };
    let (equal, rest) = rest.strip_prefix('=').map_or((false, rest), |rest| (true, rest));
    let rest = rest.trim();
    let (sign, rest) = match (rest.strip_prefix('+'), rest.strip_prefix('-')) {
        (Some(rest), _) => (Some(1.0), rest),
        (_, Some(rest)) => (Some(-1.0), rest),
        _ => (None, rest),
    };
    let (number, percent) = rest.strip_suffix('%').map_or((rest, false), |number| (number, true));
    let number = number.trim();
    let plain = number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let number = number.parse::<f64>().ok().filter(|number| plain && *number < MOST)?;
    let bound = match (sign, percent) {
        (None, false) => Bound::Value(number),
        (Some(sign), false) => Bound::Change(sign * number),
        (Some(sign), true) => Bound::Percent(sign * number),
        (None, true) => return None,
    };
    Some(ExitLimit { text: text.trim().to_owned(), measure, name, below, equal, bound })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether 100 before and `after` are what must not be.
    fn met(text: &str, after: f64) -> bool {
        ExitLimit::parse(text).unwrap_or_else(|error| panic!("{error}")).is_met(100.0, after)
    }

    #[test]
    fn three_sorts_of_values() {
        assert!(met("exits/s>150", 151.0) && !met("exits/s>150", 150.0));
        assert!(met("exits/s>+10", 111.0) && !met("exits/s>+10", 110.0));
        assert!(met("exits/s>+10%", 110.5) && !met("exits/s>+10%", 109.5));
        // They have not become fewer by half.
        assert!(met("exits/s>-50%", 51.0) && !met("exits/s>-50%", 50.0));
        assert!(met("exits/s < -20", 79.0) && !met("exits/s < -20", 80.0));
    }

    #[test]
    fn the_limit_itself() {
        assert!(met("user/s>=+0%", 100.0) && !met("user/s>+0%", 100.0));
        assert!(met("us/exit<=5", 5.0) && !met("us/exit<5", 5.0));
    }

    #[test]
    fn names_may_have_brackets() {
        let name = |text: &str| ExitLimit::parse(text).unwrap().name;
        assert_eq!(name("exits/s>1"), None);
        assert_eq!(name("exits/s[I/O instruction]>1"), Some("I/O instruction".into()));
        assert_eq!(name("exits/s [ f [module] ] > 1"), Some("f [module]".into()));
    }

    #[test]
    fn what_cannot_be_read_is_refused_with_the_grammar() {
        let wrong = [
            "",
            "exits",
            "exits/s",
            "exits/s>",
            "exits/s>x",
            "exits/s>10%",
            "exits/s=10",
            "exits/s>+-3",
            "exits/s>1e3",
            "exits/s>inf",
            "exits/s>nan",
            "exits/s[]>1",
            "exits/s[a>1",
            "exit/s>1",
            "exits/s>>1",
            "exits/s>+%",
            "exits/s>1.2.3",
            "exits/s>99999999999999999999",
        ];
        for text in wrong {
            let error = ExitLimit::parse(text).unwrap_err();
            assert!(error.contains("Such as: exits/s>+10%"), "{text}: {error}");
        }
        let error = ExitLimit::parse("\x1b[2J").unwrap_err();
        assert!(!error.chars().any(char::is_control), "{error:?}");
    }
}
