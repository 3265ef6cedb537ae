//! A process that serves NICs on one switch with one I/O core: what the daemon does for them, without the daemon.
//!
//! Started by `network` and `elvis` as `ioplane-bench lan ...`, so that what is measured is the data path and the vhost-user
//! host, built as they are shipped.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use ioplane_cores::{CoreSettings, Notify, Pool, YieldPolicy};
use ioplane_host::vhost_user::{ServerOptions, serve};
use ioplane_network::{Mac, PortOptions, Switch, SwitchSettings};
use ioplane_virtio::net::{Net, NetOptions};

/// What to serve.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// The processor of the core.
    #[arg(long)]
    pub cpu: usize,
    /// The core waits for kicks; else it polls.
    #[arg(long)]
    pub notified: bool,
    /// The core chooses for each queue whether to poll.
    #[arg(long)]
    pub adaptive: bool,
    /// Queue pairs of each NIC.
    #[arg(long)]
    pub pairs: u16,
    /// The core never yields its processor, which nothing else is to use.
    #[arg(long)]
    pub dedicated: bool,
    /// Entries of each ring at most.
    #[arg(long)]
    pub ring: u16,
    /// A NIC: its address, `=`, and its socket.
    #[arg(long = "nic")]
    pub nics: Vec<Nic>,
}

#[derive(Debug, Clone)]
pub struct Nic {
    mac: Mac,
    socket: PathBuf,
}

impl FromStr for Nic {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (address, socket) = text.split_once('=').context("no '=' after the address")?;
        let bytes: Result<Vec<u8>, _> = address.split(':').map(|byte| u8::from_str_radix(byte, 16)).collect();
        let mac = bytes?.try_into().map_err(|_| anyhow!("{address} is no address of six bytes"))?;
        Ok(Nic { mac, socket: socket.into() })
    }
}

/// Serves until it is killed.
pub fn run(options: &Options) -> Result<()> {
    let notify = match (options.notified, options.adaptive) {
        (true, _) => Notify::Notified,
        (_, true) => Notify::Adaptive,
        _ => Notify::Polled,
    };
    let yield_policy = if options.dedicated { YieldPolicy::Dedicated } else { YieldPolicy::default() };
    let settings = CoreSettings { cpu: Some(options.cpu), notify, yield_policy, ..CoreSettings::default() };
    let pool = Arc::new(Pool::with([settings])?);
    let switch = Switch::new("bench", SwitchSettings::default());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        let mut serving = Vec::new();
        for (index, nic) in options.nics.iter().enumerate() {
            let name = format!("nic{index}");
            let mac = Some(nic.mac);
            let port = switch.plug(PortOptions { mac, pairs: options.pairs, ..PortOptions::new(&name) })?;
            let net = NetOptions {
                name,
                mac: nic.mac,
                pairs: options.pairs,
                queue_size: options.ring,
                mtu: 1500,
                control: false,
            };
            let server = ServerOptions::new(nic.socket.clone(), pool.clone());
            serving.push(serve(Net::new(net, port), server)?);
        }
        std::future::pending::<Result<()>>().await
    })
}
