// SPDX-License-Identifier: GPL-2.0
/*
 * Batches of device accesses (docs/guide/batch.md of ioplane): a driver fills an array, and one exit carries out all of it. Where nobody
 * takes batches, ioplane_batch() issues the accesses one by one, also if the VM has moved to such a host meanwhile.
 *
 * /sys/kernel/debug/ioplane_batch/compare reads the CMOS memory by batches and one by one, and says whether both are the same.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/debugfs.h>
#include <linux/gfp.h>
#include <linux/io.h>
#include <linux/ktime.h>
#include <linux/mc146818rtc.h>
#include <linux/module.h>
#include <linux/percpu.h>
#include <linux/seq_file.h>

#include <asm/cpufeature.h>
#include <asm/processor.h>

#include "ioplane_batch.h"

struct ioplane_array {
	struct ioplane_batch_header header;
	struct ioplane_batch_entry entries[];
};

/* As large as a page has room for; CPUID says how many are taken. */
#define MOST_ENTRIES ((unsigned int)((PAGE_SIZE - sizeof(struct ioplane_batch_header)) / sizeof(struct ioplane_batch_entry)))

static DEFINE_PER_CPU(struct ioplane_array *, arrays);
/* 0: no batches were offered when the module was loaded. */
static unsigned int most;
static u16 doorbell;

static atomic64_t rings, batched, single;
static struct dentry *folder;

static void issue(struct ioplane_access *access)
{
	switch (access->kind << 8 | access->width) {
	case IOPLANE_READ_PORT << 8 | 1:
		access->value = inb(access->port);
		break;
	case IOPLANE_READ_PORT << 8 | 2:
		access->value = inw(access->port);
		break;
	case IOPLANE_READ_PORT << 8 | 4:
		access->value = inl(access->port);
		break;
	case IOPLANE_WRITE_PORT << 8 | 1:
		outb(access->value, access->port);
		break;
	case IOPLANE_WRITE_PORT << 8 | 2:
		outw(access->value, access->port);
		break;
	case IOPLANE_WRITE_PORT << 8 | 4:
		outl(access->value, access->port);
		break;
	case IOPLANE_READ_MEMORY << 8 | 1:
		access->value = readb(access->mapped);
		break;
	case IOPLANE_READ_MEMORY << 8 | 2:
		access->value = readw(access->mapped);
		break;
	case IOPLANE_READ_MEMORY << 8 | 4:
		access->value = readl(access->mapped);
		break;
	case IOPLANE_READ_MEMORY << 8 | 8:
		access->value = readq(access->mapped);
		break;
	case IOPLANE_WRITE_MEMORY << 8 | 1:
		writeb(access->value, access->mapped);
		break;
	case IOPLANE_WRITE_MEMORY << 8 | 2:
		writew(access->value, access->mapped);
		break;
	case IOPLANE_WRITE_MEMORY << 8 | 4:
		writel(access->value, access->mapped);
		break;
	case IOPLANE_WRITE_MEMORY << 8 | 8:
		writeq(access->value, access->mapped);
		break;
	}
	atomic64_inc(&single);
}

static bool valid(const struct ioplane_access *access)
{
	bool memory = access->kind == IOPLANE_READ_MEMORY || access->kind == IOPLANE_WRITE_MEMORY;

	switch (access->width) {
	case 1:
	case 2:
	case 4:
		return access->kind <= IOPLANE_WRITE_MEMORY;
	case 8:
		return memory;
	}
	return false;
}

/*
 * Rings once for the first of these accesses, and takes over what was read. Returns how many are done, and EAX. Interrupts are off only
 * as long as the array of this processor is in use: the host answers what it has done by then if it takes long.
 */
