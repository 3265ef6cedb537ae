/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Batches of device accesses: the layout of docs/guide/batch.md, and what drivers call.
 */
#ifndef IOPLANE_BATCH_H
#define IOPLANE_BATCH_H

#include <linux/types.h>

/* CPUID: the first of two leaves at a multiple of 100h from 40000000h on. */
#define IOPLANE_BATCH_SIGNATURE "IOplaneBatch"
#define IOPLANE_BATCH_VERSION 1
#define IOPLANE_BATCH_MAGIC 0x42704f49 /* IOpB */
/* In EAX: the doorbell is a port where no device is. */
#define IOPLANE_BATCH_NOBODY 0xffffffffU

struct ioplane_batch_header {
	__le32 magic;
	__le16 version;
	__le16 count;
	__le16 done;
	__le16 status;
	__le32 reserved;
};

struct ioplane_batch_entry {
	u8 kind;
	u8 width;
	__le16 status;
	__le32 reserved;
	__le64 address;
	__le64 value;
};

enum ioplane_batch_kind {
	IOPLANE_READ_PORT,
	IOPLANE_WRITE_PORT,
	IOPLANE_READ_MEMORY,
	IOPLANE_WRITE_MEMORY,
};

/* Bits 16 to 31 of EAX. */
enum ioplane_batch_status {
	IOPLANE_BATCH_DONE,
	IOPLANE_BATCH_ADDRESS,
	IOPLANE_BATCH_HEADER,
	IOPLANE_BATCH_COUNT,
	IOPLANE_BATCH_ENTRY,
	IOPLANE_BATCH_NOT_STORED,
};

enum ioplane_entry_status {
	IOPLANE_ENTRY_UNTOUCHED,
	IOPLANE_ENTRY_DONE,
	IOPLANE_ENTRY_KIND,
	IOPLANE_ENTRY_WIDTH,
	IOPLANE_ENTRY_ADDRESS,
	IOPLANE_ENTRY_KERNEL,
	IOPLANE_ENTRY_MEMORY,
};

/**
 * struct ioplane_access - one access of a driver
 * @kind: an enum ioplane_batch_kind
 * @width: bytes: 1, 2, 4, and 8 for memory
 * @port: for ports
 * @physical: for memory: where the device is
 * @mapped: for memory: the same, as ioremap() has given it
 * @value: what is written, or what was read
 */
struct ioplane_access {
	u8 kind;
	u8 width;
	u16 port;
	phys_addr_t physical;
	void __iomem *mapped;
	u64 value;
};

int ioplane_batch(struct ioplane_access *accesses, unsigned int count);

#endif
