//! What is shown while something takes its time, and Ctrl-C meanwhile.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use anyhow::{Context, Result};
use tokio::signal::unix::{SignalKind, signal};

use crate::output::quiet;

/// A bar of bytes; only on a terminal, and not with `-q`.
#[derive(Debug)]
pub struct ByteBar(indicatif::ProgressBar);

impl ByteBar {
    pub fn new() -> Result<ByteBar> {
        let shown = !quiet() && std::io::stderr().is_terminal();
        let bar = if shown { indicatif::ProgressBar::new(0) } else { indicatif::ProgressBar::hidden() };
        let style = "{wide_bar} {bytes}/{total_bytes} {msg}";
        bar.set_style(indicatif::ProgressStyle::with_template(style).context("the progress bar")?);
        Ok(ByteBar(bar))
    }

    pub fn show(&self, done: u64, all: u64, words: String) {
        self.0.set_length(all);
        self.0.set_position(done);
        self.0.set_message(words);
    }

    pub fn clear(&self) {
        self.0.finish_and_clear();
    }
}

/// From now on neither Ctrl-C nor a termination or hang-up ends this process: for what must not be left half done.
pub fn ignore_signals() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let _entered = runtime.enter();
    // The process's handlers stay when these go.
    for kind in [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()] {
        let _ = signal(kind)?;
    }
    Ok(())
}

/// Becomes true by Ctrl-C, which ends this process no more: what it has begun would go on without anybody who looks at it.
pub fn interrupted() -> Result<Arc<AtomicBool>> {
    noted(&[SignalKind::interrupt()])
}

/// The same, and by a termination or a hang-up: for what nobody else goes on with when this process ends.
pub fn told_to_end() -> Result<Arc<AtomicBool>> {
    noted(&[SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()])
}

/// Becomes true by the first of these signals.
fn noted(kinds: &[SignalKind]) -> Result<Arc<AtomicBool>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut signals = {
        let _entered = runtime.enter();
        kinds.iter().map(|kind| signal(*kind)).collect::<Result<Vec<_>, _>>()?
    };
    let came = Arc::new(AtomicBool::new(false));
    let told = came.clone();
    std::thread::spawn(move || {
        runtime.block_on(std::future::poll_fn(|context| {
            match signals.iter_mut().any(|signal| signal.poll_recv(context).is_ready()) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        }));
        told.store(true, Ordering::SeqCst);
    });
    Ok(came)
}