static unsigned int ring(struct ioplane_access *accesses, unsigned int count, u32 *answer, u16 *refusal)
{
	unsigned long rax, rdx = doorbell, flags;
	struct ioplane_array *array;
	unsigned int index, done;
	u32 eax;

	local_irq_save(flags);
	array = this_cpu_read(arrays);
	array->header = (struct ioplane_batch_header){
		.magic = cpu_to_le32(IOPLANE_BATCH_MAGIC),
		.version = cpu_to_le16(IOPLANE_BATCH_VERSION),
		.count = cpu_to_le16(count),
	};
	for (index = 0; index < count; index++) {
		struct ioplane_access *access = &accesses[index];
		bool memory = access->kind >= IOPLANE_READ_MEMORY;

		array->entries[index] = (struct ioplane_batch_entry){
			.kind = access->kind,
			.width = access->width,
			.address = cpu_to_le64(memory ? access->physical : access->port),
			.value = cpu_to_le64(access->value),
		};
	}
	rax = virt_to_phys(array);
	/* The host may change RDX too (IOPLANE_BATCH_NOT_STORED). */
	asm volatile("inl %%dx, %%eax" : "+a"(rax), "+d"(rdx) : : "memory");
	eax = rax;
	*refusal = 0;
	if (eax == IOPLANE_BATCH_NOBODY)
		/* Entries may be done all the same: before the VM moved, or a fault of the host's. */
		done = le16_to_cpu(array->header.done);
	else
		done = eax & 0xffff;
	if (done > count)
		done = count;
	for (index = 0; index < done; index++)
		if (!(accesses[index].kind & 1))
			accesses[index].value = le64_to_cpu(array->entries[index].value);
	if (eax >> 16 == IOPLANE_BATCH_NOT_STORED && done && !(accesses[done - 1].kind & 1))
		accesses[done - 1].value = rdx;
	if (eax >> 16 == IOPLANE_BATCH_ENTRY && done < count)
		*refusal = le16_to_cpu(array->entries[done].status);
	local_irq_restore(flags);
	*answer = eax;
	atomic64_inc(&rings);
	atomic64_add(done, &batched);
	return done;
}

/**
 * ioplane_batch() - carries out accesses in their order
 * @accesses: what to do; values that are read are put there
 * @count: how many
 *
 * May be called with interrupts off, and from interrupts. Others may access the same devices in between, as they may between single
 * accesses: it takes no lock.
 *
 * Return: 0; -EINVAL if an access is none that a device can answer, with those before it done.
 */
int ioplane_batch(struct ioplane_access *accesses, unsigned int count)
{
	unsigned int next = 0, index;

	for (index = 0; index < count; index++)
		if (!valid(&accesses[index]))
			return -EINVAL;
	/* One access is one exit either way. */
	while (most && count - next > 1) {
		u32 answer;
		u16 refusal;

		next += ring(accesses + next, min(count - next, most), &answer, &refusal);
		if (answer == IOPLANE_BATCH_NOBODY)
			break;
		switch (answer >> 16) {
		case IOPLANE_BATCH_DONE:
		case IOPLANE_BATCH_NOT_STORED:
			continue;
		case IOPLANE_BATCH_ENTRY:
			if (refusal != IOPLANE_ENTRY_KERNEL)
				return -EINVAL;
			/* The kernel of the host answers it, and only to an instruction. */
			issue(&accesses[next++]);
			continue;
		}
		pr_warn_once("the host refuses an array: %08x\n", answer);
		break;
	}
	while (next < count)
		issue(&accesses[next++]);
	return 0;
}
EXPORT_SYMBOL_GPL(ioplane_batch);

/* What firmware has left in the CMOS memory, behind the clock: it does not change. */
#define CMOS_FIRST 0x10
#define CMOS_BYTES 0x30

