//! The file in which a directory keeps whose names are whose.

use std::path::{Path, PathBuf};

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use serde::{Deserialize, Serialize};

use crate::device::{DeviceRecord, check_kept};
use crate::directory::NameChange;
use crate::error::NetbusError;
use crate::names::shown;

/// Name to [`Kept`] as JSON.
const DEVICES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("devices");

/// What is kept of a device.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    host: String,
    device: DeviceRecord,
}

/// A redb database: changes are whole and synced, or have not happened, whenever power fails.
#[derive(Debug)]
pub struct DirectoryStore {
    database: Database,
    path: PathBuf,
}

impl DirectoryStore {
    /// Opens or makes the file. One process has it at a time. Blocks.
    ///
    /// # Errors
    /// The file cannot be opened, is another's, or is no such database.
    pub fn open(path: &Path) -> Result<DirectoryStore, NetbusError> {
        let database = Database::create(path).map_err(|error| store(path, error))?;
        let store = DirectoryStore { database, path: path.to_owned() };
        // So that reading finds the table in a new file.
        store.apply(&[])?;
        Ok(store)
    }

    /// Everything that is kept: hosts and their devices. Blocks.
    ///
    /// # Errors
    /// The file cannot be read, or says what nobody can have put there.
    pub fn load(&self) -> Result<Vec<(String, DeviceRecord)>, NetbusError> {
        let failed = |error: redb::Error| store(&self.path, error);
        let read = self.database.begin_read().map_err(|error| failed(error.into()))?;
        let table = read.open_table(DEVICES).map_err(|error| failed(error.into()))?;
        let mut all = Vec::new();
        for row in table.iter().map_err(|error| failed(error.into()))? {
            let (name, kept) = row.map_err(|error| failed(error.into()))?;
            let bad = |why: String| NetbusError::Kept {
                path: self.path.display().to_string(),
                name: shown(name.value()),
                why,
            };
            let kept: Kept = serde_json::from_slice(kept.value()).map_err(|error| bad(error.to_string()))?;
            check_kept(name.value(), &kept.host, &kept.device).map_err(bad)?;
            all.push((kept.host, kept.device));
        }
        Ok(all)
    }

    /// Makes changes durable, all or none. Blocks until they are on disk.
    ///
    /// # Errors
    /// The file cannot be written: none of them is durable.
    pub fn apply(&self, changes: &[NameChange]) -> Result<(), NetbusError> {
        let failed = |error: redb::Error| store(&self.path, error);
        let write = self.database.begin_write().map_err(|error| failed(error.into()))?;
        {
            let mut table = write.open_table(DEVICES).map_err(|error| failed(error.into()))?;
            for change in changes {
                match change {
                    NameChange::Put(host, device) => {
                        let kept = Kept { host: host.clone(), device: device.clone() };
                        let text = serde_json::to_vec(&kept)
                            .map_err(|error| NetbusError::Malformed(error.to_string()))?;
                        table
                            .insert(device.name.as_str(), text.as_slice())
                            .map_err(|error| failed(error.into()))?;
                    }
                    NameChange::Remove(name) => {
                        table.remove(name.as_str()).map_err(|error| failed(error.into()))?;
                    }
                }
            }
        }
        write.commit().map_err(|error| failed(error.into()))
    }
}

fn store(path: &Path, error: impl Into<redb::Error>) -> NetbusError {
    NetbusError::Store { path: path.display().to_string(), source: Box::new(error.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_applied_is_there_after_opening_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("directory.redb");
        let put = |name: &str| NameChange::Put("host-a".to_owned(), DeviceRecord::sample(name));
        {
            let store = DirectoryStore::open(&path).unwrap();
            assert_eq!(store.load().unwrap(), []);
            store.apply(&[put("a"), put("b"), put("c")]).unwrap();
            store.apply(&[NameChange::Remove("b".to_owned())]).unwrap();
            assert!(matches!(DirectoryStore::open(&path), Err(NetbusError::Store { .. })), "opened twice");
        }
        let names: Vec<String> =
            DirectoryStore::open(&path).unwrap().load().unwrap().into_iter().map(|(_, d)| d.name).collect();
        assert_eq!(names, ["a", "c"]);
    }

    #[test]
    fn a_file_that_lies_or_is_something_else_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("directory.redb");
        std::fs::write(&path, "no database, but long enough to be one".repeat(1000)).unwrap();
        let error = DirectoryStore::open(&path).unwrap_err().to_string();
        assert!(error.contains("directory.redb"), "{error}");
        std::fs::remove_file(&path).unwrap();
        for kept in [
            "{",
            r#"{"host":"host-a","device":{"name":"other","kind":"disk","size":null,"location":"x","read_only":false,"users":0,"holder":null,"trouble":null}}"#,
        ] {
            let store = DirectoryStore::open(&path).unwrap();
            let write = store.database.begin_write().unwrap();
            write.open_table(DEVICES).unwrap().insert("mine", kept.as_bytes()).unwrap();
            write.commit().unwrap();
            let error = store.load().unwrap_err().to_string();
            assert!(error.contains("mine"), "{error}");
        }
    }
}
