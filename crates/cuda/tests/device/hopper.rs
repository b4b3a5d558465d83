//! Boxes and products of a Hopper GPU. Wrong kernels run on the emulated GPU only, which must show each of them. Skipped unless
//! LOCKSTEP_DEVICE is cuda.

use std::process::Command;

use lockstep_cuda::{Boxes, DeviceBuffer, Gpu, Grid, Source, Stream, TensorMap};

static HOPPER: Source = Source { name: "hopper", code: include_str!("hopper.cu") };

const KERNEL: &str = "LOCKSTEP_TEST_KERNEL";
const UNWRITTEN: &str = "reads shared memory that its block never wrote";

/// What the emulated GPU says of a box at another place. A GPU reports an illegal instruction.
const BETWEEN: &str = "is not a multiple of 16 bytes";

/// How a wrong kernel ends: with wrong numbers, or with a message.
enum End {
    Wrong,
    Message(&'static str),
}

/// Wrong kernels, and how they end without and with LOCKSTEP_EMULATED_CHECK.
const MISTAKES: [(&str, End, &str); 7] = [
    ("boxes_with_late_wait", End::Wrong, UNWRITTEN),
    ("boxes_without_release", End::Message("more threads arrive at an mbarrier"), "more threads"),
    ("boxes_between_16_bytes", End::Message(BETWEEN), BETWEEN),
    ("boxes_of_too_few_bytes", End::Message("129 at an mbarrier"), "wait forever"),
    ("product_with_late_wait", End::Wrong, UNWRITTEN),
    ("product_without_release", End::Wrong, "a copy of a box of block 0 writes shared memory"),
    ("product_without_end", End::Message("did not wait for"), "did not wait for"),
];

/// A Hopper GPU, if the tests run on one.
fn hopper() -> Option<Machine> {
    if std::env::var("LOCKSTEP_DEVICE").as_deref() != Ok("cuda") {
        println!("skipped: set LOCKSTEP_DEVICE=cuda");
        return None;
    }
    let gpu = Gpu::open(0).unwrap();
    if gpu.context.capability != (9, 0) {
        println!("skipped: {} is not a Hopper GPU", gpu.context.name);
        return None;
    }
    let stream = Stream::new(gpu.context.clone());
    Some(Machine { gpu, stream })
}

struct Machine {
    gpu: Gpu,
    stream: Stream,
}

impl Machine {
    fn upload<T: Copy>(&self, values: &[T]) -> DeviceBuffer {
        let buffer = self.gpu.context.allocate(size_of_val(values), "a test").unwrap();
        let from = values.as_ptr().cast();
        // SAFETY: the buffer has as many bytes, and pageable memory has been read when the call returns.
        let status = unsafe {
            (self.gpu.context.api().cuMemcpyHtoDAsync_v2)(
                buffer.address,
                from,
                size_of_val(values),
                self.stream.handle(),
            )
        };
        self.gpu.context.must(status, "copy to a buffer");
        buffer
    }

    fn download<T: Copy + Default>(&self, buffer: &DeviceBuffer, len: usize) -> Vec<T> {
        let mut values = vec![T::default(); len];
        let bytes = size_of_val(values.as_slice());
        // SAFETY: both have as many bytes, and the stream is finished before the vector is used.
        let status = unsafe {
            (self.gpu.context.api().cuMemcpyDtoHAsync_v2)(
                values.as_mut_ptr().cast(),
                buffer.address,
                bytes,
                self.stream.handle(),
            )
        };
        self.gpu.context.must(status, "copy from a buffer");
        self.stream.synchronize();
        values
    }

    /// A tensor of bf16, innermost dimension first, and boxes of it.
    fn map(&self, tensor: &DeviceBuffer, dims: [u64; 3], row: u64, size: [u32; 3]) -> TensorMap {
        let strides = [2 * row, 2 * row * dims[1]];
        let boxes = Boxes { address: tensor.address, dims, strides, size };
        TensorMap::new(&self.gpu.context, &boxes).unwrap()
    }

