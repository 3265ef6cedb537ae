//! Draws every state model from its table: `cargo run -p ioplane-passthrough --example draw -- docs/guide`.

use ioplane_model::draw;
use ioplane_passthrough::catalog;

fn main() -> std::io::Result<()> {
    let Some(folder) = std::env::args().nth(1) else {
        return Err(std::io::Error::other("name the folder to draw into, such as docs/guide"));
    };
    for model in catalog::models() {
        let path = std::path::Path::new(&folder).join(format!("model-{}.svg", model.name));
        std::fs::write(&path, draw::svg(model))?;
        println!("{}", path.display());
    }
    Ok(())
}
