//! `model`: the device state models that this program has. No daemon is needed.

use anyhow::Result;
use ioplane_api::refusal::Code;
use ioplane_cli::args::ModelCommand;
use ioplane_cli::command::table::Table;
use ioplane_cli::output::{CommandError, out, print};
use ioplane_model::{StateModel, draw};
use ioplane_passthrough::catalog;
use serde::Serialize;

/// One model, in short.
#[derive(Debug, Serialize)]
struct ModelReport {
    name: &'static str,
    title: &'static str,
    /// Vendor, device and revisions that it fits.
    fits: Vec<String>,
    registers: usize,
    regions: usize,
    /// All regions together.
    states: usize,
}

impl From<&StateModel> for ModelReport {
    fn from(model: &StateModel) -> Self {
        let fits = model.ids.iter().map(|id| {
            let which = format!("{:04x}:{:04x}", id.vendor, id.device);
            let revisions = id.revisions.map(|(first, last)| format!(" revisions {first:02x} to {last:02x}"));
            which + &revisions.unwrap_or_default()
        });
        ModelReport {
            name: model.name,
            title: model.title,
            fits: fits.collect(),
            registers: model.registers.len(),
            regions: model.regions.len(),
            states: model.regions.iter().map(|region| region.states.len()).sum(),
        }
    }
}

/// Does what was typed.
pub fn run(command: ModelCommand, json: bool) -> Result<()> {
    match command {
        ModelCommand::List => print(json, &all(), |models| list(models)),
        ModelCommand::Show { name, svg, dot } => {
            let Some(model) = catalog::named(&name) else {
                let names: Vec<&str> = catalog::models().iter().map(|model| model.name).collect();
                let remedy = format!("name one of {}", names.join(", "));
                let error = format!("there is no model {name}");
                return Err(CommandError::new(Code::NotFound, error, remedy).into());
            };
            match (svg, dot) {
                (true, _) => out(draw::svg(model).as_bytes()),
                (_, true) => out(draw::dot(model).as_bytes()),
                _ => print(json, &draw::chart(model), |_| draw::text(model)),
            }
        }
    }
}

fn all() -> Vec<ModelReport> {
    catalog::models().iter().map(|model| ModelReport::from(*model)).collect()
}

fn list(models: &[ModelReport]) -> String {
    let mut table = Table::new(&["NAME", "FITS", "REGISTERS", "REGIONS", "STATES", "WHAT IT IS"]);
    for model in models {
        table.row(vec![
            model.name.to_owned(),
            model.fits.join(", "),
            model.registers.to_string(),
            model.regions.to_string(),
            model.states.to_string(),
            model.title.to_owned(),
        ]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_model_is_listed() {
        let models = all();
        let listed = list(&models);
        for (model, row) in models.iter().zip(listed.lines().skip(1)) {
            assert!(row.starts_with(model.name) && row.ends_with(model.title), "{listed}");
            assert!(
                model.registers > 0 && model.states > model.regions && !model.fits.is_empty(),
                "{model:?}"
            );
        }
        assert!(run(ModelCommand::Show { name: "none".into(), svg: false, dot: false }, false).is_err());
    }
}
