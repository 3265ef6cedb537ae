//! The long help of every command, and what completion offers.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::Command;

use ioplane_testkit::golden;

/// What a command prints, on a host that has set nothing, 100 columns wide.
fn printed(args: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ioplane"));
    command.args(args).env_clear().env("COLUMNS", "100").stdin(std::process::Stdio::null());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The commands that a help text lists, without `help` itself.
fn listed(help: &str) -> Vec<String> {
    let list = help
        .lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| line.starts_with("  "));
    let names = list.filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    names.filter(|name| !name.is_empty() && *name != "help").map(str::to_owned).collect()
}

/// The help of `command` and of those below it.
fn collect(command: &[String], all: &mut String) -> usize {
    let words: Vec<&str> = command.iter().map(String::as_str).collect();
    let help = printed(&[&words[..], &["--help"]].concat());
    let _ = writeln!(all, "== ioplane {}\n{}", words.join(" "), help.trim_end());
    let below = listed(&help).into_iter().map(|name| collect(&[command, &[name]].concat(), all));
    1 + below.sum::<usize>()
}

#[test]
fn of_every_command() {
    let mut all = String::new();
    assert!(collect(&[], &mut all) > 40, "they are not all found");
    golden!("help.text").check(&all);
}

/// By bash's script: `cmd="..."` where a word leads from a command to one below it, and `opts="..."` of each.
#[test]
fn completions() {
    let script = printed(&["completion", "bash"]);
    let mut options: BTreeMap<&str, &str> = BTreeMap::new();
    let mut command = "";
    for line in script.lines().map(str::trim) {
        if let Some(name) = line.strip_suffix(')').filter(|name| name.starts_with("ioplane")) {
            command = name;
        }
        if let Some(opts) = line.strip_prefix("opts=\"").and_then(|rest| rest.strip_suffix('"')) {
            options.insert(command, opts);
        }
    }
    assert!(options.len() > 40, "they are not all found");
    let text: String = options
        .iter()
        .map(|(command, opts)| {
            format!("{}:{}\n", command.replace("__subcmd", "").replace("__", " "), spaced(opts))
        })
        .collect();
    golden!("completions.text").check(&text);
    for shell in ["zsh", "fish", "elvish", "powershell"] {
        assert!(printed(&["completion", shell]).contains("qemu-args"), "{shell}");
    }
}

fn spaced(opts: &str) -> String {
    opts.split_whitespace().map(|opt| format!(" {opt}")).collect()
}
