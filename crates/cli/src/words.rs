//! Words of the command line that have changed: the old one is read, with a warning. The table of all changed words, of other
//! interfaces as well, is in CHANGELOG.md.

use std::ffi::OsString;

/// A word that has changed.
#[derive(Debug)]
pub struct OldWord {
    /// The commands that know it.
    pub command: &'static [&'static str],
    /// As it was: an option, or the name of a command below `command`.
    pub old: &'static str,
    /// As it is.
    pub new: &'static str,
}

/// All of them. Each `old` is an alias of its option or command in [`crate::args`].
pub const OLD_WORDS: &[OldWord] = &[
    OldWord { command: &["qemu-args"], old: "--disk-only", new: "--device-only" },
    OldWord { command: &["upgrade"], old: "--patience", new: "--deadline" },
    OldWord { command: &["disk"], old: "twin", new: "migration-socket" },
    OldWord { command: &["disk", "add"], old: "--twin", new: "--migration-socket" },
    OldWord { command: &["qemu-args"], old: "--twin", new: "--migration-socket" },
    OldWord { command: &["core", "add"], old: "--manners", new: "--yield-policy" },
    OldWord { command: &["pci", "quiesce"], old: "--or-go-on", new: "--or-resume" },
    OldWord { command: &["exits", "apply"], old: "--folder", new: "--directory" },
    OldWord { command: &["exits", "callers"], old: "--folder", new: "--directory" },
];

/// Options that may stand before a command and have a value in the next word.
const WITH_VALUE: &[&str] = &["--socket", "--log"];

impl OldWord {
    /// Whether it is among `words`, behind the commands that know it.
    fn used(&self, words: &[&str]) -> bool {
        let mut commands = self.command.iter();
        let mut next = commands.next();
        for word in words {
            match next {
                Some(command) if word == command => next = commands.next(),
                // Another command, or the name of one is the value of an option.
                Some(_) if !word.starts_with('-') => return false,
                Some(_) => {}
                None if self.old.starts_with('-') => {
                    let rest = word.strip_prefix(self.old);
                    if rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('=')) {
                        return true;
                    }
                }
                None if word.starts_with('-') => {}
                None => return *word == self.old,
            }
        }
        false
    }
}

/// A warning for each old word among the arguments of a command line that could be read.
pub fn warnings(arguments: &[OsString]) -> Vec<String> {
    let words = arguments.iter().skip(1).map(|word| word.to_str().unwrap_or_default());
    let mut words = words.take_while(|word| *word != "--");
    let mut said = Vec::new();
    while let Some(word) = words.next() {
        if WITH_VALUE.contains(&word) {
            words.next();
        } else {
            said.push(word);
        }
    }
    let used = OLD_WORDS.iter().filter(|word| word.used(&said));
    used.map(|word| format!("{} is deprecated: use {}", word.old, word.new)).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::{CommandFactory, Parser};

    use super::*;
    use crate::args::Cli;

    /// The arguments and the value that a command with an old word needs.
    fn line(word: &OldWord, said: &str) -> Vec<OsString> {
        let line = match word.command {
            ["qemu-args"] => format!("ioplane qemu-args web {said}"),
            ["upgrade"] => format!("ioplane --socket /run/disk upgrade {said} 30"),
            ["disk"] => format!("ioplane disk --socket /run/x {said} web"),
            ["disk", "add"] => format!("ioplane disk add web --memory 1M {said} /run/web.sock"),
            ["core", "add"] => format!("ioplane -v core add {said}=nice"),
            ["pci", "quiesce"] => format!("ioplane pci quiesce card {said}"),
            ["exits", "apply"] => format!("ioplane exits apply pm-timer {said} /mnt/shared"),
            ["exits", "callers"] => format!("ioplane exits callers {said}=/mnt/shared"),
            other => panic!("how is an old word of {other:?} used?"),
        };
        line.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn old_words_mean_what_the_new_ones_do_and_are_warned_of() {
        for word in OLD_WORDS {
            let (old, new) = (line(word, word.old), line(word, word.new));
            let read = |line: &[OsString]| format!("{:?}", Cli::try_parse_from(line).unwrap().command);
            assert_eq!(read(&old), read(&new));
            let [warning] = &warnings(&old)[..] else { panic!("{old:?}: {:?}", warnings(&old)) };
            assert!(warning.contains(word.old) && warning.contains(word.new), "{warning}");
            assert_eq!(warnings(&new), [""; 0]);
        }
    }

    /// What is no option, or an option of another command, is none of them.
    #[test]
    fn other_uses_of_an_old_word_are_not_warned_of() {
        for line in [
            "ioplane disk add --disk-only",
            "ioplane qemu-args -- --disk-only",
            "ioplane --patience upgrade",
            "ioplane disk show twin",
            "ioplane --socket disk nic show twin",
            "ioplane disk --socket twin list",
        ] {
            let line: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            assert_eq!(warnings(&line), [""; 0]);
        }
    }

    #[test]
    fn every_hidden_alias_is_an_old_word_and_stands_in_the_changelog() {
        fn aliases(command: &clap::Command, all: &mut Vec<String>) {
            for argument in command.get_arguments() {
                let visible = argument.get_visible_aliases().unwrap_or_default();
                let named = argument.get_all_aliases().unwrap_or_default();
                let hidden = named.iter().filter(|alias| !visible.contains(alias));
                all.extend(hidden.map(|alias| format!("--{alias}")));
            }
            for below in command.get_subcommands() {
                let visible = |alias: &&str| below.get_visible_aliases().any(|other| other == *alias);
                let hidden = below.get_all_aliases().filter(|alias| !visible(alias));
                all.extend(hidden.map(str::to_owned));
                aliases(below, all);
            }
        }
        let mut all = Vec::new();
        aliases(&Cli::command(), &mut all);
        // A newer command that shares options with one of them knows their old words as well, and nobody has ever used those.
        let distinct: BTreeSet<&str> = all.iter().map(String::as_str).collect();
        assert_eq!(distinct, OLD_WORDS.iter().map(|word| word.old).collect());
        assert!(all.len() >= OLD_WORDS.len(), "{all:?}");
        let changelog = include_str!("../../../CHANGELOG.md");
        for OldWord { old, new, .. } in OLD_WORDS {
            assert!(all.contains(&(*old).to_owned()), "{old} is no alias");
            let row = |line: &&str| line.contains(&format!("`{old}`")) && line.contains(&format!("`{new}`"));
            assert!(changelog.lines().any(|line| row(&line)), "no row of CHANGELOG.md has {old} and {new}");
        }
    }
}
