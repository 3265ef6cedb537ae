// SPDX-License-Identifier: GPL-2.0
/*
 * A driver cooperates with whoever moves its function to another one (CompSC, VEE '12): a page that both share, the read lock of it around
 * each operation set, and the replay of the driver's own state when the function was moved. What a driver does itself is in DRIVER_coop.c.
 *
 * Who has the lock as a reader has a function that is its own. The writer takes it when there are no readers, brings the function to rest by
 * the list in the page, resets another one, writes back the registers of the list, counts up `moves`, and gives the lock back. So nobody is
 * inside an operation set when `moves` changes, and nobody enters one before the replay: it needs no other lock against NAPI, the handlers
 * and xmit. Those never wait: what they could not do is done by the worker. Who may sleep waits, and replays himself if need be.
 *
 * Whoever has trapped a write to a register may post it, so that it arrives after the lock was given back. Operation sets and replays therefore
 * end with a read. What xmit, NAPI and handlers write (tails, masks, throttles) may be lost: a replay brings that anew. It begins with a read,
 * before which nothing that was posted reaches the other function.
 */
#include <linux/atomic.h>
#include <linux/delay.h>
#include <linux/mutex.h>
#include <linux/netdevice.h>
#include <linux/pci.h>
#include <linux/slab.h>
#include <linux/workqueue.h>

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
	const struct ioplane_coop_driver *driver;
	void *adapter;
	struct pci_dev *pdev;
	struct net_device *netdev;
	struct coop_page *page;
	int capability;
	/* What `moves` was when the function was brought back last. */
	u32 moves;
	bool filters;
	/* The page is announced and believed. */
	bool believed;
	/* Of those who may sleep. */
	struct mutex turn;
	struct delayed_work work;
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

void __ioplane_coop_leave(struct ioplane_coop *coop)
{
	u32 lock = READ_ONCE(coop->page->lock);

	while (!try_cmpxchg(&coop->page->lock, &lock, lock - 1))
		;
}

bool __ioplane_coop_enter(struct ioplane_coop *coop)
{
	if (!coop_try(coop))
		return false;
	if (likely(READ_ONCE(coop->page->moves) == smp_load_acquire(&coop->moves)))
		return true;
	__ioplane_coop_leave(coop);
	return false;
}

void __ioplane_coop_later(struct ioplane_coop *coop)
{
	schedule_delayed_work(&coop->work, 0);
}

void __ioplane_coop_filters_later(struct ioplane_coop *coop)
{
	WRITE_ONCE(coop->filters, true);
	__ioplane_coop_later(coop);
}

void __ioplane_coop_touch(const void *from, unsigned int len)
{
	unsigned long at, end = (unsigned long)from + len;

	for (at = (unsigned long)from; at < end; at = (at & PAGE_MASK) + PAGE_SIZE) {
		volatile u8 *byte = (volatile u8 *)at;
		*byte = *byte;
	}
}

bool __ioplane_coop_counts(struct ioplane_coop *coop)
{
	return READ_ONCE(coop->believed);
}

u64 __ioplane_coop_counter(struct ioplane_coop *coop, u32 reg)
{
	unsigned int i;

	/* They are the first entries. */
	for (i = 0; i < coop->driver->counters_len; i++)
		if (coop->driver->counters[i] == reg)
			return le64_to_cpu(READ_ONCE(coop->page->list[i].wide));
	return 0;
}

void ioplane_coop_add(struct ioplane_coop *coop, u32 operation, u32 offset, u64 operand)
{
	u32 number = le32_to_cpu(coop->page->entries);
	struct coop_entry *entry = &coop->page->list[number];

	if (WARN_ON_ONCE(number >= IOPLANE_COOP_MOST))
		return;
	entry->operation = cpu_to_le32(operation);
	entry->offset = cpu_to_le32(offset);
	/* Of a counter it is what was counted. */
	if (operation != IOPLANE_COOP_COUNTER)
		entry->wide = cpu_to_le64(operand);
	coop->page->entries = cpu_to_le32(number + 1);
}

/* The lock is held: a writer that has it keeps the page until it gives it back. */
static void coop_withdraw(struct ioplane_coop *coop)
{
	WRITE_ONCE(coop->believed, false);
	pci_write_config_dword(coop->pdev, coop->capability + IOPLANE_COOP_CAP_CONTROL, 0);
}

void __ioplane_coop_withdraw(struct ioplane_coop *coop)
{
	__ioplane_coop_begin(coop);
	coop_withdraw(coop);
	__ioplane_coop_end(coop);
}

void __ioplane_coop_announce(struct ioplane_coop *coop)
{
	u64 gpa = virt_to_phys(coop->page);
	struct pci_dev *pdev = coop->pdev;
	unsigned int i;
	u32 state;

	coop->page->entries = 0;
	for (i = 0; i < coop->driver->counters_len; i++)
		ioplane_coop_add(coop, IOPLANE_COOP_COUNTER, coop->driver->counters[i], 0);
	if (!coop->driver->list(coop->adapter, coop)) {
		coop_withdraw(coop);
		return;
	}
	pci_write_config_dword(pdev, coop->capability + IOPLANE_COOP_CAP_LOW, lower_32_bits(gpa));
	pci_write_config_dword(pdev, coop->capability + IOPLANE_COOP_CAP_HIGH, upper_32_bits(gpa));
	pci_write_config_dword(pdev, coop->capability + IOPLANE_COOP_CAP_CONTROL, IOPLANE_COOP_ANNOUNCE);
	pci_read_config_dword(pdev, coop->capability + IOPLANE_COOP_CAP_CONTROL, &state);
	WRITE_ONCE(coop->believed, state == IOPLANE_COOP_BELIEVED);
	if (state != IOPLANE_COOP_BELIEVED)
		dev_warn(&pdev->dev, "the page for moves is refused: this function cannot be moved\n");
}

