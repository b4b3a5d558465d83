//! Races and uninitialized memory. Skipped unless LOCKSTEP_EMULATED_CHECK is set.

use std::process::Command;

use lockstep_cuda::{Arg, Gpu, Grid, Source, Stream};

static RACES: Source = Source { name: "races", code: include_str!("races.cu") };

const KERNEL: &str = "LOCKSTEP_TEST_KERNEL";
// Depending on the order, the reader comes before the writer.
const SHARED: &str = "shared memory that";
const DEVICE: &str = "device memory that thread";

/// Kernels, and the report of each. Those without one are right.
const CASES: [(&str, Option<&str>); 21] = [
    ("warps_without_barrier", Some(SHARED)),
    ("warps_with_barrier", None),
    ("one_barrier_in_a_loop", Some(SHARED)),
    ("two_barriers_in_a_loop", None),
    ("barrier_of_other_warps", Some(SHARED)),
    ("barrier_of_some_warps", None),
    ("lanes_after_a_shuffle", Some(SHARED)),
    ("lanes_after_syncwarp", None),
    ("neighbouring_bytes", None),
    ("dynamic_without_barrier", Some(SHARED)),
    ("copies_without_barrier", Some(SHARED)),
    ("copies_with_barrier", None),
    ("blocks_write_one_number", Some(DEVICE)),
    ("blocks_add_atomically", None),
    ("last_block_without_fence", Some(DEVICE)),
    ("last_block_with_fence", None),
    ("half_of_shared_memory", Some("reads shared memory that its block never wrote")),
    ("half_of_dynamic_memory", Some("reads shared memory that its block never wrote")),
    ("reads_device_memory", None),
    ("reads_device_memory new", Some("reads device memory that was never written")),
    // A report does not depend on what the buffer was before.
    ("warps_without_barrier new", Some(SHARED)),
];

#[test]
fn wrong_kernels_are_reported_and_right_ones_are_not() {
    if std::env::var_os("LOCKSTEP_EMULATED_CHECK").is_none() {
        println!("skipped: set LOCKSTEP_EMULATED_CHECK=1 with an emulated GPU");
        return;
    }
    let tests = std::env::current_exe().unwrap();
    for order in ["forward", "random"] {
        for (case, expected) in CASES {
            let output = Command::new(&tests)
                .args(["--exact", "races::one_kernel", "--ignored", "--nocapture"])
                .env(KERNEL, case)
                .env("LOCKSTEP_EMULATED_ORDER", order)
                .env("LOCKSTEP_EMULATED_CHECK", "1")
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&output.stderr);
            let reported = text.contains("emulated GPU:");
            match expected {
                None => assert!(output.status.success() && !reported, "{case}, {order}: {text}"),
                Some(what) => assert!(
                    !output.status.success() && text.contains(what),
                    "{case}, {order}: expected \"{what}\": {text}"
                ),
            }
        }
    }
}

#[test]
#[ignore = "the test above runs it, in a process of its own"]
fn one_kernel() {
    let case = std::env::var(KERNEL).unwrap();
    let (kernel, state) = case.split_once(' ').unwrap_or((&case, ""));
    let (known, _) = CASES.iter().find(|(known, _)| *known == kernel).unwrap();
    let gpu = Gpu::open(0).unwrap();
    let stream = Stream::new(gpu.context.clone());
    let buffer = gpu.context.allocate(4096, "a test").unwrap();
    if state != "new" {
        let zeros = [0u8; 4096];
        // SAFETY: the buffer has as many bytes, and pageable memory has been read when the call returns.
        let status = unsafe {
            (gpu.context.api().cuMemcpyHtoDAsync_v2)(
                buffer.address,
                zeros.as_ptr().cast(),
                zeros.len(),
                stream.handle(),
            )
        };
        gpu.context.must(status, "clear a buffer");
    }
    let threads = if *known == "barrier_of_some_warps" {
        128
    } else if known.starts_with("lanes") {
        32
    } else {
        64
    };
    // Blocks would overwrite each other's numbers.
    let blocks = if known.contains("block") || *known == "reads_device_memory" { 4 } else { 1 };
    let grid = Grid::new(blocks, threads).shared(256);
    let function = gpu.kernels.function(&gpu.context, &RACES, known);
    function.launch(&stream, grid, &[Arg::from(buffer.address)]).unwrap();
    stream.synchronize();
}
