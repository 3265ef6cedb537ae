// SPDX-License-Identifier: GPL-2.0 OR MIT
//
// Counts the exits of watched threads where they happen, so that no record of an event goes to user space.
//
//   kvm_exit --pending--> kvm_pio, kvm_mmio, kvm_msr, ... kvm_userspace_exit? --> kvm_entry     one count: (reason, rip, detail, step of its time)
//                 `-- sched_switch: without a processor meanwhile
//
// It does what src/profile.rs and src/runs.rs do with records of perf, and e2e/tests/exits.rs holds one against the other. Structures that cross to user space are
// those of src/count/layout.rs. Fields of the kernel's records are found when it is loaded.
//
// Built by `script/build-bpf` into count.bpf.o, which the repository has.

#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

// The kernel may have these fields elsewhere, or not at all: src/count/formats.rs tells the loader what tracefs says of them.
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct trace_event_raw_kvm_exit {
	__u32 exit_reason;
	unsigned long guest_rip;
	__u32 isa;
	__u64 info1;
	__u64 info2;
	__u32 vcpu_id;
};
struct trace_event_raw_kvm_entry {
	__u32 vcpu_id;
};
struct trace_event_raw_kvm_pio {
	__u32 rw;
	__u32 port;
	__u32 size;
	__u32 val;
};
struct trace_event_raw_kvm_mmio {
	__u32 type;
	__u32 len;
	__u64 gpa;
};
struct trace_event_raw_kvm_fast_mmio {
	__u64 gpa;
};
struct trace_event_raw_kvm_msr {
	__u32 write;
	__u32 ecx;
};
struct trace_event_raw_kvm_cpuid {
	__u32 function;
};
struct trace_event_raw_kvm_hypercall {
	unsigned long nr;
};
// Linux before 6.2 calls it `irq`.
struct trace_event_raw_kvm_inj_virq {
	__u32 vector;
};
struct trace_event_raw_kvm_inj_virq___older {
	__u32 irq;
};
struct trace_event_raw_kvm_apic_accept_irq {
	__u32 apicid;
};
struct trace_event_raw_kvm_apicv_accept_irq {
	__u32 apicid;
};
struct trace_event_raw_sched_switch {
	int prev_pid;
	long prev_state;
	int next_pid;
};
#pragma clang attribute pop

enum { NOTHING, PORT, MEMORY, MSR, CPUID, HYPERCALL, FAULT };
enum { MISSING, WRITE_PROTECTED, PROTECTED, UNKNOWN_CAUSE };
enum { VMX = 1, SVM = 2 };
// Sorts of exits, as src/count/layout.rs numbers them.
enum { KIND_OTHER, KIND_PORT, KIND_MEMORY, KIND_MSR, KIND_HALT, KIND_INTERRUPT, KIND_WINDOW, KIND_TIMER };
enum { FLAG_NESTED = 1 };
// What is known of a thread's vCPU; entered: that it is one.
enum { VCPU_UNKNOWN, VCPU_KNOWN, VCPU_ENTERED };

// Whoever else records this event still gets it.
#define PASS 1
#define LONGEST 16
#define CODES 2048
#define UNTIMED 0xffff
// An exit whose time is known, and is in no step.
#define ANY_STEP 0xfffe
#define THREADS 2048
#define SITES (1 << 17)
#define CROWDED 8192
#define RUNS 4096
#define QUEUE_PORTS 16
#define APIC 0xfee00000ull

// What an exit was about.
struct detail {
	__u64 data;
	__u8 kind;
	__u8 width;
	__u8 write;
	// Which queue a legacy virtio device is told of.
	__u8 queue_known;
	__u16 queue;
	__u16 zero;
};

struct site {
	__u64 rip;
	struct detail detail;
	__u32 reason;
	__u16 step;
	__u8 isa;
	__u8 flags;
};

struct counts {
	__u64 count;
	__u64 host_ns;
	__u64 max_ns;
	__u64 user;
	__u64 user_ns;
	__u64 preempted_ns;
	__u64 blocked_ns;
};

