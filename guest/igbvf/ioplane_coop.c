// SPDX-License-Identifier: GPL-2.0
/*
 * igbvf cooperates with whoever moves its function to another one (CompSC, VEE '12): a page that both share, the read lock of it around
 * each operation set, and the replay of the driver's own state when the function was moved.
 *
 * Who has the lock as a reader has a function that is its own. The writer takes it when there are no readers, brings the function to rest by
 * the list in the page, resets another one, writes back the registers of the list, counts up `moves`, and gives the lock back. So nobody is
 * inside an operation set when `moves` changes, and nobody enters one before the replay: it needs no other lock against NAPI, the handlers
 * and xmit. Those never wait: what they could not do is done by the worker. Who may sleep waits, and replays himself if need be.
 */
#include <linux/atomic.h>
#include <linux/delay.h>
#include <linux/etherdevice.h>
#include <linux/io.h>
#include <linux/mutex.h>
#include <linux/netdevice.h>
#include <linux/pci.h>
#include <linux/rtnetlink.h>
#include <linux/slab.h>
#include <linux/workqueue.h>

#include "igbvf.h"
#include "ioplane_coop.h"

struct coop_entry {
	__le32 operation;
	__le32 offset;
	union {
		struct {
			__le32 operand;
			__le32 value;
		};
		__le64 wide;
	};
};

struct coop_page {
	__le32 magic;
	__le32 format;
	u32 lock;	/* x86 is little-endian, as all of this */
	u32 moves;
	u32 replayed;
	u32 flags;
	__le32 entries;
	__le32 reserved[9];
	struct coop_entry list[IOPLANE_COOP_MOST];
};

static_assert(sizeof(struct coop_page) == PAGE_SIZE);

struct ioplane_coop {
	struct igbvf_adapter *adapter;
	struct coop_page *page;
	int capability;
	/* What `moves` was when the function was brought back last. */
	u32 moves;
	bool filters;
	/* Of those who may sleep. */
	struct mutex turn;
	struct delayed_work work;
};

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

static bool coop_try(struct ioplane_coop *coop)
{
	u32 lock = READ_ONCE(coop->page->lock);

	do {
		if (lock & IOPLANE_COOP_WRITER)
			return false;
	} while (!try_cmpxchg(&coop->page->lock, &lock, lock + 1));
	return true;
}

static void coop_release(struct ioplane_coop *coop)
{
	u32 lock = READ_ONCE(coop->page->lock);

	while (!try_cmpxchg(&coop->page->lock, &lock, lock - 1))
		;
}

bool __ioplane_coop_enter(struct igbvf_adapter *adapter)
{
	struct ioplane_coop *coop = adapter->coop;

	if (!coop_try(coop))
		return false;
	if (likely(READ_ONCE(coop->page->moves) == smp_load_acquire(&coop->moves)))
		return true;
	coop_release(coop);
	return false;
}

void __ioplane_coop_leave(struct igbvf_adapter *adapter)
{
	coop_release(adapter->coop);
}

void ioplane_coop_later(struct igbvf_adapter *adapter)
{
	schedule_delayed_work(&adapter->coop->work, 0);
}

void ioplane_coop_filters_later(struct igbvf_adapter *adapter)
{
	WRITE_ONCE(adapter->coop->filters, true);
	ioplane_coop_later(adapter);
}

void __ioplane_coop_touch(const void *from, unsigned int len)
{
	unsigned long at, end = (unsigned long)from + len;

	for (at = (unsigned long)from; at < end; at = (at & PAGE_MASK) + PAGE_SIZE) {
		volatile u8 *byte = (volatile u8 *)at;
		*byte = *byte;
	}
}

static struct coop_entry *coop_counter(struct ioplane_coop *coop, u32 reg)
{
	int i;

	/* They are the first ones. */
	for (i = 0; i < ARRAY_SIZE(coop_counters); i++)
		if (coop_counters[i] == reg)
			return &coop->page->list[i];
	return NULL;
}

