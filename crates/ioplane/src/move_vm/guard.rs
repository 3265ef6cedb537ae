//! The images that keep a QEMU from migrating a guest with functions of ours, as `ioplane qemu-args` has them: taken away for a move that brings the
//! functions along, and put back if there is none.

use anyhow::Result;
use ioplane_api::request::NotedGuard;
use ioplane_cli::command::qemu::node;
use serde_json::{Value, json};

use super::monitor::Monitor;

/// Those of the functions that move, and what they are made of. A VM's other ones stay, and keep it here.
#[derive(Debug, Default)]
pub(super) struct Guards {
    nodes: Vec<Value>,
    removed: usize,
}

fn image(node: &str, file: &str) -> Value {
    json!({
        "driver": "vdi",
        "node-name": node,
        "read-only": true,
        "file": { "driver": "file", "filename": file },
    })
}

impl Guards {
    /// Finds them.
    pub fn of(monitor: &mut Monitor, functions: &[&str]) -> Result<Guards> {
        let own: Vec<String> = functions.iter().map(|name| node(name)).collect();
        let all = monitor.execute("query-named-block-nodes", &json!({ "flat": true }))?;
        let guard = |node: &Value| {
            let name = node["node-name"].as_str().filter(|name| own.iter().any(|own| own == name))?;
            let file = node["file"].as_str().filter(|_| node["drv"] == "vdi")?;
            Some(image(name, file))
        };
        Ok(Guards { nodes: all.as_array().into_iter().flatten().filter_map(guard).collect(), removed: 0 })
    }

    /// Those that a move had taken away when it was broken off, or was about to.
    pub fn taken(noted: &[NotedGuard]) -> Guards {
        let nodes: Vec<Value> = noted.iter().map(|NotedGuard { node, file }| image(node, file)).collect();
        Guards { removed: nodes.len(), nodes }
    }

    /// As they are written down.
    pub fn noted(&self) -> Vec<NotedGuard> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let noted = |node: &Value| NotedGuard {
            node: text(&node["node-name"]),
            file: text(&node["file"]["filename"]),
        };
        self.nodes.iter().map(noted).collect()
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
        let there = monitor.execute("query-named-block-nodes", &json!({ "flat": true }))?;
        while self.removed > 0 {
            let node = &self.nodes[self.removed - 1];
            let mut all = there.as_array().into_iter().flatten();
            // A move that was broken off may not have taken it away.
            if !all.any(|one| one["node-name"] == node["node-name"]) {
                monitor.execute("blockdev-add", node)?;
            }
            self.removed -= 1;
        }
        Ok(())
    }
}
