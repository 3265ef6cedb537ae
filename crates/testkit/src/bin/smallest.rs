//! The smallest daemon: one image, one I/O core, one vhost-user socket. Shows how the crates fit; the crash tests kill it.
//!
//! ```text
//! cargo run -p ioplane-testkit --bin smallest -- /tmp/disk.sock disk.img [queues [cores]]
//! ```

use std::sync::Arc;

use ioplane_cores::{CoreSettings, Pool};
use ioplane_host::vhost_user::{ServerOptions, serve};
use ioplane_storage::{FileBacking, FileOptions};
use ioplane_virtio::blk::{Blk, BlkOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut words = std::env::args().skip(1);
    let (Some(socket), Some(image)) = (words.next(), words.next()) else {
        return Err("usage: smallest SOCKET IMAGE [QUEUES [CORES]]".into());
    };
    let queues = words.next().map_or(Ok(1), |word| word.parse())?;
    let cores = words.next().map_or(Ok(1), |word| word.parse())?;

    // Storage: locks the image, and waits until the I/O of a dead process on it has ended.
    let backing = FileBacking::open(FileOptions::new(image))?;
    // The model: what the guest sees.
    let options = BlkOptions {
        name: "disk".to_owned(),
        serial: "smallest".to_owned(),
        queues,
        queue_size: 256,
        read_only: false,
        logical_block: None,
    };
    let disk = Blk::new(options, backing);
    // Cores: the threads that poll.
    let pool = Arc::new(Pool::with(vec![CoreSettings::default(); cores])?);
    // The host: a task that owns the device and obeys its front end.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        let _handle = serve(disk, ServerOptions::new(socket, pool))?;
        println!("serving");
        std::future::pending().await
    })
}
