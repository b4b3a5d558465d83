//! Helpers of the fuzz targets: a time limit for one execution, and a folder for inputs that are files.

use std::path::PathBuf;
use std::time::Duration;

/// Maximum CPU time of one execution. CPU time, so that a busy machine does not matter.
const LIMIT: Duration = Duration::from_secs(1);

/// Runs an execution and panics if it takes too long.
pub fn timed<T>(run: impl FnOnce() -> T) -> T {
    let start = cpu_time();
    let result = run();
    let took = cpu_time() - start;
    assert!(took < LIMIT, "{took:?} of CPU time");
    result
}

fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the struct is valid for the duration of the call.
    let code = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(code, 0, "the thread has a clock");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// An empty folder of this process.
pub fn folder(target: &str) -> PathBuf {
    let name = format!("lockstep-fuzz-{target}-{}", std::process::id());
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&folder).expect("a temporary folder");
    folder
}

/// A manifest with these contents and a valid checksum.
pub fn manifest(body: &[u8]) -> Vec<u8> {
    let sum = blake3::hash(body).to_hex();
    [b"{\"blake3\":\"", sum.as_bytes(), b"\",\n", body].concat()
}

/// Makes the checksums of a token file valid, so that the fuzzer gets past them.
pub fn sign_tokens(file: &mut [u8]) {
    const HEADER: usize = 192;
    if file.len() < HEADER {
        return;
    }
    let number = |file: &[u8], at: usize| {
        u64::from_le_bytes(file[at..at + 8].try_into().expect("eight bytes"))
    };
    let width = u64::from(file[12]);
    let tokens = number(file, 32).saturating_mul(width).checked_next_multiple_of(8);
    let (documents, tokenizer) = (number(file, 24).saturating_mul(16), number(file, 48));
    let all = file.len();
    let clamp = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(all);
    let end = |before: usize, len: u64| clamp((before as u64).saturating_add(len));
    let tokens_end = end(HEADER, tokens.unwrap_or(u64::MAX));
    let index_end = end(tokens_end, documents);
    let tokenizer_end = end(index_end, tokenizer);
    let sums: Vec<u8> = (file[HEADER..tokens_end].chunks(16 << 10))
        .flat_map(|chunk| blake3::hash(chunk).as_bytes()[..8].to_vec())
        .collect();
    let checksums = &mut file[tokenizer_end..];
    let len = sums.len().min(checksums.len());
    checksums[..len].copy_from_slice(&sums[..len]);
    let hash = |range: std::ops::Range<usize>| *blake3::hash(&file[range]).as_bytes();
    let sums = [
        (64, hash(tokenizer_end..file.len())),
        (96, hash(tokens_end..index_end)),
        (128, hash(index_end..tokenizer_end)),
    ];
    for (at, sum) in sums {
        file[at..at + 32].copy_from_slice(&sum);
    }
    let own = *blake3::hash(&file[..160]).as_bytes();
    file[160..HEADER].copy_from_slice(&own);
}
