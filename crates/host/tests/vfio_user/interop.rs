//! The published crate `vfio_user` as a client.

use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::SeqCst;

use ioplane_testkit::toy::card::registers::*;
use ioplane_testkit::toy::card::{BAR0, MAPPED_AT};
use vfio_bindings::bindings::vfio;

use super::{count, eventfd, eventually, memory, served};

#[test]
fn the_published_client_drives_the_device() {
    let card = served();
    let mut client = vfio_user::Client::new(&card.socket()).expect("a version and all regions");
    let bar = client.region(0).expect("a BAR");
    assert_eq!((bar.size, bar.flags), (BAR0, 0xf));
    let [area] = &bar.sparse_areas[..] else { panic!("{:?}", bar.sparse_areas) };
    let file = bar.file_offset.as_ref().expect("a descriptor");
    assert_eq!((area.offset, area.size, file.start() + area.offset), (0x1000, 0x1000, MAPPED_AT));

    let mut id = [0; 4];
    client.region_read(vfio::VFIO_PCI_CONFIG_REGION_INDEX, 0, &mut id).unwrap();
    assert_eq!(id, [0x36, 0x1b, 0x79, 0x70]);
    let memory = memory(1 << 20);
    rustix::io::pwrite(&memory, &5u64.to_le_bytes(), 0x5000).unwrap();
    client.dma_map(0x4000, 1 << 30, 0x4000, memory.as_raw_fd()).unwrap();
    client.region_write(0, ADDRESS, &((1u64 << 30) + 0x1000).to_le_bytes()).unwrap();
    let mut data = [0; 8];
    client.region_read(0, DATA, &mut data).unwrap();
    assert_eq!(u64::from_le_bytes(data), 5);
    client.dma_unmap(1 << 30, 0x4000).unwrap();
    assert_eq!(card.seen.ranges.load(SeqCst), 0);

    assert_eq!(client.get_irq_info(2).unwrap().count, 4);
    let call = eventfd();
    let wire = vfio::VFIO_IRQ_SET_DATA_EVENTFD | vfio::VFIO_IRQ_SET_ACTION_TRIGGER;
    client.set_irqs(2, wire, 1, 1, &[call.as_raw_fd()]).unwrap();
    client.region_write(0, MSIX, &1u64.to_le_bytes()).unwrap();
    assert_eq!(count(&call), 1);
    let off = vfio::VFIO_IRQ_SET_DATA_NONE | vfio::VFIO_IRQ_SET_ACTION_TRIGGER;
    client.set_irqs(2, off, 0, 0, &[]).unwrap();
    client.region_write(0, MSIX, &1u64.to_le_bytes()).unwrap();
    assert_eq!(count(&call), 0);

    client.reset().unwrap();
    assert_eq!(card.seen.resets.load(SeqCst), 1);
    client.shutdown().unwrap();
    eventually("the end", || !card.handle.status().connected);
    assert!(card.handle.status().faults.is_empty(), "{:?}", card.handle.status());
}