static int compare_show(struct seq_file *file, void *unused)
{
	static struct ioplane_access accesses[2 * CMOS_BYTES];
	static DEFINE_MUTEX(busy);
	u64 begun, batch_ns, single_ns, rung = atomic64_read(&rings), alone;
	unsigned int different = 0, index;
	unsigned long flags;
	int result;

	mutex_lock(&busy);
	for (index = 0; index < CMOS_BYTES; index++) {
		accesses[2 * index] = (struct ioplane_access){
			.kind = IOPLANE_WRITE_PORT, .width = 1, .port = RTC_PORT(0), .value = CMOS_FIRST + index,
		};
		accesses[2 * index + 1] = (struct ioplane_access){
			.kind = IOPLANE_READ_PORT, .width = 1, .port = RTC_PORT(1),
		};
	}
	alone = atomic64_read(&single);
	spin_lock_irqsave(&rtc_lock, flags);
	begun = ktime_get_ns();
	result = ioplane_batch(accesses, ARRAY_SIZE(accesses));
	batch_ns = ktime_get_ns() - begun;
	alone = atomic64_read(&single) - alone;
	begun = ktime_get_ns();
	for (index = 0; index < CMOS_BYTES; index++) {
		struct ioplane_access read = accesses[2 * index + 1];

		issue(&accesses[2 * index]);
		issue(&read);
		different += read.value != accesses[2 * index + 1].value;
	}
	single_ns = ktime_get_ns() - begun;
	spin_unlock_irqrestore(&rtc_lock, flags);
	mutex_unlock(&busy);
	seq_printf(file, "offered %u\nresult %d\nrings %llu\nsingle %llu\ndifferent %u\nbatch_ns %llu\nsingle_ns %llu\n",
		   most, result, atomic64_read(&rings) - rung, alone, different, batch_ns, single_ns);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(compare);

static int counts_show(struct seq_file *file, void *unused)
{
	seq_printf(file, "rings %llu\nbatched %llu\nsingle %llu\n", (u64)atomic64_read(&rings),
		   (u64)atomic64_read(&batched), (u64)atomic64_read(&single));
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(counts);

static void __init find_offer(void)
{
	u32 base, eax, words[3], ebx, ecx, edx;

	if (!boot_cpu_has(X86_FEATURE_HYPERVISOR))
		return;
	for (base = 0x40000000; base < 0x40010000; base += 0x100) {
		cpuid(base, &eax, &words[0], &words[1], &words[2]);
		if (memcmp(IOPLANE_BATCH_SIGNATURE, words, sizeof(words)) || eax < base + 1)
			continue;
		cpuid(base + 1, &eax, &ebx, &ecx, &edx);
		if (eax != IOPLANE_BATCH_VERSION || !ecx || ebx > 0xfffc)
			return;
		doorbell = ebx;
		most = min(ecx, MOST_ENTRIES);
		return;
	}
}

static void free_arrays(void)
{
	int cpu;

	for_each_possible_cpu(cpu)
		free_page((unsigned long)per_cpu(arrays, cpu));
}

static int __init batch_init(void)
{
	int cpu;

	BUILD_BUG_ON(sizeof(struct ioplane_batch_header) != 16);
	BUILD_BUG_ON(sizeof(struct ioplane_batch_entry) != 24);
	for_each_possible_cpu(cpu) {
		per_cpu(arrays, cpu) = (void *)get_zeroed_page(GFP_KERNEL);
		if (!per_cpu(arrays, cpu)) {
			free_arrays();
			return -ENOMEM;
		}
	}
	find_offer();
	folder = debugfs_create_dir("ioplane_batch", NULL);
	debugfs_create_file("compare", 0400, folder, NULL, &compare_fops);
	debugfs_create_file("counts", 0400, folder, NULL, &counts_fops);
	if (most)
		pr_info("batches of up to %u accesses, doorbell at port %#x\n", most, doorbell);
	else
		pr_info("no batches are offered: accesses are issued one by one\n");
	return 0;
}

static void __exit batch_exit(void)
{
	debugfs_remove_recursive(folder);
	free_arrays();
}

module_init(batch_init);
module_exit(batch_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Batches of device accesses that take one exit");
