//! Keys that have changed: the old one is read, with a warning that names its line. Which there are is known to the forms of `ioplane-api`.

use std::borrow::Cow;

use ioplane_api::spec::{CoreForm, DiskForm, Form, FunctionForm, NicForm, SwitchForm};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::problem::Problem;
use super::reader::SourceText;

/// The tables, and the old and new names of their keys.
const TABLES: &[(&str, &[(&str, &str)])] = &[
    ("core", CoreForm::OLD_FIELDS),
    ("disk", DiskForm::OLD_FIELDS),
    ("switch", SwitchForm::OLD_FIELDS),
    ("nic", NicForm::OLD_FIELDS),
    ("pci", FunctionForm::OLD_FIELDS),
];

/// Gives every key of `document` the name of today, and adds a warning for each that had an old one. A key that is there by both
/// names is a problem.
pub fn rename(
    document: &mut DeTable<'_>,
    source: SourceText<'_>,
    warnings: &mut Vec<Problem>,
    problems: &mut Vec<Problem>,
) {
    for (kind, old_keys) in TABLES {
        let Some(DeValue::Array(array)) = document.get_mut(*kind).map(Spanned::get_mut) else { continue };
        for item in array.iter_mut() {
            let DeValue::Table(table) = item.get_mut() else { continue };
            for (old, new) in *old_keys {
                let Some((key, value)) = table.remove_entry(*old) else { continue };
                let line = source.line(&key.span());
                if table.contains_key(*new) {
                    let reason = format!("{old} is the old name of {new}, and {new} is there too");
                    problems.push(Problem { line, reason, remedy: format!("leave {old} out") });
                } else {
                    let reason = format!("{old} is deprecated");
                    warnings.push(Problem { line, reason, remedy: format!("write {new}") });
                    table.insert(Spanned::new(key.span(), Cow::Borrowed(*new)), value);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::Config;

    #[test]
    fn an_old_key_is_read_as_the_new_one_with_a_warning() {
        let read = |core: &str, disk: &str| {
            let text = format!(
                "[[core]]\n{core} = \"nice\"\n[[disk]]\nname = \"a\"\nmemory = \"1M\"\n{disk} = \"a.sock\"\n"
            );
            Config::parse(Path::new("/etc/c.toml"), &text).unwrap_or_else(|problems| panic!("{problems}"))
        };
        let (old, new) = (read("manners", "twin"), read("yield_policy", "migration_socket"));
        assert_eq!((&old.cores[0].0, &old.disks[0].0), (&new.cores[0].0, &new.disks[0].0));
        let said: Vec<_> = old.warnings.iter().map(|warning| (warning.line, &*warning.remedy)).collect();
        assert_eq!(said, [(2, "write yield_policy"), (6, "write migration_socket")]);
        assert!(new.warnings.is_empty());
    }

    #[test]
    fn a_key_by_both_names_is_refused() {
        let text =
            "[[disk]]\nname = \"a\"\nmemory = \"1M\"\ntwin = \"a.sock\"\nmigration_socket = \"b.sock\"\n";
        let problems = Config::parse(Path::new("/etc/c.toml"), text).unwrap_err();
        assert_eq!(
            problems.to_string(),
            "/etc/c.toml:4: twin is the old name of migration_socket, and migration_socket is there too\n  \
             hint: leave twin out"
        );
    }

    /// A problem of an old key has its line.
    #[test]
    fn what_is_wrong_with_an_old_key_is_told_by_the_new_name() {
        let text = "[[disk]]\nname = \"a\"\nmemory = \"1M\"\ntwin = 1\n";
        let problems = Config::parse(Path::new("/etc/c.toml"), text).unwrap_err();
        let [problem] = &problems.list[..] else { panic!("{problems}") };
        assert_eq!((problem.line, &*problem.reason), (4, "migration_socket is an integer"));
    }
}
