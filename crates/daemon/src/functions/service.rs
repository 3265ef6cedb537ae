//! What serves a function: a thread that owns it, its socket, its record, and what is to be done when it ends.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ioplane_host::vfio_user::Handle;
use ioplane_moving::PageSet;

use super::Card;
use super::body::Body;
use super::lending::Lender;
use crate::refusal::Refusal;
use crate::served::{ServedKind, Service, StateRecord, blocking};

/// What is done when nothing of the function is left. May block.
pub type After = Box<dyn FnOnce() -> Result<(), Refusal> + Send>;

/// The daemon's hold on one function.
pub struct ServedFunction {
    /// To talk to the thread that owns it.
    pub(super) handle: Handle<Body>,
    /// One change at a time.
    pub(super) changing: tokio::sync::Mutex<()>,
    /// Pages that it has written and its VMM could not be told of.
    unsent: Mutex<PageSet>,
    /// Who lends pages of its registers, if they may be.
    pub(super) lender: Option<Lender>,
    note: StateRecord<Card>,
    /// Done when it has ended, in that order.
    after: Arc<Mutex<Vec<After>>>,
    /// What could not be done when it was stopped.
    complaint: Mutex<Option<String>>,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ServedFunction {
    /// One that is served, and written down.
    pub(super) fn new(
        handle: Handle<Body>,
        note: StateRecord<Card>,
        after: Vec<After>,
        lender: Option<Lender>,
    ) -> Self {
        ServedFunction {
            handle,
            changing: tokio::sync::Mutex::default(),
            unsent: Mutex::default(),
            lender,
            note,
            after: Arc::new(Mutex::new(after)),
            complaint: Mutex::default(),
        }
    }

    /// Other things to be done when it has ended; returns those that were to be done.
    pub(super) fn replace_after(&self, after: Vec<After>) -> Vec<After> {
        std::mem::replace(&mut *lock(&self.after), after)
    }

    /// Keeps pages that the VMM could not be told of; returns those that were kept before.
    pub(super) fn keep_unsent(&self, pages: PageSet) -> PageSet {
        std::mem::replace(&mut *lock(&self.unsent), pages)
    }

    /// What could not be done when it was stopped.
    pub fn complaint(&self) -> Option<String> {
        lock(&self.complaint).clone()
    }
}

impl Service<Card> for ServedFunction {
    fn note(&self) -> &StateRecord<Card> {
        &self.note
    }

    fn socket(&self) -> &Path {
        self.handle.socket()
    }

    async fn in_use(&self) -> bool {
        self.handle.status().connected
    }

    async fn stop(&self, force: bool) -> Result<(), Refusal> {
        let _changing = self.changing.lock().await;
        if !force && self.in_use().await {
            return Err(Refusal::guest_uses(Card::NAME));
        }
        // Whoever keeps a page of it mapped keeps the host's driver from it.
        let _trapped = match &self.lender {
            Some(lender) => lender.take_back().await.map_err(|error| {
                let name = self.note.read().now.name;
                tracing::warn!(function = name, error, "stopped with registers that are mapped");
            }),
            None => Err(()),
        };
        let (handle, after) = (self.handle.clone(), self.after.clone());
        let complaints = blocking(move || {
            handle
                .stop(force)
                .map_err(|error| Refusal::conflict(error.to_string(), "shut the guest down first"))?;
            let after = std::mem::take(&mut *lock(&after));
            Ok(after.into_iter().filter_map(|end| end().err()).collect::<Vec<_>>())
        });
        // It is not served any more, whatever else could not be done.
        for Refusal { error, remedy, .. } in complaints.await? {
            let name = self.note.read().now.name;
            tracing::warn!(function = name, error, remedy, "stopped, and not all given back");
            *lock(&self.complaint) = Some(format!("not all was given back: {error}\n  hint: {remedy}"));
        }
        Ok(())
    }
}