    /// # Safety
    /// `T` must have the layout of the kernel's parameter.
    unsafe fn launch<T: Copy>(&self, kernel: &'static str, grid: Grid, parameter: &T) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.gpu.kernels.launch_with(&self.stream, &HOPPER, kernel, grid, parameter) };
    }
}

/// `Copies` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Copies {
    map: TensorMap,
    places: u64,
    out: u64,
    boxes: i32,
}

/// Whether a kernel copies boxes to where they belong, with zeros outside of the tensor.
fn copies_boxes(machine: &Machine, kernel: &'static str) -> bool {
    // Rows of the tensor are 104 elements apart.
    let (dims, row, size) = ([100, 70, 3], 104, [64, 32, 2]);
    let at = |[x, y, z]: [i32; 3]| ((z * dims[1] + y) * row + x) as usize;
    let tensor: Vec<u16> = (0..at([0, 0, dims[2]])).map(|i| (i % 65_521) as u16 + 1).collect();
    let inside = [[0, 0, 0], [32, 38, 1], [8, 7, 0]];
    let outside = [[40, 10, 2], [-8, -5, -1], [96, 60, 2], [200, 0, 0], [-56, 69, 2], [0, 0, -2]];
    let places = [inside.as_slice(), outside.as_slice()].concat();
    let expected: Vec<u16> = places
        .iter()
        .flat_map(|&[x, y, z]| {
            let rows = (0..size[2] * size[1]).map(move |i| [x, y + i % size[1], z + i / size[1]]);
            rows.flat_map(|[x, y, z]| (0..size[0]).map(move |i| [x + i, y, z]))
        })
        .map(|place| {
            let inside = place.iter().zip(dims).all(|(&i, dim)| (0..dim).contains(&i));
            if inside { tensor[at(place)] } else { 0 }
        })
        .collect();
    let (tensor, device_places) = (machine.upload(&tensor), machine.upload(&places));
    let out = machine.upload(&vec![u16::MAX; expected.len()]);
    let map = machine.map(&tensor, dims.map(|dim| dim as u64), row as u64, size.map(|n| n as u32));
    let boxes = places.len() as i32;
    let copies = Copies { map, places: device_places.address, out: out.address, boxes };
    // SAFETY: the layout is that of the kernels' `Copies`.
    unsafe { machine.launch(kernel, Grid::new(1, 256).shared(2 * 8192 + 1024 + 32), &copies) };
    machine.download::<u16>(&out, expected.len()) == expected
}

/// `Operands` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Operands {
    a: TensorMap,
    b: TensorMap,
    out: u64,
    steps: i32,
}

/// Numbers with few bits, so that sums are exact.
fn numbers(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7919 + i / 61 + seed) % 33) as f32 / 16.0 - 1.0).collect()
}

/// Whether a kernel multiplies: 1 + a · b.
fn multiplies(machine: &Machine, kernel: &'static str) -> bool {
    let [a_transposed, b_transposed] = ["a", "b"].map(|operand| {
        [operand, "both"].iter().any(|name| kernel == format!("product_{name}_transposed"))
    });
    let (rows, cols, steps) = (64, 256, 5);
    let inner = 64 * steps;
    let (a, b) = (numbers(rows * inner, 1), numbers(cols * inner, 2));
    let place = |transposed: bool, outer: usize, i: usize, k: usize| match transposed {
        true => k * outer + i,
        false => i * inner + k,
    };
    let expected: Vec<f32> = (0..rows * cols)
        .map(|at| {
            let product = |k| {
                a[place(a_transposed, rows, at / cols, k)]
                    * b[place(b_transposed, cols, at % cols, k)]
            };
            1.0 + (0..inner).map(product).sum::<f32>()
        })
        .collect();
    let tensor = |values: &[f32], outer: usize, transposed| {
        let bits: Vec<u16> = values.iter().map(|x| (x.to_bits() >> 16) as u16).collect();
        let buffer = machine.upload(&bits);
        let (x, y) = if transposed { (outer, inner) } else { (inner, outer) };
        let map = machine.map(&buffer, [x as u64, y as u64, 1], x as u64, [64, 64, 1]);
        (buffer, map)
    };
    let (_a, map_a) = tensor(&a, rows, a_transposed);
    let (_b, map_b) = tensor(&b, cols, b_transposed);
    let out = machine.upload(&vec![f32::NAN; rows * cols]);
    let operands = Operands { a: map_a, b: map_b, out: out.address, steps: steps as i32 };
    let shared = 2 * (rows + cols) * 128 + 1024 + 16;
    // SAFETY: the layout is that of the kernels' `Operands`.
    unsafe { machine.launch(kernel, Grid::new(1, 128).shared(shared), &operands) };
    machine.download::<f32>(&out, rows * cols) == expected
}

