/* SPDX-License-Identifier: GPL-2.0 */
/* What of igbvf is needed to bring its function back after a move. */
#ifndef IGBVF_COOP_H
#define IGBVF_COOP_H

#include "ioplane_coop.h"

struct igbvf_adapter;

int igbvf_coop_probe(struct igbvf_adapter *adapter);

/* In netdev.c, for the replay. The lock is held. */
void igbvf_tell_filters(struct igbvf_adapter *adapter);
void igbvf_restore_vlan(struct igbvf_adapter *adapter);
void igbvf_set_rlpml(struct igbvf_adapter *adapter);

/* A statistics register, as it goes on over moves; of memory, without an exit. */
#define igbvf_coop_counter(adapter, reg) \
	((adapter)->coop && __ioplane_coop_counts((adapter)->coop) ? \
	 (u32)__ioplane_coop_counter((adapter)->coop, reg) : readl((adapter)->hw.hw_addr + (reg)))
#endif