/* The function is another one, or the same one anew. The lock is held, and nobody else comes in: the driver's state is what it was when the
 * last operation set ended.
 */
static void coop_replay(struct ioplane_coop *coop)
{
	const struct ioplane_coop_driver *driver = coop->driver;
	u32 moves = READ_ONCE(coop->page->moves);
	u32 flags = READ_ONCE(coop->page->flags);
	bool copied = (flags & IOPLANE_COOP_COPIED) && !(flags & IOPLANE_COOP_MARKED);
	int err = driver->replay(coop->adapter, copied);

	if (err) {
		dev_err(&coop->pdev->dev, "not brought back after a move: %d; a reset is tried\n", err);
		/* As after a hang. It waits for this one's turn. */
		driver->reset(coop->adapter);
	}
	/* It has been stopped for longer than the stack believes a device to take, perhaps. */
	netif_trans_update(coop->netdev);
	WRITE_ONCE(coop->filters, false);
	WRITE_ONCE(coop->page->flags, 0);
	WRITE_ONCE(coop->page->replayed, moves);
	smp_store_release(&coop->moves, moves);
}

/* What handlers, NAPI and xmit could not do. The lock is held. */
static void coop_resume(struct ioplane_coop *coop)
{
	if (xchg(&coop->filters, false))
		coop->driver->filters(coop->adapter);
	if (coop->driver->is_up(coop->adapter))
		coop->driver->raise(coop->adapter);
}

/* The writer has the lock, and it is this one's turn. If the function stands still, frames that it has received and that nobody has seen are
 * marked, so that they come along when memory is copied to another host. On the other host, where that would be too late, COPIED is set.
 */
static void coop_mark_unseen(struct ioplane_coop *coop)
{
	if (READ_ONCE(coop->page->flags) != IOPLANE_COOP_STILL || READ_ONCE(coop->page->moves) != coop->moves)
		return;
	rmb();
	if (coop->driver->is_up(coop->adapter) && !coop->driver->mark(coop->adapter))
		return;
	wmb();
	cmpxchg(&coop->page->flags, IOPLANE_COOP_STILL, IOPLANE_COOP_STILL | IOPLANE_COOP_MARKED);
}

/* The writer has the lock. The stack does not take it for a device that hangs. */
static void coop_wait(struct ioplane_coop *coop)
{
	netif_trans_update(coop->netdev);
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
	struct net_device *netdev = coop->netdev;

	/* Without a link nothing is handed over in any case, and a queue that is stopped then stays so. */
	if (netif_running(netdev) && coop->driver->is_up(coop->adapter))
		netif_tx_wake_all_queues(netdev);
}

static void coop_work(struct work_struct *work)
{
	struct ioplane_coop *coop = container_of(to_delayed_work(work), struct ioplane_coop, work);
	bool taken;

	mutex_lock(&coop->turn);
	taken = coop_take(coop);
	if (taken) {
		coop_resume(coop);
		coop->driver->flush(coop->adapter);
		__ioplane_coop_leave(coop);
		/* Whoever takes the rings away needs the turn. */
		coop_wake(coop);
	} else {
		coop_wait(coop);
	}
	mutex_unlock(&coop->turn);
	if (!taken)
		schedule_delayed_work(&coop->work, 1);
}

void __ioplane_coop_begin(struct ioplane_coop *coop)
{
	mutex_lock(&coop->turn);
	while (!coop_take(coop)) {
		coop_wait(coop);
		usleep_range(500, 1000);
	}
}

void __ioplane_coop_end(struct ioplane_coop *coop)
{
	coop->driver->flush(coop->adapter);
	__ioplane_coop_leave(coop);
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

int ioplane_coop_probe(struct pci_dev *pdev, struct net_device *netdev, const struct ioplane_coop_driver *driver, void *adapter,
		       struct ioplane_coop **to)
{
	int at = coop_find(pdev);
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
	coop->driver = driver;
	coop->adapter = adapter;
	coop->pdev = pdev;
	coop->netdev = netdev;
	coop->capability = at;
	mutex_init(&coop->turn);
	INIT_DELAYED_WORK(&coop->work, coop_work);
	coop->page->magic = cpu_to_le32(IOPLANE_COOP_MAGIC);
	coop->page->format = cpu_to_le32(IOPLANE_COOP_FORMAT);
	/* From here on the function can be moved. */
	*to = coop;
	__ioplane_coop_announce(coop);
	dev_info(&pdev->dev, "can be moved: cooperates by its capability at %#x\n", at);
	return 0;
}

void ioplane_coop_remove(struct ioplane_coop **of)
{
	struct ioplane_coop *coop = *of;

	if (!coop)
		return;
	__ioplane_coop_withdraw(coop);
	cancel_delayed_work_sync(&coop->work);
	*of = NULL;
	free_page((unsigned long)coop->page);
	kfree(coop);
}