struct run {
	__u64 rip;
	__u64 length;
	struct detail steps[LONGEST];
};

struct run_counts {
	__u64 times;
	__u64 user;
};

struct thread {
	// The exit that it is in.
	__u64 at;
	__u64 user_at;
	__u64 preempted_ns;
	__u64 blocked_ns;
	__u64 off_user;
	// Since when it has no processor; 0: it has one.
	__u64 off_at;
	__u64 rip;
	struct detail detail;
	struct detail early;
	__u32 reason;
	__u32 vcpu;
	__u8 pending;
	__u8 isa;
	__u8 kind;
	__u8 user;
	__u8 nested;
	__u8 told;
	__u8 off_preempted;
	__u8 vcpu_known;
	// The run that it is in.
	__u64 since;
	__u64 last_rip;
	struct detail last;
	struct run run;
	__u64 run_user;
	__u64 in_run;
	// Sums.
	__u64 exits;
	// What KVM did where no exit was told.
	__u64 consequences;
	__u64 events;
	__u64 spin_windows;
	__u64 lost;
	// Runs that found no room.
	__u64 runs_crowded;
	__u64 ports_by_exit;
	__u64 ports_by_kvm;
	__u64 halted_ns;
	__u64 timed;
	struct counts all;
	__u64 vectors[256];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, THREADS);
	__type(key, __u32);
	__type(value, struct thread);
} threads SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SITES);
	__type(key, struct site);
	__type(value, struct counts);
} sites SEC(".maps");

// By reason alone, when `sites` is full.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, CROWDED);
	__type(key, struct site);
	__type(value, struct counts);
} crowded SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, RUNS);
	__type(key, struct run);
	__type(value, struct run_counts);
} runs SEC(".maps");

// Everything begins and ends at once.
__u32 on;

// Sorts by number, Intel's and then AMD's: src/reason.rs has the tables.
const volatile __u8 kinds[2 * CODES];
const volatile __u64 near_bytes;
const volatile __u64 gap_ns;
// Where legacy virtio devices are told of a queue, by its number; zero behind the last.
const volatile __u16 queue_ports[QUEUE_PORTS];

static const struct counts no_counts;
static const struct run_counts no_run_counts;

static __always_inline struct thread *watched(__u32 id)
{
	return *(volatile __u32 *)&on ? bpf_map_lookup_elem(&threads, &id) : NULL;
}

static __always_inline struct thread *own(void)
{
	struct thread *thread = watched((__u32)bpf_get_current_pid_tgid());

	if (thread)
		thread->events++;
	return thread;
}

// Sixteen steps to each doubling, as src/times.rs has them.
static __always_inline __u16 step_of(__u64 ns)
{
	__u64 rest = ns;
	__u32 log = 0;

	if (ns < 16)
		return ns;
	if (rest >> 32) { log += 32; rest >>= 32; }
	if (rest >> 16) { log += 16; rest >>= 16; }
	if (rest >> 8) { log += 8; rest >>= 8; }
	if (rest >> 4) { log += 4; rest >>= 4; }
	if (rest >> 2) { log += 2; rest >>= 2; }
	if (rest >> 1) log += 1;
	log -= 4;
	return ((log + 1) << 4) + ((ns >> (log & 63)) & 15);
}

static __always_inline struct counts *counts_of(void *map, const struct site *site)
{
	struct counts *counts = bpf_map_lookup_elem(map, site);

	if (counts)
		return counts;
	bpf_map_update_elem(map, site, &no_counts, BPF_NOEXIST);
	return bpf_map_lookup_elem(map, site);
}

// A site that has a place keeps it, even when a step of its time finds none: one entry for that comes with its first step.
static __always_inline void reserve(struct site *site)
{
	__u16 step = site->step;

	site->step = ANY_STEP;
	bpf_map_update_elem(&sites, site, &no_counts, BPF_NOEXIST);
	site->step = step;
}

