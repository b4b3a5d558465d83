//! A crash after every write, sync and rename of a save, for every combination of unsynced data that a disk may have
//! lost: the checkpoint found afterwards is the complete old one or the complete new one.

use crate::state::{Kept, head, holds, save_by, saved, wrong_with};
use crate::support::fresh;
use lockstep_ckpt::{Disk, Keep, load, steps, sweep};
use lockstep_plan::Mesh;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Files and folders of a simulated disk: their current state, and their last synced state.
#[derive(Clone, Default)]
struct Model {
    nodes: Vec<Node>,
}

#[derive(Clone)]
enum Node {
    File { now: Vec<u8>, safe: Vec<u8> },
    Folder { now: Names, safe: Names },
}

type Names = BTreeMap<String, usize>;

/// State of unsynced data after a power failure.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Data {
    Kept,
    Lost,
    /// The first half of the data.
    Torn,
    /// The right length, filled with zeros.
    Zeros,
    /// A different one of these for each file.
    Any(u64),
}

/// State of unsynced directory entries after a power failure.
#[derive(Clone, Copy, PartialEq, Debug)]
enum NamesLeft {
    Kept,
    Lost,
    /// A different one of these for each folder.
    Any(u64),
}

impl Model {
    /// A fully synced folder.
    fn of(folder: &Path) -> Model {
        let mut model = Model::default();
        model.take(folder);
        model
    }

    fn take(&mut self, path: &Path) -> usize {
        let number = self.nodes.len();
        if path.is_file() {
            let bytes = fs::read(path).unwrap();
            self.nodes.push(Node::File { now: bytes.clone(), safe: bytes });
            return number;
        }
        self.nodes.push(Node::Folder { now: Names::new(), safe: Names::new() });
        let mut names = Names::new();
        for entry in fs::read_dir(path).unwrap().flatten() {
            names.insert(entry.file_name().into_string().unwrap(), self.take(&entry.path()));
        }
        self.nodes[number] = Node::Folder { now: names.clone(), safe: names };
        number
    }

    fn names(&mut self, folder: usize) -> &mut Names {
        match &mut self.nodes[folder] {
            Node::Folder { now, .. } => now,
            Node::File { .. } => panic!("a file is no folder"),
        }
    }

    /// A path below the root, as it is now.
    fn find(&mut self, path: &Path) -> usize {
        path.iter().fold(0, |folder, name| self.names(folder)[name.to_str().unwrap()])
    }

    fn parent(&mut self, path: &Path) -> (usize, String) {
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        (self.find(path.parent().unwrap()), name)
    }

    fn add(&mut self, path: &Path, node: Node) {
        let (parent, name) = self.parent(path);
        let number = self.nodes.len();
        self.nodes.push(node);
        self.names(parent).insert(name, number);
    }

    fn apply(&mut self, root: &Path, act: &Kept) {
        let below = |path: &PathBuf| path.strip_prefix(root).unwrap().to_path_buf();
        match act {
            Kept::MakeFolder(path) => {
                let path = below(path);
                let (parent, name) = self.parent(&path);
                if !self.names(parent).contains_key(&name) {
                    self.add(&path, Node::Folder { now: Names::new(), safe: Names::new() });
                }
            }
            Kept::Create(path) => self.add(&below(path), Node::File { now: vec![], safe: vec![] }),
            Kept::Write(path, bytes) => {
                let number = self.find(&below(path));
                let Node::File { now, .. } = &mut self.nodes[number] else { panic!("no file") };
                now.extend(bytes);
            }
            Kept::SyncFile(path) => {
                let number = self.find(&below(path));
                let Node::File { now, safe } = &mut self.nodes[number] else { panic!("no file") };
                safe.clone_from(now);
            }
            Kept::SyncFolder(path) => {
                let number = self.find(&below(path));
                let Node::Folder { now, safe } = &mut self.nodes[number] else { panic!("a file") };
                safe.clone_from(now);
            }
            Kept::Rename(from, to) => {
                let (parent, name) = self.parent(&below(from));
                let moved = self.names(parent).remove(&name).unwrap();
                let (parent, name) = self.parent(&below(to));
                assert!(self.names(parent).insert(name, moved).is_none(), "nothing is overwritten");
            }
            Kept::Remove(path) => {
                let (parent, name) = self.parent(&below(path));
                // The contents are removed first, and may be lost on the disk while the name still exists.
                if let Some(folder) = self.names(parent).remove(&name) {
                    self.names(folder).clear();
                }
            }
        }
    }

    /// The files after a power failure.
    fn leave(&self, node: usize, path: &Path, data: Data, names: NamesLeft) {
        match &self.nodes[node] {
            Node::File { now, safe } => fs::write(path, left(node, now, safe, data)).unwrap(),
            Node::Folder { now, safe } => {
                fs::create_dir_all(path).unwrap();
                let kept = match names {
                    NamesLeft::Kept => true,
                    NamesLeft::Lost => false,
                    NamesLeft::Any(seed) => dice(seed, node).is_multiple_of(2),
                };
                for (name, node) in if kept { now } else { safe } {
                    self.leave(*node, &path.join(name), data, names);
                }
            }
        }
    }
}

fn left(node: usize, now: &[u8], safe: &[u8], data: Data) -> Vec<u8> {
    let new = &now[safe.len()..];
    match data {
        Data::Kept => now.to_vec(),
        Data::Lost => safe.to_vec(),
        Data::Torn => now[..safe.len() + new.len() / 2].to_vec(),
        Data::Zeros => [safe, &vec![0; new.len()]].concat(),
        Data::Any(seed) => {
            let all = [Data::Kept, Data::Lost, Data::Torn, Data::Zeros];
            left(node, now, safe, all[dice(seed, node) as usize % 4])
        }
    }
}

