//! `model`: the device state models that this program has. No daemon is needed.

use anyhow::Result;
use ioplane_api::refusal::Code;
use ioplane_cli::args::ModelCommand;
use ioplane_cli::command::table::Table;
use ioplane_cli::output::{CommandError, out, print};
use ioplane_model::{StateModel, draw};
use ioplane_moving::catalog as moving;
use ioplane_passthrough::catalog as mediated;
use serde::Serialize;

/// One model, in short.
#[derive(Debug, Serialize)]
struct ModelReport {
    name: &'static str,
    title: &'static str,
    /// The mode in which functions are added for it.
    mode: &'static str,
    /// Vendor, device and revisions that it fits.
    fits: Vec<String>,
    registers: usize,
    regions: usize,
    /// All regions together.
    states: usize,
}

impl ModelReport {
    fn new(mode: &'static str, model: &StateModel) -> Self {
        let fits = model.ids.iter().map(|id| {
            let which = format!("{:04x}:{:04x}", id.vendor, id.device);
            let revisions = id.revisions.map(|(first, last)| format!(" revisions {first:02x} to {last:02x}"));
            which + &revisions.unwrap_or_default()
        });
        ModelReport {
            name: model.name,
            title: model.title,
            mode,
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
            let Some((_, model)) = models().find(|(_, model)| model.name == name) else {
                let names: Vec<&str> = models().map(|(_, model)| model.name).collect();
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

/// All models, with the mode in which functions are added for each.
fn models() -> impl Iterator<Item = (&'static str, &'static StateModel)> {
    let mediated = mediated::models().iter().map(|model| ("mediated", *model));
    mediated.chain(moving::movable().iter().map(|direct| ("migratable", direct.model)))
}

fn all() -> Vec<ModelReport> {
    models().map(|(mode, model)| ModelReport::new(mode, model)).collect()
}

fn list(models: &[ModelReport]) -> String {
    let mut table = Table::new(&["NAME", "MODE", "FITS", "REGISTERS", "REGIONS", "STATES", "WHAT IT IS"]);
    for model in models {
        table.row(vec![
            model.name.to_owned(),
            model.mode.to_owned(),
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
