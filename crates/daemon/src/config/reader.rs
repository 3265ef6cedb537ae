//! Reading one table of a TOML file, field by field: every problem is noted with its line, and reading goes on.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use ioplane_api::size::Size;
use ioplane_api::spec::Flaw;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::problem::Problem;

/// The text, for lines.
#[derive(Debug, Clone, Copy)]
pub struct Source<'t> {
    /// All of it.
    pub text: &'t str,
    /// Folder that relative paths begin at.
    pub folder: &'t Path,
}

impl Source<'_> {
    /// The line of a span.
    pub fn line(&self, span: &Range<usize>) -> usize {
        let start = span.start.min(self.text.len());
        self.text.as_bytes()[..start].iter().filter(|byte| **byte == b'\n').count() + 1
    }
}

/// Where a table and its fields are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    /// Line of the table.
    pub line: usize,
    fields: BTreeMap<String, usize>,
}

impl Place {
    /// Line of a field, or of the table if the field is not there.
    pub fn of(&self, field: &str) -> usize {
        self.fields.get(field).copied().unwrap_or(self.line)
    }

    /// A flaw, where it is.
    pub fn problem(&self, flaw: Flaw) -> Problem {
        Problem { line: self.of(flaw.field), reason: flaw.reason, remedy: flaw.remedy }
    }
}

/// One table being read.
pub struct Reader<'t, 'p> {
    source: Source<'t>,
    what: &'static str,
    table: &'t DeTable<'t>,
    asked: Vec<&'static str>,
    problems: &'p mut Vec<Problem>,
    /// Where everything is.
    pub place: Place,
}

impl<'t, 'p> Reader<'t, 'p> {
    /// Reads `table`, which people know as `what`.
    pub fn new(
        source: Source<'t>,
        what: &'static str,
        table: &'t DeTable<'t>,
        span: &Range<usize>,
        problems: &'p mut Vec<Problem>,
    ) -> Self {
        let fields =
            table.iter().map(|(key, _)| (key.get_ref().to_string(), source.line(&key.span()))).collect();
        let place = Place { line: source.line(span), fields };
        Reader { source, what, table, asked: Vec::new(), problems, place }
    }

    fn value(&mut self, field: &'static str) -> Option<&'t Spanned<DeValue<'t>>> {
        self.asked.push(field);
        self.table.get(field)
    }

    /// Whether a field is there, whatever it is.
    pub fn has(&self, field: &str) -> bool {
        self.table.contains_key(field)
    }

    fn wrong(&mut self, field: &'static str, value: &DeValue<'_>, wanted: &str) {
        let reason = format!("{field} is {} {}", article(value.type_str()), value.type_str());
        self.note(field, reason, format!("write {wanted}"));
    }

    /// Notes a problem of a field.
    pub fn note(&mut self, field: &str, reason: String, remedy: String) {
        let line = self.place.of(field);
        self.problems.push(Problem { line, reason, remedy });
    }

    /// A text.
    pub fn text(&mut self, field: &'static str) -> Option<String> {
        let value = self.value(field)?.get_ref();
        let text = value.as_str().map(str::to_owned);
        if text.is_none() {
            self.wrong(field, value, &format!("{field} = \"...\""));
        }
        text
    }

    /// A path; relative ones begin at the configuration's folder.
    pub fn path(&mut self, field: &'static str) -> Option<PathBuf> {
        let folder = self.source.folder;
        self.text(field).map(|text| folder.join(text))
    }

    /// Whether a field is a number, whichever.
    pub fn is_number(&self, field: &str) -> bool {
        self.table.get(field).is_some_and(|value| value.get_ref().is_integer())
    }

    /// A number, not negative.
    pub fn number(&mut self, field: &'static str) -> Option<u64> {
        let value = self.value(field)?.get_ref();
        let number = value.as_integer().and_then(|n| u64::from_str_radix(n.as_str(), n.radix()).ok());
        if number.is_none() {
            match value.as_integer() {
                Some(n) => self.note(
                    field,
                    format!("{field} = {}", n.as_str()),
                    "write a number from 0 on".to_owned(),
                ),
                None => self.wrong(field, value, &format!("{field} = NUMBER")),
            }
        }
        number
    }

    /// A number that fits 32 bits.
    pub fn small(&mut self, field: &'static str) -> Option<u32> {
        let number = self.number(field)?;
        let small = u32::try_from(number).ok();
        if small.is_none() {
            self.note(field, format!("{field} = {number}"), "write a smaller number".to_owned());
        }
        small
    }

    /// Yes or no.
    pub fn switch(&mut self, field: &'static str) -> Option<bool> {
        let value = self.value(field)?.get_ref();
        let switch = value.as_bool();
        if switch.is_none() {
            self.wrong(field, value, &format!("{field} = true or {field} = false, without quotes"));
        }
        switch
    }

    /// A size.
    pub fn size(&mut self, field: &'static str) -> Option<Size> {
        if self.is_number(field) {
            return self.number(field).map(Size);
        }
        match self.text(field)?.parse() {
            Ok(size) => Some(size),
            Err(error) => {
                self.note(field, error.to_string(), format!("write {field} = \"64M\""));
                None
            }
        }
    }

    /// A text that says something: reason and remedy are the error's own, parted by its first colon.
    pub fn parsed<T: std::str::FromStr<Err: std::fmt::Display>>(&mut self, field: &'static str) -> Option<T> {
        match self.text(field)?.parse() {
            Ok(value) => Some(value),
            Err(error) => {
                let text: String = error.to_string();
                let (reason, remedy) = text.rsplit_once(": write ").unwrap_or((&text, "another one"));
                self.note(field, format!("{field}: {reason}"), format!("write {remedy}"));
                None
            }
        }
    }

    /// One of some words.
    pub fn word<T>(
        &mut self,
        field: &'static str,
        of: impl Fn(&str) -> Option<T>,
        words: &[&str],
    ) -> Option<T> {
        let text = self.text(field)?;
        let found = of(&text);
        if found.is_none() {
            let all: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
            self.note(field, format!("{field} = {text:?}"), format!("write one of {}", all.join(", ")));
        }
        found
    }

    /// Notes every field that nobody asked for.
    pub fn finish(self) -> Place {
        for (key, _) in self.table {
            let name = key.get_ref().as_ref();
            if !self.asked.contains(&name) {
                let line = self.source.line(&key.span());
                let remedy = match nearest(name, &self.asked) {
                    Some(near) => format!("write {near}, or leave it out"),
                    None => format!("leave it out: {} has {}", self.what, self.asked.join(", ")),
                };
                self.problems.push(Problem {
                    line,
                    reason: format!("{} has no {name:?}", self.what),
                    remedy,
                });
            }
        }
        self.place
    }
}

/// `a` or `an`.
fn article(word: &str) -> &'static str {
    if word.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" }
}

/// The known word that somebody probably meant.
pub fn nearest<'w>(word: &str, known: &[&'w str]) -> Option<&'w str> {
    let distance = |other: &str| -> usize {
        let other: Vec<char> = other.chars().collect();
        let mut row: Vec<usize> = (0..=other.len()).collect();
        for (i, a) in word.chars().take(64).enumerate() {
            let mut before = row[0];
            row[0] = i + 1;
            for (j, b) in other.iter().enumerate() {
                let change = before + usize::from(a != *b);
                before = row[j + 1];
                row[j + 1] = change.min(row[j] + 1).min(before + 1);
            }
        }
        row[other.len()]
    };
    known
        .iter()
        .map(|known| (distance(known), *known))
        .min()
        .filter(|(d, known)| *d <= 1 + known.len() / 4)
        .map(|(_, k)| k)
}
