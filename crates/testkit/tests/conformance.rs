//! The conformance suite: every device on every host, with all six laws.

use ioplane_testkit::conformance;
use ioplane_testkit::conformance::adder::Adding;
use ioplane_testkit::conformance::blk::Disks;
use ioplane_testkit::conformance::dma::DmaKit;
use ioplane_testkit::conformance::mmio::Mmio;
use ioplane_testkit::conformance::net::Nics;
use ioplane_testkit::conformance::nic::{EmulatedNe2000, EmulatedRtl8139, Ne2000s, Rtl8139s};
use ioplane_testkit::conformance::ring::RingKit;
use ioplane_testkit::conformance::vhost_user::OverSocket;
use ioplane_testkit::conformance::virtio::PackedRings;
use ioplane_testkit::conformance::watched::{WatchedNe2000, WatchedRtl8139};

conformance!(toy_dma, DmaKit);
conformance!(toy_ring, RingKit);
conformance!(toy_virtio_in_process, Mmio(Adding));
conformance!(toy_virtio_over_vhost_user, OverSocket(Adding));
conformance!(virtio_blk_in_process, Mmio(Disks::Memory));
conformance!(virtio_blk_over_vhost_user, OverSocket(Disks::Memory));
conformance!(toy_virtio_packed_in_process, Mmio(PackedRings(Adding)));
conformance!(toy_virtio_packed_over_vhost_user, OverSocket(PackedRings(Adding)));
conformance!(virtio_blk_packed_in_process, Mmio(PackedRings(Disks::Memory)));
conformance!(virtio_blk_packed_over_vhost_user, OverSocket(PackedRings(Disks::Memory)));
conformance!(virtio_net_in_process, Mmio(Nics));
conformance!(virtio_net_over_vhost_user, OverSocket(Nics));
conformance!(virtio_net_packed_in_process, Mmio(PackedRings(Nics)));
conformance!(virtio_net_packed_over_vhost_user, OverSocket(PackedRings(Nics)));
conformance!(rtl8139_in_process, Rtl8139s(EmulatedRtl8139));
conformance!(ne2000_in_process, Ne2000s(EmulatedNe2000));
conformance!(rtl8139_under_watch, Rtl8139s(WatchedRtl8139));
conformance!(ne2000_under_watch, Ne2000s(WatchedNe2000));
