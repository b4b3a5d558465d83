//! A temporary folder that is removed with the test, and helpers.

use lockstep_data::{Error, Options, Recipe, Report, Source, TokenFile, prepare};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

pub struct TestDir(PathBuf);

impl TestDir {
    pub fn new() -> TestDir {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("lockstep-data-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        TestDir(folder)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        std::fs::write(self.path(name), content).unwrap();
        self.path(name)
    }

    /// File names, sorted.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        let mut names: Vec<_> =
            entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Prepares one input into out.tokens, with the settings changed by `how`.
    pub fn prepare(&self, input: &Path, how: impl Fn(&mut Recipe)) -> Result<Report, Error> {
        let mut recipe = Recipe::new(vec![input.to_path_buf()], self.path("out.tokens"));
        recipe.replace = true;
        how(&mut recipe);
        prepare(&recipe, &|_| ())
    }

    /// A token file with these documents.
    pub fn documents<T: AsRef<str>>(&self, documents: &[T]) -> PathBuf {
        let rows: String = documents
            .iter()
            .map(|text| format!("{}\n", serde_json::json!({ "text": text.as_ref() })))
            .collect();
        let input = self.write("documents.jsonl", rows);
        self.prepare(&input, |_| ()).unwrap();
        self.path("out.tokens")
    }
}

impl Drop for TestDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The documents of a token file, as text.
pub fn texts(path: &Path) -> Vec<String> {
    let file = TokenFile::open(path).unwrap();
    let tokenizer = file.tokenizer().unwrap();
    (0..file.documents())
        .map(|document| {
            let mut tokens = vec![0; file.len_of(document) as usize];
            file.read(document, 0, &mut tokens).unwrap();
            tokenizer.decode(&tokens).unwrap()
        })
        .collect()
}

pub fn open(path: &Path, held_out: f64) -> Source {
    Source::open(path.to_str().unwrap(), &Options { held_out }).unwrap()
}
