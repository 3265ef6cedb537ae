//! What may be wrong with a field: one check for all kinds that have it, and for what a form asks as for what is stored.

use std::ops::RangeInclusive;
use std::path::Path;

use super::{Flaw, ServedSpec};

/// Longest path of a unix socket (sun_path, with its end).
const SOCKET_PATH: usize = 107;
/// Bytes of a network interface's name (IFNAMSIZ, with its end).
const INTERFACE: usize = 15;

/// A field that counts.
pub(super) struct CountField {
    /// The field.
    pub name: &'static str,
    /// Numbers that it can have.
    pub range: RangeInclusive<u16>,
    /// Only powers of two.
    pub power_of_two: bool,
    /// What it has if nobody says.
    pub usual: u16,
}

impl CountField {
    /// The number of a form. One out of range is a flaw, and the usual one stands in for it.
    pub fn read(&self, flaws: &mut Vec<Flaw>, given: Option<u64>) -> u16 {
        let Some(given) = given else { return self.usual };
        let number = u16::try_from(given).ok().filter(|number| self.range.contains(number));
        number.unwrap_or_else(|| {
            flaws.extend(self.flaw(given));
            self.usual
        })
    }

    /// What is wrong with a number, if anything.
    pub fn flaw(&self, number: impl Into<u64>) -> Option<Flaw> {
        let number: u64 = number.into();
        let (least, most) = (self.range.start(), self.range.end());
        let fits = (u64::from(*least)..=u64::from(*most)).contains(&number)
            && (!self.power_of_two || number.is_power_of_two());
        let what = if self.power_of_two { "a power of two from " } else { "" };
        let flaw = || {
            Flaw::new(self.name, format!("{} = {number}", self.name), format!("give {what}{least} to {most}"))
        };
        (!fits).then(flaw)
    }
}

/// What is wrong with a name, if anything.
pub fn name_flaw(name: &str) -> Option<Flaw> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let remedy = "use 1 to 40 letters, digits, '-', '_' and '.', beginning with a letter or a digit";
    if name.is_empty() || name.len() > 40 {
        return Some(Flaw::new("name", format!("a name of {} characters", name.chars().count()), remedy));
    }
    if let Some(bad) = name.chars().find(|c| !plain(*c)) {
        return Some(Flaw::new("name", format!("{bad:?} in the name {name:?}"), remedy));
    }
    if !name.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return Some(Flaw::new("name", format!("the name {name:?} begins with a sign"), remedy));
    }
    None
}

/// What is wrong with the name of a switch that is named in a field, if anything.
pub(super) fn switch_flaw(name: &str) -> Option<Flaw> {
    name_flaw(name).map(|flaw| Flaw { field: "switch", ..flaw })
}

/// What is wrong with the name of an interface, if anything.
pub(super) fn interface_flaw(field: &'static str, name: &str) -> Option<Flaw> {
    let plain = |c: char| c.is_ascii_graphic() && !matches!(c, '/' | '%' | ':');
    let good = (1..=INTERFACE).contains(&name.len()) && name.chars().all(plain);
    let remedy = "give the name of a TAP interface, such as tap0: at most 15 characters without '/'";
    (!good).then(|| Flaw::new(field, format!("{name:?} is no name of an interface"), remedy))
}

/// What is wrong with a path that has to be absolute, if anything.
pub(super) fn path_flaw(field: &'static str, path: &Path) -> Option<Flaw> {
    let flaw = || Flaw::new(field, format!("{} is not an absolute path", path.display()), "begin it with /");
    (!path.is_absolute()).then(flaw)
}

/// What is wrong with the path of a socket, if anything.
pub fn socket_flaw(path: &Path) -> Option<Flaw> {
    let len = path.as_os_str().len();
    path_flaw("socket", path).or_else(|| {
        let reason =
            format!("{} is {len} bytes long; a socket's path has {SOCKET_PATH} at most", path.display());
        let flaw = || Flaw::new("socket", reason, "choose a shorter run_dir or socket");
        (len > SOCKET_PATH).then(flaw)
    })
}

/// Flaws of fields that were given, and say nothing about `what`.
pub(super) fn foreign(flaws: &mut Vec<Flaw>, what: &str, remedy: &str, given: &[(&'static str, bool)]) {
    for &(field, _) in given.iter().filter(|(_, given)| *given) {
        flaws.push(Flaw::new(field, format!("{field} says nothing about {what}"), remedy));
    }
}

/// The specification that a form makes, unless it has flaws of its own or the form had. One flaw a field is enough.
pub(super) fn checked<S: ServedSpec>(spec: S, mut flaws: Vec<Flaw>) -> Result<S, Vec<Flaw>> {
    for flaw in spec.flaws() {
        if !flaws.iter().any(|known| known.field == flaw.field) {
            flaws.push(flaw);
        }
    }
    if flaws.is_empty() { Ok(spec) } else { Err(flaws) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: CountField =
        CountField { name: "queue_size", range: 2..=1024, power_of_two: true, usual: 128 };

    #[test]
    fn a_number_is_checked_alike_in_a_form_and_where_it_is_stored() {
        let read = |given| {
            let mut flaws = Vec::new();
            (SIZES.read(&mut flaws, given), flaws)
        };
        assert_eq!((read(None), read(Some(1024))), ((128, vec![]), (1024, vec![])));
        for wrong in [0, 1, 1025, 65536 + 64] {
            let flaw = SIZES.flaw(wrong).unwrap();
            assert_eq!(
                (flaw.reason, flaw.remedy),
                (format!("queue_size = {wrong}"), "give a power of two from 2 to 1024".into())
            );
            assert_eq!(read(Some(wrong)), (128, vec![SIZES.flaw(wrong).unwrap()]));
        }
        // As many as somebody asks for, and found when all fields are looked at.
        assert_eq!(read(Some(3)), (3, vec![]));
        assert!(SIZES.flaw(3u64).is_some() && SIZES.flaw(64u16).is_none());
    }

    #[test]
    fn a_socket_is_absolute_and_not_too_long() {
        assert_eq!(socket_flaw(Path::new("/run/x.sock")), None);
        for wrong in ["x.sock".to_owned(), format!("/{}", "x".repeat(SOCKET_PATH))] {
            assert_eq!(socket_flaw(Path::new(&wrong)).unwrap().field, "socket");
        }
    }
}
