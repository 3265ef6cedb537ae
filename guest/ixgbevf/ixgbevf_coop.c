// SPDX-License-Identifier: GPL-2.0
/*
 * ixgbevf cooperates with whoever moves its function: what of it ioplane_coop.c asks for.
 */
#include <linux/delay.h>
#include <linux/etherdevice.h>
#include <linux/netdevice.h>
#include <linux/slab.h>

#include "ixgbevf.h"
#include "ixgbevf_coop.h"

/* Of counters of 36 bits, the lower register: the page counts on from there. It is read often enough for that: 4 GiB take 3 s at 10 Gb/s. */
static const u32 coop_counters[] = {
	IXGBE_VFGPRC, IXGBE_VFGPTC, IXGBE_VFGORC_LSB, IXGBE_VFGOTC_LSB, IXGBE_VFMPRC,
};

/* Looks at a queue that was switched on. */
#define COOP_LOOKS	10

static void coop_keep(struct ioplane_coop *coop, u32 reg)
{
	ioplane_coop_add(coop, IOPLANE_COOP_KEEP, reg, 0);
}

/* The registers of a ring that are read at rest, and written to the other function after its reset. The queues are off then. */
static void coop_keep_ring(struct ioplane_coop *coop, struct ixgbevf_ring *ring, bool tx)
{
	u8 at = ring->reg_idx;

	if (tx) {
		coop_keep(coop, IXGBE_VFTDBAL(at));
		coop_keep(coop, IXGBE_VFTDBAH(at));
		coop_keep(coop, IXGBE_VFTDLEN(at));
		coop_keep(coop, IXGBE_VFTDWBAH(at));
		coop_keep(coop, IXGBE_VFTDWBAL(at));
		coop_keep(coop, IXGBE_VFDCA_TXCTRL(at));
		coop_keep(coop, IXGBE_VFTXDCTL(at));
	} else {
		coop_keep(coop, IXGBE_VFRDBAL(at));
		coop_keep(coop, IXGBE_VFRDBAH(at));
		coop_keep(coop, IXGBE_VFRDLEN(at));
		coop_keep(coop, IXGBE_VFDCA_RXCTRL(at));
		coop_keep(coop, IXGBE_VFSRRCTL(at));
		coop_keep(coop, IXGBE_VFRXDCTL(at));
	}
	ioplane_coop_add(coop, IOPLANE_COOP_AREA, ring->size, ring->dma);
}

static bool coop_list(void *of, struct ioplane_coop *coop)
{
	struct ixgbevf_adapter *adapter = of;
	int i;

	/* What a program wants to have sent back has a context of its own, which the device has learned once. */
	if (adapter->num_xdp_queues) {
		dev_warn(&adapter->pdev->dev, "an XDP program is loaded: this function cannot be moved\n");
		return false;
	}
	for (i = 0; i < adapter->num_rx_queues; i++)
		if (adapter->rx_ring[i]->desc)
			ioplane_coop_add(coop, IOPLANE_COOP_CLEAR, IXGBE_VFRXDCTL(adapter->rx_ring[i]->reg_idx),
					 IXGBE_RXDCTL_ENABLE);
	for (i = 0; i < adapter->num_tx_queues; i++) {
		u8 at = adapter->tx_ring[i]->reg_idx;

		if (!adapter->tx_ring[i]->desc)
			continue;
		ioplane_coop_add(coop, IOPLANE_COOP_EQUAL, IXGBE_VFTDH(at), IXGBE_VFTDT(at));
		ioplane_coop_add(coop, IOPLANE_COOP_CLEAR, IXGBE_VFTXDCTL(at), IXGBE_TXDCTL_ENABLE);
	}
	for (i = 0; i < adapter->num_rx_queues; i++)
		if (adapter->rx_ring[i]->desc)
			coop_keep_ring(coop, adapter->rx_ring[i], false);
	for (i = 0; i < adapter->num_tx_queues; i++)
		if (adapter->tx_ring[i]->desc)
			coop_keep_ring(coop, adapter->tx_ring[i], true);
	coop_keep(coop, IXGBE_VFPSRTYPE);
	for (i = 0; i < adapter->num_msix_vectors - NON_Q_VECTORS; i++)
		coop_keep(coop, IXGBE_VTEITR(i));
	for (i = 0; i < DIV_ROUND_UP(max(adapter->num_rx_queues, adapter->num_tx_queues), 2); i++)
		coop_keep(coop, IXGBE_VTIVAR(i));
	coop_keep(coop, IXGBE_VTIVAR_MISC);
	coop_keep(coop, IXGBE_VTEIAC);
	coop_keep(coop, IXGBE_VTEIAM);
	if (adapter->hw.mac.type >= ixgbe_mac_X550_vf) {
		for (i = 0; i < IXGBEVF_VFRSSRK_REGS; i++)
			coop_keep(coop, IXGBE_VFRSSRK(i));
		for (i = 0; i < IXGBEVF_X550_VFRETA_SIZE / 4; i++)
			coop_keep(coop, IXGBE_VFRETA(i));
		coop_keep(coop, IXGBE_VFMRQC);
	}
	return true;
}