// Another vCPU's exits may be counted in the same place now.
static __always_inline void add(struct counts *counts, const struct counts *more)
{
	__u64 max = counts->max_ns;

	__sync_fetch_and_add(&counts->count, more->count);
	if (more->host_ns)
		__sync_fetch_and_add(&counts->host_ns, more->host_ns);
	if (more->user) {
		__sync_fetch_and_add(&counts->user, more->user);
		__sync_fetch_and_add(&counts->user_ns, more->user_ns);
	}
	if (more->preempted_ns)
		__sync_fetch_and_add(&counts->preempted_ns, more->preempted_ns);
	if (more->blocked_ns)
		__sync_fetch_and_add(&counts->blocked_ns, more->blocked_ns);
	for (int attempt = 0; attempt < 8 && more->max_ns > max; attempt++)
		max = __sync_val_compare_and_swap(&counts->max_ns, max, more->max_ns);
}

static __always_inline void count(struct thread *thread, struct site *site, const struct counts *more)
{
	struct counts *counts = bpf_map_lookup_elem(&sites, site);

	if (!counts) {
		if (site->step != UNTIMED)
			reserve(site);
		counts = counts_of(&sites, site);
	}
	if (!counts && site->step != UNTIMED) {
		site->step = ANY_STEP;
		counts = bpf_map_lookup_elem(&sites, site);
	}
	if (!counts) {
		site->rip = 0;
		__builtin_memset(&site->detail, 0, sizeof(site->detail));
		counts = counts_of(&crowded, site);
	}
	if (counts)
		add(counts, more);
	else
		thread->lost++;
}

static __always_inline bool same(const struct detail *a, const struct detail *b)
{
	return a->data == b->data && a->kind == b->kind && a->width == b->width && a->write == b->write &&
	       a->queue_known == b->queue_known && a->queue == b->queue;
}

// The guest does something else now. A single access is no run.
static __always_inline void end_run(struct thread *thread)
{
	__u64 length = thread->run.length;

	if (length >= 2) {
		struct run_counts *counts = bpf_map_lookup_elem(&runs, &thread->run);

		if (!counts) {
			bpf_map_update_elem(&runs, &thread->run, &no_run_counts, BPF_NOEXIST);
			counts = bpf_map_lookup_elem(&runs, &thread->run);
		}
		if (counts) {
			__sync_fetch_and_add(&counts->times, 1);
			__sync_fetch_and_add(&counts->user, thread->run_user);
		} else {
			thread->runs_crowded++;
		}
	}
	if (length) {
		for (int at = 0; at < LONGEST; at++) {
			if (!thread->run.steps[at].kind)
				break;
			__builtin_memset(&thread->run.steps[at], 0, sizeof(struct detail));
		}
		thread->run.length = 0;
		thread->run.rip = 0;
	}
	thread->run_user = 0;
	thread->in_run = 0;
}

// The exit that a thread is in goes to its run when all is known about it, or when an interrupt is delivered after it.
static __noinline int tell(struct thread *thread, __u64 end)
{
	__u64 away;

	if (!thread || !thread->pending || thread->told)
		return 0;
	thread->told = 1;
	if (thread->in_run && thread->at - thread->since > gap_ns && thread->at > thread->since)
		end_run(thread);
	switch (thread->kind) {
	case KIND_INTERRUPT:
	case KIND_TIMER:
		away = thread->rip > thread->last_rip ? thread->rip - thread->last_rip : thread->last_rip - thread->rip;
		if (thread->in_run && away > near_bytes)
			end_run(thread);
		break;
	case KIND_PORT:
	case KIND_MEMORY:
		if (thread->detail.kind != (thread->kind == KIND_PORT ? PORT : MEMORY)) {
			end_run(thread);
			break;
		}
		// A loop begins its next turn: the same again, or the first again.
		if (thread->in_run &&
		    ((thread->last_rip == thread->rip && same(&thread->last, &thread->detail)) ||
		     (thread->run.rip == thread->rip && same(&thread->run.steps[0], &thread->detail))))
			end_run(thread);
		if (!thread->run.length)
			thread->run.rip = thread->rip;
		if (thread->run.length < LONGEST) {
			thread->run.steps[thread->run.length & (LONGEST - 1)] = thread->detail;
			thread->run.length++;
			thread->run_user += thread->user;
		}
		thread->last = thread->detail;
		thread->last_rip = thread->rip;
		thread->in_run = 1;
		break;
	default:
		end_run(thread);
	}
	thread->since = end ? end : thread->at;
	return 0;
}

