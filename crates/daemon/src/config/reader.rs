//! Reading one table of a TOML file, field by field: every problem is noted with its line, and reading goes on.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use ioplane_api::size::Size;
use ioplane_api::spec::{
    CoreForm, DiskForm, FieldSource, Flaw, Form, FunctionForm, NicForm, PoolForm, SwitchForm,
};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::problem::Problem;

/// The text, for lines.
#[derive(Debug, Clone, Copy)]
pub struct SourceText<'t> {
    /// All of it.
    pub text: &'t str,
    /// Folder that relative paths begin at.
    pub folder: &'t Path,
}

impl SourceText<'_> {
    /// The line of a span.
    pub fn line(&self, span: &Range<usize>) -> usize {
        let start = span.start.min(self.text.len());
        self.text.as_bytes()[..start].iter().filter(|byte| **byte == b'\n').count() + 1
    }
}

/// Where a table and its fields are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    pub line: usize,
    fields: BTreeMap<String, usize>,
}

impl Place {
    /// Line of a field, or of the table if the field is not there.
    pub fn of(&self, field: &str) -> usize {
        self.fields.get(field).copied().unwrap_or(self.line)
    }

    pub fn problem(&self, flaw: Flaw) -> Problem {
        Problem { line: self.of(flaw.field), reason: flaw.reason, remedy: flaw.remedy }
    }
}

/// Where a key goes that stands in the wrong table.
const ELSEWHERE: &[(&str, &[&str])] = &[
    ("[[disk]]", DiskForm::FIELDS),
    ("[[nic]]", NicForm::FIELDS),
    ("[[core]]", CoreForm::FIELDS),
    ("[[switch]]", SwitchForm::FIELDS),
    ("[pool]", PoolForm::FIELDS),
    ("[[pci]]", FunctionForm::FIELDS),
];

/// One table being read.
pub struct TableReader<'t, 'p> {
    source: SourceText<'t>,
    what: &'static str,
    table: &'t DeTable<'t>,
    asked: Vec<&'static str>,
    problems: &'p mut Vec<Problem>,
    /// Where everything is.
    pub place: Place,
}

impl<'t, 'p> TableReader<'t, 'p> {
    /// Reads `table`, which people know as `what`.
    pub fn new(
        source: SourceText<'t>,
        what: &'static str,
        table: &'t DeTable<'t>,
        span: &Range<usize>,
        problems: &'p mut Vec<Problem>,
    ) -> Self {
        let fields =
            table.iter().map(|(key, _)| (key.get_ref().to_string(), source.line(&key.span()))).collect();
        let place = Place { line: source.line(span), fields };
        TableReader { source, what, table, asked: Vec::new(), problems, place }
    }

    fn value(&mut self, field: &'static str) -> Option<&'t Spanned<DeValue<'t>>> {
        self.asked.push(field);
        self.table.get(field)
    }

    fn wrong(&mut self, field: &'static str, value: &DeValue<'_>, wanted: &str) {
        let reason = format!("{field} is {} {}", article(value.type_str()), value.type_str());
        self.note(field, reason, format!("write {wanted}"));
    }

    pub fn note(&mut self, field: &str, reason: String, remedy: String) {
        let line = self.place.of(field);
        self.problems.push(Problem { line, reason, remedy });
    }

    /// Whether a field is a number, whichever.
    fn is_number(&self, field: &str) -> bool {
        self.table.get(field).is_some_and(|value| value.get_ref().is_integer())
    }

    /// Notes every field that nobody asked for.
    pub fn finish(self) -> Place {
        for (key, _) in self.table {
            let name = key.get_ref().as_ref();
            if !self.asked.contains(&name) {
                let line = self.source.line(&key.span());
                let elsewhere = ELSEWHERE.iter().find(|(_, fields)| fields.contains(&name));
                let remedy = match (nearest(name, &self.asked), elsewhere) {
                    (Some(near), _) => format!("write {near}, or leave it out"),
                    (None, Some((part, _))) => {
                        format!("it goes into {part}: {} has {}", self.what, self.asked.join(", "))
                    }
                    (None, None) => format!("leave it out: {} has {}", self.what, self.asked.join(", ")),
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

impl FieldSource for TableReader<'_, '_> {
    fn has(&self, field: &str) -> bool {
        self.table.contains_key(field)
    }

    fn text(&mut self, field: &'static str) -> Option<String> {
        let value = self.value(field)?.get_ref();
        let text = value.as_str().map(str::to_owned);
        if text.is_none() {
            self.wrong(field, value, &format!("{field} = \"...\""));
        }
        text
    }

    fn path(&mut self, field: &'static str) -> Option<PathBuf> {
        let folder = self.source.folder;
        self.text(field).map(|text| folder.join(text))
    }

    fn number(&mut self, field: &'static str) -> Option<u64> {
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

    fn small(&mut self, field: &'static str) -> Option<u32> {
        let number = self.number(field)?;
        let small = u32::try_from(number).ok();
        if small.is_none() {
            self.note(field, format!("{field} = {number}"), "write a smaller number".to_owned());
        }
        small
    }

    fn switch(&mut self, field: &'static str) -> Option<bool> {
        let value = self.value(field)?.get_ref();
        let switch = value.as_bool();
        if switch.is_none() {
            self.wrong(field, value, &format!("{field} = true or {field} = false, without quotes"));
        }
        switch
    }

    fn size(&mut self, field: &'static str) -> Option<Size> {
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

    fn parsed<T: FromStr<Err: Display>>(&mut self, field: &'static str) -> Option<T> {
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

    fn word<T>(&mut self, field: &'static str, of: impl Fn(&str) -> Option<T>, words: &[&str]) -> Option<T> {
        let text = self.text(field)?;
        let found = of(&text);
        if found.is_none() {
            let all: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
            self.note(field, format!("{field} = {text:?}"), format!("write one of {}", all.join(", ")));
        }
        found
    }

    fn parsed_or_number<T: FromStr<Err: Display>>(&mut self, field: &'static str) -> Option<T> {
        if !self.is_number(field) {
            return self.parsed(field);
        }
        let number = self.number(field)?;
        let text = number.to_string();
        match text.parse() {
            Ok(value) => Some(value),
            Err(error) => {
                let text = error.to_string();
                let (_, remedy) = text.rsplit_once(": write ").unwrap_or((&text, "another one"));
                self.note(field, format!("{field} = {number}"), format!("write {remedy}"));
                None
            }
        }
    }
}

/// `a` or `an`.
fn article(word: &str) -> &'static str {
    if word.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" }
}

/// The known word that somebody probably meant.
pub fn nearest<'w>(word: &str, known: &[&'w str]) -> Option<&'w str> {
    let word: String = word.chars().take(64).collect();
    let near = known.iter().map(|known| (strsim::osa_distance(&word, known), *known)).min()?;
    // Two letters of four are another word: mode is not core.
    (near.0 <= 1 + near.1.len() / 5).then_some(near.1)
}
