// SPDX-License-Identifier: GPL-2.0
/*
 * igbvf cooperates with whoever moves its function: what of it ioplane_coop.c asks for.
 */
#include <linux/delay.h>
#include <linux/etherdevice.h>
#include <linux/io.h>
#include <linux/netdevice.h>
#include <linux/slab.h>

#include "igbvf.h"
#include "igbvf_coop.h"

static const u32 coop_counters[] = {
	E1000_VFGPRC, E1000_VFGPTC, E1000_VFGORC, E1000_VFGOTC, E1000_VFMPRC,
	E1000_VFGPRLBC, E1000_VFGPTLBC, E1000_VFGORLBC, E1000_VFGOTLBC,
};

/* What is read at rest, and written to the other function after its reset. The queues are off then. */
static const u32 coop_kept[] = {
	E1000_RDBAL(0), E1000_RDBAH(0), E1000_RDLEN(0), E1000_SRRCTL(0), E1000_RXDCTL(0),
	E1000_TDBAL(0), E1000_TDBAH(0), E1000_TDLEN(0), E1000_DCA_TXCTRL(0), E1000_TXDCTL(0),
	E1000_EITR(0), E1000_EITR(1), E1000_EITR(2), E1000_IVAR0, E1000_IVAR_MISC, E1000_EIAC, E1000_EIAM,
};

static void coop_add_ring(struct ioplane_coop *coop, struct igbvf_ring *ring)
{
	if (ring->desc)
		ioplane_coop_add(coop, IOPLANE_COOP_AREA, ring->size, ring->dma);
}

static bool coop_list(void *of, struct ioplane_coop *coop)
{
	struct igbvf_adapter *adapter = of;
	int i;

	ioplane_coop_add(coop, IOPLANE_COOP_CLEAR, E1000_RXDCTL(0), E1000_RXDCTL_QUEUE_ENABLE);
	ioplane_coop_add(coop, IOPLANE_COOP_EQUAL, E1000_TDH(0), E1000_TDT(0));
	ioplane_coop_add(coop, IOPLANE_COOP_CLEAR, E1000_TXDCTL(0), E1000_TXDCTL_QUEUE_ENABLE);
	for (i = 0; i < ARRAY_SIZE(coop_kept); i++)
		ioplane_coop_add(coop, IOPLANE_COOP_KEEP, coop_kept[i], 0);
	coop_add_ring(coop, adapter->rx_ring);
	coop_add_ring(coop, adapter->tx_ring);
	return true;
}

static bool coop_is_up(void *of)
{
	struct igbvf_adapter *adapter = of;

	return !test_bit(__IGBVF_DOWN, &adapter->state);
}

static void coop_filters(void *of)
{
	struct igbvf_adapter *adapter = of;

	netif_addr_lock_bh(adapter->netdev);
	igbvf_tell_filters(adapter);
	netif_addr_unlock_bh(adapter->netdev);
}

/* Says RESET, without the reset: that was done already, and would take the registers back that were just written. */
static int coop_say_reset(struct igbvf_adapter *adapter)
{
	struct e1000_hw *hw = &adapter->hw;
	struct e1000_mbx_info *mbx = &hw->mbx;
	u32 msg[3];
	unsigned long end = jiffies + IOPLANE_COOP_PATIENCE;

	do {
		s32 err;

		spin_lock_bh(&hw->mbx_lock);
		mbx->timeout = E1000_VF_MBX_INIT_TIMEOUT;
		/* That bit, if it comes, is of the reset that is over. */
		mbx->ops.check_for_rst(hw);
		msg[0] = E1000_VF_RESET;
		err = mbx->ops.write_posted(hw, msg, 1);
		if (!err)
			err = mbx->ops.read_posted(hw, msg, 3);
		spin_unlock_bh(&hw->mbx_lock);
		msg[0] &= ~E1000_VT_MSGTYPE_CTS;
		if (!err && msg[0] == (E1000_VF_RESET | E1000_VT_MSGTYPE_ACK)) {
			memcpy(hw->mac.perm_addr, &msg[1], ETH_ALEN);
			return 0;
		}
		/* A function that has no address yet. */
		if (!err && msg[0] == (E1000_VF_RESET | E1000_VT_MSGTYPE_NACK)) {
			eth_zero_addr(hw->mac.perm_addr);
			return 0;
		}
		msleep(20);
	} while (time_before(jiffies, end));
	return -EIO;
}

