//! Invariants 7 and 8 are held by tests of the crates that keep them. Here each of those tests runs without its invariant, in a process of its own,
//! and has to fail.
//!
//! | invariant | hook (`bound(Invariant::..)`) |
//! |---|---|
//! | 7 bounds polls | `crates/virtio/src/cost.rs` and the slice of a disk's poller; the TAP device's poller; that of an NBD export, the channel of an import; `storage`'s reap; messages between two turns of a core |
//! | 8 keeps quotas | `ioplane_memory::Account`: clients, mappings of one, mappings of all, pinned bytes; shares of a core's io_uring |

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ioplane_device::mutation::{Invariant, VARIABLE};

/// Tests of one program that hold an invariant.
struct Guards {
    invariant: Invariant,
    package: &'static str,
    program: &'static str,
    tests: &'static [&'static str],
}

const GUARDS: &[Guards] = &[
    Guards {
        invariant: Invariant::BoundsPolls,
        package: "ioplane-virtio",
        program: "work_per_poll",
        tests: &[
            "hole_05_one_poll_moves_a_bounded_part_of_a_huge_request",
            "hole_05_one_poll_of_many_requests_moves_no_more",
            "hole_05_one_poll_discards_a_bounded_part",
            "hole_05_others_are_served_between_the_slices_of_a_huge_request",
            "hole_05_one_poll_hands_a_bounded_part_to_a_file",
        ],
    },
    Guards {
        invariant: Invariant::BoundsPolls,
        package: "ioplane-virtio",
        program: "net_work",
        tests: &[
            "hole_05_one_poll_makes_a_bounded_number_of_segments",
            "hole_05_one_poll_floods_a_bounded_number_of_bytes_and_segments",
            "hole_05_one_poll_wakes_a_bounded_number_of_receivers",
            "hole_05_one_poll_obeys_a_bounded_number_of_commands",
            "hole_05_looking_for_room_in_vain_is_charged",
        ],
    },
    Guards {
        invariant: Invariant::BoundsPolls,
        package: "ioplane-network",
        program: "tap",
        tests: &[
            "hole_05_one_poll_of_a_tap_makes_a_bounded_number_of_calls_and_moves_a_bounded_number_of_bytes",
        ],
    },
    Guards {
        invariant: Invariant::BoundsPolls,
        package: "ioplane-nbd",
        program: "work_per_poll",
        tests: &[
            "one_poll_costs_no_more_than_it_may",
            "one_poll_takes_a_bounded_part_of_a_long_write_and_sends_a_bounded_part_of_replies",
        ],
    },
    Guards {
        invariant: Invariant::BoundsPolls,
        package: "ioplane-nbd",
        program: "import_bounds",
        tests: &["one_reap_of_an_import_takes_a_bounded_part_of_what_has_come"],
    },
    Guards {
        invariant: Invariant::BoundsPolls,
        package: "ioplane-storage",
        program: "bounds",
        tests: &["hole_05_one_reap_copies_a_bounded_part_of_what_has_ended"],
    },
    Guards {
        invariant: Invariant::BoundsPolls,
        package: "ioplane-cores",
        program: "cores",
        tests: &["hole_06_a_flood_of_changes_leaves_the_neighbour_its_turns"],
    },
    Guards {
        invariant: Invariant::KeepsQuotas,
        package: "ioplane-cores",
        program: "ring",
        tests: &["a_silent_disk_of_many_queues_leaves_others_their_share_of_the_ring"],
    },
    Guards {
        invariant: Invariant::KeepsQuotas,
        package: "ioplane-memory",
        program: "account",
        tests: &[
            "hole_04_greedy_clients_leave_every_other_client_its_own",
            "hole_04_pinned_bytes_have_a_limit_and_a_sparse_file_costs_nothing",
        ],
    },
    Guards {
        invariant: Invariant::KeepsQuotas,
        package: "ioplane-memory",
        program: "small_limit",
        tests: &["two_greedy_clients_leave_most_of_a_small_limit"],
    },
];

/// What script/test builds with: with other features cargo would build half of the workspace anew.
fn features() -> &'static str {
    let features =
        include_str!("../../../script/test").lines().find_map(|line| line.strip_prefix("features="));
    features.expect("script/test names its features")
}

/// Longer than any of these tests takes.
const LIMIT: Duration = Duration::from_secs(120);

/// Where cargo puts each of the programs, by package and name.
fn programs() -> BTreeMap<(String, String), PathBuf> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."));
    cargo.args(["test", "--workspace", "--features", features()]);
    cargo.args(["--no-run", "--message-format=json"]);
    // ring is built anew, and all that needs it, when what its build script sees of these is other than before.
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if ["CARGO_MANIFEST_", "CARGO_PKG_", "CARGO_CRATE_"].iter().any(|begin| name.starts_with(begin)) {
            cargo.env_remove(name);
        }
    }
    for guards in GUARDS {
        cargo.args(["--test", guards.program]);
    }
    let built = cargo.stderr(Stdio::inherit()).output().expect("cargo");
    assert!(built.status.success(), "cargo cannot build the tests");
    let messages = serde_json::Deserializer::from_slice(&built.stdout).into_iter::<serde_json::Value>();
    messages
        .filter_map(|message| {
            let message = message.expect("messages of cargo");
            let executable = message["executable"].as_str()?.into();
            let manifest = Path::new(message["manifest_path"].as_str()?).parent()?.file_name()?.to_str()?;
            Some((
                (format!("ioplane-{manifest}"), message["target"]["name"].as_str()?.to_owned()),
                executable,
            ))
        })
        .collect()
}

/// Runs one test of `program` without `invariant`, or with all invariants. Whether it passed, and what it printed.
fn run(program: &Path, package: &str, test: &str, invariant: Option<Invariant>) -> (bool, String) {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let mut command = Command::new(program);
    command.args([test, "--exact", "--nocapture"]).env_remove(VARIABLE);
    command.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(&package["ioplane-".len()..]));
    command.envs(invariant.map(|invariant| (VARIABLE, (invariant as u8).to_string())));
    command.stdout(writer.try_clone().expect("a descriptor")).stderr(writer);
    let mut child = command.spawn().expect("a test program");
    // Its ends of the pipe go with it.
    drop(command);
    let printed = std::thread::spawn(move || std::io::read_to_string(reader).unwrap_or_default());
    let deadline = Instant::now() + LIMIT;
    let passed = loop {
        if let Some(status) = child.try_wait().expect("a child") {
            break status.success();
        }
        if Instant::now() > deadline {
            child.kill().expect("a child");
            child.wait().expect("a child");
            break false;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    (passed, printed.join().expect("what it printed"))
}

#[test]
fn each_guard_fails_without_its_invariant() {
    let programs = programs();
    let mut wrong = Vec::new();
    for Guards { invariant, package, program, tests } in GUARDS {
        let path = programs
            .get(&((*package).to_owned(), (*program).to_owned()))
            .unwrap_or_else(|| panic!("{package} has no test program {program}"));
        for test in *tests {
            let (passed, printed) = run(path, package, test, Some(*invariant));
            if printed.contains("SKIPPED") {
                println!("SKIPPED: {package} {program} {test}: it does not run here:\n{printed}");
            } else if !printed.contains("running 1 test") {
                wrong.push(format!("{package} {program}: there is no test {test}:\n{printed}"));
            } else if passed {
                wrong.push(format!(
                    "{package} {program}: {test} passes without invariant {}",
                    *invariant as u8
                ));
            } else if let (false, printed) = run(path, package, test, None) {
                wrong.push(format!("{package} {program}: {test} fails with every invariant:\n{printed}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
