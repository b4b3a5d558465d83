//! Benchmark: write and read speed of a checkpoint compared with `dd` on the same disk, interleaved.
//!
//!     cargo run --release -p lockstep-ckpt --example checkpoint_speed -- FOLDER [ROUNDS] [PRESET] [RANKS]
//!
//! Saving does what the ranks of a run do: each writes and syncs its file with checksums, then one commits. Loading does
//! what they do on a resume: each reads and verifies its share of parameters and moments. `dd` writes as many zeros with
//! conv=fsync and reads them back. Files are evicted from the page cache before they are read. The last line shows medians.

use lockstep_ckpt::{
    CHUNK, Disk, ExtraState, Head, Manifest, Named, Piece, Position, TensorKind, begin, commit,
    load, write_pieces,
};
use lockstep_plan::model::{Part, Shape};
use lockstep_plan::{Mesh, presets};
use std::borrow::Cow;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

const KINDS: [TensorKind; 3] = [TensorKind::Param, TensorKind::First, TensorKind::Second];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some(folder) = args.first().map(PathBuf::from) else {
        eprintln!("usage: checkpoint_speed FOLDER [ROUNDS] [PRESET] [RANKS]");
        std::process::exit(2);
    };
    let number =
        |at: usize, default: usize| args.get(at).map_or(default, |n| n.parse().expect("a number"));
    let (rounds, ranks) = (number(1, 5), number(3, 2));
    let preset = args.get(2).map_or("gpt2-124m", String::as_str);
    let shape = presets::shape(preset, None).expect("a preset with its own vocabulary");
    let mesh = Mesh { data: ranks, shard: ranks, ..Mesh::ONE };
    let run = folder.join("checkpoint-speed");
    std::fs::create_dir_all(&run).expect("a folder that can be written");

    // Random values, which a disk cannot compress.
    let states: Vec<(Vec<Piece>, Vec<f32>)> =
        (0..ranks).map(|rank| state(&shape, &mesh, rank)).collect();
    let bytes: usize = states.iter().map(|(_, values)| 4 * values.len()).sum();
    println!(
        "{preset}, {ranks} writer(s), {:.2} GB, {rounds} round(s) in {}",
        bytes as f64 / 1e9,
        run.display()
    );
    println!(
        "{:>10}{:>10}{:>8}{:>12}{:>10}{:>8}   MB/s",
        "dd write", "save", "", "dd read", "load", ""
    );

    let mut all: Vec<[f64; 4]> = Vec::new();
    for round in 0..rounds {
        let rate = |seconds: f64| bytes as f64 / 1e6 / seconds;
        let zeros = run.join("zeros");
        let dd_write = || dd(Path::new("/dev/zero"), &zeros, bytes, true);
        let save = || save(&run, &shape, &states, round as u64);
        let (dd_write, saved) = interleaved(round, &dd_write, &save);
        let dir = lockstep_ckpt::find(&run).expect("just saved");
        let files = std::fs::read_dir(&dir).expect("it is there").flatten();
        files.for_each(|file| evict(&file.path()));
        evict(&zeros);
        let dd_read = || dd(&zeros, Path::new("/dev/null"), bytes, false);
        let (dd_read, loaded) = interleaved(round, &dd_read, &|| read(&dir, &shape, &mesh));
        std::fs::remove_file(&zeros).expect("dd wrote it");
        std::fs::remove_dir_all(&dir).expect("it was there");
        let rates = [dd_write, saved, dd_read, loaded].map(rate);
        print_row(&rates);
        all.push(rates);
    }
    let median = |column: usize| {
        let mut rates: Vec<f64> = all.iter().map(|rates| rates[column]).collect();
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    };
    println!("medians:");
    print_row(&[0, 1, 2, 3].map(median));
    std::fs::remove_dir_all(&run).expect("it can be removed");
}

fn print_row([dd_write, saved, dd_read, loaded]: &[f64; 4]) {
    let (write, read) = (100.0 * saved / dd_write, 100.0 * loaded / dd_read);
    println!("{dd_write:>10.0}{saved:>10.0}{write:>7.0}%{dd_read:>12.0}{loaded:>10.0}{read:>7.0}%");
}

