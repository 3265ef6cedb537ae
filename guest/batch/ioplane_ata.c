// SPDX-License-Identifier: GPL-2.0
/*
 * libata's register accesses as batches (ioplane_batch.c): the registers of a command with the status that follows them, and the set-up
 * of the bus master. Ports of IDE controllers that have libata's own methods for that get these instead, when the module is loaded; it
 * cannot be removed.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/ata.h>
#include <linux/delay.h>
#include <linux/libata.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/slab.h>

#include "ioplane_batch.h"

static char *driver = "ata_piix";
module_param(driver, charp, 0400);
MODULE_PARM_DESC(driver, "the driver of the controllers");

/* Accesses of one command: two rounds of five registers, the device register, the status. */
#define MOST 12

struct batch {
	struct ioplane_access accesses[MOST];
	unsigned int count;
};

/* How lib/iomap.c of x86 tells ports from memory: its tokens for ports are below this, and a port is their low 16 bits. */
#define PORT_TOKENS 0x40000UL

static bool is_port(const void __iomem *at)
{
	return at && (unsigned long)at < PORT_TOKENS;
}

static void add(struct batch *batch, u8 kind, u8 width, void __iomem *at, u32 value)
{
	if (WARN_ON_ONCE(batch->count == MOST))
		return;
	batch->accesses[batch->count++] = (struct ioplane_access){
		.kind = kind, .width = width, .port = (unsigned long)at & 0xffff, .value = value,
	};
}

static void write8(struct batch *batch, void __iomem *at, u8 value)
{
	add(batch, IOPLANE_WRITE_PORT, 1, at, value);
}

/* Carries them out, and returns what the last one has read. */
static u8 carry_out(struct batch *batch)
{
	if (!batch->count)
		return 0;
	WARN_ON_ONCE(ioplane_batch(batch->accesses, batch->count));
	return batch->accesses[batch->count - 1].value;
}

static void tf_load(struct ata_port *ap, const struct ata_taskfile *tf)
{
	struct ata_ioports *at = &ap->ioaddr;
	struct batch batch = {};
	u8 status;

	if (tf->ctl != ap->last_ctl) {
		iowrite8(tf->ctl, at->ctl_addr);
		ap->last_ctl = tf->ctl;
		ata_wait_idle(ap);
	}
	if (tf->flags & ATA_TFLAG_ISADDR) {
		if (tf->flags & ATA_TFLAG_LBA48) {
			/* The registers are two bytes deep: the upper ones first. */
			write8(&batch, at->feature_addr, tf->hob_feature);
			write8(&batch, at->nsect_addr, tf->hob_nsect);
			write8(&batch, at->lbal_addr, tf->hob_lbal);
			write8(&batch, at->lbam_addr, tf->hob_lbam);
			write8(&batch, at->lbah_addr, tf->hob_lbah);
		}
		write8(&batch, at->feature_addr, tf->feature);
		write8(&batch, at->nsect_addr, tf->nsect);
		write8(&batch, at->lbal_addr, tf->lbal);
		write8(&batch, at->lbam_addr, tf->lbam);
		write8(&batch, at->lbah_addr, tf->lbah);
	}
	if (tf->flags & ATA_TFLAG_DEVICE)
		write8(&batch, at->device_addr, tf->device);
	/* What waiting for the device begins with. */
	add(&batch, IOPLANE_READ_PORT, 1, at->status_addr, 0);
	status = carry_out(&batch);
	if (status & (ATA_BUSY | ATA_DRQ))
		ata_wait_idle(ap);
}

/* The command register, and the read behind it that has the write arrive. */
static void add_command(struct batch *batch, struct ata_port *ap, const struct ata_taskfile *tf)
{
	write8(batch, ap->ioaddr.command_addr, tf->command);
	add(batch, IOPLANE_READ_PORT, 1, ap->ioaddr.altstatus_addr, 0);
}

static void exec_command(struct ata_port *ap, const struct ata_taskfile *tf)
{
	struct batch batch = {};

	add_command(&batch, ap, tf);
	carry_out(&batch);
	/* The device has so long until its status is that of the command. */
	ndelay(400);
}

static void dma_setup(struct ata_queued_cmd *qc)
{
	struct ata_port *ap = qc->ap;
	void __iomem *master = ap->ioaddr.bmdma_addr;
	struct batch batch = {};
	u8 control;

	/* The table in memory, before the device is told of it. */
	mb();
	add(&batch, IOPLANE_WRITE_PORT, 4, master + ATA_DMA_TABLE_OFS, ap->bmdma_prd_dma);
	add(&batch, IOPLANE_READ_PORT, 1, master + ATA_DMA_CMD, 0);
	control = carry_out(&batch) & ~(ATA_DMA_WR | ATA_DMA_START);
	if (!(qc->tf.flags & ATA_TFLAG_WRITE))
		control |= ATA_DMA_WR;
	batch.count = 0;
	write8(&batch, master + ATA_DMA_CMD, control);
	add_command(&batch, ap, &qc->tf);
	carry_out(&batch);
	ndelay(400);
}

static bool replace(struct ata_port *ap)
{
	const struct ata_ioports *at = &ap->ioaddr;
	struct ata_port_operations *own;
	unsigned long flags;

	if (ap->ops->sff_tf_load != ata_sff_tf_load || ap->ops->sff_exec_command != ata_sff_exec_command ||
	    ap->ops->sff_check_status != ata_sff_check_status)
		return false;
	if (!is_port(at->feature_addr) || !is_port(at->device_addr) || !is_port(at->status_addr) ||
	    !is_port(at->ctl_addr) || !is_port(at->altstatus_addr) || !is_port(at->command_addr))
		return false;
	own = kmemdup(ap->ops, sizeof(*own), GFP_KERNEL);
	if (!own)
		return false;
	own->sff_tf_load = tf_load;
	own->sff_exec_command = exec_command;
	if (own->bmdma_setup == ata_bmdma_setup && is_port(at->bmdma_addr))
		own->bmdma_setup = dma_setup;
	spin_lock_irqsave(ap->lock, flags);
	WRITE_ONCE(ap->ops, own);
	spin_unlock_irqrestore(ap->lock, flags);
	return true;
}

static int __init ata_init(void)
{
	struct pci_dev *pci = NULL;
	unsigned int replaced = 0;

	for_each_pci_dev(pci) {
		struct ata_host *host;
		unsigned int port;

		if (pci->class >> 8 != PCI_CLASS_STORAGE_IDE)
			continue;
		/* Its driver neither comes nor goes meanwhile. */
		device_lock(&pci->dev);
		host = pci_get_drvdata(pci);
		if (pci->dev.driver && !strcmp(pci->dev.driver->name, driver) && host)
			for (port = 0; port < host->n_ports; port++)
				replaced += replace(host->ports[port]);
		device_unlock(&pci->dev);
	}
	if (!replaced)
		return -ENODEV;
	pr_info("%u ports of %s use batches\n", replaced, driver);
	return 0;
}

module_init(ata_init);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("libata's register accesses as batches");
