//! The file of selected algorithms: one line per problem, kept between runs. An algorithm is only valid for the
//! version of cuBLASLt and the GPU that it was selected with, so both are part of the file's name.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use lockstep_cuda::cache;

use super::api::Algorithm;

/// Selected algorithms by the text of their problems.
pub(crate) struct Chosen {
    file: Option<PathBuf>,
    algorithms: HashMap<String, Algorithm>,
}

/// Algorithms that several devices share.
pub(crate) type SharedChosen = Arc<Mutex<Chosen>>;

impl Chosen {
    /// The algorithms of a GPU model and a version of cuBLASLt, shared by the whole process.
    pub fn of_gpu(gpu: &str, version: usize) -> SharedChosen {
        static ALL: Mutex<BTreeMap<(String, usize), SharedChosen>> = Mutex::new(BTreeMap::new());
        let mut all = ALL.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let load = || Arc::new(Mutex::new(Chosen::load(gpu, version)));
        all.entry((gpu.to_string(), version)).or_insert_with(load).clone()
    }

    /// Reads the file of this GPU and version; empty if there is none.
    fn load(gpu: &str, version: usize) -> Chosen {
        let gpu: String =
            gpu.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let file = cache::folder()
            .map(|folder| folder.join("matmul").join(format!("{gpu}-cublaslt-{version}.txt")));
        let text = file.as_ref().and_then(|file| std::fs::read_to_string(file).ok());
        let algorithms = parse(text.as_deref().unwrap_or(""));
        Chosen { file, algorithms }
    }

    pub fn get(&self, problem: &str) -> Option<Algorithm> {
        self.algorithms.get(problem).copied()
    }

    /// Stores an algorithm, unless another process has stored one for this problem in the meantime. Returns the one that
    /// is stored: all runs on this machine use the same, so that they compute the same bits. A file that cannot be written
    /// costs time in the next run, which may choose another algorithm.
    pub fn agree(&mut self, problem: String, algorithm: Algorithm) -> Algorithm {
        let agreed = match &self.file {
            Some(file) => stored_or(file, &problem, algorithm).unwrap_or_else(|error| {
                let file = file.display();
                eprintln!("warning: cannot store the selected algorithms in {file}: {error}");
                algorithm
            }),
            None => algorithm,
        };
        self.algorithms.insert(problem, agreed);
        agreed
    }
}

/// The algorithm of a problem in the file. Adds `algorithm` to the file if there is none. One process at a time.
fn stored_or(file: &Path, problem: &str, algorithm: Algorithm) -> io::Result<Algorithm> {
    let _locked = cache::lock(file)?;
    let mut all = parse(&std::fs::read_to_string(file).unwrap_or_default());
    if let Some(stored) = all.get(problem) {
        return Ok(*stored);
    }
    all.insert(problem.to_string(), algorithm);
    let mut lines: Vec<String> = all.iter().map(|(problem, a)| line(problem, a)).collect();
    lines.sort();
    cache::store(file, lines.concat().as_bytes())?;
    Ok(algorithm)
}

fn line(problem: &str, algorithm: &Algorithm) -> String {
    let words: Vec<String> = algorithm.0.iter().map(|word| format!("{word:x}")).collect();
    format!("{problem} = {}\n", words.join(" "))
}

/// Lines that are damaged are ignored: their problems are selected again.
fn parse(text: &str) -> HashMap<String, Algorithm> {
    let entry = |line: &str| {
        let (problem, words) = line.split_once(" = ")?;
        let words: Vec<u64> = words
            .split(' ')
            .map(|word| u64::from_str_radix(word, 16))
            .collect::<Result<_, _>>()
            .ok()?;
        Some((problem.to_string(), Algorithm(words.try_into().ok()?)))
    };
    text.lines().filter_map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_survive_a_round_trip_and_damaged_ones_are_ignored() {
        let algorithm = Algorithm([1, 2, 3, u64::MAX, 5, 6, 7, 8]);
        let text = format!("{}half a line = 1 2\nnothing\n", line("1,2,3 nt", &algorithm));
        let parsed = parse(&text);
        assert_eq!(parsed.len(), 1);
        assert_eq!(parsed["1,2,3 nt"], algorithm);
    }

    #[test]
    fn processes_agree_on_the_algorithm_that_was_stored_first() {
        let folder = std::env::temp_dir().join(format!("lockstep-chosen-{}", std::process::id()));
        let mut processes = [(); 2]
            .map(|_| Chosen { file: Some(folder.join("gpu.txt")), algorithms: HashMap::new() });
        let [mine, other] = [Algorithm([1; 8]), Algorithm([2; 8])];
        assert_eq!(processes[0].agree("first".into(), mine), mine);
        assert_eq!(processes[1].agree("first".into(), other), mine);
        assert_eq!(processes[1].get("first"), Some(mine));
        assert_eq!(processes[1].agree("second".into(), other), other);
        assert_eq!(processes[0].agree("second".into(), mine), other);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
