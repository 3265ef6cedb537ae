//! Flushes of an export that have failed are written down before they are answered (docs/decisions/0044-remote-requests-once.md).

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use ioplane_nbd::export::FlushRecorder;
use tokio::sync::{mpsc, oneshot};

use super::instance::ExportInstance;
use super::owner::Ask;
use super::told::ToldState;
use crate::flush_ledger::FlushLedger;
use crate::served::blocking;

/// How long after a number could not be written down it is tried again.
const AGAIN: Duration = Duration::from_secs(2);

/// Writes down which flushes have failed, until the export's owner is gone.
///
/// If that cannot be done the failures are answered, since a client that hears of one writes again what it has kept; then all connections are ended and nobody
/// is let in until it is done. Otherwise clients would go on for hours, and a restart would bring the instance back that they had before. Flushes that fail
/// meanwhile are answered as well: their connections could not end otherwise.
pub async fn keep(
    instance: ExportInstance,
    recorder: FlushRecorder,
    ledger: FlushLedger,
    told: ToldState,
    (owner, mut gone): (mpsc::WeakSender<Ask>, oneshot::Receiver<Infallible>),
) {
    let ledger = Arc::new(ledger);
    loop {
        let count = tokio::select! {
            count = recorder.next() => count,
            _ = &mut gone => return,
        };
        let now = instance.now();
        told.incarnation(&now);
        let saved = save(&ledger, count).await;
        instance.set_unrecorded(saved.clone().err());
        recorder.recorded(count);
        let Err(why) = saved else {
            tracing::error!(instance = now, "a flush has failed: the export is another instance from now on");
            continue;
        };
        tracing::error!(instance = now, why, "nobody may use the export");
        match owner.upgrade() {
            Some(owner) if owner.send(Ask::EndAll).await.is_ok() => {}
            _ => return,
        }
        loop {
            tokio::select! {
                () = tokio::time::sleep(AGAIN) => {}
                _ = recorder.next() => {}
                _ = &mut gone => return,
            }
            let count = recorder.count();
            told.incarnation(&instance.now());
            let saved = save(&ledger, count).await;
            instance.set_unrecorded(saved.clone().err());
            recorder.recorded(count);
            if saved.is_ok() {
                tracing::info!(
                    instance = instance.now(),
                    "the failed flush is written down: clients may come"
                );
                break;
            }
        }
    }
}

async fn save(ledger: &Arc<FlushLedger>, count: u64) -> Result<(), String> {
    let ledger = ledger.clone();
    let saved = blocking(move || Ok(ledger.save(count))).await;
    let saved = saved.map_err(|refused| refused.error).and_then(|saved| saved);
    saved.map_err(|why| format!("a flush has failed, and that cannot be written down: {why}"))
}

#[cfg(test)]
mod tests {
    use ioplane_api::spec::BackingSpec;
    use ioplane_nbd::export::FailedFlushes;

    use super::*;
    use crate::flush_ledger;

    /// Flushes that fail while the count of earlier ones cannot be written down are answered, and nobody is let in until it can.
    #[tokio::test]
    async fn all_that_fail_are_answered_while_it_cannot_be_written_down() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        std::fs::write(&path, "x").unwrap();
        let spec =
            BackingSpec::File { path, format: None, direct: Default::default(), engine: Default::default() };
        // As of a device: without attributes.
        let (count, ledger) = flush_ledger::open(&spec, None, folder.path()).unwrap();
        assert_eq!(count, 0);
        let records = folder.path().join("claims/flushes");
        let record = std::fs::read_dir(&records).unwrap().next().unwrap().unwrap().path();
        std::fs::remove_file(&record).unwrap();
        std::fs::create_dir(&record).unwrap();
        let failed = Arc::new(FailedFlushes::default());
        let instance = ExportInstance::new("image@boot", &failed);
        let told = ToldState::new(&instance.now(), 1 << 20);
        let ((owner, mut asked), (alive, gone)) = (mpsc::channel(4), oneshot::channel());
        let keeper = keep(instance.clone(), failed.recorder(), ledger, told, (owner.downgrade(), gone));
        let keeper = tokio::spawn(keeper);
        let first = failed.report().unwrap();
        assert!(matches!(asked.recv().await, Some(Ask::EndAll)));
        assert!(failed.is_recorded(first) && instance.unrecorded().is_some());
        // As the connections that are being ended: none is told that they are to end once more.
        for _ in 0..3 {
            let another = failed.report().unwrap();
            let answered = async {
                while !failed.is_recorded(another) {
                    tokio::task::yield_now().await;
                }
            };
            tokio::time::timeout(Duration::from_secs(60), answered).await.expect("it is not answered");
            assert!(instance.unrecorded().is_some());
        }
        assert!(asked.try_recv().is_err());
        std::fs::remove_dir(&record).unwrap();
        let last = failed.report().unwrap();
        let let_in = async {
            while instance.unrecorded().is_some() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), let_in).await.expect("nobody is let in");
        assert_eq!(flush_ledger::open(&spec, None, folder.path()).unwrap().0, last);
        drop(alive);
        keeper.await.unwrap();
    }
}
