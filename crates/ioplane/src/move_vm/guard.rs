//! The images that keep a QEMU from migrating a guest with functions of ours, as `ioplane qemu-args` has them: taken away for a move that brings the
//! functions along, and put back if there is none.

use anyhow::Result;
use ioplane_cli::command::qemu::node;
use serde_json::{Value, json};

use super::monitor::Monitor;

/// Those of the functions that move, and what they are made of. A VM's other ones stay, and keep it here.
#[derive(Debug, Default)]
pub(super) struct Guards {
    nodes: Vec<Value>,
    removed: usize,
}

impl Guards {
    /// Finds them.
    pub fn of(monitor: &mut Monitor, functions: &[&str]) -> Result<Guards> {
        let own: Vec<String> = functions.iter().map(|name| node(name)).collect();
        let all = monitor.execute("query-named-block-nodes", &json!({ "flat": true }))?;
        let guard = |node: &Value| {
            let name = node["node-name"].as_str().filter(|name| own.iter().any(|own| own == name))?;
            let file = node["file"].as_str().filter(|_| node["drv"] == "vdi")?;
            Some(json!({
                "driver": "vdi",
                "node-name": name,
                "read-only": true,
                "file": { "driver": "file", "filename": file },
            }))
        };
        Ok(Guards { nodes: all.as_array().into_iter().flatten().filter_map(guard).collect(), removed: 0 })
    }

    /// Whether this reason against a migration is one of them.
    pub fn explain(&self, why: &str) -> bool {
        let named =
            |node: &Value| node["node-name"].as_str().is_some_and(|name| why.contains(&format!("'{name}'")));
        self.nodes.iter().any(named)
    }

    /// Takes them away.
    pub fn remove(&mut self, monitor: &mut Monitor) -> Result<()> {
        for node in &self.nodes[self.removed..] {
            monitor.execute("blockdev-del", &json!({ "node-name": node["node-name"] }))?;
            self.removed += 1;
        }
        Ok(())
    }

    /// Puts back those that were.
    pub fn put_back(&mut self, monitor: &mut Monitor) -> Result<()> {
        while self.removed > 0 {
            monitor.execute("blockdev-add", &self.nodes[self.removed - 1])?;
            self.removed -= 1;
        }
        Ok(())
    }
}
