//! Commands that show how far something is that the daemon does for long, and end it by Ctrl-C.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Result;
use ioplane_api::report::DiskReport;

use super::address;
use crate::client::Client;
use crate::progress::ByteBar;

/// Time between two looks at how far it is.
const LOOK: Duration = Duration::from_millis(200);

/// What is done to a disk for long.
pub trait LongWork: Sized {
    /// What a report of the disk says of it.
    fn of(disk: &DiskReport) -> Result<Self>;
    /// Whether it has not ended.
    fn is_under_way(&self) -> bool;
    /// Bytes that are done, of how many, and what to say beside.
    fn progress(&self) -> (u64, u64, String);
}

/// Shows how far it is until it has ended. Ctrl-C cancels it; that the command line goes in another way does not.
pub fn follow<W: LongWork>(
    client: &Client,
    name: &str,
    interrupted: &AtomicBool,
    cancel: &dyn Fn() -> Result<DiskReport>,
) -> Result<W> {
    let bar = ByteBar::new()?;
    loop {
        let disk: DiskReport = client.get(&address(name))?;
        let work = W::of(&disk)?;
        if !work.is_under_way() {
            bar.clear();
            return Ok(work);
        }
        if interrupted.load(Ordering::SeqCst) {
            bar.clear();
            return W::of(&cancel()?);
        }
        let (done, all, beside) = work.progress();
        bar.show(done, all, beside);
        std::thread::sleep(LOOK);
    }
}
