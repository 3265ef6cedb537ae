//! Exports.

use std::time::{SystemTime, UNIX_EPOCH};

use ioplane_api::report::{ClaimReport, ExportReport, ReservationReport};
use ioplane_api::size::Size;
use ioplane_api::spec::LimitsSpec;

use super::device::limits;
use super::{error_lines, fact, group_of, state};
use crate::command::table::Table;

/// `publish list`.
pub fn exports(exports: &[ExportReport]) -> String {
    if exports.is_empty() {
        return "nothing is published: `ioplane publish disk` does that\n".to_owned();
    }
    let mut table =
        Table::new(&["NAME", "STATE", "SIZE", "MODE", "CLIENTS", "HOLDER", "ORIGIN", "LISTENS", "BACKING"]);
    for export in exports {
        table.row(vec![
            export.name.clone(),
            state(export.state, export.connections > 0).to_owned(),
            Size(export.size).to_string(),
            if export.read_only { "ro" } else { "rw" }.to_owned(),
            export.connections.to_string(),
            holder(export).unwrap_or_else(|| "-".to_owned()),
            export.origin.clone(),
            export.listen.clone().unwrap_or_else(|| export.socket.display().to_string()),
            backing(export),
        ]);
    }
    let mut text = table.to_string();
    for export in exports {
        text.push_str(&error_lines(&export.name, &export.error, &export.remedy, export.retry));
    }
    text
}

/// Who may use it alone.
fn holder(export: &ExportReport) -> Option<String> {
    export.claim.as_ref().filter(|claim| claim.held).map(|claim| claim.holder.clone())
}

/// A time, in the largest unit of which there are two.
fn rough(seconds: u64) -> String {
    let units = [(86_400, "days"), (3600, "hours"), (60, "minutes")];
    let fits = units.into_iter().find(|(unit, _)| seconds >= 2 * unit);
    fits.map_or_else(|| format!("{seconds} s"), |(unit, name)| format!("{} {name}", seconds / unit))
}

/// The same, with all that is known of the claim.
fn claim(export: &ExportReport) -> String {
    let Some(ClaimReport { generation, holder, held, since_s }) = &export.claim else {
        return if export.read_only { "needs none: nobody writes" } else { "none yet: any client may write" }
            .to_owned();
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let time = rough(now.saturating_sub(*since_s));
    match held {
        true => format!("{holder}, for {time} (generation {generation})"),
        false => format!("released {time} ago by {holder} (generation {generation}): any client may write"),
    }
}

fn backing(export: &ExportReport) -> String {
    let path = export.backing.path.as_ref().map(|path| path.display().to_string());
    path.unwrap_or_else(|| export.backing.kind.clone())
}

/// What all its clients may do together. Without limits nothing, unless somebody has just asked.
pub fn export_limits(export: &ExportReport, asked: bool) -> String {
    let mut text = limits("capacity", export.limits(), "requests", asked);
    for ReservationReport { by, iops, bandwidth, .. } in &export.reservations {
        let words = LimitsSpec::reserved(*iops, *bandwidth).rates("requests");
        text.extend(words.map(|words| fact("reserved", format!("{words}, by {by}"))));
    }
    text
}

/// `publish show`.
pub fn export(export: &ExportReport) -> String {
    let mode = if export.read_only { "read-only" } else { "writable" };
    let mut text = format!(
        "{}: {}, {}, {mode}, {}\n",
        export.name,
        backing(export),
        Size(export.size),
        state(export.state, export.connections > 0)
    );
    text += &fact("socket", export.socket.display());
    let whom = match (export.tls, &export.allow) {
        (false, _) => "in plain text, for whoever can reach it".to_owned(),
        (true, None) => "with TLS, for all hosts of the authority".to_owned(),
        (true, Some(hosts)) => format!("with TLS, for {hosts}"),
    };
    let listen = export.listen.as_ref().map(|listen| format!("{listen}, {whom}"));
    text += &fact("listens", listen.as_deref().unwrap_or("only on its socket"));
    let summed = match export.summed_connections {
        0 => String::new(),
        some => format!(", {some} with CRC32C"),
    };
    text += &fact(
        "clients",
        format!("{} connections of at most {}{summed}", export.connections, export.most_connections),
    );
    text += &fact("claim to write", claim(export));
    text += &fact("origin", &export.origin);
    text += &fact("preferred core", export.core.map_or("any".to_owned(), |core| core.to_string()));
    text += &group_of(export.group.as_deref());
    text += &export_limits(export, false);
    text.extend(export.trouble.as_ref().map(|trouble| fact("trouble", trouble)));
    text.extend(export.instance.as_ref().map(|instance| fact("instance", instance)));
    let totals = &export.totals;
    let (read, written) = (Size(totals.bytes_read), Size(totals.bytes_written));
    text += &fact("requests", format!("{}, {read} read, {written} written", totals.requests));
    let ends: Vec<String> = export.ends.iter().map(|(why, count)| format!("{count} {why}")).collect();
    if !ends.is_empty() {
        text += &fact("ended connections", ends.join(", "));
    }
    text + &error_lines(&export.name, &export.error, &export.remedy, export.retry)
}
