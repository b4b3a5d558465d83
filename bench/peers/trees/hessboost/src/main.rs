//! Trains hessboost on one data set: `hessboost-peer JOB PREDICTIONS`, with the job of `peer.py` as JSON. Prints a line of
//! JSON with seconds, CPU seconds and added memory, and writes the predictions of the test rows as little-endian f32.

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use hessboost::data::load_libsvm;
use hessboost::prelude::*;
use serde_json::{Value, json};

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    let [_, job, predictions] = &args[..] else { return Err("usage: hessboost-peer JOB PREDICTIONS".into()) };
    let job: Value = serde_json::from_str(job)?;
    let folder = Path::new(job["folder"].as_str().ok_or("no folder")?);
    let name = job["name"].as_str().ok_or("no name")?;
    let (classes, rounds) = (number(&job, "classes")?, number(&job, "rounds")?);
    let mut settings = vec![
        ("tree_method", json!("hist")),
        ("grow_policy", json!("depthwise")),
        ("max_depth", json!(6)),
        ("eta", json!(0.1)),
        ("lambda", json!(1.0)),
        ("max_bin", json!(256)),
        ("nthread", json!(number(&job, "threads")?)),
        ("objective", json!(if classes > 2 { "multi:softprob" } else { "binary:logistic" })),
    ];
    if classes > 2 {
        settings.push(("num_class", json!(classes)));
    }
    let params = TrainingParams::from_xgboost(settings)?;
    let file = |part: &str, suffix: &str| folder.join(format!("{name}-{part}-{suffix}"));
    let is_sparse = file("train", "x.libsvm").exists();
    let sparse = match is_sparse {
        true => Some((load_libsvm(file("train", "x.libsvm"))?, load_libsvm(file("test", "x.libsvm"))?)),
        false => None,
    };
    let dense = match is_sparse {
        true => None,
        false => Some([array(&file("train", "x.npy"))?, array(&file("test", "x.npy"))?]),
    };
    let y = [array(&file("train", "y.npy"))?, array(&file("test", "y.npy"))?];
    let matrix = |part: usize| -> Result<DMatrix> {
        let values = &dense.as_ref().expect("dense data")[part];
        DMatrix::from_dense(values, y[part].len(), values.len() / y[part].len())
    };
    // Files are read before the clock starts.
    let (before, cpu, started) = (usage().1, usage().0, Instant::now());
    let (train_matrix, test) = match sparse {
        Some((train, test)) => (train, Some(test)),
        None => (matrix(0)?.with_labels(&y[0])?, None),
    };
    let model = train(&params, &train_matrix, rounds)?;
    let seconds = started.elapsed().as_secs_f64();
    let (end_cpu, end_memory) = usage();
    println!("{}", json!({"seconds": seconds, "cpu": end_cpu - cpu, "memory": end_memory - before}));
    let test = test.map_or_else(|| matrix(1), Ok)?;
    let out = model.predict(&test, Iterations::Best)?;
    let bytes: Vec<u8> = out.as_slice().iter().flat_map(|value| value.to_le_bytes()).collect();
    std::fs::write(predictions, bytes)?;
    Ok(())
}

fn number(job: &Value, key: &str) -> std::result::Result<usize, Box<dyn Error>> {
    Ok(job[key].as_u64().ok_or_else(|| format!("no {key}"))? as usize)
}

/// The values of a `.npy` file of version 1 with f32 in C order.
fn array(path: &Path) -> std::result::Result<Vec<f32>, Box<dyn Error>> {
    let bytes = std::fs::read(path)?;
    let header = u16::from_le_bytes(bytes.get(8..10).ok_or("not a .npy file")?.try_into()?) as usize;
    let (head, body) = bytes.split_at_checked(10 + header).ok_or("not a .npy file")?;
    let head = String::from_utf8_lossy(head);
    if !head.contains("'<f4'") || !head.contains("'fortran_order': False") {
        return Err(format!("{}: expected float32 in C order", path.display()).into());
    }
    Ok(body.chunks_exact(4).map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]])).collect())
}

/// CPU seconds and peak memory in bytes of this process.
fn usage() -> (f64, i64) {
    // SAFETY: all fields are integers, for which zero is valid; getrusage only writes to the struct.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
    (seconds(usage.ru_utime) + seconds(usage.ru_stime), usage.ru_maxrss * 1024)
}