#[test]
fn boxes_arrive_and_are_zero_outside_of_the_tensor() {
    let Some(machine) = hopper() else { return };
    assert!(copies_boxes(&machine, "boxes"));
}

#[test]
fn products_of_all_layouts_are_those_of_the_host() {
    let Some(machine) = hopper() else { return };
    for kernel in
        ["product", "product_a_transposed", "product_b_transposed", "product_both_transposed"]
    {
        assert!(multiplies(&machine, kernel), "{kernel}");
    }
}

#[test]
fn maps_that_the_copy_engine_cannot_read_are_errors() {
    let Some(machine) = hopper() else { return };
    let tensor = machine.upload(&[0u16; 4096]);
    let right = Boxes {
        address: tensor.address,
        dims: [64, 32, 2],
        strides: [128, 4096],
        size: [64, 32, 1],
    };
    assert!(TensorMap::new(&machine.gpu.context, &right).is_ok());
    let wrong = [
        Boxes { address: right.address + 8, ..right },
        Boxes { dims: [64, 0, 2], ..right },
        Boxes { strides: [120, 4096], ..right },
        Boxes { strides: [128, 1 << 40], ..right },
        Boxes { size: [128, 32, 1], ..right },
        Boxes { size: [4, 32, 1], ..right },
        Boxes { size: [64, 257, 1], ..right },
        Boxes { size: [64, 0, 1], ..right },
    ];
    for boxes in wrong {
        assert!(TensorMap::new(&machine.gpu.context, &boxes).is_err(), "{boxes:?}");
    }
}

#[test]
fn wrong_kernels_are_shown_by_the_emulated_gpu() {
    let Some(machine) = hopper() else { return };
    if machine.gpu.context.name != "Emulated GPU" {
        return;
    }
    let checked = std::env::var_os("LOCKSTEP_EMULATED_CHECK").is_some();
    for order in ["forward", "reverse", "random"] {
        for (kernel, unchecked, report) in &MISTAKES {
            let output = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "hopper::one_mistake", "--ignored", "--nocapture"])
                .env(KERNEL, kernel)
                .env("LOCKSTEP_EMULATED_ORDER", order)
                .output()
                .unwrap();
            let (text, numbers) =
                (String::from_utf8_lossy(&output.stderr), String::from_utf8_lossy(&output.stdout));
            let message = match unchecked {
                _ if checked => report,
                End::Message(message) => message,
                End::Wrong => {
                    assert!(
                        numbers.contains("wrong numbers"),
                        "{kernel}, {order}: {numbers}{text}"
                    );
                    continue;
                }
            };
            // The message names the kernel.
            let named = text.contains(&format!("emulated GPU: {kernel}: "));
            assert!(
                !output.status.success() && named && text.contains(message),
                "{kernel}, {order}: expected \"{message}\": {numbers}{text}"
            );
        }
    }
}

#[test]
#[ignore = "the test above runs it, in a process of its own"]
fn one_mistake() {
    let wanted = std::env::var(KERNEL).unwrap();
    let (kernel, ..) = MISTAKES.iter().find(|(kernel, ..)| *kernel == wanted).unwrap();
    let machine = hopper().unwrap();
    let right = match kernel.starts_with("boxes") {
        true => copies_boxes(&machine, kernel),
        false => multiplies(&machine, kernel),
    };
    println!("{} numbers", if right { "right" } else { "wrong" });
}
