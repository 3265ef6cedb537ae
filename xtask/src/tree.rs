//! The files of the workspace, each read once.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::source::Source;

/// Folders that hold nothing of ours.
const SKIPPED: [&str; 5] = ["target", ".git", "corpus", "artifacts", "node_modules"];

/// Where the lists of what a rule allows lie.
pub const REASONS: &str = "xtask/reasons/";

/// Everything that the rules look at. Paths are relative to the root, with `/`.
#[derive(Debug, Default)]
pub struct Tree {
    /// Rust sources.
    pub rust: Vec<Source>,
    /// Shell scripts: by ending or by first line.
    pub shell: Vec<Page>,
    /// Markdown.
    pub docs: Vec<Page>,
    /// Lists of what a rule allows for a reason.
    pub reasons: Vec<Page>,
    /// Every file and folder there is.
    pub paths: Vec<String>,
    /// What `cargo metadata` says of the workspace's packages.
    pub packages: serde_json::Value,
}

/// A text file that is not Rust.
#[derive(Debug)]
pub struct Page {
    /// Where.
    pub path: String,
    /// What.
    pub text: String,
}

/// The workspace's root: the folder above this package.
pub fn root() -> Result<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    Ok(here.parent().context("xtask lies in the workspace")?.to_owned())
}

impl Tree {
    /// Reads the workspace at `root`.
    pub fn read(root: &Path) -> Result<Self> {
        let mut tree = Tree { packages: metadata(root)?, ..Tree::default() };
        tree.walk(root, root)?;
        tree.paths.sort();
        Ok(tree)
    }

    /// The first file of every library and program of the workspace.
    pub fn roots(&self) -> Vec<String> {
        let workspace = self.packages["workspace_root"].as_str().unwrap_or_default();
        let packages = self.packages["packages"].as_array().into_iter().flatten();
        let targets = packages.flat_map(|package| package["targets"].as_array().into_iter().flatten());
        let built = targets.filter(|target| {
            let kinds = target["kind"].as_array().into_iter().flatten();
            kinds.filter_map(|kind| kind.as_str()).any(|kind| kind == "lib" || kind == "bin")
        });
        let paths = built.filter_map(|target| target["src_path"].as_str()?.strip_prefix(workspace));
        paths.map(|path| path.trim_start_matches('/').to_owned()).collect()
    }

    fn walk(&mut self, root: &Path, folder: &Path) -> Result<()> {
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            let kind = entry.file_type()?;
            let below = path.strip_prefix(root)?.to_string_lossy().replace('\\', "/");
            if kind.is_dir() {
                if !SKIPPED.contains(&name.as_str()) {
                    self.paths.push(below);
                    self.walk(root, &path)?;
                }
            } else if kind.is_file() {
                self.paths.push(below.clone());
                self.file(&path, below)?;
            }
        }
        Ok(())
    }

    fn file(&mut self, path: &Path, below: String) -> Result<()> {
        let ending = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
        let reasons = below.starts_with(REASONS);
        if !["rs", "md", "sh", ""].contains(&ending) && !reasons {
            return Ok(());
        }
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            // Somebody moved it while we walked.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error).with_context(|| below),
        };
        let Ok(text) = String::from_utf8(bytes) else { return Ok(()) };
        match ending {
            _ if reasons => self.reasons.push(Page { path: below, text }),
            "rs" => self.rust.push(Source::new(below, text)),
            "md" => self.docs.push(Page { path: below, text }),
            "sh" => self.shell.push(Page { path: below, text }),
            _ if text.starts_with("#!") && text.lines().next().is_some_and(|line| line.ends_with("sh")) => {
                self.shell.push(Page { path: below, text });
            }
            _ => {}
        }
        Ok(())
    }
}

fn metadata(root: &Path) -> Result<serde_json::Value> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let output = std::process::Command::new(cargo)
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(root)
        .output()
        .context("running cargo metadata")?;
    anyhow::ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}