static void coop_say_address(struct igbvf_adapter *adapter)
{
	struct e1000_hw *hw = &adapter->hw;
	const u8 *own = adapter->netdev->dev_addr;

	if (ether_addr_equal(hw->mac.perm_addr, own))
		return;
	ether_addr_copy(hw->mac.addr, own);
	spin_lock_bh(&hw->mbx_lock);
	hw->mac.ops.rar_set(hw, hw->mac.addr, 0);
	spin_unlock_bh(&hw->mbx_lock);
	if (!ether_addr_equal(hw->mac.addr, own)) {
		dev_err(&adapter->pdev->dev, "after a move the physical function refuses the address %pM\n", own);
		ether_addr_copy(hw->mac.addr, own);
	}
}

static u32 coop_behind(struct igbvf_ring *ring, u32 index, u32 head)
{
	return (index + ring->count - head) % ring->count;
}

/* Shifts a ring, so that the descriptor at `head` is the first one. `room`: as many bytes as its descriptors, or its buffers. */
static void coop_shift(struct igbvf_ring *ring, u32 head, void *room)
{
	size_t count = ring->count, desc = sizeof(*ring->desc), buffer = sizeof(*ring->buffer_info);
	u32 at;

	memcpy(room, ring->desc, count * desc);
	memcpy(ring->desc, room + head * desc, (count - head) * desc);
	memcpy(&ring->desc[count - head], room, head * desc);
	memcpy(room, ring->buffer_info, count * buffer);
	memcpy(ring->buffer_info, room + head * buffer, (count - head) * buffer);
	memcpy(&ring->buffer_info[count - head], room, head * buffer);
	ring->next_to_clean = coop_behind(ring, ring->next_to_clean, head);
	ring->next_to_use = coop_behind(ring, ring->next_to_use, head);
	for (at = 0; at < ring->count; at++) {
		union e1000_adv_tx_desc **watched = &ring->buffer_info[at].next_to_watch;

		/* Of a receive ring there is something else at that place. */
		if (ring == ring->adapter->tx_ring && *watched)
			*watched = &ring->desc[coop_behind(ring, (union igbvf_desc *)*watched - ring->desc, head)].tx_desc;
	}
}

/* The first descriptor of frames that were not sent. */
static u32 coop_unsent(struct igbvf_ring *ring)
{
	u32 at = ring->next_to_clean;

	while (at != ring->next_to_use) {
		union e1000_adv_tx_desc *last = ring->buffer_info[at].next_to_watch;

		if (!last || !(last->wb.status & cpu_to_le32(E1000_TXD_STAT_DD)))
			break;
		at = ((union igbvf_desc *)last - ring->desc + 1) % ring->count;
	}
	return at;
}

/* The first descriptor that the function has not written. In memory that was copied nobody knows what came along: all are posted anew. */
static u32 coop_unwritten(struct igbvf_ring *ring, bool copied)
{
	u32 at = ring->next_to_clean;

	while (!copied && at != ring->next_to_use &&
	       (ring->desc[at].rx_desc.wb.upper.status_error & cpu_to_le32(E1000_RXD_STAT_DD)))
		at = (at + 1) % ring->count;
	return at;
}

static void coop_post(struct igbvf_adapter *adapter, struct igbvf_ring *ring)
{
	u32 at;

	for (at = 0; at != ring->next_to_use; at++) {
		struct igbvf_buffer *buffer = &ring->buffer_info[at];
		union e1000_adv_rx_desc *desc = &ring->desc[at].rx_desc;

		if (adapter->rx_ps_hdr_size) {
			desc->read.pkt_addr = cpu_to_le64(buffer->page_dma);
			desc->read.hdr_addr = cpu_to_le64(buffer->dma);
		} else {
			desc->read.pkt_addr = cpu_to_le64(buffer->dma);
			desc->read.hdr_addr = 0;
		}
	}
}

/* Of a frame the driver has seen the first parts, and the function begins with another frame: it is lost. Its buffer is in use by what was
 * seen of it, and has none of its own to post.
 */
static int coop_drop_begun(struct igbvf_adapter *adapter, struct igbvf_ring *ring)
{
	struct igbvf_buffer *buffer = &ring->buffer_info[0];
	struct device *dev = &adapter->pdev->dev;
	unsigned int len = adapter->rx_ps_hdr_size;
	struct sk_buff *skb;
	dma_addr_t dma;

	if (!ring->next_to_use || !buffer->skb || !skb_shinfo(buffer->skb)->nr_frags)
		return 0;
	skb = netdev_alloc_skb_ip_align(adapter->netdev, len);
	if (!skb)
		return -ENOMEM;
	dma = dma_map_single(dev, skb->data, len, DMA_FROM_DEVICE);
	if (dma_mapping_error(dev, dma)) {
		dev_kfree_skb_any(skb);
		return -ENOMEM;
	}
	dev_kfree_skb_any(buffer->skb);
	buffer->skb = skb;
	buffer->dma = dma;
	return 0;
}