u32 __ioplane_coop_counter(struct igbvf_adapter *adapter, u32 reg)
{
	struct coop_entry *entry = coop_counter(adapter->coop, reg);

	return entry ? (u32)le64_to_cpu(READ_ONCE(entry->wide)) : readl(adapter->hw.hw_addr + reg);
}

static void coop_add(struct ioplane_coop *coop, u32 operation, u32 offset, u32 operand)
{
	u32 number = le32_to_cpu(coop->page->entries);
	struct coop_entry *entry = &coop->page->list[number];

	entry->operation = cpu_to_le32(operation);
	entry->offset = cpu_to_le32(offset);
	/* Of a counter it is what was counted. */
	if (operation != IOPLANE_COOP_COUNTER)
		entry->wide = cpu_to_le64(operand);
	coop->page->entries = cpu_to_le32(number + 1);
}

static void coop_add_ring(struct ioplane_coop *coop, struct igbvf_ring *ring)
{
	if (!ring->desc)
		return;
	coop_add(coop, IOPLANE_COOP_AREA, ring->size, 0);
	coop->page->list[le32_to_cpu(coop->page->entries) - 1].wide = cpu_to_le64(ring->dma);
}

void ioplane_coop_announce(struct igbvf_adapter *adapter)
{
	struct ioplane_coop *coop = adapter->coop;
	struct pci_dev *pdev = adapter->pdev;
	u64 gpa;
	u32 state;
	int i;

	if (!coop)
		return;
	gpa = virt_to_phys(coop->page);
	coop->page->entries = 0;
	for (i = 0; i < ARRAY_SIZE(coop_counters); i++)
		coop_add(coop, IOPLANE_COOP_COUNTER, coop_counters[i], 0);
	coop_add(coop, IOPLANE_COOP_CLEAR, E1000_RXDCTL(0), E1000_RXDCTL_QUEUE_ENABLE);
	coop_add(coop, IOPLANE_COOP_EQUAL, E1000_TDH(0), E1000_TDT(0));
	coop_add(coop, IOPLANE_COOP_CLEAR, E1000_TXDCTL(0), E1000_TXDCTL_QUEUE_ENABLE);
	for (i = 0; i < ARRAY_SIZE(coop_kept); i++)
		coop_add(coop, IOPLANE_COOP_KEEP, coop_kept[i], 0);
	coop_add_ring(coop, adapter->rx_ring);
	coop_add_ring(coop, adapter->tx_ring);

	pci_write_config_dword(pdev, coop->capability + IOPLANE_COOP_CAP_LOW, lower_32_bits(gpa));
	pci_write_config_dword(pdev, coop->capability + IOPLANE_COOP_CAP_HIGH, upper_32_bits(gpa));
	pci_write_config_dword(pdev, coop->capability + IOPLANE_COOP_CAP_CONTROL, IOPLANE_COOP_ANNOUNCE);
	pci_read_config_dword(pdev, coop->capability + IOPLANE_COOP_CAP_CONTROL, &state);
	if (state != IOPLANE_COOP_BELIEVED)
		dev_warn(&pdev->dev, "the page for moves is refused: this function cannot be moved\n");
}

