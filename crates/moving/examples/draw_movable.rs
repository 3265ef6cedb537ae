//! Draws the model of every function that can be moved: `cargo run -p ioplane-moving --example draw_movable -- docs/guide`.

use ioplane_model::draw;
use ioplane_moving::catalog;

fn main() -> std::io::Result<()> {
    let Some(folder) = std::env::args().nth(1) else {
        return Err(std::io::Error::other("name the folder to draw into, such as docs/guide"));
    };
    for direct in catalog::movable() {
        let path = std::path::Path::new(&folder).join(format!("model-{}.svg", direct.model.name));
        std::fs::write(&path, draw::svg(direct.model))?;
        println!("{}", path.display());
    }
    Ok(())
}
