//! Words of the command line that have changed: the old one is read, with a warning. The table of all changed words, of other
//! interfaces as well, is in CHANGELOG.md.

use std::ffi::OsString;

/// A word that has changed.
#[derive(Debug)]
pub struct OldWord {
    /// The commands that know it.
    pub command: &'static [&'static str],
    /// As it was.
    pub old: &'static str,
    /// As it is.
    pub new: &'static str,
}

/// All of them. Each `old` is an alias of its option in [`crate::args`].
pub const OLD_WORDS: &[OldWord] = &[
    OldWord { command: &["qemu-args"], old: "--disk-only", new: "--device-only" },
    OldWord { command: &["upgrade"], old: "--patience", new: "--deadline" },
];

/// A warning for each old word among the arguments of a command line that could be read.
pub fn warnings(arguments: &[OsString]) -> Vec<String> {
    let words: Vec<&str> =
        arguments.iter().skip(1).filter_map(|word| word.to_str()).take_while(|word| *word != "--").collect();
    let used = |word: &OldWord| {
        let mut commands = word.command.iter().peekable();
        let is_old = |said: &str| {
            said.strip_prefix(word.old).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
        };
        // Options of a command stand behind its name.
        words.iter().any(|said| match commands.peek() {
            Some(command) => {
                if said == *command {
                    commands.next();
                }
                false
            }
            None => is_old(said),
        })
    };
    let used = OLD_WORDS.iter().filter(|word| used(word));
    used.map(|word| format!("{} is deprecated: use {}", word.old, word.new)).collect()
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;
    use crate::args::Cli;

    /// The arguments and the value that a command with an old word needs.
    fn line(word: &OldWord, option: &str) -> Vec<OsString> {
        let line = match word.command {
            ["qemu-args"] => format!("ioplane qemu-args web {option}"),
            ["upgrade"] => format!("ioplane upgrade {option} 30"),
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
        for line in
            ["ioplane disk add --disk-only", "ioplane qemu-args -- --disk-only", "ioplane --patience upgrade"]
        {
            let line: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            assert_eq!(warnings(&line), [""; 0]);
        }
    }

    #[test]
    fn every_alias_of_an_option_is_an_old_word_and_stands_in_the_changelog() {
        fn aliases(command: &clap::Command, all: &mut Vec<String>) {
            for argument in command.get_arguments() {
                let hidden = argument.get_all_aliases().unwrap_or_default();
                all.extend(hidden.iter().map(|alias| format!("--{alias}")));
            }
            command.get_subcommands().for_each(|below| aliases(below, all));
        }
        let mut all = Vec::new();
        aliases(&Cli::command(), &mut all);
        assert_eq!(all.len(), OLD_WORDS.len(), "{all:?}");
        let changelog = include_str!("../../../CHANGELOG.md");
        for OldWord { old, new, .. } in OLD_WORDS {
            assert!(all.contains(&(*old).to_owned()), "{old} is no alias");
            let row = |line: &&str| line.contains(&format!("`{old}`")) && line.contains(&format!("`{new}`"));
            assert!(changelog.lines().any(|line| row(&line)), "no row of CHANGELOG.md has {old} and {new}");
        }
    }
}
