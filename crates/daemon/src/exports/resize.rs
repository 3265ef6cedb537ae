//! The size of an export, changed while clients use it (docs/decisions/0072-the-session-of-two-hosts.md).

use ioplane_api::refusal::Code;
use ioplane_api::size::Size;
use ioplane_api::spec::BackingSpec;
use tokio::sync::oneshot;

use super::PublishedDisk;
use super::owner::{Ask, Unresized};
use crate::refusal::Refusal;
use crate::served::ServedKind;

impl PublishedDisk {
    /// Gives it another size, and tells those who use it. Smaller only if that is said, and nobody has it attached.
    pub async fn resize(&self, Size(bytes): Size, shrink: bool) -> Result<(), Refusal> {
        let _changing = self.service.changing.lock().await;
        let record = self.note().read();
        let (name, before) = (&record.now.name, self.service.door.published().bytes());
        if bytes < before && !shrink {
            let (old, new) = (Size(before), Size(bytes));
            let error = format!("from {old} to {new}: what lies beyond would be lost");
            let remedy = "remove the disks that use it, shrink what is on it, then say --shrink";
            return Err(Refusal::conflict(error, remedy).coded(Code::LosesData).at("size"));
        }
        let ended = || Refusal::busy(format!("export {name} has just ended"), "try again");
        let (answer, resized) = oneshot::channel();
        if self.service.door.ask(Ask::Resize { bytes, answer }).await.is_err() {
            return Err(ended());
        }
        resized.await.map_err(|_| ended())?.map_err(|why| match why {
            Unresized::Attached(by) => {
                let remedy = "remove the disks that use it there first: they count on its size";
                Refusal::conflict(format!("export {name} would be smaller, and {by}"), remedy).at("size")
            }
            Unresized::Refused(error) => Refusal::from(error).at("size"),
        })?;
        // A file remembers by itself, and a device is as large as it is.
        self.note().change(|record| {
            if let BackingSpec::Memory { bytes: size } = &mut record.now.backing {
                *size = bytes;
            }
        })?;
        Ok(())
    }
}