/* Says RESET, without the reset: that was done already, and would take the registers back that were just written. */
static int coop_say_reset(struct igbvf_adapter *adapter)
{
	struct e1000_hw *hw = &adapter->hw;
	struct e1000_mbx_info *mbx = &hw->mbx;
	u32 msg[3];
	int tries;

	for (tries = 0; tries < 50; tries++) {
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
	}
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

/* The function is another one, or the same one anew. The lock is held, and nobody else comes in: the driver's state is what it was when the
 * last operation set ended.
 */
static void coop_replay(struct ioplane_coop *coop)
{
	struct igbvf_adapter *adapter = coop->adapter;
	struct net_device *netdev = adapter->netdev;
	u32 moves = READ_ONCE(coop->page->moves);
	u32 flags = READ_ONCE(coop->page->flags);
	bool copied = (flags & IOPLANE_COOP_COPIED) && !(flags & IOPLANE_COOP_MARKED);
	int err;

	err = coop_say_reset(adapter);
	if (!err)
		coop_say_address(adapter);
	if (!err && !test_bit(__IGBVF_DOWN, &adapter->state)) {
		netif_addr_lock_bh(netdev);
		igbvf_tell_filters(adapter);
		netif_addr_unlock_bh(netdev);
		igbvf_restore_vlan(adapter);
		igbvf_set_rlpml(adapter);
		err = coop_rings(adapter, copied);
	}
	adapter->last_reset = jiffies;
	if (err) {
		dev_err(&adapter->pdev->dev, "not brought back after a move: %d; a reset is tried\n", err);
		/* As after a hang. It waits for this one's turn. */
		schedule_work(&adapter->reset_task);
	}
	/* It has been stopped for longer than the stack believes a device to take, perhaps. */
	netif_trans_update(netdev);
	WRITE_ONCE(coop->filters, false);
	WRITE_ONCE(coop->page->flags, 0);
	WRITE_ONCE(coop->page->replayed, moves);
	smp_store_release(&coop->moves, moves);
}

/* What handlers, NAPI and xmit could not do. The lock is held. */
static void coop_resume(struct ioplane_coop *coop)
{
	struct igbvf_adapter *adapter = coop->adapter;
	struct net_device *netdev = adapter->netdev;
	struct e1000_hw *hw = &adapter->hw;

	if (xchg(&coop->filters, false)) {
		netif_addr_lock_bh(netdev);
		igbvf_tell_filters(adapter);
		netif_addr_unlock_bh(netdev);
	}
	if (test_bit(__IGBVF_DOWN, &adapter->state))
		return;
	ew32(EIMS, adapter->eims_enable_mask);
	ew32(EICS, adapter->eims_enable_mask);
}

/* As for what was taken: the processor writes to what the device wrote. Not where that went by another buffer, or is mapped by an IOMMU. */
static bool coop_mark(struct igbvf_adapter *adapter, struct igbvf_buffer *buffer)
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

/* The writer has the lock, and it is this one's turn. If the function stands still, frames that it has received and that nobody has seen are
 * marked, so that they come along when memory is copied to another host. On the other host, where that would be too late, COPIED is set.
 */
static void coop_mark_unseen(struct ioplane_coop *coop)
{
	struct igbvf_adapter *adapter = coop->adapter;
	struct igbvf_ring *ring = adapter->rx_ring;
	u32 at;

	if (READ_ONCE(coop->page->flags) != IOPLANE_COOP_STILL || READ_ONCE(coop->page->moves) != coop->moves)
		return;
	rmb();
	if (!test_bit(__IGBVF_DOWN, &adapter->state)) {
		for (at = ring->next_to_clean; at != ring->next_to_use; at = (at + 1) % ring->count) {
			if (!(ring->desc[at].rx_desc.wb.upper.status_error & cpu_to_le32(E1000_RXD_STAT_DD)))
				break;
			if (!coop_mark(adapter, &ring->buffer_info[at]))
				return;
		}
	}
	wmb();
	cmpxchg(&coop->page->flags, IOPLANE_COOP_STILL, IOPLANE_COOP_STILL | IOPLANE_COOP_MARKED);
}

/* The writer has the lock. The stack does not take it for a device that hangs. */
static void coop_wait(struct ioplane_coop *coop)
{
	netif_trans_update(coop->adapter->netdev);
	coop_mark_unseen(coop);
}

/* A reader of the version that there is, or false. */
static bool coop_take(struct ioplane_coop *coop)
{
	if (!coop_try(coop))
		return false;
	if (READ_ONCE(coop->page->moves) != coop->moves) {
		coop_replay(coop);
		coop_resume(coop);
	}
	return true;
}

static void coop_wake(struct ioplane_coop *coop)
{
	struct net_device *netdev = coop->adapter->netdev;

	if (netif_running(netdev) && netif_carrier_ok(netdev) && !test_bit(__IGBVF_DOWN, &coop->adapter->state))
		netif_wake_queue(netdev);
}

static void coop_work(struct work_struct *work)
{
	struct ioplane_coop *coop = container_of(to_delayed_work(work), struct ioplane_coop, work);
	bool taken;

	mutex_lock(&coop->turn);
	taken = coop_take(coop);
	if (taken) {
		coop_resume(coop);
		coop_release(coop);
	} else {
		coop_wait(coop);
	}
	mutex_unlock(&coop->turn);
	if (taken)
		coop_wake(coop);
	else
		schedule_delayed_work(&coop->work, 1);
}

void __ioplane_coop_begin(struct igbvf_adapter *adapter)
{
	struct ioplane_coop *coop = adapter->coop;

	mutex_lock(&coop->turn);
	while (!coop_take(coop)) {
		coop_wait(coop);
		usleep_range(500, 1000);
	}
}

void __ioplane_coop_end(struct igbvf_adapter *adapter)
{
	struct ioplane_coop *coop = adapter->coop;

	coop_release(coop);
	mutex_unlock(&coop->turn);
}

static int coop_find(struct pci_dev *pdev)
{
	int at = pci_find_capability(pdev, IOPLANE_COOP_CAP_ID);

	for (; at; at = pci_find_next_capability(pdev, at, IOPLANE_COOP_CAP_ID)) {
		u32 signature;
		u8 len, format;

		pci_read_config_byte(pdev, at + 2, &len);
		pci_read_config_byte(pdev, at + 3, &format);
		pci_read_config_dword(pdev, at + IOPLANE_COOP_CAP_SIGNATURE, &signature);
		if (signature == IOPLANE_COOP_MAGIC && format == IOPLANE_COOP_FORMAT && len >= IOPLANE_COOP_CAP_LEN)
			break;
	}
	return at;
}

int ioplane_coop_probe(struct igbvf_adapter *adapter)
{
	int at = coop_find(adapter->pdev);
	struct ioplane_coop *coop;

	if (!at)
		return 0;
	coop = kzalloc(sizeof(*coop), GFP_KERNEL);
	if (!coop)
		return -ENOMEM;
	coop->page = (struct coop_page *)get_zeroed_page(GFP_KERNEL);
	if (!coop->page) {
		kfree(coop);
		return -ENOMEM;
	}
	coop->adapter = adapter;
	coop->capability = at;
	mutex_init(&coop->turn);
	INIT_DELAYED_WORK(&coop->work, coop_work);
	coop->page->magic = cpu_to_le32(IOPLANE_COOP_MAGIC);
	coop->page->format = cpu_to_le32(IOPLANE_COOP_FORMAT);
	/* From here on the function can be moved. */
	adapter->coop = coop;
	ioplane_coop_announce(adapter);
	dev_info(&adapter->pdev->dev, "can be moved: cooperates by its capability at %#x\n", at);
	return 0;
}

void ioplane_coop_withdraw(struct igbvf_adapter *adapter)
{
	if (adapter->coop)
		pci_write_config_dword(adapter->pdev, adapter->coop->capability + IOPLANE_COOP_CAP_CONTROL, 0);
}

/* The interface is down, and nobody calls any more. */
void ioplane_coop_remove(struct igbvf_adapter *adapter)
{
	struct ioplane_coop *coop = adapter->coop;

	if (!coop)
		return;
	cancel_delayed_work_sync(&coop->work);
	ioplane_coop_withdraw(adapter);
	adapter->coop = NULL;
	free_page((unsigned long)coop->page);
	kfree(coop);
}