// The exit is over; where its end was not told, its time is not known.
static __always_inline void finish(struct thread *thread, __u64 end)
{
	struct site site = {};
	struct counts more = {};

	if (!thread->pending)
		return;
	tell(thread, end);
	thread->pending = 0;
	site.rip = thread->rip;
	site.detail = thread->detail;
	site.reason = thread->reason;
	site.isa = thread->isa;
	site.flags = thread->nested ? FLAG_NESTED : 0;
	site.step = UNTIMED;
	more.count = 1;
	more.user = thread->user;
	if (end >= thread->at && end) {
		more.host_ns = end - thread->at;
		more.max_ns = more.host_ns;
		site.step = step_of(more.host_ns);
		more.preempted_ns = thread->preempted_ns;
		more.blocked_ns = thread->blocked_ns;
		if (thread->user && end > thread->user_at + thread->off_user)
			more.user_ns = end - thread->user_at - thread->off_user;
		thread->timed++;
		if (thread->kind == KIND_HALT)
			thread->halted_ns += more.host_ns;
	}
	// Only this thread's programs write here.
	thread->all.count++;
	thread->all.host_ns += more.host_ns;
	thread->all.user += more.user;
	thread->all.user_ns += more.user_ns;
	thread->all.preempted_ns += more.preempted_ns;
	thread->all.blocked_ns += more.blocked_ns;
	count(thread, &site, &more);
}

static __always_inline void set(struct detail *detail, __u8 kind, __u64 data, __u8 width, bool write)
{
	detail->data = data;
	detail->kind = kind;
	detail->width = width;
	detail->write = write;
}

// What the exit's own fields say: from_exit in src/event.rs, where the sections of the manuals are.
static __always_inline void from_exit(struct detail *detail, __u32 isa, __u32 code, __u64 info1, __u64 info2)
{
	if (isa == SVM) {
		switch (code) {
		case 0x7b:
			return set(detail, PORT, info1 >> 16 & 0xffff, info1 >> 4 & 7, !(info1 & 1));
		case 0x400:
			if (info1 & 8)
				return set(detail, MEMORY, info2, 0, info1 & 2);
			return set(detail, FAULT, !(info1 & 1) ? MISSING : info1 & 2 ? WRITE_PROTECTED : PROTECTED, 0, 0);
		case 0x401:
			return set(detail, MEMORY, APIC + 0x300, 0, true);
		case 0x402:
			return set(detail, MEMORY, APIC + (info1 & 0xff0), 0, info1 >> 32 & 1);
		}
	} else if (isa == VMX) {
		switch (code) {
		case 30:
			return set(detail, PORT, info1 >> 16 & 0xffff, (info1 & 7) + 1, !(info1 & 8));
		case 48:
			return set(detail, FAULT, !(info1 & 0x38) ? MISSING : info1 & 2 ? WRITE_PROTECTED : PROTECTED, 0, 0);
		case 44:
			return set(detail, MEMORY, APIC + (info1 & 0xfff), 0, (info1 >> 12 & 15) == 1);
		case 45:
			return set(detail, MEMORY, APIC + 0xb0, 0, true);
		case 56:
			return set(detail, MEMORY, APIC + (info1 & 0xfff), 0, true);
		}
	}
}