fn dice(seed: u64, node: usize) -> u64 {
    let mixed = (seed ^ (node as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
        .wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed >> 32
}

/// Two writers, each with half of every tensor.
const TWO: Mesh = Mesh { data: 2, ..Mesh::ONE };

/// All disk operations of a save.
fn acts(run: &Path, step: u64, keep: Keep) -> Vec<Kept> {
    let acts = Arc::new(Mutex::new(Vec::new()));
    let record = acts.clone();
    let disk = Disk::with_hook(move |act| {
        record.lock().unwrap().push(Kept::from(act));
        Ok(())
    });
    save_by(&disk, run, &TWO, &head(step, 0), keep).unwrap();
    let acts = acts.lock().unwrap();
    acts.clone()
}

/// Checks every state that a crash during the operations can leave: the newest checkpoint is complete and one of `either`,
/// all other checkpoints with a final name are complete, and another save succeeds.
fn survives(name: &str, before: &Model, run: &Path, acts: &[Kept], either: [u64; 2]) -> usize {
    let mut model = before.clone();
    let (mut states, mut seen) = (0, [0; 2]);
    for done in 0..=acts.len() {
        if done > 0 {
            model.apply(run, &acts[done - 1]);
        }
        let mut ways: Vec<(Data, NamesLeft)> = Vec::new();
        for data in [Data::Kept, Data::Lost, Data::Torn, Data::Zeros] {
            ways.extend([NamesLeft::Kept, NamesLeft::Lost].map(|names| (data, names)));
        }
        let random = |seed: u64| (Data::Any(seed), NamesLeft::Any(seed ^ 0x5555));
        ways.extend((0..8).map(|roll| random((done * 100 + roll) as u64)));
        for (data, names) in ways {
            let place = fresh(name);
            model.leave(0, &place, data, names);
            let what = format!("after act {done} of {}, {data:?} {names:?}", acts.len());
            let found = steps(&place);
            let newest = *found.first().unwrap_or_else(|| panic!("{what}: nothing is left"));
            let which = either.iter().position(|step| *step == newest);
            seen[which.unwrap_or_else(|| panic!("{what}: found {found:?}"))] += 1;
            for step in found {
                let dir = lockstep_ckpt::folder(&place, step);
                let wrong = wrong_with(&dir);
                assert!(wrong.is_empty(), "{what}: {wrong:?}");
                holds(&load(&dir).unwrap(), step);
            }
            states += 1;
        }
        // Another save succeeds after the crash. Checked only sometimes, because it waits for a real disk.
        if done % 16 == 0 || done + 8 > acts.len() {
            sweep(&place_of(name)).unwrap();
            holds(&load(&saved(&place_of(name), 9)).unwrap(), 9);
        }
    }
    assert!(seen.iter().all(|seen| *seen > 0), "both are met: {seen:?}");
    states
}

/// The folder of the last state.
fn place_of(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

#[test]
fn crash_at_any_point_leaves_the_old_or_the_new_checkpoint() {
    let run = fresh("crash-first");
    saved(&run, 1);
    let before = Model::of(&run);
    let acts = acts(&run, 2, Keep { newest: 1, every: 0 });
    for kind in ["Create", "Write", "SyncFile", "SyncFolder", "Rename", "Remove"] {
        assert!(
            acts.iter().any(|act| format!("{act:?}").starts_with(kind)),
            "{kind}: {}",
            acts.len()
        );
    }
    let states = survives("crashed-first", &before, &run, &acts, [1, 2]);
    println!("{} acts, {states} states", acts.len());
}

/// A step whose checkpoint was corrupt, so that it was trained and saved again.
#[test]
fn crash_while_replacing_leaves_a_complete_checkpoint() {
    let run = fresh("crash-replaced");
    saved(&run, 1);
    saved(&run, 2);
    let before = Model::of(&run);
    let acts = acts(&run, 2, Keep { newest: 0, every: 0 });
    // The previous checkpoint is intact here, so finding it is correct as well.
    survives("crashed-replaced", &before, &run, &acts, [1, 2]);
}

/// A disk error fails the save and keeps the existing checkpoints.
#[test]
fn disk_error_at_any_point_keeps_existing_checkpoints() {
    let run = fresh("refused-counted");
    saved(&run, 1);
    let all = acts(&run, 2, Keep { newest: 0, every: 0 }).len();
    // Some of the many writes, and all later operations. Each round waits for a real disk.
    for refused in (0..all).filter(|act| act % 9 == 0 || act + 10 > all) {
        let run = fresh("refused");
        saved(&run, 1);
        let count = Arc::new(Mutex::new(0));
        let disk = Disk::with_hook(move |_| {
            let mut count = count.lock().unwrap();
            *count += 1;
            match *count == refused + 1 {
                true => Err(std::io::Error::from(std::io::ErrorKind::StorageFull)),
                false => Ok(()),
            }
        });
        let error = save_by(&disk, &run, &TWO, &head(2, 0), Keep { newest: 0, every: 0 });
        let error = error.expect_err("an act was refused");
        assert!(error.to_string().contains("no storage space"), "{error}");
        lockstep_ckpt::abandon(&Disk::default(), &run, 2, 0);
        // If only the sync after the rename failed, the new checkpoint exists and is complete.
        for step in steps(&run) {
            holds(&load(&lockstep_ckpt::folder(&run, step)).unwrap(), step);
        }
        assert!(steps(&run).contains(&1), "op {refused}");
        assert_eq!(refused + 1 < all, !steps(&run).contains(&2), "op {refused} of {all}");
    }
}