static bool coop_is_up(void *of)
{
	struct ixgbevf_adapter *adapter = of;

	return !test_bit(__IXGBEVF_DOWN, &adapter->state);
}

static void coop_filters(void *of)
{
	struct ixgbevf_adapter *adapter = of;

	netif_addr_lock_bh(adapter->netdev);
	ixgbevf_tell_filters(adapter);
	netif_addr_unlock_bh(adapter->netdev);
}

/* Says RESET, without the reset: that was done already, and would take the registers back that were just written. */
static int coop_say_reset(struct ixgbevf_adapter *adapter)
{
	struct ixgbe_hw *hw = &adapter->hw;
	u32 msg[IXGBE_VF_PERMADDR_MSG_LEN];
	unsigned long end = jiffies + IOPLANE_COOP_PATIENCE;

	hw->api_version = ixgbe_mbox_api_10;
	hw->mbx.ops.init_params(hw);
	memcpy(&hw->mbx.ops, &ixgbevf_mbx_ops_legacy, sizeof(hw->mbx.ops));
	do {
		s32 err;

		spin_lock_bh(&adapter->mbx_lock);
		hw->mbx.timeout = IXGBE_VF_MBX_INIT_TIMEOUT;
		/* That bit, if it comes, is of the reset that is over. */
		hw->mbx.ops.check_for_rst(hw);
		msg[0] = IXGBE_VF_RESET;
		err = ixgbevf_write_mbx(hw, msg, 1);
		if (!err)
			err = ixgbevf_poll_mbx(hw, msg, ARRAY_SIZE(msg));
		spin_unlock_bh(&adapter->mbx_lock);
		msg[0] &= ~IXGBE_VT_MSGTYPE_CTS;
		/* FAILURE: a function that has no address yet. */
		if (!err && (msg[0] == (IXGBE_VF_RESET | IXGBE_VT_MSGTYPE_SUCCESS) ||
			     msg[0] == (IXGBE_VF_RESET | IXGBE_VT_MSGTYPE_FAILURE))) {
			hw->mac.mc_filter_type = msg[IXGBE_VF_MC_TYPE_WORD];
			return 0;
		}
		msleep(20);
	} while (time_before(jiffies, end));
	return -EIO;
}

static void coop_say_address(struct ixgbevf_adapter *adapter)
{
	const u8 *own = adapter->netdev->dev_addr;
	struct ixgbe_hw *hw = &adapter->hw;
	u8 address[ETH_ALEN];
	s32 err;

	ether_addr_copy(address, own);
	spin_lock_bh(&adapter->mbx_lock);
	err = hw->mac.ops.set_rar(hw, 0, address, 0);
	spin_unlock_bh(&adapter->mbx_lock);
	if (err)
		dev_err(&adapter->pdev->dev, "after a move the physical function refuses the address %pM\n", own);
	/* A refusal takes back what the driver believes. */
	ether_addr_copy(hw->mac.addr, own);
	ether_addr_copy(hw->mac.perm_addr, own);
}

static void coop_say_frame_size(struct ixgbevf_adapter *adapter)
{
	struct net_device *netdev = adapter->netdev;
	s32 err;

	spin_lock_bh(&adapter->mbx_lock);
	err = adapter->hw.mac.ops.set_rlpml(&adapter->hw, netdev->mtu + ETH_HLEN + ETH_FCS_LEN);
	spin_unlock_bh(&adapter->mbx_lock);
	if (err)
		dev_err(&adapter->pdev->dev, "after a move the physical function refuses frames of %d bytes\n", netdev->mtu);
}

static u16 coop_behind(struct ixgbevf_ring *ring, u32 index, u32 head)
{
	return (index + ring->count - head) % ring->count;
}

/* Shifts a table of `count` entries, so that the one at `head` is the first one. `room`: as many bytes. */
static void coop_rotate(void *table, size_t entry, u32 count, u32 head, void *room)
{
	memcpy(room, table, count * entry);
	memcpy(table, room + head * entry, (count - head) * entry);
	memcpy(table + (count - head) * entry, room, head * entry);
}

