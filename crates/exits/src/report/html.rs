//! The report as one HTML file that works without a network.

use std::fmt::Write as _;

use super::escape::Escaped;
use super::{ExitRow, Report, access, address};

const STYLE: &str = include_str!("report.css");
/// Sorts a table by the column whose head is clicked. Without it the tables are sorted by count.
const SCRIPT: &str = include_str!("report.js");
/// So many lines a table has.
const LINES: usize = 200;

impl Report {
    /// The whole report as a page.
    pub fn html(&self) -> String {
        let vm = Escaped(&self.vm);
        let mut out = format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
             <title>Exits of {vm}</title>\n<style>\n{STYLE}</style></head><body>\n<main>\n\
             <h1>Exits of {vm}</h1>\n<p>{program}, process {pid}, {vcpus} vCPUs, watched for {seconds:.1} s.</p>\n",
            program = Escaped(&self.program),
            pid = self.pid,
            vcpus = self.vcpus,
            seconds = self.seconds,
        );
        out.push_str("<dl>");
        let mut fact = |name: &str, value: String| {
            let _ = write!(out, "<div><dt>{name}</dt><dd>{value}</dd></div>");
        };
        fact("exits", grouped(self.exits));
        fact("a second", grouped((self.exits as f64 / self.seconds.max(1e-9)).round() as u64));
        fact("lost", grouped(self.lost));
        if let Some(count) = self.kernel.as_ref().and_then(ioplane_kvmstat::Totals::exits) {
            fact("KVM's own count", grouped(count));
        }
        if !self.functions.is_empty() {
            fact("functions named", format!("{:.1} %", self.functions_percent));
        }
        fact("registers named", format!("{:.1} %", self.devices_percent));
        out.push_str("</dl>\n");
        for note in &self.notes {
            let _ = writeln!(out, "<p class=\"note\">{}</p>", Escaped(note));
        }
        let _ = writeln!(out, "<figure>{}</figure>", self.svg());
        self.findings_html(&mut out);
        table(&mut out, "By reason", "reason", &self.reasons);
        if !self.functions.is_empty() {
            table(&mut out, "By guest function", "function", &self.functions);
        }
        table(&mut out, "By device and register", "device and register", &self.registers);
        table(&mut out, "By vCPU", "vCPU", &self.by_vcpu);
        self.sites_html(&mut out);
        self.vmm_html(&mut out);
        let _ = writeln!(out, "</main>\n<script>\n{SCRIPT}</script></body></html>");
        out
    }

    fn findings_html(&self, out: &mut String) {
        for finding in &self.findings {
            let _ = writeln!(
                out,
                "<section class=\"finding\"><h2>{} <code>{}</code></h2><p>{}</p><p><b>Remedy:</b> {}</p>\
                 <p>Expected: {}; {}.</p></section>",
                Escaped(&finding.title),
                Escaped(&finding.id),
                Escaped(&finding.evidence),
                Escaped(&finding.remedy),
                finding.expected(),
                finding.certainty,
            );
        }
    }

    fn vmm_html(&self, out: &mut String) {
        let Some(time) = &self.vmm else { return };
        let _ = writeln!(
            out,
            "<h2>In the VMM</h2><p>{}.</p><table><thead><tr><th>samples</th><th>%</th><th>function</th></tr></thead><tbody>",
            Escaped(&time.words())
        );
        for row in time.functions.iter().take(LINES) {
            let (samples, name) = (grouped(row.samples), Escaped(&row.name));
            let _ = writeln!(
                out,
                "<tr><td>{samples}</td><td>{:.2}</td><td><code>{name}</code></td></tr>",
                row.percent
            );
        }
        out.push_str("</tbody></table>\n");
    }

    fn sites_html(&self, out: &mut String) {
        head(out, "By instruction", "where</th><th>why</th><th>about what");
        for site in self.sites.iter().take(LINES) {
            numbers(out, &site.row);
            let about = match &site.place {
                Some(place) => format!("{}: {}{}", place.device, place.register, access(site.detail)),
                None => String::new(),
            };
            let bare = address(site.detail).unwrap_or_default();
            let _ = writeln!(
                out,
                "<td><code>{}</code></td><td>{}</td><td>{} <small>{}</small></td></tr>",
                Escaped(&site.row.name),
                Escaped(&site.reason_name),
                Escaped(&about),
                Escaped(&bare),
            );
        }
        out.push_str("</tbody></table>\n");
    }
}

fn head(out: &mut String, title: &str, last: &str) {
    let _ = writeln!(
        out,
        "<h2>{title}</h2><table><thead><tr><th>exits</th><th>a second</th><th>%</th><th>host ms</th>\
         <th>% of host time</th><th>us each</th><th>{last}</th></tr></thead><tbody>"
    );
}

fn numbers(out: &mut String, row: &ExitRow) {
    // What was not timed has no time, not none.
    let timed = |text: String| if row.ns_each.is_some() { text } else { String::new() };
    let _ = write!(
        out,
        "<tr><td>{}</td><td>{:.1}</td><td>{:.2}</td><td>{}</td><td>{}</td><td>{}</td>",
        grouped(row.count),
        row.rate,
        row.percent,
        timed(format!("{:.1}", row.host_ns as f64 / 1e6)),
        timed(format!("{:.2}", row.host_percent)),
        timed(format!("{:.1}", row.ns_each.unwrap_or(0) as f64 / 1e3)),
    );
}

/// Three digits at a time.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            // A narrow space at which no line breaks.
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

fn table(out: &mut String, title: &str, last: &str, rows: &[ExitRow]) {
    if rows.is_empty() {
        return;
    }
    head(out, title, last);
    for row in rows.iter().take(LINES) {
        numbers(out, row);
        let _ = writeln!(out, "<td>{}</td></tr>", Escaped(&row.name));
    }
    out.push_str("</tbody></table>\n");
}