/// Seconds of each. The order changes with the round, because the disk may still be busy with the previous one.
fn interleaved(round: usize, one: &dyn Fn(), other: &dyn Fn()) -> (f64, f64) {
    if round.is_multiple_of(2) {
        let one = timed(one);
        (one, timed(other))
    } else {
        let other = timed(other);
        (timed(one), other)
    }
}

/// Seconds of `work`, started after all pending writes.
fn timed(work: &dyn Fn()) -> f64 {
    // SAFETY: `sync` has no arguments.
    unsafe { libc::sync() };
    let begun = Instant::now();
    work();
    begun.elapsed().as_secs_f64()
}

fn state(shape: &Shape, mesh: &Mesh, rank: usize) -> (Vec<Piece>, Vec<f32>) {
    let written = Part::new(mesh, mesh.coord(rank), 1, shape.blocks()).written();
    let piece = |kind: TensorKind| {
        written.iter().map(move |slice| Piece {
            kind,
            named: Named { name: slice.name.clone(), dims: slice.dims.clone() },
            runs: slice.runs.clone(),
            counts: true,
        })
    };
    let pieces: Vec<Piece> = KINDS.into_iter().flat_map(piece).collect();
    let len = pieces.iter().map(Piece::len).sum();
    let mut state = rank as u64 + 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32
    };
    (pieces, std::iter::repeat_with(&mut next).take(len).collect())
}

fn save(run: &Path, shape: &Shape, states: &[(Vec<Piece>, Vec<f32>)], step: u64) {
    let disk = Disk::default();
    let write = |(writer, (pieces, values)): (usize, &(Vec<Piece>, Vec<f32>))| {
        let folder = begin(&disk, run, step, 0).expect("a folder");
        let mut rest = &values[..];
        let next = |number: usize| {
            let (now, later) = rest.split_at(pieces[number].len());
            rest = later;
            Ok(Cow::Borrowed(now))
        };
        write_pieces(&disk, &folder, writer, pieces, CHUNK, next).expect("room on the disk")
    };
    let parts = std::thread::scope(|scope| {
        let threads: Vec<_> =
            states.iter().enumerate().map(|state| scope.spawn(move || write(state))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let (position, plan) = (Position::default(), serde_json::Value::Null);
    let extra = ExtraState::default();
    let head = Head { step, generation: 0, position, shape: shape.clone(), plan, extra };
    commit(&disk, run, &Manifest::of(head, CHUNK, parts)).expect("committed");
}

fn read(dir: &Path, shape: &Shape, mesh: &Mesh) {
    let read = |rank: usize| {
        let checkpoint = load(dir).expect("whole");
        let mut values = Vec::new();
        for kind in KINDS {
            for slice in Part::new(mesh, mesh.coord(rank), 1, shape.blocks()).slices() {
                values.resize(slice.here.len(), 0.0);
                checkpoint.read(kind, &slice.name, &slice.runs, &mut values).expect("good");
            }
        }
    };
    std::thread::scope(|scope| {
        (0..mesh.ranks()).for_each(|rank| drop(scope.spawn(move || read(rank))));
    });
}

fn dd(from: &Path, to: &Path, bytes: usize, sync: bool) {
    let blocks = bytes.div_ceil(4 << 20);
    let mut command = Command::new("dd");
    command.arg(format!("if={}", from.display())).arg(format!("of={}", to.display()));
    command.arg("bs=4M").arg(format!("count={blocks}"));
    command.args(sync.then_some("conv=fsync"));
    let status = command.stderr(Stdio::null()).status().expect("dd is there");
    assert!(status.success(), "dd failed");
}

/// Evicts a file from the page cache.
fn evict(path: &Path) {
    let file = std::fs::File::open(path).expect("the file exists");
    // SAFETY: the descriptor belongs to an open file, and the call takes no pointers.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}
