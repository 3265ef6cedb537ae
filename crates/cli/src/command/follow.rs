//! Commands that show how far something is that the daemon does for long, and end it by Ctrl-C.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use ioplane_api::report::DiskReport;

use super::address;
use crate::client::Client;
use crate::output::quiet;

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

/// Becomes true by Ctrl-C, which ends this process no more: the work would go on without anybody who looks at it.
pub fn interrupted() -> Result<Arc<AtomicBool>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut signal = {
        let _entered = runtime.enter();
        tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())?
    };
    let interrupted = Arc::new(AtomicBool::new(false));
    let noted = interrupted.clone();
    std::thread::spawn(move || {
        runtime.block_on(signal.recv());
        noted.store(true, Ordering::SeqCst);
    });
    Ok(interrupted)
}

/// Shows how far it is until it has ended. Ctrl-C cancels it; that the command line goes in another way does not.
pub fn follow<W: LongWork>(
    client: &Client,
    name: &str,
    interrupted: &AtomicBool,
    cancel: &dyn Fn() -> Result<DiskReport>,
) -> Result<W> {
    let shown = !quiet() && std::io::stderr().is_terminal();
    let bar = if shown { indicatif::ProgressBar::new(0) } else { indicatif::ProgressBar::hidden() };
    let style = "{wide_bar} {bytes}/{total_bytes} {msg}";
    bar.set_style(indicatif::ProgressStyle::with_template(style).context("the progress bar")?);
    loop {
        let disk: DiskReport = client.get(&address(name))?;
        let work = W::of(&disk)?;
        if !work.is_under_way() {
            bar.finish_and_clear();
            return Ok(work);
        }
        if interrupted.load(Ordering::SeqCst) {
            bar.finish_and_clear();
            return W::of(&cancel()?);
        }
        let (done, all, beside) = work.progress();
        bar.set_length(all);
        bar.set_position(done);
        bar.set_message(beside);
        std::thread::sleep(LOOK);
    }
}
