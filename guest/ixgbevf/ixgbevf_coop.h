/* SPDX-License-Identifier: GPL-2.0 */
/* What of ixgbevf is needed to bring its function back after a move. */
#ifndef IXGBEVF_COOP_H
#define IXGBEVF_COOP_H

#include <linux/bits.h>

#include "ioplane_coop.h"

int ixgbevf_coop_probe(struct ixgbevf_adapter *adapter);

/* In ixgbevf_main.c, for the replay. The lock is held. */
void ixgbevf_negotiate_api(struct ixgbevf_adapter *adapter);
void ixgbevf_tell_filters(struct ixgbevf_adapter *adapter);
void ixgbevf_restore_vlan(struct ixgbevf_adapter *adapter);
void ixgbevf_tx_timeout_reset(struct ixgbevf_adapter *adapter);

/* Statistics registers, as they go on over moves; of memory, without an exit. Two registers are one counter of 36 bits. */
static inline u32 ixgbevf_coop_counter(struct ixgbevf_adapter *adapter, u32 reg)
{
	if (adapter->coop && __ioplane_coop_counts(adapter->coop))
		return __ioplane_coop_counter(adapter->coop, reg);
	return IXGBE_READ_REG(&adapter->hw, reg);
}

static inline u64 ixgbevf_coop_counter_36bit(struct ixgbevf_adapter *adapter, u32 lsb, u32 msb)
{
	u64 low;

	if (adapter->coop && __ioplane_coop_counts(adapter->coop))
		return __ioplane_coop_counter(adapter->coop, lsb) & GENMASK_ULL(35, 0);
	low = IXGBE_READ_REG(&adapter->hw, lsb);
	return (u64)IXGBE_READ_REG(&adapter->hw, msb) << 32 | low;
}
#endif
