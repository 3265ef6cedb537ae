//! Ctrl-C and SIGTERM: the round that runs is finished, then what was started is ended and its folders are removed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, bail};
use tokio::signal::unix::{SignalKind, signal};

/// The run was ended from outside.
#[derive(Debug)]
pub struct Interrupted;

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// Whether the run is to be ended.
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Takes both signals from now on, until the process ends.
    pub fn watch() -> Result<Self> {
        let wanted = Arc::new(AtomicBool::new(false));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (mut interrupt, mut terminate) = {
            let _inside = runtime.enter();
            (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?)
        };
        let flag = wanted.clone();
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            runtime.block_on(async {
                loop {
                    tokio::select! {
                        _ = interrupt.recv() => {}
                        _ = terminate.recv() => {}
                    }
                    if flag.swap(true, Ordering::AcqRel) {
                        // The backends are killed with this process; only empty folders stay.
                        std::process::exit(super::INTERRUPTED.into());
                    }
                    eprintln!("ending after this round; once more ends at once");
                }
            });
        })?;
        Ok(Interrupt(wanted))
    }

    /// Fails once a signal has come.
    pub fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Acquire) {
            bail!(Interrupted);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_interrupted_is_known_from_a_failure() {
        let interrupt = Interrupt(Arc::new(AtomicBool::new(false)));
        assert!(interrupt.check().is_ok());
        interrupt.0.store(true, Ordering::Release);
        assert!(interrupt.check().unwrap_err().is::<Interrupted>());
    }
}