static int coop_rings(struct igbvf_adapter *adapter, bool copied)
{
	struct igbvf_ring *rx = adapter->rx_ring, *tx = adapter->tx_ring;
	struct e1000_hw *hw = &adapter->hw;
	size_t each = max(sizeof(union igbvf_desc), sizeof(struct igbvf_buffer));
	void *room = kvmalloc(max(rx->count, tx->count) * each, GFP_KERNEL);
	int err;

	if (!room)
		return -ENOMEM;
	coop_shift(tx, coop_unsent(tx), room);
	coop_shift(rx, coop_unwritten(rx, copied), room);
	kvfree(room);
	err = coop_drop_begun(adapter, rx);
	if (err)
		return err;
	coop_post(adapter, rx);
	wmb();
	/* Bases, lengths and thresholds have been written already. */
	ew32(TDH(0), 0);
	ew32(TDT(0), 0);
	ew32(TXDCTL(0), er32(TXDCTL(0)) | E1000_TXDCTL_QUEUE_ENABLE);
	ew32(TDT(0), tx->next_to_use);
	ew32(RDH(0), 0);
	ew32(RDT(0), 0);
	ew32(RXDCTL(0), er32(RXDCTL(0)) | E1000_RXDCTL_QUEUE_ENABLE);
	ew32(RDT(0), (rx->next_to_use + rx->count - 1) % rx->count);
	return 0;
}

static int coop_replay(void *of, bool copied)
{
	struct igbvf_adapter *adapter = of;
	int err = coop_say_reset(adapter);

	if (!err)
		coop_say_address(adapter);
	if (!err && coop_is_up(adapter)) {
		coop_filters(adapter);
		igbvf_restore_vlan(adapter);
		igbvf_set_rlpml(adapter);
		err = coop_rings(adapter, copied);
	}
	adapter->last_reset = jiffies;
	return err;
}

static void coop_reset(void *of)
{
	struct igbvf_adapter *adapter = of;

	schedule_work(&adapter->reset_task);
}

static void coop_raise(void *of)
{
	struct igbvf_adapter *adapter = of;
	struct e1000_hw *hw = &adapter->hw;

	ew32(EIMS, adapter->eims_enable_mask);
	ew32(EICS, adapter->eims_enable_mask);
}

/* As for what was taken: the processor writes to what the device wrote. Not where that went by another buffer, or is mapped by an IOMMU. */
static bool coop_mark_buffer(struct igbvf_adapter *adapter, struct igbvf_buffer *buffer)
{
	if (buffer->dma) {
		if (buffer->dma != virt_to_phys(buffer->skb->data))
			return false;
		__ioplane_coop_touch(buffer->skb->data,
				     adapter->rx_ps_hdr_size ? adapter->rx_ps_hdr_size : adapter->rx_buffer_len);
	}
	if (buffer->page_dma) {
		void *from = page_address(buffer->page) + buffer->page_offset;

		if (buffer->page_dma != virt_to_phys(from))
			return false;
		__ioplane_coop_touch(from, PAGE_SIZE / 2);
	}
	return true;
}

static bool coop_mark(void *of)
{
	struct igbvf_adapter *adapter = of;
	struct igbvf_ring *ring = adapter->rx_ring;
	u32 at;

	for (at = ring->next_to_clean; at != ring->next_to_use; at = (at + 1) % ring->count) {
		if (!(ring->desc[at].rx_desc.wb.upper.status_error & cpu_to_le32(E1000_RXD_STAT_DD)))
			break;
		if (!coop_mark_buffer(adapter, &ring->buffer_info[at]))
			return false;
	}
	return true;
}

static void coop_flush(void *of)
{
	struct igbvf_adapter *adapter = of;
	struct e1000_hw *hw = &adapter->hw;

	e1e_flush();
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

int igbvf_coop_probe(struct igbvf_adapter *adapter)
{
	return ioplane_coop_probe(adapter->pdev, adapter->netdev, &coop_driver, adapter, &adapter->coop);
}
