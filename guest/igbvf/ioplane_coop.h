/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A virtual function whose driver cooperates with whoever moves it: the page that both share, and what igbvf calls.
 * The other side of the format is crates/passthrough/src/cooperating/page.rs of ioplane.
 */
#ifndef IOPLANE_COOP_H
#define IOPLANE_COOP_H

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

struct igbvf_adapter;
struct igbvf_ring;
struct ioplane_coop;

/* What igbvf calls. Without the capability adapter->coop is NULL, and none of it does anything. */
int ioplane_coop_probe(struct igbvf_adapter *adapter);
void ioplane_coop_remove(struct igbvf_adapter *adapter);
/* The rings are what they will be until the next time. The lock is held. */
void ioplane_coop_announce(struct igbvf_adapter *adapter);
/* The page is no longer there, until it is announced again: whoever boots next does not know of it. */
void ioplane_coop_withdraw(struct igbvf_adapter *adapter);

bool __ioplane_coop_enter(struct igbvf_adapter *adapter);
void __ioplane_coop_leave(struct igbvf_adapter *adapter);
void __ioplane_coop_begin(struct igbvf_adapter *adapter);
void __ioplane_coop_end(struct igbvf_adapter *adapter);
void __ioplane_coop_touch(const void *from, unsigned int len);
u32 __ioplane_coop_counter(struct igbvf_adapter *adapter, u32 reg);
/* Somebody looks soon whether the lock is free again, and does what could not be done meanwhile. After what must not be forgotten. */
void ioplane_coop_later(struct igbvf_adapter *adapter);
/* Filters were not told to the PF. */
void ioplane_coop_filters_later(struct igbvf_adapter *adapter);

/* In netdev.c, for the replay. The lock is held. */
void igbvf_tell_filters(struct igbvf_adapter *adapter);
void igbvf_restore_vlan(struct igbvf_adapter *adapter);
void igbvf_set_rlpml(struct igbvf_adapter *adapter);

/* The read lock, from any context. false: not now; call ioplane_coop_later(). */
#define ioplane_coop_enter(adapter)	(likely(!(adapter)->coop) || __ioplane_coop_enter(adapter))
#define ioplane_coop_leave(adapter) \
	do { if (unlikely((adapter)->coop)) __ioplane_coop_leave(adapter); } while (0)
/* The same for whoever may sleep: waits, and brings the function back if it was moved. Not to be nested. */
#define ioplane_coop_begin(adapter) \
	do { if (unlikely((adapter)->coop)) __ioplane_coop_begin(adapter); } while (0)
#define ioplane_coop_end(adapter) \
	do { if (unlikely((adapter)->coop)) __ioplane_coop_end(adapter); } while (0)
/* The device wrote there: the processor does so too, since nobody else notices. */
#define ioplane_coop_touch(adapter, from, len) \
	do { if (unlikely((adapter)->coop)) __ioplane_coop_touch(from, len); } while (0)
/* A statistics register, as it goes on over moves; of memory, without an exit. */
#define ioplane_coop_counter(adapter, reg) \
	((adapter)->coop ? __ioplane_coop_counter(adapter, reg) : readl((adapter)->hw.hw_addr + (reg)))
#endif
