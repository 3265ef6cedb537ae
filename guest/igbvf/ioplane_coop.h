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
/* Of the flags: memory is a copy. What the device wrote and nobody has seen may be missing. The driver clears it. */
#define IOPLANE_COOP_COPIED	1
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
#endif