static void coop_shift_tx(struct ixgbevf_ring *ring, u32 head, void *room)
{
	u32 at;

	coop_rotate(ring->desc, sizeof(union ixgbe_adv_tx_desc), ring->count, head, room);
	coop_rotate(ring->tx_buffer_info, sizeof(struct ixgbevf_tx_buffer), ring->count, head, room);
	ring->next_to_clean = coop_behind(ring, ring->next_to_clean, head);
	ring->next_to_use = coop_behind(ring, ring->next_to_use, head);
	for (at = 0; at < ring->count; at++) {
		union ixgbe_adv_tx_desc **watched = &ring->tx_buffer_info[at].next_to_watch;

		if (*watched)
			*watched = IXGBEVF_TX_DESC(ring, coop_behind(ring, *watched - IXGBEVF_TX_DESC(ring, 0), head));
	}
}

static void coop_shift_rx(struct ixgbevf_ring *ring, u32 head, void *room)
{
	coop_rotate(ring->desc, sizeof(union ixgbe_adv_rx_desc), ring->count, head, room);
	coop_rotate(ring->rx_buffer_info, sizeof(struct ixgbevf_rx_buffer), ring->count, head, room);
	ring->next_to_clean = coop_behind(ring, ring->next_to_clean, head);
	ring->next_to_use = coop_behind(ring, ring->next_to_use, head);
	ring->next_to_alloc = coop_behind(ring, ring->next_to_alloc, head);
}

/* The first descriptor of frames that were not sent: the context of each stands before it. */
static u32 coop_unsent(struct ixgbevf_ring *ring)
{
	u32 at = ring->next_to_clean;

	while (at != ring->next_to_use) {
		union ixgbe_adv_tx_desc *last = ring->tx_buffer_info[at].next_to_watch;

		if (!last || !(last->wb.status & cpu_to_le32(IXGBE_TXD_STAT_DD)))
			break;
		at = (last - IXGBEVF_TX_DESC(ring, 0) + 1) % ring->count;
	}
	return at;
}

/* Whether the device has written a descriptor that was posted: the driver clears no more than that. */
static bool coop_is_written(struct ixgbevf_ring *ring, u32 at)
{
	return IXGBEVF_RX_DESC(ring, at)->wb.upper.length != 0;
}

/* The first descriptor that is not one of a whole frame that was received. In memory that was copied nobody knows what came along: all are
 * posted anew. `whole`: the frame whose first parts the driver has taken is among the others.
 */
static u32 coop_unwritten(struct ixgbevf_ring *ring, bool copied, bool *whole)
{
	u32 at = ring->next_to_clean, end = at;

	*whole = !ring->skb;
	while (!copied && at != ring->next_to_use && coop_is_written(ring, at)) {
		bool last = ixgbevf_test_staterr(IXGBEVF_RX_DESC(ring, at), IXGBE_RXD_STAT_EOP);

		at = (at + 1) % ring->count;
		if (last) {
			end = at;
			*whole = true;
		}
	}
	return end;
}

static void coop_post(struct ixgbevf_ring *ring)
{
	u32 at;

	for (at = 0; at != ring->next_to_use; at++) {
		struct ixgbevf_rx_buffer *buffer = &ring->rx_buffer_info[at];
		union ixgbe_adv_rx_desc *desc = IXGBEVF_RX_DESC(ring, at);

		desc->read.pkt_addr = cpu_to_le64(buffer->dma + buffer->page_offset);
		desc->read.hdr_addr = 0;
	}
}

/* Writes a queue's control register, and waits until the queue is on. */
static int coop_switch_on(struct ixgbe_hw *hw, u32 reg, u32 enable)
{
	int look;

	IXGBE_WRITE_REG(hw, reg, IXGBE_READ_REG(hw, reg) | enable);
	for (look = 0; look < COOP_LOOKS; look++) {
		if (IXGBE_READ_REG(hw, reg) & enable)
			return 0;
		usleep_range(1000, 2000);
	}
	return -EIO;
}

