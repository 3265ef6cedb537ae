/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A virtual function whose driver cooperates with whoever moves it: the page that both share, and what a driver calls and is asked for.
 * The other side of the format is crates/passthrough/src/cooperating/page.rs of ioplane.
 */
#ifndef IOPLANE_COOP_H
#define IOPLANE_COOP_H

#include <linux/compiler.h>
#include <linux/types.h>

/* The page. */
#define IOPLANE_COOP_MAGIC	0x50436f69u
#define IOPLANE_COOP_FORMAT	1
/* Of the lock. The other bits count readers. */
#define IOPLANE_COOP_WRITER	0x80000000u
/* Of the flags, which the driver clears: memory is a copy. What the device wrote and nobody has seen may be missing, unless it was marked. */
#define IOPLANE_COOP_COPIED	1
/* The device stands still, and writes nothing any more. */
#define IOPLANE_COOP_STILL	2
/* The driver's: it has written to the pages of what the device wrote and nobody has seen. Only in place of STILL alone. */
#define IOPLANE_COOP_MARKED	4
/* Operations of entries. */
#define IOPLANE_COOP_KEEP	1
#define IOPLANE_COOP_CLEAR	2
#define IOPLANE_COOP_EQUAL	3
#define IOPLANE_COOP_AREA	4
#define IOPLANE_COOP_COUNTER	5
/* Entries that a page has room for. */
#define IOPLANE_COOP_MOST	252

/* How long a physical function may not answer, in jiffies: others wait for the turn meanwhile. */
#define IOPLANE_COOP_PATIENCE	(5 * HZ)

/* The vendor-specific capability: where its words are, and what is written to the last one and read from it. */
#define IOPLANE_COOP_CAP_ID	0x09
#define IOPLANE_COOP_CAP_LEN	20
#define IOPLANE_COOP_CAP_SIGNATURE	4
#define IOPLANE_COOP_CAP_LOW	0x08
#define IOPLANE_COOP_CAP_HIGH	0x0c
#define IOPLANE_COOP_CAP_CONTROL	0x10
#define IOPLANE_COOP_ANNOUNCE	1
#define IOPLANE_COOP_BELIEVED	1
#define IOPLANE_COOP_REFUSED	2

struct net_device;
struct pci_dev;
struct ioplane_coop;

/*
 * A driver, as this file knows it. `adapter` is what the driver has of a function. All but `list` are called with the lock held or, `mark`,
 * while the writer has it; one at a time.
 */
struct ioplane_coop_driver {
	/* The statistics registers that it reads, of 32 bits. */
	const u32 *counters;
	unsigned int counters_len;
	/* Says by ioplane_coop_add() what is done to the function around a move. false: it cannot be moved as it is now. */
	bool (*list)(void *adapter, struct ioplane_coop *coop);
	/* The interface is up: the device has its rings. */
	bool (*is_up)(void *adapter);
	/* Tells the physical function who the driver is, without a reset of the function, and brings the rings back if the interface is up.
	 * `copied`: memory is a copy, and what the device has written since the driver looked is not believed.
	 */
	int (*replay)(void *adapter, bool copied);
	/* That has failed: resets the function. Neither takes much longer than IOPLANE_COOP_PATIENCE. */
	void (*reset)(void *adapter);
	/* Tells the physical function its filters. */
	void (*filters)(void *adapter);
	/* Enables interrupts, and raises all of them once. */
	void (*raise)(void *adapter);
	/* Reads a register: what was written before has arrived. */
	void (*flush)(void *adapter);
	/* Touches what the device has written and the driver has not seen. false: it cannot tell all of it. */
	bool (*mark)(void *adapter);
};

/*
 * What a driver calls. Its adapter has a field `coop`; where the function has no such capability that is NULL, and none of this does anything.
 */

/* Looks for the capability. 0: *coop is set, or there is none. Afterwards the function can be moved. */
int ioplane_coop_probe(struct pci_dev *pdev, struct net_device *netdev, const struct ioplane_coop_driver *driver, void *adapter,
		       struct ioplane_coop **coop);
/* The interface is down, and nobody calls any more. */
void ioplane_coop_remove(struct ioplane_coop **coop);
/* Of `list`. What `offset` and `operand` mean is told with the operation. */
void ioplane_coop_add(struct ioplane_coop *coop, u32 operation, u32 offset, u64 operand);

void __ioplane_coop_announce(struct ioplane_coop *coop);
void __ioplane_coop_withdraw(struct ioplane_coop *coop);
bool __ioplane_coop_enter(struct ioplane_coop *coop);
void __ioplane_coop_leave(struct ioplane_coop *coop);
void __ioplane_coop_begin(struct ioplane_coop *coop);
void __ioplane_coop_end(struct ioplane_coop *coop);
void __ioplane_coop_touch(const void *from, unsigned int len);
/* Whether counters are kept in the page; else they are registers. */
bool __ioplane_coop_counts(struct ioplane_coop *coop);
u64 __ioplane_coop_counter(struct ioplane_coop *coop, u32 reg);
void __ioplane_coop_later(struct ioplane_coop *coop);
void __ioplane_coop_filters_later(struct ioplane_coop *coop);

#define ioplane_coop_if(adapter, call) \
	do { if (unlikely((adapter)->coop)) call; } while (0)
/* The rings are what they will be until the next time. The lock is held. */
#define ioplane_coop_announce(adapter)	ioplane_coop_if(adapter, __ioplane_coop_announce((adapter)->coop))
/* The page is no longer there, until it is announced again: whoever boots next does not know of it. Takes the lock. */
#define ioplane_coop_withdraw(adapter)	ioplane_coop_if(adapter, __ioplane_coop_withdraw((adapter)->coop))
/* The read lock, from any context. false: not now; call ioplane_coop_later(). */
#define ioplane_coop_enter(adapter)	(likely(!(adapter)->coop) || __ioplane_coop_enter((adapter)->coop))
#define ioplane_coop_leave(adapter)	ioplane_coop_if(adapter, __ioplane_coop_leave((adapter)->coop))
/* The same for whoever may sleep: waits, and brings the function back if it was moved. Not to be nested. */
#define ioplane_coop_begin(adapter)	ioplane_coop_if(adapter, __ioplane_coop_begin((adapter)->coop))
#define ioplane_coop_end(adapter)	ioplane_coop_if(adapter, __ioplane_coop_end((adapter)->coop))
/* The device wrote there: the processor does so too, since nobody else notices. */
#define ioplane_coop_touch(adapter, from, len)	ioplane_coop_if(adapter, __ioplane_coop_touch(from, len))
/* After ioplane_coop_enter() was false: somebody looks soon whether the lock is free again, and does what could not be done meanwhile. After
 * what must not be forgotten.
 */
#define ioplane_coop_later(adapter)	__ioplane_coop_later((adapter)->coop)
/* The same, and filters were not told to the physical function. */
#define ioplane_coop_filters_later(adapter)	__ioplane_coop_filters_later((adapter)->coop)
#endif
