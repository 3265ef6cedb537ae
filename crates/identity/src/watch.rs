//! Looking for a newer list of revoked certificates, again and again.

use crate::directory::{IdentityDirectory, ListNews};
use crate::files::FileVersion;

/// Looks at the list of a directory whenever the file has changed, or could not be used the last time.
#[derive(Debug)]
pub struct ListWatch {
    identity: IdentityDirectory,
    /// The file whose list counts, or that is not there.
    seen: Option<Option<FileVersion>>,
    /// Why the file does not count, as it was told.
    told: Option<String>,
}

impl ListWatch {
    /// Nothing is looked at yet.
    pub fn new(identity: IdentityDirectory) -> ListWatch {
        ListWatch { identity, seen: None, told: None }
    }

    /// What is new. That a file does not count is told once for each reason.
    pub fn look(&mut self) -> ListNews {
        let found = FileVersion::of(&self.identity.list_file());
        if self.seen == Some(found) {
            return ListNews { ended: self.identity.ended(), ..ListNews::default() };
        }
        let mut news = self.identity.look_again();
        // What is wrong need not be with the file: then that never changes.
        self.seen = news.refused.is_none().then_some(found);
        let why = news.refused.as_ref().map(ToString::to_string);
        if why == self.told {
            news.refused = None;
        }
        self.told = why;
        news
    }
}
