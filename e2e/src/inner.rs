//! The `ioplane` binary as a daemon in L1, and its command line there.

use crate::daemon::binary;
use crate::l1::{Job, L1};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);

/// A running daemon in L1.
#[derive(Debug)]
pub struct Inner<'a> {
    l1: &'a L1,
    job: Job<'a>,
    folder: String,
}

impl L1 {
    /// Starts one with this configuration (TOML); it keeps its sockets in `/tmp/NAME` in L1, and a second one of the same name goes on
    /// where the first has ended.
    pub fn serve(&self, name: &str, config: &str) -> Result<Inner<'_>> {
        self.serve_with(name, config, "")
    }

    /// The same with `NAME=VALUE` words in its environment.
    pub fn serve_with(&self, name: &str, config: &str, environment: &str) -> Result<Inner<'_>> {
        let ioplane = binary()?;
        let (ioplane, folder) = (ioplane.display(), format!("/tmp/{name}"));
        let job = self.start(&format!(
            "mkdir -p {folder}; cat >{folder}/ioplane.toml <<'END'\n{config}\nEND\n\
             echo $$ >{folder}/pid; exec env {environment} {ioplane} --socket {folder}/control.sock serve --config {folder}/ioplane.toml"
        ))?;
        job.expect("ready", MINUTE).context("start ioplane in L1")?;
        Ok(Inner { l1: self, job, folder })
    }
}

impl Inner<'_> {
    fn command(&self, words: &str) -> Result<String> {
        Ok(format!("{} --socket {}/control.sock {words}", binary()?.display(), self.folder))
    }

    fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        error.context(format!("the daemon in L1 has said:\n{}", self.job.output()))
    }

    /// Runs `ioplane WORDS`; what it prints.
    pub fn text(&self, words: &str) -> Result<String> {
        self.text_within(words, MINUTE)
    }

    fn text_within(&self, words: &str, limit: Duration) -> Result<String> {
        self.l1.run(&self.command(words)?, limit).map_err(|error| self.explain(error))
    }

    /// Runs `ioplane WORDS --json`.
    pub fn json(&self, words: &str) -> Result<Value> {
        self.json_within(words, MINUTE)
    }

    /// The same for what takes longer.
    pub fn json_within(&self, words: &str, limit: Duration) -> Result<Value> {
        let said = self.text_within(&format!("{words} --json"), limit)?;
        serde_json::from_str(&said).with_context(|| format!("ioplane {words} prints no JSON: {said}"))
    }

    /// How often a driver that cooperates was told that its function is another one, once it has brought back the last one.
    pub fn brought_back(&self, function: &str) -> Result<u64> {
        let end = Instant::now() + MINUTE;
        loop {
            let shown = self.json(&format!("pci show {function}"))?;
            let driver = &shown["cooperation"];
            if driver["announced"] == true && driver["replayed"] == driver["moves"] {
                ensure!(shown["model"].is_null() && shown["mode"] == "cooperating", "{shown:#}");
                return driver["moves"].as_u64().with_context(|| shown.to_string());
            }
            ensure!(Instant::now() < end, "the driver does not bring its function back: {shown:#}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Register accesses of a function's guest that have come to it; each is an exit.
    pub fn accesses(&self, function: &str) -> Result<u64> {
        let shown = self.json(&format!("pci show {function}"))?;
        let count = |way: &str| shown["traffic"][way].as_u64();
        let both = count("reads").zip(count("writes"));
        both.map(|(reads, writes)| reads + writes).with_context(|| shown.to_string())
    }

    /// An error if a register of a function was accessed as its hardware forbids: the emulated card takes what silicon does not.
    pub fn breaks_no_rule(&self, function: &str) -> Result<()> {
        let faults = self.json(&format!("pci show {function}"))?["hardware_faults"].clone();
        ensure!(faults == serde_json::json!({}), "{function}: {faults}");
        Ok(())
    }

    /// How many pages of a function's registers its guest has mapped. One that has no time just now says nothing.
    pub fn mapped_pages(&self, function: &str) -> Result<u64> {
        Ok(self.json(&format!("pci show {function}"))?["mapped_pages"].as_u64().unwrap_or(0))
    }

    /// Waits until so many are.
    pub fn until_mapped(&self, function: &str, pages: u64) -> Result<()> {
        let end = Instant::now() + MINUTE;
        while self.mapped_pages(function)? != pages {
            ensure!(Instant::now() < end, "{pages} pages of {function} are not mapped: {}", self.said());
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// How often functions have come to rest here so far.
    pub fn rests(&self) -> usize {
        self.said().matches("stands still").count()
    }

    /// Waits until they have so often, for what `moving` does.
    pub fn until_rests(&self, count: usize, moving: &Job<'_>) -> Result<()> {
        let end = Instant::now() + 3 * MINUTE;
        while self.rests() < count {
            ensure!(
                Instant::now() < end && !moving.has_ended(),
                "it does not come to rest: {}",
                moving.output()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Starts `ioplane WORDS`.
    pub fn start(&self, words: &str) -> Result<Job<'_>> {
        self.l1.start(&format!("exec {}", self.command(words)?))
    }

    /// Runs what must be refused; what was said to that.
    pub fn refused(&self, words: &str) -> Result<String> {
        let ended = self.l1.start(&self.command(words)?)?.wait(MINUTE)?;
        ensure!(ended.status != 0, "ioplane {words} was not refused: {}", ended.output);
        Ok(ended.output)
    }

    /// What a guest of so much memory, some of it above 4 GiB, needs to have these PCI functions, for [`L1::debian_by`] with
    /// [`crate::Version::Newer`].
    pub fn guest_args(&self, functions: &[&str], memory_mib: u64) -> Result<String> {
        let mut line = crate::high::machine(memory_mib);
        for (n, name) in functions.iter().enumerate() {
            let memory = match (n, self.l1.huge) {
                (0, false) => format!("--memory {memory_mib}M"),
                (0, true) => format!("--memory {memory_mib}M --hugetlb 2M"),
                _ => "--device-only".to_owned(),
            };
            // A part of a script's line, which a shell reads.
            let said = self.text(&format!("qemu-args {name} {memory} --quoted --qemu-version 11.1"))?;
            line += &format!(" {}", said.trim().replace('\n', " "));
        }
        Ok(line)
    }

    /// What it has logged.
    pub fn said(&self) -> String {
        self.job.output()
    }

    /// Ends it by SIGTERM and waits.
    pub fn stop(self) -> Result<()> {
        self.l1.run(&format!("kill -TERM $(cat {}/pid)", self.folder), MINUTE)?;
        let ended = self.job.wait(MINUTE)?;
        ensure!(ended.status == 0, "the daemon in L1 ended with {}:\n{}", ended.status, ended.output);
        Ok(())
    }

    /// Signal 9.
    pub fn kill(self) -> Result<()> {
        self.job.kill()
    }
}