static int coop_rings(struct ixgbevf_adapter *adapter, bool copied)
{
	size_t each = max3(sizeof(union ixgbe_adv_tx_desc), sizeof(struct ixgbevf_tx_buffer), sizeof(struct ixgbevf_rx_buffer));
	u32 most = max(adapter->tx_ring_count, adapter->rx_ring_count);
	struct ixgbe_hw *hw = &adapter->hw;
	void *room = kvmalloc_array(most, each, GFP_KERNEL);
	int i, err;

	if (!room)
		return -ENOMEM;
	for (i = 0; i < adapter->num_tx_queues; i++)
		coop_shift_tx(adapter->tx_ring[i], coop_unsent(adapter->tx_ring[i]), room);
	for (i = 0; i < adapter->num_rx_queues; i++) {
		struct ixgbevf_ring *ring = adapter->rx_ring[i];
		bool whole;

		coop_shift_rx(ring, coop_unwritten(ring, copied, &whole), room);
		/* Of a frame the driver has seen the first parts, and the function begins with another one: it is lost. */
		if (!whole) {
			if (!IS_ERR(ring->skb))
				dev_kfree_skb_any(ring->skb);
			ring->skb = NULL;
		}
		coop_post(ring);
	}
	kvfree(room);
	wmb();
	/* Bases, lengths and thresholds have been written already. No tail before its queue is on. */
	for (i = 0; i < adapter->num_tx_queues; i++) {
		struct ixgbevf_ring *ring = adapter->tx_ring[i];
		u8 at = ring->reg_idx;

		IXGBE_WRITE_REG(hw, IXGBE_VFTDH(at), 0);
		IXGBE_WRITE_REG(hw, IXGBE_VFTDT(at), 0);
		err = coop_switch_on(hw, IXGBE_VFTXDCTL(at), IXGBE_TXDCTL_ENABLE);
		if (err)
			return err;
		clear_bit(__IXGBEVF_HANG_CHECK_ARMED, &ring->state);
		ixgbevf_write_tail(ring, ring->next_to_use);
	}
	for (i = 0; i < adapter->num_rx_queues; i++) {
		struct ixgbevf_ring *ring = adapter->rx_ring[i];
		u8 at = ring->reg_idx;

		IXGBE_WRITE_REG(hw, IXGBE_VFRDH(at), 0);
		IXGBE_WRITE_REG(hw, IXGBE_VFRDT(at), 0);
		err = coop_switch_on(hw, IXGBE_VFRXDCTL(at), IXGBE_RXDCTL_ENABLE);
		if (err)
			return err;
		ixgbevf_write_tail(ring, ring->next_to_use);
	}
	return 0;
}

static int coop_replay(void *of, bool copied)
{
	struct ixgbevf_adapter *adapter = of;
	int err = coop_say_reset(adapter);

	if (!err) {
		ixgbevf_negotiate_api(adapter);
		coop_say_address(adapter);
	}
	if (!err && coop_is_up(adapter)) {
		coop_filters(adapter);
		ixgbevf_restore_vlan(adapter);
		coop_say_frame_size(adapter);
		adapter->hw.mac.ops.get_link_state(&adapter->hw, &adapter->link_state);
		err = coop_rings(adapter, copied);
	}
	adapter->last_reset = jiffies;
	return err;
}

static void coop_reset(void *of)
{
	ixgbevf_tx_timeout_reset(of);
}

static void coop_raise(void *of)
{
	struct ixgbevf_adapter *adapter = of;
	struct ixgbe_hw *hw = &adapter->hw;

	IXGBE_WRITE_REG(hw, IXGBE_VTEIMS, adapter->eims_enable_mask);
	IXGBE_WRITE_REG(hw, IXGBE_VTEICS, adapter->eims_enable_mask);
}

/* As for what was taken: the processor writes to what the device wrote. Not where that went by another buffer, or is mapped by an IOMMU. */
static bool coop_mark(void *of)
{
	struct ixgbevf_adapter *adapter = of;
	int i;

	for (i = 0; i < adapter->num_rx_queues; i++) {
		struct ixgbevf_ring *ring = adapter->rx_ring[i];
		u32 at;

		for (at = ring->next_to_clean; at != ring->next_to_use && coop_is_written(ring, at); at = (at + 1) % ring->count) {
			struct ixgbevf_rx_buffer *buffer = &ring->rx_buffer_info[at];

			if (buffer->dma != page_to_phys(buffer->page))
				return false;
			__ioplane_coop_touch(page_address(buffer->page) + buffer->page_offset, ixgbevf_rx_bufsz(ring));
		}
	}
	return true;
}

static void coop_flush(void *of)
{
	struct ixgbevf_adapter *adapter = of;

	IXGBE_WRITE_FLUSH(&adapter->hw);
}

static const struct ioplane_coop_driver coop_driver = {
	.counters	= coop_counters,
	.counters_len	= ARRAY_SIZE(coop_counters),
	.list		= coop_list,
	.is_up		= coop_is_up,
	.replay		= coop_replay,
	.reset		= coop_reset,
	.filters	= coop_filters,
	.raise		= coop_raise,
	.flush		= coop_flush,
	.mark		= coop_mark,
};

int ixgbevf_coop_probe(struct ixgbevf_adapter *adapter)
{
	return ioplane_coop_probe(adapter->pdev, adapter->netdev, &coop_driver, adapter, &adapter->coop);
}