SEC("tracepoint/kvm/kvm_exit")
int kvm_exit(struct trace_event_raw_kvm_exit *record)
{
	struct thread *thread = own();
	__u32 code, isa, known;
	__u64 info1, info2;

	if (!thread)
		return PASS;
	finish(thread, 0);
	thread->exits++;
	isa = record->isa;
	code = record->exit_reason;
	info1 = record->info1;
	info2 = record->info2;
	// Read here: the verifier refuses a pointer into the record that is carried along.
	barrier_var(info1);
	barrier_var(info2);
	if (isa == VMX)
		code &= 0xffff;
	thread->at = bpf_ktime_get_ns();
	thread->rip = record->guest_rip;
	thread->reason = code;
	thread->isa = isa == VMX || isa == SVM ? isa : 3;
	known = code < CODES ? code : CODES - 1;
	thread->kind = isa == VMX ? kinds[known] : isa == SVM ? kinds[CODES + known] : KIND_OTHER;
	// Software's own numbers, of encrypted guests.
	if (isa == SVM && code >= 0x80000001 && code <= 0x80000004)
		thread->kind = code <= 0x80000002 ? KIND_MEMORY : code == 0x80000004 ? KIND_HALT : KIND_OTHER;
	__builtin_memset(&thread->detail, 0, sizeof(thread->detail));
	from_exit(&thread->detail, isa, code, info1, info2);
	thread->ports_by_exit += thread->detail.kind == PORT;
	if (thread->early.kind && thread->kind == KIND_MSR && !thread->detail.kind)
		thread->detail = thread->early;
	thread->early.kind = NOTHING;
	if (bpf_core_field_exists(record->vcpu_id)) {
		thread->vcpu = record->vcpu_id;
		thread->vcpu_known = VCPU_KNOWN;
	}
	thread->pending = 1;
	thread->user = 0;
	thread->nested = 0;
	thread->told = 0;
	thread->user_at = 0;
	thread->preempted_ns = 0;
	thread->blocked_ns = 0;
	thread->off_user = 0;
	return PASS;
}

// Programs at raw tracepoints begin with `raw_`: they get what KVM calls the tracepoint with (arch/x86/kvm/trace.h, TP_PROTO), and KVM builds no record, which costs
// more than what is done here. There is none for kvm_exit, whose arguments do not tell the reason.

static __always_inline void entered(struct thread *thread)
{
	thread->early.kind = NOTHING;
	finish(thread, bpf_ktime_get_ns());
}

SEC("tracepoint/kvm/kvm_entry")
int kvm_entry(struct trace_event_raw_kvm_entry *record)
{
	struct thread *thread = own();

	if (!thread)
		return PASS;
	if (bpf_core_field_exists(record->vcpu_id)) {
		thread->vcpu = record->vcpu_id;
		thread->vcpu_known = VCPU_KNOWN;
	}
	entered(thread);
	return PASS;
}

// Where the record of kvm_exit has the vCPU's number.
SEC("raw_tracepoint/kvm_entry")
int raw_kvm_entry(void *arguments)
{
	struct thread *thread = own();

	if (!thread)
		return 0;
	if (thread->vcpu_known == VCPU_UNKNOWN)
		thread->vcpu_known = VCPU_ENTERED;
	entered(thread);
	return 0;
}

// An exit that is known only by what KVM did about it: on a software KVM, where kvm_exit never fires.
static __always_inline void consequence(struct thread *thread, const struct detail *said)
{
	struct site site = {};
	struct counts more = { .count = 1 };

	site.detail = *said;
	site.step = UNTIMED;
	thread->consequences++;
	count(thread, &site, &more);
}

// What KVM does about an exit. A device's address says more than that a page was missing; otherwise the first word counts, since a string instruction says many.
static __noinline int said(struct thread *thread, const struct detail *detail)
{
	__u8 known;

	if (!thread || !detail)
		return 0;
	if (!thread->pending) {
		if (detail->kind == MSR)
			thread->early = *detail;
		else
			thread->early.kind = NOTHING;
		consequence(thread, detail);
		return 0;
	}
	known = thread->detail.kind;
	if ((known == NOTHING && (detail->kind != FAULT || thread->kind == KIND_MEMORY)) ||
	    (known == FAULT && detail->kind == MEMORY) ||
	    (known == MEMORY && !thread->detail.width && detail->kind == MEMORY) ||
	    (known == PORT && detail->queue_known && !thread->detail.queue_known && thread->detail.data == detail->data)) {
		thread->ports_by_kvm += known != PORT && detail->kind == PORT;
		thread->detail = *detail;
	}
	return 0;
}

static __always_inline int says(__u8 kind, __u64 data, __u8 width, bool write)
{
	struct thread *thread = own();
	struct detail detail = {};

	if (!thread)
		return PASS;
	set(&detail, kind, data, width, write);
	said(thread, &detail);
	return PASS;
}

#define LIST(words...) words
#define SAYS(name, kind, of_record, of_raw)                            \
	SEC("tracepoint/kvm/" #name)                                   \
	int name(struct trace_event_raw_##name *record)                \
	{                                                              \
		return says(kind, LIST of_record);                     \
	}                                                              \
	SEC("raw_tracepoint/" #name)                                   \
	int raw_##name(struct bpf_raw_tracepoint_args *raw)            \
	{                                                              \
		return says(kind, LIST of_raw);                        \
	}

// Whether a legacy virtio device is told there which of its queues has work.
static __always_inline bool tells_queue(const struct detail *detail)
{
	if (!detail->write)
		return false;
	for (int at = 0; at < QUEUE_PORTS && queue_ports[at]; at++) {
		if (queue_ports[at] == detail->data)
			return true;
	}
	return false;
}

SEC("tracepoint/kvm/kvm_pio")
int kvm_pio(struct trace_event_raw_kvm_pio *record)
{
	struct thread *thread = own();
	struct detail detail = {};
	__u32 value = 0;

	if (!thread)
		return PASS;
	set(&detail, PORT, record->port & 0xffff, record->size, record->rw != 0);
	if (bpf_core_field_exists(record->val)) {
		value = record->val;
		barrier_var(value);
		if (tells_queue(&detail)) {
			detail.queue_known = 1;
			detail.queue = value;
		}
	}
	said(thread, &detail);
	return PASS;
}

SEC("raw_tracepoint/kvm_pio")
int raw_kvm_pio(struct bpf_raw_tracepoint_args *raw)
{
	struct thread *thread = own();
	struct detail detail = {};

	if (!thread)
		return 0;
	set(&detail, PORT, raw->args[1] & 0xffff, raw->args[2], raw->args[0] != 0);
	// What is written lies where the last argument says.
	if (tells_queue(&detail))
		detail.queue_known = !bpf_probe_read_kernel(&detail.queue, sizeof(detail.queue), (void *)raw->args[4]);
	// The rest of the register lies behind it.
	if (raw->args[2] == 1)
		detail.queue &= 0xff;
	said(thread, &detail);
	return 0;
}

SAYS(kvm_fast_mmio, MEMORY, (record->gpa, 0, true), (raw->args[0], 0, true))
SAYS(kvm_msr, MSR, (record->ecx, 0, record->write != 0), ((__u32)raw->args[1], 0, raw->args[0] != 0))
SAYS(kvm_cpuid, CPUID, (record->function, 0, false), ((__u32)raw->args[0], 0, false))
SAYS(kvm_hypercall, HYPERCALL, ((__u32)record->nr, 0, false), ((__u32)raw->args[0], 0, false))

// Type 2 is a write; a read is told when the VMM is asked (0) and when it is answered (1), before the guest goes on.
static __always_inline int mmio(__u32 type, __u32 length, __u64 address)
{
	return type == 0 ? PASS : says(MEMORY, address, length, type == 2);
}

SEC("tracepoint/kvm/kvm_mmio")
int kvm_mmio(struct trace_event_raw_kvm_mmio *record)
{
	return mmio(record->type, record->len, record->gpa);
}

SEC("raw_tracepoint/kvm_mmio")
int raw_kvm_mmio(struct bpf_raw_tracepoint_args *raw)
{
	return mmio(raw->args[0], raw->args[1], raw->args[2]);
}

// Of these nothing is read.
#define BARE(name, call)                                               \
	SEC("tracepoint/kvm/" #name)                                   \
	int name(void *record)                                         \
	{                                                              \
		return call;                                           \
	}                                                              \
	SEC("raw_tracepoint/" #name)                                   \
	int raw_##name(void *arguments)                                \
	{                                                              \
		return call;                                           \
	}

BARE(kvm_page_fault, says(FAULT, UNKNOWN_CAUSE, 0, false))

static __always_inline int to_user_space(void)
{
	struct thread *thread = own();

	if (thread && thread->pending && !thread->user) {
		thread->user = 1;
		thread->user_at = bpf_ktime_get_ns();
	}
	return PASS;
}

BARE(kvm_userspace_exit, to_user_space())

static __always_inline void delivered(struct thread *thread)
{
	tell(thread, 0);
	end_run(thread);
}

static __always_inline int injected(__u8 vector)
{
	struct thread *thread = own();

	if (!thread)
		return PASS;
	delivered(thread);
	thread->vectors[vector]++;
	return PASS;
}

SEC("tracepoint/kvm/kvm_inj_virq")
int kvm_inj_virq(struct trace_event_raw_kvm_inj_virq *record)
{
	struct trace_event_raw_kvm_inj_virq___older *older = (void *)record;
	__u32 vector;

	if (bpf_core_field_exists(record->vector)) {
		vector = record->vector;
		barrier_var(vector);
	} else {
		vector = older->irq;
		barrier_var(vector);
	}
	return injected(vector);
}

SEC("raw_tracepoint/kvm_inj_virq")
int raw_kvm_inj_virq(struct bpf_raw_tracepoint_args *raw)
{
	return injected(raw->args[0]);
}

// In this thread: its own timer's, or one that it sends to another vCPU.
static __always_inline int accepts(__u32 vcpu)
{
	struct thread *thread = own();

	if (thread && (thread->vcpu_known != VCPU_KNOWN || thread->vcpu == vcpu))
		delivered(thread);
	return PASS;
}

#define ACCEPTS(name)                                                  \
	SEC("tracepoint/kvm/" #name)                                   \
	int name(struct trace_event_raw_##name *record)                \
	{                                                              \
		return accepts(record->apicid);                        \
	}                                                              \
	SEC("raw_tracepoint/" #name)                                   \
	int raw_##name(struct bpf_raw_tracepoint_args *raw)            \
	{                                                              \
		return accepts(raw->args[0]);                          \
	}

ACCEPTS(kvm_apic_accept_irq)
ACCEPTS(kvm_apicv_accept_irq)

static __always_inline int spun(void)
{
	struct thread *thread = own();

	if (thread)
		thread->spin_windows++;
	return PASS;
}

BARE(kvm_ple_window_update, spun())

// The exit was a guest's of the guest: whose instruction that was cannot be told.
static __always_inline int nested(void)
{
	struct thread *thread = own();

	if (thread && thread->pending) {
		thread->nested = 1;
		thread->rip = 0;
		thread->told = 1;
		// What it was in is none of the guest's runs.
		thread->run.length = thread->run.length ? 1 : 0;
		end_run(thread);
	}
	return PASS;
}

BARE(kvm_nested_vmexit, nested())

SEC("tracepoint/sched/sched_switch")
int sched_switch(struct trace_event_raw_sched_switch *record)
{
	struct thread *thread = watched(record->prev_pid);
	__u64 time, since, now;

	if (thread) {
		thread->off_at = bpf_ktime_get_ns();
		// It would have run on: it is runnable, or was preempted (0x100).
		thread->off_preempted = !(record->prev_state & 0xff);
	}
	thread = watched(record->next_pid);
	if (!thread || !thread->off_at)
		return PASS;
	since = thread->off_at;
	thread->off_at = 0;
	if (!thread->pending)
		return PASS;
	now = bpf_ktime_get_ns();
	if (since < thread->at)
		since = thread->at;
	time = now > since ? now - since : 0;
	if (thread->off_preempted)
		thread->preempted_ns += time;
	else
		thread->blocked_ns += time;
	if (thread->user && since >= thread->user_at)
		thread->off_user += time;
	return PASS;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
